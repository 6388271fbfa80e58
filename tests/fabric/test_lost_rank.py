"""A lost rank is an error, not a hang: killed, stopped, stuck, gone early or failed, under `launch` and torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lost_rank_targets as targets
import pytest

import undertow as ut
from undertow import settings
from undertow.errors import LaunchFailed
from undertow.fabric import launch as launch_module
from undertow.fabric.watchdog import is_dead

MARK = "UNDERTOW_TEST_MARK"
LIMIT = 5.0  # seconds from a death to the last survivor's RankLost
SCRIPT = Path(targets.__file__)


def marked_processes(mark: str) -> list[str]:
    """Living processes that inherited the mark, by their command line."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().decode())
        except OSError:
            continue  # gone, or not ours
    return found


class Traces:
    """What a job may leave behind: processes, files in its own temporary folder, names in the shared places."""

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        self.mark = uuid.uuid4().hex
        self.environment = {MARK: self.mark, "TMPDIR": str(temporary)}
        self._names = self._shared_names()

    def assert_none(self) -> None:
        deadline = time.monotonic() + 3
        while (left := marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []
        assert self._shared_names() - self._names == set()
        # torchrun keeps its logs; they are its own.
        assert [path for path in self.temporary.iterdir() if not path.name.startswith("torchelastic")] == []

    @staticmethod
    def _shared_names() -> set[Path]:
        """Everything in /dev/shm, and what could only be ours in /tmp, where others write as well."""
        return {*Path("/dev/shm").iterdir(), *Path("/tmp").glob("*undertow*"), *Path("/tmp").glob("*gloo*")}


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    return Traces(temporary)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where ranks write down what happened to them. Flight records go beside."""
    monkeypatch.setenv(settings.FLIGHT_DIR.name, str(tmp_path / "flight"))
    return str(tmp_path)


class Killer(threading.Thread):
    """Sends `number` to `victim`, `delay` seconds after every rank has said that it is calling."""

    def __init__(self, folder: str, ranks: int, victim: int, delay: float, number: signal.Signals) -> None:
        super().__init__(daemon=True)
        self.time = 0.0
        self.pid = 0
        self._files = [Path(folder) / f"pid-{rank}" for rank in range(ranks)]
        self._victim, self._delay, self._number = victim, delay, number

    def run(self) -> None:
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in self._files):
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)
        self.pid = int(self._files[self._victim].read_text())
        time.sleep(self._delay)
        self.time = time.time()
        os.kill(self.pid, self._number)


def lost(folder: str, rank: int) -> tuple[float, str]:
    """When `rank` raised RankLost, and its sentence."""
    record = json.loads((Path(folder) / f"lost-{rank}.json").read_text())
    return float(record["time"]), str(record["error"])


# -- killed ----------------------------------------------------------------------------------------------------------


def kill_once(seed: int, folder: str, traces: Traces) -> float:
    """One launch of which a random rank is killed at a random moment. Seconds until the last survivor knew."""
    chance = random.Random(seed)
    ranks, delay = chance.randint(2, 4), chance.uniform(0, 0.4)
    victim = chance.randrange(ranks)
    print(f"seed {seed}: rank {victim} of {ranks} is killed after {delay * 1e3:.0f} ms")
    killer = Killer(folder, ranks, victim, delay, signal.SIGKILL)
    killer.start()
    with pytest.raises(LaunchFailed) as caught:
        ut.launch(targets.call_forever, ranks, device="cpu", args=(seed, folder), deadline=30, env=traces.environment)
    facts = caught.value.facts
    assert (facts["rank"], facts["cause"]) == (victim, "killed by signal 9 (SIGKILL)"), caught.value
    survivors = [rank for rank in range(ranks) if rank != victim]
    for rank in survivors:
        assert facts["outcomes"][rank].startswith("RankLost: Rank "), facts["outcomes"]
    latest = max(lost(folder, rank)[0] for rank in survivors) - killer.time
    assert latest < LIMIT
    assert any(f"Rank {victim} of group" in lost(folder, rank)[1] for rank in survivors), facts["outcomes"]

    (file,) = (Path(folder) / "flight").iterdir()
    record = json.loads(file.read_text())
    dead = record["ranks"][victim]
    assert (dead["pid"], dead["left"]) == (killer.pid, False)
    assert dead["records"][-1]["sequence"] == dead["calls"]
    assert dead["records"][-1]["operator"] == "matmul_all_reduce"
    assert dead["records"][-1]["plan"].split()[0] in targets.STRATEGIES
    for rank in survivors:
        assert abs(record["ranks"][rank]["calls"] - dead["calls"]) <= 1
    traces.assert_none()
    return latest


@pytest.mark.parametrize("seed", range(10))
def test_a_killed_rank_is_noticed_by_all(seed: int, folder: str, traces: Traces) -> None:
    kill_once(seed, folder, traces)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_killed_rank_is_noticed_by_all_nightly(seed: int, folder: str, traces: Traces) -> None:
    kill_once(seed, folder, traces)


def test_a_rank_killed_before_it_made_the_group(folder: str, traces: Traces) -> None:
    killer = Killer(folder, 3, 1, 0.2, signal.SIGKILL)
    killer.start()
    facts = failure(targets.die_before_the_group, 3, folder, traces=traces)
    assert facts["cause"] == "killed by signal 9 (SIGKILL)"
    for rank in (0, 2):
        when, sentence = lost(folder, rank)
        assert when - killer.time < LIMIT
        assert sentence == f"Rank 1 of group 0 is lost: its process {killer.pid} died."
    traces.assert_none()


# -- not killed, but of no use ---------------------------------------------------------------------------------------

LANES = ("serial:net", "chunked:peer", "serial:dma")


def failure(
    function: Callable[..., object], ranks: int, *arguments: object, traces: Traces, deadline: float = 30
) -> dict[str, Any]:
    """The facts of a launch that must fail."""
    with pytest.raises(LaunchFailed) as caught:
        ut.launch(function, ranks, device="cpu", args=arguments, deadline=deadline, env=traces.environment)
    return caught.value.facts


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a rank that sleeps soon after the others have raised."""
    monkeypatch.setattr(launch_module, "GRACE_SECONDS", 0.5)


@pytest.mark.parametrize("strategy", LANES)
def test_a_rank_that_raises_is_the_first_cause(strategy: str, folder: str, traces: Traces) -> None:
    facts = failure(targets.misbehave, 3, "raise", strategy, folder, traces=traces)
    assert (facts["rank"], facts["cause"]) == (1, "ValueError: an ordinary mistake")
    assert all(facts["outcomes"][rank].startswith("RankLost: Rank 1 of group 0 is lost") for rank in (0, 2)), facts
    traces.assert_none()


@pytest.mark.parametrize("strategy", LANES)
def test_a_rank_that_leaves_early_is_lost_at_the_deadline(strategy: str, folder: str, traces: Traces) -> None:
    facts = failure(targets.misbehave, 2, "return", strategy, folder, traces=traces, deadline=2)
    assert facts["outcomes"][1] == "returned"
    assert facts["outcomes"][0].startswith("RankLost: Rank 1 of group 0 is lost: "), facts["outcomes"]
    traces.assert_none()


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(("how", "strategy"), [*(("sleep", strategy) for strategy in LANES), ("stop", "serial:peer")])
def test_a_stuck_rank_is_lost_at_the_deadline(how: str, strategy: str, folder: str, traces: Traces) -> None:
    began = time.monotonic()
    facts = failure(targets.misbehave, 3, how, strategy, folder, traces=traces, deadline=2)
    assert time.monotonic() - began < 2 + LIMIT
    for rank in (0, 2):
        # Whoever waits for the stuck rank names it; whoever waits for a rank that waits for it may name that one.
        sentence = facts["outcomes"][rank]
        assert sentence.startswith("RankLost: Rank "), sentence
        assert "2 s" in sentence
    named = [outcome for outcome in facts["outcomes"] if outcome.startswith("RankLost: Rank 1 of group 0 is lost: ")]
    assert named, facts["outcomes"]
    assert any("its last call here was matmul_all_reduce(M 8, N 8, float32)" in outcome for outcome in named), named
    traces.assert_none()


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("strategy", LANES)
def test_an_interrupt_ends_a_wait_at_once(strategy: str, folder: str, traces: Traces) -> None:
    interrupter = Killer(folder, 2, 0, 0.3, signal.SIGINT)
    interrupter.start()
    began = time.monotonic()
    facts = failure(targets.misbehave, 2, "sleep", strategy, folder, traces=traces)
    assert facts["outcomes"][0] == "KeyboardInterrupt"
    assert time.monotonic() - began < LIMIT
    traces.assert_none()


# -- torchrun --------------------------------------------------------------------------------------------------------


class Torchrun:
    """A torchrun job of this file's script; everything it starts carries the mark."""

    def __init__(self, ranks: int, traces: Traces, *arguments: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        self.process = subprocess.Popen(
            [*command, str(SCRIPT), *arguments],
            env={**os.environ, **traces.environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def output(self, seconds: float = 60) -> str:
        return self.process.communicate(timeout=seconds)[0]

    def close(self) -> None:
        """Whatever is left of a job that failed its test goes with its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


def await_exit(pid: int, seconds: float) -> float:
    """Seconds until the process has ended, whoever collects it."""
    began = time.monotonic()
    while not is_dead(pid):
        assert time.monotonic() - began < seconds, f"process {pid} still runs after {seconds:g} s"
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("strategy", "ending"),
    [
        ("chunked:peer", "caught"),
        pytest.param("serial:net", "uncaught", marks=pytest.mark.nightly),
        pytest.param("serial:dma", "uncaught", marks=pytest.mark.nightly),
    ],
)
def test_survivors_under_torchrun_raise_and_end_by_themselves(
    strategy: str, ending: str, folder: str, traces: Traces
) -> None:
    killer = Killer(folder, 3, 1, 0.1, signal.SIGKILL)
    killer.start()
    job = Torchrun(3, traces, "job", folder, strategy, ending)
    try:
        killer.join(60)
        survivors = {rank: int((Path(folder) / f"pid-{rank}").read_text()) for rank in (0, 2)}
        for pid in survivors.values():  # they ignore torchrun's SIGTERM, so this is their own end
            await_exit(pid, LIMIT)
        output = job.output()
    finally:
        job.close()
    for rank in survivors:
        when, sentence = lost(folder, rank)
        assert when - killer.time < LIMIT
        assert sentence == f"Rank 1 of group 0 is lost: its process {killer.pid} died."
    assert "terminate called" not in output, output  # no thread of ours may touch torch after the interpreter's end
    assert ("undertow.errors.RankLost: Rank 1 of group 0 is lost" in output) == (ending == "uncaught"), output
    traces.assert_none()


def test_ranks_that_end_in_order_are_not_lost(folder: str, traces: Traces) -> None:
    job = Torchrun(3, traces, "orderly", folder)
    try:
        output = job.output()
        assert job.process.returncode == 0, output
        assert (Path(folder) / "still-whole").exists()
        assert "lost" not in output
    finally:
        job.close()
    traces.assert_none()


def test_a_store_that_does_not_answer() -> None:
    took, said = ut.launch(targets.a_store_that_does_not_answer, 1, device="cpu", deadline=2)[0]
    assert said == "Rank unknown of group 0 is lost: connecting did not complete in 2 s."
    assert took < LIMIT
