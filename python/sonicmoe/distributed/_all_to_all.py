"""The all-to-all transport of tokens: each goes once to each rank that has one of its experts.

A token takes its ids and fp32 scores along. The rank runs the layer and returns one row a token,
which the sender adds up. Scores enter inside the experts, so that Y is never kept.

The host waits once, for the numbers of rows. Few operators are called, those themselves: a layer
with a history of its own costs the host much more.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .. import _layer, _ops
from ._backward import Kept, gradients_of_rows, refuse_second_derivative
from ._collectives import Group
from ._dispatch import Sent, packed, placed
from ._gather import exchanges_of, padded


def _dscores(sent: Sent, rows: torch.Tensor) -> torch.Tensor:
    """(T, K) of the rows (rows, K') that came back."""
    places = sent.places
    return F.pad(rows.flatten(), (1, 0)).index_select(0, places.flatten()).view(places.shape)


class _Experts(torch.autograd.Function):
    """The experts of all ranks on this rank's tokens. Kept: x as it arrived or as it is here, H and
    the routing."""

    @staticmethod
    def forward(ctx, x, scores, ids, dispatch, w1, b1, w2, b2, layer, w1_up, b1_up):
        with torch._C._AutoDispatchBelowAutograd():  # each call takes the host less
            make, exchanges = dispatch
            arrived, sent = make(exchanges, x, ids, scores, w2.shape[0])
            rows = arrived[:3]
            routing = torch.ops.sonicmoe.ids_routing(*rows, w2.shape[0], layer)
            layer = f"{layer} max_rows={arrived.max_rows()}"  # the wait of placed rows
            o, preact = torch.ops.sonicmoe.ids_experts_forward(
                *rows, routing, w1, b1, w2, b2, layer, w1_up, b1_up
            )
            sent = sent()
            out = torch.ops.sonicmoe.combine(sent.back("sums", o).waited(), sent.rows)
        kept = None
        if ctx.needs_input_grad[4] or ctx.needs_input_grad[9]:  # w1, w1_up
            kept = x if sent.comes_again else arrived.x
        ctx.save_for_backward(kept, w1, w2, b2, preact, routing, w1_up)
        ctx.sent, ctx.layer, ctx.owns_preact = sent, layer, True
        ctx.top_k = arrived.ids.shape[1]
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        x, w1, w2, b2, preact, routing, w1_up = ctx.saved_tensors
        wants_dx, wants_dscores, _, _, *wants = ctx.needs_input_grad
        sent = ctx.sent
        with torch._C._AutoDispatchBelowAutograd():
            douts = sent.there("dout", dout)
            kept = Kept(w1, w2, b2, preact, routing, w1_up)
            dx, dscores, weight_gradients = gradients_of_rows(
                ctx, douts.waited(), ctx.top_k, kept, wants, wants_dx
            )
            if x is not None and sent.comes_again:
                x = sent.there_aside("x", x).waited()
            dx = sent.back("sums", dx, beside=True) if wants_dx else None
            dscores = sent.back("dscores", dscores, beside=True) if wants_dscores else None
            of_weights = weight_gradients(x)
            if not (wants_dx or wants_dscores):
                sent.exchanges.rest()
            dx = None if dx is None else torch.ops.sonicmoe.combine(dx.waited(), sent.rows)
            dscores = None if dscores is None else _dscores(sent, dscores.waited())
        return dx, dscores, None, None, *of_weights


@torch.compiler.disable
def all_to_all_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    experts: _layer.ExpertArgs,
    group: Group,
    max_tokens: int | None,
    peer_copies: bool,
) -> torch.Tensor:
    """As `gather_experts`."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "transport: got 'all_to_all', allowed: 'gather' in a CUDA graph's capture, for the host "
            "reads numbers of rows"
        )
    tokens = x.shape[0]
    if peer_copies:
        x, ids, scores = padded(x, ids, scores, max_tokens)
    _ops.require()
    x, _, of_operator = experts.checked(x, scores)
    w1, b1, w2, b2, text, _, _, w1_up, b1_up, _ = of_operator
    dispatch = placed if peer_copies else packed, exchanges_of(x, group, peer_copies)
    out = _Experts.apply(x, scores, ids, dispatch, w1, b1, w2, b2, text, w1_up, b1_up)
    return out if len(out) == tokens else out[:tokens]
