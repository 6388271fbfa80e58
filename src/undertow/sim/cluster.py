"""Machines as files: what devices, links and topology a cluster has, and by which rules it is simulated.

    cluster = Cluster.load("h100x8")            # one that is shipped, or the path of a TOML file
    cluster.network, cluster.rules, cluster.device
    cluster.scaled(64)                          # the same with 64 nodes

Every table with numbers has a `source`: where they come from. A file with a mistake is refused whole, in one sentence.

| table | keys |
|---|---|
| `[device]` | name, peak (flop/s), memory_bandwidth, multiprocessors, cta_copy_rate |
| `[links.NAME]` | bandwidth (bytes/s each way), latency (s), duplex "full" or "half", points [[bytes, seconds], ...] |
| `[topology]` | kind; switch, fully_connected, ring: ranks, link; torus: ranks, dimensions, link; tree: ranks, levels |
| | rails: nodes, per_node, cards, aligned, port, card, spine. one_node = true: all ranks share a node |
| `[rules]` | sharing "fifo" or "fair", store_and_forward, copies_are_free, and the seconds of `Rules` |
| `[copy_engines]` | count, copy_seconds (what each copy costs beside its bytes), reduces, direction: "both" or "one" |
| | (half of them write to other ranks, half read from them); unless said, "both" |
| `[collectives]` | multiprocessors that kernels of a collective hold; all_gather, all_reduce, ...: those of one kind |
| `[interference]` | of each lane a table with contention, per_byte, crowding: the model of `plan.interference` |
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from ..collective.topology import Topology
from ..errors import InvalidArgument
from ..plan.interference import Effect, Interference
from ..plan.plan import LANES
from ..plan.tables import Section
from .network import MOST_LINKS, MOST_RANKS, LinkKind, Network
from .schedules import Rules
from .topologies import FullyConnected, Level, Rails, Switch, Torus, Tree, square_sides

FORMAT = "undertow cluster 1"
MOST_BYTES = 1 << 20  # of a file
_MOST_BANDWIDTH, _MOST_LATENCY = 1e15, 1e6  # beyond them an event's time would drown in rounding, and nothing end
_MOST_ENGINES = 1 << 16
_ANY = "multiprocessors"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_KINDS = ("switch", "fully_connected", "ring", "torus", "tree", "rails")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `cta_copy_rate`: bytes per second that one CTA copies to a peer, None where it is unknown."""

    name: str
    peak: float
    memory_bandwidth: float
    multiprocessors: int
    cta_copy_rate: float | None = None


@dataclass(frozen=True, slots=True)
class CopyEngines:
    """Engines of a device that copy beside its multiprocessors. `reduces`: what if they could add? `directed`: half of
    them write to other ranks, half read from them."""

    count: int
    copy_seconds: float
    reduces: bool = False
    directed: bool = False


@dataclass(frozen=True)
class Shape:
    """A topology before it is built: ranks = nodes per_node, and a function of the number of nodes and of ranks."""

    nodes: int
    per_node: int
    build: Callable[[int, int], Network]

    def __post_init__(self) -> None:
        ranks = self.nodes * self.per_node
        if ranks > MOST_RANKS:
            raise InvalidArgument(argument="topology", was=f"of {ranks} ranks", must=f"of at most {MOST_RANKS}")


@dataclass(frozen=True)
class Cluster:
    """A machine that can be simulated; see the module's table."""

    name: str
    description: str
    device: Device
    shape: Shape
    rules: Rules
    copy_engines: CopyEngines | None = None
    interference: Interference | None = None
    held: tuple[tuple[str, int], ...] = ()

    @property
    def lane(self) -> str:
        """Which lane the interference model knows its collectives by."""
        return "dma" if self.rules.engines else "net"

    def multiprocessors_of(self, collective: str) -> int:
        """Those that its kernels hold while they run; 0 for copy engines, and where the file does not say."""
        held = dict(self.held)
        return 0 if self.rules.engines else held.get(collective, held.get(_ANY, 0))

    @property
    def ranks(self) -> int:
        return self.shape.nodes * self.shape.per_node

    @cached_property
    def network(self) -> Network:
        return self.shape.build(self.shape.nodes, self.ranks)

    @property
    def topology(self) -> Topology:
        """As programs index by."""
        return Topology.grid(self.shape.nodes, self.shape.per_node)

    def by_engines(self) -> Cluster:
        """The same where copy engines move everything: copies queue for them, each costs something beside its bytes, no
        CTAs limit it and no multiprocessors are held. What arrives is still copied and summed in memory by kernels,
        unless engines add on the way."""
        if self.copy_engines is None:
            raise InvalidArgument(
                argument="machine", was=f"{self.name}, without copy engines", must="one that has some"
            )
        engines = self.copy_engines
        rules = replace(
            self.rules, engines=engines.count, engine_seconds=engines.copy_seconds,
            engines_have_directions=engines.directed, worker_rate=math.inf,
            memory_rate=math.inf if engines.reduces else self.rules.memory_rate,
        )  # fmt: skip
        return replace(self, name=f"{self.name}, copy engines", rules=rules)

    def scaled(self, nodes: int) -> Cluster:
        """The same with another number of nodes; where a node is a rank, of ranks."""
        if nodes < 1:
            raise InvalidArgument(argument="nodes", was=nodes, must="at least 1")
        return replace(self, shape=replace(self.shape, nodes=nodes))

    @staticmethod
    def load(source: str | Path) -> Cluster:
        """From a file, or a shipped one by name."""
        path = Path(source)
        shipped = resources.files(__package__) / "machines" / f"{source}.toml"
        try:
            if path.suffix != ".toml" and "/" not in str(source) and shipped.is_file():
                text = shipped.read_text(encoding="utf-8")
            else:
                if path.stat().st_size > MOST_BYTES:
                    must = f"of at most {MOST_BYTES} bytes"
                    raise InvalidArgument(argument="machine", was=f"{path} of {path.stat().st_size} bytes", must=must)
                text = path.read_text(encoding="utf-8")
            data = tomllib.loads(text)
        except InvalidArgument:
            raise
        except (OSError, ValueError, RecursionError) as error:  # of a number with too many digits a bare ValueError
            must = f"a readable file in TOML ({error}), or one of {', '.join(shipped_names())}"
            raise InvalidArgument(argument="machine", was=repr(str(source)), must=must) from error
        return Cluster.from_dict(data)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster:
        """Check every field."""
        top = Section("machine", data)
        top.choice("format", (FORMAT,))
        name, description = top.text("name"), top.text("description")
        device = _device(top.section("device"))
        links_section = top.section("links")
        links = {one: _link(one, links_section.section(one)) for one in links_section.left()}
        cluster = Cluster(
            name=name,
            description=description,
            device=device,
            shape=_shape(top.section("topology"), links),
            rules=_rules(top.section("rules") if top.has("rules") else None, device),
            copy_engines=_copy_engines(top.section("copy_engines")) if top.has("copy_engines") else None,
            interference=_interference(top.section("interference"), device) if top.has("interference") else None,
            held=_held(top.section("collectives"), device) if top.has("collectives") else (),
        )
        top.finish()
        if cluster.rules.fair and any(kind.points for kind in cluster.network.links.kinds):
            raise InvalidArgument(argument="machine.rules.sharing", was="'fair'", must="'fifo' where links have points")
        return cluster


def shipped_names() -> list[str]:
    """The machines that come with the package."""
    folder = resources.files(__package__) / "machines"
    return sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml"))


# -- reading -------------------------------------------------------------------------------------------------------


def _device(section: Section) -> Device:
    section.text("source")
    device = Device(
        section.text("name"),
        section.positive("peak"),
        section.positive("memory_bandwidth", least=1.0, most=_MOST_BANDWIDTH),
        section.whole("multiprocessors"),
        section.positive("cta_copy_rate") if section.has("cta_copy_rate") else None,
    )
    section.finish()
    return device


def _link(name: str, section: Section) -> LinkKind:
    section.text("source")
    duplex = section.choice("duplex", ("full", "half")) if section.has("duplex") else "full"
    points = section.points("points") if section.has("points") else ()
    bandwidth = section.positive("bandwidth", least=1.0, most=_MOST_BANDWIDTH)
    kind = LinkKind(name, bandwidth, section.not_negative("latency", most=_MOST_LATENCY), duplex == "half", points)
    section.finish()
    return kind


def _rules(section: Section | None, device: Device) -> Rules:
    rules = Rules(memory_rate=device.memory_bandwidth, worker_rate=device.cta_copy_rate or math.inf)
    if section is None:
        return rules
    section.text("source")
    flags = {one: section.flag(one) for one in ("store_and_forward", "copies_are_free") if section.has(one)}
    seconds = {
        one: section.not_negative(one)
        for one in ("step_seconds", "message_seconds", "call_seconds")
        if section.has(one)
    }
    fair = section.choice("sharing", ("fifo", "fair")) == "fair" if section.has("sharing") else False
    section.finish()
    return replace(rules, fair=fair, **flags, **seconds)  # type: ignore[arg-type]


def _copy_engines(section: Section) -> CopyEngines:
    section.text("source")
    reduces = section.flag("reduces") if section.has("reduces") else False
    directed = section.choice("direction", ("both", "one")) == "one" if section.has("direction") else False
    count = section.whole("count")
    if directed and count % 2:
        raise section.refuse("count", count, "even where each engine has one direction")
    if count > _MOST_ENGINES:
        raise section.refuse("count", count, f"at most {_MOST_ENGINES}")
    engines = CopyEngines(count, section.not_negative("copy_seconds", most=_MOST_LATENCY), reduces, directed)
    section.finish()
    return engines


def _held(section: Section, device: Device) -> tuple[tuple[str, int], ...]:
    section.text("source")
    found = []
    for name in section.names((_ANY, *COLLECTIVES)):
        count = section.whole(name)
        if count > device.multiprocessors:
            raise section.refuse(name, count, f"at most the {device.multiprocessors} of the device")
        found.append((name, count))
    return tuple(found)


def _interference(section: Section, device: Device) -> Interference:
    section.text("source")
    effects = []
    for lane in section.names(LANES):
        one = section.section(lane)
        effects.append((lane, Effect(*(one.not_negative(key) for key in ("contention", "per_byte", "crowding")))))
        one.finish()
    return Interference(device.multiprocessors, tuple(effects))


def _shape(section: Section, links: Mapping[str, LinkKind]) -> Shape:
    kind = section.choice("kind", _KINDS)
    used: set[str] = set()

    def link(key: str) -> LinkKind:
        name = section.text(key)
        if name not in links:
            raise section.refuse(key, name, f"one of the links: {', '.join(links) or 'there are none'}")
        used.add(name)
        return links[name]

    if kind == "rails":
        nodes, per_node = _count(section, "nodes"), _count(section, "per_node")
        port, card, cards = link("port"), link("card"), _count(section, "cards")
        aligned, spine = section.flag("aligned"), link("spine") if section.has("spine") else None
        if per_node % cards:
            raise section.refuse("cards", cards, f"a divisor of the {per_node} ranks of a node")
        shape = Shape(nodes, per_node, lambda n, _: Rails(n, per_node, port, card, cards, aligned, spine))
    elif kind == "torus":
        dimensions, one = _count(section, "dimensions"), link("link")
        if dimensions not in (2, 3):
            raise section.refuse("dimensions", dimensions, "2 or 3")
        shape = Shape(_count(section, "ranks"), 1, lambda n, _: Torus(square_sides(n, dimensions), one))
        square_sides(shape.nodes, dimensions)
    elif kind == "tree":
        ranks, levels = _count(section, "ranks"), _levels(section, links, used)
        shape = Shape(ranks, 1, lambda n, _: Tree(n, levels))
    else:
        one, ranks = link("link"), _count(section, "ranks")
        builders: dict[str, Callable[[int, int], Network]] = {
            "switch": lambda n, _: Switch(n, one),
            "fully_connected": lambda n, _: FullyConnected(n, one),
            "ring": lambda n, _: Torus((n,), one),
        }
        if kind == "fully_connected" and ranks * ranks > MOST_LINKS:
            raise section.refuse("ranks", ranks, f"at most {math.isqrt(MOST_LINKS)} where all are connected")
        shape = Shape(ranks, 1, builders[kind])
    if kind != "rails" and section.has("one_node") and section.flag("one_node"):
        built, ranks = shape.build, shape.nodes
        shape = Shape(1, ranks, lambda n, r: built(r, r))
    section.finish()
    for name in links:
        if name not in used:
            was = f"with link {name!r} that joins nothing"
            raise InvalidArgument(argument="topology", was=was, must="one that uses every link of the file")
    return shape


def _count(section: Section, key: str) -> int:
    value = section.whole(key)
    if value > MOST_RANKS:
        raise section.refuse(key, value, f"at most {MOST_RANKS}")
    return value


def _levels(section: Section, links: Mapping[str, LinkKind], used: set[str]) -> list[Level]:
    """From below; each level's groups must be made of whole groups of the one before, the last must join all ranks."""
    given = section.take("levels")
    if not isinstance(given, list) or not given:
        raise section.refuse("levels", given, "a list of tables, from single ranks upwards")
    levels: list[Level] = []
    for number, one in enumerate(given):
        level = Section(f"topology.levels[{number}]", one)
        size, count = level.whole("size"), level.whole("count") if level.has("count") else 1
        chosen = []
        for key in ("link", "through"):
            name = level.text(key) if key == "link" or level.has(key) else None
            if name is not None and name not in links:
                raise level.refuse(key, name, f"one of the links: {', '.join(links) or 'there are none'}")
            used.update({name} - {None})  # type: ignore[arg-type]
            chosen.append(None if name is None else links[name])
        level.finish()
        if (number == 0 and size != 1) or (levels and (size <= levels[-1].size or size % levels[-1].size)):
            was = f"one of {size} ranks over {'nothing' if not levels else levels[-1].size}"
            raise level.refuse("size", was, "1 at first, then multiples that grow: otherwise ranks are not joined")
        assert chosen[0] is not None
        levels.append(Level(size, chosen[0], count, chosen[1]))
    return levels
