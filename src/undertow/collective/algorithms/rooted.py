"""Broadcast, reduce, gather and scatter. `c.root` is the root; others are named by how far they stand behind it."""

from __future__ import annotations

from ..language import Trace, program


@program("broadcast")
def broadcast_direct(c: Trace) -> None:
    """The root writes to everybody."""
    buffer = c.rank(c.root).input[0].copy(c.rank(c.root).output[0])
    for other in c.others(c.root):
        buffer.copy(other)


@program("broadcast")
def broadcast_tree(c: Trace) -> None:
    """Whoever has the buffer writes it to one more, so that in each round twice as many have it (binomial tree)."""
    c.rank(c.root).input[0].copy(c.rank(c.root).output[0])
    behind = [c.root, *c.others(c.root)]
    having = 1
    while having < c.ranks:
        for place in range(min(having, c.ranks - having)):
            c.rank(behind[place]).output[0].copy(behind[place + having])
        having *= 2


@program("broadcast", chunks=lambda ranks: max(1, ranks - 1))
def broadcast_scatter_gather(c: Trace) -> None:
    """The root hands every other rank a chunk of its own, which copies it to the rest: everybody sends the buffer once
    at most."""
    buffer = c.rank(c.root).input[:].copy(c.rank(c.root).output[:])
    for place, owner in enumerate(c.others(c.root)):
        buffer[place].copy(owner)
    for place, owner in enumerate(c.others(c.root)):
        chunk = c.rank(owner).output[place]
        for other in c.others(owner):
            if other != c.root:
                chunk.copy(other)


@program("reduce")
def reduce_direct(c: Trace) -> None:
    """The root reads everybody's buffer and sums them, its own first."""
    total = c.rank(c.root).input[0].copy(c.rank(c.root).output[0])
    for other in c.others(c.root):
        total.reduce(c.rank(other).input[0])


@program("reduce")
def reduce_tree(c: Trace) -> None:
    """In each round every second rank that still has a sum adds the other half's to its own (binomial tree). Only the
    root's output is written: sums of others stand in scratch buffers."""
    held = [c.rank(one).input[0] for one in (c.root, *c.others(c.root))]
    sums = [c.rank(c.root).output[0], *(c.rank(one).scratch()[0] for one in c.others(c.root))]
    held[0] = held[0].copy(sums[0])
    distance = 1
    while distance < c.ranks:
        for place in range(0, c.ranks - distance, 2 * distance):
            held[place] = held[place].copy(sums[place]).reduce(held[place + distance])
        distance *= 2


@program("gather")
def gather_direct(c: Trace) -> None:
    """Everybody writes its shard to the root."""
    for rank in range(c.ranks):
        c.rank(rank).input[0].copy(c.rank(c.root).output[rank])


@program("scatter")
def scatter_direct(c: Trace) -> None:
    """The root writes everybody's shard to it."""
    for rank in range(c.ranks):
        c.rank(c.root).input[rank].copy(c.rank(rank).output[0])
