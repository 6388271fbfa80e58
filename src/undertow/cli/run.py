"""`undertow run`: a script in several ranks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Device, DeviceOption, Mps


def run(
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="A Python script.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="How many ranks to start.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="For the script, untouched.")] = None,
    device: DeviceOption = Device.auto,
    deadline: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds after which a wait for another rank is an error.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where the ranks meet; 0 picks a free one.")] = 0,
    mps: Annotated[
        Mps | None, typer.Option(help="More ranks than GPUs: under MPS if possible, time slicing, or MPS only.")
    ] = None,
) -> None:
    """Run SCRIPT in several ranks; the first failing one is reported and ends the others."""
    from ..fabric.launch import launch, run_script

    launch(
        run_script,
        ranks,
        device.value,
        args=(str(script), list(arguments or ())),
        deadline=deadline,
        mps=None if mps is None else mps.value,
        port=port,
    )
