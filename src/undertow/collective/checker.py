"""Judges a schedule as it will run, not the program it came from. What it accepts is right in every order of events.

Checked, for the schedule's own buffering model: the postcondition (nothing missing, nothing twice), deadlocks (program
order, waits, slots of staging), races between workers of one rank and of several, with scratch used again by later
iterations, chunks that are read before anything was written, lengths, bounds, and what each target lets a rank reach.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument, ProgramRefused
from . import checker_core as core
from .language import INPUT, OUTPUT
from .schedule import END, NEEDED, READY, START, Schedule

_TRACE_STEPS = 5
_EXACT_TOUCHES = 2_000_000  # beyond that, a wrong result is reported by how many contributions it has


@dataclass(frozen=True)
class Report:
    """What was looked at."""

    instructions: int
    waits: int
    posts: int
    iterations: int
    executed: int


def check(schedule: Schedule) -> Report:
    """Raise `ProgramRefused` with place, reason and a trace of at most five steps, or say what was looked at."""
    if not isinstance(schedule, Schedule):
        must = "a schedule, as program.compile(ranks) gives one"
        raise InvalidArgument(argument="schedule", was=repr(schedule), must=must)
    _check_bounds(schedule)
    iterations = schedule.depth + 1 if schedule.loops else 1
    order = np.full(len(schedule.instructions) * iterations, -1, np.int32)
    contents = _Contents(schedule)
    verdict = _simulate(schedule, iterations, contents, order)
    if verdict[0] != core.FINE:
        _refuse(schedule, verdict, contents, order, iterations)
    one = schedule.instructions
    return Report(len(one), len(one.wait_value), len(one.post_semaphore), iterations, verdict[4])


class _Contents:
    """What user atoms hold before and must hold after, as hashes."""

    def __init__(self, schedule: Schedule) -> None:
        contract, users = schedule.contract, schedule.user_atoms
        items = np.arange(int(contract.first_item[-1]), dtype=np.uint64)
        one, two = _mixed(items, 0x9E3779B97F4A7C15), _mixed(items, 0xD1B54A32D192ED03)
        self.item = np.full(users, -1, np.int64)
        self.total = np.full(users, -1, np.int64)
        self.begin_one, self.begin_two = np.zeros(users, np.uint64), np.zeros(users, np.uint64)
        self.begin_class = np.full(users, -1, np.int32)
        self.want_one, self.want_two = np.zeros(users, np.uint64), np.zeros(users, np.uint64)
        self.want_count = np.full(users, -1, np.int32)
        self.protected = np.zeros(users, np.bool_)
        sizes = np.diff(contract.total_start)
        sum_one, sum_two = _row_sums(one[contract.total_items], sizes), _row_sums(two[contract.total_items], sizes)
        for rank in range(contract.ranks):
            first, last = int(contract.first_item[rank]), int(contract.first_item[rank + 1])
            place = slice(int(schedule.first_atom[rank, INPUT]), int(schedule.first_atom[rank, INPUT]) + last - first)
            self.item[place] = np.arange(first, last)
            self.begin_one[place], self.begin_two[place] = one[first:last], two[first:last]
            self.begin_class[place] = contract.item_class[first:last]
            self.protected[place] = schedule.keeps_input and not schedule.in_place
        for rank in range(contract.ranks):
            first, last = int(contract.first_output[rank]), int(contract.first_output[rank + 1])
            place = slice(int(schedule.first_atom[rank, OUTPUT]), int(schedule.first_atom[rank, OUTPUT]) + last - first)
            total = contract.after[first:last]
            self.total[place] = total
            known = np.maximum(total, 0)
            if len(sizes):
                self.want_one[place], self.want_two[place] = sum_one[known], sum_two[known]
                self.want_count[place] = np.where(total < 0, -1, sizes[known])
        self.pending = np.zeros(users, np.bool_)
        ready = np.flatnonzero(schedule.instructions.kind == READY)
        for at in ready:
            entry = schedule.instructions.store_start[at]
            start = schedule.instructions.store_atom[entry]
            self.pending[start : start + schedule.instructions.count[at]] = True


def _mixed(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Well-spread 64-bit numbers (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        mixed = (values + np.uint64(1)) * np.uint64(seed)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def _row_sums(values: NDArray[np.uint64], sizes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Sums of consecutive runs, modulo 2**64."""
    with np.errstate(over="ignore"):
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
        ends = np.cumsum(sizes)
        return np.asarray(running[ends] - running[ends - sizes], np.uint64)


def _simulate(
    schedule: Schedule, iterations: int, contents: _Contents, order: NDArray[np.int32]
) -> tuple[int, int, int, int, int]:
    one = schedule.instructions
    first_worker = np.searchsorted(schedule.worker_rank, np.arange(schedule.ranks)).astype(np.int32)
    found = core.simulate(
        one.kind, one.count, one.source_start, one.source_atom, one.store_start, one.store_atom, one.class_start,
        one.class_of, one.wait_start, one.wait_semaphore, one.wait_value, one.wait_back, one.post_start,
        one.post_semaphore, schedule.worker_start, schedule.worker_rank, first_worker, schedule.semaphore_poster,
        schedule.semaphore_waiter, schedule.semaphore_posts, schedule.semaphore_of_start, schedule.atom_rank,
        schedule.user_atoms, schedule.depth, iterations, contents.begin_one, contents.begin_two, contents.begin_class,
        contents.pending, contents.protected, contents.want_one, contents.want_two, contents.want_count, order,
    )  # fmt: skip
    return tuple(int(value) for value in found)  # type: ignore[return-value]


def _check_bounds(schedule: Schedule) -> None:
    """Every range lies in one buffer, and no rank reaches what the target does not let it reach."""
    one = schedule.instructions
    worker = np.repeat(np.arange(len(schedule.worker_rank)), np.diff(schedule.worker_start))
    rank = schedule.worker_rank[worker]
    _check_semaphores(schedule, worker)
    shifted = int(core.overlapping(one.count, one.source_start, one.source_atom, one.store_start, one.store_atom))
    if shifted >= 0:
        reason = "an instruction writes a range that overlaps another of its ranges without being equal to it"
        _raise(schedule, int(one.row[shifted]), reason, [shifted])
    atoms = len(schedule.atom_rank)
    for start, atom, rows, stores in (
        (one.source_start, one.source_atom, one.source_row, False),
        (one.store_start, one.store_atom, one.store_row, True),
    ):
        owner = np.repeat(np.arange(len(one)), np.diff(start))
        last = atom + one.count[owner] - 1
        bad = (atom < 0) | (last >= atoms) | (one.count[owner] < 1)
        safe = np.clip(last, 0, atoms - 1)
        first = np.clip(atom, 0, atoms - 1)
        bad |= (schedule.atom_rank[first] != schedule.atom_rank[safe]) | (
            schedule.atom_buffer[first] != schedule.atom_buffer[safe]
        )
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            _raise(schedule, int(rows[at]), "a range leaves its buffer", [int(owner[at])])
        remote = schedule.atom_rank[atom] != rank[owner]
        if schedule.staged:
            staging = schedule.atom_buffer[atom] == len(schedule.buffers) - 1
            bad = remote & ~(staging & (stores or schedule.publishes))
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                reason = f"rank {rank[owner[at]]} cannot reach {schedule.chunk_name(int(atom[at]))}"
                _raise(schedule, int(rows[at]), reason, [int(owner[at])])


def _row_of_store(schedule: Schedule, instruction: int, atom: int) -> int:
    """The operation behind the store of `instruction` that covers `atom`."""
    one = schedule.instructions
    for entry in range(one.store_start[instruction], one.store_start[instruction + 1]):
        if one.store_atom[entry] <= atom < one.store_atom[entry] + one.count[instruction]:
            return int(one.store_row[entry])
    return int(one.row[instruction])


def _check_semaphores(schedule: Schedule, worker: NDArray[np.int64]) -> None:
    """Every semaphore is posted by one worker and waited for by one: counts mean nothing otherwise."""
    one = schedule.instructions
    for start, semaphore, owner, verb in (
        (one.wait_start, one.wait_semaphore, schedule.semaphore_waiter, "waits for"),
        (one.post_start, one.post_semaphore, schedule.semaphore_poster, "posts"),
    ):
        at = np.repeat(np.arange(len(one)), np.diff(start))
        wrong = np.flatnonzero(owner[semaphore] != worker[at])
        if len(wrong):
            found = int(at[wrong[0]])
            reason = f"rank {schedule.worker_rank[worker[found]]} {verb} a semaphore of another worker"
            _raise(schedule, int(one.row[found]), reason, [found])


def _raise(schedule: Schedule, row: int, reason: str, steps: list[int]) -> None:
    lines = "".join(f"\n  {number}. {schedule.describe(one)}" for number, one in enumerate(steps[:_TRACE_STEPS], 1))
    raise ProgramRefused(program=schedule.name, where=schedule.where(row), reason=reason, trace=lines)


def _refuse(
    schedule: Schedule,
    verdict: tuple[int, int, int, int, int],
    contents: _Contents,
    order: NDArray[np.int32],
    iterations: int,
) -> None:
    kind, a, b, atom, iteration = verdict
    row = schedule.instructions.row
    if kind == core.DEADLOCK:
        _refuse_deadlock(schedule, a)
    if kind == core.POSTS:
        poster = int(schedule.worker_rank[schedule.semaphore_poster[a]])
        waiter = int(schedule.worker_rank[schedule.semaphore_waiter[a]])
        reason = f"rank {poster} posts {b} times for rank {waiter}, but the schedule counts on"
        reason += f" {schedule.semaphore_posts[a]} a call or iteration"
        _raise(schedule, -1, reason, [])
    if kind == core.TOO_LARGE:
        reason = f"it is too large to be judged: {len(schedule.worker_rank)} workers, too many of them ahead of others"
        _raise(schedule, int(row[b]), reason, [])
    name = schedule.chunk_name(atom)
    again = f", in iteration {iteration}" if iteration else ""
    if kind == core.WRONG:
        reason = f"{name} does not hold what it must: {_difference(schedule, contents, order, atom)}"
        _raise(schedule, _row_of_store(schedule, a, atom) if a >= 0 else -1, reason, [a] if a >= 0 else [])
    reasons = {
        core.RACE_READ: f"{name} is read while it may still be written{again}",
        core.RACE_WRITE: f"{name} is overwritten while it may still be in use{again}",
        core.RACE_START: f"{name} is touched although its rank may not have begun the call",
        core.RACE_END: f"{name} is touched although its rank's call may be over",
        core.UNWRITTEN: f"{name} is read before anything was written there{again}",
        core.LENGTHS: f"{name} holds a chunk of another length class than the one it is used as",
        core.INPUT_CHANGED: f"{name} is overwritten, but a call that is not in place must leave its input alone",
    }
    steps = [b, a] if a != b and a >= 0 else [b]
    _raise(schedule, int(row[b if kind == core.RACE_END else a]), reasons[kind], steps)


def _refuse_deadlock(schedule: Schedule, worker: int) -> None:
    """Replay which worker is blocked where, and follow who waits for whom until somebody comes twice."""
    blocked = _blocked(schedule)
    seen: list[int] = []
    while worker in blocked and worker not in seen:
        seen.append(worker)
        worker = int(schedule.semaphore_poster[blocked[worker][1]])
    cycle = seen[seen.index(worker) :] if worker in seen else seen
    steps = [blocked[one][0] for one in cycle]
    ranks = ", ".join(str(schedule.worker_rank[one]) for one in cycle[:_TRACE_STEPS])
    ending = "for each other" if worker in seen else "for a post that nobody makes"
    more = ", ..." if len(cycle) > _TRACE_STEPS else ""
    who = f"rank {ranks} waits" if len(cycle) == 1 else f"ranks {ranks}{more} wait"
    _raise(schedule, int(schedule.instructions.row[steps[0]]), f"{who} {ending}", steps)


def _blocked(schedule: Schedule) -> dict[int, tuple[int, int]]:
    """Where a stuck schedule stands: worker -> (instruction, semaphore). Which worker goes first does not matter."""
    one = schedule.instructions
    iterations = schedule.depth + 1 if schedule.loops else 1
    posted = np.zeros(len(schedule.semaphore_posts), np.int64)
    stands: dict[int, tuple[int, int]] = {}
    sequences = {}
    for worker in range(len(schedule.worker_rank)):
        span = range(int(schedule.worker_start[worker]), int(schedule.worker_start[worker + 1]))
        body = [at for at in span if one.kind[at] < START]
        first = [(at, 0) for at in span if one.kind[at] == START]
        last = [(at, iterations - 1) for at in span if one.kind[at] == END]
        sequences[worker] = first + [(at, turn) for turn in range(iterations) for at in body] + last
    at_step = dict.fromkeys(sequences, 0)
    moving = True
    while moving:
        moving = False
        for worker, sequence in sequences.items():
            stands.pop(worker, None)
            while at_step[worker] < len(sequence):
                at, turn = sequence[at_step[worker]]
                short = [
                    int(one.wait_semaphore[entry])
                    for entry in range(one.wait_start[at], one.wait_start[at + 1])
                    if posted[one.wait_semaphore[entry]] < _target(schedule, entry, turn)
                ]
                if short:
                    stands[worker] = (at, short[0])
                    break
                for entry in range(one.post_start[at], one.post_start[at + 1]):
                    posted[one.post_semaphore[entry]] += 1
                at_step[worker] += 1
                moving = True
    return stands


def _target(schedule: Schedule, entry: int, turn: int) -> int:
    one = schedule.instructions
    semaphore = one.wait_semaphore[entry]
    value = int(one.wait_value[entry])
    if schedule.semaphore_of_start[semaphore]:
        return value
    return value + (turn - int(one.wait_back[entry])) * int(schedule.semaphore_posts[semaphore])


def _difference(schedule: Schedule, contents: _Contents, order: NDArray[np.int32], atom: int) -> str:
    """What is missing and what is too much in an output chunk, by running the first iteration with real multisets."""
    one, contract = schedule.instructions, schedule.contract
    total = int(contents.total[atom])
    expected = Counter(
        int(item) for item in contract.total_items[contract.total_start[total] : contract.total_start[total + 1]]
    )
    if int(one.count.sum()) * max(expected.total(), 1) > _EXACT_TOUCHES:
        return "contributions are missing or counted twice"
    held: dict[int, Counter[int]] = {
        place: Counter([int(item)])
        for place, item in enumerate(contents.item)
        if item >= 0 and not contents.pending[place]
    }
    seen: set[int] = set()
    for at in (int(entry) for entry in order if entry >= 0):
        if at in seen or one.kind[at] > NEEDED:
            continue
        seen.add(at)
        sources = one.source_atom[one.source_start[at] : one.source_start[at + 1]]
        stores = one.store_atom[one.store_start[at] : one.store_start[at + 1]]
        for part in range(one.count[at]):
            if one.kind[at] == READY:
                held[int(stores[0]) + part] = Counter([int(contents.item[stores[0] + part])])
                continue
            value: Counter[int] = Counter()
            for source in sources:
                value.update(held.get(int(source) + part, Counter()))
            for store in stores:
                held[int(store) + part] = value
        if len(seen) == len(one):
            break
    found = held.get(atom, Counter())
    if not found:
        return "nothing was written there"
    missing, extra = expected - found, found - expected
    said = [f"{_item_names(schedule, missing)} missing"] if missing else []
    said += [f"{_item_names(schedule, extra)} too much"] if extra else []
    return ", ".join(said) or "its contributions are right in the first iteration only"


def _item_names(schedule: Schedule, items: Counter[int]) -> str:
    first = schedule.contract.first_item
    names = []
    for item in sorted(items)[:3]:
        rank = int(np.searchsorted(first, item, side="right")) - 1
        names.append(f"input[{(item - int(first[rank])) // schedule.grain}] of rank {rank}")
    return ", ".join(names) + (", ..." if len(items) > 3 else "")
