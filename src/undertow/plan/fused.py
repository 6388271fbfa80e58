"""The fused grain: every tile moves its own bytes. Its forms, what they can do, and the memory they need.

Which tile is computed when, who owns it, where it waits or goes is in `fused_order.py`.

scatter    matmul_reduce_scatter, matmul_all_reduce: a tile goes to the rank that owns its rows, which sums. Threads of
           a CPU compute the rows of the following ranks first, own ones last, so that the others' parts have arrived;
           a GPU sums while it multiplies, and all ranks have the same order (`beside.py`).
           For all_reduce whole bands belong to ranks, by torch.tensor_split's rule, and the owner's sum goes to all.
           Over `net` and `dma` own rows come last on a GPU, too, and are summed when all products are made
           (`posts.py`).
exchange   matmul_all_to_all: a tile goes to the rank that its rows are for. As scatter, without a sum (`tokens.py`).
gather     all_gather_matmul: a tile waits for its band of rows. Own rows first, then the others' as they arrive: in
           this rank's memory, or (`plan.pull`) in that of their owner, where the tile reads them.
           all_to_all_matmul: the same, of the rows that others have for this rank (`tokens.py`).
decode     matmul_all_reduce of few rows: a block of columns, and perhaps a part of K, goes to every rank. A GPU has a
           small CTA for each, many to an SM, and `share.communication_ctas` others that sum (`fused_decode`).
owned      matmul_all_reduce of more rows, though few: a block of columns goes to its owner, whose sum goes to all.
           Ranks own blocks in turn; a rank computes those of the following ranks first, its own last.

**Push or pull.** Pushed rows cross a link once, and every tile reads them here. Pulled ones are read there by every
tile, which many links could not bear; but ranks that share a GPU share its memory, too (`Problem.together`): there
pulling spares all copies but one, and all ranks' tiles find the same rows in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .plan import TOKENS, split

if TYPE_CHECKING:
    from .plan import Plan
    from .problem import Problem

SCATTER, EXCHANGE, GATHER, DECODE, OWNED = "scatter", "exchange", "gather", "decode", "owned"
OF_FEW_ROWS = (DECODE, OWNED)
MOST_RANKS = 8  # of the GPU kernels that store into peers' memory, which are unrolled over them
MOST_DECODE_ROWS = 64
MOST_PACKETS = 32  # polled together
WIDEST_PIECE = 16384  # columns: what a CTA of the gather kernel moves at once
NARROWEST_PIECE = 256
LINE = 32  # words of a tile's or a band's line, 4 bytes each
GPU_TILES = ((128, 256), (64, 256))  # of GPUs with TMA
NARROW_TILE = (128, 128)  # another one where rows are gathered: more of them may fill waves better
PLAIN_TILES = ((128, 128), (64, 128))  # of others: what fits their registers and shared memory
SUMMING = 32  # CTAs that sum few rows where nothing else is said: more of them poll, and sum no sooner
ROW_TILE = (1, 16)  # of one row: without tensor cores, where weights lie by columns
DECODE_TILES = (ROW_TILE, *((rows, columns) for columns in (64, 32) for rows in (16, 32, 64)))
OWNED_TILES = tuple((rows, columns) for columns in (256, 128, 64) for rows in (16, 32, 64))
AHEAD = (0, 256, 512, 1024, 2048)  # elements along K
HALF_SHARED = 113 << 10  # bytes of shared memory of which two CTAs find room on an SM; the most that one may have:
ALL_SHARED = 227 << 10
HALF_REGISTERS = 128  # of each of 256 threads: two such CTAs find room on an SM


def form(problem: Problem, plan: Plan) -> str:
    """Which of the forms a fused plan for this problem is."""
    if problem.operator == "all_gather_matmul":
        return GATHER
    if problem.operator == TOKENS:
        return EXCHANGE
    if problem.operator != "matmul_all_reduce":
        return SCATTER
    return DECODE if plan.split > 0 else OWNED if plan.owners == "columns" else SCATTER


def multiplying(working: int, plan: Plan) -> int:
    """CTAs of those that work that multiply, where the others only sum or bring rows meanwhile: one at least."""
    if at_once(plan):
        return working
    return max(min(1, working), working - (plan.share.communication_ctas or 0))


def brought(problem: Problem, plan: Plan) -> bool:
    """Whether rows are brought by CTAs that multiply nothing meanwhile (`brought.py`)."""
    return problem.operator == "all_gather_matmul" and plan.order == "rotated"


def at_once(plan: Plan) -> bool:
    """Whether all CTAs bring rows, and all multiply when they are over with it."""
    bringing, every = plan.share.communication_ctas or 0, plan.share.multiprocessors
    return plan.pull and plan.order == "rotated" and every is not None and bringing >= every


def own_last(problem: Problem, lane: str) -> bool:
    """Whether a rank's own tiles come last. A gather's come first, and where a GPU sums beside its products there is no
    such order; of rows that change ranks they do in each group of bands."""
    if problem.operator == "all_gather_matmul":
        return False
    return problem.device == "cpu" or problem.operator == TOKENS or lane != "peer"


def why_not(problem: Problem, lane: str) -> str:
    """Why no fused plan can run this problem over this lane, or "". Only what all ranks know decides."""
    if problem.device == "cpu":
        return ""
    most = MOST_RANKS if lane == "peer" else LINE if problem.operator == TOKENS else problem.ranks
    gathers = problem.operator == "all_gather_matmul"  # where K is the same on all ranks and N is not
    reasons = (
        (problem.item_size != 2, f"the fused kernels multiply float16 and bfloat16, not {problem.dtype}"),
        (problem.ranks > most, f"the fused kernels know {most} ranks over lane {lane}, not {problem.ranks}"),
    )
    found = next((reason for bad, reason in reasons if bad), "")
    if found or problem.operator == TOKENS:  # any number of rows, and none; of columns where none are brought
        return found or (why_not_bands(problem.n) if problem.mirrored else "")
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
    """Tiles that the kernels of this GPU have: the usual ones for many and for few rows, then others."""
    if not problem.bulk:
        return PLAIN_TILES
    return (*GPU_TILES, NARROW_TILE) if problem.operator == "all_gather_matmul" else GPU_TILES


def piece_of(k: int, bands: int = 1, loaders: int = 0) -> int:
    """Columns of a part of a band of K: a line has room for LINE of them; powers of two.

    1024, or fewer where so many loaders would not have two parts of `bands` bands each; more where K has too many.
    """
    least = max(NARROWEST_PIECE, 1 << max(0, -(-k // LINE) - 1).bit_length())
    piece = max(least, 1024)
    while piece > least and bands * -(-k // piece) < 2 * loaders:
        piece //= 2
    return piece


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


def stage_elements(problem: Problem, plan: Plan, stays: bool = False) -> int:
    """What one turn of a call needs of every rank's memory: a slot for each rank and sums, rows, or packets.

    `stays`: all gathered rows, in memory that both turns use. Pulled ones need it of one rank only, but memory is
    symmetric.
    """
    if stays:
        return -(-problem.m * problem.k // 2)
    if problem.operator == "all_gather_matmul":
        return (max(problem.shards) if plan.pull else problem.m) * problem.k
    if problem.operator == TOKENS:  # as if the rank that sends most received most: who calls knows
        return problem.m * problem.n
    if form(problem, plan) == DECODE:  # a packet holds two columns
        return problem.ranks * plan.split * problem.m * (problem.n // 2)
    if form(problem, plan) == OWNED:  # whole tiles: parts and sums
        assert plan.tile is not None
        return 2 * column_groups(problem, plan) * problem.ranks * plan.tile[0] * plan.tile[1]
    return (problem.ranks + 1) * padded_rows(owned(problem, plan), plan) * problem.n


def stage_bytes(problem: Problem, plan: Plan, stays: bool = False) -> int:
    """Symmetric memory of both turns on a GPU, without words. `stays`: as in `stage_elements`."""
    packet = 8 if form(problem, plan) == DECODE else problem.item_size
    return 2 * packet * stage_elements(problem, plan, stays)


def column_groups(problem: Problem, plan: Plan) -> int:
    """How many blocks of columns each rank owns: the last ones may have no columns."""
    assert plan.tile is not None
    return -(-problem.n // (problem.ranks * plan.tile[1]))


def decode_step(tile: tuple[int, int]) -> int:
    """Elements along K that a small CTA multiplies at once."""
    return 256 if tile == ROW_TILE else 128 if tile[0] == 16 else 64


def decode_stages(tile: tuple[int, int]) -> int:
    """How many of those are under way: so few that an SM has room for several such CTAs. One row has none, but more
    CTAs to an SM."""
    return 1 if tile == ROW_TILE else 3


def small_ctas(problem: Problem, plan: Plan, tile: tuple[int, int], working: int, bounded: bool) -> tuple[int, int]:
    """CTAs that multiply and that sum, where few rows are sent to all ranks at once: one for each piece and, on the SMs
    that work, at most one each that waits; `bounded`: at most so many of both, but one of either."""
    if not working:
        return 0, 0
    summing = min(plan.share.communication_ctas or SUMMING, working)
    pieces = -(-problem.n // tile[1]) * plan.split
    if not bounded:
        return pieces, summing
    summing = max(1, min(summing, working // 4))
    return min(pieces, max(1, working - summing)), summing


def owned_step(plan: Plan, bulk: bool) -> int:
    """Elements along K of a tile of owned columns that are multiplied at once: 16 KB of weights or more with TMA."""
    assert plan.tile is not None
    return (128 if plan.tile[1] == 64 else 64) if bulk else 32


def owned_stages(plan: Plan, bulk: bool) -> int:
    """How many of those are under way. Where the next call is to find room beside this one, they fill half an SM.

    From 64 rows on (wgmma) what is multiplied is another one, and results pass through shared memory, too.
    """
    assert plan.tile is not None
    block_m, block_n = plan.tile
    if not bulk:
        return 4
    room = HALF_SHARED if plan.ahead else ALL_SHARED
    rest = 1024 + 2 * block_m * block_n  # barriers; a tile of 16 bits on its way to memory
    held = (room - rest) // (2 * (block_m + block_n) * owned_step(plan, bulk))
    return max(2, min(8, held + (block_m < 64)))


def parts(plan: Plan, k: int) -> int:
    """In how many parts of `plan.piece` columns a band of K columns is brought."""
    return -(-k // plan.piece)
