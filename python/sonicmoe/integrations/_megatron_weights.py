"""The weights of one projection of Megatron's experts, and how its checkpoints hold them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import nn

from .._main_grad import as_one


class Linear(nn.Module):
    """`weight` (E, out, in) and `bias` (E, out), or `apart` E parameters of each: `weight0`, ...

    Tensor parallelism splits the dimension `split` of an expert's weight over its ranks, each of the
    `halves` by itself. So a rank has its part of the gate rows and its part of the up rows.
    """

    def __init__(
        self,
        name: str,
        experts: int,
        config: TransformerConfig,
        out_features: int,
        in_features: int,
        *,
        halves: int,
        split: int,
        init_method: Callable,
        apart: bool,
        groups: Sequence[Any],
    ) -> None:
        super().__init__()
        self.name, self.experts, self.halves, self.split = name, experts, halves, split
        self.apart, self.init_method, self.config = apart, init_method, config
        self.ep_group, self.tp_group, self.dp_group = groups
        self.whole_shape = out_features, in_features
        shape = [out_features, in_features]
        shape[split] = divide(shape[split], self.tp_group.size())
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        made = {"weight": torch.empty(experts, *shape, dtype=config.params_dtype, device=device)}
        if config.add_bias_linear:
            made["bias"] = made["weight"].new_zeros(experts, shape[0])
        for kind, whole in made.items():
            self._register(kind, whole)
        if config.perform_initialization:
            self.reset_parameters()

    def _register(self, kind: str, whole: torch.Tensor) -> None:
        # Megatron lays out its buffers from the last parameter to the first. With the last expert
        # registered first, the gradients of the experts follow each other there.
        names = [f"{kind}{e}" for e in reversed(range(self.experts))] if self.apart else [kind]
        parts = reversed(whole.unbind()) if self.apart else [whole]
        for name, part in zip(names, parts, strict=True):
            parameter = nn.Parameter(part)
            parameter.allreduce = self.config.expert_model_parallel_size == 1
            if kind == "weight" or self.split == 0:
                dimension = self.split + (0 if self.apart else 1)
                set_tensor_model_parallel_attributes(parameter, True, dimension, self.halves)
            self.register_parameter(name, parameter)

    def parameters_of(self, kind: str) -> list[nn.Parameter] | nn.Parameter | None:
        """The weights or the biases: one tensor, or those of the experts in order."""
        if not self.apart:
            return getattr(self, kind, None)
        found = [getattr(self, f"{kind}{e}", None) for e in range(self.experts)]
        return None if found[0] is None else found

    def forward(self) -> tuple[Any, Any]:
        """weight and bias. A call, for hooks that gather parameters."""
        return self.parameters_of("weight"), self.parameters_of("bias")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in self.parameters_of("weight"):
            if self.config.use_cpu_initialization:
                _initialize_affine_weight_cpu(
                    weight, *self.whole_shape, weight.shape[self.split], self.split,
                    self.init_method, self.halves, params_dtype=weight.dtype,
                    rank=self.tp_group.rank(), world_size=self.tp_group.size(),
                    skip_set_tensor_parallel_attributes=True,
                )  # fmt: skip
            else:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    self.init_method(weight)

    def _apply(self, fn: Callable, recurse: bool = True) -> "Linear":
        """Keeps the experts' tensors in one memory."""
        super()._apply(fn, recurse)
        for kind in ("weight", "bias"):
            parts = self.parameters_of(kind)
            if self.apart and parts is not None and as_one(parts) is None:
                moved = torch.stack([p.data for p in parts])
                for parameter, part in zip(parts, moved, strict=True):
                    parameter.data = part
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        """Takes weights apart or together, and leaves the extra states of other experts."""
        for key in [k for k in state_dict if k.startswith(f"{prefix}_extra_state")]:
            del state_dict[key]
        for kind in ("weight", "bias"):
            whole = f"{prefix}{kind}"
            parts = [f"{whole}{e}" for e in range(self.experts)]
            if self.apart and whole in state_dict:
                state_dict.update(zip(parts, state_dict.pop(whole).unbind(), strict=True))
            elif not self.apart and all(part in state_dict for part in parts):
                state_dict[whole] = torch.stack([state_dict.pop(part) for part in parts])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def sharded(self, prefix: str, offsets: tuple, metadata: dict) -> dict:
        """Their part of a sharded state dict."""
        alone = metadata.get("singleton_local_shards", False)
        first = self.ep_group.rank() * self.experts
        made = {}
        for kind in ("weight", "bias"):
            parts = self.parameters_of(kind)
            if parts is None:
                continue
            for e, part in enumerate(parts) if self.apart else [(0, parts)]:
                local_name = f"{prefix}{self.name}.{kind}{e if self.apart else ''}"
                make, merge = self._factory(kind, prefix, offsets, alone, first + e)
                key = f"{prefix}experts.{self.name}.{kind}"
                made[local_name] = ShardedTensorFactory(key, part, make, merge, self._replica(kind))
        for e in range(self.experts):  # other experts' modules ask a checkpoint for theirs
            key, at = self._place("_extra_state", prefix, offsets, alone, first + e)
            replica = 0, self.tp_group.rank(), self.dp_group.rank()
            made[f"{prefix}{self.name}._extra_state{e}"] = make_sharded_object_for_checkpoint(
                None, key, at, replica
            )
        return made

    def _replica(self, kind: str) -> tuple[int, int, int]:
        replicated = kind == "bias" and self.split != 0
        return 0, self.tp_group.rank() if replicated else 0, self.dp_group.rank()

    def _place(
        self, kind: str, prefix: str, offsets: tuple, alone: bool, expert: int
    ) -> tuple[str, tuple]:
        """The key of an expert's tensor in a checkpoint, and where it is: in one of all experts, or
        alone."""
        if alone:
            return f"{prefix}experts.{expert}.{self.name}.{kind}", offsets
        total = self.ep_group.size() * self.experts
        return f"{prefix}experts.{self.name}.{kind}", (*offsets, (len(offsets), expert, total))

    def _factory(
        self, kind: str, prefix: str, offsets: tuple, alone: bool, first: int
    ) -> tuple[Callable, Callable]:
        """What makes a checkpoint's tensors of ours, and ours of those."""
        rank, ranks = self.tp_group.rank(), self.tp_group.size()
        is_split = kind == "weight" or self.split == 0

        @torch.no_grad()
        def make(
            key: str, tensor: torch.Tensor, replica_id: tuple, flattened_range: slice | None
        ) -> list[ShardedTensor]:
            made = []
            for e, part in enumerate([tensor] if self.apart else tensor):
                key, at = self._place(kind, prefix, offsets, alone, first + e)
                for half, rows in enumerate(part.chunk(self.halves)):
                    place = ()
                    if is_split and (alone or self.halves == 1):
                        place = ((len(at) + self.split, rank, ranks),)
                    elif is_split:
                        place = ((len(at), half * ranks + rank, self.halves * ranks),)
                    name = key if not alone or self.halves == 1 else f"{key}_{'wv'[half]}"
                    made.append(
                        ShardedTensor.from_rank_offsets(
                            name, rows, *at, *place, replica_id=replica_id, prepend_axis_num=len(at)
                        )
                    )
            return made

        @torch.no_grad()
        def merge(made: list[torch.Tensor]) -> torch.Tensor:
            halves = [made[i : i + self.halves] for i in range(0, len(made), self.halves)]
            parts = [torch.cat(pair) if self.halves > 1 else pair[0] for pair in halves]
            return parts[0] if self.apart else torch.stack(parts)

        return make, merge
