"""Production schedules of MSCCL: each is read, judged, run with exact results, written and read again.

The files are not part of this repository. They are looked for in `UNDERTOW_CONFORMANCE`, or beside the checkout.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from contract_runs import run_exactly

from undertow.collective.checker import check
from undertow.collective.formats import read, text
from undertow.collective.formats.msccl import Algorithm

_NAMED = os.environ.get("UNDERTOW_CONFORMANCE")
_FOLDER = (Path(_NAMED) if _NAMED else Path(__file__).parents[3] / "shared" / "conformance") / "msccl-xml"
FILES = sorted(_FOLDER.glob("*.xml"))


def operations(algorithm: Algorithm) -> list[list[tuple[object, ...]]]:
    """What every threadblock does, nops left out."""
    return [
        [
            (
                block.send,
                block.receive,
                block.channel,
                *((one.type, one.source, one.destination, one.count) for one in block.steps if one.type != "nop"),
            )
            for block in gpu.threadblocks
        ]
        for gpu in algorithm.gpus
    ]


def test_there_are_production_files() -> None:
    if not FILES:
        pytest.skip(f"no conformance files: set UNDERTOW_CONFORMANCE, or put them into {_FOLDER}")
    assert all(one.stat().st_size for one in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_production_file(path: Path, tmp_path: Path) -> None:
    imported = read(path)
    for schedule in imported.schedules:
        check(schedule)
        run_exactly(schedule, runs=1, tiles=(2,))
    (tmp_path / "again.xml").write_text(text(imported.schedules[0], like=imported))
    again = read(tmp_path / "again.xml")
    assert operations(again.source) == operations(imported.source)
    assert again.source.facts == imported.source.facts
    assert [one.digest for one in again.schedules] == [one.digest for one in imported.schedules]
    for schedule in again.schedules:
        check(schedule)
    run_exactly(again.schedules[-1], runs=1, tiles=(1,))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_production_file_with_a_message_for_every_chunk(path: Path) -> None:
    for schedule in read(path).with_split_messages():
        check(schedule)
