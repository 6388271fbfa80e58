"""An MSCCL schedule as one of ours.

A threadblock becomes a worker. A connection becomes slots in the receiver's staging buffer, as many as MSCCL's queue
holds messages (2 in Simple, 8 in LL and LL128), so that what the checker says of deadlocks holds for MSCCL's runtime:

    k-th receive        waits for the k-th send
    (k + slots)-th send waits for the k-th receive
    a step with depid   waits for that step, or the next one of its threadblock that is published

Nops only carry waits: these go to the step behind them. Where somebody waits for a nop, or nothing stands behind it, it
stays, as a step that moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    STAGING,
    STAGING_NAME,
    Lane,
    Layout,
    Lowered,
    Place,
    scratch_turns,
)
from .lanes import Step as LoweredStep
from .msccl import COLLECTIVES, READS, RECEIVES, SENDS, SLOTS, STORES, Algorithm, Gpu, Step
from .roots import UNEVEN, roots_of, shape
from .text import damaged

DEPTH = 2
_BUFFERS = {"i": INPUT, "o": OUTPUT, "s": SCRATCH}
_BY_SHARD = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def schedules(
    algorithm: Algorithm, path: str = "<file>", *, slots: int | None = None, split: bool = False
) -> list[Schedule]:
    """One for each form the file may be called in, not checked. `slots`: of a connection, instead of the protocol's.

    `split`: with a message for every chunk, as MSCCL sends them when chunks are longer than its tiles.
    """
    importer = _Importer(algorithm, path, slots or SLOTS[algorithm.facts.protocol], split)
    return [importer.schedule(in_place) for in_place in algorithm.facts.forms]


def contract_of(algorithm: Algorithm, path: str, roots: tuple[int, ...] | None = None) -> Contract:
    """What a collective of this name promises; custom ones: sizes only. `roots`: unset as long as nobody knows."""
    name = COLLECTIVES[algorithm.collective]
    ranks = algorithm.ranks
    if name == "custom":
        inputs = [gpu.input_chunks for gpu in algorithm.gpus]
        outputs = [gpu.output_chunks for gpu in algorithm.gpus]
        if True in algorithm.facts.forms:  # one memory: where only one of the two is named, it is both
            outputs = [output or given for output, given in zip(outputs, inputs, strict=True)]
            inputs = [given or output for output, given in zip(outputs, inputs, strict=True)]
        _bound(sum(inputs) + sum(outputs), path)
        return custom(name, inputs, outputs, {})
    if name in _BY_SHARD and algorithm.chunks % ranks:
        reason = f"nchunksperloop is {algorithm.chunks}, but must be a multiple of the {ranks} ranks"
        damaged(path, 0, f"{reason} for {algorithm.collective}")
    _bound(2 * ranks * algorithm.chunks, path)
    chunks = algorithm.chunks // ranks if name in _BY_SHARD else algorithm.chunks
    return shape(name, ranks, chunks) if roots is None else BUILT_IN[name](ranks, chunks, *roots)


def _bound(chunks: int, path: str) -> None:
    if chunks > MOST_CHUNKS:
        damaged(path, 0, f"its buffers have {chunks} chunks in all, more than {MOST_CHUNKS}")


@dataclass(frozen=True, slots=True)
class _Seat:
    """A step that stays, or one chunk of it where messages are split."""

    step: Step
    part: int
    count: int


@dataclass(frozen=True, slots=True)
class _Message:
    sender: Place
    receiver: Place
    count: int


class _Importer:
    """What a file says, form by form of its calls."""

    def __init__(self, algorithm: Algorithm, path: str, slots: int, split: bool) -> None:
        self._algorithm, self._path, self._slots, self._split = algorithm, path, slots, split
        self._name = COLLECTIVES[algorithm.collective]
        self._contract = contract_of(algorithm, path)
        _bound(sum(gpu.scratch_chunks for gpu in algorithm.gpus), path)
        blocks = sum(max(1, len(gpu.threadblocks)) for gpu in algorithm.gpus)
        if blocks > MOST_LANES:
            damaged(path, 0, f"it has {blocks} threadblocks in all, more than {MOST_LANES}")
        self._check_sizes()
        self._check_places(self._contract)
        self._lanes: list[Lane] = []
        self._seats: list[list[_Seat]] = []
        self._waits: list[tuple[Place, Place, int]] = []
        for rank, gpu in enumerate(algorithm.gpus):
            self._take_seats(rank, gpu)
        self._connections = self._connect()

    def schedule(self, in_place: bool) -> Schedule:
        """Collectives with a root name none in a file: what its steps do tells."""
        made = self._lowered(self._placed(self._contract, in_place), in_place)
        roots = roots_of(self._name, made)
        if roots:
            contract = self._placed(contract_of(self._algorithm, self._path, roots), in_place)
            if self._name in UNEVEN:
                self._check_places(contract, roots)
                made = self._lowered(contract, in_place)
            made = replace(made, contract=contract)
        return made.schedule()

    def _check_sizes(self) -> None:
        ranks = self._algorithm.ranks
        moved = sum(step.count for gpu in self._algorithm.gpus for block in gpu.threadblocks for step in block.steps)
        if moved > MOST_MOVES:
            damaged(self._path, 0, f"its steps move {moved} chunks in all, more than {MOST_MOVES}")
        for rank, gpu in enumerate(self._algorithm.gpus):
            sizes = {"i": self._contract.inputs[rank], "o": self._contract.outputs[rank]}
            if len(gpu.threadblocks) > MOST_LANES_OF_A_RANK:
                reason = f"gpu {rank} has {len(gpu.threadblocks)} threadblocks, more than {MOST_LANES_OF_A_RANK}"
                damaged(self._path, 0, reason)
            for letter, said in (("i", gpu.input_chunks), ("o", gpu.output_chunks)):
                if said not in (0, sizes[letter]):
                    reason = f"{letter}_chunks of gpu {rank} is {said}, but must be {sizes[letter]} or 0"
                    damaged(self._path, 0, f"{reason} for {self._algorithm.collective}")
            for number, block in enumerate(gpu.threadblocks):
                for peer in (block.send, block.receive):
                    if peer == rank or peer >= ranks:
                        reason = f"tb {number} of gpu {rank} is connected to gpu {peer}"
                        damaged(self._path, 0, f"{reason}, but must be to another of the {ranks}")

    def _check_places(self, contract: Contract, roots: tuple[int, ...] = ()) -> None:
        known = f", as {self._algorithm.collective} has its root on gpu {roots[0]}" if len(roots) == 1 else ""
        known = f", as gpu {roots[0]} sends to gpu {roots[1]}" if len(roots) == 2 else known
        for rank, gpu in enumerate(self._algorithm.gpus):
            sizes = {"i": contract.inputs[rank], "o": contract.outputs[rank], "s": gpu.scratch_chunks}
            for block in gpu.threadblocks:
                for step in block.steps:
                    for place, used in ((step.source, step.type in READS), (step.destination, step.type in STORES)):
                        if used and step.count and place[1] + step.count > sizes[place[0]]:
                            reason = f"chunk {place[1] + step.count - 1} of buffer {place[0]} is used on gpu {rank}"
                            why = known if place[0] != "s" else ""
                            damaged(self._path, step.line, f"{reason}, which has {sizes[place[0]]}{why}")

    # -- steps and what they wait for ----------------------------------------------------------------------------------

    def _take_seats(self, rank: int, gpu: Gpu) -> None:
        """The lanes of a rank: which steps stay, and the waits between them."""
        first = len(self._lanes)
        awaited = self._awaited(rank, gpu)
        wanted = set(awaited.values())
        first_seat: dict[tuple[int, int], int] = {}
        last_seat: dict[tuple[int, int], int] = {}
        carriers: dict[tuple[int, int], tuple[int, int]] = {}  # who waits in place of a nop
        for number, block in enumerate(gpu.threadblocks):
            seats: list[_Seat] = []
            waiting: list[int] = []
            for at, step in enumerate(block.steps):
                moves = step.type != "nop" and step.count > 0
                if not moves and (number, at) not in wanted and at + 1 < len(block.steps):
                    waiting.append(at)
                    continue
                first_seat[number, at] = len(seats)
                for one in (*waiting, at):
                    carriers[number, one] = (number, at)
                waiting = []
                pieces = step.count if self._split and step.type in SENDS | RECEIVES else 1
                width = step.count // pieces if moves else 0
                seats.extend(_Seat(step, piece * width, width) for piece in range(pieces if moves else 1))
                last_seat[number, at] = len(seats) - 1
            self._lanes.append(Lane(rank, block.channel))
            self._seats.append(seats)
        if not gpu.threadblocks:  # every rank has a worker
            self._lanes.append(Lane(rank, 0))
            self._seats.append([])
        for (number, at), target in awaited.items():
            waiter = carriers[number, at]
            if target[0] != number:
                self._waits.append(((first + number, first_seat[waiter]), (first + target[0], last_seat[target]), 0))

    def _awaited(self, rank: int, gpu: Gpu) -> dict[tuple[int, int], tuple[int, int]]:
        """For every step that waits, the step of its rank that lets it go on."""
        found = {}
        published: list[list[int]] = []  # the next published step from each on, or -1
        for block in gpu.threadblocks:
            following = [-1] * len(block.steps)
            for at in range(len(block.steps) - 1, -1, -1):
                later = following[at + 1] if at + 1 < len(block.steps) else -1
                following[at] = at if block.steps[at].published else later
            published.append(following)
        for number, block in enumerate(gpu.threadblocks):
            for at, step in enumerate(block.steps):
                if step.depends_on is None:
                    continue
                other, wanted = step.depends_on
                if other >= len(published) or wanted >= len(published[other]):
                    damaged(self._path, step.line, f"there is no step {wanted} of tb {other} on gpu {rank} to wait for")
                if other == number:
                    if wanted >= at:
                        self._refuse(
                            step.line, f"step {at} of tb {number} on gpu {rank} waits for itself or a later one"
                        )
                    continue
                after = published[other][wanted]
                if after < 0:
                    reason = f"step {at} of tb {number} on gpu {rank} waits for step {wanted} of tb {other}"
                    self._refuse(step.line, f"{reason}, which nobody is told of: hasdep is 0 there and later")
                found[number, at] = (other, after)
        return found

    def _refuse(self, line: int, reason: str) -> None:
        raise ProgramRefused(program=self._algorithm.name, where=f"{self._path}:{line}", reason=reason, trace="")

    # -- messages ------------------------------------------------------------------------------------------------------

    def _connect(self) -> dict[tuple[int, int, int], list[_Message]]:
        """The messages of each connection (from, to, channel); each is sent by one lane and received by one."""
        ends: dict[tuple[int, int, int], dict[bool, list[Place]]] = {}
        number = 0
        for rank, gpu in enumerate(self._algorithm.gpus):
            for block in gpu.threadblocks:
                for peer, kinds, sends in ((block.send, SENDS, True), (block.receive, RECEIVES, False)):
                    if peer < 0:
                        continue
                    key = (rank, peer, block.channel) if sends else (peer, rank, block.channel)
                    sides = ends.setdefault(key, {})
                    if sends in sides:  # counts would mean nothing any more
                        verb = "send to" if sends else "receive from"
                        self._refuse(0, f"two tbs of gpu {rank} {verb} gpu {peer} on channel {block.channel}")
                    seats = self._seats[number]
                    sides[sends] = [
                        (number, at) for at, seat in enumerate(seats) if seat.count and seat.step.type in kinds
                    ]
                number += 1
            number += not gpu.threadblocks
        found = {}
        for key, sides in sorted(ends.items()):
            sent, received = sides.get(True, []), sides.get(False, [])
            route = f"from gpu {key[0]} to gpu {key[1]} on channel {key[2]}"
            for sender, receiver in zip(sent, received, strict=False):
                counts = self._seat(sender).count, self._seat(receiver).count
                if counts[0] != counts[1]:
                    reason = f"a message of {counts[0]} chunks {route} is received as one of {counts[1]}"
                    self._refuse(self._seat(receiver).step.line, reason)
            if len(sent) != len(received):
                odd = (sent if len(sent) > len(received) else received)[min(len(sent), len(received))]
                reason = f"{len(sent)} messages are sent {route}, but {len(received)} are received"
                self._refuse(self._seat(odd).step.line, reason)
            found[key] = [
                _Message(sender, receiver, self._seat(sender).count)
                for sender, receiver in zip(sent, received, strict=True)
            ]
        return found

    def _seat(self, place: Place) -> _Seat:
        return self._seats[place[0]][place[1]]

    def _placed(self, contract: Contract, in_place: bool) -> Contract:
        """With a form in place: by shard, a rank's shard lies where it belongs in the longer buffer."""
        if not in_place or contract.in_place is not None:
            return contract
        shards = self._name in ("gather", "scatter")
        lengths = zip(contract.inputs, contract.outputs, strict=True)
        starts = [rank * min(given, made) if shards else 0 for rank, (given, made) in enumerate(lengths)]
        return replace(contract, in_place=tuple(starts))

    # -- one form ------------------------------------------------------------------------------------------------------

    def _lowered(self, contract: Contract, in_place: bool) -> Lowered:
        ranks = contract.ranks
        room = [0] * ranks
        begins: dict[tuple[int, int, int], tuple[int, int]] = {}  # of a connection: first chunk of staging, width
        for key, messages in self._connections.items():
            widest = max((one.count for one in messages), default=0)
            begins[key] = (room[key[1]], widest)
            room[key[1]] += min(len(messages), self._slots) * widest
        _bound(sum(room), self._path)
        scratch = [gpu.scratch_chunks for gpu in self._algorithm.gpus]
        layout = Layout.of(contract, in_place, [(SCRATCH_NAME, scratch), (STAGING_NAME, room)])
        waits = list(self._waits)
        arriving: dict[Place, int] = {}
        leaving: dict[Place, int] = {}
        for key, messages in self._connections.items():
            begin, widest = begins[key]
            begin += int(layout.first[key[1], STAGING])
            slots = min(len(messages), self._slots)
            for turn, one in enumerate(messages):
                arriving[one.receiver] = leaving[one.sender] = begin + turn % slots * widest
                waits.append((one.receiver, one.sender, 0))
                # The one that had this slot before, in this iteration or the last one with this part of the memory.
                before = turn - slots if turn >= slots else len(messages) - 1 - (len(messages) - 1 - turn) % slots
                waits.append((one.sender, messages[before].receiver, 0 if turn >= slots else DEPTH))
        lanes = [Lane(lane.rank, lane.channel) for lane in self._lanes]
        for number, seats in enumerate(self._seats):
            for at, seat in enumerate(seats):
                step = _lowered_step(seat, lanes[number].rank, layout, arriving, leaving, (number, at))
                lanes[number].steps.append(step)
        begin, end = int(layout.first[:, SCRATCH].min()), int(layout.first[:, STAGING].min())
        waits += scratch_turns(lanes, DEPTH, lambda atom: begin <= atom < end, self._path)
        name = self._algorithm.name
        return Lowered(name, self._path, contract, in_place, True, layout, lanes, waits, DEPTH)


def _lowered_step(
    seat: _Seat, rank: int, layout: Layout, arriving: dict[Place, int], leaving: dict[Place, int], place: Place
) -> LoweredStep:
    step = seat.step
    sources, stores = [], []
    if seat.count:
        own = [
            int(layout.first[rank, _BUFFERS[buffer]]) + at + seat.part for buffer, at in (step.source, step.destination)
        ]
        if step.type == "re":
            sources = [own[1], own[0]]
        elif step.type in READS:
            sources = [own[0]]
        if step.type in RECEIVES:
            sources.append(arriving[place])
        if step.type in STORES and not (step.type == "cpy" and own[0] == own[1]):
            stores = [own[1]]  # in place, a copy may be of a chunk to itself, which changes nothing
        if step.type in SENDS:
            stores.append(leaving[place])
    return LoweredStep(sources, stores, seat.count, step.line)
