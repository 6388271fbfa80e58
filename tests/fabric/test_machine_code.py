"""What is compiled and kept on disk is compiled anew when anything that it holds has changed, in whichever file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from undertow.fabric import atomics, machine_code, post_ring, staged_moves
from undertow.kernels import ring_layout

CALLER = """
from undertow.fabric.machine_code import compiled
import other

@compiled
def both(x):
    return other.FACTOR * x + other.more(x)

print(both(10))
"""
OTHER = """
from undertow.fabric.machine_code import compiled

FACTOR = {factor}

@compiled
def more(x):
    return {more}
"""


def test_an_edit_of_another_file_counts(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(CALLER)

    def run(factor: int, more: str) -> int:
        (tmp_path / "other.py").write_text(OTHER.format(factor=factor, more=more))
        command = [sys.executable, "-B", "caller.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert run(2, "1") == 21
    kept = sorted((tmp_path / "__pycache__").glob("caller.both*.nbc"))
    assert kept
    assert run(2, "1") == 21
    assert sorted((tmp_path / "__pycache__").glob("caller.both*.nbc")) == kept  # that one was used
    assert run(3, "1") == 31
    assert run(3, "7") == 37


@pytest.mark.parametrize("kept", [post_ring.take, staged_moves.serve])
@pytest.mark.parametrize("name", ["SOURCE_BUFFER", "NO_SIGNAL", "WORD_BYTES", "ready_value"])
def test_who_takes_posts_is_known_by_the_ring_s_layout(name: str, kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine_code.identity(kept.py_func)
    assert machine_code.identity(kept.py_func) == before
    was = getattr(ring_layout, name)
    if isinstance(was, FunctionType):
        monkeypatch.setattr(post_ring._ready_value, "py_func", lambda ticket: ticket)
    else:
        monkeypatch.setattr(ring_layout, name, was + 1)
    assert machine_code.identity(kept.py_func) != before


def test_and_by_the_order_of_its_atomics(monkeypatch: pytest.MonkeyPatch) -> None:
    """An intrinsic is known by the code that emits it, closures included."""
    before = machine_code.identity(post_ring.take.py_func)
    monkeypatch.setattr(atomics, "load_acquire", atomics.load_in_order)
    assert machine_code.identity(post_ring.take.py_func) != before


def test_it_is_the_same_in_every_process() -> None:
    text = (
        "from undertow.fabric import machine_code, staged_moves;"
        "print(machine_code.identity(staged_moves.serve.py_func))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", text], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("0", "1")
    }
    assert found == {machine_code.identity(staged_moves.serve.py_func) + "\n"}
