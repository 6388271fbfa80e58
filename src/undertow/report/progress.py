"""The progress bar. One rank draws it: the launcher only waits, and the ranks share its terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

Report = Callable[[str, float], None]
"""Told what is being done now, and which fraction of everything is done."""


def silent(what: str, fraction: float) -> None:
    """For ranks that draw nothing."""


@contextmanager
def progress_bar(shown: bool) -> Iterator[Report]:
    """A bar on standard error while the block runs; nothing if it is not a terminal.

    It is redrawn only when told: a thread that redraws by itself would take time from what is measured.
    """
    console = Console(file=sys.stderr)
    if not shown or not console.is_terminal:
        yield silent
        return
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=1.0)

        def report(what: str, fraction: float) -> None:
            progress.update(task, description=what, completed=fraction, refresh=True)

        yield report
