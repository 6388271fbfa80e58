"""The columns of all ranks side by side: what follows a column-parallel layer whose result every rank needs.

    reference:  y = concatenation over ranks r of y_r [..., N_r]         backward: dy_r = the columns of rank r of dy

Every rank holds the result, so each passes the same gradient back, and nothing moves there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..collective.operators import all_gather
from ..fabric.registry import named

if TYPE_CHECKING:
    from .sharded import Cut


def gather_columns(y: torch.Tensor, cut: Cut, group: str) -> torch.Tensor:
    """y [..., N_r] -> [..., N], parts in the order of the whole weight."""
    sizes = [sum(cut.sizes(rank)) for rank in range(cut.ranks)]
    flat: torch.Tensor = _gather(y.reshape(-1, y.shape[-1]), sizes, group)
    if len(cut.parts) == 1:
        return flat.reshape(*y.shape[:-1], cut.parts[0])
    shards = torch.split(flat, sizes, -1)
    cuts = [torch.split(shard, cut.sizes(rank), -1) for rank, shard in enumerate(shards)]
    whole = torch.cat([one[part] for part in range(len(cut.parts)) for one in cuts], -1)
    return whole.reshape(*y.shape[:-1], sum(cut.parts))


@torch.library.custom_op("undertow::gather_columns", mutates_args=())
def _gather(y: torch.Tensor, sizes: Sequence[int], group: str) -> torch.Tensor:
    """y [M, N_r] of all ranks -> [M, sum of N_r], in rank order."""
    counts = [y.shape[0] * size for size in sizes]
    flat = all_gather(y.reshape(-1), rows=counts, group=named(group))
    parts = zip(torch.split(flat, counts), sizes, strict=True)
    return torch.cat([part.view(y.shape[0], size) for part, size in parts], 1)


def _shape(y: torch.Tensor, sizes: Sequence[int], group: str) -> torch.Tensor:
    return y.new_empty(y.shape[0], sum(sizes))


def _setup(ctx: Any, inputs: tuple[torch.Tensor, Sequence[int], str], output: torch.Tensor) -> None:
    ctx.sizes, ctx.rank = inputs[1], named(inputs[2]).rank


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.split(dy, list(ctx.sizes), 1)[ctx.rank].contiguous(), None, None


torch.library.register_fake("undertow::gather_columns", _shape)
torch.library.register_autograd("undertow::gather_columns", _backward, setup_context=_setup)
