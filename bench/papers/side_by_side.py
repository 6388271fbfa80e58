"""Published figures and simulated ones, side by side, with a word on each: how all experiments here print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rich.table import Table

from undertow.report.tables import show


class Figure(NamedTuple):
    """One line: `published` is a text, for some figures are ranges or not known; `word` says what to think of it."""

    what: str
    published: str
    simulated: str
    word: str = ""


def print_figures(title: str, figures: Iterable[Figure], remarks: Iterable[str] = ()) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("figure", "published", "simulated", ""):
        table.add_column(name)
    for figure in figures:
        table.add_row(*figure)
    show(table)
    for remark in remarks:
        print(f"- {remark}")
