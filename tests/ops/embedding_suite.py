"""Random jagged problems of embedding_all_to_all, made the same on every rank, and their exact check."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch

import undertow as ut
from undertow.ops.bags import Shard
from undertow.ops.embedding_all_to_all import reference
from undertow.ops.embedding_gradients import RowOptimizer
from undertow.plan.plan import SLICES, Plan

GRAINS = ("serial", "chunked", "signaled", "fused")
LANES = ("peer", "dma", "net")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Bag = list[int]


@dataclass
class Case:
    """Whole tables and their bags, `bags[table][sample]`; and how each is placed: ranges of it on ranks."""

    seed: int
    dtype: torch.dtype
    index: torch.dtype
    pooling: str
    batches: list[int]
    tables: list[torch.Tensor]
    bags: list[list[Bag]]
    weights: list[list[list[float]]] | None
    placed: list[list[tuple[int, slice, slice]]]  # by rank: (table, rows, columns)
    sharded: bool

    @staticmethod
    def random(size: int, seed: int) -> Case:
        chance = random.Random(seed)
        dtype, index = chance.choice(DTYPES), chance.choice((torch.int32, torch.int64))
        pooling = chance.choice(("sum", "sum", "mean"))
        lengths = (0, 1, 2, 4) if pooling == "mean" else (0, 0, 1, 2, 3, 5, 9)
        batches = [chance.choice((0, 1, 2, 5, 9)) for _ in range(size)]
        if chance.random() < 0.3:
            batches = [chance.choice((1, 3, 6))] * size
        samples = sum(batches)
        count = chance.choice((1, 1, 2, 3, size, size + 2))
        sharded = chance.random() < 0.4
        generator = torch.Generator().manual_seed(seed)
        shapes = [(chance.choice((1, 4, 7, 30)), chance.choice((1, 3, 4, 8, 16))) for _ in range(count)]
        tables = [(4 * torch.randint(-2, 3, one, generator=generator)).to(dtype) for one in shapes]
        bags = [
            [[chance.randrange(rows) for _ in range(chance.choice(lengths))] for _ in range(samples)]
            for rows, _ in shapes
        ]
        weights = None
        if chance.random() < 0.4:
            weights = [[[float(chance.choice((-1, 0, 1))) for _ in bag] for bag in per] for per in bags]
        placed: list[list[tuple[int, slice, slice]]] = [[] for _ in range(size)]
        for table, (rows, dim) in enumerate(shapes):
            how = chance.choice(("whole", "rows", "columns")) if sharded else "whole"
            owners = chance.sample(range(size), chance.randint(1, size)) if how != "whole" else [chance.randrange(size)]
            extent = rows if how == "rows" else dim
            cuts = sorted(chance.choices(range(extent + 1), k=len(owners) - 1))
            for owner, (first, last) in zip(owners, itertools.pairwise([0, *cuts, extent]), strict=True):
                if how == "columns" and first == last:
                    continue
                here = (table, slice(first, last), slice(0, dim)) if how == "rows" else None
                placed[owner].append(here or (table, slice(0, rows), slice(first, last)))
            if how == "whole":
                placed[owners[0]][-1] = (table, slice(0, rows), slice(0, dim))
        if not sharded:  # plain tensors are numbered rank by rank
            order = [table for per in placed for table, _, _ in per]
            tables, bags = [tables[one] for one in order], [bags[one] for one in order]
            weights = None if weights is None else [weights[one] for one in order]
            numbers = iter(range(count))
            placed = [[(next(numbers), rows, columns) for _, rows, columns in per] for per in placed]
        return Case(seed, dtype, index, pooling, batches, tables, bags, weights, placed, sharded)

    def arguments(self, rank: int) -> dict[str, Any]:
        held = self.placed[rank]
        mine = [bag for table, _, _ in held for bag in self.bags[table]]
        lengths = torch.tensor([len(bag) for bag in mine], dtype=self.index)
        found: dict[str, Any] = {
            "tables": [
                Shard(self.tables[table][rows, columns].clone(), table, rows.start, columns.start)
                if self.sharded else self.tables[table].clone() for table, rows, columns in held
            ],
            "values": torch.tensor([one for bag in mine for one in bag], dtype=self.index),
            "pooling": self.pooling, "batches": self.batches, "weights": None,
        }  # fmt: skip
        if self.weights is not None:
            flat = [one for table, _, _ in held for bag in self.weights[table] for one in bag]
            found["weights"] = torch.tensor(flat, dtype=torch.float32 if self.seed % 2 else self.dtype)
        if self.seed % 3:
            found["offsets"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(self.index)
        else:
            found["lengths"] = lengths
        return found

    def whole(self) -> dict[str, Any]:
        """All tables as if one rank held them, for the reference."""
        every = [bag for per in self.bags for bag in per]
        lengths = torch.tensor([len(bag) for bag in every], dtype=torch.int64)
        flat = [] if self.weights is None else [one for per in self.weights for bag in per for one in bag]
        return {
            "tables": [self.tables], "values": [torch.tensor([one for bag in every for one in bag], dtype=torch.int64)],
            "offsets": [torch.nn.functional.pad(lengths.cumsum(0), (1, 0))],
            "weights": None if self.weights is None else [torch.tensor(flat)], "pooling": self.pooling,
            "batches": self.batches,
        }  # fmt: skip

    def want(self, rank: int) -> torch.Tensor:
        return reference(**self.whole())[rank]


def random_plan(strategy: str, samples: int, chance: random.Random) -> Plan:
    """Any parcels, in any grain; of fractions that may not fit the samples."""
    extent = chance.choice((1, 2, 3, 7, max(1, samples)))
    cuts = sorted({0, extent, *(chance.randint(0, extent) for _ in range(chance.randint(0, 4)))})
    grain, lane = strategy.split(":")
    return Plan(grain, lane, tuple(itertools.pairwise(cuts)), order=SLICES, own_last=chance.random() < 0.5)


def verify(group: ut.Group, case: Case, strategy: str, plan: Plan | None = None) -> None:
    y = ut.embedding_all_to_all(**case.arguments(group.rank), group=group, strategy=strategy, plan=plan)
    want = case.want(group.rank)
    assert y.shape == want.shape, f"{tuple(y.shape)} instead of {tuple(want.shape)}"
    wrong = int((y != want).sum())
    assert wrong == 0, f"{wrong} of {want.numel()} elements are wrong"


def run(seed: int, count: int) -> int:
    """`count` random cases, each under one strategy, every other with a plan of its own; how many had shards."""
    group, chance, shards = ut.init(), random.Random(seed), 0
    for number in range(count):
        case = Case.random(group.size, seed * 1000 + number)
        strategy = f"{chance.choice(GRAINS)}:{chance.choice(LANES)}"
        plan = random_plan(strategy, sum(case.batches), chance) if number % 2 else None
        try:
            verify(group, case, strategy, plan)
        except Exception as error:
            raise AssertionError(f"seed {seed} case {number} {strategy} {plan}: {error}") from error
        shards += case.sharded
    return shards


# -- gradients ---------------------------------------------------------------------------------------------------------


def wanted_gradients(case: Case) -> tuple[list[torch.Tensor], list[list[list[float]]]]:
    """By autograd over whole tables: dy[sample, column] = 1 + (sample + column) % 3. Of tables, of weights."""
    tables = [one.double().clone().requires_grad_() for one in case.tables]
    samples = sum(case.batches)
    columns, products = [], []
    given: list[list[list[torch.Tensor]]] = []
    for table, per in zip(tables, case.bags, strict=True):
        rows = []
        given.append([])
        for sample in range(samples):
            bag = per[sample]
            scale = [1.0] * len(bag) if case.weights is None else case.weights[len(given) - 1][sample]
            leaves = [torch.tensor(one, dtype=torch.float64, requires_grad=True) for one in scale]
            given[-1].append(leaves)
            total = torch.zeros(table.shape[1], dtype=torch.float64)
            for index, leaf in zip(bag, leaves, strict=True):
                total = total + leaf * table[index]
            rows.append(total / len(bag) if case.pooling == "mean" and bag else total)
        columns.append(torch.stack(rows) if rows else torch.zeros(0, table.shape[1], dtype=torch.float64))
    y = torch.cat(columns, 1)
    products.append((y * slope(samples, y.shape[1])).sum())
    if products[0].requires_grad:
        products[0].backward()
    found = [torch.zeros_like(one) if one.grad is None else one.grad for one in tables]
    weights = [[[0.0 if one.grad is None else float(one.grad) for one in bag] for bag in per] for per in given]
    return found, weights


def slope(samples: int, width: int) -> torch.Tensor:
    return (1 + (torch.arange(samples)[:, None] + torch.arange(width)) % 3).double()


def same(found: torch.Tensor, want: torch.Tensor, part: int) -> bool:
    """Bit for bit, unless gradients are divided by what is no power of two."""
    return torch.equal(found, want) if part & (part - 1) == 0 else torch.allclose(found, want, rtol=1e-13, atol=1e-12)


def gradients(seed: int, count: int) -> int:
    """Dense and sparse, divided and not, of weights too, and steps of a fused optimizer; how many were compared."""
    group, compared = ut.init(), 0
    rank, chance = group.rank, random.Random(seed)
    for number in range(count):
        case = Case.random(group.size, seed * 1000 + number)
        case.dtype = torch.float64
        case.tables = [one.double() for one in case.tables]
        for_tables, for_weights = wanted_gradients(case)
        given = case.arguments(rank)
        leaves = [one.weight if isinstance(one, Shard) else one for one in given["tables"]]
        optimizer = RowOptimizer("sgd", lr=0.5) if number % 4 == 3 else None
        for one in leaves:
            one.requires_grad_(optimizer is None)
        weights = given["weights"]
        if weights is not None:
            given["weights"] = weights = weights.double().requires_grad_(optimizer is None)
        divide, strategy = number % 3 == 1, f"{chance.choice(GRAINS)}:{chance.choice(LANES)}"
        before = [one.detach().clone() for one in leaves]
        y = ut.embedding_all_to_all(
            **given, group=group, strategy=strategy, sparse=number % 2 == 1, divide_gradients=divide,
            optimizer=optimizer,
        )  # fmt: skip
        first = sum(case.batches[:rank])
        dy = slope(sum(case.batches), y.shape[1])[first : first + case.batches[rank]]
        y.backward(dy)
        part = group.size if divide else 1
        for one, was, (table, rows, columns) in zip(leaves, before, case.placed[rank], strict=True):
            want = for_tables[table][rows, columns] / part
            if optimizer is not None:
                assert same(one, was - 0.5 * want, part), f"case {number} {strategy}: table {table} after the step"
            else:
                assert one.grad is not None
                assert one.grad.is_sparse == (number % 2 == 1)
                assert same(one.grad.to_dense(), want, part), f"case {number} {strategy}: gradient of table {table}"
            compared += 1
        if weights is not None and optimizer is None and not case.sharded:
            flat = [one for table, _, _ in case.placed[rank] for bag in for_weights[table] for one in bag]
            assert weights.grad is not None
            assert same(weights.grad, torch.tensor(flat, dtype=torch.float64) / part, part), f"case {number}: weights"
            compared += 1
    return compared
