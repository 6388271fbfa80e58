"""A matmul whose rows go to the ranks they are for: out = rows of all ranks' a @ b for this one, in one launch.

As `fused_scatter` without a sum: a finished tile leaves for its final rows in the memory of the rank it is for, and a
word there says so; own ones go straight to `out`. Then the CTAs copy what others sent, tile after tile, as it arrives.

    announce the call; wait until all have announced the one before
    for tile in table:                        expert by expert, rows for all ranks
        total = finish(a @ b[expert])         bias and activation are the sender's
        the word of the tile before, at the rank that it is for = epoch
        rows of the receiver (own: of out) = total
    for tile in arriving:                     about in the order in which they are sent
        wait for its word; out = what arrived

Both tables are the plan's. `table`: row, rows, column, columns of the product; place, the tile's first element in the
matrix of the receiver, and stride, how far its rows lie apart there; LINE * expert + the receiver; the number of its
word there. `arriving`: row, rows, column, columns of `out`, and the number of its word.

A tile never holds rows of two experts or for two ranks, and its stores end where its rows do: what lies behind them
belongs to another tile, perhaps of another rank.

Turns and memory ordering: `turns.py`. The receiver acquires a tile's word at system scope before it loads the tile with
ordinary loads.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .combine import activated
from .gemm import ENTRY, multiply, plain_multiply, store_tile
from .signals import has_bulk_copies, signal_wait_all
from .turns import LINE, take_turn, tell


@triton.jit
def _collect(out, source, row, rows, out_row, column, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile that arrived, into `out`."""
    HALF: tl.constexpr = BLOCK_M // 2
    across = column // 16 * 16 + tl.arange(0, BLOCK_N)[None, :]
    for half in tl.static_range(2):
        down = half * HALF + tl.arange(0, HALF)[:, None]
        mask = (down < rows) & (across < n)
        found = tl.load(source + (row + down).to(tl.int64) * n + across, mask=mask)
        tl.store(out + (out_row + down).to(tl.int64) * n + across, found, mask=mask)


@triton.jit
def _finished(tile, bias, column, n, BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    if BIAS:
        across = column + tl.arange(0, tile.shape[1])
        tile += tl.load(bias + across, mask=across < n, other=0.0).to(tl.float32)[None, :]
    return activated(tile, ACTIVATION)


@triton.jit
def _tell(table, stored, word_bases, turn_word, epoch, rank):
    """The word of tile `stored`, if there is one and it is another rank's."""
    entry, there = table + stored * ENTRY, stored >= 0
    owner = tl.load(entry + 6, mask=there, other=0).to(tl.int32) % LINE
    place = turn_word + tl.load(entry + 7, mask=there, other=0).to(tl.int32)
    tell(word_bases, owner, (there & (owner != rank)).to(tl.int32), place, epoch, 0)


_FREE = [
    *("bias", "table", "arriving", "bases", "word_bases", "words", "epochs", "tiles", "coming", "active", "inner"),
    *("half", "lines", "rank", "abort", "error", "deadline_ns", "a_row", "b_row", "b_expert"),
]


@triton.jit(do_not_specialize=_FREE)
def fused_exchange_kernel(
    a, b, arrived, out, bias, table, arriving, bases, word_bases, words, epochs,
    a_row: tl.int64, b_row: tl.int64, b_expert: tl.int64, tiles: tl.int32, coming: tl.int32, active: tl.int32,
    inner: tl.int32, n: tl.int32, half: tl.int64, lines: tl.int32, rank: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUPED: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`a` [M, K] and `b` ([K, N] or, TRANSPOSED, [N, K]; GROUPED: one for each expert, [E, ...]) are tensor
    descriptors, or (GPUs without TMA) pointers, whose rows lie `a_row` and `b_row` apart, experts `b_expert`.

    `arrived`: this rank's own memory, whose second turn begins at `half`; `bases`: addresses of all ranks'.
    `words`: a line of announcements, and `lines` lines for each turn; `word_bases`: addresses of all ranks'. `bias`
    [N], or one for each expert. EVEN: N is a multiple of 8, and all memory aligned. The first `active` CTAs work; every
    CTA of the grid, which never changes, counts calls in its word of `epochs`.
    """
    program, programs = tl.program_id(0), active
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = epoch & 1
    steps = tl.cdiv(inner, BLOCK_K)
    if EVEN:
        n, half = n // 8 * 8, half // 8 * 8  # they are so already: it tells the compiler
    turn_word = (1 + turn * lines) * LINE
    stored = tl.where(program < programs, program - programs, -1)  # a CTA that does not work tells of nothing
    if program < programs:
        take_turn(word_bases, words, epoch, program, rank, abort, error, deadline_ns, RANKS)
    here = tl.where(program < programs, tiles, 0)
    AHEAD: tl.constexpr = has_bulk_copies()  # loads of a tile run into the epilogue of the one before
    for position in tl.range(program, here, tl.maximum(programs, 1), flatten=AHEAD):  # it divides by its step
        entry = table + position * ENTRY
        row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        expert = tl.load(entry + 6).to(tl.int32) // LINE
        if has_bulk_copies():
            total = multiply(a, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, expert, GROUPED)
        else:
            total = plain_multiply(a, b, a_row, b_row, b_expert, row, tl.load(entry + 1).to(tl.int32), column, n, inner,
                                   expert, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, GROUPED)  # fmt: skip
        _tell(table, stored, word_bases, turn_word, epoch, rank)  # the tile before, whose stores have long arrived
        stored += programs
        entry = table + stored * ENTRY
        column = tl.load(entry + 2).to(tl.int32)
        whom = tl.load(entry + 6).to(tl.int32)
        owner, expert = whom % LINE, whom // LINE
        total = _finished(total, bias + expert * n, column, n, BIAS, ACTIVATION)
        there = tl.load(bases + owner) + turn * half * (out.dtype.element_ty.primitive_bitwidth // 8)
        target = tl.where(owner == rank, out.to(tl.int64), there).to(tl.pointer_type(out.dtype.element_ty))
        if EVEN:
            target = tl.multiple_of(target, 16)
        store_tile(target, target, bias, total, entry, 4, False, EVEN, False, 0)
    _tell(table, stored, word_bases, turn_word, epoch, rank)
    for position in range(program, tl.where(program < programs, coming, 0), programs):
        entry = arriving + position * ENTRY
        signal_wait_all(words + turn_word + tl.load(entry + 4).to(tl.int32), epoch, 1, -1, abort, error, deadline_ns)
        row = tl.load(entry).to(tl.int32)
        _collect(out, arrived + turn * half, row, tl.load(entry + 1).to(tl.int32), row,
                 tl.load(entry + 2).to(tl.int32), n, BLOCK_M, BLOCK_N)  # fmt: skip
    tl.store(epochs + program, epoch)
