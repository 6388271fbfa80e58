"""What a traced schedule did: a timeline in the format of measured ones, and the critical path by resource."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..collective.schedule import MOVE
from ..fabric.events import Event, Timeline
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
    """Seconds from the first start to the last arrival, by what they were spent on: a kind of link (its latency and
    queueing for it count), a rank's memory, other local work, or the way of signals. Together they are all of it. An
    instruction's time counts whole for the link that kept it longest: in a queue that is where the queue is, which need
    not be the link that made it; `what_if` tells."""
    log = result.log
    found: dict[str, float] = {}
    if not len(log):
        return found
    names = _link_names(result)
    over = np.maximum(log[:, 4], log[:, 5])
    at = int(over.argmax())
    reached = float(over[at])
    while at >= 0:
        begin, link = float(log[at, 3]), int(log[at, 7])
        done = min(reached, float(over[at]))
        name = names(link) if link >= 0 else "local work"
        found["signals"] = found.get("signals", 0.0) + reached - done
        found[name] = found.get(name, 0.0) + max(0.0, done - begin)
        reached, at = min(reached, begin), int(log[at, 6])
    found["signals"] += reached
    least = 1e-9 * sum(found.values())  # less is rounding
    return {name: seconds for name, seconds in sorted(found.items(), key=lambda pair: -pair[1]) if seconds > least}


def _link_names(result: Result) -> Callable[[int], str]:
    """What the log's links are called; behind those of the network are the ranks' memories."""
    names, kind_of = [kind.name for kind in result.network.links.kinds], result.network.links.kind_of()
    return lambda link: names[kind_of[link]] if link < len(kind_of) else MEMORY
