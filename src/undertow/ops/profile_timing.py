"""Device seconds of calls that all ranks begin at once: how `undertow profile` times what shares engines or SMs.

A barrier of hosts lets ranks go on milliseconds apart, so a message from every rank to every other brings their streams
together: nobody's call begins before everybody's stream is there. With `ahead`, each stream then sleeps until its host
has enqueued the whole call, and what hosts cost is not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from ..fabric.group import Group

Call = Callable[[], object]
_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call
DELAY_CYCLES = 25_000_000  # more than 10 ms on GPUs of today: longer than the host needs to enqueue any of this


class Spread(NamedTuple):
    """Seconds until the last rank was done, and as a part of that, how much sooner the first one was."""

    seconds: float
    stagger: float


def together(group: Group, call: Call, align: Call, rounds: int, ahead: bool = True) -> Spread:
    """Medians of `rounds` calls, after one that is not counted. Collective; the same on all ranks.

    `align`: the message from every rank to every other.
    """
    call()  # loads kernels, which must not happen behind what sleeps
    taken = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize(group.device)
        group.barrier()
        align()
        if ahead:
            _cuda._sleep(DELAY_CYCLES)
        start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(float(start.elapsed_time(end)) * 1e-3)
    slowest = group.reduce_max(taken)[1:]
    fastest = [-one for one in group.reduce_max([-one for one in taken])[1:]]
    sooner = [1 - first / last if last > 0 else 0.0 for first, last in zip(fastest, slowest, strict=True)]
    return Spread(statistics.median(slowest), statistics.median(sooner))
