"""When posts leave, and when they are needed: as the tables of a GPU's kernels say it, tile by tile."""

from __future__ import annotations

import dataclasses
import random

import plan_machines as machines
import pytest

from undertow.plan import fused, post_tables
from undertow.plan.defaults import default_plan, posted_forms
from undertow.plan.plan import Plan, alike
from undertow.plan.posted_steps import steps_of
from undertow.plan.posts import Rows, Sums, signal_of
from undertow.plan.problem import Problem

SUMS = ("matmul_reduce_scatter", "matmul_all_reduce")


def random_plan(chance: random.Random, operator: str) -> tuple[Problem, Plan]:
    ranks = chance.randint(2, 5)
    shards = [chance.randint(1, 900) for _ in range(ranks)]
    n, k = 8 * chance.randint(1, 200), 8 * chance.randint(1, 200)
    rows = {} if operator == "matmul_all_reduce" else {"shards": shards}
    problem = machines.problem(operator, m=sum(shards), n=n, k=k, ranks=ranks, **rows)
    parcels, group = alike(chance.choice((1, 2, 3, 64))), chance.choice((1, 2, 3, 8))
    return problem, dataclasses.replace(default_plan(problem, "fused", "dma"), parcels=parcels, group_bands=group)


@pytest.mark.parametrize("operator", SUMS)
@pytest.mark.parametrize("seed", range(20))
def test_sums_are_posted_when_their_last_tile_is_stored(operator: str, seed: int) -> None:
    problem, plan = random_plan(random.Random(seed), operator)
    steps, owned = steps_of(problem, plan), fused.owned(problem, plan)
    assert plan.tile is not None
    layout = Sums(owned, plan.tile[0], len(plan.parcels), problem.n, operator == "matmul_all_reduce")
    table = post_tables.leaving_products(layout, plan, 0)
    left, found = [int(one[0]) for one in table.parcels], []
    for at, tile in enumerate(table.tiles):
        left[tile[6]] -= 1
        if not left[tile[6]] and table.parcels[tile[6]][4]:
            post = table.posts[table.parcels[tile[6]][3]]
            found.append(((at + 1) / len(table.tiles), float(post[3] * problem.item_size)))
    assert list(zip(steps.made, steps.nbytes, strict=True)) == found
    assert sum(steps.nbytes) == (sum(owned) - owned[0]) * problem.n * problem.item_size
    assert set(steps.needed) <= {1.0}


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_waited_for_as_they_land(seed: int) -> None:
    """The first tile that waits for a parcel stands behind those that wait for what landed before."""
    problem, plan = random_plan(random.Random(seed), "all_gather_matmul")
    steps = steps_of(problem, plan)
    assert sum(steps.nbytes) == (problem.m - problem.shards[0]) * problem.k * problem.item_size
    assert set(steps.made) <= {0.0}
    own = -(-problem.shards[0] // plan.tile[0]) if plan.tile else 0  # bands
    bands = sum(-(-rows // plan.tile[0]) for rows in problem.shards) if plan.tile else 1
    assert steps.needed[0] == pytest.approx(own / bands)
    if plan.group_bands == 1:
        assert list(steps.needed) == sorted(steps.needed)


@pytest.mark.parametrize("rank", range(4))
def test_what_is_posted_first_is_multiplied_first(rank: int) -> None:
    """Of every sender the post for this rank is the how many-th of the parcel it is; tiles come in that order."""
    problem = machines.problem("all_gather_matmul", m=4096)
    plan = default_plan(problem, "fused", "dma")
    assert plan.tile is not None
    layout = Rows(problem.shards, plan.tile[0], len(plan.parcels), problem.k)
    lands = []
    for source in range(4):
        if source != rank:
            posts = post_tables.leaving_rows(layout, source).posts.tolist()
            lands += [(at, post[4]) for at, post in enumerate(posts) if post[0] == rank]
    waited = list(dict.fromkeys(post_tables.landing_rows(layout, problem.n, plan, rank).tiles[:, 6].tolist()))
    assert waited == [post_tables.NOBODY, *(signal for _, signal in sorted(lands))]
    assert waited[1] == signal_of((rank + 1) % 4, 0)


@pytest.mark.parametrize("operator", [*SUMS, "all_gather_matmul"])
@pytest.mark.parametrize("m", [512, 1024, 8192])
def test_smaller_groups_begin_sooner(operator: str, m: int) -> None:
    problem = machines.problem(operator, m=m)
    forms = posted_forms(problem, "dma")
    assert [plan.group_bands for plan in forms] == sorted({plan.group_bands for plan in forms})
    steps = [steps_of(problem, plan) for plan in forms]
    firsts = [one.made[0] for one in steps]
    assert firsts == sorted(firsts)
    tails = [1 - one.needed[-1] for one in steps]
    assert tails == sorted(tails)
    for plan in forms:
        plan.check(problem)
