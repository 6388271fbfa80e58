"""A matmul of few rows whose columns have owners: out = sum over ranks of x @ w, for at most 64 rows, in one launch.

As `fused_decode`, for rows so many that sending all of them to all ranks costs more than a second way. Blocks of
columns belong to ranks in turn; RANKS of them next to each other, one of every rank, are a group. A rank multiplies the
blocks of the following ranks first, its own last. A finished block goes to its owner, which adds the parts of all ranks
as soon as its own is there and sends the sum to everybody:

    for block of ranks r + 1, r + 2, ..., r, group after group:
        total = x @ w
        mine:    wait for words[group, s] of all others s; out = sum over s of parts[group, s], which is
                 sums[group, r] of every rank; ready[group, r] of every rank = epoch
        others': parts[group, r] of the owner = total; words[group, r] of the owner = epoch
    for group:
        wait for ready[group, s] of all others s; out = sums[group, s]

So the others' parts have arrived when a rank's own block is computed, and only the way of the sums is waited for. A
word follows its block at once: the owner may be waiting for it. Loads of weights run ahead meanwhile.

Sums are taken in fp32 in the order of ranks; the partial products are rounded to the type of x before, own ones, too:
as in `fused_decode`. A group that ends behind the last column has blocks without columns, which are
computed (of zeros) and told as all others, but not stored.

Slots are used in turn by two calls. A rank in call n + 2 has waited, in call n + 1, for sums of every rank, which took
parts that all ranks computed after their whole call n: nobody still reads the slots of call n.

Memory ordering. A block's word is released, at system scope, behind a CTA barrier that follows the block's stores
(`turns.tell`); the owner acquires it at system scope before it loads the parts with ordinary loads. The same holds for
sums and their words. Epochs are this rank's own: one for each CTA, read and advanced by it alone. Who does not get
what it waits for poisons the result, as in `fused_decode`.

AHEAD (sm_90 and later, launched to match): elements along K of the first blocks whose weights are asked for while the
launch in front ends (`ahead.py`); 0: the call begins when that has ended. The next launch may begin when the CTA waits
for nobody any more, or (`early`) already when it has told of all its blocks and the CTAs of its number on all ranks
run, which they say when they finish a block.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,misc,no-untyped-def"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from .ahead import ask_for_weights, begin_early, let_next_begin, say_running
from .combine import activated
from .gemm import halves, multiply, plain_multiply
from .poison import leave_grid
from .signals import has_bulk_copies, signal_wait_all
from .turns import LINE, tell

_AT_ONCE = tl.constexpr(4)  # ranks whose parts a thread asks for at once
_WHOLE = tl.constexpr(8192)  # elements of a tile that is stored, or summed, as one by four ranks


@triton.jit
def _parted(tile, RANKS: tl.constexpr):
    """A tile in parts whose addresses fit the registers: one, or two halves of its columns."""
    parts = (tile,)
    if tile.shape[0] * tile.shape[1] * (RANKS if RANKS > 4 else 4) > 4 * _WHOLE:
        parts = halves(tile)
    return parts


@triton.jit
def _place(slot, down, across, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where these rows and columns of a block are in slot number `slot`: each holds a block, row after row."""
    return slot.to(tl.int64) * (BLOCK_M * BLOCK_N) + (down * BLOCK_N + across)


@triton.jit
def _put(target, part, slot, rows, left, FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns from FIRST on of a block into a slot of `target`."""
    across = FIRST + tl.arange(0, part.shape[1])[None, :]
    down = tl.arange(0, part.shape[0])[:, None]
    mask = (down < rows) & (across < left)
    tl.store(target + _place(slot, down, across, BLOCK_M, BLOCK_N), part.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _sum(
    out, parts, bases, sums_at, bias, part, group, rank, rows, n, column, FIRST: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The same columns of an own block: the parts of all ranks in their order, finished; to `out`, and to all others'
    sums, `sums_at` elements behind their bases."""
    ELEMENT: tl.constexpr = out.dtype.element_ty
    across = FIRST + tl.arange(0, part.shape[1])[None, :]
    down = tl.arange(0, part.shape[0])[:, None]
    mask = (down < rows) & (across < n - column)
    own = part.to(ELEMENT).to(tl.float32)
    total = tl.zeros(part.shape, tl.float32)
    for begin in tl.static_range(0, RANKS, _AT_ONCE):
        values = ()
        for source in tl.static_range(begin, min(begin + _AT_ONCE, RANKS)):  # under way before the first is added
            place = _place(group * RANKS + source, down, across, BLOCK_M, BLOCK_N)
            values = values + (tl.load(parts + place, mask=mask & (rank != source), other=0.0),)
        for one in tl.static_range(len(values)):
            total += tl.where(rank == begin + one, own, values[one].to(tl.float32))
    if BIAS:
        total += tl.load(bias + column + across, mask=across < n - column, other=0.0).to(tl.float32)
    result = activated(total, ACTIVATION).to(ELEMENT)
    place = sums_at + _place(group * RANKS + rank, down, across, BLOCK_M, BLOCK_N)
    for step in tl.static_range(1, RANKS):
        there = tl.load(bases + (rank + step) % RANKS).to(tl.pointer_type(ELEMENT))
        tl.store(tl.multiple_of(there, 16) + place, result, mask=mask)
    tl.store(out + (down * n + column + across), result, mask=mask)


@triton.jit
def _collect(
    out, sums, group, rank, rows, n, RANKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The blocks of a group that others summed, into `out`; as many loads under way as fit."""
    TALL: tl.constexpr = BLOCK_M if BLOCK_M * BLOCK_N <= _WHOLE // 2 else _WHOLE // 2 // BLOCK_N
    across = tl.arange(0, BLOCK_N)[None, :]
    for top in range(0, rows, TALL):
        down = top + tl.arange(0, TALL)[:, None]
        for begin in tl.static_range(1, RANKS, _AT_ONCE):
            values = ()
            for step in tl.static_range(begin, min(begin + _AT_ONCE, RANKS)):
                block = group * RANKS + (rank + step) % RANKS
                mask = (down < rows) & (across < n - block * BLOCK_N)
                values = values + (tl.load(sums + _place(block, down, across, BLOCK_M, BLOCK_N), mask=mask),)
            for one in tl.static_range(len(values)):
                column = (group * RANKS + (rank + begin + one) % RANKS) * BLOCK_N
                tl.store(out + (down * n + column + across), values[one], mask=(down < rows) & (across < n - column))


_FREE = [
    *("weights", "bias", "bases", "word_bases", "words", "epochs", "active", "early", "rank", "rows", "inner", "half"),
    *("reduced", "lines", "abort", "error", "deadline_ns", "a_row", "b_row"),
]


@triton.jit(do_not_specialize=_FREE)
def fused_columns_kernel(
    x, w, weights, out, bias, parts, bases, word_bases, words, epochs, rows: tl.int32, n: tl.int32, inner: tl.int32,
    active: tl.int32, early: tl.int32, a_row: tl.int64, b_row: tl.int64, half: tl.int64, reduced: tl.int64,
    lines: tl.int32, rank: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, RANKS: tl.constexpr,
    LANES: tl.constexpr, AHEAD: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`x` [rows, K] and `w` ([K, N] or, TRANSPOSED, [N, K]) are tensor descriptors, or (GPUs without TMA) pointers,
    whose rows lie `a_row` and `b_row` apart; `weights` points to w in either case; `out` [rows, N] is contiguous.

    `parts`: this rank's own memory, [2, 2, groups, RANKS, BLOCK_M, BLOCK_N]: of either turn, `half` elements apart,
    parts and, `reduced` elements behind them, sums; `bases`: addresses of all ranks'. `words`: a line for each of
    `lines` groups, as many for sums that are ready, and one for each CTA; `word_bases`: addresses of all ranks'. N is a
    multiple of 8. The first `active` CTAs work; every CTA of the grid, which never changes, counts calls in its word of
    `epochs`; behind those is `poison.leave_grid`'s. LANES: the CTA's threads. AHEAD, `early`: see above.
    """
    program = tl.program_id(0)
    n, half, reduced = n // 8 * 8, half // 8 * 8, reduced // 8 * 8  # they are so already: it tells the compiler
    groups = tl.cdiv(n, RANKS * BLOCK_N)
    last = tl.where(program < active, RANKS * groups, 0)
    every = tl.maximum(active, 1)  # loops divide by their step
    if AHEAD > 0:
        for one in tl.static_range(2):  # of the first block, and if it has no more, of the second
            position, left = program + one * every, AHEAD - one * inner
            if (position < last) & (left > 0):
                column = (position % groups * RANKS + (rank + 1 + position // groups) % RANKS) * BLOCK_N
                ask_for_weights(weights, b_row, n, column, 0, tl.minimum(inner, left), AHEAD, BLOCK_N, TRANSPOSED,
                                LANES)  # fmt: skip
        begin_early()
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = (epoch & 1).to(tl.int64) * half
    steps = tl.cdiv(inner, BLOCK_K)
    stored = program - every
    lost = epoch * 0  # whether a wait of this CTA failed
    FLAT: tl.constexpr = has_bulk_copies()  # loads of a block run into the epilogue of the one before
    for position in tl.range(program, last, every, flatten=FLAT):
        column = (position % groups * RANKS + (rank + 1 + position // groups) % RANKS) * BLOCK_N
        if has_bulk_copies():
            total = multiply(x, w, 0, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
        else:
            total = plain_multiply(x, w, a_row, b_row, b_row, rows * 0, rows, column, n, inner, 0, BLOCK_M, BLOCK_N,
                                   BLOCK_K, TRANSPOSED, False)  # fmt: skip
        stored += every  # the position again: what the loads that run ahead need must not wait for this
        group, owner = stored % groups, (rank + 1 + stored // groups) % RANKS
        column = (group * RANKS + owner) * BLOCK_N
        mine = owner == rank
        failed = signal_wait_all(
            words + group * LINE, epoch, tl.where(mine, RANKS, 0), rank, abort, error, deadline_ns
        )  # fmt: skip
        if AHEAD == 0:
            lost |= failed
        pieces = _parted(total, RANKS)
        WIDTH: tl.constexpr = BLOCK_N // len(pieces)
        if mine:
            for one in tl.static_range(len(pieces)):
                _sum(out, parts + turn, bases, turn + reduced, bias, pieces[one], group, rank, rows, n, column,
                     one * WIDTH, RANKS, BLOCK_M, BLOCK_N, BIAS, ACTIVATION)  # fmt: skip
        else:
            there = tl.load(bases + owner).to(tl.pointer_type(out.dtype.element_ty))
            for one in tl.static_range(len(pieces)):
                _put(tl.multiple_of(there, 16) + turn, pieces[one], group * RANKS + rank, rows, n - column,
                     one * WIDTH, BLOCK_M, BLOCK_N)  # fmt: skip
        first, count = tl.where(mine, 0, owner), tl.where(mine, RANKS, 1)
        tell(word_bases, first, count, (tl.where(mine, lines, 0) + group) * LINE + rank, epoch, failed)
        if AHEAD > 0:
            say_running(word_bases, (2 * lines + program) * LINE + rank, epoch, RANKS, LANES)
    if AHEAD > 0:
        # Others may have more CTAs at work, each of which waits for the one of its number here. (A launch of no CTA,
        # which only loads the kernel, counts otherwise.)
        if (active > 0) & (program >= active) & (program < RANKS * groups):
            say_running(word_bases, (2 * lines + program) * LINE + rank, epoch, RANKS, LANES)
        if (early != 0) & (program < last):
            running = words + (2 * lines + program) * LINE
            signal_wait_all(running, epoch, RANKS, rank, abort, error, deadline_ns)
            let_next_begin()
    for group in range(program, tl.where(program < active, groups, 0), every):
        failed = signal_wait_all(words + (lines + group) * LINE, epoch, RANKS, rank, abort, error, deadline_ns)
        if AHEAD == 0:
            lost |= failed
        elif group + every >= groups:  # this CTA waits for nobody any more
            let_next_begin()
        _collect(out, parts + turn + reduced, group, rank, rows, n, RANKS, BLOCK_M, BLOCK_N)
    tl.store(epochs + program, epoch)
    if AHEAD == 0:
        leave_grid(epochs, lost, out, rows * n, deadline_ns)
