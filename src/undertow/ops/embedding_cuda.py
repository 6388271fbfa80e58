"""Pooled lookups on a GPU: launches of `kernels/embedding.py`, into this rank's own memory or into that of peers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..fabric import stream_memory, timeline
from ..fabric.base import WORD_STRIDE
from ..fabric.cuda import CudaFabric
from ..plan.bags import kernel_shape, slices
from ..plan.plan import Plan
from .bags import Bags
from .cuda_product import counters, device_table
from .product import Product

_SPREAD_CTAS = 8  # on an SM: copies wait for memory
_THREADS = 128
_TICKETS, _LOADED = object(), object()  # names of what is kept with a fabric


class Slice(NamedTuple):
    """A row of the kernels' list of slices, but for what the launch adds."""

    address: int  # counted from the launch's buffer, if it has one
    stride: int
    first: int
    bags: int
    signal: int = 0  # counted from the launch's words, if it has any
    source: int = 0  # counted from the launch's buffer
    source_stride: int = 0
    choice: int = 0
    distance: int = 0
    to: int = -1  # of a slice that is posted: to whom
    there: int = 0  # and where it lands


# -- launches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lookup:
    """The kernels' view of one rank's bags. `columns[i]`: where piece i goes in a destination row.

    `only_load` launches do nothing but load the kernel and upload its lists: behind a waiting stream, loading might
    wait for what the stream waits for. A captured call has neither to do, as it was made before the capture.
    """

    fabric: CudaFabric
    bags: Bags
    plan: Plan
    columns: tuple[int, ...]

    def pool(
        self, found: Sequence[Slice], buffer: torch.Tensor | None = None, words: int = 0, only_load: bool = False
    ) -> None:
        """Pool all slices in one launch of the plan's SMs, into `buffer` or where their addresses lead.

        `words`: what signals are counted from. Those of a captured call are new, and the list of slices, which cannot
        be uploaded in a capture, must be the one of the calls before it.
        """
        from ..kernels import embedding

        bags = self.bags
        if not found or not bags.tables or (only_load and _is_captured()):
            return
        arguments, constants, ctas = self.pooling(found, bags.tables[0], buffer)
        if not only_load:
            grid, count = (ctas,), len(found)
        elif is_loaded(self.fabric, "pool", arguments, constants):
            return
        else:
            grid, count = (1,), 0
        kernel: Any = embedding.pool_kernel
        origin = 0 if buffer is None else buffer.data_ptr()
        kernel[grid](*arguments, count, bags.values.numel(), origin, words, **constants)

    def exchange(
        self,
        found: Sequence[Slice],
        told: Sequence[int],
        awaited: Sequence[int],
        place: int,
        out: torch.Tensor,
        only_load: bool = False,
    ) -> None:
        """A whole call in one launch: pool into the places of others and wait for what they store into `out`.

        `told`: addresses of words at the sources, which learn that this rank's place is number `place`; `awaited`: of
        those that the sources set here. The kernel poisons `out` if it fails.
        """
        from ..kernels import embedding

        if (not found and not told and not awaited) or (only_load and _is_captured()):
            return
        arguments, constants, ctas = self.pooling(found, out, None)
        listed = (*told, *awaited, 0)  # never an empty list
        words = device_table(self.fabric, ("words", listed), lambda: np.array(listed, np.int64))
        counts: tuple[int, ...] = (len(told), len(awaited), place)
        if not only_load:
            grid, count, result = (ctas,), len(found), (out.data_ptr(), out.nbytes)
        elif is_loaded(self.fabric, "exchange", arguments, constants):
            return
        else:
            grid, count, result, counts = (1,), 0, (0, 0), (0, 0, 0)
        guard, deadline = self.fabric.guard, int(self.fabric.group.deadline * 1e9)
        kernel: Any = embedding.exchange_kernel
        kernel[grid](
            *arguments, count, self.bags.values.numel(), words, *counts, *result, guard.abort, guard.error, deadline,
            LANES=_THREADS, **constants,
        )  # fmt: skip

    def pooling(
        self, found: Sequence[Slice], like: torch.Tensor, buffer: torch.Tensor | None, more_tickets: int = 0
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], int]:
        """What launches of pooling kernels have in common: tensors, the tickets last of them, constants and CTAs."""
        bags, shape = self.bags, kernel_shape(self.plan, like.element_size())
        if like.dtype == torch.float64:
            raise InvalidArgument(argument="tables[0]", was="of torch.float64", must="of 32 or 16 bits on a GPU")
        weights = bags.weights if bags.weights is not None else bags.values
        constants: dict[str, Any] = {
            **shape.options(), "ALIGNMENT": self._alignment(found, like, buffer), "MEAN": bags.pooling == "mean",
            "WEIGHTS": bags.weights is not None,
            "WHOLE": all(one.dim == shape.columns for one in bags.pieces), "maxnreg": shape.registers,
        }  # fmt: skip
        table, items = self._slices(found, shape.bags)
        tickets = _tickets(self.fabric, len(found) + 1 + more_tickets)
        arguments = (like, table, self._tables(), bags.values, bags.offsets, weights, tickets)
        ctas = shape.ctas * (self.plan.share.multiprocessors or self.fabric.multiprocessors)
        return arguments, constants, max(1, min(items, ctas))

    def spread(
        self,
        found: Sequence[Slice],
        buffer: torch.Tensor,
        ctas: int | None = None,
        only_load: bool = False,
    ) -> None:
        """Copy pooled rows of `buffer` to their places in one launch; `source` of each slice says from where."""
        from ..kernels import embedding

        if not found or not self.bags.tables or (only_load and _is_captured()):
            return
        columns = kernel_shape(self.plan, buffer.element_size()).columns
        block = 4 * max(1, _THREADS * 16 // (columns * buffer.element_size()))
        constants = {
            "BAGS": block, "COLUMNS": columns, "ALIGNMENT": self._alignment(found, buffer, buffer),
            "num_warps": _THREADS // 32,
        }  # fmt: skip
        table, items = self._slices(found, block)
        arguments = (buffer, table, self._tables(), _tickets(self.fabric, len(found)))
        ctas = ctas or _SPREAD_CTAS * self.fabric.multiprocessors
        if not only_load:
            grid, count = (max(1, min(items, ctas)),), len(found)
        elif is_loaded(self.fabric, "spread", (buffer,), constants):
            return
        else:
            grid, count = (1,), 0
        kernel: Any = embedding.spread_kernel
        kernel[grid](*arguments, count, buffer.data_ptr(), **constants)

    def _slices(self, found: Sequence[Slice], block: int) -> tuple[torch.Tensor, int]:
        """The list on the device, and how many items it has."""
        from ..kernels.embedding import SLICE_WORDS

        tables = len(self.bags.pieces)
        items = [tables * -(-one.bags // block) for one in found]
        begins = list(itertools.accumulate(items, initial=0))

        def rows() -> NDArray[np.int64]:
            lines = [
                (one.address, one.stride, one.first, one.bags, one.signal, begin, count, one.source, one.source_stride,
                 one.choice, one.distance, one.to, one.there)
                for one, begin, count in zip(found, begins, items, strict=False)
            ]  # fmt: skip
            return np.array(lines, np.int64).reshape(-1, SLICE_WORDS)

        return device_table(self.fabric, ("slices", tuple(found), block, tables), rows), begins[-1]

    def _tables(self) -> torch.Tensor:
        bags = self.bags
        sources = list(itertools.accumulate((one.dim for one in bags.pieces), initial=0))
        lines = tuple(
            (table.data_ptr(), piece.rows, piece.dim, table.stride(0), column, number * bags.samples, piece.first_row,
             source)
            for number, (table, piece, column, source) in enumerate(
                zip(bags.tables, bags.pieces, self.columns, sources, strict=False))
        )  # fmt: skip
        return device_table(self.fabric, ("tables", lines), lambda: np.array(lines, np.int64))

    def _alignment(self, found: Sequence[Slice], like: torch.Tensor, buffer: torch.Tensor | None) -> int:
        """Elements that all addresses are multiples of: those of 16 bytes, or one."""
        size = like.element_size()
        bytes_of = [
            *(one.data_ptr() for one in self.bags.tables), *(one.stride(0) * size for one in self.bags.tables),
            *(one.dim * size for one in self.bags.pieces), *(one * size for one in self.columns),
            *(one.address for one in found), *(one.stride * size for one in found),
            *(one.source for one in found), *(one.source_stride * size for one in found),
            *(one.distance * size for one in found), 0 if buffer is None else buffer.data_ptr(),
        ]  # fmt: skip
        return 16 // size if all(one % 16 == 0 for one in bytes_of) else 1


def is_loaded(fabric: CudaFabric, kernel: str, tensors: tuple[torch.Tensor, ...], constants: dict[str, Any]) -> bool:
    """Whether this variant was launched before; from now on it was."""
    loaded: set[object] = fabric.kept.setdefault(id(_LOADED), set())  # type: ignore[assignment]
    key = (kernel, *(one.dtype for one in tensors), *sorted(constants.items()))
    known = key in loaded
    loaded.add(key)
    return known


def _is_captured() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _tickets(fabric: CudaFabric, count: int) -> torch.Tensor:
    """Zeros that each launch leaves as zeros; of every stream its own, of a captured call its own."""
    from ..kernels.embedding import TICKET_WORDS

    kept: dict[int, torch.Tensor] = fabric.kept.setdefault(id(_TICKETS), {})  # type: ignore[assignment]
    stream = stream_memory.current_stream(fabric.device)
    key = -len(kept) - 1 if _is_captured() else stream
    found = kept.get(key)
    if found is None or found.numel() < count * TICKET_WORDS:
        if found is not None:
            kept[-len(kept) - 1] = found
        found = kept[key] = torch.zeros(max(64, count) * TICKET_WORDS, dtype=torch.int32, device=fabric.device)
    return found


# -- pooling into a buffer of this rank's own --------------------------------------------------------------------------


class CudaPooling(Product):
    """All samples of this rank's pieces into `buffer` [samples, width], parcel by parcel as the plan says."""

    def __init__(
        self,
        fabric: CudaFabric,
        bags: Bags,
        batches: Sequence[int],
        plan: Plan,
        buffer: torch.Tensor,
        own: Callable[[], None],
    ) -> None:
        """`own` takes this rank's own rows from the buffer, in the caller's order, once all are enqueued."""
        self._fabric, self._plan, self._bags, self._buffer, self._own = fabric, plan, bags, buffer, own
        columns = tuple(itertools.accumulate((one.dim for one in bags.pieces), initial=0))[:-1]
        self._lookup = Lookup(fabric, bags, plan, columns)
        self._leaving = slices(batches, plan, fabric.group.rank)
        self._words = counters(fabric, len(self._leaving))

    def load(self) -> None:
        """Before anything waits."""
        for parcel in range(len(self._plan.parcels)) if self._plan.grain == "chunked" else (None,):
            self._pool(parcel, only_load=True)

    def prepare(self) -> None:
        self._words.zero_()

    def start(self) -> None:
        if self._plan.grain != "chunked":
            self._pool(None)
            self._own()

    def reach(self, parcel: int) -> None:
        if self._plan.grain == "chunked":
            self._pool(parcel)
            if parcel + 1 == len(self._plan.parcels):
                self._own()

    def await_parcel(self, parcel: int) -> None:
        """One word for each slice that leaves; its last finisher's release covers it."""
        if self._plan.grain == "signaled" and self._bags.tables:
            for number, one in enumerate(self._leaving):
                if one.parcel == parcel and one.destination != self._fabric.group.rank:
                    self._fabric.guard.wait(self._words.data_ptr() + WORD_STRIDE * number, 1, on_host=False)

    def _pool(self, parcel: int | None, only_load: bool = False) -> None:
        """One parcel, or all."""
        width, size, signal = self._bags.width, self._buffer.element_size(), self._plan.grain == "signaled"
        found = [
            Slice(one.first * width * size, width, one.first, one.bags, WORD_STRIDE * (number + 1) if signal else 0)
            for number, one in enumerate(self._leaving) if parcel is None or one.parcel == parcel
        ]  # fmt: skip
        with timeline.event("lookup", engine="compute", bags=sum(one.bags for one in found)):
            words = self._words.data_ptr() - WORD_STRIDE  # counted from one before the first: 0 is nobody's
            self._lookup.pool(found, self._buffer, words, only_load)
