"""Gradients that backward adds to the `main_grad` of a parameter, as Megatron's layers do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import _autograd


class _ToMainGrads(torch.autograd.Function):
    """Passes weights on: one as it is, several as one tensor (E, ...).

    If `fused`, their gradients go to their main_grads: the layer's backward has added them, or
    hands them over here. Hooks that wait for a gradient then get an uninitialized tensor, as
    Megatron's do from its own layers. Without one, autograd would call them from another thread.
    """

    @staticmethod
    def forward(ctx, fused: bool, several: bool, *weights: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.fused, ctx.several, ctx.weights = fused, several, weights
        if not several:
            return weights[0].view_as(weights[0])
        in_place = as_one(weights)
        return torch.stack(weights) if in_place is None else in_place

    @staticmethod
    def backward(ctx, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            gradients = [None] * len(ctx.weights)
        else:
            gradients = gradient.unbind() if ctx.several else [gradient]
        if ctx.fused:
            gradients = map(_added, ctx.weights, gradients)
        return None, None, *gradients


def _added(weight: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """What autograd gets for a weight whose gradient is in its main_grad, after adding the rest."""
    if not weight.requires_grad:
        return None
    if gradient is not None:
        overwrites = getattr(weight, "overwrite_main_grad", False)
        add = weight.main_grad.copy_ if overwrites else weight.main_grad.add_
        add(gradient)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # Memory of its own: autograd makes it `grad`, which its owner may change. A view without memory
    # (expand) would be copied there. Megatron adds `grad` to main_grad where zero_out_wgrad is set.
    if getattr(weight, "zero_out_wgrad", False) or torch.is_anomaly_enabled():
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors of one shape that follow each other in one memory, as (E, ...); None if they do not."""
    first = tensors[0].detach()
    storage, start = first.untyped_storage().data_ptr(), first.data_ptr()
    step = first.numel() * first.element_size()
    for i, tensor in enumerate(tensors):
        if (
            tensor.shape != first.shape
            or tensor.dtype != first.dtype
            or not tensor.is_contiguous()
            or tensor.data_ptr() != start + i * step
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights of one shape as one tensor (E, ...), read in place where :func:`as_one` can."""
    if torch.compiler.is_compiling():  # tracing knows nothing of the memory of its inputs
        return torch.stack(tuple(weights))
    return _ToMainGrads.apply(False, True, *weights)


class MainGrads:
    """The main_grads of one call of a layer, and its weights as it takes them.

    `weights` are by the layer's names, each with the user's name of it: a tensor, or those of each
    expert.
    """

    def __init__(self, **weights: tuple[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        taken = [_Weight(name, weight) for name, weight in weights.values()]
        # The layer adds to all main_grads or to none: then it hands the gradients over.
        adds = all(w.main_grad is not None for w in taken if w.trained)
        self.weights = [w.passed_on(adds) for w in taken]
        #: The layer's arguments by name.
        self.named = {}
        self._overwritten = []
        for argument, weight in zip(weights, taken, strict=True):
            if adds and weight.trained:
                self.named[f"{argument}_main_grad"] = weight.main_grad
                if weight.overwrites == {True}:
                    self._overwritten.append(weight.main_grad)

    def zero_before(self, out: torch.Tensor) -> None:
        """Lets each backward of `out`, the layer's, zero the main_grads that it overwrites."""
        for main_grad in self._overwritten:
            _autograd.zero_before(out.grad_fn, main_grad)


class _Weight:
    """A weight of :class:`MainGrads`."""

    def __init__(self, name: str, weight: torch.Tensor | Sequence[torch.Tensor]) -> None:
        self.several = not isinstance(weight, torch.Tensor)
        self.all = tuple(weight) if self.several else (weight,)
        self.trained = [w for w in self.all if w.requires_grad]
        for w in self.trained:
            _checked(name, w)
        self.overwrites = {bool(getattr(w, "overwrite_main_grad", False)) for w in self.trained}
        if torch.compiler.is_compiling() and self.trained:
            _check_traced(name, self)
        #: What the kernels can add to: main_grads in one memory, in the order of the experts.
        self.main_grad = None
        if len(self.trained) == len(self.all) and len(self.overwrites) == 1:
            main_grads = [w.main_grad for w in self.all]
            self.main_grad = as_one(main_grads) if self.several else main_grads[0]

    def passed_on(self, adds: bool) -> torch.Tensor:
        """To a layer that adds to main_grads, or does not."""
        if not self.trained:
            return joined(self.all) if self.several else self.all[0]
        tells = [w for w in self.trained if hasattr(w, "grad_added_to_main_grad")]
        if torch.compiler.is_compiling():
            for w in tells:
                w.grad_added_to_main_grad = True
        elif self.several or tells or not adds:
            return _ToMainGrads.apply(True, self.several, *self.all)
        return self.all[0]


def _checked(name: str, weight: torch.Tensor) -> None:
    if not isinstance(weight, nn.Parameter):
        raise ValueError(
            f"{name}: got what a parametrization, an adapter, a hook or a DTensor has made, "
            "allowed: the parameter itself, for gradient_accumulation_fusion adds to its main_grad"
        )
    if getattr(weight, "__fsdp_param__", False):
        raise ValueError(
            f"{name}: got a parameter of Megatron-FSDP, which makes main_grad in backward, allowed: "
            "others, or gradient_accumulation_fusion=False"
        )
    if getattr(weight, "main_grad", None) is None:
        raise ValueError(
            f"{name}.main_grad: got None, allowed: a torch.float32 tensor like the "
            "weight, for gradient_accumulation_fusion adds to it"
        )


def _check_traced(name: str, weight: _Weight) -> None:
    """No code of ours runs in the backward of a compiled call."""
    if weight.several:
        raise ValueError(
            f"{name}: got a weight for each expert, allowed: one tensor, with "
            "gradient_accumulation_fusion under torch.compile"
        )
    if True in weight.overwrites:
        raise ValueError(
            f"{name}.overwrite_main_grad: got True, allowed: False under torch.compile; zero "
            "main_grad before backward"
        )
