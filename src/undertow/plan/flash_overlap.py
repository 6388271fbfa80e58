"""FlashOverlap's way of choosing parcels, kept as a candidate and as the peer to be measured against.

Two SMs are set aside for communication. Waves are counted in units of ceil(waves / 10), so that there are at most ten,
and every grouping of the units is looked at, but for those of more than five groups whose first is longer than two
units (a late first message). With S SMs, T tiles, G the matmul's seconds alone, groups of g_i tiles:

    W0 = ceil(T / S)      W1 = ceil(T / (S - 2))      G' = G W1 / W0
    comp_i = G' / W1 · ceil(g_i / (S - 2))
    comm_end = max(comp_end_i, comm_end) + L(g_i);    one group alone: G + L(T)

L is the collective's time alone. Nothing is said of launches, of skew, or of contention beyond the two SMs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

SET_ASIDE = 2
_UNITS = 10
_MANY, _LATE = 5, 2


def choose(
    tiles: int, multiprocessors: int, gemm_seconds: float, collective: Callable[[int], float]
) -> tuple[tuple[int, int], ...]:
    """The parcels, as ranges of tiles, with the smallest predicted end. `collective(tiles)` are seconds."""
    workers = max(1, multiprocessors - SET_ASIDE)
    waves = -(-tiles // workers)
    unit = -(-waves // _UNITS) * workers
    slowed = gemm_seconds * waves / max(1, -(-tiles // multiprocessors))
    wave_seconds = slowed / max(1, waves)
    units = -(-tiles // unit) if tiles else 0
    lengths = {count: collective(min(tiles, count * unit)) for count in range(1, units + 1)}
    tail = tiles - (units - 1) * unit

    def end(groups: tuple[int, ...]) -> float:
        if len(groups) == 1:
            return gemm_seconds + lengths[groups[0]]
        computed = moved = 0.0
        for index, count in enumerate(groups):
            last = index == len(groups) - 1
            held = (count - 1) * unit + tail if last else count * unit
            computed += wave_seconds * -(-held // workers)
            moved = max(computed, moved) + (collective(held) if last else lengths[count])
        return moved

    best = min(_groupings(units), key=end, default=())
    bounds = [0, *(min(tiles, reached * unit) for reached in itertools.accumulate(best))]
    return tuple(itertools.pairwise(bounds)) or ((0, 0),)


def _groupings(units: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `units` as a sum in order, fewest groups first, without the late ones."""
    for count in range(units):
        for cuts in itertools.combinations(range(1, units), count):
            groups = tuple(stop - start for start, stop in itertools.pairwise((0, *cuts, units)))
            if len(groups) <= _MANY or groups[0] <= _LATE:
                yield groups
