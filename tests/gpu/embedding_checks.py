"""Exactness of embedding_all_to_all on a GPU, its gradients and captured calls, inside the ranks of a virtual node."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "ops"))
import embedding_suite as suite
from late_rank import call_without_the_last

import undertow as ut
from undertow.ops.bags import Shard
from undertow.plan.plan import SLICES, Plan, split

STRATEGIES = (*(f"{grain}:peer" for grain in suite.GRAINS), "serial:dma", "chunked:dma", "signaled:dma", "serial:net")
POSTED = ("fused:dma", "fused:net")
CHECKS: dict[str, Callable[[ut.Group], int]] = {}


def check(function: Callable[[ut.Group], int]) -> Callable[[ut.Group], int]:
    CHECKS[function.__name__] = function
    return function


def run(names: list[str]) -> dict[str, int]:
    group = ut.init()
    found = {}
    for name in names:
        began = time.perf_counter()
        found[name] = CHECKS[name](group)
        group.fabric.settle()
        group.barrier()
        group.check()
        if group.rank == 0:
            print(f"{name} {time.perf_counter() - began:.1f} s", flush=True)
    return found


def arguments(group: ut.Group, case: suite.Case) -> dict[str, Any]:
    """This rank's, on its device; 64-bit tables as 32-bit ones, which hold the same small integers."""

    def moved(value: Any) -> Any:
        if isinstance(value, Shard):
            return Shard(moved(value.weight), value.table, value.first_row, value.first_column)
        if isinstance(value, torch.Tensor):
            value = value.float() if value.dtype == torch.float64 else value
            return value.to(group.device)
        return (
            [moved(one) for one in value]
            if isinstance(value, list) and value and not isinstance(value[0], int)
            else value
        )

    return {name: moved(value) for name, value in case.arguments(group.rank).items()}


def wanted(group: ut.Group, case: suite.Case) -> torch.Tensor:
    want = case.want(group.rank)
    return (want.float() if want.dtype == torch.float64 else want).to(group.device)


@check
def random_problems(group: ut.Group) -> int:
    """Every strategy in turn; results are kept, so that places run out."""
    kept = []
    for seed in range(24):
        case = suite.Case.random(group.size, 500 + seed)
        strategy = STRATEGIES[seed % len(STRATEGIES)]
        y = ut.embedding_all_to_all(**arguments(group, case), group=group, strategy=strategy)
        kept.append((strategy, seed, y, wanted(group, case)))
    group.fabric.settle()
    for strategy, seed, y, want in kept:
        assert torch.equal(y, want), f"{strategy}, seed {seed}, rank {group.rank}"
    return len(kept)


@check
def posted_problems(group: ut.Group) -> int:
    """Slices that the kernel posts to the proxy: random problems one behind the other, in one slice and in several,
    with ranks that have nothing for each other among them; and what is told of them."""
    kept = []
    for seed in range(16):  # most compile two kernels
        case = suite.Case.random(group.size, 700 + seed)
        strategy, given = POSTED[seed % 2], arguments(group, case)
        plan = None
        if seed % 3 == 0 and sum(case.batches):
            samples = sum(case.batches)
            parcels = split(samples, min(samples, (1, 5, 16)[seed // 3 % 3]))
            plan = Plan(*strategy.split(":"), parcels, order=SLICES, own_last=True)
        y = ut.embedding_all_to_all(**given, group=group, strategy=strategy, plan=plan)
        told = ut.explain()
        assert told is not None
        assert told.plan.name == strategy
        kept.append((strategy, seed, y, wanted(group, case)))
    group.fabric.settle()
    group.check()
    for strategy, seed, y, want in kept:
        assert torch.equal(y, want), f"{strategy}, seed {seed}, rank {group.rank}"
    return len(kept)


def large(group: ut.Group, tables: int = 3, dim: int = 128, batch: int = 3000) -> tuple[dict[str, Any], torch.Tensor]:
    """Slices of megabytes, which leave in several chunks while others are pooled: small integers, all ranks meet."""
    samples, rows = batch * group.size, 500
    held, values = [], []
    for rank in range(group.size):
        generator = torch.Generator().manual_seed(rank)
        held.append([torch.randint(-2, 3, (rows, dim), generator=generator).float() for _ in range(tables)])
        values.append(torch.randint(0, rows, (tables * samples * 3,), generator=generator))
    mine = slice(group.rank * batch, (group.rank + 1) * batch)
    want = torch.cat([
        torch.nn.functional.embedding_bag(values[rank].view(tables, samples, 3)[number, mine], table, mode="sum")
        for rank in range(group.size) for number, table in enumerate(held[rank])
    ], 1)  # fmt: skip
    given: dict[str, Any] = {
        "tables": [one.to(group.device) for one in held[group.rank]], "values": values[group.rank].to(group.device),
        "offsets": torch.arange(0, tables * samples * 3 + 1, 3, device=group.device), "group": group,
        "batches": [batch] * group.size,
    }  # fmt: skip
    return given | {"layout": ut.embedding_layout(given["tables"], group)}, want.to(group.device)


@check
@torch.no_grad()
def posted_calls_in_a_row(group: ut.Group) -> int:
    """Without a word between them: each brings other numbers, so that one that came too early or too late is seen.

    The first ones are small, so that memory grows between two calls. Then once more with a rank that comes late: the
    kernels of the others wait, with all calls behind them, and their proxies must bring what they wait for.
    """
    given, want = large(group)
    few, want_few = large(group, batch=10)
    for strategy, late in itertools.product(POSTED, (False, True)):
        small = [ut.embedding_all_to_all(**few, strategy=strategy) for _ in range(2)]
        if late:
            group.fabric.settle()
            group.barrier()
            if group.rank == group.size - 1:
                time.sleep(0.3)
        results = []
        for number in range(5):
            for one in given["tables"]:
                one.add_(one if number else 0)  # twice as much each time
            results.append(ut.embedding_all_to_all(**given, strategy=strategy))
        group.fabric.settle()
        group.check()
        for y in small:
            assert torch.equal(y, want_few), f"{strategy}, small, rank {group.rank}"
        for number, y in enumerate(results):
            assert torch.equal(y, want * 2**number), f"{strategy}, call {number}, rank {group.rank}, late: {late}"
        for one in given["tables"]:
            one.div_(16)
    return len(POSTED)


@check
@torch.no_grad()
def the_host_waits_behind_posts(group: ut.Group) -> int:
    """A rank comes late; the others read a number that depends on its slices, or go on over `net`, where the host
    waits: their proxies must be able to call the driver meanwhile."""
    given, want = large(group, batch=500)
    expected = float(want.sum())
    for strategy in (*POSTED, "serial:net"):  # what is new is made now
        ut.embedding_all_to_all(**given, strategy=strategy)
        group.fabric.settle()
    usual, group.deadline = group.deadline, 10.0
    for strategy in POSTED:
        group.barrier()
        if group.rank == group.size - 1:
            time.sleep(0.2)
        total = float(ut.embedding_all_to_all(**given, strategy=strategy).sum())
        group.check()
        assert total == expected, f"{strategy}, rank {group.rank}"
        group.barrier()
        if group.rank == group.size - 1:
            time.sleep(0.2)
        results = [ut.embedding_all_to_all(**given, strategy=one) for one in (strategy, "serial:net")]
        group.check()
        for y in results:
            assert torch.equal(y, want), f"{strategy}, rank {group.rank}"
    group.deadline = usual
    return len(POSTED)


@check
@torch.no_grad()
def some_peers_are_reached(group: ut.Group) -> int:
    """As between nodes: every other rank has a peer pointer and the rest are posted to, by one kernel."""
    if group.device.type != "cuda":
        return 0
    from undertow.ops import embedding_posts  # there is a driver

    usual = embedding_posts.reached

    def every_other(fabric: Any, space: Any) -> tuple[int, ...]:
        return tuple(one for one in range(group.size) if one != group.rank and (one - group.rank) % 2 == 0)

    embedding_posts.reached = every_other
    try:
        kept = []
        for seed in range(4):
            case = suite.Case.random(group.size, 700 + seed)
            y = ut.embedding_all_to_all(**arguments(group, case), group=group, strategy=POSTED[seed % 2])
            kept.append((y, wanted(group, case)))
        given, want = large(group)
        kept += [(ut.embedding_all_to_all(**given, strategy="fused:dma"), want) for _ in range(4)]
        group.fabric.settle()
        group.check()
    finally:
        embedding_posts.reached = usual
    for number, (y, want) in enumerate(kept):
        assert torch.equal(y, want), f"call {number}, rank {group.rank}"
    return len(kept)


@check
@torch.no_grad()
def captured_posts(group: ut.Group) -> int:
    """A graph of two posted calls, replayed on other numbers, with calls between; what cannot be captured says so."""
    if group.device.type != "cuda":
        return 0
    given, want = large(group, batch=500)
    for strategy in POSTED:
        given["strategy"] = strategy
        ut.embedding_all_to_all(**given)
        group.fabric.settle()
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            first, second = ut.embedding_all_to_all(**given), ut.embedding_all_to_all(**given)
        for scale in (1, 2, 2):
            for one in given["tables"]:
                one.mul_(scale)
            want = want * scale
            group.fabric.settle()
            group.barrier()
            graph.replay()
            between = ut.embedding_all_to_all(**given)
            graph.replay()
            group.fabric.settle()
            group.check()
            for y in (first, second, between):
                assert torch.equal(y, want), f"{strategy}, scale {scale}"
    alone = given | {"batches": [500 * group.size, *[0] * (group.size - 1)]}
    ut.embedding_all_to_all(**alone)
    refused = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            ut.embedding_all_to_all(**alone)
    except ut.UndertowError as error:
        refused = str(error)
    assert "outside a capture" in refused, refused
    return len(POSTED)


@check
def gradients(group: ut.Group) -> int:
    """Of tables, dense, over peers and through the host, posted or not."""
    compared = 0
    for number in range(8):
        case = suite.Case.random(group.size, 900 + number)
        case.dtype = torch.float32
        case.tables = [one.float() for one in case.tables]
        for_tables, _ = suite.wanted_gradients(case)
        given = arguments(group, case)
        leaves = [one.weight if isinstance(one, Shard) else one for one in given["tables"]]
        for one in leaves:
            one.requires_grad_()
        y = ut.embedding_all_to_all(**given, group=group, strategy=("fused:peer", "signaled:dma", *POSTED)[number % 4])
        first = sum(case.batches[: group.rank])
        slope = suite.slope(sum(case.batches), y.shape[1])[first : first + len(y)]
        y.backward(slope.float().to(group.device))
        for one, (table, rows, columns) in zip(leaves, case.placed[group.rank], strict=True):
            assert one.grad is not None
            assert torch.equal(one.grad.double().cpu(), for_tables[table][rows, columns]), f"case {number}"
            compared += 1
    return compared


@check
def captured_calls(group: ut.Group) -> int:
    """A graph of two calls, replayed on new values: the second replay must not pass with the first one's signals.

    Both results are kept, so they must not share memory; what an eager call gave before the replays stays as it was,
    and eager calls between replays are right, too.
    """
    if group.device.type != "cuda":
        return 0
    for strategy in ("fused:peer", "serial:peer", "signaled:dma"):
        case = suite.Case.random(group.size, 77)
        case.dtype, case.tables = torch.float32, [one.float() for one in case.tables]
        given = arguments(group, case)
        layout = ut.embedding_layout(given["tables"], group)
        given |= {"layout": layout, "group": group, "strategy": strategy}
        for _ in range(2):
            ut.embedding_all_to_all(**given)
        group.fabric.settle()
        group.barrier()
        eager = ut.embedding_all_to_all(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            first = ut.embedding_all_to_all(**given)
            second = ut.embedding_all_to_all(**given)
        assert first.numel() == 0 or first.data_ptr() != second.data_ptr(), f"{strategy}: results share memory"
        want = before = wanted(group, case)
        for scale in (1, 2, 3):
            for one in given["tables"]:
                weight = one.weight if isinstance(one, Shard) else one
                weight.mul_(scale)
            want = want * scale
            group.fabric.settle()
            group.barrier()
            graph.replay()
            graph.replay()
            between = ut.embedding_all_to_all(**given)
            graph.replay()
            group.fabric.settle()
            assert torch.equal(first, want), f"{strategy}: first, scale {scale}"
            assert torch.equal(second, want), f"{strategy}: second, scale {scale}"
            assert torch.equal(between, want), f"{strategy}: between replays, scale {scale}"
            assert torch.equal(eager, before), f"{strategy}: replays wrote into an eager call's result"
            del between
        del eager
    return 3


def wait_until_gone(group: ut.Group) -> None:
    """The driver destroys a graph when it likes."""
    from undertow.ops.embedding_peers import Exchange  # there is a driver

    last, until = Exchange.of(group.fabric)._graph, time.monotonic() + 10  # type: ignore[arg-type]
    while last is not None and not last.is_gone:
        assert time.monotonic() < until, "a graph that nobody holds is not gone"
        time.sleep(0.01)


@check
def captured_results_are_not_copied(group: ut.Group) -> int:
    """Three graphs, one after the other: each has the place that is kept for captured calls, once the last is gone."""
    if group.device.type != "cuda":
        return 0
    from undertow.ops.embedding_peers import Exchange  # there is a driver

    table = torch.ones(8, 4, device=group.device)
    samples = 3 * group.size
    values, offsets = torch.ones(samples, dtype=torch.int64), torch.arange(samples + 1)
    given: dict[str, Any] = {
        "tables": [table], "values": values.to(group.device), "offsets": offsets.to(group.device), "group": group,
        "strategy": "fused:peer", "layout": ut.embedding_layout([table], group), "batches": [3] * group.size,
    }  # fmt: skip
    ut.embedding_all_to_all(**given)
    group.fabric.settle()
    places = set()
    for turn in range(3):
        wait_until_gone(group)
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = ut.embedding_all_to_all(**given)
        table.fill_(turn + 1)
        group.fabric.settle()
        group.barrier()
        graph.replay()
        group.fabric.settle()
        assert torch.equal(y, torch.full_like(y, turn + 1))
        places.add(y.data_ptr())
        last = Exchange.of(group.fabric)._graph  # type: ignore[arg-type]
        assert last is not None
        assert not last.is_gone, "torch destroys what it captured, but what it replays has the place still"
        group.barrier()
        del y, graph
    assert len(places) == 1, "the place of a graph that is gone was not found free"
    return 3


@check
def wrong_indices_read_nothing(group: ut.Group) -> int:
    """Far outside the tables, without a check: they count as absent."""
    table = torch.ones(8, 4, device=group.device)
    samples = 3 * group.size
    values = torch.tensor([1, 1 << 40, -5, 2], device=group.device).repeat(samples)
    if group.device.type != "cuda":
        return 0
    offsets = torch.arange(0, 4 * samples + 1, 4, device=group.device)
    y = ut.embedding_all_to_all([table], values, offsets, group=group, strategy="fused:peer")
    assert torch.equal(y, torch.full_like(y, 2.0))
    return 1


@torch.no_grad()
def abandoned(strategy: str) -> str:
    """The last rank does not come; the kernels of the others give up at the deadline, and the group fails."""
    group = ut.init()
    table = torch.ones(8, 4, device=group.device)
    samples = 3 * group.size
    given: dict[str, Any] = {
        "tables": [table], "values": torch.ones(samples, dtype=torch.int64, device=group.device),
        "offsets": torch.arange(samples + 1, device=group.device), "group": group, "strategy": strategy,
        "layout": ut.embedding_layout([table], group), "batches": [3] * group.size,
    }  # fmt: skip
    ut.embedding_all_to_all(**given)
    group.fabric.settle()
    group.barrier()
    return call_without_the_last(group, lambda: ut.embedding_all_to_all(**given))
