"""Fused matmuls of rows that change ranks, on a GPU: one persistent launch a call, stages as in `fused_stage.py`.

A call is prepared (memory, tables, the kernel itself) before anything of it moves: what fails there ends no group.
Tables follow from the counts of rows of all ranks; a call with counts that were not seen lately uploads new ones, and
so cannot be the first of them in a CUDA graph capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..fabric import timeline
from ..fabric.cuda import CudaFabric
from ..plan import fused
from ..plan.tokens import Tokens, arriving_tiles, collected_table, leaving_table, push_table
from .cuda_product import device_table
from .finish import Finish
from .fused_cuda import gather_launch
from .fused_launch import ALIGNED, active, factors, finishing, watch
from .fused_stage import Stage, load, stage_of

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..plan.plan import Plan
    from .beside import Taking


def exchange(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, tokens: Tokens, plan: Plan, finish: Finish, fabric: Fabric
) -> Callable[[], None]:
    """matmul_all_to_all: what enqueues it, once. The sender finishes its rows."""
    from ..kernels.fused_exchange import fused_exchange_kernel

    assert isinstance(fabric, CudaFabric)
    assert plan.tile is not None
    block_m, block_n = plan.tile
    rank, size, n = fabric.group.rank, fabric.group.size, w.shape[-1]
    if n == 0 or tokens.most == 0:  # on all ranks
        return _nothing
    words = tokens.most_lines(block_m) * -(-n // block_n)
    lines = 2 + 2 * -(-words // fused.LINE)  # one of announcements, one to make their number even
    stage = stage_of(fabric, ("exchange", x.dtype), tokens.most * n, lines, x.dtype)
    key = (tokens, n, plan.digest, rank)
    table = device_table(fabric, ("leaving", *key), lambda: leaving_table(tokens, n, plan, rank))
    coming = device_table(fabric, ("collected", *key), lambda: collected_table(tokens, n, plan, rank))
    both = factors(x, w, fabric.bulk_copies)
    bias, ends = finishing(finish, y)
    even = n % ALIGNED == 0 and y.data_ptr() % 16 == 0

    def launch(epochs: torch.Tensor, working: int) -> None:
        kernel: Any = fused_exchange_kernel
        kernel[(fabric.multiprocessors,)](
            *both.operands((block_m, block_n)), stage.data.local, y, bias, table, coming, stage.bases, stage.word_bases,
            stage.words.local, epochs, *both.strides, len(table), len(coming), working, both.inner, n, stage.half,
            (stage.lines - 2) // 2, rank, *watch(fabric),
            BLOCK_M=block_m, BLOCK_N=block_n, GROUPED=both.grouped, RANKS=size, EVEN=even, **ends, **both.constants,
        )  # fmt: skip

    # How weights lie, bias and activation are each rank's own.
    variant = (both.transposed, even, n == 1, n % 16, y.data_ptr() % 16, *ends.values())
    load(fabric, stage, ("exchange", plan.tile, x.dtype, both.grouped), variant, launch)
    stage.follow(fabric)

    def call() -> None:
        with timeline.event("matmul", engine="compute", rows=x.shape[0], fused=True):
            launch(stage.epochs, active(plan, fabric))
        stage.enqueued(fabric)

    return call


def arrive(
    x: torch.Tensor,
    w: torch.Tensor,
    received: torch.Tensor,
    y: torch.Tensor,
    tokens: Tokens,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    arriving: Taking | None,
    keep: bool,
) -> Callable[[], None]:
    """all_to_all_matmul: what enqueues it, once. `keep`: the rows that came are wanted in `received`."""
    assert isinstance(fabric, CudaFabric)
    assert plan.tile is not None
    block_m = plan.tile[0]
    rank, k = fabric.group.rank, x.shape[1]
    if tokens.most == 0:  # on all ranks
        return _nothing if arriving is None else lambda: arriving.begin(received)
    if w.shape[-1] == 0:  # others need its rows, and wait for it to take theirs: it multiplies a few zeros
        w, finish = w.new_zeros(*w.shape[:-1], ALIGNED), Finish(None, "none")
        y = y.new_empty(y.shape[0], ALIGNED)
    n = w.shape[-1]
    lines = 2 + 2 * tokens.most_lines(block_m)  # one of announcements, one to make their number even
    # One for each K, so that rows of all calls have the same places in both halves.
    stage = stage_of(fabric, ("arrive", x.dtype, k), tokens.most * k, lines, x.dtype, unit=k)
    key = (tokens, plan.digest, rank)
    table = device_table(fabric, ("arriving", n, *key), lambda: arriving_tiles(tokens, n, plan, rank))
    pushes = device_table(fabric, ("pushes", *key), lambda: push_table(tokens, plan, rank))
    whole = all(one.rows % block_m == 0 for one in tokens.arriving(rank)[:-1])
    launch = gather_launch(x, w, y, plan, finish, fabric, stage, table, pushes, whole, announced=True)
    stage.follow(fabric)

    def call() -> None:
        with timeline.event("matmul", engine="compute", rows=y.shape[0], fused=True):
            launch(stage.epochs, active(plan, fabric))
        if keep or arriving is not None:
            _keep(x, received, tokens, stage, rank)
        stage.enqueued(fabric)
        if arriving is not None:
            arriving.begin(received)
            arriving.add([(0, received.shape[0])])
            fabric.poison_if_aborted(*arriving.made)

    return call


def _keep(x: torch.Tensor, received: torch.Tensor, tokens: Tokens, stage: Stage, rank: int) -> None:
    """Copy the rows that arrived out of their stage, own ones among them.

    Which half they are in only the device knows, as a replayed call counts there.
    """
    if received.numel() == 0:
        return
    halves = stage.data.local.view(2, stage.half)[:, : received.numel()]
    received.view(1, -1).copy_(halves.index_select(0, stage.epochs[:1] & 1))
    first, there = sum(row[rank] for row in tokens.matrix[:rank]), sum(tokens.matrix[rank][:rank])
    count = tokens.matrix[rank][rank]
    received[first : first + count] = x[there : there + count]


def _nothing() -> None:
    """No rank has anything to send."""
