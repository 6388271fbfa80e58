"""A context of the driver for the proxies' copies, beside torch's.

The driver's queue holds about a thousand launches. Who launches one more waits for room, with the lock of the context
in hand, and every other call in that context waits, too. A kernel that waits for what the proxy moves, a thousand
launches behind it, and the proxy's next copy: none of them would go on until the deadline. The same goes for whatever
else waits for kernels with that lock, as loading one does. In a context of their own the proxies' copies wait for
nobody: its streams have queues and a lock of their own. (Against who waits with the interpreter's lock it does not
help: what moves posts over `dma` needs none, `staged_moves.py`; the threads of `net` do.)

Pinned memory belongs to all contexts of a process, mapped memory (torch's symmetric memory, `torch_symmetric.py`) to a
device. What `cudaMalloc` gave belongs to one context: a copy of it takes that one's lock.

A context takes about half a GB of the GPU's memory, and of its channels as many as torch's, which the driver shares
among all: two contexts each of more than SHARING ranks are too many for one GPU. There, or where the driver says so,
the copies are made in torch's context, which is said once: hosts then wait for each call that posts, and behind a
replay of one they must not run a thousand launches ahead.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import torch

from . import stream_memory
from .logs import get_logger
from .virtual_node import SHARING

_AHEAD = 500  # launches: half of what the driver's queue holds
_URGENT = -1
_lock = threading.Lock()
_contexts: dict[int, int | None] = {}  # of this process, by device; none where there was no room
_used = set[int]()  # devices in whose context a proxy has had streams
_here = threading.local()  # the context that this thread has entered


class Copies:
    """What one proxy copies by: `out` and `into`, handles of urgent streams. `is_own`: they are not of torch's context.

    `sharing`: how many ranks of the job have this GPU.
    """

    def __init__(self, device: torch.device, sharing: int) -> None:
        self._device = device
        self._torchs: list[torch.cuda.Stream] = []
        with _lock:
            self._context = _context(device, sharing)
            streams = self._in_own() if self._context is not None else []
            if streams:
                _used.add(device.index)
            elif self._context is not None:
                if device.index not in _used:
                    stream_memory.end_context(self._context)
                self._context = _contexts[device.index] = None
                _say(device)
        self.is_own = self._context is not None
        if not self.is_own:
            self._torchs = [stream_memory.new_stream(device, priority=_URGENT) for _ in range(2)]
            streams = [int(one.cuda_stream) for one in self._torchs]
        self.out, self.into = streams

    def _in_own(self) -> list[int]:
        """Both streams, or none."""
        with self.current():
            streams = [one for one in (stream_memory.bare_stream(_URGENT) for _ in range(2)) if one is not None]
            if len(streams) < 2:
                for one in streams:
                    stream_memory.end_stream(one)
                return []
        return streams

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """What this thread asks of the driver inside is asked in the copies' context, which it enters once."""
        if self._context is None or getattr(_here, "context", None) == self._context:
            yield
            return
        stream_memory.enter_context(self._context)
        _here.context = self._context
        try:
            yield
        finally:
            _here.context = None
            stream_memory.leave_context()

    def rest(self) -> None:
        """Wait until all that the streams were given is done: copies, which wait for nothing."""
        with self.current():
            for stream in (self.out, self.into):
                stream_memory.synchronize(stream)

    def end(self) -> None:
        """Nobody gives the streams anything any more."""
        self.rest()
        if self.is_own:
            with self.current():
                for stream in (self.out, self.into):
                    stream_memory.end_stream(stream)
        self._torchs.clear()


def _context(device: torch.device, sharing: int) -> int | None:
    """The copies' context of this process, made at first use; it lives as long."""
    if device.index not in _contexts:
        _contexts[device.index] = stream_memory.new_context(device) if sharing <= SHARING else None
        if _contexts[device.index] is None:
            _say(device)
        elif _step_aside not in gc.callbacks:
            gc.callbacks.append(_step_aside)
    return _contexts[device.index]


def _say(device: torch.device) -> None:
    get_logger().warning(
        "GPU %s has no room for a context of the proxy's own: hosts wait for each call that posts; enqueue no more "
        "than %d launches behind a replay of one before it is over.",
        device.index,
        _AHEAD,
    )


def _step_aside(phase: str, _: dict[str, Any]) -> None:
    """Tensors that a collection of garbage ends are torch's, and so must the context be meanwhile, on any thread."""
    context = getattr(_here, "context", None)
    if context is not None:
        if phase == "start":
            stream_memory.leave_context()
        else:
            stream_memory.enter_context(context)
