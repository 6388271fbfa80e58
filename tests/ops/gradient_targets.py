"""Rank functions for gradients: exact against autograd of the unsharded computation, through every grain and lane.

Every rank makes the tensors of all ranks, as leaves of one graph without communication, and compares its own part of
their gradients bit for bit: small integers, whose sums no order of adding can change.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import undertow as ut
from undertow import errors
from undertow.collective.algorithms import LIBRARY
from undertow.fabric import timeline
from undertow.ops import all_gather_matmul as gather
from undertow.ops import all_to_all_matmul as arriving
from undertow.ops import matmul_all_reduce as reduce
from undertow.ops import replicated_matmul as replicated

SHAPES = ((1, 1, 1), (2, 3, 1), (5, 4, 3), (7, 13, 9), (16, 8, 12), (33, 17, 6), (40, 5, 21))  # M, N, K of a rank
STRATEGIES = tuple(
    f"{grain}:{lane}" for grain in ("serial", "chunked", "signaled", "fused") for lane in ("net", "peer", "dma")
)


@dataclass
class Case:
    """One call on all ranks: leaves, what it is without ranks, and what this rank calls."""

    leaves: list[list[torch.Tensor]]  # [argument][rank], or one for all ranks
    plain: Callable[[], list[torch.Tensor]]  # the result of every rank
    call: Callable[..., torch.Tensor]
    same_result: bool = False  # all ranks hold one result, whose gradient counts once


def _integers(chance: torch.Generator, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-2, 3, (rows, columns), generator=chance).to(dtype).requires_grad_()


def _finish(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(y + bias)


def _matmul_all_reduce(ranks: int, m: int, n: int, k: int, chance: torch.Generator, dtype: torch.dtype) -> Case:
    xs = [_integers(chance, m, k + rank % 2, dtype) for rank in range(ranks)]
    ws = [_integers(chance, k + rank % 2, n, dtype) for rank in range(ranks)]
    bias = [_integers(chance, 1, n, dtype)]

    def plain() -> list[torch.Tensor]:
        return [_finish(reduce.reference(xs, ws), bias[0][0])] * ranks

    return Case([xs, ws, bias], plain, ut.matmul_all_reduce, same_result=True)


def _matmul_reduce_scatter(ranks: int, m: int, n: int, k: int, chance: torch.Generator, dtype: torch.dtype) -> Case:
    whole = _matmul_all_reduce(ranks, m, n, k, chance, dtype)
    rows = [max(0, m - 3 * rank) for rank in range(ranks)]
    rows[0] += m - sum(rows)
    uneven = rows[0] >= 0 and k % 2 == 0

    def plain() -> list[torch.Tensor]:
        y = whole.plain()[0]
        return list(torch.split(y, rows) if uneven else torch.tensor_split(y, ranks))

    def call(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        return ut.matmul_reduce_scatter(*tensors, rows=rows if uneven else None, **options)  # type: ignore[arg-type]

    return Case(whole.leaves, plain, call)


def _all_gather_matmul(ranks: int, m: int, n: int, k: int, chance: torch.Generator, dtype: torch.dtype) -> Case:
    rows = [max(0, m - 5 * rank) for rank in range(ranks)]
    xs = [_integers(chance, one, k, dtype) for one in rows]
    ws = [_integers(chance, k, n + rank % 2, dtype) for rank in range(ranks)]
    biases = [_integers(chance, 1, n + rank % 2, dtype) for rank in range(ranks)]

    def plain() -> list[torch.Tensor]:
        return [_finish(y, bias[0]) for y, bias in zip(gather.reference(xs, ws), biases, strict=True)]

    def call(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        return ut.all_gather_matmul(*tensors, rows=rows, **options)  # type: ignore[arg-type]

    return Case([xs, ws, biases], plain, call)


def _replicated_matmul(ranks: int, m: int, n: int, k: int, chance: torch.Generator, dtype: torch.dtype) -> Case:
    x = _integers(chance, m, k, dtype)
    ws = [_integers(chance, k, n + rank % 2, dtype) for rank in range(ranks)]
    biases = [_integers(chance, 1, n + rank % 2, dtype) for rank in range(ranks)]

    def plain() -> list[torch.Tensor]:
        return [_finish(y, bias[0]) for y, bias in zip(replicated.reference(x, ws), biases, strict=True)]

    return Case([[x], ws, biases], plain, ut.replicated_matmul)


def _splits(ranks: int, m: int, k: int) -> list[list[int]]:
    chance = random.Random(m * 100 + k)
    return [[chance.choice((0, 1, m // 2, m)) for _ in range(ranks)] for _ in range(ranks)]


def _matmul_all_to_all(ranks: int, m: int, n: int, k: int, chance: torch.Generator, dtype: torch.dtype) -> Case:
    splits = _splits(ranks, m, k)
    xs = [_integers(chance, sum(row), k, dtype) for row in splits]
    ws = [_integers(chance, k, n, dtype) for _ in splits]
    biases = [_integers(chance, 1, n, dtype) for _ in splits]

    def plain() -> list[torch.Tensor]:
        made = [_finish(x @ w, bias[0]) for x, w, bias in zip(xs, ws, biases, strict=True)]
        rows = [torch.split(y, row) for y, row in zip(made, splits, strict=True)]
        return [torch.cat([row[rank] for row in rows]) for rank in range(ranks)]

    def call(x: torch.Tensor, w: torch.Tensor, **options: object) -> torch.Tensor:
        return ut.matmul_all_to_all(x, w, splits, **options)  # type: ignore[arg-type]

    return Case([xs, ws, biases], plain, call)


def _all_to_all_matmul(ranks: int, m: int, n: int, k: int, chance: torch.Generator, dtype: torch.dtype) -> Case:
    splits = _splits(ranks, m, k)
    xs = [_integers(chance, sum(row), k, dtype) for row in splits]
    ws = [_integers(chance, k, n, dtype) for _ in splits]
    biases = [_integers(chance, 1, n, dtype) for _ in splits]

    def plain() -> list[torch.Tensor]:
        return [_finish(y, bias[0]) for y, bias in zip(arriving.reference(xs, ws, splits), biases, strict=True)]

    def call(x: torch.Tensor, w: torch.Tensor, **options: object) -> torch.Tensor:
        return ut.all_to_all_matmul(x, w, splits, **options)  # type: ignore[arg-type]

    return Case([xs, ws, biases], plain, call)


Make = Callable[[int, int, int, int, torch.Generator, torch.dtype], Case]
OPERATORS: dict[str, Make] = {
    "matmul_all_reduce": _matmul_all_reduce,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "all_gather_matmul": _all_gather_matmul,
    "replicated_matmul": _replicated_matmul,
    "matmul_all_to_all": _matmul_all_to_all,
    "all_to_all_matmul": _all_to_all_matmul,
}


def _mine(tensors: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    return tensors[rank] if len(tensors) > 1 else tensors[0]


def verify(group: ut.Group, name: str, strategy: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(sum(shape))
    case = OPERATORS[name](group.size, *shape, chance, dtype)
    results = case.plain()
    weights = [torch.randint(-1, 2, one.shape, generator=chance).to(dtype) for one in results]
    if case.same_result:
        weights, results = weights[:1], results[:1]
    sum((y * weight).sum() for y, weight in zip(results, weights, strict=True)).backward()  # type: ignore[union-attr]
    where = f"{name} {strategy} {shape} {dtype} on rank {group.rank} of {group.size}"

    own = [_mine(one, group.rank).detach().clone().requires_grad_() for one in case.leaves]
    x, w, bias = own
    if (sum(shape) + len(strategy)) % 2:  # as a layer's weight, the transpose of a parameter
        own[1] = w = w.detach().mT.contiguous().mT.requires_grad_()
    laid_out: list[tuple[int, ...]] = []
    w.register_hook(lambda gradient: laid_out.append(gradient.stride()))
    y = case.call(x, w, bias=bias.view(-1), activation="relu", group=group, strategy=strategy)
    assert torch.equal(y, _mine(results, group.rank)), where
    with torch.no_grad():
        again = case.call(x, w, bias=bias.view(-1), activation="relu", group=group, strategy=strategy)
    assert torch.equal(again, y), where
    y.backward(_mine(weights, group.rank))
    for argument, got, leaves in zip(("x", "w", "bias"), own, case.leaves, strict=True):
        want = _mine(leaves, group.rank).grad
        assert got.grad is not None, f"{where}: no gradient of {argument}"
        assert torch.equal(got.grad, want), f"{where}: gradient of {argument}"
    if min(w.shape) > 1:
        assert laid_out == [w.stride()], f"{where}: the gradient of w would have to be turned round"


def exact(part: float, seed: int) -> int:
    """A part of all operators, strategies, shapes and dtypes; how many there were."""
    group, chance, count = ut.init(), random.Random(seed), 0
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    for name, strategy, shape, dtype in itertools.product(OPERATORS, (*STRATEGIES, "auto"), SHAPES, dtypes):
        if name == "all_to_all_matmul" and "signaled" in strategy:
            continue  # it has no such form
        if strategy == "auto" and shape != SHAPES[4]:
            continue
        if dtype == torch.bfloat16 and shape[0] > 16:
            continue  # sums of more products than bf16 can count
        if chance.random() < part:
            verify(group, name, strategy, shape, dtype)
            count += 1
    return count


def different_gradients() -> str:
    """The first rank wants the gradient of its weight, for which x is gathered, the others do not."""
    group = ut.init()
    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, 6, requires_grad=group.rank == 0)
    y = ut.all_gather_matmul(x, w, group=group, strategy="serial:peer")
    try:
        y.sum().backward()
    except errors.MismatchedCall as error:
        return str(error)
    return "nobody noticed"


def some_gradients_only() -> bool:
    """Where only the input, or only the weight, asks for one, nobody waits for the other."""
    group = ut.init()
    for name, make in OPERATORS.items():
        for wants in ((True, False), (False, True)):
            case = make(group.size, 6, 4, 3, torch.Generator().manual_seed(1), torch.float64)
            own = [_mine(one, group.rank).detach().clone() for one in case.leaves]
            for tensor, wanted in zip(own, wants, strict=False):
                tensor.requires_grad_(wanted)
            y = case.call(own[0], own[1], bias=own[2].view(-1), activation="none", group=group, strategy="chunked:peer")
            y.sum().backward()
            assert [one.grad is not None for one in own] == [*wants, False], name
    return poisoned_gradients(group)


def poisoned_gradients(group: ut.Group) -> bool:
    """Were the backward pass aborted, nothing made of rows that came from others would look like a gradient."""
    fabric, aborted = group.fabric, [False]

    def poison(*made: torch.Tensor) -> None:
        for one in made if aborted[0] else ():
            one.fill_(float("nan"))

    fabric.poison_if_aborted = poison  # type: ignore[method-assign]
    of_others = {"matmul_reduce_scatter": (1, 2), "all_gather_matmul": (1,), "matmul_all_to_all": (1, 2)}
    for (name, which), grain in itertools.product(of_others.items(), ("serial", "chunked", "signaled")):
        case = OPERATORS[name](group.size, 6, 4, 3, torch.Generator().manual_seed(1), torch.float64)
        own = [_mine(one, group.rank).detach().clone().requires_grad_() for one in case.leaves]
        y = case.call(own[0], own[1], bias=own[2].view(-1), activation="none", group=group, strategy=f"{grain}:peer")
        aborted[0] = True
        y.sum().backward()
        aborted[0] = False
        for argument in which:
            found = own[argument].grad
            assert found is not None and bool(found.isnan().all()), f"{name} {grain}: argument {argument}"
    del fabric.poison_if_aborted  # type: ignore[method-assign]
    return True


def residual_and_options() -> bool:
    """The residual gets its gradient; a plan and a program serve the forward pass."""
    group = ut.init()
    x, w = torch.ones(8, 3).requires_grad_(), torch.ones(3, 5)
    residual = torch.ones(8, 5).requires_grad_()
    want = 3 * group.size + 1.0
    y = ut.matmul_all_reduce(x, w, residual=residual, strategy="serial:peer")
    assert torch.equal(y, torch.full((8, 5), want))
    y.sum().backward()
    assert residual.grad is not None
    assert torch.equal(residual.grad, torch.ones(8, 5))
    found = ut.explain()
    assert found is not None
    planned = ut.matmul_all_reduce(x, w, plan=found.plan)
    program = ut.matmul_all_reduce(x, w, program=LIBRARY["ring"])
    for one in (planned, program):
        assert torch.equal(one, torch.full((8, 5), want - 1))
        assert torch.equal(torch.autograd.grad(one.sum(), x)[0], torch.full((8, 3), 5.0))
    return True


def all_slopes() -> dict[str, float]:
    return {name: directional(name) for name in OPERATORS}


def directional(name: str) -> float:
    """The largest relative difference between gradients and central differences of the loss of all ranks, in fp64."""
    group, worst = ut.init(), 0.0
    case = OPERATORS[name](group.size, 7, 5, 4, torch.Generator().manual_seed(3), torch.float64)
    chance = torch.Generator().manual_seed(group.rank)
    shared = torch.Generator().manual_seed(99)
    own = [
        torch.randn(_mine(one, group.rank).shape, generator=chance if len(one) > 1 else shared, dtype=torch.float64)
        for one in case.leaves
    ]
    once = {index for index, one in enumerate(case.leaves) if len(one) == 1}  # the same on all ranks

    def loss(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        x, w, bias = tensors
        y = case.call(x, w, bias=bias.view(-1), activation="silu", group=group, strategy="chunked:peer")
        return torch.sin(y).sum() / (group.size if case.same_result else 1)

    for _ in range(3):
        ways = [torch.randn(one.shape, generator=chance, dtype=torch.float64) for one in own]
        for index in once:
            ways[index] = torch.randn(own[index].shape, generator=shared, dtype=torch.float64)
        leaves = [one.clone().requires_grad_() for one in own]
        (loss(leaves) * (group.size if case.same_result else 1)).backward()
        slope = 0.0
        for index, (leaf, way) in enumerate(zip(leaves, ways, strict=True)):
            assert leaf.grad is not None
            slope += float((leaf.grad * way).sum()) / (group.size if index in once else 1)
        step = 1e-6
        ends = [float(loss([o + sign * step * way for o, way in zip(own, ways, strict=True)])) for sign in (1, -1)]
        found = group.exchange([slope, (ends[0] - ends[1]) / (2 * step)], "a slope")
        analytic, numeric = (sum(one[part] for one in found) for part in (0, 1))
        worst = max(worst, abs(analytic - numeric) / max(1.0, abs(numeric)))
    return worst


def hidden(name: str, strategy: str) -> float:
    """Of one backward pass over an emulated link: the part of the copies' time during which a matmul ran, on rank 0."""
    group = ut.init()
    case = OPERATORS[name](group.size, 768, 256, 384, torch.Generator().manual_seed(1), torch.float32)
    own = [_mine(one, group.rank).detach().clone().requires_grad_() for one in case.leaves]
    y = case.call(own[0], own[1], bias=own[2].view(-1), activation="none", group=group, strategy=strategy)
    weights = torch.ones_like(y)
    y.backward(weights, retain_graph=True)
    with timeline.recording() as recorder:
        y.backward(weights)
    found = recorder.timeline()
    return found.overlap("dma", "compute") / found.busy("dma")


def all_hidden() -> dict[tuple[str, str], float]:
    moving = [name for name in OPERATORS if name != "matmul_all_reduce"]
    return {(name, strategy): hidden(name, strategy) for name in moving for strategy in ("chunked:dma", "serial:dma")}


def twice() -> bool:
    """matmul_all_reduce can be differentiated again: its gradient is made of operations that can."""
    group = ut.init()
    chance = torch.Generator().manual_seed(7)
    xs = [torch.randint(-2, 3, (4, 6), generator=chance).double().requires_grad_() for _ in range(group.size)]
    ps = [torch.randint(-2, 3, (5, 6), generator=chance).double().requires_grad_() for _ in range(group.size)]
    for turned in (True, False):

        def again(y: torch.Tensor, x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first = torch.autograd.grad(y.square().sum(), (x, p), create_graph=True)
            return torch.autograd.grad(sum(one.square().sum() for one in first), (x, p))

        x, p = xs[group.rank], ps[group.rank]
        ws = [one.t() if turned else one.t().contiguous() for one in ps]
        others = sum(
            a.detach() @ b.detach() for one, (a, b) in enumerate(zip(xs, ws, strict=True)) if one != group.rank
        )
        want = again(x @ ws[group.rank] + others, x, p)
        got = again(ut.matmul_all_reduce(x, ws[group.rank], group=group, strategy="serial"), x, p)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    return True
