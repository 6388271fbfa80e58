"""The steps of a walk (`lane_plan`): what was collected, with flushes where sends may still read, and with signals
between tracks where two of them use the same memory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .lane_order import Chunk, atoms_read, atoms_written, executor, executors

if TYPE_CHECKING:
    from .schedule import Schedule

NEAR, FAR = 0, 1  # lanes: between ranks of one node, between nodes
EARLY, MAIN, LATE = range(3)  # tracks
# Steps and what their numbers mean. Flushes with LATER are for iterations from `depth` on.
# instruction, instructions, messages, messages, messages, parcel of a kernel, lane, lane, signal, signal
RUN, SEND, EXPECT, RECEIVE, FREE, AWAIT, FLUSH, FLUSH_LATER, SIGNAL, WAIT = range(10)
_LOOK_BACK = 64  # chunks
_SPARES = 16  # chunks that wait to be sent and have no other memory; with more of them, a flush makes room


class Step(NamedTuple):
    """See the kinds above."""

    kind: int
    track: int
    numbers: tuple[int, ...]


class _Touch(NamedTuple):
    """Local memory that a step reads and writes; as atoms, spares below zero."""

    read: set[int]
    written: set[int]


class Steps:
    """Collects steps.

    By instruction: `lanes` that its messages go by. By chunk: the `takers` that read first what it was sent as, and
    what it was `made_of`.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        lanes: Sequence[set[int]],
        takers: Mapping[Chunk, set[Chunk]],
        made_of: Mapping[Chunk, set[Chunk]],
    ) -> None:
        self._schedule, self._rank = schedule, rank
        self._lanes, self._takers, self._made_of = lanes, takers, made_of
        self._steps: list[tuple[Step, _Touch]] = []
        self._next_spare = 0
        mine = np.array(executors(schedule)) == rank
        self._room = max(_SPARES, int(schedule.instructions.count[mine].max(initial=0)))
        staging = len(schedule.buffers) - 1
        # Places of my workspace are counted from the first scratch chunk on, atoms from the first of staging.
        self._first_place = int(schedule.first_atom[rank, staging]) - int(schedule.atoms[rank, 2:staging].sum())
        self._sent: dict[int, list[int]] = {}  # instruction -> what the messages of its chunks are read from
        self._written: dict[int, dict[int, int]] = {}  # instruction -> local memory that it writes -> chunk
        self.spare_of: dict[int, int] = {}
        self.spares = 0
        self.signals = 0

    def add(self, kind: int, track: int, numbers: Sequence[int], places: Iterable[int] = ()) -> None:
        """One step for all `numbers`, unless there are none. `places`: of my workspace, that it writes."""
        if numbers:
            atoms = {self._first_place + place for place in places}
            self._steps.append((Step(kind, track, tuple(numbers)), _Touch(set(), atoms)))

    def wait_for_kernel(self, instructions: Sequence[int], track: int) -> None:
        """For all parcels that `instructions` wait for, each once."""
        one = self._schedule.instructions
        written: dict[int, set[int]] = defaultdict(set)
        for at in instructions:
            written[int(one.number[at])].update(atom for atom, _ in atoms_written(self._schedule, at))
        for parcel, atoms in written.items():
            self._steps.append((Step(AWAIT, track, (parcel,)), _Touch(set(), atoms)))

    def moves(self, instructions: Sequence[int], track: int) -> None:
        """Of a turn. What is only sent leaves first; then sums are made, and leave together."""
        schedule = self._schedule
        computed, waiting = [], []
        for at in instructions:
            stores = atoms_written(schedule, at)
            local = {atom: part for atom, part in stores if schedule.atom_rank[atom] == self._rank}
            sends = len(local) < len(stores)
            computes = stores_here(schedule, at)
            spare = self._spare(at) if computes and not local else []
            if sends:
                self._sent[at] = self._sent_from(at, spare)
            if computes:
                self._written[at] = {**local, **{atom: part for part, atom in enumerate(spare)}}
                computed.append((at, sends))
            else:
                waiting.append(at)
        self._send(waiting, track)
        waiting = []
        for at, sends in computed:
            written = set(self._written[at])
            if any(not written.isdisjoint(self._sent[other]) for other in waiting):  # all spares are in use
                self._send(waiting, track)
                waiting = []
            read = {atom for atom, _ in atoms_read(schedule, at)}
            self._steps.append((Step(RUN, track, (at,)), _Touch(read, written)))
            if sends:
                waiting.append(at)
        self._send(waiting, track)

    def _send(self, instructions: Sequence[int], track: int) -> None:
        if instructions:
            read = set[int]().union(*(self._sent[at] for at in instructions))
            self._steps.append((Step(SEND, track, tuple(instructions)), _Touch(read, set())))

    def _sent_from(self, at: int, spare: list[int]) -> list[int]:
        """What the messages of an instruction are read from: its source, its first local store, or a spare."""
        if spare:
            return spare
        one, schedule = self._schedule.instructions, self._schedule
        if sends_source(schedule, at):
            return [atom for atom, _ in atoms_read(schedule, at)]
        stores = one.store_atom[one.store_start[at] : one.store_start[at + 1]].tolist()
        first = next(atom for atom in stores if schedule.atom_rank[atom] == self._rank)
        return list(range(first, first + int(one.count[at])))

    def _spare(self, at: int) -> list[int]:
        """Memory of its own for a sum that is only sent; used again after a while, which makes a flush."""
        count = int(self._schedule.instructions.count[at])
        first = self._next_spare if self._next_spare + count <= self._room else 0
        self._next_spare = first + count
        self.spares = max(self.spares, self._next_spare)
        self.spare_of[at] = first
        return [-1 - spare for spare in range(first, first + count)]

    # -- flushes and signals -------------------------------------------------------------------------------------------

    def finished(self) -> list[Step]:
        """The steps, with flushes and signals."""
        return self._signalled(self._flushed())

    def _flushed(self) -> list[tuple[Step, _Touch]]:
        """A flush counts as the reading of what it waits for: whoever writes there on another track waits for it."""
        users = self._schedule.user_atoms
        recycled: tuple[set[int], set[int]] = (set(), set())  # by lane: sent out of what later iterations use again
        for at, atoms in self._sent.items():
            for lane in self._lanes[at]:
                recycled[lane].update(atom for atom in atoms if not 0 <= atom < users)
        pending: list[dict[int, set[Chunk]]] = [{}, {}]  # by lane: what sends of this iteration may read, and which
        over = [False, False]  # whether sends of earlier iterations are over
        found = []
        for step, touch in self._steps:
            if step.kind == RUN:
                for lane in (NEAR, FAR):
                    again = any(
                        atom in pending[lane] and not self._taken((step.numbers[0], part), pending[lane][atom])
                        for atom, part in self._written[step.numbers[0]].items()
                    )
                    if again or (not over[lane] and not touch.written.isdisjoint(recycled[lane])):
                        read = (set(pending[lane]) if again else set()) | (set() if over[lane] else recycled[lane])
                        kind = FLUSH if again else FLUSH_LATER
                        found.append((Step(kind, step.track, (lane,)), _Touch(read, set())))
                        over[lane] = True
                    if again:
                        pending[lane].clear()
            elif step.kind == SEND:
                for at in step.numbers:
                    for lane in self._lanes[at]:
                        for part, atom in enumerate(self._sent[at]):
                            pending[lane].setdefault(atom, set()).add((at, part))
            found.append((step, touch))
        return found

    def _taken(self, chunk: Chunk, sent: set[Chunk]) -> bool:
        """Whether `chunk` is made, by and by, of all messages that chunks `sent` were sent as: then these have left.

        A short look back: answers come soon, or not at all. All chunks on the way are as long, so that none is empty.
        """
        wanted = set[Chunk]().union(*(self._takers[one] for one in sent))
        found, ahead = {chunk}, deque([chunk])
        while ahead and len(found) < _LOOK_BACK and not wanted <= found:
            new = self._made_of.get(ahead.popleft(), set()) - found
            found |= new
            ahead.extend(new)
        return wanted <= found

    def _signalled(self, steps: list[tuple[Step, _Touch]]) -> list[Step]:
        """Before a step, a wait for the last step of each other track that uses its memory, unless that is known. Steps
        of a track that wait for nothing between them are signalled once, after the last."""
        ends = _blocks([step for step, _ in steps])
        latest: dict[int, int] = {}  # of each track
        writer: dict[int, int] = {}  # atom -> place in `steps`
        readers: dict[int, list[int]] = defaultdict(list)  # since it was written
        known: dict[tuple[int, int], int] = {}  # (track, other track) -> the last that it has waited for
        waits: dict[int, list[int]] = defaultdict(list)
        for number, (step, touch) in enumerate(steps):
            before = {writer[atom] for atom in touch.read | touch.written if atom in writer}
            before.update(reader for atom in touch.written for reader in readers.pop(atom, ()))
            last: dict[int, int] = {}
            for other in before:
                track = steps[other][0].track
                last[track] = max(last.get(track, -1), min(ends[other], latest[track]))
            for track, other in last.items():
                if track != step.track and known.get((step.track, track), -1) < other:
                    known[step.track, track] = other
                    waits[number].append(other)
            latest[step.track] = number
            for atom in touch.read:
                readers[atom].append(number)
            for atom in touch.written:
                writer[atom] = number
        signal_of = {
            other: signal for signal, other in enumerate(sorted({one for two in waits.values() for one in two}))
        }
        self.signals = len(signal_of)
        found = []
        for number, (step, _) in enumerate(steps):
            found += [Step(WAIT, step.track, (signal_of[other],)) for other in waits[number]]
            found.append(step)
            if number in signal_of:
                found.append(Step(SIGNAL, step.track, (signal_of[number],)))
        return found


def _blocks(steps: Sequence[Step]) -> list[int]:
    """Of each step: the last one of its track before the next that waits for something."""
    found = list(range(len(steps)))
    after: dict[int, int] = {}  # by track: the end of the block that follows
    for number in reversed(range(len(steps))):
        step = steps[number]
        found[number] = after.get(step.track, number)
        if step.kind in (RUN, SEND, FREE):
            after[step.track] = found[number]
        else:
            after.pop(step.track, None)
    return found


def stores_here(schedule: Schedule, at: int) -> bool:
    """Whether an instruction writes memory of its own rank, a spare if nothing else, before it sends."""
    one = schedule.instructions
    stores = one.store_atom[one.store_start[at] : one.store_start[at + 1]]
    mine = schedule.atom_rank[stores] == executor(schedule, at)
    return bool(mine.any()) or not sends_source(schedule, at)


def sends_source(schedule: Schedule, at: int) -> bool:
    """Whether an instruction with remote stores sends what it reads: one source, and not a staging place."""
    one = schedule.instructions
    sources = one.source_atom[one.source_start[at] : one.source_start[at + 1]]
    return len(sources) == 1 and bool(
        sources[0] < schedule.user_atoms or schedule.atom_buffer[sources[0]] < len(schedule.buffers) - 1
    )
