"""In which order the backend's calls on a GPU are enqueued, without a GPU: who waits for which event."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from undertow.torch_backend import handles


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.cuda_stream, self._log = name, name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} after {other.name}")

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} after the call on {event.stream}")


class Event:
    stream = ""

    def record(self, stream: Stream) -> None:
        self.stream = stream.name


class Gpu:
    """What of torch.cuda the order is made with; `capture` is the one that the caller's stream is in."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.caller, self.capture = Stream("caller", self.log), 0
        self.Event = Event

    def Stream(self, device: object, priority: int = 0) -> Stream:
        return Stream("own", self.log)

    def current_stream(self, device: object) -> Stream:
        return self.caller

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"call on {stream.name}")
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    driver: Any = ModuleType("undertow.fabric.stream_memory")
    driver.capture_of = lambda stream: found.capture
    monkeypatch.setattr(handles, "_cuda", found)
    monkeypatch.setitem(sys.modules, driver.__name__, driver)
    monkeypatch.setattr("undertow.fabric.stream_memory", driver, raising=False)
    return found


def test_calls_follow_each_other_but_not_across_captures(gpu: Gpu) -> None:
    streams = handles.Streams(SimpleNamespace(device="cuda:0"))  # type: ignore[arg-type]

    def add(blocking: bool) -> list[str]:
        gpu.log.clear()
        streams.add("a call", lambda: None, [], [], blocking)
        return list(gpu.log)

    assert add(False) == ["own after caller", "call on own"]
    assert add(True) == ["caller after the call on own", "call on caller"]
    gpu.capture = 7
    assert add(True) == ["call on caller"]
    assert add(False) == ["own after caller", "own after the call on caller", "call on own"]
    gpu.capture = 8
    assert add(True) == ["call on caller"], "an event of another capture cannot be waited for"
    gpu.capture = 0
    assert add(True) == ["call on caller"]
