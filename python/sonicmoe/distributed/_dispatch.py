"""Which rows a rank sends to whom, and how: the two ways of the all-to-all transport.

Packed rows lie without gaps, in the order of ranks, as the process group wants them. It needs all
numbers of rows before it sends x.

Placed rows have a place for each token of each rank, which nobody needs to know a number for. So x
is on its way while the host waits for the numbers. Places without a row hold sentinels' ids.

Behind the wait the device has nothing to do until the host has queued the experts. So `placed` waits
late, and both leave what the experts do not need to a call that comes behind them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ._collectives import equal_tokens, equally_many
from ._gather import parted

ROWS = 1024  # of which the capacity of rows is a multiple, so that few texts of layers occur


class Arrived(NamedTuple):
    """The rows of this rank's experts."""

    x: torch.Tensor  # (rows, d)
    ids: torch.Tensor  # (rows, K') among the rank's own; K' = min(K, the rank's experts)
    scores: torch.Tensor
    max_rows: Callable[[], int]  # (token, expert) pairs that this rank computes, rounded up


class Sent(NamedTuple):
    """What a rank has sent, and what comes back."""

    tokens: torch.Tensor  # (rows or places) int32, one for each row that it sends
    row_counts: torch.Tensor | None  # (ranks) int32 of placed rows; None: packed
    rows: torch.Tensor  # (T, ranks) int32: the token's row in what comes back, or -1
    places: torch.Tensor  # (T, K) int32: of each score behind a zero and the (rows, K') that come
    #                       back; 0 for sentinels
    counts: list[list[int]]  # rows from each rank to each
    back_counts: list[list[int]]  # the same of what comes back
    exchanges: Any  # Collectives or PeerCopies

    @property
    def comes_again(self) -> bool:
        """Whether x does, in backward: what has arrived is not kept."""
        return self.row_counts is not None

    def there(self, name: str, tensor: torch.Tensor) -> Any:
        if self.row_counts is not None:
            return self.exchanges.sending(name, tensor, self.tokens, self.row_counts)
        return self._copied(name, tensor)

    def there_aside(self, name: str, tensor: torch.Tensor) -> Any:
        """As `there`, beside products that are already queued."""
        with self.exchanges.aside():
            return self._copied(name, tensor)

    def _copied(self, name: str, tensor: torch.Tensor) -> Any:
        rows = tensor.index_select(0, self.tokens)
        return self.exchanges.exchanging(name, rows, self.counts)

    def back(self, name: str, rows: torch.Tensor, beside: bool = False) -> Any:
        return self.exchanges.exchanging(name, rows, self.back_counts, beside)


# What ranks tell each other is a list of numbers for each: its rows for each rank, its (token,
# expert) pairs for each rank, its experts and its tokens.


def max_rows(of_ranks: list[list[int]], rank: int) -> int:
    """The pairs that a rank computes, rounded up. Zero would stand for no limit."""
    pairs = sum(numbers[len(of_ranks) + rank] for numbers in of_ranks)
    return max(-(-pairs // ROWS), 1) * ROWS


def _check(of_ranks: list[list[int]], rank: int) -> None:
    """Of placed rows."""
    equally_many([numbers[-2] for numbers in of_ranks])
    equal_tokens([numbers[-1] for numbers in of_ranks], rank)


def _counts(of_ranks: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Sent.counts and Sent.back_counts."""
    there = [numbers[: len(of_ranks)] for numbers in of_ranks]
    return there, [list(back) for back in zip(*there, strict=True)]


def packed(
    exchanges: Any, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, experts: int
) -> tuple[Arrived, Callable[[], Sent]]:
    """Sends x (T, d), ids (T, K) int32 among all experts, `experts` of them on each rank, and
    scores. One host read. Call what comes second when the experts are queued."""
    _, rank, size = exchanges.group
    numbers, tokens, choices, rows, places = torch.ops.sonicmoe.token_dispatch(
        ids, scores, experts, size, True
    )
    reading = exchanges.reading("numbers", numbers)
    x_rows = x.index_select(0, tokens)  # of as many rows as there may be

    of_ranks = reading()  # the wait
    equally_many([numbers[-2] for numbers in of_ranks])
    counts = _counts(of_ranks)
    count = sum(counts[0][rank])
    choices = exchanges.exchanging("choices", choices[:count], counts[0])
    x_rows = exchanges.exchanging("x", x_rows[:count], counts[0])
    arrived = Arrived(x_rows.waited(), *parted(choices.waited()), lambda: max_rows(of_ranks, rank))
    return arrived, lambda: Sent(tokens[:count], None, rows, places, *counts, exchanges)


def placed(
    exchanges: Any, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, experts: int
) -> tuple[Arrived, Callable[[], Sent]]:
    """As :func:`packed`; the wait is max_rows(). Each rank brings equally many tokens.

    Numbers and choices, which are few bytes, are there before x leaves."""
    _, rank, size = exchanges.group
    numbers, tokens, choices, rows, places = torch.ops.sonicmoe.token_dispatch(
        ids, scores, experts, size, False
    )
    kind = *x.shape, x.dtype, ids.shape[1], experts
    if kind not in exchanges.known:  # buffers may grow, which all ranks do together
        brought = exchanges.reading("numbers", numbers)()
        exchanges.rest()  # beside ranks that know their kind, and wait for x
        _check(brought, rank)
        exchanges.known.add(kind)
    choices = exchanges.exchanging("choices", choices)
    reading = exchanges.reading("numbers", numbers, choices)
    row_counts = numbers[0, :size]
    x_rows = exchanges.sending("x", x, tokens, row_counts).waited()

    @functools.cache
    def of_ranks() -> list[list[int]]:
        numbers = reading()  # the wait
        _check(numbers, rank)
        return numbers

    def sent() -> Sent:
        return Sent(tokens, row_counts, rows, places, *_counts(of_ranks()), exchanges)

    return Arrived(x_rows, *parted(choices.tensor), lambda: max_rows(of_ranks(), rank)), sent
