"""Tables by size: written by `undertow collective tune`, used by all ranks or by none, harmless when damaged."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import table_targets as targets
from typer.testing import CliRunner

import undertow as ut
from undertow.cli import app
from undertow.collective import LIBRARY, tables
from undertow.collective.tables import Row


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path))
    return tmp_path


def row(program: str, up_to: int | None, instead: str | None = None, signature: str | None = None) -> Row:
    known = LIBRARY[program].signature if signature is None else signature
    return Row(up_to, program, known, 64 << 10, instead or program, 64 << 10, 1e-5)


def test_calls_take_the_program_of_their_size() -> None:
    tables.store("cpu", 2, {"all_reduce": [row("ring", 1 << 10), row("one_shot", None)]})
    for found in ut.launch(targets.uses_the_table, 2, device="cpu"):
        assert found == {"programs": ["ring", "one_shot"], "right": True, "said": []}


def test_a_users_program_runs_where_it_was_made() -> None:
    own = targets.from_the_middle
    tables.store("cpu", 2, {"all_reduce": [row(own.name, 1 << 10, "ring", own.signature), row("ring", None)]})
    for found in ut.launch(targets.uses_the_table, 2, device="cpu"):
        assert found == {"programs": ["from_the_middle", "ring"], "right": True, "said": []}


def test_the_librarys_best_stands_in_for_a_program_that_nobody_made() -> None:
    tables.store("cpu", 2, {"all_reduce": [row("elsewhere", None, "ring", "00000000")]})
    for found in ut.launch(targets.uses_the_table, 2, device="cpu"):
        assert found["programs"] == ["ring", "ring"]
        assert found["right"]
        said = "Program elsewhere (00000000) of the table is not made on all ranks: the library's runs."
        assert found["said"] == [said]


def test_a_table_that_not_all_ranks_hold_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "one"))
    tables.store("cpu", 2, {"all_reduce": [row("ring", None)]})
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "other"))
    for found in ut.launch(targets.only_rank_one_has_it, 2, device="cpu", args=(str(tmp_path / "one"),)):
        assert found["programs"] == ["two_shot", "two_shot"]
        assert found["right"]
        assert found["said"] == ["Tables by size differ between the ranks of group 0, and none is used."]


def damaged(change: object) -> bytes:
    path = tables.store("cpu", 2, {"all_reduce": [row("ring", None)]})
    content = json.loads(path.read_text())
    change(content)  # type: ignore[operator]
    return json.dumps(content).encode()


DAMAGES = {
    "empty": lambda: b"",
    "half": lambda: damaged(lambda content: None)[:100],
    "no table": lambda: b"[]",
    "bytes": lambda: b"\xff\xfe\x00",
    "long": lambda: b"x" * (1 << 21),
    "deep": lambda: b"[" * 100_000,
    "format": lambda: damaged(lambda content: content.update(format="other")),
    "ranks": lambda: damaged(lambda content: content.update(ranks=3)),
    "collective": lambda: damaged(lambda content: content["collectives"].update(dance=[])),
    "no rows": lambda: damaged(lambda content: content["collectives"].update(all_reduce=[])),
    "program": lambda: damaged(lambda content: content["collectives"]["all_reduce"][0].update(instead="rm -rf")),
    "stride": lambda: damaged(lambda content: content["collectives"]["all_reduce"][0].update(stride=-1)),
    "type": lambda: damaged(lambda content: content["collectives"]["all_reduce"][0].update(program=7)),
    "field": lambda: damaged(lambda content: content["collectives"]["all_reduce"][0].update(more=7)),
    "end": lambda: damaged(lambda content: content["collectives"]["all_reduce"][0].update(up_to=7)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_table_is_as_good_as_none(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    content = DAMAGES[kind]()
    path = tables.path_of("cpu", 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    caplog.clear()
    assert tables.load("cpu", 2) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"Table {path} is damaged and is not used: ")
    assert "\n" not in said


def test_writers_at_the_same_time_leave_a_whole_table() -> None:
    def write(program: str) -> None:
        for _ in range(30):
            tables.store("cpu", 2, {"all_reduce": [row(program, None)]})

    writers = [threading.Thread(target=write, args=(name,)) for name in ("ring", "one_shot", "two_shot")]
    for one in writers:
        one.start()
    while any(one.is_alive() for one in writers):
        found = tables.load("cpu", 2)
        assert found is None or found["all_reduce"][0].program in ("ring", "one_shot", "two_shot")
    assert tables.load("cpu", 2) is not None
    assert list(tables.folder().glob(".*")) == []


def test_other_collectives_stay() -> None:
    tables.store("cpu", 2, {"all_reduce": [row("ring", None)]})
    tables.store("cpu", 2, {"all_gather": [row("all_gather_ring", None)]})
    assert set(tables.load("cpu", 2) or {}) == {"all_reduce", "all_gather"}


def test_the_command_measures_and_keeps() -> None:
    arguments = ["collective", "tune", "all_gather", "-n", "2", "--min-bytes", "1K", "--max-bytes", "8K"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert "The table is kept in" in found.output
    rows = (tables.load("cpu", 2) or {})["all_gather"]
    assert rows[-1].up_to is None
    assert all(LIBRARY[one.program].collective == "all_gather" for one in rows)


def test_the_command_names_what_it_cannot_take(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from undertow import collective as co\n\n\n@co.program('all_gather')\ndef mine(c):\n"
        "    for rank in range(c.ranks):\n        c.rank(rank).input[0].copy(c.rank(rank).output[rank])\n"
    )
    arguments = ["collective", "tune", "all_gather", "-n", "2", "-p", str(file), "--max-bytes", "1K"]
    found = CliRunner().invoke(app, arguments)
    assert "mine is left out: " in found.output
    assert found.exit_code == 0
    assert CliRunner().invoke(app, ["collective", "tune", "dance", "-n", "2"]).exit_code == 1
