"""torchtitan's MoE with its experts replaced, beside its own."""

import copy
from dataclasses import dataclass

import pytest
import snippets
import torch
from small import (
    KINDS,
    B,
    D,
    E,
    GptOssGroupedExperts,
    K,
    L,
    N,
    built,
    expect_twice_as_near,
    gradients,
    in_fp64,
    moe_config,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher, TorchAOTokenDispatcher
from torchtitan.protocols.module import Module

from sonicmoe import functional
from sonicmoe.integrations import torchtitan as ours


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@dataclass(kw_only=True, slots=True)
class ModelConfig(Module.Config):
    """A tree of configurations, as a trainer has."""

    layers: list


def pair(kind="swiglu", **changes):
    """torchtitan's own MoE and ours, with the same weights."""
    stock, config = moe_config(kind, **changes), moe_config(kind, **changes)
    assert ours.replace_experts(config) == 1
    return built(stock), built(config)


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
    for p in moe.parameters():
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


def test_a_transport_by_name():
    config = ModelConfig(layers=[moe_config()])
    name = "sonicmoe.integrations.torchtitan.experts"
    apply_overrides(OverrideConfig(imports=[(name, {"transport": "gather"})]), config)
    (layer,) = config.layers
    assert layer.routed_experts.transport == "gather"
    ours.replace_experts(config, "all_to_all")
    assert layer.routed_experts.transport == "all_to_all"
    ours.replace_experts(config)  # says nothing about it
    assert layer.build().routed_experts.transport.name == "all_to_all"
    # Without expert parallelism there is nothing to carry.
    moe, alone = built(layer), pair()[1]
    x = torch.randn(B, L, D)
    assert torch.equal(moe(x), alone(x))


def test_a_transport_with_options():
    config = ModelConfig(layers=[moe_config()])
    name = "sonicmoe.integrations.torchtitan.experts"
    options = {"name": "gather", "max_tokens": 64, "peer_copies": True}
    apply_overrides(OverrideConfig(imports=[(name, {"transport": options})]), config)
    transport = config.layers[0].build().routed_experts.transport
    assert {key: getattr(transport, key) for key in options} == options


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
    with pytest.raises(ValueError, match="hidden_dim: got 12, allowed: multiples of 8"):
        ours.replace_experts(odd)
    with pytest.raises(ValueError, match="^transport: got 'ring', allowed: 'auto', 'gather'"):
        ours.replace_experts(moe_config(), "ring")
    with pytest.raises(ValueError, match="^transport: got 'peers', allowed: name, max_tokens, "):
        ours.replace_experts(moe_config(), {"name": "gather", "peers": True})
    padded = TorchAOTokenDispatcher.Config(num_experts=E, top_k=K, pad_multiple=8)
    with pytest.raises(TypeError, match="^routed_experts.token_dispatcher: got TorchAOTokenDisp"):
        ours.replace_experts(moe_config(token_dispatcher=padded), "gather")
    with pytest.raises(ValueError, match="^config: got Linear.Config, allowed: the configuration"):
        ours.replace_experts(Linear.Config(in_features=8, out_features=8))


def test_typechecking_is_refused(monkeypatch):
    _, moe = pair()
    monkeypatch.setattr(ours, "get_spmd_backend", lambda: "spmd_types")
    monkeypatch.setattr(ours.spmd, "is_type_checking", lambda: True)
    with pytest.raises(ValueError, match="^debug.spmd_typechecking: got True, allowed: False"):
        moe(torch.randn(B, L, D))


def test_the_documented_lines():
    first, second = snippets.of_section("torchtitan")
    config = ModelConfig(layers=[moe_config()])
    exec(first, {"model_config": config})
    assert type(config.layers[0].routed_experts) is ours.SonicRoutedExperts.Config
    assert config.layers[0].routed_experts.transport is None
    exec(first + second, {"model_config": config})
    assert config.layers[0].routed_experts.transport == "gather"
