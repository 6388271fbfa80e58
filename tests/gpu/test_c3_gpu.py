"""Computation beside collectives on a GPU: in a virtual node with real ones, and on a divided card."""

from __future__ import annotations

import c3_checks
import pytest

import undertow as ut


@pytest.mark.parametrize("ranks", [2, 4])
def test_everything_beside_everything(ranks: int) -> None:
    print("\n".join(ut.launch(c3_checks.everything, ranks, device="cuda", args=(ranks == 2,), deadline=60)[0]))


def test_a_divided_card() -> None:
    print(ut.launch(c3_checks.divided, 1, device="cuda", deadline=60)[0])
