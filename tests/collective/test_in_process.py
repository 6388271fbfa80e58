"""Library programs on all ranks in one process: many orders of events, several calls in a row on the same semaphores
and workspace, unequal and empty spans, all types, kernels that make parcels and wait for tiles, and real threads."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from in_process import DTYPES, Call, Machine, Signal, Stalled, lengths_of, verify

from undertow.collective import cpu_interpreter as interpreter
from undertow.collective import cpu_sums as sums
from undertow.collective.algorithms import LIBRARY, OUT_OF_PLACE_ONLY
from undertow.collective.bind import bind
from undertow.collective.contract import Contract, custom
from undertow.collective.language import INPUT, Trace, program
from undertow.collective.schedule import Schedule
from undertow.collective.topology import Topology
from undertow.errors import InvalidArgument

LONGEST = 1 << 14
SHAPES = {"hierarchical": (2, 2), "all_gather_hierarchical": (2, 2), "all_to_next": (2, 2)} | {
    "all_to_all_two_step": (2, 2), "all_to_all_three_step": (2, 2),
}  # fmt: skip
OPTIONS: tuple[dict[str, object], ...] = (
    {"target": "direct"},
    {"target": "direct", "workers": 3, "instances": 2},
    {"target": "staged"},
    {"target": "staged", "slots": 1, "depth": 1, "workers": 2, "instances": 3},
    {"target": "staged", "depth": 3, "fuse": False},
)


def traced(name: str, ranks: int) -> Trace:
    shape = SHAPES.get(name)
    return LIBRARY[name].trace(topology=Topology.grid(*shape)) if shape else LIBRARY[name].trace(ranks)


def compiled(name: str, trace: Trace, in_place: bool, **options: object) -> Schedule:
    return LIBRARY[name].compile(topology=trace.topology, in_place=in_place, **options)


def in_place_too(trace: Trace) -> list[bool]:
    works = trace.contract.in_place is not None and trace.name not in OUT_OF_PLACE_ONLY
    return [False, True] if works else [False]


def some_calls(contract: Contract, in_place: bool, seed: int) -> list[Call]:
    """One call of each of four types, of lengths from nothing to several tiles, and odd."""
    random = np.random.default_rng(seed)
    calls = []
    for dtype in random.permutation(["float32", "int32", "bfloat16", "float64"]):
        spans = random.choice([0, 1, 3, 17, 33, 67, 100], contract.spans)
        if contract.name == "all_to_all" and in_place:
            square = spans.reshape(contract.ranks, -1)
            spans = np.maximum(square, square.T).ravel()
        tile = [None, 16, 48][int(random.integers(3))]
        calls.append(Call(tuple(int(one) for one in spans), str(dtype), tile))
    return calls


@pytest.mark.parametrize("name", LIBRARY)
def test_every_order_of_events_gives_the_sum(name: str) -> None:
    for number, options in enumerate(OPTIONS):
        trace = traced(name, 2 + number % 4)
        for in_place in in_place_too(trace):
            schedule = compiled(name, trace, in_place, **options)
            seed = zlib.crc32(f"{name}{number}".encode()) % 10_000
            calls = some_calls(trace.contract, in_place, seed)
            verify(trace, schedule, calls, seed, Machine(schedule, 96, LONGEST), runs=4)


@pytest.mark.parametrize("name", LIBRARY)
def test_packets(name: str) -> None:
    trace = traced(name, 4)
    for in_place in in_place_too(trace):
        for instances in (1, 2):
            schedule = compiled(name, trace, in_place, target="staged", packets=True, instances=instances)
            calls = some_calls(trace.contract, in_place, instances)
            verify(trace, schedule, calls, instances, Machine(schedule, 96, LONGEST), runs=4)


@pytest.mark.parametrize("name", LIBRARY)
def test_published(name: str) -> None:
    """What several ranks take lies once in staging, where they read it; slots and instances are few, and are not."""
    every: tuple[dict[str, object], ...] = ({}, {"slots": 1, "depth": 1}, {"instances": 2, "workers": 2})
    for number, options in enumerate(every):
        trace = traced(name, 3 + number % 2)
        for in_place in in_place_too(trace):
            schedule = compiled(name, trace, in_place, target="staged", publish=True, **options)
            calls = some_calls(trace.contract, in_place, number)
            verify(trace, schedule, calls, number, Machine(schedule, 96, LONGEST), runs=4)


def test_published_once() -> None:
    """Of two-shot on four ranks: three parts at an owner, and its sum in one place instead of three."""
    apart, once = (LIBRARY["two_shot"].compile(4, target="staged", publish=publish) for publish in (False, True))
    assert apart.atoms[:, -1].tolist() == [6] * 4
    assert once.atoms[:, -1].tolist() == [4] * 4
    for options in OPTIONS[0], {"target": "staged", "packets": True}:
        with pytest.raises(InvalidArgument, match="publish"):
            LIBRARY["two_shot"].compile(4, publish=True, **options)


@pytest.mark.parametrize("name", ["ring", "two_shot", "halving_doubling", "all_to_all_swap", "all_gather_doubling"])
@pytest.mark.parametrize("target", ["direct", "staged"])
def test_threads(name: str, target: str) -> None:
    trace = LIBRARY[name].trace(4)
    for in_place in in_place_too(trace):
        schedule = compiled(name, trace, in_place, target=target, workers=2)
        calls = some_calls(trace.contract, in_place, 7)
        verify(trace, schedule, calls, 7, Machine(schedule, 96, LONGEST), runs=3, threads=True)


@pytest.mark.parametrize("name", ["ring", "all_gather_direct", "all_to_all_direct", "broadcast_tree"])
def test_threads_with_packets(name: str) -> None:
    trace = LIBRARY[name].trace(4)
    schedule = LIBRARY[name].compile(4, target="staged", packets=True, workers=2, instances=2)
    calls = [Call((length,) * trace.contract.spans, dtype) for length, dtype in ((64, "float32"), (256, "bfloat16"))]
    verify(trace, schedule, calls * 3, 9, Machine(schedule, 128, LONGEST), runs=3, threads=True)


@pytest.mark.parametrize("options", OPTIONS)
def test_counts_that_pass_the_end_of_a_word(options: dict[str, object]) -> None:
    for name in ("two_shot", "all_to_all_swap"):
        trace = LIBRARY[name].trace(3)
        schedule = LIBRARY[name].compile(3, **options)
        for bits in (31, 32):
            for posts in {1, 2, *schedule.semaphore_posts.tolist()} - {0}:
                machine = Machine(schedule, 64, LONGEST)
                machine.grow_old((1 << bits) // posts - 2, (1 << bits) // posts - 1)
                calls = [Call((length,) * trace.contract.spans) for length in (40, 3, 17, 64)]
                verify(trace, schedule, calls, posts, machine, runs=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type(dtype: str) -> None:
    trace = LIBRARY["two_shot"].trace(3)
    schedule = LIBRARY["two_shot"].compile(3, target="staged")
    verify(trace, schedule, [Call((47,), dtype), Call((1,), dtype)], 3, Machine(schedule, 64, LONGEST), runs=3)


def test_ranks_drift_apart_over_many_short_calls() -> None:
    for name, options in (("all_gather_direct", {"depth": 1}), ("broadcast_tree", {"depth": 3}), ("one_shot", {})):
        trace = LIBRARY[name].trace(4)
        for target in ("direct", "staged"):
            schedule = LIBRARY[name].compile(4, target=target, **options)
            lengths = (5, 0, 40, 1, 23, 23, 8, 64, 2, 3)
            calls = [Call((length,) * trace.contract.spans) for length in lengths]
            verify(trace, schedule, calls, 11, Machine(schedule, 32, LONGEST), runs=10)


def test_more_sources_than_an_interpreter_has_room_for_at_first() -> None:
    chunks = 300
    after = {(0, 0): [(1, chunk) for chunk in range(chunks)]}

    @program(custom("many", [0, chunks], [1, 0], after))
    def many(c: Trace) -> None:
        total = c.rank(1).input[0].copy(c.rank(0).output[0])
        for chunk in range(1, chunks):
            total.reduce(c.rank(1).input[chunk])

    for target in ("direct", "staged"):
        schedule = many.compile(target=target)
        verify(many.trace(), schedule, [Call((3,)), Call((9,), "float64")], 5, Machine(schedule, 64, 1 << 16), runs=3)


@pytest.mark.parametrize("name", ["ring", "two_shot", "all_to_all_direct", "reduce_scatter_direct", "all_gather_ring"])
@pytest.mark.parametrize("options", OPTIONS)
def test_kernels_make_parcels_and_wait_for_tiles(name: str, options: dict[str, object]) -> None:
    ranks, instances = 3, int(options.get("instances", 1))
    trace = LIBRARY[name].trace(ranks, ready=True, needed=True)
    schedule = LIBRARY[name].compile(ranks, ready=True, needed=True, **options)
    contract = schedule.contract
    parcels = [Signal(rank, chunk, chunk, 1) for rank in range(ranks) for chunk in range(contract.inputs[rank])]
    tiles = [
        Signal(rank, chunk, chunk, 1, instances) for rank in range(ranks) for chunk in range(contract.outputs[rank])
    ]
    machine = Machine(schedule, 96, LONGEST, parcels, tiles)
    calls = some_calls(contract, False, 3)
    verify(trace, schedule, calls, 3, machine, runs=6)


@pytest.mark.parametrize("target", ["direct", "staged"])
def test_a_call_that_does_not_fit_is_refused_by_all_ranks_alike(target: str) -> None:
    """If some refuse and others begin, these wait for ever. In place, what comes must fit where what leaves was."""

    @program("all_reduce", ranks=2, chunks=2)
    def detour(c: Trace) -> None:
        """Rank 0 keeps its first chunk where its second one, which may be shorter, belongs."""
        for rank in range(2):
            c.rank(rank).input[:].copy(c.rank(rank).output[:]).reduce(c.rank(1 - rank).input[:])
        saved = c.rank(0).output[1].copy(c.rank(0).scratch()[0])
        c.rank(0).output[0].copy(c.rank(0).output[1])
        c.rank(0).output[1].copy(c.rank(0).output[0])
        saved.copy(c.rank(0).output[1])

    swap = LIBRARY["all_to_all_swap"].compile(3, target=target, in_place=True)
    for schedule, call in (
        (detour.compile(target=target, fuse=False), Call((7,))),
        (swap, Call((4, 2, 4, 4, 4, 4, 4, 4, 4))),
    ):
        machine = Machine(schedule, 64, LONGEST)
        refused = []
        for rank in range(schedule.ranks):
            try:
                machine.bind(call, rank)
                refused.append(False)
            except InvalidArgument:
                refused.append(True)
        assert len(set(refused)) == 1, f"{schedule.name}: {refused}"


def test_a_budget_is_kept_where_a_worker_ends() -> None:
    @program("broadcast", ranks=1, chunks=2)
    def apart(c: Trace) -> None:
        for chunk in range(2):
            c.rank(0).input[chunk].copy(c.rank(0).output[chunk], channel=chunk)

    schedule = apart.compile(target="direct")
    bound = bind(schedule, 0, [8], 64, 4, sums.INT32, sums.SUM)
    given, out, words = np.arange(1, 9, dtype=np.int32), np.zeros(8, np.int32), np.zeros(64, np.int64)
    bases = np.array([given.ctypes.data, out.ctypes.data, 0, given.ctypes.data, out.ctypes.data])
    state = np.zeros(interpreter.STATE_HEADER + 2 * interpreter.STATE_ROW, np.int64)
    semaphores = np.full(2, words.ctypes.data)
    interpreter.begin(bound.code, state)
    interpreter.run(bound.code, bases, state, semaphores, 1, words.ctypes.data, -(1 << 40), 0, 0, 0, 1, 0)
    assert out.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]


# -- the machine itself ----------------------------------------------------------------------------------------------


def wrong_somewhere(trace: Trace, schedule: Schedule, runs: int = 40) -> bool:
    """Whether any order of events that is tried shows it."""
    for seed in range(runs):
        try:
            calls = [Call((33,) * trace.contract.spans), Call((5,) * trace.contract.spans)] * 2
            verify(trace, schedule, calls, seed, Machine(schedule, 64, LONGEST))
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("target", ["direct", "staged"])
@pytest.mark.parametrize("name", ["ring", "all_to_all_swap"])
def test_the_machine_notices_a_missing_wait(name: str, target: str) -> None:
    """Most waits are needed in an order of events that a few dozen tries find; a blind machine would find none."""
    trace = LIBRARY[name].trace(3)
    schedule = LIBRARY[name].compile(3, target=target)
    waits = range(len(schedule.instructions.wait_value))
    noticed = sum(wrong_somewhere(trace, schedule.without_wait(index)) for index in waits)
    assert noticed > 0.7 * len(waits), f"{noticed} of {len(waits)}"


def test_the_machine_notices_a_missing_post() -> None:
    schedule = LIBRARY["ring"].compile(3, target="staged").without_post(4)
    with pytest.raises(Stalled):
        verify(LIBRARY["ring"].trace(3), schedule, [Call((33,))], 0, Machine(schedule, 64))
    machine = Machine(schedule, 64)
    machine.thread_seconds = 0.2
    with pytest.raises(Stalled):
        verify(LIBRARY["ring"].trace(3), schedule, [Call((33,))], 0, machine, threads=True)


def test_lengths_follow_the_contract() -> None:
    contract = LIBRARY["all_to_all_direct"].contract(2)
    assert lengths_of(contract, Call((1, 2, 3, 4)), 1, INPUT).tolist() == [3, 4]
