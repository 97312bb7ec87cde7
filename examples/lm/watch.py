"""Ends a run well: on a signal after the step, and when another rank is lost, at once."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

POLL = 0.5  # seconds


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Watch:
    """Turns SIGINT and SIGTERM into `asked`, and ends this process when it can only wait.

    A rank that waits in a collective for a lost one runs no Python in its main thread, not even a
    signal's handler. A thread therefore looks at the processes of the other ranks on this machine,
    and at the time since `alive` was called. `end` says how to go on.
    """

    def __init__(self, timeout: float, how_to_go_on: Callable[[], str]) -> None:
        self.timeout, self.how_to_go_on = timeout, how_to_go_on
        self.asked = False
        self.rank = dist.get_rank()
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (socket.gethostname(), os.getpid()))
        self.here = {
            rank: pid
            for rank, (host, pid) in enumerate(everyone)
            if host == socket.gethostname() and _lives(pid)  # containers may share a host's name
        }
        self._over, self._told = threading.Event(), threading.Lock()

    def __enter__(self) -> "Watch":
        self.alive()
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        if dist.get_world_size() > 1:
            threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        if isinstance(error, RuntimeError) and (lost := self.lost(wait=4 * POLL)):
            self.end(f"lost {_named(lost)}: {str(error).splitlines()[0]}")
        self._over.set()
        if error is None:
            dist.barrier()  # no rank exits while another one still looks
        else:
            print(f"\ntrain_lm: {self.how_to_go_on()}", file=sys.stderr, flush=True)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _) -> None:
        self.asked = True
        if dist.get_world_size() == 1:  # a second one acts at once, as without us
            signal.signal(number, self._before[number])

    def alive(self) -> None:
        self._last = time.monotonic()

    def lost(self, wait: float = 0) -> list[int]:
        """Ranks of this machine whose process is gone. A connection breaks before that shows."""
        until = time.monotonic() + wait
        while True:
            gone = [rank for rank, pid in self.here.items() if not _lives(pid)]
            if gone or time.monotonic() > until:
                return gone
            time.sleep(POLL / 10)

    def _look(self) -> None:
        while not self._over.wait(POLL):
            if lost := self.lost():
                self.end(f"lost {_named(lost)}")
            if time.monotonic() - self._last > self.timeout:
                self.end(f"no step has ended for --timeout ({self.timeout}) seconds")

    def end(self, why: str) -> None:
        """Ends the process; the first rank of this machine that lives speaks for all."""
        self._told.acquire()  # never released: one thread ends the process
        gone = self.lost()
        if self.rank == min(rank for rank in self.here if rank not in gone):
            print(f"\ntrain_lm: {why}. {self.how_to_go_on()}", file=sys.stderr, flush=True)
        else:
            time.sleep(4 * POLL)  # the speaker is to find the reason, not that this rank is gone
        sys.stdout.flush()
        os._exit(1)


def _named(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
