"""Embedding tables spread over ranks: where everything goes, which slices leave in which order, and kernel shapes.

Rank r holds *pieces* of tables: whole ones, ranges of rows, ranges of columns. An output row has the columns of all
tables in the order of their numbers. A piece of columns has its own place there. Several pieces of rows of one table
add up: the first holder's sum has the table's place, the others' stand behind the row, and are added in rank order.

    output row:  | table 0 | table 1        | table 2 |       | row pieces of other holders |
                 0                                    width                                 room
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InvalidArgument
from .tiles import chunks

if TYPE_CHECKING:
    from .plan import Plan

_ADDED = 4  # at least so many rows in a bag are worth asking for several at a time
_THREADS = 128
_VECTOR_BYTES = 16
_ALIGNMENT = 128
_MOST_COLUMNS = 512
_REGISTERS = 65536  # of an SM


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first_row, first_row + rows) and columns [first_column, first_column + dim) of global table `table`."""

    table: int
    rows: int
    dim: int
    first_row: int = 0
    first_column: int = 0

    def __post_init__(self) -> None:
        for name, least in (("table", 0), ("rows", 0), ("dim", 1), ("first_row", 0), ("first_column", 0)):
            if getattr(self, name) < least:
                raise InvalidArgument(argument=name, was=str(getattr(self, name)), must=f"at least {least}")


class Sum(NamedTuple):
    """Columns [column, column + dim) of the output: what stands there, plus what stands at `others`, in this order."""

    column: int
    dim: int
    others: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """`held[r]`: the pieces of rank r, in the order of its tables; `dtype` of all. The same on all ranks."""

    held: tuple[tuple[Piece, ...], ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse tables that overlap or have holes."""
        for table, dims in self._dims.items():
            reached = 0
            for first, dim in sorted(dims):
                if first != reached:
                    was = f"with columns from {first} after {reached}"
                    must = "made of pieces that meet without gap or overlap"
                    raise InvalidArgument(argument=f"table {table}", was=was, must=must)
                reached = first + dim
        if sorted(self._dims) != list(range(len(self._dims))):
            was = f"numbered {sorted(self._dims)}"
            raise InvalidArgument(argument="tables", was=was, must="numbered 0, 1, 2, ... over all ranks")
        heights: dict[int, int] = {}
        for (table, first), found in self._holders.items():
            reached = 0
            for _, piece in sorted(found, key=lambda one: (one[1].first_row, one[1].rows)):
                if piece.first_row != reached:
                    was = f"with rows from {piece.first_row} after {reached} at column {first}"
                    must = "made of pieces that meet without gap or overlap"
                    raise InvalidArgument(argument=f"table {table}", was=was, must=must)
                reached += piece.rows
            if reached != heights.setdefault(table, reached):
                was = f"of {reached} rows at column {first}"
                raise InvalidArgument(argument=f"table {table}", was=was, must=f"of {heights[table]} in all columns")

    @cached_property
    def _dims(self) -> dict[int, set[tuple[int, int]]]:
        """Of each table: the ranges of columns (first, dim)."""
        found: dict[int, set[tuple[int, int]]] = {}
        for pieces in self.held:
            for one in pieces:
                found.setdefault(one.table, set()).add((one.first_column, one.dim))
        return found

    @cached_property
    def _holders(self) -> dict[tuple[int, int], list[tuple[int, Piece]]]:
        """Who holds rows of a (table, first column), in rank order."""
        found: dict[tuple[int, int], list[tuple[int, Piece]]] = {}
        for rank, pieces in enumerate(self.held):
            for one in pieces:
                found.setdefault((one.table, one.first_column), []).append((rank, one))
        return found

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Columns of each global table."""
        return tuple(sum(dim for _, dim in self._dims[table]) for table in range(len(self._dims)))

    @property
    def width(self) -> int:
        """Columns of an output row."""
        return sum(self.dims)

    @property
    def room(self) -> int:
        """Columns of an output row and what is added to it."""
        return self.width + sum(dim * len(others) for _, dim, others in self.sums)

    @cached_property
    def _places(self) -> dict[tuple[int, int], int]:
        """Of a (table, first column): where it stands in an output row."""
        return {
            (table, first): sum(self.dims[:table]) + first for table, dims in self._dims.items() for first, _ in dims
        }

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Of every rank, of each of its pieces: the column of its first value."""
        found: list[list[int]] = [[] for _ in self.held]
        behind = self.width
        seen: set[tuple[int, int]] = set()
        for rank, pieces in enumerate(self.held):
            for one in pieces:
                key = (one.table, one.first_column)
                if key in seen:
                    found[rank].append(behind)
                    behind += one.dim
                else:
                    found[rank].append(self._places[key])
                    seen.add(key)
        return tuple(map(tuple, found))

    @cached_property
    def sums(self) -> tuple[Sum, ...]:
        """What is left to add up once all have sent."""
        others: dict[tuple[int, int], list[int]] = {}
        for pieces, columns in zip(self.held, self.columns, strict=True):
            for one, column in zip(pieces, columns, strict=True):
                others.setdefault((one.table, one.first_column), []).append(column)
        dims = {(one.table, one.first_column): one.dim for pieces in self.held for one in pieces}
        return tuple(
            Sum(places[0], dims[key], tuple(places[1:])) for key, places in sorted(others.items()) if len(places) > 1
        )

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Columns that each rank makes of every sample."""
        return tuple(sum(one.dim for one in pieces) for pieces in self.held)

    def runs(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Columns that stand side by side at `rank` and in the output: (column there, column here, how many)."""
        found: list[tuple[int, int, int]] = []
        by = 0
        for piece, to in zip(self.held[rank], self.columns[rank], strict=True):
            if found and found[-1][1] + found[-1][2] == to:
                found[-1] = (found[-1][0], found[-1][1], found[-1][2] + piece.dim)
            else:
                found.append((by, to, piece.dim))
            by += piece.dim
        return tuple(found)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows of each global table, over all its pieces."""
        found = [0] * len(self._dims)
        for pieces in self.held:
            for one in pieces:
                found[one.table] = max(found[one.table], one.first_row + one.rows)
        return tuple(found)


class Leaving(NamedTuple):
    """A slice: bags [first, first + bags) of every table, for rank `destination`, from its row `row` on."""

    destination: int
    parcel: int
    first: int
    bags: int
    row: int


def slices(batches: Sequence[int], plan: Plan, rank: int) -> tuple[Leaving, ...]:
    """All slices that `rank` computes, in order; none is empty.

    Parcel by parcel, in each the other ranks in rotated order, so that no receiver is everybody's first. The rank's own
    slices come last of all if the plan says so: nothing has to travel when they are done.
    """
    size = len(batches)
    firsts = [sum(batches[:one]) for one in range(size)]
    found = []
    for parcel, ranges in enumerate(chunks(batches, plan)):
        for step in range(1, size + 1):
            to = (rank + step) % size
            first, bags = ranges[to]
            if bags:
                found.append(Leaving(to, parcel, first, bags, first - firsts[to]))
    if plan.own_last:
        found.sort(key=lambda one: one.destination == rank)
    return tuple(found)


class Arrival(NamedTuple):
    """Rows [row, row + rows) of the result: columns [by, by + columns) of what `source` sends go to column `to`."""

    source: int
    parcel: int
    row: int
    rows: int
    by: int
    to: int
    columns: int


@dataclass(frozen=True)
class Posted:
    """The bytes of one call that is posted, the same on all ranks: what a rank pools, then what lands there.

        | rows of all samples, of this rank's columns | rows of its samples, of rank 0's columns | of rank 1's | ...
        0                                             sending

    Both parts have room for the rank that needs most.
    """

    layout: Layout
    batches: tuple[int, ...]
    item_size: int

    @property
    def sending(self) -> int:
        return aligned(sum(self.batches) * max(self.layout.sent) * self.item_size)

    @property
    def nbytes(self) -> int:
        return self.sending + aligned(max(self.batches) * sum(self.layout.sent) * self.item_size)

    @property
    def meets(self) -> bool:
        """Whether every rank has something for every other: then who has all slices of a call knows that the others
        have all of the call before."""
        return all(self.layout.sent) and all(self.batches)

    def source(self, rank: int, first: int) -> int:
        """The byte at which `rank` pools sample `first`."""
        return first * self.layout.sent[rank] * self.item_size

    def place(self, destination: int, source: int, row: int) -> int:
        """The byte at which `source`'s part of a row of `destination` lands."""
        before = self.batches[destination] * sum(self.layout.sent[:source])
        return self.sending + (before + row * self.layout.sent[source]) * self.item_size

    def arrivals(self, plan: Plan, rank: int, sources: Sequence[int]) -> tuple[Arrival, ...]:
        """What lands at `rank`, about in the order in which it comes: who is one before it sends to it first."""
        size, first_own = len(self.batches), sum(self.batches[:rank])
        return tuple(
            Arrival(source, parcel, ranges[rank][0] - first_own, ranges[rank][1], *run)
            for parcel, ranges in enumerate(chunks(self.batches, plan))
            if ranges[rank][1]
            for source in sorted(sources, key=lambda one: (rank - one) % size)
            for run in self.layout.runs(source)
        )


def aligned(nbytes: int) -> int:
    """At least so many, and a multiple of what all memory begins at."""
    return -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT


class Shape(NamedTuple):
    """How the kernel works: a block of bags, columns at a time, rows asked for at a time, registers of a thread.

    `together`: tables that take turns, block by block, so that what they store beside each other in a row of the result
    is stored at about the same time; 1: a table's blocks follow each other.
    """

    bags: int
    columns: int
    ahead: int
    registers: int
    together: int = 1

    @property
    def ctas(self) -> int:
        """CTAs that an SM holds."""
        return max(1, _REGISTERS // (_THREADS * self.registers))

    def options(self) -> dict[str, Any]:
        return {
            "BAGS": self.bags, "COLUMNS": self.columns, "UNROLL": self.ahead, "TOGETHER": self.together,
            "num_warps": _THREADS // 32,
        }  # fmt: skip


def completed(plan: Plan, dims: Sequence[int], item_size: int, length: float) -> Plan:
    """The plan with a tile and rows ahead, if it leaves them open, for tables of these dims and bags of this length.

    A row is one load of 16 bytes for each thread. Long bags: one row at a time in every thread, four asked for at once.
    Short ones: two bags in every thread instead. On an H200 these were the fastest of those tried, since they leave
    registers for eight CTAs on an SM: more loads in a thread cost more CTAs than they are worth.
    """
    if plan.tile is not None:
        return plan
    vector = max(1, _VECTOR_BYTES // item_size)
    columns = min(_MOST_COLUMNS, max(vector, 1 << (max(dims, default=1) - 1).bit_length()))
    bags = max(1, _THREADS * vector // columns)
    if length < _ADDED:
        return replace(plan, tile=(2 * bags, columns), group_bands=1)
    return replace(plan, tile=(bags, columns), group_bands=4)


def kernel_shape(plan: Plan, item_size: int) -> Shape:
    """Registers by how many loads are under way: with fewer the compiler would wait for one before it asks the next.

    What posts slices has more to keep.
    """
    if plan.tile is None:
        raise InvalidArgument(argument="plan.tile", was="None", must="(bags, columns) of the lookup kernel")
    bags, columns = plan.tile
    loads = plan.group_bands * max(1, bags * columns * item_size // (_THREADS * _VECTOR_BYTES))
    registers = 64 if loads <= 4 else 80 if loads <= 8 else 128
    return Shape(bags, columns, plan.group_bands, registers + 8 if plan.posts("cuda") else registers)
