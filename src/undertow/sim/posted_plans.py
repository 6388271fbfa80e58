"""A fused plan whose bands are posted, run: every parcel of every rank, on copy engines that ranks of a GPU share.

    sums    waves of tiles | each parcel when its last wave is over: out, in | all_reduce: sums out, in | what is left
    rows    own rows are copied, parcel by parcel: out, in | waves of tiles: own rows, then each behind its parcel

`plan.predict` has the equations for the first and the last rank; here each rank's copy is a task of its own. Where each
rank has engines of its own, one rank stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..plan import matmuls, posted_steps, predict, staged
from ..plan.machine import Machine
from ..plan.plan import Plan
from ..plan.problem import Problem
from .tasks import COMPUTE, Task, Tasks

_STAGES = ("post", "land")
_ENGINES = {"post": "dma out", "land": "dma in"}


class PostedCall:
    """Adds the tasks of one call."""

    def __init__(self, problem: Problem, plan: Plan, machine: Machine, tasks: Tasks, workers: int) -> None:
        assert machine.engines is not None
        assert plan.tile is not None
        self.problem, self.plan, self.machine, self.engines = problem, plan, machine, machine.engines
        self.tasks, self.workers = tasks, workers
        self.ranks = range(problem.ranks if machine.shares_device else 1)
        self.steps = posted_steps.steps_of(problem, plan)
        tiles = sum(-(-rows // plan.tile[0]) for rows in problem.shards) * -(-problem.n // plan.tile[1])
        self.waves = max(1, -(-tiles // workers))
        self.wave_seconds = matmuls.matmul_times(problem, plan, machine, [0, 1])[0] / self.waves

    def run(self) -> None:
        if self.problem.operator == "all_gather_matmul":
            self._rows()
        else:
            self._sums()

    def _sums(self) -> None:
        ends = [self._wave(wave, ()) for wave in range(self.waves)]
        made = [ends[math.ceil(self.waves * part) - 1] for part in self.steps.made]
        landed = self._copies("product", [(one,) for one in made])
        others, parts = self.problem.ranks - 1, len(self.plan.parcels)
        if self.problem.operator == "matmul_all_reduce" and landed:
            # An own parcel has come from all others with the last of them, and its sum goes to each.
            came = landed[-max(1, len(landed) // others) :]
            landed = self._copies("sum", [came[step * len(came) // len(landed)] for step in range(len(landed))])
        after = tuple(one for step in landed for one in step)
        rest = predict.fused_rest_seconds(self.problem, self.machine) / (self.problem.ranks * parts)
        self._compute("sums", rest, (ends[-1], *after))

    def _rows(self) -> None:
        count = len(self.steps.nbytes)
        copied, own = predict.own_copy_seconds(self.problem, self.machine), list[int]()
        for step in range(count):
            own.append(self._compute(f"own {step}", copied / count, tuple(own[-1:])))
        landed = self._copies("rows", [(one,) for one in own])
        for wave in range(self.waves):
            waits = [step for step, needed in enumerate(self.steps.needed) if needed * self.waves < wave + 1]
            self._wave(wave, landed[max(waits)] if waits else ())
        self._compute("end", predict.fused_rest_seconds(self.problem, self.machine), ())

    def _copies(self, what: str, ready: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Of each step the tasks, one of each rank, after which what was posted in it has landed."""
        pieces = self.steps.nbytes
        nothing = [0.0] * len(pieces)
        places = staged.places(self.problem.ranks)
        parts = staged.parts(pieces, pieces, nothing, nothing, self.engines.chunk, places)
        done: dict[tuple[str, int, int], int] = {}
        found: list[tuple[int, ...]] = [()] * len(pieces)
        for at, part in enumerate(parts):
            for stage in _STAGES:
                for rank in self.ranks:
                    before = [done[stage, at - 1, rank]] if at else []
                    if stage == "post":
                        before += ready[part.parcel]
                        if part.before >= 0:
                            before.append(done["land", part.before, (rank + 1) % len(self.ranks)])
                    else:
                        before.append(done["post", at, (rank - 1) % len(self.ranks)])
                    done[stage, at, rank] = self._copy(f"{what} {part.parcel}", stage, rank, part.piece, before)
            found[part.parcel] = tuple(done["land", at, rank] for rank in self.ranks)
        return found

    def _copy(self, name: str, stage: str, rank: int, piece: float, after: Sequence[int]) -> int:
        shared = self.machine.shares_device
        seconds = staged.job_seconds(self.engines, stage, _STAGES, self.problem.ranks, shared, piece)
        speed = self.engines.in_speed / (self.problem.ranks if shared else 1)
        engine = _ENGINES[stage]
        task = Task(
            f"{stage} {name}", (0,), engine, seconds, tuple(after), self.engines.hop, self.plan.lane, speed, 0,
            "lane dma", {"rank": rank}, f"{engine} {rank}", ordered=False,
        )  # fmt: skip
        return self.tasks.add(task)

    def _wave(self, wave: int, after: tuple[int, ...]) -> int:
        return self._compute(f"wave {wave}", self.wave_seconds, after)

    def _compute(self, name: str, seconds: float, after: tuple[int, ...]) -> int:
        return self.tasks.add(Task(name, (0,), COMPUTE, seconds, after, 0.0, None, 0.0, self.workers, "matmul"))
