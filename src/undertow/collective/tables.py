"""Tables by size: which program a collective runs on this machine, as `undertow collective tune` found it.

One JSON file (`plan.files`) for each device, number of ranks, machine and set of versions, in `tables` of the user's
cache folder. A group looks once, at its first call: the table counts only if all ranks hold the same one. A program of
the user's own is named in it by its name and signature, never by a file to run: it is taken where every rank's
process has made that program (imported its module) before, and the best of the library stands in for it elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__, settings
from ..fabric.environment import cpu_model
from ..fabric.logs import get_logger
from ..plan import files
from .algorithms import LIBRARY
from .contract import BUILT_IN
from .language import MADE, Program
from .selection import Choice

if TYPE_CHECKING:
    from ..fabric.group import Group

FORMAT = "undertow table 1"
_KEPT = object()  # name of what is kept with a fabric


@dataclass(frozen=True, slots=True)
class Row:
    """Up to `up_to` bytes (None: any), the sum of a call's spans: the best program, and the best of the library."""

    up_to: int | None
    program: str
    signature: str
    stride: int
    instead: str
    instead_stride: int
    seconds: float

    @property
    def is_library(self) -> bool:
        return self.program in LIBRARY and LIBRARY[self.program].signature == self.signature


Rows = Mapping[str, Sequence[Row]]


class Table:
    """What a group found. Compared by identity: calls that are alike are looked up by it."""

    def __init__(self, rows: Rows, known: frozenset[tuple[str, str]]) -> None:
        self._rows, self._known = rows, known

    def find(self, collective: str, nbytes: int) -> tuple[Choice, Program] | None:
        """How a call of so many bytes is run; None where nothing was measured."""
        for row in self._rows.get(collective, ()):
            if row.up_to is None or nbytes <= row.up_to:
                if not row.is_library and (row.program, row.signature) in self._known:
                    return Choice(inf, row.program, stride=row.stride), MADE[row.program, row.signature]
                name, stride = (row.program, row.stride) if row.is_library else (row.instead, row.instead_stride)
                return Choice(inf, name, stride=stride), LIBRARY[name]
        return None


def folder() -> Path:
    return settings.cache_folder() / "tables"


def machine(device: str) -> str:
    return cpu_model() if device == "cpu" else str(torch.cuda.get_device_name())


def path_of(device: str, ranks: int) -> Path:
    surroundings = json.dumps([machine(device), __version__, torch.__version__])
    return folder() / f"{device}-{ranks}-{hashlib.sha256(surroundings.encode()).hexdigest()[:12]}.json"


def store(device: str, ranks: int, rows: Rows) -> Path:
    """Keep a table; raises OSError where it cannot be written. What it has of other collectives stays."""
    path = path_of(device, ranks)
    every = {**(load(device, ranks) or {}), **rows}
    content = {
        "format": FORMAT,
        "machine": machine(device),
        "ranks": ranks,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "collectives": {name: [asdict(row) for row in each] for name, each in every.items()},
    }
    files.write(path, content)
    return path


def load(device: str, ranks: int) -> dict[str, list[Row]] | None:
    """The rows of the file by collective; None without one, or with a damaged one, which is said in one line."""
    path = path_of(device, ranks)
    try:
        return _parse(files.read(path), ranks)
    except FileNotFoundError:
        return None
    except files.DAMAGE as error:
        get_logger().warning("Table %s is damaged and is not used: %s", path, files.first_line(error))
        return None


def of(group: Group) -> Table | None:
    """The table of a group, looked for once. Collective the first time."""
    if group.size == 1 or max(group.nodes) > 0:
        return None
    kept = group.fabric.kept
    if id(_KEPT) not in kept:
        kept[id(_KEPT)] = _agreed(group)
    found = kept[id(_KEPT)]
    return found if isinstance(found, Table) else None


def _agreed(group: Group) -> Table | None:
    rows = load(group.device.type, group.size)
    digest = "" if rows is None else hashlib.sha256(repr(sorted(rows.items())).encode()).hexdigest()
    wanted = [(row.program, row.signature) for each in (rows or {}).values() for row in each if not row.is_library]
    mine = [list(one) for one in wanted if one in MADE]
    said = group.exchange([digest, mine], "tables by size")
    if len({theirs for theirs, _ in said}) > 1:
        get_logger().warning("Tables by size differ between the ranks of group %s, and none is used.", group.name)
        return None
    if rows is None:
        return None
    known = frozenset(one for one in wanted if all(list(one) in theirs for _, theirs in said))
    for name, signature in sorted(set(wanted) - known):
        get_logger().warning(
            "Program %s (%s) of the table is not made on all ranks: the library's runs.", name, signature
        )
    return Table(rows, known)


def _parse(content: Any, ranks: int) -> dict[str, list[Row]]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it is not of the format {FORMAT!r}")
    if content.get("ranks") != ranks or not isinstance(content.get("collectives"), dict):
        raise ValueError(f"it is not for {ranks} ranks")
    found: dict[str, list[Row]] = {}
    for collective, each in content["collectives"].items():
        if collective not in BUILT_IN or not isinstance(each, list) or not each:
            raise ValueError(f"it has no rows for {collective!r}")
        found[collective] = [_row(collective, one) for one in each]
        if found[collective][-1].up_to is not None:
            raise ValueError(f"its rows for {collective} end at {found[collective][-1].up_to} bytes")
    return found


def _row(collective: str, fields: Any) -> Row:
    row = Row(**fields)
    texts, numbers = (row.program, row.signature, row.instead), (row.stride, row.instead_stride)
    if not all(isinstance(one, str) for one in texts) or not isinstance(row.seconds, (int, float)):
        raise TypeError(f"a row for {collective} has a field of another type")
    if not all(isinstance(one, int) and 1 << 10 <= one <= 1 << 24 for one in numbers):
        raise ValueError(f"a row for {collective} has a stride that is not between 1 KiB and 16 MiB")
    if row.up_to is not None and not isinstance(row.up_to, int):
        raise TypeError(f"a row for {collective} ends at {row.up_to!r}")
    if row.instead not in LIBRARY or LIBRARY[row.instead].collective != collective:
        raise ValueError(f"{row.instead!r} is no program of the library for {collective}")
    return row
