"""Exchanges by copy engines, between GPUs of one machine that write into each other's memory.

NCCL's kernels take multiprocessors from the experts, and the experts slow them down. Copies between
GPUs take none. A rank pushes its parts into the other ranks' buffers, symmetric memory of torch.
Barriers on the device say when all has arrived. Where nothing else runs, a kernel of ours gathers
and pushes at once.

Buffers serve all layers of a group, which run on one stream. Who passes a barrier knows that all
that other ranks had queued before it is done: a buffer may be filled again once a later exchange
has been waited for. What came stays valid until then, on the stream of that wait.
"""

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from ._collectives import Group


class _Begun(NamedTuple):
    """An exchange. It holds what is being sent: memory that is freed serves the current stream at
    once."""

    exchanges: "PeerCopies"
    tensor: torch.Tensor  # what comes
    events: Sequence[torch.cuda.Event] = ()  # of other streams that send this rank's parts
    sent: torch.Tensor | None = None
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    def waited(self) -> torch.Tensor:
        return self.exchanges.waited(self)


class _Places(NamedTuple):
    """Of one buffer, for rows of one kind."""

    of: tuple  # that kind
    there: list[int]  # on each rank, the address of those for what comes from this one
    addresses: torch.Tensor  # the same, for send_rows
    here: torch.Tensor  # on this rank, for what comes from all


class PeerCopies:
    """The exchanges of one group, with the methods of Collectives: every rank makes the same calls,
    and waits for them in the same order.

    Each call names the buffer that it fills. `beside` says that products run meanwhile on the
    current stream. Else that stream copies the rows that stay on this rank.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._stream = torch.cuda.Stream()
        self._own_stream = torch.cuda.Stream()  # beside products, for rows that stay
        self._memory: dict[str, torch.Tensor] = {}
        self._of_ranks: dict[str, list[torch.Tensor]] = {}  # each rank's buffer of that name
        self._places: dict[str, _Places] = {}  # those of the last call
        self._of_graphs: list[torch.Tensor] = []  # buffers that grew after a capture
        self._captured = False
        self._flags = symmetric.empty(16, dtype=torch.uint8, device=_device())
        self._handle = symmetric.rendezvous(self._flags, group.of_torch())
        self._barrier = self._handle.barrier  # of the current stream
        self.known: set[tuple] = set()  # kinds of input that all ranks have brought

    def rest(self) -> None:
        """Waits, on the device, until no rank reads what earlier exchanges have brought. Whoever
        waits for a later exchange does so, too."""
        self._barrier()

    def aside(self) -> Any:
        """In this context what is sent is made beside the products, too."""
        return torch.cuda.stream(self._stream)

    def waited(self, begun: _Begun) -> torch.Tensor:
        for event in begun.events:
            torch.cuda.current_stream().wait_event(event)
        self._barrier()
        return begun.tensor if begun.finish is None else begun.finish(begun.tensor)

    def gathering(self, name: str, part: torch.Tensor) -> _Begun:
        part, places = part.contiguous(), len(part)
        return self._push(name, part, [places] * self.group.size, places, lambda peer: 0)

    def reading(self, name: str, part: torch.Tensor, *begun: _Begun) -> Callable[[], list]:
        """As `gathering`, of a few numbers, and a call that gives them to the host. It waits for
        nothing that was begun later. The current stream does wait for them, and for the exchanges
        `begun`, on all ranks."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        for event in [event for exchange in begun for event in exchange.events]:
            self._stream.wait_event(event)
        with self.aside():
            came = self.gathering(name, part).tensor
            self._handle.barrier(channel=1)  # not that of the current stream
            current.wait_event(self._stream.record_event())
            read = torch.empty(came.shape, dtype=came.dtype, device="cpu", pin_memory=came.is_cuda)
            read.copy_(came, non_blocking=True)
            event = self._stream.record_event()

        def waited() -> list:
            event.synchronize()
            return read.tolist()

        return waited

    def scattering_sum(self, name: str, whole: torch.Tensor, beside: bool = False) -> _Begun:
        """Sums are fp32, rounded once."""
        size, device = self.group.size, whole.device
        begun = self.exchanging(name, whole, beside=beside)
        places = len(whole) // size
        if whole.dtype == torch.float32:  # of scores: few bytes
            return begun._replace(finish=lambda came: came.unflatten(0, (size, places)).sum(0))
        ranks = torch.arange(size, dtype=torch.int32, device=device)
        rows = torch.arange(places, dtype=torch.int32, device=device).unsqueeze(1)
        rows = torch.add(rows, ranks, alpha=places)  # (T, ranks): where a token's parts lie
        return begun._replace(finish=lambda came: torch.ops.sonicmoe.combine(came, rows))

    def exchanging(
        self,
        name: str,
        rows: torch.Tensor,
        counts: Sequence[Sequence[int]] | None = None,
        beside: bool = False,
    ) -> _Begun:
        """Rows have places: those for one rank lie behind those for another, equally many for each.
        So do what comes. Of the places for rank q the first `counts[p][q]` of rank p have a row;
        without counts all are sent."""
        rows, places = rows.contiguous(), len(rows) // self.group.size
        mine = [places] * self.group.size if counts is None else counts[self.group.rank]
        return self._push(name, rows, mine, places, lambda peer: peer * places, beside)

    def sending(
        self, name: str, tensor: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
    ) -> _Begun:
        """`exchanging` of a tensor's rows, by a kernel on the current stream. `tokens` says which
        row has each place, `counts` of how many places for each rank.

        What is sent aside later comes behind all that the current stream has waited for by now."""
        self._stream.wait_event(torch.cuda.current_stream().record_event())
        places = self._places_of(name, tensor.dtype, *tensor.shape)
        torch.ops.sonicmoe.send_rows(tensor.contiguous(), tokens, counts, places.addresses)
        return _Begun(self, places.here)

    def own(self, came: torch.Tensor) -> torch.Tensor:
        """A copy of what was waited for. It is there when the next exchange is waited for."""
        copy = torch.empty_like(came)  # in memory that the current stream may still use
        self._stream.wait_stream(torch.cuda.current_stream())
        with self.aside():
            copy.copy_(came)
        return copy

    def _push(
        self,
        name: str,
        rows: torch.Tensor,
        counts: Sequence[int],
        places: int,
        start: Callable[[int], int],
        beside: bool = False,
    ) -> _Begun:
        """`counts[p]` rows go to rank p, from row `start(p)` on. Each rank has so many places for
        what comes from each; they come in the order of ranks.

        What stays is copied on the current stream, beside products on one of its own: copies within
        a GPU take multiprocessors, so that they wait, and others would wait for them.

        The host calls the driver itself: a copy by torch, and its streams, take it much longer."""
        rank, size, stream = self.group.rank, self.group.size, self._stream
        _, there, _, here = self._places_of(name, rows.dtype, places, *rows.shape[1:])
        address, of_row = rows.data_ptr(), math.prod(rows.shape[1:]) * rows.itemsize
        current = torch.cuda.current_stream()
        own, ready = self._own_stream if beside else current, current.record_event()

        def copy(peer: int, by: torch.cuda.Stream) -> None:
            if counts[peer] > 0:
                size = counts[peer] * of_row
                _copy(there[peer], address + start(peer) * of_row, size, by.cuda_stream)

        stream.wait_event(ready)
        for ahead in range(1, size):
            copy((rank + ahead) % size, stream)
        if beside:
            own.wait_event(ready)
        copy(rank, own)
        events = [stream.record_event()]
        if beside:
            events.append(own.record_event())
        return _Begun(self, here, events, rows)

    def _places_of(self, name: str, dtype: torch.dtype, places: int, *row: int) -> _Places:
        self._captured |= torch.cuda.is_current_stream_capturing()
        known = self._places.get(name)
        if known is not None and known.of == (dtype, places, *row):
            return known
        rank, size = self.group.rank, self.group.size
        of_one = places * math.prod(row) * dtype.itemsize
        with torch.inference_mode(False):  # who comes first may be in it
            buffers = self._buffers(name, size * of_one)
            there = [buffer.data_ptr() + rank * of_one for buffer in buffers]
            here = buffers[rank][: size * of_one].view(dtype).view(size * places, *row)
            addresses = torch.tensor(there, dtype=torch.int64, device="cpu")
        self._places[name] = made = _Places((dtype, places, *row), there, addresses, here)
        return made

    def _buffers(self, name: str, room: int) -> list[torch.Tensor]:
        kept = self._memory.get(name)
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


def _copy(to: int, address: int, size: int, stream: int) -> None:
    """Queues a copy of bytes between addresses of any GPUs."""
    code = _driver().cuMemcpyAsync(to, address, size, stream)
    if code != 0:
        raise RuntimeError(f"peer_copies: cuMemcpyAsync of {size} bytes failed with error {code}")


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_uint64
    driver.cuMemcpyAsync.argtypes = address, address, ctypes.c_size_t, ctypes.c_void_p
    return driver


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
