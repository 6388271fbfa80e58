"""Lanes of the CPU fabric between ranks of one node.

`peer`: the calling thread copies into the other rank's memory, as an SM would store to a peer.
`dma`: a helper thread per rank copies, so the caller computes on, as beside a copy engine. It can be *paced* to a
bandwidth and a latency; then its times are emulated and say so.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import errors, settings
from . import atomics, timeline
from .base import Lane, needed
from .symmetric import SymmetricBuffer
from .transfer import destination_address
from .turns import ask_for_short_turns

if TYPE_CHECKING:
    from .cpu import CpuFabric

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_BLOCK = 1 << 20  # bytes copied between two looks at the clock


@dataclass(frozen=True, slots=True)
class Pace:
    """The link that the dma lane pretends to be: bytes per second, and seconds of overhead per transfer."""

    bandwidth: float
    latency: float = 0.0

    @staticmethod
    def parse(text: str) -> Pace | None:
        """`1GB/s`, `500MB/s,20us`; empty for none."""
        if not text.strip():
            return None
        match = re.fullmatch(rf"\s*{_NUMBER}\s*([KMG]?)B/s\s*(?:,\s*{_NUMBER}\s*(us|ms|s)\s*)?", text)
        if match is None or float(match[1]) <= 0:
            must = "a bandwidth and optionally a latency, such as 1GB/s,20us"
            raise errors.InvalidArgument(argument=settings.DMA_PACE.name, was=repr(text), must=must)
        latency = float(match[3]) * _SECONDS[match[4]] if match[3] else 0.0
        return Pace(float(match[1]) * _UNITS[match[2]], latency)

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:g} GB/s, {self.latency * 1e6:g} us"


class PeerLane(Lane):
    """Direct stores into the peer's memory by whoever calls."""

    name = "peer"

    def __init__(self, fabric: CpuFabric) -> None:
        self._pairs = fabric.handoffs()

    def describe(self) -> str:
        return "memcpy into shared memory by the calling thread"

    def send(self, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int) -> None:
        address = destination_address(buffer, peer, start, source)
        self._pairs.claim(peer, slot)
        with timeline.event("copy", engine=self.name, bytes=source.nbytes, to=peer):
            atomics.copy(address, source.data_ptr(), source.nbytes)
        self._pairs.deliver(peer, slot)  # releases the bytes just copied

    def receive(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> torch.Tensor:
        self._pairs.accept(peer, slot)  # acquires them
        return buffer.local.view(-1)[start : start + count]

    def free(self, peer: int, slot: int) -> None:
        self._pairs.free(peer, slot)


@dataclass(frozen=True, slots=True)
class _Job:
    peer: int
    slot: int
    address: int
    source: torch.Tensor  # held, so that it outlives the copy


class _Engine:
    """A thread that does one job after the other."""

    def __init__(self, move: Callable[[_Job], None]) -> None:
        self._move = move
        self.jobs: queue.SimpleQueue[_Job | threading.Event | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="undertow-dma", daemon=True)
        self._thread.start()

    def mark(self) -> Callable[[], None]:
        """What waits until the jobs so far are done, or given up."""
        done = threading.Event()
        self.jobs.put(done)

        def wait() -> None:
            while not done.wait(0.05):  # in slices, so that Ctrl-C arrives
                pass

        return wait

    def flush(self) -> None:
        self.mark()()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self.jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        ask_for_short_turns()
        while (job := self.jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
            elif self._error is None:
                try:
                    self._move(job)
                except Exception as error:  # a lost rank, as a rule; handed to `flush`, whatever it is
                    self._error = error


class DmaLane(Lane):
    """Copies by helper threads; `send` returns at once.

    Two threads, for messages and for what is shared: one that waits for room must not hold back the other. Both
    together are no faster than the pace.
    """

    name = "dma"

    def __init__(self, fabric: CpuFabric) -> None:
        self._pairs = fabric.handoffs()
        self.pace = Pace.parse(settings.DMA_PACE.get())
        self._link_free = 0
        self._link = threading.Lock()
        self._sending, self._sharing = _Engine(self._move), _Engine(self._move)

    @property
    def emulated(self) -> bool:  # type: ignore[override]
        return self.pace is not None

    def describe(self) -> str:
        paced = f", emulated link of {self.pace}" if self.pace else ""
        return f"memcpy into shared memory by a helper thread{paced}"

    def send(self, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int) -> None:
        self._sending.jobs.put(_Job(peer, slot, destination_address(buffer, peer, start, source), source))

    def share(
        self, peers: Sequence[int], source: torch.Tensor, buffer: SymmetricBuffer | None, start: int, slot: int
    ) -> None:
        for peer in peers:
            address = destination_address(needed(buffer), peer, start, source)
            self._sharing.jobs.put(_Job(peer, slot, address, source))

    def receive(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> torch.Tensor:
        self._pairs.accept(peer, slot)
        return buffer.local.view(-1)[start : start + count]

    def free(self, peer: int, slot: int) -> None:
        self._pairs.free(peer, slot)

    def flush(self) -> None:
        self._sending.flush()
        self._sharing.flush()

    def mark(self) -> Callable[[], None]:
        sending, sharing = self._sending.mark(), self._sharing.mark()

        def wait() -> None:
            sending()
            sharing()

        return wait

    def close(self) -> None:
        self._sending.close()
        self._sharing.close()

    def _move(self, job: _Job) -> None:
        self._pairs.claim(job.peer, job.slot)
        with timeline.event("copy", engine=self.name, bytes=job.source.nbytes, to=job.peer):
            pace, source, count = self.pace, job.source.data_ptr(), job.source.nbytes
            if pace is None:
                atomics.copy(job.address, source, count)
            else:  # without the GIL from block to block: who must ask for it on a busy core wakes milliseconds late
                begin = self._reserve(count, pace)
                atomics.copy_paced(job.address, source, count, _BLOCK, begin, pace.bandwidth / 1e9)
        self._pairs.deliver(job.peer, job.slot)

    def _reserve(self, nbytes: int, pace: Pace) -> int:
        """When the emulated link begins with these bytes, in nanoseconds: after what was reserved before, and its
        latency."""
        with self._link:
            begin = max(time.perf_counter_ns(), self._link_free) + round(pace.latency * 1e9)
            self._link_free = begin + round(nbytes / pace.bandwidth * 1e9)
        return begin
