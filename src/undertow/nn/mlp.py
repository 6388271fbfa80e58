"""The feed-forward block of a transformer over ranks: up by columns, down by rows, one communication each way.

    plain    y = down(activation(up(x)))
    gated    y = down(activation(gate(x)) * up(x))          gate and up are one weight: one matmul, one gather

In the sequence-parallel form x and y are [S_r, ..., hidden] and the communication is a gather and a scatter, both
beneath their matmuls; otherwise x is on all ranks and the communication is one sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from ..ops.finish import ACTIVATIONS, FUNCTIONS
from .linear import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from .sharded import AnyGroup


class TensorParallelMLP(torch.nn.Module):
    """`hidden_size` in and out, `intermediate_size` between, cut over the ranks of `group`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        group: AnyGroup = None,
        sequence_parallel: bool = False,
        strategy: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise InvalidArgument(argument="activation", was=repr(activation), must=f"one of {', '.join(ACTIVATIONS)}")
        self.activation, self.gated = activation, gated
        self.up = ColumnParallelLinear(
            hidden_size, (intermediate_size,) * (2 if gated else 1), bias, group=group, strategy=strategy,
            sequence_parallel=sequence_parallel, device=device, dtype=dtype,
        )  # fmt: skip
        self.down = RowParallelLinear(
            intermediate_size, hidden_size, bias, group=group, strategy=strategy, sequence_parallel=sequence_parallel,
            device=device, dtype=dtype,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *second = self.up(x)
        hidden = first if self.activation == "none" else FUNCTIONS[self.activation](first)
        return self.down(hidden * second[0] if second else hidden)  # type: ignore[no-any-return]
