"""embedding_all_to_all in a virtual node: ranks that share a GPU."""

from __future__ import annotations

import embedding_checks
import pytest

import undertow as ut


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_check(ranks: int) -> None:
    """All in one launch: a cold start costs as much as many checks."""
    names = list(embedding_checks.CHECKS)
    found = ut.launch(embedding_checks.run, ranks, device="cuda", args=(names,), deadline=60)[0]
    assert found["random_problems"] == 24
    assert found["posted_problems"] == 16
    assert found["posted_calls_in_a_row"] == found["the_host_waits_behind_posts"] == found["captured_posts"] == 2
    assert found["some_peers_are_reached"] == 8
    assert found["gradients"] > 0
    assert found["captured_calls"] == found["captured_results_are_not_copied"] == 3


@pytest.mark.parametrize("strategy", ["fused:peer", "fused:dma", "fused:net"])
def test_a_rank_that_does_not_come_is_noticed_at_the_deadline(strategy: str) -> None:
    results = ut.launch(embedding_checks.abandoned, 2, device="cuda", args=(strategy,), deadline=60)
    assert "failed after" in results[0], results
