"""Trains whole decoders on two GPUs under FSDP2, our experts beside F.grouped_mm, for a receipt.

    python -m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 \
        --master-port 29513 --max-restarts 3 benchmarks/end_to_end.py

Stacks (end_to_end_model.py): a fine-grained MoE of 7B weights, and Qwen3-30B-A3B. Each has as many
layers as an estimate gives two GPUs of 80 GB; the receipt has it. Variants of a stack:

- ours, and again at the end, which shows drift
- grouped_mm: experts from PyTorch's parts (torch_experts.py)
- rounding: ours with token rounding to the nearest multiple of 128
- preact: ours with recompute="preact"

Weights, gradients and AdamW's moments are fp32, products bf16, and each block is computed again in
backward. Then H and copies of X live for one block alone; with --checkpoint attention the experts
keep what they need, and F.grouped_mm needs fewer layers. A step is forward, backward, clipping and
AdamW. Tokens and weights are random, and no loss balances the experts, so that routing is that of a
router before training, and losses say nothing about quality. The receipt has the rows of the most
loaded expert over the mean, summed over the timed steps.

MFU counts 6 FLOPs for each active weight and token, attention to half of the context, and nothing
that is computed again. A step takes as long as on the slower rank. `host_ms` is what the host takes
to queue one. Well below the step's time, the host is no limit; near it, it may be, or it waits for
a full queue.

Variants run one after the other. After an error the processes end where torchrun has a restart
left, and the new ones go on with the next variant. An error or a failed check gives exit status 1.
`--device cpu --small` runs on gloo in seconds, to test this program.
"""

import argparse
import faulthandler
import gc
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from typing import Any

import two_gpus  # first: it sets the environment of NCCL

# isort: split
import end_to_end_model as stacks
import torch
import torch.distributed as dist
from arguments import positive, report_file
from end_to_end_model import Stack
from torch.distributed.device_mesh import init_device_mesh
from two_gpus_world import World, add_names, check, check_names, check_two

from sonicmoe.distributed import clip_grad_norm_

RANKS = 2
WARMUP = 3  # steps; the first one makes plans and code
LIMIT = 120  # seconds, after which a variant that hangs ends the run
ALLOWED = {"cuda": 1e-2, "cpu": 1e-6}  # relative: bf16 rounds by 2^-9, fp32 by 2^-24
NOT_ENDED = "the variant has not ended"
LOST = "the other rank does not come"
LAUNCH = (
    "python -m torch.distributed.run --nproc-per-node 2 --max-restarts 3 benchmarks/end_to_end.py"
)


def mark(world: World) -> Any:
    """A point in time on this rank's device."""
    if not world.cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(marks: list[Any]) -> list[float]:
    return [
        1e3 * (b - a) if isinstance(a, float) else a.elapsed_time(b)
        for a, b in itertools.pairwise(marks)
    ]


class Training:
    def __init__(self, world: World, s: Stack, name: str) -> None:
        self.s, self.device = s, world.device
        mesh = init_device_mesh(world.device.type, (world.size,))
        self.model = stacks.sharded(s, stacks.VARIANTS[name], mesh, world.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.draws = torch.Generator(world.device).manual_seed(100 + world.rank)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of this rank and the norm of the gradient of both."""
        size = self.s.sequences, self.s.context + 1
        drawn = {"generator": self.draws, "device": self.device}
        tokens = torch.randint(self.s.vocabulary, size, **drawn)
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm


def memory(world: World, what: str) -> list[int] | None:
    """Of each rank; None on the CPU."""
    return world.exchange(getattr(torch.cuda, what)()) if world.cuda else None


def retries(world: World) -> int:
    """How often the allocator had to free what it kept, which stalls the device."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if world.cuda else 0


def most_over_mean(model: stacks.Decoder) -> float:
    """Rows of the most loaded expert of any block over the mean; 0 where nobody counts."""
    counts = torch.stack([block.moe.tokens_per_expert for block in model.blocks]).float()
    over = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
    return round(over.max().item(), 3)


def measure(world: World, s: Stack, name: str, options: argparse.Namespace) -> dict[str, Any]:
    if world.cuda:
        torch.cuda.reset_peak_memory_stats()
    before = memory(world, "memory_allocated")
    training = Training(world, s, name)
    first = training.step()
    for _ in range(WARMUP - 1):
        training.step()
    for block in training.model.blocks:
        block.moe.tokens_per_expert.zero_()
    gc.collect()
    gc.freeze()  # a collection in a step would look at all that there is
    try:
        world.barrier()
        retried, began = retries(world), time.perf_counter()
        marks = [mark(world)]
        for _ in range(options.steps):
            last = training.step()
            marks.append(mark(world))
        host = 1e3 * (time.perf_counter() - began) / options.steps
        world.barrier()
    finally:
        gc.unfreeze()
    slower = world.most(milliseconds(marks))
    step = statistics.median(slower)
    steps = (round(ms, 3) for ms in (step, min(slower), max(slower)))
    rate = 1e3 * s.tokens / step
    losses = [statistics.fmean(world.exchange(loss.item())) for loss, _ in (first, last)]
    return {
        "step_ms": dict(zip(("median", "least", "most"), steps, strict=True)),
        "tokens_per_s_and_gpu": round(rate, 1),
        "mfu": float(f"{rate * s.flops_of_token / (1e12 * options.peak_tflops):.4g}"),
        "host_ms": round(max(world.exchange(host)), 3),
        "allocator_retries": sum(world.exchange(retries(world) - retried)),
        "experts_most_over_mean": max(world.exchange(most_over_mean(training.model))),
        "bytes_before": before,
        "peak_bytes": memory(world, "max_memory_allocated"),
        "peak_reserved_bytes": memory(world, "max_memory_reserved"),
        "first_loss": losses[0],
        "first_gradient_norm": first[1].item(),
        "last_loss": losses[1],
    }


def stack_of(name: str, options: argparse.Namespace) -> Stack:
    whole = (stacks.SMALL if options.small else stacks.STACKS)[name]
    given = {"checkpoint": options.checkpoint, "sequences": options.sequences or whole.sequences}
    whole = whole._replace(**given)
    return whole._replace(layers=options.layers) if options.layers else whole.fitted(RANKS)


def about_stack(s: Stack, layers: int) -> dict[str, Any]:
    """A stack's part of the receipt, before its variants. `layers`: of the whole model."""
    parts = s.bytes_of_rank(RANKS)
    return {
        "shape": s._asdict(),
        "layers_of_the_whole_model": layers,
        "tokens_of_a_step_and_gpu": s.tokens,
        "weights": s.weights,
        "active_weights": s.active,
        "flops_of_token": s.flops_of_token,
        "bytes_of_rank": parts,
        "bytes_of_rank_sum": sum(parts.values()),
        "bytes_allowed": int(stacks.ROOM),
        "variants": {},
    }


def checks(variants: dict[str, dict], kind: str) -> list[dict[str, Any]]:
    """The first step's loss and gradient beside ours; token rounding picks other experts."""
    made, ours = [], variants.get("ours", {})
    for name, got in variants.items():
        if name in ("ours", "rounding") or "error" in got or "first_loss" not in ours:
            continue
        for what in ("first_loss", "first_gradient_norm"):
            off = abs(got[what] / ours[what] - 1)
            text = f"{off:.3g}", f"at most {ALLOWED[kind]} off ours", off <= ALLOWED[kind]
            made.append(check(f"{name}, {what}", *text))
    return made


def compare(result: dict[str, Any], kind: str) -> None:
    """Adds to a stack's result what several variants say together."""
    variants = result["variants"]
    result["checks"] = checks(variants, kind)
    medians = {name: got["step_ms"]["median"] for name, got in variants.items() if "step_ms" in got}
    ours = medians.get("ours")
    result["step_over_ours"] = {n: round(m / ours, 4) for n, m in medians.items() if ours}


def run_stack(world: World, receipt: two_gpus.Receipt, stack: str, options: Any) -> None:
    """Each variant that the receipt lacks. An error is noted, and the next variant follows."""
    s = stack_of(stack, options)
    result = about_stack(s, (stacks.SMALL if options.small else stacks.STACKS)[stack].layers)
    result["variants"] = receipt.content["sections"].get(stack, result)["variants"]
    for name in options.variants:
        if name in result["variants"]:
            continue
        result["variants"][name] = {"error": NOT_ENDED}
        receipt.put(stack, result)
        world.exchange("the receipt is written")  # before a rank may be lost
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        began, got, error = time.perf_counter(), {}, None
        try:
            got = measure(world, s, name, options)
        except Exception as problem:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            error = repr(problem)[:1500]  # a traceback has paths of this machine
        got |= together(world, error)
        got["seconds"] = round(time.perf_counter() - began, 1)
        result["variants"][name] = got
        compare(result, options.device)
        receipt.put(stack, result)
        if world.rank == 0:
            print(line(name, got), flush=True)
        if "error" in got:
            start_anew(world, got["error"])
        faulthandler.cancel_dump_traceback_later()
        gc.collect()  # FSDP2's modules refer to each other in circles
        torch._dynamo.reset()  # compiled code is that of its shapes
        if world.cuda:
            torch.cuda.empty_cache()


def together(world: World, error: str | None) -> dict[str, str]:
    """What went wrong on either rank."""
    try:
        texts = dict.fromkeys(text for text in world.exchange(error) if text)  # once each
    except Exception:  # the other rank is gone, or waits on its device
        return {"error": f"{LOST}; this one: {error}"}
    return {"error": "\n".join(texts)} if texts else {}


def start_anew(world: World, error: str) -> None:
    """Ends this process if torchrun starts another, or if the ranks no longer meet: after an error
    their devices may wait for each other."""
    left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > restarts()
    if left and LOST not in error:
        world.exchange("the receipt is written")
    if left or LOST in error:
        os._exit(1)  # in order it would wait for the other rank


def restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def line(name: str, got: dict[str, Any]) -> str:
    if "error" in got:
        return f"  {name:12s} ERROR {got['error']}"
    peak = max(got["peak_bytes"] or [0]) / 2**30
    return (
        f"  {name:12s} {got['step_ms']['median']:10.1f} ms {got['tokens_per_s_and_gpu']:9.0f} "
        f"tokens/s/GPU, MFU {got['mfu']:6.3f}, peak {peak:5.1f} GiB, loss {got['first_loss']:.4f} "
        f"to {got['last_loss']:.4f} ({got['seconds']} s)"
    )


def failures(sections: dict[str, dict]) -> list[str]:
    made = []
    for stack, result in sections.items():
        made += [f"{stack}, {n}: error" for n, got in result["variants"].items() if "error" in got]
        made += [f"{stack}: {c['name']}" for c in result.get("checks", []) if not c["passed"]]
    return made


def told(failed: list[str], rank: int) -> int:
    """The exit status."""
    if rank == 0:
        print("\n" + (f"{len(failed)} failed: {'; '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small shapes, few steps")
    add_names(parser, "stacks", stacks.STACKS)
    add_names(parser, "variants", stacks.VARIANTS)
    parser.add_argument(
        "--layers", type=positive, help="default: as many as an estimate gives 80 GB"
    )
    parser.add_argument("--sequences", type=positive, help="of a rank in a step; default: 4")
    parser.add_argument("--checkpoint", choices=("block", "attention"), default="block",
                        help="what backward computes again; default: %(default)s")  # fmt: skip
    parser.add_argument("--steps", type=positive, help="timed; default: 10; small: 2")
    parser.add_argument("--peak-tflops", type=positive, default=989,
                        help="of a GPU, for MFU; default: %(default)s (H100, H200)")  # fmt: skip
    parser.add_argument(
        "--json", type=report_file, default=two_gpus.ROOT / "receipts" / "end_to_end.json"
    )
    options = parser.parse_args()
    check_names(parser, options, stacks=stacks.STACKS, variants=stacks.VARIANTS)
    check_two(parser, options.device)
    try:
        for name in options.stacks:
            stack_of(name, options)
    except ValueError as problem:
        parser.error(f"--{problem}")
    options.steps = options.steps or (2 if options.small else 10)
    return options


def head(world: World, o: argparse.Namespace) -> dict[str, Any]:
    """What ran where, and how."""
    o.sections, o.repeats = o.stacks, o.steps  # two_gpus.py's names
    made = two_gpus.about(world, o)
    given = {"device": o.device, "stacks": ",".join(o.stacks), "variants": ",".join(o.variants),
             "layers": o.layers, "sequences": o.sequences, "checkpoint": o.checkpoint,
             "steps": o.steps, "peak-tflops": o.peak_tflops}  # fmt: skip
    words = [f"--{name} {value}" for name, value in given.items() if value is not None]
    made["command"] = " ".join([LAUNCH, *words, *["--small"] * o.small])
    made["steps"] = made.pop("repeats")
    return made | {
        "warmup_steps": WARMUP,
        "peak_tflops": o.peak_tflops,
        "restarts": restarts(),
        "training": "FSDP2 over 2 ranks; fp32 weights, gradients, AdamW",
        "tokens": "random, other ones in each step; no loss balances the experts",
        "flops_of_token": "6 * active weights + 6 * layers * context * heads * head",
    }


def main() -> int:
    options = parsed()
    earlier = {}
    # Before World, where ranks meet: rank 0 writes after that.
    if not restarts():
        options.json.unlink(missing_ok=True)
    elif options.json.exists():
        earlier = json.loads(options.json.read_text())["sections"]
    wanted = set(options.variants)
    if all(
        stack in earlier and wanted <= set(earlier[stack]["variants"]) for stack in options.stacks
    ):
        return told(failures(earlier), int(os.environ["RANK"]))  # nothing is left to do
    world = World(options.device, options.small, options.steps)
    world.timer = None  # its 256 MiB
    receipt = two_gpus.Receipt(options.json, world, head(world, options))
    receipt.content["sections"] |= earlier
    for stack in options.stacks:
        if world.rank == 0:
            print(f"\n{stack}", flush=True)
        run_stack(world, receipt, stack, options)
    status = told(failures(receipt.content["sections"]), world.rank)
    if world.rank == 0:
        print(f"{options.json}, {time.perf_counter() - world.began:.0f} s", flush=True)
    world.exchange("done")  # torchrun ends the others when one has failed
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
