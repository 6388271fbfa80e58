"""What becomes of parcels: summed, given a bias and an activation, put back in the order of the matrix.

    combine   out[i] = activation(parts[0][i] + parts[1][i] + ... + bias[(first + i) mod columns])
    unpack    y[row, column] = activation(buffer[place] + bias[column]), tile by tile as an unpack table says

Sums are taken in the order of the parts, in fp32 for 16-bit types, and rounded once. A bounded number of CTAs, so that
little is taken from a matmul beside it. All accesses are ordinary ones, ordered by the stream.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,misc"

import triton
import triton.language as tl

MOST_PARTS = 8
BLOCK, WARPS = 4096, 8
NONE, RELU, GELU, SILU = range(4)
_RELU, _GELU, _SILU = tl.constexpr(RELU), tl.constexpr(GELU), tl.constexpr(SILU)
_ENTRY = tl.constexpr(6)  # words of an unpack table's row
UNPACK_ROWS, UNPACK_COLUMNS = 16, 256
_POINTERS = ["out", "p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "bias"]


@triton.jit
def activated(value, ACTIVATION: tl.constexpr):
    if ACTIVATION == _RELU:
        # As torch does: NaN stays NaN.
        value = tl.where(value > 0, value, tl.where(value != value, value, 0.0))
    if ACTIVATION == _GELU:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    if ACTIVATION == _SILU:
        value = value / (1.0 + tl.exp(-value))
    return value


@triton.jit
def _load(pointer, offsets, mask, ALIGNED: tl.constexpr):
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + offsets, mask=mask)


@triton.jit(
    do_not_specialize=[*_POINTERS, "count", "first", "columns"], do_not_specialize_on_alignment=[*_POINTERS, "count"]
)
def combine_kernel(
    out, p0, p1, p2, p3, p4, p5, p6, p7, bias, count: tl.int64, first: tl.int64, columns: tl.int64,
    PARTS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`out` may be one of the parts: every element is read and written by one thread, in that order."""
    wide: tl.constexpr = tl.float32 if out.dtype.element_ty.primitive_bitwidth == 16 else out.dtype.element_ty
    parts = (p0, p1, p2, p3, p4, p5, p6, p7)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        values = ()
        for one in tl.static_range(PARTS):
            values = values + (_load(parts[one], offsets, mask, ALIGNED),)  # noqa: RUF005
        total = values[0].to(wide)
        for one in tl.static_range(1, PARTS):
            total += values[one].to(wide)
        if BIAS:
            total += tl.load(bias + (first + offsets) % columns, mask=mask).to(wide)
        total = activated(total, ACTIVATION).to(out.dtype.element_ty)
        tl.store((tl.multiple_of(out, 16) if ALIGNED else out) + offsets, total, mask=mask)


@triton.jit(do_not_specialize=["y", "buffer", "bias", "table", "tiles", "n"])
def unpack_kernel(
    y, buffer, bias, table, tiles: tl.int32, n: tl.int64,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`y` [rows, n] from `buffer`, one tile of the table after the other for each CTA."""
    wide: tl.constexpr = tl.float32 if y.dtype.element_ty.primitive_bitwidth == 16 else y.dtype.element_ty
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        entry = table + tile * _ENTRY
        row, rows, column = tl.load(entry), tl.load(entry + 1).to(tl.int32), tl.load(entry + 2)
        columns, place, stride = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4), tl.load(entry + 5)
        for top in range(0, rows, ROWS):
            down = top + tl.arange(0, ROWS)[:, None]
            for left in range(0, columns, COLUMNS):
                across = left + tl.arange(0, COLUMNS)[None, :]
                mask = (down < rows) & (across < columns)
                value = tl.load(buffer + place + down * stride + across, mask=mask).to(wide)
                if BIAS:
                    value += tl.load(bias + column + across, mask=across < columns).to(wide)
                value = activated(value, ACTIVATION).to(y.dtype.element_ty)
                tl.store(y + (row + down) * n + column + across, value, mask=mask)
