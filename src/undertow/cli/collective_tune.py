"""`undertow collective tune`: measure programs, and keep which one a collective runs at which size."""

from __future__ import annotations

from typing import Annotated

import typer

from .collective import size


def tune(
    collective: Annotated[str, typer.Argument(help="all_reduce, all_gather, ...: what the table is for.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="How many ranks.")],
    programs: Annotated[
        list[str] | None, typer.Option("--program", "-p", help="FILE.py or FILE.py:NAME, measured too. Repeatable.")
    ] = None,
    min_bytes: Annotated[int, typer.Option(metavar="SIZE", parser=size, show_default="1K", help="First size.")] = 1024,
    max_bytes: Annotated[int, typer.Option(metavar="SIZE", parser=size, show_default="4M", help="Largest size.")] = 4
    << 20,
    factor: Annotated[int, typer.Option(min=2, help="From one size to the next.")] = 8,
) -> None:
    """Measure the library's programs and yours on this machine's CPU, and keep the fastest of each size.

    `undertow.collective` and the torch backend use the table from their next start on. A program of yours is used by
    processes that have imported the module it is made in.
    """
    from ..collective.loading import load
    from ..report.collective_bench import Sweep
    from ..report.collective_tune import keep, tune

    own = [one for target in programs or () for one in load(target)]
    found, refused = tune(collective, ranks, own, Sweep(min_bytes, max_bytes, factor), progress=True)
    for line in refused:
        typer.echo(line, err=True)
    for one in found:
        instead = "" if one.best is one.library else f"; of the library {one.library_seconds * 1e6:.1f} us"
        typer.echo(f"{one.nbytes:>12} bytes  {one.seconds * 1e6:>9.1f} us  {one.best.name}{instead}")
    typer.echo(f"The table is kept in {keep(collective, ranks, found)}.")
