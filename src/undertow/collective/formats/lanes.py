"""From foreign lanes to a schedule: what importers of every format hand over, and what becomes of it.

A *lane* (threadblock) becomes a worker and keeps the order of its steps. Importers say which step must come after
which; semaphores, length classes and the sums of custom collectives follow from that. Nothing is fused, moved or
dropped: what the checker then judges and runtimes run is what the file says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .. import passes
from ..contract import Contract, custom
from ..language import INPUT, OUTPUT
from ..schedule import END, MOVE, Instructions, Schedule
from ..semaphores import number, starts
from ..topology import Topology
from .order import sequential
from .text import damaged

INPUT_NAME, OUTPUT_NAME, SCRATCH_NAME, STAGING_NAME = "input", "output", "scratch", "staging"
SCRATCH, STAGING = 2, 3
_SORTS = 1
MOST_LANES = 1 << 13  # the checker knows what each lane knows of each other one
MOST_CHUNKS = 1 << 20  # of all buffers of all ranks
MOST_STEPS = 1 << 17
MOST_MOVES = 1 << 20  # chunks that all steps move together
MOST_LANES_OF_A_RANK = 256
MOST_TURNS = 1 << 19  # waits between lanes that share scratch
_BLOCK = 1 << 12  # chunks of scratch that are looked at together


@dataclass(slots=True)
class Step:
    """stores <- the sum of sources, `count` chunks of each; `line` is the line of the file it comes from."""

    sources: list[int]
    stores: list[int]
    count: int
    line: int
    kind: int = MOVE


@dataclass(slots=True)
class Lane:
    rank: int
    channel: int
    steps: list[Step] = field(default_factory=list)


Place = tuple[int, int]  # lane, step


@dataclass(frozen=True)
class Layout:
    """Where the chunks of all buffers lie: user buffers first, then scratch, then staging, each rank by rank."""

    first: NDArray[np.int32]  # [rank, buffer]
    size: NDArray[np.int32]
    names: tuple[str, ...]
    user_atoms: int

    @staticmethod
    def of(contract: Contract, in_place: bool, others: Sequence[tuple[str, Sequence[int]]]) -> Layout:
        """`others`: name and size on each rank of what is not the user's."""
        ranks = contract.ranks
        size = np.array([contract.inputs, contract.outputs, *(sizes for _, sizes in others)], np.int64).T
        first = np.zeros_like(size)
        first[:, :2], user_atoms = contract.user_places(in_place and contract.in_place is not None)
        at = user_atoms
        for buffer in range(2, 2 + len(others)):
            for rank in range(ranks):
                first[rank, buffer] = at
                at += int(size[rank, buffer])
        names = (INPUT_NAME, OUTPUT_NAME, *(name for name, _ in others))
        return Layout(first.astype(np.int32), size.astype(np.int32), names, user_atoms)


@dataclass
class Lowered:
    """A foreign schedule on its way. `waits`: (who waits, for whom, how many iterations ago)."""

    name: str
    path: str
    contract: Contract
    in_place: bool
    staged: bool
    layout: Layout
    lanes: list[Lane]
    waits: list[tuple[Place, Place, int]]
    depth: int
    grain: int = 1

    def order(self) -> list[int]:
        """Numbers of the steps of all lanes, in an order in which one iteration can run."""
        first = self._first()
        return sequential(first.tolist(), self._numbers(first), int(first[-1]))

    def _first(self) -> NDArray[np.int64]:
        """The number of each lane's first step, and their count as a last entry."""
        return np.concatenate([[0], np.cumsum([len(one.steps) for one in self.lanes])]).astype(np.int64)

    def _numbers(self, first: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = [(first[a] + i, first[b] + j, back) for (a, i), (b, j), back in self.waits]
        return np.unique(np.array(rows, np.int64).reshape(-1, 3), axis=0)

    def schedule(self) -> Schedule:
        """The same as a schedule, not checked yet."""
        lanes = self.lanes
        first = self._first()
        steps = [step for lane in lanes for step in lane.steps]
        worker_of = np.repeat(np.arange(len(lanes)), np.diff(first))
        numbers = self._numbers(first)
        numbered = number(
            numbers[:, 0], numbers[:, 1], numbers[:, 2], np.zeros(len(numbers), np.int64), worker_of, len(lanes), _SORTS
        )
        order = sequential(first.tolist(), numbers, len(steps))
        contract = self._meaning(steps, order) if self.contract.name == "custom" else self.contract
        count = np.array([one.count for one in steps], np.int32)
        source_start = starts(np.array([len(one.sources) for one in steps], np.int64))
        store_start = starts(np.array([len(one.stores) for one in steps], np.int64))
        source_atom = np.array([atom for one in steps for atom in one.sources], np.int32)
        store_atom = np.array([atom for one in steps for atom in one.stores], np.int32)
        row = np.arange(len(steps), dtype=np.int32)
        instructions = Instructions(
            kind=np.array([one.kind for one in steps], np.int32),
            count=count,
            number=np.full(len(steps), -1, np.int32),
            source_start=source_start,
            source_atom=source_atom,
            store_start=store_start,
            store_atom=store_atom,
            class_start=starts(count),
            class_of=self._classes(contract, steps, order, count),
            wait_start=numbered.wait_start,
            wait_semaphore=numbered.wait_semaphore,
            wait_value=numbered.wait_value,
            wait_back=numbered.wait_back,
            post_start=numbered.post_start,
            post_semaphore=numbered.post_semaphore,
            row=row,
            source_row=np.repeat(row, np.diff(source_start)),
            store_row=np.repeat(row, np.diff(store_start)),
        )
        none = np.zeros(len(numbered.posts), np.bool_)
        return Schedule(
            name=self.name,
            contract=contract,
            topology=Topology.flat(contract.ranks),
            in_place=self.in_place,
            staged=self.staged,
            packets=False,
            grain=self.grain,
            instances=1,
            depth=self.depth,
            buffers=self.layout.names,
            first_atom=self.layout.first,
            atoms=self.layout.size,
            user_atoms=self.layout.user_atoms,
            instructions=instructions,
            worker_start=first.astype(np.int32),
            worker_rank=np.array([one.rank for one in lanes], np.int32),
            semaphore_poster=numbered.poster,
            semaphore_waiter=numbered.waiter,
            semaphore_posts=numbered.posts,
            semaphore_of_start=none,
            semaphore_of_packets=none,
            # Places in a file look like places in a program: an empty code object carries the file's name.
            codes=(compile("", self.path, "exec"),),
            rows=np.array([(0, one.line) for one in steps], np.int32).reshape(-1, 2),
            worker_channel=np.array([one.channel for one in lanes], np.int32),
            keeps_input=self._keeps_input(steps),
        )

    def _keeps_input(self, steps: list[Step]) -> bool:
        """Whether nobody writes to an input that is not also an output."""
        if self.in_place:
            return True
        inputs = np.zeros(self.layout.user_atoms, np.bool_)
        for rank in range(self.contract.ranks):
            begin = self.layout.first[rank, INPUT]
            inputs[begin : begin + self.layout.size[rank, INPUT]] = True
        touched = [atom for one in steps for atom in one.stores if atom < self.layout.user_atoms]
        return not inputs[touched].any()

    def _classes(
        self, contract: Contract, steps: list[Step], order: list[int], count: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """The length class of every chunk that is moved. What never runs (a deadlock) has none: 0 stands there."""
        held = np.full(int((self.layout.first + self.layout.size).max(initial=0)), -1, np.int32)
        for rank in range(contract.ranks):
            begin = self.layout.first[rank, INPUT]
            items = contract.item_class[contract.first_item[rank] : contract.first_item[rank + 1]]
            held[begin : begin + len(items)] = items
        chosen = [steps[one] for one in order if steps[one].kind == MOVE]
        found = np.zeros(sum(one.count for one in chosen), np.int32)
        source_start = starts(np.array([len(one.sources) for one in chosen], np.int64))
        store_start = starts(np.array([len(one.stores) for one in chosen], np.int64))
        passes.class_of_groups(
            np.full(len(chosen), MOVE, np.int32), np.array([one.count for one in chosen], np.int32), source_start,
            np.array([atom for one in chosen for atom in one.sources], np.int32), store_start,
            np.array([atom for one in chosen for atom in one.stores], np.int32), held, found,
        )  # fmt: skip
        begins = starts(count)
        placed = np.zeros(int(count.sum()), np.int32)
        at = 0
        for one in order:
            if steps[one].kind == MOVE:
                placed[begins[one] : begins[one + 1]] = found[at : at + steps[one].count]
                at += steps[one].count
        return np.maximum(placed, 0)

    def _meaning(self, steps: list[Step], order: list[int]) -> Contract:
        """A custom collective means what it computes: with no race in it, every order computes the same."""
        layout, given = self.layout, self.contract
        held: dict[int, Counter[tuple[int, int]]] = {}
        for rank, chunks in enumerate(given.inputs):
            for chunk in range(chunks):
                held[int(layout.first[rank, INPUT]) + chunk] = Counter([(rank, chunk)])
        for step in (steps[one] for one in order):
            for part in range(step.count):
                total: Counter[tuple[int, int]] = Counter()
                known = True
                for source in step.sources:
                    known = known and source + part in held
                    total.update(held.get(source + part, Counter()))
                for store in step.stores:
                    if known:
                        held[store + part] = total
        after = {}
        for rank, chunks in enumerate(given.outputs):
            for chunk in range(chunks):
                found = held.get(int(layout.first[rank, OUTPUT]) + chunk)
                if found:
                    after[rank, chunk] = sorted(found.elements())
        return replace(custom(given.name, given.inputs, given.outputs, after), in_place=given.in_place)


def join_at_end(lanes: list[Lane], waits: list[tuple[Place, Place, int]], ranks: int) -> None:
    """A call of a rank is over when all its lanes are: its first lane gets an end that waits for the others."""
    for rank in range(ranks):
        mine = [number for number, lane in enumerate(lanes) if lane.rank == rank]
        lanes[mine[0]].steps.append(Step([], [], 0, 0, END))
        end = (mine[0], len(lanes[mine[0]].steps) - 1)
        for other in mine[1:]:
            if lanes[other].steps:
                waits.append((end, (other, len(lanes[other].steps) - 1), 0))


def scratch_turns(
    lanes: list[Lane], depth: int, own: Callable[[int], bool], path: str
) -> list[tuple[Place, Place, int]]:
    """Waits that our smaller scratch costs: a chunk of it holds one tile and is used again `depth` iterations later.

    `own` says which atoms are such scratch. Foreign runtimes have room for whole chunks there, so files say nothing of
    this. Who touches a chunk waits, at its first touch of any, for the last touches of the lanes it could disturb.
    """
    found: list[tuple[Place, Place, int]] = []
    by_rank: dict[int, list[int]] = {}
    for number_, lane in enumerate(lanes):
        by_rank.setdefault(lane.rank, []).append(number_)
    for mine in by_rank.values():
        touches: dict[int, list[tuple[int, int, int, bool]]] = {}  # by block: lane, begin, end, whether it writes
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for row, lane_number in enumerate(mine):
            for at, step in enumerate(lanes[lane_number].steps):
                for atoms, writes in ((step.sources, False), (step.stores, True)):
                    for atom in atoms:
                        if own(atom):
                            first.setdefault(row, at)
                            last[row] = at
                            for block in range(atom // _BLOCK, (atom + step.count - 1) // _BLOCK + 1):
                                begin = max(atom - block * _BLOCK, 0)
                                end = min(atom + step.count - block * _BLOCK, _BLOCK)
                                touches.setdefault(block, []).append((row, begin, end, writes))
        disturbs = np.zeros((len(mine), len(mine)), np.bool_)
        for ranges in touches.values():
            present = np.unique([row for row, *_ in ranges])
            touched, written = np.zeros((2, len(present), _BLOCK), np.float32)
            for at, (_, begin, end, writes) in zip(
                np.searchsorted(present, [row for row, *_ in ranges]), ranges, strict=True
            ):
                touched[at, begin:end] = 1
                if writes:
                    written[at, begin:end] = 1
            disturbs[np.ix_(present, present)] |= (written @ touched.T) > 0
        if len(found) + np.count_nonzero(disturbs) > MOST_TURNS:
            damaged(path, 0, "too many threadblocks share scratch with too many others")
        for one, other in zip(*np.nonzero(disturbs | disturbs.T), strict=True):
            if one != other:
                found.append(((mine[one], first[int(one)]), (mine[other], last[int(other)]), depth))
    return found
