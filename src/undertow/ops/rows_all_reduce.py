"""y = sum over ranks r of f_r(rows): what each rank computes of rows that all hold, summed while it is computed.

| tensor | shape on each rank | sharded over |
|---|---|---|
| rows | one or several, [M, ...] each, the same on all ranks | nothing: every rank holds them |
| weights_r | any | as `compute` wants them: each rank has its own |
| y | [M, N] | nothing: every rank holds the sum |

f_r is `compute(rows, weights_r)`, anything that makes each row of its result from the same row of its arguments:
f_r(rows)[a:b] = f_r(rows[a:b]). So this is for row-parallel work that is more than one matmul, such as a model's
experts, each cut over ranks. `serial` computes, then sums. `chunked` splits the rows on the host:

    compute         | f of part 0 | f of part 1 | f of part 2 | ...
    communication                 | sum 0       | sum 1       | ...

Backward, with dy [M, N] the same on all ranks, the same parts in the same order:

    d weights_r = (df_r / d weights_r)^T dy            d rows = sum over ranks r of (df_r / d rows)^T dy

The sum for the first of `rows` moves part by part beneath the gradients of the next part. Those for the others, which
are narrow (the weights of routing), follow as one collective each.

Every part reads all weights again, so cutting may lose more than it hides. `auto` measures nothing here, and is
`serial`; over `peer` where all ranks stand on one node, else over `net`. Traced by a compiler, `compute` is part of its
graph, and one collective sums what it gives; nothing is hidden then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ..collective.operators import all_reduce
from ..errors import InvalidArgument
from ..fabric import timeline
from ..fabric.registry import as_group, named
from ..plan.defaults import default_plan
from ..plan.plan import Plan, parse_strategy
from ..plan.problem import Problem
from ..plan.tiles import chunks
from . import matmul_all_reduce
from .differentiable import name_of
from .explain import Choice, Explanation, remember
from .finish import Finish
from .operands import check_dtype, dtype_name
from .overlap import one_by_one
from .product import Product

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.group import Group

OPERATOR = "rows_all_reduce"
GRAINS = ("serial", "chunked")
_HALVES = (torch.float16, torch.bfloat16)

Tensors = Sequence[torch.Tensor]
Compute = Callable[[Tensors, Tensors], torch.Tensor]
Part = tuple[int, int]
"""First row, and rows."""


def reference(compute: Compute, rows: Tensors, weights: Sequence[Tensors]) -> torch.Tensor:
    """The meaning, as a plain loop over the weights of all ranks."""
    y = compute(rows, weights[0])
    for one in weights[1:]:
        y = y + compute(rows, one)
    return y


def rows_all_reduce(
    compute: Compute,
    rows: Tensors,
    weights: Tensors,
    columns: int,
    *,
    dtype: torch.dtype | None = None,
    group: Group | dist.ProcessGroup | DeviceMesh | str | None = None,
    strategy: str = "auto",
) -> torch.Tensor:
    """`compute(rows, weights)` [M, columns], summed over the ranks of `group`, of `dtype`, or else that of rows[0].

    With gradients, `compute` is differentiated by autograd, for `rows` and `weights` alone, and every rank must want
    those of the same rows. It must not change in place what its own gradient needs.
    """
    given, dtype = ("rows[0]", rows[0].dtype) if dtype is None else ("dtype", dtype)
    if torch.compiler.is_compiling():
        name = name_of(group)
        held = [held_by_all(one, name) if one.is_floating_point() else one for one in rows]
        total: torch.Tensor = sum_over_ranks(compute(held, weights).to(dtype), name)
        return total
    on = as_group(group)
    check_dtype(given, dtype)
    for name, tensors in (("rows", rows), ("weights", weights)):
        for number, one in enumerate(tensors):
            if one.device != on.device:
                was, must = f"on {one.device}", f"on {on.device}"
                raise InvalidArgument(argument=f"{name}[{number}]", was=was, must=must)
    y = rows[0].new_empty(rows[0].shape[0], columns, dtype=dtype)
    call = _Call(compute, on, _choice(y, on, strategy), strategy)
    if torch.is_grad_enabled() and any(one.requires_grad for one in (*rows, *weights)):
        return _Summed.apply(call, y, len(rows), *rows, *weights)  # type: ignore[no-any-return, no-untyped-call]

    def part(first: int, count: int) -> torch.Tensor:
        return _checked(compute([one[first : first + count] for one in rows], weights), count, columns)

    return call.summed(part, y, "")


def _checked(made: torch.Tensor, count: int, columns: int) -> torch.Tensor:
    if made.shape != (count, columns):
        was = f"one that gives {list(made.shape)} of {count} rows"
        raise InvalidArgument(argument="compute", was=was, must=f"one that gives {[count, columns]}")
    return made


def _problem(y: torch.Tensor, on: Group) -> Problem:
    """What moves: as of a `matmul_all_reduce`, whose parcels are planned and carried."""
    m, n = y.shape
    return Problem.of(
        matmul_all_reduce.OPERATOR, m, n, 0, dtype=dtype_name(y), ranks=on.size, device=y.device.type,
        multiprocessors=on.fabric.multiprocessors, bulk=on.fabric.bulk_copies,
    )  # fmt: skip


def _choice(y: torch.Tensor, on: Group, strategy: str) -> Choice:
    lanes, problem = on.fabric.lanes(), _problem(y, on)
    near = "net" if lanes["peer"] else "peer"
    if strategy != "auto":
        return Choice(default_plan(problem, *parse_strategy(strategy, GRAINS, lanes, near)), "The strategy was given.")
    plan = default_plan(problem, "serial", near)
    plan = dataclasses.replace(plan, deterministic=torch.are_deterministic_algorithms_enabled())
    return Choice(plan, "Nothing is measured for this operator, so serial runs.")


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call, of which the backward pass is another with the same plan."""

    compute: Compute
    on: Group
    choice: Choice
    asked: str

    def summed(self, part: Callable[[int, int], torch.Tensor], y: torch.Tensor, way: str) -> torch.Tensor:
        """y [M, N] = `part(first, count)` of all rows, in the plan's parts, summed over ranks.

        `way`: what else ranks must agree on: a sum of one's gradients must not meet one of another's results.
        """
        on, plan = self.on, self.choice.plan
        problem = _problem(y, on)

        def product(buffer: torch.Tensor) -> Product:
            return _Rows(plan, chunks(problem.shards, plan), part, buffer.view(y.shape))

        shape = f"M {problem.m}, N {problem.n}, {problem.dtype}"
        with on.call(OPERATOR, shape + way, f"{plan.name} {plan.digest}") as number:
            lane = on.fabric.lane(plan.lane)
            with on.fabric.guarded_call((y,)), one_by_one(on.fabric, lane):
                finish = Finish.of(None, "none", plan)
                matmul_all_reduce.run_product(product, y, problem, plan, finish, on.fabric, lane)
            remember(Explanation(OPERATOR, shape, on.name, number, self.asked, self.choice))
        return y


class _Rows(Product):
    """Parts of rows, each by the caller's function."""

    def __init__(
        self,
        plan: Plan,
        parts: Sequence[Sequence[Part]],
        part: Callable[[int, int], torch.Tensor],
        y: torch.Tensor,
    ) -> None:
        self._plan, self._parts, self._part, self._y = plan, parts, part, y

    def start(self) -> None:
        if self._plan.grain == "serial":
            self._compute(0, self._y.shape[0])

    def reach(self, parcel: int) -> None:
        if self._plan.grain == "chunked":
            for first, count in self._parts[parcel]:
                self._compute(first, count)

    def _compute(self, first: int, count: int) -> None:
        if count:
            with timeline.event("rows", engine="compute", rows=count):
                self._y[first : first + count] = self._part(first, count)


class _Summed(torch.autograd.Function):
    """Each part has a graph of its own, which the backward pass goes through part by part.

    What those graphs save is kept as this function's own, all of it at once and when nothing moves: so it is dropped
    when the graph around it is, and what watches saved tensors (activation checkpointing, which stops a forward pass
    there by an exception, or offloading) sees them.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, y: torch.Tensor, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        rows = tensors[:count]
        weights = [one.detach().requires_grad_(one.requires_grad) for one in tensors[count:]]
        graphs: dict[Part, tuple[Tensors, GradientEdge | None]] = {}
        saved: list[torch.Tensor] = []
        versions: list[int] = []
        known: dict[tuple[object, ...], int] = {}  # weights are saved by every part, and kept once

        def save(tensor: torch.Tensor) -> int:
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
            if key not in known or not tensor.numel():
                known[key] = len(saved)
                saved.append(tensor)
                versions.append(tensor._version)
            return known[key]

        def part(first: int, length: int) -> torch.Tensor:
            leaves = [one[first : first + length].detach().requires_grad_(one.requires_grad) for one in rows]
            with torch.enable_grad(), saved_tensors_hooks(save, saved.__getitem__):
                made = _checked(call.compute(leaves, weights), length, y.shape[1])
            graphs[first, length] = leaves, get_gradient_edge(made) if made.requires_grad else None
            return made.detach()

        call.summed(part, y, f", gradients of rows {[at for at, one in enumerate(rows) if one.requires_grad]}")
        if [one._version for one in saved] != versions:
            was = "one that changes in place what its gradient needs"
            raise InvalidArgument(argument="compute", was=was, must="one that makes a new tensor there")
        ctx.mark_dirty(y)
        ctx.save_for_backward(*saved)
        saved.clear()
        ctx.call, ctx.graphs, ctx.weights, ctx.saved = call, graphs, weights, saved
        ctx.like = [torch.empty_like(one, device="meta") for one in rows]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.saved[:] = ctx.saved_tensors
        try:
            return _gradients(ctx, dy)
        finally:
            ctx.saved.clear()


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Those of the arguments of `_Summed`, whose saved tensors are there."""
    call, like, weights, graphs = ctx.call, ctx.like, ctx.weights, ctx.graphs
    first_wanted, *others_wanted = ctx.needs_input_grad[3 : 3 + len(like)]
    others = [
        torch.zeros_like(one, device=dy.device, memory_format=torch.contiguous_format) if wanted else None
        for one, wanted in zip(like[1:], others_wanted, strict=True)
    ]
    totals = [_Total(one) if one.requires_grad else None for one in weights]

    def part(first: int, length: int) -> torch.Tensor:
        """The gradients of one part of the rows: those of rows[0] are returned, others kept, weights' added up."""
        leaves, made = graphs[first, length]
        if made is None:  # nothing of this part depends on what has a gradient
            return torch.zeros_like(leaves[0])
        inputs = [one for one in (*leaves, *weights) if one.requires_grad]
        given = torch.autograd.grad(made, inputs, dy[first : first + length], retain_graph=True, materialize_grads=True)
        found = iter(given)
        mine = next(found) if first_wanted else leaves[0]
        for other in others:
            if other is not None:
                other[first : first + length] = next(found)
        for total in totals:
            if total is not None:
                total.add(next(found))
        return mine

    drow = None
    if first_wanted:
        drow = torch.empty_like(like[0], device=dy.device, memory_format=torch.contiguous_format)
        flat = drow.view(len(drow), math.prod(drow.shape[1:]))
        call.summed(lambda first, length: part(first, length).reshape(flat[first : first + length].shape), flat,
                    ", backward")  # fmt: skip
    else:
        for first, length in graphs:
            part(first, length)
    for other in others:
        if other is not None:
            all_reduce(other, group=call.on)
    return (None, None, None, drow, *others, *(None if one is None else one.sum for one in totals))


class _Total:
    """The gradient of a weight, over parts; 16-bit ones of several parts are added in fp32 and rounded once."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._parts = 0
        self._sum: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        self._parts += 1
        if self._sum is None:
            self._sum = gradient
            return
        if self._parts == 2:
            self._sum = self._sum.to(torch.float32 if gradient.dtype in _HALVES else gradient.dtype, copy=True)
        self._sum += gradient

    @property
    def sum(self) -> torch.Tensor:
        return torch.zeros_like(self._weight) if self._sum is None else self._sum.to(self._weight.dtype)


# -- for a compiler, and for parameters that all ranks hold -----------------------------------------------------------


@torch.library.custom_op("undertow::sum_over_ranks", mutates_args=())
def sum_over_ranks(y: torch.Tensor, group: str) -> torch.Tensor:
    """Of every rank's y; every rank gets it, and so its gradient."""
    total = y.clone(memory_format=torch.contiguous_format)
    return all_reduce(total, group=named(group))


class _HeldByAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_over_ranks(dy, ctx.group), None


def held_by_all(x: torch.Tensor, group: str) -> torch.Tensor:
    """x, the same on all ranks, whose gradient is the sum of what each rank made of it."""
    return _HeldByAll.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def _like(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


sum_over_ranks.register_fake(_like)
sum_over_ranks.register_autograd(lambda ctx, dy: (dy, None))
