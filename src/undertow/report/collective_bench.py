"""Collectives timed, in the columns of nccl-tests.

    size      bytes of a rank's longest buffer          algbw    size / time
    count     elements of a span (a buffer or shard)    busbw    algbw times the factor of nccl-tests
    time      median over blocks of calls, the slowest rank's
    #wrong    elements of all ranks that are not exactly what they must be, before the timing or after it

At each size everything that is measured takes turns, block by block, in the same processes. Ranks that have a core each
are bound to it; Gloo, whose threads would get in each other's way there, may use all cores in its turn.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ..collective.checker import check as check_schedule
from ..collective.contract import BUILT_IN, ROOTED, Contract
from ..collective.cpu_runtime import STRIDE, CpuExecutable, stride_for
from ..collective.formats import read
from ..collective.language import Program
from ..collective.loading import meaning
from ..collective.operators import CALLS
from ..collective.schedule import Schedule
from ..collective.trial import Trial, equal_spans, spans_of_buffer
from ..errors import InvalidArgument
from ..fabric.group import Group
from ..fabric.launch import launch
from ..fabric.registry import init
from ..fabric.timer import WallClock, compare
from .collective import Request, ranks_in_words
from .collective_files import chosen_forms
from .collective_runs import check_memory, make_trial, sendable
from .progress import progress_bar

if TYPE_CHECKING:
    from ..fabric.cpu import CpuFabric

UNDERTOW, GLOO = "undertow", "gloo"
BLOCKS, WARMUP_BLOCKS = 9, 2
BLOCK_CALLS, BLOCK_BYTES = 20, 8 << 20  # calls of a block: 20, as in nccl-tests; fewer where they move more than this
BLOCK_SECONDS = 1.0  # that the blocks of one kind may take for one size, all together
CALL_FORMS: dict[str, tuple[bool, ...]] = {  # in place or not
    "all_reduce": (False, True), "all_gather": (False,), "reduce_scatter": (False,), "all_to_all": (False, True),
    "broadcast": (True,), "reduce": (False,), "gather": (False,), "scatter": (False,),
}  # fmt: skip
_GLOO_TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.uint8,
)  # fmt: skip
Call = Callable[[], object]
Key = tuple[int, str, bool]  # number of the entry, party, in place


def bus_factor(collective: str, ranks: int) -> float | None:
    """What nccl-tests multiplies algbw by; None for collectives it does not know."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0 if collective in ("broadcast", "reduce", "send_recv") else None


@dataclass(frozen=True, slots=True)
class Entry:
    """What a table is about: a program's schedules, by in_place, or none: the library's own choice by size.

    `collective` is empty for a contract of the user's own.
    """

    name: str
    collective: str
    contract: Contract
    root: int
    forms: tuple[bool, ...]
    schedules: Mapping[bool, Schedule]
    stride: int = STRIDE

    @property
    def direct(self) -> bool:
        return any(not one.staged for one in self.schedules.values())

    @property
    def rooted(self) -> bool:
        return self.collective in ROOTED


@dataclass(frozen=True, slots=True)
class Sweep:
    """Sizes from `least` to `most` bytes, each `factor` times the one before; `calls` of a block, 0: by size."""

    least: int
    most: int
    factor: int = 4
    dtype: str = "float32"
    operation: str = "sum"
    calls: int = 0
    against_gloo: bool = False

    def sizes(self) -> list[int]:
        if not 0 < self.least <= self.most:
            raise InvalidArgument(argument="--min-bytes", was=self.least, must=f"from 1 to --max-bytes, {self.most}")
        sizes = [self.least]
        while sizes[-1] * self.factor <= self.most:
            sizes.append(sizes[-1] * self.factor)
        return sizes

    def calls_of_block(self, nbytes: int) -> int:
        return self.calls or max(1, min(BLOCK_CALLS, BLOCK_BYTES // nbytes))


@dataclass(frozen=True, slots=True)
class Cell:
    """One party and form at one size. `ratio`: its time over that of Undertow."""

    seconds: float
    wrong: int
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One size of one entry; cells by party and in_place."""

    nbytes: int
    count: int
    cells: dict[tuple[str, bool], Cell]


def entry_for(program: Program, request: Request) -> Entry:
    """A program in the forms asked for; raises where one is refused."""
    traced = request.trace(program)
    (target,) = request.targets
    forms = tuple(request.forms(program, traced))
    schedules = {one: sendable(request.compile(traced, target, one)) for one in forms}
    return Entry(program.name, meaning(program), traced.contract, request.root, forms, schedules)


def entry_for_file(path: str, in_place: bool | None, slots: int | None) -> Entry:
    """A schedule file in the forms asked for; raises where one is refused."""
    schedules = {one.in_place: one for one in chosen_forms(read(path, slots), in_place)}
    for one in schedules.values():
        check_schedule(one)
    contract = schedules[max(schedules)].contract  # of the form in place, if there is one: it says where buffers meet
    known = contract.name in BUILT_IN and contract.name not in ROOTED  # a file does not name its root
    made = {form: sendable(one) for form, one in schedules.items()}
    return Entry(Path(path).stem, contract.name if known else "", contract, 0, tuple(made), made)


def entry_for_call(collective: str, request: Request) -> Entry:
    """A collective as users call it."""
    rooted = collective in ROOTED
    if not 0 <= request.root < (request.ranks if rooted else 1):
        must = f"below {request.ranks}" if rooted else f"0: {collective} has no root"
        raise InvalidArgument(argument="--root", was=request.root, must=must)
    forms = tuple(one for one in CALL_FORMS[collective] if request.in_place in (None, one))
    if not forms:
        option = "--in-place" if request.in_place else "--out-of-place"
        raise InvalidArgument(argument=option, was="given", must=f"left out: {collective} has no such call")
    contract = BUILT_IN[collective](request.ranks, 1, **({"root": request.root} if rooted else {}))
    return Entry(collective, collective, contract, request.root, forms, {})


def bench(entries: Sequence[Entry], sweep: Sweep, progress: bool = False) -> list[list[Row]]:
    """The rows of every entry."""
    ranks = entries[0].contract.ranks
    check_memory("--max-bytes", sweep.sizes()[-1], ranks)  # refuses before anything is started
    cores = sorted(os.sched_getaffinity(0))
    found: list[list[list[Row]]] = launch(bench_rank, ranks, "cpu", args=(list(entries), sweep, cores, progress))
    return found[0]


# -- in each rank ------------------------------------------------------------------------------------------------------


def bench_rank(entries: Sequence[Entry], sweep: Sweep, cores: Sequence[int], progress: bool) -> list[list[Row]]:
    """Everything one rank does; times and wrong elements are those of all ranks."""
    measuring = _Measuring(init(), entries, sweep, cores)
    sizes = sweep.sizes()
    tables: list[list[Row]] = [[] for _ in entries]
    with progress_bar(progress and measuring.group.rank == 0) as report:
        for step, nbytes in enumerate(sizes):

            def told(done: int, of: int, step: int = step, nbytes: int = nbytes) -> None:
                report(f"{nbytes} bytes", (step + done / of) / len(sizes))

            told(0, 1)
            for table, row in zip(tables, measuring.rows(nbytes, told), strict=True):
                table.append(row)
    return tables


@contextlib.contextmanager
def _roaming(cores: Sequence[int]) -> Iterator[None]:
    """Let this thread run on any of the cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _Clock(WallClock):
    """Wall time, where blocks of some calls may use all cores."""

    def __init__(self, roaming: Sequence[Call], cores: Sequence[int]) -> None:
        self._roaming = {id(call) for call in roaming}
        self._cores = cores

    def sampler(self, call: Call, calls: int) -> Callable[[], float]:
        sample = super().sampler(call, calls)
        if id(call) not in self._roaming:
            return sample

        def roaming() -> float:
            with _roaming(self._cores):
                return sample()

        return roaming


class _Measuring:
    """What lives for all sizes: the executables, and Gloo's group."""

    def __init__(self, group: Group, entries: Sequence[Entry], sweep: Sweep, cores: Sequence[int]) -> None:
        self.group = group
        self._cores = cores
        self._entries, self._sweep = entries, sweep
        self._dtype: torch.dtype = getattr(torch, sweep.dtype)
        fabric = cast("CpuFabric", group.fabric)
        self._executables = {
            (number, in_place): CpuExecutable(fabric, schedule, min(entry.stride, stride_for(schedule)))
            for number, entry in enumerate(entries)
            for in_place, schedule in entry.schedules.items()
        }
        self._gloo = None
        if sweep.against_gloo:
            self._gloo = dist.new_group(backend="gloo")
            for thread in map(int, os.listdir("/proc/self/task")):  # its own, and those it shares with earlier groups
                if thread != threading.get_native_id():
                    os.sched_setaffinity(thread, cores)

    def rows(self, nbytes: int, progress: Callable[[int, int], object]) -> list[Row]:
        """One row of each entry."""
        trials: dict[tuple[object, ...], Trial] = {}
        calls: dict[Key, tuple[Call, Trial]] = {}
        for key, make in self._parties():
            trial = self._trial(trials, key, nbytes)
            calls[key] = make(trial), trial
        before = self._wrong(calls)
        for trial in trials.values():
            trial.rest()
        names = {key: f"{key[0]} {key[1]} {key[2]}" for key in calls}
        found = compare(
            {names[key]: call for key, (call, _) in calls.items()},
            clock=_Clock([call for (_, party, _), (call, _) in calls.items() if party == GLOO], self._cores),
            calls=self._sweep.calls_of_block(nbytes),
            repeats=BLOCKS,
            warmup=WARMUP_BLOCKS,
            budget_seconds=BLOCK_SECONDS * len(calls),
            reduce_max=self.group.reduce_max,
            before=self.group.barrier,
            progress=progress,
        )
        after = self._wrong(calls)
        for trial in trials.values():
            trial.release()
        cells: list[dict[tuple[str, bool], Cell]] = [{} for _ in self._entries]
        for key, name in names.items():
            number, party, in_place = key
            ours = names.get((number, UNDERTOW, in_place))
            ratio = found.ratio(of=name, to=ours).median if ours is not None and party != UNDERTOW else None
            wrong = max(before[key], after[key])
            cells[number][party, in_place] = Cell(statistics.median(found.samples[name]), wrong, ratio)
        return [self._row(entry, nbytes, found) for entry, found in zip(self._entries, cells, strict=True)]

    def _row(self, entry: Entry, nbytes: int, cells: dict[tuple[str, bool], Cell]) -> Row:
        count = equal_spans(entry.contract, nbytes, self._dtype.itemsize)[0]
        return Row(count * spans_of_buffer(entry.contract) * self._dtype.itemsize, count, cells)

    def _parties(self) -> Iterator[tuple[Key, Callable[[Trial], Call]]]:
        """Everything to be measured, and how a call of it is made."""
        for number, entry in enumerate(self._entries):
            for in_place in entry.forms:
                if entry.schedules:
                    yield (number, UNDERTOW, in_place), partial(self._program_call, number, in_place)
                else:
                    yield (number, UNDERTOW, in_place), partial(_operator_call, entry, self._sweep.operation)
                if self._gloo is not None and _gloo_can(entry.collective, in_place, self._dtype):
                    make = partial(_gloo_call, entry, _reduction(self._sweep.operation), self._gloo)
                    yield (number, GLOO, in_place), make

    def _program_call(self, number: int, in_place: bool, trial: Trial) -> Call:
        executable, operation = self._executables[number, in_place], self._sweep.operation
        return partial(executable.run, trial.source, trial.out, trial.spans, operation)

    def _trial(self, trials: dict[tuple[object, ...], Trial], key: Key, nbytes: int) -> Trial:
        """Whatever means the same shares its memory: nobody's lies better than another's."""
        number, party, in_place = key
        entry = self._entries[number]
        direct = entry.direct and party == UNDERTOW
        shared = (entry.collective or number, in_place, direct)
        if shared not in trials:
            operation = self._sweep.operation
            # A file without a name for its collective may mean another one in each form.
            contract = entry.contract if entry.collective else entry.schedules[in_place].contract
            trials[shared] = make_trial(
                self.group, contract, nbytes, self._dtype, in_place, direct, operation,
                keeps_input=all(one.keeps_input for one in entry.schedules.values()),
            )  # fmt: skip
        return trials[shared]

    def _wrong(self, calls: Mapping[Key, tuple[Call, Trial]]) -> dict[Key, int]:
        """Wrong elements of all ranks after one call of each."""
        counts = []
        for call, trial in calls.values():
            trial.fill()
            call()
            counts.append(trial.wrong()[0])
        everybody = self.group.exchange(counts, "wrong elements")
        return dict(zip(calls, map(sum, zip(*everybody, strict=True)), strict=True))


def _operator_call(entry: Entry, operation: str, trial: Trial) -> Call:
    """The library's own call, with what a user would hand it."""
    source, out = trial.tensors
    name, at_root = entry.collective, trial.rank == entry.root
    call: Callable[..., object] = CALLS[name]
    options: dict[str, Any] = {"root": entry.root} if entry.rooted else {}
    if entry.contract.reduces:
        options["op"] = operation
    if name == "broadcast":
        return partial(call, out, **options)
    if name == "scatter":
        return partial(call, source if at_root else None, out=out, **options)
    if name in ("reduce", "gather") and not at_root:
        return partial(call, source, **options)
    return partial(call, source, out=out, **options)


def _reduction(operation: str) -> dist.ReduceOp:
    return cast(dist.ReduceOp, getattr(dist.ReduceOp, operation.upper()))


def _gloo_can(collective: str, in_place: bool, dtype: torch.dtype) -> bool:
    in_place_only = ("all_reduce", "broadcast", "reduce")  # out of place by a copy before, which counts
    return dtype in _GLOO_TYPES and (collective in in_place_only or (collective in CALLS and not in_place))


def _gloo_call(entry: Entry, operation: dist.ReduceOp, group: dist.ProcessGroup, trial: Trial) -> Call:
    """torch.distributed's call for the same."""
    source, out = trial.tensors
    root, ranks = entry.root, entry.contract.ranks
    at_root = trial.rank == root
    named: Any = dist  # newer versions of torch have other names for two of them
    if entry.collective == "all_gather":
        all_gather = getattr(named, "all_gather_single", None) or named.all_gather_into_tensor
        return lambda: all_gather(out, source, group=group)
    if entry.collective == "reduce_scatter":
        reduce_scatter = getattr(named, "reduce_scatter_single", None) or named.reduce_scatter_tensor
        return lambda: reduce_scatter(out, source, op=operation, group=group)
    if entry.collective == "all_to_all":
        return lambda: dist.all_to_all_single(out, source, group=group)
    if entry.collective == "gather":
        shards = list(out.chunk(ranks)) if at_root else None
        return lambda: dist.gather(source, shards, dst=root, group=group)
    if entry.collective == "scatter":
        given = list(source.chunk(ranks)) if at_root else None
        return lambda: dist.scatter(out, given, src=root, group=group)

    def reduce_or_broadcast() -> None:
        if not trial.in_place and (at_root or entry.collective != "broadcast"):
            out.copy_(source)
        if entry.collective == "broadcast":
            dist.broadcast(out, src=root, group=group)
        elif entry.collective == "reduce":
            dist.reduce(out, dst=root, op=operation, group=group)
        else:
            dist.all_reduce(out, op=operation, group=group)

    return reduce_or_broadcast


# -- for the reader ----------------------------------------------------------------------------------------------------

_MISSING = "N/A"
_FORMS = ((False, "out-of-place"), (True, "in-place"))
_FIRST = (("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 9), ("redop", "", 6), ("root", "", 6))
_OURS = (("time", "(us)", 11), ("algbw", "(GB/s)", 8), ("busbw", "(GB/s)", 8), ("#wrong", "", 7))
_THEIRS = (*_OURS, ("slower", "(times)", 8))
_Columns = Sequence[tuple[str, str, int]]


def table(entry: Entry, rows: Sequence[Row], sweep: Sweep) -> Iterator[str]:
    """Lines as nccl-tests prints them: what is not a row of numbers begins with #."""
    parties: list[tuple[str, _Columns]] = [(UNDERTOW, _OURS)]
    parties += [(GLOO, _THEIRS)] if sweep.against_gloo else []
    groups = [(party, in_place, form, columns) for party, columns in parties for in_place, form in _FORMS]
    what = f" for {entry.collective}" if entry.collective not in ("", entry.name) else ""
    how = ("direct" if entry.direct else "staged") if entry.schedules else "programs chosen by size"
    yield f"# {entry.name}{what}, {ranks_in_words(entry.contract.ranks)} on the CPU, {how}"
    above = " " * sum(width for _, _, width in _FIRST)
    for party, _, form, columns in groups:
        said = f"{form}, {party}" if sweep.against_gloo else form
        above += f"{said:^{sum(width for _, _, width in columns)}}"
    yield f"#{above[1:]}".rstrip()
    everything = [*_FIRST, *(column for *_, columns in groups for column in columns)]
    for line in (0, 1):
        yield "#" + "".join(f"{column[line]:>{column[2]}}" for column in everything)[1:].rstrip()
    factor = bus_factor(entry.collective, entry.contract.ranks)
    operation = sweep.operation if entry.contract.reduces else "none"
    root = entry.root if entry.rooted else -1
    for row in rows:
        cells = [str(row.nbytes), str(row.count), sweep.dtype, operation, str(root)]
        for party, in_place, _, columns in groups:
            cells += _cells(row.nbytes, row.cells.get((party, in_place)), factor, len(columns))
        yield "".join(f"{cell:>{column[2]}}" for cell, column in zip(cells, everything, strict=True))
    wrong = wrong_elements([rows])
    yield f"# Wrong elements: {wrong} {'OK' if not wrong else 'FAILED'}"
    ours = [row.nbytes / cell.seconds * 1e-9 for row in rows for (who, _), cell in row.cells.items() if who == UNDERTOW]
    if factor is not None and ours:
        yield f"# Avg bus bandwidth: {statistics.fmean(ours) * factor:.3f} GB/s"


def wrong_elements(tables: Sequence[Sequence[Row]]) -> int:
    return sum(cell.wrong for rows in tables for row in rows for cell in row.cells.values())


def _cells(nbytes: int, cell: Cell | None, factor: float | None, columns: int) -> list[str]:
    if cell is None:
        return [_MISSING] * columns
    algorithm = nbytes / cell.seconds * 1e-9
    bus = _MISSING if factor is None else f"{algorithm * factor:.3f}"
    found = [f"{cell.seconds * 1e6:.2f}", f"{algorithm:.3f}", bus, str(cell.wrong)]
    ratio = _MISSING if cell.ratio is None else f"{cell.ratio:.2f}"
    return [*found, ratio][:columns]
