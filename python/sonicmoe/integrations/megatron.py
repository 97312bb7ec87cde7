"""Megatron-Core 0.16: the experts of its MoELayer by sonicmoe.

`replace_experts(spec)` puts :class:`SonicGroupedMLP` into the spec of a layer, a block or a model.
Router, dispatcher, shared experts, DDP, distributed optimizer and checkpoints stay Megatron's.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from .. import _check, functional
from .._main_grad import MainGrads, joined
from ._megatron_config import activation_of, check_config
from ._megatron_weights import Linear


class SonicGroupedMLP(MegatronModule):
    """Experts on the rows that a dispatcher has put in their order.

    Probabilities multiply the activation before fc2, as in Megatron. `linear_fc1.weight`
    (E, 2F, H) has gate rows, then up rows; `linear_fc2.weight` is (E, H, F). With
    `weight_per_expert` they are E parameters `weight0`, `weight1`, ... as Transformer Engine has.

    Weight gradients are made in backward, and `backward_dw` does nothing. The layer keeps rows and
    H for backward and no activation, so that recomputing `moe_act` saves nothing more.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: object = None,
        pg_collection: Any = None,
        *,
        weight_per_expert: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        check_config(config, self.tp_group.size())
        self.activation = activation_of(config)
        hidden = config.moe_latent_size or config.hidden_size
        width = config.moe_ffn_hidden_size
        sizes = {
            f"config.{'moe_latent_size' if config.moe_latent_size else 'hidden_size'}": hidden,
            "config.moe_ffn_hidden_size of a rank": width // self.tp_group.size(),
            "num_local_experts": num_local_experts,
            "top_k": 1,  # the dispatcher's may be any
        }
        _check.layer_sizes(**sizes)
        halves = 2 if config.gated_linear_unit else 1
        groups = self.ep_group, self.tp_group, self.dp_group
        self.linear_fc1 = Linear(
            "linear_fc1", num_local_experts, config, halves * width, hidden,
            halves=halves, split=0, init_method=config.init_method, apart=weight_per_expert,
            groups=groups,
        )  # fmt: skip
        self.linear_fc2 = Linear(
            "linear_fc2", num_local_experts, config, hidden, width,
            halves=1, split=1, init_method=config.output_layer_init_method,
            apart=weight_per_expert, groups=groups,
        )  # fmt: skip

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor | Sequence[int],
        permuted_probs: torch.Tensor,
        output_buffer: torch.Tensor | None = None,
        grad_input_buffer: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """The output of rows (R, H), of which expert e owns the next `tokens_per_expert[e]`: counts
        on any device. Rows behind the last are not read, and give zeros.

        The output is written to `output_buffer`, and backward writes the gradient of rows to
        `grad_input_buffer`, if there are any.
        """
        rows, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            rows = (probs.unsqueeze(-1) * rows).to(rows.dtype)
            probs = None
        counts = torch.as_tensor(tokens_per_expert)
        if counts.dtype not in (torch.int32, torch.int64):
            counts = counts.long()
        (w1, b1), (w2, b2) = self.linear_fc1(), self.linear_fc2()
        main_grads = None
        if self.config.gradient_accumulation_fusion and torch.is_grad_enabled():
            main_grads = MainGrads(
                w1=("experts.linear_fc1.weight", w1), w2=("experts.linear_fc2.weight", w2)
            )
            w1, w2 = main_grads.weights
        out = functional.grouped_experts(
            rows,
            counts.to(rows.device, non_blocking=True),
            _whole(w1),
            _whole(w2),
            probs,
            _whole(b1),
            _whole(b2),
            activation=self.activation,
            layout="concatenated" if self.config.gated_linear_unit else "interleaved",
            # Megatron multiplies the bias of fc2 by the probability, too.
            score_at="before_down" if b2 is None else "after_down",
            out=output_buffer,
            dx_out=grad_input_buffer,
            **(main_grads.named if main_grads else {}),
        )
        if main_grads:
            main_grads.zero_before(out)
        return out, None

    def backward_dw(self) -> None:
        """Nothing: backward has made the gradients of the weights."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """By the keys that SequentialMLP and TEGroupedMLP give their experts in a checkpoint."""
        made = {}
        for linear in (self.linear_fc1, self.linear_fc2):
            made.update(linear.sharded(prefix, tuple(sharded_offsets), metadata or {}))
        return made

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        """Takes a plain state dict of SequentialMLP, too."""
        for key in [k for k in state_dict if k.startswith(f"{prefix}local_experts.")]:
            expert, linear, kind = key[len(prefix) :].split(".")[1:4]
            state_dict[f"{prefix}{linear}.{kind}{expert}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _whole(weight: torch.Tensor | Sequence[torch.Tensor] | None) -> torch.Tensor | None:
    return weight if weight is None or isinstance(weight, torch.Tensor) else joined(weight)


def replace_experts(spec: Any, *, weight_per_expert: bool = False) -> Any:
    """Puts :class:`SonicGroupedMLP` into each MoE layer of a spec: that of a MoE layer, of a
    transformer layer or of a block. Returns the spec."""
    experts = ModuleSpec(module=SonicGroupedMLP, params={"weight_per_expert": weight_per_expert})
    if not _replace(spec, experts):
        raise ValueError(
            f"spec: got {type(spec).__name__} without MoESubmodules, allowed: a spec with MoE "
            "layers, as those made with num_experts"
        )
    return spec


def _replace(spec: Any, experts: ModuleSpec) -> int:
    """Of how many MoE layers."""
    if isinstance(spec, MoESubmodules):
        spec.experts = experts
        return 1
    if isinstance(spec, (list, tuple)):
        return sum(_replace(part, experts) for part in spec)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = [getattr(spec, field.name) for field in dataclasses.fields(spec)]
        return sum(_replace(part, experts) for part in parts)
    return 0
