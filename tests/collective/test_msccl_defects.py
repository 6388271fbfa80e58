"""Situations in which msccl-tools (commit 030a750) compiles wrong code, D1 to D11 as we found them, in our language:
compiled to what runs exactly, in every order of events that is tried, or refused for the right reason."""

from __future__ import annotations

import itertools

import pytest
from in_process import Call, Machine, verify

from undertow.collective.algorithms import LIBRARY
from undertow.collective.checker import check
from undertow.collective.contract import custom
from undertow.collective.language import Program, Trace, program
from undertow.collective.topology import Topology

OPTIONS: tuple[dict[str, object], ...] = (
    {"target": "direct"},
    {"target": "direct", "fuse": False},
    {"target": "direct", "workers": 3},
    {"target": "staged"},
    {"target": "staged", "fuse": False, "slots": 1},
    {"target": "staged", "slots": 1, "depth": 1, "workers": 2},
    {"target": "staged", "slots": 8, "depth": 3},
    {"target": "staged", "packets": True},
)
DTYPES = itertools.cycle(["float32", "int32", "bfloat16", "float64"])


def runs_right(made: Program, **more: object) -> None:
    """Compiled in every way, run with chunks of one tile, of several, of part of one, and of different lengths."""
    trace = made.trace()
    for options in OPTIONS:
        for in_place in (False, True) if trace.contract.in_place is not None and more.get("in_place") else (False,):
            chosen = {**options, **more, "in_place": in_place}
            schedule = made.compile(**chosen)
            lengths = (16, 70, 5, 33)
            calls = [Call((length,) * trace.contract.spans, next(DTYPES)) for length in lengths]
            verify(trace, schedule, calls, 0, Machine(schedule, 48, 1 << 14), runs=6)


def test_d1_a_remote_reduction_between_different_places() -> None:
    """There the receiver adds what lies at the sender's index; here each end has an index and a buffer of its own."""
    after = {(1, 0): [(0, 2), (1, 1)], (1, 1): [(0, 0), (1, 0), (1, 2)], (0, 0): [(0, 1), (1, 2)]}

    @program(custom("elsewhere", [3, 3], [1, 2], after))
    def elsewhere(c: Trace) -> None:
        left, right = c.rank(0), c.rank(1)
        right.input[1].copy(right.output[0]).reduce(left.input[2])
        kept = right.input[0].copy(right.scratch("kept")[3])
        kept.reduce(left.input[0].copy(left.scratch()[1]))
        kept.reduce(right.input[2])
        kept.copy(right.output[1])
        left.input[1].copy(left.output[0]).reduce(right.input[2])

    runs_right(elsewhere)


def test_d2_a_sum_of_which_only_a_part_is_overwritten() -> None:
    """A sum is sent on and then partly overwritten: the other part must have been stored."""
    after = {(1, 0): [(2, 0)], (1, 1): [(0, 1), (1, 1)], (1, 2): [(0, 2), (1, 2)]}
    after |= {(2, chunk): [(0, chunk), (1, chunk)] for chunk in range(3)}

    @program(custom("partly", [3, 3, 1], [0, 3, 3], after))
    def partly(c: Trace) -> None:
        total = c.rank(1).input[:].copy(c.rank(1).output[:]).reduce(c.rank(0).input[:])
        total.copy(2)
        c.rank(2).input[0].copy(c.rank(1).output[0])

    runs_right(partly)

    @program("all_reduce", ranks=3, chunks=4)
    def round_and_back(c: Trace) -> None:
        c.rank(0).input[:].copy(c.rank(0).output[:])
        total = c.rank(1).input[:].copy(c.rank(1).output[:]).reduce(c.rank(0).output[:])
        total = c.rank(2).input[:].copy(c.rank(2).output[:]).reduce(total)
        total[0:2].copy(0)
        total[2:4].copy(0)
        c.rank(0).output[1:4].copy(1)
        total[0].copy(1)

    runs_right(round_and_back, in_place=True)


def test_d3_shifted_ranges_that_overlap_are_forwarded() -> None:
    """What is sent on is not what has just come, but overlaps it."""
    after = {(1, chunk): [(0, chunk)] for chunk in range(1, 4)} | {(1, 0): [(1, 0)]}
    after |= {(2, 0): [(1, 0)], (2, 1): [(0, 1)], (2, 2): [(0, 2)]}

    @program(custom("shifted", [4, 1, 0], [0, 4, 3], after))
    def shifted(c: Trace) -> None:
        c.rank(1).input[0].copy(c.rank(1).output[0])
        c.rank(0).input[1:4].copy(c.rank(1).output[1:4])
        c.rank(1).output[0:3].copy(c.rank(2).output[0:3])

    runs_right(shifted)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_d3_a_sum_of_overlapping_ranges_is_put_back(shift: int, remote: bool) -> None:
    """The sum of a range and its neighbour, made aside and stored over either: chunk by chunk would read new chunks."""
    low, high = (1, 0) if shift < 0 else (1, 2)
    put = 1 + shift if shift else 1
    items = {place: [(0, place)] for place in range(4)}
    total = [sorted([(0, low + part), (0, high + part)]) for part in range(2)]
    after = {(0, place): items[place] for place in range(4)}
    after |= {(0, put + part): total[part] for part in range(2)}

    @program(custom("put_back", [4, 0], [4, 0], after))
    def put_back(c: Trace) -> None:
        held = c.rank(0).input[:].copy(c.rank(0).output[:])
        aside = c.rank(int(remote)).scratch()[0:2]
        held[low : low + 2].copy(aside).reduce(held[high : high + 2])
        aside.copy(held[put : put + 2])

    runs_right(put_back)


def test_d4_a_worker_that_sends_before_it_waits() -> None:
    """All waits of a worker moved to its first instruction would have two ranks wait for each other."""

    @program("all_reduce", ranks=2, chunks=2)
    def answers(c: Trace) -> None:
        one, two = c.rank(0), c.rank(1)
        for rank in (one, two):
            rank.input[:].copy(rank.output[:])
        one.input[0].copy(two.scratch()[0])
        two.input[1].copy(one.scratch()[1])
        two.output[0].reduce(two.scratch()[0])
        two.output[0].copy(0)
        one.output[1].reduce(one.scratch()[1])
        one.output[1].copy(1)

    runs_right(answers, in_place=True)


@pytest.mark.parametrize("rounds", [1, 4])
def test_d4_a_ping_pong(rounds: int) -> None:
    @program("all_reduce", ranks=2)
    def ping_pong(c: Trace) -> None:
        ball = c.rank(0).input[0]
        for number in range(rounds):
            ball = ball.copy(c.rank(1).scratch(f"{number}")[0]).copy(c.rank(0).scratch(f"{number}")[0])
        total = c.rank(0).output[0]
        ball.copy(total).reduce(c.rank(1).input[0])
        total.copy(1)

    runs_right(ping_pong)


def test_d5_a_program_that_starts_with_a_local_reduction() -> None:
    """Out of place an input may not be a sum's place, in place it is the very first thing that is written."""

    @program("all_reduce", ranks=2, chunks=2)
    def local_first(c: Trace) -> None:
        c.rank(0).output[0].reduce(c.rank(1).input[0])
        c.rank(0).output[0].copy(1)
        c.rank(1).output[1].reduce(c.rank(0).input[1])
        c.rank(1).output[1].copy(0)

    schedules = [local_first.compile(in_place=True, target=target) for target in ("direct", "staged")]
    for schedule in schedules:
        assert len(schedule.instructions)
        verify(local_first.trace(), schedule, [Call((19,)), Call((70,))], 0, Machine(schedule, 48), runs=10)

    after = {(0, 0): [(0, 0), (0, 1)]}

    @program(custom("local", [2], [1], after))
    def local(c: Trace) -> None:
        c.rank(0).input[0].reduce(c.rank(0).input[1])
        c.rank(0).input[0].copy(c.rank(0).output[0])

    for target in ("direct", "staged"):
        schedule = local.compile(target=target)  # the sum need not pass through the input, so it does not
        assert len(schedule.instructions)
        verify(local.trace(), schedule, [Call((19,)), Call((0,)), Call((70,))], 0, Machine(schedule, 48), runs=3)


@pytest.mark.parametrize("instances", [2, 3, 4])
def test_d6_mixed_counts_with_instances(instances: int) -> None:
    """Two chunks in one instruction and one in the next: an instance must have the same part of each chunk in both."""

    @program("all_gather", ranks=2, chunks=2)
    def mixed(c: Trace) -> None:
        for rank in range(2):
            both = c.rank(rank).input[0:2].copy(c.rank(rank).output[2 * rank : 2 * rank + 2])
            for part in both.split(2):
                part.copy(1 - rank)

    @program("all_reduce", ranks=3, chunks=4)
    def mixed_sums(c: Trace) -> None:
        total = c.rank(0).input[0:4].copy(c.rank(0).output[0:4])
        for other in c.others(0):
            for chunk in (1, 0, 3, 2):
                total[chunk].reduce(c.rank(other).input[chunk])
        for part in total.split(2):
            for other in c.others(0):
                part.copy(other)

    runs_right(mixed, instances=instances, in_place=True)
    runs_right(mixed_sums, instances=instances, in_place=True)


@pytest.mark.parametrize("name", ["all_to_all_direct", "all_to_all_two_step", "all_to_all_three_step"])
@pytest.mark.parametrize("instances", [2, 5])
def test_d7_all_to_all_with_instances(name: str, instances: int) -> None:
    topology = Topology.grid(2, 2)
    trace = LIBRARY[name].trace(topology=topology)
    for options in OPTIONS:
        schedule = LIBRARY[name].compile(topology=topology, instances=instances, **options)
        spans = [tuple((3 * place) % 7 * 5 for place in range(16)), (33,) * 16, (1,) * 16]
        calls = [Call(one, next(DTYPES)) for one in spans]
        verify(trace, schedule, calls, instances, Machine(schedule, 96, 1 << 14), runs=4)


@pytest.mark.parametrize("ways", [1, 2])
def test_d8_two_workers_between_the_same_ranks(ways: int) -> None:
    """Two channels from one rank to another are two connections; each has its own places and counts."""

    @program("all_gather", ranks=2, chunks=4)
    def two_channels(c: Trace) -> None:
        with c.parallel(ways):
            for rank in range(2):
                own = c.rank(rank).input[:].copy(c.rank(rank).output[4 * rank : 4 * rank + 4], channel=0)
                for number, part in enumerate(own.split(4)):
                    part.copy(1 - rank, channel=number % 2)

    @program("all_reduce", ranks=2, chunks=4)
    def alternating(c: Trace) -> None:
        """The same chunk goes there on one channel and comes back on another."""
        for chunk in range(4):
            there = c.rank(1).output[chunk]
            c.rank(1).input[chunk].copy(there, channel=1)
            there.reduce(c.rank(0).input[chunk], channel=chunk % 2)
            there.copy(0, channel=(chunk + 1) % 2)

    for made in (two_channels, alternating):
        schedule = made.compile(target="staged")
        assert len(schedule.workers_of(0)) == 2 * ways if made is two_channels else 2
        runs_right(made)


@pytest.mark.parametrize("messages", [1, 2, 3, 9, 20])
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_d9_messages_both_ways(messages: int, slots: int) -> None:
    """More messages than a connection holds, sent by both ranks before either receives in program order."""

    @program("all_gather", ranks=2, chunks=messages)
    def crossing(c: Trace) -> None:
        for rank in range(2):
            for chunk in range(messages):
                c.rank(rank).input[chunk].copy(c.rank(1 - rank).output[rank * messages + chunk])
        for rank in range(2):
            for chunk in range(messages):
                c.rank(rank).input[chunk].copy(c.rank(rank).output[rank * messages + chunk])

    for depth, workers in ((1, None), (2, 3)):
        schedule = crossing.compile(target="staged", slots=slots, depth=depth, workers=workers)
        assert schedule.atoms[:, -1].tolist() == [min(messages, slots)] * 2
        check(schedule)
        calls = [Call((16 * messages,) * 2), Call((messages,) * 2, "int32"), Call((40 * messages,) * 2, "bfloat16")]
        verify(crossing.trace(), schedule, calls, 0, Machine(schedule, 32, 1 << 14), runs=6)


@pytest.mark.parametrize("name", ["all_pairs_chunks", "one_shot", "two_shot", "halving_doubling"])
def test_d9_shipped_algorithms_with_one_slot(name: str) -> None:
    trace = LIBRARY[name].trace(6)
    schedule = LIBRARY[name].compile(6, target="staged", slots=1, depth=1)
    verify(trace, schedule, [Call((200,)), Call((7,)), Call((431,))], 0, Machine(schedule, 16, 1 << 14), runs=5)


def test_d10_the_same_program_gives_the_same_schedule() -> None:
    """In two processes: see test_checker. Here: in one, after other things were compiled."""
    first = [LIBRARY[name].compile(6, target="staged", workers=3).digest for name in ("ring", "all_pairs_chunks")]
    for name in sorted(LIBRARY):
        LIBRARY[name].compile(3)
    again = [LIBRARY[name].compile(6, target="staged", workers=3).digest for name in ("ring", "all_pairs_chunks")]
    assert first == again
    assert len({LIBRARY["ring"].compile(ranks, target="staged").digest for ranks in (2, 3, 4)}) == 3


@pytest.mark.parametrize("target", ["direct", "staged"])
def test_d11_as_many_connections_as_a_program_needs(target: str) -> None:
    """hierarchical 8 x 16, which needs more than 32 channels there."""
    schedule = LIBRARY["hierarchical"].compile(topology=Topology.grid(16, 8), target=target)
    assert schedule.ranks == 128


def test_d11_many_channels_on_one_rank() -> None:
    @program("all_gather", ranks=2, chunks=80)
    def wide(c: Trace) -> None:
        for rank in range(2):
            for chunk in range(80):
                own = c.rank(rank).input[chunk].copy(c.rank(rank).output[80 * rank + chunk], channel=chunk)
                own.copy(1 - rank, channel=chunk)

    for target in ("direct", "staged"):
        schedule = wide.compile(target=target)
        assert len(schedule.workers_of(0)) == 64  # as many as there may be; channels share them
        verify(wide.trace(), schedule, [Call((400, 333))] * 2, 0, Machine(schedule, 32, 1 << 14), runs=3)
