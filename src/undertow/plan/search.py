"""Which plans are worth trying: the best parcels by dynamic programming, and fixed ones beside them.

**All groupings of waves.** Parcels may end where a wave ends. Let u cuts be possible, cut 0 before the first tile. A
state at cut j is what `pipeline` says when everything before j has been sent: (time, lag). The states at j come from
those at all i < j by sending i..j as one parcel:

    states(j) = those of { advance(state, parcel i..j) : i < j, state in states(i) } that no other beats in time and lag

`pipeline` proves that the end is monotone in both, so a beaten state is part of no better plan: the best state at the
last cut is the best of all 2^(u-1) groupings. Where 1/p + 1/c < 1, overlap loses to serial, and serial is a candidate
anyway. A cut keeps at most `_STATES` states, spread over their range, which matters only where slowdowns are strong.
Over copy engines (`staged`) several parcels are under way at once, so that is no state: there `climb` looks for cuts.

**Fused plans** have no parcels to group; a few stand beside the others. Over copy engines, where nobody can store into
others' memory, they post their tiles, group by group of more or fewer bands.

**Fixed ones**: equal parcels of 1 to 32 waves, growing, shrinking, two chunks, FlashOverlap's rule, serial; over copy
engines serial and chunks are cut as the model thinks best, too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import brought, climb, flash_overlap, fused, pipeline
from .defaults import (
    BESIDE_CTAS,
    default_plan,
    few_row_forms,
    fused_plan,
    gather_forms,
    posted_forms,
    scatter_forms,
    token_forms,
)
from .matmuls import LIBRARY_TILE, matmul_seconds, tile_seconds, workers_of
from .pipeline import Step, advance
from .plan import EMBEDDING, TOKENS, Plan, Share, split
from .predict import Prediction, Staging, collective_seconds, is_staged, predict, signal_seconds
from .tiles import TileGrid

if TYPE_CHECKING:
    from .machine import Machine
    from .problem import Problem

Floats = NDArray[np.float64]
Parcels = tuple[tuple[int, int], ...]
MOST_CUTS = 200
LONGEST_PARCEL = 32
_STATES = 12
_ROW_CUTS = 64  # at most: where rows may be cut
_NOTHING = 5e-4
_CHUNKS = (2, 4, 8)
_SEARCHED = ("best", "serial, planned", "chunks, planned")
_FLATTERED = 0.02  # of many cuts that were tried, those are found best that the model's errors flatter most
_CLEARLY = 0.1
_GROUP_BANDS = 8
_GPU_TILES = ((128, 256), (128, 128), (64, 128), (64, 64))
_WIDE_GPU_TILES = ((64, 128), (64, 64))  # fp32: no tensor cores, many registers
_GATHER_PARTS = (1, 2, 4, 8)
_LOADERS = (4, 8, 16, 32)
_MOST_PARTS = 16  # of few rows, that a CTA waits for together


def candidates(problem: Problem, machine: Machine, lanes: Sequence[str]) -> list[Plan]:
    """Plans for `problem`, those predicted to be fastest first; serial is always among them."""
    return [plan for plan, _ in ranked(problem, machine, lanes)]


def ranked(problem: Problem, machine: Machine, lanes: Sequence[str]) -> list[tuple[Plan, Prediction]]:
    """The candidates with what they are predicted to take. Lanes that the machine does not know are left out."""
    known = [lane for lane in lanes if lane in machine.lanes] or list(machine.lanes)
    every = [item for lane in known for item in fixed(problem, machine, lane).items()]
    plans = [plan for _, plan in every]
    if "peer" in known:  # who can store into all ranks' memory need not post to a proxy, whose thread would stay
        plans = [plan for plan in plans if not plan.posts(problem.device)]
    plans += fused_plans(problem) if "peer" in known else []
    unique = {
        plan.digest: plan for plan in plans if is_even(problem, plan) or not is_staged(problem, machine, plan.lane)
    }
    regular = {plan.digest for name, plan in every if name not in _SEARCHED}
    searched = {plan.digest for name, plan in every if name in _SEARCHED and is_staged(problem, machine, plan.lane)}
    found = [(plan, predict(problem, plan, machine)) for plan in unique.values()]

    def place(one: tuple[Plan, Prediction]) -> tuple[float, bool]:
        serial = one[0].grain == "serial"  # others are measured against it, so the usual one comes first
        flattered = (_CLEARLY if serial else _FLATTERED) * (one[0].digest in searched - regular)
        return one[1].total * (1 + flattered), not serial  # ties go to serial

    return sorted(found, key=place)  # stable


def fixed(problem: Problem, machine: Machine, lane: str) -> dict[str, Plan]:
    """Every candidate over one lane, by name: "serial", "chunks of 2", "equal 7", "growing", "best", ..."""
    found = {"serial": default_plan(problem, "serial", lane)}
    if problem.ranks == 1 or problem.m * problem.n == 0:
        return found
    if is_staged(problem, machine, lane):
        together = problem.ranks if problem.operator != "matmul_all_reduce" else 1  # rows of each are a matmul
        bands = max(1, min(_ROW_CUTS, problem.m // (LIBRARY_TILE[0] * together)))
        for name, grain, count in (("serial, planned", "serial", _ROW_CUTS), ("chunks, planned", "chunked", bands)):
            cuts = sorted({problem.m * one // count for one in range(count + 1)})
            found[name] = _climbed(problem, machine, Plan(grain, lane, ((0, problem.m),)), cuts)
    if problem.operator == EMBEDDING:
        return found | _slices(problem, lane)
    for parts in _CHUNKS:
        if problem.m >= parts:
            found[f"chunks of {parts}"] = Plan("chunked", lane, split(problem.m, parts))
    if problem.mirrored:  # nothing is signaled where rows are multiplied when they came
        return found
    if problem.device == "cuda" and lane == "dma" and problem.operator != TOKENS and not fused.why_not(problem, lane):
        found |= {f"posted by {plan.group_bands}": plan for plan in posted_forms(problem, lane)}
    if problem.operator == "all_gather_matmul":
        return found | _gathering(problem, lane)
    frame = _best_frame(problem, machine, lane)
    cuts = wave_cuts(problem, frame)
    for name, ends in _groupings(len(cuts) - 1):
        found[name] = _cut(frame, [cuts[end] for end in ends])
    found["best"] = dataclasses.replace(frame, parcels=best_parcels(problem, machine, frame))
    found["flash overlap"] = flash_overlap_plan(problem, machine, frame)
    return found


def fused_plans(problem: Problem) -> list[Plan]:
    """Fused plans for this problem on a GPU. None on a CPU: there a thread that moves its own tiles hides nothing."""
    matmul = problem.operator != EMBEDDING
    if not matmul or problem.device == "cpu" or problem.ranks == 1 or fused.why_not(problem, "peer"):
        return []
    first = fused_plan(problem, "peer")
    found = [first]
    if problem.operator == "all_gather_matmul":
        found += _gathers(problem)
    elif problem.operator == TOKENS:
        found = token_forms(problem, "peer")
    elif problem.operator == "matmul_reduce_scatter":
        found += scatter_forms(problem, "peer").values()
    elif fused.form(problem, first) in fused.OF_FEW_ROWS and first.tile is not None:
        found += [dataclasses.replace(first, **other) for other in _other_ways(problem, first)]
    return list({plan.digest: plan for plan in found}.values())


def _gathers(problem: Problem) -> list[Plan]:
    """Every form of a fused gather."""
    forms = gather_forms(problem, "peer")
    found = list(forms.values())
    before, at_once = forms["before"], forms.get("at once")
    counts = {min(ctas, before.share.multiprocessors or ctas) for ctas in _LOADERS}
    for ctas in sorted(counts):  # more CTAs that push bring the rows sooner, and compute less
        found.append(dataclasses.replace(before, share=dataclasses.replace(before.share, communication_ctas=ctas)))
    found += brought.fuller_waves(problem, at_once) if at_once is not None else []
    if problem.together:  # pushing takes more of the memory they share, and reads less often what is far
        found.append(gather_forms(dataclasses.replace(problem, together=False), "peer")["before"])
    return found


def _other_ways(problem: Problem, first: Plan) -> list[dict[str, Any]]:
    """What else few rows may be multiplied and summed by: other columns of a tile, the other exchange; and, where CTAs
    would be idle, K in two parts."""
    assert first.tile is not None
    rows, columns = first.tile
    forms = few_row_forms(problem)
    other = (32 if columns == 64 else 64) if first.split else (64 if columns > 64 else 128)
    found: list[dict[str, Any]] = [{"tile": (max(16, rows), other)}, forms["owners" if first.split else "at once"]]
    active = first.share.multiprocessors or problem.multiprocessors
    if first.split and 2 * -(-problem.n // columns) <= active and 2 * problem.ranks <= _MOST_PARTS:
        found.append({"split": 2})
    return found


def _slices(problem: Problem, lane: str) -> dict[str, Plan]:
    """Of embedding_all_to_all: chunks, a kernel whose slices leave as they finish, one that stores or posts them."""
    found = {}
    for grain in ("chunked", "signaled", "fused"):
        base = default_plan(problem, grain, lane)
        stores = grain == "fused" and problem.device == "cuda" and lane == "peer"
        counts = {len(base.parcels), *(() if stores else _CHUNKS)}
        for parts in sorted(counts):
            if 1 <= parts <= problem.m:
                found[f"{grain} {parts}"] = dataclasses.replace(base, parcels=split(problem.m, parts))
    return found


# -- parcels -----------------------------------------------------------------------------------------------------------


def wave_cuts(problem: Problem, plan: Plan, even: bool = False) -> list[int]:
    """Where parcels may end: where a wave ends; with natural layout, after the bands complete by then. `MOST_CUTS`.

    `even`: only where the parcels before hold as many bands of every rank.
    """
    grid, workers = problem.grid(plan), workers_of(problem, plan)
    unit = grid.columns if plan.layout == "natural" else 1
    unit *= _bands_in_turn(problem, plan) if even else 1
    ends = [wave * workers // unit * unit for wave in range(grid.waves(workers))]
    cuts = sorted({0, grid.tiles, *ends})
    if len(cuts) <= MOST_CUTS + 1:
        return cuts
    return sorted({cuts[index * (len(cuts) - 1) // MOST_CUTS] for index in range(MOST_CUTS + 1)})


def is_even(problem: Problem, plan: Plan) -> bool:
    """Whether every parcel holds as many bands of every rank: then all sum as much, and one copy brings all pieces."""
    if plan.grain != "signaled" or plan.layout != "natural" or plan.tile is None:
        return True
    unit = problem.grid(plan).columns * _bands_in_turn(problem, plan)
    return all(stop % unit == 0 for _, stop in plan.parcels)


def _bands_in_turn(problem: Problem, plan: Plan) -> int:
    """After how many bands every rank has had one: 1 where it does not matter, or never comes out even."""
    bands = set(problem.grid(plan).band_counts)
    in_turn = plan.layout == "natural" and plan.order in ("interleaved", "proportional")
    return problem.ranks if in_turn and len(bands) == 1 else 1


def best_parcels(problem: Problem, machine: Machine, plan: Plan) -> Parcels:
    """The parcels of `plan`'s tile, layout, lane and share that are predicted to end first."""
    cuts = np.array(wave_cuts(problem, plan, is_staged(problem, machine, plan.lane)), dtype=np.int64)
    if len(cuts) < 2:
        return ((0, int(cuts[-1])),)
    assert plan.tile is not None  # wave_cuts would have refused
    if is_staged(problem, machine, plan.lane):
        return _climbed(problem, machine, plan, [int(cut) for cut in cuts]).parcels
    workers, tiles = workers_of(problem, plan), int(cuts[-1])
    one = tile_seconds(problem, machine, plan.tile, workers)
    ready = np.asarray(machine.launch_seconds + -(-cuts // workers) * one, dtype=np.float64)
    sizes, where = np.unique(np.maximum(0, cuts[None, :] - cuts[:, None]), return_inverse=True)
    times = [collective_seconds(problem, machine, plan.lane, problem.result_bytes * size / tiles) for size in sizes]
    model, ctas = machine.slowdowns, plan.share.communication_ctas or 0
    slow = [model.gemm_slowdown(plan.lane, speed, workers, ctas) for _, speed in times]
    shape = len(cuts), len(cuts)
    grouping = Grouping(
        ready + machine.work.skew,
        np.array([seconds for seconds, _ in times])[where].reshape(shape),
        np.array(slow)[where].reshape(shape),
        model.lane_slowdown(plan.lane, workers),
        float(ready[-1]),
        signal_seconds(plan, machine),
        machine.launch_seconds,
    )
    ends = fewer_cuts(grouping, best_cuts(grouping))
    return tuple(itertools.pairwise([0, *(int(cuts[end]) for end in ends)]))


def _climbed(problem: Problem, machine: Machine, plan: Plan, cuts: Sequence[int]) -> Plan:
    """The plan with parcels that end at some of `cuts`.

    Over copy engines several parcels are under way at once, and no state at a cut says what is best to have.
    """
    call = Staging(problem, plan, machine)

    def end(chosen: climb.Cuts) -> float:
        return call.end([0, *(cuts[one] for one in chosen)])

    return _cut(plan, [cuts[one] for one in climb.best(len(cuts) - 1, end)])


class Grouping(NamedTuple):
    """What grouping is about: `ready[j]` is when the producer reaches cut j, the matrices [i, j] are of parcel i..j."""

    ready: Floats
    cost: Floats
    producer_slowdown: Floats
    consumer_slowdown: float
    total: float
    signal: float = 0.0
    launch: float = 0.0

    def step(self, start: Any, stop: int) -> Step:
        """Parcel start..stop; of many starts, a step of arrays."""
        cost, slow = self.cost[start, stop], self.producer_slowdown[start, stop]
        return Step(self.ready[stop], cost, slow, self.consumer_slowdown, self.signal, self.launch)


def fewer_cuts(grouping: Grouping, ends: list[int]) -> list[int]:
    """`ends` without the cuts that gain next to nothing: many groupings are equally good, and fewer calls are safer."""
    ready, cost = grouping.ready.tolist(), grouping.cost.tolist()
    slow, rest = grouping.producer_slowdown.tolist(), (grouping.consumer_slowdown, grouping.signal, grouping.launch)

    def run(state: tuple[float, float], cuts: list[int]) -> tuple[float, float]:
        pairs = itertools.pairwise(cuts)
        steps = [Step(ready[stop], cost[start][stop], slow[start][stop], *rest) for start, stop in pairs]
        return pipeline.run(grouping.total, steps, *state)

    state, kept = (0.0, 0.0), [0]
    allowed = max(run(state, [0, *ends])) * (1 + _NOTHING)
    for index, end in enumerate(ends[:-1]):
        if max(run(state, [kept[-1], *ends[index + 1 :]])) > allowed:
            producer_end, time = run(state, [kept[-1], end])
            state = time, producer_end - grouping.total
            kept.append(end)
    return [*kept[1:], ends[-1]]


def best_cuts(grouping: Grouping) -> list[int]:
    """The cuts after which parcels end, the last included, with the earliest end of everything."""
    last = len(grouping.ready) - 1
    room = 1 + last * _STATES
    time, lag, at, parent = np.zeros(room), np.zeros(room), np.zeros(room, np.int64), np.zeros(room, np.int64)
    count, final = 1, 0
    for cut in range(1, last + 1):
        ends, lags = advance(time[:count], lag[:count], grouping.total, grouping.step(at[:count], cut))
        if cut == last:
            final = int(np.argmin(np.maximum(ends, grouping.total + lags)))
            break
        keep = _unbeaten(ends, lags)
        new = slice(count, count + len(keep))
        time[new], lag[new], at[new], parent[new] = ends[keep], lags[keep], cut, keep
        count += len(keep)
    found = [last]
    while at[final]:
        found.append(int(at[final]))
        final = int(parent[final])
    return found[::-1]


def _unbeaten(ends: Floats, lags: Floats) -> NDArray[np.int64]:
    """Indices of the states that no other beats in both, at most `_STATES` of them, the earliest and the last kept."""
    first = int(np.argmin(ends))
    rivals = np.flatnonzero(lags < lags[first])  # all others are later and have lost as much
    if not len(rivals):
        return np.array([first])
    rivals = rivals[np.argsort(ends[rivals], kind="stable")]
    lowest = np.minimum.accumulate(np.concatenate([[lags[first]], lags[rivals][:-1]]))
    front = np.concatenate([[first], rivals[lags[rivals] < lowest]])
    if len(front) > _STATES:
        front = front[np.linspace(0, len(front) - 1, _STATES).astype(np.int64)]
    return front


def _groupings(waves: int) -> Iterable[tuple[str, list[int]]]:
    """Names and ends, in waves, of the fixed groupings."""
    for length in range(1, min(LONGEST_PARCEL, waves) + 1):
        yield f"equal {length}", [*range(length, waves, length), waves]
    doubling = [end for end in (2**power - 1 for power in range(1, 64)) if end < waves]
    yield "growing", [*doubling, waves]
    yield "shrinking", [*(waves - end for end in reversed(doubling)), waves]


def _cut(frame: Plan, ends: Sequence[int]) -> Plan:
    return dataclasses.replace(frame, parcels=tuple(itertools.pairwise([0, *ends])))


def flash_overlap_plan(problem: Problem, machine: Machine, frame: Plan) -> Plan:
    """What FlashOverlap's rule would choose: two SMs set aside, no thought of contention; packed, as its tiles are."""
    tiles, all_workers = problem.grid(frame).tiles, problem.multiprocessors
    parcels = flash_overlap.choose(
        tiles,
        all_workers,
        matmul_seconds(problem, machine, all_workers, problem.m),
        lambda held: collective_seconds(problem, machine, frame.lane, problem.result_bytes * held / tiles)[0],
    )
    workers = max(1, all_workers - flash_overlap.SET_ASIDE)
    share = dataclasses.replace(frame.share, multiprocessors=workers, communication_ctas=flash_overlap.SET_ASIDE)
    if problem.device == "cpu":
        share = frame.share
    layout = "packed" if problem.grid(frame).columns > 1 else "natural"
    return dataclasses.replace(frame, layout=layout, share=share, parcels=parcels)


# -- everything but the parcels ----------------------------------------------------------------------------------------


def frames(problem: Problem, lane: str) -> list[Plan]:
    """Plans of one parcel for each layout and SM budget that a signaled plan may have over this lane."""
    tile = _tile(problem)
    grid = TileGrid(problem.m, problem.n, *tile, problem.shards)
    layouts = ["natural"] if grid.columns == 1 else ["natural", "packed"]
    bands = 1
    if problem.device == "cuda":
        bands = -(-_GROUP_BANDS // len(problem.shards)) * len(problem.shards)
    return [
        Plan(
            "signaled",
            lane,
            ((0, grid.tiles),),
            share,
            tile=tile,
            group_bands=bands,
            order=problem.order,
            layout=layout,
        )
        for share, layout in itertools.product(_shares(problem, lane), layouts)
    ]


def _shares(problem: Problem, lane: str) -> list[Share]:
    """SM budgets. A lane or a reduction that runs on SMs needs some that the persistent matmul does not hold.

    A matmul on all SMs would let them run only when it ends, or, where its tiles wait for them, never.
    """
    if problem.device == "cpu":
        return [Share()]
    every = problem.multiprocessors
    sums = problem.operator in ("matmul_all_reduce", "matmul_reduce_scatter")
    aside = sorted({min(max(1, every // part), every - 1) for part in (32, 16, 8)} - {0})
    ctas = {count: BESIDE_CTAS if lane == "dma" else count for count in aside}  # beside copy engines only sums run
    found = [Share(multiprocessors=every - count, communication_ctas=ctas[count]) for count in aside]
    if lane == "dma" and not sums:
        found.insert(0, Share())
    return found or [Share()]


def _tile(problem: Problem) -> tuple[int, int]:
    """GPU: the largest that gives every SM a tile. CPU: whole bands, some dozens; columns where rows are few."""
    if problem.device == "cuda":
        tiles = _GPU_TILES if problem.item_size == 2 else _WIDE_GPU_TILES
        for tile in tiles:
            if TileGrid(problem.m, problem.n, *tile, problem.shards).tiles >= problem.multiprocessors:
                return tile
        return tiles[-1]
    if problem.m >= 128:
        return max(16, -(-problem.m // 64)), problem.n
    return max(1, min(16, problem.m)), max(1, min(problem.n, max(64, -(-problem.n // 16))))


def _best_frame(problem: Problem, machine: Machine, lane: str) -> Plan:
    """The layout and share whose best equal parcels are predicted to end first.

    Over copy engines the usual ones, parcels as rows lie and fewest SMs aside, unless others are clearly faster: they
    have costs that no equation here has (a full GPU, tiles that are packed).
    """
    usual: Plan | None = None
    if is_staged(problem, machine, lane):
        aside = [one for one in frames(problem, lane) if one.layout == "natural" and one.share.multiprocessors]
        usual = next(iter(aside), None)

    def end(frame: Plan) -> float:
        cuts = wave_cuts(problem, frame)
        lengths = sorted({1, 2, 4, 8, max(1, len(cuts) // 2), len(cuts) - 1})
        return min(
            predict(problem, _cut(frame, [*cuts[length:-1:length], cuts[-1]]), machine).total for length in lengths
        ) * (1 if usual in (None, frame) else 1 + _CLEARLY)

    return min(frames(problem, lane), key=end)


def _gathering(problem: Problem, lane: str) -> dict[str, Plan]:
    """all_gather_matmul: each rank's rows in so many parcels."""
    found = {}
    for frame in frames(problem, lane):
        if frame.layout == "packed":
            continue
        grid = problem.grid(frame)
        bands = max(grid.band_counts)
        for parts in (one for one in _GATHER_PARTS if one <= bands):
            inside = [(start * grid.columns, stop * grid.columns) for start, stop in split(bands, parts)]
            step = bands * grid.columns
            parcels = tuple((turn * step + a, turn * step + b) for turn in range(problem.ranks) for a, b in inside)
            name = f"parcels of 1/{parts}, {frame.share.multiprocessors or 'all'} workers"
            found[name] = dataclasses.replace(frame, parcels=parcels)
    return found
