"""What a traced schedule did: a timeline in the format of measured ones, and the critical path by resource."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..collective.schedule import MOVE
from ..fabric.events import Event, Timeline
from .links import HOP_AHEAD, HOP_BEFORE, HOP_FLIGHT, HOP_LINK
from .schedules import Result

MEMORY = "memory"


def schedule_timeline(result: Result) -> Timeline:
    """Every move of a run that was traced, from its start until its last byte has arrived."""
    schedule = result.schedule
    first = np.searchsorted(schedule.worker_rank, np.arange(schedule.ranks))
    names = _link_names(result)
    events = []
    for worker, instruction, iteration, begin, out, delivered, _, link in result.log.tolist():
        if schedule.instructions.kind[int(instruction)] != MOVE:
            continue
        rank = int(schedule.worker_rank[int(worker)])
        details = {"iteration": int(iteration), "delivered_ns": round(delivered * 1e9)}
        if link >= 0:
            details |= {"link": names(int(link))}
        events.append(
            Event(
                schedule.describe(int(instruction)).rpartition(" (")[0],
                rank,
                f"worker {int(worker) - int(first[rank])}",
                round(begin * 1e9),
                round((max(out, delivered) - begin) * 1e9),
                "simulated",
                details,
            )
        )
    return Timeline(events, {"simulated": True, "program": schedule.name})


def critical_path(result: Result) -> dict[str, float]:
    """Seconds from the first start to the last arrival, by what they were spent on: a kind of link (with its latency),
    a rank's memory, other local work, copy engines, or the way of signals and requests. Together they are all of it.

    Back from the last arrival: to what let it begin, and over FIFO links also to the message that it queued behind, so
    that a queue counts for the link that makes it. Where sharing is fair nobody queues: an instruction counts whole for
    the link that bounded it last.
    """
    log = result.log
    if not len(log):
        return {}
    path = _Path(result)
    over = np.maximum(log[:, 4], log[:, 5])
    at = int(over.argmax())
    path.reached = float(over[at])
    steps = 2 * len(log) + 2 * (len(result.hops[1]) if result.hops is not None else 0)
    while at >= 0 and steps > 0:
        path.spend("signals", float(over[at]))
        name = path.name(int(log[at, 7]))
        if result.hops is not None:
            at, name, steps = path.through_hops(at, steps)
        path.spend(name, float(log[at, 3]))
        at, steps = int(log[at, 6]), steps - 1
    path.spend("signals", 0.0)
    least = 1e-9 * sum(path.found.values())  # less is rounding
    return {name: seconds for name, seconds in sorted(path.found.items(), key=lambda pair: -pair[1]) if seconds > least}


class _Path:
    """How far back a path has come, and what was met on the way."""

    def __init__(self, result: Result) -> None:
        self._result, self._names = result, _link_names(result)
        self.found: dict[str, float] = {}
        self.reached = 0.0

    def name(self, link: int) -> str:
        return self._names(link) if link >= 0 else "local work"

    def spend(self, name: str, until: float) -> None:
        """All since `until` goes to one account; nothing if the path is there already."""
        if until < self.reached:
            self.found[name] = self.found.get(name, 0.0) + self.reached - until
            self.reached = until

    def through_hops(self, at: int, steps: int) -> tuple[int, str, int]:
        """From a flight's end over its hops and those it queued behind, to the start of the first message of all that:
        the flight that sent it, what it waited for before it sent (a request's way, a copy engine), steps left."""
        assert self._result.hops is not None
        bound, numbers, times = self._result.hops
        hop, name = int(bound[at]), "local work"
        while hop >= 0 and steps > 0:
            steps -= 1
            came, began, freed, left = times[hop].tolist()
            at, before = int(numbers[hop, HOP_FLIGHT]), int(numbers[hop, HOP_BEFORE])
            if before >= 0 and (came >= self.reached or left > freed):  # not there yet, or waiting for what still comes
                hop = before
                continue
            link = self.name(int(numbers[hop, HOP_LINK]))
            if came < self.reached:
                self.spend(link, began)
            name = "local work" if link == MEMORY else "copy engines" if self._result.by_engines else "signals"
            hop = int(numbers[hop, HOP_AHEAD]) if began > came else before
        return at, name, steps


def _link_names(result: Result) -> Callable[[int], str]:
    """What the log's links are called; behind those of the network are the ranks' memories."""
    names, kind_of = [kind.name for kind in result.network.links.kinds], result.network.links.kind_of()
    return lambda link: names[kind_of[link]] if link < len(kind_of) else MEMORY
