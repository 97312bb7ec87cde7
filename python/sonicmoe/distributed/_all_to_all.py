"""The all-to-all transport of tokens: each goes once to each rank that has one of its experts.

A token takes its local ids and fp32 scores along. The rank runs the layer and returns one row a
token, which the sender adds up. Scores enter inside the experts, so that Y is never kept.
"""

from typing import NamedTuple

import torch

from .. import _layer
from ._collectives import Group, all_to_all, exchanged


class _Plan(NamedTuple):
    """Who sends what: `token_of_row` (sent rows) in the order of ranks, then of tokens."""

    token_of_row: torch.Tensor
    rank_of_row: torch.Tensor
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    pairs: int  # (token, expert) pairs that this rank computes


def _places(wanted: torch.Tensor, length: int) -> torch.Tensor:
    """The `length` indices where `wanted`, flat, is true. Unlike nonzero it waits for nothing."""
    slot = torch.where(wanted, wanted.cumsum(0) - 1, length)
    places = slot.new_empty(length + 1)
    return places.scatter_(0, slot, torch.arange(len(wanted), device=slot.device))[:length]


def _plan(ids: torch.Tensor, experts: int, group: Group) -> _Plan:
    """Of ids (T, K) among all experts, `experts` of them on each rank. One host read."""
    ranks = torch.arange(group.size, device=ids.device).view(-1, 1, 1)
    owned = (ids >= ranks * experts) & (ids < (ranks + 1) * experts)  # (ranks, T, K)
    goes = owned.any(2)
    sent = torch.stack((goes.sum(1), owned.sum((1, 2))), 1)  # rows and pairs, of each rank
    one = [1] * group.size
    counts = torch.cat((sent, exchanged(sent, one, one, group)), 1).cpu().tolist()
    rows = [line[0] for line in counts]
    places = _places(goes.flatten(), sum(rows))
    tokens = max(ids.shape[0], 1)
    return _Plan(
        places % tokens,
        places // tokens,
        rows,
        [line[2] for line in counts],
        sum(line[3] for line in counts),
    )


def _added(rows: torch.Tensor, plan: _Plan, tokens: int) -> torch.Tensor:
    """The sums (T, d) of each token's rows, in fp32 and in the order of ranks.

    A rank returns a token once, so that no two threads add to one element: the bits are the same
    each time.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    out = torch.zeros(tokens, rows.shape[1], dtype=wide, device=rows.device)
    parts = zip(plan.token_of_row.split(plan.sent), rows.split(plan.sent), strict=True)
    for token_of_row, part in parts:
        out.index_add_(0, token_of_row, part.to(wide))
    return out.to(rows.dtype)


class _Spread(torch.autograd.Function):
    """Rows of tokens (T, ...) in the order in which they are sent; backward adds them up."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, plan: _Plan) -> torch.Tensor:
        ctx.plan, ctx.tokens = plan, x.shape[0]
        return x[plan.token_of_row]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _added(gradient, ctx.plan, ctx.tokens), None


class _Combine(torch.autograd.Function):
    """The sums (T, d) of rows that came back; backward spreads them again. Keeps no row."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, plan: _Plan, tokens: int) -> torch.Tensor:
        ctx.plan = plan
        return _added(rows, plan, tokens)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient[ctx.plan.token_of_row], None, None


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
    count = experts.w2.shape[0]
    plan = _plan(ids, count, group)
    x_rows = all_to_all(_Spread.apply(x, plan), plan.received, plan.sent, group)
    score_rows = all_to_all(_Spread.apply(scores, plan), plan.received, plan.sent, group)
    mine = ids[plan.token_of_row] - (plan.rank_of_row * count).unsqueeze(1).to(ids.dtype)
    id_rows = exchanged(mine, plan.received, plan.sent, group).flatten()

    places = _places((id_rows >= 0) & (id_rows < count), plan.pairs)
    out, _ = _layer.routed_layer(
        x_rows,
        score_rows.flatten()[places],
        (places // ids.shape[1]).to(ids.dtype),
        id_rows[places],
        *experts,
    )
    return _Combine.apply(all_to_all(out, plan.sent, plan.received, group), plan, x.shape[0])
