"""The gather transport: every rank sees all tokens, and its experts compute what is theirs.

Forward gathers x, ids and scores, and adds up the partial outputs. Backward gathers x and dO, and
adds up dx and dscores. All sizes are static and nothing waits for the device.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .. import _autograd, _layer, _ops
from ._collectives import (
    Group,
    all_gather,
    gathered,
    gathered_together,
    reduce_scatter,
    scattered_sum,
)


def padded(tensor: torch.Tensor, rows: int | None, value: float = 0) -> torch.Tensor:
    """More rows of `value` behind those of a tensor (T, ...), up to `rows`."""
    if rows is None or rows == tensor.shape[0]:
        return tensor
    return F.pad(tensor, (0, 0, 0, rows - tensor.shape[0]), value=value)


def local_ids(ids: torch.Tensor, rank: int, experts: int) -> torch.Tensor:
    """Ids among all experts as those of the rank's own, -1 for the others."""
    mine = ids - rank * experts
    return torch.where((mine >= 0) & (mine < experts), mine, -1)


def own_first(
    ids: torch.Tensor, scores: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local ids (T, K) and scores in as many columns as the rank has experts, where K is larger: a
    token has each of them once at most, so that only sentinels are left out."""
    if ids.shape[1] <= experts:
        return ids, scores
    order = (ids < 0).to(torch.uint8).argsort(dim=1, stable=True)[:, :experts]
    return ids.gather(1, order), scores.gather(1, order)


def of_weights(wants: Sequence[bool], *gradients: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Gradients for autograd, without those that it does not want."""
    return [made if wanted else None for made, wanted in zip(gradients, wants, strict=True)]


class _Choices(torch.autograd.Function):
    """Everybody's ids and fp32 scores, in one exchange; gradients of scores are added up."""

    @staticmethod
    def forward(ctx, scores: torch.Tensor, ids: torch.Tensor, group: Group):
        ctx.group = group
        both = gathered(torch.cat((ids, scores.view(torch.int32)), 1), group)
        ids, bits = both.chunk(2, dim=1)
        ctx.mark_non_differentiable(ids)
        return bits.contiguous().view(torch.float32), ids

    @staticmethod
    def backward(ctx, dscores: torch.Tensor, _):
        return scattered_sum(dscores, ctx.group), None, None


class _Gathered(torch.autograd.Function):
    """The local experts on everybody's tokens. Only this rank's x is kept: backward gathers again.

    The operators are called themselves, for a layer with a history of its own would keep the
    gathered x. Saved tensors stay visible to hooks (activation checkpointing, offloading).
    """

    @staticmethod
    def forward(ctx, x, scores, ids, group, w1, b1, w2, b2, layer, w1_up, b1_up):
        o, _, preact, routing = torch.ops.sonicmoe.ids_forward(
            gathered(x, group), ids, scores, w1, b1, w2, b2, layer, w1_up=w1_up, b1_up=b1_up
        )
        ctx.save_for_backward(x, w1, w2, b2, preact, routing, w1_up)
        ctx.group, ctx.layer, ctx.top_k, ctx.owns_preact = group, layer, ids.shape[1], True
        return scattered_sum(o, group)

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "sonicmoe.distributed: got create_graph=True, allowed: False, for the experts have "
                "no second derivative"
            )
        x, w1, w2, b2, preact, routing, w1_up = ctx.saved_tensors
        wants_dx, wants_dscores, _, _, *wants = ctx.needs_input_grad
        wants_dw1, _, wants_dw2, _, _, wants_dw1_up, _ = wants
        douts, xs = gathered_together((dout, x), ctx.group)
        dx, dscores, dw1, db1, dw2, db2, dw1_up, db1_up = torch.ops.sonicmoe.ids_backward(
            douts,
            xs,
            ctx.top_k,
            w1,
            w2,
            b2,
            preact,
            routing,
            ctx.layer,
            dpreact=_autograd.place_of_dpreact(ctx, preact),
            wants_dx=wants_dx,
            wants_dw1=wants_dw1,
            wants_dw2=wants_dw2,
            w1_up=w1_up,
            wants_dw1_up=wants_dw1_up,
        )
        return (
            scattered_sum(dx, ctx.group) if wants_dx else None,
            dscores if wants_dscores else None,
            None,
            None,
            *of_weights(wants, dw1, db1, dw2, db2, None, dw1_up, db1_up),
        )


def gather_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    experts: _layer.ExpertArgs,
    group: Group,
    keep_gathered: bool,
    max_tokens: int | None,
) -> torch.Tensor:
    """o (T, d) of x (T, d), ids (T, K) among all experts and fp32 scores; `experts`: the
    ExpertArgs of this rank's."""
    tokens, count = x.shape[0], experts.w2.shape[0]
    if max_tokens is not None and tokens > max_tokens:
        raise ValueError(f"x: got {tokens} tokens, allowed: up to max_tokens ({max_tokens})")
    x, scores = padded(x, max_tokens), padded(scores, max_tokens)
    scores, ids = _Choices.apply(scores, padded(ids, max_tokens, -1), group)
    local, scores = own_first(local_ids(ids, group.rank, count), scores, count)
    if keep_gathered or torch.compiler.is_compiling():
        out, _ = _layer.experts(all_gather(x, group), local, scores, *experts)
        return reduce_scatter(out, group)[:tokens]
    _ops.require()
    x, checked = experts.checked(x, scores)
    w1, b1, w2, b2, text, _, _, w1_up, b1_up, _ = checked.of_operator()
    weights = w1, b1, w2, b2, text, w1_up, b1_up
    return _Gathered.apply(x, scores, local, group, *weights)[:tokens]
