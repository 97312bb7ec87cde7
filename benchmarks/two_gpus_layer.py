"""Sections of two_gpus.py: agreement, a CUDA graph, waits of the host, and times of the layer."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from two_gpus_world import World, check, distance, local, measure, normal, target

import sonicmoe
from sonicmoe import MoE, functional
from sonicmoe.distributed import ExpertParallel, Transport, experts, fully_shard_experts
from sonicmoe.distributed._collectives import group_of
from sonicmoe.distributed._dispatch import packed, placed
from sonicmoe.distributed._gather import exchanges_of, local_ids

#: By name, with the waits of the host that a step has: those of which torch warns, and all. Peer
#: copies wait for an event, of which it does not.
WAITS_EXPECTED = {
    "gather": (0, 0),
    "gather, peer copies": (0, 0),
    "all_to_all": (1, 1),
    "all_to_all, peer copies": (0, 1),
}
#: Calls of the CUDA runtime and driver in which a host waits.
WAITING = frozenset(
    "cudaDeviceSynchronize cudaStreamSynchronize cudaEventSynchronize cudaMemcpy cudaMemcpy2D "
    "cuCtxSynchronize cuStreamSynchronize cuEventSynchronize".split()
)


class Shape(NamedTuple):
    tokens: int  # of a rank
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def of_layer(self) -> tuple[int, int, int, int]:
        return self.experts, self.top_k, self.hidden, self.intermediate


CHECKED = Shape(2048, 2048, 768, 32, 4)
QWEN3_30B = Shape(8192, 2048, 768, 128, 8)
SMALL = Shape(32, 64, 48, 8, 2)


def transports(world: World) -> dict[str, Transport]:
    names = ("gather", "all_to_all")
    made = {name: Transport(name) for name in names}
    if world.cuda:
        made |= {f"{name}, peer copies": Transport(name, peer_copies=True) for name in names}
    return made


@functools.cache
def mesh_of(kind: str) -> DeviceMesh:
    """Two ranks that share the experts; data parallelism over one."""
    mesh = init_device_mesh(kind, (1, 2), mesh_dim_names=("dp", "ep"))
    mesh["dp", "ep"]._flatten("everybody")
    return mesh


def on_grid(tensor: torch.Tensor, step: float) -> torch.Tensor:
    return (tensor.float() / step).round().mul(step).bfloat16()


def layer_of(world: World, shape: Shape) -> MoE:
    """The same layer on both ranks. Its router and `tokens_of` hold multiples of powers of two, so
    that logits are exact in fp32: every order of sums, hence every variant, routes alike."""
    torch.manual_seed(1)
    with world.device:
        moe = MoE(*shape.of_layer(), "swiglu", False, 0.02)
    moe.bfloat16()
    with torch.no_grad():
        drawn = normal(world, 0.02, *moe.router.weight.shape, seed=1)
        moe.router.weight.copy_(on_grid(drawn, 2**-7))
        for parameter in moe.parameters():
            world.same(parameter.data)
    return moe


def tokens_of(world: World, shape: Shape, seed: int = 0) -> torch.Tensor:
    """x of all ranks, the same on both."""
    drawn = normal(world, 0.2, world.size * shape.tokens, shape.hidden, seed=seed)
    return world.same(on_grid(drawn, 2**-5))


def in_fp64(moe: MoE, x: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of x and the three weights, by plain PyTorch."""
    weights = [p.detach().double().requires_grad_() for p in weights_of(moe)]
    x = x.double().requires_grad_()
    logits = x @ weights[0].T
    ids = functional.route(logits.detach().bfloat16(), moe.top_k)[1].long()
    scores = logits.gather(1, ids).softmax(1)
    out = torch.zeros_like(x)
    for e, (w1, w2) in enumerate(zip(weights[1].unbind(), weights[2].unbind(), strict=True)):
        tokens, places = (ids == e).nonzero(as_tuple=True)
        h = x[tokens] @ w1.T
        y = (F.silu(h[:, ::2]) * h[:, 1::2]) @ w2.T
        out = out.index_add(0, tokens, y * scores[tokens, places].unsqueeze(1))
    return [out.detach(), *torch.autograd.grad(out, [x, *weights], dout.double())]


def weights_of(moe: MoE) -> list[torch.nn.Parameter]:
    return [moe.router.weight, moe.c_fc.weight, moe.c_proj.weight]


def variants(world: World) -> dict[str, Callable[[MoE], MoE]]:
    mesh = mesh_of(world.device.type)
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}

    def spread(moe: MoE, transport: Transport) -> MoE:
        return parallelize_module(moe, mesh["ep"], ExpertParallel(transport))

    def sharded(moe: MoE) -> MoE:
        return fully_shard(moe, mesh=mesh["everybody"], **options)

    def both(moe: MoE, transport: Transport) -> MoE:
        fully_shard_experts(spread(moe, transport), mesh["dp"], **options)
        return fully_shard(moe, mesh=mesh["everybody"], **options)

    of = transports(world)
    made = {name: functools.partial(spread, transport=of[name]) for name in of}
    made["FSDP2"] = sharded
    return made | {f"FSDP2, {t}": functools.partial(both, transport=of[t]) for t in of}


def sums_of(world: World, name: str, gradient: torch.Tensor) -> torch.Tensor:
    """A weight's gradient of both ranks' losses, added up, from what a variant leaves."""
    if isinstance(gradient, DTensor):
        means = name.startswith("FSDP2")
        return gradient.full_tensor().double() * (world.size if means else 1)
    return world.summed(gradient.float())  # replicated, of this rank's tokens


def agree(world: World) -> dict[str, Any]:
    """Each variant at most twice as far from fp64 as the layer on one rank, in bf16."""
    shape = SMALL if world.small else CHECKED
    moe, x = layer_of(world, shape), tokens_of(world, shape)
    dout = world.same(normal(world, 0.2, *x.shape, seed=2))
    names = ("out", "dx", "drouter", "dw1", "dw2")
    exact = in_fp64(moe, x, dout)
    own = run(copy.deepcopy(moe), x, dout)
    errors = [distance(a, b) for a, b in zip(own, exact, strict=True)]
    checks = [check(f"one rank, {n}", float(f"{e:.3g}"), "at most 0.02", e <= 0.02)
              for n, e in zip(names, errors, strict=True)]  # fmt: skip
    counts = copy.deepcopy(moe)
    counts(x)
    for name, make in variants(world).items():
        module = make(copy.deepcopy(moe))
        out, dx, *gradients = first = run(module, world.rows(x), world.rows(dout))
        made = [sums_of(world, name, g) for g in gradients]
        ratios = [of_rows(world, g, e) for g, e in zip((out, dx), exact, strict=False)]
        ratios += [distance(g, e) for g, e in zip(made, exact[2:], strict=True)]
        for what, got, one in zip(names, ratios, errors, strict=True):
            ratio = max(world.most([got / one]))
            text = "at most 2 times the error of one rank"
            checks.append(check(f"{name}, {what}", round(ratio, 3), text, ratio <= 2))
        routed = torch.equal(world.summed(module.tokens_per_expert), counts.tokens_per_expert)
        checks.append(check(f"{name}, choices of experts", routed, "as on one rank", routed))
        if name in transports(world):  # buffers that layers share hold other rows meanwhile
            module.zero_grad(set_to_none=True)
            later = run(module, world.rows(x), world.rows(dout), world.rows(dout))
            same = all(torch.equal(local(a), local(b)) for a, b in zip(first, later, strict=True))
            same = all(world.exchange(same))
            text = "the bits of a step without it"
            checks.append(check(f"{name}, another forward before backward", same, text, same))
            del later
        del module, out, dx, gradients, first, made
    return {"shape": shape._asdict(), "checks": checks}


def run(
    moe: MoE, x: torch.Tensor, dout: torch.Tensor, between: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The output and all gradients. Tokens `between` go through before the backward."""
    x = x.clone().requires_grad_()
    out, _ = moe(x)
    if between is not None:
        moe(between)
    out.backward(dout)
    return [out.detach(), x.grad, *(p.grad for p in weights_of(moe))]


def of_rows(world: World, got: torch.Tensor, exact: torch.Tensor) -> float:
    """The distance of both ranks' rows together."""
    off = (got.double() - world.rows(exact)).square().sum().reshape(1)
    return (world.summed(off).sqrt() / exact.norm()).item()


def step_of(world: World, transport: Transport, shape: Shape) -> tuple[torch.Tensor, Callable]:
    """x of this rank, and a step of the whole layer that reads it: the output, all gradients."""
    moe = parallelize_module(
        layer_of(world, shape), mesh_of(world.device.type)["ep"], ExpertParallel(transport)
    )
    x = world.rows(tokens_of(world, shape)).clone().requires_grad_()
    dout = normal(world, 0.2, *x.shape, seed=3 + world.rank)
    leaves = [x, *weights_of(moe)]

    def step() -> list[torch.Tensor]:
        out, _ = moe(x)
        return [out.detach(), *map(local, torch.autograd.grad(out, leaves, dout))]

    return x, step


def graph(world: World) -> dict[str, Any]:
    """Capture on both ranks, then replay on other tokens; the same bits as eager calls."""
    if not world.cuda:
        return {"notes": ["not run: a CUDA graph needs a GPU"]}
    shape = SMALL if world.small else CHECKED
    checks = []
    for name, transport in transports(world).items():
        if transport.name == "gather":  # the other waits for the device
            checks += replays(world, shape, name, transport)
    return {"shape": shape._asdict(), "checks": checks}


def replays(world: World, shape: Shape, name: str, transport: Transport) -> list[dict[str, Any]]:
    x, step = step_of(world, transport, shape)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    world.barrier()
    captured_graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog is another thread, which this mode leaves alone.
    with torch.cuda.graph(captured_graph, capture_error_mode="thread_local"):
        captured = step()
    world.barrier()
    checks = []
    for of_tokens, tokens in inputs_of(world, shape).items():
        with torch.no_grad():
            x.copy_(world.rows(tokens))
        captured_graph.replay()
        got = [tensor.clone() for tensor in captured]
        want = step()
        world.barrier()
        equal = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        finite = all(bool(tensor.isfinite().all()) for tensor in want)
        passed = all(world.exchange(equal and finite))
        text = "output and 4 gradients as in eager calls, bit for bit"
        checks.append(check(f"{name}, replayed on {of_tokens}", passed, text, passed))
    return checks


def inputs_of(world: World, shape: Shape) -> dict[str, torch.Tensor]:
    other = tokens_of(world, shape, 11)
    return {
        "the captured tokens": tokens_of(world, shape),
        "other tokens": other,
        "one token over and over": other[:1].expand_as(other).contiguous(),
        "other tokens again": tokens_of(world, shape, 12),
    }


def waits(world: World) -> dict[str, Any]:
    """Waits of the host in a step after the first ones, counted in two ways.

    torch's sync debug mode warns where an operator of torch waits, in forward and in backward. The
    profiler sees calls of the CUDA runtime in which a host waits, whoever makes them.
    """
    if not world.cuda:
        return {"notes": ["not run: only CUDA has a device to wait for"]}
    shape = SMALL if world.small else CHECKED
    checks, notes = [], []
    for transport, expected in WAITS_EXPECTED.items():
        _, step = step_of(world, transports(world)[transport], shape)
        for _ in range(3):
            step()
        world.barrier()
        warned = world.exchange(warnings_of(step))
        world.barrier()
        passed = warned == [expected[0]] * world.size
        text = f"{expected[0]}, on each rank"
        checks.append(check(f"{transport}, warnings of torch", warned, text, passed))
        try:
            seen, error = profiled(step), None
        except Exception as problem:  # no profiler on this machine
            seen, error = [], repr(problem)
        everybody = world.exchange((seen, error))
        if any(text for _, text in everybody):
            notes.append(f"{transport}: the profiler said {[text for _, text in everybody]}")
            continue
        found = [names for names, _ in everybody]
        passed = [len(names) for names in found] == [expected[1]] * world.size
        text = f"{expected[1]}, on each rank"
        checks.append(check(f"{transport}, calls in the profile", found, text, passed))
    return {"shape": shape._asdict(), "checks": checks, "notes": notes}


def warnings_of(step: Callable) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(w.message) for w in caught)


def profiled(step: Callable) -> list[str]:
    """The names of calls that wait, between a step's first and last line."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        with torch.profiler.record_function("sonicmoe_step"):
            step()
    events = profile.events()
    of_host = torch.autograd.DeviceType.CPU
    steps = [e.time_range for e in events if e.name == "sonicmoe_step" and e.device_type == of_host]
    span = max(steps, key=lambda time_range: time_range.elapsed_us())
    if not any("LaunchKernel" in e.name for e in events):
        raise RuntimeError("the profile has no launches, so that it would have no waits either")
    return [
        e.name for e in events if e.name in WAITING and span.start <= e.time_range.start <= span.end
    ]


def times(world: World) -> dict[str, Any]:
    """Forward and backward from given ids and scores, with all gradients."""
    shape = SMALL if world.small else QWEN3_30B
    group = group_of(dist.group.WORLD)
    count = shape.experts // world.size
    x = normal(world, 0.2, shape.tokens, shape.hidden, seed=20 + world.rank).requires_grad_()
    dout = normal(world, 0.2, *x.shape, seed=30 + world.rank)
    logits = normal(world, 1, shape.tokens, shape.experts, seed=40 + world.rank).float()
    scores, ids = logits.topk(shape.top_k)
    ids, scores = ids.int(), scores.softmax(1).requires_grad_()
    sizes = (count, 2 * shape.intermediate, shape.hidden), (count, shape.hidden, shape.intermediate)
    w1, w2 = (
        normal(world, 0.02, *size, seed=50 + 2 * world.rank + i).requires_grad_()
        for i, size in enumerate(sizes)
    )

    def spread(transport: Transport) -> tuple:
        out = experts(x, ids, scores, w1, w2, group=dist.group.WORLD, transport=transport)
        return torch.autograd.grad(out, [x, scores, w1, w2], dout)

    # One GPU with the same tokens, ids and experts: the other rank's are sentinels.
    gathered = [gather(world, tensor.detach()) for tensor in (x, ids, scores, dout)]
    whole, every_id, every_score, whole_dout = gathered
    own_ids = local_ids(every_id, world.rank, count)
    leaves = [whole.requires_grad_(), every_score.requires_grad_(), w1, w2]

    def alone() -> tuple:
        out, _ = sonicmoe.experts(whole, own_ids, every_score, w1, w2)
        return torch.autograd.grad(out, leaves, whole_dout)

    of = transports(world)
    off = max(
        distance(got, want)
        for transport in of.values()
        for got, want in zip(spread(transport)[2:], alone()[2:], strict=True)
    )
    off = world.most([off])[0]
    calls = {**{name: functools.partial(spread, of[name]) for name in of}, "one GPU": alone}
    checks = [check("dw1, dw2 beside one GPU", float(f"{off:.3g}"), "at most 0.01", off <= 0.01)]
    parts: dict[str, dict[str, Callable]] = {}
    for name, transport in of.items():
        if transport.name == "all_to_all":
            exchanges = exchanges_of(x, group, transport.peer_copies)
            make = placed if transport.peer_copies else packed
            parts[name], pairs = parts_of(world, make, exchanges, x, ids, scores, dout, w1, w2)
            checks.append(pairs)
    named = {
        f"{name}: {part}": call for name, of_one in parts.items() for part, call in of_one.items()
    }
    made = measure(world, calls | named)
    medians = {name: made[name]["median"] for name in made}
    sums = {}
    for name, of_one in parts.items():
        # dout goes there as x does, and dx comes back as out does.
        each = [*of_one, "x there", "out back"]
        sums[name] = round(sum(medians[f"{name}: {part}"] for part in each), 4)
    gathers = min((name for name in of if name.startswith("gather")), key=medians.get)
    over = {f"{name} over its parts, each alone": medians[name] / sums[name] for name in sums}
    return {
        "shape": shape._asdict(),
        "checks": checks,
        "milliseconds": made,
        "sum_of_parts_ms": sums,
        "targets": [
            target(f"{gathers}, over one GPU", medians[gathers] / medians["one GPU"], 1.20, 1.10),
            *(target(name, ratio, 1.10, 0.95) for name, ratio in over.items()),
        ],
    }


def gather(world: World, part: torch.Tensor) -> torch.Tensor:
    made = part.new_empty(world.size * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(made, part.contiguous())
    return made


def parts_of(
    world: World,
    make: Callable,
    exchanges: Any,
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    dout: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
) -> tuple[dict[str, Callable], dict]:
    """The experts on the rows that arrive, forward and backward, and each exchange, as calls."""
    exchanges.rest()
    arrived, sending = make(exchanges, x.detach(), ids, scores.detach(), w2.shape[0])
    sent = sending()
    rows = arrived.x.clone().requires_grad_()  # buffers are for others, too
    row_scores, row_dout = arrived.scores.requires_grad_(), sent.there("dout", dout).waited()
    leaves, row_dout = [rows, row_scores, w1, w2], row_dout.clone()
    # Of placed rows all choices leave, before anybody knows how many there are.
    there = None if sent.comes_again else sent.counts
    rows_sent = world.size * len(x) if sent.comes_again else sum(sent.counts[world.rank])
    one_way = row_dout.new_ones(rows_sent, dout.shape[1])
    choices = one_way.new_zeros(rows_sent, 2 * row_scores.shape[1], dtype=torch.int32)
    numbers = choices.new_zeros(1, 2 * world.size + 2)

    def of_experts() -> tuple:
        out, _ = sonicmoe.experts(rows, arrived.ids, row_scores, w1, w2)
        return torch.autograd.grad(out, leaves, row_dout)

    def x_there() -> torch.Tensor:
        return sent.there("x", x.detach()).waited()

    def sends(name: str, rows: torch.Tensor) -> Callable:
        return lambda: exchanges.exchanging(name, rows, there).waited()

    def returns(name: str, rows: torch.Tensor) -> Callable:
        return lambda: sent.back(name, rows).waited()

    here = (arrived.ids >= 0) & (arrived.ids < w2.shape[0])
    pairs = sum(world.exchange(int(here.sum())))
    total = ids.numel() * world.size
    return {
        "experts on the rows that arrive": of_experts,
        "numbers": lambda: exchanges.gathering("numbers", numbers).waited(),
        "x there": x_there if sent.comes_again else sends("x", one_way),
        "ids and scores there": sends("choices", choices),
        "out back": returns("sums", row_dout),
        "dscores back": returns("dscores", row_scores.detach().clone()),
    }, check("pairs computed", pairs, f"{total}, all of them", pairs == total)
