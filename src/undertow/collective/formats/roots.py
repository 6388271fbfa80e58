"""Whose buffer a broadcast sends, and who gets the sum of a reduce: files name no root, but what they do tells it.

Every input chunk is a random number, and one pass over the steps, in an order in which they can run, says which sums
stand where: that costs what the steps move, however many ranks there are to choose from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..contract import Contract
from ..language import INPUT, OUTPUT
from .lanes import Lowered

ROOTED = ("broadcast", "reduce")


def with_root(lowered: Lowered, contract: Callable[[int], Contract]) -> Lowered:
    """The same with its root, if it has one: rank 0 where no other explains what the steps do. `contract`: by root."""
    if lowered.contract.name not in ROOTED:
        return lowered
    return replace(lowered, contract=contract(_root(lowered)))


def _root(lowered: Lowered) -> int:
    layout, ranks = lowered.layout, lowered.contract.ranks
    atoms = int((layout.first + layout.size).max(initial=0))
    held = np.random.default_rng(0).integers(1 << 63, size=atoms, dtype=np.uint64)

    def buffers(which: int) -> list[bytes]:
        spans = zip(layout.first[:, which].tolist(), layout.size[:, which].tolist(), strict=True)
        return [held[begin : begin + size].tobytes() for begin, size in spans]

    given = buffers(INPUT)
    steps = [step for lane in lowered.lanes for step in lane.steps]
    for step in (steps[one] for one in lowered.order()):
        if step.sources:
            total = np.zeros(step.count, np.uint64)
            for source in step.sources:
                total += held[source : source + step.count]
            for store in step.stores:
                held[store : store + step.count] = total
    made = buffers(OUTPUT)
    if lowered.contract.name == "reduce":
        wanted = np.sum([np.frombuffer(one, np.uint64) for one in given], axis=0, dtype=np.uint64).tobytes()
        return made.index(wanted) if wanted in made else 0
    owner = {one: rank for rank, one in enumerate(given)}
    # In place, everybody's output begins as its own input: only what others have of a rank counts.
    reached = Counter(owner[one] for rank, one in enumerate(made) if owner.get(one, rank) != rank)
    return max(range(ranks), key=lambda rank: (reached[rank], -rank))
