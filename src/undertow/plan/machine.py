"""What a node can do: measured by `undertow profile`, or written by hand in the same TOML. No torch in here.

    machine = Machine.load("machine.toml")
    machine.gemm.seconds(workers=64)
    machine.lane("dma").bandwidth(4 << 20)

Curves are points of (amount, seconds). Between points the time is a power law, a straight line on doubly logarithmic
paper, which is exact both where latency rules and where bandwidth does.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import InvalidArgument
from .plan import LANES

FORMAT = "undertow machine 1"
DEVICES = ("cpu", "cuda")
WORKERS = ("threads", "SMs")
Points = tuple[tuple[int, float], ...]


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
        largest, longest = self.points[-1]
        if nbytes >= largest:
            return longest * nbytes / largest
        return _interpolate(self.points, max(nbytes, self.points[0][0]))

    def bandwidth(self, nbytes: int) -> float:
        """Bytes per second that each rank gets for messages of that size."""
        return nbytes / self.seconds(nbytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of `ranks` ranks on `device`. `shares_device`: they share one GPU (a virtual node)."""

    name: str
    device: str
    ranks: int
    shares_device: bool
    launch_seconds: float
    stream_seconds: float
    gemm: GemmCurve
    lanes: dict[str, LaneCurve]
    environment: dict[str, str | int | float | bool] = field(default_factory=dict)

    def lane(self, name: str) -> LaneCurve:
        if name not in self.lanes:
            must = f"one that machine {self.name!r} has: {', '.join(self.lanes) or 'none'}"
            raise InvalidArgument(argument="lane", was=repr(name), must=must)
        return self.lanes[name]

    # -- files -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """Check every field. A file with a mistake is refused whole: half a machine would make silent nonsense."""
        top = _Section("machine", data)
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
        }

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


def _interpolate(points: Points, amount: int) -> float:
    """The time at `amount`, which lies within the points."""
    for (low, first), (high, second) in itertools.pairwise(points):
        if amount <= high:
            position = math.log(amount / low) / math.log(high / low)
            return first * math.pow(second / first, position)
    return points[-1][1]


# -- reading -------------------------------------------------------------------------------------------------------


class _Section:
    """A table of the file, read key by key: each read says what it must be, and none may be left over."""

    def __init__(self, where: str, data: Any) -> None:
        if not isinstance(data, Mapping):
            raise InvalidArgument(argument=where, was=repr(data), must="a table")
        self._where = where
        self._data = dict(data)

    def take(self, key: str) -> Any:
        if key not in self._data:
            raise InvalidArgument(argument=self._where, was=f"without {key!r}", must=f"a table with {key!r}")
        return self._data.pop(key)

    def refuse(self, key: str, was: object, must: str) -> InvalidArgument:
        return InvalidArgument(argument=f"{self._where}.{key}", was=repr(was), must=must)

    def section(self, key: str) -> _Section:
        return _Section(f"{self._where}.{key}", self.take(key))

    def names(self, allowed: tuple[str, ...]) -> list[str]:
        for name in self._data:
            if name not in allowed:
                raise self.refuse(name, self._data[name], f"absent; the names here are {', '.join(allowed)}")
        return list(self._data)

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str) or not value:
            raise self.refuse(key, value, "a text")
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self.take(key)
        if value not in allowed:
            raise self.refuse(key, value, f"one of {', '.join(allowed)}")
        return str(value)

    def flag(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def whole(self, key: str) -> int:
        value = self.take(key)
        if not _is_whole(value):
            raise self.refuse(key, value, "a whole number of at least 1")
        return int(value)

    def positive(self, key: str, least: float = 0.0) -> float:
        value = self.take(key)
        if not _is_positive(value) or value < least:
            raise self.refuse(key, value, f"a number of at least {least:g}" if least else "a number above 0")
        return float(value)

    def points(self, key: str) -> Points:
        value = self.take(key)
        must = "a list of [amount, seconds] with amounts that grow"
        if not isinstance(value, list) or not value:
            raise self.refuse(key, value, must)
        for point in value:
            if not isinstance(point, list) or len(point) != 2 or not _is_whole(point[0]) or not _is_positive(point[1]):
                raise self.refuse(key, point, must)
        if any(low[0] >= high[0] for low, high in itertools.pairwise(value)):
            raise self.refuse(key, [point[0] for point in value], must)
        return tuple((int(amount), float(seconds)) for amount, seconds in value)

    def shape(self, key: str) -> tuple[int, int, int]:
        value = self.take(key)
        if not isinstance(value, list) or len(value) != 3 or not all(map(_is_whole, value)):
            raise self.refuse(key, value, "[M, N, K], whole numbers of at least 1")
        return value[0], value[1], value[2]

    def scalars(self) -> dict[str, str | int | float | bool]:
        for key, value in self._data.items():
            if not isinstance(value, str | int | float):
                raise self.refuse(key, value, "a text, a number, true or false")
        return dict(self._data)

    def finish(self) -> None:
        for key, value in self._data.items():
            raise self.refuse(key, value, "absent: this version knows no such key")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _gemm(section: _Section) -> GemmCurve:
    curve = GemmCurve(
        section.choice("workers", WORKERS), section.shape("shape"), section.text("dtype"), section.points("points")
    )
    section.finish()
    return curve


def _lane(name: str, section: _Section) -> LaneCurve:
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


# -- writing -------------------------------------------------------------------------------------------------------


def to_toml(data: Mapping[str, Any], prefix: str = "") -> str:
    """`data` as TOML: scalars and lists first, then the tables, each under its full name."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in data.items() if not isinstance(value, Mapping)]
    for key, value in data.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{_key(key)}"
            lines += ["", f"[{name}]", to_toml(value, f"{name}.").rstrip("\n")]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # TOML's basic strings are JSON's, except that DEL must be escaped too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        return "[\n" + "".join(f"    {_value(item)},\n" for item in value) + "]"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)
