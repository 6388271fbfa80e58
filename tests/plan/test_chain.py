"""Sums that go from rank to rank: each tile is added once by every rank, and nobody waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from undertow.errors import InvalidArgument
from undertow.plan import chain, fused_order
from undertow.plan.defaults import fused_plan, scatter_forms
from undertow.plan.plan import Plan, Share
from undertow.plan.problem import Problem
from undertow.plan.search import fused_plans

SHARDS = [(512, 512), (300, 1, 700), (640, 200, 333, 129), (128,) * 8]
N = 700


def plan_of(bands: int = 8, ctas: int = 4) -> Plan:
    return Plan("fused", "peer", ((0, 1),), Share(ctas), tile=chain.TILE, group_bands=bands, order="rotated")


def problem_of(m: int, k: int = 2048, ranks: int = 4, multiprocessors: int = 33, **more: object) -> Problem:
    given = {"dtype": "bfloat16", "device": "cuda", **more}
    return Problem.of(
        "matmul_reduce_scatter", m, 8192, k, ranks=ranks, multiprocessors=multiprocessors, **given  # type: ignore[arg-type]
    )  # fmt: skip


def run(tables: list[np.ndarray], ctas: int, seed: int) -> tuple[dict[int, list[int]], bool]:
    """CTAs of all ranks in a random order, as the kernel has them: who added to each tile's sum, in which order, and
    whether all came to their end."""
    ranks, draw = len(tables), random.Random(seed)
    slots: dict[tuple[int, int], list[int]] = {}  # what a rank has of a tile's line
    done: dict[int, list[int]] = {}
    at = {(rank, cta): cta for rank in range(ranks) for cta in range(ctas)}
    while True:
        able = []
        for (rank, cta), position in at.items():
            if position < len(tables[rank]):
                line, awaited = (
                    int(tables[rank][position, fused_order.TILE_LINE]),
                    tables[rank][position, chain.AWAITED],
                )
                if not awaited or (rank, line) in slots:
                    able.append((rank, cta))
        if not able:
            over = all(position >= len(tables[rank]) for (rank, _), position in at.items())
            return done, over
        rank, cta = draw.choice(able)
        row = tables[rank][at[rank, cta]]
        line = int(row[fused_order.TILE_LINE])
        summed = [*(slots[rank, line] if row[chain.AWAITED] else []), rank]
        if row[fused_order.OWNER] == rank:
            assert line not in done
            done[line] = summed
        else:
            following = (rank + 1) % ranks
            assert (following, line) not in slots
            slots[following, line] = summed
        at[rank, cta] += ctas


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("ctas", [1, 3, 32])
def test_every_rank_adds_to_every_tile_in_one_order(shards: tuple[int, ...], ctas: int) -> None:
    tables = [chain.table(shards, N, plan_of(3), rank) for rank in range(len(shards))]
    for seed in range(5):
        done, over = run(tables, ctas, seed)
        assert over
        assert sorted(done) == sorted(tables[0][:, fused_order.TILE_LINE].tolist())
        for rank, table in enumerate(tables):
            for line in table[table[:, fused_order.OWNER] == rank, fused_order.TILE_LINE].tolist():
                assert done[line] == [(rank + 1 + step) % len(shards) for step in range(len(shards))]


def test_a_wrong_order_is_found() -> None:
    """Own tiles first: everybody waits for what others would compute behind theirs."""
    shards = SHARDS[0]
    tables = [chain.table(shards, N, plan_of(), rank) for rank in range(2)]
    assert run(tables, 1, 0)[1]
    assert not run([table[::-1] for table in tables], 1, 0)[1]
    skipped = tables[1].copy()
    skipped[0, chain.AWAITED] = 1  # it is the first of its chain: nobody sends it anything
    assert not run([tables[0], skipped], 1, 0)[1]


@pytest.mark.parametrize("shards", SHARDS)
def test_the_tiles_are_those_of_other_scatters(shards: tuple[int, ...]) -> None:
    for rank in range(len(shards)):
        found = chain.table(shards, N, plan_of(), rank)[:, : chain.AWAITED]
        other = fused_order.scatter_table(shards, N, plan_of(), rank, False)[:, : chain.AWAITED]
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, other.tolist()))


def test_what_is_waited_for_stands_one_ranks_tiles_earlier() -> None:
    asked = problem_of(8192)
    plan = scatter_forms(asked, "peer")["chain"]
    tables = [chain.table(asked.shards, asked.n, plan, rank) for rank in range(4)]
    each = len(tables[0]) // 4
    for rank in range(4):
        assert not tables[rank][:each, chain.AWAITED].any()
        assert (tables[rank][each:, fused_order.TILE_LINE] == tables[rank - 1][:-each, fused_order.TILE_LINE]).all()
        assert (tables[rank][3 * each :, fused_order.OWNER] == rank).all()


def test_which_problems_have_such_plans() -> None:
    forms = scatter_forms(problem_of(8192), "peer")
    assert set(forms) == {"beside", "chain"}
    assert forms["chain"].share == Share(32)  # one SM stays free where all CTAs wait
    assert fused_plan(problem_of(8192), "peer") == forms["beside"]
    assert all(plan in fused_plans(problem_of(8192)) for plan in forms.values())
    assert set(scatter_forms(problem_of(2048), "peer")) == {"beside", "chain"}
    assert set(scatter_forms(problem_of(1024), "peer")) == {"beside"}  # shards of two waves
    assert set(scatter_forms(problem_of(8192, bulk=False), "peer")) == {"beside"}
    assert set(scatter_forms(problem_of(8192, ranks=1), "peer")) == {"beside"}
    assert set(scatter_forms(problem_of(8192, dtype="float16"), "peer")) == {"beside"}  # sums on their way may overflow
    assert set(scatter_forms(problem_of(16384, ranks=8), "peer")) == {"beside"}  # rounded on seven ways


def test_plans_of_other_problems_are_refused() -> None:
    plan = scatter_forms(problem_of(8192), "peer")["chain"]
    plan.check(problem_of(8192))
    assert Plan.from_json(plan.to_json()) == plan
    summed = Problem.of(
        "matmul_all_reduce", 8192, 8192, 2048, dtype="bfloat16", ranks=4, device="cuda", multiprocessors=33
    )
    for other in (summed, problem_of(8192, bulk=False), problem_of(8192, device="cpu")):
        with pytest.raises(InvalidArgument, match=r"plan\.(order|tile)"):
            plan.check(other)
    with pytest.raises(InvalidArgument, match=r"plan\.order"):
        replace(plan, deterministic=True).check(problem_of(8192))  # sums are not in rank order
