"""When the two sides of a concurrent call began and ended.

On a CPU the clock's time, taken by whoever works; on CUDA events in the order of the streams, read after the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call


@dataclass(frozen=True, slots=True)
class Ends:
    """Seconds from the beginning of both to the end of each."""

    compute: float
    collective: float

    @property
    def both(self) -> float:
        return max(self.compute, self.collective)


class Spans:
    """Three moments. `begin` on the caller's stream, `computed` on the computing one, `communicated` on the other.

    `whole`: whether all three were taken of a call that did not fail.
    """

    whole = False

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._compute = self._collective = self._began

    def computed(self) -> None:
        self._compute = time.perf_counter()

    def communicated(self) -> None:
        self._collective = time.perf_counter()

    def ends(self) -> Ends:
        return Ends(self._compute - self._began, self._collective - self._began)


class CudaSpans(Spans):
    """The same by events."""

    def __init__(self) -> None:
        self._events = [_cuda.Event(enable_timing=True) for _ in range(3)]

    def begin(self) -> None:
        self._events[0].record()

    def computed(self) -> None:
        self._events[1].record()

    def communicated(self) -> None:
        self._events[2].record()

    def ends(self) -> Ends:
        """Waits for both."""
        start, compute, collective = self._events
        for one in (compute, collective):
            one.synchronize()
        return Ends(start.elapsed_time(compute) * 1e-3, start.elapsed_time(collective) * 1e-3)


def spans_of(device: torch.device) -> Spans:
    return CudaSpans() if device.type == "cuda" else Spans()
