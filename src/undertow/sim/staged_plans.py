"""A plan whose parcels go through host memory, run: every copy of every rank, on engines that ranks of a GPU share.

`plan.staged` says which stages a parcel passes and what waits for what, in equations for the first and the last rank;
here each rank's job is a task of its own, engines take whoever is ready first, the host enqueues parcel after parcel,
and copies are slowed while the matmul runs. Ranks that share a GPU and multiply by a library's kernels are ready one
after the other (`Work.stagger`). Where each rank has engines of its own, one rank stands for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ..plan import staged
from ..plan.machine import Machine
from ..plan.plan import Plan
from ..plan.predict import Staging, unpack_seconds
from ..plan.problem import Problem
from .tasks import COMPUTE, Task, Tasks

_HOST = "host"
_ENGINES = {"out": "dma out", "share": "dma out", "in": "dma in", "gather": "dma in"}
Waves = Callable[[], Sequence[tuple[int, int]]]
"""Of each parcel of a signaled plan its elements and the task after which it is complete; waves become tasks."""


class StagedCall:
    """Adds the tasks of one call."""

    def __init__(self, problem: Problem, plan: Plan, machine: Machine, tasks: Tasks, workers: int) -> None:
        assert machine.engines is not None
        self.problem, self.plan, self.machine, self.engines = problem, plan, machine, machine.engines
        self.tasks, self.workers = tasks, workers
        self.staging = Staging(problem, plan, machine)
        self.ranks = range(problem.ranks if machine.shares_device else 1)
        bounds = [0, *itertools.accumulate(stop - start for start, stop in plan.parcels)]
        self.computing = self.staging.computing(bounds)
        self.pieces = self.staging.pieces(bounds)

    def run(self, waves: Waves) -> None:
        """The call, its copies, its end."""
        problem, plan, engines = self.problem, self.plan, self.engines
        begun = self._host("call", engines.call, ())
        self.tasks.add(Task("begin", (0,), COMPUTE, 0.0, (begun,)))  # what is computed follows it
        each = engines.parcel_seconds(problem.operator)
        # `enqueued[i]`: the host has done with the parcels before i
        hosts = [each if piece > 0 else 0.0 for piece in self.pieces]
        enqueued = [begun, *(self._host(f"enqueue {i}", seconds, ()) for i, seconds in enumerate(hosts))]
        if plan.grain == "signaled":
            ready = [[made] * len(self.ranks) for _, made in waves()]
        elif plan.grain == "chunked":
            ready = [self._matmul(f"matmul {i}", one, enqueued[i]) for i, one in enumerate(self.computing)]
        else:
            ready = [self._matmul("matmul", sum(self.computing), begun)] * len(plan.parcels)
        over = self._copies(ready, enqueued)
        packed = plan.grain == "signaled" and plan.layout == "packed"
        unpack = unpack_seconds(problem, self.machine) if packed else 0.0
        everything = tuple({*over, *(one for parcel in ready for one in parcel if one >= 0)})
        self._host("end", engines.end + unpack, everything)

    def _host(self, name: str, seconds: float, after: tuple[int, ...]) -> int:
        return self.tasks.add(Task(name, (0,), _HOST, seconds, after, resource="host"))

    def _matmul(self, name: str, seconds: float, after: int) -> list[int]:
        """Of each rank, the task after which its part is complete."""
        stagger = self.machine.work.stagger if len(self.ranks) > 1 else 0.0
        late = stagger * seconds / self.staging.matmuls
        found: list[int] = []
        for rank in self.ranks:
            part = seconds - late if rank == 0 else late / (len(self.ranks) - 1)
            task = Task(name, (0,), COMPUTE, part, (after,), 0.0, None, 0.0, self.workers, "matmul")
            found.append(self.tasks.add(task))
        return found

    def _copies(self, ready: Sequence[Sequence[int]], enqueued: Sequence[int]) -> list[int]:
        """All stages of all parts, in the order in which streams have them; what was last of each rank."""
        problem, engines = self.problem, self.engines
        stages = staged.STAGES[problem.operator]
        nothing = [0.0] * len(self.pieces)
        largest = self.staging.largest(self.pieces) or self.pieces
        parts = staged.parts(self.pieces, largest, nothing, nothing, engines.chunk, staged.places(problem.ranks))
        done: dict[tuple[str, int, int], int] = {}
        for at, part in enumerate(parts):
            for stage, rank in itertools.product(stages, self.ranks):
                others = [one for one in self.ranks if one != rank] or [rank]
                before = [done[stage, at - 1, rank]] if at else []
                if stage == "out":
                    before += [ready[part.parcel][rank], enqueued[part.parcel]]
                elif stage in ("in", "gather"):
                    before += [done["out" if stage == "in" else "share", at, one] for one in others]
                    before.append(enqueued[part.parcel + 1])
                    before += [done["sum", at - 1, rank]] if stage == "in" and "sum" in stages and at else []
                else:
                    before.append(done["in" if stage == "sum" else "sum", at, rank])
                if stage in staged.READ_BY and part.before >= 0:
                    before += [done[staged.READ_BY[stage], part.before, one] for one in others]
                after = tuple(one for one in before if one >= 0)
                job = self._job(stage, stages, rank, at == len(parts) - 1, part, after)
                done[stage, at, rank] = self.tasks.add(job)
        last = len(parts) - 1
        return [done[stages[-1], last, rank] for rank in self.ranks] if parts else []

    def _job(
        self, stage: str, stages: Sequence[str], rank: int, last: bool, part: staged.Part, after: tuple[int, ...]
    ) -> Task:
        """A copy holds an engine; a sum runs on SMs that are the rank's own, faster when the matmul has left."""
        problem, engines, shared = self.problem, self.engines, self.machine.shares_device
        name, hop = f"{stage} {part.parcel}", engines.hop
        if stage == "sum":
            alone = last or self.plan.grain == "serial"
            seconds = (problem.ranks + 1) * part.summed / (engines.sum_speed_alone if alone else engines.sum_speed)
            return Task(name, (0,), f"sum {rank}", seconds, after, hop, resource="sum")
        seconds = staged.job_seconds(engines, stage, stages, problem.ranks, shared, part.piece)
        speed = engines.in_speed / (problem.ranks if shared else 1)
        engine = _ENGINES[stage]
        return Task(
            name, (0,), engine, seconds, after, hop, self.plan.lane, speed, 0, "lane dma", {"rank": rank},
            f"{engine} {rank}", ordered=False,
        )  # fmt: skip
