"""Exactness of the matmul operators, run inside ranks: integers whose sums are exact, poisoned outputs.

Inputs are -1, 0 and 1 with few non-zero products for each output, so that every partial sum in any order is an integer
that the dtype holds (bf16: up to 256), and any wrong place, missing or doubled part shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

import undertow as ut
from undertow.ops import all_gather_matmul as gather
from undertow.ops import matmul_all_reduce as reduce
from undertow.ops import matmul_all_to_all as exchange
from undertow.ops import matmul_reduce_scatter as scatter

GRAINS = ("serial", "chunked", "signaled", "fused")
LANES = ("net", "peer", "dma")
SHAPES: tuple[tuple[int, int, int], ...] = (
    (1, 1, 1),
    (1, 7, 3),
    (2, 3, 1),
    (3, 1, 5),
    (5, 11, 2),
    (7, 13, 17),
    (8, 8, 8),
    (13, 5, 31),
    (16, 64, 24),
    (17, 17, 17),
    (19, 1, 40),
    (23, 29, 31),
    (31, 64, 7),
    (32, 33, 34),
    (37, 41, 12),
    (48, 96, 16),
    (53, 2, 61),
    (61, 67, 5),
    (64, 48, 32),
    (71, 73, 20),
    (83, 16, 64),
    (96, 10, 9),
    (97, 101, 8),
    (101, 3, 103),
    (128, 40, 12),
    (131, 64, 6),
    (150, 37, 25),
    (173, 11, 19),
    (0, 5, 4),
    (199, 23, 14),
)  # fmt: skip  M, N, K of a rank
CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NON_ZERO = 16  # products that are not zero, at most, for each output of each rank


Prepared = tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    operator: str
    strategy: str
    dtype: torch.dtype
    shape: tuple[int, int, int]
    seed: int

    def __str__(self) -> str:
        return f"{self.operator} {self.strategy} {str(self.dtype).removeprefix('torch.')} {self.shape}"


def cases(
    seed: int, part: float, lanes: Sequence[str] = LANES, dtypes: Sequence[torch.dtype] = CPU_DTYPES,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
) -> list[Case]:  # fmt: skip
    """The whole matrix, or a seeded part of it, the same on all ranks."""
    every = itertools.product(OPERATORS, strategies(lanes), dtypes, shapes)
    chance = random.Random(seed)
    return [
        Case(operator, strategy, dtype, shape, chance.randrange(1 << 30))
        for operator, strategy, dtype, shape in every
        if chance.random() < part
    ]


def run(seed: int, part: float) -> int:
    """All cases of a part; how many there were. Runs on every rank."""
    group = ut.init()
    found = cases(seed, part)
    for case in found:
        verify(group, case)
    return len(found)


def verify(group: ut.Group, case: Case) -> None:
    call, want = prepared(group, case)
    _exactly(case, group, call(_poisoned(want.shape, case, group)), want)


def prepared(group: ut.Group, case: Case) -> Prepared:
    """What makes the case's call into a tensor that it is given, and what it must put there."""
    return OPERATORS[case.operator](group, case)


@lru_cache(1024)
def _drawn(rows: int, columns: int, seed: int, most: int) -> torch.Tensor:
    """-1, 0, 1, with at most `most` that are not zero in each row. Drawing takes longer than a call on a GPU."""
    generator = torch.Generator().manual_seed(seed % (1 << 31))
    made = torch.randint(-1, 2, (rows, columns), generator=generator)
    if columns > most:
        keep = torch.rand(rows, columns, generator=generator).argsort(1) < most
        made = made * keep
    return made.to(torch.int8)


def integers(rows: int, columns: int, seed: int, case: Case, device: torch.device) -> torch.Tensor:
    """-1, 0, 1, with at most _NON_ZERO that are not zero in each row, spread over all columns."""
    return _drawn(rows, columns, seed, _NON_ZERO).to(device=device, dtype=case.dtype)


def _weights(rows: int, columns: int, seed: int, case: Case, device: torch.device) -> torch.Tensor:
    """Any integers of -1, 0, 1: x alone limits the sums. Every other one lies the other way round."""
    made = _drawn(rows, columns, seed, columns).to(device=device, dtype=case.dtype)
    return made.t().contiguous().t() if case.seed % 2 else made


def _exactly(case: Case, group: ut.Group, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, f"{case}, rank {group.rank}: {list(got.shape)} instead of {list(want.shape)}"
    wrong = int((got != want).sum())
    assert wrong == 0, f"{case}, rank {group.rank} of {group.size}: {wrong} of {want.numel()} elements are wrong"


def _poisoned(shape: Sequence[int], case: Case, group: ut.Group) -> torch.Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=case.dtype, device=group.device)


def _bias(case: Case, columns: int, device: torch.device) -> torch.Tensor | None:
    if case.seed % 3:
        return None
    return (torch.arange(columns) % 5 - 2).to(device=device, dtype=case.dtype)


def _finished(y: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    y = y if bias is None else y + bias
    return torch.relu(y) if activation == "relu" else y


def _activation(case: Case) -> str:
    return "relu" if case.seed % 5 == 0 else "none"


def _factors(group: ut.Group, case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """x [M, K_r], w [K_r, N] of all ranks; shards of K differ."""
    m, n, k = case.shape
    inners = [k + rank % 3 for rank in range(group.size)]
    xs = [integers(m, one, case.seed + rank, case, group.device) for rank, one in enumerate(inners)]
    ws = [_weights(one, n, case.seed + 50 + rank, case, group.device) for rank, one in enumerate(inners)]
    return xs, ws


def _wide(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.double() for one in tensors]


def _all_reduce(group: ut.Group, case: Case) -> Prepared:
    xs, ws = _factors(group, case)
    bias, activation = _bias(case, case.shape[1], group.device), _activation(case)
    want = _finished(reduce.reference(_wide(xs), _wide(ws)).to(case.dtype), bias, activation)

    def call(out: torch.Tensor) -> torch.Tensor:
        got = ut.matmul_all_reduce(
            xs[group.rank], ws[group.rank], bias=bias, activation=activation, group=group, strategy=case.strategy,
            out=out,
        )  # fmt: skip
        assert got is out
        return got

    return call, want


def _reduce_scatter(group: ut.Group, case: Case) -> Prepared:
    xs, ws = _factors(group, case)
    bias, activation = _bias(case, case.shape[1], group.device), _activation(case)
    want = scatter.reference(_wide(xs), _wide(ws))[group.rank]
    want = _finished(want.to(case.dtype), bias, activation)
    return lambda out: ut.matmul_reduce_scatter(
        xs[group.rank], ws[group.rank], bias=bias, activation=activation, group=group, strategy=case.strategy, out=out
    ), want  # fmt: skip


def _all_gather(group: ut.Group, case: Case) -> Prepared:
    m, n, k = case.shape
    uneven = case.seed % 2 == 0
    rows = [max(0, m - 7 * rank) if uneven else m for rank in range(group.size)]
    xs = [integers(one, k, case.seed + rank, case, group.device) for rank, one in enumerate(rows)]
    ws = [_weights(k, n + rank % 2, case.seed + 50 + rank, case, group.device) for rank in range(group.size)]
    w = ws[group.rank]
    bias, activation = _bias(case, w.shape[1], group.device), _activation(case)
    want = _finished(gather.reference(_wide(xs), _wide(ws))[group.rank].to(case.dtype), bias, activation)
    return lambda out: ut.all_gather_matmul(
        xs[group.rank], w, rows=rows if uneven else None, bias=bias, activation=activation, group=group,
        strategy=case.strategy, out=out,
    ), want  # fmt: skip


def _all_to_all(group: ut.Group, case: Case) -> Prepared:
    m, n, k = case.shape
    chance = random.Random(case.seed)
    uneven = case.seed % 2 == 0
    matrix = [[m // group.size + (rank < m % group.size) for rank in range(group.size)] for _ in range(group.size)]
    if uneven:
        matrix = [[chance.choice((0, 1, m // 2, m)) for _ in range(group.size)] for _ in range(group.size)]
    xs = [integers(sum(row), k, case.seed + rank, case, group.device) for rank, row in enumerate(matrix)]
    ws = [_weights(k, n, case.seed + 50 + rank, case, group.device) for rank in range(group.size)]
    bias, activation = _bias(case, n, group.device), _activation(case)
    # The sender finishes its rows.
    done = [_finished((x @ w).to(case.dtype), bias, activation) for x, w in zip(_wide(xs), _wide(ws), strict=True)]
    identity = [torch.eye(n, dtype=torch.float64, device=group.device)] * group.size
    want = exchange.reference(_wide(done), identity, matrix)[group.rank].to(case.dtype)
    splits = [None, matrix[group.rank], matrix][case.seed % 2 + 1] if uneven else None
    return lambda out: ut.matmul_all_to_all(
        xs[group.rank], ws[group.rank], splits, bias=bias, activation=activation, group=group, strategy=case.strategy,
        out=out,
    ), want  # fmt: skip


OPERATORS: dict[str, Callable[[ut.Group, Case], Prepared]] = {
    "matmul_all_reduce": _all_reduce,
    "matmul_reduce_scatter": _reduce_scatter,
    "all_gather_matmul": _all_gather,
    "matmul_all_to_all": _all_to_all,
}


def strategies(lanes: Sequence[str] = LANES) -> list[str]:
    """Every grain over every lane."""
    return [f"{grain}:{lane}" for grain, lane in itertools.product(GRAINS, lanes)]
