"""What both processes of test_ranks.py run: a transport of ours in the place of the dispatcher."""

import contextlib
import itertools

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims as parallel_dims
from small import B, D, E, K, L, N, built, expect_twice_as_near, gradients, in_fp64, moe_config
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torchtitan.components.optimizer.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from sonicmoe.integrations import torchtitan as ours

TRANSPORTS = ("gather", "all_to_all")
LAYOUTS = {
    "swiglu": {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)},
    "gpt_oss": dict.fromkeys(
        ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"), spmd.R
    ),
}
#: Of errors. dx jumps where rounding moves a pre-activation of gpt-oss across the clamp.
LIMITS = {"swiglu": 0.01, "gpt_oss": 0.06}
X = torch.randn(2 * B, L, D, generator=torch.Generator().manual_seed(5))
WEIGHTS = torch.randn(X.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)

# Its own dispatcher asks a later torch than ours whether it is being traced.
if not hasattr(torch.compiler, "_is_non_strict_tracing"):
    torch.compiler._is_non_strict_tracing = lambda: False
parallel_dims.device_type = "cpu"


def dims(backend="partial_dtensor", tp=1, ep=2):
    set_spmd_backend(backend)
    return parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=2 // tp, cp=1, tp=tp, pp=1, ep=ep, world_size=2,
        spmd_backend=backend,
    )  # fmt: skip


def one(transport=None, kind="swiglu", dtype=torch.float32, **changes):
    """A module that holds all experts; with a transport, ours."""
    config = moe_config(kind, **changes)
    if transport:
        ours.replace_experts(config, transport)
    return ready(built(config), dtype)


def ready(moe, dtype):
    moe.to(dtype)
    with torch.no_grad():  # fp32, as in its own mixed precision
        moe.expert_bias_E = torch.linspace(-0.1, 0.1, E)
        moe.tokens_per_expert_E = torch.zeros(E)
    return moe


def spread(mesh, transport=None, kind="swiglu", dtype=torch.float32, **changes):
    """The same module over both ranks, by torchtitan's own rules of sharding."""
    config = moe_config(kind, **changes)
    if transport:
        ours.replace_experts(config, transport)
    set_moe_sharding_config(
        config, enable_ep=mesh.ep > 1, enable_sp=mesh.tp > 1, expert_param_layout=LAYOUTS[kind]
    )
    moe = ready(built(config), dtype)
    moe.parallelize(mesh)
    return moe


def own(whole, mesh, sharded=True):
    """This rank's part of what one process has: of tokens, or of the experts if sharded."""
    if whole.shape == X.shape:
        return whole.chunk(2, 1 if mesh.tp > 1 else 0)[dist.get_rank()]
    return whole.chunk(2)[dist.get_rank()] if sharded else whole


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def as_is(moe, x):
    return moe(x)


def on_rank(moe, mesh, dtype=torch.float32, call=as_is):
    """What `gradients` makes of this rank's tokens; the router's gradients are those of all."""
    spmd_types = mesh.spmd_backend == "spmd_types"
    with get_spmd_context(parallel_dims=mesh)() if spmd_types else contextlib.nullcontext():
        made = gradients(call, moe, own(X.to(dtype), mesh), own(WEIGHTS, mesh))
    made = {name: local(tensor) for name, tensor in made.items()}
    made["router.gate.weight"] = made["router.gate.weight"].clone()
    dist.all_reduce(made["router.gate.weight"])
    return made


def of_one(moe, mesh, like, dtype=torch.float32, call=as_is):
    """The parts `like` of what one process makes of all tokens."""
    made = gradients(call, moe, X.to(dtype), WEIGHTS)
    return {name: own(t, mesh, t.shape != like[name].shape) for name, t in made.items()}


def check_beside_torchtitan(folder):
    """As near to fp64 as torchtitan's experts behind its dispatcher, and as one process."""
    for kind, dtype in itertools.product(LAYOUTS, (torch.float32, torch.bfloat16)):
        mesh = dims()
        stock = spread(mesh, None, kind, dtype)
        theirs = on_rank(stock, mesh, dtype)
        exact = of_one(one(None, kind, dtype), mesh, theirs, dtype, in_fp64)
        alone = of_one(one("gather", kind, dtype), mesh, theirs, dtype)
        for transport in (*TRANSPORTS, "auto"):
            moe = spread(mesh, transport, kind, dtype)
            moe.routed_experts.token_dispatcher.dispatch = None  # not called
            mine = on_rank(moe, mesh, dtype)
            assert mine["out"].dtype == theirs["out"].dtype
            expect_twice_as_near(mine, theirs, exact, LIMITS[kind])
            expect_twice_as_near(mine, alone, exact, LIMITS[kind])
            assert moe.tokens_per_expert_E.sum() == K * B * L
            assert torch.equal(moe.tokens_per_expert_E, stock.tokens_per_expert_E)


def check_spmd_types(folder):
    """Its default backend, whose parameters are plain tensors; with tp, ranks share a sequence."""
    for kind, tp, transport in itertools.product(LAYOUTS, (1, 2), TRANSPORTS):
        mesh = dims("spmd_types", tp)
        mine = on_rank(spread(mesh, transport, kind), mesh)
        exact = of_one(one(None, kind), mesh, mine, call=in_fp64)
        alone = of_one(one("gather", kind), mesh, mine)
        expect_twice_as_near(mine, alone, exact, LIMITS[kind])


def check_load_balancing(folder):
    """Its hook of the optimizer sees the same counts, and moves the bias as with its dispatcher."""
    moved = []
    for transport in (None, *TRANSPORTS):
        mesh = dims()
        moe = spread(mesh, transport)
        block = torch.nn.Module()
        block.moe, block.moe_enabled = moe, True
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleDict({"0": block})
        optimizer = torch.optim.SGD(moe.parameters(), 1e-3)
        register_moe_load_balancing_hook(optimizer, [model], mesh)
        before = moe.expert_bias_E.clone()
        on_rank(moe, mesh)
        optimizer.step()
        assert not moe.tokens_per_expert_E.any()
        moved.append(moe.expert_bias_E - before)
    assert moved[0].abs().max() > 0
    assert all(torch.equal(bias, moved[0]) for bias in moved[1:])


def check_state(folder):
    """Names, sharding and numbers of the parameters are torchtitan's."""
    mesh = dims()
    theirs, moe = spread(mesh), spread(mesh, "gather")
    state = theirs.state_dict()
    assert list(state) == list(moe.state_dict())
    for name, tensor in moe.state_dict().items():
        assert type(tensor) is type(state[name]) and torch.equal(local(tensor), local(state[name]))
        assert getattr(tensor, "placements", None) == getattr(state[name], "placements", None)
    with torch.no_grad():
        for parameter in theirs.parameters():
            local(parameter).mul_(-1)
    moe.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, map(local, moe.parameters()), map(local, theirs.parameters())))


def check_fsdp2(folder):
    """The experts sharded over their mesh, all else over both ranks; its gradients are summed."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for transport in TRANSPORTS:
        mesh = dims()
        plain = on_rank(spread(mesh, transport), mesh)
        moe = spread(mesh, transport)
        experts = moe.routed_experts.inner_experts
        fully_shard(experts, mesh=mesh.get_mesh("efsdp"), mp_policy=policy)
        fully_shard(moe, mesh=mesh.get_mesh("fsdp"))
        for unit in (experts, moe):
            sum_gradients(unit)
        made = gradients(as_is, moe, own(X, mesh), own(WEIGHTS, mesh))
        made["router.gate.weight"] = made["router.gate.weight"].full_tensor()
        for name, wanted in plain.items():
            torch.testing.assert_close(local(made[name]), wanted, rtol=1e-6, atol=1e-6, msg=name)


def sum_gradients(unit):
    """Of FSDP2: no means over ranks, as torchtitan sets it, by operations that gloo has."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def check_experts_sharded_alone(folder):
    """FSDP2's hooks of the experts' own module run."""
    mesh = dims(ep=1)
    moe = one("gather")
    fully_shard(moe.routed_experts.inner_experts, mesh=mesh.get_mesh("fsdp"))
    sum_gradients(moe.routed_experts.inner_experts)
    mine = on_rank(moe, mesh)
    wanted = of_one(one("gather"), mesh, mine)
    assert torch.equal(mine["out"], wanted["out"]) and torch.equal(mine["x"], wanted["x"])
    expect_twice_as_near(mine, wanted, of_one(one(), mesh, mine, call=in_fp64))


def check_checkpointing(folder):
    """PyTorch's and torchtitan's own, of which one keeps what collectives bring."""
    for transport in TRANSPORTS:
        mesh = dims()
        moe = spread(mesh, transport)
        plain = on_rank(moe, mesh)
        calls = [lambda moe, x: checkpoint(moe, x, use_reentrant=False)]
        for policy in (FullAC(FullAC.Config()), SelectiveAC(SelectiveAC.Config())):
            wrapped = policy._wrap_block(moe, base_fqn="layers.0.moe")
            calls.append(lambda _, x, wrapped=wrapped: wrapped(x))
        for call in calls:
            again = on_rank(moe, mesh, call=call)
            assert all(torch.equal(again[name], plain[name]) for name in plain)


def check_compiles_to_one_graph(folder):
    """Gather does. All-to-all reads sizes on the host, and breaks the graph."""
    mesh = dims()
    moe = spread(mesh, "gather")
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    plain = on_rank(moe, mesh)
    made = on_rank(moe, mesh, call=lambda moe, x: compiled(x))
    for name, wanted in plain.items():
        torch.testing.assert_close(made[name], wanted, rtol=1e-2, atol=1e-5, msg=name)
    moe = spread(mesh, "all_to_all")
    with pytest.raises(Exception, match="all_to_all_experts"):
        torch.compile(moe, backend="aot_eager", fullgraph=True)(own(X, mesh))


def check_without_a_transport(folder):
    """torchtitan's dispatcher runs, as its user has chosen it."""
    mesh, called = dims(), []
    config = moe_config()
    ours.replace_experts(config)
    set_moe_sharding_config(
        config, enable_ep=True, enable_sp=False, expert_param_layout=LAYOUTS["swiglu"]
    )
    moe = ready(built(config), torch.float32)
    moe.parallelize(mesh)
    dispatcher = moe.routed_experts.token_dispatcher
    dispatch = dispatcher.dispatch
    dispatcher.dispatch = lambda *inputs: (called.append(1), dispatch(*inputs))[1]
    mine, theirs = on_rank(moe, mesh), on_rank(spread(mesh), mesh)
    assert called
    exact = of_one(one(), mesh, mine, call=in_fp64)
    expect_twice_as_near(mine, theirs, exact)


def check_refusals(folder):
    odd = LocalTokenDispatcher.Config(num_experts=7, top_k=K)
    experts = moe_config().routed_experts.inner_experts
    experts.num_experts = 7
    mesh = dims()
    moe_7 = moe_config(inner_experts=experts, token_dispatcher=odd)
    ours.replace_experts(moe_7, "gather")
    with pytest.raises(ValueError, match="^num_experts: got 7, allowed: multiples of 2"):
        moe_7.routed_experts.build().parallelize(mesh)
    # Nothing has sharded the experts.
    whole = moe_config()
    ours.replace_experts(whole, "gather")
    text = rf"^inner_experts.w1_EFD: got this rank's part \({E}, {N}, {D}\), allowed: \({E // 2}, "
    with pytest.raises(ValueError, match=text):
        whole.build().parallelize(mesh)
    # A plan of one's own, which divides experts too.
    config = moe_config()
    ours.replace_experts(config, "gather")
    set_moe_sharding_config(
        config, enable_ep=False, enable_sp=False, expert_param_layout=LAYOUTS["swiglu"]
    )
    both = dims(tp=2)
    with pytest.raises(ValueError, match=r"^inner_experts.w1_EFD: got .*tensor parallelism"):
        config.build().parallelize(both)


#: By name, in the order in which they run.
CHECKS = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}
