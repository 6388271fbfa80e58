"""The virtual node with a stand-in for the MPS control program: its daemon never outlives whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from undertow.errors import InvalidArgument, VirtualNodeUnavailable
from undertow.fabric import virtual_node
from undertow.fabric.virtual_node import PrivateFolder, VirtualNode

FAKE = Path(__file__).with_name("fake_mps_control.py")
MPS_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty temporary folder, no MPS variables, no program, and nothing in the default place."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(virtual_node, "_LONGEST_PARENT", 1000)
    monkeypatch.setattr(virtual_node.tempfile, "tempdir", str(folder))
    monkeypatch.setattr(virtual_node, "DEFAULT_PIPE_FOLDER", str(folder / "no-default"))
    for name in (*MPS_VARIABLES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(virtual_node, "control_program", lambda: None)
    return folder


@pytest.fixture
def control(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FAKE}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(virtual_node, "control_program", lambda: str(program))
    return str(program)


def pids_in(pipe_folder: str | Path) -> list[int]:
    return [int((Path(pipe_folder) / name).read_text()) for name in ("daemon.pid", "server.pid")]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def wait_until(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("control")
def test_the_daemon_lives_as_long_as_the_node(temporary: Path) -> None:
    with VirtualNode(4) as node:
        assert node.uses_mps
        assert node.owns_daemon
        environments = [node.rank_environment(rank) for rank in range(4)]
        pids = pids_in(environments[0]["CUDA_MPS_PIPE_DIRECTORY"])
        assert not any(is_gone(pid) for pid in pids)
        assert Path(environments[0]["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
        assert Path(environments[0]["TMPDIR"]).is_dir()
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environments[3]
        assert environments[3]["CUDA_DEVICE_MAX_CONNECTIONS"] == "13"
        assert environments[3]["CUDA_MODULE_LOADING"] == "EAGER"
        assert environments[3]["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
        assert len({environment["NCCL_HOSTID"] for environment in environments}) == 4
        (Path(environments[0]["TMPDIR"]) / "left-by-a-rank").write_text("x")
    assert all(is_gone(pid) for pid in pids)
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("control")
def test_an_exception_ends_the_daemon(temporary: Path) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with VirtualNode(2) as node:
            pids.extend(pids_in(node.rank_environment(0)["CUDA_MPS_PIPE_DIRECTORY"]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)
    assert list(temporary.iterdir()) == []


KILLED_LAUNCHER = """
import sys, time
from undertow.fabric import virtual_node
virtual_node.control_program = lambda: sys.argv[1]
virtual_node.DEFAULT_PIPE_FOLDER = "/nonexistent"
virtual_node._LONGEST_PARENT = 1000
with virtual_node.VirtualNode(2) as node:
    print(node.rank_environment(0)["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("to_group", [False, True], ids=["process", "group"])
def test_a_killed_launcher_leaves_no_daemon(control: str, temporary: Path, to_group: bool) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", KILLED_LAUNCHER, control],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdout is not None
    pids = pids_in(launcher.stdout.readline().strip())
    if to_group:
        os.killpg(launcher.pid, signal.SIGKILL)
    else:
        launcher.kill()
    launcher.communicate()
    wait_until(lambda: all(is_gone(pid) for pid in pids))
    wait_until(lambda: list(temporary.iterdir()) == [])


@pytest.mark.nightly
@pytest.mark.usefixtures("control")
def test_a_daemon_that_does_not_quit_is_killed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    with VirtualNode(2) as node:
        pids = pids_in(node.rank_environment(0)["CUDA_MPS_PIPE_DIRECTORY"])
    assert all(is_gone(pid) for pid in pids)
    assert list(temporary.iterdir()) == []


def test_a_running_daemon_is_used_and_left_alone(
    control: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    subprocess.run([control, "-d"], check=True, stdin=subprocess.DEVNULL)
    subprocess.run([control], input="start_server -uid 0\n", text=True, check=True)
    try:
        with VirtualNode(2, "require") as node:
            assert node.uses_mps
            assert not node.owns_daemon
            assert node.rank_environment(1)["CUDA_MPS_PIPE_DIRECTORY"] == str(pipes)
        assert not any(is_gone(pid) for pid in pids_in(pipes))
        assert list(temporary.iterdir()) == []
        with VirtualNode(2, "off") as node:  # ranks must not reach the daemon that is there
            assert node.rank_environment(0)["CUDA_MPS_PIPE_DIRECTORY"] != str(pipes)
    finally:
        subprocess.run([control], input="quit\n", text=True, check=True)


@pytest.mark.usefixtures("control")
def test_a_dead_daemons_folder_does_not_count(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with VirtualNode(2) as node:
        assert node.owns_daemon
        assert node.rank_environment(0)["CUDA_MPS_PIPE_DIRECTORY"] != str(tmp_path)
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("control")
@pytest.mark.parametrize(
    ("behaviour", "reason"), [("refuse", "no permission"), ("serverless", "started no server within 5 s")]
)
def test_a_daemon_that_does_not_start(
    behaviour: str,
    reason: str,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_MPS", behaviour)
    with VirtualNode(2) as node:
        assert not node.uses_mps
        assert not set(MPS_VARIABLES) & set(node.rank_environment(0))
        assert node.rank_environment(0)["TMPDIR"].startswith(str(temporary))
    (record,) = caplog.records
    assert "share the GPU by time slicing, because" in record.getMessage()
    assert reason in record.getMessage()
    assert list(temporary.iterdir()) == []


def test_without_the_program(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    with VirtualNode(8) as node:
        assert not node.uses_mps
    assert "nvidia-cuda-mps-control is not installed" in caplog.text
    caplog.clear()
    with pytest.raises(VirtualNodeUnavailable, match=r"needs CUDA MPS, but the program .* is not installed"):
        VirtualNode(8, "require").__enter__()
    with VirtualNode(8, "off"):
        pass
    assert caplog.text == ""
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("temporary")
def test_shares_follow_the_ranks_per_gpu() -> None:
    for ranks, devices, connections in (
        (2, 1, "26"),
        (4, 1, "13"),
        (8, 1, "8"),
        (5, 1, "12"),
        (8, 4, "26"),
        (16, 1, "8"),
    ):
        with VirtualNode(ranks, "off", devices) as node:
            assert node.rank_environment(0)["CUDA_DEVICE_MAX_CONNECTIONS"] == connections


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="mps is 'maybe', but must be one of auto, off, require"):
        VirtualNode(2, "maybe")


@pytest.mark.usefixtures("control")
def test_the_daemon_sees_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with VirtualNode(2) as node:
        pid = pids_in(node.rank_environment(0)["CUDA_MPS_PIPE_DIRECTORY"])[0]
        assert b"CUDA_VISIBLE_DEVICES" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_private_folder_cannot_be_made(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_node.tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(OSError, match="no temporary folder could be made"):
        PrivateFolder().__enter__()


def test_the_guardian_is_quick_to_start(temporary: Path) -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        with PrivateFolder() as folder:
            times.append(time.perf_counter() - start)
            assert folder.state == "ready"
    assert min(times) < 1.0
