"""Plans for people: what the cache holds, and what tuning one problem found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from ..fabric.registry import init
from ..ops.all_gather_matmul import all_gather_matmul
from ..ops.all_to_all_matmul import all_to_all_matmul
from ..ops.explain import Explanation, explain, milliseconds
from ..ops.matmul_all_reduce import matmul_all_reduce
from ..ops.matmul_all_to_all import matmul_all_to_all
from ..ops.matmul_reduce_scatter import matmul_reduce_scatter
from ..ops.tuning import tune
from ..plan.cache import Entry
from ..plan.plan import split
from .tables import MISSING

_OPERATORS: dict[str, Any] = {
    one.__name__: one
    for one in (matmul_all_reduce, matmul_reduce_scatter, all_gather_matmul, matmul_all_to_all, all_to_all_matmul)
}


def tune_rank(
    operator: str, m: int, n: int, k: int, dtype: str, budget_seconds: float, experts: int = 1
) -> Explanation:
    """One rank's part in `undertow plan tune`: m, n and k as in `plan.problem`. `experts`: a rank's weights, of tokens
    that are cut evenly over those of all."""
    group = init()
    rows = _cut(m, group.size)
    options: dict[str, Any] = {"rows": rows} if operator == "all_gather_matmul" else {}
    mine = rows[group.rank] if operator == "all_gather_matmul" else m
    place: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": group.device}
    x, w = torch.ones(mine, k, **place), torch.ones(k, n, **place)
    if operator in ("matmul_all_to_all", "all_to_all_matmul"):  # every rank sends m rows, and gets as many
        sizes = [
            [_cut(rows[(source + rank) % group.size], experts) for rank in range(group.size)]
            for source in range(group.size)
        ]
        if experts > 1:
            options, w = {"group_sizes": sizes}, torch.ones(experts, k, n, **place)
        else:
            options = {"splits": [[sum(one) for one in row] for row in sizes]}
    tune(_OPERATORS[operator], x, w, budget_seconds=budget_seconds, **options)
    found = explain()
    assert found is not None
    return found


def _cut(rows: int, parts: int) -> list[int]:
    return [stop - start for start, stop in split(rows, parts)]


def render_choice(found: Explanation, title: str) -> Table:
    """Every candidate with what it was predicted to take and took; the chosen one is marked."""
    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    table.add_column("strategy", no_wrap=True)
    for heading in ("parcels", "predicted", "measured", "speed-up over serial"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in found.candidates:
        table.add_row(
            one.name,
            str(one.parcels),
            milliseconds(one.predicted),
            milliseconds(one.measured),
            _factor(found.choice.serial_seconds, one.measured),
            "chosen" if one.chosen else "",
        )
    return table


def render_cache(found: Sequence[tuple[Path, Entry | None]]) -> Table:
    """One row for each file."""
    table = Table(title=f"{len(found)} plans", title_justify="left", box=box.ROUNDED)
    for heading in ("problem", "plan"):
        table.add_column(heading, no_wrap=True)
    for heading in ("parcels", "measured", "speed-up over serial"):
        table.add_column(heading, justify="right")
    for heading in ("made", "machine"):
        table.add_column(heading)
    for path, entry in found:
        if entry is None:
            table.add_row(path.name, "damaged", *[MISSING] * 5)
            continue
        measured, serial = _times(entry)
        table.add_row(
            entry.key.rpartition("-")[0],
            entry.plan.name,
            str(len(entry.plan.parcels)),
            milliseconds(measured),
            _factor(serial, measured),
            entry.made,
            entry.machine,
        )
    return table


def cache_to_json(found: Sequence[tuple[Path, Entry | None]]) -> list[dict[str, Any]]:
    """The same for programs; a damaged file has its name only."""
    rows: list[dict[str, Any]] = []
    for path, entry in found:
        row: dict[str, Any] = {"file": path.name, "damaged": entry is None}
        if entry is not None:
            measured, serial = _times(entry)
            row |= {
                "problem": entry.key,
                "machine": entry.machine,
                "versions": entry.versions,
                "made": entry.made,
                "strategy": entry.plan.name,
                "parcels": len(entry.plan.parcels),
                "plan": entry.plan.digest,
                "measured_seconds": measured,
                "serial_seconds": serial,
                "gemm_seconds": entry.gemm_seconds,
                "reason": entry.reason,
            }
        rows.append(row)
    return rows


def _times(entry: Entry) -> tuple[float | None, float | None]:
    """Measured seconds of the plan and of the fastest serial one."""
    mine = next((measured for digest, *_, measured in entry.trials if digest == entry.plan.digest), None)
    serial = [
        measured for _, name, _, _, measured in entry.trials if name.startswith("serial:") and measured is not None
    ]
    return mine, min(serial, default=None)


def _factor(serial: float | None, measured: float | None) -> str:
    return f"{serial / measured:.2f}×" if serial is not None and measured else MISSING
