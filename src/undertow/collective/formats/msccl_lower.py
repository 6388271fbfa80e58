"""Any staged schedule in MSCCL's steps, on threadblocks that MSCCL allows.

Messages of a rank to another go over one connection for each worker that sends them (more where they are not received
in the order they are sent in); a connection has a threadblock at each end. Where a rank passes on to one rank what
comes from another, both ends are one threadblock and the two steps one (rcs, rrs, rrcs). Dependences follow from who
reads and writes which chunk; what others imply is left out.
"""

from __future__ import annotations

from ..schedule import Schedule
from .msccl import MOST_THREADBLOCKS_OF_A_CHANNEL
from .msccl_cut import Cutter, Operation
from .msccl_steps import Draft, DraftBlock, Position

_Route = tuple[int, int, int]  # rank, stream, peer
_Connection = tuple[int, int, int, int]  # source, destination, stream, and which of those


def lowered(schedule: Schedule, fuse: bool) -> tuple[list[list[DraftBlock]], list[int]]:
    """The threadblocks of each rank, and the chunks of scratch of each; both with all instances."""
    first = Cutter(schedule, lambda received, sent: fuse and received.stream == sent.stream)
    for _ in first.operations():
        pass
    routes = _routes(first)
    cutter = Cutter(
        schedule,
        lambda received, sent: (
            routes.get((sent.source, sent.stream, received.source)) == sent.destination
            and received.stream == sent.stream
        ),
    )
    operations = list(cutter.operations())
    blocks = _Blocks(schedule.ranks, cutter, routes)
    for one in operations:
        blocks.add(one)
    scratch = [cutter.scratch_chunks(rank) * schedule.instances for rank in range(schedule.ranks)]
    return _replicated(blocks.made, schedule.instances), scratch


def _routes(cutter: Cutter) -> dict[_Route, int]:
    """Per rank, stream and origin, where everything is passed on to, if that is one rank and from nobody else."""
    onward: dict[_Route, set[int]] = {}
    backward: dict[_Route, set[int]] = {}
    for received, sent in cutter.joined:
        incoming, outgoing = cutter.messages[received], cutter.messages[sent]
        onward.setdefault((outgoing.source, outgoing.stream, incoming.source), set()).add(outgoing.destination)
        backward.setdefault((outgoing.source, outgoing.stream, outgoing.destination), set()).add(incoming.source)
    return {
        (rank, stream, origin): next(iter(targets))
        for (rank, stream, origin), targets in onward.items()
        if len(targets) == 1 and len(backward[rank, stream, next(iter(targets))]) == 1
    }


def _connections(cutter: Cutter) -> list[_Connection]:
    """Of each message: its stream's, or a further one where it would overtake a message of it."""
    turn = {message: at for at, message in enumerate(cutter.received)}
    latest: dict[tuple[int, int, int], list[int]] = {}
    found = []
    for number, one in enumerate(cutter.messages):
        ends = latest.setdefault((one.source, one.destination, one.stream), [])
        level = next((at for at, end in enumerate(ends) if end < turn[number]), len(ends))
        ends[level : level + 1] = [turn[number]]
        found.append((one.source, one.destination, one.stream, level))
    return found


def _channels(connections: list[_Connection], routes: dict[_Route, int]) -> dict[_Connection, int]:
    """As few channels as possible: different ones for connections of the same two ranks, and no channel with more
    threadblocks than it may have; the same one for connections that share a threadblock."""
    group = {one: one for one in connections}

    def head(one: _Connection) -> _Connection:
        while group[one] != one:
            one = group[one]
        return one

    for (rank, stream, origin), to in routes.items():
        ends = (origin, rank, stream, 0), (rank, to, stream, 0)
        group[head(ends[0])] = head(ends[1])
    members: dict[_Connection, list[_Connection]] = {}
    for one in sorted(group):
        members.setdefault(head(one), []).append(one)
    taken: set[tuple[int, int, int]] = set()  # source, destination, channel
    users: dict[tuple[int, int, bool], int] = {}  # rank, channel, sends: threadblocks
    found = {}
    for together in members.values():
        channel = 0
        while any(
            (one[0], one[1], channel) in taken
            or users.get((one[0], channel, True), 0) >= MOST_THREADBLOCKS_OF_A_CHANNEL
            or users.get((one[1], channel, False), 0) >= MOST_THREADBLOCKS_OF_A_CHANNEL
            for one in together
        ):
            channel += 1
        for one in together:
            found[one] = channel
            taken.add((one[0], one[1], channel))
            for rank, sends in ((one[0], True), (one[1], False)):
                users[rank, channel, sends] = users.get((rank, channel, sends), 0) + 1
    return found


class _Blocks:
    """Operations, one after the other, onto threadblocks; with what each must wait for."""

    def __init__(self, ranks: int, cutter: Cutter, routes: dict[_Route, int]) -> None:
        self.made: list[list[DraftBlock]] = [[] for _ in range(ranks)]
        self._cutter, self._routes = cutter, routes
        self._origins = {(rank, stream, to): origin for (rank, stream, origin), to in routes.items()}
        self._connections = _connections(cutter)
        self._channels = _channels(self._connections, routes)
        self._ends: dict[tuple[_Connection, bool], int] = {}  # connection, sends -> threadblock
        self._writer: dict[int, Position] = {}
        self._readers: dict[int, list[Position]] = {}
        # Up to which step of each other threadblock of its rank a threadblock knows; and what each step taught.
        self._known: list[list[dict[int, int]]] = [[] for _ in range(ranks)]
        self._taught: dict[tuple[int, int, int], dict[int, int]] = {}

    def add(self, one: Operation) -> None:
        number = self._block(one)
        block = self.made[one.rank][number]
        position = (number, len(block.steps))
        reads = [] if one.source is None else list(range(one.source, one.source + one.count))
        writes = [] if one.destination is None else list(range(one.destination, one.destination + one.count))
        before = {self._writer[atom] for atom in (*reads, *writes) if atom in self._writer}
        for atom in writes:
            before.update(self._readers.get(atom, ()))
        block.steps.append(
            Draft(
                one.type, None if one.source is None else self._cutter.place(one.source),
                None if one.destination is None else self._cutter.place(one.destination), one.count,
                self._needed(one.rank, number, before), one.received, one.sent,
            )
        )  # fmt: skip
        known = self._known[one.rank][number]
        known[number] = position[1]
        self._taught[one.rank, *position] = dict(known)
        for atom in reads:
            self._readers.setdefault(atom, []).append(position)
        for atom in writes:
            self._writer[atom] = position
            self._readers[atom] = []

    def _needed(self, rank: int, number: int, before: set[Position]) -> list[Position]:
        """Of the steps that must come before, those that this threadblock does not know of yet."""
        known = self._known[rank][number]
        found = []
        for block, at in sorted(before, key=lambda one: (-one[1], one[0])):
            if block != number and known.get(block, -1) < at:
                found.append((block, at))
                for other, step in self._taught[rank, block, at].items():
                    known[other] = max(known.get(other, -1), step)
        return found

    def _block(self, one: Operation) -> int:
        """Its threadblock: its connection's; for local work, the one that had to do with its chunks before."""
        if one.sent is not None:
            return self._end(self._connections[one.sent], True)
        if one.received is not None:
            return self._end(self._connections[one.received], False)
        for atom in (one.destination, one.source):
            if atom is not None and atom in self._writer:
                return self._writer[atom][0]
        blocks = self.made[one.rank]
        if not blocks:
            return self._new(one.rank, DraftBlock(-1, -1, 0))
        return min(range(len(blocks)), key=lambda number: len(blocks[number].steps))

    def _end(self, connection: _Connection, sends: bool) -> int:
        """The threadblock of this end of a connection, with the end that it passes on to or takes from."""
        if (connection, sends) not in self._ends:
            source, destination, stream, level = connection
            rank, peer = (source, destination) if sends else (destination, source)
            partner = -1
            if level == 0:  # a stream's first connection is the one that routes lead over
                partner = (self._origins if sends else self._routes).get((rank, stream, peer), -1)
            ends = (peer, partner) if sends else (partner, peer)
            self._ends[connection, sends] = number = self._new(rank, DraftBlock(*ends, self._channels[connection]))
            if partner >= 0:
                other = (partner, rank, stream, 0) if sends else (rank, partner, stream, 0)
                self._ends[other, not sends] = number
        return self._ends[connection, sends]

    def _new(self, rank: int, block: DraftBlock) -> int:
        self.made[rank].append(block)
        self._known[rank].append({})
        return len(self.made[rank]) - 1


def _replicated(blocks: list[list[DraftBlock]], instances: int) -> list[list[DraftBlock]]:
    """Every threadblock once for each instance, on its part of every chunk.

    Parts of neighbouring chunks are not neighbours, so a step of several chunks becomes several.
    """
    if instances == 1:
        return blocks
    channels = 1 + max((block.channel for of_rank in blocks for block in of_rank), default=0)
    widest = max((step.count for of_rank in blocks for block in of_rank for step in block.steps), default=1)
    made: list[list[DraftBlock]] = []
    for of_rank in blocks:
        replicas = []
        last = {
            (number, at): sum(step.count for step in block.steps[: at + 1]) - 1
            for number, block in enumerate(of_rank)
            for at in range(len(block.steps))
        }
        for block in of_rank:
            for instance in range(instances):
                copy = DraftBlock(block.send, block.receive, block.channel + instance * channels)
                for step in block.steps:
                    for part in range(step.count):
                        after = [(other * instances + instance, last[other, at]) for other, at in step.after]
                        copy.steps.append(
                            Draft(
                                step.type, _part(step.source, part, instance, instances),
                                _part(step.destination, part, instance, instances), 1, after if part == 0 else [],
                                _message(step.received, part, instance, instances, widest),
                                _message(step.sent, part, instance, instances, widest),
                            )
                        )  # fmt: skip
                replicas.append(copy)
        made.append(replicas)
    return made


def _part(place: tuple[str, int] | None, part: int, instance: int, instances: int) -> tuple[str, int] | None:
    return None if place is None else (place[0], (place[1] + part) * instances + instance)


def _message(number: int | None, part: int, instance: int, instances: int, widest: int) -> int | None:
    return None if number is None else (number * widest + part) * instances + instance
