"""Weights as stored: contiguous or permuted views, either way round, in one tensor or two."""

import itertools

import pytest
import torch
from helpers import (
    FORMS,
    UNTRANSPOSED,
    Layer,
    activation_layouts,
    assert_as_good,
    assert_close,
    kept_bytes,
    make_layer,
    run,
    stored,
    turned,
)
from torch.utils._python_dispatch import TorchDispatchMode

from sonicmoe import ActivationType, KernelBackendMoE, MoE, functional, reference
from sonicmoe._check import TRANSPOSED_LAYOUTS, W1_LAYOUTS
from sonicmoe.router import RouterConfig, Routing

T, D, N, E, K = 48, 24, 16, 6, 2
SWIGLU = ActivationType.SWIGLU
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHTS = ("w1", "w2", "w1_up")
LAYOUTS = ("separate", *TRANSPOSED_LAYOUTS)
PAIRS = list(itertools.product(FORMS.values(), repeat=2))


def weights_of(layer):
    return [name for name in WEIGHTS if getattr(layer, name) is not None]


def lists():
    return torch.rand(70), torch.randint(0, T, (70,)), torch.randint(0, E + 1, (70,))


def call(leaves, form=stored, given=None, **options):
    """The layer's output, or that of lists if they are `given`."""
    x, w1, b1, w2, b2 = map(leaves.get, ("x", "w1", "b1", "w2", "b2"))
    weights = form(w1), b1, form(w2), b2
    if "w1_up" in leaves:
        options |= {"w1_up": form(leaves["w1_up"]), "b1_up": leaves.get("b1_up")}
    if given is not None:
        return functional.moe_general_routing_inputs(x, *given, *weights, **options)[0]
    return functional.moe_TC_softmax_topk_layer(x, leaves["router_w"], *weights, K, **options)[0]


def backward(o):
    (o.float() * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum().backward()


# Forms.


class Operations(TorchDispatchMode):
    """Which operators ran, and on how many elements."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen.append((function.name().partition(".")[0], out.numel()))
        return out


@pytest.mark.parametrize("use_lists", [False, True])
@pytest.mark.parametrize("layout", W1_LAYOUTS)
def test_gradients_have_the_form_of_their_weights_and_nothing_is_copied(layout, use_lists):
    layer = make_layer(bias=True, layout=layout)
    given = lists() if use_lists else None
    names = weights_of(layer)
    results = []
    for form in FORMS.values():
        # The weights themselves have the form, as parameters do.
        leaves = layer.leaves()
        for name in names:
            leaves[name] = form(leaves[name].detach()).requires_grad_()
        with Operations() as operations:
            o = call(leaves, given=given, layout=layout)
            gradients = torch.autograd.grad(o.square().sum(), [leaves[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            assert gradient.shape == leaves[name].shape, name
            assert gradient.stride() == leaves[name].stride(), name
        large = {name for name, count in operations.seen if count >= E * N * D}
        assert large <= {"aten::permute"}, large
        results.append([o, *(g if form is stored else g.permute(2, 0, 1) for g in gradients)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["interleaved", "transposed"])
@pytest.mark.parametrize("w1_form, w2_form", PAIRS)
def test_each_weight_may_have_either_form(w1_form, w2_form, layout):
    layer = make_layer(layout=layout)
    weights = w1_form(layer.w1), None, w2_form(layer.w2), None
    o = functional.moe_TC_softmax_topk_layer(layer.x, layer.router_w, *weights, K, layout=layout)[0]
    assert torch.equal(o, run(layer, K, SWIGLU, "softmax_over_topk", layout)[0])


@pytest.mark.parametrize("layout", ["interleaved", *TRANSPOSED_LAYOUTS])
@pytest.mark.parametrize(
    "hidden, intermediate, experts",
    [(16, 8, 16), (16, 16, 16), (8, 8, 8), (16, 8, 1), (8, 16, 8), (16, 16, 3), (16, 16, 1)],
)
def test_strides_decide_where_both_forms_fit_the_shape(hidden, intermediate, experts, layout):
    sizes = dict(hidden=hidden, intermediate=intermediate, experts=experts)
    layer, k = make_layer(**sizes, layout=layout), min(K, experts)
    plain = reference.topk_layer(
        layer.x,
        layer.router_w,
        k,
        Routing(RouterConfig()),
        layer.w1,
        None,
        layer.w2,
        None,
        layout=layout,
    )
    for form in FORMS.values():
        o, logits, counts, _ = run(layer, k, SWIGLU, "softmax_over_topk", layout, form)
        assert torch.equal(counts, plain[2])
        torch.testing.assert_close(o, plain[0])


@pytest.mark.parametrize("layout", W1_LAYOUTS)
def test_kept_bytes_do_not_depend_on_the_form(layout):
    leaves = make_layer(bias=True, layout=layout).leaves()
    expected = sorted([T * D * 4, T * K * 2 * N * 4, 20 * T * K + 4 * (2 * E + 1)])
    for form in FORMS.values():
        kept, _ = kept_bytes(
            lambda form=form: call(leaves, form, layout=layout),
            [v for k, v in leaves.items() if k != "x"],
        )
        assert kept == expected


# Layouts.


@pytest.mark.parametrize("use_lists", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_separate_has_the_bits_of_concatenated(dtype, bias, use_lists):
    two = make_layer(bias=bias, dtype=DTYPES[dtype], layout="separate")
    biases = (torch.cat([two.b1, two.b1_up], 1), two.b2) if bias else (None, None)
    w1 = torch.cat([two.w1, two.w1_up], 1)
    one = Layer(two.x, two.router_w, w1, biases[0], two.w2, biases[1])
    given = lists() if use_lists else None
    ours, theirs = two.leaves(), one.leaves()
    o, expected = call(ours, given=given), call(theirs, given=given, layout="concatenated")
    assert torch.equal(o, expected)
    assert torch.equal(call(ours, given=given, layout="separate"), o)
    if not use_lists:
        assert torch.equal(call(theirs, concat_layout=True), o)
    with torch.no_grad():
        assert torch.equal(call(ours, given=given), o)
    backward(o)
    backward(expected)
    for name in ["x", "w2"] + ["router_w"] * (not use_lists) + ["b2"] * bias:
        assert torch.equal(ours[name].grad, theirs[name].grad), name
    for gate, up in [("w1", "w1_up")] + [("b1", "b1_up")] * bias:
        both = torch.cat([ours[gate].grad, ours[up].grad], 1)
        assert torch.equal(both, theirs[gate].grad), gate


@pytest.mark.parametrize("use_lists", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activation, layout",
    activation_layouts(ActivationType.GEGLU, ActivationType.RELU_SQ, layouts=UNTRANSPOSED),
)
def test_transposed_weights_are_the_same_layer(activation, layout, dtype, bias, use_lists):
    leaves = make_layer(activation, bias, DTYPES[dtype], layout=layout).leaves()
    other, given = turned(leaves), lists() if use_lists else None
    results = []
    for tensors, name in ((leaves, layout), (other, UNTRANSPOSED[layout])):
        o = call(tensors, given=given, activation_type=activation, layout=name)
        backward(o)
        gradients = {f"d{k}": v.grad for k, v in tensors.items() if v.grad is not None}
        results.append({"o": o} | gradients)
    assert_close(results[0], turned(results[1]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "activation, layout", activation_layouts(ActivationType.GEGLU, ActivationType.RELU_SQ)
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_match_plain_pytorch(dtype, bias, activation, layout, form):
    layer = make_layer(activation, bias, DTYPES[dtype], layout=layout)
    scores, tokens, experts = lists()
    leaves, plain, exact = layer.leaves(), layer.leaves(), layer.to(torch.float64).leaves()
    options = dict(activation_type=activation, layout=layout)
    outputs = [call(leaves, FORMS[form], (scores, tokens, experts), **options)]
    for side in (plain, exact):
        x, w1, b1, w2, b2, w1_up, b1_up = map(
            side.get, ("x", "w1", "b1", "w2", "b2", "w1_up", "b1_up")
        )
        outputs.append(
            reference.routed_layer(
                x, scores.to(torch.promote_types(x.dtype, torch.float32)), tokens, experts,
                w1, b1, w2, b2, activation, layout=layout, w1_up=w1_up, b1_up=b1_up,
            )[0]
        )  # fmt: skip
    do = torch.randn(T, D).to(DTYPES[dtype])
    for o in outputs:
        o.backward(do.to(o.dtype))
    assert_as_good("o", *outputs)
    for name in leaves:
        if name != "router_w":
            assert_as_good("d" + name, leaves[name].grad, plain[name].grad, exact[name].grad)


@pytest.mark.parametrize("backend", [KernelBackendMoE.sonicmoe, KernelBackendMoE.torch])
def test_module_has_the_layout_by_either_name(backend):
    def module(**options):
        torch.manual_seed(0)
        return MoE(E, K, D, N, SWIGLU, True, 0.2, **options)

    x = torch.randn(T, D)
    interleaved, concatenated = module(layout="interleaved"), module(layout="concatenated")
    assert "layout='concatenated'" in repr(concatenated)
    assert concatenated.state_dict().keys() == interleaved.state_dict().keys()
    a, b = interleaved(x, backend)[0], concatenated(x, backend)[0]
    assert torch.equal(module()(x, backend)[0], a) and not torch.equal(a, b)
    for options in ({"concat_layout": True}, {"concat_layout": True, "layout": "concatenated"}):
        assert torch.equal(module(**options)(x, backend)[0], b)
    order = [*range(0, 2 * N, 2), *range(1, 2 * N, 2)]
    concatenated.c_fc.weight.data = interleaved.c_fc.weight.data[:, order].contiguous()
    torch.testing.assert_close(concatenated(x, backend)[0], a)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autocast(layout):
    layer = make_layer(bias=True, layout=layout)
    leaves, low = layer.leaves(), layer.to(torch.bfloat16).leaves()
    with torch.autocast("cpu", torch.bfloat16):
        o = call(leaves, layout=layout)
    expected = call(low, layout=layout)
    assert torch.equal(o, expected)
    backward(o)
    backward(expected)
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == torch.float32
        assert torch.equal(leaf.grad, low[name].grad.float()), name


# Gradients: added to main_grad, left out, compiled.


def main_grads(layer, form=stored):
    """Random tensors to add to, and the options that name them."""
    main = {name: torch.randn(getattr(layer, name).shape) for name in weights_of(layer)}
    return main, {f"{name}_main_grad": form(tensor) for name, tensor in main.items()}


@pytest.mark.parametrize("use_lists", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form, main_form", PAIRS)
def test_main_grads_of_either_form(form, main_form, layout, use_lists):
    layer = make_layer(bias=True, layout=layout)
    leaves, plain = layer.leaves(), layer.leaves()
    given = lists() if use_lists else None
    main, options = main_grads(layer, main_form)
    before = {name: tensor.clone() for name, tensor in main.items()}
    versions = {name: tensor._version for name, tensor in main.items()}
    backward(call(leaves, form, given, layout=layout, **options))
    backward(call(plain, form, given, layout=layout))
    for name in main:
        assert leaves[name].grad is None and main[name]._version > versions[name]
        assert torch.equal(main[name], before[name] + plain[name].grad), name
    for name in leaves.keys() - {*main, "router_w"}:
        assert torch.equal(leaves[name].grad, plain[name].grad), name


@pytest.mark.parametrize(
    "layout, frozen",
    [*(("separate", name) for name in WEIGHTS), ("transposed", "w1"), ("transposed", "w2")],
)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_one_frozen(layout, frozen, accumulate, compiled):
    torch._dynamo.reset()
    layer = make_layer(bias=True, layout=layout)
    leaves, plain = layer.leaves(), layer.leaves()
    leaves[frozen].requires_grad_(False)
    main, options = main_grads(layer)
    before = {name: tensor.clone() for name, tensor in main.items()}
    del options[frozen + "_main_grad"]
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    backward(function(leaves, layout=layout, **(options if accumulate else {})))
    backward(call(plain, layout=layout))
    assert leaves[frozen].grad is None and torch.equal(main[frozen], before[frozen])
    for name in main.keys() - {frozen}:
        if accumulate:
            assert leaves[name].grad is None
            assert torch.equal(main[name], before[name] + plain[name].grad)
        else:
            assert torch.equal(leaves[name].grad, plain[name].grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use_lists", [False, True])
def test_only_what_is_asked_for_is_added(use_lists, layout):
    layer = make_layer(layout=layout)
    leaves = layer.leaves()
    main, options = main_grads(layer)
    given = lists() if use_lists else None
    loss = call(leaves, given=given, layout=layout, **options).square().sum()
    for count in range(len(main) + 1):
        for wanted in itertools.combinations(main, count):
            for tensor in main.values():
                tensor.zero_()
            asked = [leaves[name] for name in ("x", *wanted)]
            torch.autograd.grad(loss, asked, retain_graph=True, allow_unused=True)
            assert tuple(name for name in main if main[name].any()) == wanted


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["separate", "transposed_interleaved"])
@pytest.mark.parametrize("use_lists", [False, True])
def test_compiles_to_one_graph(use_lists, layout, form, backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (T, 20):
        layer = make_layer(bias=True, tokens=tokens, layout=layout)
        given = (torch.rand(30), torch.randint(0, tokens, (30,)), torch.randint(0, E, (30,)))
        given = given if use_lists else None
        main, options = main_grads(layer)
        expected_main, expected_options = main_grads(layer)
        for name in main:
            expected_main[name].copy_(main[name])
        for ours, theirs in (({}, {}), (options, expected_options)):
            leaves, eager = layer.leaves(), layer.leaves()
            o = compiled(leaves, FORMS[form], given, layout=layout, **ours)
            expected = call(eager, FORMS[form], given, layout=layout, **theirs)
            assert torch.equal(o, expected)
            backward(o)
            backward(expected)
            for name, leaf in leaves.items():
                if eager[name].grad is None:
                    assert leaf.grad is None, name
                else:
                    assert torch.equal(leaf.grad, eager[name].grad), name
        for name in main:
            assert torch.equal(main[name], expected_main[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_of_two_tensors(dtype):
    ops = torch.ops.sonicmoe
    layer = make_layer(bias=True, dtype=DTYPES[dtype], layout="separate")
    x, router_w, w1, b1, w2, b2, w1_up, b1_up = (t.detach() for t in layer.leaves().values())
    up = {"w1_up": w1_up, "b1_up": b1_up}
    options = f"top_k={K} w1_layout=separate"
    args = x, router_w, w1, b1, w2, b2, options
    o, _, _, preact, routing = ops.layer_forward(*args, **up)
    assert preact.shape == (T * K, 2 * N)
    backward_args = o, None, x, router_w, w1, w2, b2, None, preact, routing, options
    shapes = [tuple(t.shape) for t in ops.layer_backward(*backward_args, w1_up=w1_up)[2:]]
    halves = [(E, N, D), (E, N)]
    assert shapes == [*halves, (E, D, N), (E, D), *halves, (0,), (0,)]
    torch.library.opcheck(ops.layer_backward.default, backward_args, {"w1_up": w1_up})
    main, main_options = main_grads(layer)
    for wants in ({}, {"wants_dw1_up": False}, {"wants_dw1": False}):
        kwargs = {"w1_up": w1_up, **main_options, **wants}
        torch.library.opcheck(ops.layer_backward.default, backward_args, kwargs)
        kwargs = {"w1_up": w1_up, **wants}
        torch.library.opcheck(ops.layer_backward.default, backward_args, kwargs)
    kwargs = {"w1_up": w1_up, **main_options, "w1_up_main_grad": None}
    with pytest.raises(ValueError, match="^w1_up_main_grad: got None, allowed: a tensor, for that"):
        ops.layer_backward(*backward_args, **kwargs)
    assert len(ops.layer_backward(*backward_args, **kwargs, wants_dw1_up=False)) == 10

    scores, tokens, experts = torch.rand(70), torch.randint(0, T, (70,)), torch.randint(0, E, (70,))
    routed = x, scores, tokens.int(), experts.int(), w1, b1, w2, b2, "w1_layout=separate"
    o, _, preact, routing = ops.routed_forward(*routed, **up)
    backward_args = o, x, w1, w2, b2, preact, routing, "w1_layout=separate"
    torch.library.opcheck(ops.routed_backward.default, backward_args, {"w1_up": w1_up})
    for operator, given in ((ops.layer_forward, args), (ops.routed_forward, routed)):
        torch.library.opcheck(operator.default, given, up | main_options)
        leaves = [
            a.requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in given
        ]
        torch.library.opcheck(operator.default, leaves, up)
