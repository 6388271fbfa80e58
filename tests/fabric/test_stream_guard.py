"""What the watchdog reads from kernels, without a GPU."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import undertow.fabric
from undertow.kernels.signals import ABORTED, LATE


class Driver:
    """Says yes to everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A guard of no streams: its modules, which look for the driver, are imported for this test alone."""
    real: Any = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *more: Driver() if name == "libcuda.so.1" else real(name, *more))
    names = ("stream_memory", "stream_guard")
    for name in names:
        monkeypatch.delitem(sys.modules, f"undertow.fabric.{name}", raising=False)
    module = importlib.import_module("undertow.fabric.stream_guard")
    made = object.__new__(module.StreamGuard)
    made._closed, made._busy_of, made._stream = False, {}, SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(made, "_bind", lambda: None)
    yield made
    for name in names:
        del sys.modules[f"undertow.fabric.{name}"]
        delattr(undertow.fabric, name)


@pytest.mark.parametrize("code", [0, ABORTED.value, LATE.value])
def test_whatever_a_kernel_reports_ends_the_group(code: int, guard: Any) -> None:
    """Also what those report who gave up because another was late: it may stand where the late one's code stood."""
    failures: list[str] = []
    guard.error = torch.tensor([code], dtype=torch.int32)
    guard._group = SimpleNamespace(rank=0, deadline=5.0, why_waiting=lambda peer, waited: waited, fail=failures.append)
    guard._tick(0.0)
    assert len(failures) == (code != 0)


def test_a_check_finds_what_a_kernel_reported(guard: Any) -> None:
    """Before the watchdog's next look: who settles and then checks must not take poison for a result."""
    failures: list[str] = []
    guard.error = torch.zeros(1, dtype=torch.int32)
    guard._group = SimpleNamespace(why_waiting=lambda peer, waited: waited, fail=failures.append)
    assert not guard._look()
    guard.error.fill_(LATE.value)
    assert guard._look()
    assert failures == ["a kernel waited for a signal until its deadline"]
    guard.close()
    assert not guard._look()
