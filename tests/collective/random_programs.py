"""Random programs for tests: right ones by construction, and neighbours of them that the reference judges.

    soup     any copies and reductions between any places that hold something; its contract is what came out
    routed   a built-in contract, every total of it gathered and handed out over random ranks and scratch places

A program is a list of `Step`s, so that a mutation is an edit of a list.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from undertow.collective.contract import BUILT_IN, Contract, custom
from undertow.collective.language import COPY, INPUT, OUTPUT, REDUCE, Program, Trace, program
from undertow.collective.reference import multisets

Place = tuple[int, int, int]  # rank, buffer, first chunk
BUFFERS = ("input", "output", "one", "two")
_MOST_PARTS = 16  # of a sum: small integers stay exact in bf16


@dataclass(frozen=True)
class Step:
    kind: int
    source: Place
    to: Place
    count: int
    channel: int = -1
    ways: int = 1


@dataclass(frozen=True)
class Made:
    """A random program; `in_place` says which form the author had in mind."""

    steps: tuple[Step, ...]
    contract: Contract
    in_place: bool

    def program(self) -> Program:
        @program(self.contract)
        def made(c: Trace) -> None:
            for one in self.steps:
                with c.parallel(one.ways):
                    source, to = _ref(c, one.source, one.count), _ref(c, one.to, one.count)
                    if one.kind == COPY:
                        source.copy(to, channel=one.channel)
                    else:
                        to.reduce(source, channel=one.channel)

        return made

    def mutated(self, dice: random.Random) -> Made:
        """One step dropped, done twice, moved, or slightly different."""
        steps = list(self.steps)
        at = dice.randrange(len(steps))
        kind = dice.randrange(4)
        if kind == 0:
            del steps[at]
        elif kind == 1:
            steps.insert(dice.randrange(at, len(steps)) + 1, steps[at])
        elif kind == 2:
            steps.insert(dice.randrange(len(steps)), steps.pop(at))
        else:
            steps[at] = _different(steps[at], self.contract, dice)
        return replace(self, steps=tuple(steps))


def _ref(c: Trace, place: Place, count: int):
    rank, buffer, start = place
    view = c.rank(rank)
    held = view.input if buffer == INPUT else view.output if buffer == OUTPUT else view.scratch(BUFFERS[buffer])
    return held[start : start + count]


def _different(one: Step, contract: Contract, dice: random.Random) -> Step:
    if dice.random() < 0.3:
        return replace(one, kind=REDUCE if one.kind == COPY else COPY)
    rank, buffer, start = one.source
    sizes = (contract.inputs, contract.outputs)
    starts = range(sizes[buffer][rank] - one.count + 1) if buffer <= OUTPUT else range(start + 2)
    if dice.random() < 0.5 or len(starts) < 2:
        ranks = [
            other
            for other in range(contract.ranks)
            if buffer > OUTPUT or start + one.count <= sizes[buffer][other]
        ]  # fmt: skip
        source = (dice.choice(ranks), buffer, start)
    else:
        source = (rank, buffer, dice.choice(starts))
    meet = source[:2] == one.to[:2] and abs(source[2] - one.to[2]) < one.count
    return one if meet else replace(one, source=source)


def random_program(seed: int) -> Made:
    dice = random.Random(seed)
    return _soup(dice) if dice.random() < 0.5 else _routed(dice)


def _hints(dice: random.Random) -> tuple[list[int], list[int]]:
    """Channels and numbers of ways that a program uses."""
    channels = dice.choice([[-1], [-1], [-1, 0, 1], [0, 1, 2], [2, 5]])
    ways = dice.choice([[1], [1], [1], [1, 1, 2], [1, 3], [2, 3]])
    return channels, ways


# -- soup ------------------------------------------------------------------------------------------------------------


def _soup(dice: random.Random) -> Made:
    crowded = dice.random() < 0.3  # few places, long ranges: most of them overlap
    ranks = dice.randint(1, 2 if crowded else 6)
    in_place = dice.random() < 0.35
    inputs = [dice.randint(3 if crowded else 1, 4) for _ in range(ranks)]
    outputs = [dice.randint(0 if ranks > 1 else 1, 5) for _ in range(ranks)]
    starts: tuple[int, ...] | None = None
    if in_place:
        outputs = [one + dice.randint(0, 2) for one in inputs]
        starts = tuple(dice.randint(0, out - own) for own, out in zip(inputs, outputs, strict=True))
        if dice.random() < 0.4 and sum(outputs) > sum(inputs):
            inputs, outputs = outputs, inputs
    elif sum(outputs) == 0:
        outputs[0] = 2
    contract = replace(custom("soup", inputs, outputs, {}), in_place=starts)
    scratch = 3 if crowded else dice.randint(2, 5)
    cells = _Cells(contract, in_place, scratch)
    channels, ways = _hints(dice)
    steps: list[Step] = []
    recent: list[Place] = []
    local = 0.8 if crowded else dice.random()  # how much stays on a rank
    tries = 0
    wanted = dice.randint(2, 30)
    while len(steps) < wanted and tries < 1000:
        tries += 1
        count = 2 if crowded else dice.choice([1, 1, 2, 2, 3])
        kind = COPY if dice.random() < 0.55 else REDUCE
        if recent and dice.random() < 0.5:
            source = _beside(dice.choice(recent[-4:]), dice)
        else:
            rank = dice.randrange(ranks)
            buffer = dice.choice([INPUT, INPUT, OUTPUT, 2, 3])
            source = (rank, buffer, dice.randrange(max(1, cells.size(rank, buffer))))
        if recent and dice.random() < 0.4:
            to = _beside(dice.choice(recent[-4:]), dice)
        else:
            rank = source[0] if dice.random() < local else dice.randrange(ranks)
            buffer = dice.choice([OUTPUT, OUTPUT, 2, 3, INPUT] if in_place else [OUTPUT, OUTPUT, 2, 3])
            to = (rank, buffer, dice.randrange(max(1, cells.size(rank, buffer))))
        if not in_place and to[1] == INPUT:
            continue
        channel, parts = dice.choice(channels), dice.choice(ways)
        plan = [(kind, source, to)]
        if dice.random() < 0.15:  # a sum made aside and put back, which wants to become one instruction
            aside = (source[0], dice.choice([2, 3]), dice.randrange(scratch))
            plan = [(COPY, source, aside), (REDUCE, _beside(source, dice), aside), (COPY, aside, _beside(source, dice))]
        for one_kind, one_source, one_to in plan:
            step = Step(one_kind, one_source, one_to, count, channel, parts)
            if (in_place or one_to[1] != INPUT) and cells.apply(step):
                steps.append(step)
                recent.append(one_to)
    made = Made(tuple(steps), contract, in_place)
    found = multisets(made.program().trace(), in_place)
    after = {
        (rank, chunk): list(value)
        for rank, chunks in enumerate(found)
        for chunk, value in enumerate(chunks)
        if value is not None
    }
    return replace(made, contract=replace(custom("soup", inputs, outputs, after), in_place=starts))


def _beside(place: Place, dice: random.Random) -> Place:
    """The same place, or one that overlaps it where ranges are longer than one chunk."""
    rank, buffer, start = place
    return rank, buffer, max(0, start + dice.choice([0, 0, 0, -1, 1]))


class _Cells:
    """How many items each chunk is the sum of, so that only what is there is read and nothing grows too much."""

    def __init__(self, contract: Contract, in_place: bool, scratch: int) -> None:
        self._contract, self._scratch, self._in_place = contract, scratch, in_place
        self._parts: dict[Place, int] = {
            self._cell((rank, INPUT, chunk)): 1 for rank, count in enumerate(contract.inputs) for chunk in range(count)
        }

    def size(self, rank: int, buffer: int) -> int:
        sizes = (self._contract.inputs, self._contract.outputs)
        return sizes[buffer][rank] if buffer <= OUTPUT else self._scratch

    def _cell(self, place: Place) -> Place:
        """The same for a chunk of the input and the chunk of the output that it is in place."""
        rank, buffer, chunk = place
        if not self._in_place or buffer > OUTPUT:
            return place
        assert self._contract.in_place is not None
        held = OUTPUT if self._contract.holder(rank) == INPUT else INPUT
        return rank, INPUT, chunk + (self._contract.in_place[rank] if buffer == held else 0)

    def apply(self, step: Step) -> bool:
        """Do it if it can be done."""
        cells = []
        for rank, buffer, start in (step.source, step.to):
            if start + step.count > self.size(rank, buffer):
                return False
            cells.append([self._cell((rank, buffer, start + part)) for part in range(step.count)])
        sources, targets = cells
        if set(sources) & set(targets):
            return False
        parts = [self._parts.get(one, 0) for one in sources]
        if step.kind == REDUCE:
            old = [self._parts.get(one, 0) for one in targets]
            if not all(old):
                return False
            parts = [one + two if one else 0 for one, two in zip(parts, old, strict=True)]
        if not all(parts) or max(parts) > _MOST_PARTS:
            return False
        self._parts.update(zip(targets, parts, strict=True))
        return True


# -- routed ----------------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    """Chunks that travel side by side: where parts of their totals are, and where the totals must go."""

    count: int
    parts: list[tuple[int, int]]  # (rank, first input chunk)
    ends: list[tuple[int, int]]  # (rank, first output chunk)


def _routed(dice: random.Random) -> Made:
    ranks = dice.randint(1, 6)
    name = dice.choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
    chunks = dice.randint(1, 4 if name == "all_reduce" else 2)
    contract = BUILT_IN[name](ranks, chunks)
    jobs = list(_jobs(name, ranks, chunks, dice))
    dice.shuffle(jobs)
    in_place = dice.random() < 0.4
    channels, ways = _hints(dice)
    room = _Room(dice)
    steps: list[Step] = []
    saved: dict[tuple[int, int], Place] = {}
    if in_place:  # outputs lie on inputs: all of them are brought away first
        for job in jobs:
            for rank, chunk in job.parts:
                if (rank, chunk) not in saved:
                    saved[rank, chunk] = room.take(dice.randrange(ranks), job.count)
                    step = Step(COPY, (rank, INPUT, chunk), saved[rank, chunk], job.count, dice.choice(channels))
                    steps.append(step)
    under_way = [_route(job, ranks, in_place, saved, room, dice) for job in jobs]
    width = dice.choice([1, 2, len(under_way)])
    while under_way:
        one = dice.randrange(min(width, len(under_way)))
        step = next(under_way[one], None)
        if step is None:
            del under_way[one]
        else:
            steps.append(replace(step, channel=dice.choice(channels), ways=dice.choice(ways)))
    return Made(tuple(steps), contract, in_place)


def _jobs(name: str, ranks: int, chunks: int, dice: random.Random) -> Iterator[_Job]:
    def ranges(begin: int, end: int) -> Iterator[tuple[int, int]]:
        while begin < end:
            count = min(dice.randint(1, 3), end - begin)
            yield begin, count
            begin += count

    everybody = range(ranks)
    if name == "all_reduce":
        for at, count in ranges(0, chunks):
            yield _Job(count, [(rank, at) for rank in everybody], [(rank, at) for rank in everybody])
    for rank in everybody:
        for at, count in ranges(0, chunks):
            shard = rank * chunks + at
            if name == "all_gather":
                yield _Job(count, [(rank, at)], [(other, shard) for other in everybody])
            elif name == "reduce_scatter":
                yield _Job(count, [(other, shard) for other in everybody], [(rank, at)])
    if name == "all_to_all":
        for rank in everybody:
            for other in everybody:
                for at, count in ranges(0, chunks):
                    yield _Job(count, [(rank, other * chunks + at)], [(other, rank * chunks + at)])


class _Room:
    """Scratch places, given out again once they are free."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._size: dict[tuple[int, int], int] = {}
        self._free: list[tuple[Place, int]] = []
        self._thrifty = dice.random()

    def take(self, rank: int, count: int) -> Place:
        fitting = [one for one in self._free if one[0][0] == rank and one[1] >= count]
        if fitting and self._dice.random() < self._thrifty:
            found = self._dice.choice(fitting)
            self._free.remove(found)
            place, size = found
            if size > count:
                self._free.append(((rank, place[1], place[2] + count), size - count))
            return place
        buffer = self._dice.choice([2, 3])
        start = self._size.get((rank, buffer), 0)
        self._size[rank, buffer] = start + count
        return rank, buffer, start

    def give(self, place: Place, count: int) -> None:
        self._free.append((place, count))


def _route(
    job: _Job,
    ranks: int,
    in_place: bool,
    saved: dict[tuple[int, int], Place],
    room: _Room,
    dice: random.Random,
) -> Iterator[Step]:
    """Sums the parts pairwise in a random order and random places, then hands the total out."""
    count = job.count
    ends = [(rank, OUTPUT, chunk) for rank, chunk in job.ends]
    dice.shuffle(ends)
    # A place, and whether it may be overwritten: inputs may not, and outputs of a job are its own.
    held: list[tuple[Place, bool]] = [
        (saved[part], True) if in_place else ((part[0], INPUT, part[1]), False) for part in job.parts
    ]
    free_ends = list(ends)

    def somewhere(beside: int) -> Place:
        if free_ends and dice.random() < 0.5:
            return free_ends.pop(dice.randrange(len(free_ends)))
        return room.take(beside if dice.random() < 0.5 else dice.randrange(ranks), count)

    def drop(place: Place) -> None:
        if place[1] > OUTPUT:
            room.give(place, count)
        elif place[1] == OUTPUT:
            free_ends.append(place)

    while len(held) > 1 or (not held[0][1] and dice.random() < 0.3):
        at = dice.randrange(len(held))
        place, mine = held.pop(at)
        if not mine or dice.random() < 0.25:
            to = somewhere(place[0])
            yield Step(COPY, place, to, count)
            if mine:
                drop(place)
            place = to
        if held:
            other, others = held.pop(dice.randrange(len(held)))
            yield Step(REDUCE, other, place, count)
            if others:
                drop(other)
        held.append((place, True))
    having = [held[0][0]]
    for end in ends:
        if end not in having:
            yield Step(COPY, dice.choice(having), end, count)
            having.append(end)
    if held[0][1] and held[0][0][1] > OUTPUT:
        room.give(held[0][0], count)


# -- calls and options -----------------------------------------------------------------------------------------------

LENGTHS = (0, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 40, 64, 100)
DTYPES = ("float32", "float32", "int32", "bfloat16", "float64", "uint8", "float16", "int16")


def random_spans(contract: Contract, in_place: bool, dice: random.Random) -> tuple[int, ...]:
    lengths = [dice.choice(LENGTHS) for _ in range(contract.spans)]
    if dice.random() < 0.3:
        lengths = lengths[:1] * contract.spans
    if contract.name == "all_to_all" and in_place:  # what is sent must have room for what comes
        ranks = contract.ranks
        for one in range(contract.spans):
            lengths[one] = lengths[min(one, one % ranks * ranks + one // ranks)]
    return tuple(lengths)


def random_options(dice: random.Random, target: str) -> dict[str, object]:
    found: dict[str, object] = {
        "target": target,
        "instances": dice.choice([1, 1, 2, 3]),
        "workers": dice.choice([None, None, 1, 2, 3, 8]),
        "depth": dice.choice([1, 2, 2, 3]),
        "fuse": dice.random() < 0.8,
    }
    if target == "staged":
        found["slots"] = dice.choice([1, 1, 2, 3, 8])
        found["packets"] = dice.random() < 0.25
        found["publish"] = not found["packets"] and dice.random() < 0.4
    return found


def sequence_of(made: Made) -> Sequence[str]:
    """The steps in words, for a failing test's message."""
    return [
        f"{'copy' if one.kind == COPY else 'reduce'} {BUFFERS[one.source[1]]}[{one.source[2]}] of {one.source[0]} ->"
        f" {BUFFERS[one.to[1]]}[{one.to[2]}] of {one.to[0]}, {one.count} chunks, channel {one.channel}, {one.ways} ways"
        for one in made.steps
    ]
