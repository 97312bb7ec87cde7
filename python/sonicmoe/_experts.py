"""The experts' weights as a module, and as the layer takes them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import _check


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
        draw = functools.partial(nn.init.normal_, mean=0.0, std=self.std)
        if _check.is_dtensor(self.weight):
            from .distributed._draw import draw_experts_  # imports torch.distributed: slow

            draw_experts_(self.weight, draw)
        else:
            draw(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """weight and bias as they are now, parametrized or adapted; x is for hooks alone."""
        return tensor_of(self, "weight"), tensor_of(self, "bias")

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


def tensor_of(module: nn.Module, name: str) -> Any:
    """The module's attribute of that name. nn.Module looks for parameters last, which takes a
    while."""
    own = module.__dict__
    if name in own or hasattr(type(module), name):  # some wrappers keep the parameter beside it
        return getattr(module, name)
    parameters = own["_parameters"]
    return parameters[name] if name in parameters else getattr(module, name)


def weights(
    name: str, made: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias as the layer takes them. What a parametrization or an adapter has made may
    lie in any order of memory: a copy puts it right."""
    weight = _check.local(f"{name}.weight", made[0], x)
    bias = _check.local(f"{name}.bias", made[1], x)
    return _in_order(weight), None if bias is None else _in_order(bias)


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.contiguous()


#: What the layers call the module's tensors, and what its callers know.
_OWN_NAMES = {
    "w1": "c_fc.weight",
    "b1": "c_fc.bias",
    "w2": "c_proj.weight",
    "b2": "c_proj.bias",
    "w1_main_grad": "c_fc.weight.main_grad",
    "w2_main_grad": "c_proj.weight.main_grad",
    "router_w": "router.weight",
    "logit_bias": "router.bias",
    "logits": "router(x)",
}


def in_own_names(run: Callable, *inputs: Any) -> Any:
    """run(*inputs), whose errors name the module's tensors."""
    if torch.compiler.is_compiling():
        return run(*inputs)
    try:
        return run(*inputs)
    except (TypeError, ValueError) as error:
        own = _check.renamed(error, _OWN_NAMES)
        if own is error:
            raise
        raise own from None
