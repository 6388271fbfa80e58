"""Kernels of few rows as the operators launch them, by Triton's interpreter on the CPU: with TMA, and without.

What is real and what is not: `interpreted_node.py`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from interpreted_node import ASKED, CTAS, HALF, Node, made, poisoned, wide

from undertow.kernels import ahead
from undertow.ops import fused_cuda
from undertow.ops.finish import Finish
from undertow.ops.fused_stage import Stage
from undertow.plan import fused
from undertow.plan.defaults import fused_plan
from undertow.plan.plan import Share
from undertow.plan.problem import Problem


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("working", [CTAS, 2, 1])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(("tile", "shape"), [
    (fused.ROW_TILE, (1, 136, 520)), ((16, 64), (1, 136, 104)), ((16, 32), (5, 464, 264)), ((32, 64), (17, 136, 264)),
])  # fmt: skip
def test_few_rows_are_sent_at_once_as_they_are_launched(
    tile: tuple[int, int], shape: tuple[int, int, int], split: int, working: int, transposed: bool
) -> None:
    """A CTA for each piece, or fewer than that; ranks of which one has its weights the other way round; blocks that are
    short, K that is no whole number of steps."""
    (m, n, k), ranks = shape, 3
    node = Node(ranks, True)
    xs, ws = [made(m, k, seed=rank) for rank in range(ranks)], [made(k, n, seed=9 + rank) for rank in range(ranks)]
    other = [rank for rank in range(ranks) if transposed == (rank == 1)]  # whose weights lie by rows
    ws = [w if rank in other else w.t().contiguous().t() for rank, w in enumerate(ws)]
    bias = made(n, seed=4)
    asked = Problem.of("matmul_all_reduce", m, n, k, dtype="float16", ranks=ranks, device="cuda", multiprocessors=CTAS)
    plan = dataclasses.replace(
        fused_plan(asked, "peer"), split=split, owners="rows", tile=tile, share=Share(working, CTAS)
    )
    plan.check(asked)
    want = torch.relu(sum(x @ w for x, w in zip(wide(xs), wide(ws), strict=True)) + bias.float()).to(HALF)
    for call in range(3):  # each turn, and again
        outs = [poisoned(m, n) for _ in range(ranks)]
        node.run(lambda fabric, rank, outs=outs: fused_cuda.prepare(  # type: ignore[misc]
            xs[rank], ws[rank], outs[rank], asked, plan, Finish(bias, "relu"), fabric
        ))  # fmt: skip
        for got in outs:
            assert torch.equal(got, want)
        (stages,) = node.stages.values()
        for rank, stage in enumerate(stages):
            assert int(stage.epochs[0]) == call + 1
            used, spare = (stage.taken[turn % 2 * fused.LINE :][:2].tolist() for turn in (call + 1, call))
            assert spare == [0, 0]  # for the next call
            tile_ = (16, 64) if tile == fused.ROW_TILE and (working < CTAS or rank in other) else tile
            counts = fused.small_ctas(asked, plan, tile_, working, working < CTAS)
            assert used == [sum(counts), 2 * counts[1]]  # who summed left twice: see `run`
            assert stage.data.local[turned(stage, call) :][: stage.half].eq(-1).sum() == stage.half - (
                ranks * split * m * n // 2
            )  # nothing beyond what is sent


def turned(stage: Stage, call: int) -> int:
    """Where packets of that call lie."""
    return (call + 1) % 2 * stage.half


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("bulk", "tile", "shape"), [
    (False, (16, 128), (5, 136, 104)), (True, (16, 64), (5, 136, 104)), (True, (32, 64), (17, 464, 264)),
])  # fmt: skip
def test_few_rows_as_they_are_launched(
    bulk: bool, tile: tuple[int, int], shape: tuple[int, int, int], transposed: bool
) -> None:
    """Weights asked for ahead where there is TMA, or by pointers; groups whose last block is short, or missing."""
    (m, n, k), ranks = shape, 3
    node = Node(ranks, bulk)
    xs, ws = [made(m, k, seed=rank) for rank in range(ranks)], [made(k, n, seed=9 + rank) for rank in range(ranks)]
    ws = [w.t().contiguous().t() if transposed else w for w in ws]
    bias = made(n, seed=4)
    asked = Problem.of(
        "matmul_all_reduce", m, n, k, dtype="float16", ranks=ranks, device="cuda", multiprocessors=CTAS, bulk=bulk
    )  # fmt: skip
    plan = dataclasses.replace(
        fused_plan(asked, "peer"), split=0, owners="columns", tile=tile, ahead=512 if bulk else 0,
        share=Share(CTAS - 1),
    )  # fmt: skip
    plan.check(asked)
    want = torch.relu(sum(x @ w for x, w in zip(wide(xs), wide(ws), strict=True)) + bias.float()).to(HALF)
    times = 3
    for _ in range(2):  # each turn
        outs = [poisoned(m, n) for _ in range(ranks)]
        ASKED.clear()
        node.run(lambda fabric, rank, outs=outs: fused_cuda.prepare(  # type: ignore[misc]
            xs[rank], ws[rank], outs[rank], asked, plan, Finish(bias, "relu"), fabric
        ), times)  # fmt: skip
        for got in outs:
            assert torch.equal(got, want)
        for stage in node.stages["columns", HALF] if bulk else []:
            running = stage.words.local.view(-1, fused.LINE)[stage.lines : stage.lines + CTAS - 1, :ranks]
            assert (running == stage.epochs[0]).all()  # every CTA that works said so to all
        for w in ws:  # what is asked for is asked for once a call
            seen, begin = torch.zeros(n * k, dtype=torch.int32), w.data_ptr()
            for one, size in ASKED:
                if begin <= one < begin + 2 * n * k and size > 0:
                    assert one % 16 == size % 16 == 0
                    seen[(one - begin) // 2 : (one - begin + size) // 2] += 1
            assert set(seen.tolist()) <= {0, times}
            assert (int(seen.sum()) > 64 * k) == bulk  # more than the first block: K has fewer elements


@pytest.mark.parametrize("transposed", [True, False])
def test_the_first_weights_are_asked_for_once(transposed: bool) -> None:
    """All of a block that is there: 256 elements along K, or to its end; 64 columns, or to the last."""
    n, k = 200, 328
    w = torch.zeros((n, k) if transposed else (k, n), dtype=HALF)
    for column, begin in ((0, 0), (64, 128), (192, 0)):
        ASKED.clear()
        _ask[(1,)](w, w.stride(0), n, column, begin, min(k, begin + 256), 256, 64, transposed)
        seen = torch.zeros(n * k, dtype=torch.int32)
        for one, size in ASKED:
            first = (one - w.data_ptr()) // 2
            seen[first : first + max(0, size) // 2] += 1
        want = torch.zeros(k, n, dtype=torch.int32)
        want[begin : begin + 256, column : column + 64] = 1
        assert torch.equal(seen.view(w.shape), want.t() if transposed else want), (column, begin)


@triton.jit
def _ask(
    w, b_row, n, column, begin, end, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    ahead.ask_for_weights(w, b_row, n, column, begin, end, AHEAD, BLOCK_N, TRANSPOSED, 256)
