"""torchtitan 0.3: its routed experts by sonicmoe.

`--override.imports sonicmoe.integrations.torchtitan.experts` on the command line of a run, or
`replace_experts(model_config)` where the configuration is at hand. Names, shapes, initialization
and sharding of the parameters stay torchtitan's, so do router, dispatcher and shared experts.

The experts read w1 (gate), w3 (up) and w2 as they lie, cast to bf16 as torchtitan does. Without
expert parallelism no dispatcher runs: one call gathers rows, multiplies by the scores and sums.
"""

from dataclasses import dataclass

import spmd_types as spmd
import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import Configurable, derive, override
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
)

from .. import _check, functional


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
        self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor
    ) -> torch.Tensor:
        """Rows in expert order from any dispatcher, of which those that no expert owns give 0."""
        return on_rows(self, x_RD, num_tokens_per_expert_E)


def on_rows(
    experts: GroupedExperts, rows: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    _refuse_typechecking()
    if counts.dtype not in (torch.int32, torch.int64):
        counts = counts.long()
    out = functional.grouped_experts(rows.bfloat16(), counts, **experts.arguments())
    return out.type_as(rows)


class SonicRoutedExperts(RoutedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        dispatcher = self.token_dispatcher
        # Those that only sort where there is no expert parallelism. Others have their own rules.
        sorts = type(dispatcher) in (LocalTokenDispatcher, AllToAllTokenDispatcher)
        if not sorts or getattr(dispatcher, "ep_mesh", None) is not None:
            return super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
        _refuse_typechecking()
        out_TD, _ = functional.experts(
            x_BLD.flatten(0, 1).bfloat16(),
            topk_expert_ids_BLK.flatten(0, 1),
            topk_scores_BLK.flatten(0, 1),
            **self.inner_experts.arguments(),
        )
        return out_TD.type_as(x_BLD).view(x_BLD.shape)


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
def experts(cfg: RoutedExperts.Config) -> SonicRoutedExperts.Config:
    """The override: the same experts by sonicmoe. Experts that it does not know are refused."""
    inner = cfg.inner_experts
    if type(cfg) is SonicRoutedExperts.Config:
        return cfg
    if type(cfg) is not RoutedExperts.Config:
        raise TypeError(f"routed_experts: {_got(cfg)}, allowed: {_name(RoutedExperts.Config)}")
    ours = _ours(type(inner))
    if ours is None:
        raise TypeError(
            f"routed_experts.inner_experts: {_got(inner)}, allowed: {_name(GroupedExperts.Config)}, "
            "GptOssGroupedExperts.Config; quantized experts compute something else, and fused ones "
            "hold other weights"
        )
    _check.layer_sizes(inner.dim, inner.hidden_dim, inner.num_experts, cfg.token_dispatcher.top_k)
    return derive(cfg, SonicRoutedExperts.Config, inner_experts=derive(inner, ours))


def _name(config: type) -> str:
    return config.__qualname__


def _got(config: Configurable.Config) -> str:
    return f"got {_name(type(config))}"


def replace_experts(config: Configurable.Config) -> int:
    """Replaces the routed experts of each MoE layer in a configuration, before it is built. Returns
    of how many layers."""
    found = list(config.traverse(RoutedExperts.Config))
    if not found or found[0][2] is None:
        raise ValueError(
            f"config: {_got(config)}, allowed: the configuration of a model or trainer with "
            "RoutedExperts.Config inside"
        )
    made = [experts(cfg) for _, cfg, _, _ in found]
    for (_, _, parent, place), new in zip(found, made, strict=True):
        if isinstance(parent, list):
            parent[place] = new
        else:
            setattr(parent, place, new)
    return len(made)
