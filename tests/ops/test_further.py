"""all_gather_matmul with several weights, and with the gathered rows."""

from __future__ import annotations

import re

import further_targets as targets
import pytest

import undertow as ut

SEED = 77


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_several_weights_are_exact(ranks: int) -> None:
    counts = ut.launch(targets.exact, ranks, device="cpu", args=(SEED, 44), deadline=20)
    assert set(counts) == {counts[0]}
    assert counts[0] > 80


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_many_are_exact(ranks: int) -> None:
    ut.launch(targets.exact, ranks, device="cpu", args=(SEED * ranks, 500), deadline=30)
    ut.launch(targets.gradients, ranks, device="cpu", args=(SEED * ranks, 200), deadline=30)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_their_gradients(ranks: int) -> None:
    assert ut.launch(targets.gradients, ranks, device="cpu", args=(SEED, 22), deadline=20) == [22] * ranks


def test_in_one_graph() -> None:
    assert ut.launch(targets.in_a_graph, 2, device="cpu") == [[True, True]] * 2


@pytest.mark.parametrize("gradients", [False, True])
def test_refusals_are_one_sentence_and_the_group_goes_on(gradients: bool) -> None:
    for said in ut.launch(targets.refused, 2, device="cpu", args=(gradients,), deadline=20):
        out, outs = said.pop("out"), said.pop("outs")
        assert outs.startswith(f"InvalidArgument: out is {'given' if gradients else 'in memory that the call'}")
        assert said == {
            "none": "InvalidArgument: w is no weight, but must be a weight, or several.",
            "bias": "InvalidArgument: bias is 1 of them, but must be one for each of 2 weights.",
            "biases": "InvalidArgument: bias is [3] torch.float32 on cpu, but must be [5] torch.float32 on cpu.",
            "activation": "InvalidArgument: activation is 'tanh', but must be one of none, relu, gelu, silu.",
            "one bias": "InvalidArgument: bias is several, but must be one, as w is one weight.",
            "no activation": "InvalidArgument: activation is None, but must be the name of one, as w is one weight.",
            "shape": "InvalidArgument: w is of shape [3, 5], but must be of 4 rows, as x has columns.",
            "dtype": "InvalidArgument: w is of torch.bfloat16, but must be of torch.float32, as x is.",
            "usable": "True",
        }
        assert out == (
            "InvalidArgument: out is given, but must be None where gradients are taken or torch traces: call under"
            " torch.no_grad(), or do it apart."
            if gradients
            else "InvalidArgument: out is [1, 1] torch.float32 on cpu, but must be contiguous [6, 5] torch.float32"
            " on cpu."
        )


def test_results_with_gradients_may_be_changed_in_place() -> None:
    assert ut.launch(targets.changed_in_place, 2, device="cpu") == [True, True]


def test_what_is_known_of_one_product_is_not_of_several() -> None:
    assert ut.launch(targets.known_apart, 2, device="cpu") == [3, 3]


def test_ranks_that_want_different_things_are_told() -> None:
    for said in ut.launch(targets.told_different_things, 2, device="cpu", deadline=3):
        assert re.match(r"MismatchedCall: Ranks of group 0 disagree on call \d+: .*rows kept", said), said


def test_an_aborted_call_poisons_all_it_was_given() -> None:
    assert ut.launch(targets.aborted, 2, device="cpu") == [["poisoned", "poisoned"]] * 2


def test_rows_are_scattered_as_they_are_told() -> None:
    assert ut.launch(targets.scattered_by_rows, 3, device="cpu") == [True] * 3
