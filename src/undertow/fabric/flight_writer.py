"""Writing flight records: a few stores by compiled code, cheap enough to stand around a call of a few microseconds.

Any thread may write: a record belongs to whoever took its ticket. The text of a record is JSON that does not change
from call to call but for one number, which is written over a field of blanks at its beginning.
"""

from __future__ import annotations

import functools
import json
import zlib
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from . import machine_code
from .atomics import copy_bytes

HEADER_BYTES = 128
RECORDS = 64
RECORD_BYTES = 512
RING_BYTES = HEADER_BYTES + RECORDS * RECORD_BYTES
COUNT_WORD = 2  # of the header: records ever begun
# Words of a record: sequence, state, start and end (seconds since 1970, as doubles), length of the text, the text.
SEQUENCE, STATE, START, END, LENGTH, TEXT = 0, 1, 2, 3, 4, 5
TEXT_BYTES = RECORD_BYTES - 8 * TEXT
RUNNING, DONE, FAILED = 1, 2, 3
_HEAD = '{"call": '
_NUMBER_AT, _NUMBER_WIDTH = len(_HEAD), 20
_CLOCK_REALTIME = 0

_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))


@intrinsic  # type: ignore[untyped-decorator]
def as_pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _take_ticket(typing_context: Any, address: Any) -> Any:
    """Add one to the 64-bit word at `address`; what it is now. Relaxed: only the number matters."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        before = builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), ordering="monotonic")
        return builder.add(before, ir.Constant(ir.IntType(64), 1))

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _publish(typing_context: Any, address: Any, value: Any) -> Any:
    """Store a 64-bit word, releasing what was written before: a reader in another process sees a whole record."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        builder.store_atomic(values[1], pointer, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@machine_code.compiled
def _seconds(room):  # type: ignore[no-untyped-def]
    _clock_gettime(np.int32(_CLOCK_REALTIME), as_pointer(room.ctypes.data))
    return room[0] + room[1] * 1e-9


@machine_code.compiled
def begin(ring, text, length, number):  # type: ignore[no-untyped-def]
    """Record that a call begins; the ticket for `end`. `number` is written into the text unless it is negative."""
    ticket = _take_ticket(ring + 8 * COUNT_WORD)
    at = ring + HEADER_BYTES + (ticket - 1) % RECORDS * RECORD_BYTES
    _publish(at, 0)  # not a record while it is being written
    copy_bytes(np.uintp(at + 8 * TEXT), np.uintp(text), length)
    if number >= 0:
        digits = carray(as_pointer(at + 8 * TEXT + _NUMBER_AT), (_NUMBER_WIDTH,), np.uint8)
        place, rest = _NUMBER_WIDTH - 1, number
        while True:
            digits[place] = 48 + rest % 10
            rest //= 10
            place -= 1
            if rest == 0:
                break
    words = carray(as_pointer(at), (TEXT,), np.int64)
    times = carray(as_pointer(at), (TEXT,), np.float64)
    words[STATE], words[LENGTH] = RUNNING, length
    times[START], times[END] = _seconds(np.empty(2, np.int64)), 0.0
    _publish(at, ticket)
    return ticket


@machine_code.compiled
def end(ring, ticket, failed):  # type: ignore[no-untyped-def]
    """Record that the call of `ticket` is over, unless so many later ones have begun that its record is theirs."""
    at = ring + HEADER_BYTES + (ticket - 1) % RECORDS * RECORD_BYTES
    words = carray(as_pointer(at), (TEXT,), np.int64)
    if words[SEQUENCE] == ticket:
        times = carray(as_pointer(at), (TEXT,), np.float64)
        times[END] = _seconds(np.empty(2, np.int64))
        _publish(at + 8 * STATE, FAILED if failed else DONE)


class Text:
    """The text of a record, kept where compiled code can read it."""

    def __init__(self, data: bytes) -> None:
        self.checksum = zlib.crc32(data)
        self._bytes = np.frombuffer(data[:TEXT_BYTES] or b" ", np.uint8)
        self.address, self.length = int(self._bytes.ctypes.data), len(self._bytes)


@functools.lru_cache(maxsize=4096)
def call_text(group: str, operator: str, shape: str, plan: str) -> Text:
    """What does not change from call to call of one kind, with room for the number of the call."""
    fields = json.dumps({"group": group, "operator": operator, "shape": shape, "plan": plan})
    return Text(f"{_HEAD}{'':{_NUMBER_WIDTH}}, {fields[1:]}".encode())
