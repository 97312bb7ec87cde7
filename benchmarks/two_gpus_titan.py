"""Sections of two_gpus.py: torchtitan's MoE, with its own dispatchers and with ours in their place.

torchtitan 0.3 takes more of PyTorch than 2.11 has. Its MoE alone needs these packages beside torch:
torchtitan 0.3.0, spmd_types 0.2.3, tyro 1.0.17, docstring_parser 0.18.0, all of pure Python.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from two_gpus_layer import QWEN3_30B, SMALL, Shape
from two_gpus_world import World, check, distance, local, measure, normal, target

DIFFERENCE = 0.02  # of a tensor's norm, beside torchtitan's: both round to bf16 all the way
SPENT = 75.0  # seconds of the whole run after which nothing is compiled any more


def packages() -> Any:
    """torchtitan, as far as its MoE goes. Imported late: only these sections need it."""
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.utils import set_spmd_backend

    # Its dispatcher asks for this, which PyTorch 2.11 lacks.
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):
        torch.compiler._is_non_strict_tracing = lambda: False
    set_spmd_backend("partial_dtensor")
    return parallel_dims


@functools.cache
def dims_of(world: World) -> Any:
    parallel_dims = packages()
    parallel_dims.device_type = world.device.type
    return parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2, world_size=2,
        spmd_backend="partial_dtensor",
    )  # fmt: skip


def moe_of(
    world: World, shape: Shape, transport: str | None = None, minimal: bool = False
) -> torch.nn.Module:
    """Its MoE over both ranks, in bf16 as FSDP2's mixed precision hands it out. The numbers of the
    weights are the same each time."""
    dims = dims_of(world)
    import spmd_types as spmd
    from torchtitan.models.common.config_utils import (
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config
    from torchtitan.models.common.token_dispatcher import MinimalAsyncEPTokenDispatcher

    sizes = {"num_experts": shape.experts, "top_k": shape.top_k}
    routed = make_routed_experts_config(
        dim=shape.hidden, hidden_dim=shape.intermediate, comm_backend="standard", param_init={},
        **sizes,
    )  # fmt: skip
    if minimal:
        routed.token_dispatcher = MinimalAsyncEPTokenDispatcher.Config(
            hidden_dim=shape.hidden, num_max_tokens_per_rank=shape.tokens, dtype=torch.bfloat16,
            device=world.device, **sizes,
        )  # fmt: skip
    router = make_router_config(
        dim=shape.hidden, gate_param_init={}, score_func="softmax", route_norm=True, **sizes
    )
    config = make_moe_config(num_experts=shape.experts, router=router, routed_experts=routed)
    if transport:
        from sonicmoe.integrations.torchtitan import replace_experts

        replace_experts(config, transport)
    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=layout)
    with world.device:
        moe = config.build()
    moe.bfloat16()
    moe.expert_bias_E, moe.tokens_per_expert_E = (
        torch.zeros(shape.experts, device=world.device) for _ in range(2)
    )
    moe.parallelize(dims)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(moe.named_parameters()):
            part = local(parameter)
            rank = 0 if "gate" in name else world.rank
            part.copy_(normal(world, 0.02, *part.shape, seed=100 + 2 * i + rank))
    return moe


def step_of(world: World, shape: Shape, moe: Callable, owner: torch.nn.Module) -> Callable:
    """Forward and backward on this rank's tokens: the output, the gradients of x and weights."""
    x = normal(world, 0.2, 1, shape.tokens, shape.hidden, seed=60 + world.rank).requires_grad_()
    dout = normal(world, 0.2, *x.shape, seed=70 + world.rank)
    leaves = [x, *owner.parameters()]

    def step() -> list[torch.Tensor]:
        out = moe(x)
        return [out.detach(), *map(local, torch.autograd.grad(out, leaves, dout))]

    return step


@contextlib.contextmanager
def plain_scatter_add() -> Iterator[None]:
    """Its combine adds up rows by a deterministic scatter_add, which PyTorch makes of a sort of all
    elements on CUDA. Its users cannot choose another; here the faster one is timed beside it."""
    from torchtitan.models.common import token_dispatcher

    kept = token_dispatcher.deterministic_scatter_add
    token_dispatcher.deterministic_scatter_add = scatter_add
    try:
        yield
    finally:
        token_dispatcher.deterministic_scatter_add = kept


def scatter_add(out: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    return out.scatter_add(0, index, src)


def plain(step: Callable) -> Callable:
    def with_plain_sums() -> list[torch.Tensor]:
        with plain_scatter_add():
            return step()

    return with_plain_sums


def differences(world: World, step: Callable, stock: Callable) -> list[float]:
    """The largest on either rank, of the output and of each gradient."""
    own = [distance(a, b) for a, b in zip(step(), stock(), strict=True)]
    return [float(f"{value:.3g}") for value in world.most(own)]


def compiled(world: World, step: Callable) -> str:
    """Runs a compiled step a few times, and says why it does not work. Code that torchtitan compiled
    for its first numbers of rows may refuse the next ones."""
    if world.seconds() > SPENT:
        return f"not compiled: {SPENT:.0f} s of the run were over"
    torch._dynamo.config.capture_scalar_outputs = True  # as torchtitan has it
    text = ""
    try:
        for _ in range(3):
            step()
            world.synchronize()
    except Exception as problem:
        text = repr(problem)[:600]
    texts = [t for t in world.exchange(text) if t]
    return f"not compiled: {texts[0]}" if texts else ""


def compiled_calls(
    world: World, of_compiled: Callable
) -> tuple[list[dict[str, Callable]], list[str]]:
    """Of torchtitan and of ours what can be compiled, by their names; notes on what cannot."""
    made, notes = [], []
    for title, name in (("torchtitan, compiled", None), ("gather, compiled", "gather")):
        step = of_compiled(name)
        text = compiled(world, step)
        made.append({} if text else {title: step})
        if text:
            notes.append(f"{title}: {text}")
    return made, notes


def titan(world: World) -> dict[str, Any]:
    """Router, dispatcher or transport, experts: torchtitan's eager and compiled, and with ours."""
    shape = SMALL if world.small else QWEN3_30B
    modules = {name: moe_of(world, shape, name) for name in (None, "gather", "all_to_all")}
    steps = {name: step_of(world, shape, moe, moe) for name, moe in modules.items()}
    checks, notes = [], []
    for name in ("gather", "all_to_all"):
        off = differences(world, steps[name], steps[None])
        checks.append(check(f"{name} beside torchtitan", off, f"at most {DIFFERENCE} each",
                            max(off) <= DIFFERENCE))  # fmt: skip

    def of_compiled(name: str | None) -> Callable:
        # As torchtitan compiles its blocks.
        backend = "inductor" if world.cuda else "aot_eager"
        moe = torch.compile(modules[name], backend=backend, fullgraph=True)
        return step_of(world, shape, moe, modules[name])

    theirs = {
        "torchtitan, eager": steps[None],
        "torchtitan, eager, plain scatter_add": plain(steps[None]),
    }
    ours = {f"{name}, eager": steps[name] for name in ("gather", "all_to_all")}
    made = measure(world, theirs | ours)
    more, found = compiled_calls(world, of_compiled)
    notes += found
    for side, names in zip((theirs, ours), more, strict=True):
        try:
            made |= measure(world, names)
            side |= names
        except Exception as problem:
            notes.append(f"{', '.join(names)}: {problem!r}")
    fastest = [min(side, key=lambda name: made[name]["median"]) for side in (theirs, ours)]
    ratio = made[fastest[0]]["median"] / made[fastest[1]]["median"]
    eager = min(made[name]["median"] for name in ours if name.endswith("eager"))
    notes += [
        f"fastest of each side: {fastest[0]}; {fastest[1]}",
        f"as it is over ours, both eager: {made['torchtitan, eager']['median'] / eager:.3f} times",
        "torchtitan compiles if compile.enable says so, which is off by default",
    ]
    return {
        "shape": shape._asdict(),
        "dispatcher": "AllToAllTokenDispatcher, partial_dtensor",
        "checks": checks,
        "milliseconds": made,
        "targets": [target("torchtitan over ours, each's fastest", ratio, 1.5, 2.0, larger=True)],
        "notes": notes,
    }


def minimal_async_ep(world: World) -> dict[str, Any]:
    """Its dispatcher in symmetric memory, which wants all activations recomputed (FullAC)."""
    packages()
    if not world.cuda:
        return {"notes": ["not run: MinimalAsyncEP has CUDA kernels alone"]}
    from torchtitan.distributed.activation_checkpoint import FullAC

    shape = SMALL if world.small else QWEN3_30B
    error, made = None, {}
    try:
        minimal = moe_of(world, shape, minimal=True)
        wrapped = FullAC(FullAC.Config())._wrap_block(minimal, base_fqn="layers.0.moe")
        step = step_of(world, shape, wrapped, minimal)
        step()
        world.synchronize()
    except Exception as problem:
        error = repr(problem)[:1500]
    errors = [text for text in world.exchange(error) if text]
    if errors:
        return {"notes": [f"not run: {errors[0]}"]}
    stock, ours = moe_of(world, shape), moe_of(world, shape, "gather")
    theirs = step_of(world, shape, stock, stock)
    off = differences(world, step, theirs)
    calls = {
        "MinimalAsyncEP, eager, FullAC": step,
        "torchtitan, eager": theirs,
        "gather, eager": step_of(world, shape, ours, ours),
    }
    made = measure(world, calls)
    ratio = made["MinimalAsyncEP, eager, FullAC"]["median"] / made["gather, eager"]["median"]
    return {
        "shape": shape._asdict(),
        "milliseconds": made,
        "notes": [
            f"output and gradients beside torchtitan's all-to-all: {off}",
            f"over gather, eager: {ratio:.3f} times",
        ],
    }
