"""Runs checks on several processes with gloo, which start once for all checks of a world size."""

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PASSED = "passed"


def _work(rank: int, ranks: int, folder: str, checks: dict[str, Callable]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            check(Path(folder))
        except Exception:
            # The ranks no longer wait for each other at the same place: nothing more can run.
            Path(folder, f"{name}.{rank}").write_text(traceback.format_exc())
            raise
        Path(folder, f"{name}.{rank}").write_text(PASSED)
        dist.barrier()
    dist.destroy_process_group()


def run_checks(ranks: int, folder: Path, checks: dict[str, Callable]) -> None:
    """Runs each check(folder) on `ranks` processes; what became of it lies in `folder`."""
    try:
        mp.spawn(_work, (ranks, str(folder), checks), nprocs=ranks)
    except (mp.ProcessRaisedException, mp.ProcessExitedException):
        pass  # told by `outcome`; once in a while gloo aborts a process that has ended all checks


def outcome(ranks: int, folder: Path, name: str) -> list[str]:
    """What each rank says of a check."""
    files = [folder / f"{name}.{rank}" for rank in range(ranks)]
    return [f.read_text() if f.exists() else "not reached: see other checks" for f in files]
