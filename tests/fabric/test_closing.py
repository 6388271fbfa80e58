"""After an end, and at odds: an error with a sentence, never a wild pointer, a wrong sum or a leak."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import closing_targets as targets
import pytest
import torch

import undertow as ut
from undertow import settings
from undertow.errors import InvalidArgument, LaunchFailed
from undertow.fabric import registry
from undertow.ops.matmul_all_reduce import matmul_all_reduce


def test_use_after_close() -> None:
    for found in ut.launch(targets.use_after_close, 2, device="cpu", deadline=10):
        kinds = [one.partition(":")[0] for one in found]
        assert kinds == [*["BufferReleased"] * 4, "GroupClosed", "GroupClosed"], found


def test_groups_leave_no_descriptor_and_no_thread() -> None:
    for counts in ut.launch(targets.groups_come_and_go, 2, device="cpu", args=(5,), deadline=20):
        assert counts[1:] == counts[:1] * 4, counts


@pytest.mark.parametrize("lane", ["dma", "net"])
def test_a_proxy_ends_with_its_fabric(lane: str) -> None:
    assert ut.launch(targets.proxy_outlived, 2, device="cpu", args=(lane,), deadline=10) == [[], []]


def test_a_ring_that_one_rank_has_no_memory_for() -> None:
    for said in ut.launch(targets.no_memory_for_a_ring, 3, device="cpu"):
        assert said == ["Rank 1 could not allocate: no memory for a proxy ring", "made"]


@pytest.mark.parametrize("how", ["close", "script"])
def test_what_was_posted_last_arrives(how: str) -> None:
    assert ut.launch(targets.last_posts, 2, device="cpu", args=(how,), deadline=10) == [[2, 0], [2, 0]]


@pytest.mark.parametrize("lane", ["dma", "net"])
def test_a_proxy_leaves_nothing_behind_where_the_process_lives_on(lane: str) -> None:
    script = Path(__file__).parent / "closing_targets.py"
    command = [sys.executable, "-c", "from undertow.cli import main; main()", "run", "-n", "2", "--device", "cpu"]
    done = subprocess.run([*command, str(script), lane], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[[0, 0, 0], [0, 0, 0], [0, 0, 0]]"] * 2


@pytest.mark.parametrize("uncaught", [False, True])
def test_after_an_exception_that_nobody_caught_nothing_is_finished(
    uncaught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits without the interpreter's lock is told to end: the driver is about to go."""
    told: list[str] = []
    said = {name: partial(told.append, name) for name in ("finish", "abandon", "fall_silent", "stop", "leave")}
    monkeypatch.setattr(registry, "_groups", {0: SimpleNamespace(**said)})
    monkeypatch.setattr(registry.watchdog, "instance", lambda: SimpleNamespace(**said))
    monkeypatch.setattr(registry.FlightRing, "mine", lambda: SimpleNamespace(**said))
    monkeypatch.setattr(registry.Group, "any_failed", False)
    if uncaught:
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    else:
        monkeypatch.delattr(sys, "last_value", raising=False)
    registry._leave()
    assert told == (["abandon", "fall_silent", "stop"] if uncaught else ["leave", "finish", "fall_silent", "stop"])


def test_wrong_peers_and_slots_are_refused() -> None:
    for found in ut.launch(targets.wrong_peers_and_slots, 2, device="cpu", deadline=10):
        assert all(one.startswith("InvalidArgument: peer is") for one in found[:-1]), found
        assert found[-1] == "InvalidArgument: slot is 8, but must be between 0 and 7.", found


def test_a_workspace_that_a_graph_uses_is_kept() -> None:
    for kept, replaced, refused in ut.launch(targets.growth_after_capture, 2, device="cpu", deadline=10):
        assert kept
        assert replaced
        assert refused.startswith("WorkspaceTooSmall: The call needs 8.0 MiB of workspace, 1.0 MiB is held")


@pytest.mark.parametrize("target", [targets.different_parcels, targets.different_lanes])
def test_ranks_at_odds(target: object) -> None:
    with pytest.raises(LaunchFailed) as caught:
        ut.launch(target, 2, device="cpu", deadline=2)  # type: ignore[arg-type]
    outcomes = caught.value.facts["outcomes"]
    assert any(one.startswith("MismatchedCall") for one in outcomes), outcomes
    assert all(one.startswith(("MismatchedCall", "RankLost")) for one in outcomes), outcomes


def test_one_rank_has_gradients_and_aliases_are_refused() -> None:
    ut.init()
    try:
        x, w = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
        matmul_all_reduce(x, w).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((4, 4), 4.0))
        with torch.no_grad():
            assert torch.equal(matmul_all_reduce(x, w), torch.full((4, 4), 4.0))
        with pytest.raises(InvalidArgument, match="another use for"):
            matmul_all_reduce(w, w, out=w)
    finally:
        ut.shutdown()


def named_node() -> str:
    """Each rank on a node of its own name, before the fabric is made."""
    os.environ[settings.NODE.name] = f"node {os.environ['RANK']}"
    return targets.busy_node()


def test_a_busy_node_is_not_a_lost_one() -> None:
    assert ut.launch(named_node, 2, device="cpu", deadline=30) == ["4.0", "4.0"]


def test_a_check_asks_before_it_says_that_all_is_well() -> None:
    assert ut.launch(targets.asked_at_a_check, 1, device="cpu", deadline=10) == ["A kernel said so."]
