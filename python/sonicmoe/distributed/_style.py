"""ExpertParallel: the experts of a :class:`sonicmoe.MoE` over the ranks of a mesh."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .. import _check, _layer, functional, losses
from .._autocast import autocast
from .._experts import Experts
from ..enums import KernelBackendMoE
from ..moe import MoE
from ..reference_routing import project
from ..router import Routing
from ._collectives import group_of, summed
from ._transport import Transport

LOSS_COUNTS = ("local", "global")


class ExpertParallel(ParallelStyle):
    """Spreads the experts of a `MoE` over a mesh of one dimension, for `parallelize_module`:

        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("ep",))
        parallelize_module(model, mesh, {"layers.*.moe": ExpertParallel()})

    The weights and biases of `c_fc` and `c_proj` become DTensors, Shard(0) over the experts, and
    forward takes each rank's own tokens to the experts and back. Experts are those of the mesh's
    first rank. All else stays as it is: ranks have one seed, or load the same weights.

    `transport`: a :class:`Transport`, or its name. Outputs and gradients are those of one module
    that holds all experts and sees the tokens of all ranks, its loss being the sum of theirs:
    gradients of experts are complete, those of the router come from this rank's tokens alone, like
    those of every other replicated parameter.

    `tokens_per_expert` counts this rank's tokens, and so do the losses. With `loss_counts="global"`
    the switch loss takes the counts of all ranks of the mesh, added up: its mean over them is then
    the loss of all their tokens, provided that each rank has as many.

    The default transport wants equally many tokens on each rank where the mesh has at most K.

    :func:`fully_shard_experts` shards experts further, over ranks that hold the same ones.
    """

    def __init__(self, transport: Transport | str = "auto", *, loss_counts: str = "local") -> None:
        super().__init__()
        self.transport = transport if isinstance(transport, Transport) else Transport(transport)
        if loss_counts not in LOSS_COUNTS:
            kind = ValueError if isinstance(loss_counts, str) else TypeError
            raise kind(
                f"loss_counts: got {loss_counts!r}, allowed: {', '.join(map(repr, LOSS_COUNTS))}"
            )
        self.loss_counts = loss_counts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _checked_mesh(device_mesh)
        moe = _checked_module(module, device_mesh.size())
        for part in (moe.c_fc, moe.c_proj):
            for name, parameter in list(part.named_parameters(recurse=False)):
                sharded = distribute_tensor(
                    parameter.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank
                )
                part.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))
        moe.parallel = _Parallel(device_mesh, self.transport, self.loss_counts)
        return moe


def _checked_mesh(mesh: DeviceMesh) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "mesh: got no process group, allowed: one of torch.distributed, after "
            "init_process_group (torchrun sets its environment)"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: got {type(mesh).__name__}, allowed: a DeviceMesh")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh: got {mesh.ndim} dimensions {mesh.mesh_dim_names}, allowed: one, as mesh['ep']"
        )
    try:
        mesh.get_group()._get_backend(torch.device(mesh.device_type))
    except RuntimeError as error:
        raise RuntimeError(
            f"mesh: got device type {mesh.device_type!r}, for which the process group has no "
            "backend, allowed: 'cpu' with gloo, 'cuda' with nccl"
        ) from error


def _checked_module(module: nn.Module, ranks: int) -> MoE:
    if not isinstance(module, MoE):
        raise TypeError(f"module: got {type(module).__name__}, allowed: sonicmoe.MoE")
    if module.routing != "top_k":
        raise ValueError(
            f"routing: got {module.routing!r}, allowed: 'top_k' under ExpertParallel, for rounding "
            "gives a token any number of experts"
        )
    if module.gradient_accumulation_fusion:
        raise ValueError(
            "gradient_accumulation_fusion: got True, allowed: False under ExpertParallel, whose "
            "weights are DTensors"
        )
    if module.recompute != "none":
        raise ValueError(
            f"recompute: got {module.recompute!r}, allowed: 'none' under ExpertParallel"
        )
    if module.num_experts % ranks != 0:
        raise ValueError(
            f"num_experts: got {module.num_experts}, allowed: multiples of {ranks}, the ranks of "
            "the mesh"
        )
    for name in ("c_fc", "c_proj"):
        part = getattr(module, name)
        if type(part) is not Experts or "weight" not in part._parameters:
            raise ValueError(
                f"{name}: got an adapted or parametrized {type(part).__name__}, allowed: a plain "
                "one; adapt it after ExpertParallel"
            )
        for key, parameter in part.named_parameters():
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"{name}.{key}: got a DTensor with placements {parameter.placements}, allowed: "
                    "a plain parameter; ExpertParallel comes first, once"
                )
    return module


def _checked_unit(name: str, part: nn.Module) -> None:
    """fully_shard marks all modules whose parameters are in its group, for Dynamo."""
    if getattr(part, "_is_fsdp_managed_module", False):
        raise ValueError(
            f"{name}: got experts in a group of fully_shard, which averages the gradients of other "
            "parameters there over too few ranks, or frees the experts before their use, allowed: "
            "sonicmoe.distributed.fully_shard_experts first, or ignored_params"
        )


class _Parallel(nn.Module):
    """What a MoE's forward does otherwise when its experts lie on several ranks.

    A module without parameters: the calls of c_fc and c_proj, and all that uses their weights, lie
    inside its own. FSDP2 shards the three as one group (:func:`fully_shard_experts`).
    """

    def __init__(self, mesh: DeviceMesh, transport: Transport, loss_counts: str) -> None:
        super().__init__()
        self.mesh, self.transport, self.loss_counts = mesh, transport, loss_counts
        self.group = group_of(mesh.get_group())
        self.is_sharded = False  # by fully_shard_experts

    def __deepcopy__(self, memo: dict) -> "_Parallel":
        return type(self)(self.mesh, self.transport, self.loss_counts)  # one mesh a process

    def forward(self, run: Callable[..., tuple], x: torch.Tensor, *rest: Any) -> tuple:
        return run(x, *rest)

    def extra_repr(self) -> str:
        return (
            f"ranks={self.group.size}, transport={self.transport}, "
            f"loss_counts={self.loss_counts!r}, is_sharded={self.is_sharded}"
        )

    def local(self, made: tuple[tuple, tuple], x: torch.Tensor) -> list[tuple]:
        """This rank's experts, (weight, bias) of c_fc and c_proj; gradients become DTensors."""
        if _check.is_dtensor(x):
            raise TypeError(
                "x: got a DTensor, allowed: this rank's tokens, x.to_local(), under ExpertParallel"
            )
        if x.device.type != self.mesh.device_type:
            raise ValueError(
                f"x: got a tensor on {x.device}, allowed: {self.mesh.device_type}, the mesh's"
            )
        return [
            (self._local(f"{name}.weight", weight), self._local(f"{name}.bias", bias))
            for name, (weight, bias) in zip(("c_fc", "c_proj"), made, strict=True)
        ]

    def _local(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if not _check.is_dtensor(tensor):
            raise TypeError(f"{name}: got a plain tensor, allowed: a DTensor under ExpertParallel")
        if tensor.device_mesh != self.mesh:
            raise ValueError(
                f"{name}: got a DTensor on {tensor.device_mesh}, allowed: {self.mesh}, that of "
                "ExpertParallel"
            )
        if tuple(tensor.placements) != (Shard(0),):
            raise ValueError(
                f"{name}: got a DTensor with placements {tuple(tensor.placements)}, allowed: "
                "(Shard(dim=0),)"
            )
        return tensor.to_local()

    def counts(self, counts: torch.Tensor) -> torch.Tensor:
        """What the switch loss takes of this rank's counts (E)."""
        return summed(counts, self.group) if self.loss_counts == "global" else counts

    def layer(self, module: MoE, kernel_backend_moe: KernelBackendMoE) -> "_Parallel":
        """In place of the module `_layer`, for a MoE of top-K."""
        if kernel_backend_moe is not KernelBackendMoE.sonicmoe:
            raise ValueError(
                f"kernel_backend_moe: got {kernel_backend_moe}, allowed: "
                "KernelBackendMoE.sonicmoe, under ExpertParallel"
            )
        _check.not_sharded_alone("router", module.router)
        if not self.is_sharded:
            for name in ("c_fc", "c_proj"):
                _checked_unit(name, getattr(module, name))
        return self

    def topk_layer(
        self,
        x: torch.Tensor,
        router_w: torch.Tensor,
        top_k: int,
        routing: Routing,
        *experts: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = project(x, router_w, routing.logit_bias, routing.config.logits == "f32")
        out, counts = self.logits_layer(x, logits, None, top_k, routing, *experts)
        return out, logits, counts

    def logits_layer(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        ids: None,
        top_k: int,
        routing: Routing,
        *experts: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _check.tensors(x=x, logits=logits)
        if logits.dtype == x.dtype:  # fp32 logits of a 16-bit x are to be fp32
            (logits,) = autocast(logits)
        (x,) = autocast(x)
        _check.supported("x", x.dtype)
        of_experts = _layer.ExpertArgs(*experts)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not of_experts.is_inference_mode):
            scores, ids = functional.route(
                logits,
                top_k,
                router=routing.config,
                selection_bias=routing.selection_bias,
                expert_scale=routing.expert_scale,
            )
            out = self.transport.run(x, ids, scores, of_experts, self.group)
        return out, losses.count_choices(ids, logits.shape[1])
