"""Collectives with gradients, in the functional form that torch.compile traces.

torch registers derivatives of the same operators, but gloo refuses a leaf that requires grad there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

_ops = torch.ops._c10d_functional


class Group(NamedTuple):
    """A process group as traced code may hold it: constants alone."""

    name: str
    rank: int
    size: int


def group_of(group: dist.ProcessGroup) -> Group:
    return Group(group.group_name, dist.get_rank(group), dist.get_world_size(group))


def gathered(part: torch.Tensor, group: Group) -> torch.Tensor:
    """The parts of all ranks one behind the other, which have one shape; without a history."""
    made = _ops.all_gather_into_tensor(part.contiguous(), group.size, group.name)
    return _ops.wait_tensor(made)


def gathered_together(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """:func:`gathered` of several tensors in one exchange, which takes less time than each alone."""
    parts = [part.contiguous() for part in parts]
    made = _ops.all_gather_into_tensor_coalesced(parts, group.size, group.name)
    return [_ops.wait_tensor(whole) for whole in made]


def scattered_sum(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part of the sum over ranks, in the type of `whole`; without a history."""
    made = _ops.reduce_scatter_tensor(whole.contiguous(), "sum", group.size, group.name)
    return _ops.wait_tensor(made)


def summed(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ranks, without a history."""
    return _ops.wait_tensor(_ops.all_reduce(tensor.contiguous(), "sum", group.name))


def exchanged(
    rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Group
) -> torch.Tensor:
    """`sent[p]` rows go to rank p and `received[p]` rows come from it; without a history."""
    return waited(exchanging(rows, received, sent, group))


def exchanging(
    rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Group
) -> torch.Tensor:
    """The same, begun: what it gives is to be read behind :func:`waited`. The device waits, not the
    host."""
    return _ops.all_to_all_single(rows.contiguous(), list(received), list(sent), group.name)


def waited(begun: torch.Tensor) -> torch.Tensor:
    return _ops.wait_tensor(begun)


class _Linear(torch.autograd.Function):
    """A linear function of a tensor, and the one that backward applies to the gradient. Each is
    given with its arguments behind the tensor."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, there: tuple, back: tuple) -> torch.Tensor:
        ctx.back = back
        return there[0](tensor, *there[1:])

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back[0](gradient, *ctx.back[1:]), None, None


def all_gather(part: torch.Tensor, group: Group) -> torch.Tensor:
    """:func:`gathered`; backward sums the gradients of all ranks."""
    return _Linear.apply(part, (gathered, group), (scattered_sum, group))


def reduce_scatter(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """:func:`scattered_sum`; backward gathers the gradients of all ranks."""
    return _Linear.apply(whole, (scattered_sum, group), (gathered, group))
