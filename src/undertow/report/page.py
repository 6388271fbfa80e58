"""One self-contained HTML page: tables, pictures, timelines to zoom into, chunks that move. It fetches nothing.

Whatever comes from a file is escaped: text as text, data as JSON in which no `<` is left, so that it cannot end the
element it stands in. The page's own rule (its content security policy) forbids any other source, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from rich.table import Table

from ..fabric.events import Timeline

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
MOST_ROWS = 500
"""Of a timeline: a canvas can only be so high."""
MOST_EVENTS = 100_000
"""Of a timeline: a browser draws so many without delay. The longest ones are shown of more."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands below it: pieces of HTML that the functions of this file have made."""

    title: str
    pieces: tuple[str, ...]


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole document."""
    assets = files(__package__) / "assets"
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    several = sum(piece.count('data-kind="timeline"') for section in sections for piece in section.pieces) > 1
    together = '<p><label><input type="checkbox" id="together"> zoom all timelines together</label></p>'
    body = [f"<h1>{escape(title)}</h1>", together if several else ""]
    for section in sections:
        body += [f"<section><h2>{escape(section.title)}</h2>", *section.pieces, "</section>"]
    head = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>\n{style}</style></head><body>",
    ]
    return "\n".join([*head, *filter(None, body), f"<script>\n{script}</script></body></html>", ""])


def sentence(text: str, quiet: bool = False) -> str:
    kind = ' class="quiet"' if quiet else ""
    return f"<p{kind}>{escape(text)}</p>"


def table(shown: Table) -> str:
    """A table as it is shown in a terminal, with its title."""
    rows = list(zip(*(list(column.cells) for column in shown.columns), strict=True))
    sides = [' class="right"' if column.justify == "right" else "" for column in shown.columns]
    head = "".join(
        f"<th{side}>{escape(str(column.header))}</th>" for side, column in zip(sides, shown.columns, strict=True)
    )
    body = [
        "<tr>" + "".join(f"<td{side}>{escape(str(cell))}</td>" for side, cell in zip(sides, row, strict=True)) + "</tr>"
        for row in rows
    ]
    title = f"<h3>{escape(str(shown.title))}</h3>" if shown.title else ""
    return f'{title}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def facts(found: Mapping[str, Any]) -> str:
    """What a run was made on, folded away."""
    rows = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(_plain(value))}</dd>" for name, value in found.items())
    return f"<details><summary>environment</summary><dl>{rows}</dl></details>" if rows else ""


def picture(svg: str) -> str:
    """A picture that this package drew."""
    return f'<div class="wide">{svg}</div>'


def timeline(shown: Timeline) -> str:
    """Ranks and their engines as rows, to zoom into and to move along."""
    order = {engine: place for place, engine in enumerate(shown.engines)}
    rows = sorted({(event.rank, event.engine) for event in shown.events}, key=lambda row: (row[0], order[row[1]]))
    unseen, rows = len(rows) - MOST_ROWS, rows[:MOST_ROWS]
    row_of = {row: place for place, row in enumerate(rows)}
    events = [event for event in shown.events if (event.rank, event.engine) in row_of]
    left_out = len(events) - MOST_EVENTS
    events = sorted(events, key=lambda event: -event.duration_ns)[:MOST_EVENTS]
    events.sort(key=lambda event: event.start_ns)
    origin = min((event.start_ns for event in events), default=0)
    names, details = _Numbers(), _Numbers()
    data = {
        "end": max([1, *(event.end_ns - origin for event in events)]),
        "rows": [f"rank {rank} · {engine}" for rank, engine in rows],
        "events": [
            [
                row_of[event.rank, event.engine],
                event.start_ns - origin,
                event.duration_ns,
                names.of(event.name),
                details.of(_plain(event.details)) if event.details else -1,
            ]
            for event in events
        ],
        "names": names.texts,
        "details": details.texts,
    }
    said = "wheel or + − to zoom, drag or arrows to move, double click or 0 for all of it"
    if unseen > 0:
        said += f"; the last {unseen} rows are left out"
    if left_out > 0:
        said += f"; the shortest {left_out} events are left out"
    return _stage("timeline", data, f'<canvas tabindex="0" aria-label="timeline"></canvas>{sentence(said, quiet=True)}')


def flow(ranks: int, steps: int, moves: Iterable[tuple[int, int, int, int, int]]) -> str:
    """Chunks that move: (step, from, to, chunk, how many are summed) each; to itself: a copy or sum on the spot."""
    data = {"ranks": ranks, "steps": steps, "moves": [list(move) for move in moves]}
    controls = (
        '<div class="controls"><button type="button">play</button>'
        '<input type="range" min="0" value="0" aria-label="step"><span class="said"></span></div>'
    )
    words = "ranks in a circle; dots are chunks on their way, thick lines sums, rings what a rank does by itself"
    return _stage("flow", data, f'{controls}<canvas aria-label="flow of chunks"></canvas>{sentence(words, quiet=True)}')


def _stage(kind: str, data: object, inside: str) -> str:
    # No "<" is left, so that no text in the data can end the element; JSON reads \u003c as the same text.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    held = f'<script type="application/json">{text}</script>'
    return f'<div class="stage" data-kind="{kind}">{held}{inside}<div class="tip"></div></div>'


class _Numbers:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._known: dict[str, int] = {}

    def of(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = len(self.texts)
            self.texts.append(text)
        return self._known[text]


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_plain(one)}" for name, one in value.items())
    return value if isinstance(value, str) else json.dumps(value, default=str)
