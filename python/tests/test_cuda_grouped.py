"""The experts alone on a GPU: by plain PyTorch, compiled, captured in a graph, without waiting."""

import pytest
import torch
from helpers import NEEDS_HOPPER, assert_same
from test_grouped import COUNTS, SCORES, backward, call, compare, data, on

from sonicmoe import ActivationType
from sonicmoe._check import W1_LAYOUTS

pytestmark = NEEDS_HOPPER
R, D, N = 900, 136, 72
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOADS = [[130, 0, 257, 1, 96, 0], [0, 0, 700, 0, 0, 90], [128] * 6, [0] * 6]


def padded(counts, index=torch.int64, multiple=16):
    """The arguments for segments that begin at multiples, and which rows experts own."""
    counts = torch.tensor(counts, dtype=index)
    room = (counts + multiple - 1) // multiple * multiple
    offsets = torch.cat([room.new_zeros(1), room.cumsum(0)]).to(index)
    owned = torch.zeros(R, dtype=torch.bool)
    for begin, count in zip(offsets.tolist(), counts.tolist(), strict=False):
        owned[begin : begin + count] = True
    return {"counts": counts, "offsets": offsets}, owned


def leaves_on_gpu(owned, dtype=torch.bfloat16, **options):
    return on("cuda", data(owned=owned, dtype=dtype, hidden=D, intermediate=N, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", W1_LAYOUTS)
@pytest.mark.parametrize("score_at", SCORES)
def test_matches_plain_pytorch(score_at, layout, bias, dtype):
    arguments, owned = padded(LOADS[0])
    leaves = data(score_at, owned, D, N, dtype=DTYPES[dtype], bias=bias, layout=layout)
    options = {} if score_at == "none" else {"score_at": score_at}
    compare(leaves, owned, device="cuda", layout=layout, **arguments, **options)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["counts", "offsets", "both"])
@pytest.mark.parametrize("load", range(len(LOADS)))
def test_segments(load, kind, index):
    arguments, owned = padded(LOADS[load], index, multiple=16 if kind == "both" else 1)
    if kind != "both":
        arguments["offsets" if kind == "counts" else "counts"] = None
    leaves = data("after_down", owned, D, N, dtype=torch.bfloat16, bias=True)
    compare(leaves, owned, device="cuda", activation=ActivationType.SWIGLU, **arguments)


def test_captured_in_a_graph():
    """One graph for every routing: the tensors stay, and what is in them changes."""
    arguments, owned = padded(LOADS[2])
    static = on("cuda", arguments)
    leaves = leaves_on_gpu(owned, bias=True)
    dout = torch.randn(R, D, device="cuda").bfloat16()
    memory = {name: torch.empty_like(dout) for name in ("out", "dx_out")}

    def step():
        return backward(call(leaves, **static, **memory), leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for load in LOADS:
        arguments, owned = padded(load)
        for name, value in arguments.items():
            static[name].copy_(value)
        with torch.no_grad():
            for name in ("rows", "scores"):
                leaves[name].copy_(torch.randn(leaves[name].shape))[~owned.cuda()] = torch.nan
        graph.replay()
        got = {name: value.clone() for name, value in captured.items()}
        assert_same(got, backward(call(leaves, **static), leaves, dout))
        assert not got["out"][~owned].any() and not got["drows"][~owned].any()
        assert got["out"].isfinite().all()


def test_waits_for_nothing_and_uses_the_current_stream():
    arguments, owned = padded(LOADS[0])
    arguments = on("cuda", arguments)
    leaves = leaves_on_gpu(owned)
    leaves["scores"] = leaves["scores"].detach().bfloat16().requires_grad_()
    dout = torch.randn(R, D, device="cuda").bfloat16()
    expected = backward(call(leaves, **arguments), leaves, dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # what comes before on this stream takes a while
            late = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
            got = backward(call(late, **arguments), late, dout)
            late["rows"].detach().zero_()  # and this comes after
        assert not stream.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert_same(got, expected)


def test_rows_that_no_expert_owns_keep_what_the_memory_had():
    arguments, owned = padded(LOADS[0])
    leaves, dout = leaves_on_gpu(owned), torch.randn(R, D, device="cuda").bfloat16()
    want = backward(call(leaves, **on("cuda", arguments)), leaves, dout)
    out, dx_out = torch.full((2, R, D), 7.0, device="cuda", dtype=torch.bfloat16)
    result = call(leaves, **on("cuda", arguments), out=out, dx_out=dx_out, zero_tail=False)
    got = backward(result, leaves, dout)
    assert result.data_ptr() == out.data_ptr() and got["drows"] is dx_out
    for name in ("out", "drows"):
        assert (got[name][~owned] == 7).all() and torch.equal(got[name][owned], want[name][owned])


@pytest.mark.parametrize("rows", [0, 40])
def test_idle_rank(rows):
    leaves = leaves_on_gpu(torch.zeros(rows, dtype=torch.bool), bias=True)
    out = call(leaves, counts=torch.zeros(6, dtype=torch.int64, device="cuda"))
    assert out.shape == (rows, D) and not out.any()
    out.sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any(), name


def test_segments_past_the_rows_lose_them():
    leaves = leaves_on_gpu(torch.ones(R, dtype=torch.bool))
    counts = torch.tensor([R - 100, 0, 60, 70, 30, 2**40], device="cuda")  # 40 rows are left
    fitting = torch.tensor([R - 100, 0, 60, 40, 0, 0], device="cuda")
    dout = torch.randn(R, D, device="cuda").bfloat16()
    got, want = (backward(call(leaves, counts=c), leaves, dout) for c in (counts, fitting))
    assert_same(got, want)


def test_compiles_to_one_graph():
    counts = torch.tensor(COUNTS, device="cuda")
    leaves = leaves_on_gpu(torch.ones(48, dtype=torch.bool), bias=True)
    dout = torch.randn(48, D, device="cuda").bfloat16()
    want = backward(call(leaves, counts=counts), leaves, dout)
    compiled = torch.compile(call, fullgraph=True)
    assert_same(backward(compiled(leaves, counts=counts), leaves, dout), want)
