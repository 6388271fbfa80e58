"""What the proxy's `dma` path does over and over, compiled: it needs the interpreter's lock for nothing.

A launch may wait for room in the driver's queue with that lock in its hands, behind a kernel that waits for what is
moved here.

For every (sender, receiver) a ring of chunks in one segment that all ranks pin. A chunk's header holds the descriptor;
its `full` word holds the chunk's number, written by the sender's stream after the copy out; the receiver's stream
writes the number to the pair's `consumed` word after the copy in. Numbers are cyclic and live in the two threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ..kernels import ring_layout
from . import atomics
from .post_ring import NOTHING, POST_WORDS, RING, TAKEN, WRONG_SIGNAL, address_in, take
from .segment import PAGE

SLOTS = 4
IDLE, BUSY = NOTHING, TAKEN
LEFT_BEHIND, UNKNOWN_PLACE, DRIVER = WRONG_SIGNAL + 1, WRONG_SIGNAL + 2, 1 << 16
"""Besides what `take` says: nobody took what was left; a chunk for a buffer that is not attached; a driver's error."""

_HEADER = 128 // 8  # words from the full word to the header
_BUFFER, _OFFSET, _SIZE, _SIGNAL, _LAST = range(5)  # of the header: where to, bytes of this chunk, ..., whether last
_AWAKE, _ASLEEP = 2_000_000, 100_000  # nanoseconds of looking without a pause, and of a pause


class Pairs(NamedTuple):
    """The chunks of all pairs: the segment's words and its address, and the counts of this rank."""

    words: NDArray[np.int64]
    address: int
    rank: int
    ranks: int
    chunk: int
    sent: NDArray[np.int64]
    received: NDArray[np.int64]
    arrivals: NDArray[np.int64]  # addresses of this rank's signals
    arrived: NDArray[np.int64]  # and their counts: nobody else writes them


class Driver(NamedTuple):
    """Addresses of the driver's functions, and the streams, out of this GPU and into it."""

    to_host: int
    to_device: int
    write: int
    out: int
    into: int


class Waiting(NamedTuple):
    """Posts that have not left, in order, each with how many of its bytes have; the numbers of the first and the next.

    Post n is in row n, cyclically.
    """

    posts: NDArray[np.int64]
    ends: NDArray[np.int64]


_WORDS, _ROWS = types.int64[::1], types.int64[:, ::1]
_PAIRS = types.NamedTuple((_WORDS, *[types.int64] * 4, *[_WORDS] * 4), Pairs)
_DRIVER = types.NamedUniTuple(types.int64, 5, Driver)
_WAITING = types.NamedTuple((_ROWS, _WORDS), Waiting)


@atomics.compiled("int64(int64)")
def _span(chunk: int) -> Any:
    """Bytes of a pair: a page with the consumed word; then places, each a page with the full word and, from byte 128
    on, the header, and a chunk's bytes."""
    return PAGE + SLOTS * (PAGE + chunk)


def total_bytes(ranks: int, chunk: int) -> int:
    """Of the chunks of all pairs."""
    return ranks * ranks * int(_span(chunk))


def _function(parameters: tuple[Any, ...]) -> Any:
    """An intrinsic that calls the C function at an address."""

    def declare(typing_context: Any, function: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [context.get_value_type(one) for one in parameters])
            return builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])

        return types.int32(types.int64, *parameters), generate

    return declare


@intrinsic  # type: ignore[untyped-decorator]
def _copy(typing_context: Any, function: Any, to: Any, source: Any, size: Any, stream: Any) -> Any:
    """cuMemcpyDtoHAsync or cuMemcpyHtoDAsync: each parameter is a word of 64 bits."""
    return _function((types.int64,) * 4)(typing_context, function, to, source, size, stream)


@intrinsic  # type: ignore[untyped-decorator]
def _write(typing_context: Any, function: Any, stream: Any, address: Any, value: Any, flags: Any) -> Any:
    """cuStreamWriteValue32: releases what the stream did before."""
    parameters = (types.int64, types.int64, types.int32, types.int32)
    return _function(parameters)(typing_context, function, stream, address, value, flags)


@atomics.compiled(types.int64(_PAIRS, types.int64, types.int64))
def _pair(pairs: Any, sender: int, receiver: int) -> Any:
    """Address of a pair's memory, which begins with the consumed word."""
    return pairs.address + (sender * pairs.ranks + receiver) * _span(pairs.chunk)


@atomics.compiled(types.int64(_PAIRS, types.int64, types.int64, types.int64))
def _place(pairs: Any, sender: int, receiver: int, number: int) -> Any:
    return _pair(pairs, sender, receiver) + PAGE + number % SLOTS * (PAGE + pairs.chunk)


@atomics.compiled(types.int64(RING, _PAIRS, _DRIVER, _WAITING))
def _send_one(ring: Any, pairs: Any, driver: Any, waiting: Any) -> Any:
    """One chunk of the first post that waits."""
    if waiting.ends[0] == waiting.ends[1]:
        return IDLE
    post = waiting.posts[waiting.ends[0] % len(waiting.posts)]
    to, done = post[ring_layout.DESTINATION_RANK - 1], post[POST_WORDS]
    number = pairs.sent[to] + 1
    # Acquires the receiver's reading of the chunk that was here SLOTS numbers ago.
    consumed = atomics.load_acquire(np.uintp(_pair(pairs, pairs.rank, to)))
    if np.int32(number - consumed) > SLOTS:
        return IDLE
    left = post[ring_layout.BYTE_COUNT - 1] - done
    size = min(pairs.chunk, left)
    place = _place(pairs, pairs.rank, to, number)
    header = (place - pairs.address) // 8 + _HEADER
    pairs.words[header + _BUFFER] = post[ring_layout.DESTINATION_BUFFER - 1]
    pairs.words[header + _OFFSET] = post[ring_layout.DESTINATION_OFFSET - 1] + done
    pairs.words[header + _SIZE] = size
    pairs.words[header + _SIGNAL] = post[ring_layout.SIGNAL_INDEX - 1]
    pairs.words[header + _LAST] = size == left
    if size:
        source = address_in(ring, post[ring_layout.SOURCE_BUFFER - 1], post[ring_layout.SOURCE_OFFSET - 1] + done)
        if source == 0:
            return UNKNOWN_PLACE
        code = _copy(driver.to_host, place + PAGE, source, size, driver.out)
        if code:
            return DRIVER + code
    # Releases the copy; the header was stored before the call.
    code = _write(driver.write, driver.out, place, np.int32(number), np.int32(0))
    if code:
        return DRIVER + code
    pairs.sent[to] = number
    if size == left:
        waiting.ends[0] += 1
    else:
        post[POST_WORDS] = done + size
    return BUSY


@atomics.compiled(types.int64(RING, _PAIRS, _DRIVER, types.int64))
def _receive_one(ring: Any, pairs: Any, driver: Any, sender: int) -> Any:
    """The next chunk of a sender, if it is there."""
    number = pairs.received[sender] + 1
    place = _place(pairs, sender, pairs.rank, number)
    if atomics.load_acquire(np.uintp(place)) != np.int32(number):  # acquires header and bytes
        return IDLE
    header = (place - pairs.address) // 8 + _HEADER
    size, signal = pairs.words[header + _SIZE], pairs.words[header + _SIGNAL]
    if size:
        address = address_in(ring, pairs.words[header + _BUFFER], pairs.words[header + _OFFSET])
        if address == 0:
            return UNKNOWN_PLACE
        code = _copy(driver.to_device, address, place + PAGE, size, driver.into)
        if code:
            return DRIVER + code
    if pairs.words[header + _LAST] and signal != ring_layout.NO_SIGNAL:
        pairs.arrived[signal] += 1
        code = _write(driver.write, driver.into, pairs.arrivals[signal], np.int32(pairs.arrived[signal]), np.int32(0))
        if code:
            return DRIVER + code
    # Releases the reading of the chunk.
    code = _write(driver.write, driver.into, _pair(pairs, sender, pairs.rank), np.int32(number), np.int32(0))
    if code:
        return DRIVER + code
    pairs.received[sender] = number
    return BUSY


@atomics.compiled(types.int64(RING, _PAIRS, _DRIVER, _WAITING))
def turn(ring: Any, pairs: Any, driver: Any, waiting: Any) -> Any:
    """Take a post, send a chunk and receive one of each sender, where there is one: BUSY, IDLE, or what is wrong."""
    found = IDLE
    if waiting.ends[1] - waiting.ends[0] < len(waiting.posts):
        post = waiting.posts[waiting.ends[1] % len(waiting.posts)]
        status = take(ring, post)
        if status > TAKEN:
            return status
        if status == TAKEN:
            post[POST_WORDS] = 0
            waiting.ends[1] += 1
            found = BUSY
    status = _send_one(ring, pairs, driver, waiting)
    if status > BUSY:
        return status
    found = max(found, status)
    for sender in range(pairs.ranks):
        status = _receive_one(ring, pairs, driver, sender)
        if status > BUSY:
            return status
        found = max(found, status)
    return found


@atomics.compiled(types.int64(RING, _PAIRS, _DRIVER, _WAITING, types.int64, types.int64, _WORDS))
def serve(ring: Any, pairs: Any, driver: Any, waiting: Any, stop: int, abort: int, patience: Any) -> Any:
    """Turns until the word at `abort` is set, or that at `stop` and nothing waits: IDLE then, or what is wrong.

    `patience`: nanoseconds for which posts that nobody takes are waited for when it is to end; known by then.
    """
    idle_since = atomics.now()
    while True:
        # Looked at before the turn, which takes what was posted until then.
        ends = atomics.load_acquire(np.uintp(stop)) != 0
        aborted = atomics.load_acquire(np.uintp(abort)) != 0
        status = turn(ring, pairs, driver, waiting)
        if status > BUSY:
            return status
        moment = atomics.now()
        if status == BUSY:
            idle_since = moment
        elif aborted or (ends and waiting.ends[0] == waiting.ends[1]):
            return IDLE
        elif ends and moment - idle_since > patience[0]:
            return LEFT_BEHIND
        elif moment - idle_since > _AWAKE:
            atomics.sleep_until(moment + _ASLEEP)  # nothing for a while: give the core away
        else:
            atomics.relax()
