"""Who sends and who gets in a collective with a root: files name none, but what they do tells it.

Every input chunk is a random number, and one pass over the steps, in an order in which they can run, says which sums
stand where: that costs what the steps move, however many ranks there are to choose from.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ..contract import BUILT_IN, Contract
from ..language import INPUT, OUTPUT
from .lanes import Lowered
from .text import damaged

# As long as no root is known, everybody's buffers are as long as a root's would be: those of another collective.
_SHAPES = {"broadcast": "broadcast", "reduce": "reduce"}
_UNEVEN_SHAPES = {"gather": "all_gather", "scatter": "reduce_scatter", "send_recv": "broadcast"}
ROOTED = (*_SHAPES, *_UNEVEN_SHAPES)
UNEVEN = tuple(_UNEVEN_SHAPES)  # where buffers differ in length from rank to rank
_Numbers = NDArray[np.uint64]


def shape(name: str, ranks: int, chunks: int) -> Contract:
    """A contract with buffers in which any rank can be the root; for what has no root, its own."""
    return BUILT_IN[_UNEVEN_SHAPES.get(name, name)](ranks, chunks)


def roots_of(name: str, lowered: Lowered) -> tuple[int, ...]:
    """What the contract of this name wants to know: its root, or source and destination; none if it has no root.

    Rank 0 where no other explains what the steps do: the checker then says what is wrong.
    """
    if name not in ROOTED:
        return ()
    given, made = _run(lowered)
    if name == "reduce":
        wanted = np.sum(given, axis=0, dtype=np.uint64)
        return (_first([int((one == wanted).all()) for one in made]),)
    if name == "gather":
        wanted = np.concatenate(given)
        return (_first([int(np.count_nonzero(one == wanted)) for one in made]),)
    pairs = _pairs(given, made, lowered.contract.ranks if name == "scatter" else 1)
    if name == "send_recv":
        return _only_pair(pairs, lowered)
    reached: Counter[int] = Counter()
    for (source, _), count in pairs.items():
        reached[source] += count
    return (_first([reached[rank] for rank in range(lowered.contract.ranks)]),)


def _run(lowered: Lowered) -> tuple[list[_Numbers], list[_Numbers]]:
    """Every rank's input before, and its output after."""
    layout = lowered.layout
    atoms = int((layout.first + layout.size).max(initial=0))
    held = np.random.default_rng(0).integers(1 << 63, size=atoms, dtype=np.uint64)

    def buffers(which: int) -> list[_Numbers]:
        spans = zip(layout.first[:, which].tolist(), layout.size[:, which].tolist(), strict=True)
        return [held[begin : begin + size].copy() for begin, size in spans]

    given = buffers(INPUT)
    steps = [step for lane in lowered.lanes for step in lane.steps]
    for step in (steps[one] for one in lowered.order()):
        if step.sources:
            total = np.zeros(step.count, np.uint64)
            for source in step.sources:
                total += held[source : source + step.count]
            for store in step.stores:
                held[store : store + step.count] = total
    return given, buffers(OUTPUT)


def _pairs(given: list[_Numbers], made: list[_Numbers], shards: int) -> Counter[tuple[int, int]]:
    """How many chunks each rank has of each other one, where they belong: shard r of `shards` at rank r.

    What a rank has of its own says nothing: in place, everybody's output begins as its own input.
    """
    length = len(given[0])
    numbers = np.concatenate(given)
    order = np.argsort(numbers)
    found: Counter[tuple[int, int]] = Counter()
    for rank, one in enumerate(made):
        at = order[np.minimum(np.searchsorted(numbers, one, sorter=order), len(numbers) - 1)]
        begin = rank * len(one) if shards > 1 else 0
        belongs = (numbers[at] == one) & (at % length == begin + np.arange(len(one))) & (at // length != rank)
        sources, counts = np.unique(at[belongs] // length, return_counts=True)
        found.update({(int(source), rank): int(count) for source, count in zip(sources, counts, strict=True)})
    return found


def _only_pair(pairs: Counter[tuple[int, int]], lowered: Lowered) -> tuple[int, int]:
    if lowered.contract.ranks < 2:
        damaged(lowered.path, 0, "sendrecv is from one gpu to another, but there is one gpu only")
    if len(pairs) > 1:
        (one, to), (other, towards) = sorted(pairs)[:2]
        reason = f"gpu {to} gets something of gpu {one}, and gpu {towards} of gpu {other}"
        damaged(lowered.path, 0, f"sendrecv is from one gpu to another, but {reason}: custom would allow that")
    return next(iter(pairs), (0, 1))


def _first(scores: list[int]) -> int:
    """The first of the best."""
    return scores.index(max(scores))
