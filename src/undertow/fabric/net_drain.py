"""The proxy's `net` path: a header and the bytes as two messages to the other rank's proxy, on a Gloo group of its own.

The receiver does not know what comes next, so a second thread waits for a header from anybody. A GPU's bytes pass
through pinned host memory on both sides.
"""

from __future__ import annotations

import threading
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
        self._receiver = threading.Thread(target=self._receive, name="undertow-proxy-net", daemon=True)
        self._receiver.start()

    def start(self, post: Post) -> None:
        data = self._host_copy(post)
        header = [post.destination_buffer, post.destination_offset, post.byte_count, post.signal_index]
        if post.destination_rank == self._group.rank:
            self._deliver(header, data)
            return
        with self._group.connected("the proxy's send"):
            self._wire.send([torch.tensor(header)], post.destination_rank, _HEADER_TAG).wait()
            if post.byte_count:
                self._wire.send([data], post.destination_rank, _BYTES_TAG).wait()

    def progress(self) -> bool:
        return False

    def _host_copy(self, post: Post) -> torch.Tensor:
        """The posted bytes in host memory. The view is the CPU buffer itself: `send` has read it when it returns."""
        flat = self._proxy.buffers[post.source_buffer].as_type(torch.uint8).local
        view = flat[post.source_offset : post.source_offset + post.byte_count]
        if self._stream is None:
            return view
        with torch.cuda.stream(self._stream):
            host = torch.empty(post.byte_count, dtype=torch.uint8, pin_memory=True)
            host.copy_(view, non_blocking=True)
        self._stream.synchronize()
        return host

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
            data = torch.empty(fields[2], dtype=torch.uint8, pin_memory=self._proxy.on_device)
            if fields[2]:
                self._wire.recv([data], work._source_rank(), _BYTES_TAG).wait()
            self._deliver(fields, data)

    def _deliver(self, fields: list[int], data: torch.Tensor) -> None:
        """Bytes first, then the signal, which releases them."""
        buffer, offset, size, signal = fields
        flat = self._proxy.buffers[buffer].as_type(torch.uint8).local
        if self._stream is None:
            flat[offset : offset + size].copy_(data)
        else:
            with torch.cuda.stream(self._stream):
                flat[offset : offset + size].copy_(data, non_blocking=True)
            self._stream.synchronize()  # `data` may go
        if signal == ring_layout.NO_SIGNAL:
            return
        if self._stream is None:
            self._arrivals.advance(signal, atomics.store)
            return
        from .stream_memory import write

        stream = self._stream.cuda_stream
        self._arrivals.advance(signal, lambda address, count: write(stream, address, count))

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
