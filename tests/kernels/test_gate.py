"""The gate's kernel, read without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ptx import TARGETS, CompiledKernel, check_release_order, compile_kernel

from undertow.kernels import gate

TYPES = {"words": "*i64", "epoch": "*i32", "ranks": "i32", "abort": "*i32", "error": "*i32", "deadline_ns": "i64"}


def compiled(target: str, lanes: int = 32) -> CompiledKernel:
    kernel: Any = gate.gate_kernel
    return compile_kernel(kernel, TYPES, {"LANES": lanes}, target, lanes // 32)


@pytest.mark.parametrize("target", TARGETS)
def test_it_leaves_room_for_everybody(target: str) -> None:
    made = compiled(target)
    assert made.spills == 0
    assert made.shared <= 1024
    assert made.registers * 32 < 65536 // 16, "a sixteenth of an SM at most"


@pytest.mark.parametrize("target", TARGETS)
def test_own_words_are_set_before_others_are_waited_for(target: str) -> None:
    """Whoever waited first would wait for ever."""
    made = compiled(target)
    first_set, first_poll = (re.search(kind, made.ptx) for kind in (r"st\.release\.sys", r"ld\.acquire\.sys"))
    assert first_set is not None
    assert first_poll is not None
    assert first_set.start() < first_poll.start()
    assert check_release_order(made.ptx) == []


def test_many_ranks() -> None:
    assert compiled("sm_90", 64).spills == 0
