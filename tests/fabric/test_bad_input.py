"""Bad input: one clear sentence each, on every rank that can know, and nothing left behind."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import bad_input_targets as targets
import pytest

import undertow as ut
from undertow import settings
from undertow.errors import InvalidArgument, LaunchFailed, LaunchRefused, OutOfSharedMemory
from undertow.fabric import launch as launch_module
from undertow.fabric.registry import seconds_to_wait
from undertow.fabric.segment import Segment

SCRIPT = Path(targets.__file__)


@pytest.fixture(autouse=True)
def _flight_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.FLIGHT_DIR.name, str(tmp_path / "flight"))


@pytest.fixture(autouse=True)
def _nothing_leaked() -> object:
    """Shared names and this process's descriptors are after a test what they were before."""
    ut.launch(os.getpid, 1, device="cpu")  # starts what stays: the process that forks ranks
    gc.collect()  # an exception holds the frames of its launch, and they the store
    before = set(Path("/dev/shm").iterdir()), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert (set(Path("/dev/shm").iterdir()), len(os.listdir("/proc/self/fd"))) == before


# -- ranks that disagree ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["serial:peer", "chunked:dma", "serial:net"])
def test_mismatched_shapes_are_both_named(strategy: str) -> None:
    with pytest.raises(LaunchFailed) as caught:
        ut.launch(targets.mismatched_rows, 2, device="cpu", args=(strategy,), deadline=2)
    outcomes = caught.value.facts["outcomes"]
    assert caught.value.facts["kind"] == "MismatchedCall", outcomes
    sentence = next(one for one in outcomes if one.startswith("MismatchedCall"))
    rows = r"matmul_all_reduce\(M \d+, N 1000, float32\)"
    called = rf"rank (0|1) called {rows} as {strategy} [0-9a-f]{{16}}"
    assert re.fullmatch(
        rf"MismatchedCall: Ranks of group 0 disagree on call 2: {called}, but {called}\.",
        sentence,
    )
    assert "M 400" in sentence
    assert "M 800" in sentence
    for outcome in outcomes:
        assert outcome.startswith(("MismatchedCall", "RankLost")), outcomes


@pytest.mark.parametrize("strategy", ["serial:peer", "serial:net"])
def test_mismatched_shapes_are_refused_before_the_launch_when_checking(strategy: str) -> None:
    results = ut.launch(
        targets.mismatched_before_launch,
        3,
        device="cpu",
        args=(strategy,),
        deadline=20,
        env={settings.CHECK.name: "1"},
    )
    called = rf"matmul_all_reduce\(M {{}}, N 8, float32\) as {strategy} [0-9a-f]{{{{16}}}}"
    expected = (
        "MismatchedCall: Ranks of group 0 disagree on call 1:"
        f" rank 0 called {called.format(4)}, but rank 1 called {called.format(5)}\\."
    )
    assert all(re.fullmatch(expected, sentence) and usable for sentence, usable in results), results


def test_different_strategies_are_a_mismatch() -> None:
    with pytest.raises(LaunchFailed) as caught:
        ut.launch(targets.mismatched_strategies, 2, device="cpu", deadline=2)
    sentence = next(one for one in caught.value.facts["outcomes"] if one.startswith("MismatchedCall"))
    assert "as serial:peer" in sentence
    assert "as chunked:dma" in sentence


def test_mismatched_buffers_are_refused_and_the_group_goes_on() -> None:
    for rank, (sentence, usable) in enumerate(ut.launch(targets.mismatched_buffers, 2, device="cpu", deadline=20)):
        assert sentence.startswith("MismatchedCall: Ranks of group 0 disagree on call 0: ")
        assert f"rank {rank} called buffer([{10 + rank}], torch.float32)" in sentence
        assert f"rank {1 - rank} called buffer([{11 - rank}], torch.float32)" in sentence
        assert usable


# -- memory ----------------------------------------------------------------------------------------------------------


def test_an_allocation_that_one_rank_cannot_make_fails_on_all() -> None:
    for huge, small, usable in ut.launch(targets.failing_allocation, 2, device="cpu", deadline=20):
        assert re.fullmatch(
            r"AllocationFailed: Rank 0 could not allocate: Shared memory for a symmetric buffer of \[\d+\] torch.uint8"
            r" needs 1024.0 TiB, but .* is available on this node\.",
            huge,
        )
        assert small == (
            "AllocationFailed: Rank 1 could not allocate: Shared memory for a symmetric buffer of [8] torch.uint8"
            " needs 8 B, but 0 B is available on this node."
        )
        assert usable


def test_a_segment_larger_than_memory() -> None:
    with pytest.raises(OutOfSharedMemory, match=r"^Shared memory for a test needs 1024\.0 TiB, but .* is available"):
        Segment.create(1 << 50, "a test")
    with pytest.raises(InvalidArgument, match=r"^size is 0, but must be a positive number of bytes"):
        Segment.create(0, "a test")


def test_more_ranks_than_memory_allows() -> None:
    with pytest.raises(LaunchRefused, match=r"1000000 ranks need about .* of memory, and .* is available\.$"):
        ut.launch(os.getpid, 1_000_000, device="cpu")


def test_zero_ranks() -> None:
    with pytest.raises(LaunchRefused, match=r"ranks is 0, but must be a whole number of at least 1\.$"):
        ut.launch(os.getpid, 0, device="cpu")


def test_an_unknown_device() -> None:
    with pytest.raises(LaunchRefused, match=r"device is 'abacus', but must be one of auto, cpu, cuda\.$"):
        ut.launch(os.getpid, 1, device="abacus")


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system can be mounted by root only")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_a_full_shared_memory_file_system_does_not_matter() -> None:
    """Segments are anonymous memory files, so /dev/shm is not asked at all."""
    fill = "mount -t tmpfs -o size=1m tmpfs /dev/shm && (cat /dev/zero > /dev/shm/full 2>/dev/null || true)"
    check = "test $(df --output=avail /dev/shm | tail -1) -eq 0"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{fill} && {check} && exec {sys.executable} {SCRIPT}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "exact\n"), done.stderr


# -- what an earlier run left, and what others hold ----------------------------------------------------------------


def test_an_occupied_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchRefused, match=rf"^Cannot launch: port {port} is in use by another program\.$"):
            ut.launch(os.getpid, 1, device="cpu", port=port)


def test_what_a_killed_run_left_does_not_disturb_the_next(tmp_path: Path) -> None:
    """A launcher killed in the middle of a run, then the same again in the same folders."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    for stale in ("undertow-0", "gloo.sock", "torch_symm"):
        (temporary / stale).touch()
    with socket.socket(socket.AF_UNIX) as left:  # a socket file that nobody listens on
        left.bind(str(temporary / "undertow.sock"))
    first = subprocess.Popen([sys.executable, SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)
    time.sleep(1.5)  # somewhere in its run; wherever that is, the next must not care
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (second.returncode, second.stdout) == (0, "exact\n"), second.stderr
    assert {path.name for path in temporary.iterdir()} == {"undertow-0", "gloo.sock", "torch_symm", "undertow.sock"}


def test_the_flight_ring_of_a_launcher_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.FLIGHT_RING.name, "/proc/999999999/fd/3:0")
    assert ut.launch(targets.exact, 2, device="cpu", deadline=20) == [True, True]


# -- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_are_named_with_what_they_were_and_must_be() -> None:
    (found,) = ut.launch(targets.arguments, 1, device="cpu", deadline=20)
    strategies = 'must be "auto", a grain (serial, chunked, signaled, fused) or "grain:lane" with lanes net, peer, dma.'
    assert found == {
        "before init": "NotInitialised: This call needs a group; call undertow.init() first.",
        "x of three dimensions": "InvalidArgument: x is of shape [1, 4, 2], but must be a matrix.",
        "w of another length": ("InvalidArgument: w is of shape [3, 8], but must be of 2 rows, as x has columns."),
        "w of another dtype": "InvalidArgument: w is of torch.float64, but must be of torch.float32, as x is.",
        "integers": "InvalidArgument: x is of torch.int32, but must be one of float64, float32, bfloat16, float16.",
        "another device": "InvalidArgument: x is on meta, but must be on cpu.",
        "out of another shape": (
            "InvalidArgument: out is [8, 4] torch.float32 on cpu, but must be contiguous [4, 8] torch.float32 on cpu."
        ),
        "out strided": (
            "InvalidArgument: out is [4, 8] torch.float32 on cpu, but must be contiguous [4, 8] torch.float32 on cpu."
        ),
        "unknown strategy": f"InvalidArgument: strategy is 'fast', but {strategies}",
        "unknown lane": f"InvalidArgument: strategy is 'serial:tube', but {strategies}",
        "plan for other rows": (
            "InvalidArgument: plan is made for parcels [(0, 2), (2, 5)], but must be made for 4 rows."
        ),
        "not a group": "InvalidArgument: group is 'world', but must be the name of a group that was used before ('0').",
        "negative buffer": "InvalidArgument: shape is [2, -1], but must be made of extents of at least 0.",
        "lane name": "InvalidArgument: lane is 'tube', but must be one of net, peer, dma.",
    }


def test_lane_bounds_and_use_after_the_end() -> None:
    for found in ut.launch(targets.lane_bounds, 2, device="cpu", deadline=20):
        for name in ("peer", "dma"):
            inside = "but must be inside the buffer's 16 elements."
            assert found[f"{name}: past the end"] == f"InvalidArgument: start is [9, 17), {inside}"
            assert found[f"{name}: before the start"] == f"InvalidArgument: start is [-1, 7), {inside}"
            must = "but must be contiguous torch.float32."
            assert found[f"{name}: dtype"] == f"InvalidArgument: source is contiguous torch.float64, {must}"
            assert found[f"{name}: strided"] == f"InvalidArgument: source is strided torch.float32, {must}"
        assert found["signal"] == "InvalidArgument: index is 4, but must be between 0 and 3."
        released = "BufferReleased: The symmetric buffer of shape [16] was released; allocate a new one."
        assert found["released"] == found["released, sent to"] == released
        closed = "GroupClosed: Group 0 was closed; make a new one with undertow.as_group or undertow.init."
        assert found["closed group"] == found["closed group, barrier"] == closed
        assert found["made again"] == "True"


@pytest.mark.parametrize("text", ["fast", "1GB", "-1GB/s", "0GB/s", "1GB/s,20", "1.2.3GB/s", ".GB/s", "1GB/s,1.1.1us"])
def test_a_senseless_pace(text: str) -> None:
    found = ut.launch(targets.paced, 1, device="cpu", env={settings.DMA_PACE.name: text}, deadline=20)
    must = "a bandwidth and optionally a latency, such as 1GB/s,20us"
    assert found == [f"InvalidArgument: UNDERTOW_DMA_PACE is '{text}', but must be {must}."]


@pytest.mark.parametrize("text", ["soon", "", "-1", "0", "nan"])
def test_a_senseless_deadline(text: str) -> None:
    found = ut.launch(targets.bad_deadline, 1, device="cpu", env={settings.DEADLINE.name: text})
    assert found == [f"InvalidArgument: UNDERTOW_DEADLINE is '{text}', but must be a positive number of seconds."]


def test_a_deadline_that_nobody_will_see() -> None:
    with pytest.raises(InvalidArgument, match="at most those of a year"):
        seconds_to_wait(float("inf"))


def test_a_group_that_this_rank_is_not_in() -> None:
    first, second = ut.launch(targets.sub_group_without_me, 2, device="cpu", deadline=20)
    assert first == "member"
    assert second == "InvalidArgument: group is a ProcessGroup without this rank, but must be one that contains it."


def test_the_grace_of_a_launch_is_longer_than_the_watchdog_needs() -> None:
    """Survivors get to say by themselves what they lost: within 5 s of a death."""
    assert launch_module.GRACE_SECONDS > 5
