"""Megatron's MoE layer with our experts, beside its own."""

import functools
import math
import types

import pytest
import snippets
import torch
import torch.nn.functional as F
from helpers import (
    B,
    D,
    E,
    K,
    N,
    S,
    gather,
    groups,
    hidden_states,
    make_config,
    make_layer,
    make_pair,
    own_state,
)  # fmt: skip
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)  # fmt: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.utils.checkpoint import checkpoint

from sonicmoe.integrations import megatron as ours


def run(layer, x, weights=None):
    """Output, and gradients of x, router and weights (E, ...)."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out, bias = layer(x)
    assert bias is None
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out.double() * weights).sum().backward()
    return {"out": out.detach(), "dx": x.grad, "router": layer.router.weight.grad} | expert_grads(
        layer
    )


def expert_grads(layer):
    made = {}
    for linear in ("linear_fc1", "linear_fc2"):
        for kind in ("weight", "bias"):
            if hasattr(layer.experts, "local_experts"):
                parts = [getattr(getattr(e, linear), kind) for e in layer.experts.local_experts]
            else:
                parts = getattr(layer.experts, linear).parameters_of(kind)
            if parts is None or isinstance(parts, list) and parts[0] is None:
                continue
            grads = [p.grad for p in parts] if isinstance(parts, list) else parts.grad
            if isinstance(grads, list):  # Megatron gives idle experts no gradient
                pairs = zip(parts, grads, strict=True)
                grads = torch.stack([torch.zeros_like(p) if g is None else g for p, g in pairs])
            made[f"{linear}.{kind}"] = grads
    return made


def expect_close(mine, stock, rtol):
    assert mine.keys() == stock.keys()
    for name, wanted in stock.items():
        error, size = (mine[name] - wanted).norm(), wanted.norm()
        assert error <= rtol * size, f"{name}: {error / size}"
        assert size > 0, name


def randomize(stock, mine):
    """Biases start at zero, which would tell nothing."""
    with torch.no_grad():
        for p in stock.experts.parameters():
            p.normal_(std=0.3)
    mine.load_state_dict(own_state(stock))


ACTIVATIONS = {
    "swiglu": {},
    "swiglu_fused": dict(bias_activation_fusion=True),
    "swiglu_clamped": dict(activation_func_clamp_value=0.4),
    "swiglu_offset": dict(glu_linear_offset=1.0, activation_func_clamp_value=0.4),
    "geglu": dict(activation_func=F.gelu),
    "geglu_tanh": dict(activation_func=fast_gelu),
    "reglu": dict(activation_func=F.relu),
    "quick_geglu": dict(activation_func=quick_gelu),
    "gpt_oss": dict(
        activation_func=quick_gelu, glu_linear_offset=1.0, activation_func_clamp_value=0.4
    ),
    "quick_offset": dict(activation_func=quick_gelu, glu_linear_offset=1.0),
    "gelu": dict(activation_func=F.gelu, gated_linear_unit=False),
    "tanh": dict(
        activation_func=functools.partial(F.gelu, approximate="tanh"), gated_linear_unit=False
    ),
    "relu_sq": dict(activation_func=squared_relu, gated_linear_unit=False),
    "silu": dict(gated_linear_unit=False),
}


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_fp32(name, bias, per_expert):
    options = ACTIVATIONS[name] | dict(add_bias_linear=bias)
    if name == "swiglu_fused" and bias:  # Megatron's kernel knows no bias
        fused, options = options, options | dict(bias_activation_fusion=False)
        stock, mine = make_pair(fused, **options, weight_per_expert=per_expert)
    else:
        stock, mine = make_pair(**options, weight_per_expert=per_expert)
    randomize(stock, mine)
    x = hidden_states()
    expect_close(run(mine, x), run(stock, x), 3e-5 if name == "geglu_tanh" else 1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["swiglu_fused", "gpt_oss", "relu_sq"])
def test_bf16_is_as_near_to_fp64(name, bias):
    options = ACTIVATIONS[name] | dict(add_bias_linear=bias)
    if name == "gpt_oss":  # beyond what occurs: a clamp's slope jumps where it is reached
        options["activation_func_clamp_value"] = 60.0
    if bias:
        options["bias_activation_fusion"] = False
    stock, mine = make_pair(**options, params_dtype=torch.bfloat16, bf16=True)
    randomize(stock, mine)
    x = hidden_states(torch.bfloat16)
    exact = make_layer(make_config(**options | dict(bias_activation_fusion=False)), False)
    exact.double().load_state_dict(own_state(stock))
    wanted = run(exact, x.double())
    made, theirs = run(mine, x), run(stock, x)
    for tensor, truth in wanted.items():
        error, of_stock = ((m[tensor].double() - truth).norm() for m in (made, theirs))
        assert error <= 2 * of_stock, tensor
        assert of_stock < 0.05 * truth.norm(), tensor


@pytest.mark.parametrize("device_counts", [torch.int32, torch.int64, None])
@pytest.mark.parametrize("counts", [[0, 7, 0, 3, 1, 0, 9, 0], [0] * E, [0] * (E - 1) + [13]])
def test_counts(counts, device_counts):
    stock, mine = make_pair()
    rows, probs = torch.randn(sum(counts), D), torch.rand(sum(counts))
    given = counts if device_counts is None else torch.tensor(counts, dtype=device_counts)
    made = []
    for layer in (stock, mine):
        leaves = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        out, none = layer.experts(
            leaves[0], given if layer is mine else torch.tensor(counts), leaves[1]
        )
        out.square().sum().backward()
        assert none is None
        made.append([out, *[t.grad for t in leaves], *expert_grads(layer).values()])
    for theirs, our in zip(*made, strict=True):
        assert our is not None
        torch.testing.assert_close(our, theirs, rtol=1e-5, atol=1e-5)


def test_buffers_of_the_caller_and_padding():
    _, mine = make_pair()
    counts = torch.tensor([2] * E)
    rows = torch.full((2 * E + 5, D), float("nan"))
    rows[: 2 * E] = torch.randn(2 * E, D)
    rows.requires_grad_()
    out, dx = torch.empty(rows.shape), torch.empty(rows.shape)
    y, _ = mine.experts(rows, counts, torch.rand(len(rows)), out, dx)
    assert y.data_ptr() == out.data_ptr() and not y[2 * E :].any() and y[: 2 * E].all()
    y.sum().backward()
    assert torch.equal(rows.grad, dx) and not dx[2 * E :].any()
    mine.experts.backward_dw()


def test_probabilities_on_the_input():
    stock, mine = make_pair(
        moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True
    )
    x = hidden_states()
    expect_close(run(mine, x), run(stock, x), 1e-5)


def test_recomputing():
    stock, mine = make_pair()
    x = hidden_states()
    wanted = run(stock, x)
    leaf = x.clone().requires_grad_()
    out = checkpoint(lambda y: mine(y)[0], leaf, use_reentrant=True)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out.double() * weights).sum().backward()
    made = {"out": out.detach(), "dx": leaf.grad, "router": mine.router.weight.grad}
    expect_close(made | expert_grads(mine), wanted, 1e-5)


@pytest.mark.parametrize("per_expert", [False, True])
def test_three_steps(per_expert):
    losses = []
    for layer in make_pair(weight_per_expert=per_expert):
        optimizer = torch.optim.AdamW(layer.parameters(), 1e-2)
        losses.append([])
        for step in range(3):
            optimizer.zero_grad()
            loss = (layer(hidden_states(seed=step))[0] - hidden_states(seed=9)).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][2] != pytest.approx(losses[0][0], rel=1e-3)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("per_expert", [False, True])
def test_compiles_to_one_graph(per_expert, fused):
    if fused and per_expert:
        pytest.skip("refused: a weight for each expert under torch.compile")
    torch._dynamo.reset()
    _, mine = make_pair(ours=dict(gradient_accumulation_fusion=fused), weight_per_expert=per_expert)
    experts = mine.experts
    rows, counts, probs = torch.randn(3 * E, D), torch.tensor([3] * E), torch.rand(3 * E)
    for p in experts.parameters():
        p.main_grad = torch.zeros(p.shape)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    made = []
    for module in (experts, compiled):
        out = module(rows, counts, probs)[0]
        out.sum().backward()
        grads = [p.main_grad.clone() if fused else p.grad for p in experts.parameters()]
        for p in experts.parameters():
            p.grad = None
            p.main_grad.zero_()
        made.append([out, *grads])
    for eager, traced in zip(*made, strict=True):
        assert eager.any()
        torch.testing.assert_close(traced, eager)


def test_initialization():
    """The same draws as Megatron's own, from the same generator."""
    for per_expert in (False, True):
        torch.manual_seed(1)
        stock = make_layer(make_config(), False)
        torch.manual_seed(1)
        mine = make_layer(make_config(), True, weight_per_expert=per_expert)
        assert torch.equal(mine.router.weight, stock.router.weight)
        weights = mine.experts.linear_fc1.parameters_of("weight")
        deviation = torch.cat([w.flatten() for w in weights]).std().item()
        theirs = (
            torch.cat([w.flatten() for w in gather(stock, lambda w: w, "linear_fc1")]).std().item()
        )
        assert deviation == pytest.approx(theirs, rel=0.05)
        for p in mine.experts.parameters():
            assert p.allreduce and p.tensor_model_parallel


@pytest.mark.parametrize("per_expert", [False, True])
def test_experts_stay_in_one_memory(per_expert, monkeypatch):
    _, mine = make_pair(weight_per_expert=per_expert)
    mine.experts.bfloat16()
    monkeypatch.setattr(torch, "stack", None)
    counts = torch.tensor([1] * E)
    out, _ = mine.experts(torch.randn(E, D).bfloat16(), counts, torch.rand(E))
    out.sum().backward()
    assert all(p.grad is not None for p in mine.experts.parameters())


# Checkpoints. Megatron's own writer forks processes and wants a GPU; tensors in a dict stand for it.


def pieces(state):
    """Each ShardedTensor of a sharded state dict, as factories make them, and its place."""
    apply_factories(state)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            at = tuple(
                slice(offset, offset + size)
                for offset, size in zip(
                    value.global_offset,
                    (1,) * value.prepend_axis_num + value.local_shape,
                    strict=True,
                )
            )
            yield value, at


def save(state, made=None, complete=True):
    made = {} if made is None else made
    for piece, at in pieces(state):
        whole = made.setdefault(piece.key, torch.full(piece.global_shape, float("nan")))
        assert whole[at].isnan().all(), "written twice"
        whole[at] = piece.data.detach().reshape(whole[at].shape)
    assert not (complete and any(whole.isnan().any() for whole in made.values()))
    return made


def load(state, made):
    factories = {k: v for k, v in state.items() if isinstance(v, ShardedTensorFactory)}
    asked = set()
    for piece, at in pieces(state):
        asked.add(piece.key)
        assert made[piece.key].shape == piece.global_shape
        piece.data = made[piece.key][at].reshape(piece.local_shape).clone()
    assert asked == made.keys()
    loaded = {k: map_tensors(v) for k, v in state.items() if "_extra_state" not in k}
    return apply_factory_merges(loaded, factories) | {k: None for k in state if "_extra_state" in k}


def map_tensors(value):
    return [map_tensors(v) for v in value] if isinstance(value, list) else value.data


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_checkpoints(gated, per_expert, bias, alone):
    options = dict(gated_linear_unit=gated, add_bias_linear=bias)
    stock, mine = make_pair(**options, weight_per_expert=per_expert)

    def sharded(layer):
        metadata = dict(singleton_local_shards=alone)
        return layer.sharded_state_dict(prefix="mlp.", metadata=metadata)

    x = hidden_states()
    for source, target in ((mine, stock), (stock, mine)):
        with torch.no_grad():
            for p in source.parameters():
                p.normal_()
        before = source(x)[0]
        assert not torch.allclose(target(x)[0], before)
        state = load(sharded(target), save(sharded(source)))
        target.load_state_dict({k.removeprefix("mlp."): v for k, v in state.items()})
        torch.testing.assert_close(target(x)[0], before, rtol=1e-4, atol=1e-3)


class Group:
    """Of some ranks, as one of them sees it."""

    def __init__(self, rank, ranks):
        self.rank, self.size = lambda: rank, lambda: ranks


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_parts_of_ranks(gated, per_expert):
    """Two ranks of expert times two of tensor parallelism: their checkpoint is that of one rank,
    and so is what they compute together."""
    sizes = dict(gated_linear_unit=gated, moe_ffn_hidden_size=48)
    config, (stock, _) = make_config(**sizes), make_pair(**sizes)
    whole = save(stock.experts.sharded_state_dict(prefix="mlp."))
    counts, rows = torch.tensor([3, 0, 2, 5, 1, 4, 0, 6]), torch.randn(21, D)
    probs, total, again = torch.rand(21), torch.zeros(21, D), {}
    for ep in range(2):
        for tp in range(2):
            collection = types.SimpleNamespace(
                ep=Group(ep, 2), expt_tp=Group(tp, 2), expt_dp=Group(0, 1)
            )
            part = ours.SonicGroupedMLP(
                E // 2, config, pg_collection=collection, weight_per_expert=per_expert
            )
            state = load(part.sharded_state_dict(prefix="mlp."), whole)
            part.load_state_dict({k.removeprefix("mlp."): v for k, v in state.items()})
            mine = slice(0, 10) if ep == 0 else slice(10, 21)
            total[mine] += part(rows[mine], counts.view(2, -1)[ep], probs[mine])[0].detach()
            again = save(part.sharded_state_dict(prefix="mlp."), again, complete=ep and tp)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[key], whole[key]) for key in whole)
    torch.testing.assert_close(total, stock.experts(rows, counts, probs)[0].detach())


def test_keys_of_checkpoints():
    stock, mine = make_pair()
    keys = [
        {v.key for v in layer.sharded_state_dict(prefix="mlp.").values()} for layer in (stock, mine)
    ]
    assert keys[0] == keys[1] and "mlp.experts.experts.linear_fc1.weight" in keys[1]


def test_plain_state_dicts():
    """Of SequentialMLP (in every other test), and of weights together and apart."""
    stock, together = make_pair()
    apart = make_layer(make_config(), True, weight_per_expert=True)
    apart.load_state_dict(together.state_dict())
    assert "experts.linear_fc1.weight0" in apart.state_dict()
    x = hidden_states()
    assert torch.equal(apart(x)[0], together(x)[0])
    again = make_layer(make_config(), True)
    again.load_state_dict(apart.state_dict())
    assert torch.equal(again(x)[0], together(x)[0])
    with pytest.raises(RuntimeError, match="Unexpected key.*experts.linear_fc3.weight"):
        again.load_state_dict(again.state_dict() | {"experts.linear_fc3.weight": x})


# The spec and refusals.


def test_specs():
    spec = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False)
    assert ours.replace_experts(spec) is spec
    assert spec.submodules.mlp.submodules.experts.module is ours.SonicGroupedMLP
    with pytest.raises(ValueError, match="^spec: got ModuleSpec without MoESubmodules, allowed"):
        ours.replace_experts(get_gpt_layer_local_spec())


REFUSED = {
    "fp8": (dict(), dict(fp8="e4m3")),
    "fp4": (dict(), dict(fp4="e2m1")),
    "use_te_activation_func": (dict(use_te_activation_func=True), {}),
    "activation_func_fp8_input_store": (dict(activation_func_fp8_input_store=True), {}),
    "delay_wgrad_compute": ({}, dict(delay_wgrad_compute=True)),
    "offload_modules": (
        {}, dict(fine_grained_activation_offloading=True, offload_modules=["moe_act"])
    ),
    "moe_router_topk": (dict(moe_apply_probs_on_input=True), {}),
    "params_dtype": (dict(params_dtype=torch.float64), {}),
    "activation_func": (dict(activation_func=torch.tanh), {}),
    "activation_func_clamp_value": (
        dict(activation_func=quick_gelu, activation_func_clamp_value=7.0), {}
    ),
    "bias_activation_fusion": (dict(activation_func=F.gelu, bias_activation_fusion=True), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    options, later = REFUSED[name]
    config = make_config(**options)
    for key, value in later.items():  # what the configuration itself would want a GPU for
        setattr(config, key, value)
    with pytest.raises(ValueError, match=f"^config.{name}: got .*, allowed: "):
        ours.SonicGroupedMLP(E, config, pg_collection=groups())


@pytest.mark.parametrize(
    "options, name",
    [
        (dict(activation_func=squared_relu), "activation_func"),
        (dict(activation_func=quick_gelu, gated_linear_unit=False), "activation_func"),
        (dict(activation_func=F.gelu, glu_linear_offset=1.0), "activation_func_clamp_value"),
        (dict(glu_linear_offset=0.5), "activation_func_clamp_value"),
        (dict(activation_func_clamp_value=-1.0), "activation_func_clamp_value"),
        (
            dict(bias_activation_fusion=True, activation_func_clamp_value=1.0),
            "bias_activation_fusion",
        ),
        (
            dict(gated_linear_unit=False, activation_func_clamp_value=1.0),
            "activation_func_clamp_value",
        ),
    ],
)
def test_refused_activations(options, name):
    with pytest.raises(ValueError, match=f"^config.{name}.*: got .*, allowed: "):
        ours.SonicGroupedMLP(E, make_config(**options), pg_collection=groups())


def test_sizes_of_a_rank_are_refused():
    collection = types.SimpleNamespace(ep=Group(0, 1), expt_tp=Group(0, 2), expt_dp=Group(0, 1))
    with pytest.raises(ValueError, match="^config.moe_ffn_hidden_size of a rank: got 20, allowed"):
        ours.SonicGroupedMLP(E, make_config(), pg_collection=collection)


def test_bias_with_tensor_parallelism_is_refused():
    with pytest.raises(ValueError, match="^config.add_bias_linear: got True, allowed: False with"):
        ours.check_config(make_config(add_bias_linear=True), 2)


def test_the_layer_is_megatrons():
    _, mine = make_pair()
    assert type(mine) is MoELayer and type(mine.experts) is ours.SonicGroupedMLP
    assert mine.experts.linear_fc1.weight.shape == (E, 2 * N, D)
    assert math.prod(mine(hidden_states())[0].shape) == S * B * D and K == 2


def test_the_documented_lines():
    (block,) = snippets.of_section("Megatron-Core")
    exec(block, names := {})
    assert names["spec"].submodules.mlp.submodules.experts.module is ours.SonicGroupedMLP
