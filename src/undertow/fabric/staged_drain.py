"""The proxy's `dma` path: out of this GPU by copy engine, through pinned host memory, into the other by its proxy.

What the thread does is `staged_moves`; here is what it needs, and what is said when it ends.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from .. import errors
from . import stream_memory
from .logs import get_logger
from .pinned import PinnedSegment
from .post_ring import POST_WORDS
from .proxy import Drain
from .staged_moves import DRIVER, IDLE, LEFT_BEHIND, SLOTS, UNKNOWN_PLACE, Driver, Pairs, Waiting, serve, total_bytes

if TYPE_CHECKING:
    from .proxy import Proxy

_MOST_PINNED = 512 << 20  # bytes of the chunks of all pairs, as long as there are few enough
_MOST_CHUNK, _LEAST_CHUNK = 8 << 20, 64 << 10
_MOST_WAITING = 1024  # posts; more stay in the ring


def chunk_bytes(ranks: int) -> int:
    """Each chunk costs a copy engine a pause, and the threads of both sides some calls of the driver; chunks of many
    pairs take much memory. A power of two."""
    room = _MOST_PINNED // (ranks * ranks * SLOTS)
    return max(_LEAST_CHUNK, min(_MOST_CHUNK, 1 << (room.bit_length() - 1)))


class StagedDrain(Drain):
    """Two streams per rank, out and in; the host never waits for either."""

    def __init__(self, proxy: Proxy) -> None:
        group, signals = proxy.group, proxy.signals
        self._proxy = proxy
        chunk = chunk_bytes(group.size)
        total = total_bytes(group.size, chunk)
        self._segment = PinnedSegment(group, total, "the staging rings of a proxy")
        words = (ctypes.c_int64 * (total // 8)).from_address(self._segment.address)
        arrivals = np.array([signals.address(group.rank, index) for index in range(signals.count)], np.int64)
        sent, received = np.zeros(group.size, np.int64), np.zeros(group.size, np.int64)
        self.pairs = Pairs(
            np.ctypeslib.as_array(words), self._segment.address, group.rank, group.size, chunk, sent, received,
            arrivals, np.zeros_like(arrivals),
        )  # fmt: skip
        copies = proxy.copies()
        self.driver = Driver(*stream_memory.entry_points(), copies.out, copies.into)
        self.waiting = Waiting(np.zeros((_MOST_WAITING, POST_WORDS + 1), np.int64), np.zeros(2, np.int64))

    def serve(self) -> None:
        proxy = self._proxy
        words = proxy.stop_address, proxy.group.abort_address, proxy.patience
        # Without the interpreter's lock.
        status = int(serve(proxy.posts.compiled, self.pairs, self.driver, self.waiting, *words))
        if status == IDLE:
            return
        if status == LEFT_BEHIND:
            get_logger().warning("The proxy ends with posts that nobody took for %g s", proxy.patience[0] / 1e9)
        elif status == UNKNOWN_PLACE:
            raise errors.InvalidArgument(argument="a chunk's buffer", was="not attached", must="attached to the proxy")
        elif status > DRIVER:
            stream_memory.check(status - DRIVER, proxy.group.rank)
        else:
            proxy.posts.check(status, self.waiting.posts[int(self.waiting.ends[1]) % _MOST_WAITING, :POST_WORDS])

    def leave(self) -> None:
        self._proxy.copies().end()
        self._segment.close()
