"""A schedule on all ranks inside one process: plain memory, no fabric, and a seed that decides who goes on when.

    Machine      memory, semaphores and interpreters' states of all ranks; lives for as many calls as one likes
    verify       random data for some calls in a row, run in one random order of events, compared with the reference

The order of events is the finest there is: one instruction of one worker at a time. A seed picks one of three styles.
*uniform*: anybody. *priorities*: always the first in a random ranking that can go on, where now and then whoever went
falls to the end, so that some ranks are far behind and others a call ahead. *native*: whole ranks, as in production.
Threads, one a rank, run the same for true concurrency.

Whatever a rank owns is poisoned before and after each of its calls, at once: who reads it or writes to it without
having been let in leaves traces. Poison is NaN in floating point and -1 in integers.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from undertow.collective import cpu_interpreter as interpreter
from undertow.collective import cpu_sums as sums
from undertow.collective.bind import (
    FIRST_WORKSPACE,
    INSTANCES,
    WORKERS,
    Bound,
    bind,
    most_semaphores,
    semaphore_words,
    workspace_bytes,
)
from undertow.collective.contract import Contract
from undertow.collective.language import INPUT, OUTPUT, Trace
from undertow.collective.reference import evaluate
from undertow.collective.schedule import Schedule
from undertow.fabric import atomics

POISON = 0xFF
GUARD = 64  # bytes around every buffer that nobody may touch
UNIFORM, PRIORITIES, NATIVE, STYLES = 0, 1, 2, 3
FINISHED, STALLED, TOUCHED = 0, 1, 2
_AT_ONCE = -(1 << 40)  # as many spins: a rank that cannot go on returns instead of sleeping
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

DTYPES: dict[str, tuple[Any, int]] = {
    "float32": (np.float32, sums.FLOAT32), "int32": (np.int32, sums.INT32),
    "bfloat16": (None, sums.BFLOAT16), "float64": (np.float64, sums.FLOAT64),
    "float16": (np.float16, sums.FLOAT16), "int64": (np.int64, sums.INT64),
    "uint8": (np.uint8, sums.UINT8), "int8": (np.int8, sums.INT8), "int16": (np.int16, sums.INT16),
}  # fmt: skip


def item_size(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(DTYPES[dtype][0]).itemsize


def encoded(values: Ints, dtype: str) -> Bytes:
    """Integers as the bytes of `dtype`, exactly."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any()
        return (bits >> 16).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(values, DTYPES[dtype][0]).view(np.uint8)


def decoded(memory: Bytes, dtype: str) -> NDArray[np.float64]:
    memory = np.ascontiguousarray(memory)
    if dtype == "bfloat16":
        return (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return memory.view(DTYPES[dtype][0]).astype(np.float64)


@dataclass(frozen=True)
class Call:
    """One call of all ranks. `tile` as for `bind`."""

    spans: tuple[int, ...]
    dtype: str = "float32"
    tile: int | None = None


@dataclass(frozen=True)
class Signal:
    """A parcel that a kernel posts, or a tile that it waits for: `number`, of these chunks of the compiled contract."""

    rank: int
    number: int
    start: int
    count: int
    posts: int = 1


class Stalled(AssertionError):
    """Some ranks are not over, and none can go on."""


@functools.lru_cache(maxsize=4096)
def lengths_of(contract: Contract, call: Call, rank: int, buffer: int) -> Ints:
    """Elements of each chunk of a user buffer."""
    length = contract.class_lengths(call.spans, max(1, 16 // item_size(call.dtype)))
    if buffer == INPUT:
        return length[contract.item_class[contract.first_item[rank] : contract.first_item[rank + 1]]]
    return length[contract.output_class[contract.first_output[rank] : contract.first_output[rank + 1]]]


class Machine:
    """All ranks of one schedule. `most` bounds the bytes of a user buffer over all its calls."""

    def __init__(
        self,
        schedule: Schedule,
        stride: int = 64,
        most: int = 1 << 12,
        parcels: Sequence[Signal] = (),
        tiles: Sequence[Signal] = (),
    ) -> None:
        self.schedule = schedule
        grain = 16 * schedule.instances
        self.stride = max(grain, stride - stride % grain)
        self._parcels, self._tiles = tuple(parcels), tuple(tiles)
        ranks = schedule.ranks
        self._most = -(-most // 128) * 128
        # guard, input, guard, output, guard; each rank's a little differently aligned
        self._memory = np.full((ranks, 2 * self._most + 3 * GUARD + 256), POISON, np.uint8)
        self._shift = [8 * (rank % 3) + (-row.ctypes.data) % 128 for rank, row in enumerate(self._memory)]
        self._signals = np.zeros((ranks, (most_semaphores(schedule) + 1) * interpreter.WORD), np.uint8)
        room = workspace_bytes(schedule, self.stride)
        self._workspace = np.full((ranks, room + 2 * GUARD + 128), POISON, np.uint8)
        self._work_at = [GUARD + (-(row.ctypes.data + GUARD)) % 128 for row in self._workspace]
        self._room = room
        workers = max(len(schedule.workers_of(rank)) for rank in range(ranks)) * schedule.instances
        self._states = np.zeros((ranks, interpreter.STATE_HEADER + workers * interpreter.STATE_ROW), np.int64)
        words = 1 + max((one.number for one in (*self._parcels, *self._tiles)), default=0)
        self._parcel_words = np.zeros((ranks, words * interpreter.WORD), np.uint8)
        self._tile_words = np.zeros((ranks, words * interpreter.WORD), np.uint8)
        self._abort = np.zeros(1, np.int32)
        self._semaphores = np.empty((ranks, ranks + 1), np.int64)
        self._semaphores[:, :ranks] = [row.ctypes.data for row in self._signals]
        self._semaphores[:, ranks] = self._semaphores[0, :ranks]
        self._past_calls = 0
        self.thread_seconds = 20.0  # until threads that stand still are given up
        self._bound: dict[tuple[Call, int], Bound] = {}
        self._places: dict[tuple[Call, int], tuple[slice, slice]] = {}
        self._bases_of: dict[Call, Ints] = {}
        self.steps = 0

    def grow_old(self, iterations: int, calls: int) -> None:
        """As if so many iterations and calls had gone by."""
        schedule = self.schedule
        rank_of = schedule.worker_rank[schedule.semaphore_waiter]
        for semaphore, word in enumerate(semaphore_words(schedule)):
            past = calls if schedule.semaphore_of_start[semaphore] else iterations
            count = past * int(schedule.semaphore_posts[semaphore]) % (1 << 32)
            for instance in range(schedule.instances):
                at = (int(word) * schedule.instances + instance) * interpreter.WORD
                self._signals[rank_of[semaphore], at : at + 4].view(np.uint32)[0] = count
        self._states[:, interpreter.PAST_ITERATIONS] = iterations
        self._states[:, interpreter.PAST_CALLS] = calls

    # -- where things are --------------------------------------------------------------------------------------------

    def places(self, call: Call, rank: int) -> tuple[slice, slice]:
        """Input and output of a rank's memory, in bytes."""
        if (call, rank) not in self._places:
            self._places[call, rank] = self._find_places(call, rank)
        return self._places[call, rank]

    def _find_places(self, call: Call, rank: int) -> tuple[slice, slice]:
        contract = self.schedule.contract
        size = item_size(call.dtype)
        counts = [lengths_of(contract, call, rank, buffer) for buffer in (INPUT, OUTPUT)]
        begin = [self._shift[rank] + GUARD, self._shift[rank] + 2 * GUARD + self._most]
        if self.schedule.in_place:
            assert contract.in_place is not None
            holder = contract.holder(rank)
            held = OUTPUT if holder == INPUT else INPUT
            begin[held] = begin[holder] + int(counts[holder][: contract.in_place[rank]].sum()) * size
        found = [slice(at, at + int(count.sum()) * size) for at, count in zip(begin, counts, strict=True)]
        assert all(one.stop - one.start <= self._most for one in found), "Machine(most=...) is too little for this call"
        return found[INPUT], found[OUTPUT]

    def _bases(self, call: Call) -> Ints:
        if call not in self._bases_of:
            self._bases_of[call] = self._find_bases(call)
        return self._bases_of[call]

    def _find_bases(self, call: Call) -> Ints:
        ranks = self.schedule.ranks
        bases = np.zeros((ranks, FIRST_WORKSPACE + 3 * ranks), np.int64)
        for rank in range(ranks):
            places = self.places(call, rank)
            bases[:, FIRST_WORKSPACE + rank] = self._workspace[rank].ctypes.data + self._work_at[rank]
            for buffer in (INPUT, OUTPUT):
                address = self._memory[rank].ctypes.data + places[buffer].start
                bases[rank, buffer] = address
                if not self.schedule.staged:
                    bases[:, FIRST_WORKSPACE + ranks * (1 + buffer) + rank] = address
        return bases

    def bind(self, call: Call, rank: int) -> Bound:
        found = self._bound.get((call, rank))
        if found is None:
            code, size = DTYPES[call.dtype][1], item_size(call.dtype)
            found = bind(self.schedule, rank, call.spans, self.stride, size, code, sums.SUM, call.tile)
            self._bound[call, rank] = found
        return found

    # -- running -----------------------------------------------------------------------------------------------------

    def run(
        self, calls: Sequence[Call], inputs: Sequence[Sequence[Ints]], seed: int = 0, threads: bool = False
    ) -> list[list[NDArray[np.float64]]]:
        """Outputs of every call and rank. `inputs[call][rank]`: elements, as integers."""
        bound = [[self.bind(call, rank) for rank in range(self.schedule.ranks)] for call in calls]
        assert all(one.iterations == row[0].iterations for row in bound for one in row)
        feeds = np.full((len(calls), *self._memory.shape), POISON, np.uint8)
        for number, call in enumerate(calls):
            for rank, values in enumerate(inputs[number]):
                feeds[number, rank, self.places(call, rank)[INPUT]] = encoded(values, call.dtype)
        parcels, tiles = self._signal_table(calls, self._parcels), self._signal_table(calls, self._tiles)
        results, seen = np.empty_like(feeds), np.full((len(calls), len(self._tiles), feeds.shape[2]), POISON, np.uint8)
        bases = np.array([self._bases(call) for call in calls])
        iterations = np.array([row[0].iterations for row in bound])
        if threads:
            self._run_threads(bound, bases, feeds, results)
        else:
            self._run_in_turn(bound, bases, iterations, feeds, results, parcels, tiles, seen, seed)
        self._past_calls += len(calls)
        self._check_guards()
        for number, call in enumerate(calls):
            self._check_memory(call, feeds[number], results[number])
            self._check_tiles(call, tiles[number], seen[number], results[number])
        return [
            [decoded(results[number, rank, self.places(call, rank)[OUTPUT]], call.dtype) for rank in range(len(row))]
            for number, (call, row) in enumerate(zip(calls, bound, strict=True))
        ]

    def _run_in_turn(
        self, bound: list[list[Bound]], bases: Ints, iterations: Ints, feeds: Bytes, results: Bytes, parcels: Ints,
        tiles: Ints, seen: Bytes, seed: int,
    ) -> None:  # fmt: skip
        codes = [one.code for row in bound for one in row]
        ends = np.cumsum([len(one) for one in codes]).reshape(len(bound), -1)
        starts = ends - np.array([len(one) for one in codes]).reshape(ends.shape)
        verdict, rank, self.steps = _drive(
            np.concatenate(codes), starts, ends, iterations, bases, self._states, self._semaphores,
            self._abort.ctypes.data, self._memory, feeds, results, parcels, tiles, seen,
            np.array([row.ctypes.data for row in self._parcel_words]),
            np.array([row.ctypes.data for row in self._tile_words]), self._parcel_words, self._tile_words,
            self._past_calls, seed,
        )  # fmt: skip
        if verdict == STALLED:
            raise Stalled(f"seed {seed}: rank {rank} and maybe others cannot go on after {self.steps} steps")
        assert verdict != TOUCHED, f"seed {seed}: memory of rank {rank} was touched while it was in no call"

    def _run_threads(self, bound: list[list[Bound]], bases: Ints, feeds: Bytes, results: Bytes) -> None:
        """Each rank on a thread of its own. Parcels and tiles are not for this."""
        failed: list[str] = []

        def rank_runs(rank: int) -> None:
            for number, row in enumerate(bound):
                one = row[rank]
                if not (self._memory[rank] == POISON).all():
                    failed.append(f"memory of rank {rank} was touched before its call {number}")
                self._memory[rank] = feeds[number, rank]
                interpreter.begin(one.code, self._states[rank])
                status = interpreter.SLICE_OVER
                while status == interpreter.SLICE_OVER:
                    status = interpreter.run(
                        one.code, bases[number, rank], self._states[rank], semaphores[rank], one.iterations,
                        self._abort.ctypes.data, 20, 0, 0, 0, 0, 0,
                    )  # fmt: skip
                if status == interpreter.ABORTED:
                    failed.append(f"rank {rank} stands still in call {number}")
                    return
                results[number, rank] = self._memory[rank]
                self._memory[rank] = POISON

        semaphores = _with_own(self._semaphores)
        workers = [threading.Thread(target=rank_runs, args=(rank,), daemon=True) for rank in range(len(self._memory))]
        for one in workers:
            one.start()
        for one in workers:
            one.join(self.thread_seconds)
            if one.is_alive():
                self._abort[0] = 1
        for one in workers:
            one.join()
        if self._abort[0]:
            raise Stalled("; ".join(failed))
        assert not failed, failed

    def _signal_table(self, calls: Sequence[Call], signals: Sequence[Signal]) -> Ints:
        """[call, signal]: rank, number, first and last + 1 byte, posts."""
        table = np.zeros((len(calls), len(signals), 5), np.int64)
        for number, call in enumerate(calls):
            for index, one in enumerate(signals):
                buffer = INPUT if signals is self._parcels else OUTPUT
                ends = np.cumsum([0, *lengths_of(self.schedule.contract, call, one.rank, buffer)])
                begin = self.places(call, one.rank)[buffer].start
                size = item_size(call.dtype)
                low, high = (begin + size * int(ends[at]) for at in (one.start, one.start + one.count))
                table[number, index] = one.rank, one.number, low, high, one.posts
        return table

    # -- what must have been left alone ------------------------------------------------------------------------------

    def _check_guards(self) -> None:
        for rank, row in enumerate(self._workspace):
            at = self._work_at[rank]
            clean = (row[:at] == POISON).all() and (row[at + self._room :] == POISON).all()
            assert clean, f"somebody wrote beside the workspace of rank {rank}"
        assert (self._memory == POISON).all(), "user memory was touched after the last call"
        assert not self._signals[:, -interpreter.WORD :].any(), "somebody posted beside the semaphores"

    def _check_memory(self, call: Call, fed: Bytes, found: Bytes) -> None:
        """Outside outputs nothing has changed; in place, or where inputs may be used up, outside both buffers."""
        for rank, (before, after) in enumerate(zip(fed, found, strict=True)):
            given, out = self.places(call, rank)
            same = before == after
            same[out] = True
            if self.schedule.in_place or not self.schedule.keeps_input:
                same[given] = True
            if not same.all():
                at = int(np.flatnonzero(~same)[0])
                where = "its input" if given.start <= at < given.stop else "a place beside its buffers"
                raise AssertionError(f"{where} of rank {rank} has changed, byte {at - given.start} from its input on")

    def _check_tiles(self, call: Call, table: Ints, seen: Bytes, found: Bytes) -> None:
        for (rank, number, low, high, _), early in zip(table, seen, strict=True):
            same = (early[low:high] == found[rank, low:high]).all()
            assert same, f"tile {number} of rank {rank} was announced before it had arrived ({call})"


def _with_own(semaphores: Ints) -> list[Ints]:
    """What `run` takes: addresses of all ranks, then the own one again."""
    return [np.append(row[:-1], row[rank]) for rank, row in enumerate(semaphores)]


@numba.njit(nogil=True, cache=True)
def _word(memory, number):
    at = number * 128
    return np.int64(memory[at]) | (np.int64(memory[at + 1]) << 8) | (np.int64(memory[at + 2]) << 16)


@numba.njit(nogil=True, cache=True)
def _set_word(memory, number, value):
    at = number * 128
    memory[at], memory[at + 1], memory[at + 2] = value & 255, (value >> 8) & 255, (value >> 16) & 255


def _made_driver(version: int) -> Callable[..., tuple[int, int, int]]:
    """Numba's cache looks at this file only: `version`, of what is called from here, makes a new entry of it."""

    @numba.njit(nogil=True, cache=True)
    def drive(
        codes, starts, ends, iterations, bases, states, semaphores, abort, memory, feeds, results, parcels, tiles, seen,
        parcel_at, tile_at, parcel_words, tile_words, past_calls, seed,
    ):  # fmt: skip
        """Run all calls on all ranks, one step after the other. Returns a verdict, a rank and the number of steps."""
        np.random.seed(seed + 0 * version)
        calls, ranks = len(starts), len(memory)
        style = np.random.randint(0, STYLES)
        drop = 10.0 ** np.random.uniform(-3.0, -0.5)  # how often a worker falls behind all others
        rows = (states.shape[1] - interpreter.STATE_HEADER) // interpreter.STATE_ROW
        width = rows + 1  # workers of a rank, and the kernel that makes its parcels
        entities = ranks * width
        ranking = np.random.permutation(entities)
        call_of, running = np.zeros(ranks, np.int64), np.zeros(ranks, np.bool_)
        live = np.zeros(ranks, np.int64)  # workers of the present call
        alone = np.empty(states.shape[1], np.int64)
        posted = np.zeros(len(parcels[0]), np.bool_) if calls else np.zeros(0, np.bool_)
        arrived = np.zeros(len(tiles[0]), np.bool_) if calls else np.zeros(0, np.bool_)
        own = np.empty((ranks, ranks + 1), np.int64)
        for rank in range(ranks):
            own[rank] = semaphores[rank]
            own[rank, ranks] = semaphores[rank, rank]
        left = ranks if calls else 0
        steps, failures = 0, 0
        while left > 0:
            moved = False
            for attempt in range(entities):
                if style == PRIORITIES:
                    pick = ranking[attempt]
                elif failures > 2 * entities:
                    pick = (attempt + seed) % entities  # everybody once: is there nobody left who can go on?
                else:
                    pick = np.random.randint(0, entities)
                rank, one = pick // width, pick % width
                call = call_of[rank]
                if call == calls:
                    continue
                if not running[rank]:
                    for at in range(memory.shape[1]):
                        if memory[rank, at] != POISON:
                            return TOUCHED, rank, steps
                    memory[rank] = feeds[call, rank]
                    for index in range(len(posted)):
                        if parcels[call, index, 0] == rank:
                            posted[index] = False
                            memory[rank, parcels[call, index, 2] : parcels[call, index, 3]] = POISON
                    for index in range(len(arrived)):
                        if tiles[call, index, 0] == rank:
                            arrived[index] = False
                    code = codes[starts[call, rank] : ends[call, rank]]
                    interpreter.begin(code, states[rank])
                    live[rank] = code[WORKERS] * code[INSTANCES]
                    running[rank] = True
                    moved = True
                elif one == rows:  # the kernel: the next parcel
                    first = np.random.randint(0, max(1, len(posted)))
                    for shift in range(len(posted)):
                        index = (first + shift) % len(posted)
                        if parcels[call, index, 0] == rank and not posted[index]:
                            low, high = parcels[call, index, 2], parcels[call, index, 3]
                            memory[rank, low:high] = feeds[call, rank, low:high]
                            number = parcels[call, index, 1]
                            _set_word(parcel_words[rank], number, _word(parcel_words[rank], number) + 1)
                            posted[index] = True
                            moved = True
                            break
                elif one < live[rank]:
                    code = codes[starts[call, rank] : ends[call, rank]]
                    target = past_calls + call + 1
                    at = interpreter.STATE_HEADER + one * interpreter.STATE_ROW
                    native = style == NATIVE
                    alone[:] = states[rank]
                    if not native:  # all other workers as if they were over: one instruction, of this one
                        alone[interpreter.STATE_HEADER :] = -1
                        alone[at : at + interpreter.STATE_ROW] = states[rank, at : at + interpreter.STATE_ROW]
                    if native or alone[at] >= 0:
                        interpreter.run(
                            code, bases[call, rank], alone, own[rank], iterations[call], abort, _AT_ONCE,
                            parcel_at[rank], target, tile_at[rank], np.random.randint(1, 9) if native else 1, one,
                        )  # fmt: skip
                        first = interpreter.STATE_HEADER if native else at
                        end = len(alone) if native else at + interpreter.STATE_ROW
                        for index in range(first, end):
                            moved = moved or alone[index] != states[rank, index]
                        states[rank, first:end] = alone[first:end]
                    over = True
                    for other in range(live[rank]):
                        if states[rank, interpreter.STATE_HEADER + other * interpreter.STATE_ROW] >= 0:
                            over = False
                    if over:
                        states[rank, interpreter.PAST_ITERATIONS] += iterations[call]
                        states[rank, interpreter.PAST_CALLS] += 1
                    for index in range(len(arrived)):
                        owner, number, low, high, posts = tiles[call, index]
                        if owner == rank and not arrived[index] and _word(tile_words[rank], number) >= posts * target:
                            seen[call, index, low:high] = memory[rank, low:high]
                            arrived[index] = True
                    if over:
                        moved = True
                        for index in range(len(arrived)):
                            if tiles[call, index, 0] == rank and not arrived[index]:
                                return STALLED, rank, steps
                        results[call, rank] = memory[rank]
                        memory[rank] = POISON
                        call_of[rank] += 1
                        running[rank] = False
                        if call_of[rank] == calls:
                            left -= 1
                if moved:
                    steps += 1
                    failures = 0
                    if style == PRIORITIES and np.random.random() < drop:
                        for index in range(attempt, entities - 1):
                            ranking[index] = ranking[index + 1]
                        ranking[entities - 1] = pick
                    break
                failures += 1
            if not moved and (style == PRIORITIES or failures > 3 * entities):
                for rank in range(ranks):
                    if call_of[rank] < calls:
                        return STALLED, rank, steps
        return FINISHED, 0, steps

    return drive


def _interpreter_version() -> int:
    folder = Path(interpreter.__file__).parent
    sources = [*sorted(folder.glob("cpu_*.py")), folder / "bind.py", folder / "schedule.py", Path(atomics.__file__)]
    digest = hashlib.sha256(b"".join(one.read_bytes() for one in sources)).digest()
    return int.from_bytes(digest[:6], "little")


_drive = _made_driver(_interpreter_version())


# -- comparing with the reference ----------------------------------------------------------------------------------


class _Pieces:
    """A chunk of the program, as the pieces into which `parallel` cuts it."""

    def __init__(self, parts: list[Ints]) -> None:
        self.parts = parts

    def __add__(self, other: _Pieces) -> _Pieces:
        return _Pieces([one + two for one, two in zip(self.parts, other.parts, strict=True)])


def expected(
    trace: Trace, schedule: Schedule, call: Call, inputs: Sequence[Ints]
) -> list[tuple[Ints, NDArray[np.bool_]]]:
    """Output elements of each rank as the reference finds them, and which of them the contract says anything about."""
    contract = schedule.contract
    grain = contract.factor // trace.contract.factor
    given = []
    for rank, values in enumerate(inputs):
        ends = np.cumsum(lengths_of(contract, call, rank, INPUT)).tolist()
        pieces = [values[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        given.append([_Pieces(pieces[at : at + grain]) for at in range(0, len(pieces), grain)])
    found = []
    first = contract.first_output
    for rank, chunks in enumerate(evaluate(trace, given, schedule.in_place)):
        wanted = contract.after[first[rank] : first[rank + 1]] >= 0
        lengths = lengths_of(contract, call, rank, OUTPUT)
        parts = [part for one in chunks for part in (one.parts if one is not None else [None] * grain)]
        assert all(part is not None for part, good in zip(parts, wanted, strict=True) if good)
        values = [
            part if good else np.zeros(length, np.int64)
            for part, good, length in zip(parts, wanted, lengths, strict=True)
        ]
        assert [len(one) for one in values] == lengths.tolist()
        found.append((np.concatenate([np.zeros(0, np.int64), *values]), np.repeat(wanted, lengths)))
    return found


def random_inputs(schedule: Schedule, call: Call, random: np.random.Generator) -> list[Ints]:
    """Small integers, so that every order of a sum gives the same bits in every type."""
    most = {"bfloat16": 8, "uint8": 8, "int8": 5, "float16": 60, "int16": 500}.get(call.dtype, 9999)
    counts = [int(lengths_of(schedule.contract, call, rank, INPUT).sum()) for rank in range(schedule.ranks)]
    return [random.integers(0, most, count) for count in counts]


def verify(
    trace: Trace,
    schedule: Schedule,
    calls: Sequence[Call],
    seed: int,
    machine: Machine | None = None,
    runs: int = 1,
    threads: bool = False,
) -> None:
    """Run the calls one after the other, in `runs` orders of events from `seed` on, and compare every element."""
    random = np.random.default_rng(seed)
    machine = machine or Machine(schedule)
    inputs = [random_inputs(schedule, call, random) for call in calls]
    wanted = [expected(trace, schedule, call, given) for call, given in zip(calls, inputs, strict=True)]
    for order in range(seed, seed + runs):
        outputs = machine.run(calls, inputs, order, threads)
        for number, call in enumerate(calls):
            for rank, (values, known) in enumerate(wanted[number]):
                found = outputs[number][rank]
                wrong = np.flatnonzero(known & ~(found == values))
                if len(wrong):
                    at = int(wrong[0])
                    raise AssertionError(
                        f"order of events {order}, call {number} ({call}), rank {rank}: element {at} of {len(values)}"
                        f" is {found[at]} instead of {values[at]}; {len(wrong)} are wrong"
                    )
