"""The tuner with made-up measurements: it is deterministic, keeps to its budget, and never prefers noise to serial."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable

import plan_machines as machines
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.errors import InvalidArgument
from undertow.plan.plan import Plan, split
from undertow.plan.search import candidates
from undertow.plan.tuner import BUDGET_SECONDS, MOST_ROUNDS, TIE, Decision, Trial, choose, short_list, tune

PROBLEM = machines.problem(m=64, n=64, k=64)
SERIAL = Plan("serial", "net", ((0, 64),))
OTHER_SERIAL = Plan("serial", "dma", ((0, 64),))
HALVES = Plan("chunked", "dma", split(64, 2))
QUARTERS = Plan("chunked", "dma", split(64, 4))
EIGHTHS = Plan("chunked", "dma", split(64, 8))
TILES = Plan("signaled", "peer", split(4, 2), tile=(16, 64))
ALL = [TILES, HALVES, QUARTERS, SERIAL, EIGHTHS]


def run(times: dict[Plan, float] | Callable[[Plan], float], plans: list[Plan] = ALL, **options: float) -> Decision:
    measure = times if callable(times) else times.__getitem__
    return tune(PROBLEM, plans, measure, lambda text: text, **options)  # type: ignore[arg-type]


def test_the_fastest_is_chosen() -> None:
    found = run({SERIAL: 3e-3, TILES: 2e-3, HALVES: 2.5e-3, QUARTERS: 2.6e-3})
    assert found.plan == TILES
    assert found.reason == (
        f"signaled:peer in 2 parcels took 2 ms and serial 3 ms: 1.50 times as fast, by the median of {MOST_ROUNDS} "
        "measurements."
    )
    assert found.serial_seconds == 3e-3
    assert [trial.plan for trial in found.trials] == [SERIAL, TILES, HALVES, QUARTERS]  # two of a kind at most


def test_ties_go_to_serial() -> None:
    for factor in (1.0, 1.1, 1 - TIE):
        found = run({SERIAL: 3e-3, TILES: 3e-3 * factor, HALVES: 9e-3, QUARTERS: 9e-3})
        assert found.plan == SERIAL
        assert "no faster, so serial runs" in found.reason
    assert run({SERIAL: 3e-3, TILES: 2.9e-3, HALVES: 9e-3, QUARTERS: 9e-3}).plan == TILES


def test_the_strongest_serial_is_the_one_to_beat() -> None:
    found = run({SERIAL: 3e-3, OTHER_SERIAL: 2e-3, TILES: 2.5e-3}, [TILES, SERIAL, OTHER_SERIAL])
    assert found.plan == OTHER_SERIAL


def test_the_hopeless_leave_after_the_third_round() -> None:
    asked: Counter[Plan] = Counter()

    def measure(plan: Plan) -> float:
        asked[plan] += 1
        return {SERIAL: 1e-3, TILES: 0.5e-3, HALVES: 3e-3, QUARTERS: 0.55e-3}[plan]

    assert run(measure).plan == TILES
    assert asked == {SERIAL: MOST_ROUNDS, TILES: MOST_ROUNDS, HALVES: 3, QUARTERS: MOST_ROUNDS}


@given(st.floats(1e-6, 0.3), st.floats(1e-6, 0.3), st.floats(1e-6, 0.3), st.integers(1, 3))
def test_the_budget_is_kept(serial: float, tiles: float, chunks: float, calls: int) -> None:
    spent = 0.0

    def measure(plan: Plan) -> float:
        nonlocal spent
        seconds = {SERIAL: serial, TILES: tiles}.get(plan, chunks)
        spent += seconds * calls
        return seconds

    found = run(measure, calls=calls)
    # A plan may take longer than could be known before it ran once; three plans are unknown.
    assert spent <= BUDGET_SECONDS + calls * (serial + tiles + 2 * chunks)
    assert found.trials[0].measured
    known = run({SERIAL: 0.15, TILES: 0.1, HALVES: 0.1, QUARTERS: 0.1})
    assert known.plan == SERIAL
    assert known.reason == "A serial call takes 150 ms: no time was left to measure others, so serial runs."


def test_more_time_measures_more() -> None:
    times = {SERIAL: 0.15, TILES: 0.1, HALVES: 0.1, QUARTERS: 0.1}
    assert run(times, budget_seconds=2.0).plan == TILES


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_beat_serial_and_a_gain_survives_it(seed: int) -> None:
    noise = random.Random(seed)

    def measure(plan: Plan) -> float:
        truth = {SERIAL: 1e-3, TILES: 0.7e-3}.get(plan, 1.05e-3)
        return truth * (1 + 0.02 * noise.gauss(0, 1)) * (5 if noise.random() < 0.1 else 1)  # and a stumble now and then

    assert run(measure).plan == TILES
    slower = {HALVES, QUARTERS, SERIAL}
    assert run(measure, [HALVES, QUARTERS, SERIAL]).plan in slower
    assert run(measure, [HALVES, SERIAL]).plan == SERIAL


def test_a_plan_that_cannot_run_takes_for_ever() -> None:
    for never in (math.inf, math.nan):
        found = run({SERIAL: 1e-3, TILES: never, HALVES: 2e-3, QUARTERS: 2e-3})
        assert found.plan == SERIAL
        assert found.trials[1].median == math.inf
    assert run({SERIAL: math.inf, TILES: 1e-3, HALVES: 2e-3, QUARTERS: 2e-3}).plan == TILES
    assert run({SERIAL: 1e-3, TILES: math.inf}, [TILES, SERIAL]).reason.endswith("for ever: no faster, so serial runs.")


def test_only_serial() -> None:
    found = run({SERIAL: 1e-3}, [SERIAL])
    assert found.plan == SERIAL
    assert found.reason == "There is nothing to overlap in this problem, so serial runs."
    assert len(found.trials[0].measured) == 1
    with pytest.raises(InvalidArgument, match="plans with a serial one"):
        run({TILES: 1e-3}, [TILES])


def test_all_ranks_measure_and_run_what_the_first_rank_says() -> None:
    """This rank ranks the plans differently and measured nonsense; the first rank's list and choice hold."""
    said = [json.dumps([SERIAL.to_json(), HALVES.to_json()]), HALVES.to_json()]
    asked = []

    def measure(plan: Plan) -> float:
        asked.append(plan)
        return {SERIAL: 1e-3, HALVES: 2e-3}[plan]

    found = tune(PROBLEM, ALL, measure, lambda _: said.pop(0))
    assert found.plan == HALVES
    assert set(asked) == {SERIAL, HALVES}


def test_a_list_for_another_problem_is_refused_before_anything_runs() -> None:
    foreign = json.dumps([Plan("serial", "net", ((0, 65),)).to_json()])
    with pytest.raises(InvalidArgument, match="made for 64 rows"):
        tune(PROBLEM, ALL, lambda plan: pytest.fail("measured"), lambda _: foreign)


def test_predictions_are_kept_beside_measurements() -> None:
    found = tune(PROBLEM, ALL, lambda plan: 1e-3, lambda text: text, predicted=lambda plan: float(len(plan.parcels)))
    assert [trial.predicted for trial in found.trials] == [1.0, 2.0, 2.0, 4.0]
    assert all(trial.median == 1e-3 for trial in found.trials)


def test_the_short_list_of_real_candidates_is_varied() -> None:
    found = short_list(candidates(machines.problem(), machines.machine(), ["dma", "peer"]))
    assert found[0].grain == "serial"
    assert {plan.name for plan in found} >= {"signaled:dma", "chunked:dma", "signaled:peer", "chunked:peer"}
    assert len(found) <= 8


def test_choosing_is_a_function_of_the_trials() -> None:
    trials = (Trial(SERIAL, None, (2.0, 9.0, 2.0)), Trial(TILES, 1.0, (1.0, 1.0, 8.0)))
    assert choose(trials)[0] == TILES
    assert choose(trials) == choose(trials)


def test_serial_over_another_lane_comes_last_and_near_copies_do_not_come() -> None:
    again = Plan("serial", "net", split(64, 2))
    found = short_list([TILES, SERIAL, HALVES, again, OTHER_SERIAL, Plan("chunked", "dma", split(64, 3)), QUARTERS])
    assert found == [SERIAL, TILES, HALVES, Plan("chunked", "dma", split(64, 3)), OTHER_SERIAL]
    near = [Plan("chunked", "dma", split(64, parts)) for parts in (8, 9, 10, 11)]
    assert short_list([SERIAL, *near]) == [SERIAL, near[0], near[3]]


def test_what_time_is_left_goes_to_the_fastest() -> None:
    asked: list[Plan] = []

    def measure(plan: Plan) -> float:
        asked.append(plan)
        return {SERIAL: 30e-3, TILES: 22e-3, HALVES: 20e-3, QUARTERS: 29e-3}[plan]

    assert run(measure).plan == HALVES
    assert asked[:4] == [SERIAL, TILES, HALVES, QUARTERS]
    assert asked[4:] == [HALVES, TILES, QUARTERS]  # and no time for serial


def test_one_measurement_is_less_sure_than_three() -> None:
    def trials(count: int, gain: float) -> tuple[Trial, Trial]:
        return Trial(SERIAL, None, (1.0,) * count), Trial(TILES, None, (1 - gain,) * count)

    for count, gain, plan in ((1, 0.025, SERIAL), (1, 0.035, TILES), (2, 0.015, SERIAL), (2, 0.025, TILES)):
        assert choose(trials(count, gain))[0] == plan
    assert choose(trials(3, 0.015))[0] == choose(trials(9, 0.015))[0] == TILES


def test_what_a_measurement_costs_beside_counts_against_the_budget() -> None:
    times = dict.fromkeys(ALL, 1e-3)
    plain, costly = (run(times, budget_seconds=0.0205, beside=beside) for beside in (0.0, 3e-3))
    counts = [sum(len(trial.measured) for trial in found.trials) for found in (plain, costly)]
    assert counts[0] == 20
    assert counts[1] == 5
