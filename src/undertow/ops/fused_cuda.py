"""Fused matmuls on a GPU: one persistent launch a call, symmetric memory kept with the group (`fused_stage.py`).

A call is prepared (memory, tables, the kernel itself) before anything of it moves: what fails there ends no group.

All CTAs of all ranks wait for each other, so all of them must run at once: the grid is this rank's multiprocessors,
always the same, and at most so many CTAs of it work. (Few rows that are sent to all ranks at once have small CTAs, of
which few wait: `fused_few.py`.) Nothing that differs from replay to replay is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import StrategyUnavailable
from ..fabric import timeline
from ..fabric.cuda import CudaFabric
from ..plan import beside, brought, chain, fused, fused_order
from . import fused_few, posted_cuda
from .cuda_product import device_table
from .finish import Finish
from .fused_launch import ALIGNED, Launch, Make, active, descriptor, factors, finishing, watch
from .fused_stage import Stage, load, stage_of
from .whole import HOME

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..plan.plan import Plan
    from ..plan.problem import Problem
    from .beside import Taking

_HOPPER = 9  # major number of its capability


def prepare(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    arriving: Taking | None = None,
) -> Callable[[], None]:
    """The whole call of any operator by one kernel, then a norm that may follow: what enqueues it, once."""
    assert isinstance(fabric, CudaFabric)
    if plan.lane != "peer":
        if fused.form(problem, plan) == fused.GATHER:
            return posted_cuda.rows(x, w, y, problem, plan, finish, fabric, arriving)
        return posted_cuda.sums(x, w, y, problem, plan, finish, fabric)
    makers: dict[str, Make] = {
        fused.SCATTER: _scatter, fused.GATHER: _gather, fused.DECODE: fused_few.at_once, fused.OWNED: fused_few.owned,
    }  # fmt: skip
    form = fused.form(problem, plan)
    stays = arriving is not None and problem.ranks > 1
    make = partial(_gather, stays=True) if stays else makers[form]
    stage, launch = make(x, w, y, problem, plan, finish, fabric)
    stage.follow(fabric)

    def call() -> None:
        with timeline.event("matmul", engine="compute", rows=x.shape[0], fused=True):
            launch(stage.epochs, active(plan, fabric))
        if arriving is not None:
            arriving.all_at_once(_gathered(x, problem, plan, stage, fabric.group.rank) if stays else x)
            fabric.poison_if_aborted(*arriving.made)
        stage.enqueued(fabric)
        if finish.after is not None:
            finish.apply(y)
        if fused_few.poisons(form, plan):
            fabric.poisons_itself()

    return call


def _gathered(x: torch.Tensor, problem: Problem, plan: Plan, stage: Stage, rank: int) -> torch.Tensor:
    """All rows [M, K] of a gather whose rows stay (`_gather`), own ones among them, until all ranks meet again. Where
    others' were pushed, own ones are copied beside them."""
    whole = _stays_in(plan, stage)[: problem.m * problem.k].view(problem.m, problem.k)
    if not plan.pull:
        first = sum(problem.shards[:rank])
        whole[first : first + x.shape[0]] = x
    return whole


def _stays_in(plan: Plan, stage: Stage) -> torch.Tensor:
    """Where gathered rows stay: here or, where ranks share a GPU and pull them, in the memory of one of them."""
    return stage.data.peer(HOME) if plan.pull else stage.data.local


# -- matmul_reduce_scatter, matmul_all_reduce --------------------------------------------------------------------------


def _scatter(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: CudaFabric
) -> tuple[Stage, Launch]:
    """Where ranks share a GPU, tiles are stored by TMA through a mapping of all ranks' memory, and read through it."""
    if chain.chained(problem, plan):
        return _chain(x, w, y, problem, plan, finish, fabric)
    from ..kernels.fused_scatter import fused_scatter_kernel

    assert plan.tile is not None
    block_m, block_n = plan.tile
    rank, size, n = fabric.group.rank, fabric.group.size, problem.n
    broadcast, joined = problem.operator == "matmul_all_reduce", fabric.bulk_copies and fabric.together
    shards = fused.owned(problem, plan)
    padded = fused.padded_rows(shards, plan)
    lines = sum(-(-rows // block_m) for rows in shards) * -(-n // block_n)
    stage = stage_of(fabric, ("scatter", x.dtype), fused.stage_elements(problem, plan), 2 * lines, x.dtype)
    key = ("fused scatter", shards, n, plan.digest, broadcast)
    table = device_table(fabric, key, lambda: beside.common_table(shards, n, plan, broadcast))
    every = plan.share.multiprocessors or problem.multiprocessors
    jobs = device_table(
        fabric, ("jobs", rank, every, *key), lambda: beside.job_table(shards, n, plan, rank, broadcast, every)
    )
    slots: Any = stage.data.local
    mine = stage.data.local
    if joined:

        def described() -> tuple[torch.Tensor, Any]:
            everywhere = stage.side_by_side(fabric)
            rows = everywhere.as_strided((size, 2, stage.half // n, n), (everywhere.stride(0), stage.half, n, 1))
            return everywhere[rank], descriptor(rows, [1, 1, block_m, block_n // 2])

        mine, slots = stage.describe(("slots", plan.tile, n), described)
    both = factors(x, w, fabric.bulk_copies)
    bias, ends = finishing(finish, y)
    height = beside.slice_rows(size, plan)

    def launch(epochs: torch.Tensor, working: int) -> None:
        kernel: Any = fused_scatter_kernel
        kernel[(fabric.multiprocessors,)](
            *both.operands((block_m, block_n)), slots, mine, y, mine[size * padded * n :], bias, table, jobs,
            stage.bases, stage.word_bases, stage.words.local, epochs, stage.taken, *both.strides[:2], len(table),
            len(jobs), working, fused.multiplying(working, plan), both.inner, n, padded, stage.half,
            stage.lines // 2, rank, *watch(fabric),
            BLOCK_M=block_m, BLOCK_N=block_n, RANKS=size, BROADCAST=broadcast, HEIGHT=height, JOINED=joined, **ends,
            **both.constants,
        )  # fmt: skip

    common = "scatter", plan.tile, x.dtype, broadcast, *ends.values()
    load(fabric, stage, common, (both.transposed, n % 16, y.data_ptr() % 16), launch)
    return stage, launch


def _chain(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: CudaFabric
) -> tuple[Stage, Launch]:
    """Sums that go from rank to rank, on a stage of their own: other scatters count more on theirs than calls. Its
    products are Hopper's own (wgmma)."""
    if torch.cuda.get_device_capability(fabric.device)[0] != _HOPPER:
        reason = "sums go from rank to rank in a kernel for GPUs of sm_90 alone"
        raise StrategyUnavailable(strategy=plan.name, reason=reason, possible="another fused plan, serial")
    try:
        from ..kernels.fused_chain import BLOCK_K, REGISTERS, STAGES, WARPS, blocks, fused_chain_kernel
    except ImportError as error:  # an experimental part of Triton, whose names move
        reason = f"this Triton has another Gluon ({error})"
        raise StrategyUnavailable(strategy=plan.name, reason=reason, possible="another fused plan, serial") from error

    assert plan.tile is not None
    block_m, block_n = tile = plan.tile
    rank, size, n = fabric.group.rank, fabric.group.size, problem.n
    shards = problem.shards
    padded = fused.padded_rows(shards, plan)
    lines = sum(-(-rows // block_m) for rows in shards) * -(-n // block_n)
    stage = stage_of(fabric, ("chain", x.dtype), fused.stage_elements(problem, plan), lines, x.dtype)
    key = ("fused chain", shards, n, plan.digest, rank)
    table = device_table(fabric, key, lambda: chain.table(shards, n, plan, rank))
    both = factors(x, w, fabric.bulk_copies)
    out = y if y.data_ptr() % 16 == 0 else torch.empty_like(y)  # stores to the next rank are as wide as those to it
    bias, ends = finishing(finish, out)

    def launch(epochs: torch.Tensor, working: int) -> None:
        kernel: Any = fused_chain_kernel
        kernel[(fabric.multiprocessors,)](
            *blocks(both.a, both.b, both.transposed, tile), stage.data.local, out, bias, table, stage.bases,
            stage.word_bases, stage.words.local, epochs, len(table), working, both.inner, n, padded,
            stage.half, rank, (rank - 1) % size, (rank + 1) % size, *watch(fabric),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, STAGES=STAGES, TRANSPOSED=both.transposed, **ends,
            num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
        if out is not y and working:
            y.copy_(out)

    common = "chain", plan.tile, x.dtype, *ends.values()
    load(fabric, stage, common, (both.transposed, n % 16), launch)
    return stage, launch


# -- all_gather_matmul -------------------------------------------------------------------------------------------------


def _gather(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: CudaFabric,
    stays: bool = False,
) -> tuple[Stage, Launch]:
    """`stays`: gathered rows are used after the call, so the host must know where they are, and they must lie as one
    matrix. All calls use one memory then, and all ranks meet before each (`Fabric.meeting`)."""
    assert plan.tile is not None
    block_m = plan.tile[0]
    if problem.n == 0:  # others need its rows, and wait for it to take theirs: it multiplies a few zeros
        problem, finish = replace(problem, n=ALIGNED), Finish(None, "none")
        w, y = w.new_zeros(problem.k, ALIGNED), y.new_empty(problem.m, ALIGNED)
    rank, n, k = fabric.group.rank, problem.n, problem.k
    lines = sum(-(-rows // block_m) for rows in problem.shards)
    # One for each K, so that rows of all calls have the same places in both halves.
    kind = "pulled" if plan.pull else "gather", x.dtype, k, stays
    stage = stage_of(fabric, kind, fused.stage_elements(problem, plan, stays), 2 * lines, x.dtype, unit=k)
    apart = plan.pull and not stays
    key = ("fused gather", problem.shards, n, plan.digest, rank, apart)
    # Columns are each rank's own: one whose result cannot be stored 16 bytes at a time has the other kernel.
    brings = fused.brought(problem, plan) and n % ALIGNED == 0 and y.data_ptr() % 16 == 0
    tiles = brought.table if brings else fused_order.gather_table
    table = device_table(fabric, (*key, brings), lambda: tiles(problem.shards, n, plan, rank, apart))
    own = brought.own_tiles(problem.shards, n, plan, rank) if brings else None
    pushed = ("fused pushes", problem.shards, plan.digest, rank, apart)
    to = HOME if plan.pull and stays else None
    pushes = device_table(fabric, pushed, lambda: fused_order.push_table(problem.shards, plan, rank, to))
    whole = all(rows % block_m == 0 for rows in problem.shards[:-1])
    return stage, gather_launch(x, w, y, plan, finish, fabric, stage, table, pushes, whole, own, stays=stays)


def _rows_of(
    plan: Plan, fabric: CudaFabric, stage: Stage, k: int, block_k: int, stays: bool
) -> tuple[torch.Tensor, Any]:
    """Where gathered rows are read, [2 turns of rows, K] or (pulled) of each rank, and as kernels with TMA read it."""
    assert plan.tile is not None
    capacity, block = stage.half // k, [plan.tile[0], block_k]
    if stays:
        buffer = _stays_in(plan, stage)[: 2 * stage.half].view(2 * capacity, k)
    elif plan.pull:
        rows = stage.side_by_side(fabric)
        buffer, block = rows.as_strided((fabric.group.size, 2 * capacity, k), (rows.stride(0), k, 1)), [1, *block]
    else:
        buffer = stage.data.local[: 2 * stage.half].view(2 * capacity, k)
    if not fabric.bulk_copies:
        return buffer, buffer
    return buffer, stage.describe(("gathered", plan.tile[0]), lambda: descriptor(buffer, block))


def _partial(plan: Plan, fabric: CudaFabric, stage: Stage) -> torch.Tensor:
    """Room for a part of a tile's sum of each CTA, where a plan cuts K."""
    assert plan.tile is not None
    if not plan.split:
        return stage.taken
    shape = fabric.multiprocessors, *plan.tile
    return stage.describe(  # type: ignore[no-any-return]
        ("partial", plan.tile), lambda: torch.empty(shape, dtype=torch.float32, device=fabric.device)
    )


def gather_launch(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    plan: Plan,
    finish: Finish,
    fabric: CudaFabric,
    stage: Stage,
    table: torch.Tensor,
    pushes: torch.Tensor,
    whole: bool,
    own: int | None = None,
    announced: bool = False,
    stays: bool = False,
) -> Launch:
    """A gather kernel, loaded. `whole`: all rows of y but the last come in whole bands. `stays`: as in `_gather`.

    `own`: how many tiles at the beginning of the table read x, for the kernel whose rows other CTAs bring; None for the
    one whose CTAs push them first, the only one whose calls are `announced`.
    """
    from ..kernels.fused_brought import fused_brought_kernel
    from ..kernels.fused_gather import fused_gather_kernel

    assert plan.tile is not None
    block_m, block_n = plan.tile
    k, n = x.shape[1], w.shape[-1]
    both = factors(x, w, fabric.bulk_copies)
    buffer, gathered = _rows_of(plan, fabric, stage, k, both.block_k, stays)
    bases = stage.joined_bases(fabric) if plan.pull and not stays else stage.bases
    bias, ends = finishing(finish, y)
    aligned = n % ALIGNED == 0 and y.data_ptr() % 16 == 0
    bulk = aligned and whole and fabric.bulk_copies and y.numel() > 0
    halves, pieces = 2 if bulk else 4, fused.parts(plan, k)
    known: dict[str, Any] = {
        "tiles": len(table), "tasks": len(pushes) * pieces, "parts": pieces, "inner": k, "stride": both.strides[0],
        "capacity": 0 if stays else stage.half // k, "BLOCK_M": block_m, "BLOCK_N": block_n, "PARTS": halves,
        "BULK": bulk, "EVEN": aligned, "WIDTH": plan.piece, "RANKS": fabric.group.size,
        "PULL": plan.pull and not stays, **ends, **both.constants,
        **dict(zip(("abort", "error", "deadline_ns"), watch(fabric), strict=True)),
    }  # fmt: skip
    kernel: Any = fused_brought_kernel
    if own is None:
        kernel = fused_gather_kernel
        known |= {
            "b_row": both.strides[1], "b_expert": both.strides[2], "distance": buffer.stride(0),
            "rank": fabric.group.rank, "GROUPED": both.grouped, "ANNOUNCED": announced,
            "lines": stage.lines // 2 - announced,  # a line of announcements, and one to make their number even
        }  # fmt: skip
    else:
        early = brought.early(-(-k // both.block_k), both.stages)
        known |= {
            "own": own, "early": early, "lines": stage.lines // 2, "spare": stage.lines, "rank": fabric.group.rank,
            "SPLIT": plan.split, "IN_STEP": plan.in_step,
        }  # fmt: skip

    def launch(epochs: torch.Tensor, working: int) -> None:
        a, b = both.operands((block_m, block_n))
        c = descriptor(y, [block_m, block_n // halves]) if bulk else stage.taken
        if own is None:
            roles: dict[str, Any] = {"loaders": min(working, plan.share.communication_ctas or 1)}
        else:
            multiplying = fused.multiplying(working, plan)
            last = brought.last_tiles(len(table) - own, multiplying, plan)
            roles = {"multiplying": multiplying, "last": last, "partial": _partial(plan, fabric, stage)}
        kernel[(fabric.multiprocessors,)](
            a, gathered, b, c, both.a, y, bias, table, pushes, bases, stage.word_bases, stage.words.local, epochs,
            stage.taken, active=working, **roles, **known,
        )  # fmt: skip

    kind = "gather", announced, stays, plan.order, plan.pull, plan.split, plan.in_step
    common = *kind, plan.tile, plan.piece, x.dtype, both.grouped
    # Columns, and so which of the kernels it is, bias and activation are each rank's own.
    variant = (own is None, both.transposed, bulk, aligned, y.data_ptr() % 16, *ends.values())
    load(fabric, stage, common, variant, launch)
    return launch
