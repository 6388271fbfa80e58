"""`undertow plan` as a user meets it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from undertow.cli import app
from undertow.fabric import launch as launching
from undertow.ops.explain import Choice, Explanation
from undertow.plan.plan import Plan

SHAPE = ("--m", "64", "--n", "48", "--k", "32")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own; and the signal handler that a command sets is taken back."""
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("UNDERTOW_FLIGHT_DIR", str(tmp_path / "flight"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def call(*arguments: str, folder: Path, code: int = 0) -> SimpleNamespace:
    """In this process: each new one would load torch anew."""
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == code, done.output
    return SimpleNamespace(stdout=done.stdout, stderr=done.stderr)


def test_a_plan_is_made_shown_and_removed(folder: Path) -> None:
    assert call("show", folder=folder).stdout == f"There are no such plans in {folder / 'plans'}.\n"
    common = ("--device", "cpu", "--ranks", "2", "--seconds", "0.1")
    said = call("tune", "matmul_reduce_scatter", *SHAPE, "--dtype", "bfloat16", *common, folder=folder).stdout
    assert said.startswith("matmul_reduce_scatter, x [64, 32], w [32, 48], bfloat16, 2 ranks\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("|")]
    assert rows[0] == ["strategy", "parcels", "predicted", "measured", "speed-up over serial", ""]
    assert [row[5] for row in rows[2:]].count("chosen") == 1
    grains = {row[0].split(":")[0] for row in rows[2:]}  # what is predicted to be far slower is left out
    assert "serial" in grains
    assert grains <= {"serial", "chunked", "signaled"}
    assert "serial" in said.splitlines()[-3]
    assert said.endswith(f"The plan is kept in {folder / 'plans'}.\n")

    call("tune", "all_gather_matmul", *SHAPE, *common, folder=folder)
    (folder / "plans" / "matmul_all_reduce-damaged.json").write_text("{")
    text = call("show", folder=folder).stdout
    assert "matmul_reduce_scatter-64x48x32-bfloat16-2ranks-cpu" in text
    assert "damaged" in text
    found = json.loads(call("show", "--json", folder=folder).stdout)
    assert [one["damaged"] for one in found] == [False, True, False]
    assert found[2]["measured_seconds"] > 0
    assert found[2]["problem"].startswith("matmul_reduce_scatter-64x48x32-bfloat16-2ranks")
    (only,) = json.loads(call("show", "all_gather", "--json", folder=folder).stdout)
    assert only["problem"].startswith("all_gather_matmul-64x48x32-float32-2ranks")

    assert call("clear", "all_gather", folder=folder).stdout == f"1 plan was removed from {folder / 'plans'}.\n"
    assert call("clear", folder=folder).stdout == f"2 plans were removed from {folder / 'plans'}.\n"
    assert json.loads(call("show", "--json", folder=folder).stdout) == []


def test_plans_for_tokens(folder: Path) -> None:
    common = ("--device", "cpu", "--ranks", "2", "--seconds", "0.1")
    said = call("tune", "all_to_all_matmul", *SHAPE, *common, folder=folder).stdout
    assert said.startswith("all_to_all_matmul, x [64, 32], w [32, 48], float32, 2 ranks\n")
    said = call("tune", "matmul_all_to_all", *SHAPE, "--experts", "3", *common, folder=folder).stdout
    assert said.startswith("matmul_all_to_all, x [64, 32], w [3, 32, 48], float32, 2 ranks\n")
    found = json.loads(call("show", "--json", folder=folder).stdout)
    assert [one["problem"].split("-float32")[0] for one in found] == [
        "all_to_all_matmul-upto64x48x32", "matmul_all_to_all-upto64x48x32-3experts",
    ]  # fmt: skip
    call("tune", "all_to_all_matmul", *SHAPE, "--device", "cpu", "--ranks", "3", "--seconds", "0.1", folder=folder)
    found = json.loads(call("show", "3ranks", "--json", folder=folder).stdout)
    assert found[0]["problem"].startswith("all_to_all_matmul-upto64x")  # every rank gets 64 rows, and not 66


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("dance",),
        ("tune",),
        ("tune", "matmul"),
        ("tune", "matmul_all_reduce", "--m", "4", "--n", "4"),
        ("tune", "matmul_all_reduce", "--m", "0", "--n", "4", "--k", "4"),
        ("tune", "matmul_all_reduce", *SHAPE, "--dtype", "int8"),
        ("tune", "matmul_all_reduce", *SHAPE, "--experts", "2"),
    ],
)
def test_misuse_exits_2(arguments: tuple[str, ...], folder: Path) -> None:
    call(*arguments, folder=folder, code=2)


def test_a_refusal_is_one_sentence(folder: Path) -> None:
    done = call("tune", "matmul_all_reduce", *SHAPE, "--device", "cuda", folder=folder, code=1)
    assert done.stderr == "Cannot launch: device is 'cuda', but torch finds no GPU on this machine.\n"
    large = ("--m", "1000000", "--n", "1000000", "--k", "100000", "--device", "cpu", "--ranks", "2")
    done = call("tune", "matmul_all_reduce", *large, folder=folder, code=1)
    assert done.stderr.startswith("the problem is 1000000 x 1000000 x 100000, for which 2 ranks need about")
    assert done.stderr.count("\n") == 1


def test_a_plan_that_cannot_be_kept_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is left out: what ranks bring home when nothing was written."""
    plan = Plan("serial", "peer", ((0, 64),))
    found = Explanation("matmul_all_reduce", "x [64, 32]", "0", 1, "auto", Choice(plan, "Because."))
    monkeypatch.setattr(launching, "launch", lambda *arguments, **options: [found])
    said = call("tune", "matmul_all_reduce", *SHAPE, "--ranks", "2", folder=folder, code=1)
    assert said.stderr == f"The plan is not kept: nothing could be written to {folder / 'plans'}.\n"
