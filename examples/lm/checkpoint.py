"""Checkpoints in a folder. One is whole once the file `latest` names it.

Each rank writes its own parts; what reads them may have other ranks. There is nothing to save of
batches and random numbers, which depend on the seed and the step alone.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

KEPT = 2
#: Entries of the optimizer by name of parameter, for another grouping of another number of ranks.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def latest(out: Path) -> Path | None:
    """The newest whole checkpoint."""
    marker = out / "latest"
    return out / marker.read_text().strip() if marker.exists() else None


def read(folder: Path) -> dict[str, Any]:
    """What was saved beside the tensors: `about`."""
    return json.loads((folder / "run.json").read_text())


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": of_model, "optimizer": of_optimizer}


def save(
    out: Path, about: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Path:
    """Saves on all ranks; `about` has the step."""
    folder = out / f"step-{about['step']:07}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was lost while it saved
    dist.barrier()
    dcp.save(_tensors(model, optimizer), checkpoint_id=folder)
    if dist.get_rank() == 0:
        (folder / "run.json").write_text(json.dumps(about, indent=1))
        (out / "latest.new").write_text(folder.name)
        os.replace(out / "latest.new", out / "latest")
        folders = sorted(out.glob("step-*"))
        # Later ones are of a run that was lost, or resumed from an earlier step.
        kept = [other for other in folders if other.name <= folder.name][-KEPT:]
        for other in set(folders) - set(kept):
            shutil.rmtree(other)
    return folder


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights and moments. The optimizer keeps its options, which may differ from the saved ones."""
    options = [{**group, "params": None} for group in optimizer.param_groups]
    tensors = _tensors(model, optimizer)
    dcp.load(tensors, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=tensors["model"],
        optim_state_dict=tensors["optimizer"],
        options=_OPTIONS,
    )
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group |= {**own, "params": group["params"]}
