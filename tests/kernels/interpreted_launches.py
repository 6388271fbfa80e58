"""Fused kernels as the operators launch them, by Triton's interpreter on the CPU: with TMA, and without.

What is real and what is not: `interpreted_node.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted_node import CTAS, HALF, Node, made, poisoned, wide

from undertow.ops import fused_cuda, tokens_cuda
from undertow.ops.all_gather_matmul import reference as gathered_reference
from undertow.ops.all_to_all_matmul import grouped_reference as arriving_reference
from undertow.ops.beside import Arriving
from undertow.ops.finish import Finish
from undertow.ops.matmul_all_to_all import grouped_reference as leaving_reference
from undertow.ops.matmul_reduce_scatter import reference as scattered_reference
from undertow.ops.whole import HOME
from undertow.plan import brought, fused, fused_order
from undertow.plan.defaults import fused_plan, tokens_plan
from undertow.plan.plan import Share
from undertow.plan.problem import Problem
from undertow.plan.tokens import Tokens

SIZES = [[[3, 0], [70, 1]], [[0, 0], [2, 5]]]


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize(("n", "k", "transposed"), [(136, 24, True), (33, 13, False)])
def test_an_exchange_as_it_is_launched(n: int, k: int, transposed: bool, bulk: bool) -> None:
    tokens, node = Tokens.of(SIZES), Node(2, bulk)
    xs = [made(sum(row), k, seed=rank) for rank, row in enumerate(tokens.matrix)]
    ws = [made(2, k, n, seed=9 + rank) for rank in range(2)]
    ws = [w.mT.contiguous().mT if transposed else w for w in ws]
    bias = made(2, n, seed=3)
    problem = Problem.for_splits(
        tokens.matrix, n, k, dtype="float16", device="cuda", multiprocessors=CTAS, bulk=bulk
    )  # fmt: skip
    plan = tokens_plan(problem, "peer", 1)
    for _ in range(2):  # each turn
        outs = [poisoned(sum(row[rank] for row in tokens.matrix), n) for rank in range(2)]

        def call(fabric: Any, rank: int, outs: list[torch.Tensor] = outs) -> Callable[[], None]:
            return tokens_cuda.exchange(xs[rank], ws[rank], outs[rank], tokens, plan, Finish(bias, "relu"), fabric)

        node.run(call)
        want = leaving_reference(
            [torch.cat([x, x.new_ones(len(x), 1)], 1) for x in wide(xs)],
            [torch.cat([w, bias.float()[:, None]], 1) for w in wide(ws)], SIZES,
        )  # fmt: skip
        for got, right in zip(outs, want, strict=True):
            assert torch.equal(got, torch.relu(right).to(HALF))


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize(("n", "transposed"), [(136, True), (33, False)])
def test_rows_that_arrive_as_it_is_launched(n: int, transposed: bool, bulk: bool) -> None:
    tokens, node, k = Tokens.of(SIZES), Node(2, bulk), 24
    xs = [made(sum(row), k, seed=rank) for rank, row in enumerate(tokens.matrix)]
    ws = [made(2, k, n, seed=9 + rank) for rank in range(2)]
    ws = [w.mT.contiguous().mT if transposed else w for w in ws]
    problem = Problem.for_splits(
        tokens.back.matrix, k, n, dtype="float16", device="cuda", multiprocessors=CTAS, bulk=bulk, mirrored=True
    )  # fmt: skip
    plan = tokens_plan(problem, "peer", 1)
    rows = [sum(row[rank] for row in tokens.matrix) for rank in range(2)]
    for _ in range(2):
        outs, kept = [poisoned(count, n) for count in rows], [poisoned(count, k) for count in rows]

        def call(
            fabric: Any, rank: int, outs: list[torch.Tensor] = outs, kept: list[torch.Tensor] = kept
        ) -> Callable[[], None]:
            nothing = Finish(None, "none")
            return tokens_cuda.arrive(
                xs[rank], ws[rank], kept[rank], outs[rank], tokens, plan, nothing, fabric, None, True
            )  # fmt: skip

        node.run(call)
        identity = [torch.eye(k).expand(2, k, k)] * 2
        for got, right in zip(outs, arriving_reference(wide(xs), wide(ws), SIZES), strict=True):
            assert torch.equal(got, right.to(HALF))
        for got, right in zip(kept, arriving_reference(wide(xs), identity, SIZES), strict=True):
            assert torch.equal(got, right.to(HALF))


@pytest.mark.parametrize(("bulk", "together"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(("m", "n", "k"), [(70, 136, 24), (390, 520, 1096)])
def test_a_scatter_as_it_is_launched(m: int, n: int, k: int, bulk: bool, together: bool) -> None:
    """By TMA and by ordinary stores; two calls of each operator in a row, which share memory, words and counters."""
    node, finish = Node(2, bulk, together), Finish(made(n, seed=3), "relu")
    xs, ws = [made(m, k, seed=rank) for rank in range(2)], [made(n, k, seed=9 + rank).t() for rank in range(2)]
    want = [torch.relu(one + made(n, seed=3).float()) for one in scattered_reference(wide(xs), wide(ws))]
    for operator in ("matmul_reduce_scatter", "matmul_all_reduce"):
        asked = Problem.of(
            operator, m, n, k, dtype="float16", ranks=2, device="cuda", multiprocessors=CTAS, bulk=bulk
        )  # fmt: skip
        plan = dataclasses.replace(fused_plan(asked, "peer"), group_bands=2, share=Share(CTAS - 1, 1))
        scatters = operator == "matmul_reduce_scatter"
        for _ in range(2):
            outs = [poisoned(m // 2 if scatters else m, n) for _ in range(2)]
            node.run(lambda fabric, rank, asked=asked, plan=plan, outs=outs: fused_cuda.prepare(  # type: ignore[misc]
                xs[rank], ws[rank], outs[rank], asked, plan, finish, fabric
            ), 2 if scatters else 3)  # fmt: skip
            for got, right in zip(outs, want if scatters else [torch.cat(want)] * 2, strict=True):
                assert torch.equal(got, right.to(HALF))
        (stages,) = node.stages.values()
        before = [(stage.words.local.clone(), stage.taken.clone()) for stage in stages]
        stage, launch = fused_cuda._scatter(xs[0], ws[0], outs[0], asked, plan, finish, node.fabric(0))
        launch(stage.idle_epochs, 0)
        for (words, taken), stage in zip(before, stages, strict=True):
            assert torch.equal(words, stage.words.local), "a launch of no CTA told of a tile"
            assert torch.equal(taken, stage.taken), "a launch of no CTA cleared a counter"


def test_sums_are_the_same_on_all_ranks_to_the_sign_of_zero() -> None:
    """silu of what is far below zero is -0.0, which a sum with 0.0 would change."""
    node, (m, n, k) = Node(2, True, True), (70, 136, 24)
    xs, ws = [made(m, k, seed=rank) for rank in range(2)], [made(n, k, seed=9 + rank).t() for rank in range(2)]
    asked = Problem.of(
        "matmul_all_reduce", m, n, k, dtype="float16", ranks=2, device="cuda", multiprocessors=CTAS, bulk=True
    )
    plan, finish = fused_plan(asked, "peer"), Finish(torch.full((n,), -100.0, dtype=HALF), "silu")
    outs = [poisoned(m, n) for _ in range(2)]
    node.run(lambda fabric, rank: fused_cuda.prepare(  # type: ignore[misc]
        xs[rank], ws[rank], outs[rank], asked, plan, finish, fabric
    ), 3)  # fmt: skip
    assert torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16))
    assert (outs[0].view(torch.int16) == torch.tensor(-0.0, dtype=HALF).view(torch.int16)).any()


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("loaders", [1, 2])
@pytest.mark.parametrize(("rows", "k"), [((70, 70), 24), ((70, 1, 65), 264)])
@pytest.mark.parametrize("pull", [False, True])
def test_a_gather_as_it_is_launched(pull: bool, rows: tuple[int, ...], k: int, loaders: int, bulk: bool) -> None:
    """One band each, or several of small tiles in several parts: by all CTAs, or by one while another is early."""
    n, ranks = 136, len(rows)
    node, nothing = Node(ranks, bulk), Finish(None, "none")
    xs = [made(count, k, seed=rank) for rank, count in enumerate(rows)]
    ws = [made(n, k, seed=9 + rank).t() for rank in range(ranks)]
    asked = Problem.of(
        "all_gather_matmul", sum(rows), n, k, dtype="float16", ranks=ranks, device="cuda", multiprocessors=CTAS,
        shards=rows, bulk=bulk, together=pull,
    )  # fmt: skip
    plan = fused_plan(asked, "peer")
    assert plan.pull == pull
    plan = dataclasses.replace(plan, share=Share(CTAS - 1, loaders), piece=256)
    early = [fused_order.early_tiles(rows, n, plan, rank) for rank in range(ranks)]
    assert (min(early) > 0) == (loaders == 1)
    for _ in range(2):  # of both turns
        outs = [poisoned(sum(rows), n) for _ in rows]
        node.run(lambda fabric, rank, outs=outs: fused_cuda.prepare(  # type: ignore[misc]
            xs[rank], ws[rank], outs[rank], asked, plan, nothing, fabric
        ))  # fmt: skip
        for got, right in zip(outs, gathered_reference(wide(xs), wide(ws)), strict=True):
            assert torch.equal(got, right.to(HALF))
        (stages,) = node.stages.values()
        for rank, stage in enumerate(stages):
            turn, half = int(stage.epochs[0]) % 2, stage.half
            if pull:
                kept = stage.data.local[turn * half : (turn + 1) * half]
                assert torch.equal(kept[: xs[rank].numel()], xs[rank].view(-1))
                assert bool(torch.isnan(kept[xs[rank].numel() :]).all()), "rows of others were copied"
                continue
            own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
            there = stage.data.local[turn * half : turn * half + sum(rows) * k].view(-1, k)
            assert bool(torch.isnan(there[own]).all()), "own rows were copied"
            assert bool(torch.isnan(stage.data.local[turn * half + sum(rows) * k : (turn + 1) * half]).all())


@pytest.mark.parametrize(("rows", "k", "n"), [
    ((70, 70), 24, 136), ((300, 1, 165), 264, 520), ((70, 1, 65), 264, 136),
])  # fmt: skip
@pytest.mark.parametrize("way", ["pushed", "beside", "at once", "narrow", "split"])
def test_brought_rows_as_they_are_launched(way: str, rows: tuple[int, ...], k: int, n: int) -> None:
    """Own tiles first, rows by a CTA of their own or by all that are over with them; or by all before they multiply,
    own tiles among the others', perhaps with K of the last one cut. A rank with odd columns among them, which has the
    other kernel; calls in a row.
    """
    pull = way != "pushed"
    ranks = len(rows)
    node = Node(ranks, True, pull)
    xs = [made(count, k, seed=rank) for rank, count in enumerate(rows)]
    wides = [n - 3 * (rank == 1) for rank in range(ranks)]
    ws = [made(wides[rank], k, seed=9 + rank).t() for rank in range(ranks)]
    biases = [made(wide_, seed=20 + rank) for rank, wide_ in enumerate(wides)]
    asked = [Problem.of(
        "all_gather_matmul", sum(rows), wide_, k, dtype="float16", ranks=ranks, device="cuda", multiprocessors=CTAS,
        shards=rows, bulk=True, together=pull,
    ) for wide_ in wides]  # fmt: skip
    share = Share(CTAS, 1) if way in ("pushed", "beside") else Share(CTAS - 1, CTAS - 1)
    plan = dataclasses.replace(fused_plan(asked[0], "peer"), order="rotated", share=share, piece=256)
    if way == "narrow":
        plan = dataclasses.replace(plan, tile=fused.NARROW_TILE)
    if way == "split":
        plan = dataclasses.replace(plan, split=2)
        tiles = [len(brought.table(rows, wide_, plan, 0)) for wide_ in wides]
        assert [brought.last_tiles(count, CTAS - 1, plan) for count in tiles] == [count % 2 for count in tiles]
        assert ranks == 2 or 1 in (count % 2 for count in tiles)
    plan.check(asked[0])
    assert fused.at_once(plan) == (way in ("at once", "narrow", "split"))
    for _ in range(3):
        outs = [poisoned(sum(rows), wide_) for wide_ in wides]
        node.run(lambda fabric, rank, outs=outs: fused_cuda.prepare(  # type: ignore[misc]
            xs[rank], ws[rank], outs[rank], asked[rank], plan, Finish(biases[rank], "relu"), fabric
        ), 3 if plan.split else 2)  # fmt: skip
        for got, right, bias in zip(outs, gathered_reference(wide(xs), wide(ws)), biases, strict=True):
            assert torch.equal(got, torch.relu(right + bias.float()).to(HALF))


@pytest.mark.parametrize(("rows", "k", "n"), [((70, 70), 24, 136), ((70, 1, 165), 264, 136)])
@pytest.mark.parametrize("way", ["before", "pushed", "beside", "at once"])
def test_rows_that_stay_as_they_are_launched(way: str, rows: tuple[int, ...], k: int, n: int) -> None:
    """Calls in a row use the same memory: that of one rank where rows are pulled, each rank's own where not. The
    gradients of a weight and of a bias are computed from it."""
    ranks, pull = len(rows), way != "pushed"
    node, m = Node(ranks, True, pull), sum(rows)
    ws = [made(n, k, seed=9 + rank).t() for rank in range(ranks)]
    inputs = [made(m, n, seed=30 + rank) for rank in range(ranks)]
    asked = Problem.of(
        "all_gather_matmul", m, n, k, dtype="float16", ranks=ranks, device="cuda", multiprocessors=CTAS, shards=rows,
        bulk=True, together=pull,
    )  # fmt: skip
    share = Share(CTAS, 1) if way == "beside" else Share(CTAS - 1, CTAS - 1)
    order = "rotated" if way in ("beside", "at once") else "natural"
    plan = dataclasses.replace(fused_plan(asked, "peer"), order=order, share=share, piece=256)
    for call in range(3):
        xs = [made(count, k, seed=40 + 10 * call + rank) for rank, count in enumerate(rows)]
        outs, arriving = [poisoned(m, n) for _ in rows], [Arriving(inputs[rank], ws[rank].t()) for rank in range(ranks)]
        node.run(lambda fabric, rank, xs=xs, outs=outs, arriving=arriving: fused_cuda.prepare(  # type: ignore[misc]
            xs[rank], ws[rank], outs[rank], asked, plan, Finish(None, "none"), fabric, arriving[rank]
        ))  # fmt: skip
        whole = torch.cat(xs)
        for rank, one in enumerate(arriving):
            assert torch.equal(outs[rank], (whole.float() @ ws[rank].float()).to(HALF))
            assert torch.equal(one.weight, (inputs[rank].float().t() @ whole.float()).to(HALF))
            assert torch.equal(one.bias, whole.float().sum(0).to(HALF))
        (stages,) = node.stages.values()
        for rank, stage in enumerate(stages):
            here = stage.data.local[: m * k].view(m, k)
            assert torch.equal(here, whole) if rank == HOME or not pull else bool(torch.isnan(here).all())
