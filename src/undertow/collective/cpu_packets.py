"""Packets on the CPU: 32 bits of data and a 32-bit flag in one 64-bit word, stored and loaded in one piece.

A receiver polls the data itself. The flag is the number of the iteration since the executable was made, so a word of an
earlier iteration never passes for one of this. No ordering between words is needed: each carries its own proof. What a
sender may overwrite follows from what it has received itself, and the checker has proven that before anything runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from ..fabric import machine_code
from ..fabric.flight_writer import as_pointer


@intrinsic
def _load_word(typing_context: Any, address: Any) -> Any:
    """64 bits in one piece; relaxed."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, ordering="monotonic", align=8)

    return types.uint64(types.int64), generate


@intrinsic
def _store_word(typing_context: Any, address: Any, value: Any) -> Any:
    """64 bits in one piece; relaxed."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        builder.store_atomic(values[1], pointer, ordering="monotonic", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@machine_code.compiled
def pack(address, source, count, epoch):
    """Send `count` bytes from `source`, in words at `address`; an empty message is one word, for its flag."""
    flag = np.uint64(epoch & 0xFFFFFFFF) << np.uint64(32)
    words, whole = max(1, (count + 3) // 4), count // 4
    data = carray(as_pointer(source), (max(whole, 1),), np.uint32)
    for index in range(whole):
        _store_word(address + 8 * index, flag | np.uint64(data[index]))
    if words > whole:
        tail = carray(as_pointer(source + 4 * whole), (count - 4 * whole,), np.uint8)
        value = np.uint64(0)
        for byte in range(len(tail)):
            value |= np.uint64(tail[byte]) << np.uint64(8 * byte)
        _store_word(address + 8 * whole, flag | value)


@machine_code.compiled
def unpack(out, address, count, epoch):
    """Receive `count` bytes into `out` if all of them have come; whether they have."""
    flag = np.uint64(epoch & 0xFFFFFFFF)
    words, whole = max(1, (count + 3) // 4), count // 4
    data = carray(as_pointer(out), (max(whole, 1),), np.uint32)
    for index in range(words):
        word = _load_word(address + 8 * index)
        if word >> np.uint64(32) != flag:
            return False
        if index < whole:
            data[index] = np.uint32(word & np.uint64(0xFFFFFFFF))
        else:
            tail = carray(as_pointer(out + 4 * whole), (count - 4 * whole,), np.uint8)
            for byte in range(len(tail)):
                tail[byte] = np.uint8((word >> np.uint64(8 * byte)) & np.uint64(0xFF))
    return True
