"""MSCCLang scripts as users of msccl-tools write and start them, with that package's own import lines.

Each prints what `XML()` prints; its arguments are those of a command line.
"""

ROWS_AND_COLUMNS = '''
import argparse
from msccl.language import *
from msccl.topologies import *
from msccl.language.collectives import AllGather

def everybody_to_everybody(members, first, count):
    """Input indices count from where a rank's own shard lies, so that those before it are negative."""
    for sender in members:
        for place, receiver in enumerate(members):
            if sender == receiver:
                continue
            for index in range(first, first + count):
                c = chunk(sender, Buffer.input, index, 1)
                c.copy(receiver, Buffer.input, index, sendtb=place, recvtb=members.index(sender))

def rows_and_columns(gpus, instances, protocol):
    columns = 2
    rows = gpus // columns
    with MSCCLProgram("rows_and_columns", fully_connected(gpus), AllGather(gpus, 1, True), instances,
                      protocol=protocol, interleaved_replication=False, dependence_nop=True):
        for row in range(rows):
            everybody_to_everybody([row * columns + column for column in range(columns)], 0, 1)
        for column in range(columns):
            everybody_to_everybody([row * columns + column for row in range(rows)], -column, columns)
        XML()
        Check()

parser = argparse.ArgumentParser()
parser.add_argument("gpus", type=int)
parser.add_argument("instances", type=int)
parser.add_argument("--protocol", default="LL", choices=["Simple", "LL128", "LL"])
args = parser.parse_args()
rows_and_columns(args.gpus, args.instances, args.protocol)
'''

FEW_REDUCERS = """
import sys
from msccl.language import *
from msccl.topologies import *
from msccl.language.collectives import AllReduce

def few_reducers(gpus, instances, protocol="LL"):
    reducers = [1, gpus - 2]
    width = 3
    prog = MSCCLProgram("few_reducers", fully_connected(gpus), AllReduce(gpus, width * len(reducers), True), instances,
                        protocol=protocol, interleaved_replication=False,
                        threadblock_policy=ThreadblockPolicy.manual, dependence_nop=True)
    with prog:
        for gpu in range(gpus):
            for part, owner in enumerate(reducers):
                if gpu != owner:
                    chunk(gpu, Buffer.input, part * width, width).copy(owner, "scratch", sendtb=owner, recvtb=gpu)
        for part, owner in enumerate(reducers):
            for index in range(width * (gpus - 1)):
                total = chunk(owner, Buffer.input, part * width + index % width)
                total.reduce(chunk(owner, "scratch", index), sendtb=index % gpus)
        for part, owner in enumerate(reducers):
            for gpu in range(gpus):
                if gpu != owner:
                    done = chunk(owner, Buffer.input, part * width, width)
                    done.copy(gpu, Buffer.input, part * width, sendtb=gpu, recvtb=owner)
        XML()
        assert Check()

few_reducers(int(sys.argv[1]), int(sys.argv[2]))
"""

CHAINS = """
import argparse
from msccl.language import *
from msccl.topologies.nvidia import *
from msccl.topologies import *
from msccl.language.collectives import *

def chain(order, index, tb):
    for here, there in zip(order, order[1:]):
        chunk(there, Buffer.input, index).reduce(chunk(here, Buffer.input, index), sendtb=tb, recvtb=tb)
    order = order[::-1]
    for here, there in zip(order, order[1:]):
        chunk(here, Buffer.input, index).copy(there, Buffer.input, index, sendtb=tb + 1, recvtb=tb + 1)

def chains(instances, protocol):
    topology = dgx_a100()
    size = topology.num_nodes()
    with MSCCLProgram("chains", topology, AllReduce(size, 2, inplace=True), instances, protocol,
                      ThreadblockPolicy.manual, False):
        chain(list(range(size)), 0, 0)
        chain(list(range(1, size, 2)) + list(range(0, size, 2)), 1, 2)
        XML()
        Check()

parser = argparse.ArgumentParser()
parser.add_argument("instances", type=int)
parser.add_argument("--protocol", default="Simple")
args = parser.parse_args()
chains(args.instances, args.protocol)
"""

TWO_NODES_OF_PAIRS = """
import sys
from msccl.language import *
from msccl.topologies import *
from msccl.language.collectives import AllReduce

def two_nodes(size, instances, protocol):
    collective = AllReduce(2 * size, size * size, True)
    with MSCCLProgram("two_nodes", fully_connected(2 * size), collective, instances, protocol=protocol,
                      threadblock_policy=ThreadblockPolicy.manual, dependence_nop=True):
        nodes = (0, size)
        for one in range(size):
            for other in range(size):
                for node in nodes:
                    if one != other:
                        c = chunk(one + node, Buffer.input, other * size, size=size)
                        c.copy(other + node, "gathered", sendtb=other, recvtb=one)
        for one in range(size):
            for index in range(size * (size - 1)):
                for node in nodes:
                    total = chunk(one + node, Buffer.input, one * size + index % size)
                    total.reduce(chunk(one + node, "gathered", index), sendtb=index % size)
        for one in range(size):
            there = chunk(one, Buffer.input, one * size, size).copy(one + size, "crossed", index=0, sendtb=size,
                                                                    recvtb=size + 1, ch=one % 2)
            here = chunk(one + size, Buffer.input, one * size, size).copy(one, "crossed", index=0, sendtb=size + 2,
                                                                         recvtb=size + 3, ch=one % 2)
            chunk(one, Buffer.input, one * size, size).reduce(here, sendtb=size + 3, ch=one % 2)
            chunk(one + size, Buffer.input, one * size, size).reduce(there, sendtb=size + 1, ch=one % 2)
        for one in range(size):
            for other in range(size):
                for node in nodes:
                    if one != other:
                        chunk(one + node, Buffer.input, one * size, size).copy(other + node, sendtb=other, recvtb=one)
        XML()
        Check()

two_nodes(int(sys.argv[1]), int(sys.argv[2]), "LL128")
"""

BACKWARDS = """
import argparse
from msccl.language import *
from msccl.topologies.distributed import *
from msccl.topologies import *
from msccl.language.collectives import Collective

class ToThePrevious(Collective):
    def init_buffers(self):
        buffers = []
        for r in range(self.num_ranks):
            given = [None] * self.chunk_factor if r == 0 else [Chunk(r, c, r - 1, c) for c in range(self.chunk_factor)]
            buffers.append({Buffer.input: given, Buffer.output: [None] * self.chunk_factor})
        return buffers

    def check(self, prog):
        correct = True
        for r in range(self.num_ranks - 1):
            for c in range(self.chunk_factor):
                found = prog.buffers[r][Buffer.output][c]
                if found is None or found.origin_rank != r + 1 or found.origin_index != c:
                    print(f"Rank {r} chunk {c} should be ({r + 1}, {c}), given {found}")
                    correct = False
        return correct

def backwards(nodes, local, instances):
    topology = distributed_fully_connected(fully_connected(local), nodes, 1)
    with MSCCLProgram("backwards", topology, ToThePrevious(nodes * local, local, False), instances):
        for r in range(1, nodes * local):
            node, g = divmod(r, local)
            if g:
                chunk(r, Buffer.input, 0, local).copy(r - 1, Buffer.output, 0, ch=g % 2)
                continue
            for c in range(local):
                moved = chunk(r, Buffer.input, c)
                if c:
                    moved = moved.copy(node * local + c, f"out of {node}", 0, ch=c % 2)
                if c != local - 1:
                    moved = moved.copy((node - 1) * local + c, f"into {node - 1}", 0, ch=c % 2)
                moved.copy(moved.get_dst_rank(), Buffer.output, moved.get_dst_index(), ch=c % 2)
        assert Check()
        XML()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("nodes", type=int)
    parser.add_argument("local", type=int)
    parser.add_argument("instances", type=int)
    args = parser.parse_args()
    backwards(args.nodes, args.local, args.instances)
"""

STAGED_ALL_TO_ALL = """
import sys
from msccl.language import *
from msccl.topologies import *
from msccl.language.collectives import AllToAll

def staged(nodes, gpus, instances):
    ranks = nodes * gpus
    with MSCCLProgram("staged", hub_and_spoke(ranks), AllToAll(ranks, 1, inplace=False), instances, protocol="LL"):
        for source in range(nodes):
            for target in range(nodes):
                if source == target:
                    continue
                for mine in range(gpus):
                    for lane in range(gpus):
                        c = chunk(source * gpus + mine, Buffer.input, target * gpus + lane)
                        c.copy(source * gpus + lane, (source, target))
                for lane in range(gpus):
                    batch = chunk(source * gpus + lane, (source, target), 0, gpus)
                    assert {batch.get_dst_rank(at) for at in range(gpus)} == {target * gpus + lane}
                    batch.copy(batch.get_dst_rank(), Buffer.output, batch.get_dst_index(), ch=2 + lane % 2)
        for rank in range(ranks):
            near = chunk(rank, Buffer.input, rank // gpus * gpus, gpus)
            for c in near.split(gpus):
                c.copy(c.get_dst_rank(), Buffer.output, c.get_dst_index())
        XML()
        Check()

staged(*[int(one) for one in sys.argv[1:]])
"""

REDUCE_IN_GROUPS = '''
import sys
from msccl.language import *
from msccl.topologies import *
from msccl.language.collectives import Collective

class ReduceGather(Collective):
    """Sums in each group, which everybody gets."""
    def __init__(self, num_ranks, chunk_factor, inplace, groups):
        Collective.__init__(self, num_ranks, chunk_factor, inplace)
        self.groups = groups
        self.members = num_ranks // groups

    def init_buffers(self):
        return [{Buffer.input: [Chunk(r, c, -1, c) for c in range(self.members)],
                 Buffer.output: [None] * self.num_ranks} for r in range(self.num_ranks)]

    def check(self, prog):
        correct = True
        for r in range(self.num_ranks):
            for c in range(self.num_ranks):
                group, part = divmod(c, self.members)
                expected = ReduceChunk(-1, [])
                for member in reversed(range(self.members)):
                    expected = expected.reduce(-1, Chunk(group * self.members + member, part))
                expected.sort()
                found = prog.buffers[r][Buffer.output][c]
                if found is None or found != expected:
                    print(f"Rank {r} chunk {c} should be {expected}, given {found}")
                    correct = False
        return correct

def reduce_gather(num_ranks, groups, instances):
    collective = ReduceGather(num_ranks, 1, False, groups)
    members = num_ranks // groups
    with MSCCLProgram("reduce-gather", fully_connected(num_ranks), collective, instances):
        for group in range(groups):
            for part in range(members):
                first = group * members
                total = chunk(first + (part + 1) % members, Buffer.input, part)
                for step in range(2, members + 1):
                    total = chunk(first + (part + step) % members, Buffer.input, part).reduce(total, ch=0)
                total.copy(total.rank, Buffer.output, first + part)
        for r in range(num_ranks):
            c = chunk(r, Buffer.output, r)
            for step in range(1, num_ranks):
                c = c.copy((r + step) % num_ranks, Buffer.output, r, ch=1)
        Check()
        XML()

reduce_gather(*[int(one) for one in sys.argv[1:]])
'''

HALVES_OF_A_RING = '''
import sys
from msccl.language import *
from msccl.topologies.generic import *
from msccl.language.collectives import ReduceScatter

def both_ways(size, instances):
    """One half of every shard goes around to the right, the other to the left."""
    with MSCCLProgram("both_ways", ring(size), ReduceScatter(size, 2, True), instances, protocol="LL128"):
        for shard in range(size):
            for half, step in enumerate((1, -1)):
                rank = (shard + step) % size
                c = chunk(rank, Buffer.input, 2 * shard + half)
                while rank != shard:
                    rank = (rank + step) % size
                    c = chunk(rank, Buffer.input, 2 * shard + half).reduce(c, ch=half)
            first, second = chunk(shard, Buffer.output, 0), chunk(shard, Buffer.output, 1)
            assert first.group(second) == chunk(shard, Buffer.input, 2 * shard, 2)
        XML()
        Check()

both_ways(int(sys.argv[1]), int(sys.argv[2]))
'''

BINOMIAL = '''
import sys
from msccl.language import *
from msccl.topologies import *
from msccl.language.collectives import Collective

class Spread(Collective):
    """In place: everybody ends with what rank 0 has, in the one buffer there is."""
    def init_buffers(self):
        given = [[None] * self.chunk_factor for r in range(self.num_ranks)]
        given[0] = [Chunk(0, c, -1, c) for c in range(self.chunk_factor)]
        return [{Buffer.input: one, Buffer.output: one} for one in given]

    def get_buffer_index(self, rank, buffer, index):
        return (Buffer.input, index) if buffer == Buffer.output else (buffer, index)

    def check(self, prog):
        return all(prog.buffers[r][Buffer.output][c] == Chunk(0, c)
                   for r in range(self.num_ranks) for c in range(self.chunk_factor))

def spread(size, instances):
    prog = MSCCLProgram("spread", fully_connected(size), Spread(size, 2, True), instances, instr_fusion=False,
                        check_xml=False)
    with prog:
        distance = 1
        while distance < size:
            for rank in range(min(distance, size - distance)):
                assert chunk(rank + distance, Buffer.output, 0) is None
                chunk(rank, Buffer.output, 0, 2).copy(rank + distance)
            distance *= 2
        if not Check():
            raise SystemExit("wrong")
    print(prog.generate_xml())

spread(int(sys.argv[1]), int(sys.argv[2]))
'''

# Name: the script, its arguments (the last of which is the number of instances), and our contract, if it has one.
SCRIPTS: dict[str, tuple[str, list[str], str]] = {
    "rows and columns": (ROWS_AND_COLUMNS, ["6"], "all_gather"),
    "few reducers": (FEW_REDUCERS, ["5"], "all_reduce"),
    "chains": (CHAINS, [], "all_reduce"),
    "two nodes of pairs": (TWO_NODES_OF_PAIRS, ["3"], "all_reduce"),
    "backwards": (BACKWARDS, ["2", "3"], "custom"),
    "staged all-to-all": (STAGED_ALL_TO_ALL, ["2", "2"], "all_to_all"),
    "reduce in groups": (REDUCE_IN_GROUPS, ["6", "2"], "custom"),
    "both ways around": (HALVES_OF_A_RING, ["4"], "reduce_scatter"),
    "binomial": (BINOMIAL, ["6"], "custom"),
}
