"""A matmul that fetches its own rows: out = (rows that all ranks have for this one) @ b, in one launch.

all_gather_matmul: every rank has all its rows for every other. all_to_all_matmul (ANNOUNCED): some for each, perhaps
none, and perhaps one of several weights (GROUPED) for each block of them.

The first `loaders` CTAs, perhaps all, push this rank's rows into the buffers of the others and then join the rest. All
take tiles in the order of the table: tiles of own rows, straight from x, where it says so; the others once their band
of rows has arrived. Which come first the plan decides (`plan/fused_order.py`, ANNOUNCED: `plan/tokens.py`).

PULL: the loaders push rows only into this rank's own buffer, and tell all; tiles read the buffers of the others, which
lie side by side in one range of addresses (`fabric/joined.py`). That moves less where all buffers are in one memory.

    loaders:  bring rows of x to the ranks they are for, band by band, part by part (`bring.py`)
    all:      for tile in table, whoever is ready takes the next:
                  wait for all parts of the tile's band, unless it is own; out = finish(rows @ b[expert])

The tables are the plan's. `pushes`: row and rows of x; the rank they go to first, the row there, the line of the band's
words there; to how many they go, downwards and round; the first rank that is told, and how many are. `table`: that of
`gemm`, with the rows of x for own tiles and those of the buffer for others, the line of the band's words in place of
the parcel, less than zero for own tiles, and the expert, or (PULL) whose rows they are.

Buffers and words are used in turn by two calls. A rank that is in call n + 2 of all_gather_matmul has seen the end of
call n + 1, which needed rows that every other rank sent after its own call n: nobody still reads the rows of call n,
nor sets its words, whose writers change from call to call, as a line belongs to another rank in another shape. (Every
rank must have a row for that.) Where a rank may have none for another, calls are announced (`turns.py`). Where rows
stay for a gradient, `capacity` is 0 and calls use the same rows: all ranks meet before each (`Fabric.meeting`). Where
ranks share a GPU the table of pushes then sends them to one rank, whose rows all read as their own (not PULL).

Memory ordering. A word is released at system scope behind a CTA barrier that follows the stores of its part (`tell`),
and acquired at system scope by the CTA that needs it; a proxy fence orders that before its TMA loads. All words of a
CTA are released before it waits for those of others. The count of tiles taken is relaxed: it carries nothing but the
number. There are two, for calls of even and of odd numbers; each call clears the other one, which nobody uses before
the next call on the stream.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .bring import bring
from .gemm import ENTRY, multiply, plain_multiply, store_tile
from .signals import has_bulk_copies, proxy_fence, signal_wait_all
from .turns import LINE, take_turn


@triton.jit
def _multiply(
    a, b, a_row, b_row, b_expert, entry, first, inner, distance, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, GROUPED: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """The tile of an entry of the table, of rows that count from `first`; OWNED: of the rank that the entry names."""
    row, column = first + tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    expert = tl.load(entry + 7).to(tl.int32)
    if has_bulk_copies():
        steps = tl.cdiv(inner, BLOCK_K)
        total = multiply(a, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, expert, GROUPED, expert,
                         OWNED)  # fmt: skip
    else:
        if OWNED:
            a += expert.to(tl.int64) * (distance // 8 * 8)  # it is so already: it tells the compiler
        rows, n = tl.load(entry + 1).to(tl.int32), tl.load(entry + 5).to(tl.int32)
        total = plain_multiply(a, b, a_row, b_row, b_expert, row, rows, column, n, inner, expert, BLOCK_M, BLOCK_N,
                               BLOCK_K, TRANSPOSED, GROUPED)  # fmt: skip
    return total


@triton.jit
def _bias_of(bias, entry, GROUPED: tl.constexpr):
    """That of the entry's expert."""
    if GROUPED:
        bias += tl.load(entry + 7) * tl.load(entry + 5)
    return bias


_FREE = [
    *("bias", "table", "pushes", "bases", "word_bases", "words", "epochs", "taken", "tiles", "tasks", "active"),
    *("loaders", "capacity", "lines", "rank", "parts", "inner", "stride", "b_row", "b_expert", "abort", "error"),
    *("deadline_ns", "distance"),
]


@triton.jit(do_not_specialize=_FREE)
def fused_gather_kernel(
    mine, gathered, b, c, x, out, bias, table, pushes, bases, word_bases, words, epochs, taken,
    tiles: tl.int32, tasks: tl.int32, active: tl.int32, loaders: tl.int32, inner: tl.int32,
    stride: tl.int64, b_row: tl.int64, b_expert: tl.int64, distance: tl.int64, capacity: tl.int32, lines: tl.int32,
    parts: tl.int32, rank: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUPED: tl.constexpr, PARTS: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, ANNOUNCED: tl.constexpr,
    PULL: tl.constexpr,
):  # fmt: skip
    """`mine` (x [rows, K], whose rows lie `stride` apart), `gathered` [2 * capacity, K] (PULL: one of each rank, at a
    `distance` of elements), `b` ([K, N] or, TRANSPOSED, [N, K]; GROUPED: one for each expert) and, where BULK, `c`
    (`out` [M, N]) are tensor descriptors; on GPUs without TMA pointers, and rows of `b` lie `b_row` apart, experts
    `b_expert`.

    `bases` and `word_bases`: addresses of all ranks' buffers and words; `words` are those here. A band of rows comes in
    `parts` parts of WIDTH columns. ANNOUNCED: a line of announcements comes first. Words of the second turn begin
    `lines` lines after the first's. `bias` [N], or one for each expert. The first `active` CTAs work, the first
    `loaders` of them push `tasks`, all parts of all bands of `pushes`; every CTA of the grid, which never changes,
    counts calls in its word of `epochs`.
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
        tl.store(taken + (1 - turn) * LINE + 1, 0)  # the count of `fused_brought`, whose calls may follow
    if program < loaders:
        bring(x, pushes, program, tasks, loaders, bases, word_bases, turn_row, turn_line, wide, apart, epoch, parts,
              BLOCK_M, WIDTH, RANKS, False)  # fmt: skip
    counter = taken + turn * LINE
    position = tiles
    if program < active:
        position = tl.atomic_add(counter, 1, sem="relaxed")
    line = tl.load(table + position * ENTRY + 6, mask=position < tiles, other=0).to(tl.int32)
    while position < tiles:  # one loop for each source, in turn: in a branch each would have its own shared memory
        while (position < tiles) & (line < 0):
            following = tl.atomic_add(counter, 1, sem="relaxed")
            entry = table + position * ENTRY
            total = _multiply(mine, b, stride, b_row, b_expert, entry, 0, inner, distance, BLOCK_M, BLOCK_N, BLOCK_K,
                              TRANSPOSED, GROUPED, False)  # fmt: skip
            line = tl.load(table + following * ENTRY + 6, mask=following < tiles, other=0).to(tl.int32)
            store_tile(out, c, _bias_of(bias, entry, GROUPED), total, entry, PARTS, BULK, EVEN, BIAS,
                       ACTIVATION)  # fmt: skip
            position = following
        while (position < tiles) & (line >= 0):
            following = tl.atomic_add(counter, 1, sem="relaxed")
            entry = table + position * ENTRY
            signal_wait_all(words + (turn_line + line) * LINE, epoch, parts, -1, abort, error, deadline_ns)
            proxy_fence()
            total = _multiply(gathered, b, inner.to(tl.int64), b_row, b_expert, entry, turn_row, inner, distance,
                              BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, GROUPED, PULL)  # fmt: skip
            line = tl.load(table + following * ENTRY + 6, mask=following < tiles, other=0).to(tl.int32)
            store_tile(out, c, _bias_of(bias, entry, GROUPED), total, entry, PARTS, BULK, EVEN, BIAS,
                       ACTIVATION)  # fmt: skip
            position = following
    tl.store(epochs + program, epoch)
