"""Rank functions for rows_all_reduce: against its reference over the weights of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

import undertow as ut
from undertow.errors import UndertowError
from undertow.fabric import timeline
from undertow.ops.rows_all_reduce import Tensors, reference, rows_all_reduce

LANES = ("net", "peer", "dma")


def _gated(rows: Tensors, weights: Tensors) -> torch.Tensor:
    """Two matmuls with something between them, which needs whole rows of two arguments, and one that has no slope."""
    (x, share, sign), (up, down) = rows, weights
    return (torch.relu(x @ up) * share[:, :1]) @ down * sign[:, None]


def _arguments(m: int, ranks: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Small integers, whose products add up exactly; the last rank has other inner sizes than the first."""
    chance = torch.Generator().manual_seed(m)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=chance).to(dtype)

    sign = 1 - 2 * (torch.arange(m) % 2)
    return [whole(m, 5), whole(m, 2), sign], [[whole(5, 3 + rank), whole(3 + rank, 7)] for rank in range(ranks)]


def exact(ms: Sequence[int]) -> bool:
    """Bit for bit, and gradients too, however many rows there are and whatever moves them."""
    group = ut.init()
    for m in ms:
        rows, weights = _arguments(m, group.size, torch.float64)
        for one in (*rows[:2], *[weight for mine in weights for weight in mine]):
            one.requires_grad_()
        want = reference(_gated, rows, weights)
        slope = torch.arange(want.numel(), dtype=want.dtype).view_as(want) % 3
        leaves = [*rows[:2], *weights[group.rank]]
        slopes = torch.autograd.grad(want, leaves, slope, allow_unused=True)
        for strategy in ("auto", *(f"{grain}:{lane}" for grain in ("serial", "chunked") for lane in LANES)):
            options = {"strategy": strategy}
            with torch.no_grad():
                assert torch.equal(rows_all_reduce(_gated, rows, weights[group.rank], 7, **options), want)  # type: ignore[arg-type]
            got = rows_all_reduce(_gated, rows, weights[group.rank], 7, **options)  # type: ignore[arg-type]
            assert torch.equal(got, want)
            found = torch.autograd.grad(got, leaves, slope)
            for one, other in zip(found, slopes, strict=True):
                assert torch.equal(one, torch.zeros_like(one) if other is None else other), (m, strategy)
    return True


def what_auto_runs() -> tuple[str, str]:
    group = ut.init()
    rows, weights = _arguments(90, group.size, torch.float32)
    rows_all_reduce(_gated, rows, weights[group.rank], 7)
    explanation = ut.explain()
    assert explanation is not None
    return explanation.plan.name, explanation.choice.reason


def some_wanted() -> bool:
    """Gradients of the weights alone; of 16-bit weights over several parts, rounded once; as often as torch lets."""
    group = ut.init()
    rows, weights = _arguments(9, group.size, torch.bfloat16)
    mine = [one.requires_grad_() for one in weights[group.rank]]
    wide = [[one.detach().double().requires_grad_() for one in mine], [rows[0].double(), rows[1].double(), rows[2]]]
    want = torch.autograd.grad(_gated(wide[1], wide[0]).sum(), wide[0])
    y = rows_all_reduce(_gated, rows, mine, 7, strategy="chunked")
    for last in (False, True):
        found = torch.autograd.grad(y.sum(), mine, retain_graph=not last)
        assert all(torch.equal(one, other.bfloat16()) for one, other in zip(found, want, strict=True))
    try:
        torch.autograd.grad(y.sum(), mine)
    except RuntimeError as error:
        return "second time" in str(error)
    return False


def checkpointed() -> bool:
    """Activation checkpointing of both kinds: the same gradients, and nothing is kept that it would drop."""
    group = ut.init()
    rows, weights = _arguments(12, group.size, torch.float64)
    leaves = [one.requires_grad_() for one in (*rows[:2], *weights[group.rank])]

    def block(*given: torch.Tensor) -> torch.Tensor:
        y = rows_all_reduce(_gated, given[:3], given[3:], 7, strategy="chunked")
        return torch.sin(y)

    arguments, found = (*rows, *weights[group.rank]), []
    for reentrant in (None, False, True):
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one, kept=kept: kept.append(one) or one, lambda one: one):  # type: ignore[misc]
            y = block(*arguments) if reentrant is None else checkpoint(block, *arguments, use_reentrant=reentrant)
        assert reentrant is None or len(kept) <= len(arguments), [tuple(one.shape) for one in kept]
        found.append(torch.autograd.grad(y.sum(), leaves) if not reentrant else _accumulated(y, leaves))
    return all(torch.equal(one, first) for other in found for one, first in zip(other, found[0], strict=True))


def _accumulated(y: torch.Tensor, leaves: Tensors) -> list[torch.Tensor | None]:
    """The reentrant kind of checkpointing wants `backward`."""
    y.sum().backward()
    return [one.grad for one in leaves]


def hidden(strategy: str) -> tuple[float, float]:
    """Forward, and backward: the part of the copies' time over an emulated link during which rows were computed."""
    group = ut.init()
    chance = torch.Generator().manual_seed(group.rank)
    weights = [torch.randn(shape, generator=chance).requires_grad_() for shape in ((256, 768), (768, 256))]
    rows = [torch.randn(768, 256).requires_grad_(), torch.randn(768, 2).requires_grad_(), torch.ones(768)]
    found = []
    rows_all_reduce(_gated, rows, weights, 256, strategy=strategy)
    with timeline.recording() as forward:
        y = rows_all_reduce(_gated, rows, weights, 256, strategy=strategy)
    slope = torch.ones_like(y)
    y.backward(slope, retain_graph=True)
    with timeline.recording() as backward:
        y.backward(slope)
    for one in (forward.timeline(), backward.timeline()):
        found.append(one.overlap("dma", "compute") / one.busy("dma"))
    return found[0], found[1]


def odd_rows() -> bool:
    """Rows of three dimensions, and rows that lie the other way round; a part that has no slope."""
    group = ut.init()
    w = torch.arange(15, dtype=torch.float64).view(5, 3).requires_grad_()
    for x in (
        torch.ones(6, 2, 5).double(),
        torch.ones(5, 2, 6).double().permute(2, 1, 0),
        torch.ones(0, 2, 5).double(),
    ):
        for strategy in ("serial", "chunked"):
            given = x.clone(memory_format=torch.preserve_format).requires_grad_()
            y = rows_all_reduce(lambda r, v: (r[0] @ v[0]).sum(1), [given], [w], 3, strategy=strategy)
            (dx,) = torch.autograd.grad(y.sum(), [given])
            assert torch.equal(dx, (group.size * w.detach().sum(1)).expand_as(x))
    flat = torch.ones(5, 6).double().t().requires_grad_()
    y = rows_all_reduce(lambda r, v: r[0] @ v[0], [flat], [w], 3, strategy="serial")
    (dx,) = torch.autograd.grad(y.sum(), [flat])
    assert torch.equal(dx, (group.size * w.detach().sum(1)).expand_as(flat))

    def some(rows: Tensors, weights: Tensors) -> torch.Tensor:
        if bool(rows[1][0] == 0):
            return torch.zeros(len(rows[0]), 3).double()
        return rows[0] @ weights[0]

    x = torch.ones(8, 5).double().requires_grad_()
    y = rows_all_reduce(some, [x, torch.arange(8) // 4], [w], 3, strategy="chunked")
    dx, dw = torch.autograd.grad(y.sum(), [x, w])
    assert bool((dx[:2] == 0).all())
    assert torch.equal(dx[-1], group.size * w.detach().sum(1))
    return bool(dw.isfinite().all())


def refused_computations() -> list[str]:
    """A group each, as what is wrong in the middle of a call may end it."""
    group = ut.init()
    x, w = torch.ones(4, 5).requires_grad_(), torch.ones(5, 3).requires_grad_()

    def changes(rows: Tensors, weights: Tensors) -> torch.Tensor:
        h = torch.sigmoid(rows[0] @ weights[0])
        z = h * 2
        h.add_(1)
        return z

    said = []
    for compute in (changes, lambda rows, weights: (rows[0] @ weights[0])[:, :1]):
        try:
            rows_all_reduce(compute, [x], [w], 3, group=group, strategy="serial")
            said.append("nothing")
        except UndertowError as error:
            said.append(str(error))
    return said


def wanted_by_one() -> str:
    """Rank 0 wants gradients of rows, the others do not: its backward sum must not meet their next result."""
    group = ut.init()
    w = torch.ones(5, 7)
    x = torch.ones(3, 5, requires_grad=group.rank == 0)

    def layer(given: torch.Tensor) -> torch.Tensor:
        return rows_all_reduce(lambda r, v: r[0] @ v[0], [given], [w.clone().requires_grad_()], 7, strategy="serial")

    try:
        y = layer(x)
        if group.rank == 0:
            y.sum().backward()
        layer(x)
        group.barrier()
    except UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
