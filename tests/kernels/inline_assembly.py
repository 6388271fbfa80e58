"""The inline assembly of kernels, run thread by thread without a GPU: as much of PTX as they use.

What a thread does to memory, and where it meets others, is its `Warp`'s business. A loop that has gone round twice and
has seen nothing new waits until something has changed. Words that such loops look at once in 1024 polls are looked at
in every second one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol


class Warp(Protocol):
    """What a thread needs."""

    def read(self, address: int, size: int, acquire: bool) -> int: ...

    def write(self, address: int, size: int, value: int, release: bool) -> None: ...

    def time(self) -> int: ...

    def seen(self, address: int | None) -> tuple[Any, int]:
        """Where it lies, and how often that has been written to. None: the clock, and what it says."""

    def wait_for_change(self, seen: dict[Any, int]) -> None: ...


class Line(NamedTuple):
    guard: str
    operation: tuple[str, ...]
    operands: tuple[str, ...]


_POLLS = "1023"
_LABEL = re.compile(r"\s*([A-Z]\w*):")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "ge": lambda a, b: a >= b,
    "gt": lambda a, b: a > b,
}  # fmt: skip
_WITH_TWO: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}  # fmt: skip


@functools.lru_cache
def _parsed(text: str) -> tuple[list[Line], dict[str, int]]:
    lines: list[Line] = []
    labels: dict[str, int] = {}
    inside = text[text.index("{") + 1 : text.rindex("}")]
    for statement in inside.replace(_POLLS, "1").split(";"):
        while found := _LABEL.match(statement):
            labels[found.group(1)] = len(lines)
            statement = statement[found.end() :]
        guard, _, rest = (
            statement.strip().rpartition("@")[2].partition(" ") if "@" in statement else ("", "", statement)
        )
        parts = rest.split(None, 1)
        if parts and not parts[0].startswith("."):
            operands = tuple(_OPERAND.findall(parts[1])) if len(parts) > 1 else ()
            lines.append(Line(guard, tuple(parts[0].split(".")), operands))
    return lines, labels


def _width(operation: tuple[str, ...]) -> int:
    return 64 if operation[-1].endswith("64") else 32


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _parts(pair: str) -> list[str]:
    return [one.strip() for one in pair[1:-1].split(",")]


class _Polls:
    """What a loop has seen in this round and the one before."""

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.before: dict[Any, int] = {}
        self.now: dict[Any, int] = {}
        self.look(None)

    def look(self, address: int | None) -> None:
        place, writes = self.warp.seen(address)
        self.now.setdefault(place, writes)

    def again(self) -> None:
        if self.before:
            self.warp.wait_for_change(self.now | self.before)
        self.before, self.now = self.now, {}
        self.look(None)


def run(text: str, inputs: list[int], outputs: int, tid: int, warp: Warp) -> Generator[bool, bool, list[int]]:
    """One thread. Yields what it brings to a barrier, and is sent whether anybody brought true; returns its outputs."""
    lines, labels = _parsed(text)
    registers: dict[str, Any] = {f"${outputs + at}": value for at, value in enumerate(inputs)}
    registers |= {"%tid.x": tid}
    polls = _Polls(warp)
    at = 0

    def value(name: str) -> Any:
        if name.startswith("{"):
            low, high = (value(one) for one in _parts(name))
            return low & 0xFFFFFFFF | (high & 0xFFFFFFFF) << 32
        if name == "%globaltimer":
            return warp.time()
        found = registers.get(name)
        return int(name) if found is None else found

    def keep(name: str, found: Any, bits: int = 64) -> None:
        if name.startswith("{"):
            low, high = _parts(name)
            registers[low], registers[high] = found & 0xFFFFFFFF, found >> 32
        else:
            registers[name] = found & (1 << bits) - 1

    while at < len(lines):
        guard, operation, operands = lines[at]
        at += 1
        if guard and registers[guard.lstrip("!")] == guard.startswith("!"):
            continue
        kind, bits = operation[0], _width(operation)
        if kind == "bra":
            to = labels[operands[0]]
            if to < at:
                polls.again()
            at = to
        elif kind == "mov":
            keep(operands[0], value(operands[1]), bits)
        elif kind in _WITH_TWO:
            keep(operands[0], _WITH_TWO[kind](value(operands[1]), value(operands[2])), bits)
        elif kind == "mad":
            first, second = (value(one) & 0xFFFFFFFF for one in operands[1:3])
            if operation[-1] == "s32":
                first, second = _signed(first, 32), _signed(second, 32)
            keep(operands[0], first * second + value(operands[3]))
        elif kind == "setp":
            first, second = (value(one) & (1 << bits) - 1 for one in operands[1:])
            if operation[-1].startswith("s"):
                first, second = _signed(first, bits), _signed(second, bits)
            registers[operands[0]] = _COMPARED[operation[1]](first, second)
        elif kind == "selp":
            keep(operands[0], value(operands[1] if registers[operands[3]] else operands[2]), bits)
        elif kind == "ld":
            address = value(operands[1][1:-1])
            polls.look(address)
            keep(operands[0], warp.read(address, bits // 8, "acquire" in operation))
        elif kind == "st":
            warp.write(value(operands[0][1:-1]), bits // 8, value(operands[1]), "release" in operation)
        else:
            assert kind == "barrier", operation
            anybody = yield bool(len(operands) > 1 and registers[operands[2]])
            if operation[1] == "red":
                registers[operands[0]] = anybody
    return [registers[f"${one}"] for one in range(outputs)]
