"""The proxy's `net` path: a header, then the bytes in pieces, to the other rank's proxy, on a Gloo group of its own.

The receiver does not know what comes next, so a second thread waits for a header from anybody. A GPU's bytes pass
through pinned host memory on both sides, which is made once: pinning memory may wait for kernels, and those of this
rank may be waiting for the proxy. Driver calls copy it, not torch, which would remember the stream with the memory and
ask for it when it is long gone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .. import errors
from ..kernels import ring_layout
from . import atomics
from .logs import get_logger
from .proxy import Arrivals, Drain, Post

if TYPE_CHECKING:
    from .proxy import Proxy

_HEADER_TAG, _BYTES_TAG = 0, 1
_FIELDS = 4  # destination buffer, destination offset, byte count, signal index
_GOODBYE = -1
_PIECE = 4 << 20


class NetDrain(Drain):
    """Sends in the proxy's thread, receives in one of its own."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._group = proxy.group
        self._wire = proxy.group.gloo("proxy")
        self._arrivals = Arrivals(proxy.group, proxy.signals)
        self._stream: torch.cuda.Stream | None = None
        if proxy.on_device:
            from .stream_memory import new_stream

            self._stream = new_stream(proxy.group.device)
            self._leaving, self._arriving = (torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        self._receiver = threading.Thread(target=self._receive, name="undertow-proxy-net", daemon=True)
        self._receiver.start()

    def start(self, post: Post) -> None:
        header = [post.destination_buffer, post.destination_offset, post.byte_count, post.signal_index]
        to, here = post.destination_rank, self._bytes(post.source_buffer, post.source_offset, post.byte_count)
        if to == self._group.rank:
            there = self._bytes(post.destination_buffer, post.destination_offset, post.byte_count)
            for piece, source in zip(_pieces(there), _pieces(here), strict=True):
                self._store(piece, self._on_host(source))  # a copy inside the card might need an SM that is taken
            self._signal(post.signal_index)
            return
        with self._group.connected("the proxy's send"):
            self._wire.send([torch.tensor(header)], to, _HEADER_TAG).wait()
            for piece in _pieces(here):
                self._wire.send([self._on_host(piece)], to, _BYTES_TAG).wait()

    def progress(self) -> bool:
        return False

    def _bytes(self, buffer: int, offset: int, size: int) -> torch.Tensor:
        """A range of an attached buffer of this rank."""
        return self._proxy.buffers[buffer].as_type(torch.uint8).local[offset : offset + size]

    def _on_host(self, piece: torch.Tensor) -> torch.Tensor:
        """The bytes in host memory: those of the CPU buffer itself, as a send has read them when it returns."""
        if self._stream is None:
            return piece
        from .stream_memory import to_host

        host = self._leaving[: piece.numel()]
        to_host(self._stream.cuda_stream, host.data_ptr(), piece.data_ptr(), piece.numel())
        self._stream.synchronize()
        return host

    def _store(self, piece: torch.Tensor, host: torch.Tensor) -> None:
        """Bytes from host memory to their place; done when this returns, as that memory is used again."""
        if self._stream is None:
            piece.copy_(host)
            return
        from .stream_memory import to_device

        to_device(self._stream.cuda_stream, piece.data_ptr(), host.data_ptr(), piece.numel())
        self._stream.synchronize()

    def _receive(self) -> None:
        if self._proxy.on_device:
            from . import stream_memory

            torch.cuda.set_device(self._group.device)
            stream_memory.allow_other_captures()
        try:
            with self._group.connected("the proxy's receive"):
                self._receive_until_goodbye()
        except errors.UndertowError as error:
            self._group.fail(error)
        except Exception as error:  # as in the proxy's own thread: the group hears of it, whatever it was
            get_logger().exception("The proxy's receiver failed")
            self._group.fail(errors.UndertowError(reason=f"The proxy failed: {type(error).__name__}: {error}"))

    def _receive_until_goodbye(self) -> None:
        remaining = self._group.size - 1
        while remaining:
            header = torch.zeros(_FIELDS, dtype=torch.int64)
            work = self._wire.recv_anysource([header], _HEADER_TAG)
            work.wait()
            fields = [int(one) for one in header]
            if fields[0] == _GOODBYE:
                remaining -= 1
                continue
            buffer, offset, size, signal = fields
            there = self._bytes(buffer, offset, size)
            for piece in _pieces(there):
                arrived = self._arriving[: piece.numel()] if self._stream is not None else piece
                self._wire.recv([arrived], work._source_rank(), _BYTES_TAG).wait()
                if self._stream is not None:
                    self._store(piece, arrived)
            self._signal(signal)

    def _signal(self, index: int) -> None:
        """Say that one more transfer has arrived; releases its bytes."""
        if index == ring_layout.NO_SIGNAL:
            return
        if self._stream is None:
            self._arrivals.advance(index, atomics.signal_set)
            return
        from .stream_memory import write

        stream = self._stream.cuda_stream
        self._arrivals.advance(index, lambda address, count: write(stream, address, count))

    def close(self) -> None:
        if self._group.failed:
            return  # the receiver may wait for a rank that will never say goodbye; it is a daemon
        for rank in range(self._group.size):
            if rank != self._group.rank:
                goodbye = torch.tensor([_GOODBYE] + [0] * (_FIELDS - 1))
                with self._group.connected("the proxy's goodbye"):
                    self._wire.send([goodbye], rank, _HEADER_TAG).wait()
        while self._receiver.is_alive():  # a receive from anybody does not end when one of them dies
            self._receiver.join(0.05)
            self._group.check()


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Bytes in the order in which they travel: as many messages on both sides."""
    for start in range(0, flat.numel(), _PIECE):
        yield flat[start : start + _PIECE]
