"""Every program of the library, and what graphs and streams do to it, in a virtual node: ranks that share a GPU."""

from __future__ import annotations

import backend_checks
import collective_checks
import pytest

import undertow as ut


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_check(ranks: int) -> None:
    """All in one launch: a cold start costs as much as many checks."""
    report = ut.launch(collective_checks.run, ranks, device="cuda", args=(list(collective_checks.CHECKS),), deadline=60)
    print("\n".join(report[0]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_do_not_see_each_others_memory(ranks: int) -> None:
    """As GPUs of one node without peer access: the calls of `undertow.collective`, and the torch backend."""
    from undertow.fabric.cuda import OVERLAPPING  # needs a driver

    env = {OVERLAPPING: "0"}
    assert ut.launch(collective_checks.calls, ranks, device="cuda", deadline=60, env=env) == [[]] * ranks
    assert ut.launch(backend_checks.run, ranks, device="cuda", deadline=120, env=env) == [[]] * ranks


def test_a_rank_that_does_not_come_is_noticed_at_the_deadline() -> None:
    results = ut.launch(collective_checks.abandoned, 2, device="cuda", deadline=60)
    assert "failed after" in results[0], results
