"""`undertow collective`: check, compile, run and time collective programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Device, check_writable

if TYPE_CHECKING:
    from ..collective.language import Program

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


class Rival(StrEnum):
    """Whom to measure against."""

    gloo = "gloo"


_COMPILING = "How it is compiled"
ProgramArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="FILE.py, FILE.py:NAME, or a program of the library.")
]
RanksOption = Annotated[int, typer.Option("--ranks", "-n", min=1, help="How many ranks.")]
RootOption = Annotated[int, typer.Option(min=0, help="Of broadcast, reduce, gather and scatter.")]
FormOption = Annotated[
    bool | None, typer.Option("--in-place/--out-of-place", help="Unset: both, where the program has both.")
]
_TARGETS = "staged: through slots at the receiver. direct: into each other's buffers."
BothTargetsOption = Annotated[Target, typer.Option("--target", help=_TARGETS)]
OneTargetOption = Annotated[OneTarget, typer.Option("--target", help=_TARGETS)]
NodesOption = Annotated[int, typer.Option(min=1, help="Nodes, with equally many ranks.", rich_help_panel=_COMPILING)]
SlotsOption = Annotated[
    int, typer.Option(min=1, help="Messages that a staged connection may hold.", rich_help_panel=_COMPILING)
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

app = typer.Typer(help="Check, compile, run and time collective programs.", no_args_is_help=True)


@app.command()
def check(
    program: ProgramArgument,
    ranks: RanksOption,
    in_place: FormOption = None,
    target: BothTargetsOption = Target.both,
    root: RootOption = 0,
    nodes: NodesOption = 1,
    slots: SlotsOption = 2,
    depth: DepthOption = 2,
    workers: WorkersOption = None,
    instances: InstancesOption = 1,
) -> None:
    """Say of every form of a program whether it is right in every order of events, or what is wrong and where."""
    from ..collective.loading import load
    from ..report.collective import Request, check

    programs = load(program)
    request = Request(ranks, nodes, root, _targets(target), in_place, slots, depth, workers, instances)
    verdicts = []
    for verdict in check(programs, request):
        typer.echo(verdict.line(_width(programs)))
        verdicts.append(verdict)
    refused = sum(not one.right for one in verdicts)
    if refused:
        typer.echo(f"{refused} of {len(verdicts)} are refused.", err=True)
        raise typer.Exit(1)


@app.command("compile")
def compile_(
    program: ProgramArgument,
    ranks: RanksOption,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="All of it as JSON, instead of a listing.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="Whose part is listed.")] = 0,
    in_place: Annotated[bool, typer.Option("--in-place/--out-of-place")] = False,
    target: OneTargetOption = OneTarget.staged,
    root: RootOption = 0,
    nodes: NodesOption = 1,
    slots: SlotsOption = 2,
    depth: DepthOption = 2,
    workers: WorkersOption = None,
    instances: InstancesOption = 1,
) -> None:
    """List the schedule of one rank: what each worker waits for, moves and posts, with the lines of the program."""
    from ..collective.loading import load
    from ..report.collective import Request, headline, listing, to_json

    if out is not None:
        check_writable(out)
    request = Request(ranks, nodes, root, (target.value,), in_place, slots, depth, workers, instances)
    schedules = [request.compile(request.trace(one), target.value, in_place) for one in load(program)]
    for schedule in schedules:
        for line in [headline(schedule)] if out is not None else listing(schedule, rank):
            typer.echo(line)
    if out is not None:
        out.write_text(to_json(schedules))


@app.command()
def run(
    program: ProgramArgument,
    ranks: RanksOption,
    nbytes: Annotated[
        int, typer.Option("--bytes", metavar="SIZE", parser=size, show_default="1M", help="Of the longest buffer.")
    ] = 1 << 20,
    dtype: TypeOption = Type.float32,
    device: CpuOption = Device.cpu,
    in_place: FormOption = None,
    target: BothTargetsOption = Target.both,
    root: RootOption = 0,
    nodes: NodesOption = 1,
    slots: SlotsOption = 2,
    depth: DepthOption = 2,
    workers: WorkersOption = None,
    instances: InstancesOption = 1,
) -> None:
    """Run every form of a program on ranks of this machine, and compare each element with what it must be."""
    from ..collective.loading import load
    from ..report.collective import Request, check
    from ..report.collective_runs import check_device, run_once

    check_device(device.value)
    programs = load(program)
    request = Request(ranks, nodes, root, _targets(target), in_place, slots, depth, workers, instances)
    verdicts = list(check(programs, request, search_slots=False))
    for verdict in verdicts:
        if not verdict.right:
            typer.echo(verdict.line(_width(programs)))
    outcomes = run_once([one.schedule for one in verdicts if one.schedule is not None], nbytes, dtype.value)
    for outcome in outcomes:
        typer.echo(outcome.line(_width(programs)))
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
    ranks: RanksOption,
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
    slots: SlotsOption = 2,
    depth: DepthOption = 2,
    workers: WorkersOption = None,
    instances: InstancesOption = 1,
) -> None:
    """Time programs and collectives over a range of sizes, in the columns of nccl-tests."""
    from ..collective.loading import load
    from ..report.collective import Request
    from ..report.collective_bench import CALL_FORMS, Sweep, bench, entry_for, entry_for_call, table, wrong_elements
    from ..report.collective_runs import check_device

    check_device(device.value)
    request = Request(ranks, nodes, root, (target.value,), in_place, slots, depth, workers, instances)
    entries = []
    for one in programs:
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


def _width(programs: list[Program]) -> int:
    return max(len(one.name) for one in programs)
