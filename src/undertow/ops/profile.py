"""What `undertow profile` adds for the planner: whole collectives, interference, and what tiles cost.

| section of the machine file | from |
|---|---|
| collectives | each operator's communication without its matmul, over each lane, by the bytes of a rank's product |
| interference | the pairs that the fabric measured: matmul and lane, alone and side by side (`plan.interference`) |
| work | signaled matmuls without communication, of several inner sizes (`plan.work`), and an unpacking copy; on a GPU
  also the library's matmul: `profile_matmul` |
| engines | where lane dma is staged through host memory: `profile_engines` |

Every rank comes along, and the slowest counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..fabric.timer import compare
from ..plan import interference, reorder, work
from ..plan.defaults import default_plan
from ..plan.matmuls import rate, workers_of
from ..plan.plan import OPERATORS, split
from ..plan.problem import Problem
from ..plan.search import frames
from ..plan.tokens import Tokens
from . import all_gather_matmul, matmul_all_reduce, matmul_all_to_all, matmul_reduce_scatter, profile_engines
from .finish import Finish
from .operands import dtype_name
from .produce import placed, product_of
from .profile_timing import together

if TYPE_CHECKING:
    from ..fabric.group import Group
    from ..fabric.profile import Pair, Progress
    from ..plan.machine import Machine
    from ..plan.tables import Points

Call = Callable[[], object]
_COLUMNS = 1024
_NOTHING = Finish(None, "none")


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """Bytes of a rank's product, shapes of tile kernels (the last is unpacked, too), rounds, seconds of each."""

    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    rounds: int
    seconds: float

    @staticmethod
    def fitting(device: str, quick: bool) -> Effort:
        if device == "cpu":
            largest = 1 << 20 if quick else 16 << 20
            sizes = tuple(1 << exponent for exponent in range(14, 25, 2) if 1 << exponent <= largest)
            shapes = ((512, 512, 64), (512, 512, 256), (768, 512, 768))
            return Effort(sizes, shapes, torch.float32, 3 if quick else 5, 0.2 if quick else 0.6)
        largest = 16 << 20 if quick else 256 << 20
        sizes = tuple(1 << exponent for exponent in range(16, 29, 2) if 1 << exponent <= largest)
        return Effort(sizes, ((8192, 4096, 4096),), torch.bfloat16, 5 if quick else 11, 1.0 if quick else 2.0)


def sharpen(
    machine: Machine, pairs: Sequence[Pair], group: Group, quick: bool, progress: Progress = lambda what, fraction: None
) -> Machine:
    """The machine with the sections above, over the lanes that it tells of. Collective; all ranks get the same."""
    effort = Effort.fitting(group.device.type, quick)
    collectives = _collectives(group, effort, list(machine.lanes), lambda what, done: progress(what, 0.8 * done))
    progress("tiles", 0.8)
    found = dataclasses.replace(machine, collectives=collectives, interference=_interference(machine, pairs))
    align = meeting(group, "dma" if "dma" in machine.lanes else next(iter(machine.lanes)))
    if group.device.type == "cuda":
        from . import profile_matmul  # what only a GPU has: kernels

        costs = profile_matmul.costs(group, found, lambda call: together(group, call, align, effort.rounds))
    else:
        overhead, efficiency = work.fit(_kernels(group, effort, found))
        costs = work.Work(overhead=overhead, efficiency=efficiency)
    costs = dataclasses.replace(costs, copy_speed=_copy_speed(group, effort))
    engines = None
    if "dma" in machine.lanes:
        progress("copy engines", 0.9)

        def bare(operator: str, nbytes: int, parcels: int) -> Call:
            return communication(group, operator, "dma", nbytes, effort.dtype, parcels)

        engines = profile_engines.engines(group, bare, align, effort.rounds)
    return dataclasses.replace(found, work=costs, engines=engines)


def _interference(machine: Machine, pairs: Sequence[Pair]) -> interference.Interference:
    samples = [
        interference.Sample(
            compute_sms=pair.workers,
            lane=pair.lane,
            lane_bytes_per_second=pair.message_bytes / pair.lane_alone,
            gemm_seconds_alone=pair.matmul_alone,
            gemm_seconds_beside=pair.matmul_beside,
            lane_seconds_alone=pair.lane_alone,
            lane_seconds_beside=pair.lane_beside,
        )
        for pair in pairs
    ]
    return interference.fit(samples, max(pair.workers for pair in pairs))


# -- collectives -------------------------------------------------------------------------------------------------------


def _collectives(
    group: Group, effort: Effort, lanes: Sequence[str], progress: Progress
) -> dict[str, dict[str, Points]]:
    running = [(operator, lane) for operator in OPERATORS for lane in lanes]
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {one: [] for one in running}
    last_step = meeting(group, "peer" if "peer" in lanes else lanes[0])

    def align() -> None:
        """A barrier over Gloo lets ranks go milliseconds apart; messages between all of them bring them together."""
        group.barrier()
        last_step()

    for number, size in enumerate(effort.sizes):
        progress(f"collectives at {size >> 10} KB", number / len(effort.sizes))
        calls = {":".join(one): communication(group, *one, size, effort.dtype) for one in running}
        taken = compare(
            calls,
            repeats=effort.rounds,
            warmup=1,
            calls=max(1, min(8, (1 << 18) // size)),
            budget_seconds=effort.seconds,
            reduce_max=group.reduce_max,
            before=align,
        )
        for one in list(running):
            median = taken.estimate(":".join(one)).median
            curves[one].append((size, median))
            if 4 * median * len(calls) > effort.seconds:  # the same on all ranks: the times are the slowest rank's
                running.remove(one)
        if not running:
            break
    return {operator: {lane: tuple(curves[operator, lane]) for lane in lanes} for operator in OPERATORS}


def meeting(group: Group, lane: str) -> Call:
    """The smallest message from every rank to every other: when a stream is past it, all ranks' have reached it."""
    dtype = torch.bfloat16
    return communication(group, matmul_all_to_all.OPERATOR, lane, group.size * _COLUMNS * dtype.itemsize, dtype)


def communication(
    group: Group, operator: str, lane: str, nbytes: int, dtype: torch.dtype, parcels: int | None = None
) -> Call:
    """The operator's communication over that lane without its matmul, as its serial plan does it, or in `parcels`.

    `nbytes`: of a rank's product, of all_gather_matmul of the gathered input, both of 1024 columns.
    """
    fabric, size = group.fabric, group.size
    rows = max(1, nbytes // (_COLUMNS * dtype.itemsize))
    shards = [stop - start for start, stop in split(rows, size)]
    gathers = operator == all_gather_matmul.OPERATOR
    n, k = (0, _COLUMNS) if gathers else (_COLUMNS, 0)
    problem = Problem.of(
        operator, rows, n, k, dtype=str(dtype).removeprefix("torch."), ranks=size, device=group.device.type,
        multiprocessors=fabric.multiprocessors,
    )  # fmt: skip
    plan, opened = default_plan(problem, "serial", lane), fabric.lane(lane)
    if lane == "peer":  # by parcels, as those of plans that overlap go, and not by one collective
        plan = dataclasses.replace(plan, deterministic=True)
    if parcels is not None:
        plan = dataclasses.replace(plan, parcels=split(rows, parcels))
    x = torch.zeros(shards[group.rank] if gathers else rows, _COLUMNS, dtype=dtype, device=group.device)
    if gathers:
        w, y = x.new_zeros(_COLUMNS, 0), x.new_zeros(rows, 0)
        return lambda: all_gather_matmul.run(x, w, y, problem, plan, _NOTHING, fabric, opened)
    if operator == matmul_all_to_all.OPERATOR:
        tokens = Tokens.of_splits([shards] * size)
        y = x.new_zeros(size * shards[group.rank], _COLUMNS)
        return lambda: matmul_all_to_all.run(
            x, x, y, tokens, problem, plan, _NOTHING, fabric, opened, compute=False
        )  # fmt: skip
    if operator == matmul_all_reduce.OPERATOR:
        return lambda: matmul_all_reduce.run(x, x, x, problem, plan, _NOTHING, fabric, opened, compute=False)
    y = x.new_zeros(shards[group.rank], _COLUMNS)
    return lambda: matmul_reduce_scatter.run(x, x, y, problem, plan, _NOTHING, fabric, opened, compute=False)


# -- tiles -------------------------------------------------------------------------------------------------------------


def _kernels(group: Group, effort: Effort, machine: Machine) -> list[work.KernelSample]:
    """Signaled matmuls of every shape without their communication, on a CPU."""
    fabric, samples = group.fabric, []
    for m, n, k in effort.shapes:
        x = torch.ones(m, k, dtype=effort.dtype, device=group.device)
        w = torch.ones(k, n, dtype=effort.dtype, device=group.device)
        buffer = x.new_empty(m * n)
        problem = _all_reduce_problem(group, x, w)
        plan = frames(problem, next(iter(machine.lanes)))[0]
        product = product_of(fabric, problem, plan, x, w, buffer, None)

        def multiply() -> None:
            product.prepare()  # noqa: B023 - called before the loop goes on
            product.start()  # noqa: B023
            product.reach(0)  # noqa: B023

        taken = compare(
            {"tiles": multiply},
            repeats=2 * effort.rounds,
            warmup=2,
            budget_seconds=effort.seconds,
            reduce_max=group.reduce_max,
            before=group.barrier,
        )
        grid, workers = problem.grid(plan), workers_of(problem, plan)
        assert plan.tile is not None
        operations = (
            2 * plan.tile[0] * plan.tile[1] * k if machine.gemm.workers == "SMs" else problem.flops / grid.tiles
        )
        ideal = operations * workers / rate(problem, machine, workers)
        samples.append(work.KernelSample(grid.waves(workers), ideal, taken.estimate("tiles").median))
    return samples


def _copy_speed(group: Group, effort: Effort) -> float:
    """Bytes of result per second that unpacking moves."""
    m, n, _ = effort.shapes[-1]
    y = torch.zeros(m, n, dtype=effort.dtype, device=group.device)
    problem = _all_reduce_problem(group, y, y.new_empty(n, n))
    plan = dataclasses.replace(frames(problem, "net")[0], layout="packed")
    buffer = torch.zeros(m * n, dtype=effort.dtype, device=group.device)
    grid = problem.grid(plan)
    table = placed(group.fabric, ("profile", m, n), lambda: reorder.unpack_table(grid, plan))
    taken = compare(
        {"unpack": lambda: _NOTHING.unpack(y, buffer, table)},
        repeats=2 * effort.rounds,
        warmup=1,
        reduce_max=group.reduce_max,
        before=group.barrier,
    )
    return m * n * effort.dtype.itemsize / taken.estimate("unpack").median


def _all_reduce_problem(group: Group, x: torch.Tensor, w: torch.Tensor) -> Problem:
    return Problem.of(
        matmul_all_reduce.OPERATOR, x.shape[0], w.shape[1], x.shape[1], dtype=dtype_name(x), ranks=group.size,
        device=group.device.type, multiprocessors=group.fabric.multiprocessors,
    )  # fmt: skip
