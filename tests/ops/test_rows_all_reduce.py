"""rows_all_reduce in real ranks: any computation of rows, summed part by part, with gradients."""

from __future__ import annotations

import pytest
import rows_targets as targets

import undertow as ut


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_exact_with_gradients(ranks: int) -> None:
    assert all(ut.launch(targets.exact, ranks, device="cpu", args=((0, 1, 3, 10),)))


def test_auto_is_serial_as_it_measures_nothing() -> None:
    want = ("serial:peer", "Nothing is measured for this operator, so serial runs.")
    assert ut.launch(targets.what_auto_runs, 2, device="cpu") == [want, want]


def test_some_gradients() -> None:
    assert all(ut.launch(targets.some_wanted, 2, device="cpu"))


def test_rows_of_any_form() -> None:
    assert all(ut.launch(targets.odd_rows, 2, device="cpu"))


def test_what_computations_must_not_do() -> None:
    for said in ut.launch(targets.refused_computations, 2, device="cpu"):
        assert said[0] == (
            "compute is one that changes in place what its gradient needs, but must be one that makes a new tensor"
            " there."
        )
        assert "compute is one that gives [4, 1] of 4 rows, but must be one that gives [4, 3]." in said[1]


def test_ranks_that_want_different_gradients_are_told() -> None:
    for said in ut.launch(targets.wanted_by_one, 2, device="cpu", deadline=3):
        assert said.startswith("MismatchedCall: "), said
        assert "gradients of rows [0]" in said


def test_checkpointing() -> None:
    assert all(ut.launch(targets.checkpointed, 2, device="cpu"))


def test_parts_move_beneath_the_next_parts() -> None:
    found = {
        strategy: ut.launch(targets.hidden, 2, device="cpu", args=(strategy,), env={"UNDERTOW_DMA_PACE": "200MB/s"})
        for strategy in ("chunked:dma", "serial:dma")
    }
    for way in (0, 1):
        overlapped, serial = (max(one[way] for one in found[name]) for name in ("chunked:dma", "serial:dma"))
        assert overlapped > 0.15, found
        assert overlapped > serial, found
