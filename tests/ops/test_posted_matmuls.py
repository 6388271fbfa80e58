"""Fused matmuls where there is no peer pointer: whole bands are posted to the proxy's ring, over `net` and `dma`."""

from __future__ import annotations

import posted_matmul_targets as targets
import pytest

import undertow as ut
from undertow.ops.choose import lane_of_fused

SEED = 5180


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_posted_plan_is_exact(ranks: int) -> None:
    for found in ut.launch(targets.random_plans, ranks, device="cpu", args=(SEED + ranks, 50)):
        assert min(found.values()) >= 2, found


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_any_of_many_posted_plans_is_exact(ranks: int) -> None:
    for found in ut.launch(targets.random_plans, ranks, device="cpu", args=(SEED * ranks, 600)):
        assert sum(found.values()) == 600


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_of_all_kinds_in_a_row_behind_late_proxies(ranks: int) -> None:
    assert ut.launch(targets.mixed_calls, ranks, device="cpu", args=(SEED, 9), deadline=20) == [9] * ranks


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_calls_of_all_kinds_in_a_row(ranks: int) -> None:
    assert ut.launch(targets.mixed_calls, ranks, device="cpu", args=(SEED + ranks, 250)) == [250] * ranks


def test_a_post_that_never_leaves_is_an_error_at_the_deadline() -> None:
    waits, has_all = ut.launch(targets.a_lost_post, 2, device="cpu", deadline=2)
    assert waits.startswith("RankLost: Rank 1 of group 0 is lost: signal 128 stood at 0 instead of 1 for 2 s"), waits
    assert has_all == "not noticed"


def test_fused_is_posted_between_nodes() -> None:
    assert ut.launch(targets.between_nodes, 4, device="cpu", args=(SEED,), deadline=20) == ["fused:net"] * 4


def test_gradients_need_no_meeting_in_peers_memory() -> None:
    assert ut.launch(targets.gradients_without_meetings, 2, device="cpu", deadline=20) == [True, True]


def test_the_operators_explain_themselves() -> None:
    for found in ut.launch(targets.explained, 2, device="cpu"):
        assert found == [("fused:net", "The strategy was given.")] * 4


def test_a_call_without_room_ends_no_group() -> None:
    for said in ut.launch(targets.no_room, 2, device="cpu", deadline=10):
        assert len(said) == 1
        assert "no room" in said[0]


@pytest.mark.parametrize(
    ("missing", "lane"),
    [((), "peer"), (("peer",), "dma"), (("peer", "dma"), "net"), (("dma",), "peer"), (("peer", "dma", "net"), "net")],
)
def test_fused_is_posted_over_the_nearest_lane_where_there_are_no_peers(missing: tuple[str, ...], lane: str) -> None:
    lanes = {one: "a reason" if one in missing else "" for one in ("net", "peer", "dma")}
    assert lane_of_fused(lanes) == lane
