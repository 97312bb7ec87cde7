"""PeerCopies of several ranks in one process: in symmetric memory of a kind, without streams."""

import contextlib

import pytest
import torch

from sonicmoe.distributed import _peer_copies
from sonicmoe.distributed._collectives import Group


class Stream:
    """Everything has happened when it is asked."""

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def record_event(self):
        return None


class Handle:
    """Of the ranks' tensors, of which the later ones are yet to come."""

    def __init__(self, tensors):
        self.tensors = tensors

    def barrier(self):
        pass

    def get_remote_tensor(self, rank, shape, dtype):
        return Remote(self.tensors, rank)


class Remote:
    def __init__(self, tensors, rank):
        self.tensors, self.rank = tensors, rank

    def __getitem__(self, place):
        return self.tensors[self.rank][place]


class World:
    """Makes each rank's k-th buffer one of a set."""

    def __init__(self, monkeypatch, ranks):
        self.rank, self.made, self.sets = 0, [0] * ranks, {}
        for name, stub in {
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stub)
        monkeypatch.setattr(_peer_copies, "_device", lambda: torch.device("cpu"))
        monkeypatch.setattr(Group, "of_torch", lambda group: None)
        monkeypatch.setattr(_peer_copies.symmetric, "rendezvous", self.rendezvous)
        monkeypatch.setattr(
            _peer_copies.symmetric, "empty", lambda n, dtype, device: torch.zeros(n, dtype=dtype)
        )
        self.capturing = False
        self.ranks = []
        for self.rank in range(ranks):
            self.ranks.append(_peer_copies.PeerCopies(Group("g", self.rank, ranks)))

    def make(self, name, room):
        """The buffers of all ranks, which in truth make them together."""
        for rank in self.ranks:
            self.rank = rank.group.rank
            rank._buffers(name, room)

    def rendezvous(self, tensor, group):
        tensors = self.sets.setdefault(self.made[self.rank], {})
        self.made[self.rank] += 1
        tensors[self.rank] = tensor
        return Handle(tensors)


@pytest.fixture(params=[1, 2, 3])
def world(request, monkeypatch):
    return World(monkeypatch, request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_come_in_the_order_of_ranks(world, dtype):
    size = len(world.ranks)
    for tokens in (5, 0, 9, 3):
        parts = [torch.randn(tokens, 16).to(dtype) for _ in range(size)]
        # Integers, so that sums are exact in every order.
        wholes = [torch.randint(-9, 9, (size * tokens, 16)).to(dtype) for _ in range(size)]
        for name in ("x", "sums"):
            world.make(name, wholes[0].nbytes)
        for rank in world.ranks:
            rank.begin()
        gathered = [r.gathering("x", part) for r, part in zip(world.ranks, parts, strict=True)]
        sums = [r.scattering_sum("sums", w) for r, w in zip(world.ranks, wholes, strict=True)]
        for rank in range(size):
            assert torch.equal(gathered[rank].waited(), torch.cat(parts))
            want = sum(whole.tensor_split(size)[rank] for whole in wholes)
            assert torch.equal(sums[rank].waited(), want)


def test_what_a_graph_reads_stays(world):
    """Buffers that a capture has used are kept when larger ones take their place."""
    world.make("x", 64)
    for rank in world.ranks:
        first = rank._memory["x"]
        world.capturing = True
        rank._buffers("x", 64)
        with pytest.raises(RuntimeError, match="^peer_copies: got the first call with so many"):
            rank._buffers("x", 65)
        world.capturing = False
        world.rank = rank.group.rank
        rank._buffers("x", 100)
        assert rank._memory["x"] is not first and rank._of_graphs[0] is first


def test_a_copy_is_its_own(world):
    tensor = torch.randn(4, 8)
    copy = world.ranks[0].own(tensor)
    assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()
