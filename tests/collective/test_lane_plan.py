"""Walks over lanes end, whatever the order of events; what a walk lacks shows; what the walk of a matmul looks like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from walk_model import Model

from undertow.collective import lane_order as order
from undertow.collective import lane_plan as plan
from undertow.collective import lane_steps as steps
from undertow.collective.algorithms import LIBRARY
from undertow.collective.language import Trace, program
from undertow.collective.schedule import READY, Schedule
from undertow.collective.tied import tie
from undertow.collective.topology import Topology

KINDS = (plan.PLACES, plan.TWO, plan.MEETING)
TIED = {
    "all_reduce": ("two_shot", "ring", "halving_doubling", "one_shot", "all_pairs_chunks"),
    "reduce_scatter": ("reduce_scatter_direct", "reduce_scatter_ring", "reduce_scatter_halving"),
}


def tied(collective: str, name: str, ranks: int, parcels: int, **options: int) -> Schedule:
    return tie(LIBRARY[name], collective, Topology((0,) * ranks), parcels).schedule(**options)


@pytest.mark.parametrize("near", KINDS)
@pytest.mark.parametrize("name", LIBRARY)
def test_walks_end(name: str, near: int) -> None:
    for nodes in ((0, 0, 1, 1), (0,) * 5):
        topology = Topology(nodes)
        for seed, (slots, depth, workers) in enumerate(((1, 1, 1), (2, 2, 1), (3, 3, 4))):
            schedule = LIBRARY[name].compile(
                topology=topology, target="staged", slots=slots, depth=depth, workers=workers, check=False
            )
            Model(schedule, nodes, near, depth + 2, seed).run()


@pytest.mark.parametrize("near", KINDS)
@pytest.mark.parametrize("collective", TIED)
def test_walks_of_parcels_end(collective: str, near: int) -> None:
    for seed, name in enumerate(TIED[collective]):
        for ranks, parcels, slots, depth in ((4, 5, 4, 1), (3, 4, 2, 2), (5, 3, 1, 1)):
            schedule = tied(collective, name, ranks, parcels, slots=slots, depth=depth)
            for turn in range(4):
                Model(schedule, (0,) * ranks, near, 3, 10 * seed + turn).run()


def test_in_place_walks_end() -> None:
    for seed, name in enumerate(("ring", "halving_doubling", "hierarchical", "all_to_all_swap", "reduce_scatter_ring")):
        for near in KINDS:
            schedule = LIBRARY[name].compile(topology=Topology.grid(2, 4), target="staged", in_place=True)
            Model(schedule, schedule.topology.nodes, near, 4, seed).run()


@program("all_reduce")
def tangled(c: Trace) -> None:
    """Rank 0 can send two chunks at once, and then write over one of them; but the others need the place for them until
    something has gone to and fro. A lane that holds two must be rid of the first by then, and a network must have
    been told where the second goes."""
    first, others = c.rank(0), [c.rank(rank) for rank in range(1, c.ranks)]
    for other in others:
        for place in range(2):
            other.input[0].copy(other.scratch()[place])
    for turn in range(3):
        back = (others[0].scratch("bounced")[turn - 1] if turn else others[0].input[0]).copy(first.scratch()[turn])
        for other in others:
            back.copy(other.scratch("bounced")[turn])
    for other in others:
        other.scratch("bounced")[2].copy(other.output[0])
        for place in range(2):
            other.output[0].reduce(other.scratch()[place])
    once = first.input[0].copy(first.scratch("made")[0]).reduce(first.input[0])
    twice = first.input[0].copy(first.output[0]).reduce(once)
    for place, chunk in enumerate((once, twice)):
        for other in others:
            chunk.copy(other.scratch()[place])
    first.output[0].reduce(first.input[0])
    for other in others:
        for place in range(2):
            other.output[0].reduce(other.scratch()[place])


@program("all_reduce", chunks=6, ranks=2)
def mixed(c: Trace) -> None:
    """What rank 0 sends at once is in part only sent, in part kept, too."""
    first, second = c.rank(0), c.rank(1)
    for chunk in range(6):
        if chunk < 3:
            first.input[chunk].copy(first.output[chunk])
        else:
            second.input[chunk].copy(first.output[chunk])
        first.input[chunk].copy(second.output[chunk])


def test_messages_are_counted_as_they_leave() -> None:
    schedule = mixed.compile(target="staged", slots=6, check=False)
    sends = of_kind(plan.walk(schedule, 0, (0, 0), plan.TWO), steps.SEND)
    assert [len(one.numbers) for one in sends] == [3, 3]
    assert sends[0].numbers > sends[1].numbers  # what is only sent comes first
    for seed in range(5):
        Model(schedule, (0, 0), plan.TWO, 4, seed).run()


MUTANTS = {  # a kind of step that is left out or comes too late, and a schedule that needs it
    "no flush": (LIBRARY["one_shot"], 6, plan.PLACES, "may still read"),
    "late receive": (tangled, 2, plan.TWO, "deadlock|out of order"),
    "late receive of what is shared": (tangled, 4, plan.TWO, "deadlock|out of order"),
    "late expect": (tangled, 3, plan.MEETING, "deadlock"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_notices_what_a_walk_lacks(mutant: str) -> None:
    given, ranks, near, said = MUTANTS[mutant]
    options = {"slots": 4} if given is tangled else {"in_place": True}
    schedule = given.compile(ranks, target="staged", check=False, **options)
    for seed in range(10):
        Model(schedule, (0,) * ranks, near, 4, seed).run()

    def try_orders() -> None:
        for seed in range(10):
            model = Model(schedule, (0,) * ranks, near, 4, seed)
            model.walks = [replace(walk, steps=changed(walk, mutant)) for walk in model.walks]
            model.run()

    with pytest.raises(AssertionError, match=said):
        try_orders()


def changed(walk: plan.Walk, mutant: str) -> list[steps.Step]:
    if mutant == "no flush":
        return [one for one in walk.steps if one.kind not in (steps.FLUSH, steps.FLUSH_LATER)]
    moved = steps.EXPECT if mutant == "late expect" else steps.RECEIVE
    received = [number for one in walk.steps if one.kind == moved for number in one.numbers]
    found: list[steps.Step] = []
    for one in walk.steps:
        if one.kind == moved:
            continue
        if moved == steps.EXPECT and one.kind == steps.RECEIVE:
            found.append(one._replace(kind=moved))
        if moved == steps.RECEIVE and one.kind == steps.RUN:
            late = [number for number in received if walk.messages[number].first_read == one.numbers[0]]
            found += [steps.Step(moved, one.track, (number,)) for number in sorted(late)]
        found.append(one)
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_turns_keep_what_depends_on_each_other_in_order(workers: int) -> None:
    """Whoever shares memory stands in the order that the workers have."""
    schedule = LIBRARY["two_shot"].compile(4, target="staged", workers=workers)
    turns = order.in_turns(schedule).turns
    turn_of = {at: number for number, turn in enumerate(turns) for at in turn.instructions}
    assert sorted(turn_of) == list(range(len(schedule.instructions)))
    touched: dict[int, tuple[int, bool]] = {}
    for at in order.in_order(schedule):
        written = {atom for atom, _ in order.atoms_written(schedule, at)}
        for atom in written | {atom for atom, _ in order.atoms_read(schedule, at)}:
            before, wrote = touched.get(atom, (at, False))
            if before != at and (wrote or atom in written):
                assert turn_of[before] < turn_of[at]
            touched[atom] = at, atom in written


def test_order_keeps_every_worker_s_own() -> None:
    schedule = LIBRARY["two_shot"].compile(4, target="staged", workers=3)
    found = np.array(order.in_order(schedule))
    place = np.empty_like(found)
    place[found] = np.arange(len(found))
    for begin, end in zip(schedule.worker_start, schedule.worker_start[1:], strict=False):
        assert (np.diff(place[begin:end]) > 0).all()


def test_more_sums_in_flight_than_spares_make_a_flush() -> None:
    """A ring of many ranks only passes sums on: their memory is bounded, and flushed before it is used again."""
    schedule = LIBRARY["reduce_scatter_ring"].compile(24, target="staged", check=False)
    found = plan.walk(schedule, 3, (0,) * 24, plan.PLACES)
    assert found.spares == 16
    assert [step.kind for step in found.steps].count(steps.FLUSH) == 1


def of_kind(walk: plan.Walk, kind: int) -> list[steps.Step]:
    return [step for step in walk.steps if step.kind == kind]


def test_two_shot_beside_a_matmul_moves_as_the_operators_parcels_do() -> None:
    """Three tracks; three pieces leave in one step, three arrive in one; the sum is shared, and so are the others'."""
    parcels, ranks = 6, 4
    schedule = tied("all_reduce", "two_shot", ranks, parcels, slots=4, depth=1)
    walk = plan.walk(schedule, 1, (0,) * ranks, plan.TWO)
    messages = walk.messages
    sends = of_kind(walk, steps.SEND)
    assert [(one.track, len(one.numbers)) for one in sends if one.track == steps.EARLY] == [(steps.EARLY, 3)] * parcels
    sums = [one for one in sends if one.track == steps.MAIN]
    assert len(sums) == parcels
    for one in sums:
        (at,) = one.numbers
        assert all(message.shared for message in messages if message.sent == at)
    for track, shared in ((steps.MAIN, False), (steps.LATE, True)):
        receives = [one.numbers for one in of_kind(walk, steps.RECEIVE) if one.track == track]
        assert [len(numbers) for numbers in receives] == [ranks - 1] * parcels
        assert all(messages[number].shared == shared for numbers in receives for number in numbers)
    assert not of_kind(walk, steps.FLUSH)
    assert walk.signals == parcels  # from the copy of my own part to the sum
    assert [one.numbers for one in of_kind(walk, steps.AWAIT)] == [(parcel,) for parcel in range(parcels)]


def test_two_parcels_of_a_ring_are_under_way() -> None:
    """The first piece of a parcel leaves before the last of the parcel before. One track: pieces are handed on."""
    schedule = tied("all_reduce", "ring", 4, 4, slots=4, depth=1)
    walk = plan.walk(schedule, 2, (0,) * 4, plan.TWO)
    kinds = [step.kind for step in walk.steps if step.kind in (steps.SEND, steps.AWAIT)]
    assert kinds.count(steps.SEND) == 4 * 6
    early = [kinds[:place].count(steps.SEND) for place, kind in enumerate(kinds) if kind == steps.AWAIT]
    # Six messages of a parcel: the next one is waited for after four of them.
    assert early == [0, 4, 10, 16]
    assert {step.track for step in walk.steps if step.kind == steps.SEND} == {steps.MAIN}
    assert not of_kind(walk, steps.FLUSH)


def test_halving_and_doubling_flushes_nothing() -> None:
    """What comes back was made of what was sent, so that has left."""
    schedule = tied("all_reduce", "halving_doubling", 4, 3, slots=4, depth=1)
    for near in (plan.PLACES, plan.TWO):
        assert not of_kind(plan.walk(schedule, 0, (0,) * 4, near), steps.FLUSH)


def test_only_what_goes_to_all_others_is_shared() -> None:
    """A sender that asks fewer receivers whether they have read would write over what another has yet to read."""
    for name in LIBRARY:
        schedule = LIBRARY[name].compile(5, target="staged", check=False)
        for near in KINDS:
            messages = plan.walk(schedule, 0, (0,) * 5, near).messages
            shared = {one.sent for one in messages if one.shared}
            assert near == plan.TWO or not shared
            for at in shared:
                sent = [one for one in messages if one.sent == at]
                assert {one.receiver for one in sent} == set(range(5)) - {sent[0].sender}
                assert all(one.shared for one in sent)
    two = LIBRARY["two_shot"].compile(2, target="staged")
    assert not any(one.shared for one in plan.walk(two, 0, (0, 0), plan.TWO).messages)


def test_one_track_without_a_kernel() -> None:
    schedule = LIBRARY["two_shot"].compile(4, target="staged")
    assert READY not in schedule.instructions.kind
    walk = plan.walk(schedule, 0, (0,) * 4, plan.TWO)
    assert {one.track for one in walk.steps} == {steps.MAIN}
    assert walk.signals == 0
