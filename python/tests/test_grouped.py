"""The experts alone on rows in expert order, against plain PyTorch."""

import pytest
import torch
import torch.utils.checkpoint
from helpers import (
    ACTIVATION_LAYOUTS,
    FORMS,
    UNTRANSPOSED,
    activation_layouts,
    assert_as_good,
    assert_close,
    assert_same,
    at_odd_address,
    kept_bytes,
    make_layer,
    stored,
    turned,
)

from sonicmoe import ActivationType, grouped_experts, reference
from sonicmoe._check import W1_LAYOUTS

R, D, N, E = 48, 24, 16, 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCORES = ("none", "before_down", "after_down")
COUNTS = [7, 0, 13, 1, 9, 0]  # experts 1 and 5 are idle
OFFSETS = [0, 8, 8, 24, 26, 40, 40]  # with gaps, and a tail behind row 35
DENSE = [0, 7, 7, 20, 21, 30, 30]


def segments(kind, dtype=torch.int32):
    """The arguments `counts` and `offsets`, and which rows experts own."""
    counts, offsets = torch.tensor(COUNTS, dtype=dtype), torch.tensor(OFFSETS, dtype=dtype)
    dense = torch.tensor(DENSE, dtype=dtype)
    begins = OFFSETS if kind == "both" else DENSE
    owned = torch.zeros(R, dtype=torch.bool)
    for begin, count in zip(begins, COUNTS, strict=False):
        owned[begin : begin + count] = True
    arguments = {
        "counts": {"counts": counts},
        "offsets": {"counts": None, "offsets": dense},
        "both": {"counts": counts, "offsets": offsets},
        "mixed": {"counts": counts.int(), "offsets": dense.long()},
    }
    return arguments[kind], owned


BOTH, OWNED = segments("both")


def data(score_at="after_down", owned=OWNED, hidden=D, intermediate=N, **options):
    """Leaves by the names of the arguments; rows and scores are NaN where no expert owns a row."""
    rows = len(owned)
    layer = make_layer(tokens=rows, hidden=hidden, intermediate=intermediate, experts=E, **options)
    leaves = layer.leaves()
    leaves = {"rows": leaves.pop("x")} | leaves
    del leaves["router_w"]
    if score_at != "none":
        leaves["scores"] = torch.randn(rows).requires_grad_()
    for name in ("rows", "scores"):
        if name in leaves:
            leaves[name].data[~owned] = torch.nan
    return leaves


def fresh(leaves, dtype=None):
    """Copies; in `dtype`, without the garbage. Scores keep their type, unless it is fp64."""
    copies = {}
    for name, leaf in leaves.items():
        copy = leaf.detach().clone()
        if dtype is not None:
            copy = copy.to(dtype if name != "scores" or dtype == torch.float64 else copy.dtype)
            copy = copy.nan_to_num(0)
        copies[name] = copy.requires_grad_(leaf.requires_grad)
    return copies


def on(device, tensors):
    """Copies there; leaves stay leaves. What is no tensor stays as it is."""
    return {
        name: value.detach().to(device).requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in tensors.items()
    }


def call(leaves, form=stored, function=grouped_experts, **options):
    leaves = {k: form(v) if k in ("w1", "w2", "w1_up") else v for k, v in leaves.items()}
    return function(**leaves, **options)


def backward(out, leaves, dout):
    """The output, and the gradients by name."""
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(out, wanted.values(), dout.to(out))
    results = {f"d{k}": v for k, v in zip(wanted, gradients, strict=True)}
    return {"out": out.detach()} | results


def compare(leaves, owned=OWNED, form=stored, device="cpu", **options):
    """Ours, whose rows without an owner are NaN, against plain PyTorch's."""
    dout = torch.randn(leaves["rows"].shape)
    dtype = leaves["rows"].dtype
    ours = on(device, leaves)
    garbage = dout.clone()
    garbage[~owned] = torch.nan
    got = backward(call(ours, form, **on(device, options)), ours, garbage)
    got = {name: value.cpu() for name, value in got.items()}
    want = []
    for wide in (dtype, torch.float64):
        copies = fresh(leaves, wide)
        out = call(copies, function=reference.grouped_experts, **options)
        want.append(backward(out, copies, dout.to(dtype)))
    for name in got:
        assert_as_good(name, got[name], want[0][name], want[1][name])
    for name in {"out", "drows", "dscores"} & set(got):
        assert not got[name][~owned].any(), name
    counts = options.get("counts")
    idle = (options["offsets"].diff() if counts is None else counts) == 0
    for name in {"dw1", "db1", "dw2", "db2", "dw1_up", "db1_up"} & set(got):
        assert not got[name][idle].any(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("score_at", SCORES)
@pytest.mark.parametrize("activation, layout", ACTIVATION_LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_matches_plain_pytorch(form, activation, layout, score_at, bias, dtype):
    leaves = data(score_at, activation=activation, bias=bias, dtype=DTYPES[dtype], layout=layout)
    options = {} if score_at == "none" else {"score_at": score_at}
    compare(leaves, form=FORMS[form], activation=activation, layout=layout, **BOTH, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("score_at", SCORES)
@pytest.mark.parametrize(
    "activation, layout",
    activation_layouts(ActivationType.SWIGLU_OAI, ActivationType.GELU, layouts=UNTRANSPOSED),
)
def test_transposed_weights_are_the_same_experts(activation, layout, score_at, bias, dtype):
    leaves = data(score_at, activation=activation, bias=bias, dtype=DTYPES[dtype], layout=layout)
    options = BOTH | {"activation": activation}
    if score_at != "none":
        options["score_at"] = score_at
    dout, other = torch.randn(R, D), turned(leaves)
    got = backward(call(leaves, **options, layout=layout), leaves, dout)
    want = backward(call(other, **options, layout=UNTRANSPOSED[layout]), other, dout)
    assert_close(got, turned(want))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["counts", "offsets", "both", "mixed"])
def test_segments(kind, index, dtype):
    arguments, owned = segments(kind, index)
    compare(data(owned=owned, dtype=DTYPES[dtype], bias=True), owned, **arguments)


def test_defaults():
    leaves = data()
    default = call(leaves, **BOTH)
    named = call(
        leaves, **BOTH, activation="swiglu", layout="interleaved", score_at="after_down",
        zero_tail=True, rows_hint=30,
    )  # fmt: skip
    assert torch.equal(default, named)
    del leaves["scores"]
    assert torch.equal(call(leaves, **BOTH), call(leaves, **BOTH, score_at="before_down"))


def test_arguments_that_start_anywhere_or_have_strides():
    leaves, dout = data(), torch.randn(R, D)
    want = backward(call(leaves, **BOTH), leaves, dout)
    odd = fresh(leaves)
    odd["rows"] = at_odd_address(leaves["rows"].detach()).requires_grad_()
    got = backward(call(odd, **BOTH), odd, at_odd_address(dout))
    assert_same(got, want)
    odd["rows"] = torch.randn(D, R).t().copy_(leaves["rows"].detach()).requires_grad_()
    odd["scores"] = torch.randn(R, 2)[:, 0].copy_(leaves["scores"].detach()).requires_grad_()
    strided = {name: t.repeat_interleave(2)[::2] for name, t in BOTH.items()}
    got = backward(call(odd, **strided), odd, dout.t().contiguous().t())
    assert_same(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("score_at", SCORES[1:])
def test_score_gradients_come_back_in_the_type_of_the_scores(score_at, dtype):
    leaves = data(bias=True)
    leaves["scores"] = leaves["scores"].detach().to(dtype).requires_grad_()
    wide = fresh(leaves)
    wide["scores"] = leaves["scores"].detach().float().requires_grad_()
    dout = torch.randn(R, D)
    got, want = (backward(call(t, **BOTH, score_at=score_at), t, dout) for t in (leaves, wide))
    assert got["dscores"].dtype == dtype and got["dscores"][OWNED].all()
    assert torch.equal(got["dscores"], want["dscores"].to(dtype))
    assert torch.equal(got["out"], want["out"])


# Ranks without work.


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["interleaved", "transposed"])
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("kind", ["counts", "offsets", "both"])
def test_idle_rank(kind, rows, layout, dtype, bias):
    leaves = data(bias=bias, dtype=DTYPES[dtype], layout=layout)
    for name in ("rows", "scores"):
        leaves[name] = torch.full_like(leaves[name][:rows], torch.nan).requires_grad_()
    given = {
        "counts": None if kind == "offsets" else torch.zeros(E, dtype=torch.int64),
        "offsets": None if kind == "counts" else torch.zeros(E + 1, dtype=torch.int64),
    }
    out = call(leaves, **given, layout=layout)
    assert out.shape == (rows, D) and not out.any()
    out.sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any(), name


def test_one_expert_owns_all_rows():
    counts = torch.tensor([0, 0, R, 0, 0, 0])
    leaves = data(owned=torch.ones(R, dtype=torch.bool))
    dout = torch.randn(R, D)
    got = backward(call(leaves, counts=counts), leaves, dout)
    plain = fresh(leaves)
    want = backward(call(plain, function=reference.grouped_experts, counts=counts), plain, dout)
    for name in got:
        torch.testing.assert_close(got[name], want[name])


# Memory of the caller's, and rows that no expert owns.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_tail", [False, True])
def test_out_and_dx_out(zero_tail, dtype):
    leaves, dout = data(dtype=DTYPES[dtype]), torch.randn(R, D)
    want = backward(call(leaves, **BOTH), leaves, dout)
    # As a part of a larger buffer.
    buffers = torch.full((2, 2 * R, D), 7.0, dtype=DTYPES[dtype])
    out, dx_out = buffers[:, R:]
    result = call(leaves, **BOTH, out=out, dx_out=dx_out, zero_tail=zero_tail)
    got = backward(result, leaves, dout)
    assert result.data_ptr() == out.data_ptr() and torch.equal(result, out)
    assert got["drows"] is dx_out and not out.requires_grad
    for name in ("out", "drows"):
        assert torch.equal(got[name][OWNED], want[name][OWNED])
        assert (got[name][~OWNED] == (0 if zero_tail else 7)).all()
    assert torch.equal(got["dscores"][OWNED], want["dscores"][OWNED])
    for name in ("dw1", "dw2"):
        assert torch.equal(got[name], want[name])
    assert (buffers[:, :R] == 7).all()


def test_out_serves_every_step():
    leaves, out = data(), torch.empty(R, D)
    for _ in range(3):
        leaves["rows"].data[OWNED] = torch.randn(int(OWNED.sum()), D)
        result = call(leaves, **BOTH, out=out)
        # No history of the step before: the only tensors behind the node are the leaves.
        behind = [edge[0] for edge in result.grad_fn.next_functions if edge[0] is not None]
        assert all(node.name().endswith("AccumulateGrad") for node in behind)
        result.sum().backward()
        assert not out.requires_grad and torch.equal(out, call(leaves, **BOTH))
    for leaf in leaves.values():
        assert leaf.grad is not None


def test_out_that_was_overwritten_is_no_input_of_backward():
    leaves, out = data(), torch.empty(R, D)
    first = call(leaves, **BOTH, out=out)
    loss = first.square().sum()
    call(leaves, **BOTH, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # The layer itself does not need it.
    first, second = call(leaves, **BOTH, out=out), call(leaves, **BOTH, out=out)
    assert torch.equal(*(torch.autograd.grad(t.sum(), leaves["w1"])[0] for t in (first, second)))


def test_out_without_gradients():
    leaves, out, dx_out = data(), torch.empty(R, D), torch.full((R, D), 7.0)
    want = call(leaves, **BOTH).detach()
    version = out._version
    with torch.no_grad():
        result = call(leaves, **BOTH, out=out, dx_out=dx_out)
    assert torch.equal(out, want) and result.data_ptr() == out.data_ptr()
    assert out._version > version and not result.requires_grad
    with torch.inference_mode():
        out = torch.empty(R, D)
        call(leaves, **BOTH, out=out)
        assert torch.equal(out, want)
    assert (dx_out == 7).all()


def test_dx_out_is_written_where_that_gradient_is_asked_for():
    leaves, dx_out = data(), torch.full((R, D), 7.0)
    result = call(leaves, **BOTH, dx_out=dx_out)
    torch.autograd.grad(result.sum(), leaves["w1"], retain_graph=True)
    assert (dx_out == 7).all()
    result.sum().backward()
    assert torch.equal(leaves["rows"].grad, dx_out) and leaves["rows"].grad is not dx_out
    assert dx_out._version == 1


# Gradients: accumulated, frozen, kept.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", W1_LAYOUTS)
@pytest.mark.parametrize("frozen", [None, "w1", "w2", "w1_up"])
def test_main_grads(frozen, layout, dtype):
    leaves = data(bias=True, dtype=DTYPES[dtype], layout=layout)
    options = BOTH | {"layout": layout}
    weights = [name for name in ("w1", "w2", "w1_up") if name in leaves]
    if frozen in leaves:
        leaves[frozen].requires_grad_(False)
        weights.remove(frozen)
    dout = torch.randn(R, D)
    want = backward(call(leaves, **options), leaves, dout)

    def added(start):
        copies = fresh(leaves)
        main = {f"{name}_main_grad": t.clone() for name, t in start.items()}
        call(copies, **options, **main).backward(dout.to(DTYPES[dtype]))
        for name, leaf in copies.items():
            if name in weights or name == frozen:
                assert leaf.grad is None
            else:
                assert torch.equal(leaf.grad, want[f"d{name}"]), name
        return main

    # Added to zeros it is the fp32 gradient, which the plain one rounds.
    wide = added({name: torch.zeros(leaves[name].shape) for name in weights})
    for name in weights:
        assert torch.equal(wide[f"{name}_main_grad"].to(DTYPES[dtype]), want[f"d{name}"])
    before = {name: torch.randn(leaves[name].shape) for name in weights}
    for name, sum_ in added(before).items():
        assert torch.equal(sum_, before[name.removesuffix("_main_grad")] + wide[name])


@pytest.mark.parametrize("score_at", SCORES)
def test_kept_are_rows_scores_h_and_segments(score_at):
    leaves = data(score_at, bias=True)
    parameters = [v for k, v in leaves.items() if k not in ("rows", "scores")]
    kept, _ = kept_bytes(lambda: call(leaves, **BOTH), parameters)
    scores = [] if score_at == "none" else [4 * R]
    assert kept == sorted([4 * R * D, 4 * R * 2 * N, 4 * 3 * E, *scores])


@pytest.mark.parametrize("out", [False, True])
def test_dh_takes_the_place_of_h_in_the_last_backward(out):
    leaves, packed = data(), []
    memory = {"out": torch.empty(R, D)} if out else {}
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        result = call(leaves, **BOTH, **memory)
    (h,) = [tensor for tensor in packed if tensor.shape == (R, 2 * N)]
    before = h.clone()
    first, last = (
        torch.autograd.grad(result.sum(), leaves.values(), retain_graph=retain)
        for retain in (True, False)
    )
    assert not torch.equal(h[OWNED], before[OWNED])
    for a, b in zip(first, last, strict=True):
        assert torch.equal(a, b)


def test_inference_keeps_nothing():
    leaves = data()
    want = call(leaves, **BOTH).detach()
    with torch.no_grad():
        kept, out = kept_bytes(lambda: call(leaves, **BOTH), [])
    assert kept == [] and torch.equal(out, want)
    frozen = {name: leaf.detach() for name, leaf in leaves.items()}
    kept, out = kept_bytes(lambda: call(frozen, **BOTH), [])
    assert kept == [] and torch.equal(out, want)


# Living with PyTorch.


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    leaves, dout = data(bias=True), torch.randn(R, D)
    want = backward(call(leaves, **BOTH), leaves, dout)

    def run(*tensors):
        return call(dict(zip(leaves, tensors, strict=True)), **BOTH)

    out = torch.utils.checkpoint.checkpoint(run, *leaves.values(), use_reentrant=reentrant)
    out.backward(dout)
    assert_same({f"d{k}": v.grad for k, v in leaves.items()} | {"out": out.detach()}, want)


@pytest.mark.parametrize("layout", ["interleaved", "transposed_interleaved"])
def test_autocast_is_the_call_in_its_dtype(layout):
    leaves, dout = data(bias=True, layout=layout), torch.randn(R, D).bfloat16()
    options = BOTH | {"layout": layout}
    low = fresh(leaves)
    for name, leaf in leaves.items():
        if name != "scores":
            low[name] = leaf.detach().bfloat16().requires_grad_()
    want = backward(call(low, **options), low, dout)
    out, dx_out = torch.empty(2, R, D, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        result = call(leaves, **options, out=out, dx_out=dx_out)
    got = backward(result, leaves, dout)
    assert torch.equal(dx_out, want["drows"])
    for name, value in got.items():
        assert value.dtype == (torch.bfloat16 if name == "out" else torch.float32)
        assert torch.equal(value, want[name].to(value.dtype)), name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("layout", ["interleaved", "transposed"])
@pytest.mark.parametrize("score_at", ["none", "before_down"])
def test_compiles_to_one_graph_with_dynamic_rows(score_at, layout, memory, backend):
    torch._dynamo.reset()
    leaves = data(score_at, owned=torch.ones(R, dtype=torch.bool), bias=True, layout=layout)
    options = {"score_at": "before_down", "layout": layout}

    def function(leaves, counts, out, dx_out):
        return call(leaves, counts=counts, out=out, dx_out=dx_out, **options)

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for rows in (R, 37, 41):
        leaves["rows"] = torch.randn(rows, D, requires_grad=True)
        if score_at != "none":
            leaves["scores"] = torch.randn(rows, requires_grad=True)
        counts, dout = torch.tensor(COUNTS), torch.randn(rows, D)
        want = backward(function(leaves, counts, None, None), leaves, dout)
        given = torch.zeros(2, rows, D).unbind() if memory else (None, None)
        got = backward(compiled(leaves, counts, *given), leaves, dout)
        assert_same(got, want)
        if memory:
            assert torch.equal(given[0], want["out"]) and torch.equal(given[1], want["drows"])
            assert not given[0].requires_grad


@pytest.mark.parametrize("layout", ["interleaved", "transposed_interleaved"])
def test_main_grads_compile(layout):
    torch._dynamo.reset()
    leaves, dout = data(layout=layout), torch.randn(R, D)
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        main = {f"{name}_main_grad": torch.ones(leaves[name].shape) for name in ("w1", "w2")}
        copies = fresh(leaves)
        run(copies, **BOTH, layout=layout, **main).backward(dout)
        assert copies["w1"].grad is None and copies["w2"].grad is None
        results.append(main | {"rows": copies["rows"].grad, "scores": copies["scores"].grad})
    assert_same(*results)


def test_second_derivative_is_refused():
    leaves = data()
    for memory in ({}, {"out": torch.empty(R, D)}):
        out = call(leaves, **BOTH, **memory)
        with pytest.raises(RuntimeError, match="has no second derivative: got create_graph=True"):
            torch.autograd.grad(out.sum(), leaves["w1"], create_graph=True)


def test_no_gradient_of_the_output():
    class NoGradient(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, gradient: None)

    leaves = data()
    NoGradient.apply(call(leaves, **BOTH)).sum().backward()
    assert all(leaf.grad is None for leaf in leaves.values())


def operator_calls(dtype, layout):
    ops = torch.ops.sonicmoe
    leaves = fresh(data(bias=True, dtype=dtype, layout=layout), dtype)
    rows, w1, b1, w2, b2, scores = (leaf.detach() for leaf in leaves.values())
    of_layout = f"w1_layout={layout}"
    text = f"score_at=after_down zero_tail=true {of_layout}"
    # All rows have an owner: those of H that have none are not written, so that runs differ there.
    offsets = torch.tensor([0, 8, 8, 24, 26, 40, R])
    args = rows, None, offsets, scores, w1, b1, w2, b2, text
    out, preact, segments = ops.grouped_forward(*args)
    yield "grouped_forward", args
    unscored = rows, None, offsets, None, w1, None, w2, None, f"score_at=none {of_layout}"
    yield "grouped_forward", unscored
    yield "grouped_forward", (*args[:-1], text + " inference=true")
    yield "grouped_forward_out", (torch.zeros(R, D, dtype=dtype), *args)
    backward = out, rows, scores, w1, w2, b2, preact, segments, text
    yield "grouped_backward", backward
    main_grads = torch.zeros(w1.shape), torch.zeros(w2.shape)
    rest = None, True, True, False, None, None, True, torch.zeros(R, D, dtype=dtype)
    yield "grouped_backward", (*backward, *main_grads, *rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["interleaved", "transposed"])
@pytest.mark.parametrize("case", range(6))
def test_opcheck(case, layout, dtype):
    name, args = list(operator_calls(DTYPES[dtype], layout))[case]
    if name == "grouped_forward" and "inference" not in args[-1]:
        floats = [isinstance(a, torch.Tensor) and a.is_floating_point() for a in args]
        args = [a.requires_grad_() if f else a for a, f in zip(args, floats, strict=True)]
    torch.library.opcheck(getattr(torch.ops.sonicmoe, name).default, args)
