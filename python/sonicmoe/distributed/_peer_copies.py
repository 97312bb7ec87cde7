"""Exchanges by copy engines, between GPUs of one machine that write into each other's memory.

NCCL's kernels take multiprocessors from the experts, and the experts slow them down. Copies between
GPUs take none. A rank pushes its parts into the other ranks' buffers, symmetric memory of torch.
Barriers on the device say when buffers may be written, and when all has arrived.

Buffers serve all layers of a group. What came stays valid until the next forward or backward
begins, on the stream that all of them run on.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from ._collectives import Group


class _Begun(NamedTuple):
    """What is there when the event is done, and what then makes a result of it.

    It holds what is being sent: memory that is freed serves the current stream at once.
    """

    tensor: torch.Tensor
    event: torch.cuda.Event
    sent: Sequence[torch.Tensor]
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    def waited(self) -> torch.Tensor:
        torch.cuda.current_stream().wait_event(self.event)
        return self.tensor if self.finish is None else self.finish(self.tensor)


class PeerCopies:
    """The exchanges of one group, with the methods of Collectives: every rank makes the same calls.
    Each call names the buffer that it fills."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._stream, self._beside = torch.cuda.Stream(), torch.cuda.Stream()
        self._memory: dict[str, torch.Tensor] = {}
        self._of_ranks: dict[str, list[torch.Tensor]] = {}  # each rank's buffer of that name
        self._of_graphs: list[torch.Tensor] = []  # buffers that grew after a capture
        self._captured = False
        self._flags = symmetric.empty(16, dtype=torch.uint8, device=_device())
        self._handle = symmetric.rendezvous(self._flags, group.of_torch())

    def begin(self) -> None:
        """Waits, on the device, until no rank reads what earlier exchanges have brought."""
        done = torch.cuda.current_stream().record_event()
        self._beside.wait_event(done)
        self._stream.wait_event(done)
        self._stream.wait_stream(self._beside)
        with torch.cuda.stream(self._stream):
            self._handle.barrier()

    def gathering(self, name: str, part: torch.Tensor) -> _Begun:
        return self._push(name, [part.contiguous()] * self.group.size)

    def scattering_sum(self, name: str, whole: torch.Tensor) -> _Begun:
        """Sums are fp32, rounded once."""
        parts = whole.contiguous().tensor_split(self.group.size)
        begun = self._push(name, parts)
        shape, device = parts[0].shape, whole.device
        if whole.dtype == torch.float32:  # of scores: few bytes
            return begun._replace(finish=lambda came: came.view(len(parts), *shape).sum(0))
        ranks = torch.arange(len(parts), dtype=torch.int32, device=device)
        rows = torch.arange(shape[0], dtype=torch.int32, device=device).unsqueeze(1)
        rows = torch.add(rows, ranks, alpha=shape[0])  # (T, ranks): where a token's parts lie
        return begun._replace(finish=lambda came: torch.ops.sonicmoe.combine(came, rows))

    def own(self, came: torch.Tensor) -> torch.Tensor:
        """A copy of what was waited for. It is there when the next exchange is waited for."""
        copy = torch.empty_like(came)  # in memory that the current stream may still use
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            copy.copy_(came)
        return copy

    def _push(self, name: str, parts: Sequence[torch.Tensor]) -> _Begun:
        """`parts[p]`, of one shape, goes to rank p. They come in the order of ranks, joined."""
        rank, size, like = self.group.rank, self.group.size, parts[0]
        buffers = self._buffers(name, size * like.nbytes)
        made = torch.cuda.current_stream().record_event()
        self._stream.wait_event(made)
        self._beside.wait_event(made)

        def copy(peer: int) -> None:
            at = rank * like.nbytes
            sent = parts[peer].view(-1).view(torch.uint8)
            buffers[peer][at : at + like.nbytes].copy_(sent)

        with torch.cuda.stream(self._stream):
            for step in range(1, size):
                copy((rank + step) % size)
            self._handle.barrier()
        with torch.cuda.stream(self._beside):
            copy(rank)
        self._stream.wait_stream(self._beside)
        came = buffers[rank][: size * like.nbytes].view(like.dtype)
        whole = came.view(size * like.shape[0], *like.shape[1:])
        return _Begun(whole, self._stream.record_event(), parts)

    def _buffers(self, name: str, room: int) -> list[torch.Tensor]:
        kept = self._memory.get(name)
        self._captured |= torch.cuda.is_current_stream_capturing()
        if kept is None or kept.numel() < room:
            _refuse_capture()
            if kept is not None and self._captured:
                self._of_graphs.append(kept)
            torch.cuda.synchronize()  # on all ranks, before any frees what it had
            kept = symmetric.empty(max(room, 16), dtype=torch.uint8, device=_device())
            handle = symmetric.rendezvous(kept, self.group.of_torch())
            self._memory[name] = kept
            # Small buffers may share an allocation: a remote tensor knows its place in it.
            self._of_ranks[name] = [
                handle.get_remote_tensor(rank, kept.shape, kept.dtype)
                for rank in range(self.group.size)
            ]
        return self._of_ranks[name]


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "peer_copies: got the first call with so many tokens in a CUDA graph's capture, "
            "allowed: calls before it with as many, which make the buffers"
        )


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerCopies] = weakref.WeakKeyDictionary()


def peer_copies_of(group: Group) -> PeerCopies:
    """The group's, made by the first call, in which the ranks wait for each other."""
    of_torch = group.of_torch()
    made = _groups.get(of_torch)
    if made is None:
        _refuse_capture()
        made = _groups[of_torch] = PeerCopies(group)
    return made
