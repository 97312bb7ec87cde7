"""What every process of test_distributed_training.py runs: training beside one process."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_checks import close, whole
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sonicmoe import MoE
from sonicmoe.distributed import ExpertParallel, Transport, clip_grad_norm_, fully_shard_experts

HIDDEN, EXPERTS, TOP_K, TOKENS, STEPS, LR = 16, 8, 3, 12, 4, 1e-2
TRANSPORTS = ("gather", "all_to_all")


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(EXPERTS, TOP_K, HIDDEN, 8, "swiglu", True, 0.2, **options)
        self.remake = None  # how activation checkpointing calls it

    def forward(self, x):
        return self._forward(x) if self.remake is None else self.remake(self._forward, x)

    def _forward(self, x):
        x = x + self.dense(x)
        out, aux = self.moe(self.norm(x))
        return x + out, aux


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))

    def forward(self, x):
        x, total = self.embed(x), 0
        for block in self.blocks:
            x, aux = block(x)
            total = total + aux
        return self.head(x), total


def make(**options):
    """The same model on each rank. `expert_scale` is a parameter beside router and experts."""
    torch.manual_seed(1)
    return Model(router="gemma4", **options)


@functools.cache
def mesh_of(*shape):
    names = ("dp", "ep") if len(shape) == 2 else ("replicate", "shard", "ep")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@functools.cache
def everybody(*shape):
    """The mesh of all ranks, for HSDP with its replicas."""
    mesh = mesh_of(*shape)
    if len(shape) == 2:
        return mesh._flatten("everybody")
    mesh["shard", "ep"]._flatten("shards")
    return mesh["replicate", "shards"]


def spread(model, shape, transport="auto"):
    style = ExpertParallel(transport, loss_counts="global")
    return parallelize_module(model, mesh_of(*shape)["ep"], {"blocks.*.moe": style})


def sharded(model, shape, transport="auto", of_experts=None, **options):
    """Expert parallelism and FSDP2, or HSDP, in the order in which they come."""
    spread(model, shape, transport)
    mesh = mesh_of(*shape)
    data = mesh["dp"] if len(shape) == 2 else mesh["replicate", "shard"]
    for block in model.blocks:
        fully_shard_experts(block.moe, data, **(of_experts or {}), **options)
        fully_shard(block, mesh=everybody(*shape), **options)
    return fully_shard(model, mesh=everybody(*shape), **options)


def shapes():
    """Of (dp, ep)."""
    ranks = dist.get_world_size()
    return [(1, ranks), (2, ranks // 2)]


def batches(step):
    """Every rank's (T, d), on each rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(dist.get_world_size(), TOKENS, HIDDEN, generator=generator)


def loss_of(model, x):
    out, aux = model(x)
    return out.square().mean() + 0.1 * out.sum(1).tanh().mean() + 0.1 * aux


def steps(model, parts_of, first=0, last=STEPS, optimizer=None, clip=None):
    """AdamW on the mean loss of the parts. Returns the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), LR)
    losses = []
    for step in range(first, last):
        parts = parts_of(step)
        loss = sum(loss_of(model, part) for part in parts) / len(parts)
        loss.backward()
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def own_part(step):
    return [batches(step)[dist.get_rank()]]


def one_process(model, data_ranks, **options):
    """Of all tokens. The switch loss is that of the tokens of each data-parallel rank."""
    return steps(model, lambda step: batches(step).view(data_ranks, -1, HIDDEN), **options)


@functools.cache
def expected(data_ranks):
    model = make()
    return one_process(model, data_ranks), dict(model.named_parameters())


def alike(model, losses, data_ranks, want=None):
    """Losses and weights beside one process, within 1e-6."""
    want_losses, weights = want or expected(data_ranks)
    losses = losses / dist.get_world_size()
    dist.all_reduce(losses)
    close(losses, want_losses, "losses")
    got = dict(model.named_parameters())
    assert got.keys() == weights.keys()
    for name, weight in weights.items():
        close(got[name].detach(), weight.detach(), name)


def same(got, want):
    """Bit for bit."""
    got, want = dict(got.named_parameters()), dict(want.named_parameters())
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(whole(got[name]), whole(want[name])), name


def check_fsdp(folder):
    for shape in shapes():
        for transport in TRANSPORTS:
            model = sharded(make(), shape, transport)
            alike(model, steps(model, own_part), shape[0])


CHECKS = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}
