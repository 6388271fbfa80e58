"""What `undertow profile` measures of matmuls on a GPU, for `plan.work`: all ranks multiply at once, random numbers.

| constant | from |
|---|---|
| overhead, efficiency, tiles | the tile kernel without its communication, over several k |
| library, stagger | torch's matmul over the same k; how much sooner the first rank's is over than the last one's |
| rows, read_speed | torch's matmul of few rows, as chunks are: several in a row; of those that read fastest, how fast |

Numbers are random because ones and zeros take less power, and a GPU that needs less is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..plan import work
from ..plan.matmuls import library_seconds, rate, workers_of
from ..plan.plan import OPERATORS
from ..plan.problem import Problem
from ..plan.search import frames
from .operands import dtype_name
from .produce import product_of

if TYPE_CHECKING:
    from ..fabric.group import Group
    from ..plan.machine import Machine
    from .profile_timing import Spread

_OPERATOR = next(iter(OPERATORS))
_M, _N = 4096, 8192
_INNER = (1024, 2048, 4096, 8192, 12288, 20480)
_ROWS = (64, 96, 128, 192, 256, 384, 512, 1024)
_ROWS_INNER = 8192
_IN_A_ROW = 4
_MOST_STAGGER = 0.95
Timed = Callable[[Callable[[], object]], "Spread"]


def costs(group: Group, machine: Machine, timed: Timed) -> work.Work:
    """`Work` without its copies. `timed`: the seconds of a call that all ranks make at once."""
    samples, library, staggers = [], [], []
    for k in _INNER:
        x, w, problem = _factors(group, _M, k)
        y = x.new_empty(_M, _N)
        taken = timed(partial(torch.mm, x, w, out=y))
        library.append(
            (k, _without_launch(machine, taken.seconds) / library_seconds(problem, machine, _sms(group), _M))
        )
        staggers.append(taken.stagger)
        samples.append(_tile_kernel(group, machine, timed, x, w, problem))
    overhead, efficiency = work.fit(samples)
    tiles = tuple((k, one.seconds / one.said(overhead, efficiency)) for k, one in zip(_INNER, samples, strict=True))
    rows, read_speed = _few_rows(group, machine, timed, work.at(tuple(library), _ROWS_INNER))
    stagger = sorted(staggers)[len(staggers) // 2] if machine.shares_device else 0.0
    return work.Work(
        overhead=overhead, efficiency=efficiency, read_speed=read_speed, tiles=tiles, library=tuple(library), rows=rows,
        stagger=min(_MOST_STAGGER, max(0.0, stagger)),
    )  # fmt: skip


def _tile_kernel(
    group: Group, machine: Machine, timed: Timed, x: torch.Tensor, w: torch.Tensor, problem: Problem
) -> work.KernelSample:
    plan = frames(problem, next(iter(machine.lanes)))[0]
    product = product_of(group.fabric, problem, plan, x, w, x.new_empty(_M * _N), None)

    def multiply() -> None:
        product.prepare()
        product.start()
        product.reach(0)

    workers = workers_of(problem, plan)
    assert plan.tile is not None
    ideal = 2 * plan.tile[0] * plan.tile[1] * problem.k * workers / rate(problem, machine, workers)
    return work.KernelSample(problem.grid(plan).waves(workers), ideal, timed(multiply).seconds)


def _few_rows(
    group: Group, machine: Machine, timed: Timed, factor: float
) -> tuple[tuple[tuple[int, float], ...], float]:
    """The curve over rows, which ends where `library` was measured, and the most bytes per second that were read.

    `factor`: what `library` says of this k.
    """
    x, w, problem = _factors(group, max(_ROWS), _ROWS_INNER)
    y = x.new_empty(max(_ROWS), _N)
    found, speeds = [], []
    for rows in _ROWS:
        multiply = partial(torch.mm, x[:rows], w, out=y[:rows])
        taken = _without_launch(machine, timed(lambda: [multiply() for _ in range(_IN_A_ROW)]).seconds / _IN_A_ROW)  # noqa: B023
        found.append((rows, taken / (factor * library_seconds(problem, machine, _sms(group), rows))))
        read = (rows * _ROWS_INNER + _ROWS_INNER * _N + rows * _N) * x.element_size()
        speeds.append(read / taken)
    return (*found, (_M, 1.0)), max(speeds)


def _without_launch(machine: Machine, seconds: float) -> float:
    return max(0.1 * seconds, seconds - machine.launch_seconds)


def _sms(group: Group) -> int:
    return int(group.fabric.multiprocessors)


def _factors(group: Group, m: int, k: int) -> tuple[torch.Tensor, torch.Tensor, Problem]:
    x = torch.randn(m, k, dtype=torch.bfloat16, device=group.device)
    w = torch.randn(_N, k, dtype=torch.bfloat16, device=group.device).t()  # as a layer keeps its weights
    problem = Problem.of(
        _OPERATOR, m, _N, k, dtype=dtype_name(x), ranks=group.size, device="cuda", multiprocessors=_sms(group)
    )
    return x, w, problem
