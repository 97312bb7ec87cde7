"""The all-to-all transport of tokens: each goes once to each rank that has one of its experts.

A token takes its ids and fp32 scores along. The rank runs the layer and returns one row a token,
which the sender adds up. Scores enter inside the experts, so that Y is never kept.

The host waits once, for the numbers of rows. Behind the wait the device has nothing to do until the
host has queued the exchanges and the layer. So what can be made before it is, and few operators are
called, those themselves: a layer with a history of its own costs the host much more.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .. import _layer, _ops
from ._backward import Kept, gradients_of_rows, refuse_second_derivative
from ._collectives import Exchange, Group, equally_many, gathering, waited
from ._gather import at_columns, joined, own_first, parted

ROWS = 1024  # of which the capacity of rows is a multiple, so that few texts of layers occur


class _Plan(NamedTuple):
    """Who sends what. Rows are sent in the order of ranks, then of tokens."""

    tokens: torch.Tensor  # int32: of each row
    columns: torch.Tensor | None  # (rows, K'): see own_first()
    owner: torch.Tensor  # (T, K) int32: the pair's rank, out of range for sentinels
    rows: torch.Tensor  # (T, ranks) int32: the token's row to each rank, or -1
    there: list[list[int]]  # rows from each rank to each
    back: list[list[int]]  # the same of what they return
    max_rows: int  # (token, expert) pairs that this rank computes, rounded up


class _Sent(NamedTuple):
    """What goes there."""

    x: torch.Tensor  # (rows, d)
    choices: torch.Tensor  # (rows, 2 K'): ids as the other rank counts them, and scores


def _plan(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, experts: int, group: Group
) -> tuple[_Plan, _Sent]:
    """Of x (T, d), ids (T, K) int32 among all experts, `experts` of them on each rank, and scores.
    One host read."""
    (tokens, top_k), (_, rank, size) = ids.shape, group
    owner = ids.div(experts, rounding_mode="floor")
    ranks = torch.arange(size, dtype=torch.int32, device=ids.device)
    of_ranks = owner.unsqueeze(2) == ranks
    to_ranks = torch.where(of_ranks.any(1), ranks, -1)  # (T, ranks)
    rows, row_slots, slot_rows = torch.ops.sonicmoe.sort_ids(to_ranks.flatten(), size)
    pairs = of_ranks.sum((0, 1), dtype=torch.int32)
    of_each = torch.full_like(pairs, experts)
    counts = gathering(torch.stack((rows, pairs, of_each)), group)

    # Of as many rows as there may be. Behind the last they are those of the first token.
    row_slots = row_slots[: tokens * min(size, top_k)].clamp(min=0)
    row_tokens = row_slots.div(size, rounding_mode="floor")
    to_rank = torch.sub(row_slots, row_tokens, alpha=size).unsqueeze(1)
    local = torch.sub(ids.index_select(0, row_tokens), to_rank, alpha=experts)
    local, of_rows, columns = own_first(local, scores.index_select(0, row_tokens), experts)
    choices, x_rows = joined(local, of_rows), x.index_select(0, row_tokens)

    lines = waited(counts).tolist()  # the wait
    there, pairs_there = lines[::3], lines[1::3]
    equally_many([line[0] for line in lines[2::3]])
    sent = sum(there[rank])
    plan = _Plan(
        row_tokens[:sent],
        None if columns is None else columns[:sent],
        owner,
        slot_rows.view(to_ranks.shape),
        there,
        [list(column) for column in zip(*there, strict=True)],
        -(-sum(line[rank] for line in pairs_there) // ROWS) * ROWS,
    )
    return plan, _Sent(x_rows[:sent], choices[:sent])


def _places(plan: _Plan) -> torch.Tensor:
    """(T, K) int64: of each pair, in the (rows, K) that come back. A sentinel's row is -1."""
    top_k = plan.owner.shape[1]
    column = plan.owner.clamp(-1, plan.rows.shape[1]).add_(1).long()
    row = F.pad(plan.rows, (1, 1), value=-1).gather(1, column)
    return torch.arange(top_k, device=row.device).add(row, alpha=top_k)


def _dscores(plan: _Plan, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(T, K) of the rows (rows, K') that came back. Behind them stands a row of zeros, which is
    that of sentinels."""
    rows = at_columns(rows, plan.columns, places.shape[1])
    return F.pad(rows, (0, 0, 0, 1)).take(places)


class _Experts(torch.autograd.Function):
    """The experts of all ranks on this rank's tokens. Kept: x as it arrived, H and the routing."""

    @staticmethod
    def forward(ctx, x, scores, ids, group, w1, b1, w2, b2, layer, w1_up, b1_up):
        with torch._C._AutoDispatchBelowAutograd():  # each call takes the host less
            plan, sent = _plan(x, ids, scores, w2.shape[0], group)
            # The device has nothing to do until the host has queued these and the layer.
            choices, x_rows = (Exchange(t, plan.there, group) for t in (sent.choices, sent.x))
            del sent
            ids, scores = parted(choices.waited())
            x_rows, layer = x_rows.waited(), f"{layer} max_rows={plan.max_rows}"
            o, _, preact, routing = torch.ops.sonicmoe.ids_forward(
                x_rows, ids, scores, w1, b1, w2, b2, layer, w1_up=w1_up, b1_up=b1_up
            )
            out = Exchange(o, plan.back, group)
            ctx.places = _places(plan)
            out = torch.ops.sonicmoe.combine(out.waited(), plan.rows)
        of_w1 = ctx.needs_input_grad[4] or ctx.needs_input_grad[9]  # w1, w1_up
        ctx.save_for_backward(x_rows if of_w1 else None, w1, w2, b2, preact, routing, w1_up)
        ctx.plan, ctx.group, ctx.layer, ctx.owns_preact = plan, group, layer, True
        ctx.top_k = ids.shape[1]
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        x_rows, w1, w2, b2, preact, routing, w1_up = ctx.saved_tensors
        wants_dx, wants_dscores, _, _, *wants = ctx.needs_input_grad
        plan, group = ctx.plan, ctx.group
        dout_rows = Exchange(dout.index_select(0, plan.tokens), plan.there, group)
        kept = Kept(w1, w2, b2, preact, routing, w1_up)
        dx, dscores, weight_gradients = gradients_of_rows(
            ctx, dout_rows.waited(), ctx.top_k, kept, wants, wants_dx
        )
        dx = Exchange(dx, plan.back, group) if wants_dx else None
        dscores = Exchange(dscores, plan.back, group) if wants_dscores else None
        of_weights = weight_gradients(x_rows)
        return (
            None if dx is None else torch.ops.sonicmoe.combine(dx.waited(), plan.rows),
            None if dscores is None else _dscores(plan, ctx.places, dscores.waited()),
            None,
            None,
            *of_weights,
        )


@torch.compiler.disable
def all_to_all_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    experts: _layer.ExpertArgs,
    group: Group,
) -> torch.Tensor:
    """As `gather_experts`."""
    _ops.require()
    x, checked = experts.checked(x, scores)
    w1, b1, w2, b2, text, _, _, w1_up, b1_up, _ = checked.of_operator()
    return _Experts.apply(x, scores, ids, group, w1, b1, w2, b2, text, w1_up, b1_up)
