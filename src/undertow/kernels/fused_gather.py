"""A matmul that fetches its own rows: out = (rows that all ranks have for this one) @ b, in one launch.

all_gather_matmul: every rank has all its rows for every other. all_to_all_matmul (ANNOUNCED): some for each, perhaps
none, and perhaps one of several weights (GROUPED) for each block of them.

All CTAs take tiles in the order of the table: tiles of own rows, straight from x, where it says so; the others once
their band of rows has arrived. Which come first the plan decides (`plan/fused.py`). This rank's rows for others are
copied beside the main loop of the first own tiles: while tensor cores multiply, the threads that issued it would only
wait. HEIGHT rows go beside a tile, BLOCK_K columns of them in each step: asked for in one, stored in the next.

PULL: rows are stored only into this rank's own buffer, and all are told; tiles read the buffers of the others, which
lie side by side in one range of addresses (`fabric/joined.py`). That moves less where all buffers are in one memory.

    for job of the first `before` (all of them without TMA), in pieces of its columns, the first `loaders` CTAs:
        rows = x[job, piece]; for rank they are for: rows of that rank = rows; word of the piece = epoch
    for tile in table, whoever is ready takes the next:
        own:    total = x @ b[expert], and meanwhile, of the job of this position, if there is one:
                    rows = x[job]; for rank they are for: rows of that rank = rows
                words of all its pieces = epoch
        other:  wait for all words of the tile's band; total = rows @ b[expert]
        out = finish(total)

The tables are the plan's. `jobs`: row and rows of x; the rank they go to first, the row there, the first of their words
there; the first rank that is told, and how many are. They go to COPIES ranks, downwards and round. Job `before` + p is
done beside the tile of position p. `table`: that of `gemm`, with the rows of x for own tiles and those of the buffer
for others, the line of the band's words in place of the parcel, less than zero for own tiles, and the expert, or (PULL)
whose rows they are.

Nobody waits who has something to tell. The first jobs a CTA does before its first tile. The others belong to the first
positions, which are own tiles and wait for nothing. Positions are handed out in order, and the one that a CTA takes
ahead lies behind the one it is at: so a CTA that waits has no job left, neither at its position nor at the next. Hence
all jobs of all ranks are done whatever the others do, and all waits end.

Buffers and words are used in turn by two calls. A rank that is in call n + 2 of all_gather_matmul has seen the end of
call n + 1, which needed rows that every other rank sent after its own call n: nobody still reads the rows of call n,
nor sets its words, whose writers change from call to call, as a line belongs to another rank in another shape. (Every
rank must have a row for that.) Where a rank may have none for another, calls are announced (`turns.py`).

Memory ordering. The words of a job, or of a piece, are released at system scope behind a CTA barrier that follows its
stores (`tell_each`), and acquired at system scope by the CTA that needs them; a proxy fence orders that before its TMA
loads. The count of tiles taken is relaxed: it carries nothing but the number. There are two, for calls of even and of
odd numbers; each call clears the other one, which nobody uses before the next call on the stream.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,no-untyped-def"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from .gemm import ENTRY, factors, multiply, plain_multiply, store_tile
from .signals import has_bulk_copies, proxy_fence, signal_wait_all
from .turns import LINE, take_turn, tell_each

_WIDTH = tl.constexpr(512)  # columns of what is left over that are copied at once; as many more are on their way


@triton.jit
def _rows_of(jobs, number, there):
    """Of a line of the table of jobs, if it is `there`: row and rows of x, the rank they go to, the row there."""
    entry = jobs + number * ENTRY
    row, rows = tl.load(entry, mask=there, other=0), tl.load(entry + 1, mask=there, other=0).to(tl.int32)
    return row, rows, tl.load(entry + 2, mask=there, other=0).to(tl.int32), tl.load(entry + 3, mask=there, other=0)


@triton.jit
def _words_of(jobs, number, there):
    """Its first word, the first rank that is told, and how many are."""
    entry = jobs + number * ENTRY
    word, first = tl.load(entry + 4, mask=there, other=0), tl.load(entry + 5, mask=there, other=0)
    return word.to(tl.int32), first.to(tl.int32), tl.load(entry + 6, mask=there, other=0).to(tl.int32)


@triton.jit
def _targets(bases, to, COPIES: tl.constexpr, RANKS: tl.constexpr):
    """Addresses of the buffers that a job goes to."""
    found = (tl.load(bases + to),)
    for step in tl.static_range(1, COPIES):
        found = found + (tl.load(bases + (to + RANKS - step) % RANKS),)
    return found


@triton.jit
def _ask(source, rows, left, stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """`rows` rows and `left` columns of HEIGHT x WIDTH elements from `source` on. Under way only."""
    down, across = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    return tl.load(source + (down * stride.to(tl.int32) + across), mask=(down < rows) & (across < left))


@triton.jit
def _put(values, targets, place, rows, left, inner):
    """The same into each of the buffers, from element `place` on."""
    down, across = tl.arange(0, values.shape[0])[:, None], tl.arange(0, values.shape[1])[None, :]
    for one in tl.static_range(len(targets)):
        target = tl.multiple_of(targets[one].to(tl.pointer_type(values.dtype)), 16) + place
        tl.store(target + (down * inner + across), values, mask=(down < rows) & (across < left))


@triton.jit
def _part(turn, pieces, chunks, piece, inner, program, loaders):
    """What a CTA copies in its turn: which item, a piece of a job; which piece; the first column of a chunk of it, and
    how many follow.
    """
    item = program + turn // chunks * loaders
    number = item % pieces
    column = number * piece + turn % chunks * _WIDTH
    left = tl.minimum(inner, (number + 1) * piece) - column
    return item, number, column // 8 * 8, left // 8 * 8


@triton.jit
def _bring(
    x, jobs, count, bases, word_bases, turn_row, turn_line, inner, stride, piece, pieces, epoch, program, loaders,
    HEIGHT: tl.constexpr, COPIES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """The first `count` jobs, in pieces of their columns.

    While a chunk of a piece is stored the next is on its way. The word of a piece is set while the next piece is on its
    way, when its own stores have long arrived.
    """
    chunks, items = tl.cdiv(piece, _WIDTH), count * pieces
    last = tl.cdiv(tl.maximum(items - program, 0), loaders) * chunks
    item, _, column, left = _part(0, pieces, chunks, piece, inner, program, loaders)
    row, rows, _, _ = _rows_of(jobs, item // pieces, item < items)
    ahead = _ask(x + (row * stride + column), rows, left, stride, HEIGHT, _WIDTH)
    first, told, word = 0, 0, 0  # the ranks and the word of the piece before
    for turn in range(last):
        found = ahead
        item, _, column, left = _part(turn + 1, pieces, chunks, piece, inner, program, loaders)
        row, rows, _, _ = _rows_of(jobs, item // pieces, item < items)
        ahead = _ask(x + (row * stride + column), rows, left, stride, HEIGHT, _WIDTH)
        tell_each(word_bases, first, told, word, epoch, 1)
        item, number, column, left = _part(turn, pieces, chunks, piece, inner, program, loaders)
        _, rows, to, into = _rows_of(jobs, item // pieces, True)
        _put(found, _targets(bases, to, COPIES, RANKS), (turn_row + into) * inner + column, rows, left, inner)
        word, first, told = _words_of(jobs, item // pieces, turn % chunks == chunks - 1)
        word += turn_line * LINE + number
    tell_each(word_bases, first, told, word, epoch, 1)


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
def _multiply_and_copy(
    a, b, entry, x, targets, source, place, rows, inner, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, GROUPED: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """The tile of an entry of the table, of own rows, and beside it a job: `rows` rows of x from element `source` on.

    What was asked for in the step before is here and is stored; what is asked for now comes meanwhile.
    """
    row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    expert = tl.load(entry + 7).to(tl.int32)
    steps = tl.cdiv(inner, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    values = tl.zeros((HEIGHT, BLOCK_K), x.dtype.element_ty)
    for step in range(steps):
        along = step * BLOCK_K
        left, right = factors(a, b, row, column, along, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, expert, GROUPED, 0,
                              False)  # fmt: skip
        total = tl.dot(left, right, total)
        before = along - BLOCK_K
        _put(values, targets, place + before, tl.where(step > 0, rows, 0), inner - before, inner)
        values = _ask(x + (source + along), rows, inner - along, stride, HEIGHT, BLOCK_K)
    before = (steps - 1) * BLOCK_K
    _put(values, targets, place + before, rows, inner - before, inner)
    return total


@triton.jit
def _bias_of(bias, entry, GROUPED: tl.constexpr):
    """That of the entry's expert."""
    if GROUPED:
        bias += tl.load(entry + 7) * tl.load(entry + 5)
    return bias


_FREE = [
    *("bias", "table", "jobs", "bases", "word_bases", "words", "epochs", "taken", "tiles", "count", "before", "active"),
    *("loaders", "capacity", "lines", "rank", "piece", "pieces", "inner", "stride", "b_row", "b_expert", "abort"),
    *("error", "deadline_ns", "distance"),
]


@triton.jit(do_not_specialize=_FREE)
def fused_gather_kernel(
    mine, gathered, b, c, x, out, bias, table, jobs, bases, word_bases, words, epochs, taken,
    tiles: tl.int32, count: tl.int32, before: tl.int32, active: tl.int32, loaders: tl.int32, inner: tl.int32,
    stride: tl.int64, b_row: tl.int64, b_expert: tl.int64, distance: tl.int64, capacity: tl.int32, lines: tl.int32,
    piece: tl.int32, pieces: tl.int32, rank: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUPED: tl.constexpr, PARTS: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, HEIGHT: tl.constexpr, COPIES: tl.constexpr, RANKS: tl.constexpr,
    ANNOUNCED: tl.constexpr, PULL: tl.constexpr,
):  # fmt: skip
    """`mine` (x [rows, K], whose rows lie `stride` apart), `gathered` [2 * capacity, K] (PULL: one of each rank, at a
    `distance` of elements), `b` ([K, N] or, TRANSPOSED, [N, K]; GROUPED: one for each expert) and, where BULK, `c`
    (`out` [M, N]) are tensor descriptors; on GPUs without TMA pointers, and rows of `b` lie `b_row` apart, experts
    `b_expert`.

    `bases` and `word_bases`: addresses of all ranks' buffers and words; `words` are those here. A band of rows comes in
    jobs of HEIGHT rows, a job in `pieces` pieces of `piece` columns, each with a word: those of the band's first job
    first. ANNOUNCED: a line of announcements comes first. Words of the second turn begin `lines` lines after the
    first's. `bias` [N], or one for each expert. The first `active` CTAs work, the first `loaders` of them do the first
    `before` of `count` jobs; every CTA of the grid, which never changes, counts calls in its word of `epochs`.
    """
    program = tl.program_id(0)
    epoch = tl.load(epochs + program, volatile=True) + 1
    tl.debug_barrier()  # all threads have read it
    tl.store(epochs + program, epoch)  # now, as its address would be one too many for the main loop
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
        _bring(x, jobs, before, bases, word_bases, turn_row, turn_line, wide, apart, piece, pieces, epoch, program,
               loaders, HEIGHT, COPIES, RANKS)  # fmt: skip
    counter = taken + turn * LINE
    position = tiles
    if program < active:
        position = tl.atomic_add(counter, 1, sem="relaxed")
    line = tl.load(table + position * ENTRY + 6, mask=position < tiles, other=0).to(tl.int32)
    while position < tiles:  # one loop for each source, in turn: in a branch each would have its own shared memory
        while (position < tiles) & (line < 0):
            following = tl.atomic_add(counter, 1, sem="relaxed")
            entry = table + position * ENTRY
            if has_bulk_copies():
                row, rows, to, into = _rows_of(jobs, before + position, before + position < count)
                targets = _targets(bases, to, COPIES, RANKS)
                total = _multiply_and_copy(mine, b, entry, x, targets, row * apart, (turn_row + into) * wide, rows,
                                           wide, apart, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, GROUPED,
                                           HEIGHT)  # fmt: skip
                word, first, told = _words_of(jobs, before + position, before + position < count)
                tell_each(word_bases, first, told, turn_line * LINE + word, epoch, pieces)
            else:
                total = _multiply(mine, b, stride, b_row, b_expert, entry, 0, inner, distance, BLOCK_M, BLOCK_N,
                                  BLOCK_K, TRANSPOSED, GROUPED, False)  # fmt: skip
            line = tl.load(table + following * ENTRY + 6, mask=following < tiles, other=0).to(tl.int32)
            store_tile(out, c, _bias_of(bias, entry, GROUPED), total, entry, PARTS, BULK, EVEN, BIAS,
                       ACTIVATION)  # fmt: skip
            position = following
        while (position < tiles) & (line >= 0):
            following = tl.atomic_add(counter, 1, sem="relaxed")
            entry = table + position * ENTRY
            awaited = tl.cdiv(tl.load(entry + 1).to(tl.int32), HEIGHT) * pieces
            signal_wait_all(words + (turn_line + line) * LINE, epoch, awaited, -1, abort, error, deadline_ns)
            proxy_fence()
            total = _multiply(gathered, b, inner.to(tl.int64), b_row, b_expert, entry, turn_row, inner, distance,
                              BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, GROUPED, PULL)  # fmt: skip
            line = tl.load(table + following * ENTRY + 6, mask=following < tiles, other=0).to(tl.int32)
            store_tile(out, c, _bias_of(bias, entry, GROUPED), total, entry, PARTS, BULK, EVEN, BIAS,
                       ACTIVATION)  # fmt: skip
            position = following
