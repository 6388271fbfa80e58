"""`undertow sim` as a user meets it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from undertow.cli import app
from undertow.cli.sim import nodes_of
from undertow.errors import InvalidArgument
from undertow.fabric.events import Timeline


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def call(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["sim", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def test_strategies_at_each_scale(tmp_path: Path) -> None:
    trace, prefix = tmp_path / "trace.json", tmp_path / "step"
    said = call(
        "transformer", "--machine", "h100-pod", "--sweep", "nodes=1..2", "--timeline", str(trace), "--chakra",
        str(prefix), "--json",
    )  # fmt: skip
    found = json.loads(said)
    assert [(line["nodes"], line["strategy"]) for line in found["lines"]] == [
        (nodes, strategy) for nodes in (1, 2) for strategy in ("serial", "chunked", "fused")
    ]
    fused = found["lines"][-1]
    assert sum(fused["resources"].values()) == pytest.approx(fused["seconds"])
    assert Timeline.load(trace).span("compute") <= fused["seconds"] * 1.001
    again = json.loads(call(str(prefix), "--machine", "h100-pod", "--sweep", "nodes=2", "--json"))
    assert again["lines"][0]["seconds"] == pytest.approx(fused["seconds"], rel=0.05)  # whole microseconds


def test_tables_for_people() -> None:
    said = call("all_gather", "--machine", "h100x8", "--size", "1M", "--why")
    assert said.startswith("all_gather on h100x8: 8 H100 behind an NVSwitch\n")
    assert "| all_gather_ring " in said
    assert "nvlink: twice the bandwidth" in said
    assert "h100-pod" in call("x", "--machine", "list")
    named = call("list")
    assert "all_reduce       ring, one_shot" in named
    assert "dlrm             serial, chunked, fused" in named
    assert "mi300x8" in named
    by_engines = call("all_gather", "--machine", "mi300x8", "--size", "1M", "--lane", "dma", "--why")
    assert "copy engines that add" in by_engines


def test_a_users_program_and_its_timeline(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from undertow.collective import program\n"
        "@program('all_gather')\n"
        "def mine(c):\n"
        "    for rank in range(c.ranks):\n"
        "        for to in range(c.ranks):\n"
        "            c.rank(rank).input[0].copy(c.rank(to).output[rank])\n"
    )
    trace = tmp_path / "trace.json"
    assert "| mine " in call(f"{path}:mine", "--machine", "a100x8", "--timeline", str(trace))
    assert len(Timeline.load(trace)) > 8


def test_what_is_refused(tmp_path: Path) -> None:
    circle = tmp_path / "circle.toml"
    operations = [
        f"[[operations]]\nname='{one}'\nkind='compute'\nseconds=1\nafter=['{to}']" for one, to in ("ab", "ba")
    ]
    circle.write_text("\n".join(["format='undertow step 1'", "name='circle'", *operations]))
    for arguments, sentence in (
        (("nothing",), "target is 'nothing'"),
        (("dlrm", "--machine", "no-such"), "machine is 'no-such'"),
        (("dlrm", "--sweep", "nodes=5..2"), "--sweep is 'nodes=5..2'"),
        (("ring", "--sweep", "nodes=1000000000"), "ranks"),
        (("ring", "--chakra", str(tmp_path / "x")), "it has no step"),
        ((str(tmp_path / "absent.toml"),), "readable file"),
        ((str(tmp_path / "absent.et"),), "no traces"),
        ((str(circle),), "step.operations[0].after is 'b', but must be of operations before it"),
        (("dlrm", "--lane", "dma"), "machine is h100x8, without copy engines"),
        (("dlrm", "--lane", "air"), "--lane is 'air'"),
        (("ring", "--machine", "h100-pod", "--sweep", "nodes=8192"), "ranks is 65536, but must be so few"),
        (("ring", "--tile", "0"), "tile is 0"),
        (("ring", "--timeline", "/proc/no/file"), "--timeline is /proc/no/file"),
        (("dlrm", "--chakra", "/proc/no/step"), "--chakra is /proc/no/step.0.et"),
        (("ring", "--tile", "64", "--size", "2M", "--timeline", str(tmp_path / "t")), "a larger --tile"),
    ):
        said = call(*arguments, code=1)
        assert sentence in said
        assert said.count("\n") == 1


def test_sweeps() -> None:
    assert nodes_of("nodes=8..1024") == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert nodes_of("nodes=1,5") == [1, 5]
    for bad in ("nodes=", "ranks=1..2", "nodes=0..3", "nodes=1..x", "nodes=1-2"):
        with pytest.raises(InvalidArgument):
            nodes_of(bad)
