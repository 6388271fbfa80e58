"""Published tables of measurements, and ports that are fitted to them.

A table has lines `system,ranks,bytes,time_us`: AllReduce, out of place, bytes of the whole buffer, as nccl-tests prints
them. They are other people's, so they are not kept here: `UNDERTOW_CONFORMANCE` says where they are, or they lie in
`shared/conformance` beside the checkout.

**A port from a table.** A ring of n ranks takes 2 (n - 1) steps, each a message of S / n. If all of its time is that of
messages, a message of S / n keeps a port for T / (2 (n - 1)). That curve is all a fitted system has.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import settings
from ..errors import InvalidArgument
from .network import LinkKind

_MOST_BYTES = 1 << 20
_COLUMNS = ["system", "ranks", "bytes", "time_us"]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: seconds of an AllReduce of `nbytes` by `ranks` ranks of a system."""

    system: str
    ranks: int
    nbytes: int
    seconds: float


def folder(beside: Path | None = None) -> Path | None:
    """Where published tables are; None where there are none. `beside`: the checkout, or a file in it."""
    chosen = settings.CONFORMANCE.get()
    if chosen:
        return Path(chosen)
    places = () if beside is None else (parent / "shared" / "conformance" for parent in beside.resolve().parents)
    return next((place for place in places if place.is_dir()), None)


def read(path: Path) -> list[Row]:
    """The lines of a table; refused whole where one is damaged."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidArgument(
                argument="table", was=f"of {path.stat().st_size} bytes", must=f"at most {_MOST_BYTES}"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(argument="table", was=str(path), must=f"a readable file ({error})") from error
    lines = list(csv.reader(io.StringIO("\n".join(one for one in text.splitlines() if not one.startswith("#")))))
    if not lines or lines[0] != _COLUMNS:
        raise InvalidArgument(argument="table", was=f"with columns {lines[:1]}", must=f"one with {', '.join(_COLUMNS)}")
    rows = []
    for number, line in enumerate(lines[1:], 2):
        try:
            row = Row(line[0], int(line[1]), int(line[2]), float(line[3]) * 1e-6)
        except (ValueError, IndexError) as error:
            must = "a name and three numbers"
            raise InvalidArgument(argument=f"line {number} of the table", was=repr(line), must=must) from error
        if row.ranks < 2 or row.nbytes < 1 or not 0 < row.seconds < 1e6:
            raise InvalidArgument(argument=f"line {number} of the table", was=repr(line), must="of numbers above 0")
        rows.append(row)
    return rows


def fitted_port(name: str, rows: Iterable[Row]) -> LinkKind:
    """The port whose ring AllReduce takes these times; between sizes a power law. See the module's words."""
    points = {max(1, row.nbytes // row.ranks): row.seconds / (2 * (row.ranks - 1)) for row in rows}
    ordered = tuple(sorted(points.items()))
    if not ordered:
        raise InvalidArgument(argument="rows", was="none", must="at least one")
    largest, longest = ordered[-1]
    return LinkKind(name, largest / longest, 0.0, points=ordered)
