"""An MSCCL++ plan as one of our schedules: direct, as ranks reach into each other's memory.

    k-th wait on a channel     waits for the k-th signal on its other end
    what reads packets         waits for whoever wrote them in this launch
    k-th acquire               waits for the release that lets it go on
    barrier                    its threadblocks wait for each other

A long call runs a plan tile by tile, as if it were launched once for each: no threadblock of a rank begins a launch
before all have ended the one before. So the checker sees what becomes of scratch from launch to launch, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ...errors import ProgramRefused
from ..contract import BUILT_IN, Contract, custom
from ..language import INPUT, OUTPUT
from ..schedule import Schedule
from .lanes import (
    MOST_CHUNKS,
    MOST_LANES,
    MOST_LANES_OF_A_RANK,
    MOST_MOVES,
    SCRATCH,
    SCRATCH_NAME,
    Lane,
    Layout,
    Lowered,
    Place,
    Step,
    join_at_end,
)
from .mscclpp import (
    COLLECTIVES,
    COPIES,
    IDLE,
    READS_PACKETS,
    SIGNALS,
    SUMS,
    SUMS_PACKETS,
    WAITS,
    WRITES_PACKETS,
    Operand,
    Operation,
    Plan,
)
from .roots import roots_of
from .text import damaged

_BUFFERS = {"i": INPUT, "o": OUTPUT, "s": SCRATCH}
_MOST_GRAIN = 64


def schedule_of(plan: Plan, path: str = "<file>") -> Schedule:
    """Not checked yet."""
    importer = _Importer(plan, path)
    made = importer.lowered()
    return replace(made, contract=importer.contract(*roots_of(made.contract.name, made))).schedule()


def contract_of(plan: Plan, path: str, *roots: int) -> Contract:
    """What the collective of this name promises; for a name we do not know, sizes only."""
    name = COLLECTIVES.get(plan.collective.lower().replace("_", ""), "custom")
    ranks = len(plan.gpus)
    inputs, outputs = ([getattr(gpu, f"{one}_chunks") for gpu in plan.gpus] for one in ("input", "output"))
    if sum(inputs) + sum(outputs) + sum(gpu.scratch_chunks for gpu in plan.gpus) > MOST_CHUNKS:
        damaged(path, 0, f"its buffers have more than {MOST_CHUNKS} chunks in all")
    if name == "custom":
        return custom(name, inputs, outputs, {})
    factor = {"all_gather": outputs[0] // ranks, "all_to_all": inputs[0] // ranks}.get(name, inputs[0])
    factor = inputs[0] // ranks if name == "reduce_scatter" else factor
    if factor < 1 or factor * ranks * ranks > MOST_CHUNKS:
        damaged(path, 0, f"{inputs[0]} input and {outputs[0]} output chunks are not what {plan.collective} has")
    contract = BUILT_IN[name](ranks, factor, *roots)
    for rank, (given, made) in enumerate(zip(inputs, outputs, strict=True)):
        if given not in (0, contract.inputs[rank]) or made not in (0, contract.outputs[rank]):
            reason = f"gpu {rank} has {given} input and {made} output chunks, but {plan.collective} with {factor}"
            damaged(path, 0, f"{reason} has {contract.inputs[rank]} and {contract.outputs[rank]}")
    return contract


class _Importer:
    def __init__(self, plan: Plan, path: str) -> None:
        self._plan, self._path = plan, path
        contract = contract_of(plan, path)
        self._grain = math.lcm(
            *{one.share[1] for gpu in plan.gpus for block in gpu.threadblocks for one in _flat(block)}
        )
        atoms = self._grain * (sum(contract.inputs) + sum(contract.outputs))
        scratch = [gpu.scratch_chunks * self._grain for gpu in plan.gpus]
        if self._grain > _MOST_GRAIN or atoms + sum(scratch) > MOST_CHUNKS:
            damaged(path, 0, f"groups of threadblocks cut its chunks into {self._grain} parts, too many")
        blocks = [max(1, len(gpu.threadblocks)) for gpu in plan.gpus]
        if sum(blocks) > MOST_LANES or max(blocks) > MOST_LANES_OF_A_RANK:
            most = f"{MOST_LANES_OF_A_RANK} threadblocks on a gpu, or {MOST_LANES} in all"
            damaged(path, 0, f"it has more than {most}")
        self._contract = self.contract()
        self._layout = Layout.of(self._contract, plan.in_place, [(SCRATCH_NAME, scratch)])
        self._lanes: list[Lane] = []
        self._waits: list[tuple[Place, Place, int]] = []
        self._signals: dict[tuple[str, int, int, int], list[Place]] = {}  # type, from, to, which of them
        self._awaited: dict[tuple[str, int, int, int], list[Place]] = {}
        self._releases: dict[tuple[int, int], list[Place]] = {}
        self._acquires: dict[tuple[int, int], list[Place]] = {}
        self._barriers: dict[tuple[int, int, int], list[tuple[Place, int]]] = {}
        self._moved = 0
        self._before: dict[int, list[tuple[int, Place]]] = {}  # by lane: its steps that wait, and for whom
        self._indexed = 0
        self._packets: dict[int, Place] = {}
        self._unpacked: list[tuple[Place, int]] = []

    def contract(self, *roots: int) -> Contract:
        """With chunks cut as groups of threadblocks share them."""
        contract = contract_of(self._plan, self._path, *roots)
        if self._plan.in_place and contract.in_place is None:
            contract = replace(contract, in_place=(0,) * contract.ranks)
        return contract.refined(self._grain)

    def lowered(self) -> Lowered:
        for rank, gpu in enumerate(self._plan.gpus):
            for block in gpu.threadblocks or ((),):
                self._lanes.append(Lane(rank, 0, [Step([], [], 0, 0)]))  # the beginning of a launch
                visits: dict[int, int] = {}
                for one in _flat(block):
                    self._add(len(self._lanes) - 1, rank, one, visits)
        self._match()
        self._bound_launches()
        join_at_end(self._lanes, self._waits, len(self._plan.gpus))
        depth = 2 if self._plan.double_scratch else 1
        name, in_place = self._plan.name, self._plan.in_place
        return Lowered(
            name,
            self._path,
            self._contract,
            in_place,
            False,
            self._layout,
            self._lanes,
            self._waits,
            depth,
            self._grain,
        )

    # -- one operation -------------------------------------------------------------------------------------------------

    def _add(self, number: int, rank: int, one: Operation, visits: dict[int, int]) -> None:
        if one.name in IDLE:
            return
        if one.name in COPIES:
            self._copy(number, rank, one)
        elif one.name in SUMS:
            self._sum(number, rank, one)
        if one.name in SIGNALS or one.name in WAITS:
            for channel in one.channels:
                self._meet(number, rank, one, channel)
        for semaphore in one.semaphores:
            known = self._releases if one.name == "sem_release" else self._acquires
            known.setdefault((rank, semaphore), []).append(self._step(number, [], [], 0))
        if one.barrier is not None:
            turn = visits[one.barrier[0]] = visits.get(one.barrier[0], -1) + 1
            arrived = self._step(number, [], [], 0)
            self._step(number, [], [], 0)  # goes on from here
            self._barriers.setdefault((rank, one.barrier[0], turn), []).append((arrived, one.barrier[1]))

    def _step(self, number: int, sources: list[int], stores: list[int], count: int) -> Place:
        steps = self._lanes[number].steps
        steps.append(Step(sources, stores, count, 0))
        return number, len(steps) - 1

    def _copy(self, number: int, rank: int, one: Operation) -> None:
        if len(one.sources) not in (1, len(one.destinations)):
            counts = f"{len(one.sources)} sources for {len(one.destinations)} destinations"
            damaged(self._path, 0, f"{one.name} on gpu {rank} has {counts}")
        for at, destination in enumerate(one.destinations):
            source = one.sources[at if len(one.sources) > 1 else 0]
            atoms, count = self._atoms(rank, one, [source, destination])
            place = self._step(number, [atoms[0]], [atoms[1]], count)
            if one.name in READS_PACKETS:
                self._unpacked += [(place, atoms[0] + part) for part in range(count)]
            if one.name in WRITES_PACKETS:
                self._pack(place, atoms[1], count)

    def _sum(self, number: int, rank: int, one: Operation) -> None:
        if not one.sources or not one.destinations:
            damaged(self._path, 0, f"{one.name} on gpu {rank} needs sources and destinations")
        atoms, count = self._atoms(rank, one, [*one.sources, *one.destinations])
        sources, stores = atoms[: len(one.sources)], atoms[len(one.sources) :]
        place = self._step(number, sources, stores, count)
        if one.name in SUMS_PACKETS:
            for atom in sources[1:]:
                self._unpacked += [(place, atom + part) for part in range(count)]
            for atom in stores[1:]:
                self._pack(place, atom, count)

    def _atoms(self, rank: int, one: Operation, operands: list[Operand]) -> tuple[list[int], int]:
        """First atom of this threadblock's part of each operand, and how many they are."""
        found = []
        for operand in operands:
            owner = rank if operand.rank is None else operand.rank
            buffer = _BUFFERS[operand.buffer]
            size = int(self._layout.size[owner, buffer])
            if operand.size != operands[0].size or operand.size < 1:
                damaged(self._path, 0, f"{one.name} on gpu {rank} has buffers of unequal or no size")
            if (operand.index + operand.size) * self._grain > size:
                last, held = operand.index + operand.size - 1, size // self._grain
                reason = f"{one.name} on gpu {rank} uses chunk {last} of buffer {operand.buffer} of gpu {owner}"
                damaged(self._path, 0, f"{reason}, which has {held}")
            found.append(int(self._layout.first[owner, buffer]) + operand.index * self._grain)
        count = operands[0].size * self._grain // one.share[1]
        self._moved += count
        if self._moved > MOST_MOVES:
            damaged(self._path, 0, f"its operations move more than {MOST_MOVES} chunks in all")
        return [atom + one.share[0] * count for atom in found], count

    def _pack(self, place: Place, atom: int, count: int) -> None:
        for part in range(atom, atom + count):
            if part in self._packets:
                self._refuse("packets are written to one place twice in a launch, and no reader could tell which came")
            self._packets[part] = place

    # -- who waits for whom --------------------------------------------------------------------------------------------

    def _meet(self, number: int, rank: int, one: Operation, channel: int) -> None:
        peers = self._plan.gpus[rank].channels[one.channel_type]
        peer = peers[channel]
        which = peers[:channel].count(peer)
        if one.name in SIGNALS:
            place = (number, len(self._lanes[number].steps) - 1)
            if one.name in ("signal", "rlxsignal"):
                place = self._step(number, [], [], 0)
            self._signals.setdefault((one.channel_type, rank, peer, which), []).append(place)
        else:
            place = self._step(number, [], [], 0)
            self._awaited.setdefault((one.channel_type, peer, rank, which), []).append(place)

    def _match(self) -> None:
        """Inside ranks first: it decides whether threadblocks that share a channel use it one after the other."""
        semaphores = sorted({*self._releases, *self._acquires})
        shared = [
            key for key in semaphores if len(_lanes(self._releases, key)) > 1 or len(_lanes(self._acquires, key)) > 1
        ]
        for key in [*(one for one in semaphores if one not in shared), *shared]:
            self._match_semaphore(*key)
        for (owner, barrier, _), arrivals in sorted(self._barriers.items()):
            if {wanted for _, wanted in arrivals} != {len(arrivals)}:
                self._refuse(f"barrier {barrier} of gpu {owner} is reached by {len(arrivals)} threadblocks, not as many"
                             " as it is for")  # fmt: skip
            if len(self._waits) + len(arrivals) ** 2 > MOST_MOVES:
                damaged(self._path, 0, f"its barriers make more than {MOST_MOVES} waits")
            for one, _ in arrivals:
                for other, _ in arrivals:
                    if one != other:
                        self._waits.append(((one[0], one[1] + 1), other, 0))
        self._match_channels()
        for place, atom in self._unpacked:
            if atom not in self._packets:
                self._refuse("packets are read that nobody writes")
            if self._packets[atom][0] != place[0]:
                self._waits.append((place, self._packets[atom], 0))

    def _match_channels(self) -> None:
        found: list[tuple[Place, Place, int]] = []
        for key in sorted({*self._signals, *self._awaited}):
            signals, waits = self._signals.get(key, []), self._awaited.get(key, [])
            route = f"{key[0]} channel {key[3]} from gpu {key[1]} to gpu {key[2]}"
            if len(signals) != len(waits):
                self._refuse(f"{route} is signalled {len(signals)} times and waited for {len(waits)} times")
            for places, verb in ((signals, "signal"), (waits, "wait")):
                if not self._in_turn(places):
                    self._refuse(f"several threadblocks {verb} on {route}, so nobody knows who is meant")
            found += [(wait, signal, 0) for wait, signal in zip(waits, signals, strict=True)]
        self._waits += found

    def _in_turn(self, places: list[Place]) -> bool:
        """Whether these come one after the other: of one threadblock, or of several that hand over to each other."""
        return all(before[0] == after[0] or self._follows(after, before) for before, after in pairwise(places))

    def _follows(self, after: Place, before: Place) -> bool:
        """Whether the waits found so far lead back from one place to the other."""
        if self._indexed != len(self._waits):
            self._before.clear()
            for waiter, waited, _ in self._waits:
                self._before.setdefault(waiter[0], []).append((waiter[1], waited))
            self._indexed = len(self._waits)
        reached, ahead = {after[0]: after[1]}, [after]
        while ahead:
            lane, step = ahead.pop()
            for at, (other, place) in self._before.get(lane, ()):
                if at <= step and reached.get(other, -1) < place:
                    reached[other] = place
                    ahead.append((other, place))
        return reached.get(before[0], -1) >= before[1]

    def _match_semaphore(self, rank: int, semaphore: int) -> None:
        """One by one where they come in turn. Else only what is sure: the last acquire follows all releases."""
        releases, acquires = self._releases.get((rank, semaphore), []), self._acquires.get((rank, semaphore), [])
        start = self._plan.gpus[rank].semaphores[semaphore]
        name = f"semaphore {semaphore} of gpu {rank}"
        if len(acquires) != len(releases):
            self._refuse(f"{name} is released {len(releases)} times and acquired {len(acquires)} times in a launch")
        if self._in_turn(releases) and self._in_turn(acquires):
            self._waits += [
                (acquire, releases[at - start], 0)
                for at, acquire in enumerate(acquires)
                if at >= start and acquire[0] != releases[at - start][0]
            ]
        elif start == 0 and len({place[0] for place in acquires}) == 1:
            self._waits += [(acquires[-1], place, 0) for place in releases if place[0] != acquires[-1][0]]
        elif start == 0 and len({place[0] for place in releases}) == 1:
            self._waits += [(place, releases[0], 0) for place in acquires if place[0] != releases[0][0]]
        else:
            self._refuse(f"{name} is released and acquired by several threadblocks, so nobody knows who is meant")

    def _bound_launches(self) -> None:
        first: dict[int, int] = {}
        for number, lane in enumerate(self._lanes):
            hub = first.setdefault(lane.rank, number)
            if hub != number:
                self._waits.append(((number, 0), (hub, 0), 0))
                self._waits.append(((hub, 0), (number, len(lane.steps) - 1), 1))

    def _refuse(self, reason: str) -> None:
        raise ProgramRefused(program=self._plan.name, where=self._path, reason=reason, trace="")


def _lanes(known: dict[tuple[int, int], list[Place]], key: tuple[int, int]) -> set[int]:
    return {place[0] for place in known.get(key, [])}


def _flat(block: tuple[Operation, ...]) -> Iterator[Operation]:
    """Operations in order; of pipelines, what is inside, once."""
    for one in block:
        if one.name == "pipeline":
            yield from _flat(one.inner)
        else:
            yield one
