"""Where tiles lie: maps as tables of integers, for kernels and for people. All places count elements.

A signaled matmul stores each tile at its *place* in a buffer of m n elements, `stride` elements from row to row:

    natural   place = row n + column, stride = n          the ordinary matrix; parcels are whole bands
    packed    place = elements of the tiles before it     parcel after parcel; in it destination after destination;
              stride = columns of the tile                in each of them tile after tile, as they are computed

so that what a parcel sends to one destination is one contiguous range, its *piece*. The receiver's *stream* from one
sender is the pieces meant for it, parcel after parcel: for reduce_scatter the summed shard, for all_to_all the rows of
that sender.

| table | one row for each | columns |
|---|---|---|
| `tile_table` | tile, in the order of computing | row, rows, column, columns, place, stride, parcel, 0 |
| `unpack_table` | tile, in natural order | row, rows, column, columns, place, stride |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument
from .plan import Plan
from .tiles import Integers, Order, TileGrid, launch_order, natural_tiles, stored_order

TILE_COLUMNS = 8
_KEPT = 256  # maps of as many shapes and plans: a call must not make them anew
ROW, ROWS, COLUMN, COLUMNS, PLACE, STRIDE, PARCEL, EXPERT = range(TILE_COLUMNS)
Splits = Sequence[Sequence[int | Sequence[int]]]
Piece = tuple[int, int]
"""Offset and count, in elements."""


class Arrival(NamedTuple):
    """Rows of the gathered input that come together: from rank `source`, `rows` from `row` on."""

    source: int
    row: int
    rows: int


@lru_cache(_KEPT)
def tile_table(grid: TileGrid, plan: Plan, rank: int = 0) -> Integers:
    """[tiles, 8]: what the matmul kernel of `rank` reads at each position."""
    order = launch_order(grid, plan, rank)
    table = np.zeros((len(order.band), TILE_COLUMNS), dtype=np.int64)
    table[:, :PLACE] = _extents(grid, order.band, order.column)
    table[:, PLACE:PARCEL] = _places(grid, plan)[order.band * grid.columns + order.column]
    table[:, PARCEL], table[:, EXPERT] = order.parcel, grid.experts[order.band]
    table.flags.writeable = False  # it is handed out again
    return table


def renumbered(grid: TileGrid, table: Integers, numbers: Integers) -> Integers:
    """A `tile_table` whose parcels have other numbers, and stand in their order: `numbers[shard, parcel]`.

    Where a collective program names the parcels, the part of each shard may come at a time of its own.
    """
    shard = np.searchsorted(np.cumsum(grid.shards), table[:, ROW], side="right")
    found = table.copy()
    found[:, PARCEL] = numbers[shard, table[:, PARCEL]]
    return found[np.argsort(found[:, PARCEL], kind="stable")]


@lru_cache(_KEPT)
def parcel_tiles(grid: TileGrid, plan: Plan, rank: int = 0) -> tuple[int, ...]:
    """How many tiles each parcel has on `rank`: the value its counter reaches. 0 where it has none."""
    return launch_order(grid, plan, rank).tiles_of(len(plan.parcels))


@lru_cache(_KEPT)
def pieces(grid: TileGrid, plan: Plan) -> tuple[tuple[Piece, ...], ...]:
    """Of each parcel, for each destination: its range of the buffer. all_reduce: one piece, for everybody.

    A destination that gets nothing has the piece (0, 0).
    """
    counts = _piece_counts(grid, plan)
    if plan.layout == "natural":
        firsts = np.full(counts.shape, grid.m, dtype=np.int64)
        order = stored_order(grid, plan)
        destination = _destination(grid, plan, order)
        np.minimum.at(firsts, (order.parcel, destination), grid.bands[order.band, 0])
        offsets = firsts * grid.n
    else:
        ends = np.cumsum(counts.reshape(-1)).reshape(counts.shape)
        offsets = ends - counts
    offsets = np.where(counts > 0, offsets, 0)
    return tuple(
        tuple((int(offset), int(count)) for offset, count in zip(*both, strict=True))
        for both in zip(offsets, counts, strict=True)
    )


@lru_cache(_KEPT)
def received_pieces(grid: TileGrid, plan: Plan, destination: int) -> tuple[Piece, ...]:
    """Of each parcel: its range of the stream that `destination` gets from a sender with this grid."""
    counts = _piece_counts(grid, plan)[:, destination]
    ends = np.cumsum(counts)
    return tuple((int(end - count), int(count)) for end, count in zip(ends, counts, strict=True))


def unpack_table(grid: TileGrid, plan: Plan, destination: int | None = None) -> Integers:
    """[tiles, 6]: where each tile of the result is found, band after band.

    Without a destination: all tiles, in the buffer that the matmul filled (all_reduce sums it in place). With one: the
    tiles of that shard, rows counted from the shard's first, in the stream that the destination receives.
    """
    band, column = natural_tiles(grid)
    table = np.empty((len(band), PARCEL), dtype=np.int64)
    table[:, :PLACE] = _extents(grid, band, column)
    if destination is None:
        table[:, PLACE:] = _places(grid, plan)
        return table
    mine = grid.bands[band, 2] == destination
    table[:, ROW] -= grid.shard_rows[destination]
    table = np.compress(mine, table, axis=0)
    if plan.layout == "natural":
        table[:, PLACE] = table[:, ROW] * grid.n + table[:, COLUMN]
        table[:, STRIDE] = grid.n
        return table
    stored = stored_order(grid, plan)
    keep = grid.bands[stored.band, 2] == destination
    sizes = _sizes(grid, stored)[keep]
    place = np.zeros(grid.tiles, dtype=np.int64)
    place[(stored.band * grid.columns + stored.column)[keep]] = np.cumsum(sizes) - sizes
    table[:, PLACE] = place[mine]
    table[:, STRIDE] = table[:, COLUMNS]
    return table


# -- all_to_all: the receiver's side, from the matrix of all splits ----------------------------------------------------


def arriving_pieces(splits: Splits, n: int, plan: Plan, rank: int) -> tuple[tuple[Piece, ...], ...]:
    """Of each parcel, from each sender: its range of the buffer in which `rank` receives, sender after sender.

    `splits[sender][destination]` are rows, or those of each expert. The buffer holds sum over senders of
    splits[sender][rank] rows of n.
    """
    bases = _bases(splits, n, rank)
    streams = [received_pieces(sender_grid(row, n, plan), plan, rank) for row in splits]
    return tuple(
        tuple((base + stream[parcel][0], stream[parcel][1]) for base, stream in zip(bases, streams, strict=True))
        for parcel in range(len(plan.parcels))
    )


def arriving_table(splits: Splits, n: int, plan: Plan, rank: int) -> Integers:
    """The `unpack_table` of everything `rank` receives; the rows of the result stand sender after sender."""
    tables = []
    for base, row in zip(_bases(splits, n, rank), splits, strict=True):
        table = unpack_table(sender_grid(row, n, plan), plan, rank)
        table[:, ROW] += base // max(1, n)
        table[:, PLACE] += base
        tables.append(table)
    return np.concatenate(tables)


def _bases(splits: Splits, n: int, rank: int) -> list[int]:
    return [sum(sum(_experts(row[rank])) for row in splits[:sender]) * n for sender in range(len(splits))]


def _experts(rows: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(rows) if isinstance(rows, Sequence) else (rows,)


def sender_grid(row: Sequence[int | Sequence[int]], n: int, plan: Plan) -> TileGrid:
    """The tiles of a sender that has so many rows for each rank, or for each rank of each expert."""
    if plan.tile is None:
        raise InvalidArgument(argument="plan", was=f"{plan.name} without a tile", must="a plan with a tile")
    blocks = tuple(_experts(rows) for rows in row)
    shards = tuple(map(sum, blocks))
    grouped = any(isinstance(rows, Sequence) for rows in row)
    return TileGrid(sum(shards), n, *plan.tile, shards, blocks if grouped else ())


# -- all_gather: what each parcel waits for ----------------------------------------------------------------------------


def arrivals(grid: TileGrid, plan: Plan, rank: int) -> tuple[Arrival, ...]:
    """Of each parcel: the rows of the gathered input that its tiles on `rank` read. `source == rank`: already there.

    In a parcel rank r receives from (r + t) mod ranks, with one step t for all ranks, and sends that step's piece of
    its own shard to (r - t) mod ranks, who finds it here under its own rank.
    """
    ranks, extent = len(grid.shards), plan.extent
    found = []
    length = max(1, extent // ranks)
    for start, stop in plan.parcels:
        step = min(start // length, ranks - 1)
        source = (rank + step) % ranks
        bands, rows = grid.band_counts[source], grid.shards[source]
        first, last = (
            min(rows, bands * (bound - step * length) // length * grid.block_m) for bound in (start, max(start, stop))
        )
        found.append(Arrival(source, grid.shard_rows[source] + first, last - first))
    return tuple(found)


def forget() -> None:
    """What was made for some counts of tokens serves no others: a call that is measured must make it, too."""
    for kept in (tile_table, parcel_tiles, pieces, received_pieces):
        kept.cache_clear()


# -- the meaning, as plain loops ---------------------------------------------------------------------------------------


def pack(matrix: NDArray[Any], table: Integers) -> NDArray[Any]:
    """The buffer that a matmul with this `tile_table` leaves, as a plain loop: the reference for kernels."""
    buffer = np.empty(matrix.size, dtype=matrix.dtype)
    for row, rows, column, columns, place, stride in table[:, :PARCEL].tolist():
        for down in range(rows):
            start = place + down * stride
            buffer[start : start + columns] = matrix[row + down, column : column + columns]
    return buffer


def unpack(buffer: NDArray[Any], table: Integers, rows: int, columns: int) -> NDArray[Any]:
    """The [rows, columns] matrix whose tiles lie in `buffer` as this `unpack_table` says, as a plain loop."""
    matrix = np.empty((rows, columns), dtype=buffer.dtype)
    for row, height, column, width, place, stride in table[:, :PARCEL].tolist():
        for down in range(height):
            start = place + down * stride
            matrix[row + down, column : column + width] = buffer[start : start + width]
    return matrix


# -- shared ------------------------------------------------------------------------------------------------------------


def _extents(grid: TileGrid, band: Integers, column: Integers) -> Integers:
    """[tiles, 4]: row, rows, column, columns."""
    first = column * grid.block_n
    columns = np.minimum(grid.block_n, grid.n - first)
    return np.stack([grid.bands[band, 0], grid.bands[band, 1], first, columns], axis=1)


def _sizes(grid: TileGrid, order: Order) -> Integers:
    extents = _extents(grid, order.band, order.column)
    return extents[:, ROWS] * extents[:, COLUMNS]


def _places(grid: TileGrid, plan: Plan) -> Integers:
    """[tiles, 2]: place and stride of each tile, band after band."""
    if plan.layout == "natural":
        extents = _extents(grid, *natural_tiles(grid))
        return np.stack([extents[:, ROW] * grid.n + extents[:, COLUMN], np.full(len(extents), grid.n)], axis=1)
    stored = stored_order(grid, plan)
    sizes = _sizes(grid, stored)
    found = np.empty((grid.tiles, 2), dtype=np.int64)
    found[stored.band * grid.columns + stored.column, 0] = np.cumsum(sizes) - sizes
    found[stored.band * grid.columns + stored.column, 1] = _extents(grid, stored.band, stored.column)[:, COLUMNS]
    return found


def _destination(grid: TileGrid, plan: Plan, order: Order) -> Integers:
    return np.zeros(len(order.band), dtype=np.int64) if plan.order == "natural" else grid.bands[order.band, 2]


def _piece_counts(grid: TileGrid, plan: Plan) -> Integers:
    """[parcels, destinations]: elements."""
    order = stored_order(grid, plan)
    counts = np.zeros((len(plan.parcels), 1 if plan.order == "natural" else len(grid.shards)), dtype=np.int64)
    np.add.at(counts, (order.parcel, _destination(grid, plan, order)), _sizes(grid, order))
    return counts
