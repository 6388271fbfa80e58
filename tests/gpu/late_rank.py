"""A call that the last rank does not make: what the others must find."""

from __future__ import annotations

import time
from collections.abc import Callable

import chain_checks
import torch

import undertow as ut

CALLS: dict[str, tuple[str, str, int]] = {
    "one row": ("matmul_all_reduce", "fused:peer", 1),
    "few rows, to all at once": ("matmul_all_reduce", "fused:peer", 4),
    "few rows, by owners": ("matmul_all_reduce", "fused:peer", 48),
    "tiles": ("matmul_reduce_scatter", "fused:peer", 1024),
    "sums from rank to rank": ("matmul_reduce_scatter", "rotated", 1024),
    "a small sum": ("matmul_all_reduce", "serial:peer", 4),
    "a large sum": ("matmul_all_reduce", "serial:peer", 1024),
    "rows": ("all_gather_matmul", "serial:peer", 1024),
    "parcels that a program moves": ("matmul_all_reduce", "signaled:peer", 1024),
    "chunks by kernels": ("matmul_all_reduce", "chunked:peer", 1024),
    "sums that are posted": ("matmul_reduce_scatter", "fused:dma", 1024),
    "rows that are posted": ("all_gather_matmul", "fused:dma", 1024),
    "parcels by copy engines": ("matmul_all_reduce", "signaled:dma", 1024),
}
"""Operator, strategy (or the order of a plan) and rows of calls that are watched in different ways."""


def operator_without_the_last(name: str) -> str:
    group = ut.init()
    operator, strategy, rows = CALLS[name]
    x = torch.ones(rows, 512, dtype=torch.bfloat16, device=group.device)
    w = torch.ones(1024, 512, dtype=torch.bfloat16, device=group.device).t()
    how: dict[str, object] = {"strategy": strategy}
    if strategy == "rotated":
        how = {"plan": chain_checks.scatter_plans(group, rows, w.shape[1], x.shape[1])[1]}

    def call() -> torch.Tensor:
        return getattr(ut, operator)(x, w, group=group, **how)  # type: ignore[no-any-return]

    for _ in range(3):  # both turns of what calls share
        y = call()
    torch.cuda.synchronize()
    group.check()
    assert not bool(torch.isnan(y).any())
    return call_without_the_last(group, call)


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
