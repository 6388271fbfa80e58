"""Well-known algorithms written as MSCCLang programs are: to be compared with the library's."""

from __future__ import annotations

from collections.abc import Callable

from undertow.collective.msccl.language import *
from undertow.collective.msccl.language.collectives import *
from undertow.collective.msccl.topologies import *
from undertow.collective.topology import Topology as Nodes


def ring_allreduce(size, instances=1, protocol="LL"):
    prog = MSCCLProgram("ring", fully_connected(size), AllReduce(size, size, True), instances, protocol=protocol)
    with prog:
        for step in range(1, size):
            for rank in range(size):
                index = (rank - step) % size
                chunk(rank, Buffer.input, index).reduce(chunk((rank - 1) % size, Buffer.input, index), ch=0)
        for step in range(size - 1):
            for rank in range(size):
                index = (rank - step) % size
                chunk((rank - 1) % size, Buffer.input, index).copy(rank, Buffer.input, index, ch=0)
    return prog


def allpairs_allreduce(size, instances=1, protocol="LL"):
    prog = MSCCLProgram("allpairs", fully_connected(size), AllReduce(size, size, True), instances, protocol=protocol)
    with prog:
        for owner in range(size):
            total = chunk(owner, Buffer.input, owner)
            for step in range(1, size):
                total.reduce(chunk((owner + step) % size, Buffer.input, owner))
            for step in range(1, size):
                total.copy((owner + step) % size, Buffer.input, owner)
    return prog


def one_step_allreduce(size, instances=1, protocol="LL"):
    """Everybody gets everybody's buffer and sums them."""
    prog = MSCCLProgram("onestep", fully_connected(size), AllReduce(size, 1, False), instances, protocol=protocol)
    with prog:
        for rank in range(size):
            total = chunk(rank, Buffer.input, 0).copy(rank, Buffer.output, 0)
            for step in range(1, size):
                total.reduce(chunk((rank + step) % size, Buffer.input, 0))
    return prog


def halving_doubling_allreduce(size, instances=1, protocol="LL"):
    prog = MSCCLProgram("rhd", fully_connected(size), AllReduce(size, size, True), instances, protocol=protocol)
    with prog:
        start, width, distance = [0] * size, size, 1
        while width > 1:
            width //= 2
            for rank in range(size):
                if rank & distance:
                    start[rank] += width
            held = [chunk(rank ^ distance, Buffer.input, start[rank], width) for rank in range(size)]
            for rank in range(size):
                chunk(rank, Buffer.input, start[rank], width).reduce(held[rank])
            distance *= 2
        while width < size:
            distance //= 2
            for rank in range(size):
                chunk(rank, Buffer.input, start[rank], width).copy(rank ^ distance, Buffer.input, start[rank])
            for rank in range(size):
                if rank & distance:
                    start[rank] -= width
            width *= 2
    return prog


def hierarchical_allreduce(nodes, gpus, instances=1, protocol="LL"):
    size = nodes * gpus
    prog = MSCCLProgram(
        "hierarchical", fully_connected(size), AllReduce(size, size, True), instances, protocol=protocol
    )
    with prog:
        for node in range(nodes):
            for local in range(gpus):
                total = chunk(node * gpus + local, Buffer.input, local * nodes, nodes)
                for step in range(1, gpus):
                    mate = node * gpus + (local + step) % gpus
                    total.reduce(chunk(mate, Buffer.input, local * nodes, nodes))
        for node in range(nodes):
            for local in range(gpus):
                index = local * nodes + node
                total = chunk(node * gpus + local, Buffer.input, index)
                peers = [(node + step) % nodes * gpus + local for step in range(1, nodes)]
                for peer in peers:
                    total.reduce(chunk(peer, Buffer.input, index))
                for peer in peers:
                    total.copy(peer, Buffer.input, index)
        for node in range(nodes):
            for local in range(gpus):
                for step in range(1, gpus):
                    mate = node * gpus + (local + step) % gpus
                    chunk(node * gpus + local, Buffer.input, local * nodes, nodes).copy(mate)
    return prog


def ring_allgather(size, instances=1, protocol="LL"):
    prog = MSCCLProgram("ring", ring(size), AllGather(size, 1, False), instances, protocol=protocol)
    with prog:
        passed = [chunk(rank, Buffer.input, 0).copy(rank, Buffer.output, rank) for rank in range(size)]
        for _ in range(1, size):
            before = passed
            passed = []
            for rank in range(size):
                passed.append(before[(rank - 1) % size].copy(rank))
    return prog


def allpairs_allgather(size, instances=1, protocol="LL"):
    prog = MSCCLProgram("allpairs", fully_connected(size), AllGather(size, 1, True), instances, protocol=protocol)
    with prog:
        for rank in range(size):
            for step in range(1, size):
                chunk(rank, Buffer.input, 0).copy((rank + step) % size, Buffer.output, rank)
    return prog


def doubling_allgather(size, instances=1, protocol="LL"):
    prog = MSCCLProgram("doubling", fully_connected(size), AllGather(size, 1, False), instances, protocol=protocol)
    with prog:
        for rank in range(size):
            chunk(rank, Buffer.input, 0).copy(rank, Buffer.output, rank)
        known = 1
        while known < size:
            for rank in range(size):
                first = (rank + 1 - known) % size
                parts = (
                    [(first, known)] if first + known <= size else [(first, size - first), (0, first + known - size)]
                )
                for index, count in parts:
                    chunk(rank, Buffer.output, index, count).copy((rank + known) % size)
            known *= 2
    return prog


def direct_reduce_scatter(size, instances=1, protocol="LL"):
    prog = MSCCLProgram("rs", fully_connected(size), ReduceScatter(size, 1, True), instances, protocol=protocol)
    with prog:
        for rank in range(size):
            total = chunk(rank, Buffer.input, rank)
            for step in range(1, size):
                total.reduce(chunk((rank + step) % size, Buffer.input, rank))
    return prog


def ring_reduce_scatter(size, instances=1, protocol="LL"):
    prog = MSCCLProgram("rs_ring", fully_connected(size), ReduceScatter(size, 1, True), instances, protocol=protocol)
    with prog:
        for step in range(2, size + 1):
            for rank in range(size):
                index = (rank - step) % size
                chunk(rank, Buffer.input, index).reduce(chunk((rank - 1) % size, Buffer.input, index))
    return prog


def allpairs_alltoall(size, instances=1, protocol="LL"):
    prog = MSCCLProgram("a2a", fully_connected(size), AllToAll(size, 1, inplace=False), instances, protocol=protocol)
    with prog:
        for rank in range(size):
            for step in range(size):
                c = chunk(rank, Buffer.input, (rank + step) % size)
                c.copy(c.get_dst_rank(), Buffer.output, c.get_dst_index())
    return prog


def two_step_alltoall(nodes, gpus, instances=1, protocol="LL"):
    size = nodes * gpus
    prog = MSCCLProgram(
        "two_step", fully_connected(size), AllToAll(size, 1, inplace=False), instances, protocol=protocol
    )
    with prog:
        for rank in range(size):
            node, local = divmod(rank, gpus)
            for step in range(gpus):
                mate = (local + step) % gpus
                for to in range(nodes):
                    c = chunk(rank, Buffer.input, to * gpus + mate)
                    c.copy(node * gpus + mate, "collected", to * gpus + local)
        for step in range(nodes):
            for rank in range(size):
                node, local = divmod(rank, gpus)
                to = (node + step) % nodes
                c = chunk(rank, "collected", to * gpus, gpus)
                c.copy(to * gpus + local, Buffer.output, node * gpus)
    return prog


def three_step_alltoall(nodes, gpus, instances=1, protocol="LL"):
    """One rank for each pair of nodes collects, sends one range, and one there hands it out by its chunks' goals."""
    size = nodes * gpus
    prog = MSCCLProgram(
        "three_step", fully_connected(size), AllToAll(size, 1, inplace=False), instances, protocol=protocol
    )
    with prog:
        pairs = [(node, (node + step) % nodes) for step in range(1, nodes) for node in range(nodes)]
        leaving = {}
        for node, to in pairs:
            for local in range(gpus):
                c = chunk(node * gpus + local, Buffer.input, to * gpus, gpus)
                c = c.copy(node * gpus + to % gpus, ("leaving", node, to))
                leaving[node, to] = leaving[node, to].group(c) if (node, to) in leaving else c
        for rank in range(size):
            node, local = divmod(rank, gpus)
            for step in range(gpus):
                mate = node * gpus + (local + step) % gpus
                chunk(rank, Buffer.input, mate).copy(mate, Buffer.output, rank)
        arrived = {}
        for node, to in pairs:
            arrived[node, to] = leaving[node, to].copy(to * gpus + node % gpus, ("arrived", node, to), 0)
        for pair in pairs:
            for c in arrived[pair].split(gpus * gpus):
                c.copy(c.get_dst_rank(), Buffer.output, c.get_dst_index())
    return prog


class AllToNext(Collective):
    """Everybody's buffer ends at the next rank."""

    def init_buffers(self):
        made = []
        for rank in range(self.num_ranks):
            goal = (rank + 1,) if rank + 1 < self.num_ranks else (-1,)
            given = [Chunk(rank, index, *goal, index) for index in range(self.chunk_factor)]
            made.append({Buffer.input: given, Buffer.output: [None] * self.chunk_factor})
        return made

    def check(self, prog):
        right = True
        for rank in range(1, self.num_ranks):
            for index, found in enumerate(prog.buffers[rank][Buffer.output]):
                if found is None or (found.origin_rank, found.origin_index) != (rank - 1, index):
                    print(f"Rank {rank} has {found} at {index}")
                    right = False
        return right


def all_to_next(nodes, gpus, instances=1, protocol="LL"):
    size = nodes * gpus
    prog = MSCCLProgram("next", fully_connected(size), AllToNext(size, size, False), instances, protocol=protocol)
    width = nodes
    with prog:
        for rank in range(size - 1):
            node = rank // gpus
            if (rank + 1) // gpus == node:
                chunk(rank, Buffer.input, 0, size).copy(rank + 1, Buffer.output, 0)
                continue
            parts = chunk(rank, Buffer.input, 0, size).split(gpus)
            for local in range(gpus):
                if node * gpus + local != rank:
                    parts[local] = parts[local].copy(node * gpus + local, "leaving", 0)
            for local in range(gpus):
                peer = (node + 1) * gpus + local
                place = (Buffer.output, local * width) if peer == rank + 1 else ("arrived", 0)
                parts[local] = parts[local].copy(peer, *place)
            for local in range(gpus):
                parts[local].copy(rank + 1, Buffer.output, local * width)
    return prog


class Broadcast(AllToNext):
    """Everybody ends with what rank 0 has."""

    def check(self, prog):
        wanted = [Chunk(0, index) for index in range(self.chunk_factor)]
        return all(prog.buffers[rank][Buffer.output] == wanted for rank in range(self.num_ranks))


def tree_broadcast(size, instances=1, protocol="LL"):
    prog = MSCCLProgram("tree", fully_connected(size), Broadcast(size, 1, False), instances, protocol=protocol)
    with prog:
        chunk(0, Buffer.input, 0).copy(0, Buffer.output, 0)
        having = 1
        while having < size:
            for rank in range(min(having, size - having)):
                chunk(rank, Buffer.output, 0).copy(rank + having)
            having *= 2
    return prog


# name -> (program, arguments, name in the library, its nodes)
ALGORITHMS: dict[str, tuple[Callable[..., MSCCLProgram], tuple[int, ...], str, Nodes]] = {
    made.__name__: (made, arguments, native, Nodes.grid(*arguments) if len(arguments) == 2 else Nodes.flat(*arguments))
    for made, arguments, native in (
        (ring_allreduce, (8,), "ring"),
        (allpairs_allreduce, (8,), "two_shot"),
        (one_step_allreduce, (4,), "one_shot"),
        (halving_doubling_allreduce, (8,), "halving_doubling"),
        (hierarchical_allreduce, (2, 4), "hierarchical"),
        (ring_allgather, (6,), "all_gather_ring"),
        (allpairs_allgather, (5,), "all_gather_direct"),
        (doubling_allgather, (8,), "all_gather_doubling"),
        (direct_reduce_scatter, (6,), "reduce_scatter_direct"),
        (ring_reduce_scatter, (6,), "reduce_scatter_ring"),
        (allpairs_alltoall, (6,), "all_to_all_direct"),
        (two_step_alltoall, (2, 4), "all_to_all_two_step"),
        (three_step_alltoall, (3, 2), "all_to_all_three_step"),
        (all_to_next, (2, 4), "all_to_next"),
        (tree_broadcast, (7,), "broadcast_tree"),
    )
}
