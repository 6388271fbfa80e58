"""Operations that one worker can do in one instruction, without dead stores, and which worker of a rank does them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import passes
from .atoms import Ints, Memory, Operations
from .contract import Contract
from .language import NEEDED, OUTPUT, READY, REDUCE
from .schedule import MOVE
from .semaphores import starts

MAX_WORKERS = 64  # a rank


@dataclass
class Groups:
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


def group(operations: Operations, memory: Memory, contract: Contract, enabled: bool) -> Groups:
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
    made = Groups(
        np.where(kind == REDUCE, MOVE, kind).astype(np.int32), operations.count[first],
        np.where(kind >= READY, operations.source[first], -1).astype(np.int32), operations.executor[first],
        operations.channel[first], operations.row[first], starts(np.bincount(owners, minlength=groups)),
        atoms[order].astype(np.int32), operations.row[rows[order]],
        starts(np.bincount(group[storing], minlength=groups)), operations.to[storing], operations.row[storing],
    )  # fmt: skip
    return _sorted_by_level(_without_dead_stores(made, memory, contract), memory.atoms) if enabled else made


def _sorted_by_level(groups: Groups, atoms: int) -> Groups:
    """Fusing moved operations forward to the first of their group: say again what can start when."""
    level = passes.group_levels(
        groups.kind, groups.number, groups.count, groups.source_start, groups.source_atom, groups.store_start,
        groups.store_atom, atoms,
    )  # fmt: skip
    order = np.argsort(level, kind="stable")
    return Groups(
        groups.kind[order], groups.count[order], groups.number[order], groups.executor[order], groups.channel[order],
        groups.row[order], **reordered(groups, order, 0),
    )  # fmt: skip


def _without_dead_stores(groups: Groups, memory: Memory, contract: Contract) -> Groups:
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
    return Groups(
        groups.kind[alive], groups.count[alive], groups.number[alive], groups.executor[alive], groups.channel[alive],
        groups.row[alive], starts(np.diff(groups.source_start)[alive]), groups.source_atom[reading],
        groups.source_row[reading], starts(left[alive]), groups.store_atom[keep], groups.store_row[keep],
    )  # fmt: skip


def assign(groups: Groups, rank_of: Ints, workers: int | None) -> Ints:
    """A worker of its rank for each instruction: its channel's, or by the peer it talks to."""
    asked = int(groups.channel.max(initial=-1)) + 1
    limit = min(workers if workers is not None else max(asked, 1), MAX_WORKERS)
    if limit == 1:
        return np.zeros(len(groups.count), np.int32)
    by_peer = _peer_turn(groups, rank_of)
    return np.where(groups.channel >= 0, groups.channel, by_peer if workers is not None else 0).astype(np.int32) % limit


def _peer_turn(groups: Groups, rank_of: Ints) -> Ints:
    """How far away the first other rank is that an instruction reads or writes; 0 for local ones."""
    found = np.zeros(len(groups.count), np.int64)
    ranks = int(rank_of.max(initial=0)) + 1
    for start, atom in ((groups.source_start, groups.source_atom), (groups.store_start, groups.store_atom)):
        owner = np.repeat(np.arange(len(groups.count)), np.diff(start))
        away = (rank_of[atom] - groups.executor[owner]) % ranks
        remote = away > 0
        found[owner[remote]] = away[remote] - 1
    return found.astype(np.int32)


def classes_of(groups: Groups, memory: Memory, start_class: Ints) -> Ints:
    """The length class of every chunk that every instruction moves."""
    held = np.full(memory.atoms, -1, np.int32)
    held[: len(start_class)] = start_class
    found = np.empty(int(groups.count.sum()), np.int32)
    passes.class_of_groups(
        groups.kind, groups.count, groups.source_start, groups.source_atom, groups.store_start, groups.store_atom, held,
        found,
    )  # fmt: skip
    return found


def regrouped(values: Ints, start: Ints, order: NDArray[np.int64], extra: int) -> Ints:
    """The entries of compressed rows, rows in another order; `extra` empty rows at the end."""
    sizes = np.concatenate([np.diff(start), np.zeros(extra, np.int64)])[order]
    begin = np.concatenate([start[:-1], np.zeros(extra, np.int64)])[order]
    index = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes) + np.repeat(begin, sizes)
    return np.asarray(values[index], np.int32)


def reordered(groups: Groups, order: NDArray[np.int64], extra: int) -> dict[str, Ints]:
    def start(of: Ints) -> Ints:
        return starts(np.concatenate([np.diff(of), np.zeros(extra, np.int64)])[order])

    return {
        "source_start": start(groups.source_start),
        "source_atom": regrouped(groups.source_atom, groups.source_start, order, extra),
        "source_row": regrouped(groups.source_row, groups.source_start, order, extra),
        "store_start": start(groups.store_start),
        "store_atom": regrouped(groups.store_atom, groups.store_start, order, extra),
        "store_row": regrouped(groups.store_row, groups.store_start, order, extra),
    }
