"""`<copy i_off= o_off=/>` inside a gpu: a chunk of its input that is in its output before any step runs.

Files of TACCL, TE-CCL and others say so. Here the copies of a gpu are one more threadblock, and who touches a copied
chunk waits for it; written again, they are steps like any other, which every runtime knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .msccl import READS, STORES, Step, Threadblock
from .msccl_steps import NOWHERE


@dataclass(frozen=True, slots=True)
class Copy:
    source: int  # chunk of the input
    destination: int  # chunk of the output
    line: int


def with_copies(blocks: tuple[Threadblock, ...], copies: list[Copy]) -> tuple[Threadblock, ...]:
    """The threadblocks of a gpu, with its copies in one more behind them."""
    if not copies:
        return blocks
    copied = {one.destination for one in copies}
    waited = (len(blocks), len(copies) - 1)
    first = {number: at for number, block in enumerate(blocks) if (at := _first_touch(block, copied)) is not None}
    # A step that waits for something else already gets a nop before it, and later steps another number.
    moved = {number: at for number, at in first.items() if blocks[number].steps[at].depends_on is not None}
    made = []
    for number, block in enumerate(blocks):
        steps: list[Step] = []
        for at, step in enumerate(block.steps):
            if number in moved and at == moved[number]:
                steps.append(Step("nop", *NOWHERE, 0, waited, False, step.line))
            depends_on = step.depends_on
            if depends_on is not None and depends_on[1] >= moved.get(depends_on[0], depends_on[1] + 1):
                depends_on = (depends_on[0], depends_on[1] + 1)
            if at == first.get(number) and number not in moved:
                depends_on = waited
            steps.append(replace(step, depends_on=depends_on))
        made.append(replace(block, steps=tuple(steps)))
    own = [
        Step("cpy", ("i", one.source), ("o", one.destination), 1, None, at == waited[1] and bool(first), one.line)
        for at, one in enumerate(copies)
    ]
    return (*made, Threadblock(-1, -1, 0, tuple(own)))


def _first_touch(block: Threadblock, copied: set[int]) -> int | None:
    """The first step that reads or writes a copied chunk of the output."""
    for at, step in enumerate(block.steps):
        for place, used in ((step.source, step.type in READS), (step.destination, step.type in STORES)):
            if used and place[0] == "o" and not copied.isdisjoint(range(place[1], place[1] + step.count)):
                return at
    return None
