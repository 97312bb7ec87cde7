"""The router as a module: its product, tensors that stay fp32, and the count of tokens."""

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from . import _autograd, _check
from ._experts import tensor_of
from .reference_routing import project
from .router import RouterConfig


def keeping_fp32(
    function: Callable[[torch.Tensor], torch.Tensor], kept: Iterable[torch.Tensor | None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """For Module._apply: the function, which moves the kept tensors but does not round them."""
    leaves = [t for t in kept if t is not None and t.is_leaf]
    known = {id(t) for owner in leaves for t in (owner, owner.grad)}

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        made = function(tensor)
        if id(tensor) in known and made.is_floating_point() and made.dtype.itemsize < 4:
            return tensor.to(made.device, torch.float32)
        return made

    return apply


def keep_fp32(state_dict: dict[str, torch.Tensor], prefix: str, names: Iterable[str]) -> None:
    """Raises entries of a checkpoint to fp32, for load_state_dict(assign=True) takes them as they
    are."""
    for name in names:
        entry = state_dict.get(prefix + name)
        if entry is not None and entry.dtype.itemsize < 4:
            state_dict[prefix + name] = entry.float()


class Router(nn.Linear):
    """Logits (T, E) of x (T, d): x weight^T + bias, in the type of x, or in fp32 with `f32_logits`
    or an fp32 weight.

    `bias` (E), or None, is fp32 and added before the one rounding. It stays fp32 under
    `.to(dtype)`.
    """

    def __init__(self, hidden_size: int, num_experts: int, bias: bool, f32_logits: bool) -> None:
        super().__init__(hidden_size, num_experts, bias=False)
        self.f32_logits = f32_logits
        if bias:
            self.bias = nn.Parameter(torch.zeros(num_experts, dtype=torch.float32))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        draw = functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
        if _check.is_dtensor(self.weight):
            from .distributed._draw import draw_  # imports torch.distributed, which is slow

            draw_(self.weight, draw)
        else:
            draw(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return project(x, self.weight, self.bias, self.f32_logits)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        keep_fp32(state_dict, prefix, ("bias",))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable, recurse: bool = True) -> "Router":
        return super()._apply(keeping_fp32(fn, [self.bias]), recurse)


def plain_product(
    router: Any, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The router's weight, of this shape, and fp32 bias, or None where a call gives anything but
    their product with x. nn.Linear rounds another bias where the layer would not."""
    if type(router) is not Router and type(router) is not nn.Linear:
        return None
    if (
        "forward" in router.__dict__
        or router._forward_pre_hooks
        or router._forward_hooks
        or router._backward_pre_hooks
        or router._backward_hooks
        or nn.modules.module._has_any_global_hook()
    ):
        return None
    weight, bias = tensor_of(router, "weight"), tensor_of(router, "bias")
    if bias is not None and bias.dtype != torch.float32 and type(router) is nn.Linear:
        return None
    return (weight, bias) if weight.shape == shape else None


# Counts of tokens. A forward that runs inside a backward pass is a recomputation (activation
# checkpointing), which counted when it ran first. A compiled graph does not know where it runs: an
# operator asks then.

_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def _add_counts(total: torch.Tensor, counts: torch.Tensor) -> None:
    if _graph_task() == -1:
        total.add_(counts)


_library = torch.library.Library("sonicmoe", "FRAGMENT")
_library.define("add_counts(Tensor(a!) total, Tensor counts) -> ()")
_library.impl("add_counts", _add_counts, "CompositeExplicitAutograd")
_library._register_fake("add_counts", lambda total, counts: None)


def add_counts(total: torch.Tensor, counts: torch.Tensor) -> None:
    """total += counts, both (E), unless a backward pass is running."""
    if torch.compiler.is_compiling() or _autograd.transforms():
        torch.ops.sonicmoe.add_counts(total, counts)
    else:
        _add_counts(total, counts)


def warn_of_constant_weights(config: RouterConfig, router: RouterConfig | str | None) -> None:
    if router is None:
        got = (
            f"softmax_over_topk: got {config.order == 'select_then_score'}, norm_topk_probs: got "
            f"{config.renormalize}"
        )
        cure = "softmax_over_topk=False without norm_topk_probs"
    else:
        got = f"router: got {router!r}"
        cure = "order='score_then_select' without renormalize"
    warnings.warn(
        f"{got}, with num_experts_per_tok=1: every weight is constant, so the task's loss gives "
        f"the router no gradient; {cure} gives it one",
        stacklevel=3,
    )
