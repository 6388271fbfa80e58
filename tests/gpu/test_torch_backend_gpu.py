"""The torch backend in a virtual node: ranks that share a GPU."""

from __future__ import annotations

import backend_checks
import pytest

import undertow as ut


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_backend(ranks: int) -> None:
    assert ut.launch(backend_checks.run, ranks, device="cuda", deadline=120) == [[]] * ranks
