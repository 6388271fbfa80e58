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
    assert found["gradients"] > 0
