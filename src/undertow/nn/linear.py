"""Linear layers whose weight is cut over ranks: by columns of the result, or by rows of the product's inner dimension.

| layer | weight on rank r | input | output | sequence parallel: input | output |
|---|---|---|---|---|---|
| ColumnParallelLinear | [N_r, K] | [..., K] on all ranks | [..., N_r] | [S_r, ..., K] | [S, ..., N_r] |
| RowParallelLinear | [N, K_r] | [..., K_r] | [..., N] on all ranks | [S, ..., K_r] | [S_r, ..., N] |

Weights lie as in torch.nn.Linear. Sequence parallel means that the first dimension is shared out between the layers
that work on whole rows (norms, dropout): the column layer gathers it beneath its matmul, the row layer scatters it.
A DTensor is taken where it stands as the table says, and answered by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..errors import InvalidArgument
from ..ops.all_gather_matmul import all_gather_matmul
from ..ops.matmul_all_reduce import matmul_all_reduce
from ..ops.matmul_reduce_scatter import matmul_reduce_scatter
from ..ops.operands import check_dtype
from ..ops.replicated_matmul import replicated_matmul
from ..plan.plan import split
from .columns import gather_columns
from .sharded import Cut, Sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .sharded import AnyGroup


class ColumnParallelLinear(Sharded):
    """y = x @ weight^T + bias, of which this rank computes its columns.

    `out_features` may be several sizes: then one matmul (and one gather) serves all of them, and the result is a tuple
    (queries, keys and values; gate and up). `unit`: columns that stay together, such as those of an attention head; one
    for each size, or one for all. `gather_output`: every rank gets all columns.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        *,
        group: AnyGroup = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        unit: int | Sequence[int] = 1,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, strategy)
        self.several = not isinstance(out_features, int)
        parts = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        units = (unit,) * len(parts) if isinstance(unit, int) else tuple(unit)
        self.cut = Cut.of("out_features", 0, parts, units, self.ranks)
        self.in_features, self.out_features = in_features, sum(parts)
        self.sequence_parallel, self.gather_output = sequence_parallel, gather_output
        check_dtype("dtype", dtype or torch.get_default_dtype())
        whole = torch.nn.Linear(in_features, sum(parts), bias, device=device, dtype=dtype)
        self.add_sharded("weight", whole.weight, self.cut)
        self.add_sharded("bias", whole.bias, self.cut)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, group: AnyGroup = None, unit: int | Sequence[int] = 1, strategy: str = "auto",
        sequence_parallel: bool = False, gather_output: bool = False, parts: Sequence[int] | None = None,
    ) -> ColumnParallelLinear:  # fmt: skip
        """This rank's part of a layer that every rank holds. `parts`: sizes of what is cut each for itself; the result
        is one tensor all the same."""
        made = cls(
            linear.in_features, parts or linear.out_features, linear.bias is not None, group=group, unit=unit,
            strategy=strategy, sequence_parallel=sequence_parallel, gather_output=gather_output, device="meta",
        )  # fmt: skip
        made.several = False
        made.add_sharded("weight", linear.weight, made.cut, linear.weight.requires_grad)
        made.add_sharded("bias", linear.bias, made.cut, linear.bias is not None and linear.bias.requires_grad)
        return made

    def forward(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """`rows[r]`: the first dimension of x on rank r, where ranks differ (sequence parallel only)."""
        x, mesh = _local(x, Shard(0) if self.sequence_parallel else Replicate())
        flat, between = x.reshape(-1, x.shape[-1]), x.shape[1:-1]
        weight, bias, group, strategy = self.weight.t(), self.bias, self.group_name, self.strategy
        if self.sequence_parallel:
            counts = None if rows is None else [one * math.prod(between) for one in rows]
            y = all_gather_matmul(flat, weight, rows=counts, bias=bias, group=group, strategy=strategy)
            y = y.reshape(-1 if y.numel() else 0, *between, y.shape[-1])
        else:
            y = replicated_matmul(flat, weight, bias=bias, group=group, strategy=strategy)
            y = y.reshape(*x.shape[:-1], weight.shape[1])
        if self.gather_output:
            y = gather_columns(y, self.cut, self.group_name)
        placement = Replicate() if self.gather_output else Shard(y.dim() - 1)
        if not self.several:
            return _as_given(y, mesh, placement)
        parts = torch.split(y, list(self.cut.parts) if self.gather_output else self.cut.sizes(self.rank), -1)
        return tuple(_as_given(part, mesh, placement) for part in parts)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features} of which {self.weight.shape[0]}, rank {self.rank}/{self.ranks}"


class RowParallelLinear(Sharded):
    """y = sum over ranks of x_r @ weight_r^T, + bias once. `unit`: inputs that stay together."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: AnyGroup = None,
        sequence_parallel: bool = False,
        unit: int = 1,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, strategy)
        self.cut = Cut.of("in_features", 1, (in_features,), (unit,), self.ranks)
        self.in_features, self.out_features, self.sequence_parallel = in_features, out_features, sequence_parallel
        check_dtype("dtype", dtype or torch.get_default_dtype())
        whole = torch.nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.add_sharded("weight", whole.weight, self.cut)
        self.bias = whole.bias

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, group: AnyGroup = None, unit: int = 1, strategy: str = "auto",
        sequence_parallel: bool = False,
    ) -> RowParallelLinear:  # fmt: skip
        """This rank's part of a layer that every rank holds."""
        made = cls(
            linear.in_features, linear.out_features, linear.bias is not None, group=group, unit=unit, strategy=strategy,
            sequence_parallel=sequence_parallel, device="meta",
        )  # fmt: skip
        made.add_sharded("weight", linear.weight, made.cut, linear.weight.requires_grad)
        made.bias = linear.bias
        return made

    def forward(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """`rows[r]`: the first dimension of y on rank r, if not as torch.tensor_split cuts it (sequence parallel
        only)."""
        x, mesh = _local(x, Shard(x.dim() - 1))
        flat, between = x.reshape(-1, x.shape[-1]), x.shape[1:-1]
        weight, bias, group, strategy = self.weight.t(), self.bias, self.group_name, self.strategy
        if not self.sequence_parallel:
            y = matmul_all_reduce(flat, weight, bias=bias, group=group, strategy=strategy)
            return _as_given(y.reshape(*x.shape[:-1], weight.shape[1]), mesh, Replicate())
        shares = [stop - start for start, stop in split(x.shape[0], self.ranks)] if rows is None else rows
        counts = [one * math.prod(between) for one in shares]
        y = matmul_reduce_scatter(flat, weight, rows=counts, bias=bias, group=group, strategy=strategy)
        return _as_given(y.reshape(-1 if y.numel() else 0, *between, y.shape[-1]), mesh, Shard(0))

    def extra_repr(self) -> str:
        return f"{self.in_features} of which {self.weight.shape[1]}, {self.out_features}, rank {self.rank}/{self.ranks}"


def _local(x: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, DeviceMesh | None]:
    """This rank's part of a DTensor, and its mesh; a plain tensor as it is."""
    if not isinstance(x, DTensor):
        return x, None
    if x.placements != (placement,):
        must = f"({placement!r},), as this layer takes it; x.redistribute(placements=...) makes it so"
        raise InvalidArgument(argument="x.placements", was=str(x.placements), must=must)
    return x.to_local(), x.device_mesh


def _as_given(y: torch.Tensor, mesh: DeviceMesh | None, placement: Placement) -> torch.Tensor:
    return y if mesh is None else DTensor.from_local(y, mesh, [placement])
