"""Who stands where and who reaches whom: what programs index by, and what checker and selector know of a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import InvalidArgument


@dataclass(frozen=True)
class Topology:
    """`nodes[r]` is the node of rank r. `links` are the pairs (source, destination) that may talk; None: all."""

    nodes: tuple[int, ...]
    links: frozenset[tuple[int, int]] | None = None

    @staticmethod
    def flat(ranks: int) -> Topology:
        """One node; every rank reaches every other."""
        return Topology((0,) * ranks)

    @staticmethod
    def grid(nodes: int, per_node: int) -> Topology:
        """`nodes` nodes of `per_node` ranks, numbered node by node; every rank reaches every other."""
        return Topology(tuple(rank // per_node for rank in range(nodes * per_node)))

    @staticmethod
    def of(nodes: Sequence[int], links: Iterable[tuple[int, int]] | None = None) -> Topology:
        """From the node of each rank, and the links if not all exist."""
        made = Topology(tuple(nodes), None if links is None else frozenset(links))
        for source, destination in sorted(made.links or ()):
            if not (0 <= source < made.ranks and 0 <= destination < made.ranks):
                was = f"({source}, {destination})"
                raise InvalidArgument(argument="links", was=was, must=f"pairs of ranks below {made.ranks}")
        return made

    @property
    def ranks(self) -> int:
        return len(self.nodes)

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, nodes in ascending order of their number."""
        return tuple(
            tuple(rank for rank, at in enumerate(self.nodes) if at == node) for node in sorted(set(self.nodes))
        )

    @property
    def per_node(self) -> int:
        """Ranks on each node; refused where nodes differ."""
        sizes = {len(one) for one in self.members}
        if len(sizes) != 1:
            raise InvalidArgument(
                argument="topology", was=f"nodes of {sorted(sizes)} ranks", must="nodes of equal size"
            )
        return sizes.pop()

    def same_node(self, one: int, other: int) -> bool:
        return self.nodes[one] == self.nodes[other]

    def reaches(self, source: int, destination: int) -> bool:
        """Whether `source` may send to `destination`; a rank always reaches itself."""
        return source == destination or self.links is None or (source, destination) in self.links
