"""The shapes that machines have. Each says which links there are and which of them a message passes.

| shape | links of a rank | the way from a to b |
|---|---|---|
| switch | one up, one down | up a, down b |
| fully_connected | one to each other rank | that one |
| ring | one to each neighbour | the shorter way around |
| torus | two in each dimension | along the first dimension, then the second, ... each the shorter way |
| tree | one up, one down; groups of ranks likewise, level by level | up until both are below, through it, down |
| rails | one up, one down inside its node; a network card, maybe shared | inside: as a switch; else see `Rails` |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidArgument
from .network import Ints, LinkKind, Network


def _down(network: Network, kind: LinkKind, count: int, up: int) -> int:
    """The other direction of `count` links: links of their own, or the same where both directions share."""
    return up if kind.half_duplex else network.links.add(kind, count)


class Switch(Network):
    """Every rank has a port; inside, the switch is never the limit."""

    def __init__(self, ranks: int, port: LinkKind) -> None:
        super().__init__(ranks)
        self._up = self.links.add(port, ranks)
        self._back = _down(self, port, ranks, self._up)

    def _hops(self, source: Ints, destination: Ints) -> Sequence[Ints]:
        return self._up + source, self._back + destination


class FullyConnected(Network):
    """A link of its own for every ordered pair of ranks."""

    def __init__(self, ranks: int, link: LinkKind) -> None:
        super().__init__(ranks)
        self._first = self.links.add(link, ranks * ranks)
        self._shared = link.half_duplex

    def _hops(self, source: Ints, destination: Ints) -> Sequence[Ints]:
        low, high = np.minimum(source, destination), np.maximum(source, destination)
        return (self._first + (low * self.ranks + high if self._shared else source * self.ranks + destination),)


class Torus(Network):
    """Ranks on a grid whose edges meet; rank = ((z sides[1]) + y) sides[0] + x. One dimension: a ring."""

    def __init__(self, sides: Sequence[int], link: LinkKind) -> None:
        super().__init__(math.prod(sides))
        self._sides = tuple(sides)
        self._ahead = [self.links.add(link, self.ranks) for _ in sides]
        self._back = [_down(self, link, self.ranks, first) for first in self._ahead]

    def _hops(self, source: Ints, destination: Ints) -> Sequence[Ints]:
        hops: list[Ints] = []
        at, stride = source.copy(), 1
        for side, ahead, back in zip(self._sides, self._ahead, self._back, strict=True):
            here, there = at // stride % side, destination // stride % side
            distance = (there - here) % side
            forward = distance <= side - distance
            steps = np.where(forward, distance, side - distance)
            for step in range(int(steps.max(initial=0))):
                moving = steps > step
                place = at // stride % side
                next_place = np.where(forward, place + 1, place - 1) % side
                reached = at + (next_place - place) * stride
                # A link belongs to the rank on its lower side, so that both directions of a shared one are the same.
                link = np.where(forward, ahead + at, back + reached)
                hops.append(np.where(moving, link, -1))
                at = np.where(moving, reached, at)
            stride *= side
        return hops or [np.full(len(source), -1)]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a tree: groups of `size` ranks, with `count` links each way between a group and what is above.

    `through`: what all messages pass that reach a part of the group above from elsewhere, such as a root complex or
    the host memory in which they are handed over: those that change between its parts, and those that come into it.
    """

    size: int
    link: LinkKind
    count: int = 1
    through: LinkKind | None = None


class Tree(Network):
    """Levels from below, the first of single ranks. Parallel links are taken by the destination's number."""

    def __init__(self, ranks: int, levels: Sequence[Level]) -> None:
        super().__init__(ranks)
        self._levels = tuple(levels)
        self._up, self._back, self._through = [], [], []
        for level, above in zip(levels, [*levels[1:], None], strict=True):
            groups = -(-ranks // level.size)
            self._up.append(self.links.add(level.link, groups * level.count))
            self._back.append(_down(self, level.link, groups * level.count, self._up[-1]))
            higher = -(-ranks // above.size) if above is not None else 1
            self._through.append(self.links.add(level.through, higher) if level.through is not None else -1)

    def _hops(self, source: Ints, destination: Ints) -> Sequence[Ints]:
        none = np.full(len(source), -1)
        rising: list[Ints] = []
        falling: list[Ints] = []
        turning: list[Ints] = []
        sizes = [level.size for level in self._levels]
        for number, level in enumerate(self._levels):
            apart = source // level.size != destination // level.size
            chosen = destination % level.count
            rising.append(np.where(apart, self._up[number] + source // level.size * level.count + chosen, none))
            falling.append(np.where(apart, self._back[number] + destination // level.size * level.count + chosen, none))
            if self._through[number] >= 0:
                above = sizes[number + 1] if number + 1 < len(sizes) else self.ranks
                turning.append(np.where(apart, self._through[number] + destination // above, none))
            else:
                turning.append(none)
        # Down into a group, through what is inside it, down to the next.
        down = [one for pair in zip(reversed(falling), reversed([none, *turning[:-1]]), strict=True) for one in pair]
        return [*rising, turning[-1], *down]


class Rails(Network):
    """Nodes of `per_node` ranks behind a switch each, joined by network cards.

    Rank k of a node uses card k · cards // per_node. Cards of one number are a rail: to another place on another node
    a message goes to the right place inside its own node first, then along its rail (`aligned`); otherwise from its own
    card to the other's, through a network that is never the limit. `spine`: with `aligned` off, each node's way to the
    network, shared by its cards.
    """

    def __init__(
        self,
        nodes: int,
        per_node: int,
        port: LinkKind,
        card: LinkKind,
        cards: int,
        aligned: bool,
        spine: LinkKind | None = None,
    ) -> None:
        super().__init__(nodes * per_node)
        self._per_node, self._cards, self._aligned = per_node, cards, aligned
        self._up = self.links.add(port, self.ranks)
        self._back = _down(self, port, self.ranks, self._up)
        self._out = self.links.add(card, nodes * cards)
        self._in = _down(self, card, nodes * cards, self._out)
        self._spine_out, self._spine_in = -1, -1
        if spine is not None:
            self._spine_out = self.links.add(spine, nodes)
            self._spine_in = _down(self, spine, nodes, self._spine_out)

    def _card(self, node: Ints, place: Ints) -> Ints:
        return np.asarray(node * self._cards + place * self._cards // self._per_node)

    def _hops(self, source: Ints, destination: Ints) -> Sequence[Ints]:
        none = np.full(len(source), -1)
        size = self._per_node
        node, place, to_node, to_place = source // size, source % size, destination // size, destination % size
        inside = node == to_node
        out, into = self._card(node, place), self._card(to_node, to_place)
        rail, to_rail = place * self._cards // size, to_place * self._cards // size
        detour = ~inside & (rail != to_rail) & self._aligned
        gate = node * size + to_place
        return (
            np.where(inside | detour, self._up + source, none),
            np.where(inside, self._back + destination, np.where(detour, self._back + gate, none)),
            np.where(inside, none, self._out + np.where(detour, self._card(node, to_place), out)),
            np.where(inside | (self._spine_out < 0), none, self._spine_out + node),
            np.where(inside | (self._spine_in < 0), none, self._spine_in + to_node),
            np.where(inside, none, self._in + into),
        )


def square_sides(ranks: int, dimensions: int) -> tuple[int, ...]:
    """Sides of a torus of so many ranks, as equal as can be; refused where a side would be 1."""
    sides = []
    left = ranks
    for dimension in range(dimensions, 0, -1):
        wanted = round(left ** (1 / dimension))
        side = next((one for one in range(wanted, 0, -1) if left % one == 0), 1)
        sides.append(side)
        left //= side
    if min(sides) < 2:
        must = f"ranks that fill {dimensions} dimensions with sides of at least 2"
        raise InvalidArgument(argument="topology", was=f"{ranks} ranks", must=must)
    return tuple(sorted(sides, reverse=True))
