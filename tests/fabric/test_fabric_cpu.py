"""The fabric's checks on the CPU fabric, at every rank count that makes a difference on two cores."""

from __future__ import annotations

import fabric_suite
import pytest

import undertow as ut


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(fabric_suite.CHECKS))
def test_check(name: str, ranks: int) -> None:
    ut.launch(fabric_suite.run, ranks, device="cpu", args=([name],), deadline=30)


def test_all_checks_in_one_process() -> None:
    """Whatever a check leaves behind must not hurt the next."""
    names = sorted(fabric_suite.CHECKS)
    ut.launch(fabric_suite.run, 2, device="cpu", args=(names + names[::-1],), deadline=30)
