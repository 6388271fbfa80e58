"""`undertow report`: what runs have left in files, as one HTML page that opens anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import check_writable


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Timelines; what demo --results, c3 run --out, bench --out, sim --json wrote; schedule files.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("undertow-report.html"),
    title: Annotated[str, typer.Option(help="Its heading.")] = "Undertow report",
) -> None:
    """Gather tables, plots, zoomable timelines and chunk flows of any runs in one page that needs no network."""
    from ..report.page import page
    from ..report.page_files import sections

    check_writable(out)
    made = [section for path in inputs for section in sections(path)]
    text = page(title, made).encode("utf-8", "replace")  # half of a surrogate pair is no text
    out.write_bytes(text)
    titles = ", ".join(section.title for section in made).encode("utf-8", "replace").decode()
    typer.echo(f"The report is {out}: {titles}.")
