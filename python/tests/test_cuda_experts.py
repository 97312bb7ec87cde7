"""Routing of the caller on a GPU: by plain PyTorch, as lists, captured in a graph."""

import pytest
import torch
from helpers import NEEDS_HOPPER, ROUTERS, assert_same
from test_experts import as_lists, backward, call, compare, data, given_functions
from test_lists import SUMS, sums_of_rows

import sonicmoe
from sonicmoe._check import TRANSPOSED_LAYOUTS

pytestmark = NEEDS_HOPPER
T, E, K = 300, 6, 3
SIZES = {"tokens": T, "hidden": 136, "intermediate": 72}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def random_ids(dtype=torch.int32):
    """A third are sentinels, of both kinds; token 0 has nothing else."""
    ids = torch.randint(0, E, (T, K), dtype=dtype)
    some = torch.rand(T, K) < 0.3
    some[0] = True
    return torch.where(some, torch.where(torch.rand(T, K) < 0.5, -1, E).to(dtype), ids)


def on_gpu(leaves):
    return {name: leaf.detach().cuda().requires_grad_() for name, leaf in leaves.items()}


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["interleaved", *TRANSPOSED_LAYOUTS])
@pytest.mark.parametrize("top_k", [1, K])
def test_ids_match_plain_pytorch(top_k, layout, dtype, index):
    ids = random_ids(index)[:, :top_k].contiguous()
    leaves = data(top_k=top_k, bias=True, dtype=DTYPES[dtype], layout=layout, **SIZES)
    got = compare(leaves, device="cuda", ids=ids, layout=layout)
    assert not got["dweights"][(ids < 0) | (ids >= E)].any()
    assert not got["out"][0].any() and not got["dx"][0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("given", [False, True])
def test_logits_match_plain_pytorch(given, router, dtype):
    over_topk, norm = ROUTERS[router]
    options = {"K": K, "softmax_over_topk": over_topk, "norm_topk_probs": norm}
    if given:
        options["ids"] = random_ids()
    leaves = data(logits=True, bias=True, dtype=DTYPES[dtype], **SIZES)
    compare(leaves, "experts_from_logits", device="cuda", **options)


def test_the_same_pairs_as_lists():
    ids = random_ids().cuda()
    leaves = on_gpu(data(bias=True, dtype=torch.bfloat16, **SIZES))
    dout = torch.randn(T, 136, device="cuda").bfloat16()
    got = backward(call(leaves, ids=ids), leaves, dout)
    assert_same(got, backward(call(leaves, as_lists, ids=ids), leaves, dout))


@pytest.mark.parametrize("kind", ["ids", "logits", "logits_and_ids"])
def test_captured_in_a_graph(kind):
    """One graph for every routing: the tensors stay, and what is in them changes."""
    ids = random_ids().cuda()
    leaves = on_gpu(data(logits=kind != "ids", bias=True, dtype=torch.bfloat16, **SIZES))
    function = dict(given_functions(ids))[kind]
    dout = torch.randn(T, 136, device="cuda").bfloat16()

    def step():
        return backward(call(leaves, function), leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        ids.copy_(random_ids())
        with torch.no_grad():
            for name in {"x", "weights", "logits"} & leaves.keys():
                leaves[name].copy_(torch.randn(leaves[name].shape))
        graph.replay()
        assert_same({name: value.clone() for name, value in captured.items()}, step())


def test_count_cumsum_skips_sentinels():
    ids = torch.tensor([[0, 3, 9, -1], [3, 2**40, 1, -(2**40)]], device="cuda")
    counts, cumsum = sonicmoe.count_cumsum(ids, 4)
    assert counts.tolist() == [1, 1, 0, 2] and cumsum.tolist() == [1, 2, 2, 4]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("tokens, rows, top_k", SUMS)
def test_combine(dtype, tokens, rows, top_k):
    sizes = {"tokens": tokens, "rows": rows, "hidden": 136, "top_k": top_k}
    assert torch.equal(*sums_of_rows(dtype, "cuda", **sizes))
