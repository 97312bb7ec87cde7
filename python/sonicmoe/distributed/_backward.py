"""The experts' backward in two parts: exchanges of dx and of scores' gradients run between them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import _autograd


class Kept(NamedTuple):
    """What forward keeps of a rank's experts."""

    w1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor | None
    preact: torch.Tensor
    routing: torch.Tensor
    w1_up: torch.Tensor | None


def refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "sonicmoe.distributed: got create_graph=True, allowed: False, for the experts have no "
            "second derivative"
        )


def gradients_of_rows(
    ctx: Any,
    dout: torch.Tensor,
    top_k: int,
    kept: Kept,
    wants: Sequence[bool],
    wants_dx: bool,
) -> tuple[torch.Tensor, torch.Tensor, Callable]:
    """dx and the gradients of scores (T, K), with all that needs no x.

    The third one computes dW1 of x, unless that is None. It returns the gradients of w1, b1, w2,
    b2, the text of the layer, w1_up and b1_up: those that `wants` asks for, else None.
    """
    wants_dw1, _, wants_dw2, _, _, wants_dw1_up, _ = wants
    w1, w2, b2, preact, routing, w1_up = kept
    dpreact = _autograd.place_of_dpreact(ctx, preact)
    if dpreact is None:
        dpreact = torch.empty_like(preact)
    layer = ctx.layer
    dx, dscores, _, db1, dw2, db2, _, db1_up = torch.ops.sonicmoe.ids_backward(
        dout,
        dout,  # in the place of x, which nobody reads without dW1
        top_k,
        w1,
        w2,
        b2,
        preact,
        routing,
        layer,
        dpreact=dpreact,
        wants_dx=wants_dx,
        wants_dw1=False,
        wants_dw2=wants_dw2,
        w1_up=w1_up,
        wants_dw1_up=False,
    )

    def weight_gradients(x: torch.Tensor | None) -> list[torch.Tensor | None]:
        dw1 = dw1_up = None
        if x is not None:
            dw1, dw1_up = torch.ops.sonicmoe.up_proj_wgrad(
                x, dpreact, top_k, w1, w2, routing, layer, w1_up, wants_dw1, wants_dw1_up
            )
        made = dw1, db1, dw2, db2, None, dw1_up, db1_up
        return [gradient if wanted else None for gradient, wanted in zip(made, wants, strict=True)]

    return dx, dscores, weight_gradients
