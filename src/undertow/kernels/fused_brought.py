"""all_gather_matmul whose rows are brought by CTAs that do not multiply meanwhile: out = gather(x) @ b, in one launch.

As `fused_gather`, but in two main loops whose loads run ahead from tile to tile, as those of a matmul alone: first the
tiles of own rows, straight from x, while other CTAs bring these rows to where the others read them; then the tiles of
the others' rows. What is not brought yet when a CTA has no more own tiles, it helps to bring.

    bring:    for part of a band, whoever is ready takes the next:
                  rows of x -> buffers of all others, or (PULL) this rank's own one; words[band, part] of all = epoch
    CTAs:     those that multiply: own tiles in fixed turns        out = finish(x @ b)
              all: bring what is left
              those that multiply: the others' tiles               out = finish(rows @ b)
              SPLIT: tiles of a last wave, a part of K each        (`last_wave.py`)

A tile's loads begin before the tile in front of it is finished, so its rows are waited for `early` tiles ahead: at the
end of a tile, for the one that the CTA computes `early` tiles later, and before the loop for the first of them. With
loads of at most STAGES steps under way, `early` = 1 + ceil(STAGES / steps of a tile) is enough: what is waited for at
the end of tile t is loaded no earlier than STAGES steps before the first of tile t + early, which is in tile t + 1.

Tables as in `fused_gather`, own tiles first: `own` of the `tiles` of `table` are. There may be none of them, where all
ranks read the same rows: then all CTAs bring rows first, and tiles of own rows read them where the others do, too.

Nobody waits for ever: words are waited for by CTAs of a rank all of whose parts have been taken, each by a CTA that
brings it without waiting. Buffers, words and the count of parts taken are used in turn by two calls, as there.

Memory ordering. As there: a word is released at system scope behind a CTA barrier that follows the stores of its part
(`tell`), and acquired at system scope, with a CTA barrier, before a proxy fence that orders it before the TMA loads of
the rows, which all come later in the program.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .bring import bring
from .gemm import ENTRY, multiply, store_tile
from .in_step import keep_step
from .last_wave import multiply_parts, sum_parts
from .signals import proxy_fence, signal_wait_all
from .turns import LINE


@triton.jit
def _await(table, position, tiles, words, turn_line, parts, epoch, abort, error, deadline_ns):
    """Wait for the rows of the tile at a position, if there is one."""
    line = tl.load(table + position * ENTRY + 6, mask=position < tiles, other=0).to(tl.int32)
    count = tl.where(position < tiles, parts, 0)
    signal_wait_all(words + (turn_line + line) * LINE, epoch, count, -1, abort, error, deadline_ns)
    proxy_fence()


_FREE = [
    *("bias", "table", "pushes", "bases", "word_bases", "words", "epochs", "taken", "own", "tiles", "tasks", "active"),
    *("multiplying", "early", "capacity", "lines", "parts", "inner", "stride", "abort", "error", "deadline_ns"),
    *("last", "spare", "rank"),
]


@triton.jit(do_not_specialize=_FREE)
def fused_brought_kernel(
    mine, gathered, b, c, x, out, bias, table, pushes, bases, word_bases, words, epochs, taken,
    own: tl.int32, tiles: tl.int32, tasks: tl.int32, active: tl.int32, multiplying: tl.int32, early: tl.int32,
    inner: tl.int32, stride: tl.int64, capacity: tl.int32, lines: tl.int32, parts: tl.int32,
    partial, last: tl.int32, spare: tl.int32, rank: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    PARTS: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, PULL: tl.constexpr, SPLIT: tl.constexpr, IN_STEP: tl.constexpr,
):  # fmt: skip
    """Arguments as those of `fused_gather_kernel`; GPUs with TMA only. The first `active` CTAs work, the first
    `multiplying` of them multiply. `tasks`: all parts of all bands of `pushes`. SPLIT > 0: K of the `last` tiles is cut
    into so many parts, one for each CTA at most, which `partial` has room for; their words begin in line `spare`.
    IN_STEP: CTAs that multiply keep in step (`in_step.py`), counted in the word behind that of parts taken.
    """
    program, programs = tl.program_id(0), multiplying
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = epoch & 1
    turn_row, turn_line = turn * capacity, turn * lines
    wide, apart = inner // 8 * 8, stride // 8 * 8  # they are so already: it tells the compiler
    if (program == 0) & (active > 0):
        tl.store(taken + (1 - turn) * LINE, 0)
        tl.store(taken + (1 - turn) * LINE + 1, 0)  # of calls in step, which may come after others
    steps = tl.cdiv(inner, BLOCK_K)
    if SPLIT:
        tiles -= last
    here = tl.where(program < programs, tiles, 0)
    stride_of = tl.maximum(programs, 1)  # the loops divide by it
    stored = program - programs
    for position in tl.range(program, tl.minimum(here, own), stride_of, flatten=True):
        entry = table + position * ENTRY
        row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        total = multiply(mine, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
        stored += programs
        if IN_STEP:
            keep_step(taken + turn * LINE + 1, stored, tiles, stride_of)
        store_tile(out, c, bias, total, table + stored * ENTRY, PARTS, BULK, EVEN, BIAS, ACTIVATION)
    counter, task = taken + turn * LINE, tasks
    if program < active:
        task = tl.atomic_add(counter, 1, sem="relaxed")
    bring(x, pushes, task, tasks, counter, bases, word_bases, turn_row, turn_line, wide, apart, epoch, parts, BLOCK_M,
          WIDTH, RANKS, True)  # fmt: skip
    first = stored + programs  # where this CTA goes on
    for position in range(first, tl.minimum(here, first + early * stride_of), stride_of):
        _await(table, position, tiles, words, turn_line, parts, epoch, abort, error, deadline_ns)
    for position in tl.range(first, here, stride_of, flatten=True):
        entry = table + position * ENTRY
        row, column = turn_row + tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        source = tl.load(entry + 7).to(tl.int32)
        total = multiply(gathered, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, 0, False, source,
                         PULL)  # fmt: skip
        stored += programs
        if IN_STEP:
            keep_step(taken + turn * LINE + 1, stored, tiles, stride_of)
        _await(table, stored + early * programs, tiles, words, turn_line, parts, epoch, abort, error, deadline_ns)
        store_tile(out, c, bias, total, table + stored * ENTRY, PARTS, BULK, EVEN, BIAS, ACTIVATION)
    if SPLIT:
        limit = tl.where(program < programs, last * SPLIT, 0)
        multiply_parts(gathered, b, partial, table, tiles, limit, words, word_bases, rank, turn_row, turn_line, spare,
                       parts, steps, epoch, program, stride_of, abort, error, deadline_ns, BLOCK_M, BLOCK_N, BLOCK_K,
                       TRANSPOSED, PULL, SPLIT)  # fmt: skip
        sum_parts(out, bias, partial, table, tiles, limit, words, spare, epoch, program, stride_of, abort, error,
                  deadline_ns, BLOCK_M, BLOCK_N, BIAS, ACTIVATION, SPLIT)  # fmt: skip
    tl.store(epochs + program, epoch)
