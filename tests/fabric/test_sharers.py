"""Who shares a GPU: counted over the whole job, not over the group that asks."""

from __future__ import annotations

import pytest
import torch

from undertow.fabric import sharers
from undertow.fabric.sharers import Seat


@pytest.fixture(autouse=True)
def _nobody_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharers, "_met", {})


def test_two_groups_on_one_gpu_get_a_quarter_for_each_rank() -> None:
    sharers.met((0, 1, 2, 3), ["a"] * 4)
    seats = [sharers.seat("a", 132, 4) for _ in range(2)]  # of a group of two of them
    assert sharers.part(seats) == 33
    assert sharers.unknown(seats, could_share=True) == ""


def test_a_group_that_nobody_has_met_is_told_apart() -> None:
    sharers.met((0, 1), ["a", "a"])
    seats = [sharers.seat("a", 132, 4) for _ in range(2)]
    assert sharers.part(seats) == 66
    assert "undertow.init()" in sharers.unknown(seats, could_share=True)
    assert sharers.unknown(seats, could_share=False) == ""  # as many GPUs as ranks, and none may be shared


def test_one_rank_that_knows_is_enough() -> None:
    seats = [Seat("a", 132, 2, False), Seat("a", 132, 4, True)]
    assert sharers.part(seats) == 33
    assert sharers.unknown(seats, could_share=True) == ""


def test_all_ranks_of_a_group_have_the_least_part() -> None:
    seats = [Seat("a", 132, 2, True), Seat("a", 132, 2, True), Seat("b", 132, 1, True)]
    assert sharers.part(seats) == 66
    assert sharers.part([Seat("a", 132, 1, True), Seat("b", 132, 1, True)]) == 132


def test_ranks_of_an_earlier_and_larger_job_do_not_count() -> None:
    sharers.met((0, 1, 2, 3), ["a"] * 4)
    assert sharers.seat("a", 132, 2) == Seat("a", 132, 2, True)


def test_a_cpu_has_no_name() -> None:
    assert sharers.name_of(torch.device("cpu")) == ""
