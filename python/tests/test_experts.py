"""The caller's router: ids and weights (T, K), or logits (T, E) with ids or without."""

import functools
import re

import pytest
import torch
from helpers import (
    ACTIVATION_LAYOUTS,
    FORMS,
    ROUTERS,
    UNTRANSPOSED,
    assert_as_good,
    assert_close,
    assert_same,
    at_odd_address,
    make_layer,
    stored,
    turned,
)

import sonicmoe
from sonicmoe import functional, reference
from sonicmoe._check import W1_LAYOUTS

T, D, N, E, K = 20, 24, 16, 6, 3
SIZES = {"hidden": D, "intermediate": N, "experts": E}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def every_ids():
    """ids (T, K) by name."""
    ids = torch.randint(0, E, (T, K))
    some = torch.rand(T, K) < 0.4
    yield "plain", ids
    yield "past", torch.where(some, E, ids)
    yield "below", torch.where(some, -1, ids)
    far = torch.tensor([2**31 - 1, -(2**31), E + 1, -7])
    yield "far", torch.where(some, far[torch.randint(0, 4, (T, K))], ids)
    yield "only_sentinels", torch.where(some, -1, E)
    yield "duplicates", ids[:, :1].repeat(1, K)
    yield "one_expert", torch.full((T, 1), 3)
    yield "one_choice", ids[:, :1]
    yield "no_tokens", ids[:0]


IDS = [name for name, _ in every_ids()]


def sentinels(ids):
    return (ids < 0) | (ids >= E)


def data(tokens=T, top_k=K, logits=False, **options):
    """Leaves by the names of the arguments: those of experts(), or of experts_from_logits()."""
    layer = make_layer(**SIZES | {"tokens": tokens} | options)
    leaves = layer.leaves()
    del leaves["router_w"]
    if logits:
        leaves["logits"] = torch.randn(tokens, E).to(layer.x.dtype).requires_grad_()
    else:
        leaves["weights"] = torch.randn(tokens, top_k).requires_grad_()
    return leaves


def to_double(leaves):
    return {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}


def fresh(leaves):
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}


def call(leaves, function=sonicmoe.experts, form=stored, **options):
    leaves = {k: form(v) if k in ("w1", "w2", "w1_up") else v for k, v in leaves.items()}
    return function(**leaves, **options)


def backward(result, leaves, dout):
    """Output and counts, and the gradients by name."""
    out, counts = result
    gradients = torch.autograd.grad(out, leaves.values(), dout.to(out))
    named = {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "counts": counts} | named


def compare(leaves, name="experts", device="cpu", form=stored, **options):
    """Ours on the device against plain PyTorch. Returns our results."""
    dout = torch.randn(leaves["x"].shape).to(leaves["x"].dtype)
    moved = {k: v.detach().to(device).requires_grad_() for k, v in leaves.items()}
    there = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    result = call(moved, getattr(sonicmoe, name), form, **there)
    got = {k: v.cpu() for k, v in backward(result, moved, dout.to(device)).items()}
    plain = getattr(reference, name)
    want, exact = (
        backward(call(copies, plain, **options), copies, dout)
        for copies in (fresh(leaves), to_double(leaves))
    )
    counts = got["counts"]
    assert counts.dtype == torch.int32 and torch.equal(counts, want["counts"])
    for key in got.keys() - {"counts"}:
        assert_as_good(key, got[key], want[key], exact[key])
    return got


def as_lists(x, ids, weights, w1, w2, b1=None, b2=None, **options):
    """The same pairs by moe_general_routing_inputs, in the order of tokens."""
    tokens = torch.arange(ids.shape[0], device=ids.device).repeat_interleave(ids.shape[1])
    pairs = weights.flatten(), tokens, ids.flatten()
    return functional.moe_general_routing_inputs(x, *pairs, w1, b1, w2, b2, **options)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(len(IDS)), ids=IDS)
def test_matches_plain_pytorch(case, dtype, ids_dtype):
    ids = list(every_ids())[case][1].to(ids_dtype)
    leaves = data(*ids.shape, bias=True, dtype=DTYPES[dtype])
    got = compare(leaves, ids=ids)
    assert torch.equal(got["counts"].long(), ids[~sentinels(ids)].bincount(minlength=E))
    # Sentinels: no gradient at all, and tokens that have nothing else get zeros.
    assert not got["dweights"][sentinels(ids)].any()
    alone = sentinels(ids).all(dim=1)
    assert not got["out"][alone].any() and not got["dx"][alone].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation, layout", ACTIVATION_LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_weights_in_every_form(form, activation, layout, bias, dtype):
    options = {"activation": activation, "bias": bias, "dtype": DTYPES[dtype]}
    leaves = data(layout=layout, **options)
    ids = torch.randint(-1, E + 1, (T, K))
    compare(leaves, form=FORMS[form], ids=ids, activation=activation, layout=layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(len(IDS)), ids=IDS)
def test_the_same_pairs_as_lists(case, dtype):
    ids = list(every_ids())[case][1]
    leaves = data(*ids.shape, bias=True, dtype=DTYPES[dtype])
    dout = torch.randn(leaves["x"].shape)
    got = backward(call(leaves, ids=ids), leaves, dout)
    assert_same(got, backward(call(leaves, as_lists, ids=ids), leaves, dout))


def test_int64_ids_are_not_wrapped_around():
    leaves, dout = data(), torch.randn(T, D)
    ids = torch.randint(0, E, (T, K))
    some = torch.rand(T, K) < 0.5
    far = torch.tensor([2**32, 2**40 + 1, -(2**32), -(2**63)])[torch.randint(0, 4, (T, K))]
    got = backward(call(leaves, ids=torch.where(some, far, ids)), leaves, dout)
    assert_same(got, backward(call(leaves, ids=torch.where(some, -1, ids).int()), leaves, dout))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_gradients_come_back_in_their_type(dtype):
    leaves, dout = data(bias=True), torch.randn(T, D)
    ids = torch.randint(-1, E, (T, K))
    leaves["weights"] = leaves["weights"].detach().to(dtype).requires_grad_()
    got = backward(call(leaves, ids=ids), leaves, dout)
    raised = leaves | {"weights": leaves["weights"].detach().float().requires_grad_()}
    want = backward(call(raised, ids=ids), raised, dout)
    assert got["dweights"].dtype == dtype
    want["dweights"] = want["dweights"].to(dtype)
    assert_same(got, want)


def test_arguments_that_start_anywhere_or_have_strides():
    ids = torch.randint(0, E, (T, K))
    for name, function in (("weights", sonicmoe.experts), ("logits", logits_of(ids))):
        leaves, dout = data(logits=name == "logits"), torch.randn(T, D)
        given = {"ids": ids} if name == "weights" else {}
        want = backward(call(leaves, function, **given), leaves, dout)
        for change in (at_odd_address, lambda t: t.t().contiguous().t()):
            odd = fresh(leaves)
            for changed in ("x", name):
                odd[changed] = change(leaves[changed].detach()).requires_grad_()
            given = {"ids": ids.t().contiguous().t()} if name == "weights" else {}
            assert_same(backward(call(odd, function, **given), odd, change(dout)), want)


@pytest.mark.parametrize("layout", W1_LAYOUTS)
def test_main_grads(layout):
    leaves, dout = data(bias=True, layout=layout), torch.randn(T, D)
    ids = torch.randint(-1, E, (T, K))
    want = backward(call(leaves, ids=ids, layout=layout), leaves, dout)
    names = [name for name in ("w1", "w1_up", "w2") if name in leaves]
    main_grads = {f"{name}_main_grad": torch.randn(leaves[name].shape) for name in names}
    before = {name: value.clone() for name, value in main_grads.items()}
    out, _ = call(leaves, ids=ids, layout=layout, **main_grads)
    out.backward(dout)
    for name, leaf in leaves.items():
        if name not in names:
            assert torch.equal(leaf.grad, want["d" + name]), name
            continue
        key = f"{name}_main_grad"
        assert leaf.grad is None and torch.equal(main_grads[key], before[key] + want["d" + name])


def logits_of(ids=None, top_k=K, **options):
    """experts_from_logits with these arguments."""
    return functools.partial(sonicmoe.experts_from_logits, K=top_k, ids=ids, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("top_k", [1, K, E])
def test_logits_match_plain_pytorch(top_k, router, dtype):
    over_topk, norm = ROUTERS[router]
    got = compare(
        data(logits=True, bias=True, dtype=DTYPES[dtype]), "experts_from_logits", K=top_k,
        softmax_over_topk=over_topk, norm_topk_probs=norm,
    )  # fmt: skip
    assert got["counts"].sum() == T * top_k


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("case", range(len(IDS)), ids=IDS)
def test_logits_and_ids_match_plain_pytorch(case, router, dtype):
    ids = list(every_ids())[case][1]
    over_topk, norm = ROUTERS[router]
    leaves = data(len(ids), logits=True, bias=True, dtype=DTYPES[dtype])
    got = compare(
        leaves, "experts_from_logits", ids=ids, K=ids.shape[1], softmax_over_topk=over_topk,
        norm_topk_probs=norm,
    )  # fmt: skip
    alone = sentinels(ids).all(dim=1)
    assert not got["out"][alone].any() and not got["dlogits"][alone].any()


@pytest.mark.parametrize("router", ROUTERS)
def test_logits_of_a_router_are_the_same_layer(router):
    over_topk, norm = ROUTERS[router]
    layer = make_layer(tokens=T, experts=E)
    o, logits, counts = functional.moe_TC_softmax_topk_layer(
        layer.x, layer.router_w, layer.w1, None, layer.w2, None, K,
        is_softmax_over_topk=over_topk, norm_topk_probs=norm,
    )  # fmt: skip
    options = {"softmax_over_topk": over_topk, "norm_topk_probs": norm}
    tensors = layer.x, logits, K, layer.w1, layer.w2
    got, got_counts = sonicmoe.experts_from_logits(*tensors, **options)
    assert torch.equal(got, o) and torch.equal(got_counts, counts)
    _, ids = reference.route(logits, K, over_topk, norm)
    got, got_counts = sonicmoe.experts_from_logits(*tensors, ids=ids, **options)
    assert torch.equal(got, o) and torch.equal(got_counts, counts)


@pytest.mark.parametrize("router", ROUTERS)
def test_main_grads_of_logits(router):
    over_topk, norm = ROUTERS[router]
    function = logits_of(softmax_over_topk=over_topk, norm_topk_probs=norm)
    leaves, dout = data(logits=True), torch.randn(T, D)
    want = backward(call(leaves, function), leaves, dout)
    main_grads = {f"{name}_main_grad": torch.zeros(leaves[name].shape) for name in ("w1", "w2")}
    call(leaves, function, **main_grads)[0].backward(dout)
    for name in ("w1", "w2"):
        assert leaves[name].grad is None
        assert torch.equal(main_grads[f"{name}_main_grad"], want["d" + name])
    assert torch.equal(leaves["logits"].grad, want["dlogits"])


def given_functions(ids):
    yield "ids", functools.partial(sonicmoe.experts, ids=ids)
    yield "logits", logits_of(softmax_over_topk=False)
    yield "logits_and_ids", logits_of(ids)


KINDS = [name for name, _ in given_functions(None)]


def leaves_of(kind, **options):
    return data(logits=kind != "ids", **options)


@pytest.mark.parametrize("layout", UNTRANSPOSED)
@pytest.mark.parametrize("kind", KINDS)
def test_transposed_weights_are_the_same_layer(kind, layout):
    leaves, dout = leaves_of(kind, bias=True, layout=layout), torch.randn(T, D)
    function = dict(given_functions(torch.randint(-1, E + 1, (T, K))))[kind]
    got = backward(call(leaves, function, layout=layout), leaves, dout)
    other = turned(leaves)
    want = backward(call(other, function, layout=UNTRANSPOSED[layout]), other, dout)
    assert_close(got, turned(want))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["interleaved", "transposed_interleaved"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_to_one_graph(kind, layout, dynamic):
    torch._dynamo.reset()

    def function(leaves, ids):
        return call(leaves, dict(given_functions(ids))[kind], layout=layout)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (T, 33, 7):
        ids = torch.randint(-1, E + 1, (tokens, K))
        leaves = leaves_of(kind, tokens=tokens, bias=True, layout=layout)
        dout = torch.randn(tokens, D)
        want = backward(function(leaves, ids), leaves, dout)
        assert_same(backward(compiled(leaves, ids), leaves, dout), want)


@pytest.mark.parametrize("kind", KINDS)
def test_keeps_nothing_where_no_backward_can_follow(kind):
    leaves = leaves_of(kind)
    function = dict(given_functions(torch.randint(0, E, (T, K))))[kind]
    o, counts = call(leaves, function)
    with torch.no_grad():
        got, got_counts = call(leaves, function)
    assert o.requires_grad and not got.requires_grad
    assert torch.equal(got, o) and torch.equal(got_counts, counts)
    frozen = {name: leaf.detach() for name, leaf in leaves.items()}
    assert not call(frozen, function)[0].requires_grad


@pytest.mark.parametrize("layout", ["separate", "transposed"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_asked_for_alone(kind, layout):
    leaves, dout = leaves_of(kind, bias=True, layout=layout), torch.randn(T, D)
    function = dict(given_functions(torch.randint(-1, E, (T, K))))[kind]
    want = backward(call(leaves, function, layout=layout), leaves, dout)
    for name in leaves:
        got = torch.autograd.grad(call(leaves, function, layout=layout)[0], leaves[name], dout)[0]
        assert torch.equal(got, want["d" + name]), name


@pytest.mark.parametrize("layout", ["interleaved", "transposed"])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind, layout):
    leaves, dout = leaves_of(kind, bias=True, layout=layout), torch.randn(T, D)
    function = dict(given_functions(torch.randint(-1, E, (T, K))))[kind]
    with torch.autocast("cpu", torch.bfloat16):
        got = backward(call(leaves, function, layout=layout), leaves, dout)
    assert got["out"].dtype == torch.bfloat16 and got["dx"].dtype == torch.float32
    cast = {k: v.detach().bfloat16().requires_grad_() for k, v in leaves.items() if k != "weights"}
    cast = {k: cast.get(k, v) for k, v in leaves.items()}
    want = backward(call(cast, function, layout=layout), cast, dout)
    for name in want.keys() - {"counts"}:
        assert torch.equal(got[name].float(), want[name].float()), name


def operator_calls(dtype, layout):
    ops = torch.ops.sonicmoe
    leaves = data(bias=True, dtype=dtype, layout=layout)
    leaves = {name: leaf.detach() for name, leaf in leaves.items()}
    x, w1, b1, w2, b2, weights = leaves.values()
    experts = w1, b1, w2, b2
    # No sentinels: their rows of H are not written, so two runs may differ there.
    ids, logits = torch.randint(0, E, (T, K)).int(), torch.randn(T, E).to(dtype)
    text = f"activation=geglu w1_layout={layout}"
    args = x, ids, weights, *experts, text
    o, _, preact, routing = ops.ids_forward(*args)
    yield "ids_forward", args
    yield "ids_forward", (x, ids, weights, *experts, f"inference=true w1_layout={layout}")
    yield "ids_backward", (o, x, K, w1, w2, b2, preact, routing, text)
    for given in (None, ids):
        text = f"top_k={K} router_order=score_then_select w1_layout={layout}"
        args = x, logits, given, *experts, text
        o, _, preact, routing = ops.logits_forward(*args)
        yield "logits_forward", args
        saved = w1, w2, b2, preact, routing, text
        yield "logits_backward", (o, x, logits, given is not None, *saved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["interleaved", "transposed_interleaved"])
@pytest.mark.parametrize("case", range(7))
def test_opcheck(case, layout, dtype):
    name, args = list(operator_calls(DTYPES[dtype], layout))[case]
    if name.endswith("forward") and "inference" not in args[-1]:
        floats = [isinstance(a, torch.Tensor) and a.is_floating_point() for a in args]
        args = [a.requires_grad_() if f else a for a, f in zip(args, floats, strict=True)]
    torch.library.opcheck(getattr(torch.ops.sonicmoe, name).default, args)


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def inputs(**given):
    weights = {"w1": torch.randn(E, 2 * N, D), "w2": torch.randn(E, D, N)}
    return {"x": torch.randn(T, D)} | given | weights


IDS_REFUSED = [
    ({"x": 3}, TypeError, "x: got int, allowed: a tensor"),
    ({"ids": [[0] * K] * T}, TypeError, "ids: got list, allowed: a tensor"),
    (
        {"ids": torch.ones(T, K)},
        TypeError,
        "ids: got torch.float32, allowed: torch.int32, torch.int64",
    ),
    (
        {"weights": torch.ones(T, K).int()},
        TypeError,
        "weights: got torch.int32, allowed: any floating dtype",
    ),
    ({"weights": None}, TypeError, "weights: got NoneType, allowed: a tensor"),
    ({"ids": torch.ones(T).int()}, ValueError, "ids: got shape (20,), allowed: (T, K)"),
    (
        {"ids": torch.ones(T + 1, K).int()},
        ValueError,
        "ids: got shape (21, 3), allowed: (T, K) = (20, 3)",
    ),
    (
        {"weights": torch.ones(T, K + 1)},
        ValueError,
        "weights: got shape (20, 4), allowed: (T, K) = (20, 3)",
    ),
    (
        {"ids": torch.ones(T, 0).int()},
        ValueError,
        "ids: got shape (20, 0), allowed: (T, K) with K from 1 to E (6)",
    ),
    (
        {"ids": torch.ones(T, 7).int()},
        ValueError,
        "ids: got shape (20, 7), allowed: (T, K) with K from 1 to E (6)",
    ),
    (
        {"ids": torch.ones(T, K, device="meta").int()},
        ValueError,
        "ids: got a tensor on meta, allowed: cpu, where x is",
    ),
    (
        {"weights": torch.ones(T, K, device="meta")},
        ValueError,
        "weights: got a tensor on meta, allowed: cpu, where x is",
    ),
    (
        {"w2": torch.ones(E, D, N).bfloat16()},
        TypeError,
        "w2: got torch.bfloat16, allowed: torch.float32, the dtype of x",
    ),
    ({"b1": torch.ones(E, 2 * N)}, ValueError, "b2: got None, allowed: b1 and b2, or neither"),
    (
        {"layout": "separate"},
        ValueError,
        "w1_up: got None, allowed: a tensor, for layout is 'separate'",
    ),
]
LOGITS_REFUSED = [
    ({"logits": None}, TypeError, "logits: got NoneType, allowed: a tensor"),
    (
        {"logits": torch.ones(T, E).bfloat16()},
        TypeError,
        "logits: got torch.bfloat16, allowed: torch.float32, the dtype of x",
    ),
    (
        {"logits": torch.ones(T, E, device="meta")},
        ValueError,
        "logits: got a tensor on meta, allowed: cpu, where x is",
    ),
    (
        {"logits": torch.ones(T, E + 1)},
        ValueError,
        "logits: got shape (20, 7), allowed: (T, E) = (20, 6)",
    ),
    ({"K": 2.0}, TypeError, "K: got 2.0, allowed: an int"),
    ({"K": 7}, ValueError, "K: got 7, allowed: 1 to E (6)"),
    (
        {"ids": torch.ones(T, K + 1).int()},
        ValueError,
        "ids: got shape (20, 4), allowed: (T, K) = (20, 3)",
    ),
    (
        {"ids": torch.ones(T, K)},
        TypeError,
        "ids: got torch.float32, allowed: torch.int32, torch.int64",
    ),
]


@pytest.mark.parametrize("change, error, message", IDS_REFUSED)
def test_what_experts_refuses(change, error, message):
    good = inputs(ids=torch.randint(0, E, (T, K)), weights=torch.rand(T, K))
    sonicmoe.experts(**good)
    with refused(error, message):
        sonicmoe.experts(**good | change)


@pytest.mark.parametrize("change, error, message", LOGITS_REFUSED)
def test_what_experts_from_logits_refuses(change, error, message):
    good = inputs(logits=torch.randn(T, E), K=K)
    sonicmoe.experts_from_logits(**good)
    with refused(error, message):
        sonicmoe.experts_from_logits(**good | change)


def test_operators_refuse_in_the_same_words():
    ops, named = torch.ops.sonicmoe, inputs()
    x, w1, w2 = named.values()
    ids, weights = torch.zeros(T, K).int(), torch.zeros(T, K)

    def forward(text="", ids=ids, weights=weights):
        return ops.ids_forward(x, ids, weights, w1, None, w2, None, text)

    o, _, preact, routing = forward()
    message = "layer: got top_k, allowed: options, for the other arguments say that"
    with refused(ValueError, message):
        forward("top_k=3")
    with refused(ValueError, "ids: got int64, allowed: int32"):
        forward(ids=ids.long())
    with refused(ValueError, "weights: got bfloat16, allowed: float32"):
        forward(weights=weights.bfloat16())
    with refused(ValueError, f"routing: got shape (3,), allowed: (routing) = ({len(routing)},)"):
        ops.ids_backward(o, x, K, w1, w2, None, preact, routing[:3], "")
    with refused(ValueError, "preact: got shape (60, 32), allowed: (R, 2n or n) = (40, 32)"):
        ops.ids_backward(o, x, 2, w1, w2, None, preact, routing, "")
    with refused(ValueError, "top_k: got -1, allowed: 1 to experts (6)"):
        ops.ids_backward(o, x, -1, w1, w2, None, preact, routing, "")
    logits, text = torch.zeros(T, E), "top_k=3 router_order=score_then_select"
    o, _, preact, routing = ops.logits_forward(x, logits, ids, w1, None, w2, None, text)
    saved = w1, w2, None, preact, routing, text
    with refused(ValueError, "logits: got shape (20, 3), allowed: (T, E) = (20, 6)"):
        ops.logits_backward(o, x, logits[:, :3], True, *saved)
    with pytest.raises(ValueError, match="^logits: got null, allowed: "):
        ops.logits_backward(o, x, None, True, *saved)
