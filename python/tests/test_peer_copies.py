"""PeerCopies of several ranks in one process: in symmetric memory of a kind, without streams."""

import contextlib
import ctypes

import pytest
import torch

from sonicmoe.distributed import _peer_copies
from sonicmoe.distributed._collectives import Group


class Stream:
    """Runs work at once and keeps a vector clock: `seen[s]` is the last time of stream s that this
    stream is ordered after. The current stream is the last of `stack`."""

    stack = []
    every = {}  # by address

    def __init__(self):
        self.cuda_stream = len(Stream.every) + 7
        Stream.every[self.cuda_stream] = self
        self.seen = {self: 0}

    def does(self):
        """Something; returns its time."""
        self.seen[self] += 1
        return self, self.seen[self]

    def record_event(self):
        return Event(self.seen)

    def wait_event(self, event):
        for stream, time in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), time)

    def wait_stream(self, stream):
        self.wait_event(stream)


class Event:
    def __init__(self, seen):
        self.seen = dict(seen)

    def synchronize(self):
        host.append(self)


host, copies, barriers = [], [], []  # what has happened


@contextlib.contextmanager
def on_stream(stream):
    Stream.stack.append(stream)
    yield
    Stream.stack.pop()


def send_rows(x, tokens, counts, to, real=torch.ops.sonicmoe.send_rows):
    copies.extend(Stream.stack[-1].does() for _ in to)
    real(x, tokens, counts, to)


class Handle:
    """Of the ranks' tensors, of which the later ones are yet to come."""

    def __init__(self, tensors):
        self.tensors = tensors

    def barrier(self, channel=0):
        stream = Stream.stack[-1]
        stream.does()
        barriers.append((channel, stream, stream.record_event()))

    def get_remote_tensor(self, rank, shape, dtype):
        return Remote(self.tensors, rank)


class Remote:
    def __init__(self, tensors, rank):
        self.tensors, self.rank = tensors, rank

    def data_ptr(self):
        return self.tensors[self.rank].data_ptr()

    def __getitem__(self, place):
        return self.tensors[self.rank][place]


def copy(to, address, size, stream):
    copies.append(Stream.every[stream].does())
    ctypes.memmove(to, address, size)


class World:
    """Makes each rank's k-th buffer one of a set."""

    def __init__(self, monkeypatch, ranks):
        self.rank, self.made, self.sets, self.calls = 0, [0] * ranks, {}, []
        Stream.stack, Stream.every = [], {}
        for of_last_test in (host, copies, barriers):
            of_last_test.clear()
        Stream.stack.append(Stream())
        monkeypatch.setattr(torch.ops.sonicmoe, "send_rows", send_rows)
        for name, stub in {
            "Stream": Stream,
            "current_stream": lambda: Stream.stack[-1],
            "stream": on_stream,
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": lambda: self.calls.append("synchronize"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stub)
        monkeypatch.setattr(_peer_copies, "_device", lambda: torch.device("cpu"))
        monkeypatch.setattr(_peer_copies, "_copy", copy)
        monkeypatch.setattr(Group, "of_torch", lambda group: None)
        monkeypatch.setattr(_peer_copies.symmetric, "rendezvous", self.rendezvous)
        monkeypatch.setattr(_peer_copies.symmetric, "empty", self.empty)
        self.capturing = False
        self.ranks = []
        for self.rank in range(ranks):
            self.ranks.append(_peer_copies.PeerCopies(Group("g", self.rank, ranks)))

    def make(self, name, room):
        """The buffers of all ranks, which in truth make them together."""
        for rank in self.ranks:
            self.rank = rank.group.rank
            rank._buffers(name, room)

    def empty(self, size, dtype, device):
        self.calls.append("empty")
        return torch.zeros(size, dtype=dtype)

    def rendezvous(self, tensor, group):
        tensors = self.sets.setdefault(self.made[self.rank], {})
        self.made[self.rank] += 1
        tensors[self.rank] = tensor
        return Handle(tensors)


@pytest.fixture(params=[1, 2, 3, 4])
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
            rank.rest()
        gathered = [r.gathering("x", part) for r, part in zip(world.ranks, parts, strict=True)]
        sums = [r.scattering_sum("sums", w) for r, w in zip(world.ranks, wholes, strict=True)]
        for rank in range(size):
            assert torch.equal(gathered[rank].waited(), torch.cat(parts))
            want = sum(whole.tensor_split(size)[rank] for whole in wholes)
            assert torch.equal(sums[rank].waited(), want)


@pytest.mark.parametrize("beside", [False, True])
def test_places_without_a_row_stay(world, beside):
    """Rank p sends (p + q) % 3 rows to rank q, of three places."""
    size = len(world.ranks)
    counts = [[(p + q) % 3 for q in range(size)] for p in range(size)]
    world.make("x", size * 3 * 8 * 4)
    rows = [torch.randn(size * 3, 8) for _ in range(size)]
    for rank in world.ranks:
        rank.exchanging("x", torch.full((size * 3, 8), -1.0))
    begun = [rank.exchanging("x", rows[i], counts, beside) for i, rank in enumerate(world.ranks)]
    for q, exchange in enumerate(begun):
        came = exchange.waited().view(size, 3, 8)
        for p in range(size):
            assert torch.equal(came[p, : counts[p][q]], rows[p].view(size, 3, 8)[q, : counts[p][q]])
            assert torch.all(came[p, counts[p][q] :] == -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_tokens_are_sent(world, dtype):
    """Rank p sends (p + q) % 4 rows to rank q, of three places. Others keep what they have."""
    size = len(world.ranks)
    counts = [[(p + q) % 4 for q in range(size)] for p in range(size)]
    tensors = [torch.randn(3, 8).to(dtype) for _ in range(size)]
    tokens = [torch.randint(0, 3, (3 * size,), dtype=torch.int32) for _ in range(size)]
    world.make("x", size * 3 * 8 * 4)
    for rank in world.ranks:
        rank.exchanging("x", torch.full((size * 3, 8), -1.0, dtype=dtype))
    begun = [
        rank.sending("x", tensors[i], tokens[i], torch.tensor(counts[i], dtype=torch.int32))
        for i, rank in enumerate(world.ranks)
    ]
    for q in range(size):
        came = begun[q].waited().view(size, 3, 8)
        for p in range(size):
            want = torch.full((3, 8), -1.0, dtype=dtype)
            want[: counts[p][q]] = tensors[p][tokens[p].view(size, 3)[q, : counts[p][q]]]
            assert torch.equal(came[p], want)


def test_the_host_reads_what_comes(world):
    world.make("numbers", len(world.ranks) * 8)
    parts = [torch.tensor([[i, i + 5]], dtype=torch.int32) for i in range(len(world.ranks))]
    for rank, part in zip(world.ranks, parts, strict=True):
        rank.gathering("numbers", part)
    for rank, part in zip(world.ranks, parts, strict=True):  # when the others have sent theirs
        assert rank.reading("numbers", part)() == torch.cat(parts).tolist()


def test_what_a_graph_reads_stays(world):
    """Buffers that a capture has used are kept when larger ones take their place."""
    world.make("x", 64 * len(world.ranks))
    for rank in world.ranks:
        first = rank._memory["x"]
        world.capturing = True
        rank.gathering("x", torch.zeros(16, 1))
        with pytest.raises(RuntimeError, match="^peer_copies: got the first call with so many"):
            rank.gathering("x", torch.zeros(17, 1))
        world.capturing = False
        world.rank = rank.group.rank
        world.calls.clear()
        rank._buffers("x", 100 * len(world.ranks))
        assert world.calls == ["synchronize", "empty"]  # nobody frees what another one fills
        assert rank._memory["x"] is not first and rank._of_graphs[0] is first


def test_a_copy_is_its_own(world):
    tensor = torch.randn(4, 8)
    stream, made = Stream.stack[-1].does()
    copy = world.ranks[0].own(tensor)
    assert world.ranks[0]._stream.seen[stream] >= made
    assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()


def begin(kind, rank):
    size = len(rank._handle.tensors)
    rows = torch.randn(size * 2, 8)
    if kind == "gathering":
        return rank.gathering("x", rows[:2])
    if kind in ("exchanging", "exchanging beside"):
        return rank.exchanging("x", rows, beside=kind.endswith("beside"))
    if kind.startswith("summing"):
        return rank.scattering_sum("x", rows, beside=kind.endswith("beside"))
    if kind == "sending":
        tokens, counts = torch.zeros(3, size, dtype=torch.int32).split((2, 1))
        return rank.sending("x", rows[:2], tokens.flatten(), counts[0])
    with rank.aside():
        return rank.exchanging("x", rows)


KINDS = (
    "gathering", "exchanging", "exchanging beside", "summing", "summing beside", "sending",
    "exchanging aside",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_barrier_waits_for_every_copy(world, kind):
    world.make("x", len(world.ranks) * 2 * 32)
    current = Stream.stack[-1]
    for rank in world.ranks:
        _, made = current.does()  # what makes the rows
        before = len(copies)
        begun = begin(kind, rank)
        own = copies[before:]
        assert len(own) == len(world.ranks)
        if kind != "exchanging aside":  # which does not wait for the current stream
            assert all(stream is current or stream.seen[current] >= made for stream, _ in own)
        begun.waited()
        channel, stream, event = barriers[-1]
        assert channel == 0 and stream is current
        assert all(event.seen[stream] >= time for stream, time in own)


def test_the_host_waits_for_every_copy_of_numbers(world):
    world.make("numbers", len(world.ranks) * 8)
    for rank in world.ranks:
        before, current = len(copies), Stream.stack[-1]
        _, made = current.does()  # what makes the numbers
        read = rank.reading("numbers", torch.tensor([[1, 2]], dtype=torch.int32))
        own = copies[before:]
        assert all(stream.seen[current] >= made for stream, _ in own)
        world.make("x", len(world.ranks) * 2 * 32)
        begin("exchanging", rank)
        late = [(stream, time) for stream, time in copies[before:] if stream is rank._stream][-1]
        read()
        channel, stream, event = barriers[-1]
        assert channel == 1 and stream is rank._stream
        assert all(event.seen[stream] >= time for stream, time in own)
        assert host[-1].seen[stream] >= event.seen[stream]
        if len(world.ranks) > 1:
            assert host[-1].seen[late[0]] < late[1]  # not for what was begun later


@pytest.mark.parametrize("kind", ["exchanging", "exchanging beside"])
def test_the_current_stream_waits_for_numbers_and_what_was_begun(world, kind):
    world.make("numbers", len(world.ranks) * 8)
    world.make("x", len(world.ranks) * 2 * 32)
    for rank in world.ranks:
        before, current = len(copies), Stream.stack[-1]
        begun = begin(kind, rank)
        rank.reading("numbers", torch.tensor([[1, 2]], dtype=torch.int32), begun)
        own = copies[before:]
        _, stream, event = barriers[-1]
        assert all(event.seen[copied] >= time for copied, time in own)
        assert current.seen[stream] >= event.seen[stream]


def test_a_default_device_is_not_that_of_addresses(world):
    rank = world.ranks[0]
    world.make("x", len(world.ranks) * 2 * 32)
    x, tokens = torch.randn(2, 8), torch.zeros(2 * len(world.ranks), dtype=torch.int32)
    counts = torch.full((len(world.ranks),), 2, dtype=torch.int32)
    with torch.device("meta"):
        begun = rank.sending("x", x, tokens, counts)
    assert torch.equal(begun.waited()[:2], x[:1].expand(2, 8))


def test_what_goes_aside_comes_behind_what_was_waited_for(world):
    """Before the rows of this step are sent, but not behind its products: then nobody reads the
    buffer any more that the copies fill."""
    world.make("x", len(world.ranks) * 2 * 32)
    current = Stream.stack[-1]
    for rank in world.ranks:
        begin("exchanging", rank).waited()
        _, waited = current.does()
        begin("sending", rank).waited()
        _, products = current.does()
        begin("exchanging aside", rank)
        assert waited <= rank._stream.seen[current] < products


def test_the_first_call_may_be_in_inference_mode(world):
    """A buffer that is an inference tensor would refuse the second write."""
    world.make("x", len(world.ranks) * 2 * 32)
    for rank in world.ranks:
        with torch.inference_mode():
            begin("sending", rank)
        begin("sending", rank)
        begin("exchanging", rank)
