"""The order of a fused call: which tile is computed when, who owns it, where it waits or goes, as tables for kernels.

Tiles are walked in groups of `group_bands` bands, column by column, as everywhere (`tiles.py`). Each group streams all
weights once, and they are often larger than the L2 cache: where a shard has fewer bands than a group, a group of its
own for each shard would stream them once for each rank. So groups go on over the ends of shards; but own bands that
come last are groups of their own, as the others' parts of them must have arrived.

**The order of a gather on a GPU** is of that kind, too: own bands first, then the others' in the order in which they
arrive. A band goes to all ranks at once (`push_table`), so that is the first band of every rank, then the second of
every rank.

Where own bands do not fill the first group, its tiles would wait for rows of others. So as many own tiles come before
it as the CTAs that do not push can compute until those rows are here (`early_tiles`), and the group goes without them.
They cost little: their columns of weights are streamed twice. Where every CTA pushes first, there are none: nobody
could compute them earlier, and rows that all CTAs push together take a small part of the time of a tile.

What decides is the time of pushing a band to a rank against that of a tile. Both grow with K and with the rows of a
band, which cancel: it is PUSHED / block_n tiles, where PUSHED is how many operations a CTA does while it pushes a byte.
No rank must know of the others' order: what they share are the lines of bands and the parts of a line.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .tiles import Integers, TileGrid

if TYPE_CHECKING:
    from .plan import Plan

PUSHED = 256  # operations of a CTA in the time of pushing a byte: on an H200 7e12 a second against 27e9 bytes a second
# Columns of the line of a table; the first four are those of `reorder`.
ROW, ROWS, COLUMN, COLUMNS, SHARD_ROW, TILE_LINE, OWNER, OUT_ROW = range(8)
PLACE, STRIDE, BAND_LINE, SOURCE = 4, 5, 6, 7
OWN = -1  # in place of a band's line: rows of x, which nobody waits for


@lru_cache(256)
def column_table(m: int, n: int, plan: Plan, ranks: int, rank: int) -> Integers:
    """[tiles, 8]: `scatter_table` where block b of columns belongs to rank b mod ranks: all rows, no other bands."""
    assert plan.tile is not None
    block_n = plan.tile[1]
    block = np.arange(-(-n // block_n))
    block = block[np.argsort((block - rank - 1) % ranks, kind="stable")]  # of ranks r + 1, r + 2, ..., r
    table = np.zeros((len(block), 8), dtype=np.int64)
    table[:, ROWS], table[:, COLUMN], table[:, TILE_LINE], table[:, OWNER] = m, block * block_n, block, block % ranks
    table[:, COLUMNS] = np.minimum(block_n, n - table[:, COLUMN])
    table.flags.writeable = False  # it is handed out again
    return table


@lru_cache(256)
def scatter_table(shards: tuple[int, ...], n: int, plan: Plan, rank: int, broadcast: bool) -> Integers:
    """[tiles, 8]: the tiles of a scatter as a thread of `rank` computes them; the last ones are its own.

    row, rows, column, columns of the product; the row in the owner's shard; the tile's line, its number among all; the
    owner; the row of the output, which is the product's for all_reduce (`broadcast`) and the shard's otherwise.
    """
    grid = grid_of(shards, n, plan)
    distance = (grid.bands[:, 2] - rank) % len(shards)
    order = np.argsort(distance, kind="stable")
    own = distance[order] == 0
    walks = [walked(order[which], plan, grid.columns) for which in (~own, own)]
    band, column = (np.concatenate(one) for one in zip(*walks, strict=True))
    return scattered(grid, band, column, broadcast)


def scattered(grid: TileGrid, band: Integers, column: Integers, broadcast: bool) -> Integers:
    """The table of a scatter: these tiles, in this order."""
    rows = grid.bands[band]
    table = np.zeros((len(band), 8), dtype=np.int64)
    table[:, ROW], table[:, ROWS], table[:, OWNER] = rows[:, 0], rows[:, 1], rows[:, 2]
    table[:, COLUMN] = column * grid.block_n
    table[:, COLUMNS] = np.minimum(grid.block_n, grid.n - table[:, COLUMN])
    table[:, SHARD_ROW] = rows[:, 0] - np.array(grid.shard_rows, dtype=np.int64)[rows[:, 2]]
    table[:, TILE_LINE] = band * grid.columns + column
    table[:, OUT_ROW] = table[:, ROW] if broadcast else table[:, SHARD_ROW]
    table.flags.writeable = False  # it is handed out again
    return table


@lru_cache(256)
def rotated_table(shards: tuple[int, ...], n: int, plan: Plan, rank: int) -> Integers:
    """`gather_table` where every shard has groups of its own, own rows first: for threads that bring shard by shard.

    The rows of own tiles count from the beginning of x there, too, but they have the line of their band.
    """
    grid = grid_of(shards, n, plan)
    band, column = _rotated(grid, plan, rank)
    return _gathered(grid, band, column, rank, band)


def own_first(grid: TileGrid, order: Integers, plan: Plan, rank: int) -> Integers:
    """As `rotated_table`, bands in this order, but own ones before the others, in groups of their own."""
    own = grid.bands[order, 2] == rank
    walks = [walked(order[which], plan, grid.columns) for which in (own, ~own)]
    band, column = (np.concatenate(one) for one in zip(*walks, strict=True))
    return _gathered(grid, band, column, rank, band)


@lru_cache(256)
def gather_table(shards: tuple[int, ...], n: int, plan: Plan, rank: int, apart: bool = True) -> Integers:
    """[tiles, 8]: what the gather kernel of `rank` reads at each position: own tiles first, then as rows arrive.

    As `reorder.tile_table`, natural layout, with the band's line in place of the parcel; the rows of own tiles count
    from the beginning of x, and their line is OWN. Where they are pulled, all rows count from the beginning of their
    shard, and its rank stands last; unless (not `apart`) those of all ranks lie in one place.
    """
    grid = grid_of(shards, n, plan)
    arrival, shard = arrival_of(grid, rank), grid.bands[:, 2]
    bands, columns = walked(arrival, plan, grid.columns)
    early = early_tiles(shards, n, plan, rank)
    if early:  # own bands are less than a group
        own = np.flatnonzero(shard[bands] == rank)
        order = np.concatenate([own[:early], np.delete(np.arange(len(bands)), own[:early])])
        bands, columns = bands[order], columns[order]
    return awaited(grid, bands, columns, plan.pull and apart, rank)


def arrival_of(grid: TileGrid, rank: int) -> Integers:
    """Bands in the order in which they arrive: own ones, the first of each other rank, the second, ..."""
    distance = (grid.bands[:, 2] - rank) % len(grid.shards)
    return np.lexsort((distance, _within(grid), distance > 0))


def in_common(grid: TileGrid) -> Integers:
    """Bands in an order that all ranks share: the first of each rank, the second of each, ..."""
    return np.lexsort((grid.bands[:, 2], _within(grid)))


def _within(grid: TileGrid) -> Integers:
    """Of every band the how many-th of its rank it is."""
    first: Integers = np.cumsum([0, *grid.band_counts])
    return np.arange(len(grid.bands)) - first[grid.bands[:, 2]]


def awaited(
    grid: TileGrid, bands: Integers, columns: Integers, apart: bool, rank: int, own_too: bool = False
) -> Integers:
    """The table of a gather on a GPU: own tiles wait for nothing, unless these (pulled) come as the others do; rows
    that lie `apart`, with their owners, count from their owner's first.
    """
    shard = grid.bands[:, 2]
    own = (shard[bands] == rank) & (not own_too)
    table = _gathered(grid, bands, columns, -1 if own_too else rank, np.where(own, OWN, bands))
    if apart:
        table = table.copy()
        table[:, ROW] = grid.bands[bands, 0] - np.array(grid.shard_rows, dtype=np.int64)[shard[bands]]
        table[:, SOURCE] = shard[bands]
        table.flags.writeable = False
    return table


def early_tiles(shards: tuple[int, ...], n: int, plan: Plan, rank: int) -> int:
    """How many own tiles `rank` takes before the first group: until the rows of others in that group are here.

    Ranks push in step, so those rows are here when each has pushed as many bands, to all others, as the group has of
    the rank it has most of. Those who do not push compute own tiles meanwhile, in whole waves.
    """
    grid = grid_of(shards, n, plan)
    own, every = grid.band_counts[rank], plan.share.multiprocessors
    if every is None or own >= plan.group_bands:
        return 0
    pushing = min(every, plan.share.communication_ctas or 1)
    counts = [count for other, count in enumerate(grid.band_counts) if other != rank]
    missing, deep = min(plan.group_bands - own, sum(counts)), 0
    while missing > sum(min(deep, count) for count in counts):
        deep += 1
    copies = 1 if plan.pull else len(shards) - 1
    waves = -(-deep * copies * PUSHED // (grid.block_n * pushing))
    return int(min(own * grid.columns, waves * (every - pushing)))


@lru_cache(256)
def push_table(shards: tuple[int, ...], plan: Plan, rank: int, home: int | None = None) -> Integers:
    """[bands, 8]: what `rank` pushes to all others: row and rows of x; the rank that is stored to first; row and line
    there; to how many it is stored, downwards and round; the first rank that is told, and how many are.

    All are told, as that is one range of ranks: words of own bands are waited for only where own tiles read them where
    all do. What others pull is stored to this rank alone, or to the rank `home` for all.
    """
    grid, ranks = grid_of(shards, 1, plan), len(shards)
    mine = grid.bands[grid.bands[:, 2] == rank]
    table = np.zeros((len(mine) if ranks > 1 else 0, 8), dtype=np.int64)
    if ranks > 1:
        table[:, 0], table[:, 1] = mine[:, 0] - grid.shard_rows[rank], mine[:, 1]
        table[:, 2], table[:, 3] = (rank - 1) % ranks, mine[:, 0]
        table[:, 4] = first_line(shards, plan, rank) + np.arange(len(mine))
        table[:, 5], table[:, 7] = ranks - 1, ranks
        if home is not None:
            table[:, 2], table[:, 5] = home, 1
        elif plan.pull:
            table[:, 2], table[:, 3], table[:, 5] = rank, table[:, 0], 1
    table.flags.writeable = False
    return table


def first_line(shards: tuple[int, ...], plan: Plan, rank: int) -> int:
    """The number of a rank's first band among all."""
    return sum(grid_of(shards, 1, plan).band_counts[:rank])


def grid_of(shards: tuple[int, ...], n: int, plan: Plan) -> TileGrid:
    assert plan.tile is not None
    return TileGrid(sum(shards), n, *plan.tile, shards)


def _gathered(grid: TileGrid, band: Integers, column: Integers, rank: int, line: Integers) -> Integers:
    """The table of a gather: these tiles, in this order."""
    rows = grid.bands[band]
    table = np.zeros((len(band), 8), dtype=np.int64)
    mine = rows[:, 2] == rank
    table[:, ROW] = rows[:, 0] - np.where(mine, grid.shard_rows[rank], 0)
    table[:, ROWS] = rows[:, 1]
    table[:, COLUMN] = column * grid.block_n
    table[:, COLUMNS] = np.minimum(grid.block_n, grid.n - table[:, COLUMN])
    table[:, PLACE] = rows[:, 0] * grid.n + table[:, COLUMN]
    table[:, STRIDE] = grid.n
    table[:, BAND_LINE] = line
    table.flags.writeable = False  # it is handed out again
    return table


def _rotated(grid: TileGrid, plan: Plan, first: int) -> tuple[Integers, Integers]:
    """Band and column of every tile: the shard of rank `first`, then of the following, groups of bands in each."""
    starts = np.cumsum([0, *grid.band_counts])
    found = []
    for step in range(len(grid.shards)):
        shard = (first + step) % len(grid.shards)
        found.append(walked(np.arange(starts[shard], starts[shard + 1]), plan, grid.columns))
    return np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])


def walked(bands: Integers, plan: Plan, columns: int) -> tuple[Integers, Integers]:
    """Band and column of every tile of these bands: groups of `group_bands`, column by column."""
    groups = [bands[start : start + plan.group_bands] for start in range(0, len(bands), plan.group_bands)]
    if not groups:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    band = np.concatenate([np.tile(group, columns) for group in groups])
    return band, np.concatenate([np.repeat(np.arange(columns), len(group)) for group in groups])
