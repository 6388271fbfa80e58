"""The matmul operators in a virtual node: ranks that share a GPU."""

from __future__ import annotations

import operator_checks
import pytest

import undertow as ut


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_check(ranks: int) -> None:
    """All in one launch: a cold start costs as much as many checks."""
    report = ut.launch(operator_checks.run, ranks, device="cuda", args=(list(operator_checks.CHECKS),), deadline=60)
    print("\n".join(report[0]))
