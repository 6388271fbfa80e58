"""The operators as torch knows them: custom operators with a shape rule and a gradient each.

| operator | what its gradient runs | what moves beneath what |
|---|---|---|
| matmul_all_reduce | two matmuls | nothing moves: every rank holds the whole dz |
| replicated_matmul | matmul_all_reduce(dz, w^T) | the sum of dx, beneath its own matmul and that of dw |
| matmul_reduce_scatter | all_gather_matmul(dz, w^T) | the gather of dz, once, beneath the matmuls of dx and dw |
| all_gather_matmul | matmul_reduce_scatter(dz, w^T) | a second gather of x beneath the matmul of dx, dx beneath dw |
| all_gather_matmul_whole | the same, and the sum of the rows' own gradient | as above; that sum follows, by itself |
| matmul_all_to_all | all_to_all_matmul(dz, w^T) | the rows of dz, beneath the matmuls of dx and dw |
| all_to_all_matmul | matmul_all_to_all(dz, w^T) | the rows of dx, beneath their own matmul and that of dw |

A result that every rank holds has a gradient that every rank holds: all ranks compute the same loss, and each passes
the same dz back. Operators carry names (`differentiable.py`), so a traced graph holds no object of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..fabric.registry import named
from ..plan.tokens import Tokens
from .grouped import unflattened
from .operands import check_factors, like_weight

Function = TypeVar("Function", bound=Callable[..., Any])


def _operator(name: str) -> Callable[[Function], Any]:
    return torch.library.custom_op(f"undertow::{name}", mutates_args=())


def _shape_of(name: str) -> Callable[[Function], Function]:
    """What the operator gives, without data: for tracers."""

    def register(fake: Function) -> Function:
        torch.library.register_fake(f"undertow::{name}", fake)
        return fake

    return register


# -- forward -----------------------------------------------------------------------------------------------------------


@_operator("matmul_all_reduce")
def matmul_all_reduce(
    x: Tensor, w: Tensor, bias: Tensor | None, group: str, strategy: str, plan: str, program: str
) -> Tensor:
    from . import matmul_all_reduce as home
    from .differentiable import held_plan, held_program

    on = named(group)
    return home.call(x, w, bias, "none", None, None, on, strategy, held_plan(plan), held_program(program))


@_shape_of("matmul_all_reduce")
def _matmul_all_reduce_shape(
    x: Tensor, w: Tensor, bias: Tensor | None, group: str, strategy: str, plan: str, program: str
) -> Tensor:
    check_factors(x, w, named(group))
    return x.new_empty(x.shape[0], w.shape[1])


@_operator("replicated_matmul")
def replicated_matmul(x: Tensor, w: Tensor, bias: Tensor | None, group: str, strategy: str) -> Tensor:
    check_factors(x, w, named(group))
    return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)


@_shape_of("replicated_matmul")
def _replicated_matmul_shape(x: Tensor, w: Tensor, bias: Tensor | None, group: str, strategy: str) -> Tensor:
    check_factors(x, w, named(group))
    return x.new_empty(x.shape[0], w.shape[1])


@_operator("matmul_reduce_scatter")
def matmul_reduce_scatter(
    x: Tensor, w: Tensor, bias: Tensor | None, rows: Sequence[int] | None, group: str, strategy: str, plan: str,
    program: str,
) -> Tensor:  # fmt: skip
    from . import matmul_reduce_scatter as home
    from .differentiable import held_plan, held_program

    on = named(group)
    return home.call(x, w, rows, bias, "none", None, None, on, strategy, held_plan(plan), held_program(program))


@_shape_of("matmul_reduce_scatter")
def _matmul_reduce_scatter_shape(
    x: Tensor, w: Tensor, bias: Tensor | None, rows: Sequence[int] | None, group: str, strategy: str, plan: str,
    program: str,
) -> Tensor:  # fmt: skip
    on = named(group)
    check_factors(x, w, on)
    m = x.shape[0]
    mine = m // on.size + (1 if on.rank < m % on.size else 0) if rows is None else rows[on.rank]
    return x.new_empty(mine, w.shape[1])


@_operator("all_gather_matmul")
def all_gather_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None, rows: Sequence[int] | None, group: str, strategy: str, plan: str
) -> Tensor:
    from . import all_gather_matmul as home
    from .differentiable import held_plan

    return home.call(x, w, rows, bias, "none", named(group), strategy, held_plan(plan))


@_shape_of("all_gather_matmul")
def _all_gather_matmul_shape(
    x: Tensor, w: Tensor, bias: Tensor | None, rows: Sequence[int] | None, group: str, strategy: str, plan: str
) -> Tensor:
    on = named(group)
    check_factors(x, w, on)
    return x.new_empty(x.shape[0] * on.size if rows is None else sum(rows), w.shape[1])


@_operator("all_gather_matmul_whole")
def all_gather_matmul_whole(
    x: Tensor, w: Tensor, bias: Tensor | None, rows: Sequence[int] | None, group: str, strategy: str, plan: str
) -> tuple[Tensor, Tensor]:
    """The product, and the rows of all ranks."""
    from . import further
    from .differentiable import held_plan

    on = named(group)
    found, whole = further.call(x, [w], True, rows, [bias], ["none"], on, strategy, held_plan(plan), [None])
    assert whole is not None
    return found[0], whole


@_shape_of("all_gather_matmul_whole")
def _all_gather_matmul_whole_shape(
    x: Tensor, w: Tensor, bias: Tensor | None, rows: Sequence[int] | None, group: str, strategy: str, plan: str
) -> tuple[Tensor, Tensor]:
    y = _all_gather_matmul_shape(x, w, bias, rows, group, strategy, plan)
    return y, x.new_empty(y.shape[0], x.shape[1])


@_operator("all_gather_matmuls")
def all_gather_matmuls(
    x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], gathered: bool, rows: Sequence[int] | None,
    group: str, strategy: str,
) -> list[Tensor]:  # fmt: skip
    """The product with each weight and, if `gathered`, the rows of all ranks behind them. For passes of a compiler,
    which come after gradients: it has none."""
    from . import further

    usual, outs = ["none"] * len(ws), [None] * len(ws)
    found, whole = further.call(x, ws, gathered, rows, biases, usual, named(group), strategy, None, outs)
    return found if whole is None else [*found, whole]


@_shape_of("all_gather_matmuls")
def _all_gather_matmuls_shape(
    x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], gathered: bool, rows: Sequence[int] | None,
    group: str, strategy: str,
) -> list[Tensor]:  # fmt: skip
    found = [_all_gather_matmul_shape(x, w, None, rows, group, strategy, "") for w in ws]
    return [*found, x.new_empty(found[0].shape[0], x.shape[1])] if gathered else found


@_operator("matmul_all_to_all")
def matmul_all_to_all(
    x: Tensor, w: Tensor, bias: Tensor | None, splits: Sequence[int] | None, group: str, strategy: str, plan: str
) -> Tensor:
    from . import matmul_all_to_all as home
    from .differentiable import held_plan

    on = named(group)
    return home.call(x, w, tokens_of(splits, x, w, on.size), bias, "none", on, strategy, held_plan(plan))


@_shape_of("matmul_all_to_all")
def _matmul_all_to_all_shape(
    x: Tensor, w: Tensor, bias: Tensor | None, splits: Sequence[int] | None, group: str, strategy: str, plan: str
) -> Tensor:
    on = named(group)
    check_factors(x, w, on, grouped=True)
    return x.new_empty(_received(splits, x, w, on.rank, on.size), w.shape[-1])


@_operator("all_to_all_matmul")
def all_to_all_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None, splits: Sequence[int] | None, group: str, strategy: str
) -> tuple[Tensor, Tensor]:
    """The product, and the rows that came: the gradient of w needs them, and to send them again would cost as much."""
    from . import all_to_all_matmul as home

    on = named(group)
    return home.call(x, w, tokens_of(splits, x, w, on.size), bias, "none", on, strategy)


@_shape_of("all_to_all_matmul")
def _all_to_all_matmul_shape(
    x: Tensor, w: Tensor, bias: Tensor | None, splits: Sequence[int] | None, group: str, strategy: str
) -> tuple[Tensor, Tensor]:
    on = named(group)
    check_factors(x, w, on, grouped=True)
    rows = _received(splits, x, w, on.rank, on.size)
    return x.new_empty(rows, w.shape[-1]), x.new_empty(rows, x.shape[1])


def tokens_of(splits: Sequence[int] | None, x: Tensor, w: Tensor, size: int) -> Tokens:
    """Counts of all ranks, which torch carries as one list: sender, receiver and, of grouped weights, expert."""
    return unflattened(splits, x.shape[0], size, w.shape[0] if w.dim() == 3 else 1)


def _received(splits: Sequence[int] | None, x: Tensor, w: Tensor, rank: int, size: int) -> int:
    return sum(row[rank] for row in tokens_of(splits, x, w, size).matrix)


# -- backward ----------------------------------------------------------------------------------------------------------
# dx, dw and, where rows of dz come from others, dbias; what nobody asked for is empty.


@_operator("replicated_matmul_backward")
def replicated_matmul_backward(
    dz: Tensor, x: Tensor, w: Tensor, wanted: Sequence[bool], group: str, strategy: str
) -> tuple[Tensor, Tensor]:
    from . import matmul_all_reduce as home
    from .beside import Beside, multiplied

    dw = like_weight(w) if wanted[1] else w.new_empty(0)
    if not wanted[0]:
        if wanted[1]:
            multiplied(x, dz, dw)
        return x.new_empty(0), dw
    beside = Beside(lambda: multiplied(x, dz, dw)) if wanted[1] else None
    on = named(group)
    return home.call(dz, w.t(), None, "none", None, None, on, strategy, None, beside=beside, alone=False), dw


@_operator("matmul_reduce_scatter_backward")
def matmul_reduce_scatter_backward(
    dz: Tensor, x: Tensor, w: Tensor, rows: Sequence[int] | None, wanted: Sequence[bool], group: str, strategy: str
) -> tuple[Tensor, Tensor, Tensor]:
    from . import all_gather_matmul as home
    from .beside import Arriving
    from .matmul_reduce_scatter import shares

    on = named(group)
    arriving = Arriving(x if wanted[1] else x[:, :0], w, bias=wanted[2])
    dx = home.call(dz, w.t(), shares(rows, x.shape[0], on.size), None, "none", on, strategy, None, arriving=arriving)
    empty = x.new_empty(0)
    return dx, arriving.weight if wanted[1] else empty, arriving.bias if wanted[2] else empty.clone()


@_operator("all_gather_matmul_backward")
def all_gather_matmul_backward(
    dz: Tensor, x: Tensor, w: Tensor, rows: Sequence[int] | None, wanted: Sequence[bool], group: str, strategy: str
) -> tuple[Tensor, Tensor]:
    from ..collective.operators import all_gather
    from . import matmul_reduce_scatter as home
    from .all_gather_matmul import row_counts
    from .beside import gathered_again, multiplied

    on = named(group)
    counts = row_counts(rows, x.shape[0], on)
    dw = like_weight(w) if wanted[1] else w.new_empty(0)
    if not wanted[0]:
        if wanted[1]:
            multiplied(all_gather(x.contiguous(), rows=counts, group=on), dz, dw)
        return x.new_empty(0), dw
    beside = gathered_again(x, counts, on.rank, dz, dw) if wanted[1] else None
    options: dict[str, Any] = {"beside": beside, "alone": False}  # ranks may want different gradients
    return home.call(dz, w.t(), counts, None, "none", None, None, on, strategy, None, **options), dw


@_operator("all_gather_matmul_whole_backward")
def all_gather_matmul_whole_backward(
    dz: Tensor, dwhole: Tensor, x: Tensor, w: Tensor, rows: Sequence[int] | None, wanted: Sequence[bool], group: str,
    strategy: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As that of the product alone; to dx is added what all ranks have for the rows of this one, dwhole [M, K]."""
    from ..collective.operators import reduce_scatter
    from .all_gather_matmul import row_counts

    dx, dw = all_gather_matmul_backward(dz, x, w, rows, wanted, group, strategy)
    if not wanted[0]:
        return dx, dw
    on = named(group)
    return dx.add_(reduce_scatter(dwhole, rows=row_counts(rows, x.shape[0], on), group=on)), dw


@_operator("matmul_all_to_all_backward")
def matmul_all_to_all_backward(
    dz: Tensor, x: Tensor, w: Tensor, splits: Sequence[int] | None, wanted: Sequence[bool], group: str, strategy: str
) -> tuple[Tensor, Tensor, Tensor]:
    from . import all_to_all_matmul as home
    from .beside import Arriving

    on = named(group)
    tokens = tokens_of(splits, x, w, on.size)
    arriving = Arriving(x if wanted[1] else x[:, :0], w, tokens.leaving(on.rank))
    strategy = home.mirrored_strategy(strategy, dz)
    dx, _ = home.call(dz, w.mT, tokens.back, None, "none", on, strategy, arriving=arriving, keep=False)
    empty = x.new_empty(0)
    return dx, arriving.weight if wanted[1] else empty, arriving.bias if wanted[2] else empty.clone()


@_operator("all_to_all_matmul_backward")
def all_to_all_matmul_backward(
    dz: Tensor, received: Tensor, w: Tensor, splits: Sequence[int], wanted: Sequence[bool], group: str, strategy: str
) -> tuple[Tensor, Tensor]:
    from . import matmul_all_to_all as home
    from .beside import Beside, multiplied
    from .grouped import multiplied_by_expert

    on = named(group)
    tokens = tokens_of(splits, received, w, on.size)
    dw = like_weight(w) if wanted[1] else w.new_empty(0)

    def weight() -> None:
        if w.dim() == 3:
            multiplied_by_expert(received, dz, dw, tokens.arriving(on.rank))
        else:
            multiplied(received, dz, dw)

    beside = Beside(weight) if wanted[1] else None
    return home.call(dz, w.mT, tokens.back, None, "none", on, strategy, None, beside=beside), dw


def _fake_pair(dz: Tensor, x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wanted = rest[-3]
    return x.new_empty(x.shape if wanted[0] else 0), like_weight(w) if wanted[1] else w.new_empty(0)


def _fake_whole_pair(dz: Tensor, dwhole: Tensor, x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_pair(dz, x, w, *rest)


def _fake_triple(dz: Tensor, x: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wanted = rest[-3]
    bias = (*w.shape[:-2], dz.shape[1])
    dw, dbias = like_weight(w) if wanted[1] else w.new_empty(0), dz.new_empty(bias if wanted[2] else 0)
    return torch.empty_like(x, memory_format=torch.contiguous_format), dw, dbias


def _fake_returned(
    dz: Tensor, received: Tensor, w: Tensor, splits: Sequence[int], wanted: Sequence[bool], group: str, strategy: str
) -> tuple[Tensor, Tensor]:
    on = named(group)
    rows = sum(tokens_of(splits, received, w, on.size).matrix[on.rank])
    return dz.new_empty(rows, w.shape[-2]), like_weight(w) if wanted[1] else w.new_empty(0)


replicated_matmul_backward.register_fake(_fake_pair)
all_gather_matmul_backward.register_fake(_fake_pair)
all_gather_matmul_whole_backward.register_fake(_fake_whole_pair)
matmul_reduce_scatter_backward.register_fake(_fake_triple)
matmul_all_to_all_backward.register_fake(_fake_triple)
all_to_all_matmul_backward.register_fake(_fake_returned)
