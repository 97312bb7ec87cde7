"""The gather transport: every rank sees all tokens, and its experts compute what is theirs.

Forward gathers x, ids and scores, and adds up the partial outputs. Backward gathers x and dO, and
adds up dx and dscores. All sizes are static and nothing waits for the device.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .. import _layer, _ops
from ._backward import Kept, gradients_of_rows, refuse_second_derivative
from ._collectives import (
    Collectives,
    Group,
    all_gather,
    equal_tokens,
    equally_many,
    gathered,
    reduce_scatter,
    scattered_sum,
)


def padded(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, max_tokens: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With so many tokens; those behind the rank's own have sentinels."""
    tokens = x.shape[0]
    if max_tokens is None or max_tokens == tokens:
        return x, ids, scores
    if tokens > max_tokens:
        raise ValueError(f"x: got {tokens} tokens, allowed: up to max_tokens ({max_tokens})")
    behind = 0, 0, 0, max_tokens - tokens
    return F.pad(x, behind), F.pad(ids, behind, value=-1), F.pad(scores, behind)


def local_ids(ids: torch.Tensor, rank: int, experts: int) -> torch.Tensor:
    """Ids among all experts as those of the rank's own, out of [0, experts) for the others."""
    return ids - rank * experts


def own_first(
    ids: torch.Tensor, scores: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Local ids (T, K) and scores in as many columns as the rank has experts, where K is larger: a
    token has each of them once at most, so that only others' are left out. And which columns those
    were, None for all."""
    if ids.shape[1] <= experts:
        return ids, scores, None
    others = (ids < 0) | (ids >= experts)
    columns = others.to(torch.uint8).argsort(dim=1, stable=True)[:, :experts]
    return ids.gather(1, columns), scores.gather(1, columns), columns


def at_columns(some: torch.Tensor, columns: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """(T, K) of what belongs to those columns, with zeros in the others."""
    if columns is None:
        return some
    return some.new_zeros(len(some), top_k).scatter_(1, columns, some)


def joined(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Ids and fp32 scores (T, K) in one tensor (T, 2K), for one exchange."""
    return torch.cat((ids, scores.view(torch.int32)), 1)


def parted(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and scores again, in one copy."""
    halves = both.unflatten(1, (2, -1)).transpose(0, 1)
    ids, bits = halves.clone(memory_format=torch.contiguous_format).unbind()
    return ids, bits.view(torch.float32)


class _Choices(torch.autograd.Function):
    """Everybody's scores and ids; gradients of scores are added up."""

    @staticmethod
    def forward(ctx, scores: torch.Tensor, ids: torch.Tensor, group: Group):
        ctx.group = group
        ids, scores = parted(gathered(joined(ids, scores), group))
        ctx.mark_non_differentiable(ids)
        return scores, ids

    @staticmethod
    def backward(ctx, dscores: torch.Tensor, _):
        return scattered_sum(dscores, ctx.group), None, None


class _Gathered(torch.autograd.Function):
    """The local experts on everybody's tokens.

    Exchanges run while the experts compute what does not need them: forward gathers x while ids
    become local, backward gathers it again while dX is computed, and adds up dx during dW1.

    The operators are called themselves, for a layer with a history of its own would keep the
    gathered x. Saved tensors stay visible to hooks (activation checkpointing, offloading).
    """

    @staticmethod
    def forward(ctx, x, scores, ids, options, w1, b1, w2, b2, layer, w1_up, b1_up):
        exchanges, keep_gathered = options
        count, ctx.given = w2.shape[0], ids.shape[1]
        choices = exchanges.gathering("choices", joined(ids, scores))  # few bytes: they go first
        xs = exchanges.gathering("x", x)
        ids, scores = parted(choices.waited())
        ids = local_ids(ids, exchanges.group.rank, count)
        ids, scores, columns = own_first(ids, scores, count)
        xs = xs.waited()
        kept = None
        if ctx.needs_input_grad[4] or ctx.needs_input_grad[9]:  # w1, w1_up
            kept = exchanges.own(xs) if keep_gathered else x
        o, _, preact, routing = torch.ops.sonicmoe.ids_forward(
            xs, ids, scores, w1, b1, w2, b2, layer, w1_up=w1_up, b1_up=b1_up
        )
        ctx.save_for_backward(kept, w1, w2, b2, preact, routing, w1_up, columns)
        ctx.options, ctx.layer, ctx.top_k, ctx.owns_preact = options, layer, ids.shape[1], True
        return exchanges.scattering_sum("sums", o).waited()

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivative()
        x, w1, w2, b2, preact, routing, w1_up, columns = ctx.saved_tensors
        wants_dx, wants_dscores, _, _, *wants = ctx.needs_input_grad
        exchanges, keep_gathered = ctx.options
        douts = exchanges.gathering("dout", dout)
        xs = None if x is None or keep_gathered else exchanges.gathering("x", x)
        kept = Kept(w1, w2, b2, preact, routing, w1_up)
        dx, dscores, weight_gradients = gradients_of_rows(
            ctx, douts.waited(), ctx.top_k, kept, wants, wants_dx
        )
        dscores = at_columns(dscores, columns, ctx.given)
        x = x if xs is None else xs.waited()
        of_x = of_scores = None
        if wants_dx:
            of_x = exchanges.scattering_sum("sums", dx, beside=True)
        if wants_dscores:
            of_scores = exchanges.scattering_sum("dscores", dscores, beside=True)
        of_weights = weight_gradients(x)
        if not (wants_dx or wants_dscores):
            exchanges.rest()
        return (
            None if of_x is None else of_x.waited(),
            None if of_scores is None else of_scores.waited(),
            None,
            None,
            *of_weights,
        )


def _check_peer_copies(x: torch.Tensor) -> None:
    if not x.is_cuda:
        raise ValueError(f"peer_copies: got True, allowed: False, for x is on {x.device}")
    if x.device.index != torch.cuda.current_device():
        raise ValueError(
            f"x: got a tensor on {x.device}, allowed: the current device, "
            f"cuda:{torch.cuda.current_device()}, with peer_copies (torch.cuda.set_device)"
        )


def exchanges_of(x: torch.Tensor, group: Group, peer_copies: bool) -> Any:
    """Collectives, or PeerCopies."""
    if not peer_copies:
        return Collectives(group)
    _check_peer_copies(x)
    from ._peer_copies import peer_copies_of  # torch's symmetric memory takes a while to import

    return peer_copies_of(group)


_compared: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def _compare(x: torch.Tensor, count: int, group: Group) -> None:
    """Whether ranks have equally many tokens and experts. On CUDA, where the host waits for that,
    in the group's first call alone."""
    of_torch = group.of_torch()
    if x.is_cuda and (of_torch in _compared or torch.cuda.is_current_stream_capturing()):
        return
    mine = torch.tensor([[len(x), count]], dtype=torch.int32, device=x.device)
    tokens, experts = zip(*gathered(mine, group).tolist(), strict=True)
    equally_many(experts)
    equal_tokens(tokens, group.rank)
    _compared.add(of_torch)


def gather_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    experts: _layer.ExpertArgs,
    group: Group,
    keep_gathered: bool,
    max_tokens: int | None,
    peer_copies: bool,
) -> torch.Tensor:
    """o (T, d) of x (T, d), ids (T, K) among all experts and fp32 scores; `experts`: the
    ExpertArgs of this rank's."""
    tokens, count = x.shape[0], experts.w2.shape[0]
    x, ids, scores = padded(x, ids, scores, max_tokens)
    if torch.compiler.is_compiling():
        scores, ids = _Choices.apply(scores, ids, group)
        ids, scores, _ = own_first(local_ids(ids, group.rank, count), scores, count)
        out, _ = _layer.experts(all_gather(x, group), ids, scores, *experts)
        return reduce_scatter(out, group)[:tokens]
    _ops.require()
    x, _, of_operator = experts.checked(x, scores)
    w1, b1, w2, b2, text, _, _, w1_up, b1_up, _ = of_operator
    weights = w1, b1, w2, b2, text, w1_up, b1_up
    options = exchanges_of(x, group, peer_copies), keep_gathered
    _compare(x, count, group)
    out = _Gathered.apply(x, scores, ids, options, *weights)
    return out if len(out) == tokens else out[:tokens]  # a slice's backward would copy
