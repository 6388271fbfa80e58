"""The fabric's checks on the CPU fabric, at every rank count that makes a difference on two cores."""

from __future__ import annotations

import fabric_suite
import pytest

import undertow as ut

NAMES = sorted(fabric_suite.CHECKS)  # now: other files of a session add checks for GPUs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, ranks: int) -> None:
    ut.launch(fabric_suite.run, ranks, device="cpu", args=([name],), deadline=30)


@pytest.mark.parametrize("ranks", [1, 3])
def test_made_again_in_one_process(ranks: int) -> None:
    ut.launch(fabric_suite.again_and_again, ranks, device="cpu", deadline=20)


def test_all_checks_in_one_process() -> None:
    """Whatever a check leaves behind must not hurt the next."""
    ut.launch(fabric_suite.run, 2, device="cpu", args=(NAMES + NAMES[::-1],), deadline=30)
