"""What each operator keeps for its gradient, and how the gradient is asked for.

With dz the gradient of the value before the activation:

    dx = dz @ w^T        dw = x^T @ dz        dbias = sum over rows of dz

each over the whole matrices; which part of them a rank holds, and what has to move, is said in `library.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fabric.registry import named
from . import library
from .differentiable import held_plan
from .grouped import bias_gradient, flattened, unflattened
from .operands import is_transposed

Gradients = tuple[Tensor | None, ...]


def _strategy(strategy: str, plan: str) -> str:
    """A plan fits one shape; its gradient's problems are others, for which its grain and lane count."""
    given = held_plan(plan)
    return strategy if given is None else given.name


def _only(ctx: Any, found: tuple[Tensor | None, Tensor | None, Tensor | None], others: int) -> Gradients:
    """dx, dw and dbias where they are asked for, and nothing for the arguments that are no tensors."""
    asked = [one if needed else None for one, needed in zip(found, ctx.needs_input_grad, strict=False)]
    return (*asked, *([None] * others))


def _setup_named(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """x, w, bias, then what is no tensor: [rows or splits,] group, strategy[, plan[, program]]."""
    x, w = inputs[:2]
    ctx.save_for_backward(x, w)
    ctx.others = inputs[3:]


def _all_reduce(ctx: Any, dz: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = dz @ w.t() if needs[0] else None
    dw = None
    if needs[1]:
        dw = (dz.t() @ x).t() if is_transposed(w) else x.t() @ dz  # lies as w does; can be differentiated again
    return _only(ctx, (dx, dw, dz.sum(0) if needs[2] else None), 4)


def _replicated(ctx: Any, dz: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    group, strategy = ctx.others
    needs = ctx.needs_input_grad
    dx, dw = library.replicated_matmul_backward(dz.contiguous(), x, w, list(needs[:2]), group, strategy)
    return _only(ctx, (dx, dw, dz.sum(0) if needs[2] else None), 2)


def _reduce_scatter(ctx: Any, dz: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    rows, group, strategy, plan, _ = ctx.others
    wanted, strategy = list(ctx.needs_input_grad[:3]), _strategy(strategy, plan)
    found = library.matmul_reduce_scatter_backward(dz.contiguous(), x, w, rows, wanted, group, strategy)
    return _only(ctx, found, 5)


def _all_gather(ctx: Any, dz: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    rows, group, strategy, plan = ctx.others
    needs, strategy = ctx.needs_input_grad, _strategy(strategy, plan)
    dz = dz.contiguous()
    dx, dw = library.all_gather_matmul_backward(dz, x, w, rows, list(needs[:2]), group, strategy)
    return _only(ctx, (dx, dw, dz.sum(0) if needs[2] else None), 4)


def _all_gather_whole(ctx: Any, dz: Tensor, dwhole: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    rows, group, strategy, plan = ctx.others
    needs, strategy = ctx.needs_input_grad, _strategy(strategy, plan)
    given = dz.contiguous(), dwhole.contiguous(), x, w, rows, list(needs[:2]), group, strategy
    dx, dw = library.all_gather_matmul_whole_backward(*given)
    return _only(ctx, (dx, dw, dz.sum(0) if needs[2] else None), 4)


def _to_all(ctx: Any, dz: Tensor) -> Gradients:
    x, w = ctx.saved_tensors
    splits, group, strategy, plan = ctx.others
    wanted, strategy = list(ctx.needs_input_grad[:3]), _strategy(strategy, plan)
    found = library.matmul_all_to_all_backward(dz.contiguous(), x, w, splits, wanted, group, strategy)
    return _only(ctx, found, 4)


def _setup_from_all(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, _, splits, group, strategy = inputs
    ctx.save_for_backward(output[1], w)
    ctx.mark_non_differentiable(output[1])
    ctx.others = splits, group, strategy, x.shape[0]


def _from_all(ctx: Any, dz: Tensor, _: Tensor) -> Gradients:
    received, w = ctx.saved_tensors
    splits, group, strategy, rows = ctx.others
    needs = ctx.needs_input_grad
    size, rank = named(group).size, named(group).rank
    experts = w.shape[0] if w.dim() == 3 else 1
    tokens = unflattened(splits, rows, size, experts)
    dz = dz.contiguous()
    dx, dw = library.all_to_all_matmul_backward(dz, received, w, flattened(tokens), list(needs[:2]), group, strategy)
    dbias = None
    if needs[2]:
        dbias = bias_gradient(dz, tokens.arriving(rank), experts) if w.dim() == 3 else dz.sum(0)
    return _only(ctx, (dx, dw, dbias), 3)


for _name, _backward in (
    ("matmul_all_reduce", _all_reduce),
    ("replicated_matmul", _replicated),
    ("matmul_reduce_scatter", _reduce_scatter),
    ("all_gather_matmul", _all_gather),
    ("all_gather_matmul_whole", _all_gather_whole),
    ("matmul_all_to_all", _to_all),
):
    torch.library.register_autograd(f"undertow::{_name}", _backward, setup_context=_setup_named)
torch.library.register_autograd("undertow::all_to_all_matmul", _from_all, setup_context=_setup_from_all)
