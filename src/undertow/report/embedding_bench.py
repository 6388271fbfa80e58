"""What `undertow bench embedding_all_to_all` measures: every strategy beside the lookup and the All-to-All alone.

On a CPU the dma lane also runs paced, as an emulated link: the core that pools then has most of the time to itself, as
a GPU beside a copy engine. Results are compared with the reference before anything is timed, small integers throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.table import Table

from ..fabric.cpu_lanes import Pace
from ..fabric.group import Group
from ..fabric.launch import launch
from ..fabric.registry import init
from ..fabric.timer import Comparison
from ..ops.bags import Bags
from ..ops.embedding_all_to_all import problem_of
from ..ops.embedding_run import pool_all, run
from ..plan.bags import Layout, Piece
from ..plan.defaults import default_plan
from ..plan.plan import GRAINS
from .demo import Route, describe, find_routes, set_pace
from .tables import StrategyResult, strategy_results, strategy_table

LOOKUP = "lookup"


@dataclass(frozen=True, slots=True)
class Shape:
    """Of every rank: samples, tables of rows x dim; values in a bag."""

    batch: int
    tables: int
    rows: int
    dim: int
    pooling: int
    dtype: str = "float32"

    def __str__(self) -> str:
        size = f"{self.tables} tables of {self.rows} x {self.dim} {self.dtype}"
        bag = f"{self.pooling} value{'s' if self.pooling != 1 else ''} in a bag"
        return f"{self.batch} samples and {size} on each rank, {bag}"


@dataclass(frozen=True, slots=True)
class Findings:
    """Of one shape; times are those of the slowest rank."""

    shape: Shape
    comparison: Comparison
    rows: list[StrategyResult]
    wrong: list[str]
    links: dict[str, str]
    ranks: int

    def render(self) -> Table:
        return strategy_table(self.rows, title=f"embedding_all_to_all, {self.ranks} ranks, {self.shape}")


def measure(ranks: int, device: str, shapes: list[Shape], rounds: int, link: Pace | None = None) -> list[Findings]:
    """Launch ranks, let them measure each shape; the first rank's findings, and whatever was wrong on any.

    `link`: what the paced lane of a CPU pretends to be, instead of the usual one.
    """
    every: list[list[Findings]] = launch(measure_rank, ranks, device, args=(shapes, rounds, link))
    for number, first in enumerate(every[0]):
        first.wrong.extend(
            f"{name} on rank {rank}" for rank, found in enumerate(every[1:], 1) for name in found[number].wrong
        )
    return every[0]


def measure_rank(shapes: list[Shape], rounds: int, link: Pace | None = None) -> list[Findings]:
    group = init()
    routes = find_routes(group.fabric)
    if link is not None:
        routes = [route if route.pace is None else replace(route, pace=link) for route in routes]
    return [_measure(group, shape, routes, rounds) for shape in shapes]


def problem(group: Group, shape: Shape) -> tuple[Bags, Layout, tuple[int, ...]]:
    """Small integers, so that sums are exact; the same rows on every run."""
    held = tuple(
        tuple(Piece(rank * shape.tables + number, shape.rows, shape.dim) for number in range(shape.tables))
        for rank in range(group.size)
    )
    bags = bags_of(group, shape, group.rank, held[group.rank])
    return bags, Layout(held, shape.dtype), (shape.batch,) * group.size


def bags_of(group: Group, shape: Shape, rank: int, pieces: tuple[Piece, ...]) -> Bags:
    """Those of any rank, so that each can tell what the others must send."""
    generator = torch.Generator().manual_seed(1 + rank)
    dtype, samples = getattr(torch, shape.dtype), shape.batch * group.size
    tables = tuple(
        torch.randint(-1, 2, (shape.rows, shape.dim), generator=generator, device="cpu").to(group.device, dtype)
        for _ in range(shape.tables)
    )
    count = shape.tables * samples * shape.pooling
    values = torch.randint(0, shape.rows, (count,), generator=generator, device="cpu").to(group.device)
    offsets = torch.arange(0, count + 1, shape.pooling, device=group.device)
    return Bags(tables, pieces, values, offsets, None, "sum", samples)


def _measure(group: Group, shape: Shape, routes: list[Route], rounds: int) -> Findings:
    from ..fabric.timer import compare

    fabric = group.fabric
    bags, layout, batches = problem(group, shape)
    planned_for = problem_of(bags, layout, batches, group)
    like, local = bags.tables[0][:0, 0], bags.tables[0].new_empty(bags.samples, bags.width)

    def called(route: Route, grain: str, compute: bool = True) -> torch.Tensor:
        set_pace(fabric, route)
        return run(fabric, bags, layout, batches, default_plan(planned_for, grain, route.lane), like, compute)

    calls: dict[str, Callable[[], torch.Tensor]] = {
        f"{grain}:{route.label}": partial(called, route, grain) for route in routes for grain in GRAINS
    }
    expected = reference(group, shape, layout)
    wrong = [name for name, call in calls.items() if not torch.equal(call(), expected)]
    variants: dict[str, Callable[[], object]] = {
        LOOKUP: lambda: pool_all(fabric, bags, layout, batches, local),
        **{_moved(route): partial(called, route, "serial", False) for route in routes},
        **calls,
    }
    comparison = compare(
        variants, repeats=rounds, warmup=1, reduce_max=group.reduce_max, before=group.barrier,
        facts={"ranks": group.size, "shape": str(shape)},
    )  # fmt: skip
    return Findings(
        shape, comparison, _rows(comparison, routes), wrong,
        {route.label: describe(fabric, route) for route in routes}, group.size,
    )  # fmt: skip


def reference(group: Group, shape: Shape, layout: Layout) -> torch.Tensor:
    """By torch's own lookup: this rank's samples, the tables of all ranks, one rank's at a time."""
    mine, found = slice(group.rank * shape.batch, (group.rank + 1) * shape.batch), []
    for rank, pieces in enumerate(layout.held):
        bags = bags_of(group, shape, rank, pieces)
        parts = zip(bags.values.view(shape.tables, bags.samples, shape.pooling), bags.tables, strict=True)
        found += [torch.nn.functional.embedding_bag(one[mine], table, mode="sum") for one, table in parts]
    return torch.cat(found, 1)


def _moved(route: Route) -> str:
    return f"all_to_all:{route.label}"


def _rows(comparison: Comparison, routes: list[Route]) -> list[StrategyResult]:
    overlapped = {f"{grain}:{route.label}": route for route in routes for grain in GRAINS if grain != "serial"}
    return strategy_results(
        comparison,
        serial={name: f"serial:{route.label}" for name, route in overlapped.items()},
        gemm=LOOKUP,
        communication={name: _moved(route) for name, route in overlapped.items()},
        emulated=[f"{grain}:{route.label}" for route in routes if route.pace for grain in GRAINS],
    )
