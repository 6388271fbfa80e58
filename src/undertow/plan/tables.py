"""Tables of a machine file: read strictly, key by key, and written as TOML. Knows no machine."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgument

Points = tuple[tuple[int, float], ...]
"""A curve: (amount, seconds), amounts growing."""
_MOST_WHOLE = 10**18  # fits 64 bits
_MOST = 1e24  # no machine has more of anything, and sums of it are still finite
_SHOWN = 60


class Section:
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

    def has(self, key: str) -> bool:
        return key in self._data

    def refuse(self, key: str, was: object, must: str) -> InvalidArgument:
        told = repr(was)
        told = told if len(told) <= _SHOWN else f"{told[:_SHOWN]}..."
        return InvalidArgument(argument=f"{self._where}.{key}", was=told, must=must)

    def section(self, key: str) -> Section:
        return Section(f"{self._where}.{key}", self.take(key))

    def names(self, allowed: tuple[str, ...]) -> list[str]:
        for name in self._data:
            if name not in allowed:
                raise self.refuse(name, self._data[name], f"absent; the names here are {', '.join(allowed)}")
        return list(self._data)

    def left(self) -> list[str]:
        """The names of what has not been read yet."""
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

    def positive(self, key: str, least: float = 0.0, most: float = math.inf) -> float:
        value = self.take(key)
        if not _is_positive(value) or not least <= value <= most:
            must = f"a number of at least {least:g}" if least else "a number above 0"
            raise self.refuse(key, value, must if most == math.inf else f"{must} and at most {most:g}")
        return float(value)

    def not_negative(self, key: str, most: float = math.inf) -> float:
        value = self._data.get(key)
        if value == 0 and not isinstance(value, bool):
            del self._data[key]
            return 0.0
        return self.positive(key, most=most)

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
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_WHOLE


def _is_positive(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 < value <= _MOST  # an int of any length can be compared, but not every one be made a float


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
