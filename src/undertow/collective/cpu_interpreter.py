"""Runs a bound program on one CPU thread: all workers of a rank in turn, none ever waiting while another could go on.

Memory ordering: a post is a release-add after the worker's stores, a wait an acquire of the same word; both are one
semaphore's only poster and waiter. A worker that must wait gives way to the next; if none can go on, the thread polls,
then gives its core away, then sleeps, and returns after a slice so that Python can look at deadlines and Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types

from ..fabric import flight_writer, machine_code
from ..fabric.atomics import add_release, load_acquire, relax
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
from .cpu_sums import combine
from .schedule import END, MOVE, NEEDED, READY

DONE, SLICE_OVER, ABORTED, NOT_BEGUN = 0, 1, 2, 3
WORD = 128  # bytes between two semaphores
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
    return machine_code.compiled(function, boundscheck=False, error_model="numpy")


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
        combine(sources, end, addresses, count, size, code[TYPE], code[OPERATION])
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
        combine(sources, end, aside, count, size, code[TYPE], code[OPERATION])
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
