"""Collective programs for people: what the checker says of every form, and a schedule as a listing or as JSON."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from ..collective.algorithms import LIBRARY, OUT_OF_PLACE_ONLY
from ..collective.compiler import DEPTH, SLOTS, TARGETS, compile_trace
from ..collective.language import COLUMNS, MOST_OPERATIONS, REDUCE, Program, Trace
from ..collective.loading import trace
from ..collective.schedule import END, MOVE, READY, START, Schedule
from ..collective.topology import Topology
from ..errors import InvalidArgument, ProgramRefused

FORMAT, VERSION = "undertow schedules", 1


@dataclass(frozen=True, slots=True)
class Request:
    """How programs are compiled: for whom, in which forms, with how much of everything.

    `in_place` None asks for both forms where a program has both.
    """

    ranks: int
    nodes: int = 1
    root: int = 0
    targets: tuple[str, ...] = TARGETS
    in_place: bool | None = None
    slots: int = SLOTS
    depth: int = DEPTH
    workers: int | None = None
    instances: int = 1

    def __post_init__(self) -> None:
        if self.ranks > MOST_OPERATIONS:  # before anything of that length is made
            raise InvalidArgument(argument="--ranks", was=self.ranks, must=f"at most {MOST_OPERATIONS}")
        if self.ranks % self.nodes:
            raise InvalidArgument(argument="--nodes", was=self.nodes, must=f"a divisor of the {self.ranks} ranks")

    def trace(self, program: Program) -> Trace:
        """Raises where the program's own code fails or names what does not exist."""
        return trace(program, self.ranks, Topology.grid(self.nodes, self.ranks // self.nodes), self.root)

    def forms(self, program: Program, traced: Trace) -> list[bool]:
        """In place or not: what was asked, or every form that the contract knows and the program is meant for."""
        if self.in_place is not None:
            return [self.in_place]
        apart_only = LIBRARY.get(program.name) is program and program.name in OUT_OF_PLACE_ONLY
        return [False] if traced.contract.in_place is None or apart_only else [False, True]

    def compile(self, traced: Trace, target: str, in_place: bool, slots: int | None = None) -> Schedule:
        """Compile and check."""
        return compile_trace(
            traced, target=target, in_place=in_place, slots=self.slots if slots is None else slots, depth=self.depth,
            workers=self.workers, instances=self.instances,
        )  # fmt: skip


# -- checking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one form of one program. `target` is empty where not even tracing it went well."""

    program: str
    ranks: int
    target: str
    in_place: bool
    schedule: Schedule | None
    seconds: float
    refusal: str = ""
    least_slots: int | None = None
    note: str = ""

    @property
    def right(self) -> bool:
        return not self.refusal

    def line(self, width: int = 0) -> str:
        """One line; a refusal goes on below it, with its trace."""
        cells = [f"{self.program:<{width}}"] + ([ranks_in_words(self.ranks)] if self.ranks else [])
        if self.target:
            cells += [f"{self.target:<{max(map(len, TARGETS))}}", f"{form_in_words(self.in_place):<12}"]
        if self.schedule is not None:
            counts = counts_of(self.schedule)
            cells += [f"{number:>6} {what}" for what, number in counts.items()] + [f"{self.seconds:.3f} s"]
        cells.append("right" if self.right else "refused")
        if self.least_slots is not None:
            cells.append(f"least slots that work: {self.least_slots}")
        if self.note:
            cells.append(self.note)
        return "  ".join(cells) + (f"\n{self.refusal}" if self.refusal else "")


def check(programs: Iterable[Program], request: Request, search_slots: bool = True) -> Iterator[Verdict]:
    """Compile every form of every program that was asked for, and say how it went, one after the other."""
    _warm_up()
    for program in programs:
        try:
            traced = request.trace(program)
        except (ProgramRefused, InvalidArgument) as error:
            yield Verdict(program.name, request.ranks, "", False, None, 0.0, str(error))
            continue
        for target in request.targets:
            for in_place in request.forms(program, traced):
                yield _judge(traced, request, target, in_place, search_slots and target == "staged")


def _judge(traced: Trace, request: Request, target: str, in_place: bool, search_slots: bool) -> Verdict:
    schedule, refusal = None, ""
    began = time.perf_counter()
    try:
        schedule = request.compile(traced, target, in_place)
    except (ProgramRefused, InvalidArgument) as error:
        refusal = str(error)
    seconds = time.perf_counter() - began
    least = None
    if search_slots:
        known = {request.slots: not refusal}

        def accepted(slots: int) -> bool:
            if slots not in known:
                try:
                    request.compile(traced, target, in_place, slots)
                    known[slots] = True
                except (ProgramRefused, InvalidArgument):
                    known[slots] = False
            return known[slots]

        least = least_number(accepted, most_messages(traced))
    return Verdict(traced.name, traced.ranks, target, in_place, schedule, seconds, refusal, least)


def least_number(accepted: Callable[[int], bool], most: int) -> int | None:
    """The least of 1 to `most` that is accepted, where more is never worse; None if even `most` is not."""
    refused, high = 0, 1
    while not accepted(high):
        if not accepted(most):
            return None
        refused, high = high, min(2 * high, most)
    while high - refused > 1:
        middle = (refused + high) // 2
        refused, high = (refused, middle) if accepted(middle) else (middle, high)
    return high


def most_messages(traced: Trace) -> int:
    """Messages of the busiest connection of a staged schedule: with as many slots none waits for another."""
    rows = traced.rows()
    column = {name: rows[:, index].astype(np.int64) for index, name in enumerate(COLUMNS)}
    remote = (column["kind"] <= REDUCE) & (column["source_rank"] != column["rank"])
    if not remote.any():
        return 1
    pair = column["source_rank"][remote] * traced.ranks + column["rank"][remote]
    pieces = np.where(column["parallel"] > 1, column["count"] * column["parallel"], 1)[remote]
    return int(np.bincount(pair, weights=pieces).max())


def _warm_up() -> None:
    """Load the compiled passes and checker, so that no program's time has that in it."""
    for target in TARGETS:
        LIBRARY["one_shot"].compile(2, target=target)


# -- listings ----------------------------------------------------------------------------------------------------------


def listing(schedule: Schedule, rank: int) -> Iterator[str]:
    """What one rank does, worker by worker: waits, moves, posts, each move with its lines of the program."""
    if not 0 <= rank < schedule.ranks:
        raise InvalidArgument(argument="--rank", was=rank, must=f"below {schedule.ranks}")
    one = schedule.instructions
    yield headline(schedule)
    for number, worker in enumerate(schedule.workers_of(rank)):
        span = range(int(schedule.worker_start[worker]), int(schedule.worker_start[worker + 1]))
        yield f"rank {rank}, worker {number}: {len(span)} instructions"
        for index, at in enumerate(span):
            lines = [f"wait   {_wait(schedule, entry)}" for entry in range(one.wait_start[at], one.wait_start[at + 1])]
            lines.append(_move(schedule, at, rank))
            lines += [
                f"post   {_worker(schedule, int(schedule.semaphore_waiter[one.post_semaphore[entry]]))}"
                for entry in range(one.post_start[at], one.post_start[at + 1])
            ]
            for first, line in enumerate(lines):
                yield f"{index if first == 0 else '':>6}  {line}"


def headline(schedule: Schedule) -> str:
    counts = ", ".join(f"{number} {what}" for what, number in counts_of(schedule).items())
    target = "staged" if schedule.staged else "direct"
    return (
        f"{schedule.name} for {schedule.contract.name}, {ranks_in_words(schedule.ranks)}, {target},"
        f" {form_in_words(schedule.in_place)}: {counts}, {len(schedule.worker_rank)} workers,"
        f" {len(schedule.semaphore_posts)} semaphores, digest {schedule.digest}"
    )


def _wait(schedule: Schedule, entry: int) -> str:
    one = schedule.instructions
    semaphore = int(one.wait_semaphore[entry])
    poster = _worker(schedule, int(schedule.semaphore_poster[semaphore]))
    if schedule.semaphore_of_start[semaphore]:
        return f"{poster} has started"
    back = int(one.wait_back[entry])
    ago = "" if back == 0 else f", {back} iteration{'s' if back > 1 else ''} ago"
    return f"{poster}, post {one.wait_value[entry]} of {schedule.semaphore_posts[semaphore]}{ago}"


def _worker(schedule: Schedule, worker: int) -> str:
    rank = int(schedule.worker_rank[worker])
    return f"rank {rank}, worker {worker - schedule.workers_of(rank)[0]}"


def _move(schedule: Schedule, at: int, rank: int) -> str:
    one = schedule.instructions
    kind, count = int(one.kind[at]), int(one.count[at])
    if kind in (START, END):
        return "start" if kind == START else "end"
    sources = one.source_atom[one.source_start[at] : one.source_start[at + 1]]
    stores = one.store_atom[one.store_start[at] : one.store_start[at + 1]]
    where = _where(schedule, at)
    if kind != MOVE:
        chunks = _chunks(schedule, int((stores if kind == READY else sources)[0]), count, rank)
        return f"{'ready  parcel' if kind == READY else 'needed tile'} {one.number[at]}: {chunks}  ({where})"
    left = " + ".join(_chunks(schedule, int(atom), count, rank) for atom in sources)
    right = ", ".join(_chunks(schedule, int(atom), count, rank) for atom in stores)
    return f"move   {left} -> {right}  ({where})"


def _chunks(schedule: Schedule, atom: int, count: int, rank: int) -> str:
    """'output[3:5] of rank 1'; the rank is left out if it is the one listed."""
    owner, buffer = int(schedule.atom_rank[atom]), int(schedule.atom_buffer[atom])
    start = atom - int(schedule.first_atom[owner, buffer])
    place = f"{start}" if count == 1 else f"{start}:{start + count}"
    return f"{schedule.buffers[buffer]}[{place}]" + ("" if owner == rank else f" of rank {owner}")


def _where(schedule: Schedule, at: int) -> str:
    """The lines of the program that an instruction was fused from: 'two_shot.py:5, 7'."""
    one = schedule.instructions
    rows = {int(one.row[at])}
    rows |= {int(row) for row in one.source_row[one.source_start[at] : one.source_start[at + 1]]}
    rows |= {int(row) for row in one.store_row[one.store_start[at] : one.store_start[at + 1]]}
    lines: dict[str, set[int]] = {}
    for row in rows:
        path, _, line = schedule.where(row).rpartition(":")
        if path:
            lines.setdefault(Path(path).name, set()).add(int(line))
    return "; ".join(f"{name}:{', '.join(map(str, sorted(found)))}" for name, found in sorted(lines.items()))


# -- for programs ------------------------------------------------------------------------------------------------------


def to_json(schedules: Iterable[Schedule]) -> str:
    """All of every schedule, arrays as lists. Equal schedules give equal bytes, wherever and whenever."""
    described = [{"digest": one.digest, **_plain(one)} for one in schedules]
    whole = {"format": FORMAT, "version": VERSION, "schedules": described}
    return json.dumps(whole, sort_keys=True, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """As JSON holds it. Of a function only its file's name and its own are told, not where the file lies."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, CodeType):
        return {"file": Path(value.co_filename).name, "function": value.co_qualname}
    if isinstance(value, frozenset):
        return [_plain(one) for one in sorted(value)]
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    return value


# -- words -------------------------------------------------------------------------------------------------------------


def counts_of(schedule: Schedule) -> dict[str, int]:
    one = schedule.instructions
    return {"instructions": len(one), "waits": len(one.wait_semaphore), "posts": len(one.post_semaphore)}


def ranks_in_words(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


def form_in_words(in_place: bool) -> str:
    return "in place" if in_place else "out of place"
