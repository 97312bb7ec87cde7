"""A small MoE of torchtitan, plain PyTorch in fp64 beside it, and comparisons."""

import sys
import types
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import torchtitan
from torch import nn
from torchtitan.models.common.config_utils import make_routed_experts_config
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter

# A whole model of torchtitan 0.3 needs a later torch than its MoE does: gpt-oss's experts alone.
_package = types.ModuleType("torchtitan.models.gpt_oss")
_package.__path__ = [str(Path(torchtitan.__file__).parent / "models" / "gpt_oss")]
sys.modules.setdefault("torchtitan.models.gpt_oss", _package)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402

B, L, D, N, E, K = 2, 24, 32, 40, 8, 2
INIT = partial(nn.init.normal_, std=0.2)
KINDS = ["swiglu", "gpt_oss"]


def moe_config(kind="swiglu", router=None, **changes):
    names = ("w1_EFD", "w2_EDF", "w3_EFD")
    if kind == "gpt_oss":
        names = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
    routed = make_routed_experts_config(
        dim=D, hidden_dim=N, num_experts=E, top_k=K, comm_backend="standard",
        param_init=dict.fromkeys(names, INIT),
    )  # fmt: skip
    if kind == "gpt_oss":
        routed.inner_experts = GptOssGroupedExperts.Config(
            dim=D, hidden_dim=N, num_experts=E, swiglu_limit=1.5,
            param_init=routed.inner_experts.param_init,
        )  # fmt: skip
    for name, value in changes.items():
        setattr(routed, name, value)
    gate = Linear.Config(in_features=D, out_features=E, param_init={"weight": INIT})
    return MoE.Config(
        num_experts=E,
        routed_experts=routed,
        router=TokenChoiceTopKRouter.Config(num_experts=E, gate=gate, top_k=K, **(router or {})),
    )


def built(config):
    """A module with the same weights each time."""
    moe = config.build()
    torch.manual_seed(1)
    moe.init_states()
    if config.routed_experts.inner_experts.__class__ is GptOssGroupedExperts.Config:
        # These return bf16 beside an fp32 x, which torchtitan's combine refuses.
        experts = moe.routed_experts.inner_experts
        experts.register_forward_hook(lambda _, inputs, out: out.type_as(inputs[0]))
    return moe


def in_fp64(moe, x):
    """The routed experts by plain PyTorch, from the router's own choice."""
    shape = x.shape
    scores, ids, _ = moe.router(x, moe.expert_bias_E)
    experts, x = moe.routed_experts.inner_experts, x.double().flatten(0, 1)
    weights = {name: p.bfloat16().double() for name, p in experts.named_parameters()}
    out = torch.zeros_like(x)
    scores, ids = scores.double().flatten(0, 1), ids.flatten(0, 1)
    x = x.bfloat16().double()
    for e in range(E):
        w = {name: p[e] for name, p in weights.items()}
        if "w1_EFD" in w:
            a = F.silu(x @ w["w1_EFD"].T) * (x @ w["w3_EFD"].T)
            y = a @ w["w2_EDF"].T
        else:
            h = x @ w["mlp1_weight_EGD"].T + w["mlp1_bias_EG"]
            g, u = h[:, ::2].clamp(max=1.5), h[:, 1::2].clamp(-1.5, 1.5)
            y = g * torch.sigmoid(1.702 * g) * (u + 1) @ w["mlp2_weight_EDF"].T + w["mlp2_bias_ED"]
        out = out + (scores * (ids == e)).sum(1, keepdim=True) * y
    return out.view(*shape)


WEIGHTS = torch.randn(B, L, D, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def gradients(run, moe, x, weights=WEIGHTS):
    """The output and every gradient, by name."""
    moe.zero_grad()
    x = x.clone().requires_grad_()
    out = run(moe, x)
    (out.double() * weights[: out.shape[0]]).sum().backward()
    made = {"out": out.detach(), "x": x.grad}
    return made | {name: p.grad for name, p in moe.named_parameters()}


def expect_twice_as_near(mine, stock, exact, limit=0.03):
    """No tensor is farther from fp64 than twice torchtitan's own, which is within `limit`."""
    for name, truth in exact.items():
        error, of_stock = ((made[name].double() - truth).norm() for made in (mine, stock))
        assert error <= 2 * of_stock + 1e-12 * truth.norm(), f"{name}: {error}, {of_stock}"
        assert of_stock < limit * truth.norm(), f"{name}: {of_stock} of {truth.norm()}"
