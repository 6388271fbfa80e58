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
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from .. import errors
from ..kernels import ring_layout
from . import atomics
from .base import Fabric, Service
from .logs import get_logger
from .post_ring import Post, PostRing
from .segment import Segment
from .signals import Signals
from .symmetric import SymmetricBuffer

if TYPE_CHECKING:
    from .copy_context import Copies


Made = TypeVar("Made")
_MOMENT = 0.2  # seconds


class Drain(ABC):
    """How the proxy moves what was posted."""

    @abstractmethod
    def serve(self) -> None:
        """Take posts and move them, in the proxy's thread, until it is told to stop and none is left, or the group
        fails."""

    def leave(self) -> None:  # noqa: B027 - a drain that copies at once owns nothing
        """The proxy's thread has ended: let go of what no other rank needs."""

    def part(self) -> None:  # noqa: B027 - as before
        """Tell the others that nothing is sent from here any more. Not collective."""

    def close(self) -> None:  # noqa: B027 - as before
        """Stop. Collective."""


class OneByOne(Drain):
    """Moves each post before it takes the next."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    @abstractmethod
    def move(self, post: Post) -> None:
        """Have the bytes of `post` at their place, or on their way to it, and its signal behind them."""

    def serve(self) -> None:
        proxy = self._proxy
        idle_since = time.monotonic()
        while True:
            ends = proxy.stopping or proxy.group.failed  # before the look: what was posted until then is moved
            post = proxy.posts.take()
            if post is not None:
                self.move(post)
                idle_since = time.monotonic()
            elif ends:
                return
            elif time.monotonic() - idle_since > 0.002:
                time.sleep(0.0001)  # nothing for a while: give the core away


class Proxy(Service):
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
        self.on_device = fabric.group.device.type == "cuda"
        self._segment: Segment | None = None
        self._copies: Copies | None = None
        self.head: torch.Tensor  # counter of tickets, in device memory because not every link has atomics
        words = self._by_all(lambda: self._make_ring(fabric), "a proxy's ring and streams")
        self.posts = PostRing(self.group, words, capacity, signals)
        self._stop = np.zeros(1, np.int32)
        self.stop_address = int(self._stop.ctypes.data)  # of a word that is set when the proxy is to end
        self.patience = np.zeros(1, np.int64)  # nanoseconds for what nobody takes, from then on
        self._drain = self._by_all(lambda: self._make_drain(fabric, lane), "a proxy's drain")
        self.group.barrier()
        self._thread = threading.Thread(target=self._run, name="undertow-proxy", daemon=True)
        self._thread.start()
        fabric.adopt(self)

    def _make_ring(self, fabric: Fabric) -> torch.Tensor:
        """The ring's words, and on a GPU what copies need."""
        size = ring_layout.ring_bytes(self.capacity)
        if not self.on_device:
            self._segment = Segment.create(size, "a proxy ring")
            self.head = torch.zeros(1, dtype=torch.int32, device="cpu")
            return self._segment.tensor(0, (size // ring_layout.WORD_BYTES,), torch.int64)
        from .copy_context import Copies  # needs a driver
        from .cuda import CudaFabric

        assert isinstance(fabric, CudaFabric)
        self.head = torch.zeros(1, dtype=torch.int32, device=fabric.device)
        self._copies = Copies(fabric.device, fabric.sharing_device)
        self._load_ahead(fabric)
        return torch.zeros(size // ring_layout.WORD_BYTES, dtype=torch.int64, device="cpu", pin_memory=True)

    def _by_all(self, make: Callable[[], Made], what: str) -> Made:
        """What `make` makes, which outlives the call, and so its inference mode, that first needs it. What fails is
        told to all ranks: none may be left waiting for this one."""
        made, failure = None, ""
        try:
            with torch.inference_mode(False):
                made = make()
        except (RuntimeError, OSError, MemoryError) as error:  # torch's word for no memory is a RuntimeError
            self.group.check()
            failure = str(error) or type(error).__name__
        for rank, reason in enumerate(self.group.exchange(failure, what)):
            if reason:
                if self._copies is not None:
                    self._copies.end()
                raise errors.AllocationFailed(rank=rank, reason=reason)
        assert made is not None
        return made

    def _load_ahead(self, fabric: Fabric) -> None:
        """What would otherwise be made behind kernels that wait for the proxy, and wait for them: the kernel of `wait`;
        and torch's streams, which are all made with the first, with the interpreter's lock, which the proxy needs."""
        self._wait_on_device(self.head, 0)
        for priority in (0, -1):
            torch.cuda.Stream(fabric.group.device, priority=priority)  # type: ignore[no-untyped-call]
        fabric.settle()

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
        stream_memory.meet(self.group.device)  # torch may bring its context only with a call of its own
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
        """Let posts name `buffer` by a number, the same on all ranks, until it is released. All ranks attach it before
        any post names it."""
        return self.posts.attach(buffer)

    @property
    def address(self) -> int:
        """Of the ring, for kernels."""
        return self.posts.address

    def ring(self) -> torch.Tensor:
        """The ring as int64 words, for kernels."""
        return self.posts.words

    def post(self, post: Post) -> None:
        """Post from the host, by the kernel's protocol. One poster at a time."""
        ticket = int(self.head[0])
        self.head[0] = ticket + 1
        tail = self.address + ring_layout.TAIL_OFFSET
        began = time.monotonic()
        room = cyclic(ticket - self.capacity + 1)
        while atomics.wait(tail, room, self.group.abort_address, atomics.SPINS_CROWDED) != atomics.ARRIVED:
            self.group.check()
            if time.monotonic() - began > self.group.deadline:
                self.group.fail(self.group.why_waiting(post.destination_rank, "the proxy ring stayed full"))
        self.posts.put(ticket, post)

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
        return self.posts.named(post.source_buffer).address(self.group.rank) + post.source_offset

    def destination(self, post: Post, rank: int) -> int:
        """Address of the destination as seen from here, in the memory of `rank`."""
        return self.posts.named(post.destination_buffer).address(rank) + post.destination_offset

    def close(self) -> None:
        """Stop, where all ranks have what they wait for. Collective: a peer may still be sending to this rank."""
        if self.stopping:
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
        if not self.stopping:
            self._end()

    def part(self) -> None:
        """Threads that wait for others end when these part, too."""
        if not self.group.failed:
            self._drain.part()

    def abandon(self) -> None:
        """A thread that runs without the interpreter's lock would not stand still: it sees the group's abort word."""
        self._thread.join(_MOMENT)

    @property
    def stopping(self) -> bool:
        """Whether it is to end."""
        return bool(atomics.load(self.stop_address))

    def _end(self) -> None:
        self.patience[0] = int(self.group.deadline * 1e9)
        atomics.store(self.stop_address, 1)  # releases it
        while self._thread.is_alive() and not self.group.failed:  # it may be sending to a rank that is lost
            self._thread.join(0.05)
        if self.group.failed:
            return  # a kernel may still wait, and the drain be in use: all of it goes with the process
        if self._copies is not None:
            self._copies.rest()
        self._drain.leave()
        self.posts.forget_all()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self.on_this_thread():
                try:
                    self._drain.serve()
                finally:
                    self._rest()
        except errors.UndertowError as error:
            self.group.fail(error)
        except Exception as error:  # a dead proxy is a hang for every rank: whatever it was, the group hears of it
            get_logger().exception("The proxy failed")
            self.group.fail(errors.UndertowError(reason=f"The proxy failed: {type(error).__name__}: {error}"))

    def _rest(self) -> None:
        """Nothing may be under way when this thread ends, not even where the group has failed: it kept the memory that
        copies read and write. Who releases memory waits for torch's context only, and these copies have their own."""
        if self._copies is None:
            return
        try:
            self._copies.rest()
        except errors.UndertowError as error:  # the device is lost: there is no copy any more
            self.group.fail(error)


class _CopyDrain(OneByOne):
    """CPU: the destination is mapped here, so the proxy thread copies and signals at once."""

    def move(self, post: Post) -> None:
        proxy = self._proxy
        atomics.copy(proxy.destination(post, post.destination_rank), proxy.source(post), post.byte_count)
        if post.signal_index != ring_layout.NO_SIGNAL:
            proxy.signals.add(post.destination_rank, post.signal_index)  # releases the copy


def cyclic(value: int) -> int:
    """`value` wrapped to a signed 32-bit integer."""
    return ((value + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
