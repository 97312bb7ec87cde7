"""torchtitan 0.3: its routed experts by sonicmoe.

`--override.imports sonicmoe.integrations.torchtitan.experts` on the command line of a run, or
`replace_experts(model_config)` where the configuration is at hand. Names, shapes, initialization
and sharding of the parameters stay torchtitan's, so do router, dispatcher and shared experts.

The experts read w1 (gate), w3 (up) and w2 as they lie, cast to bf16 as torchtitan does. Without
expert parallelism no dispatcher runs: one call gathers rows, multiplies by the scores and sums.
With expert parallelism and a `transport`, sonicmoe.distributed takes the dispatcher's place.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torchtitan.config import Configurable, derive, override
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
)

from .. import _check, distributed, functional

#: Dispatchers that bring tokens to experts and back, and do nothing else.
PLAIN_DISPATCHERS = (LocalTokenDispatcher, AllToAllTokenDispatcher)


def local(weight: torch.Tensor) -> torch.Tensor:
    """What this rank has of a weight, in the type of torchtitan's products."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).bfloat16()


class SonicGroupedExperts(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def arguments(self) -> dict[str, torch.Tensor | str]:
        """Of the functional interface, by name."""
        return {
            "w1": local(self.w1_EFD),
            "w1_up": local(self.w3_EFD),
            "w2": local(self.w2_EDF),
            "activation": "swiglu",
        }

    def forward(
        self,
        x_RD: torch.Tensor,
        num_tokens_per_expert_E: torch.Tensor,
        layer: Callable | None = None,
    ) -> torch.Tensor:
        return run(self, x_RD, num_tokens_per_expert_E, layer)


def run(
    experts: GroupedExperts,
    rows: torch.Tensor,
    counts: torch.Tensor,
    layer: Callable | None,
) -> torch.Tensor:
    """The forward of experts. `layer` takes x and the weights; without it `rows` are in expert
    order, from any dispatcher, and those that no expert owns give 0.

    The layer runs inside the module's call so that hooks, such as FSDP2's, see it.
    """
    _refuse_typechecking()
    if layer is not None:
        return layer(rows.bfloat16(), **experts.arguments())
    if counts.dtype not in (torch.int32, torch.int64):
        counts = counts.long()
    out = functional.grouped_experts(rows.bfloat16(), counts, **experts.arguments())
    return out.type_as(rows)


class SonicRoutedExperts(RoutedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        transport: str | dict[str, Any] | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.transport = None if config.transport is None else _transport(config.transport)
        self.group = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        whole = {name: p.shape for name, p in self.inner_experts.named_parameters()}
        mesh = parallel_dims.get_optional_mesh("ep")
        used = self.transport is not None and mesh is not None
        if used:
            _check_ranks(whole, mesh.size())
        super().parallelize(parallel_dims)
        if used:
            _check_parts(self.inner_experts, whole, mesh.size())
            self.group = mesh.get_group()

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        dispatcher = self.token_dispatcher
        plain = type(dispatcher) in PLAIN_DISPATCHERS
        alone = plain and getattr(dispatcher, "ep_mesh", None) is None
        if self.group is None and not alone:
            return super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
        layer = partial(
            _layer,
            ids=topk_expert_ids_BLK.flatten(0, 1),
            weights=topk_scores_BLK.flatten(0, 1),
            group=self.group,
            transport=self.transport,
        )
        out_TD = self.inner_experts(x_BLD.flatten(0, 1), num_local_tokens_per_expert_E, layer)
        return out_TD.type_as(x_BLD).view(x_BLD.shape)


def _layer(
    x: torch.Tensor,
    *,
    ids: torch.Tensor,
    weights: torch.Tensor,
    group: ProcessGroup | None,
    transport: distributed.Transport | None,
    **experts: torch.Tensor | str,
) -> torch.Tensor:
    """Without a dispatcher, on this rank or on all of the group."""
    if group is None:
        return functional.experts(x, ids, weights, **experts)[0]
    return distributed.experts(x, ids, weights, **experts, group=group, transport=transport)


def _check_ranks(whole: dict[str, torch.Size], ranks: int) -> None:
    for shape in whole.values():
        if shape[0] % ranks != 0:
            raise ValueError(
                f"num_experts: got {shape[0]}, allowed: multiples of {ranks}, the ranks of expert "
                "parallelism, with a transport"
            )


def _check_parts(experts: GroupedExperts, whole: dict[str, torch.Size], ranks: int) -> None:
    """Each rank has whole experts: expert parallelism has divided them, and nothing else."""
    for name, parameter in experts.named_parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        count, *sizes = whole[name]
        wanted = count // ranks, *sizes
        if tuple(part.shape) != wanted:
            raise ValueError(
                f"inner_experts.{name}: got this rank's part {tuple(part.shape)}, allowed: "
                f"{wanted}, whole experts, with a transport; tensor parallelism that divides them "
                "needs torchtitan's dispatcher"
            )


def _refuse_typechecking() -> None:
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        raise ValueError(
            "debug.spmd_typechecking: got True, allowed: False, for sonicmoe's operators have no "
            "SPMD types"
        )


def _ours(config: type) -> type | None:
    """Our configuration of the experts that torchtitan's is of."""
    if config is GroupedExperts.Config:
        return SonicGroupedExperts.Config
    if config.__module__ == "torchtitan.models.gpt_oss.moe":  # its package imports a whole model
        from . import _torchtitan_gpt_oss

        return _torchtitan_gpt_oss.of(config)
    return None


@override(target=RoutedExperts.Config, description="Routed experts by sonicmoe.")
def experts(
    cfg: RoutedExperts.Config, transport: str | dict[str, Any] | None = None
) -> SonicRoutedExperts.Config:
    """The override: the same experts by sonicmoe. Experts that it does not know are refused.

    `transport`, a name that :class:`sonicmoe.distributed.Transport` knows or a dictionary of its
    arguments, carries tokens to the experts of other ranks. Without it, torchtitan's dispatcher
    does.
    """
    inner = cfg.inner_experts
    if transport is not None:
        _check_transport(transport, cfg.token_dispatcher)
    if type(cfg) is SonicRoutedExperts.Config:
        return cfg if transport is None else replace(cfg, transport=transport)
    if type(cfg) is not RoutedExperts.Config:
        raise TypeError(f"routed_experts: {_got(cfg)}, allowed: {_name(RoutedExperts.Config)}")
    ours = _ours(type(inner))
    if ours is None:
        raise TypeError(
            f"routed_experts.inner_experts: {_got(inner)}, allowed: {_name(GroupedExperts.Config)}, "
            "GptOssGroupedExperts.Config; quantized experts compute something else, and fused ones "
            "hold other weights"
        )
    sizes = {name: getattr(inner, name) for name in ("dim", "hidden_dim", "num_experts")}
    _check.layer_sizes(
        **{f"routed_experts.inner_experts.{name}": size for name, size in sizes.items()},
        **{"routed_experts.token_dispatcher.top_k": cfg.token_dispatcher.top_k},
    )
    return derive(
        cfg, SonicRoutedExperts.Config, inner_experts=derive(inner, ours), transport=transport
    )


def _transport(given: str | dict[str, Any]) -> distributed.Transport:
    if not isinstance(given, dict):
        return distributed.Transport(given)
    allowed = tuple(inspect.signature(distributed.Transport).parameters)
    for option in given:
        if option not in allowed:
            raise ValueError(f"transport: got {option!r}, allowed: {', '.join(allowed)}")
    return distributed.Transport(**given)


def _check_transport(given: str | dict[str, Any], dispatcher: LocalTokenDispatcher.Config) -> None:
    transport = _transport(given)
    allowed = [kind.Config for kind in PLAIN_DISPATCHERS]
    if type(dispatcher) not in allowed:
        raise TypeError(
            f"routed_experts.token_dispatcher: {_got(dispatcher)}, allowed: "
            f"{', '.join(map(_name, allowed))}, beside {transport}, which takes its place"
        )


def _name(config: type) -> str:
    return config.__qualname__


def _got(config: Configurable.Config) -> str:
    return f"got {_name(type(config))}"


def replace_experts(
    config: Configurable.Config, transport: str | dict[str, Any] | None = None
) -> int:
    """Replaces the routed experts of each MoE layer in a configuration, before it is built, and
    with a `transport` the dispatcher under expert parallelism. Returns of how many layers."""
    found = list(config.traverse(RoutedExperts.Config))
    if not found or found[0][2] is None:
        raise ValueError(
            f"config: {_got(config)}, allowed: the configuration of a model or trainer with "
            "RoutedExperts.Config inside"
        )
    made = [experts(cfg, transport) for _, cfg, _, _ in found]
    for (_, _, parent, place), new in zip(found, made, strict=True):
        if isinstance(parent, list):
            parent[place] = new
        else:
            setattr(parent, place, new)
    return len(made)
