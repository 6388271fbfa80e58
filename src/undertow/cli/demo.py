"""`undertow demo`: every strategy on this machine, checked and timed, in under a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Device, DeviceOption, RanksOption, check_writable


def demo(
    ranks: RanksOption = None,
    device: DeviceOption = Device.auto,
    out: Annotated[Path, typer.Option(help="The timeline, for ui.perfetto.dev.")] = Path("undertow-timeline.json"),
    results: Annotated[Path | None, typer.Option(help="The table as JSON, for `undertow report`.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, smaller matrices.")] = False,
) -> None:
    """Run matmul_all_reduce serial, chunked and signaled over every lane, check results exactly, time them in turns."""
    from ..fabric.local_ranks import default_ranks
    from ..report.demo import demonstrate, render, to_json
    from ..report.tables import show

    check_writable(out)
    if results is not None:
        check_writable(results, "--results")
    chosen = default_ranks(device.value) if ranks is None else ranks
    found = demonstrate(chosen, device.value, quick=quick, progress=True)
    if found.wrong:
        typer.echo(f"Wrong results: {', '.join(found.wrong)}.", err=True)
        raise typer.Exit(1)
    found.timeline.save(out)
    show(render(found))
    for sentence in found.sentences:
        typer.echo(sentence)
    if results is not None:
        results.write_text(to_json(found))
        typer.echo(f"The results are in {results}.")
    typer.echo(f"The timeline of one call of each is in {out}; open it at https://ui.perfetto.dev.")
