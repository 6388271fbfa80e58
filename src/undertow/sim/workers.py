"""How workers stand: what each waits for, when it starts its next instruction, and what it posts. Compiled loops.

When a post will be seen is known when it is made, so it waits in a list of its semaphore instead of among the events,
and its waiter's start is an event as soon as all it waits for is known. A post that has been seen is a number and no
row any more: whoever comes for it later starts when it comes. So the lists hold what is on its way, however late it is
waited for.
"""

from __future__ import annotations

from ..collective.schedule import END, READY
from .compiled import compiled

# Columns of instructions; they stand in rows, for all of a row is needed at once.
(
    KIND, NUMBER, CLASS, COUNT, WAIT_FROM, WAIT_TO, POST_FROM, POST_TO, PULL_FROM, PULL_TO, PUSH_FROM, PUSH_TO, NEXT,
) = range(13)  # fmt: skip
STEP_COLUMNS = 13
SEMAPHORE, VALUE, BACK = range(3)  # columns of waits
# Columns of semaphores; each turn: posts of an iteration, 0 for those of a start; seen: those without a row, the others
# are a list, from the oldest to the newest.
WAITER, EACH_TURN, _POSTED, _SEEN, OLDEST_POST, _NEWEST_POST = range(6)
SEMAPHORE_COLUMNS = 8
FIRST, BODY, RANK = range(3)  # columns of workers: rows of the first instruction and of the first in the loop; -1: none
AT, TURN, STATE, OLDEST, NEWEST, CAUSE, OWN = range(7)  # how workers stand; flights whose posts are due
FREE_AT, ARRIVED, ENDED = range(3)  # seconds
BLOCKED, COMING, BUSY, DONE = range(4)  # a worker: waits for posts, has a start among the events, has a flight
_POST_NEXT, _POST_LOG = range(2)  # columns of posts: the next one, or the next free one; the logged flight behind it
FREE_POST, POSTS = 11, 12  # of counters: the first free post, and how many rows are in use


@compiled
def bytes_of(step, turn, steps, class_of, class_bytes, tile_bytes):
    """Bytes that an instruction moves in an iteration: a tile of each of its chunks, as far as they reach."""
    total = 0.0
    for entry in range(steps[step, CLASS], steps[step, CLASS] + steps[step, COUNT]):
        total += min(tile_bytes, max(0.0, class_bytes[class_of[entry]] - turn * tile_bytes))
    return total


@compiled
def begins(
    worker, now, iterations, steps, waits, workers, semaphores, post_i, post_f, ready_at, parcels, stand, moment,
    counters,
):  # fmt: skip
    """When a worker starts its next instruction; -1 if something it waits for has not been posted yet.

    Posts that are waited for are passed, which frees them: the worker's own time remembers when the last was seen.
    """
    step = stand[worker, AT]
    turn = iterations - 1 if steps[step, KIND] == END else stand[worker, TURN]
    for entry in range(steps[step, WAIT_FROM], steps[step, WAIT_TO]):
        semaphore = waits[entry, SEMAPHORE]
        target = waits[entry, VALUE] + (turn - waits[entry, BACK]) * semaphores[semaphore, EACH_TURN]
        if semaphores[semaphore, _POSTED] < target:
            return -1.0
        while semaphores[semaphore, _SEEN] < target:
            post = semaphores[semaphore, OLDEST_POST]
            semaphores[semaphore, _SEEN] += 1
            semaphores[semaphore, OLDEST_POST] = post_i[post, _POST_NEXT]
            if post_f[post] > moment[worker, FREE_AT]:  # seen in order, so the last one decides
                moment[worker, FREE_AT] = post_f[post]
                stand[worker, CAUSE] = post_i[post, _POST_LOG]
            post_i[post, _POST_NEXT] = counters[FREE_POST]
            counters[FREE_POST] = post
    start = max(now, moment[worker, FREE_AT])
    if steps[step, KIND] == READY:
        start = max(start, ready_at[workers[worker, RANK] * parcels + steps[step, NUMBER]])
    stand[worker, STATE] = COMING
    return start


@compiled
def advance(
    worker, now, out, iterations, steps, waits, workers, semaphores, post_i, post_f, ready_at, parcels, stand, moment,
    counters,
):  # fmt: skip
    """A worker that is free at `out` goes to its next instruction: when it starts it, -1 where that is not known."""
    moment[worker, FREE_AT] = out
    step = steps[stand[worker, AT], NEXT]
    if step < 0:  # the end of the loop; behind it there may be one more
        if stand[worker, TURN] + 1 < iterations:
            stand[worker, TURN] += 1
            step = workers[worker, BODY]
        else:
            step = -step
    if step == len(steps):
        stand[worker, AT], stand[worker, STATE] = -1, DONE
        moment[worker, ENDED] = out
        return -1.0
    stand[worker, AT], stand[worker, STATE], stand[worker, CAUSE] = step, BLOCKED, stand[worker, OWN]
    return begins(
        worker, now, iterations, steps, waits, workers, semaphores, post_i, post_f, ready_at, parcels, stand, moment,
        counters,
    )  # fmt: skip


@compiled
def post(semaphore, now, seen, logged, semaphores, post_i, post_f, counters):
    """One post that will be seen at `seen`; those before it that have been seen by now lose their rows.

    No start is told wrong by that: a worker that comes for them is free at `now` or later, or still waits for something
    that is posted at `now` or later.
    """
    oldest = semaphores[semaphore, OLDEST_POST]
    while oldest >= 0 and post_f[oldest] <= now:
        semaphores[semaphore, _SEEN] += 1
        following = post_i[oldest, _POST_NEXT]
        post_i[oldest, _POST_NEXT], counters[FREE_POST] = counters[FREE_POST], oldest
        oldest = following
    fresh = counters[FREE_POST]
    if fresh >= 0:
        counters[FREE_POST] = post_i[fresh, _POST_NEXT]
    else:
        fresh = counters[POSTS]
        counters[POSTS] += 1
    if oldest >= 0:
        post_i[semaphores[semaphore, _NEWEST_POST], _POST_NEXT] = fresh
    else:
        oldest = fresh
    semaphores[semaphore, OLDEST_POST], semaphores[semaphore, _NEWEST_POST] = oldest, fresh
    post_i[fresh, _POST_NEXT], post_i[fresh, _POST_LOG], post_f[fresh] = -1, logged, seen
    semaphores[semaphore, _POSTED] += 1
