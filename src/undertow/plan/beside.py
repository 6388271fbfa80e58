"""A scatter on a GPU: tiles in an order that all ranks share, and the sums that are made beside them.

A tile's parts are with its owner when all ranks have computed it, which is at about the same time, as all go through
the same table. Most CTAs multiply; `share.communication_ctas` of them do jobs meanwhile, and in the end all of them do
what is left (`kernels/fused_scatter.py`). A *job* is some rows of an own tile to sum or, of all_reduce, a tile of
another rank to copy when its owner has summed it. CTAs take jobs in the order of their table.

**Nobody waits for ever.** Sums wait for tiles, and who multiplies waits for nobody. Jobs have numbers: of the tile at
position p a sum has p, a copy p + LAG waves, and every rank does its jobs in the order of these numbers. Of all CTAs
that wait for copies one has the least number; the sum it waits for has a lesser one, on its rank all jobs up to that
have been taken or will be taken next, and whoever does it does not wait for a copy.

LAG lets others sum before their sums are asked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from . import fused_order
from .tiles import Integers, TileGrid

if TYPE_CHECKING:
    from .plan import Plan

LAG = 3  # waves
SHARD_ROW, ROWS, COLUMN, TILE_LINE, OUT_ROW, OWNER, PART = range(7)  # columns of a line of the jobs' table


@lru_cache(256)
def common_table(shards: tuple[int, ...], n: int, plan: Plan, broadcast: bool) -> Integers:
    """[tiles, 8]: `fused_order.scatter_table` in an order that is the same on all ranks: the first band of each rank,
    the second of each, ...

    So every rank has sums to make all the time, and groups stream weights as often as those of a matmul alone.
    """
    assert plan.tile is not None
    grid = TileGrid(sum(shards), n, *plan.tile, shards)
    return fused_order.scattered(grid, *fused_order.walked(fused_order.in_common(grid), plan, grid.columns), broadcast)


@lru_cache(16)
def job_table(shards: tuple[int, ...], n: int, plan: Plan, rank: int, broadcast: bool, ctas: int) -> Integers:
    """[jobs, 8]: what `rank` sums and, `broadcast`, copies, where about `ctas` CTAs multiply.

    Row in the owner's shard, rows, column; the tile's line; row of the output; the owner; which part of the tile a sum
    is, or how many a copy waits for.
    """
    table = common_table(shards, n, plan, broadcast)
    own = table[:, fused_order.OWNER] == rank
    number = np.arange(len(table)) + np.where(own, 0, LAG * ctas)
    wanted = np.flatnonzero(own | broadcast)
    wanted = wanted[np.argsort(number[wanted], kind="stable")]
    height = 2 * slice_rows(len(shards), plan)
    found = []
    for line, mine in zip(table[wanted].tolist(), own[wanted].tolist(), strict=True):
        rows = line[fused_order.ROWS]
        parts = -(-rows // height)
        for part in range(parts if mine else 1):
            top = part * height
            found.append((
                line[fused_order.SHARD_ROW] + top, min(height, rows - top) if mine else rows, line[fused_order.COLUMN],
                line[fused_order.TILE_LINE], line[fused_order.OUT_ROW] + top, line[fused_order.OWNER],
                part if mine else parts, 0,
            ))  # fmt: skip
    jobs = np.array(found, dtype=np.int64).reshape(-1, 8)
    jobs.flags.writeable = False  # it is handed out again
    return jobs


def slice_rows(ranks: int, plan: Plan) -> int:
    """Rows that a CTA asks for at once, half a job: what its registers hold of all ranks, twice."""
    assert plan.tile is not None
    return min(plan.tile[0] // 2, (8192 if ranks <= 4 else 4096) // plan.tile[1])
