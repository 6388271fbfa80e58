"""A matmul whose tiles go to their owners by themselves: out = rows of the sum over ranks of a @ b, in one launch.

Every rank computes all tiles of its own product, own ones later than the others' (`plan/fused.py`). A finished tile is
stored into the memory of the rank that owns its rows, where each rank has a slot of its own, and a word there says so.
When own tiles come, the others' parts of them have arrived: they are added while the tile is still in registers. So
there is no second pass, and no loader or reducer that would take SMs from the matmul.

    for tile in table:
        total = a @ b                         fp32
        words[tile before, r] of its owner = epoch
        if mine:  wait for words[tile, s] of all others s; out = total + sum over s of partials[s]
        else:     partials[r] of the owner = total

Sums are made in fp32, own part first and then those of ranks r + 1, r + 2, ...: always in this order. A tile's word
follows one tile later, when its stores have arrived and nobody has to wait for them.

BROADCAST (all_reduce): the owner also keeps the sum where others can read it and tells all of them, one tile later,
too; when a CTA has no more tiles, it copies those of the others as they become ready.

The table is the plan's: row, rows, column, columns of the product; row in the owner's shard; line, the tile's number
among all; owner; row of `out`.

Slots are used in turn by two calls. A rank that is in call n + 2 has seen the end of call n + 1, which needed tiles
that every other rank computed after its own call n: nobody still reads the slots of call n. (Every rank must own a
tile for that, or wait for one: BROADCAST.)

Tiles are stored by ordinary stores, not by TMA: a descriptor for each owner means a branch for each, among which the
compiler no longer lets one wgmma run while the next is issued (half as slow again on an H200).

Memory ordering. The word of a tile is released, at system scope, behind a CTA barrier that follows the tile's stores
(`turns.tell`); the owner acquires it at system scope before it loads partials with ordinary loads. A ready word is
released in the same way after the stores of the sum, and acquired before the copy. Epochs are this rank's own: one for
each CTA, read and advanced by it alone.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,misc,no-untyped-def"

import triton
import triton.language as tl

from .combine import activated
from .gemm import ENTRY, halves, multiply, plain_multiply
from .pieces import settled
from .signals import has_bulk_copies, signal_wait_all
from .turns import LINE, tell

_AT_ONCE = tl.constexpr(3)  # ranks whose parts a thread asks for at once: more would not fit its registers


@triton.jit
def _put(target, part, n, columns, FIRST: tl.constexpr):
    """Columns from FIRST on of a tile into its owner's slot, which holds whole bands."""
    across = FIRST + tl.arange(0, part.shape[1])[None, :]
    place = tl.arange(0, part.shape[0])[:, None] * n + across
    tl.store(target + place, part.to(target.dtype.element_ty), mask=across < columns)


@triton.jit
def _sum(
    out, kept, partials, plane, bias, part, rank, rows, n, columns, FIRST: tl.constexpr, RANKS: tl.constexpr,
    BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The same columns of an own tile: with the parts of all others, finished, into `out` (BROADCAST: and `kept`)."""
    across = FIRST + tl.arange(0, part.shape[1])[None, :]
    down = tl.arange(0, part.shape[0])[:, None]
    mask = (down < rows) & (across < columns)
    place = down * n + across
    total = part
    for begin in tl.static_range(1, RANKS, _AT_ONCE):
        values = ()
        for step in tl.static_range(begin, min(begin + _AT_ONCE, RANKS)):  # under way before the first is added
            source = settled(((rank + step) % RANKS).to(tl.int64)) * plane
            values = values + (tl.load(partials + source // 8 * 8 + place, mask=mask, other=0.0),)  # noqa: RUF005
        for step in tl.static_range(len(values)):
            total += values[step].to(tl.float32)
    if BIAS:
        total += tl.load(bias + across, mask=across < columns, other=0.0).to(tl.float32)
    result = activated(total, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + place, result, mask=mask)
    if BROADCAST:
        tl.store(kept + place, result, mask=mask)


@triton.jit
def collect(out, source, row, rows, out_row, column, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile that its owner summed: from the owner's memory into `out`."""
    HALF: tl.constexpr = BLOCK_M // 2
    across = column // 16 * 16 + tl.arange(0, BLOCK_N)[None, :]
    for half in tl.static_range(2):
        down = half * HALF + tl.arange(0, HALF)[:, None]
        mask = (down < rows) & (across < n)
        found = tl.load(source + (row + down).to(tl.int64) * n + across, mask=mask)
        tl.store(out + (out_row + down).to(tl.int64) * n + across, found, mask=mask)


_FREE = ["bias", "table", "bases", "words", "epochs", "tiles", "inner", "lines", "abort", "error", "deadline_ns"]


@triton.jit(do_not_specialize=[*_FREE, "rank", "active", "plane", "half", "word_bases", "a_row", "b_row"])
def fused_scatter_kernel(
    a, b, partials, out, reduced, bias, table, bases, word_bases, words, epochs,
    a_row: tl.int64, b_row: tl.int64, tiles: tl.int32, active: tl.int32, inner: tl.int32, n: tl.int32,
    plane: tl.int64, half: tl.int64, lines: tl.int32, rank: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    RANKS: tl.constexpr, BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`a` [M, K] and `b` ([K, N] or, TRANSPOSED, [N, K]) are tensor descriptors, or, on GPUs without TMA, pointers,
    whose rows lie `a_row` and `b_row` apart.

    `partials`: this rank's own memory, where source s has its slots at s * plane, for calls of even numbers, and `half`
    further for those of odd ones; `reduced` (BROADCAST) likewise without sources, RANKS planes behind `partials`.
    `bases`: addresses of all ranks' memory, `word_bases` of their words, `words` those here: a line for each of `lines`
    tiles, and as many for sums that are ready. The first `active` CTAs work; every CTA of the grid, which never
    changes, counts calls in its word of `epochs`.
    """
    program, programs = tl.program_id(0), active
    n, plane, half = n // 8 * 8, plane // 8 * 8, half // 8 * 8  # they are so already: it tells the compiler
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = epoch & 1
    steps = tl.cdiv(inner, BLOCK_K)
    partials += turn * half
    reduced += turn * half
    stored = program - programs
    first, told, place, failed = rank, 0, 0, 0  # of the tile before: the words of which ranks, where, and whether
    here = tl.where(program < programs, tiles, 0)
    AHEAD: tl.constexpr = has_bulk_copies()  # loads of a tile run into the epilogue of the one before
    for position in tl.range(program, here, tl.maximum(programs, 1), flatten=AHEAD):  # it divides by its step
        entry = table + position * ENTRY
        row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        if has_bulk_copies():
            total = multiply(a, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
        else:
            total = plain_multiply(a, b, a_row, b_row, b_row, row, tl.load(entry + 1).to(tl.int32), column, n, inner, 0,
                                   BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, False)  # fmt: skip
        stored += programs
        entry = table + stored * ENTRY
        tell(word_bases, first, told, place, epoch, failed)  # the tile before, whose stores have long arrived
        column = tl.load(entry + 2).to(tl.int32) // 16 * 16
        line, owner = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
        at = tl.load(entry + 4) * n + column
        mine = owner == rank
        failed = signal_wait_all(
            words + line * LINE, epoch, tl.where(mine, RANKS, 0), rank, abort, error, deadline_ns
        )  # fmt: skip
        left, right = halves(total)
        parts = halves(left) + halves(right)  # addresses of a whole tile would not fit
        if RANKS > 4:
            parts = halves(parts[0]) + halves(parts[1]) + halves(parts[2]) + halves(parts[3])
        if mine:
            rows, across = tl.load(entry + 1).to(tl.int32), tl.load(entry + 7) * n + column
            for part in tl.static_range(len(parts)):
                _sum(out + across, reduced + at, partials + at, plane, bias + column, parts[part], rank, rows, n,
                     n - column, part * (BLOCK_N // len(parts)), RANKS, BROADCAST, BIAS, ACTIVATION)  # fmt: skip
        else:
            slots = tl.multiple_of(tl.load(bases + owner).to(tl.pointer_type(out.dtype.element_ty)), 16)
            slot = slots + (turn * half + rank * plane + at)
            for part in tl.static_range(len(parts)):
                _put(slot, parts[part], n, n - column, part * (BLOCK_N // len(parts)))
        told = tl.where(mine, RANKS if BROADCAST else 0, 1)
        first = tl.where(mine, 0, owner)
        place = tl.where(mine, (lines + line) * LINE, line * LINE + rank)
    tell(word_bases, first, told, place, epoch, failed)
    if BROADCAST:
        for position in range(program, here, tl.maximum(programs, 1)):
            entry = table + position * ENTRY
            line, owner = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
            if owner != rank:
                signal_wait_all(words + (lines + line) * LINE, epoch, 1, -1, abort, error, deadline_ns)
                source = tl.load(bases + owner).to(tl.pointer_type(out.dtype.element_ty))
                source = tl.multiple_of(source, 16) + (turn * half + RANKS * plane)
                collect(out, source, tl.load(entry + 4).to(tl.int32), tl.load(entry + 1).to(tl.int32),
                        tl.load(entry + 7).to(tl.int32), tl.load(entry + 2).to(tl.int32), n, BLOCK_M,
                        BLOCK_N)  # fmt: skip
    tl.store(epochs + program, epoch)
