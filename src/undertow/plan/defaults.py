"""Plans for a strategy that the user named, where nothing was measured: sensible parcels, nothing clever.

serial     the whole product first; what moves is cut only to keep a link busy in both directions
chunked    CHUNKS equal parts of the rows
signaled   about PARCELS parcels of whole bands where there are enough of them, else of tiles, packed
           (moved by a collective program: always of whole bands); sums over a GPU's peer memory by a program
fused      all SMs, or where tiles wait all but one, compute, and move what they compute (`fused.py`, `brought.py`);
           few rows by small CTAs on all SMs, at most one of those that wait to each
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from . import brought, chain, fused, posts
from .plan import EMBEDDING, SLICES, TOKENS, Plan, Share, alike, split
from .problem import Problem

CHUNKS = 4
PARCELS = 8
_PIPELINED_BYTES = 16 << 20  # a serial result is cut into parts of about so many bytes
_MOST_SERIAL = 8
_CPU_BANDS = 32
_CPU_WEIGHTS = (2, 3, 5, 6, 6, 5, 3, 2)
"""Of a CPU's parcels: the link starts early, and little is left when the matmul ends. Equal ones on a GPU, for now."""
_CPU_BOTH_WEIGHTS = (1, 2, *[3] * 9, 2)
"""Where both of two ranks sum, so that a parcel costs half as many wakes: 3 to 6 % faster than those, interleaved."""
_COPIED_BYTES = 16 << 20
"""Of a rank's pooled rows in a slice that leaves through the host: each copy costs the engine a pause. On an H200, four
ranks, 64 MiB were fastest in four parts (eight equal or 1 : 3 : 3 : 1 of them 8 to 10 % slower), 32 MiB in two."""
_POSTED_BYTES = 8 << 20
"""Of a parcel that a GPU's kernel posts, at most: a copy engine's pause counts for little beside so many (chunks of 2,
4, 8 MB over the staged lane, four ranks of an H200: 0.71, 0.81, 0.87 of the engines' speed)."""
_MOST_GROUPED = 8  # bands
_CPU_COLUMNS, _CPU_ALL_COLUMNS = 512, 1 << 20  # a band of all columns is one product; ranks may differ in columns
_CUDA_TILE, _CUDA_WIDE_TILE = (128, 256), (64, 128)  # of 16-bit and of wider types
_RESERVED = {"net": 4, "peer": 4, "dma": 1}
"""SMs that a matmul leaves to what runs beside it: the lane's own kernels, and sums."""
BESIDE_CTAS = 16  # of what runs there: they wait for memory, and several find room on an SM
_PROGRAM_CTAS = 8
_PROGRAMS = {"matmul_all_reduce": "two_shot", "matmul_reduce_scatter": "reduce_scatter_direct"}
"""Of the library, for parcels that are summed over a GPU's peer memory: one launch for all of them. Parcel by parcel
the host enqueues dozens of copies, sums and stops of streams, which takes it longer than the GPU takes for the call: on
an H200, four ranks, M 4096, N 8192, K 4096, 8.8 and 6.0 ms instead of 2.8 and 2.7."""
_MOVING = 4  # CTAs whose time goes into moving what all of them compute, for predictions
_SPARE = 1  # SM that a fused call leaves to kernels of others
_APART = 33  # SMs of a fused call of which one sums or brings rows beside the others: measured on four ranks of a 132
_UNCROWDED = 4  # ranks that share a GPU and its cache without loss
_AT_ONCE_ROWS = 64  # of all ranks together: few rows that each rank sends to all


def default_plan(problem: Problem, grain: str, lane: str, by_program: bool = False) -> Plan:
    """A plan of that grain and lane for this problem. `by_program`: a collective program may move the parcels."""
    if problem.operator == EMBEDDING:
        return _embedding(problem, grain, lane)
    if grain == "signaled":
        return _signaled(problem, lane, by_program)
    if grain == "fused":
        return fused_plan(problem, lane)
    moved = problem.result_bytes
    if problem.operator == "all_gather_matmul":  # ranks differ in columns; what moves are rows of x
        moved = problem.m * problem.k * problem.item_size
    parts = CHUNKS if grain == "chunked" else min(_MOST_SERIAL, moved // _PIPELINED_BYTES)
    if grain == "serial" and lane == "net":
        parts = 1
    return Plan(grain, lane, split(problem.m, max(1, min(parts, problem.m))))


def fused_plan(problem: Problem, lane: str) -> Plan:
    """A fused plan. Pulled rows, of shards of two bands or more, are brought by a few of a GPU's CTAs beside those that
    multiply, fewer rows, or those of more than four ranks, by all CTAs at once; pushed ones, which nobody has measured
    so between GPUs, before they multiply. On an H200, four ranks, M 512, K 8192 and 12288: 171, 557, 589, 719 us at
    once, 175, 626, 633, 787 before.
    """
    if problem.device == "cuda" and lane != "peer":
        return _posted(problem, lane)
    if problem.device == "cuda" and problem.operator == "all_gather_matmul":
        forms = gather_forms(problem, lane)
        wanted = ("beside", "at once", "before") if problem.together else ("before",)
        if _crowded(problem):
            wanted = ("at once", *wanted)
        return next(forms[one] for one in wanted if one in forms)
    return _fused(problem, lane)


def _posted(problem: Problem, lane: str, group_bands: int | None = None) -> Plan:
    """A GPU's fused plan where tiles are posted: parcels of whole bands, own ones last, or own rows first.

    Bands of a group are complete together, so groups are what a parcel holds, a quarter of a shard at most: the link
    begins with the first. Smaller ones read the weights more often. Tokens go expert by expert, in groups that end with
    them: each of their bands is a parcel.
    """
    evenly = problem.operator in ("matmul_all_reduce", TOKENS)
    tile = fused_tile(problem, problem.m // problem.ranks if evenly else min(problem.shards))
    gathers = problem.operator == "all_gather_matmul"
    tokens = problem.operator == TOKENS
    group = group_bands or (_MOST_GROUPED if tokens else max(1, min(_MOST_GROUPED, _posted_bands(problem, tile) // 4)))
    parcels = _post_parcels(problem, lane, tile, group)
    share = Share(max(1, problem.multiprocessors - _SPARE))
    return Plan(
        "fused", lane, parcels, share, tile, group_bands=group,
        own_last=fused.own_last(problem, lane), piece=fused.piece_of(problem.k) if gathers else 1024,
    )  # fmt: skip


def posted_forms(problem: Problem, lane: str) -> list[Plan]:
    """The fused plans of a GPU that are worth trying where tiles are posted: in groups of more and of fewer bands. None
    where a call would end with a meeting of all ranks' streams (`posts.Sums.meets`), which graphs cannot hold."""
    plan = _posted(problem, lane)
    if min(fused.owned(problem, plan)) == 0:
        return []
    assert plan.tile is not None
    most = min(_MOST_GROUPED, _posted_bands(problem, plan.tile))
    groups = {plan.group_bands, *(most >> halved for halved in range(most.bit_length()))}
    return [_posted(problem, lane, group) for group in sorted(groups)]


def _posted_bands(problem: Problem, tile: tuple[int, int]) -> int:
    """Bands that a rank has for another, at most."""
    evenly = problem.operator in ("matmul_all_reduce", TOKENS)  # whole bands, or splits that change
    return max(1, -(-(problem.m // problem.ranks if evenly else max(problem.shards)) // tile[0]))


def _post_parcels(problem: Problem, lane: str, tile: tuple[int, int], group_bands: int) -> tuple[tuple[int, int], ...]:
    """In how many parcels the bands travel that a rank has for another: groups of bands, or less where these are many
    bytes. One over `peer`, where tiles do by themselves."""
    if lane == "peer":
        return alike(1)
    if problem.operator == TOKENS:
        return alike(posts.PARCELS)  # how many bands there are, the call knows
    bands = _posted_bands(problem, tile)
    width = problem.k if problem.operator == "all_gather_matmul" else problem.n
    parts = max(-(-bands // group_bands), -(-bands * tile[0] * width * problem.item_size // _POSTED_BYTES))
    return alike(min(parts, bands, posts.PARCELS))


def _crowded(problem: Problem) -> bool:
    """Whether so many ranks of a group share a GPU that each has few SMs, and their products find no room in its cache
    unless all ranks read the same rows at the same time and CTAs keep in step. On an H200, eight ranks, gathers of
    K 8192 and 12288 took 422 to 12319 us in an order that all share, and up to 4 % less in step, but for one 1 % more;
    500 to 23261 with own rows first. Sums that nobody makes beside the products took 2 to 24 % less; in step, more.
    """
    return problem.together and problem.ranks > _UNCROWDED


def gather_forms(problem: Problem, lane: str) -> dict[str, Plan]:
    """The forms of a gather on a GPU that are worth trying, for the usual tile: rows brought before CTAs multiply,
    beside those that do, or by all of them at once (`brought.py`).

    Those that bring rows beside others wait for nobody, and are over then: so they need no SM that stays free. Nor do
    ranks of which each has few: they meet before such a call (`fabric/gate.py`), so nobody waits for a late one in it.
    """
    before = _fused(problem, lane)
    assert before.tile is not None
    found = {"before": before}
    if not problem.bulk:
        return found
    every = problem.multiprocessors
    bands = _usual_bands(problem, before.tile[0])
    if min(problem.shards) >= brought.BANDS * before.tile[0]:
        found["beside"] = replace(before, order="rotated", share=Share(every, _apart(every)))
    if before.pull and bands <= brought.AT_ONCE_BANDS:
        active = every if _crowded(problem) else max(1, every - _SPARE)
        whole = active // before.group_bands * before.group_bands  # a wave is then a whole block of tiles
        active = whole if 10 * whole >= 9 * active else active
        piece = fused.piece_of(problem.k, bands, active)
        found["at once"] = replace(before, order="rotated", share=Share(active, active), piece=piece)
    if _crowded(problem):
        found |= {name: replace(found[name], in_step=True) for name in ("beside", "at once") if name in found}
    return found


def scatter_forms(problem: Problem, lane: str) -> dict[str, Plan]:
    """The forms of a reduce_scatter on a GPU that are worth trying: sums made beside the products (`beside.py`), or
    passed from rank to rank (`chain.py`), where all CTAs wait, so that one SM stays free.

    On an H200, four ranks, M 8192: of K 2048, 3072 and 7168 a rank the chain took 1353, 2938 and 4660 us, sums beside
    1479, 3084 and 4687; of 12288 both took 11.95 to 12.0 ms.
    """
    beside = _fused(problem, lane)
    found = {"beside": beside}
    active = max(1, problem.multiprocessors - _SPARE)
    scatters = problem.operator == "matmul_reduce_scatter" and problem.bulk and beside.tile == chain.TILE
    if scatters and problem.ranks > 1 and chain.worthwhile(problem, beside, active):
        found["chain"] = replace(beside, order="rotated", share=Share(active))
    return found


def _apart(every: int) -> int:
    """CTAs of so many that sum or bring rows beside the others."""
    return max(1, every // _APART)


def _fused(problem: Problem, lane: str) -> Plan:
    """On a GPU: few rows have forms of their own, and who gathers has enough CTAs to bring the rows before the rest."""
    if problem.device == "cpu":
        tile = _tile(problem)
        if problem.operator == "matmul_all_reduce":  # every rank owns bands of it
            tile = max(1, min(tile[0], -(-problem.m // problem.ranks))), tile[1]
    else:
        evenly = problem.operator in ("matmul_all_reduce", "matmul_all_to_all")  # or by splits that change
        shortest = problem.m // problem.ranks if evenly else min(problem.shards)
        tile = fused_tile(problem, shortest)
    few: dict[str, Any] = {}
    if problem.device == "cuda" and problem.operator == "matmul_all_reduce" and problem.m <= fused.MOST_DECODE_ROWS:
        at_once = problem.m * problem.ranks <= _AT_ONCE_ROWS  # one way instead of two, but so many times the packets
        few = few_row_forms(problem)["at once" if at_once else "owners"]
        tile = few["tile"]
    piece, share, bands = 1024, Share(), 1
    loaders: int | None = 0
    pull = problem.operator == "all_gather_matmul" and problem.device == "cuda" and problem.together
    sums = problem.operator in ("matmul_reduce_scatter", "matmul_all_reduce")
    scatters = sums and problem.device == "cuda" and not few
    if problem.device == "cuda":  # an SM stays free where ranks wait for each other: other kernels must not
        active = max(1, problem.multiprocessors - (0 if scatters else _SPARE))
        bands = _usual_bands(problem, tile[0])
        waits = problem.operator in ("all_gather_matmul", "matmul_all_to_all")  # for rows, or the way back may
        if problem.operator == "matmul_reduce_scatter" and _crowded(problem):
            loaders = None  # one of so few would be missed: all of them sum in the end; not tried for all_reduce
        elif scatters:
            loaders = _apart(active)
        else:
            loaders = _loaders(active, 2 if pull else problem.ranks, bands) if waits else min(active, _MOVING)
        share = Share(active, loaders)
    if problem.operator == "all_gather_matmul":  # K of the others is each rank's own, and ranks must plan the same
        piece = fused.piece_of(problem.k, bands, loaders or 0 if problem.bulk else 0)  # narrow ones spill without TMA
    found = Plan(
        "fused",
        lane,
        _post_parcels(problem, lane, tile, 1),
        share,
        tile,
        group_bands=8,
        own_last=fused.own_last(problem, lane),
        piece=piece,
        pull=pull,
    )
    return replace(found, **few)


def few_row_forms(problem: Problem) -> dict[str, dict[str, Any]]:
    """What a plan says of few rows that each rank sends to all "at once", and where "owners" of columns sum them.

    On an H200, four ranks, N 8192, K 1024 and 3584, at once: one row took 21.2 and 57.0 us by tiles of its own, 22.7
    and 61.1 in blocks of 64 columns; four rows 24.0 and 62.6, in a trial of blocks of 32 columns 27 and 67. By owners
    64 rows took 33 and 75 us in blocks of 64 columns, 37 and 77 of 128, sixteen 30 and 70 of 128; weights that are
    asked for ahead, on half an SM, cost up to 18 us. That was where 32 CTAs share N evenly in blocks of any of these
    widths; where they would not, narrower blocks leave none of them idle.
    """
    tall = next(rows for rows in (16, 32, 64) if rows >= problem.m)
    every = problem.multiprocessors
    small = (tall, 64 if -(-problem.n // 64) >= every else 32)
    widths = [128, 64] if tall == 16 else [64]
    wide = min(widths, key=lambda wide: _most_columns(problem, max(1, every - _SPARE), wide))
    return {
        "at once": {
            "tile": fused.ROW_TILE if problem.m == 1 else small, "split": 1, "owners": "rows",
            "share": Share(every, min(every, fused.SUMMING)),
        },
        "owners": {
            "tile": (tall, wide), "split": 0, "owners": "columns",
            "share": Share(max(1, every - _SPARE), min(max(1, every - _SPARE), _MOVING)),
        },
    }  # fmt: skip


def _most_columns(problem: Problem, ctas: int, wide: int) -> int:
    """Of the CTA that has most, where so many share blocks of that width."""
    blocks = -(-problem.n // wide)
    return -(-blocks // ctas) * wide


def fused_tile(problem: Problem, rows: int) -> tuple[int, int]:
    """The GPU's tile for blocks of so many rows."""
    large, small, *_ = fused.gpu_tiles(problem)
    crowded = problem.ranks > 4 and not problem.bulk  # sums of many ranks need the registers
    unaligned = problem.operator == "matmul_all_to_all" and problem.n % 8 != 0  # as do addresses of single elements
    return small if rows <= small[0] or crowded or unaligned else large


def tokens_plan(problem: Problem, lane: str, rows: int) -> Plan:
    """A fused plan for rows that change ranks, in blocks of about so many rows for one rank and expert."""
    plan = fused_plan(problem, lane)
    if problem.device == "cpu":
        return plan
    plan = replace(plan, tile=fused_tile(problem, rows))
    return replace(plan, piece=fused.piece_of(problem.n)) if problem.mirrored else plan


def token_forms(problem: Problem, lane: str) -> list[Plan]:
    """The fused plans that are worth trying for rows that change ranks: by the tile for blocks of even size; and,
    where these are of several experts or arrive, by the other one, as blocks are as uneven as the data."""
    usual = problem.m // (problem.ranks * problem.experts)
    if problem.experts == 1 and not problem.mirrored:
        return [fused_plan(problem, lane)]
    large, small, *_ = fused.gpu_tiles(problem)
    found = [tokens_plan(problem, lane, rows) for rows in (usual, small[0], large[0])]
    return list(dict.fromkeys(found))


def _usual_bands(problem: Problem, block_m: int) -> int:
    """Bands of a shard, on average."""
    return max(1, sum(-(-rows // block_m) for rows in problem.shards) // max(1, problem.ranks))


def _loaders(active: int, ranks: int, bands: int) -> int:
    """CTAs that push rows before they join the others. Only what all ranks know decides, so not the columns. Rows that
    others pull are pushed once, as between two ranks.

    Pushing costs the same time of CTAs however many share it, but the more there are at once, the more they wait for
    memory; and the fewer, the longer the tiles of others' rows wait. A loader pushes a band to one rank in about the
    time of a tile (`fused_order.PUSHED`). So of shards of one band all push: rows are everywhere in a tenth of that.
    Of more bands as many fewer, and the others compute own tiles first. But enough that all is pushed in half the time
    of a product of 40 columns of tiles over all ranks, 10,240 at the usual tile: of ranks * bands * (40 / ranks) tiles
    on `active` CTAs, while (ranks - 1) * bands are pushed. Powers of two, which share the parts of bands evenly: on an
    H200, four ranks, 16 bands, 5 loaders took 9 % longer than 4 or 8; with 4 bands 16 were faster than 8.
    """
    least = max(2 * -(-active // bands) if bands > 1 else active, -(-active * (ranks - 1) // 20))
    return max(1, min(active, 1 << (least - 1).bit_length()))


def program_plan(problem: Problem, lane: str, program: str, parcels: int | None = None) -> Plan:
    """A signaled plan whose parcels a collective program moves: so many, or about PARCELS; always whole bands."""
    share = Share()
    if problem.device == "cuda":  # every CTA of a program must run at once, each on an SM that the matmul leaves free
        ctas = max(1, min(_PROGRAM_CTAS, problem.multiprocessors // 4))
        share = Share(multiprocessors=max(1, problem.multiprocessors - ctas), communication_ctas=ctas)
    plan = Plan("signaled", lane, ((0, 0),), share, _tile(problem), order=problem.order, program=program)
    grid = problem.grid(plan)
    bands = sum(grid.band_counts)
    usual = parcels is None or (parcels == PARCELS and bands >= PARCELS)
    stops = _stops(problem, bands) if usual else [stop for _, stop in split(bands, parcels or 1)]
    bounds = [stop * grid.columns for stop in stops]
    return replace(plan, parcels=_parcels(bounds), group_bands=max(1, min(8, bands)))


def _signaled(problem: Problem, lane: str, by_program: bool) -> Plan:
    tile = _tile(problem)
    share = _share(problem, lane)
    plan = Plan("signaled", lane, ((0, 0),), share=share, tile=tile, order=problem.order)
    grid = problem.grid(plan)
    group = max(1, min(8, sum(grid.band_counts)))
    if problem.order == "rotated":  # every source's rows in two halves
        longest = max(grid.band_counts, default=0)
        halves = split(longest, max(1, min(2, longest)))
        bounds = [source * longest + stop for source in range(problem.ranks) for _, stop in halves]
        return replace(plan, parcels=_parcels(bounds), group_bands=group)
    bands = sum(grid.band_counts)
    if bands >= PARCELS // 2:
        near = problem.device == "cuda" and lane == "peer" and problem.ranks > 1
        if by_program and near and problem.operator in _PROGRAMS:
            return program_plan(problem, lane, _PROGRAMS[problem.operator])
        bounds = [stop * grid.columns for stop in _stops(problem, bands, problem.both_sum)]
        return replace(plan, parcels=_parcels(bounds), group_bands=group)
    bounds = [stop for _, stop in split(grid.tiles, max(1, min(PARCELS, grid.tiles)))]
    return replace(plan, parcels=_parcels(bounds), group_bands=group, layout="packed")


def _embedding(problem: Problem, grain: str, lane: str) -> Plan:
    """Slices of each destination. A kernel that stores into peers' memory gains nothing from more than one; where the
    proxy moves what it posts, the link begins with the first."""
    stores = problem.device == "cuda" and lane == "peer"
    parts = {"chunked": CHUNKS, "signaled": PARCELS, "fused": 1 if stores else CHUNKS}.get(grain, 1)
    if grain == "serial" and lane == "dma":
        parts = min(_MOST_SERIAL, problem.result_bytes // _PIPELINED_BYTES)
    share = _share(problem, lane) if grain in ("chunked", "signaled") else Share()
    if grain in ("signaled", "fused") and (lane, problem.device) == ("dma", "cuda"):
        parts = max(2, min(PARCELS, problem.m * problem.n * problem.item_size // _COPIED_BYTES))
    parcels = split(problem.m, max(1, min(parts, problem.m)))
    return Plan(grain, lane, parcels, share, order=SLICES, own_last=grain in ("signaled", "fused"))


def _stops(problem: Problem, bands: int, both_sum: bool = False) -> list[int]:
    """Where about PARCELS parcels of so many bands end."""
    if problem.device == "cpu" and bands >= 2 * PARCELS:
        weights = _CPU_BOTH_WEIGHTS if both_sum else _CPU_WEIGHTS
        return sorted({max(1, bands * sum(weights[: one + 1]) // sum(weights)) for one in range(len(weights))})
    return [stop for _, stop in split(bands, max(1, min(PARCELS, bands)))]


def _share(problem: Problem, lane: str) -> Share:
    """On a GPU: all SMs but those that the lane and the sums need."""
    if problem.device == "cpu":
        return Share()
    reserved = min(_RESERVED[lane], problem.multiprocessors - 1)
    return Share(multiprocessors=problem.multiprocessors - reserved, communication_ctas=BESIDE_CTAS)


def _tile(problem: Problem) -> tuple[int, int]:
    if problem.device == "cuda":
        return _CUDA_TILE if problem.item_size == 2 else _CUDA_WIDE_TILE
    if problem.m < _CPU_BANDS:
        return 1, _CPU_COLUMNS
    return -(-problem.m // _CPU_BANDS), _CPU_ALL_COLUMNS


def _parcels(stops: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple(itertools.pairwise([0, *stops]))
