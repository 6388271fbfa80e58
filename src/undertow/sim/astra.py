"""ASTRA-sim's way to run collectives: so many splits of a buffer, so many of them under way at a time.

Each *active* split has a worker of its own on every rank; a worker takes its splits one after the other. With the rules
of machine `astra-hgx-h100` (links pass whole messages on, every message ends with a delay, sums cost three times their
bytes of memory traffic, copies nothing) this gives the times of its congestion-aware backend.
"""

from __future__ import annotations

from ..collective.language import Program, Trace, program
from ..errors import InvalidArgument
from .cluster import Cluster
from .schedules import Result, simulate


def all_reduce_rings(active: int) -> Program:
    """A ring for each of `active` equal parts of the buffer, each by a worker of its own."""

    @program("all_reduce", chunks=lambda ranks: active * ranks)
    def rings(c: Trace) -> None:
        ranks = c.ranks
        for part in range(active):
            inputs = [c.rank(one).input[part * ranks : (part + 1) * ranks] for one in range(ranks)]
            outputs = [c.rank(one).output[part * ranks : (part + 1) * ranks] for one in range(ranks)]
            passed = [inputs[rank][rank] for rank in range(ranks)]
            for step in range(1, ranks):
                before, passed = passed, []
                for rank in range(ranks):
                    chunk = (rank - step) % ranks
                    total = inputs[rank][chunk].copy(outputs[rank][chunk], channel=part)
                    passed.append(total.reduce(before[rank - 1], channel=part))
            for step in range(ranks - 1):
                before, passed = passed, []
                for rank in range(ranks):
                    passed.append(before[rank - 1].copy(outputs[rank][(rank - step) % ranks], channel=part))

    return rings


def all_reduce(cluster: Cluster, nbytes: int, splits: int = 4, active: int = 2) -> Result:
    """The time of a ring AllReduce of `nbytes` by a cluster's ranks and rules."""
    if not 1 <= active <= splits or splits % active:
        raise InvalidArgument(argument="active", was=active, must=f"a divisor of the {splits} splits")
    schedule = all_reduce_rings(active).compile(ranks=cluster.ranks, target="staged", slots=4)
    tile = max(1, nbytes // (splits * cluster.ranks))
    return simulate(schedule, cluster.network, nbytes=nbytes, tile=tile, rules=cluster.rules, check=False)


def all_to_all(cluster: Cluster, nbytes: int) -> Result:
    """The time of a direct AllToAll, every rank to every other."""
    from ..collective.algorithms import LIBRARY

    schedule = LIBRARY["all_to_all_direct"].compile(ranks=cluster.ranks, target="staged")
    return simulate(schedule, cluster.network, nbytes=nbytes, rules=cluster.rules, check=False)
