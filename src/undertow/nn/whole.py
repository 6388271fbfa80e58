"""What is left whole between layers that are cut, and would have to see what other ranks have.

    gathered    y_r = the rank's columns of f(x_0, x_1, ...)       x_r [..., N_r], the columns of rank r
    spread      y = f(x), whose last columns every rank goes on with alone, each with its own heads

A norm over all heads is `gathered`: its own forward sees all columns, whatever it computes, so it is right at the price
of a gather; a sum in the backward pass brings what each rank's columns make of all. A key that all heads share is
`spread`: its gradient is the sum of what the heads of all ranks make of it.

Both are hooks of the module, which go with it in a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..fabric.registry import named
from ..ops.rows_all_reduce import held_by_all
from .columns import gather_columns
from .sharded import Cut


@dataclass(frozen=True)
class _Gathered:
    cut: Cut
    group: str
    rank: int

    def before(self, _: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = arguments
        return held_by_all(gather_columns(x, self.cut, self.group), self.group), *others

    def after(self, _: torch.nn.Module, __: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        start, stop = self.cut.bounds(0, self.rank)
        return y[..., start:stop].contiguous()


@dataclass(frozen=True)
class _Spread:
    columns: int
    group: str

    def __call__(self, _: torch.nn.Module, __: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        most, last = torch.split(y, [y.shape[-1] - self.columns, self.columns], -1)
        return torch.cat((most, held_by_all(last, self.group)), -1)


def gather_for(layer: torch.nn.Module, cut: Cut, group: str) -> None:
    """`layer` sees the columns of all ranks, and gives those of this one. Once, however often it is asked for."""
    if not any(isinstance(getattr(hook, "__self__", None), _Gathered) for hook in layer._forward_hooks.values()):
        gathered = _Gathered(cut, group, named(group).rank)
        layer.register_forward_pre_hook(gathered.before)
        layer.register_forward_hook(gathered.after)


def spread(layer: torch.nn.Module, columns: int, group: str) -> None:
    """Gradients of the last `columns` of what `layer` gives are summed over ranks. Once, too."""
    if not any(isinstance(hook, _Spread) for hook in layer._forward_hooks.values()):
        layer.register_forward_hook(_Spread(columns, group))
