"""sonicmoe: Mixture-of-Experts layers that keep little and run fast."""

from . import enums, functional
from .enums import ActivationType, KernelBackendMoE, is_glu
from .functional import (
    count_cumsum,
    experts,
    experts_from_logits,
    grouped_experts,
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
    switch_loss,
    token_rounding,
)
from .moe import MoE

__version__ = "0.1.0"

__all__ = [
    "ActivationType",
    "KernelBackendMoE",
    "MoE",
    "count_cumsum",
    "enums",
    "experts",
    "experts_from_logits",
    "functional",
    "grouped_experts",
    "is_glu",
    "moe_TC_softmax_topk_layer",
    "moe_general_routing_inputs",
    "switch_loss",
    "token_rounding",
]
