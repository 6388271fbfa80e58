"""What several algorithms need to know about their ranks: one alone, a power of two of them, nodes of equal size."""

from __future__ import annotations

from ...errors import InvalidArgument
from ..language import Trace


def alone(c: Trace) -> bool:
    """Whether there is only one rank. If so its input is copied to its output, and nothing is left to do."""
    if c.ranks == 1:
        c.rank(0).input[:].copy(c.rank(0).output[:])
    return c.ranks == 1


def around(first: int, count: int, size: int) -> list[slice]:
    """`count` chunks from `first` on (which may be negative) of `size` in a circle: as one range, or two."""
    first %= size
    stop = first + count
    return [slice(first, stop)] if stop <= size else [slice(first, size), slice(0, stop - size)]


def power_of_two(ranks: int) -> int:
    """The largest power of two that is not above `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def folded(ranks: int) -> tuple[list[int], list[int]]:
    """A power of two of ranks that act, and the ranks that do not: the k-th of these is the right neighbour of the
    k-th that acts, which works for both. Neighbours, because they are most likely on one node."""
    extra = ranks - power_of_two(ranks)
    return [*range(0, 2 * extra, 2), *range(2 * extra, ranks)], list(range(1, 2 * extra, 2))


def node_size(c: Trace) -> int:
    """Ranks on each node, for algorithms that address a node's ranks as one range; refuses any other numbering."""
    size = c.topology.per_node
    for node, members in enumerate(c.topology.members):
        if members != tuple(range(node * size, (node + 1) * size)):
            was, must = f"a node of ranks {list(members)}", "ranks numbered node by node"
            raise InvalidArgument(argument="topology", was=was, must=must)
    return size
