"""A matmul whose tiles go to their owners by themselves: out = rows of the sum over ranks of a @ b, in one launch.

Every rank computes all tiles of its own product, those of the following rank's rows first, its own last. A finished
tile leaves by TMA for the memory of the rank that owns its rows, where each rank has a slot of its own, and a word
there says so. When own tiles come, the others' parts of them have long arrived: the epilogue of the CTA's next tile,
whose accumulators are free by then, sums the own tile before. So there is no second pass, and no loader or reducer that
would take SMs from the matmul.

    for tile in table:                        shards of ranks r + 1, r + 2, ..., r
        total = a @ b                         fp32
        words[tile before, r] of its owner = epoch
        partials[r] of the owner = total
        if mine:  fetch partials[s] of this tile into L2, for all s
        if the tile before was mine:  wait for words[tile before, s] of all s; out = sum over s of partials[s]

A tile's word follows one tile later, when its bulk stores have arrived and nobody has to wait for them.

BROADCAST (all_reduce): the owner also keeps the sum where others can read it and tells all of them; when a CTA has no
more tiles, it copies those of the others as they become ready.

The table is the plan's: row, rows, column, columns of the product; row in the owner's shard; line, the tile's number
among all; owner; row of `out`.

Slots are used in turn by two calls. A rank that is in call n + 2 has seen the end of call n + 1, which needed tiles
that every other rank computed after its own call n: nobody still reads the slots of call n. (Every rank must own a
tile for that, or wait for one: BROADCAST.)

Memory ordering. The word of a tile is released, at system scope, by the thread that issued the tile's bulk stores,
after their completion and a proxy fence (`_RELEASE_BULK`); the owner acquires it at system scope before it loads
partials with ordinary loads. A ready word is released at system scope behind a CTA barrier that follows the stores of
the sum, and acquired before the copy. Epochs are this rank's own: one for each CTA, read and advanced by it alone.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,misc,no-untyped-def"

import triton
import triton.language as tl

from .combine import activated
from .gemm import ENTRY, halves, multiply
from .signals import signal_wait_all

LINE = tl.constexpr(32)  # 32-bit words of a tile's line: one for each source
MOST_RANKS = 8

# The word of a tile that left by TMA, in the thread that issued its bulk stores: the leader that `elect.sync` always
# finds in the first warp. One piece of text, as in `gemm`: an atomic of Triton's own would keep loads from running
# ahead across tiles.
_RELEASE_BULK = tl.constexpr("""{
    .reg .pred other, leader;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.ge.u32 other, thread, 32;
    @other bra END;
    elect.sync _|leader, 0xffffffff;
    @!leader bra END;
    cp.async.bulk.wait_group 0;
    fence.proxy.async;
    st.release.sys.global.b32 [$1], $2;
END:
    mov.b32 $0, 0;
}""")
# A word at the same offset in the memory of every rank, after what the whole CTA stored: thread i sets that of rank i.
_RELEASE_EVERYWHERE = tl.constexpr("""{
    .reg .pred other;
    .reg .b32 thread;
    .reg .b64 place;
    barrier.sync 0;
    mov.u32 thread, %tid.x;
    setp.ge.u32 other, thread, $4;
    @other bra END;
    mad.wide.u32 place, thread, 8, $1;
    ld.global.b64 place, [place];
    add.s64 place, place, $2;
    st.release.sys.global.b32 [place], $3;
END:
    mov.b32 $0, 0;
}""")
_PREFETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;")


@triton.jit
def _put(c, tile, turn, row, column):
    """A tile into a peer's slot, in two halves: staging memory for a whole one would not fit."""
    ROWS: tl.constexpr = tile.shape[0]
    WIDTH: tl.constexpr = tile.shape[1] // 2
    left, right = halves(tile)
    c.store([turn, row, column], tl.reshape(left.to(c.dtype), (1, ROWS, WIDTH)))
    c.store([turn, row, column + WIDTH], tl.reshape(right.to(c.dtype), (1, ROWS, WIDTH)))


@triton.jit
def _send(c0, c1, c2, c3, c4, c5, c6, c7, tile, owner, turn, row, column, RANKS: tl.constexpr):
    """A tensor descriptor cannot be indexed: a chain of branches finds that of the owner."""
    if owner == 0:
        _put(c0, tile, turn, row, column)
    if owner == 1:
        _put(c1, tile, turn, row, column)
    if RANKS > 2:
        if owner == 2:
            _put(c2, tile, turn, row, column)
    if RANKS > 3:
        if owner == 3:
            _put(c3, tile, turn, row, column)
    if RANKS > 4:
        if owner == 4:
            _put(c4, tile, turn, row, column)
    if RANKS > 5:
        if owner == 5:
            _put(c5, tile, turn, row, column)
    if RANKS > 6:
        if owner == 6:
            _put(c6, tile, turn, row, column)
    if RANKS > 7:
        if owner == 7:
            _put(c7, tile, turn, row, column)


@triton.jit
def _sum(
    partials, plane, out, reduced, bias, row, rows, out_row, column, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    RANKS: tl.constexpr, BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """An own tile of all ranks, summed in their order, finished, stored; a few rows at a time."""
    ROWS: tl.constexpr = 64 if RANKS <= 4 else 32
    across = column // 16 * 16 + tl.arange(0, BLOCK_N)[None, :]
    for top in tl.static_range(0, BLOCK_M, ROWS):
        down = top + tl.arange(0, ROWS)[:, None]
        mask = (down < rows) & (across < n)
        place = (row + down).to(tl.int64) * n + across
        values = ()
        for one in tl.static_range(RANKS):  # all loads are under way before the first is added
            values = values + (tl.load(partials + one * plane + place, mask=mask, other=0.0),)  # noqa: RUF005
        total = values[0].to(tl.float32)
        for one in tl.static_range(1, RANKS):
            total += values[one].to(tl.float32)
        if BIAS:
            total += tl.load(bias + across, mask=across < n, other=0.0).to(tl.float32)
        result = activated(total, ACTIVATION).to(out.dtype.element_ty)
        tl.store(out + (out_row + down).to(tl.int64) * n + across, result, mask=mask)
        if BROADCAST:
            tl.store(reduced + place, result, mask=mask)


@triton.jit
def _finish(
    partials, plane, out, reduced, bias, bases, words, entry, n, lines, epoch, abort, error, deadline_ns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANKS: tl.constexpr, BROADCAST: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """An own tile, once all ranks' parts of it are here. BROADCAST: then all ranks are told that the sum is ready."""
    line = tl.load(entry + 5).to(tl.int32)
    signal_wait_all(words + line * LINE, epoch, RANKS, -1, abort, error, deadline_ns)
    _sum(partials, plane, out, reduced, bias, tl.load(entry + 4).to(tl.int32), tl.load(entry + 1).to(tl.int32),
         tl.load(entry + 7).to(tl.int32), tl.load(entry + 2).to(tl.int32), n, BLOCK_M, BLOCK_N, RANKS, BROADCAST, BIAS,
         ACTIVATION)  # fmt: skip
    if BROADCAST:
        offset = (lines + line).to(tl.int64) * LINE * 4
        tl.inline_asm_elementwise(_RELEASE_EVERYWHERE, "=r,l,l,r,r", [bases, offset, epoch, RANKS], dtype=tl.int32,
                                  is_pure=False, pack=1)  # fmt: skip


@triton.jit
def _prefetch(partials, plane, row, column, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr):
    """Have the others' tiles brought into L2 while the main loop runs; whether they have arrived does not matter."""
    BYTES: tl.constexpr = COLUMNS * partials.dtype.element_ty.primitive_bitwidth // 8
    place = (row + tl.arange(0, ROWS)).to(tl.int64) * n + tl.maximum(tl.minimum(column, n - COLUMNS), 0)
    for one in tl.static_range(RANKS):
        pointers = partials + one * plane + place
        tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [pointers, BYTES], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _collect(out, source, row, rows, out_row, column, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile that its owner summed: from the owner's memory into `out`."""
    HALF: tl.constexpr = BLOCK_M // 2
    across = column // 16 * 16 + tl.arange(0, BLOCK_N)[None, :]
    for half in tl.static_range(2):
        down = half * HALF + tl.arange(0, HALF)[:, None]
        mask = (down < rows) & (across < n)
        found = tl.load(source + (row + down).to(tl.int64) * n + across, mask=mask)
        tl.store(out + (out_row + down).to(tl.int64) * n + across, found, mask=mask)


_FREE = ["bias", "table", "bases", "words", "epochs", "tiles", "own", "inner", "lines", "abort", "error", "deadline_ns"]


@triton.jit(do_not_specialize=[*_FREE, "rank", "active", "plane", "half", "reduced_bases"])
def fused_scatter_kernel(
    a, b, c0, c1, c2, c3, c4, c5, c6, c7, partials, out, reduced, bias, table, bases, reduced_bases, words, epochs,
    tiles: tl.int32, own: tl.int32, active: tl.int32, inner: tl.int32, n: tl.int32, plane: tl.int64, half: tl.int64,
    lines: tl.int32, rank: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    RANKS: tl.constexpr, BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`a` [M, K] and `b` ([K, N] or, TRANSPOSED, [N, K]) are tensor descriptors, as are c0, c1, ...: this rank's slots
    [2, rows, N] in the memory of each rank, one for calls of even and one for those of odd numbers.

    `partials`: this rank's own memory, where source s has its slots at s * plane and the second turn begins at `half`;
    `reduced` (BROADCAST) likewise without sources. `bases`: addresses of all ranks' words, `reduced_bases` of their
    `reduced`, `words` those here: a line for each of `lines` tiles, and as many for sums that are ready. The first
    `active` CTAs work; every CTA of the grid, which never changes, counts calls in its word of `epochs`. The last `own`
    tiles of the table are this rank's.
    """
    program, programs = tl.program_id(0), active
    n, plane, half = n // 8 * 8, plane // 8 * 8, half // 8 * 8  # they are so already: it tells the compiler
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = epoch & 1
    steps = tl.cdiv(inner, BLOCK_K)
    partials += turn * half
    reduced += turn * half
    stored = program - programs
    finished = words + (2 * lines + program) * LINE  # at first a word of this CTA's own that nobody waits for
    before, previous = table, -1
    here = tl.where(program < programs, tiles, 0)
    for position in tl.range(program, here, programs, flatten=True):
        entry = table + position * ENTRY
        row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        total = multiply(a, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
        stored += programs
        entry = table + stored * ENTRY
        # The word of the tile before, whose bulk stores have long arrived.
        tl.inline_asm_elementwise(_RELEASE_BULK, "=r,l,r", [finished, epoch], dtype=tl.int32, is_pure=False, pack=1)
        shard_row, column = tl.load(entry + 4).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        owner = tl.load(entry + 6).to(tl.int32)
        _send(c0, c1, c2, c3, c4, c5, c6, c7, total, owner, turn, shard_row, column, RANKS)
        finished = tl.load(bases + owner).to(tl.pointer_type(tl.int32)) + tl.load(entry + 5).to(tl.int32) * LINE + rank
        if owner == rank:
            _prefetch(partials, plane, shard_row, column, n, BLOCK_M, BLOCK_N, RANKS)
        if previous == rank:  # the tile before is my own, and my part of it has arrived
            _finish(partials, plane, out, reduced, bias, bases, words, before, n, lines, epoch,
                    abort, error, deadline_ns, BLOCK_M, BLOCK_N, RANKS, BROADCAST, BIAS, ACTIVATION)  # fmt: skip
        before, previous = entry, owner
    tl.inline_asm_elementwise(_RELEASE_BULK, "=r,l,r", [finished, epoch], dtype=tl.int32, is_pure=False, pack=1)
    if (program < programs) & (stored >= 0) & (stored >= tiles - own):
        _finish(partials, plane, out, reduced, bias, bases, words, table + stored * ENTRY, n, lines, epoch,
                abort, error, deadline_ns, BLOCK_M, BLOCK_N, RANKS, BROADCAST, BIAS, ACTIVATION)  # fmt: skip
    if BROADCAST:
        for position in range(program, here - own, programs):
            entry = table + position * ENTRY
            line, owner = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
            signal_wait_all(words + (lines + line) * LINE, epoch, 1, -1, abort, error, deadline_ns)
            source = tl.load(reduced_bases + owner).to(tl.pointer_type(out.dtype.element_ty))
            source = tl.multiple_of(source, 16) + turn * half
            _collect(out, source, tl.load(entry + 4).to(tl.int32), tl.load(entry + 1).to(tl.int32),
                     tl.load(entry + 7).to(tl.int32), tl.load(entry + 2).to(tl.int32), n, BLOCK_M, BLOCK_N)  # fmt: skip
    tl.store(epochs + program, epoch)
