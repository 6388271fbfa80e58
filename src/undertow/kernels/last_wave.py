"""The tiles of a last wave that would leave most CTAs idle: K in parts, a CTA each, summed by all of them.

    parts:  for unit = (tile, part of K), a CTA each:
                partial[unit] = rows @ b over that part of K, in float32;  words[tile, part] = epoch
    sums:   for unit = (tile, slice of its rows), a CTA each:
                wait for all words of the tile;  out[slice] = finish(sum of partial[tile, :][slice]), in the order of K

Memory ordering. A part's word is released behind a CTA barrier that follows its stores (`tell`), and acquired, with a
CTA barrier, by every CTA that sums. `partial` and the words are this rank's own, used by calls one after the other.
Nobody waits for ever: every CTA stores its part before it waits for those of others.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .combine import activated
from .gemm import ENTRY, halves, multiply
from .signals import proxy_fence, signal_wait_all
from .turns import LINE, tell


@triton.jit
def _keep(partial, tile, FIRST: tl.constexpr, WIDE: tl.constexpr):
    """Columns from FIRST on of a tile whose rows have WIDE elements."""
    down, across = tl.arange(0, tile.shape[0])[:, None], FIRST + tl.arange(0, tile.shape[1])[None, :]
    tl.store(partial + (down * WIDE + across), tile)


@triton.jit
def multiply_parts(
    gathered, b, partial, table, first, limit, words, word_bases, rank, turn_row, turn_line, spare, parts, steps, epoch,
    program, programs, abort, error, deadline_ns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr, PULL: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Units below `limit` of the tiles from number `first` of the table on: SPLIT of each. Their words are in lines
    from `spare` on."""
    for unit in range(program, limit, programs):
        which, part = unit // SPLIT, unit % SPLIT
        entry = table + (first + which) * ENTRY
        line = tl.load(entry + 6).to(tl.int32)
        failed = signal_wait_all(words + (turn_line + line) * LINE, epoch, parts, -1, abort, error, deadline_ns)
        proxy_fence()
        row, column = turn_row + tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        source = tl.load(entry + 7).to(tl.int32)
        total = multiply(gathered, b, row, column, steps * (part + 1) // SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED,
                         0, False, source, PULL, steps * part // SPLIT)  # fmt: skip
        place = partial + tl.cast(unit, tl.int64) * (BLOCK_M * BLOCK_N)
        left, right = halves(total)
        for side in tl.static_range(2):  # by quarters: the addresses of a whole one would not fit
            near, far = halves(right if side else left)
            _keep(place, near, side * (BLOCK_N // 2), BLOCK_N)
            _keep(place, far, side * (BLOCK_N // 2) + BLOCK_N // 4, BLOCK_N)
        tell(word_bases, rank, 1, (spare + which) * LINE + part, epoch, failed)


@triton.jit
def sum_parts(
    out, bias, partial, table, first, limit, words, spare, epoch, program, programs, abort, error, deadline_ns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A slice of BLOCK_M / SPLIT rows of each unit's tile; places, strides and columns are multiples of 8 elements."""
    AREA: tl.constexpr = BLOCK_M * BLOCK_N
    HEIGHT: tl.constexpr = BLOCK_M // SPLIT
    for unit in range(program, limit, programs):
        which, part = unit // SPLIT, unit % SPLIT
        entry = table + (first + which) * ENTRY
        signal_wait_all(words + (spare + which) * LINE, epoch, SPLIT, -1, abort, error, deadline_ns)
        down, across = part * HEIGHT + tl.arange(0, HEIGHT)[:, None], tl.arange(0, BLOCK_N)[None, :]
        found = partial + tl.cast(which, tl.int64) * (SPLIT * AREA) + (down * BLOCK_N + across)
        total = tl.load(found)
        for other in tl.static_range(1, SPLIT):
            total += tl.load(found + other * AREA)
        columns = tl.multiple_of(tl.load(entry + 3).to(tl.int32), 8)
        place, stride = tl.multiple_of(tl.load(entry + 4), 8), tl.multiple_of(tl.load(entry + 5), 8)
        if BIAS:
            total += tl.load(bias + tl.load(entry + 2) + across, mask=across < columns, other=0.0).to(tl.float32)
        mask = (down < tl.load(entry + 1).to(tl.int32)) & (across < columns)
        value = activated(total, ACTIVATION).to(out.dtype.element_ty)
        tl.store(out + place + (down * stride.to(tl.int32) + across), value, mask=mask)
