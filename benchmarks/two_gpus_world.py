"""What the sections of two_gpus.py share: two ranks, their clock, and what a section returns."""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SLEEP = 40_000_000  # cycles, some 20 ms: longer than a host takes to queue a step
TIMEOUT = timedelta(seconds=60)


def add_names(parser: argparse.ArgumentParser, option: str, known: Iterable[str]) -> None:
    parser.add_argument(f"--{option}", default=",".join(known), metavar="NAME,NAME",
                        help="default: %(default)s")  # fmt: skip


def check_names(parser: argparse.ArgumentParser, o: argparse.Namespace, **known: Iterable) -> None:
    """Turns the texts of add_names into lists, or ends the program."""
    for option, names in known.items():
        setattr(o, option, getattr(o, option).split(","))
        for name in getattr(o, option):
            if name not in names:
                parser.error(f"--{option}: got {name!r}, allowed: {', '.join(names)}")


def check_two(parser: argparse.ArgumentParser, device: str) -> None:
    """Ends the program unless there are two ranks and, for CUDA, two devices."""
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error("WORLD_SIZE: allowed: 2; start this with torchrun --nproc-per-node 2")
    if device == "cuda" and torch.cuda.device_count() < 2:
        parser.error(f"--device: got {torch.cuda.device_count()} CUDA devices, allowed: 2 and more")


class World:
    """This rank among two."""

    def __init__(self, device: str, small: bool, repeats: int) -> None:
        self.began = time.perf_counter()
        self.rank, self.small, self.repeats = int(os.environ["RANK"]), small, repeats
        self.size = 2
        self.cuda = device == "cuda"
        self.device = torch.device(device, self.rank if self.cuda else None)
        if self.cuda:
            torch.cuda.set_device(self.device)
            # The router's product in the layers that are spread: sums in fp32, as in our kernels.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        else:
            torch.set_num_threads(1)
        # torchrun's store keeps the keys of processes that it has started again.
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        group = {"store": store, "rank": rank, "world_size": size, "timeout": TIMEOUT}
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo", **group)
        self.hosts = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.timer = Timer(self)

    def exchange(self, value: Any) -> list[Any]:
        """Each rank's value, by way of the hosts."""
        made = [None] * self.size
        dist.all_gather_object(made, value, group=self.hosts)
        return made

    def most(self, values: list[float]) -> list[float]:
        """The larger of both ranks' values, one by one."""
        return [max(pair) for pair in zip(*self.exchange(values), strict=True)]

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def barrier(self) -> None:
        """Of the hosts, after their devices are through."""
        self.synchronize()
        dist.barrier(group=self.hosts)

    def seconds(self) -> float:
        return self.most([time.perf_counter() - self.began])[0]

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor on both."""
        dist.broadcast(tensor, 0)
        return tensor

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part along the first dimension."""
        return whole.chunk(self.size)[self.rank]


class Timer:
    """Milliseconds of a call on this rank's device; without CUDA, of the host."""

    def __init__(self, world: World) -> None:
        self.world, self.behind = world, 0
        if world.cuda:
            self.dirt = torch.empty(1 << 28, dtype=torch.uint8, device=world.device)
            self.signal = torch.zeros(1, device=world.device)
            dist.all_reduce(self.signal)

    def __call__(self, call: Callable[[], Any]) -> float:
        self.world.barrier()
        if not self.world.cuda:
            began = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - began)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.dirt.zero_()  # flushes L2
        torch.cuda._sleep(SLEEP)  # the host gets ahead
        dist.all_reduce(self.signal)  # both devices go on from here at the same time
        begin.record()
        kept = call()
        self.behind += begin.query()
        end.record()
        end.synchronize()
        del kept
        return begin.elapsed_time(end)


def measure(world: World, calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
    """The calls interleaved: the median over repeats of the slower rank's time.

    `behind` counts repeats in which a rank's device began before its host had queued the call, as
    it always does where the host waits for the device in between.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    behind = dict.fromkeys(calls, 0)
    order = list(calls)
    for repeat in range(-2, world.repeats):
        for name in order:
            world.timer.behind = 0
            took = world.timer(calls[name])
            if repeat >= 0:
                times[name].append(took)
                behind[name] += world.timer.behind
        order.reverse()
    made = {}
    for name, own in times.items():
        slower = world.most(own)
        made[name] = {
            "median": round(statistics.median(slower), 4),
            "least": round(min(slower), 4),
            "most": round(max(slower), 4),
            "behind": int(world.most([behind[name]])[0]),
        }
    return made


def check(name: str, got: Any, allowed: str, passed: bool) -> dict[str, Any]:
    return {"name": name, "got": got, "allowed": allowed, "passed": bool(passed)}


def target(name: str, got: float, needed: float, aim: float, larger: bool = False) -> dict:
    """A figure beside what is needed and aimed at: at most that, or at least if `larger`."""
    met = got >= needed if larger else got <= needed
    return {"name": name, "got": round(got, 4), "needed": needed, "aim": aim, "met": met}


def normal(world: World, scale: float, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bf16 numbers, by the seed alone."""
    generator = torch.Generator(world.device).manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, device=world.device)
    return drawn.mul_(scale).bfloat16()


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, of norms."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
