"""The compiler's passes as loops over integer arrays, compiled by Numba. Each is linear in what it is given.

An *atom* is one chunk of one buffer of one rank, numbered over the whole group. Operations and instructions touch
ranges of atoms. Every pass takes a list in a valid sequential order and looks at each atom's last writer and readers:
the orders it keeps are exactly those that matter: read after write, write after read, write after write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..fabric import machine_code

COPY, REDUCE, READY, NEEDED = 0, 1, 2, 3
NOTHING = -1
FINE, UNDEFINED, UNEQUAL = 0, 1, 2  # verdicts of `contents`


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return machine_code.compiled(function, boundscheck=False)


@_compiled
def contents(kinds, sources, destinations, counts, start_class, classes, offsets):
    """The length class of what each operation moves, atom by atom, into `classes` at `offsets`.

    `start_class` holds each atom's class before, -1 where there is nothing; it is changed. Returns a verdict, the
    operation and the atom at fault.
    """
    for one in range(len(kinds)):
        kind, source, to = kinds[one], sources[one], destinations[one]
        for part in range(counts[one]):
            place = offsets[one] + part
            if kind == READY:
                classes[place] = -2 - start_class[to + part] if start_class[to + part] < -1 else start_class[to + part]
                start_class[to + part] = classes[place]
                continue
            atom = to + part if kind == NEEDED else source + part
            found = start_class[atom]
            if found < 0:
                return UNDEFINED, one, atom
            classes[place] = found
            if kind == REDUCE:
                held = start_class[to + part]
                if held < 0:
                    return UNDEFINED, one, to + part
                if held != found:
                    return UNEQUAL, one, to + part
            elif kind == COPY:
                start_class[to + part] = found
    return FINE, 0, 0


@_compiled
def levels(kinds, sources, destinations, counts, atoms):
    """How many operations must come before each one: the length of the longest chain that ends in it.

    What waits for a later parcel of a kernel comes after all that waits for an earlier one, so the parcel stands in the
    upper half of a level: levels grow along every chain all the same.
    """
    written, read = np.zeros(atoms, np.int64), np.zeros(atoms, np.int64)  # 1 + level of the last to do so
    found = np.empty(len(kinds), np.int64)
    for one in range(len(kinds)):
        kind, source, to, count = kinds[one], sources[one], destinations[one], counts[one]
        level = np.int64(source) << 32 if kind == READY else np.int64(0)
        reads = kind <= REDUCE
        for part in range(count):
            if reads:
                level = max(level, written[source + part])
            level = max(level, written[to + part])
            if kind != NEEDED:
                level = max(level, read[to + part])
        for part in range(count):
            if reads:
                read[source + part] = max(read[source + part], level + 1)
            if kind == NEEDED:
                read[to + part] = max(read[to + part], level + 1)
            else:
                written[to + part] = level + 1
                read[to + part] = 0
        found[one] = level
    return found


@_compiled
def last_writes(kinds, sources, destinations, counts, atoms):
    """Of each operation that moves something: the last one before it that wrote what it reads, -1 for none."""
    writer = np.full(atoms, NOTHING, np.int64)
    found = np.full(len(kinds), NOTHING, np.int64)
    for one in range(len(kinds)):
        if kinds[one] <= REDUCE:
            for part in range(counts[one]):
                found[one] = max(found[one], writer[sources[one] + part])
        if kinds[one] != NEEDED:
            for part in range(counts[one]):
                writer[destinations[one] + part] = one
    return found


@_compiled
def slots_of(connection, opening, closing, begins, slots):
    """The slot of each message among those of its connection, and how many each connection has.

    A message is in its slot from operation `opening` to `closing`; messages are sorted by the former, and connection c
    may take entries from `begins[c]` on for as many slots as it has messages. A slot is used again in turn, once there
    are `slots` of them, unless somebody has yet to read what is in all of them.
    """
    found, used = np.empty(len(connection), np.int64), np.zeros(len(begins), np.int64)
    turn, last = np.zeros(len(begins), np.int64), np.empty(len(connection), np.int64)
    for one in range(len(connection)):
        where = connection[one]
        slot = used[where]
        if slot >= slots:
            for step in range(used[where]):
                candidate = (turn[where] + step) % used[where]
                if last[begins[where] + candidate] < opening[one]:
                    slot = candidate
                    turn[where] = candidate + 1
                    break
        used[where] = max(used[where], slot + 1)
        last[begins[where] + slot] = closing[one]
        found[one] = slot
    return found, used


@_compiled
def _same_range(wanted, count, head, following, place):
    """Whether a linked list of ranges (all of `count` atoms) holds `wanted`."""
    while head != NOTHING:
        if place[head] == wanted:
            return True
        head = following[head]
    return False


@_compiled
def _apart(wanted, count, head, following, place):
    """Whether every range of a linked list (all of `count` atoms) is `wanted` or has nothing in common with it."""
    while head != NOTHING:
        if place[head] != wanted and abs(place[head] - wanted) < count:
            return False
        head = following[head]
    return True


@_compiled
def fuse(kinds, sources, destinations, counts, executors, channels, atoms, enabled):
    """Gather operations into instructions: sum a list of ranges once, store the sum to a list of ranges.

    An operation joins an earlier group only if the ranges are equal, the same rank and channel execute both, and
    everything it must come after lies in groups before that one (group numbers grow along all dependences, so the
    result cannot contain a cycle). Returns the group of each operation and per operation which operands it adds:
    bit 1 its source, bit 2 its destination, bit 4 its destination as a source (a reduction into memory).
    """
    total = len(kinds)
    writer = np.full(atoms, NOTHING, np.int32)
    reader, other_reader = np.full(atoms, NOTHING, np.int32), np.full(atoms, NOTHING, np.int32)
    group_of, adds = np.empty(total, np.int32), np.empty(total, np.int8)
    group_executor, group_channel = np.empty(total, np.int32), np.empty(total, np.int32)
    group_count, group_joins = np.empty(total, np.int32), np.zeros(total, np.bool_)
    source_head, source_size = np.full(total, NOTHING, np.int32), np.zeros(total, np.int32)
    store_head, store_size = np.full(total, NOTHING, np.int32), np.zeros(total, np.int32)
    # Operand lists: entry 2*i is the source of operation i, 2*i + 1 its destination.
    following = np.full(2 * total, NOTHING, np.int32)
    place = np.empty(2 * total, np.int32)
    groups = 0
    for one in range(total):
        kind, source, to, count = kinds[one], sources[one], destinations[one], counts[one]
        place[2 * one], place[2 * one + 1] = source, to
        joined = NOTHING
        if enabled and kind == COPY:
            for attempt in range(2):
                candidate = writer[source] if attempt == 0 else reader[source]
                if candidate == NOTHING or not group_joins[candidate]:
                    continue
                if group_executor[candidate] != executors[one] or group_channel[candidate] != channels[one]:
                    continue
                if group_count[candidate] != count:
                    continue
                if attempt == 0:
                    if not _same_range(source, count, store_head[candidate], following, place):
                        continue
                elif source_size[candidate] != 1 or place[source_head[candidate]] != source:
                    continue
                good, read_by_it = True, False
                for part in range(count):
                    atom, target = source + part, to + part
                    good = good and (writer[atom] == candidate if attempt == 0 else writer[atom] < candidate)
                    good = good and writer[target] < candidate
                    good = good and (reader[target] <= candidate) and (other_reader[target] < candidate)
                    read_by_it = read_by_it or reader[target] == candidate
                if good and read_by_it:  # read and written by one instruction: element by element, or not at all
                    good = _apart(to, count, source_head[candidate], following, place)
                if good:
                    joined = candidate
                    break
            if joined != NOTHING:
                adds[one] = 2
                following[2 * one + 1] = store_head[joined]
                store_head[joined] = 2 * one + 1
                store_size[joined] += 1
        elif enabled and kind == REDUCE:
            candidate = writer[to]
            if (
                candidate != NOTHING
                and group_joins[candidate]
                and group_executor[candidate] == executors[one]
                and group_channel[candidate] == channels[one]
                and group_count[candidate] == count
                and store_size[candidate] == 1
                and place[store_head[candidate]] == to
            ):
                good = True
                for part in range(count):
                    good = good and writer[to + part] == candidate and reader[to + part] == NOTHING
                    good = good and writer[source + part] < candidate
                if good:
                    joined = candidate
                    adds[one] = 1
                    following[2 * one] = source_head[joined]
                    source_head[joined] = 2 * one
                    source_size[joined] += 1
        if joined == NOTHING:
            joined = groups
            groups += 1
            group_executor[joined], group_channel[joined] = executors[one], channels[one]
            group_count[joined], group_joins[joined] = count, kind <= REDUCE
            if kind <= REDUCE:
                source_head[joined], source_size[joined] = 2 * one, 1
                store_head[joined], store_size[joined] = 2 * one + 1, 1
                adds[one] = 3
                if kind == REDUCE:
                    adds[one] = 7
                    source_size[joined] = 2
            else:
                adds[one] = 2 if kind == READY else 1
        group_of[one] = joined
        for part in range(count):
            if kind <= REDUCE:
                atom = source + part
                if reader[atom] != joined:
                    if joined > reader[atom]:
                        other_reader[atom] = reader[atom]
                        reader[atom] = joined
                    elif joined > other_reader[atom]:
                        other_reader[atom] = joined
            target = to + part
            if kind == NEEDED:
                if reader[target] != joined:
                    other_reader[target] = reader[target]
                    reader[target] = joined
            else:
                writer[target] = joined
                reader[target] = other_reader[target] = NOTHING
    return group_of, adds, groups


@_compiled
def live_stores(instruction_kind, counts, source_start, source_atom, store_start, store_atom, needed):
    """Which stores anybody reads: `needed[atom]` says whose last value counts at the end; it is changed."""
    keep = np.ones(len(store_atom), np.bool_)
    for one in range(len(counts) - 1, -1, -1):
        count = counts[one]
        alive = instruction_kind[one] == NEEDED
        for entry in range(store_start[one], store_start[one + 1]):
            wanted = instruction_kind[one] == READY
            for part in range(count):
                wanted = wanted or needed[store_atom[entry] + part]
            keep[entry] = wanted
            alive = alive or wanted
        for entry in range(store_start[one], store_start[one + 1]):
            for part in range(count):
                needed[store_atom[entry] + part] = False
        if alive:
            for entry in range(source_start[one], source_start[one + 1]):
                for part in range(count):
                    needed[source_atom[entry] + part] = True
    return keep


@_compiled
def class_of_groups(kinds, counts, source_start, source_atom, store_start, store_atom, held, found):
    """The length class of every chunk of every instruction into `found`; `held`, each atom's before, is changed."""
    at = 0
    for one in range(len(counts)):
        for part in range(counts[one]):
            if kinds[one] == READY:
                atom = store_atom[store_start[one]] + part
                moved = -2 - held[atom] if held[atom] < -1 else held[atom]
            else:
                moved = held[source_atom[source_start[one]] + part]
            found[at] = moved
            at += 1
            for entry in range(store_start[one], store_start[one + 1]):
                held[store_atom[entry] + part] = moved


@_compiled
def group_levels(kinds, numbers, counts, source_start, source_atom, store_start, store_atom, atoms):
    """As `levels`, of instructions."""
    written, read = np.zeros(atoms, np.int64), np.zeros(atoms, np.int64)
    found = np.empty(len(counts), np.int64)
    for one in range(len(counts)):
        level = np.int64(numbers[one]) << 32 if kinds[one] == READY else np.int64(0)
        for entry in range(source_start[one], source_start[one + 1]):
            for part in range(counts[one]):
                level = max(level, written[source_atom[entry] + part])
        for entry in range(store_start[one], store_start[one + 1]):
            for part in range(counts[one]):
                level = max(level, written[store_atom[entry] + part], read[store_atom[entry] + part])
        for entry in range(source_start[one], source_start[one + 1]):
            for part in range(counts[one]):
                read[source_atom[entry] + part] = max(read[source_atom[entry] + part], level + 1)
        for entry in range(store_start[one], store_start[one + 1]):
            for part in range(counts[one]):
                written[store_atom[entry] + part] = level + 1
                read[store_atom[entry] + part] = 0
        found[one] = level
    return found
