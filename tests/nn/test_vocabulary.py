"""Embeddings, last layers and losses over ranks that share the vocabulary out."""

from __future__ import annotations

import pytest
import torch
import vocabulary_targets as targets

import undertow as ut


@pytest.mark.parametrize(("ranks", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (3, torch.float64)])
def test_an_embedding(ranks: int, dtype: torch.dtype) -> None:
    assert all(ut.launch(targets.embeddings, ranks, device="cpu", args=(dtype,)))


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (3, torch.float64)])
def test_an_embedding_in_sequence_parallel(ranks: int, dtype: torch.dtype) -> None:
    assert all(ut.launch(targets.in_sequence_parallel, ranks, device="cpu", args=(dtype,)))


def test_words_that_are_none() -> None:
    for said in ut.launch(targets.wrong_words, 2, device="cpu"):
        assert said == [
            "ids.view(-1)[2] is 5, but must be between 0 and 4.",
            "ids.view(-1)[0] is -1, but must be between 0 and 4.",
            "ids is of torch.float64, but must be of torch.int32 or torch.int64.",
            "ids is on meta, but must be on cpu, as the weight is.",
            "max_norm is 1.0, but must be None, to be cut by rows.",
            "sparse is True, but must be False, to be cut by rows.",
            "strategy is 'quickly'",
            "strategy is 'serial:pear'",
        ]


@pytest.mark.parametrize("word", [-1, 5])
def test_a_word_that_nobody_looked_at(word: int) -> None:
    assert all(ut.launch(targets.a_word_that_nobody_looked_at, 2, device="cpu", args=(word,)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_tied_weight_stays_one(ranks: int) -> None:
    assert all(ut.launch(targets.tied, ranks, device="cpu"))


def test_hooks_of_what_is_replaced() -> None:
    assert all(ut.launch(targets.hooked, 2, device="cpu"))


def test_a_tied_weight_that_is_not_cut_alike() -> None:
    shared = (
        "is shared by 0.weight, 3.weight, but must be a weight of its own, or one that all its holders cut by rows"
        " alike: name each in the plan (ut.nn.Vocabulary, ut.nn.Column), leave all out of it, or untie it."
    )
    for said in ut.launch(targets.tied_refusals, 1, device="cpu"):
        assert said == [
            f"0.weight {shared}",
            f"3.weight {shared}",
            f"0.weight {shared}",
            f"0.weight {shared}",
            "3.weight is shared by 0.weight, 3.weight, but must be a weight of its own: leave the layer out of the"
            " plan, or untie it.",
            "1, matched by '1', is Linear, but must be a torch.nn.Embedding: a narrower pattern leaves it out.",
        ]


@pytest.mark.parametrize(("ranks", "dtype"), [(1, torch.float64), (2, torch.bfloat16), (3, torch.float32)])
def test_a_loss(ranks: int, dtype: torch.dtype) -> None:
    assert all(ut.launch(targets.losses, ranks, device="cpu", args=(dtype,)))


def test_what_a_loss_refuses() -> None:
    for rank, said in enumerate(ut.launch(targets.loss_refusals, 2, device="cpu")):
        columns = 4 if rank == 0 else 3
        assert said == [
            "target[1] is 7, but must be between 0 and 6, or the ignore_index.",
            "reduction is 'max', but must be one of mean, sum, none.",
            f"logits is of shape [{columns}], but must be [M, {columns}], this rank's columns; flatten(0, 1) joins"
            " dimensions of rows.",
            "target is [3] torch.int32 on cpu, but must be [3] torch.int64 on cpu.",
            "label_smoothing is 1.5, but must be between 0 and 1.",
            "target[0] is -1, but must be between 0 and 6, or the ignore_index.",
        ]


def test_words_to_loss_are_one_graph() -> None:
    assert all(ut.launch(targets.compiled, 2, device="cpu"))
