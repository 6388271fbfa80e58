"""The fused grain of the operators in real ranks: exact whatever the plan, with every option, many calls in a row."""

from __future__ import annotations

import re

import fused_targets as targets
import pytest

import undertow as ut
from undertow.plan import fused

SEED = 4070


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_fused_plan_is_exact(ranks: int) -> None:
    for forms in ut.launch(targets.random_plans, ranks, device="cpu", args=(SEED + ranks, 70)):
        assert min(forms.values()) >= 2, forms
        assert sum(forms.values()) == 70


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_any_of_many_fused_plans_is_exact(ranks: int) -> None:
    for forms in ut.launch(targets.random_plans, ranks, device="cpu", args=(SEED * ranks, 2000)):
        assert min(forms[fused.DECODE], forms[fused.OWNED]) > 50


def test_calls_of_all_kinds_in_a_row() -> None:
    for grains in ut.launch(targets.mixed_calls, 3, device="cpu", args=(SEED, 120)):
        assert min(grains.values()) > 5


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_thousand_calls_of_all_kinds_in_a_row(ranks: int) -> None:
    for grains in ut.launch(targets.mixed_calls, ranks, device="cpu", args=(SEED + ranks, 10000)):
        assert sum(grains.values()) == 10000


def test_norms_and_residuals_follow_a_fused_call() -> None:
    assert ut.launch(targets.norms_and_residuals, 2, device="cpu") == [True, True]


def test_plans_do_not_depend_on_what_a_rank_knows_alone() -> None:
    assert ut.launch(targets.ranks_differ_in_k, 3, device="cpu", deadline=20) == [True] * 3


def test_a_fused_call_is_explained() -> None:
    for name, reason in ut.launch(targets.explained, 2, device="cpu"):
        assert name == "fused:peer"
        assert reason == "The strategy was given."


def test_a_tile_that_never_comes_is_an_error_at_the_deadline() -> None:
    found = ut.launch(targets.a_missing_word_is_an_error, 2, device="cpu", deadline=2)
    for rank, one in enumerate(found):
        assert re.match(r"RankLost: Rank \d of group 0 is lost: signal \d+ stood at 0 instead of 1 for 2 s[;.]", one), (
            rank,
            one,
        )


def test_a_word_may_have_another_writer_in_the_next_call() -> None:
    """The next call neither ends a wait of this one nor loses its own word to a late writer of this one."""
    for found in ut.launch(targets.contested_words, 3, device="cpu", deadline=10):
        assert found == dict.fromkeys(found, (False, True))
        assert len(found) == 6


def test_a_call_without_room_ends_no_group() -> None:
    for said in ut.launch(targets.no_room, 2, device="cpu", deadline=10):
        # all_reduce finds the room that reduce_scatter made
        assert len(said) == 2, said
        assert all("no room" in one for one in said)


def test_auto_leaves_fused_plans_out_beside_another_group() -> None:
    for alone, beside, said in ut.launch(targets.other_groups, 3, device="cpu"):
        assert alone == ""
        assert "may run kernels on the same device" in beside
        assert "nobody knows" in said
