"""Timers of the parts of a step. A part gets what the one before returned."""

import statistics
import time
from collections.abc import Callable

import torch

SLEEP = 40_000_000  # cycles, some 20 ms: longer than a host takes to queue a step


class DeviceTimer:
    """Time between CUDA events, after a flush of L2.

    The device sleeps before a step, so that what is queued then runs without waiting for the host.
    """

    def __init__(self, sleep: int = SLEEP) -> None:
        self.dirt = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        self.sleep = sleep

    def __call__(self, *parts: Callable) -> list[float]:
        """Milliseconds of each part."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        self.dirt.zero_()
        torch.cuda._sleep(self.sleep)
        marks[0].record()
        kept = []
        for part, mark in zip(parts, marks[1:], strict=True):
            kept.append(part(*kept[-1:]))
            mark.record()
        late = marks[0].query()
        torch.cuda.synchronize()
        if not late:
            return [
                begin.elapsed_time(end) for begin, end in zip(marks[:-1], marks[1:], strict=True)
            ]
        if self.sleep >= 8 * SLEEP:
            raise RuntimeError(f"the host took longer than the device slept: {self.sleep} cycles")
        self.sleep *= 2
        del kept
        return self(*parts)


class SteadyTimer:
    """As DeviceTimer, of a device that never rests: a call runs the parts again and again.

    Keeps the host ahead without a pause: a call queues `seconds` of work before it waits. L2 is
    flushed before each part.
    """

    def __init__(self, seconds: float = 0.2) -> None:
        self.dirt = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        self.seconds = seconds
        self.steps = 4

    def heat(self, *parts: Callable, seconds: float = 5.0) -> None:
        """Works until the power cap holds the clock."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            step = sum(self(*parts)) * 1e-3
            self.steps = max(4, round(self.seconds / step))

    def __call__(self, *parts: Callable) -> list[float]:
        """Milliseconds of each part, medians over the steps."""
        marks = []
        for _ in range(self.steps):
            for part in parts:
                self.dirt.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                part()
                end.record()
                marks.append((begin, end))
        late = marks[-1][0].query()
        torch.cuda.synchronize()
        if late:
            raise RuntimeError(f"the device waited for the host in {self.steps} steps")
        times = [begin.elapsed_time(end) for begin, end in marks]
        return [statistics.median(times[part :: len(parts)]) for part in range(len(parts))]


class HostTimer:
    """Wall time, for a CPU."""

    def __call__(self, *parts: Callable) -> list[float]:
        """Milliseconds of each part."""
        kept, marks = [], [time.perf_counter()]
        for part in parts:
            kept.append(part(*kept[-1:]))
            marks.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in zip(marks[:-1], marks[1:], strict=True)]
