"""The words by which fused lookups tell places and slices, under a fake driver: any order of streams, calls in a row.

A kernel is as many operations as it has slices, each the work of a slice's last CTA. Calls follow each other without a
host in between, as in a replayed graph, so a rank may be a whole call ahead of another.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_driver import World

from undertow.fabric.signals import Step
from undertow.plan.bags import slices
from undertow.plan.plan import SLICES, Plan, split
from undertow.plan.tiles import chunks

_real = ctypes.CDLL
CALLS = 4


@pytest.fixture(name="cuda")
def embedding_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module over a driver that is not there; what is imported for it goes with the test."""
    before = set(sys.modules)

    class NoDriver:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: 0

    monkeypatch.setattr(
        ctypes, "CDLL", lambda name, *rest, **more: NoDriver() if "libcuda" in str(name) else _real(name, *rest, **more)
    )
    from undertow.ops import embedding_peers as module

    yield module
    for name in set(sys.modules) - before:
        if name.startswith("undertow."):
            del sys.modules[name]


class Words:
    """Words of all ranks; what is performed goes to this rank's stream."""

    def __init__(self, world: World, stream: int, memory: np.ndarray[Any, Any], rank: int) -> None:
        self._world, self._stream, self._memory, self._rank = world, stream, memory, rank

    def address(self, rank: int, index: int) -> int:
        return int(self._memory[rank, index : index + 1].ctypes.data)

    def perform(self, steps: Sequence[Step]) -> None:
        for waits, rank, word, value, _ in steps:
            address = self.address(rank, word)
            if waits:
                self._world.wait_value(self._stream, address, value, 0)
            else:
                self._world.write_value(self._stream, address, value, 0)


def played(cuda: Any, seed: int, ranks: int, parcels: int, clear_late: bool = False) -> None:
    """All ranks, several calls; every slice must find the place that its destination chose for that very call."""
    world = World()
    memory = np.zeros((ranks, 2 * ranks * cuda.MOST_PARCELS), np.int32)
    batches, held = [3, 2, 4, 1][:ranks], [True, seed % 3 > 0, True, True][:ranks]
    plan = Plan("fused", "peer", split(4, parcels), order=SLICES, own_last=True)
    places = np.full((ranks, 2, ranks, parcels), -1)  # the call that wrote a slice last
    for rank in range(ranks):
        stream = world.new_stream()
        exchange = cuda.Exchange(
            SimpleNamespace(
                group=SimpleNamespace(size=ranks, rank=rank),
                signals=lambda count, stream=stream, rank=rank: Words(world, stream, memory, rank),
            )
        )
        here = [parcel for parcel, ranges in enumerate(chunks(batches, plan)) if ranges[rank][1]]
        sources = [one for one in range(ranks) if held[one] and one != rank]
        leaving = slices(batches, plan, rank) if held[rank] else ()
        for call in range(CALLS):
            place = (call + rank) % 2
            exchange.begin(place, sources, here, leaving)
            for one in leaving:
                _finish(world, stream, exchange, places, rank, one, call, clear_late)
            exchange.arrived(sources, here)

            def checked(rank: int = rank, place: int = place, call: int = call, here: Any = tuple(here)) -> None:
                for source, parcel in itertools.product(range(ranks), here):
                    if held[source]:
                        assert places[rank, place, source, parcel] == call

            world.put(stream, checked)
    world.run(seed)


def _finish(
    world: World, stream: int, exchange: Any, places: Any, rank: int, one: Any, call: int, clear_late: bool
) -> None:
    choice = ctypes.c_int32.from_address(exchange.choice(one.destination, one.parcel))
    full = ctypes.c_int32.from_address(exchange.signal(one.destination, one.parcel))

    def clear() -> None:
        choice.value = 0

    def act() -> None:
        places[one.destination, choice.value - 1, rank, one.parcel] = call
        if one.destination != rank:
            if not clear_late:
                clear()
            full.value = 1

    world.put(stream, act)
    if clear_late and one.destination != rank:
        world.put(stream, clear)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_order_is_right(cuda: Any, ranks: int) -> None:
    for seed in range(15):
        played(cuda, seed, ranks, 1 + seed % 3)


def test_a_choice_that_is_cleared_too_late_is_seen(cuda: Any) -> None:
    """A destination that knows of a slice chooses again at once; clearing after that would lose its choice."""
    lost = 0
    for seed in range(80):
        try:
            played(cuda, seed, 3, 1, clear_late=True)
        except AssertionError:
            lost += 1
    assert lost > 0
