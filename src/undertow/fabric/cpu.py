"""The CPU fabric: ranks are processes, symmetric memory is shared segments, streams are threads."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import torch

from .. import errors
from . import atomics
from .base import WORD_STRIDE, Fabric, Lane, Stream
from .segment import Segment
from .share import on_threads
from .signals import Signals
from .symmetric import SymmetricBuffer
from .transfer import destination_address
from .turns import ask_for_short_turns

if TYPE_CHECKING:
    from .group import Group

_WORDS = WORD_STRIDE // 4


class CpuFabric(Fabric):
    """Shared memory between the ranks of a node; ranks on other nodes are reached by lane `net` only."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._streams: dict[str, CpuStream] = {}
        self.multiprocessors = torch.get_num_threads()

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor | None], object]:
        group = self.group
        nbytes = max(1, prod(shape) * dtype.itemsize)
        failure = ""
        segment: Segment | None = None
        try:
            segment = Segment.create(nbytes, f"a symmetric buffer of {list(shape)} {dtype}")
        except errors.OutOfSharedMemory as error:
            failure = str(error)  # told to all ranks below: none may be left waiting for this one
        self._agree_on_allocation(failure)
        assert segment is not None
        paths = group.exchange(segment.path, "where segments are")
        try:
            segments = {one: segment if one == group.rank else Segment.open(paths[one]) for one in group.local_ranks}
        except OSError as error:  # the path goes with its process
            group.broken("mapping a peer's memory", error)
        group.barrier()  # everybody has mapped everything: the descriptors can go, and nothing has a name any more
        for one in segments.values():
            one.seal()
        views = [segments[rank].tensor(0, shape, dtype) if rank in segments else None for rank in range(group.size)]
        return views, segments

    def signals(self, count: int) -> Signals:
        spins = atomics.SPINS_CROWDED if self.group.crowded else atomics.SPINS
        made = CpuSignals(self.group, self.buffer(count * _WORDS, torch.int32), count, spins)
        self._signals.add(made)
        return made

    def lanes(self) -> dict[str, str]:
        apart = "" if len(self.group.local_ranks) == self.group.size else "the group spans several nodes"
        return {"net": "", "peer": apart, "dma": apart}

    def _open_lane(self, name: str) -> Lane:
        from .cpu_lanes import DmaLane, PeerLane
        from .net import NetLane

        if name == "net":
            return NetLane(self.group)
        return PeerLane(self) if name == "peer" else DmaLane(self)

    def stream(self, name: str, priority: int = 0) -> Stream:
        with self._lock:
            if name not in self._streams:
                self._streams[name] = CpuStream(name)
            return self._streams[name]

    def computing(self, multiprocessors: int | None) -> contextlib.AbstractContextManager[None]:
        return on_threads(multiprocessors)

    def capturing(self) -> bool:
        return False

    def settle(self) -> None:
        return

    def _quiesce(self) -> None:
        for lane in self._lanes.values():
            lane.flush()
        self.group.barrier()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        super().close()


class CpuSignals(Signals):
    """Counters in a symmetric buffer. x86 or not, the ordering is the one written in `atomics`."""

    def __init__(self, group: Group, words: SymmetricBuffer, count: int, spins: int) -> None:
        self.count = count
        self._spins = spins
        self._group = group
        self._words = words
        self._bases = [words.address(rank) if group.is_local(rank) else 0 for rank in range(group.size)]
        self._abort = group.abort_address

    def add(self, rank: int, index: int, amount: int = 1) -> None:
        atomics.signal_add(self.address(rank, index), amount)

    def set(self, rank: int, index: int, value: int) -> None:
        atomics.signal_set(self.address(rank, index), value)

    def wait(self, index: int, target: int, sender: int | None = None) -> None:
        mine = self.address(self._group.rank, index)
        began = 0.0
        while True:
            status = atomics.wait(mine, target, self._abort, self._spins)
            if status == atomics.ARRIVED:
                return
            self._group.check()
            began = began or time.monotonic()
            if time.monotonic() - began > self._group.deadline:
                seen = atomics.load(mine)
                waited = f"signal {index} stood at {seen} instead of {target} for {self._group.deadline:g} s"
                self._group.fail(self._group.why_waiting(sender, waited))
                self._group.check()

    def put(self, rank: int, index: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int = 0) -> None:
        """Copy contiguous `source` to elements [start, ...) of `rank`'s `buffer`, then add 1 to its counter.

        One compiled call: a tensor copy and a separate `add` would cost more than moving a few KB does. Releases, as
        `add`.
        """
        address = destination_address(buffer, rank, start, source)
        atomics.copy_then_signal(address, source.data_ptr(), source.nbytes, self.address(rank, index), 1)

    def take(
        self,
        index: int,
        target: int,
        out: torch.Tensor,
        buffer: SymmetricBuffer,
        start: int = 0,
        sender: int | None = None,
    ) -> None:
        """`wait`, then copy elements [start, ...) of my `buffer` to contiguous `out`: the other half of `put`."""
        mine = self._group.rank
        address, to, count = destination_address(buffer, mine, start, out), out.data_ptr(), out.nbytes
        word = self.address(mine, index)
        if atomics.wait_then_copy(word, target, self._abort, self._spins, to, address, count) != atomics.ARRIVED:
            self.wait(index, target, sender)
            atomics.copy(to, address, count)

    def read(self, index: int) -> int:
        return int(atomics.load(self.address(self._group.rank, index)))

    def address(self, rank: int, index: int) -> int:
        if not 0 <= index < self.count:
            raise errors.InvalidArgument(argument="index", was=index, must=f"between 0 and {self.count - 1}")
        if not 0 <= rank < len(self._bases):
            if not self._bases:
                raise errors.BufferReleased(shape=f"{self.count} signals")
            raise errors.InvalidArgument(argument="rank", was=rank, must=f"between 0 and {len(self._bases) - 1}")
        base = self._bases[rank]
        if base == 0:
            raise errors.NoPeerPointer(peer=rank, rank=self._group.rank, reason="it stands on another node")
        return base + index * WORD_STRIDE

    def release(self) -> None:
        self._words.release()
        self._bases = []


class CpuStream(Stream):
    """A thread that works off a queue. The first error stops it: what follows is skipped until `join` raises it."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"undertow-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        ask_for_short_turns()
        while (work := self._queue.get()) is not None:
            work()

    def fork(self) -> None:
        """The caller's work on a CPU is done when it returns."""

    def after(self, other: Stream) -> None:
        assert isinstance(other, CpuStream)
        reached = threading.Event()
        other._queue.put(reached.set)
        self._queue.put(lambda: _until(reached))

    def run(self, work: Callable[[], None]) -> None:
        inference = torch.is_inference_mode_enabled()  # of the caller; a thread starts with its own

        def guarded() -> None:
            if self._error is None:
                try:
                    with torch.inference_mode(inference), torch.no_grad():
                        work()
                except BaseException as error:  # handed to `join`, whatever it is
                    self._error = error

        self._queue.put(guarded)

    def join(self) -> None:
        reached = threading.Event()
        self._queue.put(reached.set)
        _until(reached)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


def _until(reached: threading.Event) -> None:
    while not reached.wait(0.05):  # in slices, so that Ctrl-C arrives
        pass
