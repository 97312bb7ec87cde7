"""The experts of torchtitan's gpt-oss: one interleaved tensor of gate and up, biases, a clamp."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward

from .torchtitan import local, run


class SonicGptOssGroupedExperts(GptOssGroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def arguments(self) -> dict[str, torch.Tensor | str]:
        """Of the functional interface, by name."""
        w1, b2, ranks = self.mlp1_weight_EGD, self.mlp2_bias_ED, 1
        if isinstance(w1, DTensor) and "tp" in (names := w1.device_mesh.mesh_dim_names or ()):
            ranks = w1.device_mesh.size(names.index("tp"))
        if isinstance(b2, DTensor):
            b2 = b2.to_local()
        return {
            "w1": local(w1),
            "b1": local(self.mlp1_bias_EG),
            "w2": local(self.mlp2_weight_EDF),
            # Each rank of tensor parallelism adds its part of the bias, and gets all its gradient.
            "b2": ScaleBiasForward.apply(b2, ranks, torch.bfloat16),
            "activation": f"swiglu_oai(limit={float(self.swiglu_limit)!r})",
            "layout": "interleaved",
        }

    def forward(
        self,
        x_RD: torch.Tensor,
        num_tokens_per_expert_E: torch.Tensor,
        layer: Callable | None = None,
    ) -> torch.Tensor:
        return run(self, x_RD, num_tokens_per_expert_E, layer)


def of(config: type) -> type | None:
    return SonicGptOssGroupedExperts.Config if config is GptOssGroupedExperts.Config else None
