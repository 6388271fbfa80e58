"""Arguments of the wrong kind are one sentence, before anything looks into them or moves: no rank is needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import undertow as ut
from undertow.errors import InvalidArgument
from undertow.plan.plan import Plan

X, W = torch.ones(4, 3), torch.ones(3, 5)
with warnings.catch_warnings(action="ignore"):
    NESTED = torch.nested.nested_tensor([X, X])
OPERATORS: list[Callable[..., Any]] = [
    ut.matmul_all_reduce, ut.matmul_reduce_scatter, ut.all_gather_matmul, ut.matmul_all_to_all, ut.all_to_all_matmul,
    ut.replicated_matmul,
]  # fmt: skip
SUMS = OPERATORS[:2]


def refused(says: str, operator: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with pytest.raises(InvalidArgument) as error:
        operator(*arguments, **options)
    assert says in str(error.value)


@pytest.mark.parametrize("x", [X, X.clone().requires_grad_()], ids=["plain", "with gradients"])
def test_what_is_no_tensor_no_plan_and_no_strategy(x: torch.Tensor) -> None:
    for operator in OPERATORS:
        refused("x is of type ndarray", operator, np.ones((4, 3), np.float32), W)
        refused("x is of type NoneType", operator, None, W)
        refused("w is of type NoneType", operator, x, None)
        refused("strategy is of type bytes", operator, x, W, strategy=b"serial")
        refused("x is a nested tensor", operator, NESTED, W)
        if operator is not ut.all_gather_matmul:
            refused("bias is of type float", operator, x, W, bias=1.0)
        if operator not in OPERATORS[4:]:
            refused("plan is of type str", operator, x, W, plan="serial")
    for operator in SUMS:
        refused("residual is of type int", operator, x, W, residual=1)
        refused("program is a str", operator, x, W, program="ring")
        refused("out is of type list", operator, x, W, out=[X])
    refused("w is of type dict", ut.all_gather_matmul, x, {"q": W})
    refused("bias is of type int", ut.all_gather_matmul, x, [W, W], bias=3)


def test_counts_that_are_no_whole_numbers() -> None:
    for rows in (5, "22", [1.5, 2.5], [None, 4], torch.tensor([2.0, 2.0]), [[2], [2]]):
        refused("a sequence of whole numbers", ut.matmul_reduce_scatter, X, W, rows=rows)
        refused("a sequence of whole numbers", ut.all_gather_matmul, X, W, rows=rows)


def test_inside_of_a_transform_of_torch_func() -> None:
    """There, tensors have no memory; what was found out half-way ended the group."""
    for operator in OPERATORS:
        refused("inside torch.func's vmap", torch.func.vmap(lambda x: operator(x, W)), X[None])  # noqa: B023
        refused("inside torch.func's grad", torch.func.grad(lambda x: operator(x, W).sum()), X)  # noqa: B023
        refused("inside torch.func's jvp", torch.func.jvp, lambda x: operator(x, W), (X,), (X,))  # noqa: B023
        with forward_ad.dual_level():
            refused("forward-mode gradient", operator, forward_ad.make_dual(X, X), W)


def test_a_strategy_for_the_backward_pass_alone_is_looked_at_before() -> None:
    refused("strategy is 'serail'", ut.replicated_matmul, X, W, strategy="serail")


def test_what_is_tuned_and_for_how_long() -> None:
    refused("function is of type int", ut.tune, 3)
    refused("budget_seconds is 'long'", ut.tune, ut.matmul_all_reduce, X, W, budget_seconds="long")


def test_a_plan_that_is_no_text() -> None:
    refused("plan is None", Plan.from_json, None)
