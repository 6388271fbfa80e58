"""Programs that know of nodes, on two of them: two network namespaces joined by a link of 1 Gbit/s, two ranks each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from undertow.collective.algorithms import LIBRARY

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "fabric"))
import test_two_hosts as two_hosts  # noqa: E402 - the hosts are built there

GAIN = 1.5  # of hierarchical over a ring that crosses the link at every hop; it sends a third as much over the link


hosts = two_hosts.hosts


@two_hosts.needs_namespaces
def test_programs_across_two_nodes(
    hosts: two_hosts.Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every result is exact, or the script fails."""
    LIBRARY["ring"].compile(2, target="staged")  # fills Numba's cache: four ranks at once would take long
    monkeypatch.setattr(two_hosts, "SCRIPT", HERE / "two_nodes_script.py")
    with two_hosts.running(hosts, tmp_path, "check") as agents:
        two_hosts.await_exits(agents, 60, tmp_path)
        assert [agent.returncode for agent in agents] == [0, 0], two_hosts.output_of(tmp_path)
    found: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert all(one["nodes"] == [0, 0, 1, 1] for one in found)
    assert "helper thread inside a node; torch.distributed (gloo) between nodes" in found[0]["lanes"]
    seconds = found[0]["seconds"]
    with capsys.disabled():
        print("\ntwo nodes of two ranks, 1 Gbit/s, 8 MB: ", end="")
        print(", ".join(f"{name} {time * 1e3:.0f} ms" for name, time in seconds.items()))
    assert seconds["alternating_ring"] >= GAIN * seconds["hierarchical"]
