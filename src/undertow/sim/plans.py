"""A plan, run: the waves of its matmul, its parcels, signals and transfers, on one rank that stands for all.

What each part takes alone is what the predictor says (`plan.predict`), so there is one model; what happens when, tile
by tile and with both sides slowing each other, is found by running it (over copy engines: `staged_plans`). The order of
tiles is the kernel's own (`plan.tiles.launch_order`), so tails, uneven shards and parcels that end inside a wave count
as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..plan import chain, matmuls, predict
from ..plan import fused as forms
from ..plan.machine import Machine
from ..plan.plan import Plan
from ..plan.problem import Problem
from ..plan.tiles import chunks, launch_order
from .posted_plans import PostedCall
from .staged_plans import StagedCall
from .tasks import COMPUTE, Outcome, Task, Tasks

Moving = Callable[[float], tuple[float, float]]
"""Seconds and bytes per second of the operator's collective on so many bytes of a rank's product (or input)."""


def simulate_plan(problem: Problem, plan: Plan, machine: Machine, moving: Moving | None = None) -> Outcome:
    """One call. `moving`: how transfers are timed; None for the machine's curves."""
    plan.check(problem)

    def measured(nbytes: float) -> tuple[float, float]:
        return predict.collective_seconds(problem, machine, plan.lane, nbytes)

    call = _Call(problem, plan, machine, moving or measured)
    if plan.grain == "fused" and moving is None and predict.posts_to_engines(problem, plan, machine):
        PostedCall(problem, plan, machine, call.tasks, call.workers).run()
    elif plan.grain == "fused":
        call.fused()
    elif problem.operator == "all_gather_matmul":
        call.gather()
    elif moving is None and predict.is_staged(problem, machine, plan.lane):
        StagedCall(problem, plan, machine, call.tasks, call.workers).run(call.waves)
    else:
        call.produce()
    return call.tasks.run()


class _Call:
    """Collects the tasks of one call."""

    def __init__(self, problem: Problem, plan: Plan, machine: Machine, moving: Moving) -> None:
        self.problem, self.plan, self.machine, self.moving = problem, plan, machine, moving
        self.workers = matmuls.workers_of(problem, plan)
        self.tasks = Tasks(machine.slowdowns)
        self.signal = predict.signal_seconds(plan, machine)

    def produce(self) -> None:
        """matmul, then a collective, parcel by parcel."""
        plan = self.plan
        sent: list[int] = []
        if plan.tile is None:
            parts = self._rows()
            if plan.grain == "serial":
                parts = [sum(parts)]
            for number, rows in enumerate(parts):
                made = self._matmul(rows, number)
                sent.append(self._send(number, rows * self.problem.n * self.problem.item_size, made))
        else:
            for number, (elements, made) in enumerate(self.waves()):
                if elements:
                    sent.append(self._send(number, elements * self.problem.item_size, made))
        if plan.grain == "signaled" and plan.layout == "packed":
            seconds = predict.unpack_seconds(self.problem, self.machine)
            self._compute("unpack", seconds, tuple(one for one in sent if one >= 0))

    def fused(self) -> None:
        """Every wave's bytes move on their own, by the one kernel; rows come shard by shard, own ones without a wait.

        What few rows give, and what a CPU does, is moved when it is computed; rows that all CTAs bring at once, before.
        """
        problem, plan, machine = self.problem, self.plan, self.machine
        assert plan.tile is not None
        gathers = problem.operator == "all_gather_matmul"
        tiles = sum(-(-rows // plan.tile[0]) for rows in problem.shards) * -(-problem.n // plan.tile[1])
        waves = -(-tiles // self.workers)
        one = matmuls.tile_seconds(problem, machine, plan.tile, self.workers)
        moves = self.moving(problem.m * (problem.k if gathers else problem.n) * problem.item_size)
        few = forms.form(problem, plan) in forms.OF_FEW_ROWS
        at_once = few or machine.device == "cpu" or (gathers and forms.at_once(plan))
        steps = max(1, problem.ranks - 1)
        came = [-1] + [self._part(step, moves, steps, -1) for step in range(steps)] if gathers else []
        sent, made = [], -1
        for wave in range(waves):
            arrived = came[-1 if at_once else wave * len(came) // waves] if came else -1
            launch = machine.launch_seconds if wave == 0 else 0.0
            made = self._compute(f"wave {wave}", one + launch, (arrived,) if arrived >= 0 else ())
            if not gathers and not at_once:
                sent.append(self._part(wave, moves, waves, made))
        if at_once:
            if not gathers:
                self._part(0, moves, 1, made)
            return
        rest = predict.fused_rest_seconds(problem, machine, sums=not chain.chained(problem, plan))
        self._compute("sums", rest, tuple(one for one in sent if one >= 0))

    def _part(self, number: int, moves: tuple[float, float], parts: int, after: int) -> int:
        """One of so many parts of what a fused call moves: no launch, no signal of its own; -1 where nothing moves."""
        seconds, speed = moves
        if not seconds:
            return -1
        task = Task(
            f"part {number}", (0,), self.plan.lane, seconds / parts, (after,) if after >= 0 else (), 0.0,
            self.plan.lane, speed, self.plan.share.communication_ctas or 0, f"lane {self.plan.lane}",
        )  # fmt: skip
        return self.tasks.add(task)

    def gather(self) -> None:
        """A collective, parcel by parcel, then the matmul of what has come."""
        problem, plan = self.problem, self.plan
        width = problem.k * problem.item_size
        if plan.tile is None:
            parts = self._rows() if plan.grain != "serial" else [problem.m]
            for number, rows in enumerate(parts):
                arrived = self._send(number, rows * width, -1, signals=False)
                self._matmul(rows, number, (arrived,) if arrived >= 0 else ())
            return
        grid = problem.grid(plan)
        order = launch_order(grid, plan, 0)
        rows_of = np.zeros(len(plan.parcels))
        first_column = order.column == 0
        np.add.at(rows_of, order.parcel[first_column], grid.bands[order.band[first_column], 1])
        own = np.zeros(len(plan.parcels), bool)
        own[order.parcel[grid.bands[order.band, 2] == 0]] = True
        scale = problem.ranks / max(1, problem.ranks - 1)  # all of a parcel is moved, of a collective all but 1/R
        came = [
            -1 if own[number] else self._send(number, float(rows) * width * scale, -1, signals=False)
            for number, rows in enumerate(rows_of)
        ]
        one = matmuls.tile_seconds(problem, self.machine, plan.tile, self.workers)
        for start in range(0, len(order.parcel), self.workers):
            wave = order.parcel[start : start + self.workers]
            waits = tuple({came[int(parcel)] for parcel in wave if came[int(parcel)] >= 0})
            launch = self.machine.launch_seconds if start == 0 else 0.0
            self._compute(f"wave {start // self.workers}", one + launch, waits, self.signal if waits else 0.0)

    def _rows(self) -> list[int]:
        return [sum(rows for _, rows in part) for part in chunks(self.problem.shards, self.plan)]

    def waves(self) -> list[tuple[int, int]]:
        """Of each parcel: its elements, and the wave after which it is complete; waves become tasks on the way."""
        problem, plan = self.problem, self.plan
        assert plan.tile is not None
        grid = problem.grid(plan)
        order = launch_order(grid, plan, 0)
        one = matmuls.tile_seconds(problem, self.machine, plan.tile, self.workers)
        made: list[int] = []
        for start in range(0, len(order.parcel), self.workers):
            launch = self.machine.launch_seconds if start == 0 else 0.0
            made.append(self._compute(f"wave {start // self.workers}", one + launch, ()))
        columns = np.minimum(grid.block_n, grid.n - order.column * grid.block_n)
        elements = np.zeros(len(plan.parcels), np.int64)
        np.add.at(elements, order.parcel, grid.bands[order.band, 1] * columns)
        last = np.zeros(len(plan.parcels), np.int64)
        np.maximum.at(last, order.parcel, np.arange(len(order.parcel)))
        return [
            (int(size), made[int(at) // self.workers] if size else -1) for size, at in zip(elements, last, strict=True)
        ]

    def _matmul(self, rows: int, number: int, after: tuple[int, ...] = ()) -> int:
        seconds = matmuls.matmul_seconds(self.problem, self.machine, self.workers, rows)
        return self._compute(f"matmul {number}", seconds, after, self.signal if after else 0.0)

    def _compute(self, name: str, seconds: float, after: tuple[int, ...], delay: float = 0.0) -> int:
        return self.tasks.add(Task(name, (0,), COMPUTE, seconds, after, delay, None, 0.0, self.workers, "matmul"))

    def _send(self, number: int, nbytes: float, after: int, signals: bool = True) -> int:
        """The transfer of a parcel; -1 where nothing moves."""
        seconds, speed = self.moving(nbytes)
        if not seconds:
            return -1
        delay = (self.signal if signals else 0.0) + self.machine.work.skew
        task = Task(
            f"parcel {number}", (0,), self.plan.lane, seconds + self.machine.launch_seconds,
            (after,) if after >= 0 else (), delay if after >= 0 else 0.0, self.plan.lane, speed,
            self.plan.share.communication_ctas or 0, f"lane {self.plan.lane}", {"bytes": round(nbytes)},
        )  # fmt: skip
        return self.tasks.add(task)
