"""Two stages that share a machine: a producer that works through, and a consumer that follows parcel by parcel.

matmul, then communication: the matmul produces. all_gather, then matmul: the lane produces. Without the other, the
producer needs `total` seconds and has parcel i complete after ready_i; the consumer needs cost_i for it. While both
run, the producer takes p_i times as long and the consumer c_i times. With `time` when the consumer is done with parcel
i - 1, and `lag` the seconds the producer has lost so far, so that it completes parcel i at ready_i + lag:

    start = max(time, ready_i + lag + signal) + launch
    both  = min(cost_i c_i, max(0, total + lag - start) p_i)       seconds in which both run
    time  = start + both + (cost_i - both / c_i)                   the rest at full speed
    lag   = lag + both (1 - 1 / p_i)

It is exact for constant slowdowns, and all of it is branch-free, so `advance` takes numbers or arrays.

**What is best to have** is an early `time` and a small `lag`. Let 1/p + 1/c >= 1: running both at once gets more done
than one after the other. Then the end of any parcel is monotone in both. In `lag`: a smaller lag means an earlier start
and a smaller `both`. In `start`, earlier by d: either the producer outlasts the parcel and the end moves by -d, or the
producer's end moves by d (p - 1) and the consumer has d p / c done more by then, so its end moves by
d (p - 1 - p / c) <= 0. So of two states at the same cut, the one that is later in both can be forgotten (`search`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Step(NamedTuple):
    """One parcel; see the module's equations. Slowdowns are 1 or more."""

    ready: float
    cost: float
    producer_slowdown: float = 1.0
    consumer_slowdown: float = 1.0
    signal: float = 0.0
    launch: float = 0.0


def advance(time: Any, lag: Any, total: Any, step: Step) -> tuple[Any, Any]:
    """(time, lag) after one more parcel. All may be arrays, the fields of `step` too."""
    ready, cost, producer_slowdown, consumer_slowdown, signal, launch = step
    start = np.maximum(time, ready + lag + signal) + launch
    both = np.minimum(cost * consumer_slowdown, np.maximum(0.0, total + lag - start) * producer_slowdown)
    end = start + both * (1 - 1 / consumer_slowdown) + cost
    return end, lag + both * (1 - 1 / producer_slowdown)


def run(total: float, steps: list[Step], time: float = 0.0, lag: float = 0.0) -> tuple[float, float]:
    """When the producer ends and when the consumer does, in plain numbers: `advance`, step after step."""
    for ready, cost, producer_slowdown, consumer_slowdown, signal, launch in steps:
        start = max(time, ready + lag + signal) + launch
        both = min(cost * consumer_slowdown, max(0.0, total + lag - start) * producer_slowdown)
        time = start + both * (1 - 1 / consumer_slowdown) + cost
        lag += both * (1 - 1 / producer_slowdown)
    return total + lag, time
