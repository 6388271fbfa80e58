"""Two hosts for real: two network namespaces joined by a link of 1 Gbit/s, each with its own /dev/shm.

What a namespace cannot give is a second kernel: both hosts share a boot id and a process table, so this also shows
that memory is shared by what can be mapped and not by what looks alike. All traffic stays between the namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lost_rank_targets
import pytest
import two_hosts_script as script

import undertow as ut
from undertow.fabric.watchdog import is_dead

SCRIPT = Path(script.__file__)
LIMIT = 5.0  # seconds from a death to the last survivor's RankLost
RATE = 1e9  # bits per second of the link
ADDRESSES = ("10.231.77.1", "10.231.77.2")


def why_not() -> str:
    """Why two namespaces cannot be had here, or nothing."""
    missing = [name for name in ("ip", "tc", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"undertow-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made ({made.stderr.strip()})"
    own = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    return "" if own.returncode == 0 else f"no mount namespace can be made ({own.stderr.strip()})"


REASON = why_not()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=REASON)


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces and the link between them."""

    def __init__(self) -> None:
        tag = uuid.uuid4().hex[:6]
        self.names = [f"undertow-{tag}-{side}" for side in "ab"]
        self.links = [f"ut{tag}{side}" for side in "ab"]

    def build(self) -> None:
        for name in self.names:
            command("ip", "netns", "add", name)
        first, second = self.links
        command(
            "ip", "link", "add", first, "netns", self.names[0], "type", "veth", "peer", "name", second, "netns",
            self.names[1],
        )  # fmt: skip
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            inside = ("ip", "-n", name)
            command(*inside, "address", "add", f"{address}/24", "dev", link)
            command(*inside, "link", "set", "lo", "up")
            command(*inside, "link", "set", link, "up")
            command(
                "tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", "rate", "1gbit", "burst", "256kb",
                "latency", "50ms",
            )  # fmt: skip

    def destroy(self) -> None:
        for name in self.names:  # the links go with their namespaces
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def start(self, folder: Path, mode: str) -> list[subprocess.Popen[bytes]]:
        """torchrun on both hosts, two ranks each. Each host has a /dev/shm of its own."""
        run = (
            "mount -t tmpfs tmpfs /dev/shm && exec {python} -m torch.distributed.run --nnodes 2 --nproc-per-node 2"
            " --node-rank {host} --master-addr {address} --master-port 29400 {script} {folder} {mode}"
        )
        return [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.names[host], "unshare", "-m", "sh", "-c"),
                    run.format(
                        python=sys.executable,
                        host=host,
                        address=ADDRESSES[0],
                        script=SCRIPT,
                        folder=folder,
                        mode=mode,
                    ),
                ],
                env={
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": self.links[host],
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(folder / "temporary"),
                },
                stdout=(folder / f"host-{host}.log").open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for host in (0, 1)
        ]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    built = Hosts()
    try:
        built.build()
        yield built
    finally:
        built.destroy()


@contextlib.contextmanager
def running(hosts: Hosts, folder: Path, mode: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    (folder / "temporary").mkdir()
    agents = hosts.start(folder, mode)
    try:
        yield agents
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.kill()
            agent.wait()
        for pid in pids_of(folder):
            if not is_dead(pid):
                os.kill(pid, signal.SIGKILL)


def pids_of(folder: Path) -> list[int]:
    return [int(text) for file in sorted(folder.glob("pid-*")) if (text := file.read_text())]


def output_of(folder: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(folder.glob("host-*.log")))


def await_exits(agents: list[subprocess.Popen[bytes]], seconds: float, folder: Path) -> None:
    deadline = time.monotonic() + seconds
    try:
        for agent in agents:
            agent.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pytest.fail(output_of(folder))


def await_files(files: list[Path], seconds: float, agents: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + seconds
    while not all(file.exists() and file.read_text() for file in files):
        gone = [agent for agent in agents if agent.poll() not in (None, -signal.SIGKILL)]
        if time.monotonic() > deadline or gone:
            pytest.fail(output_of(files[0].parent))
        time.sleep(0.02)


@needs_namespaces
def test_the_same_script_on_two_hosts(hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(hosts, tmp_path, "check") as agents:
        await_exits(agents, 60, tmp_path)
        assert [agent.returncode for agent in agents] == [0, 0], output_of(tmp_path)
    found: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank, one in enumerate(found):
        assert one["nodes"] == [0, 0, 1, 1]
        assert one["local"] == ([0, 1] if rank < 2 else [2, 3])
        assert one["local nodes"] == [0, 0]
        assert all(one["inside"].values()), one["inside"]
        assert one["proxy"]
        for strategy, sentence in one["refusals"].items():
            assert sentence == (
                f"Strategy '{strategy}' is not available: the group spans several nodes;"
                " possible here: serial:net, chunked:net, signaled:net, fused:net."
            )
        assert "use lane 'net' to reach it" in one["pointer"]
        for call in one["across"]:
            assert call["exact"], call
            # Each half of the sum crosses the link at least once in each direction, whatever the algorithm.
            assert min(call["sent"], call["received"]) >= script.PAYLOAD / 2
            assert call["sent"] + call["received"] >= script.PAYLOAD
            rate = 8 * max(call["sent"], call["received"]) / call["s"]
            assert rate < 1.2 * RATE, "the link is not shaped"  # the bucket lets a burst of 256 KB pass at once
    with capsys.disabled():
        for call in found[0]["across"]:
            rate = 8 * max(call["sent"], call["received"]) / call["s"] / 1e9
            print(
                f"\ntwo hosts, {call['strategy']}, {script.PAYLOAD / 1e6:.1f} MB summed over 4 ranks: "
                f"{call['sent'] / 1e6:.1f} MB sent, {call['received'] / 1e6:.1f} MB received by host 0 "
                f"in {call['s'] * 1e3:.0f} ms, {rate:.2f} Gbit/s",
                end="",
            )
        print()


@needs_namespaces
@pytest.mark.parametrize(
    "event",
    [
        "a killed rank",
        "a pulled cable",
        pytest.param("a killed host", marks=pytest.mark.nightly),
        pytest.param("the store's host killed", marks=pytest.mark.nightly),
    ],
)
def test_a_loss_on_the_other_host(hosts: Hosts, tmp_path: Path, event: str) -> None:
    with running(hosts, tmp_path, "wait") as agents:
        await_files([tmp_path / f"pid-{rank}" for rank in range(4)], 60, agents)
        pids = pids_of(tmp_path)
        death = time.time()
        if event == "a killed rank":
            survivors, said = [0, 1, 2], [f"Rank 3 of group 0 is lost: its process {pids[3]} died."]
            os.kill(pids[3], signal.SIGKILL)
        elif event == "a killed host":
            survivors, said = [0, 1], ["Rank 2 of group 0 is lost: its node has been silent for 3 s."]
            end_host(agents[1], pids[2:])
        elif event == "the store's host killed":  # there is nothing left to ask who it was
            survivors, said = [2, 3], ["Rank unknown of group 0 is lost: "]
            end_host(agents[0], pids[:2])
        else:  # no connection breaks: both sides merely hear nothing any more
            survivors, said = [0, 1, 2, 3], ["Rank 2 of group 0 is lost: its node", "Rank unknown of group 0 is lost: "]
            command("ip", "-n", hosts.names[1], "link", "set", hosts.links[1], "down")
        await_files([tmp_path / f"{rank}.json" for rank in survivors], 15, [])
        for rank in survivors:
            record = json.loads((tmp_path / f"{rank}.json").read_text())
            assert record["time"] - death < LIMIT, record
            assert any(record["error"].startswith(one) for one in said), record


def end_host(agent: subprocess.Popen[bytes], pids: list[int]) -> None:
    """torchrun's agent first, as in a power cut: nobody on that host says anything any more."""
    agent.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# -- named nodes on one machine --------------------------------------------------------------------------------------


def test_named_nodes_stand_in_for_hosts(tmp_path: Path) -> None:
    results = ut.launch(as_two_nodes, 4, device="cpu", deadline=30)
    for rank, (nodes, exact, refused, moved) in enumerate(results):
        assert nodes == (0, 0, 1, 1), rank
        assert exact
        assert "the group spans several nodes; possible here: serial:net, chunked:net" in refused
        assert moved


def as_two_nodes() -> tuple[tuple[int, ...], bool, str, bool]:
    os.environ["UNDERTOW_NODE"] = "a" if int(os.environ["RANK"]) < 2 else "b"
    group = ut.init()
    exact = all(script.product(group, one, group.rank, group.size) for one in ("serial:net", "chunked:net"))
    return group.nodes, exact, script.refusal("chunked:peer"), script.by_proxy(group)


def test_a_rank_lost_on_another_named_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_FLIGHT_DIR", str(tmp_path / "flight"))
    with pytest.raises(ut.UndertowError) as caught:
        ut.launch(lose_a_rank_far_away, 3, device="cpu", args=(str(tmp_path),), deadline=30)
    assert caught.value.facts["cause"] == "killed by signal 9 (SIGKILL)"
    death = float((tmp_path / "death").read_text())
    for rank in (0, 1):
        record = json.loads((tmp_path / f"lost-{rank}.json").read_text())
        assert record["time"] - death < LIMIT
        assert "is lost" in record["error"]


def lose_a_rank_far_away(folder: str) -> None:
    os.environ["UNDERTOW_NODE"] = "here" if int(os.environ["RANK"]) < 2 else "there"
    group = ut.init()
    with lost_rank_targets.recorded(folder, group.rank):
        script.product(group, "serial:net", group.rank, group.size)
        if group.rank == 2:
            (Path(folder) / "death").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            script.product(group, "chunked:net", group.rank, group.size)
