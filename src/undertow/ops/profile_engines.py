"""What `undertow profile` measures of a lane that is staged through host memory, for `plan.staged`.

| constant | from |
|---|---|
| speeds, pauses, hop, end | bare communication of all_to_all and all_reduce in 1 to 16 parcels, by `staged.fit` |
| call, enqueue | the host's seconds for whole calls of few and of many parcels |
| sum speeds | the kernel that sums, alone and beside a matmul on all SMs but those that its plan leaves |

Each stands behind something long on the GPU, so that the host has enqueued everything before it begins: what hosts cost
is `enqueue` and `call`. Every rank comes along, and the slowest counts.
"""

from __future__ import annotations

import dataclasses
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
from . import matmul_all_reduce, matmul_all_to_all
from .finish import Finish
from .operands import dtype_name
from .produce import product_of

if TYPE_CHECKING:
    from ..fabric.group import Group

Call = Callable[[], object]
_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call
_DELAY_CYCLES = 25_000_000  # more than 10 ms on GPUs of today: longer than the host needs to enqueue any of this
_OPERATORS = (matmul_all_to_all.OPERATOR, matmul_all_reduce.OPERATOR)
_SIZES = (16 << 20, 128 << 20)  # of a rank's product
_PARCELS = (1, 2, 4, 8, 16)
_FEW, _MANY = 2, 8
_SUMMED = 4 << 20  # bytes of a piece
_SUMS = 3  # in a row


def engines(group: Group, bare: Callable[[str, int, int], Call], rounds: int) -> staged.Engines | None:
    """The copy engines behind lane dma; None where it is not staged. Collective; the same on all ranks.

    `bare(operator, nbytes, parcels)`: that operator's communication over dma, without its matmul.
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
    align = bare(matmul_all_to_all.OPERATOR, 1, 1)
    samples = []
    for operator, nbytes, parcels in itertools.product(_OPERATORS, _SIZES, _PARCELS):
        seconds = _behind(group, bare(operator, nbytes, parcels), align, rounds)
        samples.append(staged.Sample(operator, nbytes, parcels, seconds))
    found = staged.fit(samples, guess, group.size, shared)
    call, enqueue = _host(group, rounds)
    return dataclasses.replace(found, call=call, enqueue=enqueue)


def _behind(group: Group, call: Call, align: Call, rounds: int) -> float:
    """Device seconds of a call that finds the GPU busy; the median, after one that is not counted.

    `align`: a message between all ranks, which lets them begin together; a barrier of hosts does not.
    """
    taken = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize(group.device)
        group.barrier()
        align()
        _cuda._sleep(_DELAY_CYCLES)
        start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        start.record()
        with group.fabric.guarded_call(()):
            call()
        end.record()
        end.synchronize()
        taken.append(float(start.elapsed_time(end)) * 1e-3)
    return statistics.median(group.reduce_max(taken)[1:])


def _host(group: Group, rounds: int) -> tuple[float, float]:
    """Seconds that the host needs for a call of no parcels, and for each stage of copies of each parcel."""
    x = torch.ones(16 * 128, 64, dtype=torch.bfloat16, device=group.device)
    w = torch.ones(64, 256, dtype=torch.bfloat16, device=group.device)
    y = torch.empty(x.shape[0], w.shape[1], dtype=x.dtype, device=group.device)
    plan = default_plan(_problem(group, x, w), "signaled", "dma")
    medians = []
    for parcels in (_FEW, _MANY):
        chosen = dataclasses.replace(plan, parcels=split(plan.extent, parcels))
        taken = []
        for turn in range(rounds + 1):
            torch.cuda.synchronize(group.device)
            group.barrier()
            if turn:  # the first one loads kernels and tables, which must not wait for what sleeps
                _cuda._sleep(_DELAY_CYCLES)
            began = time.perf_counter()
            matmul_all_reduce.matmul_all_reduce(x, w, group=group, plan=chosen, out=y)
            taken.append(time.perf_counter() - began)
            torch.cuda.synchronize(group.device)
        medians.append(statistics.median(group.reduce_max(taken)[1:]))
    each = max(0.0, medians[1] - medians[0]) / (_MANY - _FEW)
    return max(0.0, medians[0] - _FEW * each), each / staged.copy_stages(matmul_all_reduce.OPERATOR)


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


def _problem(group: Group, x: torch.Tensor, w: torch.Tensor) -> Problem:
    return Problem.of(
        matmul_all_reduce.OPERATOR, x.shape[0], w.shape[1], x.shape[1], dtype=dtype_name(x), ranks=group.size,
        device=group.device.type, multiprocessors=group.fabric.multiprocessors,
    )  # fmt: skip
