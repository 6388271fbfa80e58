"""A context of the driver for the proxies' copies, beside torch's.

The driver's queue holds about a thousand launches. Who launches one more waits for room, with the lock of the context
in hand, and every other call in that context waits, too. A kernel that waits for what the proxy moves, a thousand
launches behind it, and the proxy's next copy: none of them would go on until the deadline. The same goes for whatever
else waits for kernels with that lock, as loading one does. In a context of their own the proxies' copies wait for
nobody: its streams have queues and a lock of their own.

Pinned memory belongs to all contexts of a process, mapped memory (torch's symmetric memory, `torch_symmetric.py`) to a
device. What `cudaMalloc` gave belongs to one context: a copy of it takes that one's lock.

A context takes about half a GB of the GPU's memory, and of its channels as many as torch's, which the driver shares
among all: two contexts each of more than RANKS ranks are too many for one GPU. There, or where the driver says so, the
copies are made in torch's context, which is said once; a rank then must not run a thousand launches ahead of a call
that posts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

import torch

from . import stream_memory
from .logs import get_logger

RANKS = 4
_AHEAD = 500  # launches: half of what the driver's queue holds
_URGENT = -1


@cache
def copy_context(device: torch.device, sharing: int) -> CopyContext:
    """The one of this process, made at first use; it lives as long. `sharing`: how many ranks have this GPU."""
    context = stream_memory.new_context(device) if sharing <= RANKS else None
    if context is None:
        get_logger().warning(
            "GPU %s has no room for a context of the proxy's own: enqueue no more than %d launches behind a call that "
            "posts before it is over.",
            device.index,
            _AHEAD,
        )
    return CopyContext(device, context)


class CopyContext:
    """`context`: its handle; None: torch's is used."""

    def __init__(self, device: torch.device, context: int | None) -> None:
        self._device, self._context = device, context
        self._streams: dict[int, torch.cuda.Stream | None] = {}  # by handle; those of torch's context go with objects

    @property
    def is_own(self) -> bool:
        return self._context is not None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """What this thread asks of the driver inside is asked in this context."""
        if self._context is None:
            yield
            return
        with stream_memory.in_context(self._context):
            yield

    def new_stream(self) -> int:
        """The handle of an urgent stream."""
        if self._context is None:
            made = stream_memory.new_stream(self._device, priority=_URGENT)
            stream = int(made.cuda_stream)
            self._streams[stream] = made
        else:
            with self.current():
                stream = stream_memory.bare_stream(priority=_URGENT)
            self._streams[stream] = None
        return stream

    def rest(self) -> None:
        """Wait until all that its streams were given is done: copies, which wait for nothing."""
        with self.current():
            for stream in list(self._streams):
                stream_memory.synchronize(stream)

    def end(self, stream: int) -> None:
        """Nobody gives the stream anything any more."""
        with self.current():
            stream_memory.synchronize(stream)
            if self._streams.pop(stream) is None:
                stream_memory.end_stream(stream)
