"""The proxy: transfers that a kernel asks for where it has no peer pointer.

A kernel posts (source, bytes, destination, signal) to a ring in pinned memory (`ring_layout`); one thread per rank
takes the posts in order and has them moved, by `dma` or by `net`. At the destination the bytes are written first, then
the arrival signal is advanced by one. An arrival signal has one writer, the destination's proxy, so a stream write of
its running count is enough and no SM is needed.

The kernel that posts must not overwrite its source until the receiver has told it, in whatever way, that it has read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import errors
from ..kernels import ring_layout
from . import atomics
from .base import Fabric
from .logs import get_logger
from .segment import Segment
from .signals import Signals
from .symmetric import SymmetricBuffer

if TYPE_CHECKING:
    from .copy_context import Copies
    from .group import Group


@dataclass(frozen=True, slots=True)
class Post:
    """One descriptor: bytes of an attached buffer here to bytes of an attached buffer there."""

    source_buffer: int
    source_offset: int
    destination_rank: int
    destination_buffer: int
    destination_offset: int
    byte_count: int
    signal_index: int


class Drain(ABC):
    """How the proxy moves what was posted."""

    @abstractmethod
    def start(self, post: Post) -> None:
        """Take a post of this rank."""

    @abstractmethod
    def progress(self) -> bool:
        """Advance what can be advanced without blocking; whether anything was."""

    def holds(self) -> bool:
        """Whether a post was taken that has not left: its receiver has no room yet."""
        return False

    def leave(self) -> None:  # noqa: B027 - a drain that copies at once owns nothing
        """The proxy's thread has ended: let go of what no other rank needs."""

    def close(self) -> None:  # noqa: B027 - as before
        """Stop. Collective."""


class Proxy:
    """A ring, the thread that drains it, and the arrival signals of this rank. Made collectively by all ranks."""

    def __init__(self, fabric: Fabric, signals: int = 64, capacity: int = 256, lane: str = "dma") -> None:
        if lane not in ("dma", "net"):
            raise errors.InvalidArgument(argument="lane", was=repr(lane), must="'dma' or 'net'")
        missing = fabric.lanes()[lane]
        if missing:
            raise errors.StrategyUnavailable(strategy=f"proxy over {lane}", reason=missing, possible="proxy over net")
        self.group = fabric.group
        self.capacity = capacity
        self.signals: Signals = fabric.signals(signals)  # arrivals on this rank
        self.buffers: dict[int, SymmetricBuffer] = {}
        self.on_device = fabric.group.device.type == "cuda"
        size = ring_layout.ring_bytes(capacity)
        self._memory: Segment | torch.Tensor
        self._copies: Copies | None = None
        if self.on_device:
            self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            self.address = self._memory.data_ptr()
            #: counter of tickets, in device memory because not every link has atomics
            self.head = torch.zeros(1, dtype=torch.int32, device=fabric.group.device)
            self._copies = self._make_copies(fabric)
            self._load_ahead(fabric)
        else:
            self._memory = Segment.create(size, "a proxy ring")
            self.address = self._memory.address
            self.head = torch.zeros(1, dtype=torch.int32)
        self._taken = 0
        self._stopping = False
        self._drain = self._make_drain(fabric, lane)
        self.group.barrier()
        self._thread = threading.Thread(target=self._run, name="undertow-proxy", daemon=True)
        self._thread.start()
        fabric.adopt(self)

    def _load_ahead(self, fabric: Fabric) -> None:
        """What would otherwise be made behind kernels that wait for the proxy, and wait for them: the kernel of `wait`;
        and torch's streams, which are all made with the first, with the interpreter's lock, which the proxy needs."""
        self._wait_on_device(self.head, 0)
        for priority in (0, -1):
            torch.cuda.Stream(fabric.group.device, priority=priority)  # type: ignore[no-untyped-call]
        fabric.settle()

    def _make_copies(self, fabric: Fabric) -> Copies:
        """What fails is told to all ranks: none may be left waiting for this one."""
        from .copy_context import Copies  # needs a driver
        from .cuda import CudaFabric

        assert isinstance(fabric, CudaFabric)
        made, failure = None, ""
        try:
            made = Copies(fabric.device, fabric.sharing_device)
        except errors.UndertowError as error:
            failure = str(error)
        for rank, reason in enumerate(self.group.exchange(failure, "streams of the proxy's copies")):
            if reason:
                raise errors.AllocationFailed(rank=rank, reason=reason)
        assert made is not None
        return made

    def copies(self) -> Copies:
        """Where a GPU's bytes are copied, and by which streams."""
        assert self._copies is not None, "of a proxy on a GPU"
        return self._copies

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """What this thread, one of the proxy's, asks of the driver inside is asked where its copies are made."""
        if self._copies is None:
            yield
            return
        from . import stream_memory

        torch.cuda.set_device(self.group.device)
        stream_memory.allow_other_captures()
        with self._copies.current():
            yield

    def _make_drain(self, fabric: Fabric, lane: str) -> Drain:
        if lane == "net":
            from .net_drain import NetDrain

            return NetDrain(self)
        if self.on_device:
            from .staged_drain import StagedDrain

            return StagedDrain(self)
        return _CopyDrain(self)

    def attach(self, buffer: SymmetricBuffer) -> int:
        """Let posts name `buffer` by a number, the same on all ranks. All ranks attach before any post names it."""
        self.buffers[buffer.identity] = buffer
        return buffer.identity

    def ring(self) -> torch.Tensor:
        """The ring as int64 words, for kernels."""
        if isinstance(self._memory, Segment):
            return self._memory.tensor(0, (ring_layout.ring_bytes(self.capacity) // 8,), torch.int64)
        return self._memory.view(torch.int64)

    def post(self, post: Post) -> None:
        """Post from the host, by the kernel's protocol. One poster at a time."""
        ticket = int(self.head[0])
        self.head[0] = ticket + 1
        tail = self.address + ring_layout.TAIL_OFFSET
        began = time.monotonic()
        room = _int32(ticket - self.capacity + 1)
        while atomics.wait(tail, room, self.group.abort_address, atomics.SPINS_CROWDED) != atomics.ARRIVED:
            self.group.check()
            if time.monotonic() - began > self.group.deadline:
                self.group.fail(self.group.why_waiting(post.destination_rank, "the proxy ring stayed full"))
        words = self.ring()[ring_layout.descriptor_offset(ticket, self.capacity) // 8 :][: ring_layout.DESCRIPTOR_WORDS]
        words[1:] = torch.tensor(
            [
                post.source_buffer,
                post.source_offset,
                post.destination_rank,
                post.destination_buffer,
                post.destination_offset,
                post.byte_count,
                post.signal_index,
            ]
        )
        # Releases the words above: the thread acquires the low half of the ready word, which changes with every lap.
        atomics.store(words.data_ptr(), ring_layout.ready_value(ticket))

    def wait(self, index: int, count: int, sender: int | None = None) -> None:
        """Wait until `count` transfers have arrived at signal `index` of this rank, in the order of the current stream.

        On a GPU this takes one SM for as long as it waits: a stream memory operation may hold back the proxy's own
        copies, which are enqueued later, and nothing would ever arrive.
        """
        if not self.on_device:
            self.signals.wait(index, count, sender)
            return
        if torch.cuda.is_current_stream_capturing():
            must = "outside a capture, where each replay would need another count; use epochs in the kernel"
            raise errors.InvalidArgument(argument="the call", was="inside a CUDA graph capture", must=must)
        from .cuda import CudaFabric

        fabric = self.group.fabric
        assert isinstance(fabric, CudaFabric)
        self._wait_on_device(fabric.signal_word(self.signals, index), count)

    def _wait_on_device(self, word: torch.Tensor, count: int) -> None:
        from ..kernels.signals import wait_kernel
        from .cuda import CudaFabric

        fabric = self.group.fabric
        assert isinstance(fabric, CudaFabric)
        deadline = int(self.group.deadline * 1e9)
        wait_kernel[(1,)](word, count, fabric.guard.abort, fabric.guard.error, deadline, num_warps=1)

    def source(self, post: Post) -> int:
        """Address of the posted bytes here."""
        return self.buffers[post.source_buffer].address(self.group.rank) + post.source_offset

    def destination(self, post: Post, rank: int) -> int:
        """Address of the destination as seen from here, in the memory of `rank`."""
        return self.buffers[post.destination_buffer].address(rank) + post.destination_offset

    def close(self) -> None:
        """Move what was posted so far, then stop. Collective: a peer may still be sending to this rank."""
        if self._stopping:
            return
        if not self.group.failed:
            self.group.barrier()
        self._end()
        if self.group.failed:
            return  # a kernel may still poll the signals, a thread still write them: they go with the process
        self._drain.close()
        self.signals.release()

    def stop(self) -> None:
        """End the thread without asking the others; for the fabric, when it is closed before the proxy."""
        if not self._stopping:
            self._end()

    def _end(self) -> None:
        self._stopping = True
        while self._thread.is_alive() and not self.group.failed:  # it may be sending to a rank that is lost
            self._thread.join(0.05)
        if self.group.failed:
            return  # a kernel may still wait, and the drain be in use: all of it goes with the process
        if self._copies is not None:
            self._copies.rest()
        self._drain.leave()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self.on_this_thread():
                self._serve()
        except errors.UndertowError as error:
            self.group.fail(error)
        except Exception as error:  # a dead proxy is a hang for every rank: whatever it was, the group hears of it
            get_logger().exception("The proxy failed")
            self.group.fail(errors.UndertowError(reason=f"The proxy failed: {type(error).__name__}: {error}"))

    def _serve(self) -> None:
        idle_since = time.monotonic()
        while True:
            ends = self._stopping or self.group.failed  # before the look: what was posted until then is moved
            ready = self.address + ring_layout.descriptor_offset(self._taken, self.capacity)
            busy = False
            if atomics.load(ready) == ring_layout.ready_value(self._taken):  # acquires the descriptor
                self._drain.start(self._take())
                busy = True
            busy = self._drain.progress() or busy
            if busy:
                idle_since = time.monotonic()
            elif self.group.failed or (ends and not self._drain.holds()):
                return
            elif ends and time.monotonic() - idle_since > self.group.deadline:
                get_logger().warning("The proxy ends with posts that nobody took for %g s", self.group.deadline)
                return
            elif time.monotonic() - idle_since > 0.002:
                time.sleep(0.0001)  # nothing for a while: give the core away

    def _take(self) -> Post:
        """Read the descriptor of the next ticket (acquired by the caller) and give its place back."""
        start = ring_layout.descriptor_offset(self._taken, self.capacity) // 8
        words = [int(one) for one in self.ring()[start : start + ring_layout.DESCRIPTOR_WORDS]]
        post = Post(*words[1:])
        self._taken += 1
        # Releases the reads above: the place may be filled again by whoever acquires the tail.
        atomics.signal_set(self.address + ring_layout.TAIL_OFFSET, _int32(self._taken))
        self._check(post)
        return post

    def _check(self, post: Post) -> None:
        """A descriptor is data from a kernel: a wrong one must not become a write to a wrong place."""
        for name, number, offset in (
            ("source", post.source_buffer, post.source_offset),
            ("destination", post.destination_buffer, post.destination_offset),
        ):
            buffer = self.buffers.get(number)
            if buffer is None:
                raise errors.InvalidArgument(argument=f"{name} buffer", was=number, must="attached to the proxy")
            if offset < 0 or post.byte_count < 0 or offset + post.byte_count > buffer.nbytes:
                was = f"[{offset}, {offset + post.byte_count})"
                raise errors.InvalidArgument(argument=f"{name} range", was=was, must=f"inside {buffer.nbytes} bytes")
        if not 0 <= post.destination_rank < self.group.size:
            must = f"between 0 and {self.group.size - 1}"
            raise errors.InvalidArgument(argument="destination rank", was=post.destination_rank, must=must)
        if post.signal_index != ring_layout.NO_SIGNAL and not 0 <= post.signal_index < self.signals.count:
            must = f"between 0 and {self.signals.count - 1}"
            raise errors.InvalidArgument(argument="signal index", was=post.signal_index, must=must)


class _CopyDrain(Drain):
    """CPU: the destination is mapped here, so the proxy thread copies and signals at once."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def start(self, post: Post) -> None:
        proxy = self._proxy
        atomics.copy(proxy.destination(post, post.destination_rank), proxy.source(post), post.byte_count)
        if post.signal_index != ring_layout.NO_SIGNAL:
            proxy.signals.add(post.destination_rank, post.signal_index)  # releases the copy

    def progress(self) -> bool:
        return False


class Arrivals:
    """The running count of each arrival signal on this rank: its proxy is the only writer."""

    def __init__(self, group: Group, signals: Signals) -> None:
        self._rank = group.rank
        self._signals = signals
        self._counts = [0] * signals.count
        self._lock = threading.Lock()

    def advance(self, index: int, store: Callable[[int, int], None]) -> None:
        """Say that one more has arrived, by `store(address, value)`; in one step, as two threads may deliver."""
        with self._lock:
            self._counts[index] += 1
            store(self._signals.address(self._rank, index), _int32(self._counts[index]))


def _int32(value: int) -> int:
    """`value` wrapped to a signed 32-bit integer."""
    return ((value + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
