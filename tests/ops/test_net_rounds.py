"""Lane `net` where the backend carries whole rounds of messages: as between GPUs by NCCL, here by Gloo.

NCCL takes the rounds of a communicator in the order in which they are enqueued, so all ranks must have the same ones in
the same order. Gloo would forgive that: so what every rank does in each round is compared.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import rounds_targets as targets

import undertow as ut
from undertow.errors import LaunchFailed

BACKEND = {"UNDERTOW_NET": "backend"}
SEED = 40


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_exact_whoever_waits_for_whom(ranks: int) -> None:
    """Threads in place of streams: the second half of a round may be asked for before the first."""
    counts = ut.launch(targets.matmuls, ranks, device="cpu", args=(SEED, 0.1, False), env=BACKEND)
    assert set(counts) == {counts[0]}
    assert counts[0] > 100


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_have_the_same_rounds_in_the_same_order(ranks: int) -> None:
    """In one order of the host, as GPU streams are given their work."""
    counts = ut.launch(targets.matmuls, ranks, device="cpu", args=(SEED + ranks, 0.05, True), env=BACKEND)
    assert set(counts) == {counts[0]}
    assert counts[0] > 100


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_cases_in_rounds(ranks: int) -> None:
    for inline in (False, True):
        ut.launch(targets.matmuls, ranks, device="cpu", args=(SEED + ranks, 1.1, inline), env=BACKEND)


@pytest.mark.parametrize("ranks", [2, 3])
def test_backward_passes_have_the_same_rounds(ranks: int) -> None:
    counts = ut.launch(targets.gradients, ranks, device="cpu", args=(SEED, 0.15), env=BACKEND)
    assert set(counts) == {counts[0]}
    assert counts[0] > 50


@pytest.mark.parametrize("ranks", [2, 3])
def test_tokens_and_tables_have_the_same_rounds(ranks: int) -> None:
    counts = ut.launch(targets.the_others, ranks, device="cpu", args=(SEED, 15), env=BACKEND)
    assert set(counts) == {counts[0]}
    assert counts[0] > 50


def test_its_speed_is_measured_in_rounds() -> None:
    for speed, what in ut.launch(targets.speed, 2, device="cpu", env=BACKEND):
        assert 1e6 < speed < 1e14
        assert what == "torch.distributed (gloo)"


@pytest.mark.parametrize("how", ["die", "sleep"])
def test_a_rank_that_is_missing_from_a_round(how: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchFailed, match="failed first"):
        ut.launch(targets.missing, 3, device="cpu", args=(how, str(tmp_path)), env=BACKEND, deadline=3)
    assert time.monotonic() - began < 30
    said = {one.name: one.read_text() for one in tmp_path.iterdir()}
    assert set(said) == {"0", "2"}, said
    for text in said.values():
        assert text.startswith("RankLost"), said


def test_what_ranks_were_told() -> None:
    assert ut.launch(targets.lane_of, 2, device="cpu", args=(("auto", "auto"),)) == ["False"] * 2
    assert ut.launch(targets.lane_of, 2, device="cpu", args=(("backend", "backend"),)) == ["True"] * 2
    must = "but must be auto, backend or host, the same on all ranks."
    for found in ut.launch(targets.lane_of, 2, device="cpu", args=(("backend", "host"),)):
        assert found == f"InvalidArgument: UNDERTOW_NET is 'backend', 'host', {must}"
    for found in ut.launch(targets.lane_of, 2, device="cpu", args=(("nccl", "nccl"),)):
        assert found == f"InvalidArgument: UNDERTOW_NET is 'nccl', {must}"


def test_a_round_takes_no_message_of_the_user() -> None:
    assert ut.launch(targets.beside_messages_of_the_user, 2, device="cpu", env=BACKEND) == [True, True]


def test_both_ways_are_one_operation_which_is_always_ended() -> None:
    """On a stand-in for NCCL's process group: what stays open would swallow all that follows."""
    for said, raised in ut.launch(targets.started_at_once, 2, device="cpu", args=(False,), env=BACKEND):
        assert said == ["start", "recv 20 from ", "send 12 to ", "end", "wait", "refused"]
        assert raised == ""
    for said, raised in ut.launch(targets.started_at_once, 2, device="cpu", args=(True,), env=BACKEND):
        assert said == ["start", "recv 20 from ", "end", "refused"]
        assert raised == "a communicator that was aborted"


def test_a_group_without_a_backend_sends_messages_all_the_same() -> None:
    assert ut.launch(targets.without_a_backend, 2, device="cpu") == ["torch.distributed (none), False, True"] * 2
