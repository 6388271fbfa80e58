"""Grouped weights: one for each of a rank's experts, in every grain, with gradients, uneven and empty groups."""

from __future__ import annotations

import grouped_targets as targets
import pytest

import undertow as ut

SEED = 516


@pytest.mark.parametrize("ranks", [2, 3])
def test_grouped_weights_are_exact(ranks: int) -> None:
    assert ut.launch(targets.exact, ranks, device="cpu", args=(SEED + ranks, 34)) == [34] * ranks


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_many_grouped_weights_are_exact(ranks: int) -> None:
    assert ut.launch(targets.exact, ranks, device="cpu", args=(SEED * ranks, 680)) == [680] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_grouped_weights_are_exact(ranks: int) -> None:
    assert ut.launch(targets.gradients, ranks, device="cpu", args=(SEED + ranks, 17)) == [17] * ranks


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_of_many_grouped_weights_are_exact(ranks: int) -> None:
    assert ut.launch(targets.gradients, ranks, device="cpu", args=(SEED * ranks, 340)) == [340] * ranks


def test_what_is_wrong_is_said_in_one_sentence() -> None:
    found = ut.launch(targets.refusals, 2, device="cpu", deadline=10)
    assert found[0][:9] == found[1][:9]
    for said, part in zip(
        found[0],
        (
            "group_sizes is None",
            "group_sizes says it",
            "given for one weight of shape [3, 5]",
            "nested as [2, 3]",
            "add up to 5",
            "counts from -1 on",
            "must be [2, 5]",
            "one for each of at least one expert",
            "has no signaled form; possible here: serial:",
            "of 3 experts on rank 1",
        ),
        strict=True,
    ):
        assert part in said, said
        assert said.endswith(".")
        assert ". " not in said


@pytest.mark.nightly
def test_grouped_weights_are_compiled_as_one_graph() -> None:
    assert ut.launch(targets.compiled, 2, device="cpu", deadline=60) == [True, True]
