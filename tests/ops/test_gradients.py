"""Gradients of the operators: exact against the unsharded computation, and overlapped."""

from __future__ import annotations

import gradient_targets as targets
import pytest
import torch

import undertow as ut

NAMES = tuple(targets.OPERATORS)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_part_of_all_gradients_is_exact(ranks: int) -> None:
    counts = ut.launch(targets.exact, ranks, device="cpu", args=(0.05, 7 * ranks))
    assert min(counts) > 40


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_gradients_are_exact(ranks: int) -> None:
    assert ut.launch(targets.exact, ranks, device="cpu", args=(1.1, 1)) == [1329] * ranks


def test_gradients_that_nobody_asks_for() -> None:
    assert ut.launch(targets.some_gradients_only, 2, device="cpu") == [True, True]


def test_ranks_that_want_different_gradients_are_told_so() -> None:
    for said in ut.launch(targets.different_gradients, 2, device="cpu", deadline=20):
        assert "rows gathered for a weight's gradient" in said


def test_residuals_plans_and_programs() -> None:
    assert ut.launch(targets.residual_and_options, 2, device="cpu") == [True, True]


def test_gradcheck_of_one_rank() -> None:
    ut.init()
    x, w, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (4, 3), (3,)))
    calls = (
        ut.matmul_all_reduce,
        ut.matmul_reduce_scatter,
        ut.all_gather_matmul,
        ut.matmul_all_to_all,
        ut.all_to_all_matmul,
    )
    for call in calls:
        for activation in ("none", "gelu", "silu"):
            torch.autograd.gradcheck(
                lambda *a, call=call, activation=activation: call(a[0], a[1], bias=a[2], activation=activation),
                (x, w, bias),
            )


def test_slopes_of_three_ranks() -> None:
    for found in ut.launch(targets.all_slopes, 3, device="cpu"):
        assert list(found) == list(NAMES)
        assert max(found.values()) < 1e-7, found


def test_the_backward_pass_moves_beneath_its_matmuls() -> None:
    """matmul_all_reduce is left out: its backward moves nothing."""
    found = ut.launch(targets.all_hidden, 2, device="cpu", env={"UNDERTOW_DMA_PACE": "200MB/s"})
    for name in NAMES[1:]:
        overlapped, serial = (max(one[name, strategy] for one in found) for strategy in ("chunked:dma", "serial:dma"))
        assert overlapped > 0.15, (name, found)
        assert overlapped > serial, (name, found)


def test_a_sum_that_all_hold_can_be_differentiated_twice() -> None:
    assert all(ut.launch(targets.twice, 2, device="cpu", deadline=20))
