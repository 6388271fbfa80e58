"""The little of protobuf's wire format that execution traces need: varints, lengths, fixed numbers. Bounded."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ..errors import SimulationRefused

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def truncated(what: str, at: int) -> SimulationRefused:
    return SimulationRefused(reason=f"{what} ends in the middle of a number or message, at byte {at}")


def read_varint(data: bytes, at: int, what: str) -> tuple[int, int]:
    """An unsigned number of up to 64 bits, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise truncated(what, at)
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            raise SimulationRefused(reason=f"{what} has a number of more than 64 bits at byte {at}")


def fields(data: bytes, what: str) -> Iterator[tuple[int, int, int | bytes]]:
    """(field, wire type, value) of a message, in order; fixed numbers as their bytes."""
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at, what)
        kind, number = tag & 7, tag >> 3
        if kind == VARINT:
            value, at = read_varint(data, at, what)
            yield number, kind, value
            continue
        if kind == LENGTH:
            size, at = read_varint(data, at, what)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise SimulationRefused(reason=f"{what} has a field of unknown wire type {kind} at byte {at}")
        if size > len(data) - at:
            raise truncated(what, at)
        yield number, kind, data[at : at + size]
        at += size


def numbers(kind: int, value: int | bytes, what: str) -> list[int]:
    """The entries of a repeated number: one, or packed ones."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while kind == LENGTH and at < len(value):
        one, at = read_varint(value, at, what)
        found.append(one)
    return found


def signed(value: int) -> int:
    """A 64-bit number that was written as two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def text(value: int | bytes, what: str) -> str:
    if isinstance(value, int):
        raise SimulationRefused(reason=f"{what} has a number where a text must be")
    return value.decode("utf-8", "replace")


def varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def field_number(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def field_bytes(number: int, value: bytes) -> bytes:
    return varint(number << 3 | LENGTH) + varint(len(value)) + value


def double(value: bytes) -> float:
    found: float = struct.unpack("<d", value)[0]
    return found


def single(value: bytes) -> float:
    found: float = struct.unpack("<f", value)[0]
    return found
