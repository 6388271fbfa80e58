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
after their completion and a proxy fence (without TMA: behind a CTA barrier; `turns.tell`); the owner acquires it at
system scope before it loads partials with ordinary loads. A ready word is released at system scope behind a CTA barrier
that follows the stores of the sum, and acquired before the copy. Epochs are this rank's own: one for each CTA, read and
advanced by it alone.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,misc,no-untyped-def"

import triton
import triton.language as tl

from .combine import activated
from .gemm import ENTRY, halves, multiply, plain_multiply
from .signals import has_bulk_copies, signal_wait_all
from .turns import LINE, tell, tell_everybody

_PREFETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;")


@triton.jit
def _put_part(c, part, turn, row, column):
    c.store([turn, row, column], tl.reshape(part.to(c.dtype), (1, part.shape[0], part.shape[1])))


@triton.jit
def put(c, tile, turn, row, column):
    """A tile into a peer's slot, in parts as wide as the descriptor's: staging memory for a whole would not fit."""
    WIDTH: tl.constexpr = c.block_shape[2]
    left, right = halves(tile)
    if WIDTH * 2 == tile.shape[1]:
        _put_part(c, left, turn, row, column)
        _put_part(c, right, turn, row, column + WIDTH)
    else:
        first, second = halves(left)
        _put_part(c, first, turn, row, column)
        _put_part(c, second, turn, row, column + WIDTH)
        third, fourth = halves(right)
        _put_part(c, third, turn, row, column + 2 * WIDTH)
        _put_part(c, fourth, turn, row, column + 3 * WIDTH)


@triton.jit
def send(c0, c1, c2, c3, c4, c5, c6, c7, tile, owner, turn, row, column, RANKS: tl.constexpr):
    """A tensor descriptor cannot be indexed: a chain of branches finds that of the owner."""
    if owner == 0:
        put(c0, tile, turn, row, column)
    if owner == 1:
        put(c1, tile, turn, row, column)
    if RANKS > 2:
        if owner == 2:
            put(c2, tile, turn, row, column)
    if RANKS > 3:
        if owner == 3:
            put(c3, tile, turn, row, column)
    if RANKS > 4:
        if owner == 4:
            put(c4, tile, turn, row, column)
    if RANKS > 5:
        if owner == 5:
            put(c5, tile, turn, row, column)
    if RANKS > 6:
        if owner == 6:
            put(c6, tile, turn, row, column)
    if RANKS > 7:
        if owner == 7:
            put(c7, tile, turn, row, column)


@triton.jit
def _store_quarter(target, part, n, columns, FIRST: tl.constexpr):
    across = FIRST + tl.arange(0, part.shape[1])[None, :]
    place = tl.arange(0, part.shape[0])[:, None] * n + across
    tl.store(target + place, part.to(target.dtype.element_ty), mask=across < columns)


@triton.jit
def _put_plain(target, tile, n, columns):
    """The same for GPUs without TMA, by ordinary stores from the tile's first element on; slots hold whole bands."""
    WIDTH: tl.constexpr = tile.shape[1] // 4
    left, right = halves(tile)
    first, second = halves(left)
    _store_quarter(target, first, n, columns, 0)
    _store_quarter(target, second, n, columns, WIDTH)
    third, fourth = halves(right)
    _store_quarter(target, third, n, columns, 2 * WIDTH)
    _store_quarter(target, fourth, n, columns, 3 * WIDTH)


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
    failed = signal_wait_all(words + line * LINE, epoch, RANKS, -1, abort, error, deadline_ns)
    _sum(partials, plane, out, reduced, bias, tl.load(entry + 4).to(tl.int32), tl.load(entry + 1).to(tl.int32),
         tl.load(entry + 7).to(tl.int32), tl.load(entry + 2).to(tl.int32), n, BLOCK_M, BLOCK_N, RANKS, BROADCAST, BIAS,
         ACTIVATION)  # fmt: skip
    if BROADCAST:
        tell_everybody(bases, (lines + line).to(tl.int64) * LINE * 4, epoch, failed, RANKS)


@triton.jit
def _prefetch(partials, plane, row, column, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr):
    """Have the others' tiles brought into L2 while the main loop runs; whether they have arrived does not matter."""
    BYTES: tl.constexpr = COLUMNS * partials.dtype.element_ty.primitive_bitwidth // 8
    place = (row + tl.arange(0, ROWS)).to(tl.int64) * n + tl.maximum(tl.minimum(column, n - COLUMNS), 0)
    for one in tl.static_range(RANKS):
        pointers = partials + one * plane + place
        tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [pointers, BYTES], dtype=tl.int32, is_pure=False, pack=1)


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


_FREE = ["bias", "table", "bases", "words", "epochs", "tiles", "own", "inner", "lines", "abort", "error", "deadline_ns"]


@triton.jit(do_not_specialize=[*_FREE, "rank", "active", "plane", "half", "reduced_bases", "a_row", "b_row"])
def fused_scatter_kernel(
    a, b, c0, c1, c2, c3, c4, c5, c6, c7, partials, out, reduced, bias, table, bases, reduced_bases, words, epochs,
    a_row: tl.int64, b_row: tl.int64, tiles: tl.int32, own: tl.int32, active: tl.int32, inner: tl.int32, n: tl.int32,
    plane: tl.int64, half: tl.int64, lines: tl.int32, rank: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    RANKS: tl.constexpr, BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`a` [M, K] and `b` ([K, N] or, TRANSPOSED, [N, K]) are tensor descriptors, as are c0, c1, ...: this rank's slots
    [2, rows, N] in the memory of each rank, one for calls of even and one for those of odd numbers. On GPUs without TMA
    `a` and `b` are pointers, whose rows lie `a_row` and `b_row` apart, and no descriptors are there.

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
        # The word of the tile before, whose bulk stores have long arrived.
        tell(finished, epoch, False)
        shard_row, column = tl.load(entry + 4).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        owner = tl.load(entry + 6).to(tl.int32)
        if has_bulk_copies():
            send(c0, c1, c2, c3, c4, c5, c6, c7, total, owner, turn, shard_row, column, RANKS)
        else:
            slots = tl.multiple_of(tl.load(reduced_bases + owner).to(tl.pointer_type(out.dtype.element_ty)), 16)
            slot = slots + (turn * half + (rank - RANKS) * plane + shard_row.to(tl.int64) * n + column // 16 * 16)
            _put_plain(slot, total, n, n - column)
        finished = tl.load(bases + owner).to(tl.pointer_type(tl.int32)) + tl.load(entry + 5).to(tl.int32) * LINE + rank
        if has_bulk_copies():
            if owner == rank:
                _prefetch(partials, plane, shard_row, column, n, BLOCK_M, BLOCK_N, RANKS)
        if previous == rank:  # the tile before is my own, and my part of it has arrived
            _finish(partials, plane, out, reduced, bias, bases, words, before, n, lines, epoch,
                    abort, error, deadline_ns, BLOCK_M, BLOCK_N, RANKS, BROADCAST, BIAS, ACTIVATION)  # fmt: skip
        before, previous = entry, owner
    tell(finished, epoch, False)
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
            collect(out, source, tl.load(entry + 4).to(tl.int32), tl.load(entry + 1).to(tl.int32),
                     tl.load(entry + 7).to(tl.int32), tl.load(entry + 2).to(tl.int32), n, BLOCK_M, BLOCK_N)  # fmt: skip
    tl.store(epochs + program, epoch)
