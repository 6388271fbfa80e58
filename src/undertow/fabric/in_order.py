"""Calls that share memory or counters on a GPU come one after the other, whatever streams they are on.

    follow      what the current stream does next comes after the last call
    ...         the call is enqueued
    enqueued    all of it stands on the current stream

Inside a capture no event of another stream can be waited for, so all such calls of one capture must be on one stream.
When a graph is replayed is for its owner to order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import InvalidArgument
from . import stream_memory


class InOrder:
    """`stream`: of the last call, after which `event` was recorded; `captured`: of the last captured one."""

    event: int
    stream: int | None
    captured: int | None

    def follow(self, device: torch.device) -> None:
        """The current stream's next call comes after the last one, wherever that was."""
        here = stream_memory.current_stream(device)
        if stream_memory.is_capturing():
            if self.captured not in (None, here) and _captures(self.captured, device):
                was, must = "on a second stream of one CUDA graph capture", "on the stream of the call before it"
                raise InvalidArgument(argument="call", was=was, must=must)
            self.captured = here
        elif self.stream not in (None, here):
            stream_memory.wait_event(here, self.event)

    def enqueued(self, device: torch.device) -> None:
        """A call was enqueued, with all that reads what it shares with others."""
        if not stream_memory.is_capturing():
            self.stream = stream_memory.current_stream(device)
            stream_memory.record(self.stream, self.event)


@dataclass
class Turns(InOrder):
    """Those who share nothing but their turns."""

    event: int
    stream: int | None = None
    captured: int | None = None


def _captures(stream: int | None, device: torch.device) -> bool:
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):  # type: ignore[no-untyped-call]
        return stream_memory.is_capturing()
