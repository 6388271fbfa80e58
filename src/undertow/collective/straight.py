"""Straight-line schedules: those of a few *phases*, which one kernel runs without interpreting anything.

Every worker of every rank does the same in a phase: wait for some words, move some pieces of one shape, post to some
words. What is moved and whom it meets is a row of addresses for each CTA, at places that the kernel knows when it is
compiled, so that all of it is loaded at once instead of being decoded step by step.

Phases are made by moving waits up and posts down until instructions stand together. That only adds to the order that
the checker has proved. It cannot deadlock either: a phase waits for phases before it, in its iteration or an earlier
one, and all workers go through iterations and phases in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .bind import MY_INPUT, MY_OUTPUT, USER, Offsets, semaphore_words
from .schedule import END, MOVE, START

if TYPE_CHECKING:
    from .schedule import Schedule

MOST_PHASES = 3  # of packets; others with several phases have not run on a GPU yet, and are interpreted
MOST_OPERANDS = 8  # sources or stores of a piece
MOST_MOVED = 16  # sources, or stores, of all pieces of a phase: their loads are under way together
WORD = 128  # bytes between two semaphores
# An operand is one word: an address, or an offset into the caller's tensors, and these bits.
OWN_INPUT, OWN_OUTPUT, IN_SCRATCH, IN_PACKETS = (1 << bit for bit in (57, 58, 59, 60))
Row = NDArray[np.int64]
_ENTRY = 4  # words of a wait: address, constant, posts an iteration, posts a call


@dataclass(frozen=True)
class Phase:
    """Instructions of every worker that are run as one, and how many of each thing the largest of them has."""

    at: int  # first word in a row
    waits: int
    posts: int
    pieces: int
    sources: int
    stores: int

    @property
    def constants(self) -> tuple[int, ...]:
        """As the kernel is given them."""
        return self.at, self.waits, self.posts, self.pieces, self.sources, self.stores

    @property
    def end(self) -> int:
        return self.at + _ENTRY * self.waits + self.posts + self.pieces * (1 + self.sources + self.stores)


@dataclass(frozen=True)
class Straight:
    """The shape of a straight-line schedule: a row holds the posts of start, the waits of end, then the phases."""

    starts: int
    ends: int
    phases: tuple[Phase, ...]
    level: NDArray[np.int64]  # the phase of each instruction; -1 for start and end
    released: bool  # whether every worker posts in the last phase, and so after all that it stores

    @property
    def width(self) -> int:
        """Words of a row."""
        return self.phases[-1].end


def straighten(schedule: Schedule) -> Straight | None:
    """The phases of a schedule, equal on all ranks; None if it is not straight enough."""
    one = schedule.instructions
    if not np.isin(one.kind, (MOVE, START, END)).all() or not (one.kind == MOVE).any():
        return None
    level = _levels(schedule)
    if level is None:
        return None
    semaphores = ~schedule.semaphore_of_packets
    waits, posts = (
        _counts(one.wait_start, semaphores[one.wait_semaphore]),
        _counts(one.post_start, semaphores[one.post_semaphore]),
    )
    worker = np.repeat(np.arange(len(schedule.worker_rank)), np.diff(schedule.worker_start))
    starts, ends = (
        _padded(int(each[one.kind == kind].max(initial=0))) for each, kind in ((posts, START), (waits, END))
    )
    phases: list[Phase] = []
    released = False
    at = starts + _ENTRY * ends
    for number in range(int(level.max()) + 1):
        here = level == number
        sources, stores = np.diff(one.source_start)[here], np.diff(one.store_start)[here]
        if len(set(zip(sources.tolist(), stores.tolist(), strict=True))) > 1:
            return None
        most = [int(np.bincount(worker[here], each[here]).max()) for each in (waits, posts, one.count)]
        phase = Phase(at, _padded(most[0]), _padded(most[1]), most[2], int(sources[0]), int(stores[0]))
        if max(phase.sources, phase.stores) > MOST_OPERANDS:
            return None
        if phase.pieces * max(phase.sources, phase.stores) > MOST_MOVED:
            return None
        phases.append(phase)
        released = bool(np.bincount(worker[here], posts[here], len(schedule.worker_rank)).all())
        at = phase.end
    return Straight(starts, ends, tuple(phases), level, released)


def _padded(count: int) -> int:
    """Room for waits or posts: few variants of the kernel serve many programs."""
    return -(-count // 8) * 8


def _counts(start: NDArray[np.int32], kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many of the entries of each compressed row are kept."""
    total = np.concatenate([[0], np.cumsum(kept)])
    return np.asarray(total[start[1:]] - total[start[:-1]], np.int64)


def _levels(schedule: Schedule) -> NDArray[np.int64] | None:
    """The phase of each move: after what it waits for in its iteration, and after what it would disturb."""
    one = schedule.instructions
    moves = one.kind == MOVE
    level = np.where(moves, 0, -1).astype(np.int64)
    poster: dict[tuple[int, int], int] = {}  # of the n-th post of a semaphore in an iteration
    told: dict[int, int] = {}
    touched: dict[int, tuple[set[int], set[int]]] = {}
    for at in np.flatnonzero(moves).tolist():
        for semaphore in one.post_semaphore[one.post_start[at] : one.post_start[at + 1]].tolist():
            told[semaphore] = told.get(semaphore, 0) + 1
            poster[semaphore, told[semaphore]] = at
        if int(one.count[at]) > MOST_MOVED:
            return None
        read, written = (
            [int(atom) + part for atom in atoms for part in range(int(one.count[at]))]
            for atoms in (
                one.source_atom[one.source_start[at] : one.source_start[at + 1]],
                one.store_atom[one.store_start[at] : one.store_start[at + 1]],
            )
        )
        if one.count[at] > 1 and set(read) & set(written):  # pieces of one instruction are moved at the same time
            return None
        touched[at] = set(read), set(written)
    changed = True
    while changed:
        changed = False
        for worker in range(len(schedule.worker_rank)):
            mates: list[int] = []  # moves of this worker in the phase of the latest
            for at in range(int(schedule.worker_start[worker]), int(schedule.worker_start[worker + 1])):
                if not moves[at]:
                    continue
                least = max(int(level[at]), int(level[mates[-1]]) if mates else 0)
                for entry in range(int(one.wait_start[at]), int(one.wait_start[at + 1])):
                    semaphore = int(one.wait_semaphore[entry])
                    if one.wait_back[entry] == 0 and not schedule.semaphore_of_start[semaphore]:
                        least = max(least, 1 + int(level[poster[semaphore, int(one.wait_value[entry])]]))
                if mates and least == level[mates[-1]] and not _together(schedule, touched, mates, at):
                    least += 1
                if least >= (MOST_PHASES if schedule.packets else 1):
                    return None
                changed |= least != level[at]
                mates = [*(mates if mates and least == level[mates[-1]] else []), at]
                level[at] = least
    return level


def _together(schedule: Schedule, touched: dict[int, tuple[set[int], set[int]]], mates: list[int], at: int) -> bool:
    """Whether a move has the shape of those before it, and neither reads nor writes what they write, or the reverse."""
    one = schedule.instructions

    def shape(move: int) -> tuple[int, int]:
        return (
            int(one.source_start[move + 1] - one.source_start[move]),
            int(one.store_start[move + 1] - one.store_start[move]),
        )

    read, written = touched[at]
    return all(
        shape(mate) == shape(at) and not touched[mate][1] & (read | written) and not touched[mate][0] & written
        for mate in mates
    )


def rows(
    schedule: Schedule,
    straight: Straight,
    rank: int,
    length: NDArray[np.int64],
    room: int,
    item_size: int,
    bases: NDArray[np.int64],
    semaphores: Sequence[int],
) -> NDArray[np.int64]:
    """The rows of all CTAs of `rank`, instance by instance within each worker, for chunks of these lengths.

    `room`: elements of a chunk of scratch. `bases`: addresses as `bind` numbers them, the caller's own ones unused.
    `semaphores`: address of every rank's first one. What a worker has less of than the largest is 0 (elements: -1).
    """
    one = schedule.instructions
    words = semaphore_words(schedule)
    offsets = Offsets(schedule, rank, length, room)
    mine = schedule.workers_of(rank)
    found = np.zeros((len(mine), schedule.instances, straight.width), np.int64)
    instances = np.arange(schedule.instances)[:, None]

    def address(semaphore: int) -> int:
        """Of the first instance's."""
        home = int(schedule.worker_rank[schedule.semaphore_waiter[semaphore]])
        return semaphores[home] + int(words[semaphore]) * schedule.instances * WORD

    def waited(at: int) -> list[tuple[int, ...]]:
        entries = range(int(one.wait_start[at]), int(one.wait_start[at + 1]))
        return [_wait(schedule, entry, address) for entry in entries if counts(int(one.wait_semaphore[entry]))]

    def posted(at: int) -> list[int]:
        semaphores_of = one.post_semaphore[one.post_start[at] : one.post_start[at + 1]].tolist()
        return [address(semaphore) for semaphore in semaphores_of if counts(semaphore)]

    def counts(semaphore: int) -> bool:
        return not schedule.semaphore_of_packets[semaphore]

    for number, worker in enumerate(mine):
        row = np.zeros(straight.width, np.int64)
        by_instance = np.zeros(straight.width, np.int64)  # what each next instance adds to a word

        def put_waits(
            at: int, room_for: int, waits: list[tuple[int, ...]], row: Row = row, by: Row = by_instance
        ) -> None:
            for index, entry in enumerate(waits):
                row[at + index : at + _ENTRY * room_for : room_for] = entry
            by[at : at + len(waits)] = WORD

        def put_posts(at: int, posts: list[int], row: Row = row, by: Row = by_instance) -> None:
            row[at : at + len(posts)], by[at : at + len(posts)] = posts, WORD

        span = range(int(schedule.worker_start[worker]), int(schedule.worker_start[worker + 1]))
        put_posts(0, [post for at in span if one.kind[at] == START for post in posted(at)])
        put_waits(straight.starts, straight.ends, [wait for at in span if one.kind[at] == END for wait in waited(at)])
        for level, phase in enumerate(straight.phases):
            moves = [at for at in span if straight.level[at] == level]
            put_waits(phase.at, phase.waits, [wait for at in moves for wait in waited(at)])
            first = phase.at + _ENTRY * phase.waits
            put_posts(first, [post for at in moves for post in posted(at)])
            pieces = [piece for at in moves for piece in _pieces(schedule, at, length, offsets, item_size, bases)]
            none = [-1, *[0] * (phase.sources + phase.stores)]
            pieces += [none] * (phase.pieces - len(pieces))
            row[first + phase.posts : phase.end] = np.array(pieces, np.int64).ravel()
        found[number] = row + instances * by_instance
    return found.reshape(-1, straight.width)


def _wait(schedule: Schedule, entry: int, address: Callable[[int], int]) -> tuple[int, ...]:
    """Address, constant, posts an iteration, posts a call: what was posted before is counted in one of the two."""
    one = schedule.instructions
    semaphore, value = int(one.wait_semaphore[entry]), int(one.wait_value[entry])
    posts = int(schedule.semaphore_posts[semaphore])
    if schedule.semaphore_of_start[semaphore]:
        return address(semaphore), value, 0, posts
    return address(semaphore), value - int(one.wait_back[entry]) * posts, posts, 0


def _pieces(
    schedule: Schedule,
    at: int,
    class_length: NDArray[np.int64],
    offsets: Offsets,
    item_size: int,
    bases: NDArray[np.int64],
) -> list[list[int]]:
    """Elements, sources and stores of each chunk that a move is made of."""
    one = schedule.instructions
    count = int(one.count[at])
    length = class_length[one.class_of[one.class_start[at] : one.class_start[at] + count]]
    atoms = [
        *one.source_atom[one.source_start[at] : one.source_start[at + 1]],
        *one.store_atom[one.store_start[at] : one.store_start[at + 1]],
    ]
    places = [offsets.of(int(atom), count, length) for atom in atoms]
    return [
        [int(length[part]), *(_operand(schedule, place[part], item_size, bases) for place in places)]
        for part in range(count)
    ]


def _operand(schedule: Schedule, place: tuple[int, int, int, int], item_size: int, bases: NDArray[np.int64]) -> int:
    base, offset, kind, _ = place
    if kind == USER:
        own = {MY_INPUT: OWN_INPUT, MY_OUTPUT: OWN_OUTPUT}
        return offset * item_size + (own[base] if base in own else int(bases[base]))
    packets = IN_PACKETS if schedule.packets else 0  # all scratch, also that which a rank keeps for itself
    return (int(bases[base]) + offset * item_size * (1 + schedule.packets)) | IN_SCRATCH | packets
