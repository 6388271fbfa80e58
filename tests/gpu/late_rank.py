"""A call that the last rank does not make: what the others must find."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import undertow as ut


def call_without_the_last(group: ut.Group, call: Callable[[], torch.Tensor]) -> str:
    """Of a call that was made once before: it ends at the deadline, its output is poisoned, and the group fails."""
    group.deadline = 4.0  # only now: the first call compiles
    if group.rank == group.size - 1:
        time.sleep(9)
        return "slept"
    began = time.monotonic()
    y = call()
    torch.cuda.synchronize()
    took = time.monotonic() - began
    assert 3 < took < 9, took
    assert bool(torch.isnan(y).all()), "the output of an aborted call was not poisoned"
    until = time.monotonic() + 3
    while not group.failed and time.monotonic() < until:
        time.sleep(0.05)
    assert group.failed, "nobody noticed"
    return f"failed after {took:.1f} s"
