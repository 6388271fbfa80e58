"""Launching: results, refusals, first causes, and that nothing is left behind, whoever is killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import launch_targets as targets
import pytest
import torch

from undertow import settings
from undertow.errors import LaunchFailed, LaunchRefused
from undertow.fabric import launch as launch_module
from undertow.fabric.launch import launch, run_script

MARK = "UNDERTOW_TEST_MARK"
SCRIPT = Path(targets.__file__)


@pytest.fixture(autouse=True)
def flight_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "flight"
    monkeypatch.setenv(settings.FLIGHT_DIR.name, str(folder))
    return folder


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "GRACE_SECONDS", 0.5)


def failure_of(*args: object, **kwargs: object) -> LaunchFailed:
    with pytest.raises(LaunchFailed) as caught:
        launch(*args, **kwargs)  # type: ignore[arg-type]
    return caught.value


# -- results -------------------------------------------------------------------------------------------------------


def test_results_come_in_rank_order_with_args_and_kwargs() -> None:
    assert launch(targets.say_rank, 3, "cpu", args=("<",), kwargs={"suffix": ">"}) == ["<0>", "<1>", "<2>"]


def test_tensors_come_back_whole() -> None:
    first, second = launch(targets.tensors, 2, "cpu")
    assert torch.equal(second["plain"], torch.full((3, 2), 1.0, dtype=torch.bfloat16))
    assert torch.equal(first["view"], torch.arange(10, 14, dtype=torch.float32))
    assert first["view"].untyped_storage().nbytes() == 16  # not the 4 MB behind the view
    assert torch.equal(first["transposed"], torch.arange(6).view(2, 3).T)
    assert isinstance(first["parameter"], torch.nn.Parameter)
    assert torch.equal(first["computed"].detach(), torch.full((2,), 2.0))
    assert first["empty"].shape == (0, 4)


def test_a_large_result_and_argument() -> None:
    tensor = torch.arange(4 << 20, dtype=torch.int32)
    results = launch(torch.neg, 2, "cpu", args=(tensor,))
    assert all(torch.equal(result, -tensor) for result in results)


def test_ranks_find_each_other_launch_after_launch() -> None:
    for _ in range(20):
        assert launch(targets.all_reduce_with_gloo, 2, "cpu") == [1.0, 1.0]


def test_environment_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(os.getpid, 1, "cpu")  # the process that forks ranks is there before the variable is set
    monkeypatch.setenv("SET_LATER", "yes")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SET_LATER", "EXTRA")
    more = (settings.DEVICE.name, settings.DEADLINE.name, "OMP_NUM_THREADS")
    _, second = launch(
        targets.environment, 2, "cpu", args=(*names, *more, "UNSET"), deadline=7.5, env={"EXTRA": "given"}
    )
    assert [second[name] for name in names] == ["1", "2", "1", "2", "127.0.0.1", "yes", "given"]
    assert [second[name] for name in more] == ["cpu", "7.5", "1"]
    assert second["UNSET"] is None


def test_a_rank_starts_with_torch_loaded_one_thread_and_no_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for facts in launch(targets.facts, 2, "cpu"):
        assert facts["threads"] == 1
        assert not facts["cuda_initialised"]
        assert facts["folder"] == str(tmp_path)
        assert facts["import_seconds"] < 0.1


def test_random_state_is_not_shared_between_ranks() -> None:
    numbers = [number for pair in launch(targets.random_numbers, 2, "cpu") for number in pair]
    assert len(set(numbers)) == 4


def test_output_goes_where_the_launcher_writes_now(capfd: pytest.CaptureFixture[str]) -> None:
    launch(targets.print_both, 2, "cpu")
    out, err = capfd.readouterr()
    assert sorted(out.split("\n")) == ["", "out 0", "out 1"]
    assert "err 0" in err
    assert "err 1" in err


def test_a_rank_may_launch() -> None:
    assert launch(targets.nested, 2, "cpu") == [["inner0", "inner1"]] * 2


def test_repeated_launches_are_cheap_and_leave_no_descriptor() -> None:
    launch(os.getpid, 2, "cpu")
    before = len(os.listdir("/proc/self/fd"))
    start = time.perf_counter()
    for _ in range(5):
        launch(os.getpid, 2, "cpu")
    assert (time.perf_counter() - start) / 5 < 1.0  # about 0.05 s; importing torch in two ranks takes 3 s
    assert len(os.listdir("/proc/self/fd")) == before


def test_run_script_is_a_main_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, atexit, neighbour\n"
        "atexit.register(lambda: print('left'))\n"
        "print(__name__, sys.argv[1:], neighbour.NAME)\n"
        "sys.exit(0)\n"
    )
    assert launch(run_script, 1, "cpu", args=(str(script), ["-x", "1"])) == [None]
    assert capfd.readouterr().out == "__main__ ['-x', '1'] found\nleft\n"


def run_main(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "main_script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)


def test_a_function_of_the_main_script(tmp_path: Path) -> None:
    done = run_main(
        tmp_path,
        """
        import os
        from undertow.fabric.launch import launch
        RANK_AT_IMPORT = os.environ.get("RANK")
        class Thing:
            def __init__(self): self.rank = RANK_AT_IMPORT
        def make(): return Thing()
        if __name__ == "__main__":
            print([thing.rank for thing in launch(make, 2, "cpu")])
        """,
    )
    assert done.stdout == "['0', '1']\n", done.stderr


def test_a_main_script_without_a_guard_is_told(tmp_path: Path) -> None:
    done = run_main(
        tmp_path,
        """
        from undertow.fabric.launch import launch
        def nothing(): pass
        launch(nothing, 2, "cpu")
        """,
    )
    assert done.returncode == 1
    assert "put the launch under if __name__ == '__main__'" in done.stderr


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((os.getpid, 0), "ranks is 0, but must be a whole number of at least 1"),
        ((os.getpid, -3), "ranks is -3"),
        ((os.getpid, 2.0), "ranks is 2.0"),
        ((os.getpid, True), "ranks is True"),
        ((os.getpid, 100_000_000), "100000000 ranks need about .* of memory, and .* is available"),
        ((os.getpid, 2, "tpu"), "device is 'tpu', but must be one of auto, cpu, cuda"),
        ((3, 2), "fn is 3, but must be a function"),
        ((lambda: None, 2), "another process cannot import function .*<lambda>; define it at the top level"),
    ],
)
def test_refusals(arguments: tuple[object, ...], sentence: str) -> None:
    with pytest.raises(LaunchRefused, match=f"^Cannot launch: {sentence}") as caught:
        launch(*arguments)  # type: ignore[arg-type]
    assert str(caught.value).count("\n") == 0


def test_refuses_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LaunchRefused, match="device is 'cuda', but torch finds no GPU"):
        launch(os.getpid, 1, "cuda")


def test_refuses_a_nested_function() -> None:
    def inside() -> None: ...

    with pytest.raises(LaunchRefused, match=r"cannot import function .*inside"):
        launch(inside, 1, "cpu")


def test_refuses_an_argument_that_cannot_travel() -> None:
    with pytest.raises(LaunchRefused, match="an argument of say_rank cannot be sent"):
        launch(targets.say_rank, 1, "cpu", args=(socket.socket(),))


def test_refuses_a_function_typed_into_a_session() -> None:
    code = "from undertow.fabric.launch import launch\ndef typed(): pass\nlaunch(typed, 1, 'cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "function typed was typed into an interactive session" in done.stderr


def test_refuses_an_occupied_port_and_takes_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchRefused, match=f"port {port} is in use by another program"):
            launch(os.getpid, 1, "cpu", port=port)
    assert launch(targets.environment, 1, "cpu", args=("MASTER_PORT",), port=port) == [{"MASTER_PORT": str(port)}]


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_grace")
def test_an_exception_names_its_rank_and_shows_its_traceback() -> None:
    error = failure_of(targets.fail_on, 3, "cpu", args=(1,))
    assert (error.facts["rank"], error.facts["kind"]) == (1, "ValueError")
    assert error.facts["cause"] == "ValueError: bad luck on rank 1"
    assert str(error).startswith("Rank 1 of 3 failed first: ValueError: bad luck on rank 1\nTraceback")
    assert 'raise ValueError(f"bad luck' in error.facts["traceback"]
    assert "rank_process.py" not in error.facts["traceback"]
    ended = "ended by the launcher: killed by signal 15 (SIGTERM)"
    assert error.facts["outcomes"] == [ended, "ValueError: bad luck on rank 1", ended]
    assert pickle.loads(pickle.dumps(error)).facts == error.facts


def test_the_first_cause_is_not_its_echo() -> None:
    error = failure_of(targets.echo_of_a_failure, 3, "cpu")
    assert error.facts["cause"] == "ValueError: the first cause"
    lost = "RankLost: Rank 1 of group test is lost: its process died."
    assert error.facts["outcomes"] == [lost, "ValueError: the first cause", lost]


def test_broken_connections_are_not_blamed_for_a_kill() -> None:
    error = failure_of(targets.kill_self_in_gloo, 3, "cpu", args=(2,))
    assert (error.facts["rank"], error.facts["cause"]) == (2, "killed by signal 9 (SIGKILL)")


@pytest.mark.usefixtures("short_grace")
def test_a_killed_rank_leaves_its_last_call_in_the_flight_record(flight_folder: Path) -> None:
    error = failure_of(targets.die_in_a_call, 2, "cpu", args=(1,))
    assert error.facts["cause"] == "killed by signal 9 (SIGKILL)"
    (file,) = flight_folder.iterdir()
    assert error.facts["flight"] == f"\nFlight record: {file}"
    record = json.loads(file.read_text())
    assert record["cause"] == "rank 1: killed by signal 9 (SIGKILL)"
    calls = record["ranks"][1]["records"]
    assert [(call["operator"], call["state"]) for call in calls] == [("first", "done"), ("last", "running")]
    assert record["ranks"][1]["pid"] > 0
    assert not record["ranks"][1]["left"]


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("_exit", 3, "exit code 3"),
        ("_exit", 0, "exit code 0 before it returned a result"),
        ("exit", 3, "exit code 3"),
        ("exit", "why", "exit code 1: why"),
    ],
)
def test_leaving_without_a_result(how: str, code: object, cause: str) -> None:
    error = failure_of(targets.leave_with, 2, "cpu", args=(code, how))
    assert (error.facts["rank"], error.facts["cause"]) == (1, cause)
    assert error.facts["outcomes"] == ["returned", cause]


def test_results_that_cannot_travel() -> None:
    assert "pickle" in failure_of(targets.return_unpicklable, 1, "cpu").facts["cause"]
    cause = failure_of(targets.return_stubborn, 1, "cpu").facts["cause"]
    assert cause == "its result cannot be rebuilt by the launcher: ValueError: not here"


@pytest.mark.usefixtures("short_grace")
def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    start = time.perf_counter()
    error = failure_of(targets.sleep_ignoring_sigterm, 2, "cpu")
    assert error.facts["outcomes"][1] == "ended by the launcher: killed by signal 9 (SIGKILL)"
    assert time.perf_counter() - start < 5


def test_a_failed_rank_ends_although_its_fabric_does_not_close() -> None:
    start = time.perf_counter()
    error = failure_of(targets.fail_with_a_fabric_that_hangs, 1, "cpu")
    assert error.facts["cause"] == "ValueError: first"
    assert time.perf_counter() - start < 5


@pytest.mark.usefixtures("short_grace")
def test_an_unwritable_flight_folder_does_not_hide_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.FLIGHT_DIR.name, "/proc/none")
    error = failure_of(targets.fail_on, 1, "cpu", args=(0,))
    assert error.facts["cause"] == "ValueError: bad luck on rank 0"
    assert "No flight record could be written" in str(error)


# -- nothing is left -----------------------------------------------------------------------------------------------


class Launcher:
    """A launcher in a process of its own, marked so that everything it starts can be found."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, str(ranks)],
            env={**os.environ, MARK: self.mark, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.pids = [int(self.process.stdout.readline().split()[1]) for _ in range(ranks)]

    def living(self) -> list[str]:
        """Every process that carries the mark, by its command line."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().decode())
            except OSError:
                continue  # gone, or not ours
        return found

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 3
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []
        assert list(self.folder.iterdir()) == []


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    started = Launcher(3, folder)
    assert len(started.living()) >= 4
    yield started
    started.process.kill()
    started.process.communicate()


@pytest.mark.parametrize("to_all", [False, True], ids=["launcher", "terminal"])
def test_an_interrupt_ends_everything(launcher: Launcher, to_all: bool) -> None:
    if to_all:
        os.killpg(launcher.process.pid, signal.SIGINT)
    else:
        launcher.process.send_signal(signal.SIGINT)
    _, err = launcher.process.communicate(timeout=10)
    assert launcher.process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    launcher.assert_nothing_left()


def test_a_killed_launcher_leaves_nothing(launcher: Launcher) -> None:
    launcher.process.kill()
    launcher.assert_nothing_left()


def test_a_killed_fork_server_is_a_failure_and_leaves_nothing(launcher: Launcher) -> None:
    stat = Path(f"/proc/{launcher.pids[0]}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    _, err = launcher.process.communicate(timeout=10)
    assert "LaunchFailed" in err
    assert "killed by signal 9 (SIGKILL)" in err
    launcher.assert_nothing_left()


def test_a_launch_after_the_fork_server_was_killed() -> None:
    launch(os.getpid, 1, "cpu")
    running = launch_module.server._server
    assert running is not None
    running.kill()
    running.wait()
    assert launch(targets.say_rank, 1, "cpu", args=("again",)) == ["again0"]


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_what_a_failed_rank_started_goes_with_it(how: str) -> None:
    marker = f"undertow-child-{os.getpid()}-{how}"
    with pytest.raises(LaunchFailed):
        launch(targets.leave_a_child_behind, 1, device="cpu", args=(marker, how))
    deadline = time.monotonic() + 3
    while (left := subprocess.run(["pgrep", "-f", marker], capture_output=True, check=False).stdout) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize(("bind", "ranks"), [("1", 2), ("0", 2), ("1", 64)])
def test_ranks_are_bound_to_cores_of_their_own_if_there_are_enough(bind: str, ranks: int) -> None:
    mine = sorted(os.sched_getaffinity(0))
    if ranks == 64:
        ranks = len(mine) + 1
    before = os.environ.get(settings.BIND.name)
    os.environ[settings.BIND.name] = bind
    try:
        shares = launch(os.sched_getaffinity, ranks, device="cpu", args=(0,))
    finally:
        os.environ.pop(settings.BIND.name) if before is None else os.environ.update({settings.BIND.name: before})
    if bind == "0" or ranks > len(mine):
        assert all(share == set(mine) for share in shares)
    else:
        assert sorted(core for share in shares for core in share) == mine
