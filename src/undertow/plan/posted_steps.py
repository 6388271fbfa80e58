"""When a fused matmul's posts leave and are needed, for predictions: as parts of the matmul's tiles.

Rank 0 stands for all: ranks post one parcel each at about the same time, to different ranks. Of sums, a parcel is
posted when the last of its tiles is stored, so it is groups of bands (`Plan.group_bands`) that release posts. Rows are
posted at once; a tile waits for its band's parcel, and all tiles behind it do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import fused, post_tables
from .posts import Rows, Sums, signal_of

if TYPE_CHECKING:
    from .plan import Plan
    from .problem import Problem

OPERATORS = ("matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul")
"""Those whose posts are known before the call."""


@dataclass(frozen=True)
class Steps:
    """Of each post, in order: its bytes; the part of all tiles after which it is made (0: before all); and the part of
    all tiles that come before the first one that waits for it (1: none does)."""

    nbytes: tuple[float, ...]
    made: tuple[float, ...]
    needed: tuple[float, ...]


def steps_of(problem: Problem, plan: Plan) -> Steps:
    assert plan.tile is not None
    if problem.operator == "all_gather_matmul":
        return _rows(problem, plan, Rows(problem.shards, plan.tile[0], len(plan.parcels), problem.k))
    broadcast = problem.operator == "matmul_all_reduce"
    shards = fused.owned(problem, plan)
    return _sums(problem, plan, Sums(shards, plan.tile[0], len(plan.parcels), problem.n, broadcast))


def _sums(problem: Problem, plan: Plan, layout: Sums) -> Steps:
    table = post_tables.leaving_products(layout, plan, 0)
    last = np.zeros(len(table.parcels), np.int64)
    np.maximum.at(last, table.tiles[:, 6], np.arange(len(table.tiles)))
    made = (last[:-1] + 1) / max(1, len(table.tiles))  # own rows are the last parcel, and not posted
    order = np.argsort(made, kind="stable")
    nbytes = table.posts[:, 3] * problem.item_size
    return Steps(tuple(nbytes[order].tolist()), tuple(made[order].tolist()), (1.0,) * len(order))


def _rows(problem: Problem, plan: Plan, layout: Rows) -> Steps:
    tiles = post_tables.landing_rows(layout, problem.n, plan, 0).tiles
    # Rank d posts its parcels one after the other, each to ranks d - 1, d - 2, ..., so the d-th of each is for rank 0.
    ranks, parcels = len(layout.shards), layout.parcels
    posts = sorted((number, d) for d in range(1, ranks) for number in range(len(parcels[d])))
    needed, nbytes = list[float](), list[float]()
    for number, source in posts:
        waiting = np.flatnonzero(tiles[:, 6] == signal_of(source, number))
        needed.append(float(waiting[0] / len(tiles)) if len(waiting) else 1.0)
        nbytes.append(float(parcels[source][number].rows * problem.k * problem.item_size))
    return Steps(tuple(nbytes), (0.0,) * len(posts), tuple(needed))
