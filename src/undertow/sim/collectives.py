"""How long a collective takes on a cluster: a library program is compiled for the group and run on its links.

| group | ranks |
|---|---|
| all | of the whole cluster |
| node | of one node |
| across | one of each node, at the same place |

All groups of a kind do the same at the same time; one of them is run, which is exact where they share no link (a card
for each rank). Programs: those that `collective.selection` takes between nodes, direct ones inside; where a flat group
is large, the faster of a ring and of halving and doubling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..collective import selection
from ..collective.algorithms import LIBRARY
from ..collective.schedule import Schedule
from ..collective.topology import Topology
from ..errors import InvalidArgument
from .cluster import COLLECTIVES, Cluster
from .network import Ints, Network
from .schedules import Result, simulate

__all__ = ["COLLECTIVES", "GROUPS", "Collectives", "Subset", "Timing", "busiest_link", "programs_for"]
GROUPS = ("all", "node", "across")
_PAIR = "pair"  # the first rank and its place on the next node; inside one node, its neighbour
_FEW = 16  # ranks of a flat group that may all talk to each other at once
_FLAT = {
    "all_reduce": ("two_shot", "halving_doubling", "ring"),
    "reduce_scatter": ("reduce_scatter_direct", "reduce_scatter_halving", "reduce_scatter_ring"),
    "all_gather": ("all_gather_direct", "all_gather_ring", "all_gather_ring"),
    "all_to_all": ("all_to_all_direct", "all_to_all_direct", "all_to_all_direct"),
}
_WORKERS = 8
_LONGEST_RING = (
    256  # beyond that its latency loses to halving at all sizes that matter, and it takes seconds to compile
)


class Subset(Network):
    """Some ranks of a network, under numbers of their own, over its links."""

    def __init__(self, network: Network, members: Sequence[int]) -> None:
        super().__init__(len(members))
        self.links = network.links
        self._network, self._members = network, np.array(members, np.int64)

    def _hops(self, source: Ints, destination: Ints) -> Sequence[Ints]:
        return self._network._hops(self._members[source], self._members[destination])


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, bytes per second that a rank sends, and the kind of link that was busiest."""

    seconds: float
    bytes_per_second: float
    link: str


class Collectives:
    """Times of one cluster's collectives; what was asked once is remembered."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._schedules: dict[tuple[str, str], tuple[Schedule, Network]] = {}  # by program and group
        self._timings: dict[tuple[str, str, int], Timing] = {}
        self.events = 0

    def ranks(self, group: str) -> int:
        if group not in GROUPS:
            raise InvalidArgument(argument="group", was=repr(group), must=f"one of {', '.join(GROUPS)}")
        shape = self.cluster.shape
        return {"all": self.cluster.ranks, "node": shape.per_node, "across": shape.nodes}[group]

    def time(self, collective: str, nbytes: float, group: str = "all") -> Timing:
        """`nbytes`: of the longest buffer of a rank, as nccl-tests counts: the whole, not the shard."""
        if collective not in COLLECTIVES:
            raise InvalidArgument(argument="collective", was=repr(collective), must=f"one of {', '.join(COLLECTIVES)}")
        if not 0 <= nbytes < 1 << 50:
            raise InvalidArgument(argument="nbytes", was=nbytes, must="at least 0 and below 2^50")
        key = (collective, group, round(nbytes))
        if key not in self._timings:
            self._timings[key] = self._run(collective, group, round(nbytes))
        return self._timings[key]

    def message(self, nbytes: float) -> Timing:
        """From one rank to its place on the next node; where there is one node only, to its neighbour."""
        key = ("send_recv", _PAIR, round(nbytes))
        if key not in self._timings:
            alone = self.cluster.ranks < 2 or key[2] < 1
            self._timings[key] = Timing(0.0, 0.0, "") if alone else self._timed("send_recv_direct", _PAIR, key[2])
        return self._timings[key]

    def _run(self, collective: str, group: str, nbytes: int) -> Timing:
        if self.ranks(group) < 2 or not nbytes:
            return Timing(0.0, 0.0, "")
        return min(
            (self._timed(name, group, nbytes) for name in programs_for(collective, self._topology(group))),
            key=lambda timing: timing.seconds,
        )

    def _timed(self, name: str, group: str, nbytes: int) -> Timing:
        schedule, network = self._schedule(name, group)
        result = simulate(schedule, network, nbytes=nbytes, rules=self.cluster.rules, check=False)
        self.events += result.events
        sent = float(result.link_bytes.sum()) / schedule.ranks / 2
        return Timing(result.seconds, sent / result.seconds, busiest_link(result))

    def _topology(self, group: str) -> Topology:
        if group == "all":
            return self.cluster.topology
        return Topology.flat(2 if group == _PAIR else self.ranks(group))

    def _schedule(self, name: str, group: str) -> tuple[Schedule, Network]:
        key = (name, group)
        if key not in self._schedules:
            network, per_node = self.cluster.network, self.cluster.shape.per_node
            if group == "node":
                network = Subset(network, list(range(per_node)))
            elif group == "across":
                network = Subset(network, list(range(0, self.cluster.ranks, per_node)))
            elif group == _PAIR:
                network = Subset(network, [0, per_node if self.cluster.shape.nodes > 1 else 1])
            topology = self._topology(group)
            schedule = LIBRARY[name].compile(topology=topology, target="staged", workers=_WORKERS, check=False)
            self._schedules[key] = schedule, network
        return self._schedules[key]


def programs_for(collective: str, topology: Topology) -> tuple[str, ...]:
    """The library programs that a group of this topology chooses from; see the module's words."""
    ranks, nodes = topology.ranks, len(topology.members)
    if 1 < nodes < ranks and collective in selection.NODES:
        return (selection.NODES[collective],)
    direct, power, ring = _FLAT[collective]
    if ranks <= _FEW:
        return (direct,)
    halves = ranks & (ranks - 1) == 0
    if ranks > _LONGEST_RING and halves:
        return (power,)
    return tuple(dict.fromkeys((ring, power) if halves else (ring,)))


def busiest_link(result: Result) -> str:
    """The kind of the link that had most to do."""
    if not len(result.link_seconds):
        return ""
    return result.network.links.kinds[int(result.network.links.kind_of()[int(result.link_seconds.argmax())])].name
