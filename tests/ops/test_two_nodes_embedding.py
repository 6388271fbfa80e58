"""embedding_all_to_all between two nodes: two network namespaces of two ranks, joined by a link of 1 Gbit/s."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "fabric"))
import test_two_hosts as two_hosts  # noqa: E402 - the hosts are built there

hosts = two_hosts.hosts


@pytest.mark.nightly
@two_hosts.needs_namespaces
def test_fused_through_the_proxy_ring_beats_serial(
    hosts: two_hosts.Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every result is exact, or the script fails."""
    monkeypatch.setattr(two_hosts, "SCRIPT", HERE / "two_nodes_embedding_script.py")
    with two_hosts.running(hosts, tmp_path, "check") as agents:
        two_hosts.await_exits(agents, 120, tmp_path)
        assert [agent.returncode for agent in agents] == [0, 0], two_hosts.output_of(tmp_path)
    found: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert all(one["nodes"] == [0, 0, 1, 1] for one in found)
    for ranks in ("four", "two"):
        seconds = found[0][ranks]["seconds"]
        with capsys.disabled():
            length = found[0][ranks]["length"]
            print(f"\ntwo nodes, {ranks} ranks, 1 Gbit/s, {length} values in a bag: ", end="")
            print(", ".join(f"{name} {time * 1e3:.0f} ms" for name, time in seconds.items()))
    seconds = found[0]["two"]["seconds"]  # four ranks need more than two cores to pool and to move at once
    assert seconds["fused"] < seconds["serial"]
