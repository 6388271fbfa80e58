"""How fast a lane is, measured: every rank sends to its neighbour at once, as in real use."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from .base import Incoming, Outgoing

if TYPE_CHECKING:
    from .base import Fabric

_ROUNDS = 5


def measure(fabric: Fabric, name: str, nbytes: int) -> float:
    """Bytes per second that each rank sends over lane `name` while all do; the slowest counts. Collective."""
    group, lane = fabric.group, fabric.lane(name)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    buffer = fabric.buffer(nbytes, torch.uint8)
    source = torch.ones(nbytes, dtype=torch.uint8, device=group.device)
    seconds = []
    for _ in range(_ROUNDS + 1):
        fabric.settle()
        group.barrier()
        began = time.perf_counter()
        with fabric.guarded_call((buffer.local,)):  # what waits in a stream has a deadline there
            lane.round([Outgoing(right, source, buffer, 0, 0)], [Incoming(left, buffer, 0, nbytes, 0)])
            lane.free(left, 0)
            lane.flush()
            fabric.settle()
        seconds.append(group.reduce_max([time.perf_counter() - began])[0])
    buffer.release()
    return nbytes / statistics.median(seconds[1:])  # the first one warms up
