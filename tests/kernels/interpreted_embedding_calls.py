"""Whole fused calls of embedding_all_to_all, one process a rank, by Triton's interpreter: they wait for each other.

What a rank's kernel says to others are words of memory that all processes share; a wait looks at them again and again.
`test_embedding_kernels.py` runs this file in a process of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from interpreted_embedding_ops import PLACES, POISON, Node, no_driver  # noqa: F401 - a fixture

from undertow.kernels import embedding
from undertow.ops import embedding_all_to_all, embedding_cuda, embedding_peers
from undertow.plan.bags import completed
from undertow.plan.plan import SLICES, Plan, split

CALLS = 4
PATIENCE = 30.0  # seconds, then a test fails
NODES = [([3, 5, 2], [[8, 4], [], [12]]), ([4, 0], [[4], [4, 8, 4]]), ([2, 2, 2], [[4], [8], [4, 4]])]


@triton.jit
def _seen(pointers, targets, wanted):
    return tl.where(tl.load(pointers, mask=wanted, other=1) >= targets, 0, 1)


def _polled(pointers: Any, targets: Any, wanted: Any, abort: Any, deadline_ns: int) -> Any:
    """Until every lane is there, or the abort word is set: 0 or 1 for each. The host's code, as the kernel is, too."""
    words = [ctypes.c_int32.from_address(int(one)) for one in pointers.handle.data[wanted.handle.data]]
    stop = ctypes.c_int32.from_address(int(abort.handle.data[0]))
    while any(one.value < 1 for one in words) and not stop.value:
        time.sleep(0.001)
    return _seen(pointers, targets, wanted)


@triton.jit
def _set_each(pointers, value, wanted):
    tl.store(pointers, value, mask=wanted)


@triton.jit
def _reported(pointer, code):
    tl.store(pointer, code)


@pytest.fixture(autouse=True)
def in_processes(no_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(embedding, "poll", _polled)
    monkeypatch.setattr(embedding, "signal_set_each", _set_each)
    monkeypatch.setattr(embedding, "report_error", _reported)
    monkeypatch.setattr(embedding_cuda, "_THREADS", 4)  # several rounds of words


class _Signals:
    """Words as a fabric gives them, in memory of all processes."""

    def __init__(self, words: list[torch.Tensor]) -> None:
        self._words = words

    def address(self, rank: int, index: int) -> int:
        return self._words[rank].data_ptr() + 128 * index


class Shared(Node):
    """A node whose places and words are those of all processes."""

    def __init__(self, batches: list[int], dims: list[list[int]], seed: int, parcels: int) -> None:
        super().__init__(batches, dims, seed)
        for one in (*self.places, *self.words):
            one.share_memory_()
        self.parcels = parcels
        self.abort = torch.zeros(len(batches), dtype=torch.int32).share_memory_()

    def call(self, rank: int, place: int) -> torch.Tensor:
        """One call of a rank into one of its places, as `run_over_peers` makes it."""
        self.chosen[rank] = place
        fabric = self.fabric(rank)
        fabric.group.deadline = PATIENCE
        fabric.guard = SimpleNamespace(abort=self.abort[rank : rank + 1], error=torch.zeros(1, dtype=torch.int32))
        fabric.signals = lambda count: _Signals(self.words)
        words = embedding_peers.Words(fabric, in_kernel=True)
        plan = Plan("fused", "peer", split(sum(self.batches), self.parcels), order=SLICES, own_last=True)
        plan = completed(plan, self.layout.dims, 4, 2)
        exchange: Any = SimpleNamespace(words=lambda grain: words)
        lane: Any = None
        whole, base = self.whole(rank), [one.data_ptr() for one in self.places]
        result = embedding_peers.Result(exchange, base, self.distance, place, self.layout, whole)
        embedding_peers.run_over_peers(fabric, lane, self.bags(rank), self.layout, self.batches, plan, result)
        kept = fabric.kept.get(id(embedding_cuda._TICKETS), {})
        assert all(not one.any() for one in kept.values()), "tickets are zero again"
        return whole


def calls(node: Shared, rank: int, seed: int) -> None:
    """Several calls, each into a place of the rank's own choice, with nothing between them but the words."""
    want = embedding_all_to_all.reference(node.tables, node.values, node.offsets, node.batches)[rank]
    chosen = random.Random(seed * 100 + rank)
    for number in range(CALLS):
        place = chosen.randrange(PLACES)
        time.sleep(chosen.random() * 0.02)  # ranks come at different times
        y = node.call(rank, place)
        assert torch.equal(y, want), f"call {number} of rank {rank}"
        y.fill_(POISON)


def on_all(node: Shared, ranks: list[int], seed: int) -> list[int | None]:
    """How the processes of these ranks ended; any that has not after a minute is ended."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=calls, args=(node, rank, seed)) for rank in ranks]
    for one in started:
        one.start()
    for one in started:
        one.join(PATIENCE)
        if one.is_alive():
            one.kill()
    return [one.exitcode for one in started]


@pytest.mark.parametrize("parcels", [1, 2])
@pytest.mark.parametrize("number", range(len(NODES)))
def test_calls_follow_each_other(number: int, parcels: int) -> None:
    node = Shared(*NODES[number], seed=number, parcels=parcels)
    assert on_all(node, list(range(node.size)), number) == [0] * node.size
    assert not any(one.any() for one in node.words), "every word is cleared by who waited for it"


def test_a_rank_that_does_not_come() -> None:
    """The others give up with the abort word, and their results are poisoned to the last byte, and nothing else is."""
    node = Shared([3, 5, 2], [[8, 4], [4], [12]], seed=1, parcels=1)
    node.abort[:2] = 1
    for rank in (0, 1):
        y = node.call(rank, 1)
        assert y.isnan().all()
        assert (node.places[rank][: node.distance // 4] == POISON).all()


def test_words_of_a_failed_call_do_not_satisfy_the_next() -> None:
    """All that is waited for is there, but the group has failed: the result may be of any call."""
    node = Shared([3, 5], [[8, 4], [4]], seed=1, parcels=1)
    node.words[0].fill_(1)
    node.abort[0] = 1
    assert node.call(0, 1).isnan().all()


def test_a_captured_call_keeps_the_tickets_of_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are its graph's memory, and nobody frees them: not also those of a launch that only loads."""
    node = Shared([3], [[8, 4]], seed=1, parcels=1)
    fabric = node.fabric(0)
    monkeypatch.setattr(node, "fabric", lambda rank: fabric)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for number in range(1, 3):
        node.call(0, 1)
        assert len(fabric.kept[id(embedding_cuda._TICKETS)]) == number
