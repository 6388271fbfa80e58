"""One gather, several products: y_i = activation_i(all ranks' rows of x @ w_i + bias_i), and the gathered rows.

    reference:  whole = concatenation of all ranks' x;      y_i = activation_i(whole @ w_i + bias_i)

The product with most columns is an `all_gather_matmul` like any other; rows are multiplied by the other weights as they
come, or, where one kernel brings them all, behind it. Weights that are one in memory (`nn.ColumnParallelLinear`) are
better: one product for all.

With gradients the weights are put side by side, which costs a copy of them until the backward pass is over, so that one
sum of dx moves, beneath one product; results are then columns of one tensor. What is given back as gathered rows sends
its gradient to the rows' owners, whether it was used or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from ..errors import InvalidArgument
from ..fabric import timeline
from ..fabric.group import Group
from ..fabric.registry import as_group, named
from .differentiable import autocast, differentiable, finished, held, name_of, refuse_in_place
from .finish import Finish, check_finish
from .given import check_given
from .library import all_gather_matmul, all_gather_matmul_whole
from .operands import check_factors, is_transposed, output

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..plan.plan import Plan

Weights = torch.Tensor | Sequence[torch.Tensor]
Outputs = torch.Tensor | Sequence[torch.Tensor] | None
Biases = torch.Tensor | Sequence[torch.Tensor | None] | None
Each = TypeVar("Each")


@dataclass(frozen=True)
class Product:
    """out [M, N] = finish(z [M, K] @ w [K, N])."""

    w: torch.Tensor
    out: torch.Tensor
    finish: Finish


class Further:
    """Further products of the rows that a gather brings, and (`whole` [M, K]) the rows: `Taking` them."""

    def __init__(self, products: Sequence[Product], whole: torch.Tensor | None) -> None:
        self._products, self._whole = products, whole
        self._z: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor | None:
        return self._whole

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return *(one.out for one in self._products), *([] if self._whole is None else [self._whole])

    @property
    def made(self) -> list[torch.Tensor]:
        return list(self.outputs)

    @property
    def columns(self) -> int:
        return sum(one.w.shape[1] for one in self._products)

    @property
    def text(self) -> str:
        kept = "" if self._whole is None else ", rows kept"
        return f", {len(self._products)} further weights{kept}"

    def begin(self, z: torch.Tensor) -> None:
        self._z = z

    def all_at_once(self, z: torch.Tensor) -> None:
        self.begin(z)
        self.add([(0, z.shape[0])])

    def add(self, rows: Sequence[tuple[int, int]]) -> None:
        assert self._z is not None
        for first, count in rows:
            here = slice(first, first + count)
            if self._whole is not None and self._whole.data_ptr() != self._z.data_ptr():
                self._whole[here] = self._z[here]
            for one in self._products if count else ():
                with timeline.event("matmul", engine="compute", rows=count, columns=one.w.shape[1]):
                    torch.mm(self._z[here], one.w, out=one.out[here])
                one.finish.apply(one.out[here])


def several(
    x: torch.Tensor,
    w: Weights,
    gathered: bool,
    rows: Sequence[int] | None,
    bias: Biases,
    activation: str | Sequence[str],
    group: Group | dist.ProcessGroup | DeviceMesh | str | None,
    strategy: str,
    plan: Plan | None,
    out: Outputs,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The result for each weight and, if asked for, the rows of all ranks [M, K]."""
    if not isinstance(w, (torch.Tensor, Sequence)):
        raise InvalidArgument(argument="w", was=f"of type {type(w).__name__}", must="a torch.Tensor, or a list of them")
    given = [w] if isinstance(w, torch.Tensor) else list(w)
    if not given:
        raise InvalidArgument(argument="w", was="no weight", must="a weight, or several")
    biases = _each("bias", _listed(bias), None, len(given))
    usual = activation if isinstance(activation, str) else "none"
    activations = _each("activation", None if isinstance(activation, str) else activation, usual, len(given))
    for one, its, place in zip(given, biases, _each("out", _listed(out), None, len(given)), strict=True):
        check_given(x, one, strategy, plan, bias=its, out=place)
    cast = [autocast(x, one, its) for one, its in zip(given, biases, strict=True)]
    x, weights, biases = cast[0][0], [one for _, one, _ in cast], [one for _, _, one in cast]
    if differentiable(x, *weights, *biases):
        refuse_in_place(out=out)
        name = name_of(group)
        # While torch traces no group is looked up; the operator's shape rule has one.
        _check(x, weights, biases, activations, None if torch.compiler.is_compiling() else named(name))
        return _side_by_side(x, weights, gathered, rows, biases, activations, name, strategy, plan)
    outs = _each("out", _listed(out), None, len(given))
    return call(x, weights, gathered, rows, biases, activations, as_group(group), strategy, plan, outs)


def call(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    gathered: bool,
    rows: Sequence[int] | None,
    biases: Sequence[torch.Tensor | None],
    activations: Sequence[str],
    on: Group,
    strategy: str,
    plan: Plan | None,
    outs: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Without gradients. Which product overlaps is each rank's own affair, as its columns are."""
    from .all_gather_matmul import call as gather_and_multiply
    from .all_gather_matmul import row_counts

    _check(x, weights, biases, activations, on)
    m = sum(row_counts(rows, x.shape[0], on))
    widest = max(range(len(weights)), key=lambda index: weights[index].shape[1])
    results = list[torch.Tensor]()
    for place, one in zip(outs, weights, strict=True):
        results.append(output(place, (m, one.shape[1]), x, one, *weights, *biases, *results))
    others = [index for index in range(len(weights)) if index != widest]
    products = [
        Product(weights[index], results[index], Finish(biases[index], activations[index])) for index in others
    ]  # fmt: skip
    whole = x.new_empty(m, x.shape[1]) if gathered else None
    further = Further(products, whole) if products or whole is not None else None
    gather_and_multiply(
        x, weights[widest], rows, biases[widest], activations[widest], on, strategy, plan, results[widest], further
    )  # fmt: skip
    return results, whole


def _check(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    activations: Sequence[str],
    on: Group | None,
) -> None:
    for one, its, activation in zip(weights, biases, activations, strict=True):
        if on is not None:
            check_factors(x, one, on)
        check_finish(its, activation, one.shape[1], x)


def _side_by_side(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    gathered: bool,
    rows: Sequence[int] | None,
    biases: Sequence[torch.Tensor | None],
    activations: Sequence[str],
    group: str,
    strategy: str,
    plan: Plan | None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """As one product, which autograd and tracers know."""
    w, bias = weights[0], biases[0]
    if len(weights) > 1:
        turned = all(is_transposed(one) for one in weights)
        w = torch.cat([one.t() for one in weights]).t() if turned else torch.cat(list(weights), 1)
        if any(one is not None for one in biases):
            zeros = [x.new_zeros(one.shape[1]) for one in weights]
            bias = torch.cat([one if one is not None else none for one, none in zip(biases, zeros, strict=True)])
    whole = None
    if gathered:
        y, whole = all_gather_matmul_whole(x, w, bias, rows, group, strategy, held(plan))
    else:
        y = all_gather_matmul(x, w, bias, rows, group, strategy, held(plan))
    if len(weights) == 1:
        return [finished(y, activations[0])], whole
    parts, first = [], 0
    for one, activation in zip(weights, activations, strict=True):  # each a view of its own: it may be changed in place
        parts.append(finished(y.narrow(1, first, one.shape[1]), activation))
        first += one.shape[1]
    return parts, whole


def _listed(given: Each | Sequence[Each] | None) -> Sequence[Each] | None:
    return [given] if isinstance(given, torch.Tensor) else given  # type: ignore[return-value]


def _each(name: str, given: Sequence[Each] | None, usual: Each, count: int) -> list[Each]:
    """One for each weight."""
    if given is None:
        return [usual] * count
    if not isinstance(given, Sequence):
        must = f"a list, one for each of {count} weights, or None"
        raise InvalidArgument(argument=name, was=f"of type {type(given).__name__}", must=must)
    if len(given) != count:
        raise InvalidArgument(argument=name, was=f"{len(given)} of them", must=f"one for each of {count} weights")
    return list(given)
