"""The operators inside torch: torch.compile, opcheck, checkpointing, autocast, DDP and FSDP2 beside them."""

from __future__ import annotations

import gradient_targets
import library_targets as targets
import pytest

import undertow as ut


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_torch_accepts_the_operators(whole: bool) -> None:
    for names in ut.launch(targets.checked, 2, device="cpu", args=(whole,)):
        assert len(names) == 13


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_one_graph(every: bool) -> None:
    names = list(gradient_targets.OPERATORS) if every else ["matmul_reduce_scatter", "all_gather_matmul"]
    assert ut.launch(targets.compiled, 2, device="cpu", args=("aot_eager", names)) == [names] * 2


@pytest.mark.nightly
def test_one_graph_by_the_real_compiler() -> None:
    names = list(gradient_targets.OPERATORS)
    assert ut.launch(targets.compiled, 2, device="cpu", args=("inductor", names), deadline=300) == [names] * 2


def test_the_group_of_a_graph() -> None:
    assert ut.launch(targets.compiled_on_all_ranks, 2, device="cpu") == [True, True]


def test_checkpointing() -> None:
    assert ut.launch(targets.checkpointed, 2, device="cpu") == [True, True]


def test_autocast() -> None:
    found = ut.launch(targets.under_autocast, 2, device="cpu")
    assert found == [["torch.bfloat16", "torch.float32", "torch.float32"]] * 2


@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_another_dimension(wrap: str) -> None:
    assert max(ut.launch(targets.other_dimension, 4, device="cpu", args=(wrap,))) < 1e-12


def test_refusals() -> None:
    for found in ut.launch(targets.refusals, 2, device="cpu"):
        apart = "None where gradients are taken or torch traces: call under torch.no_grad(), or do it apart"
        assert found["out"] == f"out is given, but must be {apart}."
        assert found["norm"] == f"norm is given, but must be {apart}."
        assert found["activation"] == "activation is 'tanh', but must be one of none, relu, gelu, silu."
        assert found["rows"] == ("rows is [1, 2], but must be 2 counts of at least 0 that add up to 6, the rows of x.")
        assert found["grain"].startswith("Strategy 'signaled' is not available: this operator has no signaled form;")
        assert found["fp8"] == (
            "x is of torch.float8_e4m3fn, but must be one of float64, float32, bfloat16, float16;"
            " fp8 is not supported yet, .to(torch.bfloat16) is the way for now."
        )
        assert (
            "splits is 2 counts, but must be the matrix splits[sender][destination] of 2 x 2 counts" in found["splits"]
        )
