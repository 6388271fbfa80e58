"""What simulations say, for people: strategies at each scale, where the time goes, what would make it faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from ..sim.what_if import Gain

_BAR = 24
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Line:
    """One strategy at one scale; `problem` says why it did not run."""

    nodes: int
    ranks: int
    strategy: str
    seconds: float | None
    resources: dict[str, float]
    problem: str = ""


def scale_table(title: str, lines: Sequence[Line]) -> Table:
    """Times, ratios to the first strategy of each scale, bars, and the largest parts."""
    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    for name, justify in (("nodes", "right"), ("ranks", "right"), ("strategy", "left"), ("time", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("× first", justify="right")
    table.add_column("", no_wrap=True)
    table.add_column("where the time goes")
    longest = max((line.seconds for line in lines if line.seconds is not None), default=0.0)
    first: dict[int, float] = {}
    for line in lines:
        if line.seconds is None:
            table.add_row(str(line.nodes), str(line.ranks), line.strategy, "–", "–", "", line.problem)
            continue
        reference = first.setdefault(line.nodes, line.seconds)
        bar = "█" * max(1, round(_BAR * line.seconds / longest)) if longest else ""
        ratio = f"{reference / line.seconds:.2f}" if line.seconds else "–"
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in list(line.resources.items())[:_SHOWN])
        table.add_row(str(line.nodes), str(line.ranks), line.strategy, duration(line.seconds), ratio, bar, parts)
    return table


def gains_table(title: str, gains: Sequence[Gain]) -> Table:
    """What would make it faster, the largest gain first."""
    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    table.add_column("what if")
    table.add_column("times as fast", justify="right")
    for gain in gains:
        table.add_row(gain.what, f"{gain.speedup:.2f}×")
    return table


def lines_to_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [
        {
            "nodes": line.nodes,
            "ranks": line.ranks,
            "strategy": line.strategy,
            "seconds": line.seconds,
            "resources": line.resources,
            "problem": line.problem,
        }
        for line in lines
    ]


def duration(seconds: float) -> str:
    """Three digits and the unit that suits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            break
    return f"{seconds * scale:.3g} {unit}"
