"""What runs have left in files, as sections of a page: told apart by what is in them, not by their names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..collective.schedule import Schedule
from ..errors import InvalidArgument
from ..fabric.events import Timeline
from ..fabric.timer import Comparison, Estimate
from . import collective_picture, page, plots
from .page import Section
from .tables import DEMO_FORMAT, StrategyResult, comparison_table, finite, strategy_table

_MOST_BYTES = 256 << 20
_MOST_MOVES = 20_000
_MOST_RANKS = 64
_KNOWN = (
    "a timeline, what `undertow demo --results`, `c3 run --out`, `bench --out` or `sim --json` wrote, or a schedule"
)


def sections(path: Path) -> list[Section]:
    """The sections of one file. Raises `InvalidArgument`, naming the file, for anything else."""
    data = _read(path)
    if data is None:
        return [schedule_section(_schedule(path))]
    try:
        found = _sections(data, path.name)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        OverflowError,
        ZeroDivisionError,
        RecursionError,
    ) as error:
        said = f"{type(error).__name__}: {error}"
        raise InvalidArgument(argument="file", was=f"{path} ({said})", must=f"whole: {_KNOWN}") from error
    if found:
        return found
    if isinstance(data, Mapping) and "gpus" in data:  # an MSCCL++ plan: its own reader judges the rest
        return [schedule_section(_schedule(path))]
    raise InvalidArgument(argument="file", was=f"{path} with something else in it", must=_KNOWN)


def _read(path: Path) -> Any:
    """The JSON in a file; None for an XML file, which another reader takes."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            must = f"at most {_MOST_BYTES >> 20} MiB: a browser would not open more"
            raise InvalidArgument(argument="file", was=f"{path} of {path.stat().st_size >> 20} MiB", must=must)
        if path.suffix == ".xml":
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(argument="file", was=f"{path} ({error.strerror})", must="readable") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(argument="file", was=f"{path}, which is no JSON", must=_KNOWN) from error


def _schedule(path: Path) -> Schedule:
    from ..collective.checker import check
    from ..collective.formats import read

    schedule = read(str(path)).schedules[0]
    check(schedule)  # a page shows nothing that would not run
    return schedule


def _sections(data: Any, name: str) -> list[Section]:
    """By what the data says it is; none if it says nothing that is known here."""
    if isinstance(data, list):
        return [made for one in data for made in _sections(one, name)]
    if not isinstance(data, Mapping):
        return []
    if "traceEvents" in data:
        return [_timeline_section(Timeline.from_chrome(data), name)]
    readers: dict[str, Callable[[Mapping[str, Any], str], Section]] = {
        DEMO_FORMAT: _demo_section,
        "undertow comparison 1": _comparison_section,
        "undertow c3 results 1": _c3_section,
    }
    reader = readers.get(str(data.get("format")))
    if reader is not None:
        return [reader(data, name)]
    if {"machine", "lines"} <= set(data):
        return [_simulation_section(data, name)]
    return []


def _timeline_section(timeline: Timeline, name: str) -> Section:
    said = f"{len(timeline.events)} events of {len(timeline.ranks)} ranks"
    return Section(name, (page.sentence(said), page.timeline(timeline), page.facts(timeline.environment)))


def _demo_section(data: Mapping[str, Any], name: str) -> Section:
    rows = [StrategyResult.from_json(row) for row in data["rows"]]
    times = {row.name: _milliseconds(row.time) for row in rows if row.time is not None}
    pieces = [page.sentence(str(one)) for one in data["sentences"]]
    pieces += [page.table(strategy_table(rows)), page.picture(plots.bars(times, "time of a call", "ms"))]
    return Section(str(data["title"]), (*pieces, page.facts(data["environment"])))


def _milliseconds(found: Estimate) -> tuple[float, float, float]:
    return found.median * 1e3, found.low * 1e3, found.high * 1e3


def _comparison_section(data: Mapping[str, Any], name: str) -> Section:
    comparison = Comparison.from_json(data)
    times = {one: _milliseconds(comparison.estimate(one)) for one in comparison.names}
    said = f"{comparison.rounds} rounds, all variants in turn; medians and 95 % intervals"
    return Section(
        name,
        (
            page.sentence(said),
            page.table(comparison_table(comparison)),
            page.picture(plots.bars(times, f"{comparison.clock} time of a call", "ms")),
            page.facts(comparison.environment),
        ),
    )


def _c3_section(data: Mapping[str, Any], name: str) -> Section:
    from ..c3.characterise import Result
    from .c3 import mean_table, picture, scenario_table

    results = [Result.from_json(one) for one in data["scenarios"]]
    title = f"{len(results)} scenarios of computation beside communication"
    pieces = [page.table(mean_table(results)), page.picture(picture(results, title))]
    pieces += [page.table(scenario_table(results, "speed-up and share of ideal")), page.facts(data["environment"])]
    return Section(name, tuple(pieces))


def _simulation_section(data: Mapping[str, Any], name: str) -> Section:
    from ..sim.what_if import Gain
    from .simulation import Line, gains_table, scale_table

    lines = [
        Line(
            int(one["nodes"]), int(one["ranks"]), str(one["strategy"]),
            None if one["seconds"] is None else finite(one["seconds"]),
            {str(part): finite(seconds) for part, seconds in one["resources"].items()}, str(one["problem"]),
        )
        for one in data["lines"]
    ]  # fmt: skip
    series: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        if line.seconds is not None:
            series.setdefault(line.strategy, []).append((line.ranks, line.seconds * 1e3))
    pieces = [page.sentence("simulated"), page.table(scale_table(f"on {data['machine']}", lines))]
    if len({line.ranks for line in lines}) > 1:
        pieces.append(page.picture(plots.curves(series, "time over the number of ranks", "ranks", "ms")))
    gains = [Gain(str(one["what"]), finite(one["speedup"])) for one in data.get("what_if", ())]
    if gains:
        pieces.append(page.table(gains_table("what would make it faster", gains)))
    return Section(name, tuple(pieces))


def schedule_section(schedule: Schedule) -> Section:
    """The chunks of a schedule on their way; of very large ones the picture alone."""
    shown = collective_picture.flow(schedule)
    moves = [
        (box.step, box.rank, other, box.chunk, box.sources) for box in shown.boxes for other in (box.to or (box.rank,))
    ]
    pieces = [page.sentence(f"{len(shown.boxes)} instructions in {shown.steps} steps")]
    if len(moves) <= _MOST_MOVES and shown.ranks <= _MOST_RANKS:
        pieces.append(page.flow(shown.ranks, shown.steps, moves))
    else:
        pieces.append(page.sentence(f"{len(moves)} moves of {shown.ranks} ranks are too many to be shown one by one."))
    return Section(shown.title, (*pieces, page.picture(collective_picture.svg(shown))))
