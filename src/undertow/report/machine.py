"""Measuring a machine with a bar on the screen, and showing what was found."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from ..fabric import profile
from ..fabric.registry import init
from ..fabric.segment import human
from ..ops.profile import sharpen
from ..plan.machine import FORMAT, Machine
from .progress import progress_bar
from .tables import EMULATED

_FABRIC = 0.6  # of the time: what the fabric measures by itself


def measure_rank(quick: bool, progress: bool) -> dict[str, Any]:
    """One rank's part in `undertow profile`; all ranks return the same."""
    group = init()
    with progress_bar(progress and group.rank == 0) as report:
        content, pairs = profile.measure(group, quick=quick, progress=lambda what, done: report(what, _FABRIC * done))
        machine = Machine.from_dict({"format": FORMAT, **content})
        rest = sharpen(machine, pairs, group, quick, lambda what, done: report(what, _FABRIC + (1 - _FABRIC) * done))
        return rest.to_dict()


def render(machine: Machine) -> Table:
    """The lanes, and under the title what the matmul and the launches take."""
    workers, fastest = machine.gemm.points[-1]
    shared = ", which share the GPU" if machine.shares_device else ""
    title = (
        f"{machine.name}, {machine.ranks} {machine.device} ranks{shared}; matmul {list(machine.gemm.shape)}"
        f" {machine.gemm.dtype} {fastest * 1e3:.3g} ms on {workers} {machine.gemm.workers}"
        f" ({machine.gemm.flops / 1e9:.4g} GFLOP/s), an operation {machine.launch_seconds * 1e6:.3g} µs,"
        f" a second stream {machine.stream_seconds * 1e6:.3g} µs"
    )
    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    table.add_column("lane", no_wrap=True)
    for heading in ("latency", "bandwidth", "at", "matmul slowed", "lane slowed"):
        table.add_column(heading, justify="right")
    table.add_column("what it is")
    for name, lane in machine.lanes.items():
        largest = lane.points[-1][0]
        table.add_row(
            name,
            f"{lane.latency * 1e6:.1f} µs",
            f"{lane.bandwidth(largest) / 1e9:.3g} GB/s",
            human(largest),
            f"{lane.gemm_slowdown:.2f}×",
            f"{lane.lane_slowdown:.2f}×",
            f"{EMULATED}: {lane.description}" if lane.emulated else lane.description,
        )
    return table
