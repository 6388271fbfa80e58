"""Rows of a gather that are brought by CTAs which multiply nothing meanwhile: `kernels/fused_brought.py`.

A plan says so by its order, "rotated". Two forms, by `share.communication_ctas`:

beside     some CTAs bring rows while the others multiply all own tiles, straight from x; then come the others' tiles.
           Own tiles are groups of their own: weights are streamed once more than for groups that go on over the ends
           of shards, which takes less time than the tiles of two bands or more.
at once    all CTAs bring rows, then all multiply (`fused.at_once`; pulled rows only): own rows are read where the
           others read them, so groups go on over the ends of shards, in one order for all ranks, which find each
           other's rows in the cache. For few rows, which take a part of a tile's time, and where so many ranks share
           a GPU that its cache holds no more.
           Few rows are few tiles, too, and a last wave may leave most CTAs idle. There K of its tiles may be cut into
           `plan.split` parts, a CTA each, which all of them sum (`kernels/last_wave.py`).

On an H200, four ranks, Llama-3 70B: of 4 and 16 bands a rank, one CTA of 33 that brings pulled rows beside the others
was the fastest of all forms, and two took 3 to 13 % longer; of one band it took 4 and 13 % longer than rows that all
bring before they multiply (`kernels/fused_gather.py`). Pushed rows between GPUs have not been measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from . import fused
from .fused_order import arrival_of, awaited, grid_of, in_common, walked

if TYPE_CHECKING:
    from .plan import Plan
    from .problem import Problem
    from .tiles import Integers

BANDS = 2  # of a rank at least, from which on some CTAs bring rows beside the others
AT_ONCE_BANDS = 16  # of a rank at most, up to which all bringing first may be worth a trial
SPLITS = (2, 4, 8)  # parts that K of the last tiles may be cut into


def early(steps: int, stages: int) -> int:
    """How many tiles ahead a tile's rows are waited for, where loads of so many steps may be under way."""
    return 1 + -(-stages // steps)


def last_tiles(tiles: int, workers: int, plan: Plan) -> int:
    """How many of so many tiles have their K cut: those of a last wave, if their parts find a CTA each."""
    left = tiles % max(1, workers)
    return left if plan.split > 0 and left * plan.split <= workers else 0


def split_of(tiles: int, workers: int) -> int:
    """Into how many parts K of a last wave's tiles is best cut; 0: it is full enough."""
    left = tiles % max(1, workers)
    return max((parts for parts in SPLITS if left and left * parts <= workers), default=0)


def fuller_waves(problem: Problem, plan: Plan) -> list[Plan]:
    """`plan`, by which all bring rows at once, in narrower tiles and with K of the last ones cut: each only if that
    fills waves better."""
    narrow = replace(plan, tile=fused.NARROW_TILE)
    found = [narrow] if _wave_area(problem, narrow) < _wave_area(problem, plan) else []
    parts = split_of(problem.grid(plan).tiles, _workers(problem, plan))
    return found + ([replace(plan, split=parts)] if parts else [])


def _wave_area(problem: Problem, plan: Plan) -> int:
    """Elements of the result that a CTA has time for until the last wave is over."""
    assert plan.tile is not None
    return problem.grid(plan).waves(_workers(problem, plan)) * plan.tile[0] * plan.tile[1]


def _workers(problem: Problem, plan: Plan) -> int:
    return fused.multiplying(plan.share.multiprocessors or problem.multiprocessors, plan)


def own_tiles(shards: tuple[int, ...], n: int, plan: Plan, rank: int) -> int:
    """How many tiles at the beginning of the table read x and wait for nothing."""
    grid = grid_of(shards, n, plan)
    return 0 if _alike(shards, plan) else int(grid.band_counts[rank]) * grid.columns


def _alike(shards: tuple[int, ...], plan: Plan) -> bool:
    """Whether own tiles wait for rows as others do. A rank that is alone brings none."""
    return fused.at_once(plan) and len(shards) > 1


@lru_cache(256)
def table(shards: tuple[int, ...], n: int, plan: Plan, rank: int, apart: bool = True) -> Integers:
    """`fused_order.gather_table` in which all own tiles come first, in groups of their own; or (at once) wait like
    others, in an order that all ranks share, so that they find each other's rows in the cache.
    """
    grid = grid_of(shards, n, plan)
    if _alike(shards, plan):
        bands, columns = walked(in_common(grid), plan, grid.columns)
        return awaited(grid, bands, columns, plan.pull and apart, rank, own_too=True)
    arrival, own = arrival_of(grid, rank), grid.band_counts[rank]
    walks = [walked(which, plan, grid.columns) for which in (arrival[:own], arrival[own:])]
    bands, columns = (np.concatenate(one) for one in zip(*walks, strict=True))
    return awaited(grid, bands, columns, plan.pull and apart, rank)
