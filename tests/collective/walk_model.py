"""All ranks' walks over lanes that hold as little, and send as late, as they are allowed to."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from undertow.collective import lane_plan as plan
from undertow.collective import lane_steps as steps
from undertow.collective.schedule import Schedule

Sent = tuple[tuple[int, ...], int]  # messages that leave together, iteration


class Model:
    """Every rank's host does its steps in the order of its walk, all tracks in one; lanes do what they are told later.

    What a walk names in one step may be joined: it is then taken, and room for it asked for, all at once.
    """

    def __init__(self, schedule: Schedule, nodes: tuple[int, ...], near: int, iterations: int, seed: int) -> None:
        self.schedule, self.near, self.nodes = schedule, near, nodes
        self.walks = [plan.walk(schedule, rank, nodes, near) for rank in range(schedule.ranks)]
        self.messages, self.lane = self.walks[0].messages, self.walks[0].lane_of
        self.iterations = iterations
        self.random = random.Random(seed)
        self.joins = self.random.random() < 0.7
        self.hosts = [self.script(rank) for rank in range(schedule.ranks)]
        self.left = list(range(schedule.ranks))
        self.queues: dict[tuple[int, int, bool], deque[Sent]] = defaultdict(deque)  # (rank, lane, shared)
        self.full: dict[object, tuple[int, int]] = {}  # what lanes hold, by slot or pair
        self.posted: set[tuple[int, int]] = set()
        self.place: dict[tuple[int, int, int], tuple[int, int]] = {}  # (rank, place, copy) -> message, iteration
        self.by_sender: dict[int, list[int]] = defaultdict(list)
        for number, one in enumerate(self.messages):
            self.by_sender[one.sent].append(number)

    def holder(self, number: int, iteration: int) -> object:
        one = self.messages[number]
        if self.lane[number] == steps.FAR:
            return "far", number, iteration
        slot = one.slot + iteration % self.schedule.depth
        if self.near == plan.TWO:
            slot = (one.slot + iteration * one.step) % 2
        return one.sender, one.receiver, one.shared, slot

    def batches(self, numbers: Sequence[int], iteration: int) -> Iterator[tuple[int, ...]]:
        """What a lane may join: messages with a hand-off each, those of a pair upwards. Without joins: one by one."""
        some: dict[object, int] = {}
        for number in numbers:
            one, holder = self.messages[number], self.holder(number, iteration)
            other = (one.sender, one.receiver, one.shared, 1)
            if some and (not self.joins or holder in some or (self.near == plan.TWO and other in some)):
                yield tuple(some.values())
                some = {}
            some[holder] = number
        if some:
            yield tuple(some.values())

    def script(self, rank: int) -> Iterator[bool]:
        """What a host does, a step for each True; False while it cannot go on."""
        walk, depth = self.walks[rank], self.schedule.depth
        for iteration in range(self.iterations):
            for kind, _, numbers in walk.steps:
                if kind == steps.RUN:
                    self.check_run(rank, numbers[0], iteration)
                elif kind == steps.SEND:
                    self.enqueue(rank, numbers, iteration)
                elif kind == steps.EXPECT:
                    self.posted.update((number, iteration) for number in numbers)
                elif kind == steps.RECEIVE:
                    for batch in self.batches(numbers, iteration):
                        while any(self.holder(number, iteration) not in self.full for number in batch):
                            yield False
                        for number in batch:
                            self.take(rank, number, iteration)
                elif kind == steps.FREE:
                    for number in numbers:
                        one = self.messages[number]
                        assert self.place.pop((rank, one.place, iteration % depth)) == (number, iteration)
                        if self.lane[number] == steps.NEAR and self.near == plan.PLACES:
                            del self.full[self.holder(number, iteration)]
                elif kind == steps.FLUSH or (kind == steps.FLUSH_LATER and iteration >= depth):
                    while any(self.queues[rank, numbers[0], shared] for shared in (False, True)):
                        yield False
                yield True

    def enqueue(self, rank: int, instructions: Sequence[int], iteration: int) -> None:
        """Shared chunks leave one after the other, each for all at once; the others as the lane joins them."""
        numbers = [number for at in instructions for number in self.by_sender[at]]
        chunks: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number in numbers:
            if self.messages[number].shared:
                chunks[self.messages[number].sent, self.messages[number].slot].append(number)
        for chunk in chunks.values():
            assert sorted(self.messages[number].receiver for number in chunk) == [
                one for one in range(self.schedule.ranks) if one != rank
            ], "what is shared goes to all others"
            self.queues[rank, steps.NEAR, True].append((tuple(chunk), iteration))
        for lane in (steps.NEAR, steps.FAR):
            alone = [number for number in numbers if self.lane[number] == lane and not self.messages[number].shared]
            self.queues[rank, lane, False].extend((batch, iteration) for batch in self.batches(alone, iteration))

    def take(self, rank: int, number: int, iteration: int) -> None:
        holder = self.holder(number, iteration)
        assert self.full[holder] == (number, iteration), "messages of one pair out of order"
        self.place[rank, self.messages[number].place, iteration % self.schedule.depth] = number, iteration
        if self.lane[number] == steps.FAR or self.near == plan.TWO:
            del self.full[holder]

    def check_run(self, rank: int, at: int, iteration: int) -> None:
        """What it reads has arrived, and what it writes is read by no send that is still to be made."""
        one, depth = self.schedule.instructions, self.schedule.depth
        staging = len(self.schedule.buffers) - 1
        for atom in one.source_atom[one.source_start[at] : one.source_start[at + 1]]:
            if atom >= self.schedule.user_atoms and self.schedule.atom_buffer[atom] == staging:
                begin = int(atom - self.schedule.first_atom[rank, staging] + self.schedule.atoms[rank, 2:staging].sum())
                for place in range(begin, begin + one.count[at]):
                    number, when = self.place[rank, place, iteration % depth]
                    assert when == iteration
                    assert self.messages[number].place == place
        written = self.memory(rank, at, iteration, sent=False)
        for (sender, _, _), queue in self.queues.items():
            for numbers, when in queue if sender == rank else ():
                for number in numbers:
                    read = self.memory(rank, self.messages[number].sent, when, sent=True)
                    assert written.isdisjoint(read), "a send may still read what is written"

    def memory(self, rank: int, at: int, iteration: int, sent: bool) -> set[tuple[int, int]]:
        """Local (atom, copy or tile) pairs that an instruction writes or, if `sent`, that its sends read."""
        one, users = self.schedule.instructions, self.schedule.user_atoms
        spare = self.walks[rank].spare_of.get(at)
        stores = one.store_atom[one.store_start[at] : one.store_start[at + 1]]
        begins = [int(atom) for atom in stores if self.schedule.atom_rank[atom] == rank]
        begins += [-1 - spare - int(one.count[at]) + 1] if spare is not None else []
        if sent:
            source = int(one.source_atom[one.source_start[at]])
            begins = [source] if steps.sends_source(self.schedule, at) else begins[:1]
        copy = iteration % self.schedule.depth
        return {
            (atom, iteration if 0 <= atom < users else copy)
            for begin in begins
            for atom in range(begin, begin + int(one.count[at]))
        }

    def send(self, rank: int, lane: int, shared: bool) -> bool:
        """Let a queue make its first send (of a network: any), if there is room."""
        queue = self.queues[rank, lane, shared]
        for index in range(len(queue) if lane == steps.FAR else min(1, len(queue))):
            numbers, iteration = queue[index]
            room = all(self.holder(number, iteration) not in self.full for number in numbers)
            if room and (lane == steps.NEAR or all((number, iteration) in self.posted for number in numbers)):
                for number in numbers:
                    self.full[self.holder(number, iteration)] = number, iteration
                del queue[index]
                return True
        return False

    def advance(self, rank: int) -> bool:
        """Let a host go on, mostly as far as it can."""
        moved = False
        while (found := next(self.hosts[rank], None)) is True:
            moved = True
            if self.random.random() < 0.1:
                break
        if found is None:
            self.left.remove(rank)
        return moved or found is None

    def run(self) -> None:
        late = self.random.random() < 0.5  # whether sends wait until no host can go on
        kinds = ((steps.NEAR, False), (steps.NEAR, True), (steps.FAR, False))
        engines = [(rank, lane, shared) for rank in self.left for lane, shared in kinds]
        while self.left:
            self.random.shuffle(self.left)
            self.random.shuffle(engines)
            hosts = [self.advance(rank) for rank in list(self.left)]
            sends = [] if late and any(hosts) else [self.send(*one) for one in engines]
            assert any(hosts) or any(sends), "deadlock"
