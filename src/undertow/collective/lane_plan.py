"""One rank's walk through a staged schedule whose messages travel by lanes. Integers only; the runtime reads it.

All ranks go through one *order* of all instructions, and each does its own part: its instructions, the receive of a
message before it is first read, the freeing of the place after it was last read. The order is sorted by how much must
come before, so whatever an instruction needs stands before it, and nobody waits for ever:

    a receive   waits for its send, which stands before the first reader
    a send      waits until the message before it in the same place is freed; its last reader stands before the send,
                as the schedule itself has to put it there
    a flush     waits for this rank's sends so far

That needs lanes that hold a message for every place (PLACES). Two kinds of lanes hold less, and get more:

    ONE      a message for each pair of ranks: the receiver takes it no later than where the next one is sent
    MEETING  none, bytes move once the receive is posted: it is posted, without waiting, where the message is sent

A send may still be read after `send` returns. What it reads is either memory of its own (a *spare*), or is not written
before a flush: at once where the same iteration writes it again, in iterations from `depth` on where it is scratch.
Nothing is sent out of a staging place itself, so `free` never waits for a send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument
from .bind import (
    FIRST_WORKSPACE,
    INSTRUCTION_ROW,
    INSTRUCTIONS,
    MY_INPUT,
    MY_OUTPUT,
    OPERAND_ROW,
    OPERANDS,
    PIECE_ROW,
    PIECES,
)
from .schedule import MOVE, READY

if TYPE_CHECKING:
    from .schedule import Schedule

NEAR, FAR = 0, 1  # lanes: between ranks of one node, between nodes
PLACES, ONE, MEETING = range(3)  # what a lane holds before the receiver comes
# Steps and what their number means. Flushes with LATER are for iterations from `depth` on.
# instruction, message, message, message, parcel of a kernel, lane, lane
RUN, EXPECT, RECEIVE, FREE, AWAIT, FLUSH, FLUSH_LATER = range(7)
Operand = tuple[int, int]  # base, offset in elements
_SPARES = 16  # chunks that wait to be sent and have no other memory; with more of them, a flush makes room


@dataclass(slots=True)
class Message:
    """One chunk of a staging place. `place` counts chunks of the receiver's workspace, `slot` the pair's hand-offs."""

    sender: int
    receiver: int
    place: int
    sent: int  # instructions
    first_read: int = -1
    last_read: int = -1
    slot: int = 0


@dataclass(frozen=True)
class Walk:
    """What one rank does in every iteration. An iteration uses hand-off `slot` + iteration % depth of a message."""

    steps: list[tuple[int, int]]
    messages: list[Message]  # of all ranks
    slot_of: dict[tuple[int, int, int], int]  # (sender, receiver, place)
    slots: int  # hand-offs of the pair that needs most
    lanes: frozenset[int]  # that any rank uses
    spare_of: dict[int, int]  # instruction -> first of its spare chunks
    spares: int


def walk(schedule: Schedule, rank: int, nodes: Sequence[int], near: int) -> Walk:
    """The walk of `rank`. `nodes` as in a group; `near`: what the lane inside a node holds; MEETING if it is a net."""
    order = in_order(schedule)
    messages, sends, reads = _messages(schedule, order)
    places: dict[tuple[int, int], set[int]] = defaultdict(set)
    for one in messages:
        places[one.sender, one.receiver].add(one.place)
    slot_of = {
        (*pair, place): number * schedule.depth
        for pair, held in places.items()
        for number, place in enumerate(sorted(held))
    }
    for one in messages:
        one.slot = slot_of[one.sender, one.receiver, one.place]

    def lane_of(one: Message) -> int:
        return NEAR if near != MEETING and nodes[one.sender] == nodes[one.receiver] else FAR

    made = _Steps(schedule, rank)
    waiting: dict[int, int] = {}  # on lanes that hold one: the message from each sender that I have not received
    received: set[int] = set()
    executor = _executors(schedule)
    for at in order:
        for number in sends[at]:
            one = messages[number]
            if one.receiver != rank:
                continue
            if lane_of(one) == FAR:
                made.add(EXPECT, number)
            elif near == ONE:
                before = waiting.pop(one.sender, None)
                if before is not None and before not in received:
                    made.add(RECEIVE, before)
                    received.add(before)
                waiting[one.sender] = number
        if executor[at] != rank:
            continue
        for number in dict.fromkeys(reads[at]):
            if number not in received:
                made.add(RECEIVE, number)
                received.add(number)
        made.run(at, {lane_of(messages[number]) for number in sends[at]})
        for number in dict.fromkeys(reads[at]):
            if messages[number].last_read == at:
                made.add(FREE, number)
    return Walk(
        made.flushed(),
        messages,
        slot_of,
        max((len(held) for held in places.values()), default=0) * schedule.depth,
        frozenset(lane_of(one) for one in messages),
        made.spare_of,
        made.spares,
    )


def in_order(schedule: Schedule) -> list[int]:
    """All instructions of an iteration, by level: after their worker's earlier ones and after those they wait for."""
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


def _executors(schedule: Schedule) -> list[int]:
    """The rank of each instruction."""
    found: list[int] = np.repeat(schedule.worker_rank, np.diff(schedule.worker_start)).tolist()
    return found


def _messages(schedule: Schedule, order: list[int]) -> tuple[list[Message], list[list[int]], list[list[int]]]:
    """All messages of an iteration, and the numbers of those that each instruction sends and reads."""
    one, ranks = schedule.instructions, _executors(schedule)
    staging = len(schedule.buffers) - 1
    before_staging = schedule.atoms[:, 2:staging].sum(axis=1)
    messages: list[Message] = []
    sends: list[list[int]] = [[] for _ in order]
    reads: list[list[int]] = [[] for _ in order]
    live: dict[int, int] = {}  # staging atom -> the message in it
    for at in order:
        count = int(one.count[at])
        for atom in one.source_atom[one.source_start[at] : one.source_start[at + 1]].tolist():
            if atom < schedule.user_atoms or schedule.atom_buffer[atom] != staging:
                continue
            for number in (live[atom + part] for part in range(count)):
                reads[at].append(number)
                messages[number].first_read = at if messages[number].first_read < 0 else messages[number].first_read
                messages[number].last_read = at
        for atom in one.store_atom[one.store_start[at] : one.store_start[at + 1]].tolist():
            to = int(schedule.atom_rank[atom])
            if to == ranks[at]:
                continue
            place = int(before_staging[to]) + atom - int(schedule.first_atom[to, staging])
            for part in range(count):
                live[atom + part] = len(messages)
                sends[at].append(len(messages))
                messages.append(Message(ranks[at], to, place + part, at))
    if any(one.last_read < 0 for one in messages):
        must = "one whose messages are all read: nobody would free the others' places"
        raise InvalidArgument(argument="schedule", was="one with a message that nobody reads", must=must)
    return messages, sends, reads


@dataclass(frozen=True, slots=True)
class _Touch:
    """Local memory that an instruction writes, and what its sends read; as atoms, spares below zero."""

    written: set[int]
    sent: set[int]
    lanes: frozenset[int]


class _Steps:
    """Collects steps, and in the end puts flushes where memory is written that a send may still read."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule, self._rank = schedule, rank
        self._steps: list[tuple[int, int]] = []
        self._touches: dict[int, _Touch] = {}
        self._next_spare = 0
        mine = np.array(_executors(schedule)) == rank
        self._room = max(_SPARES, int(schedule.instructions.count[mine].max(initial=0)))
        self.spare_of: dict[int, int] = {}
        self.spares = 0

    def add(self, kind: int, number: int) -> None:
        self._steps.append((kind, number))

    def run(self, at: int, lanes: Iterable[int]) -> None:
        """Instruction `at`, which sends by `lanes`."""
        one = self._schedule.instructions
        if one.kind[at] == READY:
            self.add(AWAIT, int(one.number[at]))
        if one.kind[at] != MOVE:
            return
        count = int(one.count[at])
        stores = one.store_atom[one.store_start[at] : one.store_start[at + 1]].tolist()
        local = [atom for atom in stores if self._schedule.atom_rank[atom] == self._rank]
        written = {atom + part for atom in local for part in range(count)}
        sent: set[int] = set()
        if len(local) < len(stores):
            begin = int(one.source_atom[one.source_start[at]]) if sends_source(self._schedule, at) else None
            begin = local[0] if begin is None and local else begin
            if begin is None:
                sent = self._spare(at, count)
                written |= sent
            else:
                sent = set(range(begin, begin + count))
        self._touches[at] = _Touch(written, sent, frozenset(lanes))
        self.add(RUN, at)

    def _spare(self, at: int, count: int) -> set[int]:
        """Memory of its own for a sum that is only sent; used again after a while, which makes a flush."""
        first = self._next_spare if self._next_spare + count <= self._room else 0
        self._next_spare = first + count
        self.spares = max(self.spares, self._next_spare)
        self.spare_of[at] = first
        return {-1 - spare for spare in range(first, first + count)}

    def flushed(self) -> list[tuple[int, int]]:
        """The steps, with flushes."""
        users = self._schedule.user_atoms
        recycled: tuple[set[int], set[int]] = (set(), set())  # by lane: sent out of what later iterations use again
        for touch in self._touches.values():
            for lane in touch.lanes:
                recycled[lane].update(atom for atom in touch.sent if not 0 <= atom < users)
        pending: tuple[set[int], set[int]] = (set(), set())  # by lane: what sends of this iteration may still read
        over = [False, False]  # whether sends of earlier iterations are over
        found = []
        for kind, number in self._steps:
            if kind == RUN:
                touch = self._touches[number]
                for lane in (NEAR, FAR):
                    again = not touch.written.isdisjoint(pending[lane])
                    if again or (not over[lane] and not touch.written.isdisjoint(recycled[lane])):
                        found.append((FLUSH if again else FLUSH_LATER, lane))
                        over[lane] = True
                    if again:
                        pending[lane].clear()
                for lane in touch.lanes:
                    pending[lane].update(touch.sent)
            found.append((kind, number))
        return found


def sends_source(schedule: Schedule, at: int) -> bool:
    """Whether an instruction with remote stores sends what it reads: one source, and not a staging place."""
    one = schedule.instructions
    sources = one.source_atom[one.source_start[at] : one.source_start[at + 1]]
    return len(sources) == 1 and bool(
        sources[0] < schedule.user_atoms or schedule.atom_buffer[sources[0]] < len(schedule.buffers) - 1
    )


class Rows:
    """Reads the tables of a bound program. The rank's own workspace is base `FIRST_WORKSPACE`."""

    def __init__(self, code: NDArray[np.int64], rank: int, room: int) -> None:
        self._code: list[int] = code.tolist()
        self._mine = FIRST_WORKSPACE + rank
        self.room = room

    def pieces(
        self, row: int
    ) -> list[tuple[int, tuple[Operand, ...], tuple[Operand, ...], tuple[tuple[int, int], ...]]]:
        """(elements, sources, local stores, remote places as (rank, place)) of each chunk of an instruction."""
        code = self._code
        at = code[INSTRUCTIONS] + row * INSTRUCTION_ROW
        found = []
        for piece in range(code[at + 4], code[at + 5]):
            place = code[PIECES] + piece * PIECE_ROW
            elements, first, middle, _, last = code[place : place + PIECE_ROW]
            operands = [
                (code[entry], code[entry + 1])
                for entry in range(
                    code[OPERANDS] + first * OPERAND_ROW, code[OPERANDS] + last * OPERAND_ROW, OPERAND_ROW
                )
            ]
            known = [(FIRST_WORKSPACE if base == self._mine else base, offset) for base, offset in operands]
            reach = (MY_INPUT, MY_OUTPUT, self._mine)
            local = [one for one, (base, _) in zip(known, operands, strict=True) if base in reach]
            remote = [(base - FIRST_WORKSPACE, offset // self.room) for base, offset in operands if base not in reach]
            sources = middle - first  # all local
            found.append((elements, tuple(local[:sources]), tuple(local[sources:]), tuple(remote)))
        return found

    def places_read(self, row: int) -> dict[int, int]:
        """Elements of each place of my workspace that an instruction reads."""
        return {
            offset // self.room: elements
            for elements, sources, _, _ in self.pieces(row)
            for base, offset in sources
            if base == FIRST_WORKSPACE
        }
