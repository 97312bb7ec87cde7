"""The all-to-all transport of tokens: each goes once to each rank that has one of its experts.

A token takes its ids and fp32 scores along. The rank runs the layer and returns one row a token,
which the sender adds up. Scores enter inside the experts, so that Y is never kept.

The host waits once, for the numbers of rows. Behind the wait the device has nothing to do until the
host has queued the exchanges and the layer. So forward and backward call few operators, and those
themselves: a layer with a history of its own costs the host much more.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .. import _autograd, _layer, _ops
from ._collectives import Group, exchanged, exchanging, waited
from ._gather import of_weights


class _Plan(NamedTuple):
    """Who sends what. Rows are sent in the order of ranks, then of tokens."""

    tokens: torch.Tensor  # int32: of each row
    owner: torch.Tensor  # (T, K) int32: the pair's rank, out of range for sentinels
    rows: torch.Tensor  # (T, ranks) int32: the token's row to each rank, or -1
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    pairs: int  # (token, expert) pairs that this rank computes


def _plan(ids: torch.Tensor, experts: int, group: Group) -> _Plan:
    """Of ids (T, K) int32 among all experts, `experts` of them on each rank. One host read."""
    owner = ids.div(experts, rounding_mode="floor")
    ranks = torch.arange(group.size, dtype=torch.int32, device=ids.device)
    of_ranks = owner.unsqueeze(2) == ranks
    to_ranks = torch.where(of_ranks.any(1), ranks, -1)  # (T, ranks)
    rows, row_slots, slot_rows = torch.ops.sonicmoe.sort_ids(to_ranks.flatten(), group.size)
    sent = torch.stack((rows, of_ranks.sum((0, 1), dtype=torch.int32)), 1)
    one = [1] * group.size
    counts = torch.cat((sent, exchanged(sent, one, one, group)), 1)
    tokens = row_slots.div(group.size, rounding_mode="floor")

    read = counts.tolist()  # the wait
    sent = [line[0] for line in read]
    return _Plan(
        tokens[: sum(sent)],
        owner,
        slot_rows.view(to_ranks.shape),
        sent,
        [line[2] for line in read],
        sum(line[3] for line in read),
    )


class _Pairs(NamedTuple):
    """The layer's lists: one entry for each pair of this rank, so that H has no row that nobody
    uses."""

    scores: torch.Tensor  # fp32
    tokens: torch.Tensor  # int32: rows that arrived
    experts: torch.Tensor  # int32: local ids
    places: torch.Tensor  # int32: in the (M, K) slots of the rows that arrived


def _pairs(choices: torch.Tensor, pairs: int, experts: int, rank: int) -> _Pairs:
    """Of the ids and scores (M, 2K), one behind the other and in one type, that arrived."""
    top_k = choices.shape[1] // 2
    key = choices[:, :top_k].div(experts, rounding_mode="floor").sub_(rank)  # 0 for this rank's
    places = torch.ops.sonicmoe.sort_ids(key.flatten(), 1)[1][:pairs]
    tokens = places.div(top_k, rounding_mode="floor")
    flat, at = choices.flatten(), torch.add(places, tokens, alpha=top_k)
    scores = flat[top_k:].index_select(0, at).view(torch.float32)
    return _Pairs(scores, tokens, flat.index_select(0, at).sub_(rank * experts), places)


def _dscores(plan: _Plan, rows: torch.Tensor) -> torch.Tensor:
    """(T, K) of the rows (M, K) that came back, one for each token and rank."""
    top_k = rows.shape[1]
    # A sentinel's row is -1, so that its slot is in the row of zeros behind the last.
    column = plan.owner.clamp(-1, plan.rows.shape[1]).add_(1).long()
    row = F.pad(plan.rows, (1, 1), value=-1).gather(1, column)
    slots = torch.arange(top_k, device=rows.device).add(row, alpha=top_k)
    return F.pad(rows, (0, 0, 0, 1)).take(slots)


class _Experts(torch.autograd.Function):
    """The experts of all ranks on this rank's tokens. Kept: x as it arrived, H and the routing."""

    @staticmethod
    def forward(ctx, x, scores, ids, group, w1, b1, w2, b2, layer, w1_up, b1_up):
        count = w2.shape[0]
        choices = torch.cat((ids, scores.view(torch.int32)), 1)
        plan = _plan(ids, count, group)
        there = plan.received, plan.sent, group
        # The few bytes go first: the lists are made while the tokens travel.
        arriving = exchanging(choices.index_select(0, plan.tokens), *there)
        x_rows = exchanging(x.index_select(0, plan.tokens), *there)
        pairs = _pairs(waited(arriving), plan.pairs, count, group.rank)
        x_rows = waited(x_rows)
        o, _, preact, routing = torch.ops.sonicmoe.routed_forward(
            x_rows, *pairs[:3], w1, b1, w2, b2, layer, w1_up=w1_up, b1_up=b1_up
        )
        ctx.save_for_backward(x_rows, w1, w2, b2, preact, routing, w1_up)
        ctx.plan, ctx.places, ctx.group, ctx.layer = plan, pairs.places, group, layer
        ctx.owns_preact = True
        out = exchanged(o, plan.sent, plan.received, group)
        return torch.ops.sonicmoe.combine(out, plan.rows)

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "sonicmoe.distributed: got create_graph=True, allowed: False, for the experts have "
                "no second derivative"
            )
        x_rows, w1, w2, b2, preact, routing, w1_up = ctx.saved_tensors
        wants_dx, wants_dscores, _, _, *wants = ctx.needs_input_grad
        wants_dw1, _, wants_dw2, _, _, wants_dw1_up, _ = wants
        plan, group = ctx.plan, ctx.group
        back = plan.sent, plan.received, group
        dout_rows = dout.index_select(0, plan.tokens)
        dx_rows, dpairs, dw1, db1, dw2, db2, dw1_up, db1_up = torch.ops.sonicmoe.routed_backward(
            exchanged(dout_rows, plan.received, plan.sent, group),
            x_rows,
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
        dx = dscores = None
        returning = exchanging(dx_rows, *back) if wants_dx else None
        if wants_dscores:
            slots = dpairs.new_zeros(len(x_rows), plan.owner.shape[1])
            slots.view(-1).index_copy_(0, ctx.places.long(), dpairs)
            dscores = _dscores(plan, exchanged(slots, *back))
        if returning is not None:
            dx = torch.ops.sonicmoe.combine(waited(returning), plan.rows)
        return (
            dx,
            dscores,
            None,
            None,
            *of_weights(wants, dw1, db1, dw2, db2, None, dw1_up, db1_up),
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
