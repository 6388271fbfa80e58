"""What `undertow profile` measures of a lane that is staged through host memory, for `plan.staged`.

| constant | from |
|---|---|
| speeds, pauses, hop, end | bare communication of all_to_all and all_reduce in 1 to 16 parcels, by `staged.fit` |
| enqueues | each operator's seconds of the host for whole calls of few and of many parcels |
| call | calls whose matmul is next to nothing: of few parcels, with a host that begins with them, and with one ahead |
| sum speeds | the kernel that sums, alone and beside a matmul on all SMs but those that its plan leaves |

Each stands behind something long on the GPU, so that the host has enqueued everything before it begins
(`profile_timing`): what hosts cost is `enqueues` and `call`. Every rank comes along, and the slowest counts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..fabric.timeline import Recorder
from ..plan import staged
from ..plan.defaults import default_plan
from ..plan.plan import split
from ..plan.problem import Problem
from ..plan.search import frames
from . import matmul_all_reduce, matmul_all_to_all, matmul_reduce_scatter
from .finish import Finish
from .operands import dtype_name
from .produce import product_of
from .profile_timing import DELAY_CYCLES, together

if TYPE_CHECKING:
    from ..fabric.group import Group

Call = Callable[[], object]
_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call
_OPERATORS = (matmul_all_to_all.OPERATOR, matmul_all_reduce.OPERATOR)
_SIZES = (16 << 20, 128 << 20)  # of a rank's product
_PARCELS = (1, 2, 4, 8, 16)
_CALLS: dict[str, Callable[..., object]] = {
    matmul_all_to_all.OPERATOR: matmul_all_to_all.matmul_all_to_all,
    matmul_reduce_scatter.OPERATOR: matmul_reduce_scatter.matmul_reduce_scatter,
    matmul_all_reduce.OPERATOR: matmul_all_reduce.matmul_all_reduce,
}
_FEW, _MANY = 4, 16
_BANDS, _INNER, _COLUMNS = 16, 64, 2048  # of the calls that hosts are timed with: bands of each rank, k, n
_SUMMED = 4 << 20  # bytes of a piece
_SUMS = 3  # in a row


def engines(group: Group, bare: Callable[[str, int, int], Call], align: Call, rounds: int) -> staged.Engines | None:
    """The copy engines behind lane dma; None where it is not staged. Collective; the same on all ranks.

    `bare(operator, nbytes, parcels)`: that operator's communication over dma, without its matmul. `align`: a message
    from every rank to every other.
    """
    fabric = group.fabric
    if fabric.lanes().get("dma") or group.size == 1 or group.device.type != "cuda":
        return None
    chunk = fabric.lane("dma").staged_chunk
    if not chunk:
        return None
    shared = bool(getattr(fabric, "shares_device", False))
    beside, alone = _sum_speeds(group, rounds)
    guess = staged.Engines(5e10, 5e10, 1.5e-5, 1.5e-5, 1e-5, chunk, beside, alone, end=1e-4)
    samples = []
    for operator, nbytes, parcels in itertools.product(_OPERATORS, _SIZES, _PARCELS):
        seconds = together(group, _guarded(group, bare(operator, nbytes, parcels)), align, rounds).seconds
        samples.append(staged.Sample(operator, nbytes, parcels, seconds))
    found = staged.fit(samples, guess, group.size, shared)
    call, enqueues = _host(group, align, rounds)
    return dataclasses.replace(found, call=call, enqueues=enqueues)


def _guarded(group: Group, call: Call) -> Call:
    """The same as a call of its own: bare communication is none."""

    def guarded() -> None:
        with group.fabric.guarded_call(()):
            call()

    return guarded


def _host(group: Group, align: Call, rounds: int) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Seconds of the host before a call's first copy can begin, and for each parcel, by operator."""
    m = _BANDS * 128 * group.size
    x = torch.ones(m, _INNER, dtype=torch.bfloat16, device=group.device)
    w = torch.ones(_INNER, _COLUMNS, dtype=torch.bfloat16, device=group.device)
    before, enqueues = [], []
    for operator, function in _CALLS.items():
        rows = m // group.size if operator == matmul_reduce_scatter.OPERATOR else m
        out = x.new_empty(rows, _COLUMNS)
        plan = default_plan(_problem(group, x, w, operator), "signaled", "dma")
        few, many = (
            functools.partial(function, x, w, group=group, out=out, plan=dataclasses.replace(plan, parcels=parcels))
            for parcels in (split(plan.extent, _FEW), split(plan.extent, _MANY))
        )
        late, ahead = (together(group, few, align, rounds, ahead=one).seconds for one in (False, True))
        before.append(max(0.0, late - ahead))
        each = (_enqueueing(group, many, rounds) - _enqueueing(group, few, rounds)) / (_MANY - _FEW)
        enqueues.append((operator, max(0.0, each)))
    return statistics.median(before), tuple(enqueues)


def _enqueueing(group: Group, call: Call, rounds: int) -> float:
    """Seconds until the host has enqueued a call, while the GPU sleeps; the median of the slowest ranks'."""
    taken = []
    call()
    for _ in range(rounds + 1):
        torch.cuda.synchronize(group.device)
        group.barrier()
        _cuda._sleep(DELAY_CYCLES)
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    torch.cuda.synchronize(group.device)
    return statistics.median(group.reduce_max(taken)[1:])


def _sum_speeds(group: Group, rounds: int) -> tuple[float, float]:
    """Bytes per second that sums read and write: beside a matmul, and alone."""
    fabric = group.fabric
    x = torch.ones(4096, 8192, dtype=torch.bfloat16, device=group.device)
    w = torch.ones(8192, 4096, dtype=torch.bfloat16, device=group.device)
    problem = _problem(group, x, w)
    plan = frames(problem, "dma")[0]
    product = product_of(fabric, problem, plan, x, w, x.new_empty(4096 * 4096), None)
    parts = [torch.ones(_SUMMED // 2, dtype=x.dtype, device=group.device) for _ in range(group.size + 1)]
    finish = Finish.of(None, "none", plan)
    finish.load(x, group.size)
    compute, aside = fabric.stream("compute"), fabric.stream("communication", priority=-1)

    def sums(recorder: Recorder) -> None:
        with recorder.event("sum", engine="sum"):
            for _ in range(_SUMS):
                finish.sum(parts[0], parts[1:])

    def seconds(beside: bool) -> float:
        recorder = Recorder(group.rank, "cuda")
        product.prepare()
        for stream in (compute, aside):
            stream.fork()
        if beside:
            compute.run(product.start)
        aside.run(lambda: sums(recorder))
        for stream in (compute, aside):
            stream.join()
        return recorder.timeline().span("sum") / _SUMS

    taken: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds + 1):
        for beside, found in taken.items():
            torch.cuda.synchronize(group.device)
            group.barrier()
            found.append(seconds(beside))
    moved = sum(one.nbytes for one in parts)
    first, second = (moved / statistics.median(group.reduce_max(taken[beside])[1:]) for beside in (True, False))
    return first, second


def _problem(group: Group, x: torch.Tensor, w: torch.Tensor, operator: str = matmul_all_reduce.OPERATOR) -> Problem:
    return Problem.of(
        operator, x.shape[0], w.shape[1], x.shape[1], dtype=dtype_name(x), ranks=group.size,
        device=group.device.type, multiprocessors=group.fabric.multiprocessors,
    )  # fmt: skip
