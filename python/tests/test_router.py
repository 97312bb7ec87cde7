"""Every option of a router against plain PyTorch, and the presets against the models' own code."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_as_good, make_layer

import sonicmoe
from sonicmoe import (
    PRESETS,
    RouterConfig,
    _autocast,
    _layer,
    functional,
    reference,
    reference_routing,
)
from sonicmoe.reference_routing import project, score_ids
from sonicmoe.router import Routing

T, D, N, E, K = 48, 24, 16, 16, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCORED = {"order": "score_then_select"}
SIGMOID = {"score": "sigmoid", **SCORED}
OPTIONS = {
    "default": {},
    "softmax": SCORED,
    "softmax_renormalized": SCORED | {"renormalize": True},
    "softmax_eps": SCORED | {"renormalize": True, "eps": 0.25},
    "softmax_scale": SCORED | {"scale": 2.5},
    "over_top_k_scaled": {"scale": 0.5, "expert_scale": True},
    "sigmoid": SIGMOID,
    "sigmoid_selects_logits": {"score": "sigmoid"},
    "sigmoid_renormalized": SIGMOID | {"renormalize": True},
    "sigmoid_eps": SIGMOID | {"renormalize": True, "eps": 0.5, "scale": 1.5},
    "sqrt_softplus": {"score": "sqrt_softplus", **SCORED},
    "sqrt_softplus_selects_logits": {"score": "sqrt_softplus", "renormalize": True},
    "logit_bias": {"logit_bias": True},
    "selection_bias": {"selection_bias": True},
    "selection_bias_sigmoid": SIGMOID | {"selection_bias": True},
    "expert_scale": SCORED | {"expert_scale": True, "renormalize": True},
    "expert_scale_softmax": SCORED | {"expert_scale": True, "logit_bias": True},
    "groups_largest": {"groups": 4, "kept_groups": 2},
    "groups_sum": SIGMOID | {"groups": 4, "kept_groups": 1, "group_score": "sum_of_two"},
    "f32": {"logits": "f32"},
    "f32_everything": SIGMOID
    | {
        "logits": "f32",
        "logit_bias": True,
        "selection_bias": True,
        "expert_scale": True,
        "renormalize": True,
        "eps": 1e-20,
        "groups": 8,
        "kept_groups": 4,
        "group_score": "sum_of_two",
    },
    "f32_softmax": SCORED | {"logits": "f32"},
}
OPTIONS |= {name: dataclasses.asdict(preset) for name, preset in PRESETS.items()}


def config_of(name):
    return RouterConfig(**OPTIONS[name])


def tensors_of(config):
    """The router's tensors of a config, by name."""
    made = {
        "logit_bias": torch.randn(E),
        "selection_bias": torch.randn(E) * 0.3,
        "expert_scale": torch.rand(E) + 0.5,
    }
    return {name: t for name, t in made.items() if getattr(config, name)}


def leaves_of(layer, tensors):
    leaves = layer.leaves()
    trained = {k: v.detach().requires_grad_() for k, v in tensors.items() if k != "selection_bias"}
    return leaves, trained


def run(layer, config, tensors):
    leaves, trained = leaves_of(layer, tensors)
    o, logits, counts = functional.moe_TC_softmax_topk_layer(
        *map(leaves.get, ("x", "router_w", "w1", "b1", "w2", "b2")), K, router=config,
        **tensors | trained,
    )  # fmt: skip
    return o, logits, counts, leaves | trained


def run_plain(layer, ids, config, tensors):
    """The same of experts that are chosen already, by autograd."""
    leaves, trained = leaves_of(layer, tensors)
    x, router_w = leaves["x"], leaves["router_w"]
    logits = project(x, router_w, trained.get("logit_bias"), config.logits == "f32")
    routing = Routing(config, expert_scale=trained.get("expert_scale"))
    weights = map(leaves.get, ("w1", "b1", "w2", "b2"))
    o, counts = reference.logits_layer(x, logits, ids, K, routing, *weights)
    return o, logits, counts, leaves | trained


def exact(tensors):
    return {name: t.double() for name, t in tensors.items()}


def compare(layer, config, tensors):
    """Output, logits and every gradient, of losses on both outputs."""
    o, logits, counts, leaves = run(layer, config, tensors)
    given = {k: tensors.get(k) for k in ("selection_bias", "expert_scale")}
    _, ids = functional.route(logits.detach(), K, router=config, **given)
    plain = run_plain(layer, ids, config, tensors)
    true = run_plain(layer.to(torch.float64), ids, config, exact(tensors))
    assert torch.equal(counts, plain[2]) and logits.dtype == plain[1].dtype
    do = torch.randn(o.shape).to(o.dtype)
    dlogits = torch.randn(logits.shape).to(logits.dtype)
    for outputs in ((o, logits), plain[:2], true[:2]):
        torch.autograd.backward(outputs, [do.to(outputs[0]), dlogits.to(outputs[1])])
    assert_as_good("o", o, plain[0], true[0])
    assert_as_good("logits", logits, plain[1], true[1])
    for name, leaf in leaves.items():
        assert_as_good(f"d{name}", leaf.grad, plain[3][name].grad, true[3][name].grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_match_plain_pytorch(name, dtype):
    config = config_of(name)
    layer = make_layer(bias=True, dtype=DTYPES[dtype], tokens=T, hidden=D, experts=E)
    compare(layer, config, tensors_of(config))


@pytest.mark.parametrize("name", OPTIONS)
def test_an_fp32_router_beside_bf16_experts(name):
    config = config_of(name)
    layer = make_layer(bias=True, dtype=torch.bfloat16, tokens=T, hidden=D, experts=E)
    layer.router_w = torch.randn(E, D) * D**-0.5
    tensors = tensors_of(config)
    _, logits, _, leaves = run(layer, config, tensors)
    assert logits.dtype == torch.float32 and leaves["router_w"].dtype == torch.float32
    compare(layer, config, tensors)


@pytest.mark.parametrize("f32", [False, True])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_logits_of_the_caller(name, with_ids, f32):
    """Their bias is in them. With ids nothing is chosen."""
    config = config_of(name)
    tensors = tensors_of(config)
    tensors.pop("logit_bias", None)
    chosen_by = dict(tensors)
    layer = make_layer(bias=True, dtype=torch.bfloat16, tokens=T, hidden=D, experts=E)
    z = torch.randn(T, E).to(torch.float32 if f32 else torch.bfloat16)
    _, ids = functional.route(z, K, router=config, **chosen_by)
    if with_ids:
        ids = ids.masked_fill(torch.rand(T, K) < 0.2, -1)
        tensors.pop("selection_bias", None)

    def call(layer, tensors, function, z, **named):
        leaves, trained = leaves_of(layer, tensors)
        leaf = z.clone().requires_grad_()
        o, counts = function(
            leaves["x"], leaf, K, leaves["w1"], leaves["w2"], leaves["b1"], leaves["b2"],
            router=config, **tensors | trained, **named,
        )  # fmt: skip
        return o, counts, leaves | trained | {"logits": leaf}

    ours = call(
        layer, tensors, sonicmoe.experts_from_logits, z, **({"ids": ids} if with_ids else {})
    )
    plain = call(layer, tensors, reference.experts_from_logits, z, ids=ids)
    wide = layer.to(torch.float64)
    true = call(wide, exact(tensors), reference.experts_from_logits, z.double(), ids=ids)
    assert torch.equal(ours[1], plain[1])
    do = torch.randn(T, D).bfloat16()
    for o, _, _ in (ours, plain, true):
        o.backward(do.to(o.dtype))
    assert ours[2]["logits"].grad.dtype == z.dtype
    for name in ours[2].keys() - {"router_w"}:
        gradients = (leaves[name].grad for _, _, leaves in (ours, plain, true))
        assert_as_good(f"d{name}", *gradients)


@pytest.mark.parametrize("name", OPTIONS)
def test_choices_with_ties(name):
    """Few distinct logits and biases: most tokens tie somewhere, for experts and for groups."""
    config = config_of(name)
    z = torch.randint(0, 4, (300, E)).float()
    given = {}
    if config.selection_bias:
        given["selection_bias"] = torch.randint(0, 2, (E,)) * 0.25
    if config.expert_scale:
        given["expert_scale"] = torch.rand(E)
    weights, ids = functional.route(z, K, router=config, **given)
    plain_weights, plain_ids = reference.route(z, K, router=config, **given)
    assert torch.equal(ids, plain_ids) and ids.dtype == torch.int32
    torch.testing.assert_close(weights, plain_weights)


def test_groups_by_hand():
    z = torch.tensor([[4.0, 0.0, 3.0, 3.0, 1.0, 1.0, 3.0, 3.0]])
    options = {"groups": 4, "kept_groups": 1}
    assert functional.route(z, 2, router=RouterConfig(**options))[1].tolist() == [[0, 1]]
    options |= {"group_score": "sum_of_two"}  # 6 twice: the lower group
    assert functional.route(z, 2, router=RouterConfig(**options))[1].tolist() == [[2, 3]]
    options |= {"kept_groups": 2}
    assert functional.route(z, 4, router=RouterConfig(**options))[1].tolist() == [[2, 3, 6, 7]]


@pytest.mark.parametrize("order", ["select_then_score", "score_then_select"])
@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("eps", [0.0, 1e-20])
def test_logits_of_minus_infinity(eps, score, order):
    """Scores of 0: legal, and with gradients of 0, though all of a token's may be so."""
    config = RouterConfig(score=score, order=order, renormalize=True, eps=eps)
    z = torch.randn(T, E)
    z[:, ::2] = -torch.inf
    z[3] = -torch.inf
    z[5, 2:] = -torch.inf
    layer = make_layer(tokens=T, hidden=D, experts=E)
    gradients = []
    for function in (sonicmoe.experts_from_logits, reference.experts_from_logits):
        leaf = z.clone().requires_grad_()
        o, _ = function(layer.x, leaf, K, layer.w1, layer.w2, router=config)
        assert o[3].eq(0).all() and o.isfinite().all()
        (o * torch.linspace(-1, 1, D)).sum().backward()
        gradients.append(leaf.grad)
    assert not gradients[0][z == -torch.inf].any()
    torch.testing.assert_close(*gradients)
    weights, _ = functional.route(z, K, router=config)
    assert not weights[3].any() and weights[5, 0] == 1


# Models.


def by_softmax(z, renormalize=True):
    weights, ids = F.softmax(z, dim=1, dtype=torch.float).topk(K, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights), ids


def by_sigmoid_in_groups(z, bias):
    """DeepseekV3TopkRouter.forward and get_topk_indices."""
    scores = z.sigmoid()
    for_choice = scores.view(-1, E) + bias.unsqueeze(0)
    groups = for_choice.view(-1, 8, E // 8).topk(2, dim=-1)[0].sum(dim=-1)
    kept = torch.topk(groups, k=4, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, kept, 1)
    mask = mask.unsqueeze(-1).expand(-1, 8, E // 8).reshape(-1, E)
    ids = torch.topk(for_choice.masked_fill(~mask.bool(), 0.0), k=K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 2.5, ids


def by_sqrt_softplus(z, bias):
    """DeepSeek-V4's Gate: original scores are gathered where biased ones choose."""
    scores = F.softplus(z).sqrt()
    ids = (scores + bias).topk(K, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 1.5, ids


def by_gpt_oss(z):
    """GptOssTopKRouter, behind its F.linear."""
    values, ids = torch.topk(z, K, dim=-1)
    return F.softmax(values, dim=1, dtype=values.dtype), ids


MODELS = {
    "qwen3": lambda z, tensors: by_softmax(z),
    "mixtral": lambda z, tensors: by_softmax(z),
    "olmoe": lambda z, tensors: by_softmax(z, renormalize=False),
    "deepseek_v3": lambda z, tensors: by_sigmoid_in_groups(z, tensors["selection_bias"]),
    "deepseek_v4": lambda z, tensors: by_sqrt_softplus(z, tensors["selection_bias"]),
    "gpt_oss": lambda z, tensors: by_gpt_oss(z),
    "gemma4": lambda z, tensors: (
        (w := by_softmax(z))[0] * tensors["expert_scale"][w[1]],
        w[1],
    ),
}


def dense(weights, ids):
    return torch.zeros(len(ids), E).scatter(1, ids.long(), weights)


def test_every_preset_has_its_model():
    assert MODELS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_presets_are_the_models(name):
    config = RouterConfig.preset(name)
    layer = make_layer(tokens=T, hidden=D, experts=E)
    tensors = tensors_of(config)
    if "selection_bias" in tensors:  # DeepSeek's masked experts have 0: keep the others above
        tensors["selection_bias"] = torch.rand(E) * 0.1
    o, logits, counts, _ = run(layer, config, tensors)
    bias = tensors.get("logit_bias")
    torch.testing.assert_close(logits, F.linear(layer.x, layer.router_w, bias))
    weights, ids = MODELS[name](logits.detach(), tensors)
    given = {k: tensors.get(k) for k in ("selection_bias", "expert_scale")}
    ours = functional.route(logits.detach(), K, router=name, **given)
    torch.testing.assert_close(dense(*ours), dense(weights, ids))
    tokens = torch.arange(T).repeat_interleave(K)
    expected, expected_counts = reference.routed_layer(
        layer.x, weights.flatten(), tokens, ids.flatten(), layer.w1, None, layer.w2, None
    )
    torch.testing.assert_close(o, expected)
    assert torch.equal(counts, expected_counts)


# The function that routes.


@pytest.mark.parametrize("name", OPTIONS)
def test_route_is_what_the_layer_does(name):
    config = config_of(name)
    layer, tensors = make_layer(tokens=T, hidden=D, experts=E), tensors_of(config)
    o, logits, counts, _ = run(layer, config, tensors)
    given = {k: tensors.get(k) for k in ("selection_bias", "expert_scale")}
    weights, ids = functional.route(logits.detach(), K, router=config, **given)
    same, same_counts = sonicmoe.experts(layer.x, ids, weights, layer.w1, layer.w2)
    assert torch.equal(o, same) and torch.equal(counts, same_counts)


@pytest.mark.parametrize("name", OPTIONS)
def test_route_has_gradients(name):
    config = config_of(name)
    tensors = tensors_of(config)
    bias, scale = tensors.get("selection_bias"), tensors.get("expert_scale")
    z = torch.randn(T, E, requires_grad=True)
    scale = None if scale is None else scale.requires_grad_()
    weights, ids = functional.route(z, K, router=config, selection_bias=bias, expert_scale=scale)
    with torch.no_grad():
        alone, _ = functional.route(z, K, router=config, selection_bias=bias, expert_scale=scale)
    assert torch.equal(weights, alone) and not alone.requires_grad
    leaves = [z] if scale is None else [z, scale]
    wide = z if config.score == "softmax" else z.double()
    expected = score_ids(wide, ids, router=config, expert_scale=scale).float()
    dw = torch.randn(T, K)
    for a, b in zip(
        torch.autograd.grad(weights, leaves, dw),
        torch.autograd.grad(expected, leaves, dw),
        strict=True,
    ):
        assert torch.equal(a, b) and a.any()


@pytest.mark.parametrize("renormalize", [False, True])
def test_route_has_tangents(renormalize):
    config = RouterConfig("sigmoid", "score_then_select", renormalize=renormalize)
    logits, tangent = torch.randn(3, 8), torch.randn(3, 8)

    def weights(z):
        return sonicmoe.route(z, 2, router=config)[0]

    forward = torch.func.jvp(weights, (logits,), (tangent,))[1]
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = weights(torch.autograd.forward_ad.make_dual(logits, tangent))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(dual).tangent, forward)
    rows = torch.autograd.functional.jacobian(weights, logits)
    torch.testing.assert_close(forward, torch.einsum("tkse,se->tk", rows, tangent))


@pytest.mark.parametrize(("shift", "rtol"), [(0.0, 1e-5), (-88.0, 1e-5), (-100.0, 0.01)])
def test_small_scores_have_finite_gradients(shift, rtol):
    """Their inverse and the square of their sum are beyond fp32. At -99 the layer's softplus is 72
    times the least fp32 number: rounded to it, p is off by up to 0.35 %, and so are the sums."""
    config = dataclasses.replace(PRESETS["deepseek_v4"], selection_bias=False)
    logits = torch.tensor([[0.0, 0.5, 1.0, 1.5]]) + shift
    experts = torch.randn(4, 16, 8), torch.randn(4, 8, 8)
    x, made = torch.randn(1, 8), []
    for through in ("route", "layer"):
        z = logits.clone().requires_grad_()
        if through == "route":
            weights, ids = sonicmoe.route(z, 2, router=config)
            o = sonicmoe.experts(x, ids, weights, *experts)
        else:
            o = sonicmoe.experts_from_logits(x, z, 2, *experts, router=config)
        made.append(torch.autograd.grad(o[0].sum(), z)[0])
    assert made[1].any()
    torch.testing.assert_close(*made, rtol=rtol, atol=0)


def test_the_selection_bias_has_no_gradient():
    layer = make_layer(tokens=T, hidden=D, experts=E)
    bias = torch.randn(E, requires_grad=True)
    config = RouterConfig(score="sigmoid", selection_bias=True)
    o, _, _ = functional.moe_TC_softmax_topk_layer(
        layer.x.requires_grad_(), layer.router_w, layer.w1, None, layer.w2, None, K, router=config,
        selection_bias=bias,
    )  # fmt: skip
    o.sum().backward()
    assert bias.grad is None and layer.x.grad.any()


# Operators.


@pytest.mark.parametrize("name", ["f32_everything", "softmax_scale", "logit_bias", "olmoe"])
def test_opcheck(name):
    ops = torch.ops.sonicmoe
    config = config_of(name)
    tensors = tensors_of(config)
    layer = make_layer(dtype=torch.bfloat16, tokens=T, hidden=D, experts=E)
    layer.router_w = layer.router_w.float()
    given = [tensors.get(k) for k in ("logit_bias", "selection_bias", "expert_scale")]
    text = f"top_k={K} " + Routing(config, *given).text(True, True)
    x, router_w, w1, w2 = layer.x, layer.router_w, layer.w1, layer.w2
    options = dict(zip(("logit_bias", "selection_bias", "expert_scale"), given, strict=True))
    args = x, router_w, w1, None, w2, None, text
    torch.library.opcheck(ops.layer_forward.default, args, options)
    o, logits, _, preact, routing = ops.layer_forward(*args, **options)
    args = o, logits, x, router_w, w1, w2, None, logits, preact, routing, text
    options = {"expert_scale": given[2]}
    for wants in (True, False):
        torch.library.opcheck(
            ops.layer_backward.default, args, options | {"wants_dlogit_bias": wants}
        )
    text = f"top_k={K} " + Routing(config, None, *given[1:]).text(True, True)
    options = {"selection_bias": given[1], "expert_scale": given[2]}
    args = x, logits, None, w1, None, w2, None, text
    torch.library.opcheck(ops.logits_forward.default, args, options)
    o, _, preact, routing = ops.logits_forward(*args, **options)
    args = o, x, logits, False, w1, w2, None, preact, routing, text
    torch.library.opcheck(ops.logits_backward.default, args, {"expert_scale": given[2]})
    torch.library.opcheck(ops.top_k.default, (logits, text), options)


# Autocast.


def test_autocast_and_fp32_logits():
    layer = make_layer(tokens=T, hidden=D, experts=E)
    args = layer.x, layer.router_w, layer.w1, None, layer.w2, None, K
    call = functional.moe_TC_softmax_topk_layer
    with torch.autocast("cpu", torch.bfloat16):
        o, logits, _ = call(*args)
        assert o.dtype == logits.dtype == torch.bfloat16  # the weight is cast as all are
        o, logits, _ = call(*args, router=RouterConfig(logits="f32"))
    low = layer.to(torch.bfloat16)
    expected = call(
        low.x, layer.router_w, low.w1, None, low.w2, None, K, router=RouterConfig(logits="f32")
    )
    assert logits.dtype == torch.float32 and o.dtype == torch.bfloat16
    assert torch.equal(logits, expected[1]) and torch.equal(o, expected[0])


def test_autocast_to_fp32_makes_the_logits_fp32(monkeypatch):
    """CUDA has it; on the CPU PyTorch turns it off."""
    layer = make_layer(dtype=torch.bfloat16, tokens=T, hidden=D, experts=E)
    args = layer.x, layer.router_w, layer.w1, None, layer.w2, None, K
    expected = functional.moe_TC_softmax_topk_layer(*args, router=RouterConfig(logits="f32"))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: True)
        for dtype in (torch.float32, torch.bfloat16):
            patch.setattr(torch, "get_autocast_dtype", lambda device, dtype=dtype: dtype)
            assert _autocast.to_fp32(layer.x) == (dtype == torch.float32)
    assert not _autocast.to_fp32(layer.x)
    # PyTorch's own functions stay: torch.autocast would restore what they say.
    monkeypatch.setattr(_layer, "autocasts", lambda x: True)
    for module in (_layer, reference_routing):
        monkeypatch.setattr(module, "to_fp32", lambda x: True)
    for got in (
        functional.moe_TC_softmax_topk_layer(*args),
        reference.topk_layer(*args[:2], K, Routing(RouterConfig()), *args[2:6]),
    ):
        assert got[0].dtype == torch.bfloat16 and got[1].dtype == torch.float32
        torch.testing.assert_close(got[1], expected[1])


# What this build has.


def test_information():
    devices, kernels = sonicmoe.devices(), sonicmoe.kernels()
    assert devices[0] == "cpu"
    assert ("top_k", "cpu.top_k", "cpu") in kernels
    assert sonicmoe.has_cuda() == any(device == "cuda" for _, _, device in kernels)
    assert all(device.startswith(("cpu", "cuda:")) for device in devices)
    if not sonicmoe.has_cuda():
        assert devices == ["cpu"]
