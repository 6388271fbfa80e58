"""The gradient of a weight, computed while the gradient of an input moves.

    reference:  dw [K, N] = x [M, K]^T @ dz [M, N]

Two forms, by what moves in the backward pass:

- `Arriving`, which is `Taking` them: rows of dz (or of x) come from other ranks for a matmul that overlaps with it;
  each parcel that has come is multiplied for the weight too, before the next is waited for.
- `Beside`: the rows that the weight's gradient needs are brought on a stream of their own while another matmul computes
  what leaves, and the weight's matmul runs while the last of that is still under way.

A weight is often the transpose of a parameter [N, K]. Its gradient then lies in memory as the parameter does
(`operands.like_weight`), or autograd would have to turn it round, which takes longer than most of what is hidden here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ..fabric import timeline
from ..plan.plan import split
from .grouped import bias_gradient, rows_of, weight_of
from .operands import is_transposed

if TYPE_CHECKING:
    from ..collective.carry import Carrier
    from ..plan.tokens import Block

_HALVES = (torch.float16, torch.bfloat16)
_PARCELS = 4  # in which rows are gathered again: each needs room for one parcel only


class Taking(Protocol):
    """What takes part of all rows that a gather, or an exchange of rows, brings for another matmul."""

    @property
    def whole(self) -> torch.Tensor | None:
        """Where the rows are wanted, all of them; None: wherever they come."""

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Results that exist before the call, to be poisoned with its own."""

    @property
    def made(self) -> list[torch.Tensor]:
        """What has been computed, to be poisoned where the rows were not right."""

    @property
    def columns(self) -> int:
        """Columns of a further product that would take as long as what is computed of the rows."""

    @property
    def text(self) -> str:
        """What ranks must agree on, for comparing calls."""

    def begin(self, z: torch.Tensor) -> None:
        """z [M, N], whose rows are still to come. May be called again: then everything starts anew."""

    def all_at_once(self, z: torch.Tensor) -> None:
        """All rows of z are here, and are not read any more when this is over (CUDA: in the order of the stream)."""

    def add(self, rows: Sequence[tuple[int, int]]) -> None:
        """Rows (first, count) of z are here."""


class Arriving:
    """dw [K, N] = x [M, K]^T @ z [M, N] and the sum over rows of z, as rows of z arrive.

    16-bit sums are kept in fp32 between parcels, and rounded once more in the end.
    """

    whole: torch.Tensor | None = None
    outputs: tuple[torch.Tensor, ...] = ()
    text = ""

    def __init__(self, x: torch.Tensor, w: torch.Tensor, blocks: Sequence[Block] = (), bias: bool = True) -> None:
        """`w` [K, N], or one for each expert; x may have fewer columns. `blocks`: which rows are whose. `bias`: whether
        the sum over rows is wanted."""
        self._x, self._blocks, self._experts = x, blocks, w.shape[0] if w.dim() == 3 else 0
        self._turned, self._wants_bias = is_transposed(w), bias
        self._z = x
        self._total: torch.Tensor | None = None
        self._summed: torch.Tensor | None = None

    def begin(self, z: torch.Tensor) -> None:
        self._z, self._total, self._summed = z, None, None

    def all_at_once(self, z: torch.Tensor) -> None:
        self.begin(z)
        self.add([(0, z.shape[0])])
        if self._wants_bias:
            self._summed = self.bias

    @property
    def columns(self) -> int:
        return self._x.shape[1]

    @property
    def made(self) -> list[torch.Tensor]:
        """Rows among it whose sum is still wanted: it is taken of them later."""
        rows = self._z if self._wants_bias and self._summed is None else None
        return [one for one in (self._total, self._summed, rows) if one is not None]

    def add(self, rows: Sequence[tuple[int, int]]) -> None:
        if list(rows) == [(0, self._z.shape[0])] and not self._experts:  # all at once: nothing is to be added up
            with timeline.event("weight gradient", engine="compute", rows=self._z.shape[0]):
                self._total = (self._z.t() @ self._x).t() if self._turned else self._x.t() @ self._z
            return
        sums = self._sums()
        for first, count in rows:
            if not count:
                continue
            for row, part, expert in rows_of(sums, self._blocks, first, count):
                x, z, total = self._x[row : row + part], self._z[row : row + part], weight_of(sums, expert)
                with timeline.event("weight gradient", engine="compute", rows=part):
                    into, left, right = (total.t(), z.t(), x) if self._turned else (total, x.t(), z)
                    if total.dtype == z.dtype:
                        into.addmm_(left, right)
                    else:
                        into += left @ right

    def _sums(self) -> torch.Tensor:
        if self._total is None:
            wide = torch.float32 if self._z.dtype in _HALVES else self._z.dtype
            experts = (self._experts,) * (self._experts > 0)
            ends = (self._z, self._x) if self._turned else (self._x, self._z)
            total = self._z.new_zeros(*experts, *(one.shape[1] for one in ends), dtype=wide)
            self._total = total.mT if self._turned else total
        return self._total

    @property
    def weight(self) -> torch.Tensor:
        return self._sums().to(self._z.dtype)

    @property
    def bias(self) -> torch.Tensor:
        if self._summed is not None:
            return self._summed
        return bias_gradient(self._z, self._blocks, self._experts) if self._experts else self._z.sum(0)


@dataclass(frozen=True)
class Beside:
    """`compute` runs after the matmul, beside what still moves; `bring`, if any, before it and beside the matmul.

    `longest`: elements of the longest piece that `bring` sends to another rank; the same on all ranks. `gathers`: what
    it brings and `compute` uses, for those who bring it otherwise (`whole.bringer`).
    """

    compute: Callable[[], None]
    bring: Callable[[Carrier], None] | None = None
    longest: int = 0
    gathers: Gathers | None = None


@dataclass(frozen=True)
class Gathers:
    """`made` is computed by `use(whole [M, K])`, the `shard`s [M_r, K] of all ranks, of `rows[r]` rows each."""

    shard: torch.Tensor
    rows: tuple[int, ...]
    use: Callable[[torch.Tensor], None]
    made: torch.Tensor


def multiplied(x: torch.Tensor, dz: torch.Tensor, dw: torch.Tensor) -> None:
    """dw [K, N] = x [M, K]^T @ dz [M, N]"""
    with timeline.event("weight gradient", engine="compute", rows=x.shape[0]):
        if is_transposed(dw):
            torch.mm(dz.t(), x, out=dw.t())
        else:
            torch.mm(x.t(), dz, out=dw)


def gathered_again(x: torch.Tensor, counts: Sequence[int], rank: int, dz: torch.Tensor, dw: torch.Tensor) -> Beside:
    """dw [K, N] = x^T @ dz [M, N] of the x [M_r, K] of all ranks: kept as shards, gathered when dw needs them."""
    firsts = [sum(counts[:source]) for source in range(len(counts))]
    pieces = [split(count, _PARCELS) for count in counts]
    brought: list[torch.Tensor] = []

    def use(whole: torch.Tensor) -> None:
        multiplied(whole, dz, dw)

    def bring(carrier: Carrier) -> None:
        # Of the stream that brings, and free again when `use` has been enqueued on the caller's: that one is forked
        # again behind `use`, so whoever gets it next there comes after it (`overlap.py`).
        whole = x.new_empty(sum(counts), x.shape[1])

        def part(source: int, parcel: int) -> torch.Tensor:
            start, stop = pieces[source][parcel]
            return whole[firsts[source] + start : firsts[source] + stop].view(-1)

        whole[firsts[rank] : firsts[rank] + counts[rank]] = x
        for parcel in range(_PARCELS):
            carrier.send(parcel, [part(rank, parcel)] * len(counts))
            carrier.receive(parcel, [part(source, parcel) for source in range(len(counts))])
        brought.append(whole)

    longest = max(stop - start for cuts in pieces for start, stop in cuts) * x.shape[1]
    return Beside(lambda: use(brought.pop()), bring, longest, Gathers(x, tuple(counts), use, dw))
