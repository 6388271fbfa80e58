"""What the benchmarks of one layer print: the time of each form, and how many times as fast as one of them it is."""

from __future__ import annotations

import json
from typing import Any

from undertow.fabric.timer import Comparison


def report(
    found: Comparison, apart: dict[str, float], over: str, title: str, facts: dict[str, Any], as_json: bool
) -> None:
    """`apart`: of each form, by how much its results or gradients differ from those compared with."""
    rows = {}
    for name in found.names:
        time, ratio = found.estimate(name), found.speedup(name, over=over)
        rows[name] = {"milliseconds": time.median * 1e3, "speed-up": [ratio.median, ratio.low, ratio.high]}
    if as_json:
        print(json.dumps({**facts, "apart": apart, "variants": rows, "environment": found.environment}, default=str))
        return
    print(title)
    for name, row in rows.items():
        median, low, high = row["speed-up"]  # type: ignore[misc]
        print(
            f"{name:>16}  {row['milliseconds']:8.1f} ms   {median:.2f}x over {over}  [{low:.2f}, {high:.2f}]"
            f"   apart by {apart[name]:.1e}"
        )
