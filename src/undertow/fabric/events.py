"""The event format of all timelines, measured or simulated: Perfetto opens it. Imports no torch.

Times are nanoseconds of one clock: the node's for what was measured, the simulation's own for what was not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of work: `engine` (compute, a lane, a copy engine, host) of `rank` was busy with it."""

    name: str
    rank: int
    engine: str
    start_ns: int
    duration_ns: int
    category: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Timeline:
    """Events of any number of ranks."""

    def __init__(self, events: Iterable[Event] = (), environment: Mapping[str, Any] | None = None) -> None:
        self.events: list[Event] = list(events)
        self.environment: dict[str, Any] = dict(environment or {})

    def __len__(self) -> int:
        return len(self.events)

    def add(self, event: Event) -> None:
        self.events.append(event)

    def merge(self, others: Iterable[Timeline]) -> Timeline:
        """Take in the events of other ranks' timelines; gives itself back. Its own environment wins."""
        for other in others:
            self.events.extend(other.events)
            self.environment = other.environment | self.environment
        return self

    @property
    def ranks(self) -> list[int]:
        return sorted({event.rank for event in self.events})

    @property
    def engines(self) -> list[str]:
        """Engines in order of first use, which is how their rows are sorted."""
        return list(dict.fromkeys(event.engine for event in sorted(self.events, key=lambda event: event.start_ns)))

    def span(self, engine: str, rank: int | None = None) -> float:
        """Seconds from the first start to the last end on `engine`, of one rank or of all."""
        found = self._select(engine, rank)
        if not found:
            return 0.0
        return (max(event.end_ns for event in found) - min(event.start_ns for event in found)) * 1e-9

    def busy(self, engine: str, rank: int | None = None) -> float:
        """Seconds during which `engine` had work; summed over ranks unless one is named."""
        ranks = self.ranks if rank is None else [rank]
        return sum(end - start for each in ranks for start, end in self._busy_intervals(engine, each)) * 1e-9

    def overlap(self, engine_a: str, engine_b: str, rank: int | None = None) -> float:
        """Seconds during which both engines of a rank had work; summed over ranks unless one is named."""
        total = 0
        for each in self.ranks if rank is None else [rank]:
            total += _common(self._busy_intervals(engine_a, each), self._busy_intervals(engine_b, each))
        return total * 1e-9

    def to_chrome(self) -> dict[str, Any]:
        """The trace as Chrome's and Perfetto's JSON: a rank is a process row, an engine a thread row.

        Timestamps count from the earliest event, for a double keeps no nanoseconds beside a machine's uptime in
        microseconds; `origin_ns` among the other data restores them.
        """
        origin = min((event.start_ns for event in self.events), default=0)
        rows = {engine: row for row, engine in enumerate(self.engines)}
        trace: list[dict[str, Any]] = []
        for rank in self.ranks:
            trace.append(_label("process_name", rank, 0, {"name": f"rank {rank}"}))
            trace.append(_label("process_sort_index", rank, 0, {"sort_index": rank}))
            for engine, row in rows.items():
                if any(event.rank == rank and event.engine == engine for event in self.events):
                    trace.append(_label("thread_name", rank, row, {"name": engine}))
                    trace.append(_label("thread_sort_index", rank, row, {"sort_index": row}))
        for event in sorted(self.events, key=lambda event: (event.start_ns, event.rank)):
            trace.append(
                {
                    "name": event.name,
                    "cat": event.category or event.engine,
                    "ph": "X",
                    "ts": (event.start_ns - origin) / 1000,
                    "dur": event.duration_ns / 1000,
                    "pid": event.rank,
                    "tid": rows[event.engine],
                    "args": event.details,
                }
            )
        other = {"format": "undertow timeline 1", "origin_ns": origin, "environment": self.environment}
        return {"traceEvents": trace, "displayTimeUnit": "ns", "otherData": other}

    @classmethod
    def from_chrome(cls, data: Mapping[str, Any]) -> Timeline:
        """Read what `to_chrome` wrote, or any trace of complete events with named threads."""
        other = data.get("otherData", {})
        origin = int(other.get("origin_ns", 0))
        entries = data["traceEvents"]
        named = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
        timeline = cls(environment=other.get("environment", {}))
        for entry in entries:
            if entry["ph"] != "X":
                continue
            engine = named.get((entry["pid"], entry["tid"]), str(entry["tid"]))
            category = entry.get("cat", "")
            timeline.add(
                Event(
                    name=entry["name"],
                    rank=int(entry["pid"]),
                    engine=engine,
                    start_ns=origin + round(entry["ts"] * 1000),
                    duration_ns=round(entry["dur"] * 1000),
                    category="" if category == engine else category,
                    details=dict(entry.get("args", {})),
                )
            )
        return timeline

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace to `path`, making its folder if needed."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_chrome(), default=str) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        return cls.from_chrome(json.loads(Path(path).read_text()))

    def _select(self, engine: str, rank: int | None) -> list[Event]:
        return [event for event in self.events if event.engine == engine and rank in (None, event.rank)]

    def _busy_intervals(self, engine: str, rank: int) -> list[tuple[int, int]]:
        """Disjoint intervals in order, so that work counted twice by nested events is counted once."""
        merged: list[tuple[int, int]] = []
        for event in sorted(self._select(engine, rank), key=lambda event: event.start_ns):
            if merged and event.start_ns <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], event.end_ns))
            else:
                merged.append((event.start_ns, event.end_ns))
        return merged


def _label(kind: str, rank: int, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": args}


def _common(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    """Nanoseconds that two ordered lists of disjoint intervals share."""
    total, i, j = 0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
