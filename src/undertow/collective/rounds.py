"""Sends that wait for the other half of their round, where a lane moves what leaves and what comes at once.

    keep(name, outgoing)      what leaves in the round of that name: one call or several, from whichever stream
    move(name, incoming)      the round: behind all that was kept for it, in the order of the current stream

Every rank moves the same rounds in the same order, with something to send and to receive, or nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..fabric.base import Incoming, Lane, Outgoing
    from ..fabric.group import Group

_SLICE = 0.02  # seconds between two looks at whether the group still stands


class Rounds:
    """The rounds of one call over one lane."""

    def __init__(self, group: Group, lane: Lane) -> None:
        self._group, self._lane = group, lane
        self._kept: dict[Hashable, tuple[list[Outgoing], list[Callable[[], None]]]] = {}
        self._changed = threading.Condition()

    def keep(self, name: Hashable, outgoing: Sequence[Outgoing]) -> None:
        """`outgoing` leaves in round `name`, behind what the current stream was given so far."""
        follow = self._lane.behind()
        with self._changed:
            messages, behind = self._kept.setdefault(name, ([], []))
            messages.extend(outgoing)
            behind.append(follow)
            self._changed.notify_all()

    def move(self, name: Hashable, incoming: Sequence[Incoming]) -> list[torch.Tensor]:
        """Round `name`: what was kept leaves, `incoming` comes; the views that hold it."""
        messages, behind = self._take(name)
        for follow in behind:
            follow()
        return self._lane.round(messages, incoming)

    def _take(self, name: Hashable) -> tuple[list[Outgoing], list[Callable[[], None]]]:
        """What was kept for a round: on a CPU perhaps by another thread, and not yet."""
        began = time.monotonic()
        with self._changed:
            while name not in self._kept:
                self._changed.wait(_SLICE)
                self._group.check()
                if time.monotonic() - began > self._group.deadline:
                    waited = f"nothing was sent in a round for {self._group.deadline:g} s"
                    self._group.fail(self._group.why_waiting(self._group.rank, waited))
            return self._kept.pop(name)
