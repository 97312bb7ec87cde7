"""FSDP2 beside ExpertParallel: the experts' group, and the norm of gradients on several meshes."""

from collections.abc import Iterable
from typing import Any

import torch
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
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for DTensors of several meshes beside plain parameters.

    Returns the norm of all gradients, a plain tensor, alike on each rank. Plain gradients are to be
    alike on each rank, too.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    groups: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    norms = [_norm(group, norm_type) for group in groups.values()]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
