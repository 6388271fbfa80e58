"""The fused grain: every tile moves its own bytes. Which tile is computed when, who owns it, where it waits or goes.

scatter    matmul_reduce_scatter, matmul_all_reduce: a tile goes to the rank that owns its rows, which sums. A rank
           computes the rows of the following ranks first, its own last, so that the others' parts have arrived.
           For all_reduce whole bands belong to ranks, by torch.tensor_split's rule, and the owner's sum goes to all.
exchange   matmul_all_to_all: a tile goes to the rank that its rows are for. As scatter, without a sum (`tokens.py`).
gather     all_gather_matmul: a tile waits for its band of rows. Own rows first, then those of the following ranks.
           all_to_all_matmul: the same, of the rows that others have for this rank (`tokens.py`).
decode     matmul_all_reduce of few rows: a block of columns, and perhaps a part of K, goes to every rank.

Within a shard tiles are walked in groups of `group_bands` bands, column by column, as everywhere (`tiles.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .plan import split
from .tiles import Integers, TileGrid

if TYPE_CHECKING:
    from .plan import Plan
    from .problem import Problem

SCATTER, EXCHANGE, GATHER, DECODE = "scatter", "exchange", "gather", "decode"
MOST_RANKS = 8  # of the GPU kernels: a descriptor for each
MOST_DECODE_ROWS = 64
MOST_PACKETS = 32  # polled together
WIDEST_PIECE = 16384  # columns: what a CTA of the gather kernel moves at once
LINE = 32  # words of a tile's or a band's line, 4 bytes each
GPU_TILES = ((128, 256), (64, 256))  # of GPUs with TMA
PLAIN_TILES = ((128, 128), (64, 128))  # of others: what fits their registers and shared memory
DECODE_TILES = ((16, 256), (32, 256), (64, 256), (16, 128), (32, 128), (64, 128))
# Columns of the line of a table; the first four are those of `reorder`.
ROW, ROWS, COLUMN, COLUMNS, SHARD_ROW, TILE_LINE, OWNER, OUT_ROW = range(8)
PLACE, STRIDE, BAND_LINE = 4, 5, 6


def form(problem: Problem, plan: Plan) -> str:
    """Which of the forms a fused plan for this problem is."""
    if problem.operator == "all_gather_matmul":
        return GATHER
    if problem.operator == "matmul_all_to_all":
        return EXCHANGE
    return DECODE if problem.operator == "matmul_all_reduce" and plan.split > 0 else SCATTER


def why_not(problem: Problem, lane: str) -> str:
    """Why no fused plan can run this problem over this lane, or "". Only what all ranks know decides."""
    if lane != "peer":
        return "whoever computes a tile stores it into another rank's memory, which is lane peer"
    if problem.device == "cpu":
        return ""
    gathers = problem.operator == "all_gather_matmul"  # where K is the same on all ranks and N is not
    reasons = (
        (problem.item_size != 2, f"the fused kernels multiply float16 and bfloat16, not {problem.dtype}"),
        (problem.ranks > MOST_RANKS, f"the fused kernels know {MOST_RANKS} ranks, not {problem.ranks}"),
    )
    found = next((reason for bad, reason in reasons if bad), "")
    if found or problem.operator == "matmul_all_to_all":  # any number of rows and columns, and none
        return found
    others = (
        (not gathers and problem.n % 8 != 0, f"N is {problem.n}, not a multiple of 8"),
        (gathers and why_not_bands(problem.k) != "", why_not_bands(problem.k)),
        (problem.operator != "matmul_all_reduce" and min(problem.shards) == 0, "a rank has no rows"),
        (problem.m == 0 or (problem.n == 0 and not gathers), "there is nothing to multiply"),
    )
    return next((reason for bad, reason in others if bad), "")


def why_not_bands(k: int) -> str:
    """Why no kernel can bring rows of K elements from other ranks, or ""."""
    most = LINE * WIDEST_PIECE
    if k == 0:
        return "there is nothing to multiply"
    if k > most:
        return f"K is {k}, and the fused gather knows at most {most}"
    return f"K is {k}, not a multiple of 8" if k % 8 else ""


def gpu_tiles(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Tiles that the kernels of this GPU have, the largest first."""
    return GPU_TILES if problem.bulk else PLAIN_TILES


def piece_of(k: int) -> int:
    """Columns of a part of a band of K: a line has room for LINE of them; powers of two."""
    return max(1024, 1 << max(0, -(-k // LINE) - 1).bit_length())


def owned(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """Rows that each rank owns in a scatter: the shards, or (all_reduce) whole bands."""
    if problem.operator != "matmul_all_reduce":
        return problem.shards
    assert plan.tile is not None
    block_m = plan.tile[0]
    bands = -(-problem.m // block_m)
    bounds = [(start * block_m, min(stop * block_m, problem.m)) for start, stop in split(bands, problem.ranks)]
    return tuple(max(0, stop - start) for start, stop in bounds)


def padded_rows(rows: tuple[int, ...], plan: Plan) -> int:
    """Rows of a slot: of the longest shard, in whole bands."""
    assert plan.tile is not None
    return -(-max(rows) // plan.tile[0]) * plan.tile[0]


def stage_elements(problem: Problem, plan: Plan) -> int:
    """What one turn of a call needs of every rank's memory: a slot for each rank and sums, rows, or packets."""
    if problem.operator == "all_gather_matmul":
        return problem.m * problem.k
    if problem.operator == "matmul_all_to_all":  # as if the rank that sends most received most: who calls knows
        return problem.m * problem.n
    if form(problem, plan) == DECODE:  # a packet holds two columns
        return problem.ranks * plan.split * problem.m * (problem.n // 2)
    return (problem.ranks + 1) * padded_rows(owned(problem, plan), plan) * problem.n


def stage_bytes(problem: Problem, plan: Plan) -> int:
    """Symmetric memory of both turns on a GPU, without words."""
    packet = 8 if form(problem, plan) == DECODE else problem.item_size
    return 2 * packet * stage_elements(problem, plan)


@lru_cache(256)
def scatter_table(shards: tuple[int, ...], n: int, plan: Plan, rank: int, broadcast: bool) -> Integers:
    """[tiles, 8]: what the scatter kernel of `rank` reads at each position; the last tiles are its own.

    row, rows, column, columns of the product; the row in the owner's shard; the tile's line, its number among all; the
    owner; the row of the output, which is the product's for all_reduce (`broadcast`) and the shard's otherwise.
    """
    grid = _grid(shards, n, plan)
    band, column = _rotated(grid, plan, rank + 1)
    rows = grid.bands[band]
    table = np.zeros((len(band), 8), dtype=np.int64)
    table[:, ROW], table[:, ROWS], table[:, OWNER] = rows[:, 0], rows[:, 1], rows[:, 2]
    table[:, COLUMN] = column * grid.block_n
    table[:, COLUMNS] = np.minimum(grid.block_n, n - table[:, COLUMN])
    table[:, SHARD_ROW] = rows[:, 0] - np.array(grid.shard_rows, dtype=np.int64)[rows[:, 2]]
    table[:, TILE_LINE] = band * grid.columns + column
    table[:, OUT_ROW] = table[:, ROW] if broadcast else table[:, SHARD_ROW]
    table.flags.writeable = False  # it is handed out again
    return table


@lru_cache(256)
def gather_table(shards: tuple[int, ...], n: int, plan: Plan, rank: int) -> Integers:
    """[tiles, 8]: what the gather kernel of `rank` reads at each position; the first tiles are of its own rows.

    As `reorder.tile_table`, natural layout, with the band's line in place of the parcel; the rows of own tiles count
    from the beginning of x.
    """
    grid = _grid(shards, n, plan)
    band, column = _rotated(grid, plan, rank)
    rows = grid.bands[band]
    table = np.zeros((len(band), 8), dtype=np.int64)
    mine = rows[:, 2] == rank
    table[:, ROW] = rows[:, 0] - np.where(mine, grid.shard_rows[rank], 0)
    table[:, ROWS] = rows[:, 1]
    table[:, COLUMN] = column * grid.block_n
    table[:, COLUMNS] = np.minimum(grid.block_n, n - table[:, COLUMN])
    table[:, PLACE] = rows[:, 0] * n + table[:, COLUMN]
    table[:, STRIDE] = n
    table[:, BAND_LINE] = band
    table.flags.writeable = False
    return table


@lru_cache(256)
def push_table(shards: tuple[int, ...], plan: Plan, rank: int) -> Integers:
    """[bands, 8]: what `rank` pushes to all others, nearest first: row and rows of x; to whom; row and line there."""
    grid = _grid(shards, 1, plan)
    mine = grid.bands[grid.bands[:, 2] == rank]
    line = first_line(shards, plan, rank) + np.arange(len(mine))
    found = []
    for step in range(1, len(shards)):
        table = np.zeros((len(mine), 8), dtype=np.int64)
        table[:, 0], table[:, 1] = mine[:, 0] - grid.shard_rows[rank], mine[:, 1]
        table[:, 2], table[:, 3], table[:, 4] = (rank - step) % len(shards), mine[:, 0], line
        found.append(table)
    whole = np.concatenate(found) if found else np.zeros((0, 8), dtype=np.int64)
    whole.flags.writeable = False
    return whole


def first_line(shards: tuple[int, ...], plan: Plan, rank: int) -> int:
    """The number of a rank's first band among all."""
    return sum(_grid(shards, 1, plan).band_counts[:rank])


def parts(plan: Plan, k: int) -> int:
    """In how many parts of `plan.piece` columns a band of K columns is brought."""
    return -(-k // plan.piece)


def _grid(shards: tuple[int, ...], n: int, plan: Plan) -> TileGrid:
    assert plan.tile is not None
    return TileGrid(sum(shards), n, *plan.tile, shards)


def _rotated(grid: TileGrid, plan: Plan, first: int) -> tuple[Integers, Integers]:
    """Band and column of every tile: the shard of rank `first`, then of the following, groups of bands in each."""
    bands, columns = [], []
    starts = np.cumsum([0, *grid.band_counts])
    for step in range(len(grid.shards)):
        shard = (first + step) % len(grid.shards)
        for start in range(int(starts[shard]), int(starts[shard + 1]), plan.group_bands):
            group = np.arange(start, min(start + plan.group_bands, int(starts[shard + 1])))
            bands.append(np.tile(group, grid.columns))
            columns.append(np.repeat(np.arange(grid.columns), len(group)))
    if not bands:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(bands), np.concatenate(columns)
