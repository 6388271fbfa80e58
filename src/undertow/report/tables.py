"""Tables for people: measured strategies with their intervals, and how much of the communication each one hid."""

from __future__ import annotations

import copy
import io
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from ..fabric.timer import Comparison, Estimate
from ..plan.metrics import overlap_efficiency, share_of_ideal

MISSING = "–"
EMULATED = "emulated"
DEMO_FORMAT = "undertow demo 1"  # what `undertow demo --results` writes and `undertow report` reads


@dataclass(frozen=True, slots=True)
class StrategyResult:
    """One row: a strategy, what it took, and what that means against its serial baseline."""

    name: str
    time: Estimate | None
    speedup: Estimate | None = None
    efficiency: float | None = None
    share: float | None = None
    emulated: bool = False
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StrategyResult:
        """Raises ValueError for what cannot have been measured."""
        time, speedup = (
            None if data[name] is None else Estimate(**{part: finite(one) for part, one in data[name].items()})
            for name in ("time", "speedup")
        )
        efficiency, share = (None if data[name] is None else finite(data[name]) for name in ("efficiency", "share"))
        return cls(str(data["name"]), time, speedup, efficiency, share, bool(data["emulated"]), str(data["note"]))


Reference = str | Mapping[str, str] | None
"""A variant's name for all rows, or row by row: a strategy is compared with the serial one of its own lane."""


def strategy_results(
    comparison: Comparison,
    *,
    serial: Reference,
    gemm: str | None = None,
    communication: Reference = None,
    emulated: Collection[str] = (),
    notes: Mapping[str, str] | None = None,
) -> list[StrategyResult]:
    """Rows for every variant of `comparison`, except those that only serve as the parts `gemm` and `communication`.

    `emulated` names the rows whose link was paced, not real: they are marked wherever they are shown.
    """
    parts = {gemm} | (set(communication.values()) if isinstance(communication, Mapping) else {communication})
    results = []
    for name in comparison.names:
        if name in parts:
            continue
        found = comparison.estimate(name)
        baseline, moved = _for(serial, name), _for(communication, name)
        efficiency = share = None
        if gemm is not None and baseline is not None:
            gemm_time = comparison.estimate(gemm).median
            efficiency = overlap_efficiency(found.median, gemm_time, comparison.estimate(baseline).median)
        if gemm is not None and moved is not None:
            gemm_time, moved_time = comparison.estimate(gemm).median, comparison.estimate(moved).median
            share = share_of_ideal(found.median, gemm_time, moved_time)
        results.append(
            StrategyResult(
                name=name,
                time=found,
                speedup=comparison.speedup(name, over=baseline) if baseline is not None else None,
                efficiency=efficiency,
                share=share,
                emulated=name in emulated,
                note=(notes or {}).get(name, ""),
            )
        )
    return results


def strategy_table(results: Iterable[StrategyResult], *, title: str | None = None) -> Table:
    """Time, speed-up over serial, overlap efficiency E and share of the ideal speed-up, one strategy a row."""
    rows = list(results)
    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    table.add_column("strategy", no_wrap=True)
    for heading in ("time", "speed-up over serial", "overlap E", "share of ideal"):
        table.add_column(heading, justify="right")
    with_notes = any(row.note or row.emulated for row in rows)
    if with_notes:
        table.add_column("remarks")
    for row in rows:
        cells = [row.name, seconds(row.time), factor(row.speedup), percent(row.efficiency), percent(row.share)]
        if with_notes:
            cells.append(", ".join(filter(None, (EMULATED if row.emulated else "", row.note))))
        table.add_row(*cells)
    return table


def comparison_table(comparison: Comparison, *, against: str | None = None, title: str | None = None) -> Table:
    """Times of all variants, and their ratio to `against` (the first variant unless named)."""
    reference = against if against is not None else comparison.names[0]
    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    table.add_column("variant", no_wrap=True)
    table.add_column(f"{comparison.clock} time", justify="right")
    table.add_column(f"times {reference}", justify="right")
    for name in comparison.names:
        ratio = None if name == reference else comparison.ratio(of=name, to=reference)
        table.add_row(name, seconds(comparison.estimate(name)), factor(ratio))
    return table


def seconds(estimate: Estimate | None) -> str:
    """'1.234 ms ± 0.012', the half-width of the interval after the sign, in the unit that suits the median."""
    if estimate is None:
        return MISSING
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if estimate.median * scale >= 1 or unit == "µs":
            break
    digits = _digits(estimate.median * scale)
    return f"{estimate.median * scale:.{digits}f} {unit} ± {_half_width(estimate) * scale:.{digits}f}"


def factor(estimate: Estimate | None) -> str:
    """'1.23× ± 0.02'."""
    return MISSING if estimate is None else f"{estimate.median:.2f}× ± {_half_width(estimate):.2f}"


def percent(share: float | None) -> str:
    return MISSING if share is None else f"{share * 100:.0f}%"


def show(renderable: RenderableType, file: TextIO | None = None) -> None:
    """Print for the reader at hand: in colour to a terminal, else as plain text that survives pipes and pasting.

    Plain text has no fixed width to fold into and no box drawing; a file whose encoding lacks a character gets a
    question mark for it instead of an error.
    """
    target = file if file is not None else sys.stdout
    console = Console(file=target)
    if console.is_terminal:
        console.print(renderable)
        return
    text = plain(renderable)
    encoding = getattr(target, "encoding", None) or "utf-8"
    target.write(text.encode(encoding, "replace").decode(encoding))


def plain(renderable: RenderableType, width: int = 200) -> str:
    """`renderable` as plain text; a table comes out in the form that Markdown reads as one."""
    if isinstance(renderable, Table):
        renderable = copy.copy(renderable)
        renderable.box = box.MARKDOWN
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=False, color_system=None).print(renderable)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _for(reference: Reference, name: str) -> str | None:
    return reference.get(name) if isinstance(reference, Mapping) else reference


def finite(number: Any) -> float:
    """A number from a file; raises ValueError for what cannot have been measured."""
    if not math.isfinite(float(number)):
        raise ValueError(f"{number} is no measure")
    return float(number)


def _half_width(estimate: Estimate) -> float:
    """The interval need not be symmetric; the wider side is told."""
    return max(estimate.high - estimate.median, estimate.median - estimate.low)


def _digits(value: float) -> int:
    return 3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0
