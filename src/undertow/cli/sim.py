"""`undertow sim`: programs, steps and traces on machines that need not be here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from .collective import size
from .options import check_writable

_MOST_SCALES = 64


def sim(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="dlrm, transformer, a collective, a program, FILE.py, FILE.toml, FILE.et, PREFIX; 'list' names them.",
        ),
    ],
    machine: Annotated[str, typer.Option(help="A shipped machine or a TOML file; 'list' names them.")] = "h100x8",
    lane: Annotated[
        str, typer.Option(help="Who moves the bytes: net (kernels) or dma (copy engines, where the machine has some).")
    ] = "net",
    sweep: Annotated[str, typer.Option(help="nodes=8..1024 (doubling) or nodes=1,2,5. Unset: as the machine is.")] = "",
    nbytes: Annotated[
        int,
        typer.Option("--size", parser=size, metavar="SIZE", show_default="64M", help="Bytes of a collective."),
    ] = 64 << 20,
    tile: Annotated[
        int | None, typer.Option(parser=size, metavar="SIZE", help="Bytes of a chunk that move at a time. Unset: all.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the fastest strategy at the last scale as a trace that Perfetto opens.")
    ] = None,
    chakra: Annotated[str, typer.Option(metavar="PREFIX", help="Write that step as a Chakra trace, PREFIX.0.et.")] = "",
    why: Annotated[bool, typer.Option("--why", help="What would make it faster?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs instead of people.")] = False,
) -> None:
    """Simulate a collective, a training step or a trace, and compare strategies at each scale."""
    from ..errors import InvalidArgument, UndertowError
    from ..report.progress import progress_bar
    from ..report.simulation import Line, gains_table, lines_to_json, scale_table
    from ..report.tables import show
    from ..sim import chakra as chakra_files
    from ..sim.cluster import Cluster, shipped_names
    from ..sim.collectives import Collectives
    from ..sim.targets import Answer, find, fits, names
    from ..sim.what_if import what_if

    if "list" in (machine, target):
        if target == "list":
            typer.echo("Targets, and their strategies:")
            for name, strategies in names().items():
                typer.echo(f"  {name:16} {strategies}")
            typer.echo("Machines:")
        for name in shipped_names():
            typer.echo(f"  {name:16} {Cluster.load(name).description}")
        return
    if lane not in ("net", "dma"):
        raise InvalidArgument(argument="--lane", was=repr(lane), must="net or dma")
    cluster = Cluster.load(machine)
    if lane == "dma":
        cluster = cluster.by_engines()
    scales = [cluster.shape.nodes] if not sweep else nodes_of(sweep)
    chosen = find(target, nbytes, tile)
    if timeline is not None:
        check_writable(timeline, "--timeline")
    if chakra:
        check_writable(Path(f"{chakra}.0.et"), "--chakra")
    lines: list[Line] = []
    best: tuple[float, str, Answer] | None = None  # of the largest scale that runs
    here: tuple[float, str, Answer] | None
    at = cluster
    with progress_bar(shown=True) as report:
        total = len(scales) * len(chosen.strategies)
        for nodes in scales:
            scaled = cluster if nodes == cluster.shape.nodes else cluster.scaled(nodes)
            known, here = Collectives(scaled), None
            for name, run in chosen.strategies.items():
                report(f"{name}, {scaled.ranks} ranks", len(lines) / total)
                found = fits(lambda run=run, scaled=scaled, known=known: run(scaled, known))  # type: ignore[misc]
                if isinstance(found, UndertowError):
                    if total == 1:
                        raise found
                    lines.append(Line(nodes, scaled.ranks, name, None, {}, str(found)))
                    continue
                lines.append(Line(nodes, scaled.ranks, name, found.seconds, found.resources))
                if here is None or found.seconds < here[0]:
                    here = found.seconds, name, found
            if here is not None:
                best, at = here, scaled
    if best is None:
        raise InvalidArgument(
            argument="target",
            was=repr(target),
            must=f"one that runs on {machine}: {str(lines[-1].problem).rstrip('.')}",
        )
    gains = []
    if why:
        run = chosen.strategies[best[1]]
        gains = what_if(at, lambda other: run(other, Collectives(other)).seconds)
    if as_json:
        found_gains = [{"what": gain.what, "speedup": gain.speedup} for gain in gains]
        typer.echo(
            json.dumps({"machine": cluster.name, "lines": lines_to_json(lines), "what_if": found_gains}, indent=1)
        )
    else:
        show(scale_table(f"{chosen.name} on {cluster.name}: {cluster.description}", lines))
        if gains:
            show(gains_table(f"{best[1]} at {at.ranks} ranks", gains))
    if timeline is not None:
        best[2].timeline().save(timeline)
        typer.echo(f"The timeline is {timeline}.", err=as_json)
    if chakra:
        if best[2].outcome is None:
            raise InvalidArgument(argument="--chakra", was=repr(chakra), must="unset for a program: it has no step")
        path = Path(f"{chakra}.0.et")
        chakra_files.write(path, chakra_files.from_outcome(best[2].outcome, at))
        typer.echo(f"The trace is {path}.", err=as_json)


def nodes_of(text: str) -> list[int]:
    """`nodes=8..1024` as 8, 16, 32, ...; `nodes=1,2,5` as it stands."""
    from ..errors import InvalidArgument

    doubling = re.fullmatch(r"nodes=(\d{1,12})\.\.(\d{1,12})", text)
    listed = re.fullmatch(r"nodes=(\d{1,12}(?:,\d{1,12})*)", text)
    found: list[int] = []
    if doubling:
        at, last = int(doubling[1]), int(doubling[2])
        while 0 < at <= last and len(found) <= _MOST_SCALES:
            found.append(at)
            at *= 2
    elif listed:
        found = [int(one) for one in listed[1].split(",")]
    if not found or min(found) < 1 or len(found) > _MOST_SCALES:
        must = "nodes=LOW..HIGH or nodes=N,N,..., numbers of at least 1"
        raise InvalidArgument(argument="--sweep", was=repr(text), must=must)
    return found
