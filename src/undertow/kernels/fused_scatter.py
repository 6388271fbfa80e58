"""A matmul whose tiles go to their owners by themselves: out = rows of the sum over ranks of a @ b.

Two kernels that run at once. The first multiplies: all ranks compute all tiles of their own products in the same order,
and store each into the memory of the rank that owns its rows, where every rank has a slot of its own; a word there says
so. It waits for nobody. The second adds, with few threads and little memory, on the multiprocessors that the first one
fills: it reads while tensor cores multiply, which a tile's own CTA could not.

    scatter:  for tile in table:
                  slot[r] of its owner = a @ b                     summed in fp32, rounded once
                  words[tile before, r] of its owner = epoch
    sum:      for tile in table, for part of its rows:
                  if mine:  wait for words[tile, s] of all s; out = finish(sum over s of slot[s])
                  BROADCAST (all_reduce): keep the sum where others can read it, and tell all; the others copy it

Sums are made in fp32, in the order of ranks. A tile's word follows one tile later, when its stores have arrived and
nobody has to wait for them.

The table is the plan's: row, rows, column, columns of the product; row in the owner's shard; line, the tile's number
among all; owner; row of `out`. The sums' table has own tiles only, but for BROADCAST.

Slots are used in turn by two calls. A rank that multiplies in call n + 2 has seen the end of call n + 1, whose sums
needed tiles that every other rank computed after its own call n: nobody still reads the slots of call n. (Every rank
must own a tile for that, or wait for one: BROADCAST.) Who waits for a sum waits for a tile that stands before all those
he has not come to, on the rank that adds it, too: so the first one that is missing is always under way.

Memory ordering. A word is released at system scope: after bulk stores when both warps that issued some have completed
them (`after_bulk_stores`), after ordinary ones behind a CTA barrier (`turns.tell`). Who adds acquires it at system
scope before it loads slots with ordinary loads. A ready word is released behind a CTA barrier after the stores of the
sum, and acquired before the copy. Epochs are this rank's own: one for each CTA of either kernel, advanced by it alone.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,misc,no-untyped-def"

import triton
import triton.language as tl

from .combine import activated
from .gemm import ENTRY, after_bulk_stores, halves, multiply, plain_multiply
from .signals import has_bulk_copies, signal_wait_all
from .turns import LINE, tell

_AT_ONCE = tl.constexpr(4)  # ranks whose parts a thread asks for at once: more would not fit its registers
_SET_BULK = tl.constexpr(after_bulk_stores("st.release.sys.global.b32 [$1], $2;"))


@triton.jit
def set_after_bulk_stores(word, epoch):
    """Set a word, which may be a peer's. Releases, at system scope, the bulk stores of the CTA's last tile."""
    tl.inline_asm_elementwise(_SET_BULK, "=r,l,r", [word, epoch], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _told(bases, owner, offset, epoch):
    """The word of a tile, in its owner's memory."""
    if has_bulk_copies():
        word = tl.load(bases + owner).to(tl.pointer_type(tl.int32)) + offset
        set_after_bulk_stores(word, epoch)
    else:
        tell(bases, owner, 1, offset, epoch, 0)


@triton.jit
def _put(target, part, n, columns, FIRST: tl.constexpr):
    """Columns from FIRST on of a tile into its owner's slot, which holds whole bands, by ordinary stores."""
    across = FIRST + tl.arange(0, part.shape[1])[None, :]
    place = tl.arange(0, part.shape[0])[:, None] * n + across
    tl.store(target + place, part.to(target.dtype.element_ty), mask=across < columns)


@triton.jit
def _store(slots, kind, bases, total, owner, row, column, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile into its owner's memory, in halves: what stages a whole one would not fit."""
    left, right = halves(total)
    if has_bulk_copies():
        HALF: tl.constexpr = BLOCK_N // 2
        KIND: tl.constexpr = kind.dtype.element_ty
        slots.store([owner, row, column], tl.reshape(left.to(KIND), (1, BLOCK_M, HALF)))
        slots.store([owner, row, column + HALF], tl.reshape(right.to(KIND), (1, BLOCK_M, HALF)))
    else:
        base = tl.multiple_of(tl.load(bases + owner).to(kind.dtype), 16)
        slot = base + (row.to(tl.int64) * n + column // 16 * 16)
        parts = halves(left) + halves(right)  # addresses of a whole tile would not fit
        for part in tl.static_range(len(parts)):
            _put(slot, parts[part], n, n - column, part * (BLOCK_N // len(parts)))


_FREE = ["table", "bases", "word_bases", "epochs", "tiles", "active", "inner", "rank", "padded", "half_rows"]


@triton.jit(do_not_specialize=[*_FREE, "a_row", "b_row"])
def fused_scatter_kernel(
    a, b, slots, kind, table, bases, word_bases, epochs, a_row: tl.int64, b_row: tl.int64, tiles: tl.int32,
    active: tl.int32, inner: tl.int32, n: tl.int32, padded: tl.int32, half_rows: tl.int32, rank: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """`a` [M, K] and `b` ([K, N] or, TRANSPOSED, [N, K]) are tensor descriptors, or, on GPUs without TMA, pointers,
    whose rows lie `a_row` and `b_row` apart.

    `slots` describes all ranks' memory, [ranks, rows, N]: `padded` rows for each source, `half_rows` further those of
    calls of odd numbers; without TMA it is at the addresses `bases`. `kind`: a pointer to elements of that memory.
    `word_bases`: addresses of all ranks' words, a line for each tile, of it a word for each source. The first `active`
    CTAs work; every CTA of the grid, which never changes, counts calls in its word of `epochs`.
    """
    program, programs = tl.program_id(0), active
    n = n // 8 * 8  # it is so already: it tells the compiler
    epoch = tl.load(epochs + program, volatile=True) + 1
    first_row = (epoch & 1) * half_rows + rank * padded
    steps = tl.cdiv(inner, BLOCK_K)
    stored = program - programs
    owner, offset = rank, 0  # of the tile before
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
        if stored != program:
            _told(word_bases, owner, offset, epoch)  # the tile before, whose stores have long arrived
        entry = table + stored * ENTRY
        owner = tl.load(entry + 6).to(tl.int32)
        offset = tl.load(entry + 5).to(tl.int32) * LINE + rank
        _store(slots, kind, bases, total, owner, first_row + tl.load(entry + 4).to(tl.int32),
               tl.load(entry + 2).to(tl.int32), n, BLOCK_M, BLOCK_N)  # fmt: skip
    if stored >= 0:
        _told(word_bases, owner, offset, epoch)
    tl.store(epochs + program, epoch)


@triton.jit
def _sum(
    out, kept, slots, plane, bias, rows, n, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """HEIGHT rows of an own tile: of all ranks' slots, finished, into `out` (BROADCAST: and `kept`)."""
    across = tl.arange(0, WIDTH)[None, :]
    down = tl.arange(0, HEIGHT)[:, None]
    mask = (down < rows) & (across < columns)
    place = down * n + across
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for begin in tl.static_range(0, RANKS, _AT_ONCE):
        values = ()
        for source in tl.static_range(begin, min(begin + _AT_ONCE, RANKS)):  # under way before the first is added
            values = values + (tl.load(slots + (source * plane // 8 * 8 + place), mask=mask, other=0.0),)  # noqa: RUF005
        for source in tl.static_range(len(values)):
            total += values[source].to(tl.float32)
    if BIAS:
        total += tl.load(bias + across, mask=across < columns, other=0.0).to(tl.float32)
    result = activated(total, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + place, result, mask=mask)
    if BROADCAST:
        tl.store(kept + place, result, mask=mask)


@triton.jit
def _copy(out, source, rows, n, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The same rows, where their owner summed them."""
    across = tl.arange(0, WIDTH)[None, :]
    down = tl.arange(0, HEIGHT)[:, None]
    mask = (down < rows) & (across < columns)
    place = down * n + across
    tl.store(out + place, tl.load(source + place, mask=mask), mask=mask)


_FREE_SUM = [
    *("bias", "table", "reduced_bases", "word_bases", "words", "epochs", "tiles", "active", "plane", "half", "lines"),
    *("rank", "abort", "error", "deadline_ns"),
]


@triton.jit(do_not_specialize=_FREE_SUM)
def fused_sum_kernel(
    slots, reduced, out, bias, table, reduced_bases, word_bases, words, epochs, tiles: tl.int32, active: tl.int32,
    n: tl.int32, plane: tl.int64, half: tl.int64, lines: tl.int32, rank: tl.int32, abort, error,
    deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, BROADCAST: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`slots`: this rank's own memory, where source s has its slots at s * plane, for calls of even numbers, and `half`
    further for those of odd ones; `reduced` (BROADCAST) likewise without sources, RANKS planes behind `slots`.

    `word_bases`: addresses of all ranks' words, `reduced_bases` of their `reduced`, `words` those here: a line for each
    of `lines` tiles, and as many for sums that are ready, of them a word for each of the PARTS of its rows. A tile's
    parts go to different CTAs, so that the last ones are summed by many.
    """
    program, programs = tl.program_id(0), active
    n, plane, half = n // 8 * 8, plane // 8 * 8, half // 8 * 8  # they are so already: it tells the compiler
    HEIGHT: tl.constexpr = BLOCK_M // PARTS
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = epoch & 1
    here = tl.where(program < programs, tiles * PARTS, 0)
    for unit in range(program, here, tl.maximum(programs, 1)):
        entry, part = table + unit // PARTS * ENTRY, unit % PARTS
        down = part * HEIGHT
        rows, column = tl.load(entry + 1).to(tl.int32) - down, tl.load(entry + 2).to(tl.int32) // 16 * 16
        line, owner = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
        at = turn * half + (tl.load(entry + 4) + down) * n + column
        into = out + ((tl.load(entry + 7) + down) * n + column)
        if owner == rank:
            failed = signal_wait_all(words + line * LINE, epoch, RANKS, -1, abort, error, deadline_ns)
            _sum(into, reduced + at, slots + at, plane, bias + column, rows, n, n - column, HEIGHT, BLOCK_N, RANKS,
                 BROADCAST, BIAS, ACTIVATION)  # fmt: skip
            if BROADCAST:
                tell(word_bases, 0, RANKS, (lines + line) * LINE + part, epoch, failed)
        elif BROADCAST:
            signal_wait_all(words + ((lines + line) * LINE + part), epoch, 1, -1, abort, error, deadline_ns)
            source = tl.load(reduced_bases + owner).to(tl.pointer_type(out.dtype.element_ty))
            _copy(into, tl.multiple_of(source, 16) + at, rows, n, n - column, HEIGHT, BLOCK_N)
    tl.store(epochs + program, epoch)
