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
    order: torch.Tensor  # int32: the rows again, by tokens and then by ranks
    token_offsets: torch.Tensor  # (T+1) int32: where a token's rows begin in `order`
    row_of_pair: torch.Tensor  # (T, K): of the row that takes the pair along; of none, anything
    is_pair: torch.Tensor  # (T, K): the others are sentinels
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    pairs: int  # (token, expert) pairs that this rank computes


def _places(wanted: torch.Tensor, ends: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The `values` where `wanted`, flat, is true, int32; behind them anything. `ends` is the
    cumulative sum of `wanted`. Unlike nonzero this waits for nothing."""
    kept = values.new_empty(len(wanted) + 1, dtype=torch.int32)
    slot = torch.where(wanted, ends - 1, len(wanted))
    return kept.scatter_(0, slot, values.to(torch.int32))


def _plan(ids: torch.Tensor, experts: int, group: Group) -> _Plan:
    """Of ids (T, K) among all experts, `experts` of them on each rank. One host read."""
    tokens, device = ids.shape[0], ids.device
    owner = ids.div(experts, rounding_mode="floor")
    ranks = torch.arange(group.size, device=device, dtype=owner.dtype)
    owned = owner == ranks.view(-1, 1, 1)  # (ranks, T, K)
    goes = owned.any(2)
    sent = torch.stack((goes.sum(1), owned.sum((1, 2))), 1)  # rows and pairs, of each rank
    one = [1] * group.size
    counts = torch.cat((sent, exchanged(sent, one, one, group)), 1)

    by_rank = goes.flatten()
    ends = by_rank.cumsum(0)
    row = (ends - 1).view(goes.shape)
    of_tokens = _places(by_rank, ends, torch.arange(tokens, device=device).repeat(group.size))
    by_token = goes.T.flatten()
    token_ends = by_token.cumsum(0)
    order = _places(by_token, token_ends, row.T.flatten())
    token_offsets = torch.zeros(tokens + 1, dtype=torch.int32, device=device)
    token_offsets[1:] = token_ends.view(tokens, group.size)[:, -1]
    is_pair = (owner >= 0) & (owner < group.size)
    row_of_pair = row.T.gather(1, owner.clamp(0, group.size - 1).long())

    read = counts.tolist()  # the wait
    rows = [line[0] for line in read]
    return _Plan(
        of_tokens[: sum(rows)],
        order[: sum(rows)],
        token_offsets,
        row_of_pair,
        is_pair,
        rows,
        [line[2] for line in read],
        sum(line[3] for line in read),
    )


def _added(rows: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """The sums (T, d) of each token's rows, in fp32 and in the order of ranks."""
    slots = torch.arange(len(plan.order), dtype=torch.int32, device=rows.device)
    return torch.ops.sonicmoe.combine(rows, plan.order, slots, plan.token_offsets)


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
        dx = _added(exchanged(dx_rows, *back), plan) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None, None
        rows = exchanged(dscore_rows, *back)
        # Of a pair that no rank computes, the place is anything in range, if there is a row.
        dscores = rows.new_zeros(plan.is_pair.shape)
        if len(rows):
            row = plan.row_of_pair.clamp(0, len(rows) - 1)
            columns = torch.arange(rows.shape[1], device=rows.device)
            dscores = torch.where(plan.is_pair, rows[row, columns], dscores)
        return dx, dscores, None, None, None


class _Combine(torch.autograd.Function):
    """The sums (T, d) of rows that came back; backward spreads them again. Keeps no row."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, plan: _Plan) -> torch.Tensor:
        ctx.plan = plan
        return _added(rows, plan)

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
    id_rows = (id_rows - group.rank * count).flatten()

    mine = (id_rows >= 0) & (id_rows < count)
    numbers = torch.arange(len(mine), device=x.device)
    places = _places(mine, mine.cumsum(0), numbers)[: plan.pairs]
    out, _ = _layer.routed_layer(
        x_rows,
        score_rows.flatten().index_select(0, places),
        places.div(ids.shape[1], rounding_mode="floor"),
        id_rows.index_select(0, places),
        *experts,
    )
    return _Combine.apply(all_to_all(out, plan.sent, plan.received, group), plan)
