"""`undertow collective`: check, compile, show, run and time collective programs and schedule files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .collective_targets import Form, check_ranks, compiled, foreign_text, verdicts
from .options import Device, check_writable

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_BYTES = 1 << 50
_MOST = 1 << 16  # as collective.compiler has it, which must not be loaded for a look at the options


def size(text: str | int) -> int:
    """Bytes: a whole number with K, M or G behind it or not."""
    said = str(text).strip().upper().removesuffix("B")
    digits = said.rstrip("KMG")
    unit = said.removeprefix(digits)
    if not digits.isascii() or not digits.isdigit() or unit not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size; write 4096, 64K, 16M or 1G.")
    nbytes = int(digits) * _UNITS[unit]
    if nbytes > _MOST_BYTES:
        raise typer.BadParameter(f"{text!r} is more than {_MOST_BYTES >> 30}G, the largest size.")
    return nbytes


class Target(StrEnum):
    """Which kind of schedule."""

    staged = "staged"
    direct = "direct"
    both = "both"


class OneTarget(StrEnum):
    """Which kind of schedule, where only one can be meant."""

    staged = "staged"
    direct = "direct"


class Type(StrEnum):
    """Of the elements."""

    float32 = "float32"
    float64 = "float64"
    float16 = "float16"
    bfloat16 = "bfloat16"
    int64 = "int64"
    int32 = "int32"
    int16 = "int16"
    int8 = "int8"
    uint8 = "uint8"


class Reduction(StrEnum):
    """What is done with elements that meet."""

    sum = "sum"
    max = "max"
    min = "min"


class Protocol(StrEnum):
    """Of MSCCL: how messages are sent, and how many a connection holds."""

    Simple = "Simple"
    LL = "LL"
    LL128 = "LL128"


class Format(StrEnum):
    """Of what is written."""

    undertow = "undertow"
    msccl = "msccl"
    mscclpp = "mscclpp"


class Rival(StrEnum):
    """Whom to measure against."""

    gloo = "gloo"


_COMPILING = "How it is compiled"
ProgramArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="FILE.py, FILE.py:NAME, FILE.xml, FILE.json, or a program of the library."),
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", "-n", min=1, help="How many ranks. Schedule files are for as many as they say.")
]
RootOption = Annotated[int, typer.Option(min=0, help="Of broadcast, reduce, gather and scatter.")]
FormOption = Annotated[
    bool | None, typer.Option("--in-place/--out-of-place", help="Unset: both, where the program has both.")
]
OneFormOption = Annotated[
    bool | None,
    typer.Option("--in-place/--out-of-place", help="Unset: programs out of place, files as they say."),
]
_TARGETS = "staged: through slots at the receiver. direct: into each other's buffers."
BothTargetsOption = Annotated[Target, typer.Option("--target", help=_TARGETS)]
OneTargetOption = Annotated[OneTarget, typer.Option("--target", help=_TARGETS)]
NodesOption = Annotated[int, typer.Option(min=1, help="Nodes, with equally many ranks.", rich_help_panel=_COMPILING)]
SlotsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=_MOST,
        help="Messages that a staged connection may hold. Unset: 2, or as a file's protocol.",
        rich_help_panel=_COMPILING,
    ),
]
DepthOption = Annotated[
    int,
    typer.Option(
        min=1, max=_MOST, help="Iterations under way before scratch is used again.", rich_help_panel=_COMPILING
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, max=_MOST, help="Of a rank. Unset: as the program asks.", rich_help_panel=_COMPILING),
]
InstancesOption = Annotated[
    int,
    typer.Option(min=1, max=_MOST, help="Of the program, each on its part of every chunk.", rich_help_panel=_COMPILING),
]
TypeOption = Annotated[Type, typer.Option(help="Type of the elements.")]
CpuOption = Annotated[Device, typer.Option(help="These commands start CPU ranks only.")]

app = typer.Typer(
    help="Check, compile, show, run and time collective programs and schedule files.", no_args_is_help=True
)


@app.command()
def check(
    program: ProgramArgument,
    ranks: RanksOption = None,
    in_place: FormOption = None,
    target: BothTargetsOption = Target.both,
    root: RootOption = 0,
    nodes: NodesOption = 1,
    slots: SlotsOption = None,
    depth: DepthOption = 2,
    workers: WorkersOption = None,
    instances: InstancesOption = 1,
) -> None:
    """Say of every form of a program whether it is right in every order of events, or what is wrong and where."""
    form = Form(ranks, nodes, root, _targets(target), in_place, slots, depth, workers, instances)
    found = []
    for width, verdict in verdicts(program, form):
        typer.echo(verdict.line(width))
        found.append(verdict)
    refused = sum(not one.right for one in found)
    if refused:
        typer.echo(f"{refused} of {len(found)} are refused.", err=True)
        raise typer.Exit(1)


@app.command("compile")
def compile_(
    program: ProgramArgument,
    ranks: RanksOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="All of it in a file, instead of a listing.")] = None,
    format_: Annotated[
        Format | None, typer.Option("--format", help="Of the file. Unset: msccl for .xml, else undertow's own JSON.")
    ] = None,
    protocol: Annotated[Protocol | None, typer.Option(help="For msccl. Unset: Simple, or as in the file.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="Whose part is listed.")] = 0,
    in_place: OneFormOption = None,
    target: Annotated[
        OneTarget | None, typer.Option("--target", help=f"{_TARGETS} Unset: staged; direct for mscclpp.")
    ] = None,
    root: RootOption = 0,
    nodes: NodesOption = 1,
    slots: SlotsOption = None,
    depth: DepthOption = 2,
    workers: WorkersOption = None,
    instances: InstancesOption = 1,
) -> None:
    """List the schedule of one rank: what each worker waits for, moves and posts, with the lines of the program."""
    from ..report.collective import headline, listing, to_json

    written = format_ or (Format.msccl if out is not None and out.suffix == ".xml" else Format.undertow)
    if out is not None:
        check_writable(out)
    chosen = target or (OneTarget.direct if written is Format.mscclpp else OneTarget.staged)
    form = Form(ranks, nodes, root, (chosen.value,), in_place, slots, depth, workers, instances)
    schedules = compiled(program, form)
    for schedule in schedules:
        for line in [headline(schedule)] if out is not None else listing(schedule, rank):
            typer.echo(line)
    if out is not None:
        if written is Format.undertow:
            text = to_json(schedules)
        else:
            suffix = ".xml" if written is Format.msccl else ".json"
            text = foreign_text(schedules, program, suffix, None if protocol is None else protocol.value, in_place)
        out.write_text(text)


@app.command()
def show(
    program: ProgramArgument,
    ranks: RanksOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="An SVG file, or an HTML page that moves, instead of the terminal."),
    ] = None,
    columns: Annotated[int, typer.Option(min=8, help="Of the terminal.")] = 100,
    in_place: OneFormOption = None,
    target: OneTargetOption = OneTarget.staged,
    root: RootOption = 0,
    nodes: NodesOption = 1,
    workers: WorkersOption = None,
) -> None:
    """Draw which chunk goes where and when: ranks as rows, time to the right, colours by chunk."""
    import sys

    from ..report.collective_picture import flow, svg, terminal

    if out is not None:
        check_writable(out)
    schedules = compiled(program, Form(ranks, nodes, root, (target.value,), in_place, workers=workers))
    if out is not None:
        if out.suffix == ".html":
            from ..report.page import page
            from ..report.page_files import schedule_section

            out.write_text(page(schedules[0].name, [schedule_section(schedules[0])]), encoding="utf-8")
        else:
            out.write_text(svg(flow(schedules[0])))
        typer.echo(f"{out}: {schedules[0].name}")
        return
    for schedule in schedules:
        for line in terminal(flow(schedule), columns, sys.stdout.isatty()):
            typer.echo(line)


@app.command()
def run(
    program: ProgramArgument,
    ranks: RanksOption = None,
    nbytes: Annotated[
        int, typer.Option("--bytes", metavar="SIZE", parser=size, show_default="1M", help="Of the longest buffer.")
    ] = 1 << 20,
    dtype: TypeOption = Type.float32,
    device: CpuOption = Device.cpu,
    in_place: FormOption = None,
    target: BothTargetsOption = Target.both,
    root: RootOption = 0,
    nodes: NodesOption = 1,
    slots: SlotsOption = None,
    depth: DepthOption = 2,
    workers: WorkersOption = None,
    instances: InstancesOption = 1,
) -> None:
    """Run every form of a program on ranks of this machine, and compare each element with what it must be."""
    from ..report.collective_runs import check_device, run_once

    check_device(device.value)
    form = Form(ranks, nodes, root, _targets(target), in_place, slots, depth, workers, instances)
    judged = list(verdicts(program, form, search_slots=False))
    width, found = judged[0][0], [one for _, one in judged]
    for verdict in found:
        if not verdict.right:
            typer.echo(verdict.line(width))
    outcomes = run_once([one.schedule for one in found if one.schedule is not None], nbytes, dtype.value)
    for outcome in outcomes:
        typer.echo(outcome.line(width))
    bad = sum(not one.right for one in found) + sum(one.wrong > 0 for one in outcomes)
    if bad:
        typer.echo(f"{bad} of {len(found)} are refused or wrong.", err=True)
        raise typer.Exit(1)


@app.command()
def bench(
    programs: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="As for the others, or a collective, for the library's own choice."),
    ],
    ranks: RanksOption = None,
    min_bytes: Annotated[int, typer.Option(metavar="SIZE", parser=size, show_default="1K", help="First size.")] = 1024,
    max_bytes: Annotated[int, typer.Option(metavar="SIZE", parser=size, show_default="64M", help="Largest size.")] = 64
    << 20,
    factor: Annotated[int, typer.Option(min=2, help="From one size to the next.")] = 4,
    dtype: TypeOption = Type.float32,
    op: Annotated[Reduction, typer.Option(help="Of collectives that reduce.")] = Reduction.sum,
    iterations: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Calls that are timed together. 0: by size.")
    ] = 0,
    against: Annotated[Rival | None, typer.Option(help="Measure this too, in turns.")] = None,
    device: CpuOption = Device.cpu,
    in_place: FormOption = None,
    target: OneTargetOption = OneTarget.staged,
    root: RootOption = 0,
    nodes: NodesOption = 1,
    slots: SlotsOption = None,
    depth: DepthOption = 2,
    workers: WorkersOption = None,
    instances: InstancesOption = 1,
) -> None:
    """Time programs and collectives over a range of sizes, in the columns of nccl-tests."""
    from ..collective.loading import is_schedule_file, load
    from ..report.collective_bench import (
        CALL_FORMS,
        Sweep,
        bench,
        entry_for,
        entry_for_call,
        entry_for_file,
        table,
        wrong_elements,
    )
    from ..report.collective_runs import check_device

    check_device(device.value)
    entries = []
    for one in programs:
        if is_schedule_file(one):
            entries.append(entry_for_file(one, in_place, slots))
            check_ranks(ranks, entries[-1].contract.ranks)
            continue
        form = Form(ranks, nodes, root, (target.value,), in_place, slots, depth, workers, instances)
        request = form.request()
        if one in CALL_FORMS:
            entries.append(entry_for_call(one, request))
        else:
            entries += [entry_for(program, request) for program in load(one)]
    sweep = Sweep(min_bytes, max_bytes, factor, dtype.value, op.value, iterations, against is not None)
    tables = bench(entries, sweep, progress=True)
    for entry, rows in zip(entries, tables, strict=True):
        for line in table(entry, rows, sweep):
            typer.echo(line)
    if wrong_elements(tables):
        typer.echo("Some elements are wrong.", err=True)
        raise typer.Exit(1)


def _targets(chosen: Target) -> tuple[str, ...]:
    return ("staged", "direct") if chosen is Target.both else (chosen.value,)
