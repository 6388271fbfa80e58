"""Lane `net` where NCCL carries rounds of messages, between ranks that share a GPU (sockets): exact all the same."""

from __future__ import annotations

import matmul_suite
import operator_checks
import posted_checks
import torch
from matmul_suite import Case

import undertow as ut
from undertow.errors import StrategyUnavailable


def in_rounds() -> int:
    """Every operator and grain; twice each, as places are taken in turn. How many cases there were."""
    group = ut.init()
    assert group.fabric.lane("net").in_rounds
    count = 0
    for operator in matmul_suite.OPERATORS:
        for number, strategy in enumerate(matmul_suite.strategies(("net",))):
            for shape in operator_checks.SHAPES:
                case = Case(operator, strategy, torch.bfloat16, shape, operator_checks.SEEDS[number % 2])
                try:
                    for _ in range(2):
                        matmul_suite.verify(group, case)
                    count += 1
                except StrategyUnavailable as error:
                    if strategy != "fused:net" or not any(one in str(error) for one in posted_checks.REFUSED):
                        raise AssertionError(f"{case}: {error}") from error
    operator_checks.settle(group)
    return count
