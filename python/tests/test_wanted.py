"""Backward makes the gradients that it is asked for, with the bits that they have among all."""

import itertools

import pytest
import torch
from helpers import OVER_SOFTMAX, make_layer, permuted
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from sonicmoe import ActivationType, MoE, functional

K = 2
# The inputs of the layer, of routing of the caller, and of the experts alone, whose gradients can
# be left out. Behind the first _ is a layout.
OPTIONAL = {
    "layer": ("x", "router_w", "w1", "w2"),
    "lists": ("x", "w1", "w2"),
    "layer_separate": ("x", "router_w", "w1", "w2", "w1_up"),
    "layer_transposed": ("x", "router_w", "w1", "w2"),
    "lists_separate": ("x", "w1", "w2", "w1_up"),
    "ids": ("x", "w1", "w2"),
    "ids_separate": ("x", "w1", "w2", "w1_up"),
    "logits": ("x", "w1", "w2"),
    "grouped": ("x", "w1", "w2"),
    "grouped_separate": ("x", "w1", "w2", "w1_up"),
    "grouped_transposed_interleaved": ("x", "w1", "w2"),
}


class Backwards(TorchDispatchMode):
    """What the backward operators were asked for, by the arguments that say so."""

    supports_higher_order_operators = True  # compiled graphs call ours through one
    names = tuple(
        f"sonicmoe::{kind}_backward" for kind in ("layer", "routed", "ids", "logits", "grouped")
    )

    def __init__(self):
        super().__init__()
        self.wants = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        called, given = (function, args) if hasattr(function, "_schema") else (args[0], args[1:])
        if isinstance(called, torch._ops.OpOverload) and called.name() in self.names:
            arguments = called._schema.arguments
            values = {a.name: a.default_value for a in arguments}
            values |= dict(zip(values, given, strict=False)) | kwargs  # defaults are not passed on
            self.wants.append({k[6:]: v for k, v in values.items() if k.startswith("wants_")})
        return function(*args, **kwargs)


def layout_of(kind):
    return kind.partition("_")[2] or "interleaved"


def call(kind, leaves, ids):
    """The loss of a layer; of one whose scores (or logits) need gradients too unless `layer`."""
    x, router_w, w1, b1, w2, b2 = map(leaves.get, ("x", "router_w", "w1", "b1", "w2", "b2"))
    args = permuted(w1), b1, permuted(w2), b2
    options = {name: leaves[name] for name in ("w1_up", "b1_up") if name in leaves}
    options["layout"] = layout_of(kind)
    if kind.startswith("lists"):
        o = functional.moe_general_routing_inputs(x, leaves["scores"], *ids, *args, **options)[0]
    elif kind.startswith("ids"):
        experts = ids[1][:48].view(48, 1)
        weights = args[0], args[2], b1, b2
        o = functional.experts(x, experts, leaves["scores"], *weights, **options)[0]
    elif kind.startswith("logits"):
        o = functional.experts_from_logits(x, leaves["scores"], K, args[0], args[2], b1, b2)[0]
    elif kind.startswith("grouped"):
        w1, b1, w2, b2 = args
        counts = torch.tensor([9, 0, 20, 1, 13, 2])
        o = functional.grouped_experts(x, counts, w1, w2, leaves["scores"], b1, b2, **options)
    else:
        o, logits, _ = functional.moe_TC_softmax_topk_layer(x, router_w, *args, K, **options)
        o = torch.cat([o, logits], 1)
    return (o.float() * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum()


def inputs(kind, bias, dtype):
    layer = make_layer(bias=bias, dtype=dtype, layout=layout_of(kind))
    leaves = layer.leaves()
    if not kind.startswith("layer"):
        del leaves["router_w"]
        shape = {"lists": (70,), "ids": (48, 1), "logits": (48, 6), "grouped": (48,)}
        scores = torch.rand(shape[kind.partition("_")[0]])
        if kind.startswith("logits"):
            scores = scores.to(dtype)
        leaves["scores"] = scores.requires_grad_()
    return leaves, (torch.randint(0, 48, (70,)), torch.randint(0, 6, (70,)))


def expect_asked(kind, wants, wanted):
    names = {*OPTIONAL[kind], "w1_up"}  # nobody asks for what is not there
    if kind.startswith("layer"):
        names.add("logit_bias")
    assert wants == {"d" + name: name in wanted for name in names}


def subsets(names):
    return itertools.chain.from_iterable(
        itertools.combinations(names, count) for count in range(len(names) + 1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", OPTIONAL)
def test_what_does_not_require_a_gradient_costs_none(kind, bias, dtype):
    leaves, ids = inputs(kind, bias, dtype)
    loss = call(kind, leaves, ids)
    full = dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))
    for wanted in subsets(OPTIONAL[kind]):
        fresh = {k: v.detach() for k, v in leaves.items()}
        for name in leaves:
            fresh[name].requires_grad_(name in wanted or name not in OPTIONAL[kind])
        if not any(t.requires_grad for t in fresh.values()):
            continue
        with Backwards() as backwards:
            call(kind, fresh, ids).backward()
        expect_asked(kind, *backwards.wants, wanted)
        for name, leaf in fresh.items():
            if leaf.requires_grad:
                assert torch.equal(leaf.grad, full[name]), (wanted, name)
            else:
                assert leaf.grad is None


@pytest.mark.parametrize("kind", OPTIONAL)
def test_what_is_not_asked_for_costs_none(kind):
    leaves, ids = inputs(kind, False, torch.float32)
    loss = call(kind, leaves, ids)
    full = dict(
        zip(leaves, torch.autograd.grad(loss, leaves.values(), retain_graph=True), strict=True)
    )
    for wanted in subsets(OPTIONAL[kind]):
        if not wanted:
            continue
        with Backwards() as backwards:
            some = torch.autograd.grad(loss, [leaves[n] for n in wanted], retain_graph=True)
        expect_asked(kind, *backwards.wants, wanted)
        for name, gradient in zip(wanted, some, strict=True):
            assert torch.equal(gradient, full[name]), (wanted, name)
    with Backwards() as backwards:
        loss.backward(inputs=[leaves["x"]])
    expect_asked(kind, *backwards.wants, ["x"])
    assert torch.equal(leaves["x"].grad, full["x"]) and leaves["w1"].grad is None


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
@pytest.mark.parametrize("x_too", [False, True])
def test_module_with_frozen_experts(routing, backend, x_too):
    torch.manual_seed(3)
    moe = MoE(6, K, 24, 16, ActivationType.SWIGLU, False, 0.2, routing=routing, tile=8)
    experts = [moe.c_fc.weight, moe.c_proj.weight]
    x = torch.randn(40, 24, requires_grad=x_too)

    def gradients(*frozen):
        for weight, is_frozen in zip(experts, frozen, strict=True):
            weight.requires_grad_(not is_frozen)
        torch._dynamo.reset()  # it does not look at a parameter's requires_grad again
        run = moe if backend == "eager" else torch.compile(moe, fullgraph=True, backend=backend)
        torch.manual_seed(0)  # of token rounding
        o, aux_loss = run(x)
        leaves = [x] * x_too + [p for p in moe.parameters() if p.requires_grad]
        with Backwards() as backwards:
            gradients = torch.autograd.grad(o.square().sum() + aux_loss, leaves)
        (wants,) = backwards.wants
        assert wants.pop("drouter_w", True)  # lists have none
        assert not wants.pop("dlogit_bias", False)
        asked = {"dx": x_too, "dw1": not frozen[0], "dw2": not frozen[1], "dw1_up": False}
        assert wants == asked
        return dict(zip(map(id, leaves), gradients, strict=True))

    full = gradients(False, False)
    for frozen in ((True, True), (True, False)):
        for leaf, gradient in gradients(*frozen).items():
            assert torch.equal(gradient, full[leaf])


def test_compiled_autograd():
    moe = MoE(6, K, 24, 16, ActivationType.SWIGLU, False, 0.2)
    x = torch.randn(40, 24, requires_grad=True)
    leaves = [x, moe.router.weight, moe.c_fc.weight, moe.c_proj.weight]

    def gradients():
        for leaf in leaves:
            leaf.grad = None
        o, aux_loss = moe(x)
        (o.square().sum() + aux_loss).backward()
        return [leaf.grad for leaf in leaves]

    full = gradients()
    for frozen in (False, True):
        moe.c_fc.weight.requires_grad_(not frozen)
        torch._dynamo.reset()
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            some = gradients()
        assert (some[2] is None) == frozen
        for a, b in zip(some, full, strict=True):
            assert a is None or torch.equal(a, b)


def test_opcheck():
    ops = torch.ops.sonicmoe
    layer = make_layer(bias=True)
    x, router_w, w1, b1, w2, b2 = (t.detach() for t in layer.leaves().values())
    options = f"top_k={K} {OVER_SOFTMAX}"
    o, logits, _, preact, routing = ops.layer_forward(x, router_w, w1, b1, w2, b2, options)
    backward = (o, logits, x, router_w, w1, w2, b2, logits, preact, routing, options)
    for main_grads in ((None, None), (torch.zeros(w1.shape), torch.zeros(w2.shape))):
        none = (*backward, *main_grads, None, False, False, False, False)
        assert [t.shape[0] for t in ops.layer_backward(*none)] == [0, 0, 0, 6, 0, 6, 0, 0, 0, 0]
        torch.library.opcheck(ops.layer_backward.default, none)
        assert not any(t.any() for t in main_grads if t is not None)
