"""`undertow plan`: what the planner knows, and measuring one problem ahead of time."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from .options import Device, DeviceOption, RanksOption

app = typer.Typer(help="Show, clear and make the plans that strategy 'auto' runs.", no_args_is_help=True)


class Operator(StrEnum):
    """What can be planned."""

    matmul_all_reduce = "matmul_all_reduce"
    matmul_reduce_scatter = "matmul_reduce_scatter"
    all_gather_matmul = "all_gather_matmul"
    matmul_all_to_all = "matmul_all_to_all"
    all_to_all_matmul = "all_to_all_matmul"


class Type(StrEnum):
    """Of the elements."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


ContainingArgument = Annotated[str, typer.Argument(metavar="TEXT", help="Only files whose names contain it.")]


@app.command("show")
def show_plans(
    containing: ContainingArgument = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs instead of people.")] = False,
) -> None:
    """Show the plans on disk."""
    from ..plan import cache
    from ..report.plans import cache_to_json, render_cache
    from ..report.tables import show

    found = [(path, entry) for path, entry in cache.show() if containing in path.name]
    if as_json:
        typer.echo(json.dumps(cache_to_json(found), indent=1))
        return
    if found:
        show(render_cache(found))
    typer.echo(f"{'They are' if found else 'There are no such plans'} in {cache.folder()}.")


@app.command("clear")
def clear_plans(containing: ContainingArgument = "") -> None:
    """Remove the plans on disk, all of them or some."""
    from ..plan import cache

    removed = cache.clear(containing)
    typer.echo(f"{removed} plan{'s were' if removed != 1 else ' was'} removed from {cache.folder()}.")


@app.command("tune")
def tune_plan(
    operator: Annotated[Operator, typer.Argument(help="Which operator.")],
    m: Annotated[int, typer.Option("--m", min=1, help="Rows: of all_gather_matmul in all, else on each rank.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Columns on each rank.")],
    k: Annotated[int, typer.Option("--k", min=1, help="Inner size on each rank.")],
    dtype: Annotated[Type, typer.Option(help="Of the elements.")] = Type.float32,
    ranks: RanksOption = None,
    device: DeviceOption = Device.auto,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long to measure.")] = 2.0,
    experts: Annotated[int, typer.Option(min=1, help="Weights of each rank, of rows that change ranks.")] = 1,
) -> None:
    """Measure one problem with patience and keep the plan for later calls."""
    if experts > 1 and operator not in (Operator.matmul_all_to_all, Operator.all_to_all_matmul):
        raise typer.BadParameter(
            f"must be 1 for {operator.value}, whose rows all have one weight", param_hint="experts"
        )
    from ..fabric.launch import launch
    from ..fabric.local_ranks import default_ranks, resolve_device
    from ..plan import cache
    from ..plan.problem import ITEM_SIZES
    from ..report.plans import render_choice, tune_rank
    from ..report.room import check_room
    from ..report.tables import show

    chosen = default_ranks(device.value) if ranks is None else ranks
    if resolve_device(device.value) == "cpu":
        numbers = m * k + experts * k * n + 2 * m * n
        check_room("the problem", f"{m} x {n} x {k}", chosen, numbers * ITEM_SIZES[dtype.value])
    arguments = (operator.value, m, n, k, dtype.value, seconds, experts)
    before = _written()
    found = launch(tune_rank, chosen, device.value, args=arguments)[0]
    show(render_choice(found, f"{operator.value}, {found.shape}, {chosen} ranks"))
    for line in str(found.choice).splitlines():
        typer.echo(line)
    if _written() == before:
        typer.echo(f"The plan is not kept: nothing could be written to {cache.folder()}.", err=True)
        raise typer.Exit(1)
    typer.echo(f"The plan is kept in {cache.folder()}.")


def _written() -> set[tuple[str, int]]:
    """The plans on disk, and when each was written."""
    from ..plan import cache

    return {(path.name, path.stat().st_mtime_ns) for path, _ in cache.show()}
