"""A scatter on a GPU: tiles in an order that all ranks share, and what each CTA does beside the next one.

A tile's parts are on their way to its owner when all ranks have computed it, which is at about the same time, as all
go through the same table. A wave later they are there, and are summed by CTAs that multiply a further tile meanwhile
(`kernels/fused_scatter.py`). A *job* is some rows of an own tile to sum or, of all_reduce, a tile to copy that another
rank has summed. The table of jobs has a line for every position of the table of tiles, mostly filled, and then what is
left.

**Nobody waits for what comes after.** The CTA that computes position q waits there for the job of line q, before it
stores its tile. The word of the tile at p is set by the CTA that computed it when it comes to its next position, at
most p + ctas; a sum whose job stands in line s is told of at s + ctas. Both are set before anything is waited for at
that position. So with

    sums in lines from p + LAG * ctas on,   copies in lines from p + 2 * LAG * ctas on,   LAG >= 1,

whoever waits at q waits for what is done at a position up to q. Of all CTAs of all ranks that wait, one waits at the
first position; what it waits for is done by a CTA that has not come so far, and does not wait. What is left comes after
the table, all sums before all copies. It does not matter that ranks have fewer CTAs than the plan says.

With LAG 2 a word is a whole tile's time old, and nobody waits for long.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from . import fused
from .tiles import Integers, TileGrid

if TYPE_CHECKING:
    from .plan import Plan

LAG = 2  # waves
SLICE = 2048  # elements that are summed beside one step of a main loop: 16 bytes of every rank for each of 256 threads
# Columns of a line of the jobs' table; none of them where there are no rows.
SHARD_ROW, ROWS, COLUMN, TILE_LINE, OUT_ROW, OWNER = range(6)


@lru_cache(256)
def common_table(shards: tuple[int, ...], n: int, plan: Plan, broadcast: bool) -> Integers:
    """[tiles, 8]: `fused.scatter_table` in an order that is the same on all ranks: the first band of each rank, the
    second of each, ...

    So every rank has sums to make all the time, and groups stream weights as often as those of a matmul alone.
    """
    assert plan.tile is not None
    grid = TileGrid(sum(shards), n, *plan.tile, shards)
    shard = grid.bands[:, 2]
    within = np.arange(len(shard)) - np.cumsum([0, *grid.band_counts])[shard]
    return fused.scattered(grid, *fused.walked(np.lexsort((shard, within)), plan, grid.columns), broadcast)


@lru_cache(256)
def job_table(shards: tuple[int, ...], n: int, plan: Plan, rank: int, broadcast: bool, ctas: int) -> Integers:
    """[tiles + what is left, 8]: what `rank` does beside each position of `common_table`, with up to `ctas` CTAs."""
    table = common_table(shards, n, plan, broadcast)
    tiles, owner = len(table), table[:, fused.OWNER]
    places: list[tuple[int, int, int]] = []  # line, position of the tile, part of its rows
    parts = job_parts(len(shards), plan, broadcast)
    free = 0
    for position in np.flatnonzero(owner == rank).tolist():
        for part in range(parts):
            free = max(free, position + LAG * ctas)
            places.append((free, position, part))
            free += 1
    if broadcast:  # there each sum has the line of its own: all ranks know when it is made
        taken = {line for line, _, _ in places}
        free = 0
        for position in np.flatnonzero(owner != rank).tolist():
            free = max(free, position + 2 * LAG * ctas)
            while free in taken:
                free += 1
            places.append((free, position, 0))
            free += 1
    early = [one for one in places if one[0] < tiles]
    late = [one for one in places if one[0] >= tiles]  # sums stand before copies
    jobs = np.zeros((tiles + len(late), 8), dtype=np.int64)
    lines = [line for line, _, _ in early] + list(range(tiles, tiles + len(late)))
    for line, (_, position, part) in zip(lines, early + late, strict=True):
        jobs[line] = _job(table[position], part, parts, plan)
    jobs.flags.writeable = False  # it is handed out again
    return jobs


def job_parts(ranks: int, plan: Plan, broadcast: bool) -> int:
    """How many jobs an own tile is: about as many as there are other positions for them, and whole slices.

    Where sums are copied, too, there is a job at every position as it is.
    """
    assert plan.tile is not None
    parts = 1
    while not broadcast and 2 * parts <= ranks and plan.tile[0] % (2 * parts * slice_rows(ranks, plan, False)) == 0:
        parts *= 2
    return parts


def slice_rows(ranks: int, plan: Plan, broadcast: bool) -> int:
    """Rows of a slice. Jobs of whole tiles have larger ones, where registers hold them."""
    assert plan.tile is not None
    return SLICE * (2 if broadcast and ranks <= 4 else 1) // plan.tile[1]


def pace(ranks: int, plan: Plan, broadcast: bool, steps: int) -> int:
    """How many steps of a main loop there are between two slices of a job; 0 where there is no room for all.

    What is asked for in one step is summed when the next slice is asked for: as late as the last one allows, as loads
    take longer than a step.
    """
    assert plan.tile is not None
    slices = plan.tile[0] // job_parts(ranks, plan, broadcast) // slice_rows(ranks, plan, broadcast)
    return (steps - 1) // slices


def _job(tile: Integers, part: int, parts: int, plan: Plan) -> Integers:
    """One part of the rows of a tile, or none of them where the band is short."""
    assert plan.tile is not None
    height = plan.tile[0] // parts
    job = np.zeros(8, dtype=np.int64)
    job[SHARD_ROW], job[OUT_ROW] = tile[fused.SHARD_ROW] + part * height, tile[fused.OUT_ROW] + part * height
    job[ROWS] = max(0, min(height, tile[fused.ROWS] - part * height))
    job[COLUMN], job[TILE_LINE], job[OWNER] = tile[fused.COLUMN], tile[fused.TILE_LINE], tile[fused.OWNER]
    return job
