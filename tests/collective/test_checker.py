"""The checker: no wait and no post can be taken away unnoticed, every fault has its sentence, and nothing depends on
chance."""

from __future__ import annotations

import inspect
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from in_process import Call, Machine, verify
from random_programs import random_options, random_program, random_spans

from undertow.collective.algorithms import LIBRARY
from undertow.collective.checker import check
from undertow.collective.contract import custom
from undertow.collective.language import Program, Trace, program
from undertow.collective.schedule import START, Instructions, Schedule
from undertow.collective.topology import Topology
from undertow.errors import InvalidArgument, ProgramRefused

MUTATED = (
    "ring", "one_shot", "two_shot", "all_pairs_chunks", "halving_doubling", "double_binary_tree", "all_gather_ring",
    "all_gather_doubling", "reduce_scatter_ring", "reduce_scatter_halving", "all_to_all_direct", "all_to_all_swap",
    "broadcast_tree", "reduce_tree",
)  # fmt: skip
MOST_REDUNDANT = 0.01  # share of all waits that a compiler may have made in vain
OPTIONS: tuple[dict[str, object], ...] = (
    {"target": "direct"},
    {"target": "direct", "workers": 2},
    {"target": "staged"},
    {"target": "staged", "slots": 1, "depth": 1},
)


def is_accepted(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ProgramRefused:
        return False
    return True


# -- nothing can be taken away ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MUTATED)
def test_no_wait_can_be_taken_away(name: str, record_property: Callable[[str, object], None]) -> None:
    """What the checker accepts all the same must be superfluous: it runs right in every order of events."""
    waits = redundant = 0
    for ranks in (2, 3, 4, 5):
        trace = LIBRARY[name].trace(ranks)
        for options in OPTIONS:
            schedule = LIBRARY[name].compile(ranks, **options)
            calls = [Call((length,) * trace.contract.spans) for length in (37, 5, 0, 40)]
            for index in range(len(schedule.instructions.wait_value)):
                mutated = schedule.without_wait(index)
                waits += 1
                if is_accepted(mutated):
                    redundant += 1
                    verify(trace, mutated, calls, index, Machine(mutated, 64, 1 << 14), runs=20)
    record_property("waits", waits)
    record_property("redundant", redundant)
    assert waits
    assert redundant <= MOST_REDUNDANT * waits, f"{redundant} of {waits} waits are superfluous"


@pytest.mark.parametrize("name", MUTATED)
def test_no_post_can_be_taken_away(name: str) -> None:
    for ranks in (2, 3, 4, 5):
        for options in OPTIONS:
            schedule = LIBRARY[name].compile(ranks, **options)
            accepted = [
                index
                for index in range(len(schedule.instructions.post_semaphore))
                if is_accepted(schedule.without_post(index))
            ]
            assert accepted == [], (ranks, options)


@pytest.mark.parametrize("name", ["ring", "two_shot", "all_to_all_swap", "all_gather_ring"])
def test_no_wait_may_be_for_less(name: str) -> None:
    """A wait for one post less, or for an iteration earlier, is a wait too little."""
    for options in OPTIONS:
        schedule = LIBRARY[name].compile(3, **options)
        one = schedule.instructions
        for index in range(len(one.wait_value)):
            less, earlier = one.wait_value.copy(), one.wait_back.copy()
            less[index] -= 1
            earlier[index] += 1
            assert not is_accepted(replace(schedule, instructions=replace(one, wait_value=less)))
            if not schedule.semaphore_of_start[one.wait_semaphore[index]]:
                assert not is_accepted(replace(schedule, instructions=replace(one, wait_back=earlier)))


def with_later_wait(schedule: Schedule, index: int) -> Schedule | None:
    """Wait number `index` moved to the next instruction of its worker, if there is one."""
    one = schedule.instructions
    at = int(np.searchsorted(one.wait_start, index, side="right")) - 1
    if at + 1 in schedule.worker_start:
        return None
    order = np.arange(len(one.wait_value))
    last = int(one.wait_start[at + 1]) - 1
    order[[index, last]] = last, index
    starts = one.wait_start.copy()
    starts[at + 1] -= 1
    names = ("wait_semaphore", "wait_value", "wait_back")
    moved = {name: getattr(one, name)[order] for name in names}
    return replace(schedule, instructions=replace(one, wait_start=starts, **moved))


def damaged(schedule: Schedule, dice: random.Random) -> Schedule | None:
    """A wait dropped, moved, or for less; or two instructions of a worker in the other order."""
    one = schedule.instructions
    waits = len(one.wait_value)
    kind = dice.randrange(4)
    if kind == 0:
        first = dice.randrange(len(one))
        in_body = first + 1 < len(one) and one.kind[first] < START and one.kind[first + 1] < START
        return with_swapped(schedule, first) if in_body and first + 1 not in schedule.worker_start else None
    if not waits:
        return None
    index = dice.randrange(waits)
    if kind == 1:
        return schedule.without_wait(index)
    if kind == 2:
        return with_later_wait(schedule, index)
    values = one.wait_value.copy()
    values[index] -= 1
    return replace(schedule, instructions=replace(one, wait_value=values))


def survives(seed: int) -> tuple[int, int]:
    """Damage a random program's schedules in many ways: what is accepted runs right. How many were, of how many."""
    dice = random.Random(seed)
    made = random_program(seed)
    trace = made.program().trace()
    tried = accepted = 0
    for target in ("direct", "staged"):
        options = random_options(dice, target) | ({"packets": False} if target == "staged" else {})
        schedule = made.program().compile(in_place=made.in_place, **options)
        calls = [Call(random_spans(made.contract, made.in_place, dice)) for _ in range(3)]
        for number in range(12 if len(schedule.instructions) else 0):
            found = damaged(schedule, dice)
            if found is None:
                continue
            tried += 1
            if is_accepted(found):
                accepted += 1
                try:
                    verify(trace, found, calls, number, Machine(found, 64, 1 << 13), runs=20)
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}, {options}: accepted, but {error}") from error
    return tried, accepted


@pytest.mark.parametrize("batch", range(4))
def test_what_is_accepted_runs_right(batch: int) -> None:
    found = [survives(seed) for seed in range(batch * 20, (batch + 1) * 20)]
    assert sum(tried for tried, _ in found) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("batch", range(20))
def test_what_is_accepted_runs_right_for_many(batch: int) -> None:
    for seed in range(1000 + batch * 100, 1000 + (batch + 1) * 100):
        survives(seed)


# -- every fault has its sentence ------------------------------------------------------------------------------------


def line_of(made: Program, text: str) -> int:
    """The line of this file on which the program's function says `text`."""
    lines, first = inspect.getsourcelines(made._function)
    found = [number for number, line in enumerate(lines, first) if text in line]
    assert len(found) == 1, (text, found)
    return found[0]


def refusal(action: Callable[[], object], made: Program, text: str) -> str:
    """The message of the refusal, which names the line with `text`, and whose trace is short and names lines here."""
    with pytest.raises(ProgramRefused) as caught:
        action()
    message = str(caught.value)
    first, *steps = message.splitlines()
    assert first.startswith(f"Program {made.name} is refused at {__file__}:{line_of(made, text)}: "), message
    assert len(steps) <= 5
    for number, step in enumerate(steps, 1):
        assert re.fullmatch(
            rf"  {number}\. .* of rank \d+ .*\({re.escape(__file__)}:\d+\)|  {number}\. rank \d+ \w+", step
        )
    return first.split(": ", 1)[1]


@program("all_gather", ranks=2)
def exchange(c: Trace) -> None:
    for rank in range(2):
        own = c.rank(rank).input[0].copy(c.rank(rank).output[rank])
        own.copy(1 - rank)


def waits_of(schedule: Schedule) -> range:
    return range(len(schedule.instructions.wait_value))


def test_races_between_ranks() -> None:
    schedule = exchange.compile(target="staged", depth=1, fuse=False)
    said = {
        refusal(lambda index=index: check(schedule.without_wait(index)), exchange, "own.copy(1 - rank)")
        for index in waits_of(schedule)
    }
    assert said == {
        "staging[0] of rank 0 is read while it may still be written.",
        "staging[0] of rank 1 is read while it may still be written.",
        "staging[0] of rank 0 is overwritten while it may still be in use, in iteration 1.",
        "staging[0] of rank 1 is overwritten while it may still be in use, in iteration 1.",
    }


def test_races_with_the_beginning_and_the_end_of_a_call() -> None:
    schedule = exchange.compile(target="direct", fuse=False)
    said = {
        refusal(lambda index=index: check(schedule.without_wait(index)), exchange, "own.copy(1 - rank)")
        for index in waits_of(schedule)
    }
    assert said == {
        "output[0] of rank 1 is touched although its rank may not have begun the call.",
        "output[1] of rank 0 is touched although its rank may not have begun the call.",
        "output[0] of rank 1 is touched although its rank's call may be over.",
        "output[1] of rank 0 is touched although its rank's call may be over.",
    }


def test_races_between_workers_of_a_rank() -> None:
    @program("broadcast", ranks=1)
    def relay(c: Trace) -> None:
        middle = c.rank(0).input[0].copy(c.rank(0).scratch()[0], channel=0)
        middle.copy(c.rank(0).output[0], channel=1)

    schedule = relay.compile()
    assert len(schedule.workers_of(0)) == 2
    said = [
        refusal(lambda index=index: check(schedule.without_wait(index)), relay, text)
        for index, text in zip(waits_of(schedule), ("channel=0", "channel=1"), strict=True)
    ]
    assert said == [
        "scratch[0] of rank 0 is overwritten while it may still be in use, in iteration 2.",
        "scratch[0] of rank 0 is read while it may still be written.",
    ]


@pytest.mark.parametrize("target", ["direct", "staged"])
def test_read_before_write(target: str) -> None:
    @program("broadcast", ranks=2)
    def reads_nothing(c: Trace) -> None:
        c.rank(0).input[0].copy(c.rank(0).output[0])
        c.rank(0).scratch()[1].copy(c.rank(1).output[0])

    said = refusal(lambda: reads_nothing.compile(target=target), reads_nothing, "scratch()[1]")
    assert said == "scratch[1] of rank 0 is read before anything was written there."

    @program("all_reduce", ranks=2)
    def adds_to_nothing(c: Trace) -> None:
        c.rank(0).output[0].reduce(c.rank(1).input[0])

    said = refusal(lambda: adds_to_nothing.compile(target=target), adds_to_nothing, "output[0].reduce")
    assert said == "output[0] of rank 0 is read before anything was written there."


def with_swapped(schedule: Schedule, first: int) -> Schedule:
    """Instructions `first` and the next one of the same worker in the other order, with all that is theirs."""
    one = schedule.instructions
    order = np.arange(len(one))
    order[[first, first + 1]] = first + 1, first
    changed: dict[str, np.ndarray] = {}
    rows = [field.name for field in fields(Instructions) if field.name.endswith("_start")]
    for start in rows:
        prefix, begins = start.removesuffix("start"), getattr(one, start)
        entries = np.concatenate([np.arange(begins[at], begins[at + 1]) for at in order]).astype(int)
        for field in fields(Instructions):
            if field.name.startswith(prefix) and field.name != start:
                changed[field.name] = getattr(one, field.name)[entries]
        changed[start] = np.concatenate([[0], np.cumsum(np.diff(begins)[order])]).astype(begins.dtype)
    for field in fields(Instructions):
        if field.name not in changed:
            changed[field.name] = getattr(one, field.name)[order]
    return replace(schedule, instructions=replace(one, **changed))


def test_swapping_is_what_it_says() -> None:
    schedule = exchange.compile(target="staged")
    again = with_swapped(with_swapped(schedule, 0), 0)
    assert again.digest == schedule.digest


def test_two_ranks_that_wait_for_each_other() -> None:
    schedule = exchange.compile(target="staged")
    describe = [schedule.describe(at) for at in range(len(schedule.instructions))]
    assert [re.sub(r" \(.*", "", one) for one in describe] == [
        "input[0] of rank 0 -> output[0] of rank 0, staging[0] of rank 1",
        "staging[0] of rank 0 -> output[1] of rank 0",
        "input[0] of rank 1 -> output[1] of rank 1, staging[0] of rank 0",
        "staging[0] of rank 1 -> output[0] of rank 1",
    ]
    stuck = with_swapped(with_swapped(schedule, 0), 2)
    assert refusal(lambda: check(stuck), exchange, "own.copy(1 - rank)") == "ranks 0, 1 wait for each other."


def test_a_circle_of_many_ranks_is_told_in_five_steps() -> None:
    @program("all_to_next", ranks=8)
    def chain(c: Trace) -> None:
        for rank in range(8):
            c.rank(rank).input[0].copy(c.rank((rank + 1) % 8).scratch()[0])
        for rank in range(8):
            c.rank(rank).scratch()[0].copy(c.rank(rank).output[0])

    schedule = chain.compile(target="direct", fuse=False)
    assert len(schedule.instructions) % 8 == 0
    bodies = [int(schedule.worker_start[worker]) for worker in range(8)]
    for first in bodies:
        kinds = schedule.instructions.kind[first : first + 2]
        if (kinds == 0).all():
            schedule = with_swapped(schedule, first)
    said = refusal(lambda: check(schedule), chain, "scratch()[0].copy")
    assert re.fullmatch(r"ranks \d(, \d){4}, \.\.\. wait for each other\.", said)


def test_a_post_that_nobody_makes() -> None:
    schedule = exchange.compile(target="staged", depth=1, fuse=False)
    posts = range(len(schedule.instructions.post_semaphore))
    said = {
        refusal(lambda index=index: check(schedule.without_post(index)), exchange, "own.copy(1 - rank)")
        for index in posts
    }
    assert {"rank 0 waits for a post that nobody makes.", "ranks 0, 1 wait for each other."} <= said


@pytest.mark.parametrize("target", ["direct", "staged"])
def test_what_is_missing_and_what_is_too_much(target: str) -> None:
    @program("all_reduce", ranks=3)
    def twice(c: Trace) -> None:
        for rank in range(3):
            c.rank(rank).input[0].copy(c.rank(rank).output[0])
            for other in c.others(rank):
                c.rank(rank).output[0].reduce(c.rank(other).input[0])
        c.rank(2).output[0].reduce(c.rank(1).input[0])  # the fault

    said = refusal(lambda: twice.compile(target=target, fuse=False), twice, "# the fault")
    assert said == "output[0] of rank 2 does not hold what it must: input[0] of rank 1 too much."

    @program("all_reduce", ranks=3)
    def forgotten(c: Trace) -> None:
        for rank in range(3):
            c.rank(rank).input[0].copy(c.rank(rank).output[0])
            for other in c.others(rank)[: 1 + (rank != 1)]:
                c.rank(rank).output[0].reduce(c.rank(other).input[0])

    said = refusal(lambda: forgotten.compile(target=target, fuse=False), forgotten, "output[0].reduce")
    assert said == "output[0] of rank 1 does not hold what it must: input[0] of rank 0 missing."

    @program("all_gather", ranks=2)
    def crossed(c: Trace) -> None:
        for rank in range(2):
            c.rank(rank).input[0].copy(c.rank(rank).output[rank])
        c.rank(1).input[0].copy(c.rank(0).output[1])
        c.rank(1).input[0].copy(c.rank(1).output[0])  # the fault

    said = refusal(lambda: crossed.compile(target=target), crossed, "# the fault")
    where = "output[0] of rank 1 does not hold what it must"
    assert said == f"{where}: input[0] of rank 0 missing, input[0] of rank 1 too much."


@pytest.mark.parametrize("target", ["direct", "staged"])
def test_what_was_never_written(target: str) -> None:
    @program("all_gather", ranks=2)
    def half(c: Trace) -> None:
        c.rank(0).input[0].copy(c.rank(0).output[0]).copy(1)
        c.rank(1).input[0].copy(c.rank(0).output[1])

    with pytest.raises(ProgramRefused, match=r"output\[1\] of rank 1 does not hold what it must: nothing was written"):
        half.compile(target=target)


def test_wrong_in_all_but_small_programs_too() -> None:
    """Whatever a wrong program looks like, it is refused, and with the words of a refusal."""
    for ranks in range(2, 12):
        for missing in range(ranks):

            @program("all_reduce", chunks=lambda ranks: ranks)
            def nearly(c: Trace, missing: int = missing) -> None:
                for owner in range(c.ranks):
                    total = c.rank(owner).input[owner].copy(c.rank(owner).output[owner])
                    for other in c.others(owner):
                        if (owner, other) != (0, missing):
                            total.reduce(c.rank(other).input[owner])
                    for other in c.others(owner):
                        total.copy(other)

            for target in ("direct", "staged"):
                if missing == 0:
                    nearly.compile(ranks, target=target)
                    continue
                with pytest.raises(ProgramRefused, match=rf"input\[0\] of rank {missing} missing"):
                    nearly.compile(ranks, target=target)


@pytest.mark.parametrize("target", ["direct", "staged"])
def test_a_changed_input(target: str) -> None:
    @program("all_reduce", ranks=2)
    def through_the_input(c: Trace) -> None:
        c.rank(0).input[0].reduce(c.rank(1).input[0])
        c.rank(0).input[0].copy(c.rank(0).output[0])
        c.rank(0).input[0].copy(c.rank(1).output[0])

    said = refusal(lambda: through_the_input.compile(target=target, fuse=False), through_the_input, "input[0].reduce")
    assert said == "input[0] of rank 0 is overwritten, but a call that is not in place must leave its input alone."
    schedule = through_the_input.compile(target=target, fuse=False, in_place=True)
    verify(through_the_input.trace(), schedule, [Call((9,))], 0, runs=5)


def test_out_of_bounds() -> None:
    @program("all_reduce", ranks=2)
    def beyond(c: Trace) -> None:
        c.rank(1).output[1]

    assert refusal(beyond.trace, beyond, "output[1]") == (
        "output[1] of rank 1 is out of bounds: there are chunks 0 to 0."
    )

    @program("all_reduce", ranks=2)
    def before(c: Trace) -> None:
        c.rank(1).input[-1]

    assert "out of bounds" in refusal(before.trace, before, "input[-1]")

    @program("all_reduce", ranks=2)
    def nobody(c: Trace) -> None:
        c.rank(2)

    said = refusal(nobody.trace, nobody, "c.rank(2)")
    assert said == "rank 2 does not exist: there are ranks 0 to 1."


@pytest.mark.parametrize("text", ["part[1:3]", "part[2:]  # too far", "part[1:1]", "part[1:0]"])
def test_out_of_bounds_of_a_range(text: str) -> None:
    @program("all_reduce", ranks=2, chunks=4)
    def narrow(c: Trace) -> None:
        part = c.rank(1).input[0:2]
        if text == "part[1:3]":
            part[1:3]
        elif text == "part[2:]  # too far":
            part[2:]  # too far
        elif text == "part[1:1]":
            part[1:1]
        else:
            part[1:0]

    with pytest.raises(ProgramRefused):
        narrow.trace()


def test_a_range_that_leaves_its_buffer() -> None:
    """Only a damaged schedule has one."""
    schedule = exchange.compile(target="staged", fuse=False)
    one = schedule.instructions
    for name in ("source_atom", "store_atom"):
        for index in range(len(getattr(one, name))):
            for wrong in (-1, len(schedule.atom_rank), 10_000):
                atoms = getattr(one, name).copy()
                atoms[index] = wrong
                with pytest.raises(ProgramRefused, match="a range leaves its buffer"):
                    check(replace(schedule, instructions=replace(one, **{name: atoms})))


def test_what_a_target_does_not_let_a_rank_reach() -> None:
    schedule = exchange.compile(target="staged", fuse=False)
    one = schedule.instructions
    atoms = one.store_atom.copy()
    output = int(schedule.first_atom[1, 1])
    atoms[0] = output  # of rank 1, by rank 0
    with pytest.raises(ProgramRefused, match=r"rank 0 cannot reach output\[0\] of rank 1"):
        check(replace(schedule, instructions=replace(one, store_atom=atoms)))


def test_no_link() -> None:
    one_way = Topology.of([0, 0], [(0, 1)])
    said = refusal(lambda: exchange.compile(topology=one_way), exchange, "own.copy(1 - rank)")
    assert said == "no link leads from rank 1 to rank 0."
    with pytest.raises(ProgramRefused, match="no link leads from rank 0 to rank 2"):
        LIBRARY["two_shot"].compile(topology=Topology.of([0] * 3, [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1)]))


def test_unequal_lengths() -> None:
    @program("all_reduce", ranks=2, chunks=2)
    def uneven(c: Trace) -> None:
        total = c.rank(0).input[0].copy(c.rank(0).output[0])
        total.reduce(c.rank(1).input[1])

    for target in ("direct", "staged"):
        said = refusal(lambda target=target: uneven.compile(target=target), uneven, "total.reduce")
        assert said == "output[0] of rank 0 holds a chunk of another length class than the one that is added to it."

    @program("all_reduce", ranks=2, chunks=4)
    def counts(c: Trace) -> None:
        c.rank(0).input[0:3].copy(c.rank(1).output[0:2])

    said = refusal(counts.trace, counts, "input[0:3].copy")
    assert said == "input[0:3] of rank 0 has 3 chunks and output[0:2] of rank 1 has 2."


def test_overlapping_ranges() -> None:
    @program("all_reduce", ranks=1, chunks=4)
    def shifted(c: Trace) -> None:
        c.rank(0).output[0:3].copy(c.rank(0).output[1:4])

    assert refusal(shifted.trace, shifted, "output[1:4]") == "output[0:3] of rank 0 and output[1:4] of rank 0 overlap."

    @program("all_gather", ranks=2, chunks=3)
    def shifted_in_place(c: Trace) -> None:
        for rank in range(2):
            c.rank(rank).input[0:2].copy(c.rank(rank).output[3 * rank + 1 : 3 * rank + 3])

    said = refusal(lambda: shifted_in_place.compile(in_place=True), shifted_in_place, "input[0:2]")
    assert said == "in place, what is read and what is written overlap there."


@pytest.mark.parametrize("option", ["instances", "workers", "slots", "depth"])
def test_there_must_be_one_of_everything(option: str) -> None:
    for wrong in (0, -1):
        with pytest.raises(InvalidArgument, match=option):
            exchange.compile(**{option: wrong})


def test_ranks_and_chunks_may_be_integers_of_numpy() -> None:
    @program("all_gather", ranks=2)
    def of_numpy(c: Trace) -> None:
        for rank in np.arange(2):
            own = c.rank(rank).input[np.int64(0)].copy(c.rank(rank).output[rank : rank + 1][np.int32(0)])
            own.copy(1 - rank)

    schedule = of_numpy.compile()
    verify(of_numpy.trace(), schedule, [Call((5, 5))], 0)


def test_a_chunk_is_named_as_in_the_program() -> None:
    """Pieces of `parallel` are the compiler's business: there is no chunk 5 here."""

    @program("all_reduce", ranks=2, chunks=2)
    def pieces(c: Trace) -> None:
        with c.parallel(3):
            for rank in range(2):
                c.rank(rank).input[:].copy(c.rank(rank).output[:])
                c.rank(rank).output[0].reduce(c.rank(1 - rank).input[0])

    with pytest.raises(ProgramRefused, match=r"output\[1\] of rank 0 does not hold .* input\[1\] of rank 1 missing"):
        pieces.compile()


# -- schedules that no compiler makes ----------------------------------------------------------------------------------


def test_two_ranks_that_post_one_semaphore() -> None:
    """Whose post comes first is chance, so a count of one says nothing about either."""
    schedule = LIBRARY["gather_direct"].compile(3, target="staged")
    one = schedule.instructions
    kept, other = np.flatnonzero(schedule.semaphore_waiter == schedule.workers_of(0)[0])
    posts, waits, values = one.post_semaphore.copy(), one.wait_semaphore.copy(), one.wait_value.copy()
    values[waits == other] = 2
    posts[posts == other], waits[waits == other] = kept, kept
    counts = schedule.semaphore_posts.copy()
    counts[kept], counts[other] = 2, 0
    instructions = replace(one, post_semaphore=posts, wait_semaphore=waits, wait_value=values)
    mixed = replace(schedule, instructions=instructions, semaphore_posts=counts)
    trace = LIBRARY["gather_direct"].trace(3)
    with pytest.raises(AssertionError):
        verify(trace, mixed, [Call((5, 5, 5))] * 3, 0, runs=40)
    assert not is_accepted(mixed)


def test_an_instruction_that_reads_what_it_has_just_written() -> None:
    """Chunks are moved one after the other: a range that is read one place beside where it is written goes wrong."""

    @program(custom("sums", [3], [3], {(0, chunk): [(0, chunk)] for chunk in range(3)}))
    def whole(c: Trace) -> None:
        c.rank(0).input[:].copy(c.rank(0).output[:])

    after = {(0, 0): [(0, 0)], (0, 1): [(0, 0), (0, 1)], (0, 2): [(0, 1), (0, 2)]}
    schedule = whole.compile(target="direct")
    one = schedule.instructions
    output = int(schedule.first_atom[0, 1])
    # output[1:3] <- output[1:3] + output[0:2], as a second instruction
    instructions = replace(
        one,
        kind=np.array([0, 0], np.int32),
        count=np.array([3, 2], np.int32),
        number=np.array([-1, -1], np.int32),
        source_start=np.array([0, 1, 3], np.int32),
        source_atom=np.array([one.source_atom[0], output + 1, output], np.int32),
        store_start=np.array([0, 1, 2], np.int32),
        store_atom=np.array([output, output + 1], np.int32),
        class_start=np.array([0, 3, 5], np.int32),
        class_of=np.array([0, 0, 0, 0, 0], np.int32),
        wait_start=np.zeros(3, np.int32),
        post_start=np.zeros(3, np.int32),
        row=np.zeros(2, np.int32),
        source_row=np.zeros(3, np.int32),
        store_row=np.zeros(2, np.int32),
    )
    contract = custom("sums", [3], [3], after)
    shifted = replace(schedule, contract=contract, instructions=instructions, worker_start=np.array([0, 2], np.int32))

    @program(contract)
    def meant(c: Trace) -> None:
        inputs = c.rank(0).input[:].copy(c.rank(0).output[:])
        inputs[1:3].reduce(c.rank(0).input[0:2])

    with pytest.raises(AssertionError, match="instead of"):
        verify(meant.trace(), shifted, [Call((7,), tile=16)], 0)
    assert not is_accepted(shifted)


# -- nothing depends on chance -----------------------------------------------------------------------------------------

_DIGESTS = """
from undertow.collective.algorithms import LIBRARY
from undertow.collective.topology import Topology
for name, topology in (
    ("ring", Topology.flat(8)), ("all_pairs_chunks", Topology.flat(8)), ("hierarchical", Topology.grid(2, 4)),
    ("all_to_all_two_step", Topology.grid(4, 2)), ("halving_doubling", Topology.flat(7)),
    ("all_gather_doubling", Topology.of([0, 0, 1, 1, 1])),
):
    for options in ({"target": "direct"}, {"target": "staged", "workers": 4}):
        print(name, LIBRARY[name].compile(topology=topology, **options).digest)
"""


def test_schedules_do_not_depend_on_the_hash_seed() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "4242")
    ]
    results = [one.communicate(timeout=120) for one in processes]
    assert [one.returncode for one in processes] == [0, 0], results
    lines = results[0][0].splitlines()
    assert len(lines) == 12
    assert len(set(lines)) == 12
    assert results[0][0] == results[1][0]
