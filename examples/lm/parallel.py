"""Ranks: the process group, and how a model lies on them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import sonicmoe
from sonicmoe.distributed import ExpertParallel, fully_shard_experts

from .model import LanguageModel
from .settings import Settings


@dataclass(frozen=True)
class Ranks:
    device: torch.device
    rank: int
    size: int
    precision: str
    mesh: DeviceMesh  # ("dp", "ep"): consecutive ranks hold one set of experts


def device_and_precision(s: Settings) -> tuple[torch.device, str]:
    """ValueError where this machine has no such device."""
    able = [name.split()[0] for name in sonicmoe.devices()]
    has_gpu = any(name.startswith("cuda") for name in able)
    if s.device == "cpu" or (s.device == "auto" and not has_gpu):
        return torch.device("cpu"), "bf16" if s.precision == "bf16" else "f32"
    own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if own not in able:
        raise ValueError(f"--device: got {s.device}, allowed: cpu, or a rank's own of {able}")
    if s.precision == "f32":
        raise ValueError("--precision: got f32, allowed: auto, bf16 on cuda")
    return torch.device(own), "bf16"


@contextmanager
def ranks_of(s: Settings) -> Iterator[Ranks]:
    """The ranks of torchrun, or one process by itself."""
    device, precision = device_and_precision(s)
    kind, group = device.type, {}
    if "RANK" not in os.environ:
        group = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if kind == "cuda":
        torch.cuda.set_device(device)
        group["device_id"] = device
    # The watch of this program ends a rank that hangs before the process group does.
    limit = timedelta(seconds=s.timeout + 60)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=limit, **group)
    size = dist.get_world_size()
    mesh = init_device_mesh(kind, (size // s.ep, s.ep), mesh_dim_names=("dp", "ep"))
    yield Ranks(device, dist.get_rank(), size, precision, mesh)
    dist.destroy_process_group()  # not after an error: other ranks may not come


def spread(model: LanguageModel, s: Settings, ranks: Ranks) -> None:
    """Experts over "ep" and then "dp", all else over all ranks. Weights and sums are fp32."""
    narrow = torch.bfloat16 if ranks.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    everyone = ranks.mesh._flatten() if s.ep > 1 else ranks.mesh["dp"]
    for block in model.blocks:
        block.to(ranks.device)  # one at a time: a device has no room for the whole model
        if s.ep > 1:
            parallelize_module(block.moe, ranks.mesh["ep"], ExpertParallel(s.transport))
            fully_shard_experts(block.moe, ranks.mesh["dp"], mp_policy=policy)
        fully_shard(block, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
