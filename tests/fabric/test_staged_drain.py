"""The proxy's `dma` path under two drivers that are not there: chunks, their order, arrivals, room, its end.

One driver is machine code and copies at once, so that threads can serve without the interpreter's lock. The other
(`fake_driver`) has streams whose operations run later, in any order that streams allow.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from fake_driver import World
from no_driver import imported

from undertow import errors
from undertow.fabric.atomics import copy_bytes, store_release
from undertow.fabric.post_ring import Post, PostRing
from undertow.fabric.staged_moves import BUSY, IDLE, SLOTS, _pair, turn
from undertow.kernels import ring_layout

PATIENCE = 10.0
ILLEGAL_ADDRESS = 700


@numba.cfunc("int32(int64, int64, int64, int64)")
def copy_at_once(to: int, source: int, size: int, stream: int) -> int:
    copy_bytes(np.uintp(to), np.uintp(source), size)
    return 0


@numba.cfunc("int32(int64, int64, int32, int32)")
def write_at_once(stream: int, address: int, value: int, flags: int) -> int:
    store_release(np.uintp(address), value)
    return 0


@numba.cfunc("int32(int64, int64, int64, int64)")
def refuse(to: int, source: int, size: int, stream: int) -> int:
    return ILLEGAL_ADDRESS


@pytest.fixture(name="staged")
def staged_drain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with imported("undertow.fabric.staged_drain", monkeypatch) as module:
        functions = copy_at_once.address, copy_at_once.address, write_at_once.address
        monkeypatch.setattr(module.stream_memory, "entry_points", lambda: functions)
        monkeypatch.setattr(module, "_MOST_CHUNK", 1 << 20)
        yield module


class Node:
    """Ranks in one process: a buffer, a ring of posts and arrival words of each, one segment for all."""

    def __init__(
        self, staged: Any, monkeypatch: pytest.MonkeyPatch, size: int, nbytes: int, capacity: int = 64,
        deadline: float = PATIENCE, streams: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self._streams = streams
        self.memory = [np.zeros(nbytes, np.uint8) for _ in range(size)]
        self.words = [np.zeros(8, np.int32) for _ in range(size)]
        self.stops, self.aborts = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._tickets = [0] * size
        self.patience = np.full(1, int(deadline * 1e9), np.int64)
        segments: list[np.ndarray[Any, Any]] = []

        def pinned(group: Any, total: int, purpose: str) -> Any:
            if not segments:
                segments.append(np.zeros(total, np.uint8))
            assert segments[0].size == total
            return SimpleNamespace(address=segments[0].ctypes.data, close=lambda: None)

        monkeypatch.setattr(staged, "PinnedSegment", pinned)
        self.posts: list[PostRing] = []
        self.drains = [staged.StagedDrain(self._proxy(rank, size, capacity, deadline)) for rank in range(size)]

    def _proxy(self, rank: int, size: int, capacity: int, deadline: float) -> Any:
        words = self.words[rank].ctypes.data
        signals = SimpleNamespace(count=8, address=lambda at, index: words + 4 * index)
        aborts, stops = self.aborts[rank:].ctypes.data, self.stops[rank:].ctypes.data
        group: Any = SimpleNamespace(rank=rank, size=size, abort_address=aborts, deadline=deadline)
        ring = torch.zeros(ring_layout.ring_bytes(capacity) // 8, dtype=torch.int64)
        self.posts.append(PostRing(group, ring, capacity, 8))
        memory = self.memory[rank]
        attached: Any = SimpleNamespace(
            identity=5, nbytes=memory.size, address=lambda at: memory.ctypes.data, when_released=lambda call: None
        )
        self.posts[rank].attach(attached)
        copies = SimpleNamespace(out=self._streams(), into=self._streams(), end=lambda: None)
        return SimpleNamespace(
            group=group, signals=signals, posts=self.posts[rank], copies=lambda: copies, stop_address=stops,
            patience=self.patience,
        )  # fmt: skip

    def post(self, rank: int, post: Post) -> None:
        self.posts[rank].put(self._tickets[rank], post)
        self._tickets[rank] += 1

    def turn(self, rank: int) -> int:
        drain = self.drains[rank]
        return int(turn(self.posts[rank].compiled, drain.pairs, drain.driver, drain.waiting))

    def serve(self, rank: int) -> Serving:
        return Serving(self.drains[rank].serve)


def test_chunks_are_large_where_there_is_room(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    mib = [(ranks, staged.chunk_bytes(ranks) / (1 << 20)) for ranks in (1, 2, 4, 5, 8, 16, 64)]
    assert mib == [(1, 8), (2, 8), (4, 8), (5, 4), (8, 2), (16, 0.5), (64, 0.0625)]


def test_functions_are_called_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    library, names = ctypes.CDLL(None), ("usleep", "getpid", "sched_yield")
    with imported("undertow.fabric.stream_memory", monkeypatch) as module:
        for own, name in zip(("_to_host", "_to_device", "_write"), names, strict=True):
            monkeypatch.setattr(module, own, library[name])
        found = module.entry_points()
    assert found == tuple(ctypes.addressof(ctypes.c_char.in_dll(library, name)) for name in names)


class Serving:
    """A thread that moves what is posted, and how it ended."""

    def __init__(self, serve: Callable[[], None]) -> None:
        self.error: Exception | None = None

        def run() -> None:
            try:
                serve()
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


@contextlib.contextmanager
def all_serving(node: Node) -> Iterator[None]:
    """Inside, all ranks move what is posted; what is waited for there must have arrived before it is over."""
    serving = [node.serve(rank) for rank in range(len(node.memory))]
    yield
    node.stops[:] = 1
    assert all(one.ends_within(PATIENCE) for one in serving)
    assert [one.error for one in serving] == [None] * len(serving)


def until(true: Callable[[], bool]) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + PATIENCE
    while not true() and time.monotonic() < end:
        time.sleep(0.001)
    return true()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_posts_arrive_whole_in_order_and_once(ranks: int, staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no bytes, of less than a chunk, of exactly one, of many more than there are places for."""
    chunk = staged.chunk_bytes(ranks)
    sizes = (0, 17, chunk, 5 * chunk + 3, 1)
    span = max(sizes)
    node = Node(staged, monkeypatch, ranks, (1 + ranks) * span)
    chance = random.Random(ranks)
    sent = []
    for rank, to in ((one, (one + step) % ranks) for one in range(ranks) for step in range(1, ranks)):
        size = sizes[len(sent) % len(sizes)]
        node.post(rank, Post(5, 0, to, 5, span * (1 + rank), size, rank))
        sent.append((rank, to, size))
    for rank, memory in enumerate(node.memory):
        memory[:span] = rank + 1
    arrived: dict[tuple[int, int], int] = {}
    for _ in range(200 * ranks):
        assert node.turn(chance.randrange(ranks)) in (IDLE, BUSY)
        for rank, to, size in sent:
            if node.words[to][rank] and (rank, to) not in arrived:
                landed = node.memory[to][span * (1 + rank) :][:size]
                assert (landed == rank + 1).all(), "a signal came before its bytes"
                arrived[rank, to] = size
    assert arrived == {(rank, to): size for rank, to, size in sent}
    assert all(int(words.sum()) == ranks - 1 for words in node.words)
    assert [node.turn(rank) for rank in range(ranks)] == [IDLE] * ranks


def begin_at(node: Node, base: int) -> None:
    """As after so many chunks of each pair, and as many arrivals."""
    for rank, drain in enumerate(node.drains):
        for counts in (drain.pairs.sent, drain.pairs.received, drain.pairs.arrived):
            counts[:] = base
        node.words[rank][:] = base
        for receiver in range(len(node.drains)):
            ctypes.c_int32.from_address(_pair(drain.pairs, rank, receiver)).value = base


@pytest.mark.parametrize("base", [0, 2**31 - 3])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_streams_do_first(
    seed: int, ranks: int, base: int, staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal never comes before its bytes, a place is never filled before it was read, and numbers wrap."""
    world, chance = World(), random.Random(seed)
    whole = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 4)
    word = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)
    functions = whole(world.to_host), whole(world.to_device), word(world.write_value)
    addresses = tuple(ctypes.cast(one, ctypes.c_void_p).value for one in functions)
    monkeypatch.setattr(staged.stream_memory, "entry_points", lambda: addresses)
    monkeypatch.setattr(staged, "_MOST_CHUNK", 4096)
    monkeypatch.setattr(staged, "_LEAST_CHUNK", 4096)
    largest, each = 3 * 4096 + 7, 8
    span = each * (ranks - 1) * largest
    node = Node(staged, monkeypatch, ranks, (1 + ranks) * span, 256, streams=world.new_stream)
    begin_at(node, base)
    posts: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (sender, receiver): places and sizes, in order
    for sender in range(ranks):
        node.memory[sender][:span] = np.arange(span) % 251 + sender + 1
        receivers = [one for one in range(ranks) if one != sender] * each
        chance.shuffle(receivers)
        for number, to in enumerate(receivers):
            at, size = number * largest, chance.choice((0, 1, 4096, largest))
            node.post(sender, Post(5, at, to, 5, span * (1 + sender) + at, size, sender))
            posts.setdefault((sender, to), []).append((at, size))
    landed = dict.fromkeys(posts, 0)
    for _ in range(100_000):
        if landed == dict.fromkeys(posts, each) and not any(world.streams.values()):
            break
        full = [queue for queue in world.streams.values() if queue]
        if full and chance.random() < 0.7:
            chance.choice(full).popleft()[1]()
        else:
            assert node.turn(chance.randrange(ranks)) in (IDLE, BUSY)
        for (sender, to), places in posts.items():
            arrived = (int(node.words[to][sender]) - base) & 0xFFFFFFFF
            for at, size in places[landed[sender, to] : arrived]:
                there = node.memory[to][span * (1 + sender) + at :][:size]
                assert (there == node.memory[sender][at : at + size]).all(), "a signal came before its bytes"
                landed[sender, to] += 1
    assert landed == dict.fromkeys(posts, each)


def test_many_small_posts_while_they_are_made(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there is room for: in the ring, and behind it."""
    monkeypatch.setattr(staged, "_MOST_WAITING", 3)
    capacity, count = 8, 2000
    node = Node(staged, monkeypatch, 2, 2 * 4 * count, capacity)
    node.memory[0][: 4 * count] = np.arange(count, dtype=np.int32).view(np.uint8)
    with all_serving(node):
        for number in range(count):
            while number - node.posts[0].taken >= capacity:
                time.sleep(0)
            node.post(0, Post(5, 4 * number, 1, 5, 4 * (count + number), 4, number % 8))
        assert until(lambda: int(node.words[1].sum()) == count)
    assert (node.memory[1][4 * count :].view(np.int32) == np.arange(count)).all()
    assert node.words[1].tolist() == [count // 8] * 8


def test_nothing_waits_for_the_interpreters_lock(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that keeps the lock while it waits, as some launches do: what they wait for is moved meanwhile."""
    ranks, asleep = 2, 0.5
    chunk = staged.chunk_bytes(ranks)
    size = (3 * SLOTS) * chunk + 5
    node = Node(staged, monkeypatch, ranks, 2 * size)
    keeps_the_lock = ctypes.PyDLL(None)  # `CDLL` would let go of it
    longest, over = [0.0], threading.Event()

    def beat() -> None:
        """How long this thread ever stood still."""
        last = time.monotonic()
        while not over.is_set():
            now = time.monotonic()
            longest[0], last = max(longest[0], now - last), now
            time.sleep(0)

    with all_serving(node):
        for rank in range(ranks):
            node.post(rank, Post(5, 0, 1 - rank, 5, size, 1, 2))
        assert until(lambda: all(words[2] == 1 for words in node.words)), "both threads serve"
        other = threading.Thread(target=beat)
        other.start()
        for rank in range(ranks):
            node.memory[rank][:size] = rank + 1
            node.post(rank, Post(5, 0, 1 - rank, 5, size, size, 3))
        keeps_the_lock.usleep(int(asleep * 1e6))
        landed = [int(words[3]) for words in node.words]
        over.set()
        other.join()
        assert landed == [1, 1]
    assert longest[0] > 0.9 * asleep, "another thread ran: the lock was not kept"
    for rank in range(ranks):
        assert (node.memory[rank][size:] == 2 - rank).all()


def test_it_ends_when_what_it_took_has_left(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = staged.chunk_bytes(2)
    node = Node(staged, monkeypatch, 2, 2 * (SLOTS + 2) * chunk)
    node.post(0, Post(5, 0, 1, 5, (SLOTS + 2) * chunk, (SLOTS + 2) * chunk, 0))
    sender = node.serve(0)
    node.stops[:] = 1  # even before the post was taken
    assert not sender.ends_within(0.3)  # the other one makes no room
    receiver = node.serve(1)
    while not node.words[1][0]:  # told to stop with nothing to do, it may end before more has come
        assert not (receiver.ends_within(0) and receiver.error)
        if receiver.ends_within(0):
            receiver = node.serve(1)
    assert sender.ends_within(PATIENCE)
    assert sender.error is None


def test_it_does_not_wait_for_ever_for_who_makes_no_room(
    staged: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = staged.chunk_bytes(2)
    node = Node(staged, monkeypatch, 2, 2 * (SLOTS + 1) * chunk, deadline=0.5)
    monkeypatch.setattr(logging.getLogger("undertow"), "propagate", True)
    node.post(0, Post(5, 0, 1, 5, 0, (SLOTS + 1) * chunk, 0))
    node.stops[:] = 1
    began = time.monotonic()
    sender = node.serve(0)
    assert sender.ends_within(PATIENCE)
    assert time.monotonic() - began >= 0.5
    assert sender.error is None
    assert "The proxy ends with posts that nobody took for 0.5 s" in caplog.text


@pytest.mark.parametrize("idle", [False, True])
def test_a_group_that_failed_ends_it(staged: Any, monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    chunk = staged.chunk_bytes(2)
    node = Node(staged, monkeypatch, 2, 2 * (SLOTS + 1) * chunk)
    if not idle:
        node.post(0, Post(5, 0, 1, 5, 0, (SLOTS + 1) * chunk, 0))
    sender = node.serve(0)
    assert not sender.ends_within(0.1)
    node.aborts[0] = 1
    assert sender.ends_within(1.0)
    assert sender.error is None


@pytest.mark.parametrize("attempt", range(20))
def test_what_was_posted_before_the_end_leaves(staged: Any, monkeypatch: pytest.MonkeyPatch, attempt: int) -> None:
    node = Node(staged, monkeypatch, 2, 64)
    serving = [node.serve(0), node.serve(1)]
    for _ in range(1 + attempt % 3):
        node.post(0, Post(5, 0, 1, 5, 0, 64, 0))
    node.stops[0] = 1
    assert serving[0].ends_within(PATIENCE)
    end = time.monotonic() + PATIENCE
    while node.words[1][0] < 1 + attempt % 3 and time.monotonic() < end:
        time.sleep(0.001)
    assert node.words[1][0] == 1 + attempt % 3
    node.stops[1] = 1
    assert serving[1].ends_within(PATIENCE)


def test_a_wrong_post_ends_it_with_its_sentence(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(staged, monkeypatch, 2, 64)
    node.post(0, Post(5, 0, 1, 5, 0, 64, 0))
    node.post(0, Post(5, 0, 1, 5, 1, 64, 0))
    sender = node.serve(0)
    assert sender.ends_within(PATIENCE)
    assert str(sender.error) == "destination range is [1, 65), but must be inside 64 bytes."


def test_a_chunk_for_a_buffer_that_is_gone_ends_it(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(staged, monkeypatch, 2, 64)
    node.posts[1].compiled.buffers[:] = -1
    node.post(0, Post(5, 0, 1, 5, 0, 64, 0))
    serving = [node.serve(0), node.serve(1)]
    assert serving[1].ends_within(PATIENCE)
    assert str(serving[1].error) == "a chunk's buffer is not attached, but must be attached to the proxy."
    node.stops[0] = 1
    assert serving[0].ends_within(PATIENCE)


def test_what_the_driver_refuses_is_said(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = refuse.address, refuse.address, write_at_once.address
    monkeypatch.setattr(staged.stream_memory, "entry_points", lambda: functions)
    node = Node(staged, monkeypatch, 2, 64)
    node.post(0, Post(5, 0, 1, 5, 0, 64, 0))
    sender = node.serve(0)
    assert sender.ends_within(PATIENCE)
    assert isinstance(sender.error, errors.DeviceLost)
    assert sender.error.facts == {"rank": 0, "reason": str(ILLEGAL_ADDRESS)}
