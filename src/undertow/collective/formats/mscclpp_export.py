"""One of our direct schedules as an MSCCL++ plan.

A worker becomes a threadblock; what it waits for and posts becomes waits and signals of channels (between ranks) and
semaphores (inside one). Waits for an earlier iteration guard scratch that we use again. The executor has all of it at
once, but uses it again in the next launch: so whoever reaches into another rank's scratch first waits for a signal that
this rank has begun the launch, and a rank does not end one before others have read its scratch. Between operations that
may depend on each other stands a nop, the executor's barrier of a threadblock. A worker with more operations than a
threadblock may have becomes several, which hand over to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...errors import NotExpressible, ProgramRefused, UnreadableFile
from ..checker import check
from ..language import OUTPUT
from ..schedule import END, MOVE, START, Schedule
from . import mscclpp_import
from .msccl_places import LETTERS
from .mscclpp import MOST_BUFFERS_OF_ONE, MOST_CHANNELS_OF_ONE, MOST_OPERATIONS, Gpu, Operand, Operation, Plan
from .order import waits_of

FORMAT = "MSCCL++ JSON"
_NAMES = {
    "all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall", "broadcast": "broadcast", "reduce": "reduce",
}  # fmt: skip
_BEGIN = -1
_NOP = Operation("nop")


@dataclass(slots=True)
class _Semaphore:
    """From one worker to another: which instructions post it, in order, and how many of them were waited for."""

    poster: int
    waiter: int
    posts: list[int] = field(default_factory=list)
    passed: int = 0
    number: int = 0  # of the channel between the two ranks, or of the rank's semaphore


def plan_of(schedule: Schedule) -> Plan:
    """Any direct schedule without instances."""
    if schedule.staged or schedule.packets:
        raise _refused(schedule, "only a direct schedule can be: plans reach into each other's memory")
    if schedule.instances > 1:
        raise _refused(schedule, f"it has {schedule.instances} instances, and a plan would have to cut its chunks")
    if not set(np.unique(schedule.instructions.kind).tolist()) <= {MOVE, START, END}:
        raise _refused(schedule, "it waits for a kernel's tiles, which the executor knows nothing of")
    made = _Exporter(schedule).plan()
    if schedule.worker_channel is not None:  # a file may do what our compiler never does
        try:
            check(mscclpp_import.schedule_of(made, f"<{schedule.name}>"))
        except (ProgramRefused, UnreadableFile) as error:
            raise _refused(schedule, f"what it becomes there is wrong: {error.facts['reason']}") from error
    return made


def _refused(schedule: Schedule, reason: str) -> NotExpressible:
    return NotExpressible(name=schedule.name, format=FORMAT, reason=reason)


class _Exporter:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._worker = np.repeat(np.arange(len(schedule.worker_rank)), np.diff(schedule.worker_start)).tolist()
        self._rank = schedule.worker_rank.tolist()
        self._first_worker = np.searchsorted(schedule.worker_rank, np.arange(schedule.ranks)).tolist()
        self._scratch_before = np.cumsum(schedule.atoms[:, 2:], axis=1) - schedule.atoms[:, 2:]
        self._scratch = schedule.atoms[:, 2:].sum(axis=1).tolist()
        self._semaphores: dict[tuple[int, int], _Semaphore] = {}  # by poster and waiter
        self._waits: dict[int, list[tuple[_Semaphore, int]]] = {}
        self._posts: dict[int, list[_Semaphore]] = {}
        self._find_semaphores()
        self._channels = self._number()

    def plan(self) -> Plan:
        schedule, contract = self._schedule, self._schedule.contract
        blocks: list[list[tuple[Operation, ...]]] = [[] for _ in range(schedule.ranks)]
        near = [
            sum(self._rank[one.waiter] == self._rank[one.poster] == rank for one in self._semaphores.values())
            for rank in range(schedule.ranks)
        ]
        for worker, rank in enumerate(self._rank):
            parts = _parts(self._block(worker, rank), near[rank])
            near[rank] += len(parts) - 1
            blocks[rank] += parts
        gpus = tuple(
            Gpu(
                contract.inputs[rank], contract.outputs[rank], self._scratch[rank],
                {"memory": tuple(self._channels[rank])} if self._channels[rank] else {},
                (0,) * near[rank],
                tuple(blocks[rank]),
            )
            for rank in range(schedule.ranks)
        )  # fmt: skip
        name = _NAMES.get(contract.name, "custom")
        others = {
            "reuse_resources": False, "num_threads_per_block": 1024, "buffer_alignment": 16, "min_message_size": 0,
            "max_message_size": (1 << 64) - 1,
        }  # fmt: skip
        return Plan(schedule.name, name, schedule.in_place, False, gpus, "Simple", dict(others))

    # -- who waits for whom --------------------------------------------------------------------------------------------

    def _find_semaphores(self) -> None:
        """All posts first, in the order of their worker; then waits, which count them."""
        schedule, kind = self._schedule, self._schedule.instructions.kind
        pairs = {
            (waiter, waited)
            for waiter, waited, back in waits_of(schedule).tolist()
            if back == 0 or kind[waited] == START or kind[waiter] == END
        }
        first, last = self._scratch_touches()
        total = len(kind)
        pairs |= {(at, _BEGIN - owner) for (_, owner), at in first.items()}
        pairs |= {(total + owner, at) for (_, owner), at in last.items()}
        for waiter, waited in pairs:
            found = self._semaphores.setdefault(self._ends(waiter, waited), _Semaphore(*self._ends(waiter, waited)))
            if waited not in found.posts:
                found.posts.append(waited)
                self._posts.setdefault(waited, []).append(found)
        for found in self._semaphores.values():
            found.posts.sort()
        for waiter, waited in sorted(pairs):
            found = self._semaphores[self._ends(waiter, waited)]
            self._waits.setdefault(waiter, []).append((found, found.posts.index(waited) + 1))

    def _ends(self, waiter: int, waited: int) -> tuple[int, int]:
        """Poster and waiter. Below 0 are beginnings of launches of ranks, behind all instructions their ends."""
        total = len(self._worker)
        poster = self._first_worker[_BEGIN - waited] if waited < 0 else self._worker[waited]
        return poster, self._first_worker[waiter - total] if waiter >= total else self._worker[waiter]

    def _scratch_touches(self) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
        """Per worker and other rank: its first touch of that rank's scratch, and the last time it reads there."""
        schedule, one = self._schedule, self._schedule.instructions
        first: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        for at, worker in enumerate(self._worker):
            read = self._atoms(one.source_start, one.source_atom, at)
            for number, atom in enumerate(read + self._atoms(one.store_start, one.store_atom, at)):
                owner = int(schedule.atom_rank[atom])
                if atom >= schedule.user_atoms and owner != self._rank[worker]:
                    first.setdefault((worker, owner), at)
                    if number < len(read):
                        last[worker, owner] = at
        return first, last

    def _used(self) -> list[_Semaphore]:
        return [one for _, one in sorted(self._semaphores.items())]

    def _number(self) -> list[list[int]]:
        """The peers of each rank's channels; between two ranks there are as many as the busier direction needs."""
        count: dict[tuple[int, int], int] = {}
        for one in self._used():
            pair = (self._rank[one.poster], self._rank[one.waiter])
            one.number = count.get(pair, 0)
            count[pair] = one.number + 1
        peers: list[list[int]] = []
        for rank in range(self._schedule.ranks):
            mine: list[int] = []
            for other in range(self._schedule.ranks):
                if other != rank:
                    mine += [other] * max(count.get((rank, other), 0), count.get((other, rank), 0))
            peers.append(mine)
        return peers

    # -- operations ----------------------------------------------------------------------------------------------------

    def _block(self, worker: int, rank: int) -> list[Operation]:
        schedule, one = self._schedule, self._schedule.instructions
        made: list[Operation] = []
        if worker == self._first_worker[rank]:
            made += self._meet("signal", rank, [(semaphore, 1) for semaphore in self._posts.get(_BEGIN - rank, [])])
        for at in range(schedule.worker_start[worker], schedule.worker_start[worker + 1]):
            meeting = self._pass(rank, at)
            data = list(self._move(rank, at)) if one.kind[at] == MOVE and one.count[at] else []
            if made and made[-1].sources and (meeting or data):
                made.append(_NOP)
            made += meeting
            for operation in data:
                if made and made[-1] is not _NOP:
                    made.append(_NOP)
                made.append(operation)
            posts = self._meet("signal", rank, [(semaphore, 1) for semaphore in self._posts.get(at, [])])
            if posts and made and made[-1] is not _NOP:
                made.append(_NOP)
            made += posts
        return made + (self._pass(rank, len(self._worker) + rank) if worker == self._first_worker[rank] else [])

    def _pass(self, rank: int, at: int) -> list[Operation]:
        """What stands before an instruction, or at a rank's end; a wait takes one signal, of several the first."""
        waits: dict[int, tuple[_Semaphore, int]] = {}
        for semaphore, value in self._waits.get(at, []):
            if value > semaphore.passed:
                before = waits[id(semaphore)][1] if id(semaphore) in waits else 0
                waits[id(semaphore)] = (semaphore, before + value - semaphore.passed)
                semaphore.passed = value
        return self._meet("wait", rank, list(waits.values()))

    def _meet(self, verb: str, rank: int, semaphores: list[tuple[_Semaphore, int]]) -> list[Operation]:
        """Waits or signals, several channels at once where possible."""
        made = []
        turns = max((times for _, times in semaphores), default=0)
        for turn in range(turns):
            now = [semaphore for semaphore, times in semaphores if times > turn]
            near = [one for one in now if self._rank[one.poster] == self._rank[one.waiter]]
            far = [self._channel(rank, one) for one in now if self._rank[one.poster] != self._rank[one.waiter]]
            for begin in range(0, len(far), MOST_CHANNELS_OF_ONE):
                chosen = tuple(far[begin : begin + MOST_CHANNELS_OF_ONE])
                made.append(Operation(verb, channel_type="memory", channels=chosen))
            name = "sem_release" if verb == "signal" else "sem_acquire"
            made += [Operation(name, semaphores=(one.number,)) for one in near]
        return made

    def _channel(self, rank: int, one: _Semaphore) -> int:
        ends = self._rank[one.poster], self._rank[one.waiter]
        return self._channels[rank].index(ends[1] if rank == ends[0] else ends[0]) + one.number

    def _move(self, rank: int, at: int) -> list[Operation]:
        """An instruction as copies, or as a sum into one place of this rank and copies of it."""
        one, count = self._schedule.instructions, int(self._schedule.instructions.count[at])
        sources = [self._operand(rank, atom, count) for atom in self._atoms(one.source_start, one.source_atom, at)]
        stores = [self._operand(rank, atom, count) for atom in self._atoms(one.store_start, one.store_atom, at)]
        if len(sources) == 1 and sources[0].rank is None:
            return _copies(sources[0], stores)
        own = [store for store in stores if store.rank is None]
        total = next((store for store in own if store in sources), own[0] if own else self._temporary(rank, count))
        near = [source for source in sources if source.rank is None]
        far = [source for source in sources if source.rank is not None]
        made = []
        if near:
            first = total if total in near else near[0]
            near.remove(first)  # once: what is added twice stays
        else:
            made.append(_copy(far.pop(0), total))
            first = total
        for name, parts in (("re", near), ("rre", far)):
            for begin in range(0, len(parts), MOST_BUFFERS_OF_ONE - 1):
                part = parts[begin : begin + MOST_BUFFERS_OF_ONE - 1]
                made.append(Operation(name, (first, *part), (total,), "memory" if name == "rre" else ""))
                first = total
        return made + _copies(total, [store for store in stores if store != total])

    def _atoms(self, start: NDArray[np.int32], atoms: NDArray[np.int32], at: int) -> list[int]:
        found: list[int] = atoms[start[at] : start[at + 1]].tolist()
        return found

    def _operand(self, rank: int, atom: int, count: int) -> Operand:
        schedule = self._schedule
        owner, buffer = int(schedule.atom_rank[atom]), int(schedule.atom_buffer[atom])
        index = atom - int(schedule.first_atom[owner, buffer])
        if buffer > OUTPUT:
            index += int(self._scratch_before[owner, buffer - 2])
        letter = LETTERS[buffer] if buffer <= OUTPUT else "s"
        return Operand(letter, index, count, None if owner == rank else owner)

    def _temporary(self, rank: int, count: int) -> Operand:
        """Room in scratch for a sum that is stored on other ranks only."""
        made = Operand("s", self._scratch[rank], count)
        self._scratch[rank] += count
        return made


def _parts(block: list[Operation], semaphore: int) -> list[tuple[Operation, ...]]:
    """One threadblock, or as many as it takes, which hand over to each other with semaphores from this number on."""
    if len(block) <= MOST_OPERATIONS:
        return [tuple(block)]
    room = MOST_OPERATIONS - 4  # what taking and handing over takes
    made: list[tuple[Operation, ...]] = []
    for begin in range(0, len(block), room):
        part = block[begin : begin + room]
        if begin:
            part = [Operation("sem_acquire", semaphores=(semaphore + len(made) - 1,)), _NOP, *part]
        if begin + room < len(block):
            part = [*part, _NOP, Operation("sem_release", semaphores=(semaphore + len(made),))]
        made.append(tuple(part))
    return made


def _copies(source: Operand, stores: list[Operand]) -> list[Operation]:
    """One operation for each place of this rank, and as few as possible for those of others."""
    made = [_copy(source, store) for store in stores if store.rank is None]
    far = [store for store in stores if store.rank is not None]
    for begin in range(0, len(far), MOST_BUFFERS_OF_ONE):
        part = tuple(far[begin : begin + MOST_BUFFERS_OF_ONE])
        made.append(Operation("put", (source,) * len(part), part, "memory"))
    return made


def _copy(source: Operand, destination: Operand) -> Operation:
    if source.rank is not None:
        return Operation("get", (source,), (destination,), "memory")
    return Operation("copy", (source,), (destination,))
