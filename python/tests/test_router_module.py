"""MoE with a RouterConfig: parameters that stay fp32, counts of tokens, losses and their mask."""

import copy
import fractions
import itertools
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import everything_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import sonicmoe
from sonicmoe import PRESETS, KernelBackendMoE, MoE, RouterConfig, functional, losses

T, D, N, E, K = 40, 24, 16, 16, 4
BACKENDS = [KernelBackendMoE.sonicmoe, KernelBackendMoE.torch]
EVERYTHING = RouterConfig(
    "sigmoid", "score_then_select", renormalize=True, scale=2.0, logit_bias=True,
    selection_bias=True, expert_scale=True, groups=4, kept_groups=2,
)  # fmt: skip
OWN = ("router.bias", "expert_scale", "selection_bias")


def make_module(router=None, **options):
    """With values in the router's tensors, so that each of them does something."""
    moe = MoE(E, options.pop("k", K), D, N, "swiglu", False, 0.3, router=router, **options)
    for tensor in (moe.router.bias, moe.expert_scale, moe.selection_bias):
        if tensor is not None:
            tensor.data.add_(torch.randn(E) * 0.2)
    return moe


def loss_of(outputs):
    o, aux_loss = outputs
    return o.float().square().sum() + aux_loss


# Parameters and buffers.


def test_names_shapes_and_types():
    moe = make_module(EVERYTHING)
    state = moe.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "router.weight": (E, D), "router.bias": (E,), "expert_scale": (E,), "selection_bias": (E,),
        "c_fc.weight": (E, 2 * N, D), "c_proj.weight": (E, D, N),
    }  # fmt: skip
    assert moe.tokens_per_expert.dtype == torch.int64 and moe.tokens_per_expert.shape == (E,)
    assert dict(moe.named_parameters()).keys() == state.keys() - {"selection_bias"}
    assert "score='sigmoid'" in repr(moe)
    fresh = MoE(E, K, D, N, "swiglu", False, 0.3, router=EVERYTHING)
    assert fresh.expert_scale.eq(1).all() and not fresh.selection_bias.any()
    assert not fresh.router.bias.any()
    fresh.load_state_dict(state)
    assert all(torch.equal(a, state[name]) for name, a in fresh.state_dict().items())
    fresh.reset_parameters()
    fresh.router.reset_parameters()
    assert fresh.expert_scale.eq(1).all() and not fresh.selection_bias.any()
    assert not fresh.router.bias.any() and not torch.equal(fresh.router.weight, moe.router.weight)
    assert MoE(E, K, D, N, "swiglu", False, 0.3).state_dict().keys() == {
        "router.weight", "c_fc.weight", "c_proj.weight"
    }  # fmt: skip


def test_a_router_without_options_starts_as_a_linear_one_does():
    torch.manual_seed(5)
    weight = nn.Linear(D, E, bias=False).weight
    torch.manual_seed(5)
    assert torch.equal(MoE(E, K, D, N, "swiglu", False, 0.3).router.weight, weight)


def conversions():
    yield "to", lambda moe: moe.to(torch.bfloat16)
    yield "half", lambda moe: moe.half()
    yield "bfloat16", lambda moe: moe.bfloat16()
    yield "nested", lambda moe: nn.Sequential(nn.ModuleDict({"moe": moe})).to(torch.bfloat16)[0].moe
    yield "dtype_and_device", lambda moe: moe.to("cpu", torch.bfloat16)
    yield "meta", lambda moe: moe.to("meta", torch.bfloat16)


@pytest.mark.parametrize("name, convert", list(conversions()))
def test_fp32_tensors_stay_so(name, convert):
    moe = make_module(EVERYTHING)
    loss_of(moe(torch.randn(T, D))).backward()
    before = {n: t.clone() for n, t in (*moe.named_parameters(), *moe.named_buffers())}
    gradients = {n: p.grad.clone() for n, p in moe.named_parameters()}
    parameter = moe.expert_scale
    moe = convert(moe)
    after = dict((*moe.named_parameters(), *moe.named_buffers()))
    for n in OWN:
        assert after[n].dtype == torch.float32, n
        if name != "meta":
            assert torch.equal(after[n], before[n]), n
            if n != "selection_bias":
                assert torch.equal(after[n].grad, gradients[n]), n
    assert after["tokens_per_expert"].dtype == torch.int64
    assert after["router.weight"].dtype.itemsize == after["c_fc.weight"].dtype.itemsize == 2
    assert isinstance(moe.expert_scale, nn.Parameter)
    if name == "meta":
        assert all(t.is_meta for t in after.values())
    else:
        assert moe.expert_scale is parameter
        x = torch.randn(T, D).to(moe.c_fc.weight.dtype)
        if x.dtype == torch.bfloat16:
            loss_of(moe(x)).backward()
            assert moe.router.bias.grad.dtype == moe.expert_scale.grad.dtype == torch.float32


def test_fp64_and_back():
    moe = make_module(EVERYTHING).double()
    assert moe.expert_scale.dtype == moe.selection_bias.dtype == torch.float64
    loss_of(moe(torch.randn(T, D).double(), KernelBackendMoE.torch)).backward()
    assert moe.bfloat16().router.bias.dtype == torch.float32


def test_copies_and_pickles():
    moe, x = make_module(EVERYTHING, losses={"z": 1e-3}), torch.randn(T, D)
    expected = moe(x)
    for other in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert other.router_config == EVERYTHING and other.losses == {"z": 1e-3}
        assert torch.equal(other.tokens_per_expert, moe.tokens_per_expert)
        for a, b in zip(other(x), expected, strict=True):
            assert torch.equal(a, b)


# The layer.


@pytest.mark.parametrize("router", [*PRESETS, EVERYTHING])
@pytest.mark.parametrize("compiled", [False, True])
def test_both_backends_and_the_compiler_agree(compiled, router):
    torch._dynamo.reset()
    moe = make_module(router, losses={"switch": 0.5, "z": 0.01, "sequence_balance": 0.25})
    x, dout = torch.randn(2, T, D), torch.randn(2, T, D)
    ours = everything_of(moe, moe, x, dout)
    if compiled:
        other = torch.compile(moe, backend="aot_eager", fullgraph=True)
        for a, b in zip(ours, everything_of(other, moe, x, dout), strict=True):
            assert torch.equal(a, b)
        assert moe.tokens_per_expert.sum() == 2 * 2 * T * K
    else:
        plain = everything_of(lambda leaf: moe(leaf, KernelBackendMoE.torch), moe, x, dout)
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("router", ["deepseek_v3", EVERYTHING])
def test_the_module_is_the_function(router):
    moe, x = make_module(router).bfloat16(), torch.randn(T, D).bfloat16()
    o, logits, counts = functional.moe_TC_softmax_topk_layer(
        x, moe.router.weight, moe.c_fc.weight, None, moe.c_proj.weight, None, K, router=router,
        logit_bias=moe.router.bias, selection_bias=moe.selection_bias,
        expert_scale=moe.expert_scale,
    )  # fmt: skip
    got, aux_loss = moe(x)
    assert torch.equal(got, o) and torch.equal(moe.tokens_per_expert, counts.long())
    assert torch.equal(aux_loss, losses.switch_loss(logits, counts, score="sigmoid"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("f32", [False, True])
def test_a_router_with_a_hook_is_the_same_layer(f32, dtype, backend):
    """Its bias is in the logits that it makes, and is not added again."""
    config = RouterConfig(logit_bias=True, logits="f32" if f32 else "input")
    plain = make_module(config)
    # Exact logits, in any order of sums: their rounding decides where tokens go.
    plain.router.weight.data = torch.randint(-4, 5, (E, D)) / 16
    plain.router.bias.data = torch.randint(-32, 33, (E,)) / 64
    plain.to(dtype)
    moe = copy.deepcopy(plain)
    seen = []
    moe.router.register_forward_hook(lambda module, args, logits: seen.append(logits.dtype))
    x = torch.randint(-2, 3, (T, D)).to(dtype)
    for module in (plain, moe):
        loss_of(module(x, backend)).backward()
    assert seen == [torch.float32 if f32 else dtype]
    eps = torch.finfo(dtype).eps
    for (name, a), b in zip(plain.named_parameters(), moe.parameters(), strict=True):
        # Each side rounds logits and gradients once, and sums over tokens in its own order.
        limit = 8 * eps * a.grad.float().norm()
        assert (a.grad.float() - b.grad.float()).norm() <= limit, name


def test_a_linear_router_with_an_fp32_bias_is_fused():
    moe = make_module()
    moe.router = nn.Linear(D, E)
    x = torch.randn(T, D)
    for dtype in (torch.float32, torch.bfloat16):
        moe.to(dtype)
        moe.router.bias.data = moe.router.bias.data.float()  # nn.Linear itself refuses the mixture
        w1, w2 = moe.c_fc.weight, moe.c_proj.weight
        o, _, _ = functional.moe_TC_softmax_topk_layer(
            x.to(dtype), moe.router.weight, w1, None, w2, None, K, router="gpt_oss",
            logit_bias=moe.router.bias,
        )  # fmt: skip
        assert torch.equal(moe(x.to(dtype))[0], o)
    moe.router.bfloat16()  # a bias that nn.Linear rounds: it is called
    with torch.no_grad():
        logits = F.linear(x.bfloat16(), moe.router.weight, moe.router.bias)
        o, _ = sonicmoe.experts_from_logits(x.bfloat16(), logits, K, w1, w2)
        assert torch.equal(moe(x.bfloat16())[0], o)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_fp32_router_beside_bf16_experts(backend, hooked):
    moe = make_module("deepseek_v3").bfloat16()
    moe.router.float()
    if hooked:
        moe.router.register_forward_hook(lambda *_: None)
    x = torch.randn(T, D).bfloat16().requires_grad_()
    o, aux_loss = moe(x, backend)
    logits = F.linear(x.float(), moe.router.weight)  # in fp32: choices differ from those in bf16
    bias = moe.selection_bias
    weights, ids = functional.route(logits, K, router="deepseek_v3", selection_bias=bias)
    expected, _ = sonicmoe.experts(x, ids, weights, moe.c_fc.weight, moe.c_proj.weight)
    eps = torch.finfo(torch.bfloat16).eps
    # Each side rounds H, A, the rows of y and o.
    assert (o - expected).float().norm() <= 4 * eps * expected.float().norm()
    o.float().square().sum().backward()
    assert moe.router.weight.grad.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(expected.float().square().sum(), moe.router.weight)
    # Besides those, the gradient of o and the rows of A' on each side.
    assert (moe.router.weight.grad - gradient).norm() <= 8 * eps * gradient.norm()


def test_a_gate_in_fp32_keeps_its_logits_under_autocast():
    class Gate(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    moe, x = make_module(), torch.randn(T, D)
    moe.router = Gate(D, E)
    with torch.autocast("cpu", torch.bfloat16):
        o, aux_loss = moe(x)
        logits = moe.router(x.bfloat16())
        expected, counts = sonicmoe.experts_from_logits(
            x.bfloat16(), logits, K, moe.c_fc.weight, moe.c_proj.weight
        )
    assert logits.dtype == torch.float32
    assert torch.equal(o, expected) and torch.equal(aux_loss, losses.switch_loss(logits, counts))


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_sharded_module_with_a_router_config(mixed, mesh):
    plain = make_module(EVERYTHING)
    moe = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
    fully_shard(moe, mesh=mesh, mp_policy=policy)
    x = torch.randn(T, D)
    o, aux_loss = moe(x)
    loss_of((o, aux_loss)).backward()
    assert moe.expert_scale.grad.full_tensor().any()
    assert moe.tokens_per_expert.sum() == T * K
    if not mixed:
        assert torch.equal(o, plain(x)[0])


# Counts.


@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_per_expert(backend, routing):
    moe = make_module("olmoe", routing=routing, tile=8)
    x = torch.randn(2, T, D)
    logits = F.linear(x.flatten(0, 1), moe.router.weight)
    counts = losses.count_choices(functional.route(logits, K, router="olmoe")[1], E).long()
    assert (counts % 8).any()
    for steps in (1, 2):
        moe(x, backend)
        assert torch.equal(moe.tokens_per_expert, steps * counts)  # before rounding
    with torch.no_grad():
        moe(x, backend)
    moe(x, backend, is_inference_mode=True)
    moe.eval()
    moe(x, backend)
    assert torch.equal(moe.tokens_per_expert, 3 * counts)


def test_opcheck_of_counts():
    args = torch.zeros(E, dtype=torch.int64), torch.ones(E, dtype=torch.int32)
    torch.library.opcheck(torch.ops.sonicmoe.add_counts.default, args)


# The compiler does not trace reentrant checkpoints.
@pytest.mark.parametrize(
    "compiled, reentrant",
    [("no", False), ("no", True), ("inside", False), ("inside", True), ("outside", False)],
)
def test_checkpointing_counts_once(compiled, reentrant):
    torch._dynamo.reset()
    moe = make_module("deepseek_v3")
    plain = copy.deepcopy(moe)
    x = torch.randn(T, D, requires_grad=True)
    call = torch.compile(moe, backend="aot_eager") if compiled == "inside" else moe

    def step(x):
        return checkpoint(call, x, use_reentrant=reentrant)

    if compiled == "outside":
        step = torch.compile(step, backend="aot_eager")
    for _ in range(2):
        loss_of(step(x)).backward()
        loss_of(plain(x)).backward()
    assert plain.tokens_per_expert.sum() == 2 * T * K
    assert torch.equal(moe.tokens_per_expert, plain.tokens_per_expert)
    for a, b in zip(moe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_update_selection_bias():
    moe = make_module("deepseek_v3")
    before = moe.selection_bias.clone()
    moe(torch.randn(T, D))
    counts = moe.tokens_per_expert.clone()
    moe.update_selection_bias(0.125)
    expected = before + 0.125 * torch.sign(counts.double().mean() - counts).float()
    assert torch.equal(moe.selection_bias, expected) and not moe.tokens_per_expert.any()
    words = "^router.selection_bias: got False, allowed: True, for update_selection_bias adds"
    with pytest.raises(ValueError, match=words):
        make_module().update_selection_bias(0.1)


def test_updates_balance_the_experts():
    torch.manual_seed(1)
    moe, x = make_module("deepseek_v4"), torch.randn(512, D)
    moe.router.weight.data += torch.linspace(-1, 1, E).view(-1, 1) * 0.3

    def imbalance():
        moe(x)
        return moe.tokens_per_expert.max() / moe.tokens_per_expert.double().mean()

    first = imbalance()
    for _ in range(200):
        moe.update_selection_bias(0.01)
        last = imbalance()
    assert last < 1 + (first - 1) / 4


# Losses.


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("router", ["deepseek_v4", "qwen3"])
@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_the_weighted_sum(routing, router, backend, masked):
    if routing == "token_rounding" and router == "deepseek_v4":
        router = "mixtral"
    weights = {"switch": 0.5, "z": 0.125, "sequence_balance": 2.0}
    plain = make_module(router, losses={}, routing=routing, tile=8)
    x = torch.randn(3, T, D)
    mask = torch.rand(3, T) < 0.7 if masked else None
    score, bias = plain.router_config.score, plain.selection_bias
    logits = F.linear(x, plain.router.weight)
    _, ids = functional.route(logits.flatten(0, 1), K, router=router, selection_bias=bias)
    ids = ids.view(3, T, K)
    flat_mask = None if mask is None else mask.flatten()
    counts = losses.count_choices(ids, E, padding_mask=mask)
    per_sequence = losses.count_choices(ids, E, padding_mask=mask, per_sequence=True)
    flat = logits.flatten(0, 1)
    expected = {
        "switch": losses.switch_loss(flat, counts, score=score, padding_mask=flat_mask),
        "z": losses.z_loss(logits, padding_mask=mask),
        "sequence_balance": losses.sequence_balance_loss(
            logits, per_sequence, score=score, padding_mask=mask
        ),
    }
    o, nothing = plain(x, backend, padding_mask=mask)
    assert nothing.dtype == torch.float32 and nothing == 0 and not nothing.requires_grad
    assert torch.equal(plain.tokens_per_expert, counts.long())
    for count in (1, 2, 3):
        for names in itertools.combinations(weights, count):
            chosen = {name: weights[name] for name in names}
            moe = MoE(E, K, D, N, "swiglu", False, 0.3, router=router, losses=chosen,
                      routing=routing, tile=8)  # fmt: skip
            moe.load_state_dict(plain.state_dict())
            got, aux_loss = moe(x, backend, padding_mask=mask)
            total = sum(weights[name] * expected[name] for name in names)
            torch.testing.assert_close(aux_loss, total)
            assert torch.equal(got, o)
            (ours,) = torch.autograd.grad(aux_loss, moe.router.weight)
            (theirs,) = torch.autograd.grad(total, plain.router.weight, retain_graph=True)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_masked_tokens_count_nowhere():
    moe = make_module(losses={"switch": 1.0, "z": 1.0, "sequence_balance": 1.0})
    x = torch.randn(2, T, D, requires_grad=True)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[1, T // 2 :] = False
    o, aux_loss = moe(x, padding_mask=mask)
    (dx,) = torch.autograd.grad(aux_loss, x, retain_graph=True)
    assert not dx[~mask].any() and dx[mask].any()
    other = x.detach().clone()
    other[~mask] = torch.randn(D)
    o2, aux_loss2 = moe(other, padding_mask=mask)
    assert torch.equal(aux_loss, aux_loss2) and torch.equal(o[mask], o2[mask])
    assert not torch.equal(o[~mask], o2[~mask]) and o[~mask].any()  # the experts compute them
    assert moe.tokens_per_expert.sum() == 2 * mask.sum() * K
    for same in (mask.long(), mask.flatten()):
        assert torch.equal(moe(x, padding_mask=same)[1], aux_loss)


def test_nothing_counts_without_tokens():
    moe = make_module(losses={"switch": 1.0, "z": 1.0, "sequence_balance": 1.0})
    for x in (torch.randn(0, D), torch.randn(2, 0, D), torch.randn(0, 3, D)):
        o, aux_loss = moe(x)
        assert o.shape == x.shape and aux_loss == 0
    x = torch.randn(2, T, D)
    o, aux_loss = moe(x, padding_mask=torch.zeros(2, T, dtype=torch.bool))
    assert aux_loss == 0 and o.any() and not moe.tokens_per_expert.any()
    assert torch.isfinite(moe(torch.randn(D))[1])  # one token


def test_a_compiled_module_with_a_mask():
    torch._dynamo.reset()
    moe = make_module("qwen3", losses={"switch": 1.0, "sequence_balance": 0.5})
    x, mask = torch.randn(2, T, D), torch.rand(2, T) < 0.5
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    expected = moe(x, padding_mask=mask)
    for a, b in zip(compiled(x, padding_mask=mask), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert moe.tokens_per_expert.sum() == 2 * mask.sum() * K


def test_a_mask_of_sizes_that_tracing_does_not_know():
    torch._dynamo.reset()
    moe = make_module("qwen3")
    compiled = torch.compile(moe, backend="eager", fullgraph=True)
    compiled(torch.randn(2, 5, D))
    for shape in ((3, 7), (4, 6)):
        for of_mask in (shape, (shape[0] * shape[1],)):
            x, mask = torch.randn(*shape, D), torch.rand(of_mask) < 0.5
            for a, b in zip(compiled(x, padding_mask=mask), moe(x, padding_mask=mask), strict=True):
                torch.testing.assert_close(a, b)


class _Adapter(nn.Module):
    """Experts with something added, as adapters have: no parameter of its own is a weight."""

    def __init__(self, base):
        super().__init__()
        self.base, self.delta = base, nn.Parameter(torch.zeros_like(base.weight))

    def forward(self, x=None):
        weight, bias = self.base(x)
        return weight + self.delta, bias


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", ["adapter", "parametrization"])
def test_a_state_of_changed_experts(how, device, assign):
    def change(moe):
        if how == "adapter":
            moe.c_fc = _Adapter(moe.c_fc)
        else:
            torch.nn.utils.parametrize.register_parametrization(moe.c_fc, "weight", nn.Identity())
        return moe

    given = change(make_module("deepseek_v3"))
    with torch.device(device):
        moe = change(MoE(E, K, D, N, "swiglu", False, 0.3, router="deepseek_v3"))
    if device == "meta" and not assign:
        moe = moe.to_empty(device="cpu")
    moe.load_state_dict(given.state_dict(), assign=assign)
    x = torch.randn(T, D)
    assert torch.equal(moe(x)[0], given(x)[0])
    assert moe.tokens_per_expert.sum() == T * K
    moe.update_selection_bias(0.1)


# What is refused, and warnings.


def test_what_the_module_refuses():
    for options, error, message in (
        ({"router": "qwen3", "norm_topk_probs": True}, ValueError,
         "norm_topk_probs: got True, allowed: False beside router="),
        ({"router": RouterConfig(), "softmax_over_topk": False}, ValueError,
         "softmax_over_topk: got False, allowed: True beside router="),
        ({"router": "gpt4"}, ValueError, "router: got 'gpt4', allowed: a RouterConfig, 'qwen3', "),
        ({"router": nn.Linear(D, E)}, TypeError, "router: got Linear("),
        ({"router": RouterConfig(groups=3)}, ValueError,
         "groups: got 3, allowed: divisors of experts (16)"),
        ({"router": RouterConfig(groups=8, kept_groups=1)}, ValueError,
         "kept_groups: got 1, allowed: so many that top_k (4) experts stay, in groups of 2"),
        ({"router": RouterConfig(groups=16, kept_groups=16, group_score="sum_of_two")}, ValueError,
         "group_score: got 'sum_of_two', allowed: 'largest' with one expert a group"),
        ({"losses": {"entropy": 1.0}}, ValueError,
         "losses: got 'entropy', allowed: a dict of weights by name: 'switch', 'z', "
         "'sequence_balance'"),
        ({"losses": "switch"}, TypeError, "losses: got 'switch', allowed: a dict of weights"),
        ({"losses": {"z": "1"}}, TypeError, "losses['z']: got '1', allowed: a number"),
        ({"losses": {"z": float("nan")}}, ValueError, "losses['z']: got nan, allowed: finite num"),
        ({"losses": {"z": 10**400}}, ValueError, "losses['z']: got 1000"),
        ({"routing": None}, TypeError, "routing: got None, allowed: 'top_k', 'token_rounding'"),
        ({"std": "0.02"}, TypeError, "std: got '0.02', allowed: a number"),
        ({"std": True}, TypeError, "std: got True, allowed: a number"),
        ({"std": -1.0}, ValueError, "std: got -1.0, allowed: finite numbers from 0 on"),
    ):  # fmt: skip
        with pytest.raises(error, match="^" + re.escape(message)):
            MoE(**{"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "std": 0.3,
                   "intermediate_size": N, "activation_function": "swiglu", "add_bias": False,
                   **options})  # fmt: skip
    with pytest.raises(TypeError, match=r"^kernel_backend_moe: got \[\], allowed: Kernel"):
        make_module()(torch.randn(T, D), [])


def test_any_real_number_scales():
    third = make_module(RouterConfig(scale=fractions.Fraction(1, 3)))
    plain = make_module(RouterConfig(scale=1 / 3))
    plain.load_state_dict(third.state_dict())
    x = torch.randn(T, D)
    for backend in KernelBackendMoE.sonicmoe, KernelBackendMoE.torch:
        torch.testing.assert_close(third(x, backend)[0], plain(x, backend)[0])


@pytest.mark.parametrize("option, allowed", [
    ({"score": "sigmoid"}, "'softmax'"), ({"score": "sqrt_softplus"}, "'softmax'"),
    ({"order": "score_then_select", "renormalize": True, "eps": 0.5}, "0.0"),
    ({"scale": 2.0}, "1.0"), ({"logit_bias": True}, "False"), ({"selection_bias": True}, "False"),
    ({"expert_scale": True}, "False"), ({"groups": 2, "kept_groups": 2}, "1"),
])  # fmt: skip
def test_token_rounding_takes_a_softmax_alone(option, allowed):
    config = RouterConfig(**option)
    name = next(n for n in reversed(option) if n != "kept_groups")
    words = rf"^router\.{name}: got .*, allowed: {allowed} with routing='token_rounding'$"
    with pytest.raises(ValueError, match=words):
        make_module(config, routing="token_rounding")
    make_module(RouterConfig(logits="f32"), routing="token_rounding", tile=8)(torch.randn(T, D))


def test_masks_that_are_refused():
    moe, x = make_module(), torch.randn(2, T, D)
    words = re.escape("padding_mask: got shape (2, 3), allowed: (2, 40), that of x without its")
    with pytest.raises(ValueError, match=f"^{words}"):
        moe(x, padding_mask=torch.ones(2, 3).bool())
    with pytest.raises(TypeError, match="^padding_mask: got torch.float32, allowed: torch.bool"):
        moe(x, padding_mask=torch.ones(2, T))
    with pytest.raises(TypeError, match="^padding_mask: got list, allowed: a tensor$"):
        moe(x, padding_mask=[True])
    with pytest.raises(ValueError, match="^padding_mask: got a tensor on meta, allowed: cpu, whe"):
        moe(x, padding_mask=torch.ones(2, T, device="meta").bool())


@pytest.mark.parametrize(
    "router", ["qwen3", "gpt_oss", "gemma4", RouterConfig("sigmoid", renormalize=True)]
)
def test_one_expert_with_constant_weights_warns(router):
    words = "^router: got .*, with num_experts_per_tok=1: every weight is constant, .* order='scor"
    with pytest.warns(UserWarning, match=words) as caught:
        moe = MoE(E, 1, D, N, "swiglu", False, 0.3, router=router)
    assert caught[0].filename == __file__
    moe(torch.randn(T, D))[0].square().sum().backward()
    assert not moe.router.weight.grad.any()


@pytest.mark.parametrize(
    "router", ["olmoe", RouterConfig("sigmoid"), RouterConfig("sigmoid", renormalize=True, eps=0.5)]
)
def test_one_expert_with_other_weights_does_not_warn(router):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe = MoE(E, 1, D, N, "swiglu", False, 0.3, router=router)
    moe(torch.randn(T, D))[0].square().sum().backward()
    assert moe.router.weight.grad.any()


def test_counts_are_no_part_of_the_state():
    """A module from the meta device starts at 0, whichever way its state comes."""
    state = MoE(16, 2, 16, 8, "swiglu", False, 0.1, router="deepseek_v3").state_dict()
    with torch.device("meta"):
        copies = [MoE(16, 2, 16, 8, "swiglu", False, 0.1, router="deepseek_v3") for _ in range(2)]
    copies[0].to_empty(device="cpu").load_state_dict(state)
    copies[1].load_state_dict(state, assign=True)
    for moe in copies:
        counts = moe.tokens_per_expert
        assert counts.device.type == "cpu" and not counts.any()
        moe(torch.randn(5, 16))
        moe.load_state_dict(state)
        assert moe.tokens_per_expert is counts and counts.sum() == 10


def test_a_16_bit_checkpoint_leaves_fp32_what_is():
    config = RouterConfig(logit_bias=True, selection_bias=True, expert_scale=True)
    moe = MoE(8, 2, 16, 8, "swiglu", False, 0.1, router=config)
    state = {name: t.bfloat16() for name, t in moe.state_dict().items()}
    moe.load_state_dict(state, assign=True)
    assert moe.router.weight.dtype == torch.bfloat16
    for tensor in (moe.router.bias, moe.selection_bias, moe.expert_scale):
        assert tensor.dtype == torch.float32
    moe(torch.randn(5, 16, dtype=torch.bfloat16))
    moe.update_selection_bias(0.1)


def test_global_hooks_see_the_router():
    moe, seen = MoE(8, 2, 16, 8, "swiglu", False, 0.1), []
    x = torch.randn(5, 16)
    expected = moe(x)[0]
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(module)
    )
    try:
        torch.testing.assert_close(
            moe(x)[0], expected
        )  # a called router's logits are PyTorch's sums
    finally:
        hook.remove()
    assert moe.router in seen


@pytest.mark.parametrize("preset", ["deepseek_v3", "deepseek_v4", "qwen3"])
def test_one_expert_of_constant_weight_warns(preset):
    with pytest.warns(UserWarning, match="gives the router no gradient|the router no gradient"):
        moe = MoE(16, 1, 16, 8, "swiglu", False, 0.1, router=preset)
    moe(torch.randn(5, 16))[0].sum().backward()
    assert not moe.router.weight.grad.any()


def test_a_loss_that_does_not_exist_later():
    moe = MoE(8, 2, 16, 8, "swiglu", False, 0.1)
    moe.losses = {"swich": 1.0}
    with pytest.raises(ValueError, match="losses: got 'swich', allowed: switch, z, sequence_bal"):
        moe(torch.randn(5, 16))
