"""Which rank holds which table: balanced by bytes and by what is looked up, largest first.

With a fair share of bytes B and of lookups L (columns read for a sample) for every rank, a piece costs

    max(its bytes / B, its lookups / L)

A table that costs more than 1 would make its rank the last one whatever the others hold, so it is cut: by rows if it is
its bytes, by columns if it is its lookups. Pieces then go, the dearest first, each to the rank that would be least
loaded with it; pieces of one table go to different ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidArgument
from .bags import Piece
from .plan import split

_NARROWEST = 4  # columns of a piece: 16 bytes of fp32


@dataclass(frozen=True, slots=True)
class Table:
    """`rows` x `dim`, called `name`; `length`: how many values a bag has on average."""

    name: str
    rows: int
    dim: int
    length: float = 1.0

    def __post_init__(self) -> None:
        for argument, value in (("rows", self.rows), ("dim", self.dim)):
            if value < 1:
                raise InvalidArgument(argument=f"{argument} of table {self.name}", was=str(value), must="at least 1")
        if not self.length >= 0:
            was, must = str(self.length), "a mean number of values, at least 0"
            raise InvalidArgument(argument=f"length of table {self.name}", was=was, must=must)


@dataclass(frozen=True, slots=True)
class _Part:
    piece: Piece
    bytes: float
    lookups: float


def place(tables: Sequence[Table], ranks: int, item_size: int = 4) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each rank, in the order of their tables. The same for everybody who asks."""
    names = [one.name for one in tables]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgument(argument="tables", was=f"with two called {twice}", must="of different names")
    fair_bytes = max(1.0, sum(one.rows * one.dim * item_size for one in tables) / ranks)
    fair_lookups = max(1e-9, sum(_lookups(one) for one in tables) / ranks)

    def cost(nbytes: float, lookups: float) -> float:
        return max(nbytes / fair_bytes, lookups / fair_lookups)

    groups = [_cut(number, one, ranks, item_size, fair_bytes, fair_lookups) for number, one in enumerate(tables)]
    groups.sort(key=lambda parts: -max(cost(one.bytes, one.lookups) for one in parts))
    loads, held = [(0.0, 0.0)] * ranks, [[] for _ in range(ranks)]  # type: list[tuple[float, float]], list[list[Piece]]
    for parts in groups:
        taken: set[int] = set()
        for part in parts:
            free = [rank for rank in range(ranks) if rank not in taken]
            best = min(free, key=lambda rank: (cost(loads[rank][0] + part.bytes, loads[rank][1] + part.lookups), rank))
            loads[best] = loads[best][0] + part.bytes, loads[best][1] + part.lookups
            held[best].append(part.piece)
            taken.add(best)
    return tuple(tuple(sorted(one, key=lambda piece: (piece.table, piece.first_column))) for one in held)


def _lookups(table: Table) -> float:
    """Columns that a sample reads and writes."""
    return (table.length + 1) * table.dim


def _cut(number: int, table: Table, ranks: int, item_size: int, fair_bytes: float, fair_lookups: float) -> list[_Part]:
    nbytes, lookups = table.rows * table.dim * item_size, _lookups(table)
    by_bytes, by_lookups = nbytes / fair_bytes, lookups / fair_lookups
    if by_lookups > 1 and by_lookups >= by_bytes and table.dim >= 2 * _NARROWEST:
        count = min(ranks, math.ceil(by_lookups), table.dim // _NARROWEST)
        units = [(start * _NARROWEST, stop * _NARROWEST) for start, stop in split(table.dim // _NARROWEST, count)]
        units[-1] = units[-1][0], table.dim
        return [
            _Part(Piece(number, table.rows, stop - start, 0, start), nbytes * (stop - start) / table.dim,
                  lookups * (stop - start) / table.dim)
            for start, stop in units
        ]  # fmt: skip
    if by_bytes > 1 and table.rows > 1:
        ranges = split(table.rows, min(ranks, math.ceil(by_bytes), table.rows))
        read = table.length * table.dim / len(ranges) + table.dim
        return [
            _Part(Piece(number, stop - start, table.dim, start, 0), nbytes * (stop - start) / table.rows, read)
            for start, stop in ranges
        ]
    return [_Part(Piece(number, table.rows, table.dim), nbytes, lookups)]
