"""Programs tied to a matmul: which chunks of the input come with which parcel of its tiles.

A program that names no parcels (`ring`, `two_shot`, any of the library) is *repeated*, once for each parcel of the
plan, on that parcel's part of the buffer, and all of the part comes with the parcel:

    all_reduce, 2 chunks, 3 parcels     | 0 0 | 1 1 | 2 2 |                 parcel of each chunk of the input
    reduce_scatter, 1 chunk, 2 ranks    | 0 | 1 | 2 |   | 0 | 1 | 2 |       the same in every shard

A program with `tile_ready` is taken at its word. Neighbouring chunks that come together on all ranks, in every shard,
are one *run*; the plan has as many parcels as there are runs, and the rows of a run are whole bands of tiles. Ranks may
name parcels in different orders: each computes its tiles in its own.

All of it is one schedule, checked as a whole and run once: what waits for an early parcel comes first. Calls name the
length of every chunk, so that chunks begin where parcels do.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..plan.plan import split
from .arguments import check_program
from .compiler import compile_trace
from .contract import BUILT_IN, Contract
from .language import COLUMNS, INPUT, NEEDED, OUTPUT, READY, Program, Trace
from .loading import meaning
from .loading import trace as traced

if TYPE_CHECKING:
    from .schedule import Schedule
    from .topology import Topology

Ints = NDArray[np.int64]
_SCRATCHES = 2  # sections take turns: the next one need not wait until the last has read its scratch
_COLUMN = {name: index for index, name in enumerate(COLUMNS)}


@dataclass(frozen=True, eq=False)
class Tied:
    """A program whose input comes in parcels.

    `runs[j]`: chunks of run j of every shard. `numbers[rank, shard, j]`: the parcel with which it comes there.
    """

    program: Program
    trace: Trace
    runs: tuple[int, ...]
    numbers: Ints
    _compiled: dict[tuple[tuple[str, Any], ...], Schedule] = field(default_factory=dict)

    @property
    def parcels(self) -> int:
        """How many parcels there are, on the rank that has most."""
        return int(self.numbers.max(initial=-1)) + 1

    @cached_property
    def digest(self) -> str:
        """Equal where ranks move the same chunks: they compare it."""
        return f"{self.program.name} {zlib.crc32(self.trace.rows().tobytes()):08x}"

    def lengths(self, pieces: Sequence[Sequence[tuple[int, int]]], item_size: int) -> list[int]:
        """Elements of every chunk of the input, in order. `pieces[j][s]`: offset and count of run j of shard s."""
        unit = max(1, 16 // item_size)  # chunks of a run begin on 16 bytes where the run does
        return [
            min(stop * unit, count) - min(start * unit, count)
            for shard in range(self.numbers.shape[1])
            for run, chunks in enumerate(self.runs)
            for count in (pieces[run][shard][1],)
            for start, stop in split(-(-count // unit), chunks)
        ]

    def schedule(self, **options: Any) -> Schedule:
        """Compiled for private buffers, input and output apart; checked. Kept."""
        key = tuple(sorted(options.items()))
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = compile_trace(self.trace, target="staged", **options)
        return found


def tie(program: Program, collective: str, topology: Topology, parcels: int) -> Tied:
    """`program` tied to parcels: its own, or else so many. Refuses, with one sentence, what cannot be tied."""
    once = _traced(program, collective, topology)
    marks = once.rows()[:, _COLUMN["kind"]]
    if (marks == NEEDED).any():
        must = "without tile_needed: no kernel waits for what it brings"
        raise InvalidArgument(argument="program", was=f"{program.name}, with tile_needed", must=must)
    shards, chunks = once.contract.spans, once.contract.factor
    if (marks == READY).any():
        numbers = _numbers(once)
        cuts = [0, *(np.flatnonzero((np.diff(numbers, axis=2) != 0).any(axis=(0, 1))) + 1).tolist(), chunks]
        runs = tuple(stop - start for start, stop in itertools.pairwise(cuts))
        return Tied(program, _Repeated(once, once.contract, 1), runs, numbers[:, :, cuts[:-1]])
    sections = max(1, parcels)
    trace = _Repeated(once, BUILT_IN[collective](topology.ranks, chunks * sections), sections)
    numbers = np.broadcast_to(np.arange(sections), (topology.ranks, shards, sections)).copy()
    return Tied(program, trace, (chunks,) * sections, numbers)


def _traced(program: Program, collective: str, topology: Topology) -> Trace:
    check_program(program)
    if meaning(program) != collective:
        was = f"{program.name}, for {meaning(program) or 'a contract of its own'}"
        raise InvalidArgument(argument="program", was=was, must=f"a program for {collective}")
    if program.ranks not in (None, topology.ranks):
        was, must = f"{program.name}, for {program.ranks} ranks", f"a program for {topology.ranks} ranks"
        raise InvalidArgument(argument="program", was=was, must=must)
    return traced(program, topology.ranks, topology)


def _numbers(once: Trace) -> Ints:
    """[rank, shard, chunk]: the parcel that each chunk of an input is said to come with."""
    contract = once.contract
    count = contract.spans * contract.factor
    found = np.full((contract.ranks, count), -1, np.int64)
    for row in once.rows()[once.rows()[:, _COLUMN["kind"]] == READY]:
        rank, start, width, parcel = (int(row[_COLUMN[name]]) for name in ("rank", "start", "count", "source_start"))
        if not 0 <= parcel < count:
            was = f"{once.name}, in which input[{start}] of rank {rank} comes with parcel {parcel}"
            raise InvalidArgument(argument="program", was=was, must=f"one of parcels 0 to {count - 1}")
        if (found[rank, start : start + width] >= 0).any():
            was = f"{once.name}, in which input[{start}] of rank {rank} becomes ready twice"
            raise InvalidArgument(argument="program", was=was, must="one in which every chunk becomes ready once")
        found[rank, start : start + width] = parcel
    missing = np.argwhere(found < 0)
    if len(missing):
        rank, chunk = missing[0]
        was = f"{once.name}, in which input[{chunk}] of rank {rank} never becomes ready"
        must = "one with tile_ready for every chunk of every input, or for none"
        raise InvalidArgument(argument="program", was=was, must=must)
    return found.reshape(contract.ranks, contract.spans, contract.factor)


class _Repeated(Trace):
    """The moves of a trace, once for each of several sections of every shard. One section: as they were.

    Chunk c of section p stands at p * chunks + c of its shard, so ranges that reach over several shards are taken
    apart; moves go chunk by chunk anyway.
    """

    def __init__(self, once: Trace, contract: Contract, sections: int) -> None:
        super().__init__(once.name, contract.cut_by_calls(), once.topology, once.root)
        self.buffers, self.codes, self._code_numbers = list(once.buffers), list(once.codes), dict(once._code_numbers)
        self._scratch_numbers = dict(once._scratch_numbers)
        self._scratch_sizes = {place: size * min(_SCRATCHES, sections) for place, size in once._scratch_sizes.items()}
        rows, chunks = once.rows(), once.contract.factor
        if not (rows[:, _COLUMN["kind"]] == READY).any():
            shards = once.contract.spans
            for section in range(sections):
                for rank in range(self.ranks):
                    for shard in range(shards):
                        first = (shard * sections + section) * chunks
                        self.tile_ready(self.rank(rank).input[first : first + chunks], section)
        if sections > 1:
            rows = _taken_apart(rows, chunks)
        for section in range(sections):
            self._rows += _moved(rows, once, chunks, section, sections).tobytes()


def _taken_apart(rows: NDArray[np.int32], chunks: int) -> NDArray[np.int32]:
    """The same moves in ranges that stay inside a shard, on both sides."""
    found = []
    for row in rows:
        ends = [row[_COLUMN[name]] % chunks for name, buffer in _ENDS if row[_COLUMN[buffer]] in (INPUT, OUTPUT)]
        done, count = 0, int(row[_COLUMN["count"]])
        while done < count:
            width = min([count - done, *(chunks - (int(one) + done) % chunks for one in ends)])
            part = row.copy()
            part[_COLUMN["count"]] = width
            for name, _ in _ENDS:
                part[_COLUMN[name]] += done
            found.append(part)
            done += width
    return np.array(found, np.int32).reshape(-1, len(COLUMNS))


_ENDS = (("source_start", "source_buffer"), ("start", "buffer"))


def _moved(rows: NDArray[np.int32], once: Trace, chunks: int, section: int, sections: int) -> NDArray[np.int32]:
    """The moves at their places in one of the sections."""
    if sections == 1:
        return rows
    found = rows.copy()
    sizes = np.array(
        [[once.scratch_size(rank, buffer) for buffer in range(len(once.buffers))] for rank in range(once.ranks)]
    )
    for (start, buffer), rank in zip(_ENDS, ("source_rank", "rank"), strict=True):
        at, number, who = (rows[:, _COLUMN[name]] for name in (start, buffer, rank))
        user = at + (at // chunks * (sections - 1) + section) * chunks
        scratch = at + section % _SCRATCHES * sizes[who, number]
        found[:, _COLUMN[start]] = np.where(number <= OUTPUT, user, scratch)
    return found
