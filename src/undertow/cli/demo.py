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
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, smaller matrices.")] = False,
) -> None:
    """Run matmul_all_reduce through every strategy, check each result exactly, and time them side by side."""
    from ..fabric.local_ranks import default_ranks
    from ..report.demo import demonstrate, render
    from ..report.tables import show

    check_writable(out)
    chosen = default_ranks(device.value) if ranks is None else ranks
    found = demonstrate(chosen, device.value, quick=quick, progress=True)
    if found.wrong:
        typer.echo(f"Wrong results: {', '.join(found.wrong)}.", err=True)
        raise typer.Exit(1)
    found.timeline.save(out)
    show(render(found))
    for sentence in found.sentences:
        typer.echo(sentence)
    typer.echo(f"The timeline of one call of each is in {out}; open it at https://ui.perfetto.dev.")
