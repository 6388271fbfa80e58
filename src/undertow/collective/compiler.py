"""From a traced program to a schedule: order, stage, fuse, drop dead stores, give to workers, synchronise.

Two targets. *direct*: user buffers lie in symmetric memory, a copy is pushed by its source's rank, a reduction pulled
by its destination's. *staged*: user buffers are private; whatever crosses ranks goes through slots of a staging buffer
at the receiver (written by the sender, read by the receiver, used again after `slots` messages of the connection). It
also is the form in which messages cross nodes. Where ranks share memory, what several of them take can be *published*:
written once, into a slot at its sender that all of them read. Both targets end in the same four verbs, and the same
checker judges both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument
from .atoms import Ints, Memory, Operations, by_level, check_sources, lay_out, over_atoms, stage, start_classes
from .contract import Contract
from .grouping import MAX_WORKERS, Groups, assign, classes_of, group, regrouped, reordered
from .language import COLUMNS, Trace
from .schedule import END, START, Instructions, Schedule
from .semaphores import distinct, number, starts
from .synchronise import find_waits

TARGETS = ("direct", "staged")
SLOTS = 2
DEPTH = 2
MOST = 1 << 16
"""Instances, workers, slots and iterations under way: more would fit into no schedule."""
_WINDOW_BYTES = 64 << 20
_OF_START, _OF_PACKETS, _SORTS = 1, 2, 3  # sorts of semaphores


def compile_trace(
    trace: Trace,
    *,
    in_place: bool = False,
    target: str = "staged",
    instances: int = 1,
    workers: int | None = None,
    slots: int = SLOTS,
    depth: int = DEPTH,
    packets: bool = False,
    publish: bool = False,
    fuse: bool = True,
    check: bool = True,
) -> Schedule:
    """`trace` as a schedule for `target`, checked unless told otherwise.

    `in_place`: input and output are one memory. `instances`: workers of the whole program, each on its part of every
    chunk. `workers`: of a rank, at most; None for as many as channels and `parallel` ask for. `slots`: messages that a
    staged connection may hold. `depth`: iterations that may be under way before scratch is used again. `packets`:
    staged data carries its own flags, for short messages. `publish`: what several ranks take is staged once, where they
    read it; for ranks that share memory.
    """
    if target not in TARGETS:
        raise InvalidArgument(argument="target", was=repr(target), must=f"one of {', '.join(TARGETS)}")
    counts = {"instances": instances, "workers": 1 if workers is None else workers, "slots": slots, "depth": depth}
    for name, value in counts.items():
        if not isinstance(value, int | np.integer) or not 1 <= value <= MOST:
            raise InvalidArgument(argument=name, was=repr(value), must=f"a whole number from 1 to {MOST}")
    if packets and target != "staged":
        raise InvalidArgument(argument="packets", was=True, must="False for a direct target: nothing is staged there")
    if publish and (packets or target != "staged"):
        must = "False for a direct target, which stages nothing, and for packets, which are polled where they arrive"
        raise InvalidArgument(argument="publish", was=True, must=must)
    if packets:
        # A packet proves its own arrival and nothing else: what it teaches of plain memory holds for the worker that
        # read it, so there is only one.
        workers = 1
    if in_place and trace.contract.in_place is None:
        must = f"False: {trace.contract.name} has no form in place"
        raise InvalidArgument(argument="in_place", was=True, must=must)
    grain = trace.grain()
    contract = trace.contract.refined(grain)
    memory = lay_out(trace, contract, grain, in_place)
    operations = over_atoms(trace, memory, grain)
    start_class = start_classes(contract, memory, operations)
    check_sources(trace, operations, start_class.copy(), memory)
    operations = by_level(operations, memory.atoms)
    if target == "staged":
        # Within an iteration a flag means one message, so packets never use a slot twice.
        operations, memory = stage(operations, memory, max(1, len(operations.kind)) if packets else slots, publish)
        operations = by_level(operations, memory.atoms)
    schedule = _schedule(
        trace, contract, operations, memory, start_class, in_place, target == "staged", packets, publish, instances,
        workers, depth, fuse,
    )  # fmt: skip
    if check:
        from .checker import check as check_schedule

        check_schedule(schedule)
    return schedule


def _schedule(
    trace: Trace,
    contract: Contract,
    operations: Operations,
    memory: Memory,
    start_class: Ints,
    in_place: bool,
    staged: bool,
    packets: bool,
    publish: bool,
    instances: int,
    workers: int | None,
    depth: int,
    fuse: bool,
) -> Schedule:
    groups = group(operations, memory, contract, fuse)
    rank_of = memory.rank_of()
    worker = assign(groups, rank_of, workers)
    ranks = contract.ranks
    seat = groups.executor.astype(np.int64) * MAX_WORKERS + worker
    taken = np.bincount(seat, minlength=ranks * MAX_WORKERS)
    taken[::MAX_WORKERS] += 1  # every rank has a first worker, which starts and ends its calls
    used = np.flatnonzero(taken)
    worker_of = np.searchsorted(used, seat).astype(np.int32)
    worker_rank = (used // MAX_WORKERS).astype(np.int32)
    start_worker = np.searchsorted(used, np.arange(ranks, dtype=np.int64) * MAX_WORKERS).astype(np.int32)
    total = len(groups.count)
    loops = memory.atoms > memory.user_atoms
    window = max(4 * len(used), min(max(total, 1), _WINDOW_BYTES // (4 * len(used))))
    waits, _, _ = find_waits(
        groups.kind, groups.count, groups.source_start, groups.source_atom, groups.store_start, groups.store_atom,
        worker_of, worker_rank, start_worker, rank_of, memory.user_atoms, depth, depth + 1 if loops else 1, window,
    )  # fmt: skip
    classes = classes_of(groups, memory, start_class)
    # Starts and ends as instructions of their own, first and last of their rank's first worker, where anybody cares.
    begins = distinct(waits[waits[:, 1] >= total, 1]) - total
    ends = distinct(waits[waits[:, 0] >= total, 0]) - total
    extra = len(begins) + len(ends)
    kind = np.concatenate([groups.kind, np.full(len(begins), START), np.full(len(ends), END)])
    of_worker = np.concatenate([worker_of, start_worker[begins], start_worker[ends]])
    rank_in_worker = np.concatenate([np.arange(1, total + 1), np.zeros(len(begins)), np.full(len(ends), total + 1)])
    order = np.lexsort((rank_in_worker, of_worker))
    place = np.empty(total + extra, np.int64)
    place[order] = np.arange(total + extra)
    start_place, end_place = np.full(ranks, -1), np.full(ranks, -1)
    start_place[begins] = place[total : total + len(begins)]
    end_place[ends] = place[total + len(begins) :]
    plain = place[:total]

    def moved(numbers: NDArray[np.int64], special: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(numbers < total, plain[np.minimum(numbers, max(total - 1, 0))] if total else 0,
                        special[np.maximum(numbers - total, 0)])  # fmt: skip

    waiter, waited, back = moved(waits[:, 0], end_place), moved(waits[:, 1], start_place), waits[:, 2]
    sizes = np.bincount(of_worker, minlength=len(used))
    worker_start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    of_place = of_worker[order]
    from_start = waits[:, 1] >= total
    by_packet = _by_packet(groups, waits, total, memory) if packets else np.zeros(len(waits), np.bool_)
    sort = np.where(from_start, _OF_START, np.where(by_packet, _OF_PACKETS, 0))
    numbered = number(waiter, waited, back, sort, of_place, len(used), _SORTS)
    count = np.concatenate([groups.count, np.zeros(extra, np.int32)])[order]
    none = np.full(extra, -1, np.int32)
    instructions = Instructions(
        kind=kind[order].astype(np.int32),
        count=count.astype(np.int32),
        number=np.concatenate([groups.number, none])[order],
        **reordered(groups, order, extra),
        class_start=starts(count),
        class_of=regrouped(classes, starts(groups.count), order, extra),
        wait_start=numbered.wait_start,
        wait_semaphore=numbered.wait_semaphore,
        wait_value=numbered.wait_value,
        wait_back=numbered.wait_back,
        post_start=numbered.post_start,
        post_semaphore=numbered.post_semaphore,
        row=np.concatenate([groups.row, none])[order],
    )
    rows = trace.rows()
    return Schedule(
        name=trace.name,
        contract=contract,
        topology=trace.topology,
        in_place=in_place,
        staged=staged,
        packets=packets,
        grain=contract.factor // trace.contract.factor,
        instances=instances,
        depth=depth,
        buffers=tuple(memory.names),
        first_atom=memory.first,
        atoms=memory.size,
        user_atoms=memory.user_atoms,
        instructions=instructions,
        worker_start=worker_start,
        worker_rank=worker_rank,
        semaphore_poster=numbered.poster,
        semaphore_waiter=numbered.waiter,
        semaphore_posts=numbered.posts,
        semaphore_of_start=numbered.sort == _OF_START,
        semaphore_of_packets=numbered.sort == _OF_PACKETS,
        publishes=publish,
        codes=tuple(trace.codes),
        rows=rows[:, [COLUMNS.index("code"), COLUMNS.index("line")]],
    )


def _by_packet(groups: Groups, waits: NDArray[np.int64], total: int, memory: Memory) -> NDArray[np.bool_]:
    """Which waits are for data that arrives in packets: the one waited for stores to staging that the waiter reads."""
    staging = int(memory.first[0, -1])
    found = np.zeros(len(waits), np.bool_)
    for index, (waiter, waited, back) in enumerate(waits):
        if waiter < total and waited < total and back == 0:
            read = groups.source_atom[groups.source_start[waiter] : groups.source_start[waiter + 1]]
            stored = groups.store_atom[groups.store_start[waited] : groups.store_start[waited + 1]]
            found[index] = bool(np.intersect1d(read[read >= staging], stored).size)
    return found
