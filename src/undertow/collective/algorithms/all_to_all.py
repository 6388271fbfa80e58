"""AllToAll: rank d ends with what every rank s has for it, in the order of s. One chunk for each pair of ranks."""

from __future__ import annotations

from ..language import Trace, program
from .grouping import node_size


@program("all_to_all")
def all_to_all_direct(c: Trace) -> None:
    """Everybody writes to everybody, each chunk once. Not in place: a rank would overwrite what it has not sent yet;
    see `all_to_all_swap`."""
    for rank in range(c.ranks):
        source = c.rank(rank).input
        source[rank].copy(c.rank(rank).output[rank])
        for other in c.others(rank):
            source[other].copy(c.rank(other).output[rank])


@program("all_to_all")
def all_to_all_swap(c: Trace) -> None:
    """Each pair of ranks exchanges its two chunks, one of them by way of a scratch buffer, so that it works in place.
    The rank ahead in the circle has the scratch buffer, so that everybody has equally much to copy."""
    ranks = c.ranks
    for rank in range(ranks):
        c.rank(rank).input[rank].copy(c.rank(rank).output[rank])
    for distance in range(1, ranks // 2 + 1):
        for rank in range(distance if 2 * distance == ranks else ranks):
            ahead = (rank + distance) % ranks
            saved = c.rank(rank).input[ahead].copy(c.rank(ahead).scratch()[rank])
            c.rank(ahead).input[rank].copy(c.rank(rank).output[ahead])
            saved.copy(c.rank(ahead).output[rank])


@program("all_to_all")
def all_to_all_two_step(c: Trace) -> None:
    """Inside a node, the k-th rank collects what its node has for the k-th rank of every node; then each pair of nodes
    exchanges one range per place. Nodes must be of equal size, ranks numbered node by node."""
    size = node_size(c)
    nodes = c.ranks // size
    views = [c.rank(one) for one in range(c.ranks)]
    collected = [one.scratch() for one in views]  # by destination node, then by source
    for rank, view in enumerate(views):
        first, place = rank - rank % size, rank % size
        for step in range(size):
            mate = (place + step) % size
            for node in range(nodes):
                view.input[node * size + mate].copy(collected[first + mate][node * size + place])
    for step in range(nodes):
        for rank in range(c.ranks):
            node, place = rank // size, rank % size
            to = (node + step) % nodes
            part = collected[rank][to * size : (to + 1) * size]
            part.copy(views[to * size + place].output[node * size : (node + 1) * size])


@program("all_to_all")
def all_to_all_three_step(c: Trace) -> None:
    """For each other node one rank collects all that its node has for it, sends it as one range, and one rank there
    hands it out. Few, large messages between nodes. Nodes must be of equal size, ranks numbered node by node."""
    size = node_size(c)
    nodes = c.ranks // size
    views = [c.rank(one) for one in range(c.ranks)]
    pairs = [(node, (node + step) % nodes) for step in range(1, nodes) for node in range(nodes)]
    leaving = [one.scratch("leaving") for one in views]
    arrived = [one.scratch("arrived") for one in views]
    inside = [one.scratch("inside") for one in views]

    def gate(node: int, other: int) -> tuple[int, int]:
        """Who of `node` deals with `other`, and where its range for it begins."""
        return node * size + other % size, other // size * size * size

    for node, to in pairs:
        rank, start = gate(node, to)
        for source in range(size):
            part = views[node * size + source].input[to * size : (to + 1) * size]
            part.copy(leaving[rank][start + source * size : start + (source + 1) * size])
    for rank, view in enumerate(views):
        first, place = rank - rank % size, rank % size
        for step in range(size):
            mate = first + (place + step) % size
            view.input[mate].copy(inside[mate][place])
    for node, to in pairs:
        rank, start = gate(node, to)
        other, other_start = gate(to, node)
        leaving[rank][start : start + size * size].copy(arrived[other][other_start : other_start + size * size])
    for rank, view in enumerate(views):
        first = rank - rank % size
        inside[rank][0:size].copy(view.output[first : first + size])
    for node, to in pairs:
        rank, start = gate(to, node)
        for source in range(size):
            for place in range(size):
                chunk = arrived[rank][start + source * size + place]
                chunk.copy(views[to * size + place].output[node * size + source])
