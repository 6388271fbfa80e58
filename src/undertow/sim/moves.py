"""A schedule as the core reads it: one row an instruction, and the routes that its messages take on a network.

Rows stand in the order in which they are likely to be run: everybody's first instruction, everybody's second, ... That
way a schedule of millions of instructions, which no cache holds, is read from front to back.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..collective.schedule import END, MOVE, START, Schedule
from . import workers
from .network import Floats, Ints, Network

Rows = NDArray[np.int32]
_KEPT: weakref.WeakKeyDictionary[Schedule, tuple[weakref.ref[Network], Moves]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Moves:
    """Tables with the columns that `workers` names. `pulls` and `pushes` are routes, `posts` semaphores.

    `instruction[i]` is the schedule's number of row i.
    """

    instruction: Ints
    steps: Rows
    waits: Rows
    posts: Rows
    pulls: Rows
    pushes: Rows
    class_of: Rows
    workers: Ints
    semaphores: Ints
    signal_seconds: Floats
    route_start: Ints
    route_link: Ints
    request_seconds: Floats


def moves_of(schedule: Schedule, network: Network) -> Moves:
    """Which routes each instruction uses: sources on other ranks are pulled, stores on other ranks pushed.

    Kept with the schedule, for it is often run again with other sizes.
    """
    kept = _KEPT.get(schedule)
    if kept is not None and kept[0]() is network:
        return kept[1]
    found = _moves(schedule, network)
    _KEPT[schedule] = weakref.ref(network), found
    return found


def _moves(schedule: Schedule, network: Network) -> Moves:
    one, ranks = schedule.instructions, schedule.ranks
    order = _order(schedule)
    row = np.empty(len(one), np.int64)
    row[order] = np.arange(len(one))
    pull_sizes, pull_pair = _remote(schedule, one.source_start, one.source_atom, order, pulls=True)
    push_sizes, push_pair = _remote(schedule, one.store_start, one.store_atom, order, pulls=False)
    poster = schedule.worker_rank[schedule.semaphore_poster].astype(np.int64)
    waiter = schedule.worker_rank[schedule.semaphore_waiter].astype(np.int64)
    signal, away = poster * ranks + waiter, poster != waiter
    pulled, pushed = _distinct(pull_pair, ranks), _distinct(push_pair, ranks)
    request = pulled % ranks * ranks + pulled // ranks
    wanted = np.unique(np.concatenate([pulled, pushed, request, signal[away]]))
    routes = network.routes(wanted // ranks, wanted % ranks)
    latency = routes.latency(network.latencies)
    # A pull's request travels the other way; the other way of a push is nobody's business.
    back = np.zeros(len(wanted))
    back[np.searchsorted(wanted, pulled)] = latency[np.searchsorted(wanted, request)]
    signal_seconds = np.zeros(len(signal))
    signal_seconds[away] = latency[np.searchsorted(wanted, signal[away])]
    wait_entry, post_entry = _entries(one.wait_start, order), _entries(one.post_start, order)
    class_sizes = one.count[order]
    columns = np.empty((workers.STEP_COLUMNS, len(one)), np.int32)
    columns[workers.KIND], columns[workers.NUMBER], columns[workers.COUNT] = (
        one.kind[order],
        one.number[order],
        class_sizes,
    )
    columns[workers.CLASS] = np.cumsum(class_sizes) - class_sizes
    for low, high, sizes in (
        (workers.WAIT_FROM, workers.WAIT_TO, np.diff(one.wait_start)[order]),
        (workers.POST_FROM, workers.POST_TO, np.diff(one.post_start)[order]),
        (workers.PULL_FROM, workers.PULL_TO, pull_sizes),
        (workers.PUSH_FROM, workers.PUSH_TO, push_sizes),
    ):
        np.cumsum(sizes, out=columns[high])
        np.subtract(columns[high], sizes, out=columns[low], casting="unsafe")
    columns[workers.NEXT] = np.append(row[1:], 0)[order]
    steps = np.ascontiguousarray(columns.T)
    found = _workers(schedule, row, steps)
    return Moves(
        order, steps,
        np.stack([one.wait_semaphore, one.wait_value, one.wait_back], axis=1)[wait_entry],
        one.post_semaphore[post_entry], _places(wanted, pull_pair, ranks), _places(wanted, push_pair, ranks),
        one.class_of[_entries(one.class_start, order)], found, _semaphores(schedule), signal_seconds, routes.start,
        routes.links, back,
    )  # fmt: skip


def _entries(start: NDArray[np.int32], order: Ints) -> Ints:
    """Where the entries of compressed rows stood, rows in another order."""
    sizes = np.diff(start)[order].astype(np.int64)
    if (sizes == 1).all():
        return start[:-1][order].astype(np.int64)
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes) + np.repeat(start[order], sizes)


def _remote(
    schedule: Schedule, start: NDArray[np.int32], atom: NDArray[np.int32], order: Ints, *, pulls: bool
) -> tuple[Ints, Ints]:
    """Of each row, how many entries lie on other ranks; of these, the (from, to) pairs as from * ranks + to.

    Pushes follow each other as the program has them. Of pulls, each rank's next neighbour is first: the runtimes read
    all sources of a sum piece by piece, so that none is first, and were all to ask rank 0 first, its port would make
    them wait.
    """
    rank = np.repeat(schedule.worker_rank, np.diff(schedule.worker_start)).astype(np.int64)
    owner = np.repeat(np.arange(len(rank)), np.diff(start))
    there = schedule.atom_rank[atom].astype(np.int64)
    away = np.flatnonzero((there != rank[owner]) & (schedule.instructions.kind[owner] == MOVE))
    owner, there = owner[away], there[away]
    sizes = np.bincount(owner, minlength=len(rank))
    if pulls and sizes.max(initial=0) > 1:
        there = there[np.lexsort(((there - rank[owner]) % schedule.ranks, owner))]
    pair = there * schedule.ranks + rank[owner] if pulls else rank[owner] * schedule.ranks + there
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return sizes[order], pair[_entries(starts, order)]


def _order(schedule: Schedule) -> Ints:
    """Instructions by their place in their worker, then by worker."""
    lengths = np.diff(schedule.worker_start)
    if len(lengths) and (lengths == lengths[0]).all():
        return np.arange(len(schedule.instructions)).reshape(len(lengths), -1).T.ravel()
    worker = np.repeat(np.arange(len(lengths)), lengths)
    return np.lexsort((worker, np.arange(len(worker)) - schedule.worker_start[worker]))


def _places(wanted: Ints, pairs: Ints, ranks: int) -> Rows:
    """Where each pair stands in `wanted`; by a table of all pairs where there are many to look up."""
    if ranks * ranks > 8 * len(pairs) + 1024:
        return np.searchsorted(wanted, pairs).astype(np.int32)
    table = np.zeros(ranks * ranks, np.int32)
    table[wanted] = np.arange(len(wanted))
    return np.asarray(table[pairs])


def _distinct(pairs: Ints, ranks: int) -> Ints:
    """Each pair once, in order. A mark for each that could exist is quicker than sorting those that do."""
    if ranks * ranks > 8 * len(pairs) + 1024:
        return np.unique(pairs)
    marked = np.zeros(ranks * ranks, np.bool_)
    marked[pairs] = True
    return np.flatnonzero(marked)


def _workers(schedule: Schedule, row: Ints, steps: Rows) -> Ints:
    """The rows of workers; marks in `steps` where their loops end: by the row behind the loop, negative."""
    start, kind = schedule.worker_start.astype(np.int64), schedule.instructions.kind
    found = np.full((len(schedule.worker_rank), 4), -1, np.int64)
    found[:, workers.RANK] = schedule.worker_rank
    busy = np.flatnonzero(start[1:] > start[:-1])
    first, last = start[:-1][busy], start[1:][busy]
    found[busy, workers.FIRST] = row[first]
    body = first + (kind[first] == START)
    ends = last - (kind[last - 1] == END)
    steps[row[last - 1], workers.NEXT] = len(steps)
    loops = ends > body
    found[busy[loops], workers.BODY] = row[body[loops]]
    behind = np.where(ends < last, row[np.minimum(ends, len(row) - 1)], len(steps))
    steps[row[ends[loops] - 1], workers.NEXT] = -behind[loops]
    return found


def _semaphores(schedule: Schedule) -> Ints:
    """A start is posted once a call, everything else once an iteration or more."""
    found = np.zeros((len(schedule.semaphore_posts), workers.SEMAPHORE_COLUMNS), np.int64)
    found[:, workers.OLDEST_POST] = -1
    found[:, workers.WAITER] = schedule.semaphore_waiter
    found[:, workers.EACH_TURN] = np.where(schedule.semaphore_of_start, 0, schedule.semaphore_posts)
    return found
