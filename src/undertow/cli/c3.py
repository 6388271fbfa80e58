"""`undertow c3`: how computation and communication disturb each other here, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .collective import size
from .options import Device, DeviceOption, RanksOption, check_writable

app = typer.Typer(help="Computation beside communication: measure it, and ask for advice.", no_args_is_help=True)
_PACE = "500MB/s"  # of the CPU's dma lane, where nobody says otherwise: memory would be no link


@app.command("run")
def run_c3(
    ranks: RanksOption = None,
    device: DeviceOption = Device.auto,
    compute: Annotated[
        str, typer.Option(help="Of gemm, thin gemm, attention, stream; comma between. Unset: all.")
    ] = "",
    collective: Annotated[
        str, typer.Option(help="Of all_gather, all_to_all, reduce_scatter, all_reduce. Unset: all.")
    ] = "",
    lanes: Annotated[str, typer.Option(help="Of peer, dma. Unset: both.")] = "",
    sizes: Annotated[str, typer.Option(metavar="SIZE,...", help="Bytes of a collective, on every lane.")] = "",
    rounds: Annotated[int, typer.Option(min=3, help="Samples of everything.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Two computations, two collectives, one size.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (SVG).")] = None,
    learn: Annotated[bool, typer.Option("--learn/--no-learn", help="Keep the fitted model for later advice.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="For programs instead of people.")] = False,
) -> None:
    """Run computations and collectives alone and together, under every strategy."""
    import os

    from .. import settings
    from ..c3 import knowledge as known
    from ..c3.characterise import Result
    from ..c3.grids import Order, default_sizes, measure_rank
    from ..c3.workloads import COLLECTIVES, COMPUTATIONS
    from ..errors import InvalidArgument
    from ..fabric.environment import environment
    from ..fabric.launch import launch
    from ..fabric.local_ranks import default_ranks, resolve_device
    from ..report.c3 import judge, mean_table, picture, scenario_table, to_json
    from ..report.room import check_room
    from ..report.tables import show

    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None:
            check_writable(path, option)
    where = resolve_device(device.value)
    chosen = default_ranks(device.value) if ranks is None else ranks
    usual = default_sizes(where)
    by_lane = _chosen("--lanes", lanes, tuple(usual))
    asked = tuple(size(one) for one in sizes.split(",") if one.strip())
    given = {lane: asked or (usual[lane][-1:] if quick else usual[lane]) for lane in by_lane}
    if any(count < 1 for counts in given.values() for count in counts):
        raise InvalidArgument(argument="--sizes", was=sizes, must="of at least 1 byte")
    if where == "cpu":
        most = max(count for counts in given.values() for count in counts)
        check_room("--sizes", f"{most} bytes", chosen, 4 * most)  # what is sent, what comes, and both to compare with
    computations = _chosen(
        "--compute", compute, tuple(COMPUTATIONS)[:2] if quick else tuple(COMPUTATIONS), COMPUTATIONS
    )
    collectives = _chosen("--collective", collective, COLLECTIVES[-2:] if quick else COLLECTIVES, COLLECTIVES)
    order = Order(
        computations=computations, collectives=collectives, sizes=given, rounds=rounds,
        scale=1.0 if where == "cuda" else 8.0, seconds=0.8 if where == "cuda" else 4.0,
    )  # fmt: skip
    environ = {}
    if where == "cpu" and not os.environ.get(settings.DMA_PACE.name):
        environ = {settings.DMA_PACE.name: _PACE}
    told = measure_rank if not as_json else _quietly
    found = [Result.from_json(one) for one in launch(told, chosen, where, args=(order.to_args(),), env=environ)[0]]
    judged = judge(found) if len(found) > 3 else {}
    facts = environment({"ranks": chosen, "device": where, **environ})
    if out is not None:
        out.write_text(json.dumps(to_json(found, judged, facts), indent=1, default=str) + "\n")
    if plot is not None:
        plot.write_text(picture(found, f"{chosen} ranks on {where}"))
    real = found
    if where == "cpu" and (environ or os.environ.get(settings.DMA_PACE.name)):
        real = [one for one in found if one.scenario.lane != "dma"]  # nothing is learnt from a link that is emulated
    kept = None
    if learn and real:
        new = known.learn(real, source=f"learnt from {len(real)} scenario{'s' if len(real) != 1 else ''}")
        before = known.load(where, chosen, new.model.multiprocessors)
        kept = known.save(known.merged(new, before), where, chosen)
    if as_json:
        typer.echo(json.dumps(to_json(found, judged, facts), default=str))
        return
    emulated = f", lane dma emulated at {_PACE}" if environ else ""
    show(
        scenario_table(found, f"{len(found)} scenarios, {chosen} ranks on {where}{emulated}: speed-up, share of ideal")
    )
    show(mean_table(found))
    if judged:
        typer.echo(
            f"The model, fitted on half of the scenarios, is off by {judged['error']:.1%} on the other half; its picks "
            f"reach {judged['of_best']:.1%} of the best strategy's speed-up, and at worst {judged['against_base']:.2f} "
            "of base."
        )
    for said, path in (
        ("The results are in", out),
        ("The picture is", plot),
        ("The model is kept in", kept),
    ):
        if path is not None:
            typer.echo(f"{said} {path}.")


def _quietly(order: dict[str, object]) -> object:
    from ..c3.grids import measure_rank

    return measure_rank(order, lambda result, done, total: None)


@app.command("advise")
def advise_c3(
    compute: Annotated[float, typer.Option("--compute", min=0.0, help="Milliseconds of the computation alone.")],
    collective: Annotated[float, typer.Option("--collective", min=0.0, help="Milliseconds of the collective alone.")],
    by_copies: Annotated[
        float | None, typer.Option("--by-copies", min=0.0, help="Milliseconds of the collective over lane dma.")
    ] = None,
    memory: Annotated[float, typer.Option(min=0.0, max=1.0, help="How much memory bounds the computation.")] = 0.3,
    nbytes: Annotated[
        int, typer.Option("--size", parser=size, metavar="SIZE", show_default="64M", help="Bytes a rank sends.")
    ] = 64 << 20,
    multiprocessors: Annotated[int, typer.Option(min=1, help="SMs (threads) of a rank.")] = 132,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Whose model: learnt with as many.")] = 4,
    device: Annotated[Device, typer.Option(help="Whose strategies.")] = Device.cuda,
    as_json: Annotated[bool, typer.Option("--json", help="For programs instead of people.")] = False,
) -> None:
    """The strategy for a computation beside a collective, from what was learnt here or what is assumed."""
    from ..c3.advice import Side, advise
    from ..c3.knowledge import load
    from ..c3.strategies import Place

    lanes = {"peer": ""} | ({"dma": ""} if by_copies is not None else {})
    seconds = {"peer": collective * 1e-3} | ({"dma": by_copies * 1e-3} if by_copies is not None else {})
    where = "cpu" if device.value == "cpu" else "cuda"
    found = advise(
        Side(compute * 1e-3, memory),
        Side(seconds, nbytes=nbytes),
        place=Place(where, multiprocessors, lanes),
        knowledge=load(where, ranks, multiprocessors),
    )
    typer.echo(json.dumps(found.to_json(), indent=1) if as_json else found.explain())


def _chosen(
    option: str, text: str, usual: tuple[str, ...], possible: tuple[str, ...] | dict[str, float] | None = None
) -> tuple[str, ...]:
    from ..errors import InvalidArgument

    names = tuple(one.strip() for one in text.split(",") if one.strip()) or usual
    allowed = tuple(possible or usual)
    unknown = [one for one in names if one not in allowed]
    if unknown:
        raise InvalidArgument(argument=option, was=repr(unknown[0]), must=f"one of {', '.join(allowed)}")
    return names
