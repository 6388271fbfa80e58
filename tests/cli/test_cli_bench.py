"""`undertow bench`: tables and sentences of a small measurement, and refusals."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from undertow.cli import app

SMALL = ["--device", "cpu", "--batch", "64", "--tables", "2", "--rows", "50", "--dim", "8", "--rounds", "3"]


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """The handler that a command sets is taken back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_embedding(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ["bench", "embedding_all_to_all", "-n", "2", *SMALL, "--pooling", "2", "--link", "500MB/s,20us"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "fused:dma (paced)" in done.output
    assert " time than serial over the same link." in done.output
    assert "0.5 GB/s" in done.output
    assert len(json.loads(out.read_text())) == 1


def test_refusals() -> None:
    done = CliRunner().invoke(app, ["bench", "embedding_all_to_all", *SMALL, "--pooling", "1,none"])
    assert done.exit_code == 1
    assert "--pooling is '1,none'" in done.output
    done = CliRunner().invoke(app, ["bench", "embedding_all_to_all", "-n", "2", *SMALL, "--rows", str(10**20)])
    assert done.exit_code == 1
    assert "the problem is 2 tables of 100000000000000000000 x 8, 64 samples, for which 2 ranks need" in done.output
