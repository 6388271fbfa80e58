"""The matmul operators in a virtual node: ranks that share a GPU."""

from __future__ import annotations

import few_row_checks
import late_rank
import net_checks
import operator_checks
import posted_checks
import pytest
import staged_checks
import token_checks

import undertow as ut

TOKENS = [one.__name__ for one in token_checks.CHECKS]
STAGED = [one.__name__ for one in staged_checks.CHECKS]
FEW_ROWS = [one.__name__ for one in few_row_checks.CHECKS]
POSTED = [one.__name__ for one in posted_checks.CHECKS]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_check(ranks: int) -> None:
    """All in one launch: a cold start costs as much as many checks."""
    names = [one for one in operator_checks.CHECKS if one not in (*TOKENS, *STAGED, *FEW_ROWS, *POSTED)]
    report = ut.launch(operator_checks.run, ranks, device="cuda", args=(names,), deadline=60)
    print("\n".join(report[0]))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_few_rows(ranks: int) -> None:
    report = ut.launch(operator_checks.run, ranks, device="cuda", args=(FEW_ROWS,), deadline=60)
    print("\n".join(report[0]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens(ranks: int) -> None:
    report = ut.launch(operator_checks.run, ranks, device="cuda", args=(TOKENS,), deadline=60)
    print("\n".join(report[0]))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_posted(ranks: int) -> None:
    report = ut.launch(operator_checks.run, ranks, device="cuda", args=(POSTED,), deadline=60)
    print("\n".join(report[0]))


def test_posted_where_ranks_do_not_see_each_others_memory() -> None:
    """As between nodes: the memory is each rank's own."""
    from undertow.fabric.cuda import OVERLAPPING  # needs a driver

    names = [one for one in POSTED if one != posted_checks.posted_gradients_and_norms.__name__]  # against `peer`
    env = {OVERLAPPING: "0"}
    report = ut.launch(operator_checks.run, 2, device="cuda", args=(names,), deadline=60, env=env)
    print("\n".join(report[0]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_staged_lane(ranks: int) -> None:
    """With three ranks or more, pieces of several peers go in one copy."""
    names = [*STAGED, "program_moves_before_the_matmul_ends", "captured_signaled_calls_replay"]
    report = ut.launch(operator_checks.run, ranks, device="cuda", args=(names,), deadline=60)
    print("\n".join(report[0]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_fused_kernels_without_tma(ranks: int) -> None:
    report = ut.launch(token_checks.plain, ranks, device="cuda", deadline=60)
    print("\n".join(report[0]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_net_by_the_backend(ranks: int) -> None:
    env = {"UNDERTOW_NET": "backend"}
    assert min(ut.launch(net_checks.in_rounds, ranks, device="cuda", deadline=60, env=env)) > 40


@pytest.mark.parametrize("name", list(late_rank.CALLS))
def test_a_rank_does_not_come(name: str) -> None:
    """Whoever poisons: a kernel of the call, a launch behind it."""
    report = ut.launch(late_rank.operator_without_the_last, 3, device="cuda", args=(name,), deadline=60)
    assert report[-1] == "slept"
    assert all(one.startswith("failed") for one in report[:-1])
