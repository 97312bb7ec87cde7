"""The all-to-all transport of tokens: each goes once to each rank that has one of its experts.

A token takes its ids and fp32 scores along. The rank runs the layer and returns one row a token,
which the sender adds up. Scores enter inside the experts, so that Y is never kept.

The host waits once, for the numbers of rows. What needs no such number is queued before the wait;
after it tokens come first, so that the device copies them while the host queues the rest.
"""

from typing import NamedTuple

import torch

from .. import _layer, _ops
from ._collectives import Group, all_to_all, exchanged


class _Plan(NamedTuple):
    """Who sends what. Rows are sent in the order of ranks, then of tokens."""

    tokens: torch.Tensor  # int32: of each row
    owner: torch.Tensor  # (T, K) int32: the pair's rank, out of range for sentinels
    rows: torch.Tensor  # (T, K) int32: the row of the first pair of a token and rank; else -1
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    pairs: int  # (token, expert) pairs that this rank computes


def _same_rank(owner: torch.Tensor) -> torch.Tensor:
    """(T, K, K): do a token's two pairs go to one rank?"""
    return owner.unsqueeze(2) == owner.unsqueeze(1)


def _plan(ids: torch.Tensor, experts: int, group: Group) -> _Plan:
    """Of ids (T, K) int32 among all experts, `experts` of them on each rank. One host read."""
    owner = ids.div(experts, rounding_mode="floor")
    first = owner.masked_fill(_same_rank(owner).tril(-1).any(2), -1)
    rows, row_slots, slot_rows = torch.ops.sonicmoe.sort_ids(first.flatten(), group.size)
    pairs, _ = torch.ops.sonicmoe.count_cumsum(owner.flatten(), group.size)
    sent, one = torch.stack((rows, pairs), 1), [1] * group.size
    counts = torch.cat((sent, exchanged(sent, one, one, group)), 1)
    tokens = row_slots.div(ids.shape[1], rounding_mode="floor")

    read = counts.tolist()  # the wait
    sent = [line[0] for line in read]
    return _Plan(
        tokens[: sum(sent)],
        owner,
        slot_rows.view(ids.shape),
        sent,
        [line[2] for line in read],
        sum(line[3] for line in read),
    )


def _local_pairs(
    id_rows: torch.Tensor, pairs: int, experts: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where this rank's `pairs` lie in the ids (M, K) that arrived, flat, and their local ids."""
    ids = id_rows.flatten() - rank * experts
    key = ids.div(experts, rounding_mode="floor")  # 0 for this rank's
    places = torch.ops.sonicmoe.sort_ids(key, 1)[1][:pairs]
    return places, ids.index_select(0, places)


class _Dispatch(torch.autograd.Function):
    """x (T, d), ids and scores (T, K) as the rows that arrive; gradients of x and scores return."""

    @staticmethod
    def forward(ctx, x, scores, ids, plan: _Plan, group: Group):
        ctx.plan, ctx.group = plan, group
        there = plan.received, plan.sent, group
        x_rows = exchanged(x.index_select(0, plan.tokens), *there)
        both = torch.cat((ids, scores.view(torch.int32)), 1).index_select(0, plan.tokens)
        id_rows, score_rows = exchanged(both, *there).chunk(2, dim=1)
        ctx.mark_non_differentiable(id_rows)
        return x_rows, score_rows.contiguous().view(torch.float32), id_rows

    @staticmethod
    def backward(ctx, dx_rows, dscore_rows, _):
        plan, group = ctx.plan, ctx.group
        back = plan.sent, plan.received, group
        dx = dscores = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.sonicmoe.combine(exchanged(dx_rows, *back), plan.rows)
        if ctx.needs_input_grad[1]:
            rows = exchanged(dscore_rows, *back)
            row = torch.where(_same_rank(plan.owner), plan.rows.unsqueeze(1), -1).amax(2)
            # Sentinels have no row: theirs is the one of zeros behind the last.
            rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
            dscores = rows.gather(0, torch.where(row < 0, len(rows) - 1, row).long())
        return dx, dscores, None, None, None


class _Combine(torch.autograd.Function):
    """The sums (T, d) of rows that came back; backward spreads them again. Keeps no row."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, plan: _Plan) -> torch.Tensor:
        ctx.plan = plan
        return torch.ops.sonicmoe.combine(rows, plan.rows)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.index_select(0, ctx.plan.tokens), None


@torch.compiler.disable
def all_to_all_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    experts: _layer.ExpertArgs,
    group: Group,
) -> torch.Tensor:
    """As `gather_experts`. The layer's lists have one entry for each pair, so that H has no row
    that nobody uses."""
    _ops.require()
    count = experts.w2.shape[0]
    plan = _plan(ids, count, group)
    x_rows, score_rows, id_rows = _Dispatch.apply(x, scores, ids, plan, group)
    # The rows that arrive have a history if either has one: the experts are to see which.
    x_rows = x_rows if x.requires_grad else x_rows.detach()
    score_rows = score_rows if scores.requires_grad else score_rows.detach()
    places, local_ids = _local_pairs(id_rows, plan.pairs, count, group.rank)
    out, _ = _layer.routed_layer(
        x_rows,
        score_rows.flatten().index_select(0, places),
        places.div(ids.shape[1], rounding_mode="floor"),
        local_ids,
        *experts,
    )
    return _Combine.apply(all_to_all(out, plan.sent, plan.received, group), plan)
