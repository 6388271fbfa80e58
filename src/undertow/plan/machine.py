"""What a node can do: measured by `undertow profile`, or written by hand in the same TOML. No torch in here.

    machine = Machine.load("machine.toml")
    machine.gemm.seconds(workers=64)
    machine.lane("dma").bandwidth(4 << 20)

Curves are points of (amount, seconds). Between points the time is a power law, a straight line on doubly logarithmic
paper, which is exact both where latency rules and where bandwidth does.
"""

from __future__ import annotations

import itertools
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import InvalidArgument
from .interference import Effect, Interference, derived
from .plan import DEVICES, LANES, OPERATORS
from .staged import STAGES, Engines
from .tables import Points, Section, to_toml
from .work import Work

FORMAT = "undertow machine 1"
WORKERS = ("threads", "SMs")


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """Seconds of one matmul of `shape` (M, N, K) against how many `workers` (threads or SMs) it may use."""

    workers: str
    shape: tuple[int, int, int]
    dtype: str
    points: Points

    def seconds(self, workers: int) -> float:
        """Fewer workers than measured: in proportion. More: no faster than with all of them."""
        fewest, longest = self.points[0]
        if workers <= fewest:
            return longest * fewest / max(1, workers)
        return _interpolate(self.points, min(workers, self.points[-1][0]))

    @property
    def flops(self) -> float:
        """Operations per second with all workers."""
        return 2 * math.prod(self.shape) / self.points[-1][1]


@dataclass(frozen=True, slots=True)
class LaneCurve:
    """Seconds of a transfer against its bytes, every rank sending to its neighbour at once.

    `gemm_slowdown` and `lane_slowdown` are how many times longer each takes while the other runs beside it.
    """

    name: str
    description: str
    emulated: bool
    points: Points
    gemm_slowdown: float
    lane_slowdown: float

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.points[0][1]

    def seconds(self, nbytes: int) -> float:
        """Below the smallest message measured: its time. Above the largest: at its bandwidth."""
        return at(self.points, nbytes)

    def bandwidth(self, nbytes: int) -> float:
        """Bytes per second that each rank gets for messages of that size."""
        return nbytes / self.seconds(nbytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of `ranks` ranks on `device`. `shares_device`: they share one GPU (a virtual node).

    What is optional sharpens predictions: `interference` (else the lanes' slowdowns tell it), `work`, `engines`, where
    lane dma is staged through host memory, and `collectives`, the seconds of whole collectives against the bytes of a
    rank's product, by operator and lane (else the lane's curve tells them); for all_gather_matmul the bytes of the
    gathered input.
    """

    name: str
    device: str
    ranks: int
    shares_device: bool
    launch_seconds: float
    stream_seconds: float
    gemm: GemmCurve
    lanes: dict[str, LaneCurve]
    environment: dict[str, str | int | float | bool] = field(default_factory=dict)
    interference: Interference | None = None
    work: Work = field(default_factory=Work)
    collectives: dict[str, dict[str, Points]] = field(default_factory=dict)
    engines: Engines | None = None

    @property
    def slowdowns(self) -> Interference:
        """The interference model: the file's own, or what its lanes' slowdowns say."""
        if self.interference is not None:
            return self.interference
        lanes = {
            name: (lane.gemm_slowdown, lane.lane_slowdown, lane.bandwidth(lane.points[-1][0]))
            for name, lane in self.lanes.items()
        }
        return derived(self.gemm.points[-1][0], lanes)

    def lane(self, name: str) -> LaneCurve:
        if name not in self.lanes:
            must = f"one that machine {self.name!r} has: {', '.join(self.lanes) or 'none'}"
            raise InvalidArgument(argument="lane", was=repr(name), must=must)
        return self.lanes[name]

    # -- files -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """Check every field. A file with a mistake is refused whole: half a machine would make silent nonsense."""
        top = Section("machine", data)
        top.choice("format", (FORMAT,))
        lanes = top.section("lanes")
        machine = cls(
            name=top.text("name"),
            device=top.choice("device", DEVICES),
            ranks=top.whole("ranks"),
            shares_device=top.flag("shares_device"),
            launch_seconds=top.positive("launch_seconds"),
            stream_seconds=top.positive("stream_seconds"),
            gemm=_gemm(top.section("gemm")),
            lanes={name: _lane(name, lanes.section(name)) for name in lanes.names(LANES)},
            environment=top.section("environment").scalars(),
            interference=_interference(top.section("interference")) if top.has("interference") else None,
            work=_work(top.section("work")) if top.has("work") else Work(),
            collectives=_collectives(top.section("collectives")) if top.has("collectives") else {},
            engines=_engines(top.section("engines")) if top.has("engines") else None,
        )
        top.finish()
        return machine

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads."""
        return {
            "format": FORMAT,
            "name": self.name,
            "device": self.device,
            "ranks": self.ranks,
            "shares_device": self.shares_device,
            "launch_seconds": self.launch_seconds,
            "stream_seconds": self.stream_seconds,
            "gemm": {
                "workers": self.gemm.workers,
                "shape": list(self.gemm.shape),
                "dtype": self.gemm.dtype,
                "points": [list(point) for point in self.gemm.points],
            },
            "lanes": {
                name: {
                    "description": lane.description,
                    "emulated": lane.emulated,
                    "gemm_slowdown": lane.gemm_slowdown,
                    "lane_slowdown": lane.lane_slowdown,
                    "points": [list(point) for point in lane.points],
                }
                for name, lane in self.lanes.items()
            },
            "environment": dict(self.environment),
            **self._optional(),
        }

    def _optional(self) -> dict[str, Any]:
        """The sections that say more than their absence would."""
        found: dict[str, Any] = {}
        if self.interference is not None:
            effects = {name: asdict(effect) for name, effect in self.interference.effects}
            found["interference"] = {"multiprocessors": self.interference.multiprocessors, "lanes": effects}
        if self.work != Work():
            found["work"] = {
                name: [list(point) for point in value] if isinstance(value, tuple) else value
                for name, value in asdict(self.work).items()
                if value is not None and value != ()
            }
        if self.collectives:
            found["collectives"] = {
                operator: {lane: [list(point) for point in points] for lane, points in lanes.items()}
                for operator, lanes in self.collectives.items()
            }
        if self.engines is not None:
            found["engines"] = {name: value for name, value in asdict(self.engines).items() if value != ()}
            if self.engines.enqueues:
                found["engines"]["enqueues"] = dict(self.engines.enqueues)
        return found

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        try:
            return cls.from_dict(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            must = f"a readable machine file in TOML ({error})"
            raise InvalidArgument(argument="machine file", was=str(path), must=must) from error

    def save(self, path: str | Path) -> None:
        """Write the TOML, making its folder if needed. Whole or not at all: a reader never sees half a file."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        scratch.write_text(to_toml(self.to_dict()), encoding="utf-8")
        scratch.replace(target)


def default_path(device: str, ranks: int) -> Path:
    """Where the machine file of so many ranks on that device is kept, unless told otherwise."""
    return settings.cache_folder() / f"machine-{device}-{ranks}.toml"


def at(points: Points, nbytes: int) -> float:
    """Seconds of a transfer. Below the smallest measured: its time. Above the largest: at its bandwidth."""
    largest, longest = points[-1]
    return longest * nbytes / largest if nbytes >= largest else _interpolate(points, max(nbytes, points[0][0]))


def _interpolate(points: Points, amount: int) -> float:
    """The time at `amount`, which lies within the points."""
    for (low, first), (high, second) in itertools.pairwise(points):
        if amount <= high:
            position = math.log(amount / low) / math.log(high / low)
            return first * math.pow(second / first, position)
    return points[-1][1]


# -- reading ----------------------------------------------------------------------------------------------------


def _gemm(section: Section) -> GemmCurve:
    curve = GemmCurve(
        section.choice("workers", WORKERS), section.shape("shape"), section.text("dtype"), section.points("points")
    )
    section.finish()
    return curve


def _lane(name: str, section: Section) -> LaneCurve:
    curve = LaneCurve(
        name=name,
        description=section.text("description"),
        emulated=section.flag("emulated"),
        points=section.points("points"),
        gemm_slowdown=section.positive("gemm_slowdown", least=1.0),
        lane_slowdown=section.positive("lane_slowdown", least=1.0),
    )
    section.finish()
    return curve


def _interference(section: Section) -> Interference:
    lanes = section.section("lanes")
    effects = tuple((name, _effect(lanes.section(name))) for name in lanes.names(LANES))
    model = Interference(section.whole("multiprocessors"), effects)
    section.finish()
    return model


def _effect(section: Section) -> Effect:
    needed = {name: section.not_negative(name) for name in ("contention", "per_byte", "crowding")}
    memory = ("per_byte_of_memory", "crowding_of_memory")
    effect = Effect(**needed, **{name: section.not_negative(name) for name in memory if section.has(name)})
    section.finish()
    return effect


def _work(section: Section) -> Work:
    """Each key may be absent."""
    speeds = ("efficiency", "signal", "copy_speed", "read_speed")
    found: dict[str, Any] = {name: section.positive(name) for name in speeds if section.has(name)}
    found |= {name: section.not_negative(name) for name in ("overhead", "skew", "stagger") if section.has(name)}
    found |= {name: section.points(name) for name in ("tiles", "library", "rows") if section.has(name)}
    if found.get("stagger", 0.0) >= 1:
        raise section.refuse("stagger", found["stagger"], "below 1")
    section.finish()
    return Work(**found)


def _engines(section: Section) -> Engines:
    speeds = ("out_speed", "in_speed", "sum_speed", "sum_speed_alone")
    delays = ("out_pause", "in_pause", "hop", "end", "call", "enqueue")
    enqueues: tuple[tuple[str, float], ...] = ()
    if section.has("enqueues"):
        table = section.section("enqueues")
        enqueues = tuple((operator, table.not_negative(operator)) for operator in table.names(tuple(STAGES)))
    engines = Engines(
        chunk=section.whole("chunk"),
        enqueues=enqueues,
        **{name: section.positive(name) for name in speeds},
        **{name: section.not_negative(name) for name in delays},
    )
    section.finish()
    return engines


def _collectives(section: Section) -> dict[str, dict[str, Points]]:
    found = {}
    for operator in section.names(tuple(OPERATORS)):
        lanes = section.section(operator)
        found[operator] = {lane: lanes.points(lane) for lane in lanes.names(LANES)}
    return found
