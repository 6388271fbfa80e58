"""`undertow bench`: operators beside their serial form, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Device, DeviceOption, RanksOption, check_writable

app = typer.Typer(help="Measure operators side by side with their serial form.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure operators side by side with their serial form."""


@app.command("embedding_all_to_all")
def embedding_all_to_all(
    ranks: RanksOption = None,
    device: DeviceOption = Device.auto,
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank.")] = 2048,
    tables: Annotated[int, typer.Option(min=1, help="Tables of each rank.")] = 8,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a table.")] = 20000,
    dim: Annotated[int, typer.Option(min=1, help="Columns of a table.")] = 64,
    pooling: Annotated[str, typer.Option(help="Values in a bag; several with commas.")] = "1,4",
    link: Annotated[str, typer.Option(help="CPU: the emulated link, such as 250MB/s,20us. Unset: 1 GB/s.")] = "",
    rounds: Annotated[int, typer.Option(min=3, help="Calls of each strategy.")] = 15,
    out: Annotated[Path | None, typer.Option(help="All times as JSON.")] = None,
) -> None:
    """Pooled lookups whose rows travel: every strategy, checked, beside the lookup and the All-to-All alone."""
    from ..errors import InvalidArgument
    from ..fabric.cpu_lanes import Pace
    from ..fabric.local_ranks import default_ranks, resolve_device
    from ..report.embedding_bench import LOOKUP, Shape, measure
    from ..report.room import check_room
    from ..report.tables import seconds, show

    if out is not None:
        check_writable(out)
    counts = pooling.split(",")
    if not all(one.strip().isdigit() and int(one) > 0 for one in counts):
        raise InvalidArgument(argument="--pooling", was=repr(pooling), must="counts of at least 1, such as 1,10,70")
    chosen = default_ranks(device.value) if ranks is None else ranks
    if resolve_device(device.value) == "cpu":
        looked = batch * chosen * tables * sum(map(int, counts)) * 8  # indices of all samples
        size = 4 * (tables * rows * dim + 3 * batch * chosen * tables * dim) + looked
        what = f"{tables} tables of {rows} x {dim}, {batch} samples"
        check_room("the problem", what, chosen, size)
    shapes = [Shape(batch, tables, rows, dim, int(one)) for one in counts]
    found = measure(chosen, device.value, shapes, rounds, Pace.parse(link))
    wrong = sorted({name for one in found for name in one.wrong})
    if wrong:
        typer.echo(f"Wrong results: {', '.join(wrong)}.", err=True)
        raise typer.Exit(1)
    for one in found:
        show(one.render())
        alone = ", ".join(
            f"{name} {seconds(one.comparison.estimate(name))}"
            for name in one.comparison.names if name == LOOKUP or name.startswith("all_to_all:")
        )  # fmt: skip
        typer.echo(f"Alone: {alone}.")
        best = max((row for row in one.rows if row.speedup is not None), key=lambda row: row.speedup.median)  # type: ignore[union-attr]
        reduction = 1 - 1 / best.speedup.median  # type: ignore[union-attr]
        less = "less" if reduction >= 0 else "more"
        typer.echo(f"{best.name} takes {abs(reduction):.0%} {less} time than serial over the same link.")
    for label, words in found[0].links.items():
        typer.echo(f"{label}: {words}.")
    if out is not None:
        import json

        out.write_text(json.dumps([one.comparison.to_json() for one in found], indent=1, default=str) + "\n")
