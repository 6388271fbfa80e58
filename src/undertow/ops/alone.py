"""The communication of an operator without its matmul: what overlap has to hide, for measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..plan.defaults import default_plan
from ..plan.problem import Problem
from . import matmul_all_reduce
from .finish import Finish
from .operands import dtype_name

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..plan.plan import Plan


def all_reduce(fabric: Fabric, lane: str, y: torch.Tensor, plan: Plan | None = None) -> None:
    """Sum contiguous `y` [M, N] over the group in place, as `matmul_all_reduce` does over that lane."""
    matrix = y.view(-1, y.shape[-1]) if y.dim() > 1 else y.view(-1, 1)
    problem = Problem.of(
        matmul_all_reduce.OPERATOR, matrix.shape[0], matrix.shape[1], 0, dtype=dtype_name(y), ranks=fabric.group.size,
        device=y.device.type, multiprocessors=fabric.multiprocessors,
    )  # fmt: skip
    chosen = plan or default_plan(problem, "serial", lane)
    opened = fabric.lane(lane)
    matmul_all_reduce.run(matrix, matrix, matrix, problem, chosen, Finish(None, "none"), fabric, opened, compute=False)
