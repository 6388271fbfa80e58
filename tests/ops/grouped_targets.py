"""Rank functions for grouped weights: exact against the plain loops, gradients against autograd, and refusals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

import undertow as ut
from undertow.errors import InvalidArgument, StrategyUnavailable, UndertowError
from undertow.ops import all_to_all_matmul as arriving
from undertow.ops import matmul_all_to_all as leaving

Sizes = list[list[list[int]]]
LANES = ("net", "peer", "dma")
STRATEGIES = {
    "leaving": (*(f"{grain}:{lane}" for grain in ("serial", "chunked", "signaled") for lane in LANES), "fused:peer"),
    "arriving": (*(f"{grain}:{lane}" for grain in ("serial", "chunked") for lane in LANES), "fused:peer"),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NON_ZERO = 16


@dataclass(frozen=True)
class Case:
    operator: str  # leaving: matmul_all_to_all, arriving: all_to_all_matmul
    strategy: str
    dtype: torch.dtype
    experts: int
    rows: int  # of a block, at most
    n: int
    k: int
    seed: int

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.operator} {self.strategy} {name} E {self.experts} rows {self.rows} N {self.n} K {self.k}"


def sizes_of(case: Case, ranks: int) -> Sizes:
    """Uneven blocks, many of them empty; now and then an expert or a rank that gets nothing at all."""
    chance = random.Random(case.seed)
    choices = (0, 0, 1, case.rows // 2, case.rows, case.rows)
    empty_expert = chance.randrange(2 * case.experts)
    empty_rank = chance.randrange(3 * ranks)
    return [
        [
            [0 if empty_expert == one or empty_rank == to else chance.choice(choices) for one in range(case.experts)]
            for to in range(ranks)
        ]
        for _ in range(ranks)
    ]


@lru_cache(128)
def _drawn(experts: int, n: int, k: int, seed: int, rows: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], ...]:
    """x, w and bias of all ranks as small integers: drawing them takes longer than a call on a GPU."""
    made = torch.Generator().manual_seed(seed % (1 << 31))
    drawn = []
    for count in rows:
        x = torch.randint(-1, 2, (count, k), generator=made)
        if k > _NON_ZERO:
            x = x * (torch.rand(x.shape, generator=made).argsort(1) < _NON_ZERO)
        w = torch.randint(-1, 2, (experts, k, n), generator=made)
        bias = torch.randint(-2, 3, (experts, n), generator=made)
        drawn.append((x.to(torch.int8), w.to(torch.int8), bias.to(torch.int8)))
    return tuple(drawn)


def tensors(
    case: Case, sizes: Sizes, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """x, w and bias of all ranks: -1, 0, 1 with few products that are not zero; every other weight transposed."""
    xs, ws, biases = [], [], []
    for drawn in _drawn(case.experts, case.n, case.k, case.seed, tuple(sum(map(sum, row)) for row in sizes)):
        x, w, bias = (one.to(device, case.dtype) for one in drawn)
        xs.append(x)
        ws.append(w.mT.contiguous().mT if case.seed % 2 else w)
        biases.append(bias)
    return xs, ws, biases


def expected(case: Case, sizes: Sizes, xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    home = leaving if case.operator == "leaving" else arriving
    wide = [[one.double() for one in some] for some in (xs, ws)]
    return [one.to(case.dtype) for one in home.grouped_reference(*wide, sizes)]


def verify(group: ut.Group, case: Case) -> None:
    sizes = sizes_of(case, group.size)
    xs, ws, biases = tensors(case, sizes, group.device)
    finished = case.seed % 3 == 0
    if finished:  # the rank that multiplies finishes: a column of ones and a row of biases say so in the reference
        xs_b = [torch.cat([x, x.new_ones(len(x), 1)], 1) for x in xs]
        ws_b = [torch.cat([w, bias[:, None]], 1) for w, bias in zip(ws, biases, strict=True)]
        want = torch.relu(expected(case, sizes, xs_b, ws_b)[group.rank])
    else:
        want = expected(case, sizes, xs, ws)[group.rank]
    out = torch.full(want.shape, float("nan"), dtype=case.dtype, device=group.device)
    call = ut.matmul_all_to_all if case.operator == "leaving" else ut.all_to_all_matmul
    told = sizes if case.seed % 2 else sizes[group.rank]
    got = call(
        xs[group.rank], ws[group.rank], group_sizes=told, bias=biases[group.rank] if finished else None,
        activation="relu" if finished else "none", group=group, strategy=case.strategy, out=out,
    )  # fmt: skip
    assert got is out
    assert got.shape == want.shape, f"{case}: {list(got.shape)} instead of {list(want.shape)}"
    wrong = int((got != want).sum())
    assert wrong == 0, f"{case}, rank {group.rank} of {group.size}: {wrong} of {want.numel()} elements are wrong"


def exact(seed: int, count: int) -> int:
    """Every strategy at least once, dtypes and shapes at random; how many cases there were."""
    group, chance = ut.init(), random.Random(seed)
    pairs = [(name, strategy) for name, strategies in STRATEGIES.items() for strategy in strategies]
    for number in range(count):
        name, strategy = pairs[number % len(pairs)]
        rows, n, k = chance.choice((1, 3, 8, 17, 40)), chance.choice((1, 7, 16, 33)), chance.choice((1, 5, 24))
        experts, dtype = chance.choice((1, 2, 3, 5)), chance.choice(DTYPES)
        verify(group, Case(name, strategy, dtype, experts, rows, n, k, chance.randrange(1 << 30)))
    return count


def gradients(seed: int, count: int) -> int:
    """dx, dw and dbias, bit for bit, against autograd of the plain loops: fp64 and integers."""
    group, chance = ut.init(), random.Random(seed)
    pairs = [(name, strategy) for name, strategies in STRATEGIES.items() for strategy in strategies]
    for number in range(count):
        name, strategy = pairs[number % len(pairs)]
        case = Case(name, strategy, torch.float64, chance.choice((1, 2, 3)), chance.choice((1, 4, 9)),
                    chance.choice((1, 6, 13)), chance.choice((1, 5, 8)), chance.randrange(1 << 30))  # fmt: skip
        verify_gradient(group, case)
    return count


def verify_gradient(group: ut.Group, case: Case) -> None:
    sizes = sizes_of(case, group.size)
    xs, ws, biases = ([one.requires_grad_() for one in some] for some in tensors(case, sizes, group.device))
    rank = group.rank
    whole = [torch.cat([x, x.new_ones(len(x), 1)], 1) for x in xs]
    heavy = [torch.cat([w, bias[:, None]], 1) for w, bias in zip(ws, biases, strict=True)]
    home = leaving if case.operator == "leaving" else arriving
    plain = [torch.relu(y) for y in home.grouped_reference(whole, heavy, sizes)]
    weights = [(torch.arange(y.numel(), device=y.device) % 3 - 1).to(y.dtype).view(y.shape) for y in plain]
    loss = sum((y * one).sum() for y, one in zip(plain, weights, strict=True))
    wanted = torch.autograd.grad(loss, [xs[rank], ws[rank], biases[rank]], allow_unused=True)
    mine = [one.detach().clone().requires_grad_() for one in (xs[rank], ws[rank], biases[rank])]
    call = ut.matmul_all_to_all if case.operator == "leaving" else ut.all_to_all_matmul
    y = call(
        mine[0], mine[1], group_sizes=sizes[rank], bias=mine[2], activation="relu", group=group, strategy=case.strategy
    )  # fmt: skip
    assert torch.equal(y.detach(), plain[rank].detach()), str(case)
    (y * weights[rank]).sum().backward()
    for what, got, want in zip(("x", "w", "bias"), mine, wanted, strict=True):
        assert got.grad is not None, f"{case}: no gradient of {what}"
        assert torch.equal(got.grad, torch.zeros_like(got) if want is None else want), f"{case}: gradient of {what}"


def refusals() -> list[str]:
    """One sentence for each wrong argument; the group goes on."""
    group = ut.init()
    x, w = torch.ones(4, 3), torch.ones(2, 3, 5)
    good = [[1, 1], [2, 0]]
    said = []
    calls: list[Callable[[], object]] = [
        lambda: ut.matmul_all_to_all(x, w, group=group),
        lambda: ut.matmul_all_to_all(x, w, [2, 2], group_sizes=good, group=group),
        lambda: ut.matmul_all_to_all(x, w[0], group_sizes=good, group=group),
        lambda: ut.matmul_all_to_all(x, w, group_sizes=[[1, 1, 0], [2, 0, 0]], group=group),
        lambda: ut.matmul_all_to_all(x, w, group_sizes=[[1, 1], [3, 0]], group=group),
        lambda: ut.matmul_all_to_all(x, w, group_sizes=[[-1, 3], [2, 0]], group=group),
        lambda: ut.all_to_all_matmul(x, w, group_sizes=good, bias=torch.ones(5), group=group),
        lambda: ut.all_to_all_matmul(x, w[:0], group_sizes=[[], []], group=group),
        lambda: ut.all_to_all_matmul(x, w, group_sizes=good, group=group, strategy="signaled"),
        lambda: ut.all_to_all_matmul(x, torch.ones(2 + group.rank, 3, 5), group_sizes=[
            [1, 1, *[0] * group.rank], [2, 0, *[0] * group.rank]], group=group),
    ]  # fmt: skip
    for call in calls:
        try:
            call()
            said.append("not refused")
        except (InvalidArgument, StrategyUnavailable) as error:
            said.append(str(error))
        except UndertowError as error:
            said.append(f"{type(error).__name__}: {error}")
    y = ut.matmul_all_to_all(x, w, group_sizes=torch.tensor(good), group=group)
    assert torch.equal(y, torch.full((4, 5), 3.0))
    return said


def compiled() -> bool:
    """As one graph: there and back through torch.compile, gradients too, and torch's own check of the operators."""
    from undertow.ops import library

    group = ut.init()
    case = Case("leaving", "chunked:peer", torch.float64, 2, 5, 4, 3, 77)
    sizes = sizes_of(case, group.size)
    home = [list(column) for column in zip(*sizes, strict=True)]
    xs, ws, _ = tensors(case, sizes, group.device)
    other = torch.arange(24, dtype=torch.float64).view(2, 4, 3) % 5 - 2

    def both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        there = ut.all_to_all_matmul(x, w, group_sizes=sizes, group=group.name, strategy="chunked:peer")
        return ut.matmul_all_to_all(there, other, group_sizes=home, group=group.name, strategy="chunked:peer")

    results = []
    for call in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        x, w = (one.detach().clone().requires_grad_() for one in (xs[group.rank], ws[group.rank]))
        y = call(x, w)
        y.sum().backward()
        results.append((y.detach(), x.grad, w.grad))
    counts = [one for row in sizes for block in row for one in block]
    x, w = (one.detach().clone().requires_grad_() for one in (xs[group.rank], ws[group.rank]))
    for operator, last in ((library.matmul_all_to_all, ("",)), (library.all_to_all_matmul, ())):
        torch.library.opcheck(operator, (x, w, None, counts, group.name, "chunked:peer", *last))
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))
