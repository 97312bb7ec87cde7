"""Which rows a rank sends to whom, and how: the two ways of the all-to-all transport.

Packed rows lie without gaps, in the order of ranks, as the process group wants them. It needs all
numbers of rows before it sends x.

Placed rows have a place for each token of each rank, which nobody needs to know a number for. So x
is on its way while the host waits for the numbers. Places without a row hold sentinels' ids.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ._collectives import equal_tokens, equally_many
from ._gather import joined, own_first, parted

ROWS = 1024  # of which the capacity of rows is a multiple, so that few texts of layers occur


class Arrived(NamedTuple):
    """The rows of this rank's experts."""

    x: torch.Tensor  # (rows, d)
    ids: torch.Tensor  # (rows, K') among the rank's own; K' as own_first() says
    scores: torch.Tensor
    max_rows: int  # (token, expert) pairs that this rank computes, rounded up


class Sent(NamedTuple):
    """What a rank has sent, and what comes back."""

    selection: Any  # of tokens, one for each row that it sends
    columns: torch.Tensor | None  # (rows, K'): see own_first()
    rows: torch.Tensor  # (T, ranks) int32: the token's row in what comes back, or -1
    places: torch.Tensor  # (T, K) int64: of each pair, in the (rows, K) that come back, or below 0
    counts: list[list[int]]  # rows from each rank to each
    exchanges: Any  # Collectives or PeerCopies
    comes_again: bool  # x, in backward: what has arrived is not kept

    def there(self, name: str, tensor: torch.Tensor) -> Any:
        return self.exchanges.sending(name, tensor, self.selection, self.counts)

    def there_aside(self, name: str, tensor: torch.Tensor) -> Any:
        """As `there`, beside products that are already queued."""
        with self.exchanges.aside():
            return self.there(name, tensor)

    def back(self, name: str, rows: torch.Tensor, beside: bool = False) -> Any:
        counts = [list(column) for column in zip(*self.counts, strict=True)]
        return self.exchanges.exchanging(name, rows, counts, beside)


class _Sorted(NamedTuple):
    """A rank's (token, rank) pairs that exist, in the order of ranks, then of tokens."""

    owner: torch.Tensor  # (T, K) int32: the rank of each (token, expert) pair
    counts: torch.Tensor  # (ranks,) int32: pairs of each rank
    slots: torch.Tensor  # (ranks T,) int32: token * ranks + rank, -1 behind the last
    rows: torch.Tensor  # (T, ranks) int32: the row of each, or -1
    numbers: torch.Tensor  # (1, 2 ranks + 2) int32: see _Numbers


def _sorted(ids: torch.Tensor, experts: int, ranks: torch.Tensor) -> _Sorted:
    owner, size = ids.div(experts, rounding_mode="floor"), len(ranks)
    elsewhere = (owner.unsqueeze(2) != ranks).all(1)  # (T, ranks)
    to_ranks = torch.add(ranks, elsewhere, alpha=size)  # out of range where a token has none
    counts, slots, rows = torch.ops.sonicmoe.sort_ids(to_ranks.flatten(), size)
    pairs, _ = torch.ops.sonicmoe.count_cumsum(owner.flatten(), size)
    # Two numbers of the host, by one kernel and no copy.
    both = torch.linspace(experts, len(ids), 2, dtype=torch.int32, device=ids.device)
    numbers = torch.cat((counts, pairs, both)).unsqueeze(0)
    return _Sorted(owner, counts, slots, rows.view(elsewhere.shape), numbers)


class _Numbers:
    """What ranks tell each other: of each rank, the (token, rank) pairs and the (token, expert)
    pairs that it has for each, its experts and its tokens."""

    def __init__(self, of_ranks: list[list[int]]) -> None:
        size = len(of_ranks)
        self.counts = [numbers[:size] for numbers in of_ranks]
        self.pairs = [numbers[size:-2] for numbers in of_ranks]
        self.tokens = [numbers[-1] for numbers in of_ranks]
        equally_many([numbers[-2] for numbers in of_ranks])

    def max_rows(self, rank: int) -> int:
        """Those that it computes, rounded up. Zero would stand for no limit."""
        pairs = sum(pairs[rank] for pairs in self.pairs)
        return max(-(-pairs // ROWS), 1) * ROWS


def _places(owner: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """See Sent."""
    column = owner.clamp(-1, rows.shape[1]).add_(1).long()
    row = F.pad(rows, (1, 1), value=-1).gather(1, column)
    top_k = owner.shape[1]
    return torch.arange(top_k, device=row.device).add(row, alpha=top_k)


def packed(
    exchanges: Any, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, experts: int
) -> tuple[Arrived, Sent]:
    """Sends x (T, d), ids (T, K) int32 among all experts, `experts` of them on each rank, and
    scores. One host read."""
    (tokens, top_k), (_, rank, size) = ids.shape, exchanges.group
    ranks = torch.arange(size, dtype=torch.int32, device=ids.device)
    made = _sorted(ids, experts, ranks)
    reading = exchanges.reading("numbers", made.numbers)

    # Of as many rows as there may be. Behind the last they are those of the first token.
    slots = made.slots[: tokens * min(size, top_k)].clamp(min=0)
    row_tokens = slots.div(size, rounding_mode="floor")
    to_rank = torch.sub(slots, row_tokens, alpha=size).unsqueeze(1)
    local = torch.sub(ids.index_select(0, row_tokens), to_rank, alpha=experts)
    local, of_rows, columns = own_first(local, scores.index_select(0, row_tokens), experts)
    choices, x_rows = joined(local, of_rows), x.index_select(0, row_tokens)
    places = _places(made.owner, made.rows)

    numbers = _Numbers(reading())  # the wait
    counts = numbers.counts
    count = sum(counts[rank])
    # The device has nothing to do until the host has queued these and the layer.
    choices = exchanges.exchanging("choices", choices[:count], counts)
    x_rows = exchanges.exchanging("x", x_rows[:count], counts)
    columns, row_tokens = None if columns is None else columns[:count], row_tokens[:count]
    selection = exchanges.selection(row_tokens)
    sent = Sent(selection, columns, made.rows, places, counts, exchanges, False)
    arrived = Arrived(x_rows.waited(), *parted(choices.waited()), numbers.max_rows(rank))
    return arrived, sent


def placed(
    exchanges: Any, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, experts: int
) -> tuple[Arrived, Sent]:
    """As :func:`packed`. Each rank brings equally many tokens."""
    (tokens, _), (_, rank, size) = ids.shape, exchanges.group
    each = torch.arange(max(tokens, size), dtype=torch.int32, device=ids.device)
    made = _sorted(ids, experts, each[:size])
    reading = exchanges.reading("numbers", made.numbers)
    kind = tokens, x.shape[1], x.dtype, ids.shape[1]
    if kind not in exchanges.known:  # buffers may grow, which all ranks do together
        brought = _Numbers(reading()).tokens
        if brought != brought[:1] * size:
            exchanges.rest()  # beside ranks that know their kind, and have waited for x
        equal_tokens(brought, rank)
        exchanges.known.add(kind)
    first = made.counts.cumsum(0, dtype=torch.int32).sub_(made.counts)
    slots = made.slots.index_select(0, (first.unsqueeze(1) + each[:tokens]).flatten())
    row_tokens = slots.clamp_(min=0).div_(size, rounding_mode="floor")
    selection = exchanges.selection(row_tokens)
    x_rows = exchanges.sending("x", x, selection)

    # While x is on its way. Places without a row get sentinels.
    local = ids.index_select(0, row_tokens).unflatten(0, (size, tokens))
    local = torch.sub(local, each[:size].view(-1, 1, 1), alpha=experts)
    exists = each[:tokens] < made.counts.unsqueeze(1)
    local = torch.where(exists.unsqueeze(2), local, -1).flatten(0, 1)
    local, of_rows, columns = own_first(local, scores.index_select(0, row_tokens), experts)
    choices = exchanges.exchanging("choices", joined(local, of_rows))
    rows = torch.where(made.rows < 0, -1, made.rows + torch.sub(each[:size] * tokens, first))
    places = _places(made.owner, rows)
    x_rows, choices = exchanges.waited(x_rows, choices)
    local, of_rows = parted(choices)

    numbers = _Numbers(reading())  # the wait
    equal_tokens(numbers.tokens, rank)
    sent = Sent(selection, columns, rows, places, numbers.counts, exchanges, True)
    return Arrived(x_rows, local, of_rows, numbers.max_rows(rank)), sent
