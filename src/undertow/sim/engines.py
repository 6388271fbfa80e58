"""Copy engines: so many of a rank, each with one copy at a time; copies that find none free queue. Compiled loops.

A copy has its engine from the moment it is issued until its last byte has arrived. Rows of `engines` are queues: two of
each rank, of which the second is used where engines read or write and do not do both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled
from .links import HOP_AT, ROUTE

_FREE, _FIRST, _LAST = range(3)  # engines without work; copies that wait, linked by the place of their hop


def queues(ranks: int, count: int, directed: bool) -> NDArray[np.int64]:
    """All engines without work; no rows for ranks whose kernels move everything (count 0)."""
    found = np.full((2 * ranks if count else 0, 3), -1, np.int64)
    found[:, _FREE] = count // 2 if directed else count
    return found


@compiled
def has_engine(queue, message, engines, message_i):
    """Take an engine for a copy, or let it wait."""
    if engines[queue, _FREE] > 0:
        engines[queue, _FREE] -= 1
        return True
    if engines[queue, _FIRST] >= 0:
        message_i[engines[queue, _LAST], HOP_AT] = message
    else:
        engines[queue, _FIRST] = message
    engines[queue, _LAST] = message
    message_i[message, HOP_AT] = -1
    return False


@compiled
def next_copy(queue, engines, message_i, route_start):
    """An engine has no work any more: the copy that gets it, -1 where none waits."""
    message = engines[queue, _FIRST]
    if message < 0:
        engines[queue, _FREE] += 1
        return -1
    engines[queue, _FIRST] = message_i[message, HOP_AT]
    message_i[message, HOP_AT] = route_start[message_i[message, ROUTE]]
    return message
