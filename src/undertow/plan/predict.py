"""How long a plan will take on a machine. Equations only: nothing runs.

**Matmul.** `matmuls`: waves of tiles, or a library's kernels, by the machine's rate and curves.

**Communication.** Of B bytes of its product each of R ranks sends, and receives,

    all_reduce       2 (R - 1) / R B     in two phases, reduce and gather, each of half
    reduce_scatter     (R - 1) / R B
    all_to_all         (R - 1) / R B
    all_gather         (R - 1) / R B     B: bytes of the gathered input

and a phase of x bytes takes the lane's curve at x. Curves of whole collectives in the machine file go before that.

**Overlap.** `pipeline` with parcels ready at the ends of waves, slowdowns from `interference`, the costs of signals and
launches, and the skew between ranks. A packed result is unpacked at the end: bytes / copy_speed. all_gather_matmul is
the mirror image: the lane is the producer, tiles wait for rows. serial is one parcel, into however many its collective
is cut: lanes are measured with their own pipelining.

**Staged.** Where the machine tells of its copy engines, `dma` goes through host memory, and parcels pass stages of
which several are under way at once (`staged`); a parcel's collective alone would take longer than it adds. The host
enqueues one parcel after the other, chunks' matmuls among them. Libraries' matmuls of ranks that share a GPU take it
one after the other: the first rank may send while the others compute (`Work.stagger`).

**Lookups.** embedding_all_to_all has bags of k rows instead of a matmul: every row is read and every sum written once,
at twice the speed of a copy. What is fused moves while it is pooled, and takes as long as the longer of the two; but a
GPU's slices that are posted to the proxy leave as parcels do, and all that arrives is brought to its place in the end.

A parcel counts as its share of the tiles, tails and uneven splits notwithstanding; where parcels are fractions of every
rank's bands, as the bands that this gives.

**Fused.** Tiles move while others are computed, so the longer of the two counts, the matmul slowed by the lane. Where
they are posted, parcels of their bands pass the copy engines as those of `staged` do. What comes after is the last
tile's way (signal, skew), and what only one rank can do then: the owner reads all ranks' parts of its rows, for
all_reduce every rank copies the others' sums. Few rows are exchanged when they are multiplied, all at once. On a CPU
the thread that computes also moves: one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import chain, fused, pipeline, posted_steps, staged
from .machine import at
from .matmuls import copy_speed, matmul_times, shards_of, workers_of
from .pipeline import Step
from .plan import EMBEDDING

if TYPE_CHECKING:
    from .machine import Machine
    from .plan import Plan
    from .problem import Problem


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds. `gemm` and `communication` are each alone; `exposed` is what the call takes beyond its matmul."""

    gemm: float
    communication: float
    unpack: float
    total: float

    @property
    def exposed(self) -> float:
        return self.total - self.gemm


def predict(problem: Problem, plan: Plan, machine: Machine) -> Prediction:
    """The seconds of one call. The plan must fit the problem (`Plan.check`)."""
    if plan.grain == "fused" and problem.operator != EMBEDDING:
        return _fused(problem, plan, machine)
    if is_staged(problem, machine, plan.lane):
        return _staged(problem, plan, machine)
    parcels = plan.parcels if plan.grain != "serial" else ((0, plan.extent),)
    bounds = [0, *itertools.accumulate(stop - start for start, stop in parcels)]
    computing = matmul_times(problem, plan, machine, bounds)
    moving = [_moving(problem, plan, machine, start, stop, max(1, bounds[-1])) for start, stop in parcels]
    posts = plan.posts(problem.device)
    if plan.grain == "fused" and not posts:  # of embedding_all_to_all: rows are stored where they are wanted
        alone = sum(computing), sum(cost for cost, _ in moving)
        return Prediction(*alone, 0.0, max(alone) + machine.work.skew)
    steps, total = _steps(problem, plan, machine, computing, moving)
    producer_end, consumer_end = pipeline.run(total, steps)
    packed = plan.grain == "signaled" and plan.layout == "packed"
    unpack = unpack_seconds(problem, machine) if packed or posts else 0.0
    end = max(producer_end, consumer_end) + unpack
    return Prediction(sum(computing), sum(cost for cost, _ in moving), unpack, end)


def is_staged(problem: Problem, machine: Machine, lane: str) -> bool:
    """Whether the operator's parcels go over copy engines that the machine tells of."""
    return lane == "dma" and machine.engines is not None and problem.operator in staged.STAGES and problem.ranks > 1


def _staged(problem: Problem, plan: Plan, machine: Machine) -> Prediction:
    bounds = [0, *itertools.accumulate(stop - start for start, stop in plan.parcels)]
    call = Staging(problem, plan, machine)
    computing, pieces = call.computing(bounds), call.pieces(bounds)
    around = call.engines.call + call.engines.end
    where = problem.operator, problem.ranks, machine.shares_device
    alone = around + staged.last_arrival(call.engines, *where, pieces, [0.0] * len(pieces))
    packed = plan.grain == "signaled" and plan.layout == "packed"
    unpack = unpack_seconds(problem, machine) if packed else 0.0
    return Prediction(sum(computing), alone, unpack, around + call.end(bounds) + unpack)


class Staging:
    """A plan over copy engines, whatever the bounds of its parcels: what is known once is asked for many of them."""

    def __init__(self, problem: Problem, plan: Plan, machine: Machine) -> None:
        assert machine.engines is not None
        self.problem, self.plan, self.machine = problem, plan, machine
        self.serial, self.engines, self._slow = plan.grain == "serial", machine.engines, 1.0
        if not self.serial:
            self.engines, self._slow = beside_matmul(problem, plan, machine)
        self._host = self.engines.parcel_seconds(problem.operator)
        self.matmuls = len(shards_of(problem, plan))

    def computing(self, bounds: Sequence[int]) -> list[float]:
        """Seconds of each parcel's matmul; of the only one, where it is serial."""
        ends = [0, max(1, bounds[-1])] if self.serial else bounds
        return matmul_times(self.problem, self.plan, self.machine, ends, self._tiles(bounds))

    def pieces(self, bounds: Sequence[int]) -> list[float]:
        """Bytes that each parcel holds for each rank."""
        sizes = self._tiles(bounds) or [stop - start for start, stop in itertools.pairwise(bounds)]
        return [self.problem.result_bytes * one / max(1, sum(sizes)) / self.problem.ranks for one in sizes]

    def end(self, bounds: Sequence[int]) -> float:
        """When all has arrived, from the moment on when the host has begun to enqueue the matmul."""
        computing, pieces = self.computing(bounds), self.pieces(bounds)
        ready, early, now = [], [], 0.0
        stagger = self.machine.work.stagger if self.machine.shares_device and self.plan.tile is None else 0.0
        for number, seconds in enumerate(computing):
            if self.plan.grain == "chunked":  # its matmul is enqueued after the parcels before it
                now = max(now, number * self._host)
            now += self._slow * seconds
            ready.append(now)
            early.append(now - stagger * self._slow * seconds / self.matmuls)
        if self.serial:
            ready, early = ready * len(pieces), early * len(pieces)
        until = 0.0 if self.serial else now
        where = self.problem.operator, self.problem.ranks, self.machine.shares_device
        return max(now, staged.last_arrival(self.engines, *where, pieces, ready, until, early, self.largest(pieces)))

    def _tiles(self, bounds: Sequence[int]) -> list[int] | None:
        """Tiles of each parcel where it is a fraction of every rank's bands, of which there may be none."""
        problem, plan, extent = self.problem, self.plan, max(1, bounds[-1])
        if plan.tile is None or plan.order != "proportional" or plan.layout != "natural":
            return None
        columns, bands = -(-problem.n // plan.tile[1]), [-(-rows // plan.tile[0]) for rows in problem.shards]
        ends = [columns * sum(count * bound // extent for count in bands) for bound in bounds]
        return [stop - start for start, stop in itertools.pairwise(ends)]

    def largest(self, pieces: Sequence[float]) -> list[float] | None:
        """The most that each parcel holds for one rank, where parcels are bands that ranks have in turn."""
        problem, plan = self.problem, self.plan
        if plan.tile is None or plan.layout != "natural" or problem.operator != "matmul_reduce_scatter":
            return None
        band = problem.n * plan.tile[0] * problem.item_size
        return [min(piece * problem.ranks, math.ceil(piece / band - 1e-6) * band) for piece in pieces]


def beside_matmul(problem: Problem, plan: Plan, machine: Machine) -> tuple[staged.Engines, float]:
    """The engines while the plan's matmul runs, and how many times longer the matmul takes while they do."""
    assert machine.engines is not None
    workers, model = workers_of(problem, plan), machine.slowdowns
    lane = model.lane_slowdown(plan.lane, workers)
    engines = replace(
        machine.engines, out_speed=machine.engines.out_speed / lane, in_speed=machine.engines.in_speed / lane
    )
    speed = engines.in_speed / (problem.ranks if machine.shares_device else 1)
    return engines, model.gemm_slowdown(plan.lane, speed, workers)


def _fused(problem: Problem, plan: Plan, machine: Machine) -> Prediction:
    (gemm,) = matmul_times(problem, plan, machine, [0, 1])
    gathers = problem.operator == "all_gather_matmul"
    nbytes = problem.m * problem.k * problem.item_size if gathers else problem.result_bytes
    communication, speed = collective_seconds(problem, machine, plan.lane, nbytes)
    if plan.pull:  # each rank's rows are copied once
        communication /= max(1, problem.ranks - 1)
    if posts_to_engines(problem, plan, machine):
        return _posted(problem, plan, machine, gemm)
    if machine.device == "cpu" or fused.form(problem, plan) in fused.OF_FEW_ROWS:
        return Prediction(gemm, communication, 0.0, gemm + communication)
    after = fused_rest_seconds(problem, machine, sums=not chain.chained(problem, plan))
    if gathers and fused.at_once(plan):  # nothing is multiplied before rows are there
        return Prediction(gemm, communication, 0.0, gemm + communication + after)
    slow = machine.slowdowns.gemm_slowdown(
        plan.lane, speed, workers_of(problem, plan), plan.share.communication_ctas or 0
    )
    both = min(gemm * slow, communication)  # seconds in which both run
    # What the last wave made moves after it, and nothing before the first is over. Rows that are gathered move at once.
    waves = math.inf if gathers else max(1, problem.grid(plan).waves(workers_of(problem, plan)))
    if plan.posts(problem.device):
        waves = problem.ranks * len(plan.parcels)
    total = max(gemm + both * (1 - 1 / slow) + communication / waves, communication + gemm / waves) + after
    return Prediction(gemm, communication, 0.0, total)


def posts_to_engines(problem: Problem, plan: Plan, machine: Machine) -> bool:
    """Whether a fused matmul's bands are posted, and moved by copy engines that the machine tells of."""
    known = problem.operator in posted_steps.OPERATORS and plan.lane == "dma" and machine.engines is not None
    return known and plan.posts(problem.device)


def own_copy_seconds(problem: Problem, machine: Machine) -> float:
    """A gather's own rows are copied to where they are posted from."""
    return problem.m * problem.k * problem.item_size / problem.ranks / copy_speed(machine)


def _posted(problem: Problem, plan: Plan, machine: Machine, gemm: float) -> Prediction:
    """Bands that are posted pass the copy engines parcel by parcel, one rank's after the other's. Sums of an all_reduce
    are as many posts again, behind all others."""
    engines, slow = beside_matmul(problem, plan, machine)
    steps, gemm = posted_steps.steps_of(problem, plan), slow * gemm
    gathers = problem.operator == "all_gather_matmul"
    copied = own_copy_seconds(problem, machine) if gathers else 0.0
    count = max(1, len(steps.nbytes))
    ready = [copied * (at + 1) / count + gemm * made for at, made in enumerate(steps.made)]

    def arrived(ready: list[float]) -> float:
        shared = machine.shares_device
        return staged.last_arrival(engines.ahead, staged.POSTS, problem.ranks, shared, steps.nbytes, ready)

    phases = 2 if problem.operator == "matmul_all_reduce" else 1
    alone = arrived([0.0] * len(steps.nbytes))
    waiting = gemm * (1 - max(steps.needed[-1:], default=1.0))  # tiles behind what lands last
    last = arrived(ready) + (phases - 1) * alone + waiting
    after = fused_rest_seconds(problem, machine)
    if not gathers:
        after /= problem.ranks * len(plan.parcels)  # sums are made as parcels land
    return Prediction(gemm, phases * alone, 0.0, max(copied + gemm, last) + after)


def fused_rest_seconds(problem: Problem, machine: Machine, sums: bool = True) -> float:
    """What a fused call does when its last tile is computed: that tile's way, and `sums` unless they went with it."""
    signal = machine.stream_seconds if machine.work.signal is None else machine.work.signal
    passes = {"matmul_reduce_scatter": 0.5, "matmul_all_reduce": 1.5, "matmul_all_to_all": 1.0}  # a copy is 1
    rest = sums * passes.get(problem.operator, 0.0) * problem.result_bytes / copy_speed(machine)
    return signal + machine.work.skew + rest


def signal_seconds(plan: Plan, machine: Machine) -> float:
    """From a complete parcel to the start of its call: nothing on the same stream, a hop to another, a signal."""
    if plan.grain == "serial":
        return 0.0
    if plan.grain == "chunked" or machine.work.signal is None:
        return machine.stream_seconds
    return machine.work.signal


# -- communication -------------------------------------------------------------------------------------------------


def collective_seconds(problem: Problem, machine: Machine, lane: str, nbytes: float) -> tuple[float, float]:
    """Seconds of the operator's collective on `nbytes` of each rank's product, and bytes per second each way."""
    ranks = problem.ranks
    if ranks == 1 or nbytes <= 0:
        return 0.0, 0.0
    phases = 2 if problem.operator == "matmul_all_reduce" else 1
    moved = (ranks - 1) / ranks * nbytes
    measured = machine.collectives.get(problem.operator, {}).get(lane)
    if measured is not None:
        seconds = at(measured, max(1, round(nbytes)))
    else:
        seconds = phases * machine.lane(lane).seconds(max(1, round(moved)))
    return seconds, phases * moved / seconds


def unpack_seconds(problem: Problem, machine: Machine) -> float:
    """Bringing a packed result into natural order: one pass over what this rank keeps."""
    held = problem.result_bytes / (problem.ranks if problem.operator == "matmul_reduce_scatter" else 1)
    return machine.launch_seconds + held / copy_speed(machine)


def _moving(problem: Problem, plan: Plan, machine: Machine, start: int, stop: int, extent: int) -> tuple[float, float]:
    """Seconds and bytes per second of a parcel's communication."""
    share = (stop - start) / extent
    if problem.operator != "all_gather_matmul":
        return collective_seconds(problem, machine, plan.lane, problem.result_bytes * share)
    nbytes = problem.m * problem.k * problem.item_size * share
    if plan.grain in ("signaled", "fused"):
        if (stop - 1) * problem.ranks < extent:  # this rank's own rows
            return 0.0, 0.0
        nbytes *= problem.ranks / max(1, problem.ranks - 1)  # all of it is moved, of a collective all but 1/R
    return collective_seconds(problem, machine, plan.lane, nbytes)


# -- both ----------------------------------------------------------------------------------------------------------


def _steps(
    problem: Problem, plan: Plan, machine: Machine, computing: list[float], moving: list[tuple[float, float]]
) -> tuple[list[Step], float]:
    """The pipeline's parcels, and the seconds of its producer."""
    workers, model = workers_of(problem, plan), machine.slowdowns
    ctas = plan.share.communication_ctas or 0
    signal = signal_seconds(plan, machine)
    lane = model.lane_slowdown(plan.lane, workers)
    launch = machine.launch_seconds
    if problem.operator == "all_gather_matmul":
        sending = [cost + launch if cost else 0.0 for cost, _ in moving]
        ready = itertools.accumulate(sending)
        arrives = [moment + machine.work.skew if cost else 0.0 for moment, cost in zip(ready, sending, strict=True)]
        signals = [signal if cost else 0.0 for cost in sending]
        # While one parcel is multiplied others move, so the matmul slows by the lane's usual speed.
        slow = model.gemm_slowdown(plan.lane, max((speed for _, speed in moving), default=0.0), workers, ctas)
        arriving = zip(arrives, computing, signals, strict=True)
        return [Step(moment, cost, lane, slow, late) for moment, cost, late in arriving], sum(sending)
    gemm = [model.gemm_slowdown(plan.lane, speed, workers, ctas) for _, speed in moving]
    ready = itertools.accumulate(computing)
    parcels = zip(ready, moving, gemm, strict=True)
    return [
        Step(moment + machine.work.skew, cost, slow, lane, signal if cost else 0.0, launch if cost else 0.0)
        for moment, (cost, _), slow in parcels
    ], sum(computing)
