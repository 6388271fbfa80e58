"""Plans on disk: kept, found again, and never harmful, whatever the files hold and whoever writes them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import plan_machines as machines
import pytest

from undertow.plan import cache
from undertow.plan.plan import Plan, split
from undertow.plan.tuner import Trial

PROBLEM = machines.problem(m=64, n=64, k=64)
PLAN = Plan("signaled", "dma", split(4, 2), tile=(16, 64))
VERSIONS = {"undertow": "0.1.0", "torch": "2.11"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path))
    return tmp_path / "plans"


def keep(plan: Plan = PLAN) -> Path:
    trials = [Trial(PLAN, 1e-3, (2e-3, 3e-3, 4e-3)), Trial(PLAN, None, ()), Trial(PLAN, 1.0, (float("inf"),))]
    assert cache.store(PROBLEM, "node", VERSIONS, plan, "It was faster.", trials)
    return cache.path_of(PROBLEM, "node", VERSIONS)


def test_what_is_kept_is_found(folder: Path) -> None:
    assert cache.load(PROBLEM, "node", VERSIONS) is None
    path = keep()
    entry = cache.load(PROBLEM, "node", VERSIONS)
    assert entry is not None
    assert (entry.plan, entry.reason, entry.machine, entry.versions) == (PLAN, "It was faster.", "node", VERSIONS)
    assert entry.trials[0] == (PLAN.digest, "signaled:dma", 2, 1e-3, 3e-3)
    assert entry.trials[1][3:] == (None, None)
    assert entry.trials[2][3:] == (1.0, None)
    assert [one.name for one in folder.iterdir()] == [path.name]


def test_another_problem_machine_or_version_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    keep()
    assert cache.load(machines.problem(m=65, n=64, k=64), "node", VERSIONS) is None
    assert cache.load(PROBLEM, "another node", VERSIONS) is None
    assert cache.load(PROBLEM, "node", {**VERSIONS, "torch": "2.12"}) is None
    assert not caplog.records


def whole() -> dict[str, Any]:
    return json.loads(keep().read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b"x" * (cache.MOST_BYTES + 1),
        {"format": "undertow plan 1"},
        {"plan": {}},
        {"plan": None},
        {"plan": {**json.loads(PLAN.to_json()), "lane": "moon"}},
        {"plan": {**json.loads(PLAN.to_json()), "parcels": [[0, 3]]}},
        {"key": "another"},
        {"machine": 7},
        {"versions": []},
        {"trials": 3},
        {"trials": [[1]]},
        {"trials": [["a", "b", "c", "d"]]},
        {"surprise": 1},
    ],
)
def test_a_damaged_file_is_a_miss_and_one_line(damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    content = damage if isinstance(damage, bytes) else json.dumps({**whole(), **damage}).encode()
    keep().write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="undertow"):
        assert cache.load(PROBLEM, "node", VERSIONS) is None
    (record,) = caplog.records
    assert "not used" in record.getMessage()
    assert "\n" not in record.getMessage()
    caplog.clear()
    keep()  # and it can be written anew
    assert cache.load(PROBLEM, "node", VERSIONS) is not None


def test_what_is_no_file_is_a_miss_that_does_not_block(caplog: pytest.LogCaptureFixture) -> None:
    path = keep()
    path.unlink()
    os.mkfifo(path)
    assert cache.load(PROBLEM, "node", VERSIONS) is None
    path.unlink()
    path.mkdir()
    assert cache.load(PROBLEM, "node", VERSIONS) is None
    assert len(caplog.records) == 2


def test_a_folder_that_cannot_be_written_is_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("in the way")
    assert not cache.store(PROBLEM, "node", VERSIONS, PLAN, "")
    (record,) = caplog.records
    assert "is not kept" in record.getMessage()


def test_a_write_that_fails_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep()

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(cache.json, "dump", full)
    assert not cache.store(PROBLEM, "node", VERSIONS, PLAN, "another reason")
    entry = cache.load(PROBLEM, "node", VERSIONS)
    assert entry is not None
    assert entry.reason == "It was faster."
    assert len(list(folder.iterdir())) == 1


def test_many_writers_and_a_reader(folder: Path) -> None:
    """Two processes write as fast as they can; every read sees one whole plan or the other."""
    code = """if True:
        import sys
        sys.path.insert(0, sys.argv[1])
        import test_cache as t
        from undertow.plan import cache
        plan = t.Plan("signaled", "dma", t.split(4, int(sys.argv[2])), tile=(16, 64))
        for _ in range(100):
            assert cache.store(t.PROBLEM, "node", t.VERSIONS, plan, "x" * 10_000)
    """
    keep()
    here = str(Path(__file__).parent)
    writers = [subprocess.Popen([sys.executable, "-c", code, here, parts]) for parts in ("1", "4")]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        entry = cache.load(PROBLEM, "node", VERSIONS)
        assert entry is not None
        seen.add(len(entry.plan.parcels))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= {1, 2, 4}
    assert len(list(folder.iterdir())) == 1


def test_show_and_clear(folder: Path) -> None:
    assert cache.show() == []
    assert cache.clear() == 0
    path = keep()
    other = machines.problem("matmul_reduce_scatter", m=64, n=64, k=64)
    cache.store(other, "node", VERSIONS, Plan("serial", "net", ((0, 64),)), "Nothing was faster.")
    (folder / "broken.json").write_text("{")
    (folder / f".{path.name}.left").write_text("half")
    shown = dict(cache.show())
    assert shown[folder / "broken.json"] is None
    assert {entry.key for entry in shown.values() if entry is not None} == {PROBLEM.key, other.key}
    assert cache.clear("reduce_scatter") == 1
    assert path.exists()
    assert cache.clear() == 2
    assert list(folder.iterdir()) == []
