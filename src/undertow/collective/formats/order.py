"""A schedule without semaphores: which instruction waits for which, and an order in which they can run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..schedule import Schedule

Waits = NDArray[np.int64]  # rows of (who waits, for whom, iterations ago)


def waits_of(schedule: Schedule) -> Waits:
    """Every wait with the instruction whose post ends it. Posts that make no difference are not told apart."""
    one = schedule.instructions
    poster = np.repeat(np.arange(len(one)), np.diff(one.post_start))
    by_semaphore: dict[int, list[int]] = {}
    for semaphore, instruction in zip(one.post_semaphore.tolist(), poster.tolist(), strict=True):
        by_semaphore.setdefault(semaphore, []).append(instruction)
    waiter = np.repeat(np.arange(len(one)), np.diff(one.wait_start)).tolist()
    rows = [
        (who, by_semaphore[semaphore][value - 1], back)
        for who, semaphore, value, back in zip(
            waiter, one.wait_semaphore.tolist(), one.wait_value.tolist(), one.wait_back.tolist(), strict=True
        )
    ]
    return np.array(rows, np.int64).reshape(-1, 3)


def sequential(first: Iterable[int], waits: Waits, total: int) -> list[int]:
    """An order in which one iteration can run, without the steps that never can. `first`: of each lane, and total."""
    begins = np.zeros(total + 1, np.bool_)
    begins[np.asarray(list(first), np.int64)] = True
    follows: dict[int, list[int]] = {}
    missing = (~begins[:total]).astype(np.int64)  # the step before it in its lane
    for waiter, waited, back in waits.tolist():
        if back == 0:
            follows.setdefault(waited, []).append(waiter)
            missing[waiter] += 1
    ready = deque(np.flatnonzero(missing == 0).tolist())
    found = []
    while ready:
        one = ready.popleft()
        found.append(one)
        after = follows.get(one, [])
        for other in after if begins[one + 1] else [*after, one + 1]:
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    return found
