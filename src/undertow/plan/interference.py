"""How much computing and communication slow each other: one model, for planner, advice and simulator.

Let S be the multiprocessors of the machine, c those the computation (a matmul, as a rule) runs on, s those the lane's
kernels run on (0 for copy engines), b the bytes per second that the lane moves when it is alone, and m, between 0 and
1, the part of the memory's bandwidth that the computation wants: near 0 for a large matmul, 1 for a copy. While both
run, each takes longer:

    computation   1 + contention · max(0, c + s - S) / c + (per_byte + per_byte_of_memory · m) · b
    lane          1 + (crowding + crowding_of_memory · m) · c / S

`contention`: what it costs when both want the same SMs, as a share of the computation's SMs. `per_byte`: what each byte
per second costs it, through shared memory bandwidth. `crowding`: how much the lane loses to a computation on all SMs.
What names memory comes on top where the computation itself lives on it. Slowdowns hold only while both run, so with
times g and l alone and slowdowns x and y the two together take (`together`)

    if g x <= l y:   g x + l - g x / y         else the same with the sides exchanged

On a CPU read "threads" for SMs. A lane that behaves differently under different rules (urgent streams, bounded grids)
has an effect for each, under a name of its own.

`fit` takes measurements, each a `Sample`: one matmul and one lane, each alone and beside the other. Both laws are
linear in their parameters, so least squares finds them; none is negative, since nothing gets faster by company.
`fit_runs` takes whole runs instead, each a `Run`: both once, at the same time. There it is the time of both that must
come out right, in proportion, which is not linear: a search over all parameters of an effect.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument

_SWEEPS = 300  # over the parameters, in one search: more bring nothing


@dataclass(frozen=True, slots=True)
class Effect:
    """What a computation and one lane do to each other: the parameters of the module's equations."""

    contention: float = 0.0
    per_byte: float = 0.0
    crowding: float = 0.0
    per_byte_of_memory: float = 0.0
    crowding_of_memory: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: seconds of the same work alone, and while the other side runs all the time."""

    compute_sms: int
    lane: str
    lane_bytes_per_second: float
    gemm_seconds_alone: float
    gemm_seconds_beside: float
    lane_seconds_alone: float
    lane_seconds_beside: float
    communication_sms: int = 0
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Both sides once, at the same time: seconds of each alone under the same shares, and of both together."""

    lane: str
    compute_seconds: float
    lane_seconds: float
    seconds: float
    compute_sms: int
    communication_sms: int
    lane_bytes_per_second: float
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class Interference:
    """The model of a machine with so many `multiprocessors`: an `Effect` for each lane."""

    multiprocessors: int
    effects: tuple[tuple[str, Effect], ...]

    def effect(self, lane: str) -> Effect:
        """That lane's parameters; a lane that was never measured is taken to disturb nobody."""
        return dict(self.effects).get(lane, Effect())

    def gemm_slowdown(
        self,
        lane: str,
        bytes_per_second: float,
        compute_sms: int,
        communication_sms: int = 0,
        memory: float = 0.0,
    ) -> float:
        """How many times longer a matmul on `compute_sms` takes while the lane runs beside it."""
        effect = self.effect(lane)
        wanted_twice = max(0, compute_sms + communication_sms - self.multiprocessors)
        per_byte = effect.per_byte + effect.per_byte_of_memory * memory
        return 1 + effect.contention * wanted_twice / max(1, compute_sms) + per_byte * bytes_per_second

    def lane_slowdown(self, lane: str, compute_sms: int, memory: float = 0.0) -> float:
        """How many times longer the lane takes while a matmul on `compute_sms` runs beside it."""
        effect = self.effect(lane)
        crowding = effect.crowding + effect.crowding_of_memory * memory
        return 1 + crowding * min(1.0, compute_sms / self.multiprocessors)

    def seconds(self, run: Run) -> float:
        """What both take together; the run's own `seconds` are not looked at."""
        slow = self.gemm_slowdown(
            run.lane, run.lane_bytes_per_second, run.compute_sms, run.communication_sms, run.memory
        )
        return together(
            run.compute_seconds, run.lane_seconds, slow, self.lane_slowdown(run.lane, run.compute_sms, run.memory)
        )


def together(compute: float, lane: float, compute_slowdown: float, lane_slowdown: float) -> float:
    """Seconds until both are done, which start together: the module's last equation."""
    first, second = compute * compute_slowdown, lane * lane_slowdown
    if first <= second:
        return first + lane - first / lane_slowdown
    return second + compute - second / compute_slowdown


def derived(multiprocessors: int, lanes: Mapping[str, tuple[float, float, float]]) -> Interference:
    """The model from a profile that has one pair of slowdowns a lane: (gemm_slowdown, lane_slowdown, bytes per second).

    The pair was measured with a matmul on all multiprocessors beside the lane at that speed.
    """
    effects = tuple(
        (name, Effect(per_byte=(gemm - 1) / speed, crowding=lane - 1)) for name, (gemm, lane, speed) in lanes.items()
    )
    return Interference(multiprocessors, effects)


def fit(samples: Iterable[Sample], multiprocessors: int | None = None) -> Interference:
    """The parameters of every lane in `samples`, by least squares, none below zero.

    Without `multiprocessors`, the machine has as many as the widest matmul that was measured.
    """
    by_lane: dict[str, list[Sample]] = {}
    widest = 1
    for sample in samples:
        _check(sample)
        by_lane.setdefault(sample.lane, []).append(sample)
        widest = max(widest, sample.compute_sms)
    multiprocessors = multiprocessors or widest
    return Interference(
        multiprocessors, tuple((lane, _fit_lane(found, multiprocessors)) for lane, found in sorted(by_lane.items()))
    )


def _fit_lane(samples: Sequence[Sample], multiprocessors: int) -> Effect:
    causes = np.array(
        [
            [max(0, one.compute_sms + one.communication_sms - multiprocessors) / one.compute_sms for one in samples],
            [one.lane_bytes_per_second for one in samples],
            [one.lane_bytes_per_second * one.memory for one in samples],
        ]
    ).T
    lost = np.array([one.gemm_seconds_beside / one.gemm_seconds_alone - 1 for one in samples])
    contention, per_byte, per_byte_of_memory = _least_squares(causes, lost)
    shares = [min(1.0, one.compute_sms / multiprocessors) for one in samples]
    share = np.array([[part, part * one.memory] for part, one in zip(shares, samples, strict=True)])
    slowed = np.array([one.lane_seconds_beside / one.lane_seconds_alone - 1 for one in samples])
    crowding, crowding_of_memory = _least_squares(share, slowed)
    return Effect(contention, per_byte, crowding, per_byte_of_memory, crowding_of_memory)


def fit_runs(runs: Iterable[Run], multiprocessors: int) -> Interference:
    """The parameters of every lane in `runs`: those with which `seconds` is right, in proportion, as nearly as can be.

    A pattern search from several beginnings, each coordinate in steps that shrink: few parameters, cheap equations.
    """
    by_lane: dict[str, list[Run]] = {}
    for run in runs:
        times = (run.compute_seconds, run.lane_seconds, run.seconds, float(run.compute_sms))
        if not all(math.isfinite(time) and time > 0 for time in times):
            raise InvalidArgument(argument="run", was=repr(run), must="made of numbers above 0")
        by_lane.setdefault(run.lane, []).append(run)
    return Interference(
        multiprocessors, tuple((lane, _search(found, multiprocessors)) for lane, found in sorted(by_lane.items()))
    )


def _search(runs: Sequence[Run], multiprocessors: int) -> Effect:
    speed = max(max(run.lane_bytes_per_second for run in runs), 1.0)
    units = np.array([1.0, 1 / speed, 1.0, 1 / speed, 1.0])  # a step of 1 is then a slowdown by about 1, in each
    columns = _columns(runs, multiprocessors)

    def loss(point: NDArray[np.float64]) -> float:
        return _misses(point * units, *columns)

    best, least = np.zeros(5), loss(np.zeros(5))
    causes = (columns[3][0], columns[3][1], columns[4][0], columns[3][2], columns[4][1])
    used = [at for at, cause in enumerate(causes) if cause.any()]  # the others explain nothing
    for begin in (0.0, 0.1, 2.0):
        point = np.zeros(5)
        point[used] = begin
        found, step = loss(point), max(0.5, begin)
        for _ in range(_SWEEPS):
            if step < 1e-3:
                break
            moved = False
            for at in used:
                for change in (step, -step):
                    other = point.copy()
                    other[at] = max(0.0, other[at] + change)
                    missed = loss(other)
                    if missed < found * (1 - 1e-6):
                        point, found, moved = other, missed, True
                        break
            step = step * 1.2 if moved else step / 2
        if found < least:
            best, least = point, found
    contention, per_byte, crowding, per_byte_of_memory, crowding_of_memory = (float(one) for one in best * units)
    return Effect(contention, per_byte, crowding, per_byte_of_memory, crowding_of_memory)


def _columns(runs: Sequence[Run], multiprocessors: int) -> tuple[NDArray[np.float64], ...]:
    """The runs as columns: times alone, the log of the time together, and what each parameter is multiplied by."""
    twice = [max(0, run.compute_sms + run.communication_sms - multiprocessors) / run.compute_sms for run in runs]
    speed = np.array([run.lane_bytes_per_second for run in runs])
    memory = np.array([run.memory for run in runs])
    share = np.array([min(1.0, run.compute_sms / multiprocessors) for run in runs])
    return (
        np.array([run.compute_seconds for run in runs]),
        np.array([run.lane_seconds for run in runs]),
        np.log([run.seconds for run in runs]),
        np.array([twice, speed, speed * memory]),
        np.array([share, share * memory]),
    )


def _misses(
    parameters: NDArray[np.float64],
    compute: NDArray[np.float64],
    lane: NDArray[np.float64],
    measured: NDArray[np.float64],
    of_compute: NDArray[np.float64],
    of_lane: NDArray[np.float64],
) -> float:
    """The mean square of how far predictions are off, in proportion; `together` for all runs at once."""
    slow = 1 + parameters[[0, 1, 3]] @ of_compute
    slow_lane = 1 + parameters[[2, 4]] @ of_lane
    first, second = compute * slow, lane * slow_lane
    both = np.where(first <= second, first + lane - first / slow_lane, second + compute - second / slow)
    return float(np.mean((np.log(both) - measured) ** 2))


def _least_squares(causes: NDArray[np.float64], effect: NDArray[np.float64]) -> list[float]:
    """The x >= 0 with the smallest |causes x - effect|². Few columns: every set of zeros is tried."""
    scale = np.maximum(np.abs(causes).max(axis=0), 1e-300)
    width = causes.shape[1]
    best, least = np.zeros(width), float(effect @ effect)
    for count in range(1, width + 1):
        for chosen in itertools.combinations(range(width), count):
            columns = list(chosen)
            found = np.linalg.lstsq(causes[:, columns] / scale[columns], effect, rcond=None)[0]
            error = float(np.sum((causes[:, columns] / scale[columns] @ found - effect) ** 2))
            if np.all(found >= 0) and error < least * (1 - 1e-9):  # a second cause must explain something
                least, best = error, np.zeros(width)
                best[columns] = found
    return [float(value) for value in best / scale]


def _check(sample: Sample) -> None:
    times = (
        sample.gemm_seconds_alone,
        sample.gemm_seconds_beside,
        sample.lane_seconds_alone,
        sample.lane_seconds_beside,
        sample.lane_bytes_per_second,
        float(sample.compute_sms),
    )
    if not all(math.isfinite(time) and time > 0 for time in times) or sample.communication_sms < 0:
        raise InvalidArgument(argument="sample", was=repr(sample), must="made of numbers above 0")
