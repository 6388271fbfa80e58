"""How a simulation stands: the arrays that the core's loop works on, and their growing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import core, workers
from .event_queue import EVENTS, SIZE, empty_places, empty_state
from .links import HOPS
from .moves import Moves
from .network import Floats, Ints

_NEWS, _FLIGHTS, _FREE_FLIGHT, _MESSAGES, _FREE_MESSAGE, _ACTIVES, _LOGGED, _MADE, _EVENTS, _SPARE, _AGAIN = range(11)
_FIRST = 256  # rows that pools begin with


class State:
    """Nothing has happened yet: every worker that has instructions stands at its first."""

    def __init__(self, moves: Moves, links: Floats, ready_at: Floats, traced: bool, engines: Ints) -> None:
        steps, count = moves.steps, len(moves.workers)
        posts = _widest(steps, workers.POST_FROM, workers.POST_TO)
        messages = max(
            _widest(steps, workers.PULL_FROM, workers.PULL_TO), _widest(steps, workers.PUSH_FROM, workers.PUSH_TO)
        )
        begins = np.flatnonzero(moves.workers[:, workers.FIRST] >= 0)
        self.counters = np.zeros(16, np.int64)
        self.counters[[_FREE_FLIGHT, _FREE_MESSAGE, _AGAIN, workers.FREE_POST]] = -1
        self.counters[_NEWS], self.counters[_SPARE] = len(begins), 2 * messages + posts + 6
        self.engines = engines
        self.clock = np.array([0.0, np.inf, 0.0, 0.0])
        size = int(2 * self.counters[_SPARE]) + len(begins)
        self.new_time, self.new_turn, self.new = np.zeros(size), np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.new[: len(begins)] = (begins << core.KIND_BITS) | core.TRY
        self.queue, self.places = empty_state(), empty_places()
        self.times, self.orders, self.heap = np.empty(_FIRST), _ints(_FIRST), _ints(_FIRST)
        self.lists, self.list_times, self.pending = _ints(_FIRST, 3), np.empty(_FIRST), _ints(_FIRST, 2)
        self.stand, self.moment = np.full((count, 8), -1, np.int64), np.zeros((count, 4))
        self.stand[begins, workers.AT] = moves.workers[begins, workers.FIRST]
        self.stand[begins, workers.TURN], self.stand[begins, workers.STATE] = 0, workers.BLOCKED
        self.flight_i, self.flight_f = _ints(_FIRST, 8), np.empty((_FIRST, 8))
        self.message_i, self.message_f = _ints(_FIRST, 4), np.empty((_FIRST, 4))
        self.post_i, self.post_f = _ints(_FIRST, 2), np.empty(_FIRST)
        self.active = _ints(_FIRST)
        self.room, self.users, self.touched = np.empty(len(links)), np.zeros(len(links), np.int64), _ints(len(links))
        self.needed = np.full(len(ready_at), -1.0)
        rows = _FIRST if traced else 1
        self._hop_i, self._hop_f = _ints(rows, 4), np.empty((rows, 4))
        self._log = np.empty((_FIRST if traced else 1, core.LOG_COLUMNS))

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """As the core takes them."""
        return (
            self.counters, self.clock, self.engines, self.queue, self.places, self.times, self.orders, self.heap,
            self.lists, self.list_times, self.pending, self.new_time, self.new_turn, self.new, self.stand, self.moment,
            self.flight_i, self.flight_f, self.message_i, self.message_f, self.post_i, self.post_f, self.active,
            self.room, self.users, self.touched, self._log, self._hop_i, self._hop_f,
        )  # fmt: skip

    def grow(self) -> None:
        """Twice the room wherever half of it is used; a core that stopped for want of room finds more."""
        news, spare, actives = (int(self.counters[one]) for one in (_NEWS, _SPARE, _ACTIVES))
        while 2 * (int(self.queue[[SIZE, EVENTS]].max()) + news) >= len(self.times):
            for name in ("times", "orders", "heap", "lists", "list_times", "pending"):
                self._double(name)
        for names, used in (
            (("flight_i", "flight_f"), int(self.counters[_FLIGHTS])),
            (("message_i", "message_f"), int(self.counters[_MESSAGES]) + spare),
            (("post_i", "post_f"), int(self.counters[workers.POSTS]) + spare),
            (("new_time", "new_turn", "new"), actives + spare + news),
            (("active",), actives + 1),
            (("_log",), int(self.counters[_LOGGED])),
            (("_hop_i", "_hop_f"), int(self.counters[HOPS]) + spare),
        ):
            while 2 * used >= len(getattr(self, names[0])) > 1:
                for name in names:
                    self._double(name)

    def _double(self, name: str) -> None:
        array: NDArray[Any] = getattr(self, name)
        setattr(self, name, np.concatenate([array, np.empty_like(array)]))

    @property
    def events(self) -> int:
        return int(self.counters[_EVENTS])

    @property
    def flights(self) -> int:
        return int(self.counters[_MADE])

    @property
    def seconds(self) -> float:
        """When the last worker was done and the last byte had arrived."""
        return float(self.moment[:, [workers.ENDED, workers.ARRIVED]].max(initial=0.0))

    @property
    def blocked(self) -> Ints:
        """Workers that are not done."""
        return np.flatnonzero(self.stand[:, workers.AT] >= 0)

    @property
    def log(self) -> Floats:
        return self._log[: int(self.counters[_LOGGED])].copy()

    @property
    def hops(self) -> tuple[Ints, Floats]:
        """How each message was served by each FIFO link, in the order in which they were; if traced."""
        count = int(self.counters[HOPS])
        return self._hop_i[:count].copy(), self._hop_f[:count].copy()

    @property
    def nbytes(self) -> int:
        """Memory of what is under way, links and workers not counted."""
        pools = (
            self.times, self.orders, self.heap, self.lists, self.list_times, self.pending, self.new_time, self.new_turn,
            self.new, self.flight_i, self.flight_f, self.message_i, self.message_f, self.post_i, self.post_f,
            self.active,
        )  # fmt: skip
        return sum(one.nbytes for one in pools)


def _ints(*shape: int) -> Ints:
    return np.empty(shape, np.int64)


def _widest(steps: NDArray[np.int32], low: int, high: int) -> int:
    return int((steps[:, high] - steps[:, low]).max(initial=0))
