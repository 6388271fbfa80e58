"""The staged lanes of all ranks of a node in this process, on a driver that runs streams in random orders."""

from __future__ import annotations

import ctypes
import types
from typing import Any

from fake_driver import World

from undertow.fabric.base import WORD_STRIDE
from undertow.fabric.signals import Handoffs, Signals

CHUNK = 1 << 12


class FakeSignals(Signals):
    """Words of all ranks in one memory; the flags of streams, as on a GPU."""

    def __init__(self, memory: Any, module: Any, rank: int, count: int) -> None:
        self.count, self._module, self._rank = count, module, rank
        self._base = ctypes.addressof(memory)

    def address(self, rank: int, index: int) -> int:
        return self._base + (rank * self.count + index) * WORD_STRIDE

    def set(self, rank: int, index: int, value: int) -> None:
        ctypes.c_int32.from_address(self.address(rank, index)).value = value

    def packed(self, steps: Any) -> bytes:
        found: bytes = self._module.packed([(one.waits, self.address(one.rank, one.word), one.value) for one in steps])
        return found

    def add(self, rank: int, index: int, amount: int = 1) -> None:
        raise NotImplementedError

    def wait(self, index: int, target: int, sender: int | None = None) -> None:
        raise NotImplementedError

    def read(self, index: int) -> int:
        raise NotImplementedError

    def release(self) -> None:
        """The test's memory goes by itself."""


class Node:
    """The lanes of all ranks on one fake driver."""

    def __init__(self, ranks: int, lanes: Any, module: Any, world: World) -> None:
        self.world, self.module, self.ranks = world, module, ranks
        self.current: dict[int, int] = {}
        slots = 2 * lanes.chunk_slots(ranks)
        words = Handoffs.words(ranks, slots)
        self._words = (ctypes.c_byte * (ranks * words * WORD_STRIDE))()
        self._ring = (ctypes.c_byte * (ranks * ranks * slots * CHUNK))()
        ring = types.SimpleNamespace(address=ctypes.addressof(self._ring), close=lambda: None)
        lanes.PinnedSegment = lambda group, size, what: ring
        self.lanes = []
        for rank in range(ranks):
            pairs = Handoffs(FakeSignals(self._words, module, rank, words), rank, ranks, slots)
            pairs.reset()
            guard = types.SimpleNamespace(perform=module.batch)
            group = types.SimpleNamespace(size=ranks, rank=rank)
            fabric = types.SimpleNamespace(
                group=group, device=rank, guard=guard, handoffs=lambda slots, pairs=pairs: pairs, rank=rank
            )
            self.lanes.append(lanes.StagedLane(fabric))
            self.current[rank] = world.new_stream()
        self.groups = [types.SimpleNamespace(group=types.SimpleNamespace(size=ranks, rank=r)) for r in range(ranks)]
