"""A matmul that fetches its own rows: out = (rows that all ranks have for this one) @ b, in one launch.

all_gather_matmul: every rank has all its rows for every other. all_to_all_matmul (ANNOUNCED): some for each, perhaps
none, and perhaps one of several weights (GROUPED) for each block of them.

The first `loaders` CTAs push this rank's rows into the buffers of the others, those first whose turn comes first, and
then join the rest. All take tiles in the order of the table: own rows first, straight from x, then those of the
following ranks, each tile once its band of rows has arrived.

    loaders:  for rank r - 1, r - 2, ..., for band, for part of its columns:
                  rows of that rank = x[band, part]; words[band, part] of that rank = epoch
    all:      for tile in table, whoever is ready takes the next:
                  wait for all parts of the tile's band; out = finish(rows @ b[expert])

The tables are the plan's. `pushes`: row and rows of x, the rank they are for, the row there, the line of the band's
words there. `table`: that of `gemm`, with the rows of x for own tiles and those of the buffer for others, the line of
the band's words in place of the parcel, and the expert.

Buffers and words are used in turn by two calls. A rank that is in call n + 2 of all_gather_matmul has seen the end of
call n + 1, which needed rows that every other rank sent after its own call n: nobody still reads the rows of call n,
nor sets its words, whose writers change from call to call, as a line belongs to another rank in another shape. (Every
rank must have a row for that.) Where a rank may have none for another, calls are announced (`turns.py`).

Memory ordering. A word is released at system scope behind a CTA barrier that follows the stores of its part
(`signal_set`), and acquired at system scope by the CTA that needs it; a proxy fence orders that before its TMA loads.
The count of tiles taken is relaxed: it carries nothing but the number. There are two, for calls of even and of odd
numbers; each call clears the other one, which nobody uses before the next call on the stream.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .gemm import ENTRY, multiply, plain_multiply, store_tile
from .signals import has_bulk_copies, proxy_fence, signal_set, signal_wait_all
from .turns import LINE, take_turn

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
    x, pushes, count, bases, word_bases, turn_row, turn_line, inner, stride, epoch, program, loaders, parts,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What a loader pushes: bands in the order of the table, each in parts."""
    for task in range(program, count * parts, loaders):
        entry, part = pushes + task // parts * ENTRY, task % parts
        row, rows = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
        to, into = tl.load(entry + 2), tl.load(entry + 3).to(tl.int32)
        target = tl.load(bases + to).to(tl.pointer_type(x.dtype.element_ty))
        _push(x, tl.multiple_of(target, 16), row, row + rows, turn_row + into, part * WIDTH, inner, stride, BLOCK_M,
              WIDTH)  # fmt: skip
        words = tl.load(word_bases + to).to(tl.pointer_type(tl.int32))
        signal_set(words + (turn_line + tl.load(entry + 4).to(tl.int32)) * LINE + part, epoch)


@triton.jit
def _multiply(
    a, b, a_row, b_row, b_expert, entry, first, inner, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """The tile of an entry of the table, of rows that count from `first`."""
    row, column = first + tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    expert = tl.load(entry + 7).to(tl.int32)
    if has_bulk_copies():
        steps = tl.cdiv(inner, BLOCK_K)
        total = multiply(a, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, expert, GROUPED)
    else:
        rows, n = tl.load(entry + 1).to(tl.int32), tl.load(entry + 5).to(tl.int32)
        total = plain_multiply(a, b, a_row, b_row, b_expert, row, rows, column, n, inner, expert, BLOCK_M, BLOCK_N,
                               BLOCK_K, TRANSPOSED, GROUPED)  # fmt: skip
    return total


_FREE = [
    *("bias", "table", "pushes", "bases", "word_bases", "words", "epochs", "taken", "tiles", "own", "count", "active"),
    *("loaders", "capacity", "lines", "rank", "parts", "inner", "stride", "b_row", "b_expert", "abort", "error"),
    "deadline_ns",
]


@triton.jit(do_not_specialize=_FREE)
def fused_gather_kernel(
    mine, gathered, b, c, x, out, bias, table, pushes, bases, word_bases, words, epochs, taken,
    tiles: tl.int32, own: tl.int32, count: tl.int32, active: tl.int32, loaders: tl.int32, inner: tl.int32,
    stride: tl.int64, b_row: tl.int64, b_expert: tl.int64, capacity: tl.int32, lines: tl.int32, parts: tl.int32,
    rank: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUPED: tl.constexpr, PARTS: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, ANNOUNCED: tl.constexpr,
):  # fmt: skip
    """`mine` (x [rows, K], whose rows lie `stride` apart), `gathered` [2 * capacity, K], `b` ([K, N] or, TRANSPOSED,
    [N, K]; GROUPED: one for each expert) and, where BULK, `c` (`out` [M, N]) are tensor descriptors; on GPUs without
    TMA pointers, and rows of `b` lie `b_row` apart, experts `b_expert`.

    `bases` and `word_bases`: addresses of all ranks' buffers and words; `words` are those here. A band of rows comes in
    `parts` parts of WIDTH columns. ANNOUNCED: a line of announcements comes first. Words of the second turn begin
    `lines` lines after the first's. `bias` [N], or one for each expert. The first `active` CTAs work, the first
    `loaders` of them push the `count` bands of `pushes`; every CTA of the grid, which never changes, counts calls in
    its word of `epochs`. The first `own` tiles of the table are of own rows.
    """
    program = tl.program_id(0)
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = epoch & 1
    turn_row, turn_line = turn * capacity, turn * lines
    if ANNOUNCED:
        turn_line += 1
        if program < active:
            take_turn(word_bases, words, epoch, program, rank, abort, error, deadline_ns, RANKS)
    wide, apart = inner // 8 * 8, stride // 8 * 8  # they are so already: it tells the compiler
    if (program == 0) & (active > 0):
        tl.store(taken + (1 - turn) * LINE, 0)
    if program < loaders:
        _load(x, pushes, count, bases, word_bases, turn_row, turn_line, wide, apart, epoch, program, loaders, parts,
              BLOCK_M, WIDTH)  # fmt: skip
    counter = taken + turn * LINE
    position = tiles
    if program < active:
        position = tl.atomic_add(counter, 1, sem="relaxed")
    while position < own:
        following = tl.atomic_add(counter, 1, sem="relaxed")
        entry = table + position * ENTRY
        total = _multiply(mine, b, stride, b_row, b_expert, entry, 0, inner, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED,
                          GROUPED)  # fmt: skip
        store_tile(out, c, bias + tl.load(entry + 7) * tl.load(entry + 5), total, entry, PARTS, BULK, EVEN, BIAS,
                   ACTIVATION)  # fmt: skip
        position = following
    while position < tiles:
        following = tl.atomic_add(counter, 1, sem="relaxed")
        entry = table + position * ENTRY
        line = tl.load(entry + 6).to(tl.int32)
        signal_wait_all(words + (turn_line + line) * LINE, epoch, parts, -1, abort, error, deadline_ns)
        proxy_fence()
        total = _multiply(gathered, b, inner.to(tl.int64), b_row, b_expert, entry, turn_row, inner, BLOCK_M, BLOCK_N,
                          BLOCK_K, TRANSPOSED, GROUPED)  # fmt: skip
        store_tile(out, c, bias + tl.load(entry + 7) * tl.load(entry + 5), total, entry, PARTS, BULK, EVEN, BIAS,
                   ACTIVATION)  # fmt: skip
        position = following
    tl.store(epochs + program, epoch)
