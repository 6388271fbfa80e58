"""Broadcast, reduce, gather and scatter: rank 0 is the root."""

from __future__ import annotations

from ..language import Trace, program


@program("broadcast")
def broadcast_direct(c: Trace) -> None:
    """The root writes to everybody."""
    buffer = c.rank(0).input[0].copy(c.rank(0).output[0])
    for other in c.others(0):
        buffer.copy(other)


@program("broadcast")
def broadcast_tree(c: Trace) -> None:
    """Whoever has the buffer writes it to one more, so that in each round twice as many have it (binomial tree)."""
    c.rank(0).input[0].copy(c.rank(0).output[0])
    having = 1
    while having < c.ranks:
        for rank in range(min(having, c.ranks - having)):
            c.rank(rank).output[0].copy(rank + having)
        having *= 2


@program("broadcast", chunks=lambda ranks: max(1, ranks - 1))
def broadcast_scatter_gather(c: Trace) -> None:
    """The root hands every other rank a chunk of its own, which copies it to the rest: everybody sends the buffer once
    at most."""
    buffer = c.rank(0).input[:].copy(c.rank(0).output[:])
    for owner in c.others(0):
        buffer[owner - 1].copy(owner)
    for owner in c.others(0):
        chunk = c.rank(owner).output[owner - 1]
        for other in c.others(owner):
            if other != 0:
                chunk.copy(other)


@program("reduce")
def reduce_direct(c: Trace) -> None:
    """The root reads everybody's buffer and sums in rank order."""
    total = c.rank(0).input[0].copy(c.rank(0).output[0])
    for other in c.others(0):
        total.reduce(c.rank(other).input[0])


@program("reduce")
def reduce_tree(c: Trace) -> None:
    """In each round every second rank that still has a sum adds the other half's to its own (binomial tree). Only the
    root's output is written: sums of others stand in scratch buffers."""
    held = [c.rank(one).input[0] for one in range(c.ranks)]
    sums = [c.rank(0).output[0], *(c.rank(one).scratch()[0] for one in c.others(0))]
    held[0] = held[0].copy(sums[0])
    distance = 1
    while distance < c.ranks:
        for rank in range(0, c.ranks - distance, 2 * distance):
            held[rank] = held[rank].copy(sums[rank]).reduce(held[rank + distance])
        distance *= 2


@program("gather")
def gather_direct(c: Trace) -> None:
    """Everybody writes its shard to the root."""
    for rank in range(c.ranks):
        c.rank(rank).input[0].copy(c.rank(0).output[rank])


@program("scatter")
def scatter_direct(c: Trace) -> None:
    """The root writes everybody's shard to it."""
    for rank in range(c.ranks):
        c.rank(0).input[rank].copy(c.rank(rank).output[0])
