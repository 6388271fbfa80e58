"""Which plan runs: the best few are measured beside serial, and one is chosen only if it was faster.

    1. a short list, the same on all ranks: the serial plan predicted fastest, the best of each grain and lane, then
       the second of each, of clearly more or fewer parcels, since neighbours in the ranking are near copies of each
       other; the best serial plan over another lane
    2. rounds: every plan of the list once, in turn, so that drift meets all of them, and after the first round the
       fastest first: what time is left is theirs; those that were clearly slower each of at least three times leave
    3. the smallest median is chosen, if it beats serial by more than `TIE` (by more where there was time for one or two
       measurements only: `DOUBTFUL`); else serial is

Time is counted by what was measured, so every rank, being told the same seconds, takes the same path: no clock decides.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidArgument
from .fused import at_once
from .plan import Plan

if TYPE_CHECKING:
    from .problem import Problem

BUDGET_SECONDS = 0.2
TIE = 0.01
"""A plan that is faster than serial by no more than this is as fast as serial."""
DOUBTFUL = (0.03, 0.02)
"""Of one measurement of each, or two, some may be chance: then a plan must be faster than serial by so much."""
MOST_ROUNDS = 9
_MOST = 6
_SERIALS = 2
_ALIKE = 2
_OTHER = 1.3  # times as many parcels: another plan
_HOPELESS = 1.25

Measure = Callable[[Plan], float]
"""Seconds of one call, already the maximum over the ranks. A plan that cannot run takes infinitely long."""
Agree = Callable[[str], str]
"""What the group's first rank passes, on every rank."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate: what it was predicted to take (None: nobody asked), and each measurement of it."""

    plan: Plan
    predicted: float | None
    measured: tuple[float, ...]

    @property
    def median(self) -> float | None:
        return statistics.median(self.measured) if self.measured else None


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan to run, all candidates that were considered, and the reason in one sentence."""

    plan: Plan
    trials: tuple[Trial, ...]
    reason: str

    @property
    def serial_seconds(self) -> float | None:
        """The median of the fastest serial plan that was measured."""
        return min((one.median for one in self.trials if _is_serial(one.plan) and one.median is not None), default=None)


def tune(
    problem: Problem,
    candidates: Sequence[Plan],
    measure: Measure,
    agree: Agree,
    *,
    predicted: Callable[[Plan], float] | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    calls: int = 1,
    warm: Callable[[Plan], None] | None = None,
    beside: float = 0.0,
) -> Decision:
    """Measure serial and the best few of `candidates`, which stand in the order of their prediction, and choose.

    `calls`: how many calls one `measure` makes; each counts against the budget, and so do the seconds `beside` each
    that it does not tell of. `warm` runs a plan once before it is
    first measured, and counts as one more of its calls: what is done only once (compiling, opening a lane) is no
    reason to leave others unmeasured.
    """
    plans = _agreed_list(problem, candidates, agree)
    guesses = [predicted(plan) if predicted is not None else None for plan in plans]
    times = _rounds(plans, measure, warm, budget_seconds / calls, beside)
    trials = tuple(Trial(plan, guess, tuple(taken)) for plan, guess, taken in zip(plans, guesses, times, strict=True))
    chosen, reason = choose(trials)
    return Decision(Plan.from_json(agree(chosen.to_json())), trials, reason)


def short_list(candidates: Sequence[Plan]) -> list[Plan]:
    """What is worth measuring: serial first, then the best of each kind."""
    lanes = {plan.name: plan for plan in reversed(candidates) if _is_serial(plan)}  # the best of each
    serial = [plan for plan in candidates if plan in lanes.values()][:_SERIALS]
    if not serial:
        raise InvalidArgument(argument="candidates", was=f"{len(candidates)} plans", must="plans with a serial one")
    alike: dict[tuple[object, ...], list[Plan]] = {}
    for plan in candidates:
        of_gathers = (plan.tile, plan.split) if at_once(plan) else ()  # of which there are several kinds
        kind = alike.setdefault((plan.name, plan.order, *of_gathers), [])
        if not _is_serial(plan) and len(kind) < _ALIKE and all(_is_other(plan, one) for one in kind):
            kind.append(plan)
    others = [kind[at] for at in range(_ALIKE) for kind in alike.values() if at < len(kind)]
    return [*serial[:1], *others[:_MOST], *serial[1:]]


def _is_other(plan: Plan, one: Plan) -> bool:
    """Whether they differ by more than their parcels' edges. Of fused plans every one does."""
    fewer, more = sorted((len(plan.parcels), len(one.parcels)))
    return plan.grain == "fused" or more >= _OTHER * fewer


def choose(trials: Sequence[Trial]) -> tuple[Plan, str]:
    """The plan and the reason, from what was measured: a function of the trials alone."""
    serial = min((one for one in trials if _is_serial(one.plan)), key=_median)
    others = [one for one in trials if not _is_serial(one.plan)]
    if not others:
        return serial.plan, "There is nothing to overlap in this problem, so serial runs."
    best = min(others, key=_median)
    if best.median is None:
        return serial.plan, f"A serial call takes {_time(serial)}: no time was left to measure others, so serial runs."
    counted = min(len(best.measured), len(serial.measured))
    if _median(best) < _median(serial) * (1 - ([*DOUBTFUL, TIE][min(counted, len(DOUBTFUL) + 1) - 1])):
        gain = _median(serial) / _median(best)
        how = f"{gain:.2f} times as fast" if math.isfinite(gain) else "which cannot run"
        return (
            best.plan,
            f"{_name(best)} took {_time(best)} and serial {_time(serial)}: {how}, by the median of {_count(best)}.",
        )
    return (
        serial.plan,
        f"Serial took {_time(serial)} and the best of {len(others)} others, {_name(best)}, {_time(best)}: "
        "no faster, so serial runs.",
    )


def _rounds(
    plans: Sequence[Plan], measure: Measure, warm: Callable[[Plan], None] | None, budget_seconds: float, beside: float
) -> list[list[float]]:
    """The measurements of each plan. Whatever would not fit into the budget is not begun."""
    times: list[list[float]] = [[] for _ in plans]
    running = list(range(len(plans)))
    spent = 0.0
    for number in range(MOST_ROUNDS):
        if number:
            running.sort(key=lambda index: statistics.median(times[index]))  # stable, and the same on all ranks
        for index in running:
            guess = statistics.median(times[index]) if times[index] else _shortest(times)
            calls = 2 if warm is not None and not times[index] else 1
            fits = spent + calls * guess + beside <= budget_seconds
            if (number or index) and not fits:  # serial, the first, always runs
                return times
            if warm is not None and not times[index]:
                warm(plans[index])
            seconds = float(measure(plans[index]))
            times[index].append(seconds if seconds >= 0 else math.inf)  # not a number: it did not run
            spent += calls * seconds + beside if math.isfinite(seconds) else 0.0
        limit = _HOPELESS * min(min(taken) for taken in times) if number >= 2 else math.inf  # twice may be chance
        running = [
            index
            for index in running
            if _is_serial(plans[index]) or (min(times[index]) <= limit and math.isfinite(min(times[index])))
        ]
        if all(_is_serial(plans[index]) for index in running):
            break
    return times


def _shortest(times: Sequence[Sequence[float]]) -> float:
    """What a plan that never ran may take: as long as the fastest so far. Predictions do not rule over the budget."""
    return min((min(taken) for taken in times if taken and math.isfinite(min(taken))), default=0.0)


def _agreed_list(problem: Problem, candidates: Sequence[Plan], agree: Agree) -> list[Plan]:
    mine = json.dumps([plan.to_json() for plan in short_list(candidates)])
    plans = [Plan.from_json(text) for text in json.loads(agree(mine))]
    for plan in plans:
        plan.check(problem)
    return plans


def _is_serial(plan: Plan) -> bool:
    return plan.grain == "serial"


def _median(trial: Trial) -> float:
    return math.inf if trial.median is None else trial.median


def _name(trial: Trial) -> str:
    parcels = len(trial.plan.parcels)
    return f"{trial.plan.name} in {parcels} parcel{'s' if parcels != 1 else ''}"


def _count(trial: Trial) -> str:
    return f"{len(trial.measured)} measurement{'s' if len(trial.measured) != 1 else ''}"


def _time(trial: Trial) -> str:
    seconds = _median(trial)
    return f"{seconds * 1e3:.3g} ms" if math.isfinite(seconds) else "for ever"
