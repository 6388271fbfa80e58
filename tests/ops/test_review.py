"""What a hostile reader found in the operators, and must not come back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import review_targets

import undertow as ut
from undertow.errors import InvalidArgument
from undertow.plan import cache
from undertow.plan.defaults import default_plan
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem


@pytest.mark.parametrize("ranks", [2, 3])
def test_modes_few_tokens_and_long_pieces(ranks: int) -> None:
    targets = (review_targets.modes, review_targets.no_tokens_then_one, review_targets.long_pieces)
    for target in (*targets, review_targets.own_rows_apart):
        ut.launch(target, ranks, device="cpu", deadline=20)


@pytest.mark.parametrize("what", ["bias", "rows", "splits"])
def test_ranks_that_mean_different_calls_hear_of_it(what: str) -> None:
    found = ut.launch(review_targets.disagreeing, 2, "cpu", args=(what,), deadline=10, env={"UNDERTOW_CHECK": "1"})
    assert found == ["MismatchedCall"] * 2


def test_ranks_in_different_calls_that_were_made_before_hear_of_it() -> None:
    found = ut.launch(review_targets.known_calls, 2, "cpu", args=("serial:peer",), deadline=20)
    assert found == [["MismatchedCall", "MismatchedCall True", "MismatchedCall True"]] * 2


def test_a_forked_child_is_no_rank_and_an_interrupted_one_no_more() -> None:
    found = ut.launch(review_targets.forked_and_interrupted, 2, "cpu", deadline=20)
    lost = "Rank {} of group 0 is lost: its matmul_all_reduce was interrupted by KeyboardInterrupt."
    assert found == [("ForkedProcess", True, lost.format(rank)) for rank in (0, 1)]


def test_an_error_half_way_ends_the_group_at_once() -> None:
    began = time.monotonic()
    found = ut.launch(review_targets.half_way, 2, device="cpu", deadline=60)
    assert all(one != "nothing" for one in found)
    assert time.monotonic() - began < 30


def test_an_empty_plan_is_for_no_rows() -> None:
    common = {"dtype": "float32", "ranks": 2, "device": "cpu", "multiprocessors": 1}
    plan = Plan("signaled", "peer", ((0, 0),), tile=(4, 4), order="rotated")
    plan.check(Problem.of("all_gather_matmul", 0, 5, 3, **common))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        plan.check(Problem.of("all_gather_matmul", 8, 5, 3, **common))  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", [{"tile": [10**30, 4]}, {"group_bands": 10**30}, {"grain": "fused", "tile": None}])
def test_plans_beyond_reason_are_refused(damage: dict[str, object]) -> None:
    problem = Problem.of("matmul_all_reduce", 64, 8, 8, dtype="float32", ranks=2, device="cpu", multiprocessors=1)
    fields = json.loads(default_plan(problem, "signaled", "peer").to_json())
    with pytest.raises(InvalidArgument):
        Plan.from_json(json.dumps({**fields, **damage})).check(problem)


def test_numbers_beyond_reason_in_a_plan_file_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path))
    problem = Problem.of("matmul_all_reduce", 64, 8, 8, dtype="float32", ranks=2, device="cpu", multiprocessors=1)
    assert cache.store(problem, "here", {}, default_plan(problem, "serial", "peer"), "made by a test")
    path = cache.path_of(problem, "here", {})
    content = json.loads(path.read_text())
    content["trials"] = [["0", "serial:peer", float("inf"), 1.0, 1.0]]
    path.write_text(json.dumps(content))
    assert cache.load(problem, "here", {}) is None


def test_serial_parts_follow_what_all_ranks_share() -> None:
    common = {"dtype": "float32", "ranks": 2, "device": "cpu", "multiprocessors": 1}
    plans = [
        default_plan(Problem.of("all_gather_matmul", 1024, n, 64, **common), "serial", "peer") for n in (8192, 8191)
    ]  # type: ignore[arg-type]
    assert plans[0] == plans[1]
