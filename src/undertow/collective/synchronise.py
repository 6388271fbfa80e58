"""Which instruction must wait for which: the least that keeps every order that matters, found with vector clocks.

Workers run their instructions in order. clock[w][v] counts how many instructions of worker v are known to be over when
worker w stands where it stands. An instruction that must come after one of another worker needs a wait, unless the
clock knows it already. Clocks are streamed: only the present ones are kept, and a window of past ones (what a wait for
an instruction lets one know). Outside the window a wait teaches less: a later one may be superfluous, never missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..fabric import machine_code

NOTHING = -1


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return machine_code.compiled(function, boundscheck=False)


@_compiled
def _merge(clock, other):
    for index in range(len(clock)):
        clock[index] = max(clock[index], other[index])


@_compiled
def find_waits(
    kinds,
    counts,
    source_start,
    source_atom,
    store_start,
    store_atom,
    worker,  # of each instruction; instructions come in a valid sequential order
    worker_rank,
    start_worker,  # of each rank: the one that announces that the call has begun, and waits for its end
    atom_rank,
    user_atoms,  # atoms below are the user's, from there on scratch and staging
    depth,  # iterations after which scratch is used again
    iterations,
    window,
):
    """Returns (waiter, waited for, iterations back) rows: instruction numbers, `total + rank` for a rank's end as the
    waiter, and `total + rank` for its start as what is waited for."""
    total, workers, atoms = len(counts), len(worker_rank), len(atom_rank)
    ranks = len(start_worker)
    length = np.zeros(workers, np.int32)
    position = np.empty(total, np.int32)
    for one in range(total):
        position[one] = length[worker[one]]
        length[worker[one]] += 1
    clock = np.zeros((workers, workers), np.int32)
    for one in range(workers):
        clock[one, start_worker[worker_rank[one]]] = 1
    past = np.empty((window, workers), np.int32)
    past_of = np.full((iterations, total), -1, np.int64)
    taken = np.int64(0)

    copies = min(depth, iterations)
    scratch = atoms - user_atoms
    places = user_atoms + copies * scratch
    last_writer = np.full(places, NOTHING, np.int64)  # iteration * total + instruction
    readers = np.full(places, NOTHING, np.int32)  # heads of lists
    node_reader, node_next = np.empty(1024, np.int64), np.empty(1024, np.int32)
    free_node, used_nodes = np.int32(NOTHING), np.int32(0)

    wanted = np.zeros(workers, np.int32)  # clock value that is needed of each worker
    wanted_by = np.full(workers, NOTHING, np.int64)  # and the instruction behind it
    touched = np.empty(workers, np.int32)
    waits = np.empty((1024, 3), np.int64)
    found = 0

    for iteration in range(iterations + 1):
        ending = iteration == iterations
        if iteration > 0 and not ending:
            for atom in range(user_atoms):  # another part of the user's memory
                last_writer[atom], readers[atom] = NOTHING, NOTHING
        if ending and user_atoms == 0:
            break
        first_atom = 0
        for one in range(ranks if ending else total):
            me = start_worker[one] if ending else worker[one]
            rank = worker_rank[me]
            marks = 0
            begin, end = (
                (0, 1)
                if ending
                else (source_start[one], store_start[one + 1] - store_start[one] + source_start[one + 1])
            )
            for entry in range(begin, end):
                if ending:
                    last_atom = first_atom
                    while last_atom < user_atoms and atom_rank[last_atom] == one:
                        last_atom += 1
                    start, count, stores = first_atom, last_atom - first_atom, True
                    first_atom = last_atom
                elif entry < source_start[one + 1]:
                    start, count, stores = source_atom[entry], counts[one], kinds[one] == 2
                else:
                    start = store_atom[store_start[one] + entry - source_start[one + 1]]
                    count, stores = counts[one], True
                for part in range(count):
                    atom = start + part
                    place = atom
                    if atom >= user_atoms:
                        place = atom + (iteration % depth) * scratch
                    before = last_writer[place]
                    if before == NOTHING and atom < user_atoms and atom_rank[atom] != rank:
                        other = start_worker[atom_rank[atom]]
                        begun = False  # whoever knows that a worker of that rank did something knows it has begun
                        while not begun and other < workers and worker_rank[other] == atom_rank[atom]:
                            begun = clock[me, other] > 0 or wanted_by[other] != NOTHING
                            other += 1
                        other = start_worker[atom_rank[atom]]
                        if not begun:
                            touched[marks] = other
                            marks += 1
                            wanted[other], wanted_by[other] = 1, -2
                    node = readers[place] if stores else NOTHING
                    while True:
                        if before != NOTHING:
                            instruction = before % total
                            other = worker[instruction]
                            if other != me and not (ending and worker_rank[other] == one):
                                starts = 1 if start_worker[worker_rank[other]] == other else 0
                                value = starts + (before // total) * length[other] + position[instruction] + 1
                                if wanted_by[other] == NOTHING:
                                    touched[marks] = other
                                    marks += 1
                                if value > wanted[other]:
                                    wanted[other], wanted_by[other] = value, before
                        if node == NOTHING:
                            break
                        before = node_reader[node]
                        node = node_next[node]
            # The latest first: what it teaches often makes the earlier ones superfluous.
            for index in range(1, marks):
                moved = touched[index]
                slot = index
                while slot > 0 and wanted_by[touched[slot - 1]] < wanted_by[moved]:
                    touched[slot] = touched[slot - 1]
                    slot -= 1
                touched[slot] = moved
            for index in range(marks):
                other = touched[index]
                if clock[me, other] < wanted[other]:
                    before = wanted_by[other]
                    begins = before == -2
                    if begins or iteration >= iterations - 1:
                        if found == len(waits):
                            grown = np.empty((2 * found, 3), np.int64)
                            grown[:found] = waits
                            waits = grown
                        waits[found, 0] = total + one if ending else one
                        waits[found, 1] = total + worker_rank[other] if begins else before % total
                        waits[found, 2] = 0 if begins or ending else iteration - before // total
                        found += 1
                    if not begins:
                        snapshot = past_of[before // total, before % total]
                        if snapshot >= 0 and snapshot + window > taken:
                            _merge(clock[me], past[snapshot % window])
                    clock[me, other] = max(clock[me, other], wanted[other])
            for index in range(marks):
                wanted[touched[index]], wanted_by[touched[index]] = 0, NOTHING
            if ending:
                continue
            clock[me, me] = (1 if start_worker[rank] == me else 0) + iteration * length[me] + position[one] + 1
            past[taken % window] = clock[me]
            past_of[iteration, one] = taken
            taken += 1
            stamp = np.int64(iteration) * total + one
            for entry in range(source_start[one], source_start[one + 1]):
                for part in range(counts[one]):
                    atom = source_atom[entry] + part
                    place = atom if atom < user_atoms else atom + (iteration % depth) * scratch
                    if readers[place] != NOTHING and node_reader[readers[place]] == stamp:
                        continue
                    if free_node != NOTHING:
                        node, free_node = free_node, node_next[free_node]
                    else:
                        if used_nodes == len(node_reader):
                            bigger, longer = np.empty(2 * used_nodes, np.int64), np.empty(2 * used_nodes, np.int32)
                            bigger[:used_nodes], longer[:used_nodes] = node_reader, node_next
                            node_reader, node_next = bigger, longer
                        node = used_nodes
                        used_nodes += np.int32(1)
                    node_reader[node], node_next[node] = stamp, readers[place]
                    readers[place] = node
            for entry in range(store_start[one], store_start[one + 1]):
                for part in range(counts[one]):
                    atom = store_atom[entry] + part
                    place = atom if atom < user_atoms else atom + (iteration % depth) * scratch
                    node = readers[place]
                    while node != NOTHING:
                        after = node_next[node]
                        node_next[node], free_node = free_node, node
                        node = after
                    readers[place] = NOTHING
                    last_writer[place] = stamp
    return waits[:found], position, length
