"""Runs a bound program on one CPU thread: all workers of a rank in turn, none ever waiting while another could go on.

Memory ordering: a post is a release-add after the worker's stores, a wait an acquire of the same word; both are one
semaphore's only poster and waiter. A worker that must wait gives way to the next; if none can go on, the thread polls,
then gives its core away, then sleeps, and returns after a slice so that Python can look at deadlines and Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from ..fabric import flight_writer
from ..fabric.atomics import add_release, copy_bytes, load_acquire, relax
from ..fabric.flight_writer import as_pointer
from .bind import (
    DEPTH,
    HEADER,
    INSTANCES,
    INSTRUCTION_ROW,
    INSTRUCTIONS,
    ITEM_SIZE,
    MY_INPUT,
    MY_OUTPUT,
    OPERAND_ROW,
    OPERANDS,
    OPERATION,
    PACKET_MEMORY,
    PACKETS,
    PIECE_ROW,
    PIECES,
    POST_ROW,
    POSTS,
    SCRATCH,
    SLICE,
    TILE,
    TYPE,
    USER,
    WAIT_ROW,
    WAITS,
    WORKER_ROW,
    WORKERS,
)
from .cpu_packets import pack, unpack
from .schedule import END, MOVE, NEEDED, READY

DONE, SLICE_OVER, ABORTED, NOT_BEGUN = 0, 1, 2, 3
FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT32, INT64, UINT8, INT8, INT16 = range(9)
SUM, MAX, MIN = range(3)
WORD = 128  # bytes between two semaphores
BLOCK = 2048  # elements summed before they are stored: stays in the first-level cache
STATE_ROW = 4  # instruction (-1: over), iteration, waits and pieces of it that are over
# First words of the state: iterations and calls before this one, and the address of a log (0: none).
PAST_ITERATIONS, PAST_CALLS, LOG, STATE_HEADER = 0, 1, 2, 3
# A log: rows it can hold, rows it holds, then rows of worker, instruction, iteration, start and end in nanoseconds.
LOG_HEADER, LOG_ROW = 2, 5
YIELDS = 200
_SLEEPS = 250
_SLEEP_MICROSECONDS = 100

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))
_CLOCK_MONOTONIC = 1  # the clock of `time.perf_counter_ns`, which all processes of a node share


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return numba.njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")(function)  # type: ignore[no-any-return]


@intrinsic
def _half_to_float(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _float_to_half(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _float_bits(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _bits_float(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], ir.FloatType())

    return types.float32(types.uint32), generate


@_compiled
def _accumulate(total, part, count, operation):
    if operation == MAX:
        for index in range(count):
            value = part[index]
            if value > total[index] or value != value:  # NaN stays, as in torch
                total[index] = value
    elif operation == MIN:
        for index in range(count):
            value = part[index]
            if value < total[index] or value != value:
                total[index] = value
    else:
        for index in range(count):
            total[index] += part[index]


@_compiled
def _as_floats(out, address, count, kind):
    """16-bit numbers as fp32: sums are made there and rounded once."""
    bits = carray(as_pointer(address), (count,), np.uint16)
    if kind == BFLOAT16:
        for index in range(count):
            out[index] = _bits_float(np.uint32(bits[index]) << np.uint32(16))
    else:
        for index in range(count):
            out[index] = _half_to_float(bits[index])


@_compiled
def _from_floats(address, values, count, kind):
    """Round to nearest, ties to even."""
    bits = carray(as_pointer(address), (count,), np.uint16)
    if kind == BFLOAT16:
        for index in range(count):
            value = _float_bits(values[index])
            rounded = (value + np.uint32(0x7FFF) + ((value >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            quiet = (value >> np.uint32(16)) | np.uint32(0x40)  # NaN stays NaN
            bits[index] = np.uint16(rounded if (value & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000) else quiet)
    else:
        for index in range(count):
            bits[index] = _float_to_half(values[index])


@_compiled
def _add_block(total, sources, addresses, byte, length):
    """total = the sum of `length` elements of each source, in their order; `total` is apart from all of them or, if the
    first source is the same memory, is that array itself: then the compiler sees that no lane reads another's store."""
    one = carray(as_pointer(addresses[0] + byte), (length,), total.dtype)
    two = carray(as_pointer(addresses[1] + byte), (length,), total.dtype)
    begin = 2
    if sources >= 4:  # three passes in one: what is summed is stored and loaded once
        three = carray(as_pointer(addresses[2] + byte), (length,), total.dtype)
        four = carray(as_pointer(addresses[3] + byte), (length,), total.dtype)
        begin = 4
        if total.ctypes.data == one.ctypes.data:
            for index in range(length):
                total[index] = total[index] + two[index] + three[index] + four[index]
        else:
            for index in range(length):
                total[index] = one[index] + two[index] + three[index] + four[index]
    elif total.ctypes.data == one.ctypes.data:
        for index in range(length):
            total[index] += two[index]
    else:
        for index in range(length):
            total[index] = one[index] + two[index]
    for source in range(begin, sources):
        _accumulate(total, carray(as_pointer(addresses[source] + byte), (length,), total.dtype), length, SUM)


def _typed_sum(dtype: Any) -> Callable[..., Any]:
    """stores <- sources combined, for a type that is summed as it is.

    Each has a name of its own. Numba tells symbols of one name apart by a number that every process counts for itself,
    so of several ranks that fill an empty cache together, two could keep sums of two types under one symbol: whoever
    links both would sum one type as the other, at every start from then on.
    """

    def run(sources, end, addresses, count, operation):
        aside = np.empty(BLOCK, dtype)
        in_place = operation == SUM  # where it is stored first, unless another source than the first is there
        for source in range(1, sources):
            in_place = in_place and addresses[source] != addresses[sources]
        for begin in range(0, count, BLOCK):
            length = min(BLOCK, count - begin)
            byte = begin * aside.itemsize
            total, stored = aside, sources
            if in_place:
                total, stored = carray(as_pointer(addresses[sources] + byte), (length,), dtype), sources + 1
            if operation == SUM:
                _add_block(total, sources, addresses, byte, length)
            else:
                one = carray(as_pointer(addresses[0] + byte), (length,), dtype)
                for index in range(length):
                    total[index] = one[index]
                for source in range(1, sources):
                    part = carray(as_pointer(addresses[source] + byte), (length,), dtype)
                    _accumulate(total, part, length, operation)
            for store in range(stored, end):
                # Where it was summed aside, that is because a store is one of the sources.
                copy_bytes(np.uintp(addresses[store] + byte), np.uintp(total.ctypes.data), length * total.itemsize)
        return len(aside)  # used here, so that it lives until here: Numba does not see who holds an address

    run.__name__ = run.__qualname__ = f"_sum_{np.dtype(dtype).name}"
    return _compiled(run)


_sum_float32 = _typed_sum(np.float32)
_sum_float64 = _typed_sum(np.float64)
_sum_int32 = _typed_sum(np.int32)
_sum_int64 = _typed_sum(np.int64)
_sum_uint8 = _typed_sum(np.uint8)
_sum_int8 = _typed_sum(np.int8)
_sum_int16 = _typed_sum(np.int16)


@_compiled
def _sum_halves(sources, end, addresses, count, operation, kind):
    total, part = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for begin in range(0, count, BLOCK):
        length = min(BLOCK, count - begin)
        byte = begin * 2
        _as_floats(total, addresses[0] + byte, length, kind)
        for source in range(1, sources):
            _as_floats(part, addresses[source] + byte, length, kind)
            _accumulate(total, part, length, operation)
        for store in range(sources, end):
            _from_floats(addresses[store] + byte, total, length, kind)


@_compiled
def _combine(sources, end, addresses, count, size, kind, operation):
    """addresses[sources:end] <- the combination of addresses[:sources]."""
    if sources == 1:
        for store in range(1, end):
            if addresses[store] != addresses[0]:
                copy_bytes(np.uintp(addresses[store]), np.uintp(addresses[0]), count * size)
    elif kind == FLOAT32:
        _sum_float32(sources, end, addresses, count, operation)
    elif kind == FLOAT64:
        _sum_float64(sources, end, addresses, count, operation)
    elif kind == INT32:
        _sum_int32(sources, end, addresses, count, operation)
    elif kind == INT64:
        _sum_int64(sources, end, addresses, count, operation)
    elif kind == UINT8:
        _sum_uint8(sources, end, addresses, count, operation)
    elif kind == INT8:
        _sum_int8(sources, end, addresses, count, operation)
    elif kind == INT16:
        _sum_int16(sources, end, addresses, count, operation)
    else:
        _sum_halves(sources, end, addresses, count, operation, kind)


@_compiled
def _move(code, piece, bases, tile_index, past, instance, addresses):
    """One piece of one instruction, for one tile and one instance's part of it; False if a packet has not come yet."""
    tile, size = code[TILE], code[ITEM_SIZE]
    count = max(0, min(tile, code[piece] - tile_index * tile))
    part = -(-count // code[INSTANCES])
    first = min(count, instance * part)
    count = min(count, first + part) - first
    if count == 0 and code[PACKETS] == 0:
        return True
    sources, end = code[piece + 2] - code[piece + 1], code[piece + 4] - code[piece + 1]
    parity = (past + tile_index) % code[DEPTH]
    for index in range(end):
        operand = code[OPERANDS] + (code[piece + 1] + index) * OPERAND_ROW
        offset = code[operand + 1]
        if code[operand + 2] == USER:
            addresses[index] = bases[code[operand]] + (offset + tile_index * tile + first) * size
        else:
            offset += parity * code[SCRATCH] + instance * code[SLICE]
            addresses[index] = bases[code[operand]] + offset * size * (1 + code[PACKETS])
    if code[PACKETS] == 0:
        _combine(sources, end, addresses, count, size, code[TYPE], code[OPERATION])
        return True
    epoch = past + tile_index + 1
    room = np.empty(max(8, (sources + 1) * count * size), np.uint8)
    aside = addresses[:end].copy()
    for index in range(end):
        operand = code[OPERANDS] + (code[piece + 1] + index) * OPERAND_ROW
        if code[operand + 2] == PACKET_MEMORY:
            aside[index] = room.ctypes.data + min(index, sources) * count * size
            if index < sources and not unpack(aside[index], addresses[index], count * size, epoch):
                return False
    if count > 0:
        _combine(sources, end, aside, count, size, code[TYPE], code[OPERATION])
    for index in range(sources, end):
        if aside[index] != addresses[index]:
            pack(addresses[index], aside[index], count * size, epoch)
    return len(room) > 0  # used here, so that it lives until here: Numba does not see who holds an address


@_compiled
def _now(stamp):
    """Nanoseconds; `stamp` is room for two words."""
    _clock_gettime(np.int32(_CLOCK_MONOTONIC), as_pointer(stamp.ctypes.data))
    return stamp[0] * 1_000_000_000 + stamp[1]


@_compiled
def _write_log(address, one, instruction, iteration, start, end):
    log = carray(as_pointer(address), (LOG_HEADER,), np.int64)
    if log[1] < log[0]:
        row = carray(as_pointer(address + 8 * (LOG_HEADER + log[1] * LOG_ROW)), (LOG_ROW,), np.int64)
        row[0], row[1], row[2], row[3], row[4] = one, instruction, iteration, start, end
        log[1] += 1


@_compiled
def begin(code, state):
    """Stand every worker at its first instruction."""
    instances = code[INSTANCES]
    for one in range(code[WORKERS] * instances):
        worker = HEADER + one // instances * WORKER_ROW
        first = code[worker] if code[worker] >= 0 else code[worker + 1]
        if code[worker] < 0 and code[worker + 1] == code[worker + 2]:
            first = code[worker + 3]  # no body: its end alone, or nothing
        at = STATE_HEADER + one * STATE_ROW
        state[at], state[at + 1], state[at + 2], state[at + 3] = first, 0, 0, 0


@_compiled
def run(
    code, bases, state, semaphores, iterations, abort, spins, parcels, parcel_target, tiles, budget, turn, fresh=False
):
    """Go on until all workers are over (DONE), nothing has moved for a slice (SLICE_OVER) or the group has failed.

    `fresh`: this is the beginning of a call. `budget`: after so many instructions the slice is over, too (0: no such
    limit); `turn`: the worker to begin with.

    `semaphores[r]` is the address of rank r's first semaphore, the last entry mine. `parcels` and `tiles` are addresses
    of words that kernels post and wait for, 128 bytes apart; a parcel is ready when its word reaches `parcel_target`.
    """
    instances = code[INSTANCES]
    count = code[WORKERS] * instances
    addresses = np.empty(256, np.int64)
    own = semaphores[len(semaphores) - 1]
    idle = 0
    stamp, started = np.empty(2, np.int64), np.int64(0)
    if fresh:
        begin(code, state)
    while True:
        moved, left = False, 0
        for order in range(count):
            one = (order + turn) % count
            at = STATE_HEADER + one * STATE_ROW
            if state[at] < 0:
                continue
            left += 1
            worker = HEADER + one // instances * WORKER_ROW
            instance = one % instances
            while True:
                row = code[INSTRUCTIONS] + state[at] * INSTRUCTION_ROW
                kind, iteration = code[row], state[at + 1]
                if kind == END:
                    iteration = iterations - 1
                blocked = False
                while code[row + 2] + state[at + 2] < code[row + 3]:
                    wait = code[WAITS] + (code[row + 2] + state[at + 2]) * WAIT_ROW
                    posts = code[wait + 3]
                    if posts < 0:
                        target = -posts * state[PAST_CALLS] + code[wait + 1]
                    else:
                        target = (state[PAST_ITERATIONS] + iteration - code[wait + 2]) * posts + code[wait + 1]
                    seen = load_acquire(np.uintp(own + (code[wait] * instances + instance) * WORD))
                    if np.int32(np.int32(seen) - np.int32(target)) < 0:
                        blocked = True
                        break
                    state[at + 2] += 1
                if not blocked and kind == READY:
                    seen = load_acquire(np.uintp(parcels + code[row + 1] * WORD))
                    if np.int32(np.int32(seen) - np.int32(parcel_target)) < 0:
                        blocked = True
                if not blocked and state[LOG]:
                    started = _now(stamp)
                if not blocked and kind == MOVE:
                    for piece in range(code[row + 4] + state[at + 3], code[row + 5]):
                        place = code[PIECES] + piece * PIECE_ROW
                        needed = code[place + 4] - code[place + 1]
                        if needed > len(addresses):
                            addresses = np.empty(needed, np.int64)
                        if not _move(code, place, bases, iteration, state[PAST_ITERATIONS], instance, addresses):
                            blocked = True
                            break
                        state[at + 3] += 1
                if blocked:
                    break
                moved = True
                if kind == NEEDED and iteration == iterations - 1:
                    add_release(np.uintp(tiles + code[row + 1] * WORD), np.int32(1))
                for post in range(code[row + 6], code[row + 7]):
                    entry = code[POSTS] + post * POST_ROW
                    word = semaphores[code[entry]] + (code[entry + 1] * instances + instance) * WORD
                    add_release(np.uintp(word), np.int32(1))
                state[at + 2] = state[at + 3] = 0
                if state[LOG]:
                    _write_log(state[LOG], one, state[at], iteration, started, _now(stamp))
                following = state[at] + 1
                if kind == END:
                    following = -1
                elif following == code[worker + 2] and state[at] >= code[worker + 1]:  # the body is over
                    if iteration + 1 < iterations:
                        state[at + 1] += 1
                        following = code[worker + 1]
                    else:
                        following = code[worker + 3]
                elif following == code[worker + 2] and code[worker + 1] == code[worker + 2]:  # a start without a body
                    following = code[worker + 3]
                state[at] = following
                budget -= 1
                if budget == 0:
                    return SLICE_OVER
                if following < 0:
                    break
        if left == 0:
            state[PAST_ITERATIONS] += iterations
            state[PAST_CALLS] += 1
            return DONE
        if moved:
            idle = 0
            continue
        idle += 1
        if idle <= spins:
            relax()
            continue
        if load_acquire(np.uintp(abort)) != 0:
            return ABORTED
        if idle <= spins + YIELDS:
            _sched_yield()
        elif idle <= spins + YIELDS + _SLEEPS:
            _usleep(np.uint32(_SLEEP_MICROSECONDS))
        else:
            return SLICE_OVER


# A frame: what does not change from call to call of one kind, as words that `perform` reads.
(
    CODE_AT, CODE_LENGTH, BASES_AT, BASES_LENGTH, STATE_AT, STATE_LENGTH, SEMAPHORES_AT, SEMAPHORES_LENGTH, ITERATIONS,
    ABORT_AT, SPINS, RING_AT, TEXT_AT, TEXT_LENGTH, TICKET, FRAME,
) = range(16)  # fmt: skip

_begin_record = flight_writer.begin
_end_record = flight_writer.end


@_compiled
def perform(frame, source, out, number):
    """A whole call with its flight record: for short messages, whose bytes cost less than Python's arguments do.

    NOT_BEGUN: the group had failed before.
    """
    words = carray(as_pointer(frame), (FRAME,), np.int64)
    if load_acquire(np.uintp(words[ABORT_AT])) != 0:
        return NOT_BEGUN
    words[TICKET] = _begin_record(words[RING_AT], words[TEXT_AT], words[TEXT_LENGTH], number)
    bases = carray(as_pointer(words[BASES_AT]), (words[BASES_LENGTH],), np.int64)
    bases[MY_INPUT], bases[MY_OUTPUT] = source, out
    status = run(
        carray(as_pointer(words[CODE_AT]), (words[CODE_LENGTH],), np.int64), bases,
        carray(as_pointer(words[STATE_AT]), (words[STATE_LENGTH],), np.int64),
        carray(as_pointer(words[SEMAPHORES_AT]), (words[SEMAPHORES_LENGTH],), np.int64), words[ITERATIONS],
        words[ABORT_AT], words[SPINS], 0, 0, 0, 0, 0, True,
    )  # fmt: skip
    if status == DONE:
        _end_record(words[RING_AT], words[TICKET], False)
    return status


def compiled_perform() -> Callable[[int, int, int, int], int]:
    """`perform` itself: Numba's dispatcher would look at the types of all arguments again at every call."""
    signature = (types.int64,) * 4
    perform.compile(signature)  # type: ignore[attr-defined]
    return perform.overloads[signature].entry_point  # type: ignore[attr-defined, no-any-return]
