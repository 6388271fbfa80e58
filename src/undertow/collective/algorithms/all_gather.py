"""AllGather: everybody ends with everybody's shard, in rank order. One chunk a shard."""

from __future__ import annotations

from ..language import Trace, program
from .grouping import around


@program("all_gather")
def all_gather_direct(c: Trace) -> None:
    """Everybody writes its shard to everybody."""
    for rank in range(c.ranks):
        shard = c.rank(rank).input[0].copy(c.rank(rank).output[rank])
        for other in c.others(rank):
            shard.copy(other)


@program("all_gather")
def all_gather_ring(c: Trace) -> None:
    """Everybody hands on to the next rank what came last from the one before, beginning with its own shard."""
    ranks = c.ranks
    outputs = [c.rank(one).output for one in range(ranks)]
    passed = [c.rank(one).input[0].copy(outputs[one][one]) for one in range(ranks)]
    for step in range(1, ranks):
        before, passed = passed, []
        for rank in range(ranks):
            passed.append(before[rank - 1].copy(outputs[rank][(rank - step) % ranks]))


@program("all_gather")
def all_gather_doubling(c: Trace) -> None:
    """Everybody knows the last 1, 2, 4, ... shards up to its own, and tells them to the rank so far ahead; in the last
    round only what is missing there. Any number of ranks; shards that pass the end of the buffer go in two ranges."""
    ranks = c.ranks
    for rank in range(ranks):
        c.rank(rank).input[0].copy(c.rank(rank).output[rank])
    known = 1
    while known < ranks:
        told = min(known, ranks - known)
        for rank in range(ranks):
            for part in around(rank + 1 - told, told, ranks):
                c.rank(rank).output[part].copy((rank + known) % ranks)
        known += told


@program("all_gather")
def all_gather_hierarchical(c: Trace) -> None:
    """A shard crosses to each other node once, to the rank at the same place there, which copies it to its node.
    Nodes must be of equal size."""
    size = c.topology.per_node
    nodes = c.topology.members
    for node, members in enumerate(nodes):
        for local, rank in enumerate(members):
            shard = c.rank(rank).input[0].copy(c.rank(rank).output[rank])
            for step in range(1, len(nodes)):
                shard.copy(nodes[(node + step) % len(nodes)][local])
    for node, members in enumerate(nodes):
        for local, rank in enumerate(members):
            mates = [members[(local + step) % size] for step in range(1, size)]
            for step in range(len(nodes)):  # the own shard first: it is there already
                shard = c.rank(rank).output[nodes[(node - step) % len(nodes)][local]]
                for mate in mates:
                    shard.copy(mate)
