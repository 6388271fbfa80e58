"""What follows a reduced matmul in a model, done while its result is unpacked: residual add, RMSNorm, LayerNorm.

    h = activation(sum + bias) + residual          rounded once to the dtype
    y = h                                          without a norm
    y = norm(h), and residual = h                  with one: the next layer needs h, so it stays in `residual`

| tensor | shape |
|---|---|
| sum, y, residual | [rows, N]: the whole result (all_reduce) or a rank's rows of it (reduce_scatter) |
| bias, norm.weight, norm.bias | [N] |

Statistics are of h as it is rounded, in fp32 (fp64 for fp64): the same bits come out whatever layout the plan chose. On
CUDA one kernel reads a packed buffer or the matrix and writes y and h (`kernels/norm.py`); on CPU a few rows at a time,
which stay in the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InvalidArgument
from .operands import check_apart, check_dense

_HALVES = (torch.float16, torch.bfloat16)
_BLOCK_BYTES = 128 << 10  # of rows that are finished at a time on a CPU
_TILE_ALIGNMENT = 8  # elements
Table = NDArray[np.int64] | torch.Tensor


def reference(h: torch.Tensor, norm: torch.nn.Module | None) -> torch.Tensor:
    """The meaning of the norm, as a plain loop over rows (in fp64, and not rounded)."""
    y = h.to(torch.float64)
    for row in y if norm is not None else ():
        assert isinstance(norm, (torch.nn.RMSNorm, torch.nn.LayerNorm))
        if isinstance(norm, torch.nn.LayerNorm):
            row -= row.sum() / len(row)
        row /= torch.sqrt((row * row).sum() / len(row) + _epsilon(norm, h.dtype))
        weight, shift = _vectors(norm)
        if weight is not None:
            row *= weight
        if shift is not None:
            row += shift
    return y


@dataclass(frozen=True, eq=False)
class After:
    """`residual` [rows, N] or None; `norm` an RMSNorm or LayerNorm over N, or None; at least one of the two."""

    residual: torch.Tensor | None
    norm: torch.nn.RMSNorm | torch.nn.LayerNorm | None

    @staticmethod
    def of(
        residual: torch.Tensor | None, norm: torch.nn.Module | None, y: torch.Tensor, *factors: torch.Tensor | None
    ) -> After | None:
        """Checked against the result `y` and what it is made of; None where nothing follows."""
        if residual is None and norm is None:
            return None
        if residual is not None:
            _check_residual(residual, y)
            check_apart("residual", residual, y)
        if norm is not None:
            _check_norm(norm, y)
            check_apart("out", y, *_vectors(norm))
            if residual is not None:  # which h overwrites
                check_apart("residual", residual, *factors, *_vectors(norm))
        return After(residual, norm)  # type: ignore[arg-type]

    @property
    def changed(self) -> tuple[torch.Tensor, ...]:
        """What a call reads and overwrites: the residual, where a norm leaves h in it."""
        return (self.residual,) if self.residual is not None and self.norm is not None else ()

    @property
    def text(self) -> str:
        """What ranks must agree on."""
        return (", residual" if self.residual is not None else "") + (
            f", {type(self.norm).__name__}" if self.norm is not None else ""
        )

    @property
    def has(self) -> tuple[bool, ...]:
        """Whether the norm has a weight and a bias: of each there is a kernel."""
        return tuple(one is not None for one in _vectors(self.norm))

    def finish(
        self,
        y: torch.Tensor,
        buffer: torch.Tensor,
        table: Table | None,
        tile: tuple[int, int] | None,
        bias: torch.Tensor | None,
        activation: str,
    ) -> None:
        """`y` [rows, N] from a flat packed `buffer`, with its unpack table and tile, or, without them, from one that
        holds the rows in their order, such as y itself.
        """
        if y.numel() == 0:
            return
        if y.device.type == "cuda":
            _on_gpu(self, y, buffer, table, tile, bias, activation)
        else:
            _on_cpu(self, y, buffer, table, bias, activation)


def _on_cpu(
    after: After,
    y: torch.Tensor,
    buffer: torch.Tensor,
    table: Table | None,
    bias: torch.Tensor | None,
    activation: str,
) -> None:
    from .finish import FUNCTIONS

    source = y if table is not None else buffer.view(y.shape)
    if table is not None:
        unpack(y, buffer, np.asarray(table))
    wide = torch.float32 if y.dtype in _HALVES else y.dtype
    step = max(1, _BLOCK_BYTES // (y.shape[1] * wide.itemsize))
    for start in range(0, y.shape[0], step):
        part = y[start : start + step]
        h = source[start : start + step].to(wide, copy=True)
        if bias is not None:
            h += bias
        if activation != "none":
            h = FUNCTIONS[activation](h)
        if after.residual is not None:
            h += after.residual[start : start + step]
        if after.norm is None:
            part.copy_(h)
            continue
        if after.residual is not None:
            after.residual[start : start + step] = h
        h = h.to(y.dtype).to(wide)
        if isinstance(after.norm, torch.nn.LayerNorm):
            h -= h.mean(1, keepdim=True)
        h /= torch.sqrt((h * h).mean(1, keepdim=True) + _epsilon(after.norm, y.dtype))
        weight, shift = _vectors(after.norm)
        if weight is not None:
            h *= weight
        if shift is not None:
            h += shift
        part.copy_(h)


def unpack(y: torch.Tensor, buffer: torch.Tensor, table: NDArray[np.int64]) -> None:
    """y [rows, N] from a flat packed `buffer`, tile by tile."""
    for row, rows, column, columns, place, stride in table.tolist():
        tile = buffer.as_strided((rows, columns), (stride, 1), buffer.storage_offset() + place)
        y[row : row + rows, column : column + columns] = tile


def _on_gpu(
    after: After,
    y: torch.Tensor,
    buffer: torch.Tensor,
    table: Table | None,
    tile: tuple[int, int] | None,
    bias: torch.Tensor | None,
    activation: str,
) -> None:
    from ..kernels import norm as kernels
    from .finish import ACTIVATIONS

    kernel: Any = kernels.finish_rows_kernel
    rows, n = y.shape
    block_m, block_n = tile or (rows, n)
    norm, residual = after.norm, after.residual
    weight, shift = (None if one is None else one.contiguous() for one in _vectors(norm))
    options = variant(n, block_n, table is not None)
    aligned = (buffer, y) if residual is None else (buffer, y, residual)
    kinds = {type(None): kernels.NO_NORM, torch.nn.RMSNorm: kernels.RMS, torch.nn.LayerNorm: kernels.LAYER}
    kernel[(rows,)](
        y, y if residual is None else residual, buffer, y if bias is None else bias.contiguous(),
        y if weight is None else weight, y if shift is None else shift, y if table is None else table, n, block_m,
        block_n, -(-n // block_n), _epsilon(norm, y.dtype) if norm is not None else 0.0, PACKED=table is not None,
        BIAS=bias is not None, ACTIVATION=ACTIVATIONS.index(activation), RESIDUAL=residual is not None,
        NORM=next(kind for one, kind in kinds.items() if isinstance(norm, one)), WEIGHT=weight is not None,
        SHIFT=shift is not None, EVEN=options.pop("EVEN") and all(one.data_ptr() % 16 == 0 for one in aligned),
        **options,
    )  # fmt: skip


def variant(n: int, block_n: int, packed: bool) -> dict[str, Any]:
    """How the kernel cuts a row of n columns: chunks that never straddle two tiles, on as many warps as they need."""
    from ..kernels.norm import MOST_IN_REGISTERS, WIDTH

    width = min(WIDTH, 1 << (n - 1).bit_length())
    if packed:
        width = math.gcd(width, block_n) if n > block_n else width
    chunks = max(1, min(-(-n // width), MOST_IN_REGISTERS // width))
    chunks = 1 << (chunks - 1).bit_length()
    return {
        "CHUNKS": chunks, "WIDTH": width, "WHOLE": chunks * width >= n,
        "EVEN": n % _TILE_ALIGNMENT == 0 and (not packed or block_n % _TILE_ALIGNMENT == 0),
        "num_warps": max(1, min(16, chunks * width // 1024)),
    }  # fmt: skip


def _epsilon(norm: torch.nn.RMSNorm | torch.nn.LayerNorm, dtype: torch.dtype) -> float:
    """An RMSNorm without one takes what torch takes: the dtype's own."""
    return float(torch.finfo(dtype).eps if norm.eps is None else norm.eps)


def _vectors(norm: torch.nn.Module | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weight and bias, where it has them."""
    return getattr(norm, "weight", None), getattr(norm, "bias", None)


def _check_residual(residual: torch.Tensor, y: torch.Tensor) -> None:
    check_dense("residual", residual)
    if (
        residual.shape != y.shape
        or residual.dtype != y.dtype
        or residual.device != y.device
        or not residual.is_contiguous()
    ):
        was = f"{list(residual.shape)} {residual.dtype} on {residual.device}"
        raise InvalidArgument(
            argument="residual", was=was, must=f"contiguous {list(y.shape)} {y.dtype} on {y.device}, as the result"
        )


def _check_norm(norm: torch.nn.Module, y: torch.Tensor) -> None:
    if not isinstance(norm, (torch.nn.RMSNorm, torch.nn.LayerNorm)):
        was = f"a {type(norm).__name__}"
        raise InvalidArgument(argument="norm", was=was, must="a torch.nn.RMSNorm or a torch.nn.LayerNorm")
    if tuple(norm.normalized_shape) != (y.shape[1],):
        was = f"over {list(norm.normalized_shape)}"
        raise InvalidArgument(argument="norm", was=was, must=f"over [{y.shape[1]}], the columns of the result")
    for name, tensor in zip(("weight", "bias"), _vectors(norm), strict=True):
        if tensor is None:
            continue
        if tensor.dtype != y.dtype or tensor.device != y.device:
            was = f"{tensor.dtype} on {tensor.device}"
            raise InvalidArgument(argument=f"norm.{name}", was=was, must=f"{y.dtype} on {y.device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            must = "detached, or the call under torch.no_grad(): with gradients add and normalise apart"
            raise InvalidArgument(argument=f"norm.{name}", was="a tensor that requires a gradient", must=must)
