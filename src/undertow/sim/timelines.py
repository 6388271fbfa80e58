"""What a traced schedule did: a timeline in the format of measured ones, and the critical path by resource."""

from __future__ import annotations

import numpy as np

from ..collective.schedule import MOVE
from ..fabric.events import Event, Timeline
from .schedules import Result


def schedule_timeline(result: Result) -> Timeline:
    """Every move of a run that was traced, from its start until its last byte has arrived."""
    schedule = result.schedule
    first = np.searchsorted(schedule.worker_rank, np.arange(schedule.ranks))
    names = [kind.name for kind in result.network.links.kinds]
    kind_of = result.network.links.kind_of()
    events = []
    for worker, instruction, iteration, begin, out, delivered, _, link in result.log.tolist():
        if schedule.instructions.kind[int(instruction)] != MOVE:
            continue
        rank = int(schedule.worker_rank[int(worker)])
        details = {"iteration": int(iteration), "delivered_ns": round(delivered * 1e9)}
        if link >= 0:
            details |= {"link": names[kind_of[int(link)]]}
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
    """Seconds from the first start to the last arrival, by what they were spent on: a kind of link (queueing for it
    counts), local work, or the way of signals. Together they are all of it."""
    log = result.log
    found: dict[str, float] = {}
    if not len(log):
        return found
    names, kind_of = [kind.name for kind in result.network.links.kinds], result.network.links.kind_of()
    over = np.maximum(log[:, 4], log[:, 5])
    at = int(over.argmax())
    reached = float(over[at])
    while at >= 0:
        begin, link = float(log[at, 3]), int(log[at, 7])
        done = min(reached, float(over[at]))
        name = names[kind_of[link]] if link >= 0 else "local work"
        found["signals"] = found.get("signals", 0.0) + reached - done
        found[name] = found.get(name, 0.0) + max(0.0, done - begin)
        reached, at = min(reached, begin), int(log[at, 6])
    found["signals"] += reached
    return {name: seconds for name, seconds in sorted(found.items(), key=lambda pair: -pair[1]) if seconds > 0}
