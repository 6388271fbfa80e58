"""The search: as good as trying everything, never without serial, quick, and every plan fits its problem."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import plan_machines as machines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.errors import InvalidArgument
from undertow.plan import flash_overlap, pipeline
from undertow.plan.defaults import default_plan
from undertow.plan.interference import Effect, Interference
from undertow.plan.machine import Machine
from undertow.plan.pipeline import Step
from undertow.plan.plan import OPERATORS, Plan, Share, split
from undertow.plan.predict import predict
from undertow.plan.problem import Problem
from undertow.plan.search import (
    Grouping,
    best_cuts,
    best_parcels,
    candidates,
    fewer_cuts,
    fixed,
    is_even,
    ranked,
    wave_cuts,
)
from undertow.plan.staged import Engines
from undertow.plan.tiles import chunks


def end_of(grouping: Grouping, ends: tuple[int, ...]) -> float:
    steps = [grouping.step(start, stop) for start, stop in itertools.pairwise((0, *ends))]
    return max(pipeline.run(grouping.total, [Step(*map(float, step)) for step in steps]))


def by_trying_all(grouping: Grouping) -> float:
    last = len(grouping.ready) - 1
    return min(
        end_of(grouping, (*cuts, last))
        for count in range(last)
        for cuts in itertools.combinations(range(1, last), count)
    )


@settings(max_examples=60)
@given(st.integers(1, 9), st.floats(0.01, 3), st.floats(0, 0.5), st.floats(1, 2), st.floats(1, 2), st.integers(0, 99))
def test_no_grouping_is_better(waves: int, speed: float, latency: float, slow: float, lane: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    ready = np.concatenate([[0.0], np.cumsum(random.uniform(0.5, 1.5, waves))])
    sizes = np.arange(waves + 1)[None, :] - np.arange(waves + 1)[:, None]
    cost = latency + speed * np.maximum(0, sizes) * random.uniform(0.9, 1.1, sizes.shape)
    slowdown = 1 + (slow - 1) * random.uniform(0.5, 1.0, sizes.shape)
    if 1 / slow + 1 / lane < 1:
        return
    grouping = Grouping(ready, cost, slowdown, lane, float(ready[-1]), 0.05, 0.02)
    found = best_cuts(grouping)
    assert found == sorted(set(found))
    assert found[-1] == waves
    assert end_of(grouping, tuple(found)) <= by_trying_all(grouping) * 1.0005
    fewer = fewer_cuts(grouping, found)
    assert set(fewer) <= set(found)
    assert end_of(grouping, tuple(fewer)) <= end_of(grouping, tuple(found)) * 1.001


@pytest.mark.parametrize("k", [1024, 2048, 7168, 20480])
@pytest.mark.parametrize("operator", ["matmul_all_reduce", "matmul_reduce_scatter", "matmul_all_to_all"])
def test_the_best_is_no_worse_than_any_fixed_one(operator: str, k: int) -> None:
    machine, problem = machines.machine(), machines.problem(operator, k=k)
    for lane in ("dma", "peer"):
        plans = fixed(problem, machine, lane)
        best = plans.pop("best")
        ends = {
            name: predict(problem, plan, machine).total
            for name, plan in plans.items()
            if plan.grain == "signaled" and plan.share == best.share and plan.layout == best.layout
        }
        assert len(ends) >= 33
        assert predict(problem, best, machine).total <= min(ends.values()) * 1.001


@pytest.mark.parametrize("lane", ["dma", "peer"])
def test_two_hundred_waves_within_fifty_milliseconds(lane: str) -> None:
    rough = Interference(32, (("dma", Effect(0.5, 3e-11, 0.4)), ("peer", Effect(0.5, 1e-12, 0.8))))
    problem = machines.problem(m=200 * 128, n=32 * 256, k=2048)
    plan = Plan("signaled", lane, ((0, 6400),), Share(multiprocessors=32, communication_ctas=4), tile=(128, 256))
    for layout, machine in itertools.product(
        ("natural", "packed"), (machines.machine(), dataclasses.replace(machines.machine(), interference=rough))
    ):
        frame = dataclasses.replace(plan, layout=layout)
        assert len(wave_cuts(problem, frame)) == 201
        taken = []
        for _ in range(5):
            start = time.thread_time()  # it computes in one thread, and others may want the core
            best_parcels(problem, machine, frame)
            taken.append(time.thread_time() - start)
        assert min(taken) < 0.05


def test_parcels_may_end_where_waves_do() -> None:
    problem = machines.problem(m=512, n=1024)  # 4 bands of 4 columns
    plan = Plan("signaled", "dma", ((0, 16),), Share(multiprocessors=6), tile=(128, 256), layout="packed")
    assert wave_cuts(problem, plan) == [0, 6, 12, 16]
    assert wave_cuts(problem, dataclasses.replace(plan, layout="natural")) == [0, 4, 12, 16]  # whole bands by then


def test_more_waves_are_merged() -> None:
    problem = machines.problem(m=1 << 16, n=1 << 14, k=512)
    plan = Plan("signaled", "dma", ((0, 512 * 64),), tile=(128, 256), layout="packed")
    cuts = wave_cuts(problem, plan)
    assert len(cuts) == 201
    assert (cuts[0], cuts[-1]) == (0, 512 * 64)
    dataclasses.replace(plan, parcels=best_parcels(problem, machines.machine(), plan)).check(problem)


@settings(max_examples=40)
@given(
    st.sampled_from(list(OPERATORS)),
    st.sampled_from([0, 1, 2, 37, 128, 1000, 4099]),
    st.sampled_from([1, 61, 512, 4096]),
    st.integers(1, 8),
    st.booleans(),
)
def test_every_candidate_fits_and_serial_is_among_them(operator: str, m: int, n: int, ranks: int, gpu: bool) -> None:
    machine = machines.machine() if gpu else machines.machine(machines.TWO_CORES)
    problem = Problem.of(
        operator,
        m,
        n,
        64,
        dtype="float32",
        ranks=ranks,
        device="cuda" if gpu else "cpu",
        multiprocessors=32 if gpu else 1,
    )
    found = ranked(problem, machine, ["net", "dma", "peer"])
    ends = [prediction.total for _, prediction in found]
    assert ends == sorted(ends)
    assert any(plan.grain == "serial" for plan, _ in found)
    assert len({plan.digest for plan, _ in found}) == len(found)
    for plan, _ in found:
        plan.check(problem)
        assert plan.lane in machine.lanes
        if gpu and plan.grain == "signaled" and (plan.lane == "peer" or "reduce" in operator):
            assert plan.share.multiprocessors is not None  # what runs on SMs must find some free
            assert plan.share.multiprocessors < 32


def test_a_balanced_problem_is_overlapped_and_an_empty_one_is_not() -> None:
    machine = machines.machine()
    balanced = candidates(machines.problem(k=7168), machine, ["dma"])
    assert balanced[0].grain in ("signaled", "fused")
    assert [plan.grain for plan in candidates(machines.problem(m=0), machine, ["dma"])] == ["serial"]
    assert [plan.grain for plan in candidates(machines.problem(ranks=1), machine, ["dma"])] == ["serial"]
    tiny = candidates(machines.problem(m=1, n=16, k=16), machine, ["dma"])
    assert tiny[0].grain == "serial"


def test_cpu_with_a_paced_link_hides_it() -> None:
    machine = machines.machine(machines.TWO_CORES)
    problem = Problem.of(
        "matmul_all_reduce", 1024, 1024, 1024, dtype="float32", ranks=2, device="cpu", multiprocessors=1
    )
    found = ranked(problem, machine, ["dma"])
    serial = next(prediction for plan, prediction in found if plan.grain == "serial")
    assert found[0][0].grain == "signaled"
    assert found[0][1].total < serial.total


def test_an_unknown_lane_is_left_out_but_something_is_left() -> None:
    machine: Machine = machines.machine(machines.TWO_CORES)
    problem = machines.problem(device="cpu", ranks=2, multiprocessors=1)
    assert {plan.lane for plan in candidates(problem, machine, ["net", "dma"])} == {"dma"}
    assert {plan.lane for plan in candidates(problem, machine, ["net"])} == {"dma"}


@given(st.integers(0, 3000), st.integers(1, 140), st.floats(0.1, 10))
def test_flash_overlap_s_rule(tiles: int, multiprocessors: int, speed: float) -> None:
    parcels = flash_overlap.choose(tiles, multiprocessors, 1.0, lambda held: speed * held / max(1, tiles))
    bounds = [0, *(stop for _, stop in parcels)]
    assert list(parcels) == list(itertools.pairwise(bounds))
    assert bounds[-1] == tiles
    assert len(parcels) <= 10
    workers = max(1, multiprocessors - 2)
    assert all(bound % workers == 0 for bound in bounds[:-1])
    waves = -(-tiles // workers)
    unit = -(-waves // 10) * workers
    assert len(parcels) <= 5 or parcels[0][1] <= 2 * unit


def test_flash_overlap_by_hand() -> None:
    """4 waves of 10 tiles on 12 SMs; a wave of matmul 1 s, of communication 0.5 s, so the last wave should be alone."""
    parcels = flash_overlap.choose(40, 12, 4.0, lambda held: 0.1 + 0.05 * held)
    assert parcels[-1] == (30, 40)
    assert flash_overlap.choose(40, 12, 4.0, lambda held: 100.0) == ((0, 40),)


@pytest.mark.parametrize(("m", "n", "parts"), [(8192, 2048, 4), (8192, 1024, 2), (2048, 256, 2), (32768, 2048, 8)])
def test_lookups_leave_through_the_host_in_few_large_copies(m: int, n: int, parts: int) -> None:
    """Behind signals of a kernel, or posted by one; what is stored into peers' memory goes as one slice."""
    problem = machines.problem("embedding_all_to_all", m=m, n=n, k=1, dtype="float32")
    for grain in ("signaled", "fused"):
        assert default_plan(problem, grain, "dma").parcels == split(m, parts)
        assert {f"{grain} 2", f"{grain} 4", f"{grain} 8"} <= set(fixed(problem, machines.machine(), "dma"))
    assert default_plan(problem, "fused", "peer").parcels == ((0, m),)
    assert default_plan(problem, "fused", "net").parcels == split(m, 4)
    assert [name for name in fixed(problem, machines.machine(), "peer") if name.startswith("fused")] == ["fused 1"]
    for lanes in (["dma"], ["dma", "peer"]):  # who has peer pointers does not post
        found = ranked(problem, machines.machine(), lanes)
        posted = [predicted for plan, predicted in found if plan.posts("cuda")]
        assert bool(posted) == ("peer" not in lanes)
        for predicted in posted:  # all that arrives is brought to its place
            assert predicted.total > predicted.communication + predicted.unpack > predicted.communication > 0
    for lane in ("peer", "net"):
        other = machines.problem("embedding_all_to_all", m=8192, n=2048, k=1, dtype="float32")
        assert default_plan(other, "signaled", lane).parcels == split(8192, 8)
    for m in (1, 2, 7, 9):
        tiny = machines.problem("embedding_all_to_all", m=m, n=1 << 22, k=1, dtype="float32")
        default_plan(tiny, "signaled", "dma").check_rows(m)


def test_over_engines_parcels_hold_as_much_of_every_rank() -> None:
    engines = Engines(4.8e10, 5e10, 1.5e-5, 1.7e-5, 1e-5, 8 << 20, 1e11, 1e12, call=5e-4, enqueue=1e-4)
    machine = dataclasses.replace(machines.machine(), engines=engines)
    for operator in ("matmul_reduce_scatter", "matmul_all_to_all"):
        problem = machines.problem(operator, k=14336)
        found = [plan for plan, _ in ranked(problem, machine, ["dma"])]
        posted = {"fused"} if operator == "matmul_reduce_scatter" else set()
        assert {plan.grain for plan in found} == {"serial", "chunked", "signaled", *posted}
        for plan in found:
            if plan.grain == "signaled" and plan.layout == "natural":
                assert all(stop % (4 * 32) == 0 for _, stop in plan.parcels)  # four ranks, 32 tiles in a band
        natural = dataclasses.replace(default_plan(problem, "signaled", "dma"), layout="natural")
        for bands, even in ((3, False), (4, True), (8, True)):
            cuts = [*range(0, natural.extent, 32 * bands), natural.extent]
            assert is_even(problem, dataclasses.replace(natural, parcels=tuple(itertools.pairwise(cuts)))) == even
        odd = machines.problem(operator, m=8192 - 128, k=14336)  # ranks with bands of different numbers
        assert ranked(odd, machine, ["dma"])
    reduced = machines.problem("matmul_all_reduce")  # every rank has a part of every band
    natural = dataclasses.replace(default_plan(reduced, "signaled", "dma"), layout="natural")
    assert is_even(reduced, dataclasses.replace(natural, parcels=((0, 32), (32, natural.extent))))


@pytest.mark.parametrize(
    ("operator", "device", "lane", "m", "program"),
    [
        ("matmul_all_reduce", "cuda", "peer", 4096, "two_shot"),
        ("matmul_reduce_scatter", "cuda", "peer", 4096, "reduce_scatter_direct"),
        ("matmul_all_reduce", "cuda", "peer", 128, ""),  # one band: parcels of tiles, packed
        ("matmul_all_reduce", "cuda", "dma", 4096, ""),
        ("matmul_all_reduce", "cpu", "peer", 4096, ""),
        ("all_gather_matmul", "cuda", "peer", 4096, ""),
        ("matmul_all_to_all", "cuda", "peer", 4096, ""),
    ],
)
def test_one_launch_moves_what_is_summed_over_peer_memory(
    operator: str, device: str, lane: str, m: int, program: str
) -> None:
    problem = Problem.of(operator, m, 2048, 512, dtype="bfloat16", ranks=4, device=device, multiprocessors=33)
    plan = default_plan(problem, "signaled", lane, by_program=True)
    plan.check(problem)
    assert plan.program == program
    assert not default_plan(problem, "signaled", lane).program
    if device == "cuda":
        assert not any(one.program for one in candidates(problem, machines.machine(), ("peer",)))


def posted(problem: Problem, lanes: list[str]) -> list[int]:
    """In how many parcels the fused candidates post."""
    plans = candidates(problem, machines.machine(), lanes)
    return sorted(len(plan.parcels) for plan in plans if plan.grain == "fused" and plan.lane != "peer")


def test_bands_are_posted_where_nobody_can_store_into_others_memory() -> None:
    """In groups of eight bands of 2 MiB to one, and parcels of 8 MiB at most."""
    assert posted(machines.problem("matmul_reduce_scatter"), ["dma"]) == [4, 4, 8, 16]
    assert posted(machines.problem("matmul_reduce_scatter", n=32768), ["dma"]) == [16] * 4
    assert posted(machines.problem("matmul_reduce_scatter", m=1024), ["dma"]) == [1, 2]
    assert posted(machines.problem("all_gather_matmul"), ["dma"]) == [4, 4, 8, 16]
    assert posted(machines.problem("matmul_reduce_scatter"), ["dma", "peer"]) == []
    assert posted(machines.problem("matmul_all_reduce", m=384), ["dma"]) == []  # a rank owns no band
    assert posted(machines.problem("matmul_all_to_all"), ["dma"]) == []
    assert posted(machines.problem("matmul_reduce_scatter", dtype="float32"), ["dma"]) == []
    assert posted(machines.problem("matmul_reduce_scatter", device="cpu", multiprocessors=1), ["dma"]) == []


def test_a_posted_plan_has_equal_parcels_and_not_too_many() -> None:
    problem = machines.problem("matmul_reduce_scatter")
    plan = default_plan(problem, "fused", "dma")
    for parcels in (((0, 1),), ((0, 1), (1, 2)), tuple((one, one + 1) for one in range(64))):
        dataclasses.replace(plan, parcels=parcels).check(problem)
    for parcels in ((), ((0, 2),), ((0, 1), (1, 3)), tuple((one, one + 1) for one in range(65))):
        with pytest.raises(InvalidArgument, match=r"plan.parcels is .*, but must be \(0, 1\), \(1, 2\) and so on"):
            dataclasses.replace(plan, parcels=parcels).check(problem)
    over_peers = default_plan(problem, "fused", "peer")
    with pytest.raises(InvalidArgument, match="but must be one: each tile moves by itself"):
        dataclasses.replace(over_peers, parcels=((0, 1), (1, 2))).check(problem)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("experts", "mirrored"), [(1, False), (8, False), (1, True), (8, True)])
def test_plans_of_tokens_fit_other_counts_of_their_class(device: str, experts: int, mirrored: bool) -> None:
    def problem(splits: list[list[int]], n: int = 512) -> Problem:
        return Problem.for_splits(
            splits, n, 256, dtype="bfloat16", device=device, multiprocessors=32, experts=experts, mirrored=mirrored
        )

    machine = machines.machine() if device == "cuda" else machines.machine(machines.TWO_CORES)
    lanes = list(machine.lanes)
    first = problem([[900, 0, 100, 7], [0, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 5]])
    plans = candidates(first, machine, lanes)
    fused_here = device == "cuda"
    wanted = {"serial", "chunked"} | ({"fused"} if fused_here else set()) | (set() if mirrored else {"signaled"})
    assert {plan.grain for plan in plans} == wanted
    tiles = {plan.tile for plan in plans if plan.grain == "fused"}
    assert len(tiles) == (0 if not fused_here else 1 if experts == 1 and not mirrored else 2)
    for splits in ([[256] * 4] * 4, [[0] * 4] * 3 + [[0, 0, 0, 513]], [[700, 0, 0, 0]] * 4):
        other = problem(splits)
        assert other.key == first.key
        for plan in plans:
            plan.check(other)
            if plan.grain in ("serial", "chunked"):  # every row once, whatever the counts
                counts = [[count for _, count in parcel] for parcel in chunks(splits[3], plan)]
                assert [sum(one) for one in zip(*counts, strict=True)] == splits[3]
    nothing = candidates(problem([[0] * 4] * 4), machine, lanes)
    assert {plan.grain for plan in nothing} <= {"serial", "fused"}
    odd = {plan.grain for plan in candidates(problem([[300] * 4] * 4, n=500), machine, lanes)}
    assert ("fused" in odd) == (fused_here and not mirrored), "rows of K elements are brought 16 bytes at a time"
    if mirrored:
        with pytest.raises(InvalidArgument, match="serial, chunked or fused, as rows of all_to_all_matmul"):
            default_plan(first, "signaled", "dma").check(first)
