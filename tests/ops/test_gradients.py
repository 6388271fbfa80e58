"""Gradients of the operators: exact against the unsharded computation, and overlapped."""

from __future__ import annotations

import gradient_targets as targets
import pytest
import torch

import undertow as ut

NAMES = tuple(targets.OPERATORS)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_part_of_all_gradients_is_exact(ranks: int) -> None:
    counts = ut.launch(targets.exact, ranks, device="cpu", args=(0.12, 7 * ranks))
    assert min(counts) > 80


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_gradients_are_exact(ranks: int) -> None:
    assert min(ut.launch(targets.exact, ranks, device="cpu", args=(1.1, 1))) > 900


def test_gradients_that_nobody_asks_for() -> None:
    assert ut.launch(targets.some_gradients_only, 2, device="cpu") == [True, True]


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
    for name in NAMES:
        assert max(ut.launch(targets.directional, 3, device="cpu", args=(name,))) < 1e-7, name


@pytest.mark.parametrize("name", [name for name in NAMES if name != "matmul_all_reduce"])
def test_the_backward_pass_moves_beneath_its_matmuls(name: str) -> None:
    """matmul_all_reduce is left out: its backward moves nothing."""
    pace = {"UNDERTOW_DMA_PACE": "200MB/s"}
    parts = ut.launch(targets.hidden, 2, device="cpu", args=(name, "chunked:dma"), env=pace)
    serial = ut.launch(targets.hidden, 2, device="cpu", args=(name, "serial:dma"), env=pace)
    assert max(parts) > 0.15, (parts, serial)
    assert max(parts) > max(serial), (parts, serial)
