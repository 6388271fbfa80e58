"""The host's side of the ring of posts (`ring_layout`): taking them in order, and refusing wrong ones.

Compiled, so that who takes posts can do it without the interpreter's lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from numpy.typing import NDArray

from .. import errors
from ..kernels import ring_layout
from . import atomics

if TYPE_CHECKING:
    from .group import Group
    from .symmetric import SymmetricBuffer

NOTHING, TAKEN, UNKNOWN_SOURCE, SOURCE_RANGE, UNKNOWN_DESTINATION, DESTINATION_RANGE, WRONG_RANK, WRONG_SIGNAL = range(
    8
)
"""What `take` says: there was no post; one was taken; one was taken that is wrong."""

POST_WORDS = ring_layout.DESCRIPTOR_WORDS - 1
_MOST_BUFFERS = 1 << 16  # a row each; only those ever used are looked at
_NUMBER, _ADDRESS, _SIZE = range(3)  # columns of the table of attached buffers
_GONE = -1


@dataclass(frozen=True, slots=True)
class Post:
    """One descriptor: bytes of an attached buffer here to bytes of an attached buffer there. In the ring's order."""

    source_buffer: int
    source_offset: int
    destination_rank: int
    destination_buffer: int
    destination_offset: int
    byte_count: int
    signal_index: int


class Ring(NamedTuple):
    """What `take` reads: the ring's words, the address of its tail, what may be named, how many rows of that were ever
    used, and how many posts were taken."""

    words: NDArray[np.int64]
    tail: int
    capacity: int
    ranks: int
    signals: int
    buffers: NDArray[np.int64]
    used: NDArray[np.int64]
    taken: NDArray[np.int64]


_WORDS, _TABLE = types.int64[::1], types.int64[:, ::1]
RING = types.NamedTuple((_WORDS, types.int64, types.int64, types.int64, types.int64, _TABLE, _WORDS, _WORDS), Ring)
_ready_value, _descriptor_offset = numba.njit(ring_layout.ready_value), numba.njit(ring_layout.descriptor_offset)


@atomics.compiled(types.int64(RING, types.int64))
def row_of(ring: Any, number: int) -> Any:
    """The row of an attached buffer, or -1."""
    for row in range(ring.used[0]):
        if ring.buffers[row, _NUMBER] == number and ring.buffers[row, _SIZE] != _GONE:
            return row
    return -1


@atomics.compiled(types.int64(RING, types.int64, types.int64))
def address_in(ring: Any, number: int, offset: int) -> Any:
    """Address here of a byte of an attached buffer, or 0."""
    row = row_of(ring, number)
    return ring.buffers[row, _ADDRESS] + offset if row >= 0 else 0


@atomics.compiled(types.boolean(types.int64, types.int64, types.int64))
def _is_inside(offset: int, size: int, room: int) -> Any:
    """Whatever was posted: no sum that could overflow."""
    return 0 <= size <= room and 0 <= offset <= room - size


@atomics.compiled(types.int64(RING, _WORDS))
def take(ring: Any, post: Any) -> Any:
    """Read the next descriptor into `post`, give its place back, and say whether it may be followed."""
    first = _descriptor_offset(ring.taken[0], ring.capacity) // ring_layout.WORD_BYTES
    ready = np.uintp(ring.words.ctypes.data + first * ring_layout.WORD_BYTES)
    if atomics.load_acquire(ready) != _ready_value(ring.taken[0]):  # acquires the words behind it
        return NOTHING
    for word in range(POST_WORDS):
        post[word] = ring.words[first + 1 + word]
    ring.taken[0] += 1
    # Releases the reads above: the place may be filled again by whoever acquires the tail.
    atomics.signal_set(np.uintp(ring.tail), np.int32(ring.taken[0]))
    size, signal = post[ring_layout.BYTE_COUNT - 1], post[ring_layout.SIGNAL_INDEX - 1]
    source = row_of(ring, post[ring_layout.SOURCE_BUFFER - 1])
    if source < 0:
        return UNKNOWN_SOURCE
    if not _is_inside(post[ring_layout.SOURCE_OFFSET - 1], size, ring.buffers[source, _SIZE]):
        return SOURCE_RANGE
    destination = row_of(ring, post[ring_layout.DESTINATION_BUFFER - 1])
    if destination < 0:
        return UNKNOWN_DESTINATION
    if not _is_inside(post[ring_layout.DESTINATION_OFFSET - 1], size, ring.buffers[destination, _SIZE]):
        return DESTINATION_RANGE
    if not 0 <= post[ring_layout.DESTINATION_RANK - 1] < ring.ranks:
        return WRONG_RANK
    if signal != ring_layout.NO_SIGNAL and not 0 <= signal < ring.signals:
        return WRONG_SIGNAL
    return TAKEN


class PostRing:
    """The ring in `memory` (int64 words), and the buffers that its posts may name.

    A descriptor is data from a kernel: a wrong one must not become a write to a wrong place.
    """

    def __init__(self, group: Group, memory: torch.Tensor, capacity: int, signals: int) -> None:
        self._rank = group.rank
        self.words = memory
        self.address = memory.data_ptr()
        self.attached: dict[int, SymmetricBuffer] = {}
        buffers = np.full((_MOST_BUFFERS, 3), _GONE, np.int64)
        used, taken = np.zeros(1, np.int64), np.zeros(1, np.int64)
        tail = self.address + ring_layout.TAIL_OFFSET
        self.compiled = Ring(memory.numpy(), tail, capacity, group.size, signals, buffers, used, taken)
        self._post = np.zeros(POST_WORDS, np.int64)

    @property
    def taken(self) -> int:
        """How many posts."""
        return int(self.compiled.taken[0])

    def attach(self, buffer: SymmetricBuffer) -> int:
        """Let posts name `buffer` by a number, the same on all ranks, until it is released.

        Who takes posts may be looking at the table meanwhile. He looks for this number only when he has acquired a post
        that names it, and that is made after this.
        """
        number, buffers, used = buffer.identity, self.compiled.buffers, self.compiled.used
        if number in self.attached:
            return number
        free = np.flatnonzero(buffers[: used[0], _SIZE] == _GONE)
        row = int(free[0]) if len(free) else int(used[0])
        if row == _MOST_BUFFERS:
            must = f"at most {_MOST_BUFFERS} at a time"
            raise errors.InvalidArgument(argument="attached buffers", was=_MOST_BUFFERS + 1, must=must)
        buffers[row, _NUMBER] = number
        buffers[row, _ADDRESS] = buffer.address(self._rank) if buffer.nbytes else 0
        buffers[row, _SIZE] = buffer.nbytes
        used[0] = max(used[0], row + 1)
        self.attached[number] = buffer
        buffer.when_released(self._forgetting(number, row))
        return number

    def _forgetting(self, number: int, row: int) -> Callable[[], None]:
        """What a buffer calls when it goes; it does not keep the ring."""
        ring = weakref.ref(self)

        def forget() -> None:
            here = ring()
            if here is not None and number in here.attached:
                del here.attached[number]
                here.compiled.buffers[row, _SIZE] = _GONE

        return forget

    def forget_all(self) -> None:
        """Nobody takes posts any more: hold no buffer."""
        self.compiled.buffers[:, _SIZE] = _GONE
        self.attached.clear()

    def named(self, number: int) -> SymmetricBuffer:
        """The attached buffer of this number."""
        if number not in self.attached:
            raise errors.InvalidArgument(argument="buffer", was=number, must="attached to the proxy")
        return self.attached[number]

    def put(self, ticket: int, post: Post) -> None:
        """Post, where `ticket` has room."""
        first = ring_layout.descriptor_offset(ticket, self.compiled.capacity) // ring_layout.WORD_BYTES
        self.compiled.words[first + 1 : first + 1 + POST_WORDS] = astuple(post)
        # Releases the words above: who takes posts acquires the low half of the ready word, which changes every lap.
        atomics.store(self.address + first * ring_layout.WORD_BYTES, ring_layout.ready_value(ticket))

    def take(self) -> Post | None:
        """The next post, if there is one."""
        status = int(take(self.compiled, self._post))
        if status == NOTHING:
            return None
        self.check(status, self._post)
        return Post(*(int(one) for one in self._post))

    def check(self, status: int, words: NDArray[np.int64]) -> None:
        """Say what was wrong with a post."""
        if status <= TAKEN:
            return
        post = Post(*(int(one) for one in words))
        ranges: Mapping[int, tuple[str, int, int]] = {
            UNKNOWN_SOURCE: ("source", post.source_buffer, post.source_offset),
            SOURCE_RANGE: ("source", post.source_buffer, post.source_offset),
            UNKNOWN_DESTINATION: ("destination", post.destination_buffer, post.destination_offset),
            DESTINATION_RANGE: ("destination", post.destination_buffer, post.destination_offset),
        }
        if status == WRONG_RANK:
            must = f"between 0 and {self.compiled.ranks - 1}"
            raise errors.InvalidArgument(argument="destination rank", was=post.destination_rank, must=must)
        if status == WRONG_SIGNAL:
            must = f"between 0 and {self.compiled.signals - 1}"
            raise errors.InvalidArgument(argument="signal index", was=post.signal_index, must=must)
        name, number, offset = ranges[status]
        if status in (UNKNOWN_SOURCE, UNKNOWN_DESTINATION):
            raise errors.InvalidArgument(argument=f"{name} buffer", was=number, must="attached to the proxy")
        was = f"[{offset}, {offset + post.byte_count})"
        must = f"inside {self.attached[number].nbytes} bytes"
        raise errors.InvalidArgument(argument=f"{name} range", was=was, must=must)
