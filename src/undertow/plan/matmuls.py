"""How long matmuls take on a machine, whole ones and parcels of them. Equations only: nothing runs.

rate(c) are the operations per second of the machine's matmul on c workers, inside a full wave. A tile takes
`Work.overhead` + 2 block_m block_n k / (efficiency · rate(c) / c), a kernel ceil(tiles / c) such waves. Serial and
chunked matmuls are the library's: tiles of `LIBRARY_TILE`, without overhead. Both take as many times longer as the
machine's curves over k say. CPU threads have no waves of their own: there a matmul takes its operations at the rate,
and tails cost what they are. Where the machine tells its `copy_speed` or `read_speed`, no matmul is faster than its
operands can be read: a wave over g bands (those of a parcel, `group_bands` at most) reads g of x and c / g blocks of w.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from . import brought, fused
from .plan import EMBEDDING
from .problem import ITEM_SIZES

if TYPE_CHECKING:
    from .machine import Machine
    from .plan import Plan
    from .problem import Problem

LIBRARY_TILE = (128, 256)
"""What vendors' libraries use for large matmuls on recent GPUs: how their waves are counted."""
_COPY_SPEED = {"cpu": 4e9, "cuda": 2e12}  # bytes of result per second, until `Work.copy_speed` says better


def workers_of(problem: Problem, plan: Plan) -> int:
    """The SMs (threads) that the plan's matmul runs on."""
    share = plan.share.multiprocessors if plan.grain != "serial" else None
    every = min(problem.multiprocessors, share or problem.multiprocessors)
    apart = plan.grain == "fused" and problem.device == "cuda" and problem.operator != EMBEDDING
    if apart and (fused.form(problem, plan) == fused.SCATTER or fused.brought(problem, plan)):
        return fused.multiplying(every, plan)
    return every


def rate(problem: Problem, machine: Machine, workers: int) -> float:
    """Operations per second on so many workers inside a full wave, for the problem's dtype.

    The measured matmul had a last wave that was not full; a dtype of another size runs as much slower as it is larger.
    """
    curve = machine.gemm
    found = 2 * math.prod(curve.shape) / curve.seconds(workers)
    if curve.workers == "SMs":
        tiles = _tiles(curve.shape[0], curve.shape[1], LIBRARY_TILE)
        used = min(workers, curve.points[-1][0])
        found *= -(-tiles // used) * used / tiles
    return found * ITEM_SIZES.get(curve.dtype, problem.item_size) / problem.item_size


def tile_seconds(problem: Problem, machine: Machine, tile: tuple[int, int], workers: int) -> float:
    """What one tile takes while `workers` of them are computed at once."""
    tiles = max(1, sum(_tiles(rows, problem.n, tile) for rows in problem.shards))
    operations = 2 * tile[0] * tile[1] * problem.k if machine.gemm.workers == "SMs" else problem.flops / tiles
    work = machine.work
    seconds = work.overhead + operations * workers / (work.efficiency * rate(problem, machine, workers))
    seconds *= work.tile_factor(problem.k)
    return max(seconds, _reading(problem, machine, problem.m) / -(-tiles // workers))


def matmul_seconds(problem: Problem, machine: Machine, workers: int, rows: int) -> float:
    """A library's matmul of so many of the problem's rows; the lookups of so many samples."""
    if not rows:
        return 0.0
    if problem.operator == EMBEDDING:
        touched = rows * problem.n * (problem.k + 1) * problem.item_size
        part = workers / problem.multiprocessors
        return machine.launch_seconds + touched / (2 * copy_speed(machine) * part)
    seconds = library_seconds(problem, machine, workers, rows)
    seconds *= machine.work.library_factor(problem.k) * machine.work.rows_factor(rows)
    return machine.launch_seconds + max(seconds, _reading(problem, machine, rows))


def library_seconds(problem: Problem, machine: Machine, workers: int, rows: int) -> float:
    """The same by its waves and the machine's rate alone: no launch, no curves, no memory."""
    speed = rate(problem, machine, workers)
    if machine.gemm.workers != "SMs":
        return 2 * rows * problem.n * problem.k / speed
    waves = -(-_tiles(rows, problem.n, LIBRARY_TILE) // workers)
    return waves * workers * 2 * math.prod(LIBRARY_TILE) * problem.k / speed


def _reading(problem: Problem, machine: Machine, rows: int) -> float:
    """Seconds to read x and w and to write y once. 0: unknown."""
    speed = _read_speed(machine)
    if speed is None:
        return 0.0
    elements = rows * problem.k + problem.k * problem.n + rows * problem.n
    return elements * problem.item_size / speed


def _read_speed(machine: Machine) -> float | None:
    """Bytes per second that a rank's matmul can read; a copy reads and writes, so memory is twice as fast."""
    known = [one for one in (machine.work.read_speed, machine.work.copy_speed and 2 * machine.work.copy_speed) if one]
    return max(known, default=None)


def matmul_times(
    problem: Problem, plan: Plan, machine: Machine, bounds: Sequence[int], held: Sequence[int] | None = None
) -> list[float]:
    """What each parcel's part of the matmul takes, in their order. `held`: the tiles of each, if not by the bounds."""
    workers, extent = workers_of(problem, plan), max(1, bounds[-1])
    if plan.tile is None or problem.operator == EMBEDDING:
        times = [0.0] * (len(bounds) - 1)
        for rows in shards_of(problem, plan):
            cuts = [rows * bound // extent for bound in bounds]
            for at, (start, stop) in enumerate(itertools.pairwise(cuts)):
                times[at] += matmul_seconds(problem, machine, workers, stop - start)
        return times
    tile = plan.tile
    few = plan.grain == "fused" and problem.device == "cuda" and fused.form(problem, plan) == fused.DECODE
    if few:  # small CTAs, many to an SM, without pauses between them: as if each SM had one tile
        tile = (tile[0], -(-problem.n // workers))
    one = tile_seconds(problem, machine, tile, workers)
    tiles = sum(_tiles(rows, problem.n, tile) for rows in problem.shards)
    reached = [-(-tiles * bound // extent) for bound in bounds]
    parcels = held or [stop - start for start, stop in itertools.pairwise(reached)]
    ends = [-(-tiles // workers) * one for tiles in itertools.accumulate(parcels, initial=0)]
    if fused.at_once(plan) and brought.last_tiles(tiles, workers, plan):
        ends[-1] -= one * (1 - 1 / plan.split)
    times = [stop - start for start, stop in itertools.pairwise(ends)]
    walks = (plan.grain == "signaled" and plan.layout == "natural") or plan.posts(problem.device)  # group by group
    if machine.work.read_speed is not None and walks:
        slower = _streamed(problem, plan, machine.work.read_speed, one)
        times = [seconds + slower(tiles) for seconds, tiles in zip(times, parcels, strict=True)]
    return [machine.launch_seconds + times[0], *times[1:]] if times else []


def shards_of(problem: Problem, plan: Plan) -> Sequence[int]:
    """Rows of which each parcel of a library's matmul takes a part: those of every rank are a matmul each."""
    apart = plan.grain == "chunked" and problem.operator in ("matmul_reduce_scatter", "matmul_all_to_all")
    return problem.shards if apart else (problem.m,)


def _streamed(problem: Problem, plan: Plan, read_speed: float, wave: float) -> Callable[[int], float]:
    """Seconds that a parcel of so many tiles takes beyond its waves, as few bands share what is read of w."""
    assert plan.tile is not None
    workers, (rows, width) = workers_of(problem, plan), plan.tile
    columns = _tiles(1, problem.n, (1, width))
    row = problem.k * problem.item_size / read_speed

    def beyond(bands: int) -> float:
        """Of a wave over so many bands."""
        read = rows * bands + width * min(columns, workers / bands)
        return max(0.0, read * row - wave)

    whole = beyond(plan.group_bands)

    def slower(tiles: int) -> float:
        groups, rest = divmod(tiles, columns * plan.group_bands)
        seconds = groups * columns * plan.group_bands / workers * whole
        return seconds + (rest / workers * beyond(max(1, rest // columns)) if rest else 0.0)

    return slower


def _tiles(rows: int, columns: int, tile: tuple[int, int]) -> int:
    return -(-rows // tile[0]) * -(-columns // tile[1])


def copy_speed(machine: Machine) -> float:
    """Bytes of result per second that one rank's copy kernel moves: measured, or a guess for this kind of device."""
    if machine.work.copy_speed is not None:
        return machine.work.copy_speed
    return _COPY_SPEED[machine.device] / (machine.ranks if machine.shares_device else 1)
