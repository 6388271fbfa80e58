"""From one rank to another: send_recv and all_to_next."""

from __future__ import annotations

from ..language import Trace, program


@program("send_recv")
def send_recv_direct(c: Trace) -> None:
    """Rank 0 writes its buffer to rank 1; there must be a rank 1."""
    c.rank(0).input[0].copy(c.rank(1).output[0])


@program("all_to_next", chunks=lambda ranks: ranks)
def all_to_next(c: Trace) -> None:
    """Everybody writes its buffer to the next rank; to another node all ranks of both nodes help, so that one rank's
    network card is not the limit: the sender scatters to its node, each sends a part to its place on the other node,
    and these are gathered at the receiver. Nodes must be of equal size."""
    size = c.topology.per_node
    node_of, members = c.topology.nodes, {c.topology.nodes[one[0]]: one for one in c.topology.members}
    width = c.ranks // size
    for rank in range(c.ranks - 1):
        whole, to = c.rank(rank).input[:], c.rank(rank + 1).output[:]
        if node_of[rank] == node_of[rank + 1]:
            whole.copy(to)
            continue
        parts, ends = whole.split(size), to.split(size)
        here, there = members[node_of[rank]], members[node_of[rank + 1]]
        for place, mate in enumerate(here):
            if mate != rank:
                parts[place] = parts[place].copy(c.rank(mate).scratch("leaving")[0:width])
        for place, peer in enumerate(there):
            inbox = ends[place] if peer == rank + 1 else c.rank(peer).scratch("arrived")[0:width]
            parts[place] = parts[place].copy(inbox)
        for place in range(size):
            parts[place].copy(ends[place])
