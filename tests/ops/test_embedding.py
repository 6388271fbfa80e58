"""embedding_all_to_all in real ranks: exact whatever the strategy and the plan, and clear about bad input."""

from __future__ import annotations

import embedding_suite as suite
import embedding_targets as targets
import pytest

import undertow as ut

SEED = 7
RANKS = (2, 3, 4)


@pytest.mark.parametrize("ranks", RANKS)
def test_random_jagged_problems_are_exact(ranks: int) -> None:
    shards = ut.launch(suite.run, ranks, device="cpu", args=(SEED + ranks, 40))
    assert len(set(shards)) == 1
    assert 5 < shards[0] < 35


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, *RANKS, 8])
def test_many_random_jagged_problems_are_exact(ranks: int) -> None:
    ut.launch(suite.run, ranks, device="cpu", args=(SEED * ranks + 1, 800))


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_exact(ranks: int) -> None:
    assert min(ut.launch(suite.gradients, ranks, device="cpu", args=(SEED + ranks, 12))) > 2


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_many_gradients_are_exact(ranks: int) -> None:
    ut.launch(suite.gradients, ranks, device="cpu", args=(SEED * ranks, 200))


def test_as_torch_does_it() -> None:
    """embedding_bag, then torch.distributed's all_to_all_single; gradients by autograd through both."""
    assert ut.launch(targets.beside_torch, 3, device="cpu") == [True] * 3


def test_what_is_kept_between_calls() -> None:
    """Results of earlier calls stay as they are; `out` is filled; the plan and the reason can be read."""
    for said in ut.launch(targets.kept_results, 2, device="cpu"):
        assert "embedding_all_to_all(" in said
        assert "fused:peer" in said


def test_an_aborted_call_leaves_no_half_result() -> None:
    assert ut.launch(targets.aborted, 2, device="cpu", deadline=20) == [["poisoned", "no step"]] * 2


def test_adagrad_steps_rows() -> None:
    assert ut.launch(targets.adagrad, 2, device="cpu") == [True, True]


def test_bad_input_is_one_sentence_and_the_group_goes_on() -> None:
    for found in ut.launch(targets.refused, 2, device="cpu", deadline=20):
        for name, words in targets.SAID.items():
            for word in words:
                assert word in found[name], f"{name}: {found[name]}"
            assert found[name].count(". ") == 0
            assert found[name].endswith(".")


def test_ranks_that_disagree_hear_of_it() -> None:
    found = ut.launch(targets.disagreeing, 2, device="cpu", deadline=20)
    for said in found:
        assert "samples of every table" in said["samples"]
        assert "float64" in said["dtypes"]
        assert "disagree" in said["batches"]
        assert "meet without gap" in said["rows with a gap"]
        assert "is 99, an index of table" in said["an index of one rank"]
        assert "is of shape [44]" in said["a table of one rank"]
        assert "rows at column" in said["columns of other heights"]
        assert "tables is of float16, but must be of float32" in said["another dtype"]
        assert "tables[1] is the memory of tables[0]" in said["a table twice"]
    assert "of rank 1" in found[0]["an index of one rank"]


def test_auto_chooses_and_says_why() -> None:
    for said in ut.launch(targets.chosen, 2, device="cpu"):
        assert "asked for 'auto'" in said
        assert "serial:" in said


@pytest.mark.parametrize("lane", ["serial:dma", "serial:net"])
def test_all_ranks_have_a_backward_pass_or_none_has(lane: str) -> None:
    first, second = ut.launch(targets.frozen_then_trained, 2, device="cpu", args=(lane,), deadline=10)
    for turn in range(3):
        assert first[2 * turn] == second[turn] == (False, float(turn))
        assert first[2 * turn + 1] == [[1.0, 1.0]] * 4
    assert first[-1].startswith("out of rank 1 is given, but must be None where gradients")
    assert second[-1].startswith("out is given, but must be None where gradients")


def test_what_changes_between_the_passes_is_seen() -> None:
    first, second = ut.launch(targets.changed_in_place, 2, device="cpu", deadline=10)
    assert all("modified by an inplace operation" in said for said in first)
    assert second == ["", "", ""]


def test_halves_are_summed_wide_and_weights_stay_as_they_are() -> None:
    assert all(ut.launch(targets.halves_and_strides, 2, device="cpu"))


def test_strided_weights() -> None:
    assert all(ut.launch(targets.strided_weights, 2, device="cpu"))


def test_auto_does_not_ask_how_long_bags_are_here() -> None:
    assert ut.launch(targets.lengths_that_differ, 2, device="cpu", deadline=10) == [4, 4]


def test_the_benchmark_compares_all_columns() -> None:
    for right, wrong in ut.launch(targets.bench_with_a_wrong_column, 2, device="cpu"):
        assert right == []
        assert "serial:peer" in wrong
        assert len(wrong) > 4
