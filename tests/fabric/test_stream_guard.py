"""What the watchdog reads from kernels, without a GPU."""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
    made._ask = threading.Event()
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


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def silent(guard: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A driver that does not answer until it is told to: a launch waits for room in its queue, with its lock."""
    module: Any = sys.modules["undertow.fabric.stream_guard"]
    answers = threading.Event()
    for name in ("query", "write"):
        monkeypatch.setattr(module.stream_memory, name, lambda *arguments: answers.wait(20))
    yield answers
    answers.set()
    guard.close()


def test_a_driver_that_does_not_answer_holds_no_deadline_up(guard: Any, silent: threading.Event) -> None:
    """The watchdog's thread goes on, and a stream that waits too long is noticed."""
    module: Any = sys.modules["undertow.fabric.stream_guard"]
    failures: list[str] = []
    word = (ctypes.c_int32 * 32)(module.BUSY)
    guard._busy_of, guard._seen_since, guard.error = {7: ctypes.addressof(word)}, {}, torch.zeros(1, dtype=torch.int32)
    guard._group = SimpleNamespace(rank=0, deadline=5.0, why_waiting=lambda peer, waited: waited, fail=failures.append)
    asking = threading.Thread(target=guard._ask_the_driver, daemon=True)
    asking.start()
    began = time.monotonic()
    for now in (0.0, 1.0, 4.0, 6.0):
        guard._tick(now)
    assert time.monotonic() - began < 5
    assert failures == ["a stream has been in one call for 5 s"]
    assert asking.is_alive()
    guard.close()
    silent.set()
    asking.join(10)
    assert not asking.is_alive()


def test_a_guard_asks_from_its_first_tick_on_and_ends(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is made for a group, but for memory that is not pinned."""
    module: Any = sys.modules["undertow.fabric.stream_guard"]
    zeros, asked, hooks = torch.zeros, threading.Event(), []
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, device=None, **more: zeros(*shape, **more))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(module, "poison_if_aborted", lambda output, abort: None)
    monkeypatch.setattr(module.stream_memory, "new_stream", lambda device, priority: SimpleNamespace(cuda_stream=4))
    monkeypatch.setattr(module.stream_memory, "query", lambda stream, rank: asked.set())
    group = SimpleNamespace(
        rank=1, device=torch.device("cuda", 0), on_abort=hooks.append, on_every_tick=hooks.append, on_check=hooks.append
    )
    before = set(threading.enumerate())
    made = module.StreamGuard(group)
    (asking,) = set(threading.enumerate()) - before
    assert hooks == [made._on_abort, made._tick, made._look]
    assert not asked.wait(0.05)
    made._tick(0.0)
    assert asked.wait(10)
    made.close()
    asking.join(10)
    assert not asking.is_alive()


@pytest.mark.parametrize("index", [0, 3])
def test_its_threads_have_the_devices_context(index: int, guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first GPU's, for which torch would see nothing to do; and torch, with its lock, is asked for nothing."""
    module: Any = sys.modules["undertow.fabric.stream_guard"]
    asked: list[tuple[object, ...]] = []

    def retain(handle: Any, device: int) -> int:
        handle._obj.value = 70 + device
        return 0

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(("torch", device)))
    for name, function in {
        "cuDeviceGet": lambda handle, number: setattr(handle._obj, "value", number),
        "cuDevicePrimaryCtxRetain": retain,
        "cuCtxSetCurrent": lambda context: asked.append(("current", context.value)),
        "cuThreadExchangeStreamCaptureMode": lambda mode: asked.append(("captures", mode._obj.value)),
    }.items():
        monkeypatch.setitem(
            module.stream_memory._driver, name, lambda *arguments, function=function: function(*arguments) or 0
        )
    guard._device = torch.device("cuda", index)
    type(guard)._bind(guard)
    assert asked == [("current", 70 + index), ("captures", 2)]


def test_a_lost_device_ends_the_group_from_the_thread_that_asks(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = sys.modules["undertow.fabric.stream_guard"]
    failures: list[Exception] = []
    guard._group = SimpleNamespace(rank=3, fail=failures.append)

    def lost(stream: int, rank: int) -> bool:
        raise module.errors.DeviceLost(rank=rank, reason="an illegal address")

    monkeypatch.setattr(module.stream_memory, "query", lost)
    guard._ask.set()
    guard._ask_the_driver()
    assert [type(one).__name__ for one in failures] == ["DeviceLost"]
    assert guard._closed


@pytest.mark.parametrize("lost", ["a rank", "the device", "all of it"])
def test_words_in_host_memory_are_released_whatever_the_driver_does(
    guard: Any, silent: threading.Event, lost: str
) -> None:
    """Again and again: a replayed graph clears them, and waits anew. Also where another context of this rank, such as
    that of the proxy's copies, has lost the device; not where its own has, in which nothing waits any more."""
    errors = sys.modules["undertow.fabric.stream_guard"].errors
    words = (ctypes.c_int32 * 64)()
    here, there = ctypes.addressof(words), ctypes.addressof(words) + 128
    guard._waits, guard.abort = {there: (9, False), here: (5, True)}, torch.zeros(1, dtype=torch.int32)
    guard._closed = lost == "all of it"
    guard._on_abort(RuntimeError(lost) if lost == "a rank" else errors.DeviceLost(rank=0, reason=lost))
    if guard._closed:
        assert guard.abort.item() == 0
        return
    assert guard.abort.item() == 1
    for _ in range(3):
        wait_for(lambda: words[0] == 5)
        words[0] = 0


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
