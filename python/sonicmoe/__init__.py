"""sonicmoe: Mixture-of-Experts layers that keep little and run fast."""

from . import enums, functional, losses
from ._info import devices, has_cuda, kernels, version
from .enums import ActivationType, KernelBackendMoE, is_glu
from .functional import (
    count_cumsum,
    experts,
    experts_from_logits,
    grouped_experts,
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
    route,
    token_rounding,
)
from .losses import (
    count_choices,
    sequence_balance_loss,
    switch_loss,
    update_selection_bias,
    z_loss,
)
from .moe import MoE
from .router import PRESETS, RouterConfig

#: `0.1.0+cpu` says that this build has no kernels for CUDA devices.
__version__ = version()

__all__ = [
    "ActivationType",
    "KernelBackendMoE",
    "PRESETS",
    "MoE",
    "RouterConfig",
    "count_choices",
    "count_cumsum",
    "devices",
    "enums",
    "experts",
    "experts_from_logits",
    "functional",
    "grouped_experts",
    "has_cuda",
    "is_glu",
    "kernels",
    "losses",
    "moe_TC_softmax_topk_layer",
    "moe_general_routing_inputs",
    "route",
    "sequence_balance_loss",
    "switch_loss",
    "token_rounding",
    "update_selection_bias",
    "z_loss",
]
