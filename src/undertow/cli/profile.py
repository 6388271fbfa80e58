"""`undertow profile`: measure this machine, write a machine file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Device, DeviceOption, RanksOption, check_writable


def profile(
    out: Annotated[
        Path | None, typer.Option(help="The machine file (TOML). Unset: in the folder of UNDERTOW_CACHE_DIR.")
    ] = None,
    ranks: RanksOption = None,
    device: DeviceOption = Device.auto,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds.")] = False,
) -> None:
    """Measure GEMMs, lanes, and how they slow each other; the planner and the simulator read the result."""
    from .. import settings
    from ..fabric.launch import launch
    from ..fabric.local_ranks import default_ranks, resolve_device
    from ..plan.machine import Machine, default_path
    from ..report.machine import measure_rank, render
    from ..report.tables import show

    chosen = default_ranks(device.value) if ranks is None else ranks
    path = out if out is not None else default_path(resolve_device(device.value), chosen)
    check_writable(path)
    unbound = {settings.BIND.name: "0"}  # the matmul is measured on all cores, too
    machine = Machine.from_dict(launch(measure_rank, chosen, device.value, args=(quick, True), env=unbound)[0])
    machine.save(path)
    show(render(machine))
    typer.echo(f"The machine file is {path}.")
