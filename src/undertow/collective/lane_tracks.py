"""The tracks of a walk on CUDA streams: the caller's current one, and two beside it.

Signals between tracks are events: `signal` stands for what its track was given so far, and `wait` holds another track
until that is done. Both are named in the order of the walk, so every event is recorded before it is waited for, and
again only in the next iteration, when all waits for it have been enqueued: nothing is counted, a capture sees forks and
joins. Without streams everything is done in the walk's own order, and signals say nothing new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from .lane_steps import EARLY, LATE

if TYPE_CHECKING:
    import torch

    from ..fabric.base import Fabric, Stream

_EVENTS = object()  # name of what is kept with a fabric


def new_signals(fabric: Fabric, count: int) -> list[int]:
    """Events for so many signals; made once for all walks of a fabric, as calls come one after the other."""
    if fabric.group.device.type != "cuda":
        return []
    from ..fabric import stream_memory

    events = cast("list[int]", fabric.kept.setdefault(id(_EVENTS), []))
    while len(events) < count:
        events.append(stream_memory.new_event(fabric.group.device))
    return events


class Tracks:
    """Of one call. `used`: the side tracks that the walk has."""

    def __init__(
        self, device: torch.device, events: list[int], used: frozenset[int], beside: tuple[Stream, Stream] | None
    ) -> None:
        self._device, self._events = device, events
        sides = {} if beside is None else dict(zip((EARLY, LATE), beside, strict=True))
        self._streams = {track: stream for track, stream in sides.items() if track in used}

    def begin(self) -> None:
        """Side tracks come after what the caller has done so far."""
        for stream in self._streams.values():
            stream.fork()

    def end(self) -> None:
        """What the caller does next comes after the side tracks."""
        for stream in self._streams.values():
            stream.join()

    def run(self, track: int, work: Callable[[], None]) -> None:
        """In the order of `track`."""
        stream = self._streams.get(track)
        if stream is None:
            work()
        else:
            stream.run(work)

    def signal(self, number: int) -> None:
        """What the current track was given so far."""
        if self._streams:
            from ..fabric import stream_memory

            stream_memory.record(stream_memory.current_stream(self._device), self._events[number])

    def wait(self, number: int) -> None:
        """What the current track does next comes after that."""
        if self._streams:
            from ..fabric import stream_memory

            stream_memory.wait_event(stream_memory.current_stream(self._device), self._events[number])
