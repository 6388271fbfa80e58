"""ReduceScatter: rank r ends with shard r of the sum of everybody's buffer. One chunk a shard."""

from __future__ import annotations

from ..language import Trace, program
from .grouping import alone, folded


@program("reduce_scatter")
def reduce_scatter_direct(c: Trace) -> None:
    """Everybody reads its shard from everybody and sums."""
    for rank in range(c.ranks):
        total = c.rank(rank).input[rank].copy(c.rank(rank).output[0])
        for other in c.others(rank):
            total.reduce(c.rank(other).input[rank])


@program("reduce_scatter")
def reduce_scatter_ring(c: Trace) -> None:
    """Shard i leaves the rank after i, collects what each next rank has of it, and ends at rank i."""
    if alone(c):
        return
    ranks = c.ranks
    inputs = [c.rank(one).input for one in range(ranks)]
    places = [c.rank(one).scratch() for one in range(ranks)]
    passed = [inputs[rank][(rank - 1) % ranks] for rank in range(ranks)]  # what each rank has for the next one
    for step in range(2, ranks):
        before, passed = passed, []
        for rank in range(ranks):
            shard = (rank - step) % ranks
            passed.append(inputs[rank][shard].copy(places[rank][shard]).reduce(before[rank - 1]))
    for rank in range(ranks):
        inputs[rank][rank].copy(c.rank(rank).output[0]).reduce(passed[rank - 1])


@program("reduce_scatter")
def reduce_scatter_halving(c: Trace) -> None:
    """Partners at half the distance of the round before halve what they sum until each has its own shard. Where ranks
    are no power of two, some work for a neighbour too, whose shard they hand over in the end."""
    if alone(c):
        return
    acting, extra = folded(c.ranks)
    bounds = [*acting, c.ranks]  # who acts at a place cares for the shards from this bound to the next
    places = range(len(acting))
    sums = [c.rank(one).scratch() for one in acting]
    held = [c.rank(one).input for one in acting]
    for place, other in enumerate(extra):
        held[place][:].copy(sums[place][0 : c.ranks]).reduce(c.rank(other).input[:])
        held[place] = sums[place]
    # The farthest first: only so does everybody keep a contiguous range that ends as its own shard.
    width = len(acting)
    while width > 1:
        width //= 2
        for place in places:
            low = place - place % width
            kept = slice(bounds[low], bounds[low + width])
            done = width == 1 and place >= len(extra)
            to = c.rank(acting[place]).output[0:1] if done else sums[place][kept]
            held[place][kept].copy(to).reduce(held[place ^ width][kept])
        held = sums
    for place, other in enumerate(extra):
        sums[place][acting[place]].copy(c.rank(acting[place]).output[0])
        sums[place][other].copy(c.rank(other).output[0])
