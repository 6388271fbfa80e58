"""Fused plans that post, run on copy engines: as the planner reckons, one copy at a time, nothing before it is made."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

import plan_machines as machines
import pytest

from undertow.plan.defaults import posted_forms
from undertow.plan.machine import Machine
from undertow.plan.plan import Plan
from undertow.plan.posted_steps import steps_of
from undertow.plan.predict import predict
from undertow.plan.problem import Problem
from undertow.plan.staged import Engines
from undertow.sim.plans import simulate_plan
from undertow.sim.tasks import Outcome

OPERATORS = ("matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul")
ENGINES = Engines(4.8e10, 5e10, 1.5e-5, 1.7e-5, 1e-5, 8 << 20, 1e11, 1e12)


def node(shared: bool = True) -> Machine:
    return dataclasses.replace(machines.quiet(), engines=ENGINES, shares_device=shared)


def first_form(problem: Problem) -> Plan:
    return posted_forms(problem, "dma")[0]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("shared", [True, False])
def test_it_agrees_with_the_planner(operator: str, shared: bool) -> None:
    machine = node(shared)
    for m, k in itertools.product((512, 2048, 8192), (2048, 14336)):
        problem = machines.problem(operator, m=m, k=k)
        for plan in posted_forms(problem, "dma"):
            found, want = simulate_plan(problem, plan, machine).seconds, predict(problem, plan, machine).total
            assert found == pytest.approx(want, rel=0.15), (m, k, len(plan.parcels))


def spans(outcome: Outcome, engine: str) -> list[tuple[float, float]]:
    both = zip(outcome.tasks, outcome.ran, strict=True)
    return sorted((ran.start, ran.end) for task, ran in both if task.engine == engine)


@pytest.mark.parametrize("operator", OPERATORS)
def test_engines_hold_one_copy_at_a_time_and_move_everything(operator: str) -> None:
    problem = machines.problem(operator)
    plan = first_form(problem)
    outcome = simulate_plan(problem, plan, node())
    phases = 2 if operator == "matmul_all_reduce" else 1
    for engine in ("dma out", "dma in"):
        found = spans(outcome, engine)
        assert len(found) == phases * problem.ranks * len(steps_of(problem, plan).nbytes)
        assert all(first[1] <= second[0] + 1e-12 for first, second in itertools.pairwise(found))


def test_sums_wait_for_what_lands_and_rows_for_their_parcel() -> None:
    for operator in OPERATORS:
        problem = machines.problem(operator, k=2048)
        outcome = simulate_plan(problem, first_form(problem), node())
        landed = max(end for _, end in spans(outcome, "dma in"))
        last_wave = max(
            ran.start for task, ran in zip(outcome.tasks, outcome.ran, strict=True) if task.name.startswith("wave")
        )
        assert (last_wave >= landed) == (operator == "all_gather_matmul")
        assert outcome.seconds > landed


def test_more_parcels_begin_sooner_and_cost_more_pauses() -> None:
    problem = machines.problem("matmul_reduce_scatter", k=2048)
    many, *_, few = posted_forms(problem, "dma")
    assert len(few.parcels) < len(many.parcels)
    early, late = (spans(simulate_plan(problem, plan, node()), "dma out") for plan in (many, few))
    assert early[0][0] < late[0][0]
    assert sum(end - start for start, end in early) > sum(end - start for start, end in late)
