"""News from other nodes, through the store.

Each node's first rank advances a beat; the first rank of the next node watches it. Any rank that learns of a loss
announces it under one key that all ranks of the group look at. Where a beat stands still for `SILENCE`, the watcher
knocks at the silent node's door: its processes are gone, its host is gone, or it is only busy. (A single rank's death
is seen and announced by its neighbours on the node.)

A thread of its own talks to the store: when the store's host vanishes without a word (power, cable), a call to it
blocks for minutes. The watchdog only looks at when the store answered last, so that even then it sees all else.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from .. import errors
from .door import Door, knock

if TYPE_CHECKING:
    from .group import Group

PERIOD = 0.5
SILENCE = 3.0
_HEARD_AT_MOST = 0.5  # seconds of silence that one look can vouch for: a process that stood still did not listen
_PATIENCE = 0.5  # seconds that a question or a goodbye may take: the store may be dead
_TELLING = 3.0  # seconds that an announcement may take: without it the other nodes never learn whom they lost
_LEFT = 1 << 40  # a beat that no heart reaches: the node's first rank closed the group on purpose


class Heartbeat:
    """The watchdog's view across nodes for one group."""

    def __init__(self, group: Group, store: dist.Store) -> None:
        self._group = group
        # A connection of its own: a blocking call of another thread on the shared one must not delay the news.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._node = group.nodes[group.rank]
        self._is_first = group.nodes.index(self._node) == group.rank
        self._watched = (self._node - 1) % (max(group.nodes) + 1)
        self._last_beat = -1
        self._last_answer = self._last_tick = self._last_news = time.monotonic()
        self._store_silence = self._node_silence = 0.0  # seconds, as far as this process was there to listen
        self._door: Door | None = None
        if self._is_first:
            self._door = Door()
            self._store.set(f"door {self._node}", self._door.address)
        self._announcement: str | None = None
        self._ending = threading.Event()
        self._wanted = threading.Event()
        self._heard = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="undertow-heartbeat", daemon=True)
        self._thread.start()

    def tick(self, now: float) -> None:
        """Called by the watchdog: has the store gone silent?"""
        looked = min(now - self._last_tick, _HEARD_AT_MOST)
        answered = self._last_answer >= self._last_tick
        self._store_silence = 0.0 if answered else self._store_silence + looked
        self._last_tick = now
        if not self._ending.is_set() and self._store_silence > SILENCE:
            reason = f"the store, or the way to its node, has been silent for {SILENCE:g} s"
            self._lose("unknown", reason)

    def hear(self) -> None:
        """Ask for news now, and wait a moment for them."""
        self._heard.clear()
        self._wanted.set()
        self._heard.wait(_PATIENCE)

    def leave(self) -> None:
        """Say that silence from here on is no loss."""
        self._end()

    def note(self, error: errors.UndertowError) -> None:
        """What there is to tell. Before this process can learn of its failure: whoever learns of it may exit at once,
        and the goodbye of an exit would be the last that the other nodes hear."""
        if isinstance(error, errors.RankLost):
            self._announcement = json.dumps({"rank": error.facts["rank"], "reason": error.facts["reason"]})

    def announce(self) -> None:
        """Tell the other nodes. Losing the race to another announcer is fine: the first cause is there already."""
        self._end()

    def _end(self) -> None:
        self._ending.set()
        self._wanted.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE if self._announcement is None else _TELLING)

    def _beat(self) -> None:
        try:
            while True:
                self._exchange_news()
                self._last_answer = time.monotonic()
                self._heard.set()
                self._wanted.wait(PERIOD)
                self._wanted.clear()
                if self._ending.is_set():
                    break
        except (RuntimeError, ValueError) as error:  # torch raises DistStoreError, a RuntimeError
            self._lose("unknown", f"the store does not answer ({str(error).splitlines()[0]})")
        with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone by now: the others see that, too
            if self._announcement is not None:
                self._store.compare_set("lost", "", self._announcement)
            elif self._is_first:
                self._store.add(f"beat {self._node}", _LEFT)
        if self._door is not None:
            self._door.close()

    def _exchange_news(self) -> None:
        if self._store.check(["lost"]):
            facts = json.loads(self._store.get("lost").decode())
            self._lose(facts["rank"], facts["reason"])
        elif self._is_first:
            self._store.add(f"beat {self._node}", 1)
            beat = self._store.add(f"beat {self._watched}", 0)
            now = time.monotonic()
            if beat != self._last_beat:
                self._last_beat, self._node_silence = beat, 0.0
            elif beat < _LEFT:
                self._node_silence += min(now - self._last_news, PERIOD + _HEARD_AT_MOST)
                if self._node_silence > SILENCE:
                    self._judge(self._node_silence)
            self._last_news = now
            if self._door is not None:
                self._door.look()

    def _judge(self, silence: float) -> None:
        """A silent node is lost if its process died or its host is gone, or at the deadline if it is only busy."""
        alive = knock(self._store.get(f"door {self._watched}").decode())
        if not alive or silence > self._group.deadline:
            rank = self._group.nodes.index(self._watched)
            self._lose(rank, f"its node has been silent for {min(silence, self._group.deadline):.0f} s")

    def _lose(self, rank: int | str, reason: str) -> None:
        self._group.fail(errors.RankLost(rank=rank, group=self._group.name, reason=reason))
