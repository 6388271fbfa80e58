"""Good parcels where no law says which are best: seeds, then small changes that gain, within so many trials.

Possible cuts are numbered 1 to `last`; a grouping is the cuts after which parcels end, the last one included, and `end`
says when everything has arrived. Seeds are equal parcels, and parcels that grow (the link starts early), shrink (little
is left when the product is complete), or do both. From the best seed on, one cut is moved, taken away or added.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

Cuts = tuple[int, ...]
TRIALS = 80
_EQUAL = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_RAMPS = (6, 12)
_RATIOS = (1.2, 1.6)
_NOTHING = 5e-4


def best(last: int, end: Callable[[Cuts], float], trials: int = TRIALS) -> Cuts:
    """The cuts with the earliest end that so many trials find; fewer cuts where they gain next to nothing."""
    known: dict[Cuts, float] = {}

    def tried(cuts: Cuts) -> float:
        if cuts not in known:
            known[cuts] = end(cuts)
        return known[cuts]

    def gains(other: Cuts, cuts: Cuts) -> bool:
        return len(known) < trials and tried(other) < known[cuts] * (1 - 1e-9)

    for seed in _seeds(last):
        tried(seed)
    cuts = min(known, key=lambda one: (known[one], len(one)))
    step = max(1, last // 16)
    while len(known) < trials:
        better = next((one for one in _changed(cuts, last, step) if one not in known and gains(one, cuts)), None)
        if better is not None:
            cuts = better
        elif step > 1:
            step //= 2
        else:
            break
    allowed = known[cuts] * (1 + _NOTHING)
    return min((one for one, found in known.items() if found <= allowed), key=lambda one: (len(one), known[one]))


def _seeds(last: int) -> Iterator[Cuts]:
    for count in _EQUAL:
        yield _in_proportion([1.0] * count, last)
    for count, ratio in itertools.product(_RAMPS, _RATIOS):
        grows = [ratio**one for one in range(count)]
        yield _in_proportion(grows, last)
        yield _in_proportion(grows[::-1], last)
        yield _in_proportion([ratio ** min(one, count - 1 - one) for one in range(count)], last)


def _in_proportion(weights: Sequence[float], last: int) -> Cuts:
    """Cuts whose distances are as the weights, as nearly as whole numbers are; where they fall together, fewer."""
    total = sum(weights)
    ends = {round(last * reached / total) for reached in itertools.accumulate(weights)}
    return tuple(sorted((ends - {0}) | {last}))


def _changed(cuts: Cuts, last: int, step: int) -> Iterator[Cuts]:
    """The grouping with one cut moved by `step`, taken away, or added inside a parcel.

    Those near the ends first: when the link starts, and what is left in the end, matters most.
    """
    bounds = (0, *cuts)
    for at in sorted(range(len(cuts)), key=lambda one: min(one, len(cuts) - 1 - one)):
        before, cut = bounds[at], cuts[at]
        for added in sorted({before + (cut - before) // 2, before + step, cut - step}):
            if before < added < cut:
                yield (*cuts[:at], added, *cuts[at:])
        if cut == last:
            continue
        for moved in (cut - step, cut + step):
            if before < moved < cuts[at + 1]:
                yield (*cuts[:at], moved, *cuts[at + 1 :])
        yield (*cuts[:at], *cuts[at + 1 :])
