"""A matmul that fetches its own rows: out = (all ranks' x, gathered by rows) @ b, in one launch.

The first `loaders` CTAs push this rank's rows into the gathered buffers of the others, those first whose turn comes
first, and then join the rest. All take tiles in the order of the table: own rows first, straight from x, then those of
the following ranks, each tile once its band of rows has arrived.

    loaders:  for step in 1 ... ranks - 1, for band, for part of its columns:
                  gathered[rows] of rank r - step = x[band, part]; words[band, part] of rank r - step = epoch
    all:      for tile in table, whoever is ready takes the next:
                  wait for all parts of the tile's band; out = a @ b

The table is that of `gemm`, with the rows of x for own tiles and of the gathered matrix for others, and the line of the
band's words in place of the parcel.

Gathered buffers and words are used in turn by two calls. A rank that is in call n + 2 has seen the end of call n + 1,
which needed rows that every other rank sent after its own call n: nobody still reads the rows of call n, nor sets its
words, whose writers change from call to call, as a line belongs to another rank in another shape. (Every rank must have
a row for that.)

Memory ordering. A word is released at system scope behind a CTA barrier that follows the stores of its part
(`signal_set`), and acquired at system scope by the CTA that needs it; a proxy fence orders that before its TMA loads.
The count of tiles taken is relaxed: it carries nothing but the number. There are two, for calls of even and of odd
numbers; each call clears the other one, which nobody uses before the next call on the stream.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .fused_scatter import LINE  # 32-bit words of a band's line: one for each part of its columns
from .gemm import ENTRY, multiply, store_tile
from .signals import proxy_fence, signal_set, signal_wait_all

_COPIED = tl.constexpr(64 << 10)  # elements that a CTA has under way: half of its registers


@triton.jit
def _push(
    x, target, row, rows, into, column, inner, stride, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + BLOCK_M) of x, `WIDTH` columns from `column` on, to rows from `into` on of a gathered matrix."""
    ROWS: tl.constexpr = _COPIED // WIDTH if _COPIED // WIDTH < BLOCK_M else BLOCK_M
    across = column + tl.arange(0, WIDTH)[None, :]
    for top in tl.static_range(0, BLOCK_M, ROWS):
        down = top + tl.arange(0, ROWS)[:, None]
        mask = (row + down < rows) & (across < inner)
        found = tl.load(x + (row + down).to(tl.int64) * stride + across, mask=mask)
        tl.store(target + (into + down).to(tl.int64) * inner + across, found, mask=mask)


@triton.jit
def _load(
    x, bases, word_bases, turn_row, first_row, first_line, rows, inner, stride, epoch, program, loaders, parts, rank,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """What a loader pushes: band after band for each of the other ranks, nearest first."""
    bands = tl.cdiv(rows, BLOCK_M)
    each = bands * parts
    for task in range(program, (RANKS - 1) * each, loaders):
        step, band, part = task // each + 1, task % each // parts, task % parts
        to = (rank + RANKS - step) % RANKS
        target = tl.load(bases + to).to(tl.pointer_type(x.dtype.element_ty))
        _push(x, tl.multiple_of(target, 16), band * BLOCK_M, rows, turn_row + first_row + band * BLOCK_M, part * WIDTH,
              inner, stride, BLOCK_M, WIDTH)  # fmt: skip
        words = tl.load(word_bases + to).to(tl.pointer_type(tl.int32))
        signal_set(words + (first_line + band) * LINE + part, epoch)


_FREE = [
    *("bias", "table", "bases", "word_bases", "words", "epochs", "taken", "tiles", "own", "active", "loaders"),
    *("first_row", "first_line", "capacity", "lines", "rank", "parts", "rows", "inner", "stride", "abort", "error"),
    "deadline_ns",
]


@triton.jit(do_not_specialize=_FREE)
def fused_gather_kernel(
    mine, gathered, b, c, x, out, bias, table, bases, word_bases, words, epochs, taken,
    tiles: tl.int32, own: tl.int32, active: tl.int32, loaders: tl.int32, rows: tl.int32, inner: tl.int32,
    stride: tl.int64, first_row: tl.int32, first_line: tl.int32, capacity: tl.int32, lines: tl.int32, parts: tl.int32,
    rank: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    PARTS: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """`mine` (x [rows, K], whose rows lie `stride` apart), `gathered` [2 * capacity, K], `b` ([K, N] or, TRANSPOSED,
    [N, K]) and, where BULK, `c` (`out` [M, N]) are tensor descriptors.

    `bases` and `word_bases`: addresses of all ranks' gathered buffers and words; `words` are those here. A band of
    columns comes in `parts` parts of WIDTH. Words of the second turn begin `lines` lines after the first's. This rank's
    rows begin at `first_row` of the gathered matrix, its lines of words at `first_line`. The first
    `active` CTAs work, the first `loaders` of them push; every CTA of the grid, which never changes, counts calls in
    its word of `epochs`. The first `own` tiles of the table are of own rows.
    """
    program = tl.program_id(0)
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = epoch & 1
    turn_row, turn_line = turn * capacity, turn * lines
    steps = tl.cdiv(inner, BLOCK_K)
    inner, stride = inner // 8 * 8, stride // 8 * 8  # they are so already: it tells the compiler
    if (program == 0) & (active > 0):
        tl.store(taken + (1 - turn) * LINE, 0)
    if program < loaders:
        _load(x, bases, word_bases, turn_row, first_row, turn_line + first_line, rows, inner, stride, epoch, program,
              loaders, parts, rank, BLOCK_M, WIDTH, RANKS)  # fmt: skip
    counter = taken + turn * LINE
    position = tiles
    if program < active:
        position = tl.atomic_add(counter, 1, sem="relaxed")
    while position < own:
        following = tl.atomic_add(counter, 1, sem="relaxed")
        entry = table + position * ENTRY
        row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        total = multiply(mine, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
        store_tile(out, c, bias, total, entry, PARTS, BULK, EVEN, BIAS, ACTIVATION)
        position = following
    while position < tiles:
        following = tl.atomic_add(counter, 1, sem="relaxed")
        entry = table + position * ENTRY
        row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        line = tl.load(entry + 6).to(tl.int32)
        signal_wait_all(words + (turn_line + line) * LINE, epoch, parts, -1, abort, error, deadline_ns)
        proxy_fence()
        total = multiply(gathered, b, turn_row + row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
        store_tile(out, c, bias, total, entry, PARTS, BULK, EVEN, BIAS, ACTIVATION)
        position = following
    tl.store(epochs + program, epoch)
