"""Programs tied to parcels: the same sums for any number of sections, in any order of events, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
from in_process import Call, Machine, Signal, verify

from undertow import collective as co
from undertow.collective.tied import Tied, tie
from undertow.collective.topology import Topology
from undertow.errors import InvalidArgument, UndertowError

NAMES = [name for name, one in co.LIBRARY.items() if one.collective in ("all_reduce", "reduce_scatter")]


def signals(tied: Tied) -> list[Signal]:
    """Every run of every shard as what a kernel posts: the order of its parcels is the seed's."""
    first = np.concatenate([[0], np.cumsum(tied.runs)])
    ranks, shards, _ = tied.numbers.shape
    return [
        Signal(rank, int(tied.numbers[rank, shard, run]), int(shard * first[-1] + first[run]), count)
        for rank in range(ranks)
        for shard in range(shards)
        for run, count in enumerate(tied.runs)
    ]


def run_in_many_orders(tied: Tied, **options: int) -> None:
    schedule = tied.schedule(**options)
    parcels = signals(tied)
    assert len({(one.rank, one.number) for one in parcels}) == len(parcels), "one post for each number"
    random = np.random.default_rng(len(tied.runs))
    spans = tuple(int(one) for one in random.choice([0, 1, 5, 16, 40], schedule.contract.spans))
    verify(tied.trace, schedule, [Call(spans), Call(spans, "bfloat16")], 7, Machine(schedule, 256, 1 << 14, parcels), 4)


@pytest.mark.parametrize("name", [one for one in NAMES if co.LIBRARY[one].collective == "all_reduce"])
@pytest.mark.parametrize(("ranks", "parcels"), [(1, 2), (2, 3), (3, 2), (4, 5)])
def test_repeated_programs_are_exact_in_any_order(name: str, ranks: int, parcels: int) -> None:
    run_in_many_orders(tie(co.LIBRARY[name], "all_reduce", Topology.flat(ranks), parcels))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_any_number_of_parcels_compiles_and_is_checked(name: str, ranks: int) -> None:
    """The checker sees the whole schedule: every sum right, nothing read before its parcel is there."""
    program = co.LIBRARY[name]
    for parcels in (1, 2, 7):
        tied = tie(program, program.collective, Topology.flat(ranks), parcels)
        assert tied.parcels == len(tied.runs) == parcels
        assert tied.schedule(instances=2).ranks == ranks


@co.program("all_reduce", chunks=lambda ranks: ranks)
def turned(c: co.Trace) -> None:
    """A ring in which every rank makes first what it sends first: rank r's chunk r is its parcel 0."""
    for rank in range(c.ranks):
        for step in range(c.ranks):
            c.tile_ready(c.rank(rank).input[(rank - step) % c.ranks], step)
    co.LIBRARY["ring"](c)


@co.program("reduce_scatter", chunks=2)
def far_first(c: co.Trace) -> None:
    """A rank's own shard is made last; halves of a shard are parcels of their own."""
    for rank in range(c.ranks):
        for step, shard in enumerate([*c.others(rank), rank]):
            for half in range(2):
                c.tile_ready(c.rank(rank).input[2 * shard + half], 2 * step + half)
    for shard in range(c.ranks):
        for half in range(2):
            total = c.rank(shard).input[2 * shard + half].copy(c.rank(shard).output[half])
            for other in c.others(shard):
                total.reduce(c.rank(other).input[2 * shard + half])


@pytest.mark.parametrize("program", [turned, far_first])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_may_make_their_parcels_in_orders_of_their_own(program: co.Program, ranks: int) -> None:
    tied = tie(program, program.collective, Topology.flat(ranks), 99)
    assert tied.runs == (1,) * (ranks if program is turned else 2)
    assert {tuple(sorted(one.ravel())) for one in tied.numbers} == {tuple(range(tied.parcels))}
    assert len({one.tobytes() for one in tied.numbers}) == ranks
    run_in_many_orders(tied)
    run_in_many_orders(tied, instances=2)


def test_chunks_begin_where_parcels_do() -> None:
    tied = tie(co.LIBRARY["two_shot"], "all_reduce", Topology.flat(3), 2)
    assert tied.lengths([[(0, 100)], [(100, 7)]], 4) == [36, 32, 32, 4, 3, 0]
    tied = tie(co.LIBRARY["reduce_scatter_direct"], "reduce_scatter", Topology.flat(2), 2)
    assert tied.lengths([[(0, 8), (20, 5)], [(8, 12), (25, 0)]], 8) == [8, 12, 5, 0]


@co.program("all_reduce", chunks=2)
def half_said(c: co.Trace) -> None:
    for rank in range(c.ranks):
        c.tile_ready(c.rank(rank).input[0], 0)
    co.LIBRARY["double_binary_tree"](c)


@co.program("all_reduce")
def said_twice(c: co.Trace) -> None:
    for parcel in range(2):
        c.tile_ready(c.rank(0).input[0], parcel % 1)
    co.LIBRARY["one_shot"](c)


@co.program("all_reduce")
def far_away(c: co.Trace) -> None:
    for rank in range(c.ranks):
        c.tile_ready(c.rank(rank).input[0], 7)
    co.LIBRARY["one_shot"](c)


@co.program("all_reduce")
def awaited(c: co.Trace) -> None:
    co.LIBRARY["one_shot"](c)
    c.tile_needed(c.rank(0).output[0], 0)


@co.program("all_reduce", ranks=4)
def for_four(c: co.Trace) -> None:
    co.LIBRARY["one_shot"](c)


@co.program("all_reduce")
def unfinished(c: co.Trace) -> None:
    c.rank(0).input[0].copy(c.rank(1).output[0])


@co.program("all_reduce")
def failing(c: co.Trace) -> None:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            half_said,
            r"half_said, in which input\[1\] of rank 0 never becomes ready, but must be one with tile_ready for",
        ),
        (said_twice, r"said_twice, in which input\[0\] of rank 0 becomes ready twice, but must be"),
        (far_away, r"far_away, in which input\[0\] of rank 0 comes with parcel 7, but must be one of parcels 0 to 0"),
        (awaited, "awaited, with tile_needed, but must be without tile_needed"),
        (for_four, "for_four, for 4 ranks, but must be a program for 2 ranks"),
        (co.LIBRARY["all_gather_ring"], "all_gather_ring, for all_gather, but must be a program for all_reduce"),
        (lambda c: None, "a function, but must be a collective program"),
        (unfinished, "unfinished is refused"),
        (failing, r"test_tied.py:\d+: KeyError: 'oops'"),
    ],
)
def test_what_cannot_be_tied_is_refused_with_one_sentence(program: co.Program, said: str) -> None:
    with pytest.raises(UndertowError, match=said) as caught:
        tie(program, "all_reduce", Topology.flat(2), 3).schedule()
    assert str(caught.value).count("\n") <= 6
    if isinstance(caught.value, InvalidArgument):
        assert "\n" not in str(caught.value)
