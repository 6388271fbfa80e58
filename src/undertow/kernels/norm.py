"""The last step over whole rows: unpack, bias, activation, residual, normalisation, in one pass over memory.

    h[row] = activation(sum[row] + bias) + residual[row]            rounded to the dtype
    y[row] = h[row], or h / sqrt(mean(h²) + eps) · weight, or (h - mean) / sqrt(variance + eps) · weight + shift

`sum` is a packed buffer, read where an unpack table says, or the ordinary matrix, which may be `y` itself. A CTA has
one row. Where a row fits into the registers it is read once; longer ones are kept in memory between the passes (in
`residual`, or in `y`). All arithmetic in fp32 (fp64 for fp64). Ordinary accesses, ordered by the stream; a CTA's passes
are ordered by its barriers.
"""

import triton
import triton.language as tl

from .combine import activated

NO_NORM, RMS, LAYER = range(3)
_NO_NORM, _LAYER = tl.constexpr(NO_NORM), tl.constexpr(LAYER)
_ENTRY = tl.constexpr(6)  # words of an unpack table's row
WIDTH = 256  # columns of a chunk, at most: chunks never straddle two tiles
MOST_IN_REGISTERS = 16384  # columns


@triton.jit
def _places(table, row, n, block_m, block_n, columns, first, PACKED: tl.constexpr, EVEN: tl.constexpr,
            CHUNKS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Where the columns from `first` on are found: offsets in the sum, columns, and which of them exist."""
    start = first + tl.arange(0, CHUNKS) * WIDTH
    if PACKED:
        entry = table + (row // block_m * columns + start // block_n) * _ENTRY
        place = tl.load(entry + 4, mask=start < n, other=0) + row % block_m * tl.load(
            entry + 5, mask=start < n, other=0
        )
        place += start % block_n
    else:
        place = row * n + start
    if EVEN:  # loads of 16 bytes
        place = tl.multiple_of(place, 8)
    across = tl.arange(0, WIDTH)[None, :]
    column = start[:, None] + across
    return place[:, None] + across, column, column < n


@triton.jit
def _hidden(buffer, residual, bias, table, row, n, block_m, block_n, columns, first, PACKED: tl.constexpr,
            BIAS: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
            CHUNKS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """h of the columns from `first` on, rounded; 0 where there are none."""
    place, column, mask = _places(table, row, n, block_m, block_n, columns, first, PACKED, EVEN, CHUNKS, WIDTH)
    element: tl.constexpr = buffer.dtype.element_ty
    wide: tl.constexpr = tl.float32 if element.primitive_bitwidth == 16 else element
    value = tl.load(buffer + place, mask=mask, other=0.0).to(wide)
    if BIAS:
        value += tl.load(bias + column, mask=mask, other=0.0).to(wide)
    value = activated(value, ACTIVATION)
    if RESIDUAL:
        value += tl.load(residual + (row * n + column), mask=mask, other=0.0).to(wide)
    return value.to(element), column, mask


@triton.jit
def _scaled(value, weight, shift, column, mask, scale, WEIGHT: tl.constexpr, SHIFT: tl.constexpr):
    value = value * scale
    if WEIGHT:
        value *= tl.load(weight + column, mask=mask, other=0.0).to(value.dtype)
    if SHIFT:
        value += tl.load(shift + column, mask=mask, other=0.0).to(value.dtype)
    return value


@triton.jit(do_not_specialize=["bias", "weight", "shift", "table", "block_m", "columns", "eps"])
def finish_rows_kernel(
    y, residual, buffer, bias, weight, shift, table, n, block_m: tl.int64, block_n, columns: tl.int64, eps: tl.float32,
    PACKED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr,
    WEIGHT: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """One row of `y` [rows, n]. With NORM, h is left in `residual`. WHOLE: a row has at most CHUNKS * WIDTH columns."""
    row = tl.program_id(0).to(tl.int64)
    element: tl.constexpr = y.dtype.element_ty
    wide: tl.constexpr = tl.float32 if element.primitive_bitwidth == 16 else element
    step: tl.constexpr = CHUNKS * WIDTH
    kept = y
    if RESIDUAL:
        kept = residual
    if WHOLE:
        rounded, column, mask = _hidden(
            buffer, residual, bias, table, row, n, block_m, block_n, columns, 0, PACKED, BIAS, ACTIVATION, RESIDUAL,
            EVEN, CHUNKS, WIDTH,
        )  # fmt: skip
        if NORM == _NO_NORM:
            tl.store(y + (row * n + column), rounded, mask=mask)
        else:
            if RESIDUAL:
                tl.store(residual + (row * n + column), rounded, mask=mask)
            value = rounded.to(wide)
            if NORM == _LAYER:
                value = tl.where(mask, value - tl.sum(tl.sum(value, axis=1), axis=0) / n, 0.0)
            scale = 1.0 / tl.sqrt(tl.sum(tl.sum(value * value, axis=1), axis=0) / n + eps)
            value = _scaled(value, weight, shift, column, mask, scale, WEIGHT, SHIFT)
            tl.store(y + (row * n + column), value.to(element), mask=mask)
    else:
        total = tl.zeros((CHUNKS, WIDTH), wide)
        squares = tl.zeros((CHUNKS, WIDTH), wide)
        for first in range(0, n, step):
            rounded, column, mask = _hidden(
                buffer, residual, bias, table, row, n, block_m, block_n, columns, first, PACKED, BIAS, ACTIVATION,
                RESIDUAL, EVEN, CHUNKS, WIDTH,
            )  # fmt: skip
            if NORM == _NO_NORM:
                tl.store(y + (row * n + column), rounded, mask=mask)
            else:
                tl.store(kept + (row * n + column), rounded, mask=mask)
                total += rounded.to(wide)
                squares += rounded.to(wide) * rounded.to(wide)
        if NORM != _NO_NORM:
            tl.debug_barrier()  # a thread may read what another has stored
            mean = tl.sum(tl.sum(total, axis=1), axis=0) * 0.0
            if NORM == _LAYER:  # the squares of what is left once the mean is known: no cancellation
                mean = tl.sum(tl.sum(total, axis=1), axis=0) / n
                squares = tl.zeros((CHUNKS, WIDTH), wide)
                for first in range(0, n, step):
                    column = first + tl.reshape(tl.arange(0, step), (CHUNKS, WIDTH))
                    value = tl.load(kept + (row * n + column), mask=column < n, other=0.0).to(wide)
                    value = tl.where(column < n, value - mean, 0.0)
                    squares += value * value
            scale = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / n + eps)
            for first in range(0, n, step):
                column = first + tl.reshape(tl.arange(0, step), (CHUNKS, WIDTH))
                value = tl.load(kept + (row * n + column), mask=column < n, other=0.0).to(wide) - mean
                value = _scaled(value, weight, shift, column, column < n, scale, WEIGHT, SHIFT)
                tl.store(y + (row * n + column), value.to(element), mask=column < n)
