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


@pytest.fixture
def enqueued(guard: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the guard enqueues, in order, by streams that are called "call" and "other"."""
    module: Any = sys.modules["undertow.fabric.stream_guard"]
    found: list[tuple[object, ...]] = []
    guard._calls, guard._waits, guard._device, guard.abort = [], {}, None, None
    guard.now = "call"
    monkeypatch.setattr(guard, "_busy", lambda stream: f"word of {stream}")
    monkeypatch.setattr(module, "poison_if_aborted", lambda output, abort: found.append(("poison", output)))
    for name, what in {
        "current_stream": lambda device: guard.now,
        "write": lambda stream, word, value: found.append((stream, word, value)),
        "wait": lambda stream, address, target: found.append((stream, "waits", address)),
        "packed": lambda operations: [("stop", *one) for one in operations],
        "batch": lambda stream, operations: found.extend(operations),
    }.items():
        monkeypatch.setattr(module.stream_memory, name, what)
    return found


def test_a_call_is_watched_from_its_first_wait_on(guard: Any, enqueued: list[tuple[object, ...]]) -> None:
    """By the word of the stream that it began on, which joins all others, once, however calls are nested."""
    guard.enter()
    guard.now = "other"
    guard.enter()
    guard.wait(7, 1, on_host=True)
    guard.perform("other", [("stop", 1)])
    guard.leave(("inner",))
    guard.now = "call"
    guard.leave(("outer",))
    assert enqueued == [
        ("call", "word of call", 1), ("other", "waits", 7), ("stop", 1), ("poison", "inner"), ("poison", "outer"),
        ("call", "word of call", 0),
    ]  # fmt: skip
    guard.enter()
    guard.leave(("outer",))
    assert enqueued[6:] == [("poison", "outer")]


def test_a_call_that_poisons_itself_ends_without(guard: Any, enqueued: list[tuple[object, ...]]) -> None:
    """Only the one that says so, and only that time."""
    guard.enter()
    guard.enter()
    guard.poisons_itself()
    guard.leave(("inner",))
    guard.leave(("outer",))
    assert enqueued == [("poison", "outer")]
    guard.enter()
    guard.leave(("again",))
    assert enqueued[1:] == [("poison", "again")]


def test_a_wait_outside_of_calls_is_watched_by_itself(guard: Any, enqueued: list[tuple[object, ...]]) -> None:
    guard.wait(7, 1, on_host=True)
    guard.perform("other", [("stop", 1)])
    word = "word of other"
    assert enqueued == [
        ("call", "word of call", 1), ("call", "waits", 7), ("call", "word of call", 0),
        ("stop", False, word, 1), ("stop", 1), ("stop", False, word, 0),
    ]  # fmt: skip
