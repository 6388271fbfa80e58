"""x @ w, computed parcel by parcel: who computes, and how it is known that a parcel is complete.

    start        once, before the first parcel
    reach(k)     the caller computes parcel k, unless a kernel that is already running does
    await_parcel on the communication stream: parcel k is complete from here on

CPU: `reach` computes the parcel's tiles one after the other by torch, so nothing is left to wait for. CUDA: `start`
launches one persistent kernel for all tiles (`cuda_product`), and `await_parcel` is a stream memory operation on the
parcel's counter, which holds no SM. Where a collective program moves the parcels, it waits for the same counters, which
then start below zero, so that every one of them ends at 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..fabric import atomics, timeline
from ..fabric.base import WORD_STRIDE
from .finish import Finish
from .grouped import finish_of, multiply_rows, rows_of, weight_of

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..fabric.group import Group
    from ..plan.plan import Plan
    from ..plan.tokens import Block


class Product(ABC):
    """The parcels of one call's product."""

    waits_for_rows = False  # whether the running kernel itself waits for rows of x that are still to come

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """Before other streams are forked: what both sides of a signal must find as it was."""

    def rows_are_here(self, parcel: int) -> None:  # noqa: B027 - the caller of `reach` knows
        """In the order of the current stream: the rows of x that the parcel needs have arrived."""

    def start(self) -> None:  # noqa: B027 - most need nothing
        """Before the first parcel."""

    @abstractmethod
    def reach(self, parcel: int) -> None:
        """The caller's part of computing a parcel."""

    def await_parcel(self, parcel: int) -> None:  # noqa: B027 - what `reach` computed is there
        """In the order of the current stream: the parcel is complete."""


class NoProduct(Product):
    """Nothing is computed: what moves, moves whatever the buffer holds."""

    def reach(self, parcel: int) -> None:
        return


class RowProduct(Product):
    """Parcels of rows, each by torch's own matmul: serial (all of them first) and chunked."""

    def __init__(
        self,
        fabric: Fabric,
        plan: Plan,
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        rows: Sequence[Sequence[tuple[int, int]]],
        finish: Finish | None,
        blocks: Sequence[Block] = (),
    ) -> None:
        """y [M, N] = x @ w, finished if told so. `rows[parcel]`: ranges (first, count) of rows.

        `blocks`: which rows are whose, where w [experts, K, N] has one weight for each expert.
        """
        self._fabric, self._plan, self._blocks = fabric, plan, blocks
        self._x, self._w, self._y, self._rows, self._finish = x, w, y, rows, finish

    def start(self) -> None:
        if self._plan.grain == "serial":
            with timeline.event("matmul", engine="compute", rows=self._x.shape[0]):
                self._multiply(0, self._x.shape[0])

    def reach(self, parcel: int) -> None:
        if self._plan.grain == "serial":
            return
        for first, count in self._rows[parcel]:
            if count:
                with (
                    self._fabric.computing(self._plan.share.multiprocessors),
                    timeline.event("matmul", engine="compute", rows=count),
                ):
                    self._multiply(first, count)

    def _multiply(self, first: int, count: int) -> None:
        multiply_rows(self._x, self._w, self._y, self._blocks, first, count, self._finish)


class TileProduct(Product):
    """Parcels of tiles on a CPU, each tile by torch."""

    def __init__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        buffer: torch.Tensor,
        table: NDArray[np.int64],
        parcels: int,
        finish: Finish | None,
        rows: Sequence[Block] = (),
    ) -> None:
        """Tiles of x @ w to their places in the flat `buffer`, in the order of a tile table.

        `rows`: which are whose, where w has one weight for each expert; a tile may hold rows of several.
        """
        self._x, self._w, self._buffer, self._finish, self._owners = x, w, buffer, finish, rows
        bounds = np.searchsorted(table[:, 6], np.arange(parcels + 1))
        self._blocks = [_merged(table[bounds[one] : bounds[one + 1], :6].tolist()) for one in range(parcels)]

    def reach(self, parcel: int) -> None:
        with timeline.event("matmul", engine="compute", blocks=len(self._blocks[parcel])):
            for row, rows, column, columns, place, stride in self._blocks[parcel]:
                for first, count, expert in rows_of(self._w, self._owners, row, rows):
                    here = place + (first - row) * stride
                    block = self._buffer.as_strided(
                        (count, columns), (stride, 1), self._buffer.storage_offset() + here
                    )  # fmt: skip
                    self._multiply(first, count, column, columns, expert, block)

    def _multiply(self, row: int, rows: int, column: int, columns: int, expert: int, block: torch.Tensor) -> None:
        x, w = self._x[row : row + rows], weight_of(self._w, expert)[:, column : column + columns]
        aside = self._finish is not None and not block.is_contiguous()  # it finishes what lies together
        product = torch.mm(x, w) if aside else torch.mm(x, w, out=block)
        if self._finish is not None:
            bias = finish_of(self._finish, expert).bias
            part = None if bias is None else bias[column : column + columns]
            Finish(part, self._finish.activation).apply(product)
        if aside:
            block.copy_(product)


class CountedTileProduct(TileProduct):
    """The same for a collective program, which waits for a word of each parcel: 0, and 1 once the parcel is complete.

    The add releases the parcel's tiles, and whoever sees the 1 has acquired them.
    """

    def __init__(
        self,
        group: Group,
        x: torch.Tensor,
        w: torch.Tensor,
        buffer: torch.Tensor,
        table: NDArray[np.int64],
        parcels: int,
    ) -> None:
        super().__init__(x, w, buffer, table, parcels, None)
        self._group, self._words = group, np.zeros(max(1, parcels) * WORD_STRIDE // 4, np.int32)

    @property
    def words(self) -> int:
        """The address of the first word; they lie WORD_STRIDE bytes apart."""
        return int(self._words.ctypes.data)

    def reach(self, parcel: int) -> None:
        super().reach(parcel)
        atomics.signal_add(self.words + WORD_STRIDE * parcel, 1)

    def await_parcel(self, parcel: int) -> None:
        """On another thread. The caller computes; if it fails, so does the group, and that ends the wait."""
        word, abort = self.words + WORD_STRIDE * parcel, self._group.abort_address
        while atomics.wait(word, 1, abort, atomics.SPINS_CROWDED) != atomics.ARRIVED:
            self._group.check()


def _merged(tiles: list[list[int]]) -> list[list[int]]:
    """Tiles of a parcel that stand one below the other, in the matrix and in the buffer, as one: fewer calls of torch.

    Within a parcel the order of computing does not matter here, as one thread computes all of it.
    """
    blocks: list[list[int]] = []
    for tile in sorted(tiles, key=lambda one: (one[2], one[0])):
        row, rows, column, columns, place, stride = tile
        if blocks:
            above = blocks[-1]
            follows = above[0] + above[1] == row and above[4] + above[1] * above[5] == place
            if follows and (above[2], above[3], above[5]) == (column, columns, stride):
                above[1] += rows
                continue
        blocks.append(tile)
    return blocks
