"""y_r = activation(x @ w_r + bias_r): the column-parallel linear layer on rows that every rank holds.

| tensor | shape on each rank | sharded over |
|---|---|---|
| x | [M, K] | nothing: every rank holds it |
| w_shard_n | [K, N_r] | N |
| y_shard_n | [M, N_r] | N |

Nothing moves forward. Backward, dx is the sum over ranks of dz_r @ w_r^T: a `matmul_all_reduce`, beneath which the
matmul of the weight's gradient runs too. It is the mirror image of that operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..fabric.registry import as_group
from ..plan.plan import as_written
from . import gradients as _gradients  # noqa: F401 - registers them
from .differentiable import autocast, differentiable, finished, name_of
from .finish import check_finish
from .given import check_before_dispatch, check_given
from .library import replicated_matmul as operator
from .operands import check_factors

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.group import Group


def reference(x: torch.Tensor, w_shards_n: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The meaning, as a plain loop: what every rank gets (without bias and activation)."""
    return [x @ w_shard_n for w_shard_n in w_shards_n]


def replicated_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    group: Group | dist.ProcessGroup | DeviceMesh | str | None = None,
    strategy: str = "auto",
) -> torch.Tensor:
    """x [M, K], the same on all ranks of `group`, @ w [K, N_r] -> [M, N_r], then bias and activation.

    `strategy` is that of the backward pass, which alone communicates.
    """
    check_given(x, w, strategy, bias=bias)
    if strategy != "auto":
        as_written(strategy)  # refuses here what the backward pass would
    x, w, bias = autocast(x, w, bias)
    if differentiable(x, w, bias):
        check_before_dispatch(x, w, bias, activation, group)
        return finished(operator(x, w, bias, name_of(group), strategy), activation)
    check_factors(x, w, as_group(group))
    check_finish(bias, activation, w.shape[1], x)
    return finished(torch.mm(x, w) if bias is None else torch.addmm(bias, x, w), activation)
