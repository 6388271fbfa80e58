"""Staged schedules over lanes: exact on every lane, and without a deadlock in any order of events."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lane_targets
import numpy as np
import pytest

import undertow as ut
from undertow.collective import lane_plan as plan
from undertow.collective.algorithms import LIBRARY
from undertow.collective.schedule import Schedule
from undertow.collective.topology import Topology


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Numba's cache is filled here and not by all ranks at once, each waiting for the others."""
    LIBRARY["ring"].compile(2, target="staged")


@pytest.mark.parametrize("ranks", [2, 4])
def test_library_is_exact_on_every_lane(ranks: int) -> None:
    ut.launch(lane_targets.library, ranks, device="cpu", args=(["peer", "dma", "net"],), deadline=30)


def test_library_is_exact_across_named_nodes() -> None:
    ut.launch(lane_targets.library_on_nodes, 4, device="cpu", args=(["a", "a", "b", "b"],), deadline=30)


def test_odds_and_ends(tmp_path: Path) -> None:
    ut.launch(lane_targets.odds_and_ends, 4, device="cpu", args=(str(tmp_path),), deadline=30)
    for rank in range(4):
        assert (tmp_path / f"refused-{rank}").read_text().splitlines() == [
            "schedule is for target direct, but must be compiled for target staged.",
            "schedule is for 5 ranks, but must be for 4 ranks.",
            "lane is 'pigeon', but must be one of net, peer, dma.",
            f"stride is {1 << 30}, but must be between 16 and {8 << 20} bytes.",
            "source is strided (1, 8), but must be contiguous.",
            "out is 63 torch.float32, but must be 64 torch.float32.",
            "out is 64 torch.int32, but must be 64 torch.float32.",
            "operation is 'product', but must be one of sum, avg, max, min.",
        ]


@pytest.mark.parametrize("lane", ["dma", "net"])
def test_a_lost_rank_is_an_error(lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_FLIGHT_DIR", str(tmp_path / "flight"))
    with pytest.raises(ut.UndertowError, match="SIGKILL"):
        ut.launch(lane_targets.lose_a_rank, 3, device="cpu", args=(str(tmp_path), lane), deadline=30)
    death = float((tmp_path / "death").read_text())
    for rank in (0, 2):
        when, said = (tmp_path / f"lost-{rank}").read_text().split(" ", 1)
        assert float(when) - death < 5
        assert "is lost" in said


# -- walks of all ranks, in random orders of events ------------------------------------------------------------------


class Model:
    """All ranks' walks over lanes that hold as little, and send as late, as they are allowed to."""

    def __init__(self, schedule: Schedule, nodes: tuple[int, ...], near: int, iterations: int, seed: int) -> None:
        self.schedule, self.near, self.nodes = schedule, near, nodes
        self.walks = [plan.walk(schedule, rank, nodes, near) for rank in range(schedule.ranks)]
        self.messages = self.walks[0].messages
        self.iterations = iterations
        self.random = random.Random(seed)
        self.hosts = [self.script(rank) for rank in range(schedule.ranks)]
        self.left = list(range(schedule.ranks))
        self.queues: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)  # (rank, lane)
        self.full: dict[object, tuple[int, int]] = {}  # what lanes hold, by slot or pair
        self.posted: set[tuple[int, int]] = set()
        self.place: dict[tuple[int, int, int], tuple[int, int]] = {}  # (rank, place, copy) -> message, iteration
        self.by_sender: dict[int, list[int]] = defaultdict(list)
        for number, one in enumerate(self.messages):
            self.by_sender[one.sent].append(number)

    def lane(self, number: int) -> int:
        one = self.messages[number]
        same = self.nodes[one.sender] == self.nodes[one.receiver]
        return plan.NEAR if self.near != plan.MEETING and same else plan.FAR

    def holder(self, number: int, iteration: int) -> object:
        one = self.messages[number]
        if self.lane(number) == plan.FAR:
            return "far", number, iteration
        slot = one.slot + iteration % self.schedule.depth if self.near == plan.PLACES else 0
        return one.sender, one.receiver, slot

    def script(self, rank: int) -> Iterator[bool]:
        """What a host does, a step for each True; False while it cannot go on."""
        walk, depth = self.walks[rank], self.schedule.depth
        for iteration in range(self.iterations):
            for kind, number in walk.steps:
                if kind == plan.RUN:
                    self.check_run(rank, number, iteration)
                    for one in self.by_sender[number]:
                        self.queues[rank, self.lane(one)].append((one, iteration))
                elif kind == plan.EXPECT:
                    self.posted.add((number, iteration))
                elif kind == plan.RECEIVE:
                    holder = self.holder(number, iteration)
                    while holder not in self.full:
                        yield False
                    assert self.full[holder] == (number, iteration), "messages of one pair out of order"
                    one = self.messages[number]
                    self.place[rank, one.place, iteration % depth] = number, iteration
                    if self.lane(number) == plan.FAR or self.near == plan.ONE:
                        del self.full[holder]
                elif kind == plan.FREE:
                    one = self.messages[number]
                    assert self.place.pop((rank, one.place, iteration % depth)) == (number, iteration)
                    if self.lane(number) == plan.NEAR and self.near == plan.PLACES:
                        del self.full[self.holder(number, iteration)]
                elif kind == plan.FLUSH or iteration >= depth:
                    while self.queues[rank, number]:
                        yield False
                yield True

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
        for lane in (plan.NEAR, plan.FAR):
            for number, when in self.queues[rank, lane]:
                assert written.isdisjoint(self.memory(rank, self.messages[number].sent, when, sent=True))

    def memory(self, rank: int, at: int, iteration: int, sent: bool) -> set[tuple[int, int]]:
        """Local (atom, copy or tile) pairs that an instruction writes or, if `sent`, that its sends read."""
        one, users = self.schedule.instructions, self.schedule.user_atoms
        spare = self.walks[rank].spare_of.get(at)
        stores = one.store_atom[one.store_start[at] : one.store_start[at + 1]]
        begins = [int(atom) for atom in stores if self.schedule.atom_rank[atom] == rank]
        begins += [-1 - spare - int(one.count[at]) + 1] if spare is not None else []
        if sent:
            source = int(one.source_atom[one.source_start[at]])
            begins = [source] if plan.sends_source(self.schedule, at) else begins[:1]
        copy = iteration % self.schedule.depth
        return {
            (atom, iteration if 0 <= atom < users else copy)
            for begin in begins
            for atom in range(begin, begin + int(one.count[at]))
        }

    def send(self, rank: int, lane: int) -> bool:
        """Let a queue make its first send (of a network: any), if there is room."""
        queue = self.queues[rank, lane]
        for index in range(len(queue) if lane == plan.FAR else min(1, len(queue))):
            holder = self.holder(*queue[index])
            if holder not in self.full and (lane == plan.NEAR or queue[index] in self.posted):
                self.full[holder] = queue[index]
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
        engines = [(rank, lane) for rank in self.left for lane in (plan.NEAR, plan.FAR)]
        while self.left:
            self.random.shuffle(self.left)
            self.random.shuffle(engines)
            hosts = [self.advance(rank) for rank in list(self.left)]
            sends = [] if late and any(hosts) else [self.send(*one) for one in engines]
            assert any(hosts) or any(sends), "deadlock"


@pytest.mark.parametrize("near", [plan.PLACES, plan.ONE, plan.MEETING])
@pytest.mark.parametrize("name", LIBRARY)
def test_walks_end(name: str, near: int) -> None:
    for nodes in ((0, 0, 1, 1), (0,) * 5):
        topology = Topology(nodes)
        for seed, (slots, depth, workers) in enumerate(((1, 1, 1), (2, 2, 1), (3, 3, 4))):
            schedule = LIBRARY[name].compile(
                topology=topology, target="staged", slots=slots, depth=depth, workers=workers, check=False
            )
            Model(schedule, nodes, near, depth + 2, seed).run()


def test_in_place_walks_end() -> None:
    for seed, name in enumerate(("ring", "halving_doubling", "hierarchical", "all_to_all_swap", "reduce_scatter_ring")):
        for near in (plan.PLACES, plan.ONE, plan.MEETING):
            schedule = LIBRARY[name].compile(topology=Topology.grid(2, 4), target="staged", in_place=True)
            Model(schedule, schedule.topology.nodes, near, 4, seed).run()


MUTANTS = {  # a kind of step that is left out or comes too late, and a schedule that needs it
    "no flush": ("one_shot", plan.PLACES, "assert"),
    "late receive": ("all_pairs_chunks", plan.ONE, "deadlock|out of order"),
    "late expect": ("all_to_all_swap", plan.MEETING, "deadlock"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_notices_what_a_walk_lacks(mutant: str) -> None:
    name, near, said = MUTANTS[mutant]
    schedule = LIBRARY[name].compile(6, target="staged", in_place=True)

    def try_orders() -> None:
        for seed in range(10):
            model = Model(schedule, (0,) * 6, near, 4, seed)
            model.walks = [replace(walk, steps=changed(walk, mutant)) for walk in model.walks]
            model.run()

    with pytest.raises(AssertionError, match=said):
        try_orders()


def changed(walk: plan.Walk, mutant: str) -> list[tuple[int, int]]:
    if mutant == "no flush":
        return [one for one in walk.steps if one[0] < plan.FLUSH]
    moved = plan.EXPECT if mutant == "late expect" else plan.RECEIVE
    found: list[tuple[int, int]] = []
    for kind, number in walk.steps:
        if kind == moved:
            continue
        if moved == plan.EXPECT and kind == plan.RECEIVE:
            found.append((moved, number))
        if moved == plan.RECEIVE and kind == plan.RUN:
            received = {one for what, one in walk.steps if what == moved}
            found += [(moved, one) for one in sorted(received) if walk.messages[one].first_read == number]
        found.append((kind, number))
    return found


def test_order_keeps_every_worker_s_own() -> None:
    schedule = LIBRARY["two_shot"].compile(4, target="staged", workers=3)
    order = np.array(plan.in_order(schedule))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    for begin, end in zip(schedule.worker_start, schedule.worker_start[1:], strict=False):
        assert (np.diff(place[begin:end]) > 0).all()


def test_more_sums_in_flight_than_spares_make_a_flush() -> None:
    """A ring of many ranks only passes sums on: their memory is bounded, and flushed before it is used again."""
    schedule = LIBRARY["reduce_scatter_ring"].compile(24, target="staged", check=False)
    found = plan.walk(schedule, 3, (0,) * 24, plan.PLACES)
    assert found.spares == 16
    assert [kind for kind, _ in found.steps].count(plan.FLUSH) == 1
