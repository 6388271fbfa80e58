"""A scatter on a GPU whose sums go from rank to rank: `kernels/fused_chain.py`. A plan says so by its order, "rotated".

Rank r computes the tiles of rank r - 1 first, then those of r - 2, ..., its own last. So the tiles of owner o are
computed by o + 1 first, then by o + 2, ..., then by o: one rank's tiles apart, all in the same order. Each adds what
came from the one before and passes the sum on.

Against sums that some CTAs make beside the others (`beside.py`) nothing is stored that is not already summed, and
nobody reads it but the epilogue that needs it. But an owner's tiles are groups of their own, so weights are streamed
once for each rank; and a tile must be far enough from the one it waits for. So it is for shards of several waves.

**Nobody waits for ever.** A tile in the k-th part of a rank's table waits for one in the part before of another rank's
table, and CTAs take the tiles of a table in its order: of all tiles that wait, one is in the first part, which waits
for nobody.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from . import fused_order

if TYPE_CHECKING:
    from .plan import Plan
    from .problem import Problem
    from .tiles import Integers

AWAITED = fused_order.OUT_ROW
"""Whether the ranks before have summed some of the tile: the column that other scatters have the output's row in."""
MOST_RANKS = 4
"""Of which `auto` tries it: on an H200, eight ranks, it took 6 to 41 % longer than sums by all CTAs."""
TILE = (128, 256)
"""The only one: its sums are most registers of those who multiply, half of its product a seventh of shared memory."""
WAVES = 4
"""Of a shard's tiles, at least: on an H200, four ranks, shards of two took 10 to 17 % longer than sums by owners, when
one group of warps multiplied; not measured since two do."""


def chained(problem: Problem, plan: Plan) -> bool:
    """Whether sums go from rank to rank."""
    return problem.operator == "matmul_reduce_scatter" and plan.order == "rotated"


def worthwhile(problem: Problem, plan: Plan, ctas: int) -> bool:
    """Whether every shard has tiles enough for so many CTAs, and sums lose little that are rounded on every way.

    Of as many roundings as ranks the error grows: by a third at four ranks, by three quarters at eight, in a model. And
    what two ranks' products make together may be more than float16 holds, though all of them together is not.
    """
    assert plan.tile is not None
    if problem.dtype != "bfloat16" or problem.ranks > MOST_RANKS:
        return False
    columns = -(-problem.n // plan.tile[1])
    return min(-(-rows // plan.tile[0]) * columns for rows in problem.shards) >= WAVES * ctas


@lru_cache(256)
def table(shards: tuple[int, ...], n: int, plan: Plan, rank: int) -> Integers:
    """[tiles, 8]: the tiles of `rank` in its order, as `fused_order.scattered` has them, but for the column AWAITED."""
    grid = fused_order.grid_of(shards, n, plan)
    ranks = len(shards)
    walks = [
        fused_order.walked(np.flatnonzero(grid.bands[:, 2] == (rank - 1 - part) % ranks), plan, grid.columns)
        for part in range(ranks)
    ]
    band, column = (np.concatenate(one) for one in zip(*walks, strict=True))
    found = fused_order.scattered(grid, band, column, False).copy()
    found[:, AWAITED] = found[:, fused_order.OWNER] != (rank - 1) % ranks
    found.flags.writeable = False  # it is handed out again
    return found
