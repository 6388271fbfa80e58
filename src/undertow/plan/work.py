"""What tiles, signals and copies cost on a machine: the constants of the predictor that are no curves.

A tile of block_m x block_n over k takes, on one of c SMs,

    tile_seconds = overhead + 2 block_m block_n k / (efficiency · rate(c) / c)

where rate(c) are the operations per second that the machine's matmul reaches on c SMs. `overhead` is what each tile
pays whatever k is (first loads, epilogue, release), `efficiency` the tile kernel's speed as a share of the matmul that
was measured. `fit` finds both from times of whole kernels: seconds = waves · tile_seconds is linear in overhead and
1 / efficiency.

Long matmuls are slower than that says: caches hold less of their operands, and the GPU's power is limited. So `tiles`
and `library` are small curves over k of what was measured divided by what these equations say, for the tile kernel and
for the library's matmul, and `rows` one over the rows of a library's matmul, which has kernels of its own for few.
Without them it is 1 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidArgument
from .tables import Points


@dataclass(frozen=True, slots=True)
class Work:
    """`signal`: seconds from a complete parcel to the start of its call, None for the machine's stream_seconds.

    `skew`: how much later than this rank the slowest is ready, seconds. `copy_speed`: bytes of result per second that
    an unpack kernel moves, None for a guess by the kind of device (`matmuls.copy_speed`). `read_speed`: bytes of
    operands per second that matmuls of few rows read, None for twice the copy's. `stagger`: where matmuls of ranks
    that share a GPU run one after the other, how much sooner the first rank's is over than the last one's, as a part of
    the time of all.
    """

    overhead: float = 0.0
    efficiency: float = 1.0
    signal: float | None = None
    skew: float = 0.0
    copy_speed: float | None = None
    read_speed: float | None = None
    stagger: float = 0.0
    tiles: Points = ()
    library: Points = ()
    rows: Points = ()

    def tile_factor(self, k: int) -> float:
        """How many times longer a tile over k takes than the equation says."""
        return at(self.tiles, k)

    def library_factor(self, k: int) -> float:
        """The same of a library's matmul."""
        return at(self.library, k)

    def rows_factor(self, rows: int) -> float:
        """And of a library's matmul of so many rows, besides."""
        return at(self.rows, rows)


def at(curve: Points, k: int) -> float:
    """The factor at k: by the logarithm of k between two points, beyond them that of the nearest; of no points 1."""
    if not curve:
        return 1.0
    where = [math.log(point) for point, _ in curve]
    return float(np.interp(math.log(max(1, k)), where, [factor for _, factor in curve]))


@dataclass(frozen=True, slots=True)
class KernelSample:
    """One measured kernel: so many waves of tiles, the seconds a tile would take at the curve's rate, and its time."""

    waves: int
    ideal_tile_seconds: float
    seconds: float

    def said(self, overhead: float, efficiency: float) -> float:
        """What the equation says that it takes."""
        return self.waves * (overhead + self.ideal_tile_seconds / efficiency)


def fit(samples: Sequence[KernelSample]) -> tuple[float, float]:
    """(overhead, efficiency) by least squares of the relative error; the overhead is never below zero."""
    if len(samples) < 2 or any(min(one.waves, one.ideal_tile_seconds, one.seconds) <= 0 for one in samples):
        raise InvalidArgument(argument="samples", was=f"{len(samples)} kernels", must="two or more, all above zero")
    causes = np.array([[one.waves / one.seconds, one.waves * one.ideal_tile_seconds / one.seconds] for one in samples])
    scale = causes.max(axis=0)
    overhead, inverse = np.linalg.lstsq(causes / scale, np.ones(len(samples)), rcond=None)[0] / scale
    if overhead < 0 or inverse <= 0:
        overhead, inverse = 0.0, float(causes[:, 1].sum() / (causes[:, 1] @ causes[:, 1]))
    return float(overhead), float(1 / inverse)
