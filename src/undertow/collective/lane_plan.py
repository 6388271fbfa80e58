"""One rank's walk through a staged schedule whose messages travel by lanes. Integers only; the runtime reads it.

All ranks go through one order of *turns* (`lane_order`), and each does its own part: its own turns, the receive of a
message before the turn that first reads it, the freeing of the place after the turn that last reads it. Whatever a turn
needs stands before it, so nobody waits for ever:

    a receive   waits for its send, which stands in a turn before the first reader's
    a send      waits until the message before it in the same place is freed; its last reader stands in a turn before,
                as it uses the same memory
    a flush     waits for this rank's sends so far

What a turn sends, and what it takes before it reads, go to the lane together, and are one step of the argument: they
need nothing of each other, so a lane may join them, and wait for all of them at once. Where it holds two messages of a
pair, it joins the first with the second, on both sides, and never the second with the next first: that one has room
when the first was taken, which may be joined with the second.

That needs lanes that hold a message for every place (PLACES). Two kinds of lanes hold less, and get more:

    TWO      two messages for each pair of ranks, in turns: the receiver takes one no later than in the turn in which
             the next but one is sent (there, whoever's turn it is, before it goes on)
    MEETING  none, bytes move once the receive is posted: it is posted, without waiting, where the message is sent

A lane of the kind TWO carries what goes to *all* other ranks apart, by `share`: copied out once, in a ring of the
sender's that holds two, in turns, each until the last receiver has taken it. To all others, because the sender asks
only the receivers of the next one whether they have read the last. Shared messages keep no order with the others, and
need none: both sides count them for themselves, and the rule of the next but one holds among them, for each receiver.
So the argument is the same: a share waits for receives that stand no later than in its own turn.

A walk has *tracks*, orders of its own beside each other where a runtime can have several: EARLY sends what kernels have
written, LATE takes what is shared, MAIN does everything else (where messages are handed on from rank to rank, all but
waiting for kernels). A step waits for the steps of its track before it, and, by signals, for those of other tracks that
use the same memory; all of them stand before it in the walk, so tracks wait for nothing that the walk in one piece
would not have waited for.

A send may still be read after `send` returns. What it reads is either memory of its own (a *spare*), or is not written
before a flush: at once where the same iteration writes it again, in iterations from `depth` on where it is scratch. No
flush is needed where what is written was made of what the receiver made of the message. Nothing is sent out of a
staging place itself, so `free` never waits for a send.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidArgument
from .lane_order import Chunk, Order, Turn, atoms_read, atoms_written, executors, in_turns
from .lane_steps import (
    EARLY,
    EXPECT,
    FAR,
    FREE,
    LATE,
    MAIN,
    NEAR,
    RECEIVE,
    Step,
    Steps,
    stores_here,
)
from .schedule import MOVE, READY

if TYPE_CHECKING:
    from .schedule import Schedule

_TRACKS = (MAIN, LATE, EARLY)  # of a turn: what waits for a kernel comes last
PLACES, TWO, MEETING = range(3)  # what a lane holds before the receiver comes


@dataclass(slots=True)
class Message:
    """One chunk of a staging place. `place` counts chunks of the receiver's workspace.

    `slot` is the pair's hand-off: of the place, or, on lanes that hold two, the how manieth of its kind it is; there it
    grows by `step` in every iteration.
    """

    sender: int
    receiver: int
    place: int
    sent: int  # instructions
    first_read: int = -1
    last_read: int = -1
    slot: int = 0
    step: int = 0
    shared: bool = False


@dataclass(frozen=True)
class Walk:
    """What one rank does in every iteration."""

    steps: list[Step]
    messages: list[Message]  # of all ranks
    lane_of: list[int]  # of each message
    sent_as: dict[tuple[int, int, int], int]  # (instruction, receiver, place) -> message
    slots: int  # hand-offs of the pair that needs most
    counted: bool  # whether hand-offs are of messages in turns, and not of places
    spare_of: dict[int, int]  # instruction -> first of its spare chunks
    spares: int
    signals: int  # between tracks


def walk(schedule: Schedule, rank: int, nodes: Sequence[int], near: int) -> Walk:
    """The walk of `rank`. `nodes` as in a group; `near`: what the lane inside a node holds; MEETING if it is a net."""
    order = in_turns(schedule)
    messages, sends, reads, takers = _messages(schedule, order.turns)
    lane_of = [NEAR if near != MEETING and nodes[one.sender] == nodes[one.receiver] else FAR for one in messages]
    if near == TWO and FAR not in lane_of:
        _share(schedule, messages, sends)
    tracks = _tracks(schedule, order, messages, reads)
    # The order in which a turn's messages leave: by track, and there what is only sent comes first.
    turns = [
        Turn(
            turn.rank, sorted(turn.instructions, key=lambda at: (_TRACKS.index(tracks[at]), stores_here(schedule, at)))
        )
        for turn in order.turns
    ]
    if near == TWO:
        slots = _count_messages(
            messages, (number for turn in turns for at in turn.instructions for number in sends[at])
        )
    else:
        slots = _number_places(messages, schedule.depth)
    lanes = [{lane_of[number] for number in sent} for sent in sends]
    made = _Walker(Steps(schedule, rank, lanes, takers, order.made_of), schedule, messages, reads, tracks)
    held: dict[tuple[int, bool], deque[int]] = defaultdict(deque)  # by sender: messages that may not have been taken
    for turn in turns:
        taken = []
        for number in (number for at in turn.instructions for number in sends[at]):
            one = messages[number]
            if one.receiver != rank:
                continue
            if lane_of[number] == FAR:
                made.steps.add(EXPECT, MAIN, [number])
            elif near == TWO:
                before = held[one.sender, one.shared]
                if len(before) == 2:
                    taken.append(before.popleft())
                before.append(number)
        made.receive(taken)
        if turn.rank == rank:
            made.take(turn)
    return Walk(
        made.steps.finished(),
        messages,
        lane_of,
        {(one.sent, one.receiver, one.place): number for number, one in enumerate(messages)},
        slots,
        near == TWO,
        made.steps.spare_of,
        made.steps.spares,
        made.steps.signals,
    )


class _Walker:
    """The steps of one rank's own turns."""

    def __init__(
        self, steps: Steps, schedule: Schedule, messages: list[Message], reads: list[list[int]], tracks: list[int]
    ) -> None:
        self.steps = steps
        self._schedule, self._messages, self._reads = schedule, messages, reads
        self._tracks = tracks
        self._received: set[int] = set()

    def receive(self, numbers: Sequence[int]) -> None:
        """Those that were not received yet, on the tracks of their first readers; together where they can be."""
        new = [number for number in dict.fromkeys(numbers) if number not in self._received]
        self._received.update(new)
        for track in (MAIN, LATE):
            self._place(RECEIVE, track, [one for one in new if self._tracks[self._messages[one].first_read] == track])

    def _place(self, kind: int, track: int, numbers: Sequence[int]) -> None:
        self.steps.add(kind, track, numbers, (self._messages[one].place for one in numbers))

    def take(self, turn: Turn) -> None:
        """Others first, what waits for a kernel last: a runtime of one track gets there only when it can wait."""
        one = self._schedule.instructions
        freed: dict[int, list[int]] = defaultdict(list)
        for track in _TRACKS:
            moves = [at for at in turn.instructions if self._tracks[at] == track and one.kind[at] == MOVE]
            read = [number for at in moves for number in self._reads[at]]
            self.receive(read)
            self.steps.moves(moves, track)
            for number in dict.fromkeys(read):
                if self._messages[number].last_read in moves:
                    freed[track].append(number)
        for track, numbers in freed.items():
            self._place(FREE, track, numbers)
        ready = [at for at in turn.instructions if one.kind[at] == READY]
        if ready:
            self.steps.wait_for_kernel(ready, EARLY)


def _tracks(schedule: Schedule, order: Order, messages: list[Message], reads: list[list[int]]) -> list[int]:
    """The track of each instruction. Only where kernels are waited for: elsewhere nothing could run ahead; and where no
    message is handed on from rank to rank, as in a ring: so many short steps that change tracks cost the host more than
    they gain."""
    one = schedule.instructions
    if not (one.kind == READY).any():
        return [MAIN] * len(one)
    tracks = []
    for at in range(len(one)):
        if any(messages[number].shared for number in reads[at]):
            tracks.append(LATE)
        elif one.kind[at] == READY or all(one.kind[other] == READY for other in order.values[at]):
            tracks.append(EARLY)
        else:
            tracks.append(MAIN)
    if any(tracks[one.sent] == MAIN and not one.shared for one in messages):
        return [MAIN] * len(tracks)
    return tracks


def _messages(
    schedule: Schedule, turns: list[Turn]
) -> tuple[list[Message], list[list[int]], list[list[int]], dict[Chunk, set[Chunk]]]:
    """All messages of an iteration, the numbers of those that each instruction sends and reads, and who reads first
    what a chunk of it was sent as."""
    ranks = executors(schedule)
    staging = len(schedule.buffers) - 1
    before_staging = schedule.atoms[:, 2:staging].sum(axis=1)
    messages: list[Message] = []
    sends: list[list[int]] = [[] for _ in ranks]
    reads: list[list[int]] = [[] for _ in ranks]
    live: dict[int, tuple[int, int]] = {}  # staging atom -> the message in it, the chunk it was sent from
    takers: dict[Chunk, set[Chunk]] = defaultdict(set)
    for at in (at for turn in turns for at in turn.instructions):
        for atom, part in atoms_read(schedule, at):
            if atom < schedule.user_atoms or schedule.atom_buffer[atom] != staging:
                continue
            number, chunk = live[atom]
            reads[at].append(number)
            if messages[number].first_read < 0:
                messages[number].first_read = at
                takers[messages[number].sent, chunk].add((at, part))
            messages[number].last_read = at
        for atom, part in sorted(atoms_written(schedule, at), key=lambda chunk: chunk[1]):  # as they leave
            to = int(schedule.atom_rank[atom])
            if to != ranks[at]:
                live[atom] = len(messages), part
                sends[at].append(len(messages))
                place = int(before_staging[to]) + atom - int(schedule.first_atom[to, staging])
                messages.append(Message(ranks[at], to, place, at))
    if any(one.last_read < 0 for one in messages):
        must = "one whose messages are all read: nobody would free the others' places"
        raise InvalidArgument(argument="schedule", was="one with a message that nobody reads", must=must)
    return messages, sends, reads, takers


def _share(schedule: Schedule, messages: list[Message], sends: list[list[int]]) -> None:
    """Mark what goes to all others: each chunk of such an instruction leaves once."""
    if schedule.ranks == 2:
        return
    for at, sent in enumerate(sends):
        receivers = sorted(messages[number].receiver for number in sent)
        others = [rank for rank in range(schedule.ranks) if not sent or rank != messages[sent[0]].sender]
        if sent and receivers == [rank for rank in others for _ in range(int(schedule.instructions.count[at]))]:
            for number in sent:
                messages[number].shared = True


def _number_places(messages: list[Message], depth: int) -> int:
    """A hand-off for each place and copy of it; how many the pair has that has most."""
    places: dict[tuple[int, int], set[int]] = defaultdict(set)
    for one in messages:
        places[one.sender, one.receiver].add(one.place)
    slot_of = {
        (*pair, place): number * depth for pair, held in places.items() for number, place in enumerate(sorted(held))
    }
    for one in messages:
        one.slot = slot_of[one.sender, one.receiver, one.place]
    return max((len(held) for held in places.values()), default=0) * depth


def _count_messages(messages: list[Message], leaving: Iterable[int]) -> int:
    """The messages of a pair in the order in which they leave, the shared ones of a sender apart; two hand-offs are
    enough."""
    count: dict[tuple[int, int, bool], int] = defaultdict(int)
    for one in (messages[number] for number in leaving):
        kind = one.sender, one.receiver, one.shared
        one.slot = count[kind]
        count[kind] += 1
    for one in messages:
        one.step = count[one.sender, one.receiver, one.shared]
    return 2
