"""Collective programs over the staged lane, without a GPU: every rank's walk on a driver that runs streams in random
orders, beside a matmul whose parcels come when they come. A signal that is missing shows as wrong numbers, an order
that waits for itself as a deadlock."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_node import CHUNK, Node

from undertow.collective import lane_runtime
from undertow.collective import lane_steps as steps
from undertow.collective.algorithms import LIBRARY
from undertow.collective.lane_plan import TWO
from undertow.collective.lane_runtime import LaneExecutable
from undertow.collective.lane_sum import Sum
from undertow.collective.language import Program, Trace, program
from undertow.collective.schedule import READY, Schedule
from undertow.collective.tied import tie
from undertow.collective.topology import Topology
from undertow.fabric.base import Stream
from undertow.fabric.symmetric import SymmetricBuffer

POISON = -(1 << 30)
PARCELS = 4
Changes = Callable[[LaneExecutable], None]


@program("all_reduce", chunks=lambda ranks: PARCELS * ranks)
def backwards(c: Trace) -> None:
    """Ranks name parcels in different orders, and owners hand sums on."""
    parcels = list(range(PARCELS))
    for rank in range(c.ranks):
        for parcel in parcels if rank % 2 else parcels[::-1]:
            c.tile_ready(c.rank(rank).input[parcel * c.ranks : (parcel + 1) * c.ranks], parcel)
    for chunk in range(PARCELS * c.ranks):
        owner = chunk % c.ranks
        total = c.rank(owner).input[chunk].copy(c.rank(owner).output[chunk])
        for other in c.others(owner):
            total.reduce(c.rank(other).input[chunk])
        for other in c.others(owner):
            total.copy(other)


class FakeStream(Stream):
    """A stream of one rank of a fake node."""

    def __init__(self, node: Node, rank: int) -> None:
        self._node, self._rank = node, rank
        self.number, self._event = node.world.new_stream(), node.module.new_event(rank)

    def fork(self) -> None:
        self._node.module.after(self.number, self._node.current[self._rank], self._event)

    def after(self, other: Stream) -> None:
        raise NotImplementedError

    def run(self, work: Callable[[], None]) -> None:
        before = self._node.current[self._rank]
        self._node.current[self._rank] = self.number
        work()
        self._node.current[self._rank] = before

    def join(self) -> None:
        self._node.module.after(self._node.current[self._rank], self.number, self._event)


class Walkers:
    """A schedule on all ranks of a fake node. Sums and the matmul are done when their streams get there."""

    def __init__(self, modules: Any, monkeypatch: pytest.MonkeyPatch, schedule: Schedule, changes: Changes) -> None:
        lanes, module, world = modules
        self.schedule, self.world = schedule, world
        self.node = Node(schedule.ranks, lanes, module, world)
        self.rank = 0  # whose host enqueues
        monkeypatch.setattr(module, "current_stream", lambda device: self.node.current[self.rank])
        near = types.SimpleNamespace(holds=TWO, open=lambda slots: self.node.lanes[self.rank], close=lambda: None)
        monkeypatch.setattr(lane_runtime, "Near", lambda fabric, lane: near)
        self.runs: list[LaneExecutable] = []
        self.sources: list[torch.Tensor] = []
        for rank in range(schedule.ranks):
            self.rank = rank
            run = LaneExecutable(self._fabric(rank), schedule, stride=CHUNK)
            run._sum = self._later  # type: ignore[assignment]
            run._signals = [module.new_event(rank) for _ in range(run._walk.signals)]
            changes(run)
            self.runs.append(run)
        self.beside = [(FakeStream(self.node, rank), FakeStream(self.node, rank)) for rank in range(schedule.ranks)]
        self.matmuls = [world.new_stream() for _ in range(schedule.ranks)]

    def _fabric(self, rank: int) -> Any:
        group = types.SimpleNamespace(
            size=self.schedule.ranks, rank=rank, nodes=(0,) * self.schedule.ranks, device=torch.device("cpu"),
            failed=True, name="fake", is_local=lambda peer: True,
        )  # fmt: skip

        def buffer(size: int, dtype: torch.dtype) -> SymmetricBuffer:
            views: list[torch.Tensor | None] = [None] * self.schedule.ranks
            views[rank] = torch.full((size,), 99, dtype=dtype)
            return SymmetricBuffer(group, 0, views, object())  # type: ignore[arg-type]

        return types.SimpleNamespace(group=group, buffer=buffer, adopt=lambda run: None, kept={})

    @property
    def _later(self) -> Any:
        exact = Sum(torch.device("cpu"), 1)

        class Later:
            def warm_up(_, *arguments: object) -> None:
                return

            def __call__(_, out: torch.Tensor, parts: list[torch.Tensor], operation: str) -> None:
                self.world.put(self.node.current[self.rank], lambda: exact(out, parts, operation))

        return Later()

    def call(self, lengths: list[int], salt: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One call on all ranks, enqueued only; what each has then and what it must have when all has run."""
        contract, made = self.schedule.contract, []
        classes = contract.class_lengths(lengths, 4).tolist()
        values = []
        for rank in range(contract.ranks):
            items = contract.item_class[contract.first_item[rank] : contract.first_item[rank + 1]].tolist()
            chance = torch.Generator().manual_seed(100 * salt + rank)
            values.append([torch.randint(-99, 99, (classes[one],), generator=chance).int() for one in items])
        for rank, run in enumerate(self.runs):
            self.rank = rank
            source = torch.full((sum(one.numel() for one in values[rank]),), POISON, dtype=torch.int32)
            outputs = contract.output_class[contract.first_output[rank] : contract.first_output[rank + 1]].tolist()
            out = torch.full((sum(classes[one] for one in outputs),), POISON, dtype=torch.int32)
            self.sources.append(source)  # alive until all has run
            ready = self._matmul(rank, source, values[rank])
            run.run(source, out, lengths, ready=ready, beside=self.beside[rank])
            want = torch.cat([sum(values[other][one] for other in range(contract.ranks)) for one in outputs])  # type: ignore[misc]
            made.append((out, want))
        return made

    def _matmul(self, rank: int, source: torch.Tensor, values: list[torch.Tensor]) -> Callable[[int], None]:
        """Parcels are written one after the other, on a stream of their own."""
        one, schedule = self.schedule.instructions, self.schedule
        worker_of = torch.repeat_interleave(
            torch.from_numpy(schedule.worker_rank.copy()), torch.from_numpy(schedule.worker_start.copy()).diff()
        )
        parcels: dict[int, list[int]] = {}
        for at in range(len(one)):
            if one.kind[at] == READY and worker_of[at] == rank:
                first = int(one.store_atom[one.store_start[at]] - schedule.first_atom[rank, 0])
                parcels.setdefault(int(one.number[at]), []).extend(range(first, first + int(one.count[at])))
        done: set[int] = set()
        places = torch.split(source, [value.numel() for value in values])

        def compute(parcel: int) -> None:
            for chunk in parcels[parcel]:
                places[chunk].copy_(values[chunk])
            done.add(parcel)

        for parcel in parcels:
            self.world.put(self.matmuls[rank], lambda parcel=parcel: compute(parcel))
        current = self.node.current
        return lambda parcel: self.world.put(current[rank], lambda: None, lambda: parcel in done) and None


def unchanged(run: LaneExecutable) -> None:
    """As it is."""


def walked(
    modules: Any, monkeypatch: pytest.MonkeyPatch, given: Program, collective: str, ranks: int, seed: int,
    changes: Changes = unchanged, longest: int = CHUNK // 4, depth: int = 1,
) -> list[tuple[int, int]]:  # fmt: skip
    """Calls of several sizes after each other; the copies that were made."""
    whole = tie(given, collective, Topology((0,) * ranks), PARCELS)
    schedule = whole.schedule(slots=4, depth=depth)
    walkers = Walkers(modules, monkeypatch, schedule, changes)
    chance = torch.Generator().manual_seed(seed)
    calls = []
    for salt in range(3):
        lengths = torch.randint(
            0 if salt else longest, longest + 1, (schedule.contract.spans,), generator=chance
        ).tolist()
        calls += walkers.call(lengths, salt)
        if salt == 0:
            copies = list(walkers.world.copies)
    streams = [one.number for pair in walkers.beside for one in pair] + walkers.matmuls
    late = [one for one in streams if torch.rand(1, generator=chance) < 0.5]
    walkers.world.run(seed, late)
    for out, want in calls:
        assert torch.equal(out, want), "wrong numbers"
    return copies


CASES = [
    ("all_reduce", LIBRARY["two_shot"]), ("all_reduce", LIBRARY["ring"]), ("all_reduce", LIBRARY["halving_doubling"]),
    ("all_reduce", LIBRARY["one_shot"]), ("all_reduce", LIBRARY["all_pairs_chunks"]),
    ("all_reduce", LIBRARY["double_binary_tree"]), ("all_reduce", backwards),
    ("reduce_scatter", LIBRARY["reduce_scatter_direct"]), ("reduce_scatter", LIBRARY["reduce_scatter_ring"]),
    ("reduce_scatter", LIBRARY["reduce_scatter_halving"]),
]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1].name)
def test_programs_are_exact_in_random_orders(
    case: tuple[str, Program], ranks: int, modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked(modules, monkeypatch, case[1], case[0], ranks, seed=ranks)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1].name)
def test_chunks_longer_than_a_message(case: tuple[str, Program], modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several iterations, whose tracks begin and end with them."""
    walked(modules, monkeypatch, case[1], case[0], 3, seed=5, longest=CHUNK, depth=2)


def test_two_shot_makes_as_few_copies_as_the_operators_parcels(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = 4
    copies = walked(modules, monkeypatch, LIBRARY["two_shot"], "all_reduce", ranks, seed=1)
    # A rank's own place parts what it sends, and what it takes for itself, in two, unless it is at an end; a sum leaves
    # once, and the others' arrive as the pieces do.
    most = PARCELS * (ranks * 1 + 3 * (ranks + 2))
    assert len(copies) <= most, (len(copies), most)


@pytest.mark.parametrize("left_out", [steps.WAIT, steps.SIGNAL])
def test_a_missing_wait_between_tracks_shows(left_out: int, modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that does not wait for the copy of my own part."""

    def changes(run: LaneExecutable) -> None:
        kept = [step for step in run._walk.steps if step.kind not in (steps.WAIT, left_out)]
        object.__setattr__(run._walk, "steps", kept)

    def several() -> None:
        for seed in range(5):
            walked(modules, monkeypatch, LIBRARY["two_shot"], "all_reduce", 3, seed, changes)

    with pytest.raises(AssertionError, match="wrong numbers"):
        several()


def test_messages_counted_wrong_show(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank takes two messages of a pair the other way round."""

    def changes(run: LaneExecutable) -> None:
        if run._group.rank == 1:
            for one in run._walk.messages:
                if one.receiver == 1 and not one.shared:
                    one.slot += 1

    with pytest.raises(AssertionError, match=r"wrong numbers|deadlock"):
        walked(modules, monkeypatch, LIBRARY["ring"], "all_reduce", 3, 1, changes)
