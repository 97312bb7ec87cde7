"""recompute="preact": the same bits, and no H among what autograd keeps."""

import pytest
import torch
from helpers import ACTIVATION_LAYOUTS, assert_same, at_odd_address, kept_bytes, make_layer
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sonicmoe import (
    ActivationType,
    KernelBackendMoE,
    MoE,
    experts,
    experts_from_logits,
    grouped_experts,
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
)

T, K, E, D, N = 48, 3, 6, 24, 16
R = T * K
IDS = torch.arange(R).view(T, K) % E
COUNTS = torch.full((E,), R // E)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def topk(t, up, **options):
    args = t["x"], t["router_w"], t["w1"], t["b1"], t["w2"], t["b2"], K
    return moe_TC_softmax_topk_layer(*args, is_softmax_over_topk=False, **up, **options)


def lists(t, up, **options):
    tokens = torch.arange(T, device=IDS.device).repeat_interleave(K)
    scores = t["logits"].float().softmax(1).gather(1, IDS).flatten()
    of_experts = t["w1"], t["b1"], t["w2"], t["b2"], E
    kind = options.pop("activation_type")
    return moe_general_routing_inputs(
        t["x"], scores, tokens, IDS.flatten(), *of_experts, 0, kind, **up, **options
    )


def weighted(t, up, **options):
    weights = t["logits"].softmax(1).gather(1, IDS)
    kind = options.pop("activation_type")
    of_experts = t["w1"], t["w2"], t["b1"], t["b2"]
    return experts(t["x"], IDS, weights, *of_experts, activation=kind, **up, **options)


def scored(t, up, ids=None, **options):
    kind = options.pop("activation_type")
    of_experts = t["w1"], t["w2"], t["b1"], t["b2"]
    return experts_from_logits(
        t["x"], t["logits"], K, *of_experts, ids=ids, softmax_over_topk=False, activation=kind,
        **up, **options,
    )  # fmt: skip


def replayed(t, up, **options):
    return scored(t, up, ids=IDS, **options)


def rows(t, up, **options):
    kind = options.pop("activation_type")
    scores = t["logits"].float().flatten()[:R]
    of_experts = t["w1"], t["w2"], scores, t["b1"], t["b2"]
    return (grouped_experts(t["rows"], COUNTS, *of_experts, activation=kind, **up, **options),)


CALLS = {f.__name__: f for f in (topk, lists, weighted, scored, replayed, rows)}


def data(activation=ActivationType.SWIGLU, layout="interleaved", bias=True, dtype=torch.float32):
    layer = make_layer(activation, bias, dtype, T, D, N, E, layout)
    leaves = {"b1": None, "b2": None} | layer.leaves()
    leaves["logits"] = torch.randn(T, E).to(dtype).requires_grad_()
    leaves["rows"] = torch.randn(R, D).to(dtype).requires_grad_()
    return leaves


def call_of(name, leaves, activation=ActivationType.SWIGLU, layout="interleaved", **options):
    up = {key: leaves[key] for key in ("w1_up", "b1_up") if key in leaves}
    return CALLS[name](leaves, up, activation_type=activation, layout=layout, **options)


def results_of(outputs, leaves):
    """Outputs and gradients by name; what is not reached has none."""
    floats = [o for o in outputs if o.is_floating_point()]
    names = [name for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad]
    douts = [torch.linspace(-1, 1, o.numel()).view(o.shape).to(o) for o in floats]
    wanted = [leaves[name] for name in names]
    gradients = torch.autograd.grad(floats, wanted, douts, allow_unused=True)
    made = {name: g for name, g in zip(names, gradients, strict=True) if g is not None}
    return made | {f"output {i}": o.detach() for i, o in enumerate(outputs)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation, layout", ACTIVATION_LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_same_bits(name, activation, layout, bias, dtype):
    leaves = data(activation, layout, bias, DTYPES[dtype])

    def results(recompute):
        return results_of(call_of(name, leaves, activation, layout, recompute=recompute), leaves)

    kept, again = results("none"), results("preact")
    assert "w1" in kept and ("b1" in kept) == bias
    assert_same(again, kept)


@pytest.mark.parametrize("layout", ["interleaved", "separate"])
@pytest.mark.parametrize("name", CALLS)
def test_saved_tensors_hold_no_preactivation(name, layout):
    leaves = data(layout=layout)
    parameters = [leaf for leaf in leaves.values() if leaf is not None]
    kept, again = (
        kept_bytes(lambda r=r: call_of(name, leaves, layout=layout, recompute=r), parameters)[0]
        for r in ("none", "preact")
    )
    preact = 4 * R * 2 * N
    kept.remove(preact)
    assert [size for size in again if size > 0] == kept
    assert preact not in again


@pytest.mark.parametrize("backend", [KernelBackendMoE.sonicmoe, KernelBackendMoE.torch])
@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_module(routing, backend):
    def results(recompute):
        torch.manual_seed(1)
        options = {"routing": routing, "tile": 4, "recompute": recompute}
        moe = MoE(E, K, D, N, "swiglu", True, 0.3, **options)
        assert f"recompute={recompute!r}" in repr(moe)
        x = torch.randn(2, T // 2, D, requires_grad=True)
        leaves = {"x": x, **dict(moe.named_parameters())}
        return results_of(moe(x, backend), leaves)

    assert_same(results("preact"), results("none"))


@pytest.mark.parametrize("name", CALLS)
def test_compiled(name):
    torch._dynamo.reset()
    leaves = data()
    kept = results_of(call_of(name, leaves), leaves)
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True)
    options = {"activation_type": ActivationType.SWIGLU, "recompute": "preact"}
    assert_same(results_of(compiled(leaves, {}, **options), leaves), kept)


def test_checkpointed_twice_and_frozen():
    leaves = data()
    kept = results_of(call_of("topk", leaves), leaves)
    again = checkpoint(lambda: call_of("topk", leaves, recompute="preact"), use_reentrant=False)
    assert_same(results_of(again, leaves), kept)
    # A graph that is kept serves two backwards.
    outputs = call_of("topk", leaves, recompute="preact")
    for keeps in (True, False):
        outputs[0].sum().backward(retain_graph=keeps)
    twice = leaves["w1"].grad.clone()
    leaves["w1"].grad = None
    outputs = call_of("topk", leaves)
    for keeps in (True, False):
        outputs[0].sum().backward(retain_graph=keeps)
    assert torch.equal(twice, leaves["w1"].grad)
    # Frozen weights and biases.
    for frozen in ("w1", "w2", "b1"):
        leaves[frozen].requires_grad_(False)
    kept = results_of(call_of("topk", leaves), leaves)
    assert_same(results_of(call_of("topk", leaves, recompute="preact"), leaves), kept)


@pytest.mark.parametrize("name", CALLS)
def test_main_grads_and_odd_addresses(name):
    leaves = data()
    leaves["b1"] = at_odd_address(leaves["b1"].detach()).requires_grad_()

    def results(recompute):
        grads = {f"{w}_main_grad": torch.ones_like(leaves[w]) for w in ("w1", "w2")}
        made = results_of(call_of(name, leaves, recompute=recompute, **grads), leaves)
        return made | {key: grad.detach() for key, grad in grads.items()}

    kept = results("none")
    assert "w1" not in kept and not torch.equal(
        kept["w1_main_grad"], torch.ones_like(kept["w1_main_grad"])
    )
    assert_same(results("preact"), kept)


def test_inference():
    moe = MoE(E, K, D, N, "swiglu", True, 0.3, recompute="preact")
    x = torch.randn(T, D)
    with torch.no_grad():
        expected, _ = moe(x)
    kept, (o, _) = kept_bytes(lambda: moe(x, is_inference_mode=True), moe.parameters())
    assert not kept and torch.equal(o, expected)


def test_flops_count_the_second_up_projection():
    moe = MoE(E, K, D, N, "swiglu", False, 0.3, recompute="preact")
    x = torch.randn(T, D, requires_grad=True)
    forward = 6 * R * N * D + 2 * T * E * D
    with FlopCounterMode(display=False) as counter:
        o, _ = moe(x)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    assert counter.get_total_flops() == 2 * forward + 4 * R * N * D


def test_operators():
    ops = torch.ops.sonicmoe
    leaves = {name: leaf.detach() for name, leaf in data().items()}
    x, of_experts = leaves["x"], [leaves[name] for name in ("w1", "b1", "w2", "b2")]
    w1, b1, w2, b2 = of_experts
    weights = torch.rand(T, K)
    args = x, IDS.int(), weights, *of_experts, "recompute=preact"
    o, _, preact, routing = ops.ids_forward(*args)
    assert preact.shape == (R, 0)
    torch.library.opcheck(ops.ids_forward.default, args)
    backward = o, x, K, w1, w2, b2, preact, routing, "recompute=preact"
    torch.library.opcheck(ops.ids_backward.default, backward, {"b1": b1})
    with pytest.raises(ValueError, match="b1: got None, allowed: b1 and b2, or neither"):
        ops.ids_backward(*backward)
    with pytest.raises(ValueError, match=r"preact: got shape \(144, 32\), allowed: \(R, 0\)"):
        ops.ids_backward(*backward[:6], torch.zeros(R, 2 * N), *backward[7:], b1=b1)
    kept = *backward[:6], torch.zeros(R, 2 * N), routing, ""
    with pytest.raises(ValueError, match="b1: got a tensor, allowed: None, for recompute is none"):
        ops.ids_backward(*kept, b1=b1)
    with pytest.raises(ValueError, match="recompute: got 'x', allowed: none, preact"):
        ops.ids_forward(*args[:-1], "recompute=x")


@pytest.mark.parametrize("name", CALLS)
def test_refuses_other_values(name):
    leaves = data()
    with pytest.raises(ValueError, match="recompute: got 'all', allowed: 'none', 'preact'"):
        call_of(name, leaves, recompute="all")
    with pytest.raises(TypeError, match="recompute: got True, allowed: 'none', 'preact'"):
        call_of(name, leaves, recompute=True)


def test_module_refuses_other_values():
    with pytest.raises(ValueError, match="recompute: got 'h', allowed: 'none', 'preact'"):
        MoE(E, K, D, N, "swiglu", True, 0.3, recompute="h")
    with pytest.raises(TypeError, match="recompute: got None, allowed: 'none', 'preact'"):
        MoE(E, K, D, N, "swiglu", True, 0.3, recompute=None)
