"""torchtitan's MoE with its experts replaced, beside its own."""

import copy
import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import snippets
import torch
import torch.nn.functional as F
import torchtitan
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.config_utils import make_routed_experts_config
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher, TorchAOTokenDispatcher
from torchtitan.protocols.module import Module

from sonicmoe import functional
from sonicmoe.integrations import torchtitan as ours

# Importing a model of torchtitan 0.3 needs a later torch than its MoE does: gpt-oss's experts alone.
_package = types.ModuleType("torchtitan.models.gpt_oss")
_package.__path__ = [str(Path(torchtitan.__file__).parent / "models" / "gpt_oss")]
sys.modules.setdefault("torchtitan.models.gpt_oss", _package)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402

B, L, D, N, E, K = 2, 24, 32, 40, 8, 2
INIT = partial(nn.init.normal_, std=0.2)
KINDS = ["swiglu", "gpt_oss"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@dataclass(kw_only=True, slots=True)
class ModelConfig(Module.Config):
    """A tree of configurations, as a trainer has."""

    layers: list


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


def pair(kind="swiglu", **changes):
    """torchtitan's own MoE and ours, with the same weights."""
    stock, config = moe_config(kind, **changes), moe_config(kind, **changes)
    assert ours.replace_experts(config) == 1
    built = stock.build(), config.build()
    for moe in built:
        torch.manual_seed(1)
        moe.init_states()
    # Its gpt-oss experts return bf16 beside an fp32 x, which its combine refuses.
    experts = built[0].routed_experts.inner_experts
    experts.register_forward_hook(lambda _, inputs, out: out.type_as(inputs[0]))
    return built


def in_fp64(moe, x):
    """The routed experts by plain PyTorch, from the router's own choice."""
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
    return out.view(B, L, D)


def gradients(run, moe, x):
    """The output and every gradient, by name."""
    moe.zero_grad()
    x = x.clone().requires_grad_()
    out = run(moe, x)
    (out.double() * WEIGHTS[: out.shape[0]]).sum().backward()
    made = {"out": out.detach(), "x": x.grad}
    return made | {name: p.grad for name, p in moe.named_parameters()}


WEIGHTS = torch.randn(B, L, D, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def expect_twice_as_near(mine, stock, exact):
    """No tensor is farther from fp64 than twice torchtitan's own."""
    for name, truth in exact.items():
        error, of_stock = ((made[name].double() - truth).norm() for made in (mine, stock))
        assert error <= 2 * of_stock + 1e-12 * truth.norm(), name
        assert of_stock < 0.03 * truth.norm(), name


def by_rows(routed):
    """Lets a dispatcher put the rows in order, as under expert parallelism."""
    routed.token_dispatcher.__class__ = type("Other", (type(routed.token_dispatcher),), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_beside_torchtitan(kind, rows, dtype, monkeypatch):
    stock, moe = pair(kind)
    if rows:
        by_rows(moe.routed_experts)
        monkeypatch.setattr(functional, "experts", None)
    else:
        monkeypatch.setattr(functional, "grouped_experts", None)
    x = torch.randn(B, L, D)
    for module in (stock, moe):
        module.to(dtype)
        module.expert_bias_E = torch.zeros(E)  # fp32, as in its own mixed precision
    x = x.to(dtype)
    double = lambda module, x: in_fp64(module, x)  # noqa: E731
    exact = gradients(double, copy.deepcopy(stock), x)
    mine = gradients(lambda m, x: m(x), moe, x)
    own = gradients(lambda m, x: m(x), stock, x)
    assert mine["out"].dtype == own["out"].dtype == dtype
    expect_twice_as_near(mine, own, exact)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps(kind, rows):
    losses = []
    for moe in pair(kind, router={"score_func": "softmax", "route_norm": True}):
        if rows:
            by_rows(moe.routed_experts)
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(moe.parameters(), 1e-2)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = (moe(torch.randn(B, L, D)) - torch.randn(B, L, D)).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][2] != pytest.approx(losses[0][0], rel=1e-3)
    assert losses[1] == pytest.approx(losses[0], rel=3e-3)


@pytest.mark.parametrize("counts", [[0, 9, 0, 3, 1, 0, 5, 0], [0] * 8, [0] * 7 + [18]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_idle_experts_and_rows_of_nobody(kind, dtype, counts):
    stock, moe = (m.routed_experts.inner_experts for m in pair(kind))
    rows = torch.randn(sum(counts) + 4, D)
    rows[sum(counts) :] = float("nan")  # a dispatcher's padding
    made = []
    for experts in (stock, moe):
        used = rows if experts is moe else rows[: sum(counts)]
        used = used.clone().requires_grad_()
        if experts is stock and not sum(counts):
            continue
        out = experts(used, torch.tensor(counts, dtype=dtype))
        (out * torch.ones(out.shape)).sum().backward()  # its products refuse an expanded gradient
        made.append((out, used.grad, *[p.grad for p in experts.parameters()]))
    mine = made[-1]
    assert not mine[0][sum(counts) :].any() and not mine[1][sum(counts) :].any()
    for i, p in enumerate(moe.parameters()):
        assert not p.grad[[e for e in range(E) if not counts[e]]].any()
    if sum(counts):
        for a, b in zip(mine, made[0], strict=True):
            assert (a[: len(b)] - b).norm() <= 0.05 * b.norm()  # theirs rounds before it clamps


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_to_one_graph(kind, rows):
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = True
    _, moe = pair(kind)
    if rows:
        by_rows(moe.routed_experts)
    x = torch.randn(B, L, D)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    eager = gradients(lambda m, x: m(x), moe, x)
    made = gradients(lambda m, x: compiled(x), moe, x)
    for name, wanted in eager.items():
        torch.testing.assert_close(made[name], wanted, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing(kind):
    _, moe = pair(kind)
    x = torch.randn(B, L, D)
    plain = gradients(lambda m, x: m(x), moe, x)
    again = gradients(lambda m, x: checkpoint(m, x, use_reentrant=False), moe, x)
    assert all(torch.equal(again[name], plain[name]) for name in plain)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_and_initialization(kind):
    stock, moe = pair(kind)
    theirs, mine = stock.state_dict(), moe.state_dict()
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(theirs[name], mine[name]) for name in theirs)
    x = torch.randn(B, L, D)
    before = moe(x)
    torch.manual_seed(5)
    stock.init_states()
    moe.load_state_dict(stock.state_dict())
    assert not torch.equal(moe(x), before)
    stock.load_state_dict(moe.state_dict())
    torch.testing.assert_close(moe(x), stock(x), rtol=0.03, atol=0.05)


def test_no_tokens():
    _, moe = pair()
    out = moe(torch.zeros(B, 0, D, requires_grad=True))
    assert out.shape == (B, 0, D)
    out.sum().backward()


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "tp"))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_dtensor_parameters(kind, mesh):
    """As tensor or expert parallelism has them."""
    _, moe = pair(kind)
    x = torch.randn(B, L, D)
    wanted = gradients(lambda m, x: m(x), moe, x)
    experts = moe.routed_experts.inner_experts
    for name, p in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(distribute_tensor(p.detach(), mesh["tp"], [Shard(0)])))
    made = gradients(lambda m, x: m(x), moe, x)
    for name, gradient in wanted.items():
        got = made[name]
        assert torch.equal(got.to_local() if hasattr(got, "to_local") else got, gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2(kind, mesh):
    stock, moe = pair(kind)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made = []
    for module in (stock, moe):
        fully_shard(module.routed_experts.inner_experts, mesh=mesh["fsdp"], mp_policy=policy)
        fully_shard(module, mesh=mesh["fsdp"], mp_policy=policy)
        out = module(torch.randn(B, L, D, generator=torch.Generator().manual_seed(3)))
        out.sum().backward()
        made.append([out, *[p.grad.full_tensor() for p in module.parameters()]])
    for theirs, mine in zip(*made, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())


def test_the_override_of_a_trainer():
    config = ModelConfig(layers=[moe_config(), moe_config()])
    entries = OverrideConfig(imports=["sonicmoe.integrations.torchtitan.experts"])
    lines = apply_overrides(entries, config)
    assert len(lines) == 2
    assert all(type(c.routed_experts) is ours.SonicRoutedExperts.Config for c in config.layers)
    assert isinstance(config.layers[0].build().routed_experts, RoutedExperts)
    assert ours.replace_experts(config) == 2  # nothing to do again


def test_other_dispatchers_keep_their_rules():
    dispatcher = TorchAOTokenDispatcher.Config(num_experts=E, top_k=K, pad_multiple=8)
    config = moe_config(token_dispatcher=dispatcher)
    ours.replace_experts(config)
    assert type(config.build().routed_experts.token_dispatcher) is TorchAOTokenDispatcher
    local = moe_config(token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K))
    ours.replace_experts(local)
    moe = local.build()
    moe.init_states()
    assert moe(torch.randn(B, L, D)).shape == (B, L, D)


def test_refusals():
    class Quantized(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    class QuantizedGptOss(GptOssGroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GptOssGroupedExperts.Config):
            pass

    for kind in (Quantized, QuantizedGptOss):
        config = moe_config(inner_experts=kind.Config(dim=D, hidden_dim=N, num_experts=E))
        before = config.routed_experts
        with pytest.raises(TypeError, match="^routed_experts.inner_experts: got .*Quantized"):
            ours.replace_experts(config)
        assert config.routed_experts is before
    odd = moe_config(inner_experts=GroupedExperts.Config(dim=D, hidden_dim=12, num_experts=E))
    with pytest.raises(ValueError, match="^intermediate: got 12, allowed: multiples of 8"):
        ours.replace_experts(odd)
    with pytest.raises(ValueError, match="^config: got Linear.Config, allowed: the configuration"):
        ours.replace_experts(Linear.Config(in_features=8, out_features=8))


def test_typechecking_is_refused(monkeypatch):
    _, moe = pair()
    monkeypatch.setattr(ours, "get_spmd_backend", lambda: "spmd_types")
    monkeypatch.setattr(ours.spmd, "is_type_checking", lambda: True)
    with pytest.raises(ValueError, match="^debug.spmd_typechecking: got True, allowed: False"):
        moe(torch.randn(B, L, D))


def test_the_documented_lines():
    (block,) = snippets.of_section("torchtitan")
    config = ModelConfig(layers=[moe_config()])
    exec(block, {"model_config": config})
    assert type(config.layers[0].routed_experts) is ours.SonicRoutedExperts.Config
