"""`undertow collective`: check, compile, show, run and time collective programs and schedule files."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidArgument
from .options import Device, check_writable

if TYPE_CHECKING:
    from ..collective.schedule import Schedule
    from ..report.collective import Request, Verdict

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str | int) -> int:
    """Bytes: a whole number with K, M or G behind it or not."""
    said = str(text).strip().upper().removesuffix("B")
    digits = said.rstrip("KMG")
    unit = said.removeprefix(digits)
    if not digits.isascii() or not digits.isdigit() or unit not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size; write 4096, 64K, 16M or 1G.")
    return int(digits) * _UNITS[unit]


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
_TARGETS = "staged: through slots at the receiver. direct: into each other's buffers."
BothTargetsOption = Annotated[Target, typer.Option("--target", help=_TARGETS)]
OneTargetOption = Annotated[OneTarget, typer.Option("--target", help=_TARGETS)]
NodesOption = Annotated[int, typer.Option(min=1, help="Nodes, with equally many ranks.", rich_help_panel=_COMPILING)]
SlotsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Messages that a staged connection may hold. Unset: 2, or as a file's protocol.",
        rich_help_panel=_COMPILING,
    ),
]
DepthOption = Annotated[
    int, typer.Option(min=1, help="Iterations under way before scratch is used again.", rich_help_panel=_COMPILING)
]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Of a rank. Unset: as the program asks.", rich_help_panel=_COMPILING)
]
InstancesOption = Annotated[
    int, typer.Option(min=1, help="Of the program, each on its part of every chunk.", rich_help_panel=_COMPILING)
]
TypeOption = Annotated[Type, typer.Option(help="Type of the elements.")]
CpuOption = Annotated[Device, typer.Option(help="Only the CPU so far.")]

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
    verdicts = []
    for width, verdict in _verdicts(
        program, ranks, nodes, root, _targets(target), in_place, slots, depth, workers, instances, search_slots=True
    ):
        typer.echo(verdict.line(width))
        verdicts.append(verdict)
    refused = sum(not one.right for one in verdicts)
    if refused:
        typer.echo(f"{refused} of {len(verdicts)} are refused.", err=True)
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
    in_place: Annotated[bool, typer.Option("--in-place/--out-of-place")] = False,
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
    schedules = _compiled(
        program, ranks, nodes, root, chosen.value, in_place, slots, depth, workers, instances
    )  # fmt: skip
    for schedule in schedules:
        for line in [headline(schedule)] if out is not None else listing(schedule, rank):
            typer.echo(line)
    if out is not None:
        text = (
            to_json(schedules) if written is Format.undertow else _foreign_text(schedules, program, written, protocol)
        )
        out.write_text(text)


@app.command()
def show(
    program: ProgramArgument,
    ranks: RanksOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="An SVG file, instead of the terminal.")] = None,
    columns: Annotated[int, typer.Option(min=8, help="Of the terminal.")] = 100,
    in_place: Annotated[bool, typer.Option("--in-place/--out-of-place")] = False,
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
    schedules = _compiled(program, ranks, nodes, root, target.value, in_place, None, 2, workers, 1)
    if out is not None:
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
    found = list(
        _verdicts(
            program,
            ranks,
            nodes,
            root,
            _targets(target),
            in_place,
            slots,
            depth,
            workers,
            instances,
            search_slots=False,
        )
    )
    width, verdicts = found[0][0], [one for _, one in found]
    for verdict in verdicts:
        if not verdict.right:
            typer.echo(verdict.line(width))
    outcomes = run_once([one.schedule for one in verdicts if one.schedule is not None], nbytes, dtype.value)
    for outcome in outcomes:
        typer.echo(outcome.line(width))
    bad = sum(not one.right for one in verdicts) + sum(one.wrong > 0 for one in outcomes)
    if bad:
        typer.echo(f"{bad} of {len(verdicts)} are refused or wrong.", err=True)
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
    iterations: Annotated[int, typer.Option(min=0, help="Calls that are timed together. 0: by size.")] = 0,
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
            _check_ranks(ranks, entries[-1].contract.ranks)
            continue
        request = _request(ranks, nodes, root, (target.value,), in_place, slots, depth, workers, instances)
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


def _request(
    ranks: int | None,
    nodes: int,
    root: int,
    targets: tuple[str, ...],
    in_place: bool | None,
    slots: int | None,
    depth: int,
    workers: int | None,
    instances: int,
) -> Request:
    from ..collective.compiler import SLOTS
    from ..report.collective import Request

    if ranks is None:
        raise typer.BadParameter("a program needs to know how many ranks.", param_hint="--ranks")
    return Request(ranks, nodes, root, targets, in_place, slots or SLOTS, depth, workers, instances)


def _check_ranks(asked: int | None, held: int) -> None:
    if asked is not None and asked != held:
        raise InvalidArgument(argument="--ranks", was=asked, must=f"{held} or left out, as the file is for {held}")


def _verdicts(
    target: str,
    ranks: int | None,
    nodes: int,
    root: int,
    targets: tuple[str, ...],
    in_place: bool | None,
    slots: int | None,
    depth: int,
    workers: int | None,
    instances: int,
    search_slots: bool,
) -> Iterator[tuple[int, Verdict]]:
    """On every form of what `target` names, be it a program or a schedule file; with the width of the longest name."""
    from ..collective.loading import is_schedule_file, load
    from ..report.collective import check
    from ..report.collective_files import check_file

    if is_schedule_file(target):
        for verdict in check_file(target, in_place, slots, search_slots):
            if verdict.ranks:
                _check_ranks(ranks, verdict.ranks)
            yield len(verdict.program), verdict
        return
    request = _request(ranks, nodes, root, targets, in_place, slots, depth, workers, instances)
    programs = load(target)
    width = max(len(one.name) for one in programs)
    for verdict in check(programs, request, search_slots):
        yield width, verdict


def _compiled(
    target: str,
    ranks: int | None,
    nodes: int,
    root: int,
    kind: str,
    in_place: bool,
    slots: int | None,
    depth: int,
    workers: int | None,
    instances: int,
) -> list[Schedule]:
    """What `target` names as schedules, checked; of a file, the first form it is for."""
    from ..collective.checker import check
    from ..collective.loading import is_schedule_file, load

    if is_schedule_file(target):
        from ..collective.formats import read

        schedules = list(read(target, slots).schedules[:1])
        _check_ranks(ranks, schedules[0].ranks)
        for one in schedules:
            check(one)
        return schedules
    request = _request(ranks, nodes, root, (kind,), in_place, slots, depth, workers, instances)
    return [request.compile(request.trace(one), kind, in_place) for one in load(target)]


def _foreign_text(schedules: list[Schedule], target: str, written: Format, protocol: Protocol | None) -> str:
    from dataclasses import replace

    from ..collective.formats import JSON, XML, read, text
    from ..collective.formats.msccl import Algorithm, Facts
    from ..collective.loading import is_schedule_file

    if len(schedules) != 1:
        must = f"one program: {target} makes {len(schedules)}, and such a file holds one schedule"
        raise InvalidArgument(argument="target", was=target, must=must)
    like = read(target) if is_schedule_file(target) else None
    suffix = XML if written is Format.msccl else JSON
    facts = like.source.facts if like is not None and isinstance(like.source, Algorithm) else None
    if protocol is not None:
        facts = replace(facts or Facts(), protocol=protocol.value)
    return text(schedules[0], suffix, like, facts)
