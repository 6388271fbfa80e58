"""Tiles, bands, parcels, and the order in which tiles are computed. Integers only.

The product [m, n] is cut into *bands* of at most `block_m` rows, which never straddle two shards, and columns of at
most `block_n`. A tile is one column of one band. An order says which tile stands at each *position*: a persistent
kernel on S SMs computes positions [w S, (w + 1) S) in wave w. Tiles are walked in groups of `group_bands` bands, column
by column, so that the tiles of a wave share rows of x and columns of w in the L2 cache:

    group_bands = 2:   0 2 4 6      positions of a grid of 3 bands and 4 columns
                       1 3 5 7
                       8 9 10 11

| order | operator | how the tiles of the shards follow each other |
|---|---|---|
| natural | all_reduce | as in the matrix; shards do not matter |
| interleaved | reduce_scatter | tile i of a shard's t stands at (i + 1/2) / t: a parcel has its share of each shard |
| proportional | all_to_all | the same, and parcels are cut in each shard by fraction, since ranks differ in rows |
| rotated | all_gather | own shard first, then those of the following ranks, as they arrive; cut by fraction |

**Parcels.** Natural and interleaved: a parcel [start, stop) is those positions. Cut by fraction: of t units of a shard
the parcel takes [t start // extent, t stop // extent), which every rank can compute about any other. Rotated: the
positions are those of `ranks` shards as long as the longest, and a parcel lies within one of them. Units are tiles
where the layout is packed, and whole bands where it is natural; there groups of bands start anew with each parcel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument
from .plan import Plan

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class TileGrid:
    """The tiles of [m, n]; `shards` are the rows of each rank, which add up to m.

    `blocks`: of each shard the rows of each expert, where each has a weight of its own: no band holds rows of two.
    """

    m: int
    n: int
    block_m: int
    block_n: int
    shards: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if min(self.block_m, self.block_n) < 1:
            raise InvalidArgument(argument="tile", was=f"{self.block_m} x {self.block_n}", must="at least 1 x 1")
        if sum(self.shards) != self.m or min(self.shards, default=0) < 0:
            raise InvalidArgument(argument="shards", was=str(list(self.shards)), must=f"rows that add up to {self.m}")
        if self.blocks and tuple(map(sum, self.blocks)) != self.shards:
            raise InvalidArgument(argument="blocks", was=str(self.blocks), must=f"of {list(self.shards)} rows")

    @cached_property
    def bands(self) -> Integers:
        """[bands, 3]: first row, rows, shard."""
        if self.blocks:
            return self._cut[:, :3]
        found = [
            (first + row, min(self.block_m, rows - row), shard)
            for shard, (first, rows) in enumerate(zip(self.shard_rows, self.shards, strict=True))
            for row in range(0, rows, self.block_m)
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 3)

    @cached_property
    def experts(self) -> Integers:
        """The expert of each band, 0 where there is one weight."""
        return self._cut[:, 3] if self.blocks else np.zeros(len(self.bands), np.int64)

    @cached_property
    def _cut(self) -> Integers:
        """[bands, 4]: first row, rows, shard, expert."""
        found, first = [], 0
        for shard, block in enumerate(self.blocks):
            for expert, rows in enumerate(block):
                found += [
                    (first + row, min(self.block_m, rows - row), shard, expert) for row in range(0, rows, self.block_m)
                ]
                first += rows
        return np.array(found, dtype=np.int64).reshape(-1, 4)

    @cached_property
    def shard_rows(self) -> tuple[int, ...]:
        """The first row of each shard."""
        return tuple(sum(self.shards[:shard]) for shard in range(len(self.shards)))

    @cached_property
    def band_counts(self) -> tuple[int, ...]:
        """Bands of each shard."""
        blocks = self.blocks or tuple((rows,) for rows in self.shards)
        return tuple(sum(-(-rows // self.block_m) for rows in block) for block in blocks)

    @property
    def columns(self) -> int:
        """Tiles of a band."""
        return -(-self.n // self.block_n)

    @property
    def tiles(self) -> int:
        return sum(self.band_counts) * self.columns

    def waves(self, workers: int) -> int:
        """How often so many workers must each take a tile."""
        return -(-self.tiles // max(1, workers))


@dataclass(frozen=True)
class Order:
    """Which tile stands at each position: three arrays of as many entries as there are tiles."""

    band: Integers
    column: Integers
    parcel: Integers

    def tiles_of(self, parcels: int) -> tuple[int, ...]:
        """How many tiles each parcel has: what its counter reaches when it is complete."""
        return tuple(int(count) for count in np.bincount(self.parcel, minlength=parcels))


def launch_order(grid: TileGrid, plan: Plan, rank: int = 0) -> Order:
    """The order in which `rank` computes its tiles, parcel after parcel. `rank` matters for rotated and own_last."""
    band, column, parcel, sequence = _ordered_tiles(grid, plan, rank)
    own = (grid.bands[band, 2] == rank) if plan.own_last else np.zeros(len(band), dtype=bool)
    by = np.lexsort((sequence, own, parcel))
    return Order(band[by], column[by], parcel[by])


def stored_order(grid: TileGrid, plan: Plan) -> Order:
    """The order in which a packed buffer holds the tiles: parcel, in it destination, in it their order of computing.

    It is the same on all ranks, whichever tiles each computes first.
    """
    band, column, parcel, sequence = _ordered_tiles(grid, plan, 0)
    destination = np.zeros(len(band), dtype=np.int64) if plan.order == "natural" else grid.bands[band, 2]
    by = np.lexsort((sequence, destination, parcel))
    return Order(band[by], column[by], parcel[by])


def chunks(shards: Sequence[int], plan: Plan) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Of each parcel of a chunked plan, of each shard: (first row in the matrix, rows), cut by fraction.

    With one shard these are the parcels themselves. A sender and a receiver find the same cut from the shard's rows.
    """
    extent = max(1, plan.extent)
    firsts = [sum(shards[:shard]) for shard in range(len(shards))]
    return tuple(
        tuple(
            (first + rows * start // extent, rows * stop // extent - rows * start // extent)
            for first, rows in zip(firsts, shards, strict=True)
        )
        for start, stop in plan.parcels
    )


def natural_tiles(grid: TileGrid) -> tuple[Integers, Integers]:
    """Band and column of every tile, band after band."""
    bands = len(grid.bands)
    return np.repeat(np.arange(bands), grid.columns), np.tile(np.arange(grid.columns), bands)


# -- how tiles follow each other ---------------------------------------------------------------------------------------

_Tiles = tuple[Integers, Integers, Integers, Integers]
"""Band, column, parcel and place in the sequence of each tile."""


def _ordered_tiles(grid: TileGrid, plan: Plan, rank: int) -> _Tiles:
    if plan.layout == "natural":
        return _by_bands(grid, plan, rank)
    if plan.order == "rotated":
        raise InvalidArgument(argument="plan.layout", was="'packed'", must="natural where tiles wait for rows")
    return _by_tiles(grid, plan)


def _by_tiles(grid: TileGrid, plan: Plan) -> _Tiles:
    """Packed: any run of tiles may be a parcel, and groups of bands do not care for parcels."""
    band, column = natural_tiles(grid)
    bounds = _bounds(plan)
    if plan.order == "natural":
        sequence = _rank_of((band, column, band // plan.group_bands))
        return band, column, _parcel_at(bounds, sequence), sequence
    shard = grid.bands[band, 2]
    within = band - _first_band(grid)[shard]
    group = max(1, plan.group_bands // len(grid.shards))  # bands of each shard
    index = _rank_of((within, column, within // group, shard)) - _first_band(grid)[shard] * grid.columns
    count = np.array(grid.band_counts, dtype=np.int64)[shard] * grid.columns
    sequence = _merged(index, count, shard)
    if plan.order == "proportional":
        return band, column, _by_fraction(index, grid.band_counts, grid.columns, shard, bounds), sequence
    return band, column, _parcel_at(bounds, sequence), sequence


def _by_bands(grid: TileGrid, plan: Plan, rank: int) -> _Tiles:
    """Natural: parcels are whole bands, and groups of bands stay inside a parcel."""
    shard = grid.bands[:, 2]
    bounds = _bounds(plan)
    within = np.arange(len(shard)) - _first_band(grid)[shard]
    count = np.array(grid.band_counts, dtype=np.int64)[shard]
    if plan.order == "rotated":
        ranks = len(grid.shards)
        step = (shard - rank) % ranks
        sequence = _rank_of((within, step))
        parcel = np.zeros(len(shard), dtype=np.int64)
        length = bounds[-1] // ranks
        for number, bands in enumerate(grid.band_counts):
            turn = (number - rank) % ranks
            cuts = bands * np.clip(bounds - turn * length, 0, length) // max(1, length)
            parcel[shard == number] = _parcel_at(cuts, within[shard == number])
    elif plan.order == "proportional":
        sequence = _merged(within, count, shard)
        parcel = _by_fraction(within, grid.band_counts, 1, shard, bounds)
    else:
        sequence = np.arange(len(shard)) if plan.order == "natural" else _merged(within, count, shard)
        parcel = _parcel_at(bounds, sequence * grid.columns)
    own = (shard == rank) if plan.own_last else np.zeros(len(shard), dtype=bool)
    place = _rank_of((sequence, own, parcel))  # of each band
    start = np.searchsorted(np.sort(parcel), parcel)  # bands in earlier parcels
    group = (place - start) // plan.group_bands
    band, column = natural_tiles(grid)
    return band, column, parcel[band], _rank_of((place[band], column, group[band], own[band], parcel[band]))


def _first_band(grid: TileGrid) -> Integers:
    return np.cumsum([0, *grid.band_counts[:-1]]).astype(np.int64)


def _bounds(plan: Plan) -> Integers:
    return np.array([0, *(stop for _, stop in plan.parcels)], dtype=np.int64)


def _rank_of(keys: tuple[NDArray[Any], ...]) -> Integers:
    """Where each entry stands when all are sorted by the last key, among equals by the one before it, and so on."""
    by = np.lexsort(keys)
    place = np.empty(len(by), dtype=np.int64)
    place[by] = np.arange(len(by))
    return place


def _merged(index: Integers, count: Integers, shard: Integers) -> Integers:
    """Places when entry i of the t of a shard stands at (i + 1/2) / t, among equals the lower shard first.

    Floating point decides as fractions would: one division is rounded correctly, so equal fractions stay equal, and
    different ones differ by 1/t² at least.
    """
    return _rank_of((shard, (2 * index + 1) / np.maximum(1, count)))


def _parcel_at(bounds: Integers, position: Integers) -> Integers:
    """The parcel that holds each position; empty parcels hold none."""
    return np.searchsorted(bounds, position, side="right").astype(np.int64) - 1


def _by_fraction(index: Integers, bands: Sequence[int], per_band: int, shard: Integers, bounds: Integers) -> Integers:
    parcel = np.zeros(len(index), dtype=np.int64)
    for number, count in enumerate(bands):
        cuts = count * per_band * bounds // max(1, int(bounds[-1]))
        parcel[shard == number] = _parcel_at(cuts, index[shard == number])
    return parcel
