"""PeerCopies by the process group, on processes without GPUs."""

import contextlib
import ctypes

import torch
import torch.distributed as dist

from sonicmoe.distributed import _all_to_all, _gather
from sonicmoe.distributed._collectives import Collectives

ROOM = 32  # of each rank on each, so that ranks may even disagree in numbers


class FakePeerCopies:
    """Rows that nobody sent are NaN, and their ids are none. Refilling a buffer poisons what it
    held.

    A buffer may be refilled only after a barrier, a meeting, that follows the last wait for it. An
    exchange inside `aside()` counts only meetings before the last exchange outside of it.
    """

    def __init__(self, group):
        self.group, self.known = group, set()
        self.meetings, self.waited_at, self.came, self.rooms = 0, {}, {}, {}
        self.is_aside, self.met_before_aside = False, 0

    def rest(self):
        self.meetings += 1

    @contextlib.contextmanager
    def aside(self):
        self.is_aside = True
        yield
        self.is_aside = False

    def waited(self, begun):
        self.meetings += 1
        self.waited_at[begun.name] = self.meetings
        return begun.tensor

    def gathering(self, name, part):
        return self._push(name, [part.contiguous()] * self.group.size, part.shape[0])

    def reading(self, name, part, *begun):
        numbers = self.gathering(name, part).tensor.tolist()
        for other in (name, *(exchange.name for exchange in begun)):
            self.waited_at[other] = self.meetings
        return lambda: numbers

    def scattering_sum(self, name, whole, beside=False):
        parts = whole.tensor_split(self.group.size)
        begun = self._push(name, parts, parts[0].shape[0])
        begun.tensor = begun.tensor.view(len(parts), *parts[0].shape).sum(0)
        return begun

    def exchanging(self, name, rows, counts=None, beside=False):
        parts = rows.tensor_split(self.group.size)
        mine = [None] * len(parts) if counts is None else counts[self.group.rank]
        sent = [part[:count] for part, count in zip(parts, mine, strict=True)]
        return self._push(name, sent, parts[0].shape[0])

    def sending(self, name, tensor, tokens, counts):
        parts = tensor.index_select(0, tokens).tensor_split(self.group.size)
        sent = [part[:count] for part, count in zip(parts, counts.tolist(), strict=True)]
        return self._push(name, sent, tensor.shape[0])

    def own(self, came):
        return came.clone()

    def _push(self, name, parts, places):
        if places > self.rooms.get(name, -1):  # all ranks make buffers together, of one size
            sizes = [None] * self.group.size
            dist.all_gather_object(sizes, places, group=self.group.of_torch())
            assert sizes == [places] * self.group.size, name
            self.rooms[name] = places
        if not self.is_aside:
            self.met_before_aside = self.meetings
        assert self.met_before_aside > self.waited_at.get(name, -1), name
        before = self.came.get(name)
        if before is not None and before.nbytes > 0:
            ctypes.memset(before.data_ptr(), 255, before.nbytes)
        padded = []
        for part in parts:
            assert part.is_contiguous() and len(part) <= places <= ROOM
            bits = part.view(torch.int32) if part.dtype == torch.float32 else part
            poison = bits.new_full((ROOM - len(part), *part.shape[1:]), -1)  # NaN in fp32
            padded.append(torch.cat((bits, poison)))
        came = torch.empty_like(torch.cat(padded))
        dist.all_to_all_single(came, torch.cat(padded), group=self.group.of_torch())
        came = came.unflatten(0, (len(parts), ROOM))[:, :places].flatten(0, 1).contiguous()
        self.came[name] = came
        return Begun(self, name, came.view(parts[0].dtype))


class Begun:
    def __init__(self, exchanges, name, tensor):
        self.exchanges, self.name, self.tensor = exchanges, name, tensor

    def waited(self):
        return self.exchanges.waited(self)


def install(patch):
    """In place of what CPU tensors refuse. Returns the objects that are made, by group."""
    made = {}

    def exchanges_of(x, group, peer_copies):
        if not peer_copies:
            return Collectives(group)
        return made.setdefault(group, FakePeerCopies(group))

    for module in (_gather, _all_to_all):
        patch.setattr(module, "exchanges_of", exchanges_of)
    return made
