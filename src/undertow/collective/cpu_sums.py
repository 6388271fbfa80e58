"""Sums on the CPU: of all types and operations, element by element, in the order of their sources.

16-bit floats are summed as fp32 and rounded once. A sum is made block by block, so that what it reads and stores more
than once stays in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from ..fabric import machine_code
from ..fabric.atomics import copy_bytes
from ..fabric.flight_writer import as_pointer

FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT32, INT64, UINT8, INT8, INT16 = range(9)
SUM, MAX, MIN = range(3)
BLOCK = 2048  # elements summed before they are stored: stays in the first-level cache


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return machine_code.compiled(function, boundscheck=False, error_model="numpy")


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
def combine(sources, end, addresses, count, size, kind, operation):
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
