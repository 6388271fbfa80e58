"""Plans over copy engines, run copy by copy: what the planner's equations say, and what they leave out."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

import plan_machines as machines

from undertow.plan.machine import Machine
from undertow.plan.predict import predict
from undertow.plan.search import fixed
from undertow.plan.staged import STAGES, Engines
from undertow.plan.work import Work
from undertow.sim.plans import simulate_plan

ENGINES = Engines(
    4.6e10, 5.2e10, 1.6e-5, 1.8e-5, 3e-6, 8 << 20, 1e11, 2e11, end=4e-5, call=3e-4,
    enqueues=(("matmul_all_to_all", 1.5e-4), ("matmul_reduce_scatter", 1.8e-4), ("matmul_all_reduce", 6e-4)),
)  # fmt: skip


def node(stagger: float = 0.7, shared: bool = True) -> Machine:
    return dataclasses.replace(machines.quiet(), engines=ENGINES, work=Work(stagger=stagger), shares_device=shared)


@pytest.mark.parametrize("operator", list(STAGES))
@pytest.mark.parametrize("shared", [True, False])
def test_it_agrees_with_the_planner(operator: str, shared: bool) -> None:
    machine = node(shared=shared)
    for m, k in ((2048, 2048), (8192, 14336)):
        problem = machines.problem(operator, m=m, k=k)
        plans = fixed(problem, machine, "dma")
        for name in ("serial", "chunks of 2", "chunks of 8", "equal 4", "equal 8", "growing", "best", "flash overlap"):
            found = simulate_plan(problem, plans[name], machine).seconds
            want = predict(problem, plans[name], machine).total
            assert found == pytest.approx(want, rel=0.08 if shared else 0.15), name  # sums count more there


def test_a_first_rank_that_is_ready_sooner_sends_sooner() -> None:
    problem = machines.problem("matmul_all_to_all", k=14336)
    serial = fixed(problem, node(), "dma")["serial"]
    late, soon = (simulate_plan(problem, serial, node(stagger)).seconds for stagger in (0.0, 0.75))
    assert soon < late
    apart = [simulate_plan(problem, serial, node(stagger, shared=False)).seconds for stagger in (0.0, 0.75)]
    assert apart[0] == apart[1]  # each has a GPU of its own


def test_engines_hold_one_copy_at_a_time() -> None:
    problem = machines.problem("matmul_all_reduce")
    outcome = simulate_plan(problem, fixed(problem, node(), "dma")["equal 4"], node())
    for engine in ("dma out", "dma in"):
        spans = sorted(
            (ran.start, ran.end) for task, ran in zip(outcome.tasks, outcome.ran, strict=True) if task.engine == engine
        )
        assert len(spans) > 8
        assert all(first[1] <= second[0] + 1e-12 for first, second in itertools.pairwise(spans))
    assert {task.details.get("rank") for task in outcome.tasks if task.engine == "dma in"} == {0, 1, 2, 3}
