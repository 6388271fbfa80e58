"""The `undertow` command as a user meets it: a process with exit codes, standard output and standard error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import undertow
from undertow.fabric.timeline import Timeline

SOURCE = Path(undertow.__file__).parents[1]
COMMAND = [sys.executable, "-c", "from undertow.cli import main; main()"]
MARK = "UNDERTOW_TEST_MARK"  # found in the environment of every process that a command leaves behind

SCRIPT = """
import os, sys, time
import undertow as ut

group = ut.init()
print("arguments", group.rank, group.size, sys.argv[1:], flush=True)
if "--fail" in sys.argv and group.rank == 1:
    raise ValueError("rank one has had enough")
if "--sleep" in sys.argv:
    time.sleep(120)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UNDERTOW_")}
    folders = {"UNDERTOW_FLIGHT_DIR": str(tmp_path / "flight"), "UNDERTOW_CACHE_DIR": str(tmp_path / "cache")}
    return {**kept, **folders, MARK: str(tmp_path), "PYTHONPATH": str(SOURCE), "COLUMNS": "160"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def call(*arguments: object, env: dict[str, str], code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def left_behind(mark: str) -> list[str]:
    """Processes that carry the mark; given a second, for the kernel ends a fork server's children one by one."""
    deadline = time.monotonic() + 2
    while found := list(_marked(mark)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return found


def _marked(mark: str) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                yield (process / "cmdline").read_text()
        except OSError:  # ended meanwhile, or somebody else's
            continue


# -- the command itself ----------------------------------------------------------------------------------------------


def test_version(environment: dict[str, str]) -> None:
    assert call("--version", env=environment).stdout == f"undertow {undertow.__version__}\n"


def test_help_names_every_command(environment: dict[str, str]) -> None:
    text = call("--help", env=environment).stdout
    assert all(name in text for name in ("demo", "run", "doctor", "profile", "collective", "plan", "--version"))


def test_the_commands_import_nothing_slow_by_themselves(environment: dict[str, str]) -> None:
    """What `import undertow` loads is not theirs to answer for; they add no torch, numba or rich of their own."""
    program = """
        import sys, time
        import undertow
        before = set(sys.modules)
        began = time.perf_counter()
        import undertow.cli
        slow = {"torch", "numba", "numpy", "undertow.fabric.launch", "undertow.report.demo"}
        added = slow & (set(sys.modules) - before)
        assert not added, added
        assert not {"undertow.report.demo", "undertow.fabric.profile", "undertow.plan.machine"} & set(sys.modules)
        assert time.perf_counter() - began < 1.5
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("dance",),
        ("run", "-n", "0", __file__),
        ("run", "-n", "2", "/nowhere/script.py"),
        ("demo", "--ranks", "1"),
    ],
)
def test_misuse_exits_2(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    done = call(*arguments, env=environment, code=2)
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_one_sentence(environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "sim", "list"], env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "Nothing more can be written: no space left on device.\n")


# -- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_for_programs(environment: dict[str, str]) -> None:
    found = json.loads(call("doctor", "--json", env=environment).stdout)
    assert found["format"] == "undertow diagnosis 1"
    assert {"topic", "name", "value", "problem"} == set(found["findings"][0])
    strategies = {one["strategy"]: one for one in found["strategies"]}
    assert strategies["chunked:net"]["available"]
    assert all(one["reason"] for one in strategies.values())


def test_doctor_for_people(environment: dict[str, str]) -> None:
    done = call("doctor", env=environment)
    assert "serial:net" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


# -- run -------------------------------------------------------------------------------------------------------------


def test_run_passes_arguments_untouched(script: Path, environment: dict[str, str]) -> None:
    arguments = ["--device", "x", "-n", "9", "--", "--help", "a b"]
    done = call("run", "-n", 2, "--device", "cpu", script, *arguments, env=environment)
    assert sorted(done.stdout.splitlines()) == [f"arguments {rank} 2 {arguments}" for rank in range(2)]


def test_run_reports_the_first_cause_and_leaves_nothing(script: Path, environment: dict[str, str]) -> None:
    done = call("run", "-n", 3, "--device", "cpu", script, "--fail", env=environment, code=1)
    assert "Rank 1 of 3 failed first: ValueError: rank one has had enough" in done.stderr
    assert f'File "{script}", line 8' in done.stderr
    assert "Flight record: " in done.stderr
    assert "launch.py" not in done.stderr  # our own frames would push the user's out of sight
    assert left_behind(environment[MARK]) == []


def test_a_refusal_is_one_sentence(script: Path, environment: dict[str, str]) -> None:
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = call("run", "-n", 2, "--device", "cuda", script, env=environment, code=1)
    assert done.stderr == "Cannot launch: device is 'cuda', but torch finds no GPU on this machine.\n"
    done = call("demo", "--device", "cpu", "--out", "/proc/nowhere/timeline.json", env=environment, code=1)
    assert done.stderr.startswith("--out is /proc/nowhere/timeline.json, but must be a file that can be written")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_ends_cleanly_when_told_to(
    number: signal.Signals, code: int, script: Path, environment: dict[str, str]
) -> None:
    arguments = ["run", "-n", "2", "--device", "cpu", str(script), "--sleep"]
    with subprocess.Popen(
        [*COMMAND, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().startswith("arguments")
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in said
    assert left_behind(environment[MARK]) == []


# -- demo ------------------------------------------------------------------------------------------------------------

GRAINS = ("serial", "chunked", "signaled")
STRATEGIES = [f"{grain}:{lane}" for lane in ("net", "peer", "dma", "dma (paced)") for grain in GRAINS]


def test_demo(environment: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "deeper" / "timeline.json"
    results, shown = tmp_path / "results.json", tmp_path / "report.html"
    done = call("demo", "--quick", "--device", "cpu", "--ranks", 2, "--out", out, "--results", results, env=environment)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    header, _, *rows = rows
    assert header[:5] == ["strategy", "time", "speed-up over serial", "overlap E", "share of ideal"]
    assert [row[0] for row in rows] == STRATEGIES
    assert all(("emulated" in row[5]) == ("paced" in row[0]) for row in rows)
    assert "Every result equals the reference exactly, on all 2 ranks." in done.stdout
    assert "Rows marked emulated are emulated: dma (paced) is an emulated link of 1 GB/s, 20 us." in done.stdout
    assert f"is in {out}" in done.stdout.replace("\n", " ")
    _check_timeline(out)
    call("report", results, out, "--out", shown, env=environment)
    for strategy in STRATEGIES:
        assert f"<td>{strategy}</td>" in shown.read_text()
    assert shown.read_text().count('data-kind="timeline"') == 1
    assert left_behind(environment[MARK]) == []


def _check_timeline(path: Path) -> None:
    chrome = json.loads(path.read_text())
    entries: list[dict[str, Any]] = chrome["traceEvents"]
    assert {entry["ph"] for entry in entries} == {"M", "X"}
    assert all(entry["ts"] >= 0 and entry["dur"] >= 0 for entry in entries if entry["ph"] == "X")
    timeline = Timeline.from_chrome(chrome)
    assert timeline.ranks == [0, 1]
    assert {"call", "compute", "dma", "net"} <= set(timeline.engines)
    for rank in timeline.ranks:
        calls = {event.name: event for event in timeline.events if event.engine == "call" and event.rank == rank}
        assert set(calls) == set(STRATEGIES)
    for grain in ("chunked", "signaled"):
        assert _inside(timeline, f"{grain}:dma (paced)").overlap("compute", "dma") > 0
    assert _inside(timeline, "serial:dma (paced)").overlap("compute", "dma") == 0


def _inside(timeline: Timeline, name: str) -> Timeline:
    """What happened during the call of that name, rank by rank."""
    calls = {event.rank: event for event in timeline.events if event.name == name}
    return Timeline(
        event for event in timeline.events if calls[event.rank].start_ns <= event.start_ns < calls[event.rank].end_ns
    )


# -- profile ---------------------------------------------------------------------------------------------------------


def test_profile_writes_to_the_cache(environment: dict[str, str], tmp_path: Path) -> None:
    from undertow.plan.machine import Machine

    done = call("profile", "--quick", "--device", "cpu", "--ranks", 2, env=environment)
    path = tmp_path / "cache" / "machine-cpu-2.toml"
    assert f"The machine file is {path}." in done.stdout
    machine = Machine.load(path)
    assert set(machine.lanes) == {"net", "peer", "dma"}
    assert machine.interference is not None
    assert all(set(lanes) == {"net", "peer", "dma"} for lanes in machine.collectives.values())


def test_a_wrong_log_level_is_one_sentence() -> None:
    done = subprocess.run([*COMMAND, "--log", "loud", "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("log level is 'loud', but must be one of")
