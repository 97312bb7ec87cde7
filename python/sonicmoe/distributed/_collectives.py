"""Collectives with gradients, in the functional form that torch.compile traces.

torch registers derivatives of the same operators, but gloo refuses a leaf that requires grad there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_ops = torch.ops._c10d_functional


class Group(NamedTuple):
    """A process group as traced code may hold it: constants alone."""

    name: str
    rank: int
    size: int

    def of_torch(self) -> dist.ProcessGroup:
        resolve: Any = dist.distributed_c10d._resolve_process_group
        return resolve(self.name)


def group_of(group: dist.ProcessGroup) -> Group:
    return Group(group.group_name, dist.get_rank(group), dist.get_world_size(group))


def waited(begun: torch.Tensor) -> torch.Tensor:
    """What an exchange makes, to be read on the device's stream. The device waits, not the host."""
    return _ops.wait_tensor(begun)


def _started(made: torch.Tensor) -> torch.Tensor:
    """Made without a history, to be read behind :func:`waited`. CUDA may compute meanwhile; gloo
    crashes with two gathers in flight."""
    return made if made.is_cuda else waited(made)


def gathering(part: torch.Tensor, group: Group) -> torch.Tensor:
    """The parts of all ranks one behind the other, which have one shape; begun."""
    return _started(_ops.all_gather_into_tensor(part.contiguous(), group.size, group.name))


def gathered(part: torch.Tensor, group: Group) -> torch.Tensor:
    return waited(gathering(part, group))


def scattering_sum(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part of the sum over ranks, in the type of `whole`; begun."""
    return _started(_ops.reduce_scatter_tensor(whole.contiguous(), "sum", group.size, group.name))


def scattered_sum(whole: torch.Tensor, group: Group) -> torch.Tensor:
    return waited(scattering_sum(whole, group))


def summed(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ranks, without a history."""
    return _ops.wait_tensor(_ops.all_reduce(tensor.contiguous(), "sum", group.name))


def equally_many(experts: Sequence[int]) -> None:
    """Refuses ranks that hold other numbers of experts than the first one."""
    for rank, count in enumerate(experts):
        if count != experts[0]:
            raise ValueError(
                f"w2: got {count} experts on rank {rank}, allowed: {experts[0]} on each rank, as on "
                "rank 0"
            )


def equal_tokens(tokens: Sequence[int], rank: int) -> None:
    """Refuses ranks that bring other numbers of tokens than this one."""
    for other, count in enumerate(tokens):
        if count != tokens[rank]:
            raise ValueError(
                f"x: got {tokens[rank]} tokens on rank {rank} and {count} on rank {other}, allowed: "
                "equally many, or max_tokens"
            )


class _Begun(NamedTuple):
    """A functional collective."""

    tensor: torch.Tensor

    def waited(self) -> torch.Tensor:
        return waited(self.tensor)


class Exchange:
    """`counts[p][q]` rows go from rank p to rank q, in the order of ranks; begun.

    Nothing traces it, so that it asks the process group itself: the functional form takes the host
    some 100 us more.
    """

    def __init__(self, rows: torch.Tensor, counts: Sequence[Sequence[int]], group: Group) -> None:
        sizes = [line[group.rank] for line in counts], list(counts[group.rank])
        options = dist.AllToAllOptions()
        options.asyncOp = True
        self._made = rows.new_empty(sum(sizes[0]), *rows.shape[1:])
        self._work = group.of_torch().alltoall_base(self._made, rows.contiguous(), *sizes, options)
        if not rows.is_cuda:  # see _started()
            self._work.wait()

    def waited(self) -> torch.Tensor:
        """What came, to be read on the device's stream."""
        self._work.wait()
        return self._made


class Collectives:
    """The exchanges of both transports, by the process group. Each is begun; what `waited` gives is
    to be read on the device's stream. Names are for PeerCopies, which has these methods, too."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def rest(self) -> None:
        """Nothing that came is read any more."""

    def gathering(self, name: str, part: torch.Tensor) -> _Begun:
        return _Begun(gathering(part, self.group))

    def reading(self, name: str, part: torch.Tensor) -> Callable[[], list]:
        """As `gathering`, and a call that gives it to the host, which waits then."""
        begun = self.gathering(name, part)
        return lambda: begun.waited().tolist()

    def scattering_sum(self, name: str, whole: torch.Tensor, beside: bool = False) -> _Begun:
        return _Begun(scattering_sum(whole, self.group))

    def exchanging(
        self, name: str, rows: torch.Tensor, counts: list[list[int]], beside: bool = False
    ) -> Exchange:
        """`counts[p][q]` rows go from rank p to rank q, in the order of ranks."""
        return Exchange(rows, counts, self.group)

    def own(self, came: torch.Tensor) -> torch.Tensor:
        """What was waited for, to be kept for backward."""
        return came


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
