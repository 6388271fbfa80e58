"""What ran when, measured or simulated, in one event format that Perfetto opens.

Times are nanoseconds of the node's monotonic clock (`time.perf_counter_ns` is CLOCK_MONOTONIC on Linux), which all
processes of a node share, so the rows of different ranks line up without any correction. Events of a GPU are pairs of
CUDA events on the stream the work is enqueued on; they are placed on the same clock through an *anchor*, a CUDA event
whose host time is known.

The library marks its work with the module's `event(...)`. Without a current recorder that is one attribute check.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal

import torch

from ..errors import InvalidArgument
from .events import Event, Timeline

__all__ = ["Event", "Recorder", "Timeline", "current", "event", "recording"]
_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call


class Recorder:
    """Collects the events of one rank, from any thread.

    `device` is "cpu" (host times), "cuda" (times on the stream, and NVTX ranges so that Nsight shows the same names),
    or "auto": cuda if this process already uses it.
    """

    def __init__(self, rank: int | None = None, device: Literal["auto", "cpu", "cuda"] = "auto") -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise InvalidArgument(argument="device", was=repr(device), must="'auto', 'cpu' or 'cuda'")
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.on = True
        self._cuda = device == "cuda" or (device == "auto" and _cuda.is_initialized())
        self._events: list[Event] = []
        self._pending: list[_DeviceSpan] = []
        self._anchors: dict[int, _Anchor] = {}
        self._lock = threading.Lock()
        if self._cuda:
            self._anchor()

    def event(
        self, name: str, *, engine: str, category: str = "", host: bool = False, **details: Any
    ) -> AbstractContextManager[object]:
        """Record the work enqueued (CUDA) or done (CPU, or `host=True`) inside the `with` block."""
        if not self.on:
            return _NOTHING
        if not self._cuda or host:
            return _HostSpan(self, name, engine, category, details)
        return _DeviceSpan(self, name, engine, category, details)

    def add(self, event: Event) -> None:
        """Take an event that was measured elsewhere, such as by a helper thread with its own stamps."""
        with self._lock:
            self._events.append(event)

    def timeline(self, environment: Mapping[str, Any] | None = None) -> Timeline:
        """Everything recorded so far, by start. Waits for the recorded device work to end."""
        with self._lock:
            pending, self._pending = self._pending, []
        for span in pending:
            self.add(span.resolve())
        with self._lock:
            return Timeline(sorted(self._events, key=lambda event: event.start_ns), environment)

    def _anchor(self) -> _Anchor:
        """The anchor of the current device, made at its first use."""
        device = torch.cuda.current_device()
        with self._lock:
            if device not in self._anchors:
                self._anchors[device] = _Anchor()
            return self._anchors[device]

    def _keep(self, span: _DeviceSpan) -> None:
        with self._lock:
            self._pending.append(span)


class _HostSpan:
    """Host time of a block."""

    __slots__ = ("_about", "_recorder", "_start")

    def __init__(self, recorder: Recorder, name: str, engine: str, category: str, details: dict[str, Any]) -> None:
        self._recorder = recorder
        self._about = (name, engine, category, details)
        self._start = 0

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        duration = time.perf_counter_ns() - self._start
        name, engine, category, details = self._about
        self._recorder.add(Event(name, self._recorder.rank, engine, self._start, duration, category, details))


class _DeviceSpan:
    """Device time of what a block enqueues on the stream that is current at its entry.

    Inside a graph capture there is only the NVTX range: a captured event holds no time of its own.
    """

    __slots__ = ("_about", "_anchor", "_end", "_recorder", "_start", "_stream")

    def __init__(self, recorder: Recorder, name: str, engine: str, category: str, details: dict[str, Any]) -> None:
        self._recorder = recorder
        self._about = (name, engine, category, details)
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        _cuda.nvtx.range_push(self._about[0])
        if torch.cuda.is_current_stream_capturing():
            return
        self._anchor = self._recorder._anchor()
        self._stream = torch.cuda.current_stream()
        self._start = _cuda.Event(enable_timing=True)
        self._end = _cuda.Event(enable_timing=True)
        self._start.record(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is not None and kind is None:
            self._end.record(self._stream)
            self._recorder._keep(self)
        _cuda.nvtx.range_pop()

    def resolve(self) -> Event:
        self._end.synchronize()
        name, engine, category, details = self._about
        start = self._anchor.host_ns + round(self._anchor.mark.elapsed_time(self._start) * 1e6)
        duration = round(self._start.elapsed_time(self._end) * 1e6)
        return Event(name, self._recorder.rank, engine, start, duration, category, details)


class _Anchor:
    """A CUDA event of the current device whose host time is known, to within half of the shortest of a few tries."""

    def __init__(self, tries: int = 5) -> None:
        shortest = None
        for _ in range(tries):
            torch.cuda.synchronize()
            mark = _cuda.Event(enable_timing=True)
            before = time.perf_counter_ns()
            mark.record()
            mark.synchronize()
            after = time.perf_counter_ns()
            if shortest is None or after - before < shortest:
                shortest = after - before
                self.mark, self.host_ns = mark, (before + after) // 2


_NOTHING: AbstractContextManager[object] = nullcontext()
_active: list[Recorder] = []
_active_lock = threading.Lock()
_current: Recorder | None = None  # process-wide, not a context variable: worker threads must see it too


@contextmanager
def recording(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Make `recorder` (or a new one) the current one of the whole process; inside another recording it takes over."""
    recorder = recorder or Recorder()
    recorder.on = True
    _switch(recorder, add=True)
    try:
        yield recorder
    finally:
        recorder.on = False
        _switch(recorder, add=False)


def _switch(recorder: Recorder, *, add: bool) -> None:
    global _current
    with _active_lock:
        if add:
            _active.append(recorder)
        else:
            _active.remove(recorder)
        _current = _active[-1] if _active else None


def current() -> Recorder | None:
    """The recorder in force, for code that wants to spare itself the making of details."""
    return _current


def is_recording() -> bool:
    """Whether events go anywhere."""
    return _current is not None


def event(
    name: str, engine: str, *, category: str = "", host: bool = False, **details: Any
) -> AbstractContextManager[object]:
    """Mark a block of work for the current recorder; without one, do nothing."""
    recorder = _current
    if recorder is None:
        return _NOTHING
    return recorder.event(name, engine=engine, category=category, host=host, **details)
