"""Why a computation is slower beside a collective: thieves of one resource each stand in for the collective.

    lost to SMs            slowdown beside a thief of k SMs
    lost to L2             slowdown beside a thief that reads within the L2 on k CTAs, less what its SMs cost
    lost to bandwidth      slowdown beside a thief that reads beyond the L2 on k CTAs, less what its SMs cost

The thief of SMs holds all registers of its SMs, so what it costs is an upper bound of what the others' SMs cost.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from .spans import spans_of
from .workloads import COMPUTATIONS, computation, repeated

if TYPE_CHECKING:
    from ..fabric.group import Group

_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call
_ROUNDS = 5
_REPEATS = 4  # one is so short that its beginning would be a good part of it


@dataclass(frozen=True, slots=True)
class Loss:
    """One computation beside one thief: seconds alone and beside, and the bytes per second that the thief read."""

    compute: str
    thief: str
    ctas: int
    alone: float
    beside: float
    thief_bytes_per_second: float = 0.0

    @property
    def slowdown(self) -> float:
        return self.beside / self.alone

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "slowdown": self.slowdown}


def attribute(group: Group, ctas: int, scale: float = 1.0) -> list[Loss]:
    """Every computation beside every thief on a GPU of one rank."""
    from ..fabric import stream_memory
    from .stand_ins import Thieves

    device = group.device
    thieves = Thieves(device)
    side = stream_memory.new_stream(device, priority=-1)
    found = []
    for name in COMPUTATIONS:
        work = repeated(computation(name, group, scale).run, _REPEATS)
        work()
        alone = statistics.median(_timed(group, work) for _ in range(_ROUNDS))
        nanoseconds = round(3e9 * alone)  # longer than the computation beside it
        for thief, run in thieves.each(ctas, nanoseconds).items():
            times = []
            for _ in range(_ROUNDS):
                torch.cuda.synchronize(device)
                with torch.cuda.stream(side):
                    run()
                _cuda._sleep(200_000)  # cycles: the thief has begun before the computation does
                times.append(_timed(group, work))
                torch.cuda.synchronize(device)
            read = 0 if thief == "SMs" else thieves.bytes_read(ctas)
            found.append(Loss(name, thief, ctas, alone, statistics.median(times), read / (nanoseconds * 1e-9)))
    return found


def _timed(group: Group, work: Any) -> float:
    spans = spans_of(group.device)
    spans.begin()
    work()
    spans.computed()
    spans.communicated()
    return spans.ends().both
