"""Calls of embedding_all_to_all that post slices, one process a rank, by Triton's interpreter; a thread is the proxy.

It takes what a rank's kernel posts to the ring, as the proxy does, but late and in any order, and moves it to the
memory of other ranks, which all processes share. `test_embedding_kernels.py` runs this file in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreted_embedding_calls import NODES, PATIENCE, Shared, _Signals, in_processes  # noqa: F401 - a fixture
from interpreted_embedding_ops import PLACES, POISON, no_driver  # noqa: F401 - a fixture

from undertow.errors import InvalidArgument
from undertow.kernels import embedding_posts as kernels
from undertow.kernels import proxy, ring_layout
from undertow.ops import embedding_all_to_all, embedding_cuda, embedding_peers, embedding_posts, posting
from undertow.plan.bags import Posted, completed
from undertow.plan.plan import SLICES, Plan, split
from undertow.plan.posts import SIGNALS

CALLS, CAPACITY = 4, 2
STRIDE = 32  # 32-bit words between two signals


@triton.jit
def _reached(pointer, target):
    return tl.where(tl.load(pointer) - target >= 0, 0, 1)


def _waited(pointer: Any, target: Any, abort: Any, deadline_ns: Any) -> Any:
    """Until the word is there, or the abort word is set."""
    word, stop = (ctypes.c_int32.from_address(int(one.handle.data[0])) for one in (pointer, abort))
    want = int(target.handle.data[0])
    while word.value - want < 0 and not stop.value:
        time.sleep(0.001)
    return _reached(pointer, target)


@triton.jit
def _released(pointer, value):
    tl.store(pointer, value)


@pytest.fixture(autouse=True)
def with_a_ring(in_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for module in (proxy, kernels):
        monkeypatch.setattr(module, "signal_wait", _waited)
    monkeypatch.setattr(proxy, "release_word", _released)
    monkeypatch.setattr(embedding_posts, "device_table", lambda fabric, key, make: torch.from_numpy(make()))
    monkeypatch.setattr(embedding_posts, "_THREADS", 4)


class Posting(Shared):
    """A node whose ranks post; those of `direct[rank]` have peer pointers."""

    def __init__(self, batches: list[int], dims: list[list[int]], seed: int, parcels: int, mixed: bool) -> None:
        super().__init__(batches, dims, seed, parcels)
        every = range(self.size)
        self.direct = [tuple(to for to in every if mixed and to != rank and (to - rank) % 2 == 0) for rank in every]
        self.posted = Posted(self.layout, tuple(batches), 4)
        self.half = self.posted.nbytes
        self.memory = [torch.full((2 * self.half // 4,), POISON).share_memory_() for _ in every]
        count = self.size * SIGNALS
        self.arrived = [torch.zeros(count * STRIDE, dtype=torch.int32).share_memory_() for _ in every]
        self.ring = np.zeros(ring_layout.ring_bytes(CAPACITY) // 8, np.int64)
        self.head = torch.zeros(1, dtype=torch.int32)
        self.state = torch.zeros(kernels.STATE_WORDS + count, dtype=torch.int32)
        self.kept: dict[int, object] = {}
        self.meeting = multiprocessing.Barrier(self.size)
        self.moved = 0

    def post_call(self, rank: int, place: int) -> torch.Tensor:
        """One call of a rank, as `embedding_posts.run` makes it."""
        self.chosen[rank] = place
        fabric = self.fabric(rank)
        fabric.group.deadline = PATIENCE
        fabric.guard = SimpleNamespace(abort=self.abort[rank : rank + 1], error=torch.zeros(1, dtype=torch.int32))
        fabric.signals, fabric.kept = lambda count: _Signals(self.words), self.kept
        fabric.settle = lambda: None
        arrivals = SimpleNamespace(address=lambda at, index: self.arrived[at].data_ptr() + 4 * STRIDE * index)
        ring: Any = SimpleNamespace(
            address=self.ring.ctypes.data, head=self.head, capacity=CAPACITY, signals=arrivals
        )  # fmt: skip
        posting: Any = SimpleNamespace(proxy=ring, state=self.state, idle=torch.zeros_like(self.state))
        plan = Plan("fused", "dma", split(sum(self.batches), self.parcels), order=SLICES, own_last=True)
        plan = completed(plan, self.layout.dims, 4, 2)
        space: Any = SimpleNamespace(address=lambda at: self.memory[at].data_ptr(), nbytes=2 * self.half)
        whole, result = self.whole(rank), None
        if self.direct[rank]:
            words = embedding_peers.Words(fabric, in_kernel=True)
            exchange: Any = SimpleNamespace(words=lambda grain: words)
            base = [one.data_ptr() for one in self.places]
            result = embedding_peers.Result(exchange, base, self.distance, place, self.layout, whole)
        call = embedding_posts.Call(
            fabric, posting, self.posted, self.bags(rank), plan, space, 7, whole, result, self.direct[rank]
        )
        call.launch(only_load=True)
        call.launch()
        kept = fabric.kept.get(id(embedding_cuda._TICKETS), {})
        assert all(not one.any() for one in kept.values()), "tickets are zero again"
        return whole

    def drain(self, rank: int, stop: threading.Event, seed: int) -> None:
        """The proxy of a rank: posts in the order of tickets, moved late and in any order."""
        chance, pending = random.Random(seed * 31 + rank), []
        tail = ctypes.c_int32.from_address(self.ring.ctypes.data + ring_layout.TAIL_OFFSET)
        ends = False
        while pending or not ends:
            ends = stop.is_set()  # before the look: what was posted until then is moved
            first = ring_layout.descriptor_offset(self.moved, CAPACITY) // 8
            if self.ring[first] == ring_layout.ready_value(self.moved):
                pending.append([int(one) for one in self.ring[first : first + ring_layout.DESCRIPTOR_WORDS]])
                self.moved += 1
                tail.value = self.moved
                ends = False
            elif pending and chance.random() < 0.3:
                self._move(rank, pending.pop(chance.randrange(len(pending))))
            time.sleep(0.0005)

    def _move(self, rank: int, words: list[int]) -> None:
        _, here, source, to, there, place, size, signal = words
        assert (here, there) == (7, 7)
        assert to not in (rank, *self.direct[rank])
        assert 0 <= source <= source + size <= 2 * self.half
        assert size > 0
        ctypes.memmove(self.memory[to].data_ptr() + place, self.memory[rank].data_ptr() + source, size)
        self.arrived[to][STRIDE * signal] += 1


def calls(node: Posting, rank: int, seed: int) -> None:
    """Several calls, with nothing between them but what kernels wait for, unless ranks have nothing for each other."""
    want = embedding_all_to_all.reference(node.tables, node.values, node.offsets, node.batches)[rank]
    first = [one.clone() for one in node.tables[rank]]
    stop, chosen = threading.Event(), random.Random(seed * 100 + rank)
    drain = threading.Thread(target=node.drain, args=(rank, stop, seed))
    drain.start()
    try:
        for number in range(CALLS):
            time.sleep(chosen.random() * 0.02)  # ranks come at different times
            place = chosen.randrange(PLACES)
            for one, table in zip(first, node.tables[rank], strict=True):
                table.copy_(one * (number + 1))  # what a call brings is not what the last one brought
            y = node.post_call(rank, place)
            assert torch.equal(y, want * (number + 1)), f"call {number} of rank {rank}"
            assert int(node.state[0]) == number + 1
            y.fill_(POISON)
            if not node.posted.meets:
                node.meeting.wait(PATIENCE)
    finally:
        stop.set()
        drain.join()
    assert not node.state[1], "nothing failed"


def on_all(node: Posting, seed: int) -> list[int | None]:
    """How the processes of all ranks ended; any that has not after a while is ended."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=calls, args=(node, rank, seed)) for rank in range(node.size)]
    for one in started:
        one.start()
    for one in started:
        one.join(PATIENCE)
        if one.is_alive():
            one.kill()
    return [one.exitcode for one in started]


@pytest.mark.parametrize(
    ("number", "parcels", "mixed"),
    [(0, 1, False), (0, 3, True), (1, 3, False), (2, 3, False), (3, 1, True), (3, 3, False), (3, 3, True)],
)
def test_calls_follow_each_other(number: int, parcels: int, mixed: bool) -> None:
    """Ranks without tables or samples, and (the last one) columns of a rank that stand apart in the result."""
    nodes = [*NODES, ([3, 1, 4, 2], [[4, 8], [12, 4], [3, 5], [8]])]
    node = Posting(*nodes[number], seed=number, parcels=parcels, mixed=mixed)
    assert on_all(node, number) == [0] * node.size
    assert not any(one.any() for one in node.words), "every word of peers is cleared by who waited for it"


def test_a_rank_that_does_not_come() -> None:
    """The other gives up with the abort word; its result is poisoned to the last byte, and so is that of a later call,
    though all has arrived by then."""
    node = Posting([3, 5], [[8, 4], [4]], seed=1, parcels=1, mixed=False)
    stop = threading.Event()
    drain = threading.Thread(target=node.drain, args=(0, stop, 1))
    drain.start()
    giving_up = threading.Timer(0.3, lambda: node.abort.fill_(1))
    giving_up.start()
    y = node.post_call(0, 1)
    assert y.isnan().all()
    assert (node.places[0][: node.distance // 4] == POISON).all()
    assert node.state[:2].tolist() == [0, 1]
    node.abort.fill_(0)
    node.arrived[0].fill_(1)
    y.fill_(POISON)
    assert node.post_call(0, 1).isnan().all()
    stop.set()
    drain.join()
    giving_up.join()


def test_a_ring_that_stays_full() -> None:
    """Nobody drains it: the post gives up with the abort word, and the call is poisoned."""
    node = Posting([3, 5, 2, 2], [[8, 4], [4], [4], [4]], seed=1, parcels=1, mixed=False)
    giving_up = threading.Timer(0.3, lambda: node.abort.fill_(1))
    giving_up.start()
    assert node.post_call(0, 1).isnan().all()
    assert node.state[:2].tolist() == [0, 1]
    giving_up.join()


class Alone:
    """What `embedding_posts.run` asks of a fabric, for a group of one rank whose proxy has nothing to do."""

    def __init__(self, node: Posting) -> None:
        self.group = SimpleNamespace(rank=0, size=1, deadline=PATIENCE, barrier=lambda: self.said.append("barrier"))
        self.guard = SimpleNamespace(abort=node.abort[:1], error=torch.zeros(1, dtype=torch.int32))
        self.multiprocessors, self.kept, self.device = 1, {}, torch.device("cpu")
        self.said: list[str] = []
        self._node = node

    def lanes(self) -> dict[str, str]:
        return {"peer": "", "dma": "", "net": ""}

    def workspace(self, purpose: str, nbytes: int) -> Any:
        self.said.append(purpose)
        return SimpleNamespace(
            address=lambda at: self._node.memory[at].data_ptr(), nbytes=nbytes, identity=3, reaches=lambda at: True
        )

    def guarded_call(self, outputs: tuple[torch.Tensor, ...], itself: bool) -> Any:
        assert itself
        return contextlib.nullcontext()

    def settle(self) -> None:
        self.said.append("settle")

    def rest(self) -> None:
        self.said.append("rest")

    def follow(self, what: str) -> None:
        self.said.append("follow")

    def enqueued(self, what: str) -> None:
        self.said.append("enqueued")

    def gate(self) -> Any:
        """Nobody shares this GPU."""
        return lambda: None


def alone(monkeypatch: pytest.MonkeyPatch, batches: list[int], dims: list[list[int]]) -> tuple[Posting, Any]:
    node = Posting(batches, dims, seed=2, parcels=1, mixed=False)
    arrivals = SimpleNamespace(address=lambda at, index: node.arrived[at].data_ptr() + 4 * STRIDE * index)

    def made(fabric: Any, signals: int, lane: str) -> Any:
        assert signals == len(batches) * SIGNALS
        ring = {"address": node.ring.ctypes.data, "head": node.head, "capacity": CAPACITY, "signals": arrivals}
        buffers: dict[int, Any] = {}
        attach = lambda space: buffers.setdefault(space.identity, space).identity  # noqa: E731
        return SimpleNamespace(
            **ring, posts=SimpleNamespace(attached=buffers), attach=attach, group=fabric.group,
            copies=lambda: SimpleNamespace(is_own=True),
        )  # fmt: skip

    monkeypatch.setattr(posting, "Proxy", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    return node, Alone(node)


def posted_plan(samples: int, parts: int) -> Plan:
    return Plan("fused", "dma", split(samples, parts), order=SLICES, own_last=True)


def test_a_whole_call_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring, memory and kernels are made once, on an idle stream; then nothing is waited for."""
    node, fabric = alone(monkeypatch, [5], [[8, 4]])
    plan = completed(posted_plan(5, 2), node.layout.dims, 4, 2)
    want = embedding_all_to_all.reference(node.tables, node.values, node.offsets, node.batches)[0]
    for number in range(3):
        y = embedding_posts.run(fabric, node.bags(0), node.layout, node.batches, plan, torch.empty(0))
        assert torch.equal(y, want)
        if number == 0:
            assert set(fabric.said) == {"rest", "settle", "barrier", "follow", "posts over dma", "enqueued"}
            fabric.said.clear()
    assert fabric.said == 2 * ["follow", "posts over dma", "enqueued"]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence each: too many parcels; inside a capture, a first call, and one that ends with a barrier."""
    node, fabric = alone(monkeypatch, [20, 0], [[8, 4], [4]])

    def call(parts: int) -> None:
        plan = completed(posted_plan(20, parts), node.layout.dims, 4, 2)
        embedding_posts.run(fabric, node.bags(0), node.layout, node.batches, plan, torch.empty(0))

    with pytest.raises(InvalidArgument, match="at most 16 where slices are posted"):
        call(17)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InvalidArgument, match="outside a capture over dma"):
        call(1)
    node.batches[1] = 3
    with pytest.raises(InvalidArgument, match="made once before it is captured"):
        call(1)
