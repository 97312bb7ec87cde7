"""The experts' weights as a module, and as the layer takes them."""

import torch
from torch import nn

from . import _check


class _AddedToMainGrad(torch.autograd.Function):
    """Passes a weight on. Backward says that its gradient has been added to `main_grad`.

    The hooks that wait for a gradient get one of zeros, as Megatron's do from its own layers:
    without any, autograd would call them from another thread.
    """

    @staticmethod
    def forward(ctx, weight: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: None) -> torch.Tensor:
        ctx.weight.grad_added_to_main_grad = True
        return torch.zeros_like(ctx.weight)


class Experts(nn.Module):
    """The weights of one projection of all experts: weight (E, out, in), bias (E, out) or None."""

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, add_bias: bool, std: float
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.std = std
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if add_bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, mean=0.0, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """weight and bias as they are now, parametrized or adapted; x is for hooks alone."""
        return self.weight, self.bias

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


def accumulating(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight as the layer takes it, and what backward adds its gradient to."""
    if not weight.requires_grad:
        return weight, None
    if not isinstance(weight, nn.Parameter):
        raise ValueError(
            f"{name}.weight: got what a parametrization, an adapter, a hook or a DTensor has made, "
            "allowed: the parameter itself, for gradient_accumulation_fusion adds to its main_grad"
        )
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            f"{name}.weight.main_grad: got None, allowed: a torch.float32 tensor like the "
            "weight, for gradient_accumulation_fusion adds to it"
        )
    if getattr(weight, "overwrite_main_grad", False):
        raise ValueError(f"{name}.weight.overwrite_main_grad: got True, allowed: False")
    if hasattr(weight, "grad_added_to_main_grad"):
        if torch.compiler.is_compiling():  # no code of ours runs in that backward
            weight.grad_added_to_main_grad = True
        else:
            weight = _AddedToMainGrad.apply(weight)
    return weight, main_grad


def weights(
    name: str, made: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias as the layer takes them. What a parametrization or an adapter has made may
    lie in any order of memory: a copy puts it right."""
    weight, bias = made
    own = _check.local(f"{name}.weight", weight, x), _check.local(f"{name}.bias", bias, x)
    return tuple(t if t is None or isinstance(t, nn.Parameter) else t.contiguous() for t in own)
