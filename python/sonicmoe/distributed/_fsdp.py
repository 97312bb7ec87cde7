"""FSDP2 beside ExpertParallel: the experts' group, and the norm of gradients on several meshes."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..moe import MoE
from ._style import _Parallel


def fully_shard_experts(module: MoE, mesh: DeviceMesh, **options: Any) -> MoE:
    """FSDP2's `fully_shard` for the experts of a MoE under ExpertParallel, before its block:

        fully_shard_experts(block.moe, mesh["dp"])  # mesh: ("dp", "ep")
        fully_shard(block, mesh=all_ranks)

    `mesh`: the data-parallel ranks that hold the same experts, of one dimension, or of two for
    HSDP. The gradients of experts are divided by the number of all ranks, those of `mesh` times
    those of ExpertParallel: that is the mean over all ranks' losses, as for all other parameters.

    `options`: those of `fully_shard`.
    """
    parallel = _checked(module, mesh)
    _checked_reduction(module, mesh, options.get("mp_policy"))
    fully_shard([module.c_fc, module.c_proj, parallel], mesh=mesh, **options)
    assert isinstance(parallel, FSDPModule)  # fully_shard has changed the class
    parallel.set_gradient_divide_factor(float(mesh.size() * parallel.group.size))
    # gloo can sum, but not scale. With one rank in the last dimension torch divides a copy, and
    # would divide a second time after the sum.
    parallel.set_force_sum_reduction_for_comms(mesh.size(mesh.ndim - 1) > 1)
    parallel.is_sharded = True
    return module


def _checked(module: MoE, mesh: DeviceMesh) -> _Parallel:
    """What ExpertParallel has put into the module."""
    if not isinstance(module, MoE):
        raise TypeError(f"module: got {type(module).__name__}, allowed: sonicmoe.MoE")
    parallel = module.parallel
    if parallel is None:
        raise ValueError(
            "module: got a MoE without ExpertParallel, allowed: one under it (parallelize_module "
            "first); fully_shard itself is for others"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: got {type(mesh).__name__}, allowed: a DeviceMesh")
    own = set(mesh.mesh.flatten().tolist()) & set(parallel.mesh.mesh.flatten().tolist())
    if len(own) != 1:
        raise ValueError(
            f"mesh: got {mesh}, which shares {len(own)} ranks with {parallel.mesh}, that of "
            "ExpertParallel, allowed: one that crosses it, as mesh['dp'] of ('dp', 'ep')"
        )
    for name in ("c_fc", "c_proj"):
        for key, parameter in getattr(module, name).named_parameters():
            of = parameter.device_mesh if isinstance(parameter, DTensor) else None
            if of != parallel.mesh:
                raise ValueError(
                    f"{name}.{key}: got a parameter on {of}, allowed: a DTensor on "
                    f"{parallel.mesh}; fully_shard_experts comes once, before fully_shard"
                )
    return parallel


def _checked_reduction(module: MoE, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None) -> None:
    """torch divides fp16 gradients before and after the sum, and with one rank once more."""
    dtypes = (policy.reduce_dtype, policy.param_dtype) if policy is not None else ()
    dtype = next(filter(None, dtypes), module.c_fc.weight.dtype)
    if dtype == torch.float16 and mesh.size(mesh.ndim - 1) == 1:
        raise ValueError(
            "mp_policy: got gradients that are reduced in torch.float16, allowed: "
            "reduce_dtype=torch.float32 where the last dimension of mesh has one rank"
        )


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for DTensors of several meshes beside plain parameters.

    Returns the norm of all gradients, a plain tensor, alike on each rank. Plain gradients are to be
    alike on each rank, too.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    norm_type = float(norm_type)
    groups: dict[tuple | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(_place(parameter.grad), []).append(parameter)
    norms = [_norm(place, group, norm_type, foreach) for place, group in groups.items()]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"parameters: got gradients of norm {total.item()}, allowed: a finite norm, for "
            "error_if_nonfinite is True"
        )
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total, foreach)
    return total


def _place(gradient: torch.Tensor) -> tuple | None:
    """The mesh and the placements of a DTensor."""
    return (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None


def _norm(
    place: tuple | None, parameters: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """Of gradients at one place. get_total_norm of DTensors of two dimensions makes torch warn that
    ranks may differ, at each step."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if place is None:
        return get_total_norm(gradients, norm_type, foreach=foreach)
    mesh, placements = place
    own = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    some = [gradient for gradient in own if gradient.numel() > 0]
    zero = own[0].new_zeros((), dtype=torch.float32)
    norm = get_total_norm(some, norm_type, foreach=foreach) if some else zero
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            norm = _of_ranks(norm, norm_type, mesh.get_group(dimension))
    return norm


def _of_ranks(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Of the shards that the ranks hold, each with its norm."""
    norm = norm.clone()
    if math.isinf(norm_type):
        largest = norm_type > 0
        dist.all_reduce(norm, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN, group)
        return norm
    power = norm_type or 1.0  # the norm of type 0 is a sum itself
    norm = norm.pow(power)
    dist.all_reduce(norm, group=group)
    return norm.pow(1 / power)
