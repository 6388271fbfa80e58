"""Topologies as MSCCLang has them: `links[destination][source]` is how fast a link is, 0 for none."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import InvalidArgument
from ...topology import Topology as OurTopology

__all__ = [
    "Topology",
    "dgx1",
    "dgx_a100",
    "distributed_fully_connected",
    "distributed_hub_and_spoke",
    "fully_connected",
    "hub_and_spoke",
    "line",
    "nvlink_only",
    "ring",
    "star",
]
Switch = tuple[list[int], list[int], int, str]


class Topology:
    """Only whether a link exists matters to a program."""

    def __init__(self, name: str, links: Sequence[Sequence[int]], switches: Sequence[Switch] = ()) -> None:
        if any(len(row) != len(links) for row in links):
            raise InvalidArgument(argument="links", was="uneven", must=f"{len(links)} rows of {len(links)} numbers")
        self.name, self.links, self.switches = name, [list(row) for row in links], list(switches)

    def num_nodes(self) -> int:
        return len(self.links)

    def link(self, src: int, dst: int) -> int:
        """How fast the link is; 0: there is none."""
        return self.links[dst][src]

    def sources(self, dst: int) -> list[int]:
        return [src for src, speed in enumerate(self.links[dst]) if speed > 0]

    def destinations(self, src: int) -> list[int]:
        return [dst for dst, row in enumerate(self.links) if row[src] > 0]

    def as_ours(self) -> OurTopology:
        ranks = range(len(self.links))
        pairs = [(src, dst) for dst in ranks for src in ranks if src != dst and self.links[dst][src] > 0]
        complete = len(pairs) == len(ranks) * (len(ranks) - 1)
        return OurTopology.of((0,) * len(ranks), None if complete else pairs)


def _of_pairs(name: str, count: int, linked: set[tuple[int, int]]) -> Topology:
    """Both directions of every pair."""
    return Topology(
        name, [[int((dst, src) in linked or (src, dst) in linked) for src in range(count)] for dst in range(count)]
    )


def fully_connected(num_nodes: int) -> Topology:
    pairs = {(one, other) for one in range(num_nodes) for other in range(one)}
    return _of_pairs(f"FullyConnected(n={num_nodes})", num_nodes, pairs)


def hub_and_spoke(num_nodes: int) -> Topology:
    """All through one switch: everybody reaches everybody."""
    return Topology(f"HubAndSpoke(n={num_nodes})", fully_connected(num_nodes).links)


def ring(num_nodes: int) -> Topology:
    pairs = {(one, (one + 1) % num_nodes) for one in range(num_nodes) if num_nodes > 1}
    return _of_pairs(f"Ring(n={num_nodes})", num_nodes, pairs)


def line(num_nodes: int) -> Topology:
    return _of_pairs(f"Line(n={num_nodes})", num_nodes, {(one, one + 1) for one in range(num_nodes - 1)})


def star(num_nodes: int, non_blocking: bool = True) -> Topology:
    """Everybody is linked to rank 0."""
    return _of_pairs(f"Star(n={num_nodes})", num_nodes, {(0, one) for one in range(1, num_nodes)})


def dgx1() -> Topology:
    """Eight GPUs: two rings of four with their diagonals, linked one to one."""
    pairs = {(base + one, base + other) for base in (0, 4) for one in range(4) for other in range(one)}
    return _of_pairs("DGX1", 8, pairs | {(one, one + 4) for one in range(4)})


def dgx_a100() -> Topology:
    """Eight GPUs behind switches, each with 12 links."""
    return Topology("DGX_A100", [[12 * int(dst != src) for src in range(8)] for dst in range(8)])


def nvlink_only(nvidia_smi_topo: str | None = None) -> Topology:
    """GPUs and how many NVLinks join each two, as the table that `nvidia-smi topo -m` prints says."""
    if nvidia_smi_topo is None:
        must = "the table that `nvidia-smi topo -m` prints"
        raise InvalidArgument(argument="nvidia_smi_topo", was=nvidia_smi_topo, must=must)
    rows = [line.split() for line in nvidia_smi_topo.splitlines() if line.startswith("GPU")]
    links = [
        [int(cell[2:]) if cell[:2] == "NV" and cell[2:].isdigit() else 0 for cell in row[1 : len(rows) + 1]]
        for row in rows
    ]
    return Topology("NVLinkOnly", links)


def distributed_fully_connected(local_topology: Topology, num_local: int, remote_bw: int = 1) -> Topology:
    """`num_local` copies of a topology; ranks of different copies all reach each other."""
    return _copies("Fully", local_topology, num_local, remote_bw)


def distributed_hub_and_spoke(local_topology: Topology, num_local: int, remote_bw: int = 1) -> Topology:
    """`num_local` copies of a topology around one switch."""
    return _copies("Hub", local_topology, num_local, remote_bw)


def _copies(kind: str, local: Topology, count: int, speed: int) -> Topology:
    size = local.num_nodes()
    total = range(size * count)
    links = [
        [local.links[dst % size][src % size] if dst // size == src // size else speed for src in total] for dst in total
    ]
    return Topology(f"Distributed{kind}({local.name}, {count})", links)
