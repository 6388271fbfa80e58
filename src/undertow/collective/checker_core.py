"""The checker's loop: runs a schedule symbolically, one instruction of one worker at a time, compiled by Numba.

It shares nothing with the compiler but the schedule's arrays. Contents are multisets of items, kept as sums of two
64-bit hashes and a count: sums of multisets are sums of these, and two different multisets agree on all three with
a probability of about 2**-128. Orders are vector clocks, merged where a wait meets its post and nowhere else: a race is
an access whose clock does not know of the access it conflicts with, whatever order this run happens to take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..fabric import machine_code
from .schedule import END, READY, START

FINE = 0
DEADLOCK = 1  # a: the blocked worker where the search began
RACE_READ = 2  # instruction a reads `atom` without knowing of b's write
RACE_WRITE = 3  # instruction a writes `atom` without knowing of b's access
RACE_START = 4  # instruction a touches `atom` of another rank, which may not have begun
RACE_END = 5  # instruction b touches `atom` of a rank whose call may be over
UNWRITTEN = 6  # instruction a reads `atom`, which holds nothing
LENGTHS = 7  # instruction a adds chunks of different lengths, or says a wrong length, at `atom`
WRONG = 8  # output `atom`, last written by instruction a (-1: by none), does not hold what the contract says
INPUT_CHANGED = 9  # instruction a writes to the input `atom` of a call that is not in place
POSTS = 10  # semaphore a is posted b times instead of what the schedule says
TOO_LARGE = 11  # what posts teach, and nobody has learnt yet, would take more memory than is sensible
MOST_LESSONS = 80_000_000  # 32-bit words
_NOTHING = -1


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return machine_code.compiled(function, boundscheck=False)


@_compiled
def overlapping(count, source_start, source_atom, store_start, store_atom):
    """The first instruction with a store that has part of a range in common with a source or another store; -1: none.

    Runtimes go element by element, so equal ranges are fine, shifted ones are not.
    """
    for one in range(len(count)):
        if count[one] > 1:
            for entry in range(store_start[one], store_start[one + 1]):
                for other in range(source_start[one], source_start[one + 1]):
                    distance = abs(store_atom[entry] - source_atom[other])
                    if 0 < distance < count[one]:
                        return one
                for other in range(store_start[one], entry):
                    if abs(store_atom[entry] - store_atom[other]) < count[one]:
                        return one
    return -1


@_compiled
def _knows_start(clock, rank, first_worker, worker_rank):
    """Whether the call of `rank` is known to have begun: one of its workers has done something."""
    other = first_worker[rank]
    while other < len(worker_rank) and worker_rank[other] == rank:
        if clock[other] > 0:
            return True
        other += 1
    return False


@_compiled
def simulate(
    kind, count, source_start, source_atom, store_start, store_atom, class_start, class_of,
    wait_start, wait_semaphore, wait_value, wait_back, post_start, post_semaphore,
    worker_start, worker_rank, first_worker,
    semaphore_poster, semaphore_waiter, semaphore_posts, semaphore_of_start,
    atom_rank, user_atoms, depth, iterations,
    begin_one, begin_two, begin_class, pending, protected,
    want_one, want_two, want_count, order,
):  # fmt: skip
    """Returns (verdict, a, b, atom, iteration). `begin_*` and `want_*` are per user atom; want_count -1: anything."""
    workers, semaphores, atoms = len(worker_rank), len(semaphore_posts), len(atom_rank)
    scratch = atoms - user_atoms
    copies = min(depth, iterations)
    places = user_atoms * iterations + copies * scratch
    one_hash, two_hash = np.zeros(places, np.uint64), np.zeros(places, np.uint64)
    size = np.zeros(places, np.int32)
    held_class = np.full(places, -1, np.int32)
    for iteration in range(iterations):
        for atom in range(user_atoms):
            place = iteration * user_atoms + atom
            if begin_class[atom] >= 0 and not pending[atom]:
                one_hash[place], two_hash[place] = begin_one[atom], begin_two[atom]
                size[place], held_class[place] = 1, begin_class[atom]
    writer = np.full(places, _NOTHING, np.int64)  # instruction, and the clock value of its worker after it
    writer_clock = np.zeros(places, np.int32)
    readers = np.full(places, _NOTHING, np.int32)
    node_instruction, node_clock = np.empty(1024, np.int32), np.empty(1024, np.int32)
    node_next = np.empty(1024, np.int32)
    used_nodes, free_node = 0, _NOTHING

    worker_of = np.empty(len(kind), np.int32)
    for worker in range(workers):
        for one in range(worker_start[worker], worker_start[worker + 1]):
            worker_of[one] = worker
    clock = np.zeros((workers, workers), np.int32)
    at, turn = np.empty(workers, np.int64), np.zeros(workers, np.int64)
    progress = np.zeros(workers, np.int64)  # waits of the present instruction that are over
    posted, passed = np.zeros(semaphores, np.int64), np.zeros(semaphores, np.int64)
    # What posts taught, until their waiter has come by: lists of rows of `lessons`.
    lesson_head, lesson_tail = np.full(semaphores, _NOTHING, np.int32), np.full(semaphores, _NOTHING, np.int32)
    lessons = np.empty((max(64, 2 * workers), workers), np.int32)
    lesson_next = np.empty(len(lessons), np.int32)
    used_lessons, free_lesson = 0, _NOTHING
    queue, queued = np.empty(workers, np.int64), np.zeros(workers, np.bool_)
    head, waiting = 0, 0
    for worker in range(workers):
        at[worker] = worker_start[worker]
        rank = worker_rank[worker]
        first = worker_start[first_worker[rank]]
        if first < worker_start[first_worker[rank] + 1] and kind[first] == START:
            clock[worker, first_worker[rank]] = 1  # a rank's own workers begin with its call
        if worker_start[worker + 1] > worker_start[worker]:
            queue[waiting] = worker
            waiting += 1
            queued[worker] = True
    most = 0
    for one in range(len(kind)):
        most = max(most, count[one])
    sum_one, sum_two = np.empty(most, np.uint64), np.empty(most, np.uint64)
    sum_size = np.empty(most, np.int32)
    done = 0
    while waiting > 0:
        worker = queue[head]
        head = (head + 1) % workers
        waiting -= 1
        queued[worker] = False
        one = at[worker]
        iteration = turn[worker]
        if kind[one] == END:
            iteration = iterations - 1
        blocked = False
        while wait_start[one] + progress[worker] < wait_start[one + 1]:
            entry = wait_start[one] + progress[worker]
            semaphore = wait_semaphore[entry]
            target = np.int64(wait_value[entry])
            if not semaphore_of_start[semaphore]:
                target += (iteration - wait_back[entry]) * semaphore_posts[semaphore]
            if posted[semaphore] < target:
                blocked = True
                break
            while passed[semaphore] < target:
                lesson = lesson_head[semaphore]
                passed[semaphore] += 1
                if passed[semaphore] == target:
                    for index in range(workers):
                        clock[worker, index] = max(clock[worker, index], lessons[lesson, index])
                lesson_head[semaphore] = lesson_next[lesson]
                if lesson_head[semaphore] == _NOTHING:
                    lesson_tail[semaphore] = _NOTHING
                lesson_next[lesson], free_lesson = free_lesson, lesson
            progress[worker] += 1
        if blocked:
            continue  # the post will queue it again
        progress[worker] = 0
        me = worker_rank[worker]
        now = clock[worker, worker] + 1
        if done < len(order):
            order[done] = one
        done += 1
        # Reads first, then stores: an instruction that does both to a chunk does so element by element.
        width = count[one]
        for part in range(width):
            sum_one[part], sum_two[part], sum_size[part] = 0, 0, 0
        for entry in range(source_start[one], source_start[one + 1]):
            for part in range(width):
                atom = source_atom[entry] + part
                place = atom + iteration * user_atoms
                if atom >= user_atoms:
                    place = user_atoms * iterations + (iteration % depth) * scratch + atom - user_atoms
                before = writer[place]
                foreign = before == _NOTHING and atom < user_atoms and atom_rank[atom] != me
                if foreign and not _knows_start(clock[worker], atom_rank[atom], first_worker, worker_rank):
                    return RACE_START, one, one, atom, iteration
                if (
                    before != _NOTHING
                    and worker_of[before] != worker
                    and clock[worker, worker_of[before]] < writer_clock[place]
                ):
                    return RACE_READ, one, before, atom, iteration
                if size[place] == 0:
                    return UNWRITTEN, one, one, atom, iteration
                if held_class[place] != class_of[class_start[one] + part]:
                    return LENGTHS, one, one, atom, iteration
                sum_one[part] += one_hash[place]
                sum_two[part] += two_hash[place]
                sum_size[part] += size[place]
                top = readers[place]
                if top != _NOTHING and node_instruction[top] == one and node_clock[top] == now:
                    continue
                if free_node != _NOTHING:
                    node, free_node = free_node, node_next[free_node]
                else:
                    if used_nodes == len(node_next):
                        a, b, c = node_instruction, node_clock, node_next
                        node_instruction = np.empty(2 * used_nodes, np.int32)
                        node_clock, node_next = np.empty(2 * used_nodes, np.int32), np.empty(2 * used_nodes, np.int32)
                        node_instruction[:used_nodes], node_clock[:used_nodes], node_next[:used_nodes] = a, b, c
                    node = used_nodes
                    used_nodes += 1
                node_instruction[node], node_clock[node], node_next[node] = one, now, readers[place]
                readers[place] = node
        for entry in range(store_start[one], store_start[one + 1]):
            for part in range(width):
                atom = store_atom[entry] + part
                place = atom + iteration * user_atoms
                if atom >= user_atoms:
                    place = user_atoms * iterations + (iteration % depth) * scratch + atom - user_atoms
                before = writer[place]
                node = readers[place]
                foreign = before == _NOTHING and atom < user_atoms and atom_rank[atom] != me
                if foreign and not _knows_start(clock[worker], atom_rank[atom], first_worker, worker_rank):
                    return RACE_START, one, one, atom, iteration
                if (
                    before != _NOTHING
                    and worker_of[before] != worker
                    and clock[worker, worker_of[before]] < writer_clock[place]
                ):
                    return RACE_WRITE, one, before, atom, iteration
                while node != _NOTHING:
                    reader = node_instruction[node]
                    if worker_of[reader] != worker and clock[worker, worker_of[reader]] < node_clock[node]:
                        return RACE_WRITE, one, reader, atom, iteration
                    after = node_next[node]
                    node_next[node], free_node = free_node, node
                    node = after
                readers[place] = _NOTHING
                writer[place], writer_clock[place] = one, now
                moved = class_of[class_start[one] + part]
                if kind[one] == READY:
                    if not pending[atom] or begin_class[atom] != moved:
                        return LENGTHS, one, one, atom, iteration
                    one_hash[place], two_hash[place], size[place] = begin_one[atom], begin_two[atom], 1
                else:
                    if atom < user_atoms and protected[atom]:
                        return INPUT_CHANGED, one, one, atom, iteration
                    one_hash[place], two_hash[place] = sum_one[part], sum_two[part]
                    size[place] = sum_size[part]
                held_class[place] = moved
        clock[worker, worker] = now
        for entry in range(post_start[one], post_start[one + 1]):
            semaphore = post_semaphore[entry]
            if free_lesson != _NOTHING:
                lesson, free_lesson = free_lesson, lesson_next[free_lesson]
            else:
                if used_lessons == len(lessons):
                    if 2 * used_lessons * workers > MOST_LESSONS:
                        return TOO_LARGE, worker, one, 0, iteration
                    more, links = np.empty((2 * used_lessons, workers), np.int32), np.empty(2 * used_lessons, np.int32)
                    more[:used_lessons], links[:used_lessons] = lessons, lesson_next
                    lessons, lesson_next = more, links
                lesson = used_lessons
                used_lessons += 1
            lessons[lesson] = clock[worker]
            lesson_next[lesson] = _NOTHING
            if lesson_tail[semaphore] == _NOTHING:
                lesson_head[semaphore] = lesson
            else:
                lesson_next[lesson_tail[semaphore]] = lesson
            lesson_tail[semaphore] = lesson
            posted[semaphore] += 1
            waiter = semaphore_waiter[semaphore]
            if not queued[waiter] and at[waiter] < worker_start[waiter + 1] and waiter != worker:
                queue[(head + waiting) % workers] = waiter
                waiting += 1
                queued[waiter] = True
        # On to the next instruction; the body between start and end is run once an iteration.
        following = one + 1
        finished = following == worker_start[worker + 1]
        if (
            kind[one] != START
            and kind[one] != END
            and (finished or kind[following] == END)
            and turn[worker] + 1 < iterations
        ):
            turn[worker] += 1
            following = worker_start[worker]
            if kind[following] == START:
                following += 1
            finished = False
        at[worker] = following
        if not finished:
            queue[(head + waiting) % workers] = worker
            waiting += 1
            queued[worker] = True
    for worker in range(workers):
        if at[worker] < worker_start[worker + 1]:
            return DEADLOCK, worker, at[worker], progress[worker], turn[worker]
    for semaphore in range(semaphores):
        expected = semaphore_posts[semaphore] * (1 if semaphore_of_start[semaphore] else iterations)
        if posted[semaphore] != expected:
            return POSTS, semaphore, posted[semaphore], 0, 0
    for iteration in range(iterations):
        for atom in range(user_atoms):
            place = atom + iteration * user_atoms
            rank = atom_rank[atom]
            last = first_worker[rank]
            before, node = writer[place], readers[place]
            value = writer_clock[place]
            while True:
                foreign = before != _NOTHING and worker_rank[worker_of[before]] != rank
                if foreign and clock[last, worker_of[before]] < value:
                    return RACE_END, before, before, atom, iteration
                if node == _NOTHING:
                    break
                before, value, node = np.int64(node_instruction[node]), node_clock[node], node_next[node]
            if want_count[atom] >= 0 and (
                size[place] != want_count[atom]
                or one_hash[place] != want_one[atom]
                or two_hash[place] != want_two[atom]
            ):
                return WRONG, writer[place], writer[place], atom, iteration
    return FINE, 0, 0, 0, done
