"""A traced program over *atoms*, the pieces that operations move whole: where they lie, in which order, staged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ProgramRefused
from . import passes
from .contract import Contract
from .language import COLUMNS, COPY, INPUT, OUTPUT, READY, REDUCE, Trace

Ints = NDArray[np.int32]


@dataclass
class Operations:
    """Operations in a valid sequential order, over atoms."""

    kind: Ints
    source: Ints
    to: Ints
    count: Ints
    executor: Ints  # rank
    channel: Ints
    row: Ints

    def take(self, order: NDArray[np.int64]) -> Operations:
        return Operations(
            self.kind[order], self.source[order], self.to[order], self.count[order], self.executor[order],
            self.channel[order], self.row[order],
        )  # fmt: skip


@dataclass
class Memory:
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


def lay_out(trace: Trace, contract: Contract, grain: int, in_place: bool) -> Memory:
    ranks, buffers = contract.ranks, len(trace.buffers)
    size, first = np.zeros((ranks, buffers), np.int32), np.zeros((ranks, buffers), np.int32)
    size[:, INPUT], size[:, OUTPUT] = contract.inputs, contract.outputs
    for rank in range(ranks):
        for buffer in range(2, buffers):
            size[rank, buffer] = trace.scratch_size(rank, buffer) * grain
    first[:, :2], user_atoms = contract.user_places(in_place)
    at = user_atoms
    for rank in range(ranks):
        for buffer in range(2, buffers):
            first[rank, buffer] = at
            at += int(size[rank, buffer])
    return Memory(first, size, list(trace.buffers), user_atoms, at)


def over_atoms(trace: Trace, memory: Memory, grain: int) -> Operations:
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
    made = Operations(
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


def start_classes(contract: Contract, memory: Memory, operations: Operations) -> Ints:
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


def check_sources(trace: Trace, operations: Operations, start_class: Ints, memory: Memory) -> None:
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


def by_level(operations: Operations, atoms: int) -> Operations:
    """Sorted by how much must come before: what can start early stands early, in every worker's order too."""
    level = passes.levels(operations.kind, operations.source, operations.to, operations.count, atoms)
    return operations.take(np.argsort(level, kind="stable"))


def stage(operations: Operations, memory: Memory, slots: int, publish: bool = False) -> tuple[Operations, Memory]:
    """Every operation between ranks becomes a push into a slot at the receiver and a local operation from it.

    `publish`: what several ranks take as it is goes into one slot at its sender instead, and each of them reads there.
    """
    rank_of = memory.rank_of()
    moves = operations.kind <= REDUCE
    source_rank = np.where(moves, rank_of[np.where(moves, operations.source, 0)], operations.executor)
    to_rank = rank_of[operations.to]
    remote = np.flatnonzero(moves & (source_rank != to_rank))
    ranks = len(memory.first)
    sender, receiver = source_rank[remote].astype(np.int64), to_rank[remote].astype(np.int64)
    channel = np.maximum(operations.channel[remote], 0).astype(np.int64)
    message, opening = np.arange(len(remote)), np.arange(len(remote))  # of each operation, and the first of each
    if publish:
        written = passes.last_writes(operations.kind, operations.source, operations.to, operations.count, memory.atoms)
        what = np.column_stack([operations.source[remote], operations.count[remote], channel, written[remote]])
        _, opening, message = np.unique(what, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(opening)  # messages of a connection come in the order of the program
        message, opening = np.argsort(order)[message.ravel()], opening[order]
    taken_once = np.bincount(message, minlength=len(opening)) == 1
    sender, channel = sender[opening], channel[opening]
    home = np.where(taken_once, receiver[opening], sender)
    key = (home * ranks + sender) * (channel.max(initial=0) + 1) + channel
    connections, connection = np.unique(key, return_inverse=True)
    closing = np.zeros(len(opening), np.int64)
    np.maximum.at(closing, message, np.arange(len(remote)))
    messages = np.bincount(connection, minlength=len(connections))
    slot, used = passes.slots_of(connection, opening, closing, np.cumsum(messages) - messages, slots)
    widest = np.zeros(len(connections), np.int64)
    np.maximum.at(widest, connection, operations.count[remote[opening]])
    room = used * widest
    # Connections are sorted by where they end, so a rank's staging is one range of atoms.
    first = memory.atoms + np.cumsum(room) - room
    staged_at = first[connection] + slot * widest[connection]
    size = np.zeros(ranks, np.int64)
    np.add.at(size, connections // (channel.max(initial=0) + 1) // ranks, room)
    grown = Memory(
        np.column_stack([memory.first, memory.atoms + np.cumsum(size) - size]).astype(np.int32),
        np.column_stack([memory.size, size]).astype(np.int32),
        [*memory.names, "staging"],
        memory.user_atoms,
        memory.atoms + int(size.sum()),
    )
    repeat = np.ones(len(operations.kind), np.int64)
    repeat[remote[opening]] = 2
    at = np.cumsum(repeat) - repeat
    made = operations.take(np.repeat(np.arange(len(repeat)), repeat))
    push, pull = at[remote[opening]], at[remote] + repeat[remote] - 1
    made.kind[push], made.to[push], made.executor[push] = COPY, staged_at, sender
    made.source[pull], made.executor[pull] = staged_at[message], to_rank[remote]
    return made, grown
