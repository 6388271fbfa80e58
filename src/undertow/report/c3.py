"""What computing beside communicating came to, for people: scenarios, means beside the published ones, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from rich import box
from rich.table import Table

from ..c3.advice import Question, Side, answer, preferred
from ..c3.characterise import PUBLISHED, Result, mean_shares
from ..c3.knowledge import Knowledge, halves, held_out
from ..c3.strategies import Place
from .tables import MISSING

_COLOURS = {
    "base": "#888888", "priority": "#4477aa", "partition": "#ccbb44", "both": "#228833", "dma": "#ee6677",
    "dma+fewer": "#aa3377",
}  # fmt: skip
_WIDTH, _HEIGHT, _LEFT, _TOP = 1100, 320, 60, 40


def scenario_table(results: Sequence[Result], title: str) -> Table:
    """One row each: times alone, the label, the ideal, and what every strategy reached of it."""
    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    names = strategies_of(results)
    for name in ("compute", "collective", "lane", "label", "alone (ms)", "ideal", *names):
        table.add_column(name, justify="left" if name in ("compute", "collective", "lane", "label") else "right")
    for one in results:
        size = f"{one.scenario.nbytes / (1 << 20):g} MiB"
        alone = f"{one.compute_seconds * 1e3:.2f} + {one.collective_seconds * 1e3:.2f}"
        cells = [_cell(one, name) for name in names]
        table.add_row(
            one.scenario.compute, f"{one.scenario.collective}, {size}", one.scenario.lane, one.label, alone,
            f"{one.ideal:.2f}x", *cells,
        )  # fmt: skip
    return table


def _cell(result: Result, name: str) -> str:
    if name not in result.together:
        return MISSING
    share = result.share(name)
    return f"{result.speedup(name):.2f}x {MISSING if share is None else f'{share:.0%}'}"


def mean_table(results: Sequence[Result]) -> Table:
    """The mean share of ideal of every strategy, beside what ConCCL reports on eight MI300X."""
    table = Table(title="mean share of the ideal speed-up", title_justify="left", box=box.ROUNDED)
    for name in ("lane", "strategy", "share", "speed-up", "worst", "published"):
        table.add_column(name, justify="left" if name in ("lane", "strategy") else "right")
    for lane, shares in mean_shares(results).items():
        for name, share in shares.items():
            speeds = [one.speedup(name) for one in results if one.scenario.lane == lane and name in one.together]
            published = f"{PUBLISHED[name]:.0%}" if name in PUBLISHED else MISSING
            table.add_row(
                lane, name, f"{share:.0%}", f"{statistics.mean(speeds):.2f}x", f"{min(speeds):.2f}x", published
            )
    return table


def strategies_of(results: Sequence[Result]) -> list[str]:
    """In the order in which they were met."""
    return list(dict.fromkeys(name for one in results for name in one.together))


# -- the advisor, judged by what was measured --------------------------------------------------------------------------


def judge(results: Sequence[Result], narrow: Sequence[tuple[int, float]] = ()) -> dict[str, float]:
    """The model and its advice on scenarios that they were not fitted to, each half judged by the other.

    `error`: mean error of predicted times. `of_best`: the picks' speed-up as a part of the best strategy's, the mean;
    `against_base`: the worst ratio of a pick's speed-up to that of `base`. Only what was measured can be picked.
    """
    of_best, against_base = [], []
    learnt = halves(results, narrow)
    for knowledge, unseen in learnt:
        for one in unseen:
            picked = pick(one, knowledge)
            speeds = {name: one.speedup(name) for name in one.together} | {"serial": 1.0}
            of_best.append(speeds[picked] / max(speeds.values()))
            if "base" in speeds:
                against_base.append(speeds[picked] / speeds["base"])
    return {
        "error": held_out(learnt),
        "of_best": statistics.mean(of_best),
        "against_base": min(against_base, default=1.0),
    }


def pick(result: Result, knowledge: Knowledge) -> str:
    """The strategy that the advisor takes for a scenario, of those that were measured."""
    lane = result.scenario.lane
    lanes = {lane: ""}
    place = Place(result.device, result.multiprocessors, lanes)
    asked = Question(
        Side(result.compute_seconds, result.memory),
        Side({lane: result.collective_seconds}, nbytes=round(result.moved_bytes)),
        place,
        knowledge,
        (lane,),
    )
    predicted = answer(asked).predicted
    measured = [f"{name}:{lane}" for name in (*result.together, "serial")]
    seen = {name: predicted[name] for name in measured if name in predicted}
    return preferred(seen, knowledge).removesuffix(f":{lane}")


def to_json(results: Sequence[Result], judged: dict[str, float], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": "undertow c3 results 1",
        "scenarios": [one.to_json() for one in results],
        "mean_share": mean_shares(results),
        "published_share": PUBLISHED,
        "model": judged,
        "environment": facts,
    }


# -- the picture -------------------------------------------------------------------------------------------------------


def picture(results: Sequence[Result], title: str) -> str:
    """SVG: scenarios from left to right by how long the collective is beside the computation, shares upwards."""
    ordered = sorted(results, key=lambda one: one.collective_seconds / one.compute_seconds)
    shares = [share for one in ordered for name in one.together if (share := one.share(name)) is not None]
    low, high = min([0.0, *shares]), max([1.0, *shares])
    step = _WIDTH / max(1, len(ordered))

    def height(share: float) -> float:
        return _TOP + _HEIGHT * (high - share) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _LEFT}" height="{_HEIGHT + 3 * _TOP}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for share in (low, 0.0, 0.5, 1.0):
        y = height(share)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for number, one in enumerate(ordered):
        x = _LEFT + (number + 0.5) * step
        for name in one.together:
            found = one.share(name)
            if found is not None:
                words = f"{one.scenario.name}: {name} {one.speedup(name):.2f}x, {found:.0%} of ideal, {one.label}"
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{height(found):.1f}" r="4" fill="{_COLOURS.get(name, "#000")}">'
                    f"<title>{escape(words)}</title></circle>"
                )
    x = float(_LEFT)
    for name in strategies_of(results):
        y = _TOP + _HEIGHT + 30
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{_COLOURS.get(name, "#000")}"/>')
        parts.append(f'<text x="{x + 10}" y="{y + 4}">{escape(name)}</text>')
        x += 30 + 8 * len(name)
    axis = "scenarios, from computation-long to communication-long; the share of the ideal speed-up upwards"
    parts.append(f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 60}">{axis}</text></svg>')
    return "\n".join(parts) + "\n"
