"""The order in which all ranks go through a schedule whose messages travel by lanes: turns, level after level.

What must come before an instruction is what it shares memory with: whoever wrote what it reads, and whoever reads or
wrote what it writes (staging places, too). Its *level* is one more than the highest of those. A *turn* is all that one
rank does with one parcel at one level, so nothing in a turn, and no two turns of a level, need each other, and whatever
a turn needs stands before it. That a worker had two instructions in an order says nothing here: chunks of different
parcels do not wait for each other, and what a rank sends in a turn leaves together.

Parcels of a kernel come one after the other, `lag` levels apart: half of the levels that a parcel takes from its tiles
to its last message, so that two are under way, one leaving while the other arrives.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import InvalidArgument
from .schedule import READY

if TYPE_CHECKING:
    from .schedule import Schedule


class Turn(NamedTuple):
    """Instructions of one rank, for one parcel, that need nothing of each other."""

    rank: int
    instructions: list[int]


Chunk = tuple[int, int]  # an instruction (or an atom), and which of the chunks that are moved it is


class Order(NamedTuple):
    """All turns of an iteration; by instruction those whose values it reads; by chunk what it is made of: chunks that
    earlier instructions have moved, all of one length."""

    turns: list[Turn]
    values: list[set[int]]
    made_of: dict[Chunk, set[Chunk]]


def in_turns(schedule: Schedule) -> Order:
    """The same on all ranks."""
    order, ranks = in_order(schedule), executors(schedule)
    needs, made_of = _conflicts(schedule, order)
    values: list[set[int]] = [set() for _ in order]
    for (at, _), chunks in made_of.items():
        values[at].update(other for other, _ in chunks)
    begins = _parcels(schedule, order, ranks)
    lag = max(1, _height(order, values) // 2)
    level, parcel = [0] * len(order), [0] * len(order)
    for at in order:
        parcel[at] = max([begins.get(at, 0), *(parcel[other] for other in values[at])])
        level[at] = max([1 + level[other] for other in needs[at]], default=0)
        level[at] = max(level[at], lag * begins.get(at, 0))
    turns: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for at in order:
        turns[level[at], parcel[at], ranks[at]].append(at)
    return Order([Turn(where[2], turns[where]) for where in sorted(turns)], values, made_of)


def in_order(schedule: Schedule) -> list[int]:
    """All instructions of an iteration, after their worker's earlier ones and after those they wait for."""
    one = schedule.instructions
    posters: dict[int, list[int]] = defaultdict(list)  # of each semaphore, in the order of its posts
    for at in range(len(one)):
        for entry in range(one.post_start[at], one.post_start[at + 1]):
            posters[int(one.post_semaphore[entry])].append(at)
    level = [-1] * len(one)
    starts = schedule.worker_start.tolist()
    stands = starts[:-1]
    left = True
    while left:
        left, moved = False, False
        for worker, end in enumerate(starts[1:]):
            while stands[worker] < end:
                at = stands[worker]
                before = [
                    posters[int(one.wait_semaphore[entry])][one.wait_value[entry] - 1]
                    for entry in range(one.wait_start[at], one.wait_start[at + 1])
                    if one.wait_back[entry] == 0
                ]
                before += [at - 1] if at > starts[worker] else []
                if any(level[other] < 0 for other in before):
                    left = True
                    break
                level[at] = 1 + max((level[other] for other in before), default=-1)
                stands[worker] += 1
                moved = True
        if left and not moved:
            raise InvalidArgument(argument="schedule", was="one that waits for itself", must="a checked one")
    return sorted(range(len(one)), key=level.__getitem__)


def _conflicts(schedule: Schedule, order: list[int]) -> tuple[list[set[int]], dict[Chunk, set[Chunk]]]:
    """By instruction: those before it that touch the same memory. By chunk: what it is made of."""
    writer: dict[int, Chunk] = {}
    readers: dict[int, list[int]] = defaultdict(list)  # since it was written
    needs: list[set[int]] = [set() for _ in order]
    made_of: dict[Chunk, set[Chunk]] = defaultdict(set)
    for at in order:
        for atom, part in atoms_read(schedule, at):
            if atom in writer:
                made_of[at, part].add(writer[atom])
                needs[at].add(writer[atom][0])
            readers[atom].append(at)
        for atom, part in atoms_written(schedule, at):
            if atom in writer:
                needs[at].add(writer[atom][0])
            needs[at].update(readers.pop(atom, ()))
            writer[atom] = at, part
        needs[at].discard(at)  # a sum may be stored over one of its parts
    return needs, made_of


def atoms_read(schedule: Schedule, at: int) -> list[Chunk]:
    """All atoms that an instruction reads, each with the number of its chunk."""
    one = schedule.instructions
    return _atoms(one.source_atom[one.source_start[at] : one.source_start[at + 1]].tolist(), int(one.count[at]))


def atoms_written(schedule: Schedule, at: int) -> list[Chunk]:
    """All that it writes, anywhere; those of a kernel's parcel are written once it is waited for."""
    one = schedule.instructions
    return _atoms(one.store_atom[one.store_start[at] : one.store_start[at + 1]].tolist(), int(one.count[at]))


def _atoms(begins: list[int], count: int) -> list[Chunk]:
    return [(begin + part, part) for begin in begins for part in range(count)]


def executors(schedule: Schedule) -> list[int]:
    """The rank of each instruction."""
    found: list[int] = np.repeat(schedule.worker_rank, np.diff(schedule.worker_start)).tolist()
    return found


def executor(schedule: Schedule, at: int) -> int:
    """The rank of one instruction."""
    return int(schedule.worker_rank[np.searchsorted(schedule.worker_start, at, side="right") - 1])


def _parcels(schedule: Schedule, order: list[int], ranks: list[int]) -> dict[int, int]:
    """Of each instruction that waits for a kernel: the how manieth parcel of its rank it waits for."""
    one = schedule.instructions
    known: dict[int, dict[int, int]] = defaultdict(dict)
    found = {}
    for at in order:
        if one.kind[at] == READY:
            mine = known[ranks[at]]
            found[at] = mine.setdefault(int(one.number[at]), len(mine))
    return found


def _height(order: list[int], values: list[set[int]]) -> int:
    """Levels of the longest chain in which each reads what the one before it wrote."""
    level = [0] * len(order)
    for at in order:
        level[at] = 1 + max((level[other] for other in values[at]), default=0)
    return max(level, default=0)
