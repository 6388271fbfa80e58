"""Whole training steps as small graphs: what a rank computes, which collectives it takes part in, in which order.

    step = Step(cluster)
    bottom = step.compute("bottom mlp", flops=2e12)
    looked = step.compute("embedding", nbytes=4e9)
    sent = step.collective("all_to_all", 64 << 20, after=[looked])
    step.compute("top mlp", flops=4e12, after=[bottom, sent])
    step.run().seconds

All ranks do the same, so one stands for all; a pipeline has one for each stage. Computing takes
max(flops / peak, bytes / memory bandwidth) of the cluster's device: a roofline, an optimist's guess; `seconds` says
better where a kernel was measured. Collectives are run on the cluster's links (`collectives`). Communication goes by
streams (engines) of its own, one after the other in each; unless told otherwise every group of ranks has one. Those of
several streams share a link where both are bound by the same one. The cluster's interference model sees how many SMs a
collective holds: what the machine's file says, or `multiprocessors`. A kernel wants all of them, or the part that its
flops need where memory bounds it: such a kernel loses little with a few SMs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import InvalidArgument
from ..plan.interference import Interference
from .cluster import Cluster
from .collectives import Collectives
from .tasks import COMPUTE, Outcome, Task, Tasks

NET = "net"


class Step:
    """Collects the operations of a step. Each call gives a number by which others wait for it."""

    def __init__(
        self, cluster: Cluster, collectives: Collectives | None = None, interference: Interference | None = None
    ) -> None:
        self.cluster = cluster
        self.collectives = collectives if collectives is not None else Collectives(cluster)
        self._tasks = Tasks(interference if interference is not None else cluster.interference)

    def compute(
        self,
        name: str,
        *,
        flops: float = 0.0,
        nbytes: float = 0.0,
        seconds: float | None = None,
        after: Sequence[int] = (),
        stage: int = 0,
    ) -> int:
        """A kernel of the device; see the module's words on its multiprocessors."""
        device = self.cluster.device
        sms = device.multiprocessors
        if seconds is None:
            computing, reading = flops / device.peak, nbytes / device.memory_bandwidth
            seconds = max(computing, reading)
            if computing < reading:
                sms = max(1, math.ceil(sms * computing / reading))
        return self._tasks.add(
            Task(name, (stage,), COMPUTE, seconds, tuple(after), multiprocessors=sms, resource="computing")
        )

    def collective(
        self,
        collective: str,
        nbytes: float,
        *,
        group: str = "all",
        after: Sequence[int] = (),
        name: str = "",
        stream: str = "",
        stage: int = 0,
        multiprocessors: int | None = None,
    ) -> int:
        """A collective of the group's ranks; `nbytes` of the longest buffer of a rank. `stream`: unless said, the
        group's own. `multiprocessors` that it holds: unless said, what the machine's file has."""
        held = self.cluster.multiprocessors_of(collective) if multiprocessors is None else multiprocessors
        timing = self.collectives.time(collective, nbytes, group)
        resource = f"{collective} over {timing.link}" if timing.link else collective
        task = Task(
            name or collective, (stage,), stream or f"{NET} {group}", timing.seconds, tuple(after), 0.0,
            self.cluster.lane, timing.bytes_per_second, held, resource,
            {"bytes": round(nbytes), "group": group, "collective": collective}, timing.link,
        )  # fmt: skip
        return self._tasks.add(task)

    def send(self, nbytes: float, *, source: int, destination: int, after: Sequence[int] = ()) -> int:
        """From one stage of a pipeline to another: a message from a rank to its place on the next node."""
        if source == destination:
            raise InvalidArgument(argument="destination", was=destination, must="another stage than the source")
        timing = self.collectives.message(nbytes)
        task = Task(
            "send", (source,), f"to stage {destination}", timing.seconds, tuple(after), 0.0, "stages",
            timing.bytes_per_second, 0, f"send over {timing.link}", {"bytes": round(nbytes)}, timing.link,
        )  # fmt: skip
        return self._tasks.add(task)

    def run(self) -> Outcome:
        return self._tasks.run()
