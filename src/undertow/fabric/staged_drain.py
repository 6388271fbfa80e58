"""The proxy's `dma` path: out of this GPU by copy engine, through pinned host memory, into the other by its proxy.

For every (sender, receiver) a ring of chunks in one shared segment. A chunk's header holds the descriptor; its `full`
word holds the chunk's number, written by the sender's stream after the copy out; the receiver's stream writes the
number to the pair's `consumed` word after the copy in. Numbers are cyclic and live in the two proxy threads.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING

from ..kernels import ring_layout
from . import atomics, stream_memory
from .pinned import PinnedSegment
from .proxy import Arrivals, Drain, Post, _int32
from .segment import PAGE

if TYPE_CHECKING:
    from .proxy import Proxy

SLOTS = 4
_FEW_RANKS, _LARGE_CHUNK, _SMALL_CHUNK = 4, 2 << 20, 512 << 10
_FIELDS = ctypes.c_int64 * 5
"""Destination buffer, destination offset, bytes of this chunk, signal index, whether it is the last."""


def chunk_bytes(ranks: int) -> int:
    """Each chunk costs the threads of both sides some calls of the driver; many pairs would pin much memory."""
    return _LARGE_CHUNK if ranks <= _FEW_RANKS else _SMALL_CHUNK


class StagedDrain(Drain):
    """Two streams per rank, out and in; the host never waits for either."""

    def __init__(self, proxy: Proxy) -> None:
        group = proxy.group
        self._proxy = proxy
        self._rank, self._size = group.rank, group.size
        self._chunk = chunk_bytes(self._size)
        self._room = PAGE + self._chunk  # a page with the full word and, from byte 128 on, the header; then the bytes
        total = self._size * self._size * (SLOTS * self._room + PAGE)
        self._ring = PinnedSegment(group, total, "the staging rings of a proxy")
        self._out, self._in = proxy.copies().out, proxy.copies().into
        self._arrivals = Arrivals(group, proxy.signals)
        self._waiting: deque[tuple[Post, int]] = deque()  # a post and how many of its bytes have left
        self._sent = [0] * self._size
        self._received = [0] * self._size

    def start(self, post: Post) -> None:
        self._waiting.append((post, 0))

    def holds(self) -> bool:
        return bool(self._waiting)

    def progress(self) -> bool:
        busy = self._send_one()
        for sender in range(self._size):
            busy = self._receive_one(sender) or busy
        return busy

    def _pair(self, sender: int, receiver: int) -> int:
        """Address of a pair's memory: one page with the consumed word, then its chunks."""
        return self._ring.address + (sender * self._size + receiver) * (SLOTS * self._room + PAGE)

    def _place(self, sender: int, receiver: int, number: int) -> int:
        return self._pair(sender, receiver) + PAGE + (number % SLOTS) * self._room

    @staticmethod
    def _header(place: int) -> ctypes.Array[ctypes.c_int64]:
        """Of the chunk at `place`, without making a tensor for it: that would take longer than a small copy."""
        return _FIELDS.from_address(place + 128)

    def _send_one(self) -> bool:
        if not self._waiting:
            return False
        post, done = self._waiting[0]
        to = post.destination_rank
        number = self._sent[to] + 1
        # Acquires the receiver's reading of the chunk that was here SLOTS numbers ago.
        consumed = atomics.load(self._pair(self._rank, to))
        if _int32(number - consumed) > SLOTS:
            return False
        size = min(self._chunk, post.byte_count - done)
        last = done + size == post.byte_count
        place = self._place(self._rank, to, number)
        self._header(place)[:] = [
            post.destination_buffer, post.destination_offset + done, size, post.signal_index, int(last),
        ]  # fmt: skip
        stream = self._out
        if size:
            stream_memory.to_host(stream, place + PAGE, self._proxy.source(post) + done, size)
        stream_memory.write(stream, place, _int32(number))  # releases the copy; the header was stored before
        self._sent[to] = number
        if last:
            self._waiting.popleft()
        else:
            self._waiting[0] = (post, done + size)
        return True

    def _receive_one(self, sender: int) -> bool:
        number = self._received[sender] + 1
        place = self._place(sender, self._rank, number)
        if atomics.load(place) != _int32(number):  # acquires header and bytes
            return False
        buffer, offset, size, signal, last = self._header(place)
        stream = self._in
        if size:
            address = self._proxy.buffers[buffer].address(self._rank) + offset
            stream_memory.to_device(stream, address, place + PAGE, size)
        if last and signal != ring_layout.NO_SIGNAL:
            self._arrivals.advance(signal, lambda address, count: stream_memory.write(stream, address, count))
        stream_memory.write(stream, self._pair(sender, self._rank), _int32(number))
        self._received[sender] = number
        return True

    def leave(self) -> None:
        self._proxy.copies().end()
        self._ring.close()
