"""From a traced program to a schedule: order, stage, fuse, drop dead stores, give to workers, synchronise.

Two targets. *direct*: user buffers lie in symmetric memory, a copy is pushed by its source's rank, a reduction pulled
by its destination's. *staged*: user buffers are private; whatever crosses ranks goes through slots of a staging buffer
at the receiver (written by the sender, read by the receiver, used again after `slots` messages of the connection). It
also is the form in which messages cross nodes. Both end in the same four verbs, and the same checker judges both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument, ProgramRefused
from . import passes
from .contract import Contract
from .language import COLUMNS, COPY, INPUT, NEEDED, OUTPUT, READY, REDUCE, Trace
from .schedule import END, MOVE, START, Instructions, Schedule
from .semaphores import distinct, number, starts
from .synchronise import find_waits

TARGETS = ("direct", "staged")
MAX_WORKERS = 64  # a rank
SLOTS = 2
DEPTH = 2
_WINDOW_BYTES = 64 << 20
_OF_START, _OF_PACKETS, _SORTS = 1, 2, 3  # sorts of semaphores
Ints = NDArray[np.int32]


@dataclass
class _Operations:
    """Operations in a valid sequential order, over atoms."""

    kind: Ints
    source: Ints
    to: Ints
    count: Ints
    executor: Ints  # rank
    channel: Ints
    row: Ints

    def take(self, order: NDArray[np.int64]) -> _Operations:
        return _Operations(
            self.kind[order], self.source[order], self.to[order], self.count[order], self.executor[order],
            self.channel[order], self.row[order],
        )  # fmt: skip


@dataclass
class _Memory:
    """Where atoms lie: user buffers first, rank by rank, then scratch and staging."""

    first: Ints  # [rank, buffer]
    size: Ints  # [rank, buffer]
    names: list[str]
    user_atoms: int
    atoms: int

    def rank_of(self) -> Ints:
        found = np.zeros(self.atoms, np.int32)
        for rank in range(len(self.first)):
            for first, size in zip(self.first[rank], self.size[rank], strict=True):
                found[first : first + size] = rank
        return found


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
    fuse: bool = True,
    check: bool = True,
) -> Schedule:
    """`trace` as a schedule for `target`, checked unless told otherwise.

    `in_place`: input and output are one memory. `instances`: workers of the whole program, each on its part of every
    chunk. `workers`: of a rank, at most; None for as many as channels and `parallel` ask for. `slots`: messages that a
    staged connection may hold. `depth`: iterations that may be under way before scratch is used again. `packets`:
    staged data carries its own flags, for short messages.
    """
    if target not in TARGETS:
        raise InvalidArgument(argument="target", was=repr(target), must=f"one of {', '.join(TARGETS)}")
    counts = {"instances": instances, "workers": 1 if workers is None else workers, "slots": slots, "depth": depth}
    for name, value in counts.items():
        if value < 1:
            raise InvalidArgument(argument=name, was=value, must="at least 1")
    if packets and target != "staged":
        raise InvalidArgument(argument="packets", was=True, must="False for a direct target: nothing is staged there")
    if packets:
        # A packet proves its own arrival and nothing else: what it teaches of plain memory holds for the worker that
        # read it, so there is only one.
        workers = 1
    if in_place and trace.contract.in_place is None:
        must = f"False: {trace.contract.name} has no form in place"
        raise InvalidArgument(argument="in_place", was=True, must=must)
    grain = trace.grain()
    contract = trace.contract.refined(grain)
    memory = _lay_out(trace, contract, grain, in_place)
    operations = _over_atoms(trace, memory, grain)
    start_class = _start_classes(contract, memory, operations)
    _check_sources(trace, operations, start_class.copy(), memory)
    operations = _by_level(operations, memory.atoms)
    if target == "staged":
        # Within an iteration a flag means one message, so packets never use a slot twice.
        operations, memory = _stage(operations, memory, max(1, len(operations.kind)) if packets else slots)
        operations = _by_level(operations, memory.atoms)
    schedule = _schedule(
        trace, contract, operations, memory, start_class, in_place, target == "staged", packets, instances, workers,
        depth, fuse,
    )  # fmt: skip
    if check:
        from .checker import check as check_schedule

        check_schedule(schedule)
    return schedule


def _lay_out(trace: Trace, contract: Contract, grain: int, in_place: bool) -> _Memory:
    ranks, buffers = contract.ranks, len(trace.buffers)
    size, first = np.zeros((ranks, buffers), np.int32), np.zeros((ranks, buffers), np.int32)
    size[:, INPUT], size[:, OUTPUT] = contract.inputs, contract.outputs
    for rank in range(ranks):
        for buffer in range(2, buffers):
            size[rank, buffer] = trace.scratch_size(rank, buffer) * grain
    at = 0
    for rank in range(ranks):
        if in_place:
            assert contract.in_place is not None
            holder = contract.holder(rank)
            held = OUTPUT if holder == INPUT else INPUT
            first[rank, holder], first[rank, held] = at, at + contract.in_place[rank]
            at += int(size[rank, holder])
        else:
            first[rank, INPUT], first[rank, OUTPUT] = at, at + size[rank, INPUT]
            at += int(size[rank, INPUT] + size[rank, OUTPUT])
    user_atoms = at
    for rank in range(ranks):
        for buffer in range(2, buffers):
            first[rank, buffer] = at
            at += int(size[rank, buffer])
    return _Memory(first, size, list(trace.buffers), user_atoms, at)


def _over_atoms(trace: Trace, memory: _Memory, grain: int) -> _Operations:
    """Rows of the trace as ranges of atoms; operations inside `parallel` as their pieces."""
    rows = trace.rows()
    column = {name: rows[:, index] for index, name in enumerate(COLUMNS)}
    index = np.arange(len(rows), dtype=np.int32)
    channel = column["channel"].copy()
    marks = column["kind"] >= READY
    piece = np.zeros(len(rows), np.int32)
    if (column["parallel"] > 1).any():
        pieces = np.where(column["parallel"] > 1, column["count"] * column["parallel"], 1)
        index = np.repeat(index, pieces)
        within = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        column = {name: values[index] for name, values in column.items()}
        marks = column["kind"] >= READY
        split = column["parallel"] > 1
        way, chunk = within % column["parallel"], within // column["parallel"]
        width = grain // column["parallel"]
        piece = np.where(split, chunk * grain + way * width, 0).astype(np.int32)
        count = np.where(split, width, column["count"] * grain)
        channel = np.where(split, np.maximum(column["channel"], 0) * column["parallel"] + way, column["channel"])
    else:
        count = column["count"] * grain
    source = memory.first[column["source_rank"], column["source_buffer"]] + column["source_start"] * grain + piece
    source = np.where(marks, column["source_start"], source)  # the parcel or tile
    to = memory.first[column["rank"], column["buffer"]] + column["start"] * grain + piece
    # A copy is pushed by its source, a reduction pulled by its destination.
    executor = np.where(column["kind"] == COPY, column["source_rank"], column["rank"])
    made = _Operations(
        column["kind"].astype(np.int32), source.astype(np.int32), to.astype(np.int32), count.astype(np.int32),
        executor.astype(np.int32), channel.astype(np.int32), index.astype(np.int32),
    )  # fmt: skip
    distance = np.abs(made.source - made.to)
    moves = made.kind <= REDUCE
    itself = moves & (made.kind == COPY) & (distance == 0)
    overlapping = np.flatnonzero(moves & ~itself & (distance < made.count))
    if len(overlapping):
        row = rows[made.row[overlapping[0]]]
        reason = "in place, what is read and what is written overlap there"
        raise ProgramRefused(program=trace.name, where=_where(trace, row), reason=reason, trace="")
    return made.take(np.flatnonzero(~itself))


def _where(trace: Trace, row: NDArray[np.int32]) -> str:
    code = trace.codes[row[COLUMNS.index("code")]]
    return f"{code.co_filename}:{row[COLUMNS.index('line')]}"


def _start_classes(contract: Contract, memory: _Memory, operations: _Operations) -> Ints:
    """The length class of what each atom holds before: -1 for nothing, -2 - class where a kernel has yet to make it."""
    found = np.full(memory.atoms, -1, np.int32)
    first_item = contract.first_item
    for rank in range(contract.ranks):
        begin = memory.first[rank, INPUT]
        found[begin : begin + contract.inputs[rank]] = contract.item_class[first_item[rank] : first_item[rank + 1]]
    for one in np.flatnonzero(operations.kind == READY):
        place = slice(operations.to[one], operations.to[one] + operations.count[one])
        found[place] = np.where(found[place] >= 0, -2 - found[place], found[place])
    return found


def _check_sources(trace: Trace, operations: _Operations, start_class: Ints, memory: _Memory) -> None:
    """Refuse, with its line, a program that reads what nobody wrote or adds chunks of different lengths."""
    offsets = np.concatenate([[0], np.cumsum(operations.count)])
    classes = np.empty(int(offsets[-1]), np.int32)
    verdict, one, atom = passes.contents(
        operations.kind, operations.source, operations.to, operations.count, start_class, classes, offsets
    )
    if verdict == passes.FINE:
        return
    rank_of = memory.rank_of()
    rank = int(rank_of[atom])
    inside = [
        number
        for number in range(len(memory.names))
        if memory.first[rank, number] <= atom < memory.first[rank, number] + memory.size[rank, number]
    ]
    name = f"{memory.names[inside[0]]}[{atom - memory.first[rank, inside[0]]}] of rank {rank}"
    reason = f"{name} is read before anything was written there"
    if verdict == passes.UNEQUAL:
        reason = f"{name} holds a chunk of another length class than the one that is added to it"
    where = _where(trace, trace.rows()[operations.row[one]])
    raise ProgramRefused(program=trace.name, where=where, reason=reason, trace="")


def _by_level(operations: _Operations, atoms: int) -> _Operations:
    """Sorted by how much must come before: what can start early stands early, in every worker's order too."""
    level = passes.levels(operations.kind, operations.source, operations.to, operations.count, atoms)
    return operations.take(np.argsort(level, kind="stable"))


def _stage(operations: _Operations, memory: _Memory, slots: int) -> tuple[_Operations, _Memory]:
    """Every operation between ranks becomes a push into a slot at the receiver and a local operation from it."""
    rank_of = memory.rank_of()
    moves = operations.kind <= REDUCE
    source_rank = np.where(moves, rank_of[np.where(moves, operations.source, 0)], operations.executor)
    to_rank = rank_of[operations.to]
    remote = np.flatnonzero(moves & (source_rank != to_rank))
    ranks = len(memory.first)
    channel = np.maximum(operations.channel[remote], 0).astype(np.int64)
    key = (to_rank[remote].astype(np.int64) * ranks + source_rank[remote]) * (channel.max(initial=0) + 1) + channel
    connections, connection = np.unique(key, return_inverse=True)
    order = np.argsort(connection, kind="stable")
    messages = np.bincount(connection, minlength=len(connections))
    begins = np.cumsum(messages) - messages
    ordinal = np.empty(len(remote), np.int64)
    ordinal[order] = np.arange(len(remote)) - np.repeat(begins, messages)
    widest = np.zeros(len(connections), np.int64)
    np.maximum.at(widest, connection, operations.count[remote])
    room = np.minimum(messages, slots) * widest
    receiver = connections // (channel.max(initial=0) + 1) // ranks
    # Connections are sorted by receiver, so a rank's staging is one range of atoms.
    first = memory.atoms + np.cumsum(room) - room
    staged_at = first[connection] + (ordinal % slots) * widest[connection]
    size = np.zeros(ranks, np.int64)
    np.add.at(size, receiver, room)
    grown = _Memory(
        np.column_stack([memory.first, memory.atoms + np.cumsum(size) - size]).astype(np.int32),
        np.column_stack([memory.size, size]).astype(np.int32),
        [*memory.names, "staging"],
        memory.user_atoms,
        memory.atoms + int(size.sum()),
    )
    repeat = np.ones(len(operations.kind), np.int64)
    repeat[remote] = 2
    at = np.cumsum(repeat) - repeat
    made = operations.take(np.repeat(np.arange(len(repeat)), repeat))
    push, pull = at[remote], at[remote] + 1
    made.kind[push], made.to[push], made.executor[push] = COPY, staged_at, source_rank[remote]
    made.source[pull], made.executor[pull] = staged_at, to_rank[remote]
    return made, grown


def _schedule(
    trace: Trace,
    contract: Contract,
    operations: _Operations,
    memory: _Memory,
    start_class: Ints,
    in_place: bool,
    staged: bool,
    packets: bool,
    instances: int,
    workers: int | None,
    depth: int,
    fuse: bool,
) -> Schedule:
    groups = _group(operations, memory, contract, fuse)
    rank_of = memory.rank_of()
    worker = _assign(groups, rank_of, workers)
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
    classes = _classes(groups, memory, start_class)
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
        **_reordered(groups, order, extra),
        class_start=starts(count),
        class_of=_regrouped(classes, starts(groups.count), order, extra),
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
        codes=tuple(trace.codes),
        rows=rows[:, [COLUMNS.index("code"), COLUMNS.index("line")]],
    )


def _by_packet(groups: _Groups, waits: NDArray[np.int64], total: int, memory: _Memory) -> NDArray[np.bool_]:
    """Which waits are for data that arrives in packets: the one waited for stores to staging that the waiter reads."""
    staging = int(memory.first[0, -1])
    found = np.zeros(len(waits), np.bool_)
    for index, (waiter, waited, back) in enumerate(waits):
        if waiter < total and waited < total and back == 0:
            read = groups.source_atom[groups.source_start[waiter] : groups.source_start[waiter + 1]]
            stored = groups.store_atom[groups.store_start[waited] : groups.store_start[waited + 1]]
            found[index] = bool(np.intersect1d(read[read >= staging], stored).size)
    return found


@dataclass
class _Groups:
    """Fused operations, in a valid sequential order."""

    kind: Ints
    count: Ints
    number: Ints
    executor: Ints
    channel: Ints
    row: Ints
    source_start: Ints
    source_atom: Ints
    source_row: Ints
    store_start: Ints
    store_atom: Ints
    store_row: Ints


def _group(operations: _Operations, memory: _Memory, contract: Contract, enabled: bool) -> _Groups:
    group, adds, groups = passes.fuse(
        operations.kind, operations.source, operations.to, operations.count, operations.executor, operations.channel,
        memory.atoms, enabled,
    )  # fmt: skip
    first = np.zeros(groups, np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]
    index = np.arange(len(group))
    kind = operations.kind[first]
    # Sources in the order of the program: the destination of a first reduction stands before what is added to it.
    adds_source = (adds & 1).astype(bool) & (operations.kind != NEEDED)
    own, added = np.flatnonzero(adds == 7), np.flatnonzero(adds_source)
    needed = np.flatnonzero(operations.kind == NEEDED)
    owners = np.concatenate([group[own], group[added], group[needed]])
    atoms = np.concatenate([operations.to[own], operations.source[added], operations.to[needed]])
    rows = np.concatenate([index[own], index[added], index[needed]])
    order = np.lexsort((np.concatenate([2 * own, 2 * added + 1, 2 * needed]), owners))
    storing = np.flatnonzero(adds & 2)
    store_order = np.argsort(group[storing], kind="stable")
    storing = storing[store_order]
    made = _Groups(
        np.where(kind == REDUCE, MOVE, kind).astype(np.int32), operations.count[first],
        np.where(kind >= READY, operations.source[first], -1).astype(np.int32), operations.executor[first],
        operations.channel[first], operations.row[first], starts(np.bincount(owners, minlength=groups)),
        atoms[order].astype(np.int32), operations.row[rows[order]],
        starts(np.bincount(group[storing], minlength=groups)), operations.to[storing], operations.row[storing],
    )  # fmt: skip
    return _sorted_by_level(_without_dead_stores(made, memory, contract), memory.atoms) if enabled else made


def _sorted_by_level(groups: _Groups, atoms: int) -> _Groups:
    """Fusing moved operations forward to the first of their group: say again what can start when."""
    level = passes.group_levels(
        groups.kind, groups.number, groups.count, groups.source_start, groups.source_atom, groups.store_start,
        groups.store_atom, atoms,
    )  # fmt: skip
    order = np.argsort(level, kind="stable")
    return _Groups(
        groups.kind[order], groups.count[order], groups.number[order], groups.executor[order], groups.channel[order],
        groups.row[order], **_reordered(groups, order, 0),
    )  # fmt: skip


def _without_dead_stores(groups: _Groups, memory: _Memory, contract: Contract) -> _Groups:
    """A value that nobody reads is not stored; an instruction that stores nothing is not run."""
    needed = np.zeros(memory.atoms, np.bool_)
    for rank, first_output in enumerate(contract.first_output[:-1]):
        wanted = contract.after[first_output : first_output + contract.outputs[rank]] >= 0
        begin = memory.first[rank, OUTPUT]
        needed[begin : begin + contract.outputs[rank]] = wanted
    keep = passes.live_stores(
        groups.kind,
        groups.count,
        groups.source_start,
        groups.source_atom,
        groups.store_start,
        groups.store_atom,
        needed,
    )
    owner = np.repeat(np.arange(len(groups.count)), np.diff(groups.store_start))
    left = np.bincount(owner[keep], minlength=len(groups.count))
    alive = (left > 0) | (groups.kind >= READY)
    if keep.all() and alive.all():
        return groups
    reading = np.repeat(alive, np.diff(groups.source_start))
    return _Groups(
        groups.kind[alive], groups.count[alive], groups.number[alive], groups.executor[alive], groups.channel[alive],
        groups.row[alive], starts(np.diff(groups.source_start)[alive]), groups.source_atom[reading],
        groups.source_row[reading], starts(left[alive]), groups.store_atom[keep], groups.store_row[keep],
    )  # fmt: skip


def _assign(groups: _Groups, rank_of: Ints, workers: int | None) -> Ints:
    """A worker of its rank for each instruction: its channel's, or by the peer it talks to."""
    asked = int(groups.channel.max(initial=-1)) + 1
    limit = min(workers if workers is not None else max(asked, 1), MAX_WORKERS)
    if limit == 1:
        return np.zeros(len(groups.count), np.int32)
    by_peer = _peer_turn(groups, rank_of)
    return np.where(groups.channel >= 0, groups.channel, by_peer if workers is not None else 0).astype(np.int32) % limit


def _peer_turn(groups: _Groups, rank_of: Ints) -> Ints:
    """How far away the first other rank is that an instruction reads or writes; 0 for local ones."""
    found = np.zeros(len(groups.count), np.int64)
    ranks = int(rank_of.max(initial=0)) + 1
    for start, atom in ((groups.source_start, groups.source_atom), (groups.store_start, groups.store_atom)):
        owner = np.repeat(np.arange(len(groups.count)), np.diff(start))
        away = (rank_of[atom] - groups.executor[owner]) % ranks
        remote = away > 0
        found[owner[remote]] = away[remote] - 1
    return found.astype(np.int32)


def _classes(groups: _Groups, memory: _Memory, start_class: Ints) -> Ints:
    """The length class of every chunk that every instruction moves."""
    held = np.full(memory.atoms, -1, np.int32)
    held[: len(start_class)] = start_class
    found = np.empty(int(groups.count.sum()), np.int32)
    passes.class_of_groups(
        groups.kind, groups.count, groups.source_start, groups.source_atom, groups.store_start, groups.store_atom, held,
        found,
    )  # fmt: skip
    return found


def _regrouped(values: Ints, start: Ints, order: NDArray[np.int64], extra: int) -> Ints:
    """The entries of compressed rows, rows in another order; `extra` empty rows at the end."""
    sizes = np.concatenate([np.diff(start), np.zeros(extra, np.int64)])[order]
    begin = np.concatenate([start[:-1], np.zeros(extra, np.int64)])[order]
    index = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes) + np.repeat(begin, sizes)
    return np.asarray(values[index], np.int32)


def _reordered(groups: _Groups, order: NDArray[np.int64], extra: int) -> dict[str, Ints]:
    def start(of: Ints) -> Ints:
        return starts(np.concatenate([np.diff(of), np.zeros(extra, np.int64)])[order])

    return {
        "source_start": start(groups.source_start),
        "source_atom": _regrouped(groups.source_atom, groups.source_start, order, extra),
        "source_row": _regrouped(groups.source_row, groups.source_start, order, extra),
        "store_start": start(groups.store_start),
        "store_atom": _regrouped(groups.store_atom, groups.store_start, order, extra),
        "store_row": _regrouped(groups.store_row, groups.store_start, order, extra),
    }
