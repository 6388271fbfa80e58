"""Every check of the fabric in a virtual node: several ranks on one GPU, under MPS."""

from __future__ import annotations

import subprocess

import fabric_suite
import gpu_checks
import pytest

import undertow as ut
from undertow import errors


def daemons() -> str:
    return subprocess.run(["pgrep", "-fa", "nvidia-cuda-mps"], capture_output=True, text=True, check=False).stdout


@pytest.fixture(autouse=True)
def nothing_left() -> object:
    before = daemons()
    yield
    assert daemons() == before, "an MPS daemon was left"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_check(ranks: int) -> None:
    report = ut.launch(gpu_checks.run, ranks, device="cuda", args=(sorted(fabric_suite.CHECKS),), deadline=60)
    print("\n".join(report[0]))


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "serial:net"), (4, "serial:peer"), (8, "chunked:dma")])
def test_killed_rank(ranks: int, strategy: str) -> None:
    with pytest.raises(errors.LaunchFailed) as raised:
        ut.launch(gpu_checks.abandoned, ranks, device="cuda", args=(False, (strategy,)), deadline=30)
    assert raised.value.facts["rank"] == ranks - 1
    outcomes = raised.value.facts["outcomes"]
    assert all("returned" in outcome for outcome in outcomes[:-1]), outcomes
    assert "SIGKILL" in outcomes[-1]


def test_missing_rank_is_noticed_at_the_deadline() -> None:
    results = ut.launch(gpu_checks.abandoned, 2, device="cuda", args=(True,), deadline=60)
    assert "RankLost" in results[0], results


def test_a_node_again_after_a_kill() -> None:
    """A killed client must not poison the next launch: it gets a daemon of its own."""
    ut.launch(fabric_suite.run, 2, device="cuda", args=(["signals_add_set_and_wrap"],), deadline=60)
