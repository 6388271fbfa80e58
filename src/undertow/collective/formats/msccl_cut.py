"""Instructions cut into MSCCL's steps, in an order in which they can run.

An instruction may sum many sources and store to many places; a step receives at most one message and sends at most one.
A sum that is stored nowhere on its own rank, and is not just passed on, is given a chunk of scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..schedule import Schedule
from .msccl_places import Places
from .order import sequential, waits_of


@dataclass(slots=True)
class Operation:
    """A step before it has a threadblock. Atoms are of its own rank; messages are numbers."""

    rank: int
    type: str
    source: int | None
    destination: int | None
    count: int
    received: int | None = None
    sent: int | None = None


@dataclass(slots=True)
class Message:
    source: int
    destination: int
    stream: int  # which worker of its rank sends it


class Cutter:
    """One pass over a schedule. `joins(received, sent)`: whether one step may receive the one and send the other."""

    def __init__(self, schedule: Schedule, joins: Callable[[Message, Message], bool]) -> None:
        self.messages: list[Message] = []
        self.received: list[int] = []  # messages in the order they are received in
        self.joined: list[tuple[int, int]] = []  # messages that one step receives and sends
        self._schedule, self._joins, self._places = schedule, joins, Places(schedule)
        self._atoms = len(schedule.atom_rank)
        self._temporaries = [0] * schedule.ranks  # chunks of scratch beyond the schedule's own
        self._temporary_at: dict[int, tuple[int, int]] = {}  # made-up atom -> rank and offset
        self._arrived: dict[int, int] = {}

    def operations(self) -> Iterator[Operation]:
        schedule, one = self._schedule, self._schedule.instructions
        seen = [0] * schedule.ranks
        streams: list[int] = []
        ranks: list[int] = []
        for worker, rank in enumerate(schedule.worker_rank.tolist()):
            size = int(schedule.worker_start[worker + 1] - schedule.worker_start[worker])
            streams += [seen[rank]] * size
            ranks += [rank] * size
            seen[rank] += 1
        is_staging = self._places.is_staging
        for at in sequential(schedule.worker_start.tolist(), waits_of(schedule), len(one)):
            sources = one.source_atom[one.source_start[at] : one.source_start[at + 1]].tolist()
            stores = one.store_atom[one.store_start[at] : one.store_start[at + 1]].tolist()
            arriving = [self._arrived[atom] for atom in sources if is_staging(atom)]
            leaving = []
            for atom in stores:
                if is_staging(atom):
                    self._arrived[atom] = len(self.messages)
                    leaving.append(len(self.messages))
                    self.messages.append(Message(ranks[at], self._places.rank(atom), streams[at]))
            own = [atom for atom in sources if not is_staging(atom)]
            kept = [atom for atom in stores if not is_staging(atom)]
            for made in self._cut(ranks[at], own, arriving, kept, leaving, int(one.count[at])):
                if made.received is not None:
                    self.received.append(made.received)
                    if made.sent is not None:
                        self.joined.append((made.received, made.sent))
                yield made

    def _cut(
        self, rank: int, own: list[int], arriving: list[int], kept: list[int], leaving: list[int], count: int
    ) -> list[Operation]:
        if len(own) == 1 and not arriving:
            made = [Operation(rank, "cpy", own[0], atom, count) for atom in kept]
            return made + [Operation(rank, "s", own[0], None, count, sent=message) for message in leaving]
        if len(own) == len(arriving) == len(leaving) == 1 and not kept and self._may_join(arriving[0], leaving[0]):
            return [Operation(rank, "rrs", own[0], None, count, arriving[0], leaving[0])]
        into = [atom for atom in kept if atom in own]
        target = into[0] if into else kept[0] if kept else self._temporary(rank, count)
        made = []
        if into:
            own.remove(target)
        elif not own:
            made.append(Operation(rank, "r", None, target, count, received=arriving.pop(0)))
        elif arriving:
            made.append(Operation(rank, "rrc", own.pop(0), target, count, received=arriving.pop(0)))
        else:
            made.append(Operation(rank, "cpy", own.pop(0), target, count))
        made += [Operation(rank, "re", atom, target, count) for atom in own]
        made += [Operation(rank, "rrc", target, target, count, received=message) for message in arriving]
        last = made[-1]
        if last.received is not None:
            chosen = next((message for message in leaving if self._may_join(last.received, message)), None)
            if chosen is not None:
                last.type, last.sent = "rcs" if last.type == "r" else "rrcs", chosen
                leaving = [message for message in leaving if message != chosen]
        made += [Operation(rank, "s", target, None, count, sent=message) for message in leaving]
        return made + [Operation(rank, "cpy", target, atom, count) for atom in kept if atom != target]

    def _may_join(self, received: int, sent: int) -> bool:
        return self._joins(self.messages[received], self.messages[sent])

    def _temporary(self, rank: int, count: int) -> int:
        atom = self._atoms
        self._atoms += count
        for part in range(count):
            self._temporary_at[atom + part] = (rank, self._temporaries[rank] + part)
        self._temporaries[rank] += count
        return atom

    def scratch_chunks(self, rank: int) -> int:
        return self._places.scratch_chunks(rank) + self._temporaries[rank]

    def place(self, atom: int) -> tuple[str, int]:
        if atom in self._temporary_at:
            rank, offset = self._temporary_at[atom]
            return "s", self._places.scratch_chunks(rank) + offset
        return self._places.of(atom)
