"""The signaled product on a GPU: one persistent kernel for all tiles, a counter for each parcel.

Counters are cleared on the call's stream before the communication stream is forked, the kernel adds to them, and the
communication stream waits for each with a stream memory operation: constants only, so a captured call can be replayed.
Where tiles wait for rows, the words go the other way: the communication stream sets them, the kernel waits.

The kernel takes as many SMs as the plan says; what runs beside it (sums, copy kernels) needs those that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..fabric import stream_memory, timeline
from ..fabric.cuda import CudaFabric, CudaStream
from ..plan import reorder
from .finish import ACTIVATIONS, Finish
from .product import Product

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..plan.plan import Plan
    from ..plan.problem import Problem
    from ..plan.tiles import TileGrid

_WORD = 32  # int32 words between two counters
_KEPT = 256  # tables of a group: shapes may differ from call to call
_HALVES = (torch.float16, torch.bfloat16)
_BLOCK_K = {128: 64, 64: 32}  # by rows of the tile
_TMA_ALIGNMENT = 16
_TMA_MAJOR = 9  # number of its capability
_TMA_SHARED = 227 << 10  # bytes of shared memory: what a CTA of the kernels with TMA may take
_TABLES, _COUNTERS, _CAPTURED = object(), object(), object()  # names of what is kept with a fabric


@dataclass(frozen=True, slots=True)
class Factor:
    """A matrix whose rows are contiguous, perhaps after a transposition."""

    tensor: torch.Tensor
    transposed: bool

    @property
    def bulk(self) -> bool:
        """Whether TMA can read it."""
        *rows, one = self.tensor.stride()
        size = self.tensor.element_size()
        return (
            one == 1 and self.tensor.numel() > 0 and all(row * size % _TMA_ALIGNMENT == 0 for row in rows)
            and self.tensor.data_ptr() % _TMA_ALIGNMENT == 0
        )  # fmt: skip


class CudaTileProduct(Product):
    """x [M, K] @ w [K, N] into the flat `buffer`, as `plan` lays tiles out; `finish` where the product is complete."""

    def __init__(
        self,
        fabric: Fabric,
        problem: Problem,
        plan: Plan,
        x: torch.Tensor,
        w: torch.Tensor,
        buffer: torch.Tensor,
        finish: Finish | None,
        numbers: NDArray[np.int64] | None = None,
        grid: TileGrid | None = None,
    ) -> None:
        """`numbers[shard, parcel]`: for a collective program, which numbers the parcels its own way.

        `grid`: tiles that are not the problem's own: where w [experts, K, N] has one weight for each expert.

        It waits for all of them with one value, so a counter begins at 1 - its tiles and is complete at 1.
        """
        assert isinstance(fabric, CudaFabric)
        assert plan.tile is not None
        if x.dtype == torch.float64:
            was = "signaled for float64 on a GPU"
            raise InvalidArgument(argument="strategy", was=was, must="serial or chunked, or another dtype")
        self._fabric, self._plan, self._buffer, self._finish = fabric, plan, buffer, finish
        self._x, self._w = x, w
        self.waits_for_rows = problem.operator == "all_gather_matmul"
        grid, rank = grid or problem.grid(plan), fabric.group.rank
        key: tuple[object, ...] = ("tiles", problem.key, problem.shards, grid.blocks, plan.digest, rank)
        self._begin: torch.Tensor | None = None
        if numbers is None:
            self._tiles = reorder.parcel_tiles(grid, plan, rank)
            self._table = device_table(fabric, key, lambda: reorder.tile_table(grid, plan, rank))
        else:
            given = numbers
            self._tiles = (1,) * (int(given.max(initial=-1)) + 1)

            def table() -> NDArray[np.int64]:
                return reorder.renumbered(grid, reorder.tile_table(grid, plan, rank), given)

            def begin() -> NDArray[np.int64]:
                return _spread(1 - np.bincount(table()[:, reorder.PARCEL], minlength=len(self._tiles)))

            key = (*key, given.tobytes())
            self._table = device_table(fabric, key, table)
            self._begin = device_table(fabric, ("begin", *key), begin)
        parcels = len(self._tiles)
        self._counters = counters(fabric, parcels + 1)  # the last one counts the tiles that were fetched
        self._fetched = self._counters[_WORD * parcels :]
        full = problem.n * x.element_size() % _TMA_ALIGNMENT == 0 and buffer.data_ptr() % _TMA_ALIGNMENT == 0
        if plan.layout == "natural":  # the descriptor ends where the matrix does
            whole = bool((grid.bands[:-1, 1] == plan.tile[0]).all())
            self._stored_as = problem.m, problem.n
        else:  # tile below tile, each complete
            whole = bool((grid.bands[:, 1] == plan.tile[0]).all()) and problem.n % plan.tile[1] == 0
            self._stored_as = buffer.numel() // plan.tile[1], plan.tile[1]
        self._bulk_stores = full and whole and buffer.numel() > 0
        self._even = problem.n % 8 == 0 and plan.tile[1] % 8 == 0 and buffer.data_ptr() % _TMA_ALIGNMENT == 0

    @property
    def words(self) -> int:
        """The address of the first counter; they lie 128 bytes apart."""
        return self._counters.data_ptr()

    def prepare(self) -> None:
        self._counters.zero_()
        if self._begin is not None:
            self._counters[: len(self._begin)].copy_(self._begin)

    def start(self) -> None:
        if self._table.shape[0]:
            with timeline.event("matmul", engine="compute", tiles=self._table.shape[0]):
                self._launch()

    def reach(self, parcel: int) -> None:
        """The kernel does."""

    def await_parcel(self, parcel: int) -> None:
        if self._tiles[parcel]:
            address = self._counters.data_ptr() + 4 * _WORD * parcel
            self._fabric.guard.wait(address, self._tiles[parcel], on_host=False)

    def rows_are_here(self, parcel: int) -> None:
        stream = stream_memory.current_stream(self._fabric.device)
        stream_memory.write(stream, self._counters.data_ptr() + 4 * _WORD * parcel, 1)  # releases the rows

    def _launch(self) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from ..kernels import gemm

        assert self._plan.tile is not None
        block_m, block_n = self._plan.tile
        guard = self._fabric.guard
        tiles, inner = self._table.shape[0], self._x.shape[1]
        bias = self._finish.bias if self._finish is not None else None
        shared: dict[str, Any] = {
            "BIAS": bias is not None,
            "ACTIVATION": ACTIVATIONS.index(self._finish.activation) if self._finish is not None else 0,
            "BLOCK_M": block_m, "BLOCK_N": block_n, "EVEN": self._even,
        }  # fmt: skip
        ends = (guard.abort, guard.error, int(self._fabric.group.deadline * 1e9))
        grid = (max(1, min(tiles, self._plan.share.multiprocessors or self._fabric.multiprocessors)),)
        given = self._buffer if bias is None else bias.contiguous()
        x, w, grouped = Factor(rows_contiguous(self._x), False), as_factor(self._w), self._w.dim() == 3
        if grouped:
            shared |= {"GROUPED": True, "BIAS_ROW": self._w.shape[2]}
        kernel: Any
        if x.tensor.dtype in _HALVES and x.bulk and w.bulk and has_tma(self._fabric.device) and block_m in _BLOCK_K:
            block_k = _BLOCK_K[block_m]
            parts = 2 if self._bulk_stores else 4
            block_b = [1] * grouped + ([block_n, block_k] if w.transposed else [block_k, block_n])
            c: Any = self._counters
            if self._bulk_stores:
                c = TensorDescriptor.from_tensor(self._buffer.view(self._stored_as), [block_m, block_n // parts])
            arguments = (
                TensorDescriptor.from_tensor(x.tensor, [block_m, block_k]),
                TensorDescriptor.from_tensor(w.tensor, block_b),
                c, self._buffer, given, self._table, self._counters, tiles, inner,
            )  # fmt: skip
            constants = {
                "BLOCK_K": block_k, "TRANSPOSED": w.transposed, "PARTS": parts, "BULK": self._bulk_stores,
                "num_warps": 8, "num_stages": 4,
            }  # fmt: skip
            if self.waits_for_rows:
                kernel = gemm.waiting_gemm_kernel
                kernel[grid](*arguments, self._fetched, *ends, **constants, **shared)
            else:
                kernel = gemm.gemm_kernel
                kernel[grid](*arguments, SIGNAL=True, DEFER=self._bulk_stores, **constants, **shared)
            return
        kernel = gemm.plain_gemm_kernel
        kernel[grid](
            self._x, self._w, self._buffer, given, self._table, self._counters, tiles, inner, *self._x.stride(),
            *self._w.stride()[-2:], *ends, BLOCK_K=32, PARTS=2 if block_n <= 128 else 4, WAITS=self.waits_for_rows,
            SIGNAL=not self.waits_for_rows, b_expert=self._w.stride(0) if grouped else 0,
            num_warps=8 if block_m * block_n > 128 * 64 else 4, num_stages=2, **shared,
        )  # fmt: skip


def device_table(fabric: Fabric, key: tuple[object, ...], make: Callable[[], NDArray[np.int64]]) -> torch.Tensor:
    """The table on the GPU; made and uploaded at the first call that needs it, which cannot be a captured one."""
    tables: dict[tuple[object, ...], torch.Tensor] = fabric.kept.setdefault(id(_TABLES), {})  # type: ignore[assignment]
    found = tables.pop(key, None)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            was = "the first one of this shape and plan, inside a CUDA graph capture"
            raise InvalidArgument(argument="call", was=was, must="made once before it is captured: it uploads a table")
        if len(tables) >= _KEPT:
            torch.cuda.synchronize(fabric.group.device)  # kernels that were enqueued may still read it
            del tables[next(iter(tables))]
        uploads = fabric.stream("upload")
        assert isinstance(uploads, CudaStream)
        with torch.cuda.stream(uploads.stream):  # the caller's own stream may be waiting for something
            found = torch.from_numpy(np.array(make(), order="C")).to(fabric.group.device)
        uploads.stream.synchronize()
    elif torch.cuda.is_current_stream_capturing():  # graphs read it as long as they live
        captured: list[torch.Tensor] = fabric.kept.setdefault(id(_CAPTURED), [])  # type: ignore[assignment]
        captured.append(found)
    tables[key] = found  # last, as it was used last: what a call was given outlives what it asks for next
    return found


def has_table(fabric: Fabric, key: tuple[object, ...]) -> bool:
    """Whether `device_table` would find it: another one is uploaded."""
    return key in fabric.kept.get(id(_TABLES), {})  # type: ignore[operator]


def _spread(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Words as far apart as counters are."""
    found = np.zeros(len(words) * _WORD, np.int64)
    found[::_WORD] = words
    return found


def counters(fabric: CudaFabric, parcels: int) -> torch.Tensor:
    """Words for the parcels of a call on the current stream.

    Calls on one stream come one after the other, so they share them. A captured call has its own: its graph may be
    replayed on any stream. They are never freed while the group lives, as the watchdog may still release them.
    """
    kept: dict[int, torch.Tensor] = fabric.kept.setdefault(id(_COUNTERS), {})  # type: ignore[assignment]
    capturing = torch.cuda.is_current_stream_capturing()
    key = -len(kept) - 1 if capturing else stream_memory.current_stream(fabric.device)
    found = kept.get(key)
    if found is None or found.numel() < parcels * _WORD:
        if found is not None:
            kept[-len(kept) - 1] = found
        with torch.inference_mode(False):  # they are cleared by later calls in any mode
            found = kept[key] = torch.zeros(max(64, parcels) * _WORD, dtype=torch.int32, device=fabric.device)
    return found


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def as_factor(w: torch.Tensor) -> Factor:
    """w [K, N], or one for each expert, as it lies: by rows, by columns, or copied."""
    if w.stride(-1) == 1:
        return Factor(w, False)
    if w.stride(-2) == 1:
        return Factor(w.mT, True)
    return Factor(w.contiguous(), False)


def has_tma(device: torch.device) -> bool:
    """Whether the kernels with TMA run there: GPUs of sm_120 have it, but not the shared memory for so many stages."""
    about = torch.cuda.get_device_properties(device)
    shared = getattr(about, "shared_memory_per_multiprocessor", _TMA_SHARED)  # not every torch tells it
    return about.major >= _TMA_MAJOR and shared >= _TMA_SHARED
