"""Routers: what configs, functions and operators refuse, and the exact words that say so."""

import dataclasses
import re

import pytest
import torch
from helpers import make_layer

import sonicmoe
from sonicmoe import PRESETS, RouterConfig, functional

T, D, E, K = 48, 24, 16, 4


def test_operators_take_tensors_with_their_options():
    layer = make_layer(tokens=T, hidden=D, experts=E)
    args = layer.x, layer.router_w, layer.w1, None, layer.w2, None
    forward = torch.ops.sonicmoe.layer_forward
    for name in ("logit_bias", "selection_bias", "expert_scale"):
        with pytest.raises(ValueError, match=f"^{name}: got a tensor, allowed: None, for {name} i"):
            forward(*args, f"top_k={K}", **{name: torch.zeros(E)})
        text = f"top_k={K} {name}=true"
        with pytest.raises(ValueError, match=f"^{name}: got None, allowed: a tensor, for {name} i"):
            forward(*args, text)
        words = rf"^{name}: got shape \(3,\), allowed: \(E\) = \(16,\)"
        with pytest.raises(ValueError, match=words):
            forward(*args, text, **{name: torch.zeros(3)})
        with pytest.raises(ValueError, match=f"^{name}: got bfloat16, allowed: float32"):
            forward(*args, text, **{name: torch.zeros(E).bfloat16()})
    with pytest.raises(ValueError, match="^layer: got f32_router_w, allowed: options, for"):
        forward(*args, f"top_k={K} f32_router_w=true f32_logits=true")


REFUSED = [
    ({"score": "tanh"}, ValueError,
     "score: got 'tanh', allowed: 'softmax', 'sigmoid', 'sqrt_softplus'"),
    ({"score": 3}, TypeError, "score: got 3, allowed: 'softmax', 'sigmoid', 'sqrt_softplus'"),
    ({"order": "both"}, ValueError,
     "order: got 'both', allowed: 'select_then_score', 'score_then_select'"),
    ({"group_score": "mean"}, ValueError,
     "group_score: got 'mean', allowed: 'largest', 'sum_of_two'"),
    ({"logits": "bf16"}, ValueError, "logits: got 'bf16', allowed: 'input', 'f32'"),
    ({"renormalize": 1}, TypeError, "renormalize: got 1, allowed: True, False"),
    ({"logit_bias": torch.zeros(2)}, TypeError,
     "logit_bias: got tensor([0., 0.]), allowed: True, False"),
    ({"eps": 0.5}, ValueError,
     "eps: got 0.5, allowed: 0 unless renormalize divides by a sum (a softmax over the top-K adds "
     "up to 1)"),
    ({"eps": 0.5, "renormalize": True}, ValueError, "eps: got 0.5, allowed: 0 unless renormalize"),
    ({"eps": -1.0, "renormalize": True, "score": "sigmoid"}, ValueError,
     "eps: got -1.0, allowed: finite numbers from 0 on, as fp32 has them"),
    ({"eps": 1e-60, "renormalize": True, "score": "sigmoid"}, ValueError, "eps: got 1e-60, al"),
    ({"scale": 0}, ValueError, "scale: got 0, allowed: finite numbers above 0, as fp32 has them"),
    ({"scale": float("inf")}, ValueError, "scale: got inf, allowed: finite numbers above 0"),
    ({"scale": 10**400}, ValueError, "scale: got 1000"),
    ({"scale": 1e39}, ValueError, "scale: got 1e+39, allowed: finite numbers above 0"),
    ({"scale": "2"}, TypeError, "scale: got '2', allowed: finite numbers above 0"),
    ({"groups": 0}, ValueError, "groups: got 0, allowed: 1 to 1024"),
    ({"groups": 2.0}, TypeError, "groups: got 2.0, allowed: an int"),
    ({"groups": 4, "kept_groups": 5}, ValueError, "kept_groups: got 5, allowed: 1 to 4"),
]  # fmt: skip


@pytest.mark.parametrize("options, error, message", REFUSED)
def test_what_a_config_refuses(options, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        RouterConfig(**options)


def test_unknown_presets_are_refused_with_the_names():
    names = ", ".join(map(repr, PRESETS))
    words = re.escape(f"router: got 'gpt4', allowed: a RouterConfig, {names}")
    for call in (
        lambda: RouterConfig.preset("gpt4"),
        lambda: functional.route(torch.zeros(2, E), K, router="gpt4"),
    ):
        with pytest.raises(ValueError, match=f"^{words}$"):
            call()
    with pytest.raises(TypeError, match="^router: got 7, allowed: a RouterConfig, 'qwen3', "):
        RouterConfig.preset(7)
    with pytest.raises(TypeError):
        PRESETS["own"] = RouterConfig()


def test_configs_are_values():
    assert RouterConfig(scale=2) == RouterConfig(scale=2.0) != RouterConfig()
    assert hash(RouterConfig.preset("deepseek_v3")) == hash(PRESETS["deepseek_v3"])
    changed = dataclasses.replace(PRESETS["deepseek_v3"], scale=1.0, groups=1, kept_groups=1)
    assert changed == RouterConfig(
        "sigmoid", "score_then_select", True, 1e-20, selection_bias=True, group_score="sum_of_two"
    )
    assert RouterConfig(**dataclasses.asdict(changed)) == changed
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.scale = 2.0


def test_what_the_functions_refuse():
    layer = make_layer(tokens=T, hidden=D, experts=E)
    args = layer.x, layer.router_w, layer.w1, None, layer.w2, None, K
    call = functional.moe_TC_softmax_topk_layer
    bias, z = torch.zeros(E), torch.randn(T, E)
    weights = layer.w1, layer.w2
    for refused, message in (
        (lambda: call(*args, router="qwen3", is_softmax_over_topk=False),
         "is_softmax_over_topk: got False, allowed: True beside router="),
        (lambda: call(*args, router="qwen3", norm_topk_probs=True),
         "norm_topk_probs: got True, allowed: False beside router="),
        (lambda: call(*args, router="gpt_oss"),
         "logit_bias: got None, allowed: a tensor, for router.logit_bias is True"),
        (lambda: call(*args, expert_scale=bias),
         "expert_scale: got a tensor, allowed: None, for router.expert_scale is False"),
        (lambda: call(*args, router="gpt_oss", logit_bias=bias.to("meta")),
         "logit_bias: got a tensor on meta, allowed: cpu, where x is"),
        (lambda: sonicmoe.experts_from_logits(layer.x, z, K, *weights, router="deepseek_v3"),
         "selection_bias: got None, allowed: a tensor, for router.selection_bias is True"),
        (lambda: sonicmoe.experts_from_logits(
            layer.x, z, K, *weights, router="deepseek_v3", selection_bias=bias,
            ids=torch.zeros(T, K).int()),
         "selection_bias: got a tensor, allowed: None, for ids are given"),
        (lambda: functional.route(z, K, router=RouterConfig(groups=5)),
         "groups: got 5, allowed: divisors of experts (16)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            refused()
    with pytest.raises(TypeError, match="^is_softmax_over_topk: got 'no', allowed: True, False"):
        call(*args, is_softmax_over_topk="no")
    with pytest.raises(TypeError, match="^norm_topk_probs: got 1, allowed: True, False"):
        sonicmoe.experts_from_logits(layer.x, z, K, *weights, norm_topk_probs=1)
    with pytest.raises(TypeError, match="^logit_bias: got torch.bfloat16, allowed: torch.float32$"):
        call(*args, router="gpt_oss", logit_bias=bias.bfloat16())
    words = "^router_w: got torch.float16, allowed: torch.bfloat16, the dtype of x, or torch.floa"
    low = layer.to(torch.bfloat16)
    with pytest.raises(TypeError, match=words):
        call(low.x, low.router_w.half(), low.w1, None, low.w2, None, K)
    with pytest.raises(TypeError, match="^router_w: got torch.bfloat16, allowed: torch.float32, t"):
        call(layer.x, low.router_w, *args[2:])
