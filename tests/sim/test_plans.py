"""Plans that are run against plans that are predicted; tasks by themselves."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from plan_machines import VIRTUAL_NODE

from undertow.errors import InvalidArgument, SimulationRefused
from undertow.fabric.events import Timeline
from undertow.plan.defaults import default_plan
from undertow.plan.interference import Effect, Interference
from undertow.plan.machine import Machine
from undertow.plan.plan import OPERATORS, Plan, split
from undertow.plan.predict import predict
from undertow.plan.problem import Problem
from undertow.sim.plans import simulate_plan
from undertow.sim.tasks import COMPUTE, Task, Tasks

MACHINE = Machine.from_dict(VIRTUAL_NODE)


def _problem(operator: str, m: int = 8192, k: int = 4096) -> Problem:
    return Problem.of(operator, m, 8192, k, dtype="bfloat16", ranks=4, device="cuda", multiprocessors=32)


@pytest.mark.parametrize("lane", ["dma", "peer"])
@pytest.mark.parametrize("grain", ["serial", "chunked", "signaled"])
@pytest.mark.parametrize("operator", list(OPERATORS))
def test_simulation_and_prediction_agree(operator: str, grain: str, lane: str) -> None:
    """Same costs, same interference: what differs is what happens tile by tile."""
    problem = _problem(operator)
    plan = default_plan(problem, grain, lane)
    if grain == "serial":
        plan = replace(plan, parcels=((0, problem.m),))
    found = simulate_plan(problem, plan, MACHINE)
    assert found.seconds == pytest.approx(predict(problem, plan, MACHINE).total, rel=0.06)


@pytest.mark.parametrize("m", [4, 64, 512, 2048, 8192])
@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul"])
def test_simulated_and_predicted_fused_calls_agree(operator: str, m: int) -> None:
    """One launch, the bytes of each wave behind it, what is left in the end; few rows move when all is computed."""
    problem = _problem(operator, m=m)
    plan = default_plan(problem, "fused", "peer")
    found, said = simulate_plan(problem, plan, MACHINE).seconds, predict(problem, plan, MACHINE)
    assert found == pytest.approx(said.total, rel=1e-9 if plan.split else 0.06)
    more = simulate_plan(problem, plan, replace(MACHINE, launch_seconds=MACHINE.launch_seconds + 1e-3)).seconds
    assert more - found == pytest.approx(1e-3, rel=0.01)  # one launch


def test_interference_is_the_planners() -> None:
    problem = _problem("matmul_all_reduce", k=20480)
    plan = default_plan(problem, "signaled", "dma")
    model = Interference(32, (("dma", Effect(per_byte=1e-11, crowding=0.5)),))
    alone, beside = (
        simulate_plan(problem, plan, replace(MACHINE, interference=one)).seconds
        for one in (Interference(32, ()), model)
    )
    assert beside > 1.05 * alone


def test_a_timeline_like_those_that_are_measured() -> None:
    problem = _problem("matmul_reduce_scatter")
    found = simulate_plan(problem, default_plan(problem, "signaled", "dma"), MACHINE)
    timeline = found.timeline()
    assert timeline.engines == [COMPUTE, "dma"]
    assert timeline.overlap(COMPUTE, "dma") > 0
    assert Timeline.from_chrome(timeline.to_chrome()).span("dma") == pytest.approx(timeline.span("dma"))
    assert sum(found.by_resource().values()) == pytest.approx(found.seconds)
    assert set(found.by_resource()) <= {"matmul", "lane dma", "waiting"}


def test_a_plan_for_another_problem_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="plan"):
        simulate_plan(_problem("matmul_all_reduce"), Plan("chunked", "dma", split(100, 4)), MACHINE)


def test_slowdowns_hold_while_both_run() -> None:
    """10 s of computing beside 4 s of moving: at half speed for the first 8, so 10 + 4 s; the lane takes 4 · 2 s."""
    tasks = Tasks(Interference(10, (("net", Effect(contention=0.0, per_byte=1.0, crowding=1.0)),)))
    tasks.add(Task("matmul", (0,), COMPUTE, 10.0, multiprocessors=10))
    tasks.add(Task("send", (0,), "net", 4.0, lane="net", bytes_per_second=1.0))
    found = tasks.run()
    assert found.ran[1].end == pytest.approx(8.0)
    assert found.ran[0].end == pytest.approx(14.0)


def test_transfers_over_one_lane_share_it() -> None:
    tasks = Tasks()
    for name, seconds in (("one", 1.0), ("two", 3.0)):
        tasks.add(Task(name, (0,), name, seconds, lane="net"))
    found = tasks.run()
    assert [one.end for one in found.ran] == pytest.approx([2.0, 4.0])


def test_collectives_wait_for_everybody() -> None:
    tasks = Tasks()
    slow = tasks.add(Task("slow", (1,), COMPUTE, 2.0))
    quick = tasks.add(Task("quick", (0,), COMPUTE, 1.0))
    tasks.add(Task("all_reduce", (0, 1), "net", 1.0, (slow, quick), 0.5))
    found = tasks.run()
    assert (found.ran[2].start, found.ran[2].end) == pytest.approx((2.5, 3.5))
    assert found.critical_path() == [0, 2]
    assert found.by_resource() == pytest.approx({COMPUTE: 2.0, "waiting": 0.5, "net": 1.0})


def test_circles_and_bad_tasks() -> None:
    tasks = Tasks()
    tasks.add(Task("one", (0,), COMPUTE, 1.0, (1,)))
    tasks.add(Task("two", (0,), "net", 1.0, (0,)))
    with pytest.raises(SimulationRefused, match="'one' waits for itself"):
        tasks.run()
    for bad in (Task("x", (), COMPUTE, 1.0), Task("x", (0,), COMPUTE, -1.0), Task("x", (0,), COMPUTE, float("nan"))):
        with pytest.raises(InvalidArgument):
            Tasks().add(bad)
    lonely = Tasks()
    lonely.add(Task("x", (0,), COMPUTE, 1.0, (7,)))
    with pytest.raises(InvalidArgument, match="after task 7"):
        lonely.run()
