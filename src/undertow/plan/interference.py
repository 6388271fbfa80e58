"""How much computing and communication slow each other: one model, for planner, advice and simulator.

Let S be the multiprocessors of the machine, c those the matmul runs on, s those the lane's kernels run on (0 for copy
engines), and b the bytes per second that the lane moves when it is alone. While both run, each takes longer:

    matmul    1 + contention · max(0, c + s - S) / c + per_byte · b
    lane      1 + crowding · c / S

`contention`: what it costs when both want the same SMs, as a share of the matmul's SMs. `per_byte`: what each byte per
second costs the matmul, through shared memory bandwidth. `crowding`: how much the lane loses to a matmul on all SMs.
Slowdowns hold only while both run. On a CPU read "threads" for SMs.

`fit` takes measurements, each a `Sample`: one matmul and one lane, each alone and beside the other. Both laws are
linear in their parameters, so least squares finds them; none is negative, since nothing gets faster by company.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Effect:
    """What a matmul and one lane do to each other: the three parameters of the module's equations."""

    contention: float = 0.0
    per_byte: float = 0.0
    crowding: float = 0.0


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


@dataclass(frozen=True, slots=True)
class Interference:
    """The model of a machine with so many `multiprocessors`: an `Effect` for each lane."""

    multiprocessors: int
    effects: tuple[tuple[str, Effect], ...]

    def effect(self, lane: str) -> Effect:
        """That lane's parameters; a lane that was never measured is taken to disturb nobody."""
        return dict(self.effects).get(lane, Effect())

    def gemm_slowdown(self, lane: str, bytes_per_second: float, compute_sms: int, communication_sms: int = 0) -> float:
        """How many times longer a matmul on `compute_sms` takes while the lane runs beside it."""
        effect = self.effect(lane)
        wanted_twice = max(0, compute_sms + communication_sms - self.multiprocessors)
        return 1 + effect.contention * wanted_twice / max(1, compute_sms) + effect.per_byte * bytes_per_second

    def lane_slowdown(self, lane: str, compute_sms: int) -> float:
        """How many times longer the lane takes while a matmul on `compute_sms` runs beside it."""
        return 1 + self.effect(lane).crowding * min(1.0, compute_sms / self.multiprocessors)


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
        ]
    ).T
    lost = np.array([one.gemm_seconds_beside / one.gemm_seconds_alone - 1 for one in samples])
    contention, per_byte = _least_squares(causes, lost)
    share = np.array([[min(1.0, one.compute_sms / multiprocessors)] for one in samples])
    slowed = np.array([one.lane_seconds_beside / one.lane_seconds_alone - 1 for one in samples])
    (crowding,) = _least_squares(share, slowed)
    return Effect(contention, per_byte, crowding)


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
