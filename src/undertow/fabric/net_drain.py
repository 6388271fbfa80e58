"""The proxy's `net` path: a header, then the bytes in pieces, to the other rank's proxy, on a Gloo group of its own.

The receiver does not know what comes next, so a second thread waits for a header from anybody, for as long as it takes.
A GPU's bytes pass through pinned host memory on both sides, which is made once: pinning memory may wait for kernels,
and those of this rank may be waiting for the proxy. Driver calls copy it, not torch, which would remember the stream
with the memory and ask for it when it is long gone.

For the same reason neither thread keeps anything of an attached buffer once a transfer is over, and on a GPU neither
makes a tensor of one: a buffer that was replaced goes with its last tensor, and symmetric memory that goes waits for
all kernels of the rank, with the interpreter's lock in its hands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from .. import errors
from ..kernels import ring_layout
from . import atomics
from .logs import get_logger
from .post_ring import Post
from .proxy import OneByOne, cyclic

if TYPE_CHECKING:
    from .group import Group
    from .proxy import Proxy
    from .signals import Signals

_HEADER_TAG, _BYTES_TAG = 0, 1
_FIELDS = 4  # destination buffer, destination offset, byte count, signal index
_GOODBYE = -1
_PIECE = 4 << 20
_EVER = timedelta(days=3650)  # between two transfers: the deadline is for those who wait for one


class NetDrain(OneByOne):
    """Sends in the proxy's thread, receives in one of its own; on a GPU each with a stream of its own."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(proxy)
        self._group = proxy.group
        self._wire = proxy.group.gloo("proxy")
        self._arrivals = _Arrivals(proxy.group, proxy.signals)
        self._on_device = proxy.on_device
        if proxy.on_device:
            self._out, self._in = proxy.copies().out, proxy.copies().into
            self._leaving, self._arriving = (
                torch.empty(_PIECE, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
            )
        self._parted = threading.Event()
        self._receiver = threading.Thread(target=self._receive, name="undertow-proxy-net", daemon=True)
        self._receiver.start()

    def move(self, post: Post) -> None:
        header = [post.destination_buffer, post.destination_offset, post.byte_count, post.signal_index]
        to = post.destination_rank
        if to == self._group.rank:
            for first, size in _pieces(post.byte_count):  # a copy inside the card might need an SM that is taken
                host = self._on_host(post.source_buffer, post.source_offset + first, size)
                self._store(post.destination_buffer, post.destination_offset + first, host)
            self._signal(post.signal_index)
            return
        with self._group.connected("the proxy's send"):
            self._wire.send([torch.tensor(header, device="cpu")], to, _HEADER_TAG).wait()
            for first, size in _pieces(post.byte_count):
                host = self._on_host(post.source_buffer, post.source_offset + first, size)
                self._wire.send([host], to, _BYTES_TAG).wait()

    def _address(self, buffer: int, offset: int) -> int:
        return self._proxy.posts.named(buffer).address(self._group.rank) + offset

    def _bytes(self, buffer: int, offset: int, size: int) -> torch.Tensor:
        """On a CPU: a range of an attached buffer of this rank."""
        return self._proxy.posts.named(buffer).as_type(torch.uint8).local[offset : offset + size]

    def _on_host(self, buffer: int, offset: int, size: int) -> torch.Tensor:
        """The bytes in host memory: those of the CPU buffer itself, as a send has read them when it returns."""
        if not self._on_device:
            return self._bytes(buffer, offset, size)
        from .stream_memory import synchronize, to_host

        to_host(self._out, self._leaving.data_ptr(), self._address(buffer, offset), size)
        synchronize(self._out)
        return self._leaving[:size]

    def _store(self, buffer: int, offset: int, host: torch.Tensor) -> None:
        """Bytes from host memory to their place; done when this returns, as that memory is used again."""
        if not self._on_device:
            self._bytes(buffer, offset, host.numel()).copy_(host)
            return
        from .stream_memory import synchronize, to_device

        to_device(self._in, self._address(buffer, offset), host.data_ptr(), host.numel())
        synchronize(self._in)

    def _receive(self) -> None:
        try:
            with self._proxy.on_this_thread(), self._group.connected("the proxy's receive"):
                self._receive_until_goodbye()
                self._parted.wait()  # the streams are both threads'
                if self._on_device:
                    self._proxy.copies().end()
        except errors.UndertowError as error:
            self._group.fail(error)
        except Exception as error:  # as in the proxy's own thread: the group hears of it, whatever it was
            get_logger().exception("The proxy's receiver failed")
            self._group.fail(errors.UndertowError(reason=f"The proxy failed: {type(error).__name__}: {error}"))

    def _receive_until_goodbye(self) -> None:
        for _ in range(self._group.size - 1):
            while True:
                header = torch.zeros(_FIELDS, dtype=torch.int64, device="cpu")
                work = self._wire.recv_anysource([header], _HEADER_TAG)
                work.wait(_EVER)
                fields = [int(one) for one in header]
                if fields[0] == _GOODBYE:
                    break
                self._take_in(work._source_rank(), *fields)  # what it holds goes when it returns

    def _take_in(self, source: int, buffer: int, offset: int, size: int, signal: int) -> None:
        """The bytes that a header announced; then their signal."""
        for first, count in _pieces(size):
            place = self._arriving[:count] if self._on_device else self._bytes(buffer, offset + first, count)
            self._wire.recv([place], source, _BYTES_TAG).wait()
            if self._on_device:
                self._store(buffer, offset + first, place)
        self._signal(signal)

    def _signal(self, index: int) -> None:
        """Say that one more transfer has arrived; releases its bytes."""
        if index == ring_layout.NO_SIGNAL:
            return
        if not self._on_device:
            self._arrivals.advance(index, atomics.signal_set)
            return
        from .stream_memory import write

        self._arrivals.advance(index, lambda address, count: write(self._in, address, count))

    def part(self) -> None:
        """Say goodbye to all others; when all have said it, the receiver ends."""
        if self._parted.is_set():
            return
        self._parted.set()
        goodbye = torch.tensor([_GOODBYE] + [0] * (_FIELDS - 1), device="cpu")
        for rank in range(self._group.size):
            if rank == self._group.rank:
                continue
            try:
                self._wire.send([goodbye], rank, _HEADER_TAG).wait()
            except RuntimeError as error:  # its process has ended, and waits for no goodbye
                get_logger().debug("Rank %d was told no goodbye: %s", rank, error)

    def close(self) -> None:
        if self._group.failed:
            return  # the receiver may wait for a rank that will never say goodbye; it is a daemon
        self.part()
        while self._receiver.is_alive():  # a receive from anybody does not end when one of them dies
            self._receiver.join(0.05)
            self._group.check()


class _Arrivals:
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
            store(self._signals.address(self._rank, index), cyclic(self._counts[index]))


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) in the order in which they travel: as many messages on both sides."""
    for first in range(0, size, _PIECE):
        yield first, min(_PIECE, size - first)
