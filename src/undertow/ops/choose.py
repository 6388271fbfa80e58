"""Which plan a call runs: the one given, one made for the strategy named, or what the planner knows to be best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plan.defaults import default_plan
from ..plan.plan import Plan, parse_strategy

if TYPE_CHECKING:
    from ..fabric.group import Group
    from ..plan.problem import Problem

GRAINS = ("serial", "chunked", "signaled")


def choose(problem: Problem, strategy: str, plan: Plan | None, group: Group) -> tuple[Plan, str]:
    """The plan and, in one sentence, why."""
    lanes = group.fabric.lanes()
    if plan is not None:
        parse_strategy(plan.name, GRAINS, lanes, plan.lane)
        plan.check(problem)
        return plan, "The plan was given."
    if strategy == "auto":
        return default_plan(problem, "serial", "net"), "No measured plan beats serial here yet, so serial runs."
    grain, lane = parse_strategy(strategy, GRAINS, lanes, "net")
    return default_plan(problem, grain, lane), "The strategy was given."
