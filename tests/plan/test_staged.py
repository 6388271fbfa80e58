"""Parcels over copy engines: the equations against every single copy, their limits, the fit, and the search."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import plan_machines as machines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.errors import InvalidArgument
from undertow.plan import climb, staged
from undertow.plan.machine import Machine
from undertow.plan.plan import Plan, split
from undertow.plan.predict import predict
from undertow.plan.search import fixed, is_even
from undertow.plan.staged import Engines, Sample, last_arrival

ENGINES = Engines(4.8e10, 5e10, 1.5e-5, 1.7e-5, 1e-5, 8 << 20, 1e11, 1e12, call=5e-4, enqueue=1e-4)
OPERATORS = tuple(staged.STAGES)


def copy_by_copy(
    engines: Engines,
    operator: str,
    ranks: int,
    shared: bool,
    pieces: list[float],
    ready: list[float],
    until: float,
    early: list[float] | None = None,
) -> float:
    """The meaning: every rank's job of every stage and part of a parcel, each when what it waits for is over and it has
    its engine; of those that wait for an engine, the one that came first. Rank 0 is ready first, the last one last."""
    stages, places = staged.STAGES.get(operator, ("post", "land")), 4 if ranks <= 4 else 2
    parts: list[tuple[int, float, int | None]] = []  # parcel, bytes, which part had its place
    users: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        for at, start in enumerate(range(0, math.ceil(piece), engines.chunk)):
            place = (number % 2 * (places // 2) + at) % places  # as StagedLane._place
            parts.append((number, min(engines.chunk, piece - start), users.get(place)))
            users[place] = len(parts) - 1
    jobs = set(itertools.product(stages, range(len(parts)), range(ranks)))
    over: dict[tuple[str, int, int], float] = {}
    free: dict[object, float] = {}
    host = engines.parcel_seconds(operator)

    def waits_for(stage: str, at: int, rank: int) -> list[tuple[str, int, int]]:
        others = [one for one in range(ranks) if one != rank]
        found, before = ([(stage, at - 1, rank)] if at else []), parts[at][2]
        if stage == "out" and before is not None:
            found += [("in", before, one) for one in others]
        if stage == "post" and before is not None:
            found.append(("land", before, (rank + 1) % ranks))
        if stage == "land":
            found.append(("post", at, (rank - 1) % ranks))
        if stage in ("in", "gather"):
            found += [("out" if stage == "in" else "share", at, one) for one in others]
        if stage == "in" and "sum" in stages and at:
            found.append(("sum", at - 1, rank))
        if stage == "sum":
            found.append(("in", at, rank))
        if stage == "share":
            found += [("sum", at, rank), *([("gather", before, one) for one in others] if before is not None else [])]
        return found

    while jobs:
        best: tuple[float, float, tuple[str, int, int]] | None = None
        for job in sorted(jobs):
            stage, at, rank = job
            needs, number = waits_for(*job), parts[at][0]
            if any(one not in over for one in needs):
                continue
            moment = max([over[one] for one in needs], default=0.0)
            if stage in ("post", "out"):
                first = ready[number] if early is None else early[number]
                moment = max(moment, first + (ready[number] - first) * rank / (ranks - 1))
            moment = max(moment, host * (number + (stage not in ("post", "out")))) + engines.hop
            engine = (stage in ("post", "out", "share"), 0 if shared else rank)
            begin = moment if stage == "sum" else max(moment, free.get(engine, 0.0))
            if best is None or (begin, moment) < best[:2]:
                best = begin, moment, job
        assert best is not None
        begin, _, job = best
        stage, at, rank = job
        piece = parts[at][1]
        if stage == "sum":
            moved, now = (ranks + 1) * piece, begin
            beside = min(moved, max(0.0, until - now) * engines.sum_speed)
            end = now + beside / engines.sum_speed + (moved - beside) / engines.sum_speed_alone
        else:
            at_an_end = rank in (0, ranks - 1)
            single = stage in ("post", "land", "share")
            copies = 1 if single or at_an_end or (stage == "in" and "sum" in stages) else 2
            moved = piece * (1 if single else ranks - 1)
            out = stage in ("post", "out", "share")
            pause, speed = (engines.out_pause, engines.out_speed) if out else (engines.in_pause, engines.in_speed)
            end = begin + copies * pause + moved / speed
            free[(out, 0 if shared else rank)] = end
        over[job] = end
        jobs.remove(job)
    return max(over.values())


@pytest.mark.parametrize("operator", [*OPERATORS, staged.POSTS])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("stagger", [0.0, 0.75])
def test_the_equations_are_what_single_copies_show(operator: str, ranks: int, shared: bool, stagger: float) -> None:
    chance = random.Random(ranks)
    for _ in range(4):
        count = chance.randrange(1, 9)
        weights = [chance.uniform(0.2, 1) for _ in range(count)]
        nbytes, matmul = chance.choice([2**23, 2**25, 2**27]) / ranks, chance.choice([1e-4, 2e-3, 1e-2])
        pieces = [nbytes * one / sum(weights) for one in weights]
        ready = [matmul * one / sum(weights) for one in itertools.accumulate(weights)]
        early = [now - stagger * matmul * one / sum(weights) for now, one in zip(ready, weights, strict=True)]
        want = copy_by_copy(ENGINES, operator, ranks, shared, pieces, ready, ready[-1], early)
        found = last_arrival(ENGINES, operator, ranks, shared, pieces, ready, ready[-1], early)
        assert found == pytest.approx(want, rel=0.07)


def test_parcels_of_nothing_pass_and_those_of_one_parity_share_their_places() -> None:
    """As a plan's parcels of fractions of bands may be: of each four only one holds anything."""
    sparse, dense = [0.0, 0.0, 0.0, 2e6] * 6, [2e6] * 6
    ahead, where = ENGINES.ahead, ("matmul_all_to_all", 4, True)
    found, want = last_arrival(ahead, *where, sparse, [0.0] * 24), last_arrival(ahead, *where, dense, [0.0] * 6)
    assert found > 1.02 * want  # one leaves only when the one before has been read
    assert found == pytest.approx(copy_by_copy(ahead, *where, sparse, [0.0] * 24, 0.0), rel=0.07)
    assert last_arrival(ahead, *where, [0.0] * 5, [1.0] * 5) == 0


def test_the_rank_with_most_to_sum_counts() -> None:
    where = ENGINES, "matmul_reduce_scatter", 4, True, [1e6], [0.0]
    more = last_arrival(*where, 1.0, None, [4e6]) - last_arrival(*where, 1.0)
    assert more == pytest.approx(5 * 3e6 / ENGINES.sum_speed)


def test_hosts_need_what_was_measured_of_each_operator() -> None:
    engines = dataclasses.replace(ENGINES, enqueues=(("matmul_all_reduce", 1e-3),))
    assert engines.parcel_seconds("matmul_all_reduce") == 1e-3
    assert engines.parcel_seconds("matmul_all_to_all") == pytest.approx(2e-4)
    assert engines.ahead.parcel_seconds("matmul_all_reduce") == 0
    machine = dataclasses.replace(node(), engines=engines)
    assert Machine.from_dict(machine.to_dict()) == machine


def test_limits() -> None:
    quick = dataclasses.replace(ENGINES, out_pause=0.0, in_pause=0.0, hop=0.0, enqueue=0.0, chunk=1 << 40)
    piece = 1e7
    one = last_arrival(quick, "matmul_all_to_all", 2, False, [piece], [1e-3])
    assert one == pytest.approx(1e-3 + piece / quick.out_speed + piece / quick.in_speed)
    many = last_arrival(quick, "matmul_all_to_all", 2, False, [piece / 100] * 100, [0.0] * 100)
    assert many == pytest.approx(piece / quick.out_speed, rel=0.02)  # both engines all the time, the slower counts
    paused = dataclasses.replace(quick, out_pause=1e-3)
    assert last_arrival(paused, "matmul_all_to_all", 2, False, [1.0] * 10, [0.0] * 10) == pytest.approx(1e-2, rel=0.01)
    chunks = dataclasses.replace(paused, chunk=1000)
    assert last_arrival(chunks, "matmul_all_to_all", 2, False, [10_000.0], [0.0]) == pytest.approx(1e-2, rel=0.01)
    both = dataclasses.replace(quick, chunk=round(piece / 10))  # the first chunk arrives while the second leaves
    parts = last_arrival(both, "matmul_all_to_all", 2, False, [piece], [0.0])
    assert parts == pytest.approx(piece / quick.out_speed + piece / 10 / quick.in_speed, rel=0.01)
    hosted = dataclasses.replace(quick, enqueue=1e-3)
    assert last_arrival(hosted, "matmul_all_to_all", 2, False, [1.0] * 10, [0.0] * 10) == pytest.approx(2e-2, rel=0.01)
    assert last_arrival(quick, "matmul_all_reduce", 1, False, [piece], [0.0]) == 0
    assert last_arrival(quick, "matmul_all_reduce", 4, True, [], []) == 0
    slow_sums = dataclasses.replace(quick, sum_speed=1e9)
    beside = last_arrival(slow_sums, "matmul_reduce_scatter", 2, False, [piece], [0.0], computing_until=1.0)
    alone = last_arrival(slow_sums, "matmul_reduce_scatter", 2, False, [piece], [0.0])
    assert beside - alone == pytest.approx(3 * piece * (1e-9 - 1e-12))


@settings(max_examples=50)
@given(
    st.sampled_from(OPERATORS), st.integers(2, 8), st.booleans(), st.lists(st.floats(1, 3e7), min_size=1, max_size=6)
)
def test_more_of_anything_is_no_earlier(operator: str, ranks: int, shared: bool, pieces: list[float]) -> None:
    ready = [1e-3 * one for one in range(len(pieces))]
    found = last_arrival(ENGINES, operator, ranks, shared, pieces, ready)
    assert found > ready[-1]
    slower = dataclasses.replace(ENGINES, out_speed=ENGINES.out_speed / 2, in_speed=ENGINES.in_speed / 2)
    assert last_arrival(slower, operator, ranks, shared, pieces, ready) >= found - 1e-12
    assert last_arrival(ENGINES, operator, ranks, shared, [2 * one for one in pieces], ready) >= found - 1e-12


def test_a_fit_finds_the_engines_behind_samples() -> None:
    true = dataclasses.replace(ENGINES, out_speed=4.2e10, in_speed=5.4e10, out_pause=2.4e-5, in_pause=1.1e-5, end=2e-4)
    chance = random.Random(7)
    samples = []
    for operator, nbytes, count in itertools.product(
        ("matmul_all_to_all", "matmul_all_reduce"), (2**24, 2**27), (1, 2, 4, 8, 16)
    ):
        end = true.end + last_arrival(true.ahead, operator, 4, True, [nbytes / count / 4] * count, [0.0] * count)
        samples.append(Sample(operator, nbytes, count, end * chance.uniform(0.99, 1.01)))
    start = dataclasses.replace(ENGINES, out_speed=6e10, in_speed=4e10, end=1e-4)
    found = staged.fit(samples, start, 4, True)
    for name in ("out_speed", "in_speed"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1)
    for nbytes, count in ((2**26, 8), (2**25, 5)):  # sizes that were not measured
        where = "matmul_reduce_scatter", 4, True, [nbytes / count / 4] * count, [1e-3] * count
        want = true.end + last_arrival(true, *where)
        assert found.end + last_arrival(found, *where) == pytest.approx(want, rel=0.02)
    with pytest.raises(InvalidArgument, match="samples"):
        staged.fit(samples[:3], start, 4, True)


# -- predictions and the search ----------------------------------------------------------------------------------------


def node() -> Machine:
    return dataclasses.replace(machines.machine(), engines=ENGINES)


def test_engines_are_kept_in_the_machine_file() -> None:
    assert Machine.from_dict(node().to_dict()) == node()
    wrong = node().to_dict()
    wrong["engines"]["in_speed"] = 0
    with pytest.raises(InvalidArgument, match=r"engines\.in_speed"):
        Machine.from_dict(wrong)


@pytest.mark.parametrize("operator", OPERATORS)
def test_predictions_over_engines(operator: str) -> None:
    """Serial is the matmul and then the communication; overlapped, neither is beaten, and both together are."""
    machine, problem = node(), machines.problem(operator, k=14336)
    serial = predict(problem, Plan("serial", "dma", split(problem.m, 8)), machine)
    assert serial.total == pytest.approx(serial.gemm + serial.communication, rel=0.02)
    best = predict(problem, fixed(problem, machine, "dma")["best"], machine)
    assert max(best.gemm, 0.95 * serial.communication) < best.total < 0.8 * serial.total
    whole = predict(problem, Plan("serial", "dma", ((0, problem.m),)), machine)
    assert whole.total > serial.total  # nothing is under way at once


def test_chunks_of_every_rank_are_matmuls_of_their_own() -> None:
    machine = node()
    plan = Plan("chunked", "dma", split(2048, 8))
    scattered = predict(machines.problem("matmul_reduce_scatter", m=2048), plan, machine)
    reduced = predict(machines.problem("matmul_all_reduce", m=2048), plan, machine)
    assert scattered.gemm == pytest.approx(2 * reduced.gemm, rel=0.03)  # 64 rows of each rank: half of a tile idle


@pytest.mark.parametrize("k", [2048, 7168, 14336, 20480])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_best_is_no_worse_than_any_fixed_one(operator: str, k: int) -> None:
    machine = node()
    for m in (2048, 8192):
        problem = machines.problem(operator, m=m, k=k)
        plans = fixed(problem, machine, "dma")
        best = plans.pop("best")
        ends = {
            name: predict(problem, plan, machine).total
            for name, plan in plans.items()
            if plan.grain == "signaled" and plan.share == best.share and plan.layout == best.layout
            and is_even(problem, plan)
        }  # fmt: skip
        assert predict(problem, best, machine).total <= min(ends.values()) * 1.025  # which stand beside it


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("matmul", [2e-3, 1e-2, 2e-2])
def test_climbing_is_near_the_best_of_all_groupings(operator: str, matmul: float) -> None:
    last, nbytes = 10, 2**25

    def end(cuts: climb.Cuts) -> float:
        sizes = [stop - start for start, stop in itertools.pairwise((0, *cuts))]
        ready = [matmul * cut / last for cut in cuts]
        pieces = [nbytes * size / last for size in sizes]
        return max(ready[-1], last_arrival(ENGINES, operator, 4, True, pieces, ready, ready[-1]))

    inner = itertools.chain.from_iterable(itertools.combinations(range(1, last), count) for count in range(last))
    least = min(end((*cuts, last)) for cuts in inner)
    assert end(climb.best(last, end)) <= 1.01 * least


@given(st.integers(1, 60))
def test_cuts_are_in_order_and_end_at_the_last(last: int) -> None:
    seen: list[climb.Cuts] = []

    def end(cuts: climb.Cuts) -> float:
        seen.append(cuts)
        return 1.0 + abs(len(cuts) - 5)

    climb.best(last, end)
    for cuts in seen:
        assert cuts[-1] == last
        assert list(cuts) == sorted(set(cuts))
        assert cuts[0] >= 1
    assert len(seen) == len(set(seen))
