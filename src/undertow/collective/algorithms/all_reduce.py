"""AllReduce: everybody ends with the sum of everybody's buffer.

Every sum is made by one rank and then copied, or made by all ranks in one order: all ranks end with the same bits.
"""

from __future__ import annotations

from ..language import Trace, program
from .grouping import alone, around, folded, power_of_two


@program("all_reduce", chunks=lambda ranks: ranks)
def ring(c: Trace) -> None:
    """Chunk i leaves rank i, collects what each next rank has of it, and then goes around once more as the sum."""
    if alone(c):
        return
    ranks = c.ranks
    inputs = [c.rank(one).input for one in range(ranks)]
    outputs = [c.rank(one).output for one in range(ranks)]
    # A copy and a reduce of one chunk become one instruction; among many ranks, where the number of operations is what
    # hurts, own chunks are copied in longer runs, each just before the first of its chunks is needed.
    run = max(1, ranks // 64)
    passed = [inputs[rank][rank] for rank in range(ranks)]  # what each rank has for the next one
    for step in range(1, ranks):
        before, passed = passed, []
        width = min(run, ranks - step) if step % run == 1 % run else 0
        for rank in range(ranks):
            if width:
                for own in around(rank - step - width + 1, width, ranks):
                    inputs[rank][own].copy(outputs[rank][own])
            passed.append(outputs[rank][(rank - step) % ranks].reduce(before[rank - 1]))
    for step in range(ranks - 1):
        before, passed = passed, []
        for rank in range(ranks):
            passed.append(before[rank - 1].copy(outputs[rank][(rank - step) % ranks]))


@program("all_reduce")
def one_shot(c: Trace) -> None:
    """Everybody reads everybody's buffer and sums in rank order. What is read is a copy, so that a rank may overwrite
    its buffer, when it works in place, before all others have read it."""
    published = [c.rank(one).input[0].copy(c.rank(one).scratch()[0]) for one in range(c.ranks)]
    for rank in range(c.ranks):
        total = published[0].copy(c.rank(rank).output[0])
        for part in published[1:]:
            total.reduce(part)


@program("all_reduce", chunks=lambda ranks: ranks)
def two_shot(c: Trace) -> None:
    """Rank i sums chunk i of everybody and copies the sum to everybody."""
    for owner in range(c.ranks):
        total = c.rank(owner).input[owner].copy(c.rank(owner).output[owner])
        for other in c.others(owner):
            total.reduce(c.rank(other).input[owner])
        for other in c.others(owner):
            total.copy(other)


@program("all_reduce", chunks=lambda ranks: ranks * ranks)
def all_pairs_chunks(c: Trace) -> None:
    """Two-shot where everybody pushes its parts to their owners, and an owner sums its part in as many chunks as there
    are ranks, each by whoever is free."""
    ranks = c.ranks
    for rank in range(ranks):
        for owner in c.others(rank):
            part = c.rank(rank).input[owner * ranks : (owner + 1) * ranks]
            part.copy(c.rank(owner).scratch()[rank * ranks : (rank + 1) * ranks])
    for owner in range(ranks):
        here, pushed = c.rank(owner), c.rank(owner).scratch()
        for chunk in range(ranks):
            total = here.input[owner * ranks + chunk].copy(here.output[owner * ranks + chunk])
            for other in c.others(owner):
                total.reduce(pushed[other * ranks + chunk])
    for owner in range(ranks):
        part = c.rank(owner).output[owner * ranks : (owner + 1) * ranks]
        for other in c.others(owner):
            part.copy(other)


@program("all_reduce", chunks=power_of_two)
def halving_doubling(c: Trace) -> None:
    """Partners at distance 1, 2, 4, ... halve what they sum until each has one chunk; back the same way they double
    what they know. Where ranks are no power of two, some work for a neighbour too."""
    if alone(c):
        return
    acting, extra = folded(c.ranks)
    places = range(len(acting))
    outputs = [c.rank(one).output for one in acting]
    held = [c.rank(one).input for one in acting]
    for place, other in enumerate(extra):
        held[place][:].copy(outputs[place][:]).reduce(c.rank(other).input[:])
        held[place] = outputs[place]
    # The nearest first: the most is exchanged in the first round, and near partners share a node.
    start, width = [0 for _ in places], len(acting)
    for distance in (1 << bit for bit in range(len(acting).bit_length() - 1)):
        width //= 2
        for place in places:
            if place & distance:
                start[place] += width
            kept = slice(start[place], start[place] + width)
            held[place][kept].copy(outputs[place][kept]).reduce(held[place ^ distance][kept])
        held = outputs
    while width < len(acting):
        distance = len(acting) // (2 * width)
        for place in places:
            outputs[place][start[place] : start[place] + width].copy(acting[place ^ distance])
        for place in places:
            if place & distance:
                start[place] -= width
        width *= 2
    for place, other in enumerate(extra):
        outputs[place][:].copy(other)


@program("all_reduce", chunks=2)
def double_binary_tree(c: Trace) -> None:
    """Sums climb a binary tree and come down again, in two trees with one half each: inner ranks of one tree are leaves
    of the other (but for one rank where their number is odd), so that everybody sends and receives equally much."""
    if alone(c):
        return
    ranks = c.ranks
    mirrored = [ranks - 1 - place if ranks % 2 == 0 else (place + 1) % ranks for place in range(ranks)]
    trees = list(enumerate((list(range(ranks)), mirrored)))
    children: list[list[int]] = [[] for _ in range(ranks)]
    for place in range(1, ranks):
        children[_parent(place, ranks)].append(place)
    order = [0]  # from the root down
    for place in order:
        order += children[place]
    for chunk, at in trees:
        held = [c.rank(at[place]).input[chunk] for place in range(ranks)]
        for place in reversed(order):
            if children[place]:
                held[place] = held[place].copy(c.rank(at[place]).output[chunk])
            for child in children[place]:
                held[place].reduce(held[child])
    for chunk, at in trees:
        for place in order:
            for child in children[place]:
                c.rank(at[place]).output[chunk].copy(at[child])


def _parent(place: int, count: int) -> int:
    """In a binary tree whose places read 0, 1, 2, ... from left to right and whose root is 0: odd places are leaves."""
    lowest = place & -place
    above = (place ^ lowest) | (lowest << 1)
    return above if above < count else place ^ lowest


@program("all_reduce", chunks=lambda ranks: ranks)
def hierarchical(c: Trace) -> None:
    """Inside a node the k-th rank sums part k; the k-th ranks of all nodes sum theirs, a chunk each (two-shot); then
    the sums are copied inside the node. The nodes must be of equal size."""
    size = c.topology.per_node
    nodes = c.topology.members
    width = len(nodes)
    for members in nodes:
        for local, rank in enumerate(members):
            part = slice(local * width, (local + 1) * width)
            total = c.rank(rank).input[part].copy(c.rank(rank).output[part])
            for step in range(1, size):
                total.reduce(c.rank(members[(local + step) % size]).input[part])
    for node, members in enumerate(nodes):
        for local, rank in enumerate(members):
            chunk = local * width + node
            total = c.rank(rank).output[chunk]
            peers = [nodes[(node + step) % width][local] for step in range(1, width)]
            for peer in peers:
                total.reduce(c.rank(peer).output[chunk])
            for peer in peers:
                total.copy(peer)
    for members in nodes:
        for local, rank in enumerate(members):
            part = slice(local * width, (local + 1) * width)
            for step in range(1, size):
                c.rank(rank).output[part].copy(members[(local + step) % size])
