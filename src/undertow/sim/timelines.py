"""A traced schedule as a timeline: a row for each worker of a rank, in the format of measured ones."""

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
