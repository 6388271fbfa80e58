"""Links and the ways over them: what topologies make and the core reads.

A link goes one way. A *route* is the links that a message from one rank to another passes, in order. Routes are made
for the pairs that are asked for, all at once, so that thousands of ranks cost what their messages cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..plan.tables import Points
from .links import CURVE_FROM, CURVE_TO, LATENCY, LINK_COLUMNS, RATE

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MOST_RANKS = 1 << 16
MOST_LINKS = 1 << 22


@dataclass(frozen=True, slots=True)
class LinkKind:
    """What all links of one name can do: bytes per second each way, seconds of latency.

    `points`: seconds that a message of so many bytes keeps the link, instead of bytes / bandwidth. `half_duplex`: both
    directions share one link.
    """

    name: str
    bandwidth: float
    latency: float
    half_duplex: bool = False
    points: Points = ()


@dataclass(frozen=True, eq=False)
class Routes:
    """`links[start[i]:start[i + 1]]` are passed by route i."""

    start: Ints
    links: Ints

    def latency(self, link_latency: Floats) -> Floats:
        """Seconds of each route, without any bytes."""
        total = np.concatenate([[0.0], np.cumsum(link_latency[self.links])])
        return np.asarray(total[self.start[1:]] - total[self.start[:-1]])


class Links:
    """Collects links while a topology is built: each kind's links are numbered together."""

    def __init__(self) -> None:
        self.kinds: list[LinkKind] = []
        self._counts: list[int] = []

    @property
    def count(self) -> int:
        return sum(self._counts)

    def add(self, kind: LinkKind, count: int) -> int:
        """`count` links of one kind; the number of the first."""
        first = self.count
        if first + count > MOST_LINKS:
            must = f"of at most {MOST_LINKS} links"
            raise InvalidArgument(argument="topology", was=f"of {first + count} links", must=must)
        self.kinds.append(kind)
        self._counts.append(count)
        return first

    def kind_of(self) -> Ints:
        """The kind's number of each link."""
        return np.repeat(np.arange(len(self.kinds)), self._counts).astype(np.int64)


class Network(ABC):
    """Links of all kinds, ranks 0 to `ranks` - 1, and the ways between them, as a subclass says in `_hops`."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.links = Links()

    @abstractmethod
    def _hops(self, source: Ints, destination: Ints) -> Sequence[Ints]:
        """For each hop, the link of each pair, -1 where a pair has none."""

    def routes(self, source: Ints, destination: Ints) -> Routes:
        """The routes of pairs of different ranks."""
        if not len(source):
            return Routes(np.zeros(1, np.int64), np.zeros(0, np.int64))
        table = np.stack([np.asarray(hop, np.int64) for hop in self._hops(source, destination)], axis=1)
        used = table >= 0
        sizes = used.sum(axis=1)
        return Routes(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), table[used])

    @property
    def latencies(self) -> Floats:
        return np.array([kind.latency for kind in self.links.kinds])[self.links.kind_of()]

    def tables(self) -> tuple[Floats, Floats]:
        """The core's rows of links, nothing served yet, and the curves of all kinds, as logarithms."""
        kinds, kind = self.links.kinds, self.links.kind_of()
        sizes = np.array([len(one.points) for one in kinds])
        ends = np.cumsum(sizes)
        found = np.zeros((self.links.count, LINK_COLUMNS))
        found[:, RATE] = np.array([one.bandwidth for one in kinds])[kind]
        found[:, LATENCY] = self.latencies
        found[:, CURVE_FROM], found[:, CURVE_TO] = (ends - sizes)[kind], ends[kind]
        points = [point for one in kinds for point in one.points]
        return found, np.log(np.array(points, np.float64).reshape(-1, 2))
