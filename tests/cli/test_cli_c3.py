"""`undertow c3` as a user meets it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from undertow.c3 import knowledge as known
from undertow.cli import app


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def call(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["c3", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def test_a_small_grid(tmp_path: Path) -> None:
    out, plot = tmp_path / "c3.json", tmp_path / "c3.svg"
    said = call(
        "run", "--device", "cpu", "--ranks", "2", "--compute", "stream,attention", "--collective", "all_gather",
        "--sizes", "64K", "--rounds", "3", "--out", str(out), "--plot", str(plot),
    )  # fmt: skip
    assert "4 scenarios, 2 ranks on cpu, lane dma emulated at 500MB/s" in said
    assert "mean share of the ideal speed-up" in said
    assert "fitted on half of the scenarios" in said
    found = json.loads(out.read_text())
    assert [one["scenario"]["lane"] for one in found["scenarios"]] == ["peer", "peer", "dma", "dma"]
    assert {one["label"] for one in found["scenarios"]} <= {"G-long", "C-long", "GC-equal"}
    assert all(one["wrong"] == 0 for result in found["scenarios"] for one in result["together"].values())
    assert found["published_share"]["base"] == 0.21
    assert found["environment"]["device"] == "cpu"
    assert plot.read_text().startswith("<svg")
    kept = known.default_path("cpu", 2)
    learnt = known.load("cpu", 2, 1)
    assert learnt.source.startswith("learnt from 2 scenarios, ")
    assert learnt.source.endswith(" effects assumed")
    assumed, now = dict(known.assumed("cpu", 1).model.effects), dict(learnt.model.effects)
    assert {name for name in now if name.startswith("dma:")} == {name for name in assumed if name.startswith("dma:")}
    assert all(now[name] == assumed[name] for name in now if name.startswith("dma:"))  # that lane was emulated
    assert now["peer:base"] != assumed["peer:base"]
    kept.unlink()


def test_advice() -> None:
    said = call("advise", "--compute", "2", "--collective", "1", "--by-copies", "1.5", "--size", "64M")
    assert "By the papers' rules:" in said
    assert said.count(">") == 1
    found = json.loads(call("advise", "--compute", "2", "--collective", "1", "--json"))
    assert found["lane"] == "peer"
    assert found["source"] == "assumed"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("run", "--compute", "sleep"), 1, "--compute is 'sleep'"),
        (("run", "--collective", "gossip"), 1, "--collective is 'gossip'"),
        (("run", "--lanes", "road"), 1, "--lanes is 'road'"),
        (("run", "--sizes", "0"), 1, "--sizes is 0"),
        (("run", "--out", "/proc/no/such"), 1, "--out is /proc/no/such"),
        (("run", "--sizes", "900000G", "--device", "cpu"), 1, "--sizes is 966367641600000 bytes, for which"),
        (("run", "--plot", "/proc/no/such"), 1, "--plot is /proc/no/such"),
        (("run", "--sizes", "many"), 2, "is no size"),
        (("advise", "--compute", "-1", "--collective", "1"), 2, "--compute"),
        (("advise", "--compute", "1", "--collective", "1", "--memory", "3"), 2, "--memory"),
    ],
)
def test_misuse(arguments: tuple[str, ...], code: int, said: str) -> None:
    assert said in call(*arguments, code=code)
