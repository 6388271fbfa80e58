"""Tables by size, made: every program that could run a collective, in turns, at every size; the fastest is kept.

Candidates are the library's programs for the collective and the user's, each with staged tiles of several lengths. Only
programs that can take whatever call comes are: in every form the call has, and with spans of any lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from ..collective import tables
from ..collective.algorithms import LIBRARY
from ..collective.language import Program
from ..collective.tables import Row
from ..errors import InvalidArgument, ProgramRefused
from .collective import Request
from .collective_bench import CALL_FORMS, UNDERTOW, Entry, Sweep, bench, entry_for

STRIDES = (64 << 10, 128 << 10, 256 << 10)
IN_PLACE = ("all_reduce", "broadcast")  # what `collective.operators` runs in place


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A program with tiles of one length."""

    program: Program
    entry: Entry

    @property
    def name(self) -> str:
        return f"{self.program.name} in tiles of {self.entry.stride >> 10} KB"


@dataclass(frozen=True, slots=True)
class Found:
    """The best at one size, and the best of the library."""

    nbytes: int
    best: Candidate
    library: Candidate
    seconds: float
    library_seconds: float


def tune(
    collective: str, ranks: int, own: Sequence[Program], sweep: Sweep, progress: bool = False
) -> tuple[list[Found], list[str]]:
    """What was found at each size, and a sentence for each of the user's programs that cannot be a candidate."""
    if collective not in CALL_FORMS:
        raise InvalidArgument(argument="collective", was=repr(collective), must=f"one of {', '.join(CALL_FORMS)}")
    refused: list[str] = []
    measured = list(candidates(collective, ranks, own, refused.append))
    if not measured:
        raise InvalidArgument(argument="--ranks", was=ranks, must="so few that a program of the library takes them")
    rows = bench([one.entry for one in measured], sweep, progress)
    found = []
    for step, nbytes in enumerate(sweep.sizes()):
        times = {one: rows[at][step] for at, one in enumerate(measured)}
        right = {one: row for one, row in times.items() if all(cell.wrong == 0 for cell in row.cells.values())}
        seconds = {one: row.cells[UNDERTOW, collective in IN_PLACE].seconds for one, row in right.items()}
        best = min(seconds, key=lambda one: seconds[one])
        library = min((one for one in seconds if _is_library(one.program)), key=lambda one: seconds[one])
        found.append(Found(nbytes, best, library, seconds[best], seconds[library]))
    return found, refused


def rows_of(collective: str, ranks: int, found: Sequence[Found]) -> list[Row]:
    """Rows of a table: a size stands for what is nearer to it than to its neighbours, on a scale of factors.

    A table counts the sum of a call's spans, which is what the longest buffer has, but of an all_to_all all ranks' do.
    """
    rows: list[Row] = []
    for at, one in enumerate(found):
        scale = ranks if collective == "all_to_all" else 1
        last = at + 1 == len(found)
        up_to = None if last else int(sqrt(one.nbytes * found[at + 1].nbytes)) * scale
        row = Row(
            up_to, one.best.program.name, one.best.program.signature, one.best.entry.stride, one.library.program.name,
            one.library.entry.stride, one.seconds,
        )  # fmt: skip
        if rows and replace(rows[-1], up_to=None, seconds=0.0) == replace(row, up_to=None, seconds=0.0):
            rows.pop()
        rows.append(row)
    return rows


def keep(collective: str, ranks: int, found: Sequence[Found]) -> str:
    """Write the table; where it lies."""
    return str(tables.store("cpu", ranks, {collective: rows_of(collective, ranks, found)}))


def candidates(
    collective: str, ranks: int, own: Sequence[Program], refuse: Callable[[str], None]
) -> Iterator[Candidate]:
    """The library's and the user's `own`; `refuse` is told a sentence for each of those that cannot be one."""
    asked = [one for one in own if not _is_library(one) or one.collective != collective]  # the library's come anyway
    for program in (*(one for one in LIBRARY.values() if one.collective == collective), *asked):
        try:
            entry = _entry(program, collective, ranks)
        except (ProgramRefused, InvalidArgument) as error:
            if program in asked:
                refuse(f"{program.name} is left out: {error}")
            continue
        for stride in STRIDES:
            yield Candidate(program, replace(entry, stride=stride))


def _entry(program: Program, collective: str, ranks: int) -> Entry:
    """In the form that is timed; the others are compiled, too, and must be right."""
    if program.collective != collective:
        was, must = f"for {program.collective}", f"for {collective}"
        raise InvalidArgument(argument="program", was=was, must=must)
    timed = collective in IN_PLACE
    made = {}
    for in_place in {timed, *(() if collective == "broadcast" else (False,))}:
        made[in_place] = entry_for(program, Request(ranks, 1, 0, ("staged",), in_place))
        for schedule in made[in_place].schedules.values():
            if len(schedule.misplaced):
                was = f"{program.name}, which takes spans of equal lengths only"
                raise InvalidArgument(argument="program", was=was, must="one that takes any call")
    return made[timed]


def _is_library(program: Program) -> bool:
    return LIBRARY.get(program.name) is program
