"""The projections of an attention block over ranks: queries, keys and values by heads, out by the same heads.

    q, k, v = x @ w_q^T, x @ w_k^T, x @ w_v^T        one weight, one matmul, one gather
    y = attend(q, k, v) @ w_out^T                    summed over ranks, or scattered

What happens between the two is the caller's, and needs no other rank: a rank has some groups of queries, each with the
head of keys and values that it shares. `heads` need not divide by the ranks, nor `kv_heads`; every rank has at least
one of the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from ..fabric.registry import as_group
from .linear import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from .sharded import AnyGroup

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class AttentionProjections(torch.nn.Module):
    """`hidden_size` in and out; `heads` of queries, `kv_heads` of keys and values (as many, unless told), `head_dim`
    numbers each (`hidden_size / heads`, unless told), cut over the ranks of `group`."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        out_bias: bool = False,
        group: AnyGroup = None,
        sequence_parallel: bool = False,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or not 1 <= kv_heads <= heads or heads % kv_heads:
            must = f"one that {heads} heads of queries share evenly"
            raise InvalidArgument(argument="kv_heads", was=str(kv_heads), must=must)
        ranks = as_group(group).size
        if kv_heads < ranks:
            must = f"at least {ranks}, one for each rank; use fewer ranks"
            raise InvalidArgument(argument="kv_heads", was=str(kv_heads), must=must)
        if head_dim is None and hidden_size % heads:
            raise InvalidArgument(argument="hidden_size", was=str(hidden_size), must=f"a multiple of {heads} heads")
        self.head_dim = hidden_size // heads if head_dim is None else head_dim
        queries, keys, together = heads * self.head_dim, kv_heads * self.head_dim, heads // kv_heads * self.head_dim
        self.qkv = ColumnParallelLinear(
            hidden_size, (queries, keys, keys), bias, group=group, unit=(together, self.head_dim, self.head_dim),
            sequence_parallel=sequence_parallel, strategy=strategy, device=device, dtype=dtype,
        )  # fmt: skip
        self.out = RowParallelLinear(
            queries, hidden_size, out_bias, group=group, unit=together, sequence_parallel=sequence_parallel,
            strategy=strategy, device=device, dtype=dtype,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, attend: Attend, rows: Sequence[int] | None = None) -> torch.Tensor:
        """x [..., hidden] -> the same; sequence parallel: [S_r, ..., hidden], and `attend` sees all S
        (`rows[r]`: S_r of rank r, where they differ).

        `attend(q, k, v)` gets [..., heads of this rank, head_dim] (k, v: its kv_heads), and gives what has q's shape.
        """
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)) for one in self.qkv(x, rows))
        y = attend(q, k, v)
        if y.shape != q.shape:
            raise InvalidArgument(argument="attend", was=f"one that gives {list(y.shape)}", must=f"{list(q.shape)}")
        return self.out(y.flatten(-2), rows)  # type: ignore[no-any-return]
