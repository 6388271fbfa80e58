"""Residual add, RMSNorm and LayerNorm after a matmul: right in every grain, lane and layout, and clear refusals."""

from __future__ import annotations

import norm_targets as targets
import pytest

import undertow as ut

SEED = 90125


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_part_of_all_that_may_follow_is_right(ranks: int) -> None:
    counts = ut.launch(targets.what_follows_is_right, ranks, device="cpu", args=(SEED + ranks, 0.4))
    assert set(counts) == {counts[0]}
    assert counts[0] > 60


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_that_may_follow_is_right(ranks: int) -> None:
    assert ut.launch(targets.what_follows_is_right, ranks, device="cpu", args=(SEED, 1.1)) == [216] * ranks


def test_norms_are_exact_where_mathematics_allows() -> None:
    for found in ut.launch(targets.exact_norms, 2, device="cpu"):
        assert found == [True] * 12


def test_bad_input_is_one_sentence_and_the_group_goes_on() -> None:
    for found in ut.launch(targets.refusals, 2, device="cpu", deadline=20):
        assert found.pop("ranks").startswith("MismatchedCall: Ranks of group 0 disagree on call")
        assert found == {
            "shape": (
                "InvalidArgument: residual is [5, 6] torch.float32 on cpu, but must be contiguous [6, 5] torch.float32"
                " on cpu, as the result."
            ),
            "dtype": (
                "InvalidArgument: residual is [6, 5] torch.float64 on cpu, but must be contiguous [6, 5] torch.float32"
                " on cpu, as the result."
            ),
            **dict.fromkeys(
                ("aliased", "over x", "over the norm"),
                "InvalidArgument: residual is in memory that the call has another use for, but must be a tensor of its"
                " own.",
            ),
            "half of out": "True",
            "out over the norm": (
                "InvalidArgument: out is in memory that the call has another use for, but must be a tensor of its own."
            ),
            "gradient": (
                "InvalidArgument: norm is given, but must be None where gradients are taken or torch traces: call under"
                " torch.no_grad(), or do it apart."
            ),
            "kind": "InvalidArgument: norm is a Linear, but must be a torch.nn.RMSNorm or a torch.nn.LayerNorm.",
            "width": "InvalidArgument: norm is over [6], but must be over [5], the columns of the result.",
            "type": "InvalidArgument: norm.weight is torch.float64 on cpu, but must be torch.float32 on cpu.",
            "parameter": (
                "InvalidArgument: norm.weight is a tensor that requires a gradient, but must be detached, or the call"
                " under torch.no_grad(): with gradients add and normalise apart."
            ),
            "usable": "True",
        }


def test_trials_leave_the_residual_alone() -> None:
    for found in ut.launch(targets.residuals_after_auto, 2, device="cpu", deadline=20):
        assert found == [4.0 * 2 + 1] * 8
