"""Which plan a call runs: the one given, one made for the strategy named, or what the planner knows to be best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import StrategyUnavailable
from ..plan import fused
from ..plan.defaults import default_plan, tokens_plan
from ..plan.plan import EMBEDDING, Plan, parse_strategy
from .explain import Choice, Explanation, remember
from .fused import unavailable
from .overlap import one_by_one

if TYPE_CHECKING:
    import torch

    from ..collective.language import Program
    from ..fabric.base import Lane
    from ..fabric.group import Group
    from ..plan.problem import Problem
    from .program import ProgramCall

GRAINS = ("serial", "chunked", "signaled", "fused")


def _nothing() -> None:
    """All that a call makes and keeps is of its problem."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call before its plan is known.

    `problem`: with what may differ between ranks as it is on this one. `same_on_all`: what ranks compare. `run` does
    the whole call with a plan over a lane and leaves the result in `output`; `matmul` only multiplies, to be timed.
    `run_program` does the whole call where a collective program moves the parcels. `changed`: tensors of the caller
    that a call reads and then overwrites, so that a second call would give another result. `grains`: those that the
    operator has; `lane`: the one of a strategy that names none. `block_rows`: where tokens change ranks, of a block of
    them, for fused plans that are named. `forget`: before a call is measured, what is made anew where counts of tokens
    change from call to call. `by_program`: whether the plan of a strategy may have a program move the
    parcels; equal on all ranks. `stays`: whether gathered rows are used behind the call, and need room of their own.
    `others`: what the call gives beside `output`.
    """

    problem: Problem
    group: Group
    shape: str
    same_on_all: str
    output: torch.Tensor
    run: Callable[[Plan, Lane], None]
    matmul: Callable[[], object]
    run_program: Callable[[ProgramCall], None] | None = None
    changed: tuple[torch.Tensor, ...] = ()
    grains: tuple[str, ...] = GRAINS
    lane: str = "net"
    block_rows: int | None = None
    forget: Callable[[], None] = _nothing
    by_program: bool = False
    stays: bool = False
    others: tuple[torch.Tensor, ...] = ()

    def execute(self, plan: Plan) -> None:
        """The whole call, as often as it is asked for. An aborted one leaves the output poisoned."""
        fabric = self.group.fabric
        if plan.program:
            from .program import planned

            assert self.run_program is not None
            call = planned(self.problem, self.group, None, plan.name, plan)
            with fabric.guarded_call((self.output,)):
                self.run_program(call)
            return
        lane = fabric.lane(plan.lane)  # before the guarded part: opening it is collective and slow
        with fabric.guarded_call((self.output, *self.others)):
            if plan.grain == "fused":  # a kernel, whose calls have an order of their own
                self.run(plan, lane)
                return
            with one_by_one(fabric, lane):
                self.run(plan, lane)


def perform(request: Request, strategy: str, plan: Plan | None, program: Program | None = None) -> None:
    """Choose a plan, run it once as a call of the group, and remember why."""
    group, operator = request.group, request.problem.name
    if program is not None or (plan is not None and plan.program):
        _perform_program(request, strategy, plan, program)
        return
    choice = choose(request, strategy, plan)
    chosen = choice.plan
    with group.call(operator, request.same_on_all, f"{chosen.name} {chosen.digest}") as number:
        request.execute(chosen)
        remember(Explanation(operator, request.shape, group.name, number, strategy, choice))


def _perform_program(request: Request, strategy: str, plan: Plan | None, program: Program | None) -> None:
    from .program import planned

    group, operator = request.group, request.problem.operator
    call = planned(request.problem, group, program, strategy, plan)
    chosen = call.plan
    chosen.check(request.problem)
    assert request.run_program is not None
    with group.call(operator, request.same_on_all, f"{chosen.name} {chosen.digest} {call.tied.digest}") as number:
        with group.fabric.guarded_call((request.output,)):
            request.run_program(call)
        reason = f"Program {chosen.program} was given." if plan is None else "The plan was given."
        remember(Explanation(operator, request.shape, group.name, number, strategy, Choice(chosen, reason)))


def choose(request: Request, strategy: str, plan: Plan | None) -> Choice:
    """The plan and, in one sentence, why. With "auto" it may run the call several times."""
    problem, lanes = request.problem, request.group.fabric.lanes()
    if plan is not None:
        parse_strategy(plan.name, request.grains, lanes, plan.lane)
        plan.check(problem)
        if plan.grain == "fused" and problem.operator != EMBEDDING:
            refuse_fused(plan.name, problem, plan.lane, request.group)
        return Choice(plan, "The plan was given.")
    if strategy == "auto":
        from .tuning import auto

        return auto(request)
    matmul_fused = strategy == "fused" and problem.operator != EMBEDDING
    usual = lane_of_fused(lanes) if matmul_fused else request.lane
    grain, lane = parse_strategy(strategy, request.grains, lanes, usual)
    if grain == "fused" and problem.operator != EMBEDDING:
        refuse_fused(strategy, problem, lane, request.group)
    if grain == "fused" and request.block_rows is not None:
        made = tokens_plan(problem, lane, request.block_rows)
    else:
        made = default_plan(problem, grain, lane, request.by_program)
    made.check(problem)
    return Choice(made, "The strategy was given.")


def lane_of_fused(lanes: dict[str, str]) -> str:
    """Of a matmul where the strategy names none, by why each lane is not there: stored to peers, or posted."""
    return next((one for one in ("peer", "dma") if not lanes[one]), "net")


def near(group: Group) -> str:
    """The lane of rows that change ranks where a strategy names none: `peer` where all ranks stand on one node."""
    return "net" if group.fabric.lanes()["peer"] else "peer"


def refuse_fused(strategy: str, problem: Problem, lane: str, group: Group) -> None:
    """Refuse, by one sentence, a fused call that no kernel can do. Nothing else runs in its place."""
    reason = fused.why_not(problem, lane) or unavailable(group)
    if reason:
        lanes = group.fabric.lanes()
        there = [one for one in ("peer", "dma", "net") if not lanes[one]]
        possible = ", ".join([*(f"signaled:{one}" for one in there), *(f"serial:{one}" for one in there)])
        raise StrategyUnavailable(strategy=strategy, reason=reason, possible=possible)
