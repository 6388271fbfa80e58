"""Fused matmuls on a GPU: one persistent launch a call, symmetric memory kept with the group (`fused_stage.py`).

A call is prepared (memory, tables, the kernel itself) before anything of it moves: what fails there ends no group.

All CTAs of all ranks wait for each other, so all of them must run at once: the grid is this rank's multiprocessors,
always the same, and at most so many CTAs of it work. Nothing that differs from replay to replay is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..fabric import timeline
from ..fabric.cuda import CudaFabric
from ..fabric.share import bound
from ..plan import fused
from .cuda_product import Factor, as_factor, device_table, rows_contiguous
from .finish import ACTIVATIONS, Finish
from .fused_stage import Stage, load, stage_of

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..plan.plan import Plan
    from ..plan.problem import Problem
    from .beside import Arriving

Launch = Callable[[torch.Tensor, int], None]
_BLOCK_K = 64
_ALIGNED = 8  # elements of 2 bytes: TMA wants rows of whole 16 bytes


def prepare(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    arriving: Arriving | None = None,
) -> Callable[[], None]:
    """The whole call of any operator by one kernel, then a norm that may follow: what enqueues it, once."""
    assert isinstance(fabric, CudaFabric)
    make = {fused.SCATTER: _scatter, fused.GATHER: _gather, fused.DECODE: _decode}[fused.form(problem, plan)]
    stage, launch = make(x, w, y, problem, plan, finish, fabric)
    stage.follow(fabric.device)

    def call() -> None:
        with timeline.event("matmul", engine="compute", rows=x.shape[0], fused=True):
            launch(stage.epochs, _active(plan, fabric))
        if arriving is not None:
            arriving.begin(_gathered(x, problem, stage, fabric.group.rank))
        stage.enqueued(fabric.device)
        if arriving is not None:
            arriving.add([(0, problem.m)])
        if finish.after is not None:
            finish.apply(y)

    return call


def _gathered(x: torch.Tensor, problem: Problem, stage: Stage, rank: int) -> torch.Tensor:
    """A copy of the rows that the last gather left in its stage, own ones among them.

    Which half they are in only the device knows, as a replayed call counts there.
    """
    halves = stage.data.local.view(2, stage.half)[:, : problem.m * problem.k]
    whole = halves.index_select(0, stage.epochs[:1] & 1).view(problem.m, problem.k)
    first = sum(problem.shards[:rank])
    whole[first : first + x.shape[0]] = x
    return whole


# -- matmul_reduce_scatter, matmul_all_reduce --------------------------------------------------------------------------


def _scatter(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: CudaFabric
) -> tuple[Stage, Launch]:
    from ..kernels.fused_scatter import fused_scatter_kernel

    assert plan.tile is not None
    block_m, block_n = plan.tile
    rank, size, n = fabric.group.rank, fabric.group.size, problem.n
    broadcast = problem.operator == "matmul_all_reduce"
    shards = fused.owned(problem, plan)
    padded = fused.padded_rows(shards, plan)
    plane = padded * n
    lines = sum(-(-rows // block_m) for rows in shards) * -(-n // block_n)
    stage = stage_of(fabric, ("scatter", x.dtype), fused.stage_elements(problem, plan), 2 * lines, x.dtype)
    key = ("fused scatter", shards, n, plan.digest, rank, broadcast)
    table = device_table(fabric, key, lambda: fused.scatter_table(shards, n, plan, rank, broadcast))
    own = -(-shards[rank] // block_m) * -(-n // block_n)
    slots = stage.describe(("slots", plane, n, block_m, block_n), lambda: [
        _descriptor(stage.data.peer(one)[rank * plane :].as_strided((2, padded, n), (stage.half, n, 1)),
                    [1, block_m, block_n // 2])
        for one in range(size)
    ])  # fmt: skip
    slots = [*slots, *slots[:1] * (fused.MOST_RANKS - size)]
    sums = stage.describe(("sums", plane), lambda: (
        stage.data.local[size * plane :], stage.bases + size * plane * x.element_size()
    ))  # fmt: skip
    a, b = _factors(x, w)
    bias, finishing = _finishing(finish, y)

    def launch(epochs: torch.Tensor, active: int) -> None:
        kernel: Any = fused_scatter_kernel
        kernel[(fabric.multiprocessors,)](
            _descriptor(a.tensor, [block_m, _BLOCK_K]), _descriptor(b.tensor, _block_b(b, block_n)), *slots,
            stage.data.local, y, sums[0], bias, table, stage.word_bases, sums[1], stage.words.local, epochs,
            len(table), own, active, a.tensor.shape[1], n, plane, stage.half, stage.lines // 2, rank, *_watch(fabric),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=_BLOCK_K, TRANSPOSED=b.transposed, RANKS=size,
            BROADCAST=broadcast, **finishing, num_warps=8, num_stages=4,
        )  # fmt: skip

    common = "scatter", plan.tile, x.dtype, broadcast, *finishing.values()
    load(fabric, stage, common, (b.transposed, n % 16, y.data_ptr() % 16), launch)
    return stage, launch


# -- all_gather_matmul -------------------------------------------------------------------------------------------------


def _gather(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: CudaFabric
) -> tuple[Stage, Launch]:
    from ..kernels.fused_gather import fused_gather_kernel

    assert plan.tile is not None
    block_m, block_n = plan.tile
    if problem.n == 0:  # others need its rows, and wait for it to take theirs: it multiplies a few zeros
        problem, finish = replace(problem, n=_ALIGNED), Finish(None, "none")
        w, y = w.new_zeros(problem.k, _ALIGNED), y.new_empty(problem.m, _ALIGNED)
    rank, size, n, k = fabric.group.rank, fabric.group.size, problem.n, problem.k
    lines = sum(-(-rows // block_m) for rows in problem.shards)
    # One for each K, so that rows of all calls have the same places in both halves.
    stage = stage_of(fabric, ("gather", x.dtype, k), fused.stage_elements(problem, plan), 2 * lines, x.dtype, unit=k)
    key = ("fused gather", problem.shards, n, plan.digest, rank)
    table = device_table(fabric, key, lambda: fused.gather_table(problem.shards, n, plan, rank))
    own = -(-problem.shards[rank] // block_m) * -(-n // block_n)
    capacity = stage.half // k
    gathered = stage.describe(("gathered", block_m), lambda: _descriptor(
        stage.data.local[: 2 * stage.half].view(2 * capacity, k), [block_m, _BLOCK_K]
    ))  # fmt: skip
    a, b = _factors(x, w)
    bias, finishing = _finishing(finish, y)
    aligned = n % _ALIGNED == 0 and y.data_ptr() % 16 == 0
    bulk = aligned and all(rows % block_m == 0 for rows in problem.shards[:-1])
    parts = 2 if bulk else 4
    loaders = plan.share.communication_ctas or 1

    def launch(epochs: torch.Tensor, active: int) -> None:
        kernel: Any = fused_gather_kernel
        kernel[(fabric.multiprocessors,)](
            _descriptor(a.tensor, [block_m, _BLOCK_K]), gathered, _descriptor(b.tensor, _block_b(b, block_n)),
            _descriptor(y, [block_m, block_n // parts]) if bulk else stage.taken, a.tensor, y, bias, table,
            stage.bases, stage.word_bases, stage.words.local, epochs, stage.taken, len(table), own, active,
            min(active, loaders), x.shape[0], k, a.tensor.stride(0), sum(problem.shards[:rank]),
            fused.first_line(problem.shards, plan, rank), capacity, stage.lines // 2, fused.parts(plan, k), rank,
            *_watch(fabric),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=_BLOCK_K, TRANSPOSED=b.transposed, PARTS=parts, BULK=bulk,
            EVEN=aligned, WIDTH=plan.piece, RANKS=size, **finishing, num_warps=8, num_stages=4,
        )  # fmt: skip

    # Columns, bias and activation are each rank's own.
    variant = (b.transposed, bulk, aligned, y.data_ptr() % 16, *finishing.values())
    load(fabric, stage, ("gather", plan.tile, plan.piece, x.dtype), variant, launch)
    return stage, launch


# -- matmul_all_reduce of few rows -------------------------------------------------------------------------------------


def _decode(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: CudaFabric
) -> tuple[Stage, Launch]:
    from ..kernels.fused_decode import fused_decode_kernel

    assert plan.tile is not None
    block_m, block_n = plan.tile
    size, n, m = fabric.group.size, problem.n, problem.m
    sources = size * plan.split
    stage = stage_of(fabric, ("decode",), fused.stage_elements(problem, plan), 1, torch.int64)
    a, b = _factors(x, w)
    bias, finishing = _finishing(finish, y)
    rows_at_once = max(1, 256 // (block_n // 2))
    at_once = 1
    while at_once * 2 * sources <= fused.MOST_PACKETS and at_once * rows_at_once < m:
        at_once *= 2
    stages = 5 if block_m < 64 else 4

    def launch(epochs: torch.Tensor, active: int) -> None:
        kernel: Any = fused_decode_kernel
        kernel[(fabric.multiprocessors,)](
            _descriptor(a.tensor, [block_m, _BLOCK_K]), _descriptor(b.tensor, _block_b(b, block_n)), y, bias,
            stage.bases, stage.data.local, epochs, m, n, a.tensor.shape[1], active, stage.half, fabric.group.rank,
            *_watch(fabric), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=_BLOCK_K, TRANSPOSED=b.transposed,
            SPLIT=plan.split, RANKS=size, LANES=256, AT_ONCE=at_once, **finishing, num_warps=8, num_stages=stages,
        )  # fmt: skip

    common = "decode", plan.tile, plan.split, at_once, x.dtype, *finishing.values()
    variant = (b.transposed, n % 16, a.tensor.shape[1] % 16, y.data_ptr() % 16)
    load(fabric, stage, common, variant, launch)
    return stage, launch


# -- shared ------------------------------------------------------------------------------------------------------------


def _active(plan: Plan, fabric: CudaFabric) -> int:
    """CTAs that work. More than the grid could not run at once, and who shares the card asked for a bound."""
    asked = (plan.share.multiprocessors, bound(), fabric.multiprocessors)
    return min(one for one in asked if one is not None)


def _watch(fabric: CudaFabric) -> tuple[object, ...]:
    return fabric.guard.abort, fabric.guard.error, int(fabric.group.deadline * 1e9)


def _finishing(finish: Finish, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Bias and activation for the kernel, unless something follows that needs whole rows."""
    bias = finish.bias if finish.after is None else None
    activation = finish.activation if finish.after is None else "none"
    given = y if bias is None else bias.contiguous()
    return given, {"BIAS": bias is not None, "ACTIVATION": ACTIVATIONS.index(activation)}


def _factors(x: torch.Tensor, w: torch.Tensor) -> tuple[Factor, Factor]:
    """x [M, K] and w [K, N] as TMA can read them. Where they do not lie so, they are copied, K padded with zeros."""
    a, b = Factor(rows_contiguous(x), False), as_factor(w)
    if a.bulk and b.bulk:
        return a, b
    inner = max(_ALIGNED, -(-x.shape[1] // _ALIGNED) * _ALIGNED)
    wide = max(_ALIGNED, -(-w.shape[1] // _ALIGNED) * _ALIGNED)
    if not a.bulk or inner != x.shape[1]:
        copied = x.new_zeros(x.shape[0], inner)
        copied[:, : x.shape[1]] = x
        a = Factor(copied, False)
    if not b.bulk or inner != x.shape[1]:
        copied = w.new_zeros(inner, wide)
        copied[: w.shape[0], : w.shape[1]] = w
        b = Factor(copied[:, : w.shape[1]], False)
    return a, b


def _descriptor(tensor: torch.Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, block)


def _block_b(b: Factor, block_n: int) -> list[int]:
    return [block_n, _BLOCK_K] if b.transposed else [_BLOCK_K, block_n]
