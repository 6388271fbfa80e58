"""A tile on a CPU: where it stands in a matrix, how it is multiplied, how those of several ranks are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..fabric import timeline
from .finish import FUNCTIONS, Finish

_HALVES = (torch.float16, torch.bfloat16)


def part_of(matrix: torch.Tensor, row: int, rows: int, column: int, columns: int) -> torch.Tensor:
    return matrix[row : row + rows, column : column + columns]


def multiply_tile(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, finish: Finish | None = None, column: int = 0
) -> None:
    """A tile of the product straight to its place, finished where it is complete."""
    with timeline.event("matmul", engine="compute", rows=x.shape[0], columns=w.shape[1]):
        product = torch.mm(x, w, out=out) if out.is_contiguous() else torch.mm(x, w)
        if finish is not None and not finish.nothing:
            bias = None if finish.bias is None else finish.bias[column : column + w.shape[1]]
            Finish(bias, finish.activation).apply(product)
        if product is not out:
            out.copy_(product)


def add(out: torch.Tensor, parts: Sequence[torch.Tensor], finish: Finish, column: int) -> None:
    """out = finish(parts[0] + parts[1] + ...), in this order, 16-bit types in fp32 and rounded once."""
    total = parts[0].to(torch.float32 if out.dtype in _HALVES else out.dtype, copy=True)
    for part in parts[1:]:
        total += part
    if finish.bias is not None:
        total += finish.bias[column : column + out.shape[1]]
    out.copy_(FUNCTIONS[finish.activation](total) if finish.activation != "none" else total)
