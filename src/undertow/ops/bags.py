"""Bags of indices and the tables they look up: the arguments of one rank, checked, and pooling on a CPU.

`values` holds the indices of all bags one after the other, feature-major as in TorchRec and FBGEMM: the bags of the
rank's first piece for samples 0, 1, ..., then those of its second piece, ... `offsets[b]` is where bag b begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..plan.bags import Layout, Piece
from .operands import check_dtype

POOLINGS = ("sum", "mean")
_INDEX_TYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Shard:
    """A piece of table number `table`: rows from `first_row` on, columns from `first_column` on."""

    weight: torch.Tensor
    table: int
    first_row: int = 0
    first_column: int = 0


@dataclass(frozen=True)
class Bags:
    """What one rank looks up: `samples` bags of each of its `tables`, described by `pieces`."""

    tables: tuple[torch.Tensor, ...]
    pieces: tuple[Piece, ...]
    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    pooling: str
    samples: int

    @property
    def width(self) -> int:
        return sum(one.dim for one in self.pieces)

    @cached_property
    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """On a CPU: tables by address, values and offsets as 64-bit integers, weights in the tables' type or none."""
        dtype = self.tables[0].dtype
        about = [
            (table.data_ptr(), piece.rows, piece.dim, table.stride(0), piece.first_row)
            for table, piece in zip(self.tables, self.pieces, strict=True)
        ]
        weights = (
            torch.empty(0, dtype=dtype, device="cpu")
            if self.weights is None
            else self.weights.detach().to(dtype).contiguous()
        )
        numbers = self.values.long().numpy(), self.offsets.long().numpy()
        return np.array(about, np.int64), *numbers, weights.numpy()

    @property
    def mean_length(self) -> float:
        return self.values.numel() / max(1, self.samples * len(self.pieces))


def tables_of(tables: Sequence[torch.Tensor | Shard]) -> tuple[torch.Tensor, ...]:
    return tuple(one.weight if isinstance(one, Shard) else one for one in tables)


def check_tables(tables: Sequence[torch.Tensor | Shard], device: torch.device) -> None:
    """[rows, dim] each, of one dtype, on the group's device; either all are shards or none is."""
    kinds = {isinstance(one, Shard) for one in tables}
    if len(kinds) > 1:
        raise InvalidArgument(argument="tables", was="tensors beside shards", must="all tensors or all shards")
    found = tables_of(tables)
    for number, one in enumerate(found):
        name = f"tables[{number}]"
        if not isinstance(one, torch.Tensor) or one.dim() != 2 or one.shape[1] < 1:
            was = f"of shape {list(one.shape)}" if isinstance(one, torch.Tensor) else type(one).__name__
            raise InvalidArgument(argument=name, was=was, must="a matrix [rows, dim]")
        if one.device != device:
            raise InvalidArgument(argument=name, was=f"on {one.device}", must=f"on {device}")
        check_dtype(name, one.dtype)
        if one.dtype != found[0].dtype:
            raise InvalidArgument(argument=name, was=f"of {one.dtype}", must=f"of {found[0].dtype}, as tables[0] is")
        if one.stride(1) != 1:
            raise InvalidArgument(argument=name, was=f"strided {tuple(one.stride())}", must="of contiguous rows")


def check_apart(tables: Sequence[torch.Tensor]) -> None:
    """Each once: steps of rows are taken table by table, each with its own state and its part of the gradient."""
    seen: dict[int, int] = {}
    for number, one in enumerate(tables):
        first = seen.setdefault(one.data_ptr(), number) if one.numel() else number
        if first != number:
            must = "a table of its own where an optimizer steps rows"
            raise InvalidArgument(argument=f"tables[{number}]", was=f"the memory of tables[{first}]", must=must)


def pieces_of(tables: Sequence[torch.Tensor | Shard], first: int) -> list[list[int]]:
    """Each as the numbers of a `Piece`; plain tensors are whole tables numbered from `first` on."""
    found = []
    for number, one in enumerate(tables):
        if isinstance(one, Shard):
            rows, dim = one.weight.shape
            found.append([one.table, rows, dim, one.first_row, one.first_column])
        else:
            found.append([first + number, *one.shape, 0, 0])
    return found


def offsets_of(
    values: torch.Tensor, offsets: torch.Tensor | None, lengths: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """Where bags begin, and the end of the last; from `lengths` if those are given. Checks all that costs no time."""
    if (offsets is None) == (lengths is None):
        was = "given beside lengths" if offsets is not None else "missing, as lengths is"
        raise InvalidArgument(argument="offsets", was=was, must="given, or lengths instead of it")
    given, name = (offsets, "offsets") if offsets is not None else (lengths, "lengths")
    assert given is not None
    for argument, tensor in (("values", values), (name, given)):
        if tensor.dim() != 1:
            raise InvalidArgument(argument=argument, was=f"of shape {list(tensor.shape)}", must="of one dimension")
        if tensor.dtype not in _INDEX_TYPES:
            raise InvalidArgument(argument=argument, was=f"of {tensor.dtype}", must="of torch.int32 or torch.int64")
        if tensor.device != values.device:
            raise InvalidArgument(argument=argument, was=f"on {tensor.device}", must=f"on {values.device}")
    fits = weights is None or (weights.shape == values.shape and weights.device == values.device)
    if weights is not None and not (fits and weights.is_floating_point()):
        was = f"{list(weights.shape)} {weights.dtype} on {weights.device}"
        must = f"{list(values.shape)} of a floating-point dtype on {values.device}"
        raise InvalidArgument(argument="weights", was=was, must=must)
    if lengths is not None:
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    if given.numel() == 0:
        must = "of one element more than there are bags"
        raise InvalidArgument(argument="offsets", was="of 0 elements", must=must)
    return given


def check_bags(bags: Bags, layout: Layout) -> None:
    """What needs a look at the numbers: always on a CPU, on a GPU where the user asks for it."""
    offsets, values = bags.offsets, bags.values
    falls = torch.nonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        where = int(falls[0])
        was = f"{int(offsets[where])} at {where} and {int(offsets[where + 1])} at {where + 1}"
        raise InvalidArgument(argument="offsets", was=was, must="never decreasing (lengths: never negative)")
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != values.numel():
        was = f"from {first} to {last}"
        raise InvalidArgument(argument="offsets", was=was, must=f"from 0 to {values.numel()}, the number of values")
    for number, piece in enumerate(bags.pieces):
        begin, end = (int(offsets[one * bags.samples]) for one in (number, number + 1))
        part, rows = values[begin:end], layout.rows[piece.table]
        wrong = torch.nonzero((part < 0) | (part >= rows))
        if len(wrong):
            where = int(wrong[0])
            was = f"{int(part[where])}, an index of table {piece.table} (tables[{number}])"
            argument, must = f"values[{begin + where}]", f"between 0 and {rows - 1}, as that table has {rows} rows"
            raise InvalidArgument(argument=argument, was=was, must=must)


def pool(bags: Bags, first: int, count: int, into: torch.Tensor) -> None:
    """Samples [first, first + count) of every piece into `into` [count, width], piece beside piece, on a CPU.

    The bags must have been checked (`check_bags`): nothing is looked at again.
    """
    if count and bags.tables and bags.tables[0].dtype in (torch.float32, torch.float64):
        _pool_compiled(bags, first, into)
        return
    column = 0
    for number, (table, piece) in enumerate(zip(bags.tables, bags.pieces, strict=True)):
        start = number * bags.samples + first
        bounds = bags.offsets[start : start + count + 1]
        part = slice(int(bounds[0]), int(bounds[-1]))
        values, offsets = bags.values[part], (bounds - bounds[0]).to(bags.values.dtype)
        weights = None if bags.weights is None else bags.weights[part]
        into[:, column : column + piece.dim] = _pooled(table, piece, values, offsets, weights, bags.pooling)
        column += piece.dim


def _pool_compiled(bags: Bags, first: int, into: torch.Tensor) -> None:
    from .cpu_pooling import pool_tables

    tables, values, offsets, weights = bags.arrays
    weighted, mean = bags.weights is not None, bags.pooling == "mean"
    pool_tables(tables, values, offsets, weights, weighted, mean, bags.samples, first, into.numpy())


def _pooled(
    table: torch.Tensor,
    piece: Piece,
    values: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    pooling: str,
) -> torch.Tensor:
    """Halves, by torch: [bags, dim] in fp32, as the caller rounds once. Rows that others hold count nothing in the sum,
    but count in the mean's number.
    """
    local = values.long() - piece.first_row
    here = (local >= 0) & (local < piece.rows)
    lengths = (offsets[1:] - offsets[:-1]).long()
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths, output_size=len(local))
    rows = table.detach()[local[here]].float()
    if weights is not None:
        rows *= weights.detach()[here, None].float()
    found = torch.zeros(len(lengths), piece.dim, dtype=rows.dtype, device=rows.device).index_add_(0, bag[here], rows)
    return found / lengths.clamp(min=1)[:, None] if pooling == "mean" else found


def add_up(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[rows, room] to [rows, width]: what several holders of rows sent, added in rank order, rounded once.

    Always memory of its own: `whole` may be a place that the next call writes to.
    """
    y = whole[:, : layout.width].clone(memory_format=torch.contiguous_format)
    wide = torch.float32 if whole.dtype in (torch.float16, torch.bfloat16) else whole.dtype
    for column, dim, others in layout.sums:
        total = whole[:, column : column + dim].to(wide)
        for other in others:
            total = total + whole[:, other : other + dim]
        y[:, column : column + dim] = total
    return y
