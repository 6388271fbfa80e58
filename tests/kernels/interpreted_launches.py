"""Launches of the fused kernels as the operators make them, by Triton's interpreter on the CPU: with TMA, and without.

What is real: operands, tables, stages, the arguments of the kernels, the kernels themselves. What is not: signals
(`interpreted_tokens.py`), streams, the driver. Ranks come one after the other and wait for nobody, so every call is
made twice with the same number: the first time for what it sends, the second for what it finds; where sums of what was
found are sent, once more.
"""

from __future__ import annotations

import ctypes
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

_open: Any = ctypes.CDLL


class _NoDriver:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0


ctypes.CDLL = lambda name, *rest, **more: (  # type: ignore[misc,assignment]
    _NoDriver() if "libcuda" in str(name) else _open(name, *rest, **more)
)

import interpreted_tokens as parts  # noqa: E402 - its replacements of signals hold here, too

from undertow.fabric.cuda import CudaFabric  # noqa: E402
from undertow.kernels import ahead, fused_columns, fused_decode  # noqa: E402
from undertow.ops import fused_cuda, fused_few, tokens_cuda  # noqa: E402
from undertow.ops.all_gather_matmul import reference as gathered_reference  # noqa: E402
from undertow.ops.all_to_all_matmul import grouped_reference as arriving_reference  # noqa: E402
from undertow.ops.beside import Arriving  # noqa: E402
from undertow.ops.finish import Finish  # noqa: E402
from undertow.ops.fused_stage import Stage  # noqa: E402
from undertow.ops.matmul_all_to_all import grouped_reference as leaving_reference  # noqa: E402
from undertow.ops.matmul_reduce_scatter import reference as scattered_reference  # noqa: E402
from undertow.ops.whole import HOME  # noqa: E402
from undertow.plan import brought, fused, fused_order  # noqa: E402
from undertow.plan.defaults import fused_plan, tokens_plan  # noqa: E402
from undertow.plan.plan import Share  # noqa: E402
from undertow.plan.problem import Problem  # noqa: E402
from undertow.plan.tokens import Tokens  # noqa: E402

CTAS = 3
HALF = torch.float16


class Node:
    """Ranks that share this process's memory."""

    def __init__(self, ranks: int, bulk: bool, together: bool = False) -> None:
        self.ranks, self.bulk, self.together, self.stages = ranks, bulk, together, dict[Any, list[Stage]]()
        parts.BULK[0] = bulk

    def fabric(self, rank: int) -> Any:
        made = object.__new__(CudaFabric)
        made.group = types.SimpleNamespace(rank=rank, size=self.ranks, deadline=1.0, device=torch.device("cpu"))
        made.device, made.multiprocessors, made.bulk_copies = made.group.device, CTAS, self.bulk
        made.guard = types.SimpleNamespace(  # type: ignore[assignment]
            abort=parts.NOBODY, error=parts.NOBODY, poisons_itself=lambda: None
        )
        made.node, made.together = self, self.together  # type: ignore[attr-defined]
        return made

    def stage(self, fabric: Any, kind: Any, elements: int, lines: int, dtype: torch.dtype, unit: int = 8) -> Stage:
        if kind not in self.stages:
            half = -(-elements // (8 * unit)) * 8 * unit
            lines += lines % 2
            poison = float("nan") if dtype.is_floating_point else -1
            whole = torch.full((self.ranks, 2 * half), poison, dtype=dtype)
            data = list(whole)
            words = [torch.zeros((lines + CTAS) * fused.LINE, dtype=torch.int32) for _ in range(self.ranks)]
            bases = parts.addresses(data), parts.addresses(words)
            self.stages[kind] = [
                Stage(
                    _buffer(data, rank), half, _buffer(words, rank), lines, *(_counters() for _ in range(3)), *bases, 0
                )
                for rank in range(self.ranks)
            ]
            for stage in self.stages[kind]:
                stage.described["side by side"] = whole
        return self.stages[kind][fabric.group.rank]

    def run(self, call: Callable[[Any, int], Callable[[], None]], times: int = 2) -> None:
        """Every rank's call, so many times with the same number."""
        for again in range(times):
            for rank in range(self.ranks):
                call(self.fabric(rank), rank)()
            if again + 1 < times:  # only what this call counts: the other counter is for the kernel to clear
                for stages in self.stages.values():
                    for stage in stages:
                        stage.taken[int(stage.epochs[0]) % 2 * fused.LINE] = 0
                        stage.epochs -= 1


def _counters() -> torch.Tensor:
    return torch.zeros(2 * fused.LINE, dtype=torch.int32)


def _buffer(tensors: list[torch.Tensor], rank: int) -> Any:
    return types.SimpleNamespace(local=tensors[rank], peer=lambda one: tensors[one])


@triton.jit
def sent(pointers, data, flag, wanted):
    tl.store(pointers, (data.to(tl.int64) & 0xFFFFFFFF) | (flag.to(tl.int64) << 32), mask=wanted)


def settled(pointers: Any, wanted: Any, flag: Any, watch: Any) -> Any:
    """Packets of another number, or that are not wanted, are not numbers."""
    found = []
    for at, one in enumerate(pointers):
        here = (wanted >> at) & 1 != 0
        word = tl.load(one, mask=here, other=0)
        found.append(tl.where(here & ((word >> 32).to(tl.int32) == flag), word.to(tl.int32), 0x7E007E00))
    return *found, tl.zeros_like(wanted)


fused_decode.send, fused_decode.settle = sent, settled  # type: ignore
for _name, _other in (("tell", parts.told), ("signal_wait_all", parts.no_wait), ("has_bulk_copies", parts.bulk_copies)):
    setattr(fused_columns, _name, _other)
ASKED: list[tuple[int, int]] = []  # addresses and bytes


def asked(pointers: Any, nbytes: Any) -> None:
    ASKED.extend((int(one), int(size)) for one, size in zip(pointers.handle.data, nbytes.handle.data, strict=True))


@triton.jit
def said(word_bases, offset, epoch, RANKS: tl.constexpr, LANES: tl.constexpr):
    for one in range(RANKS):
        tl.store(tl.load(word_bases + one).to(tl.pointer_type(tl.int32)) + offset, epoch)


ahead.ask, ahead.gdc_wait, ahead.gdc_launch_dependents = asked, parts.no_fence, parts.no_fence  # type: ignore[assignment]
fused_columns.say_running = said  # type: ignore[attr-defined]
for _module in (fused_cuda, fused_few, tokens_cuda):
    _module.stage_of = lambda fabric, *rest, **more: fabric.node.stage(fabric, *rest, **more)  # type: ignore[attr-defined]
    _module.device_table = lambda fabric, key, make: parts.table(make())  # type: ignore[attr-defined]
    _module.load = lambda *arguments: None  # type: ignore[attr-defined]
Stage.follow = Stage.enqueued = lambda self, device: None  # type: ignore[method-assign,assignment]
Stage.side_by_side = lambda self, fabric: self.described["side by side"]  # type: ignore[method-assign]


def made(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=HALF)


def wide(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.float() for one in tensors]


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
        tokens.back.matrix, k, n, dtype="float16", device="cuda", multiprocessors=CTAS, bulk=bulk
    )  # fmt: skip
    plan = tokens_plan(problem, "peer", 1, k)
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
