"""A matmul whose tiles go to their owners by themselves: out = rows of the sum over ranks of a @ b, in one launch.

Every rank computes all tiles of its own product, all ranks in the same order. A finished tile is stored into the memory
of the rank that owns its rows, where each rank has a slot of its own, and a word there says so. The owner sums a little
later, beside the main loop of a further tile: while tensor cores multiply, the threads that issued it would only wait.
So sums cost next to nothing, find what they read still in the L2 cache, and take no SM from the matmul.

    for tile in table:
        total = a @ b, and meanwhile what the entry before said:
            sum:   out = finish(sum over s of slots[s])            some rows of an own tile
            copy:  out = what its owner summed                     BROADCAST (all_reduce): of another's
        words[tile before, r] of its owner = epoch
        BROADCAST: of the sum that was made, ready[tile] of all = epoch
        slots[r] of the owner = total
        beside[tile]: wait for words[its tile, s] of all s, or for ready[its tile]
    what is left of `beside`, with nothing to multiply

Sums are made in fp32 of products rounded once, in the order of ranks. A tile's word follows one tile later, when its
stores have arrived and nobody has to wait for them.

Both tables are the plan's (`plan/fused.py`). `table`: row, rows, column, columns of the product; row in the owner's
shard; line, the tile's number among all; owner; row of `out`. `beside`: row in the owner's shard, rows (0: nothing),
column, line, row of `out`, owner; a line for every tile of the table, and then those that are left.

Nobody waits for what comes after: at position q of the table a CTA waits for words that are set at positions up to q,
before whatever is waited for there. So of all CTAs that wait, the one at the first position need not.

Slots are used in turn by two calls. A rank that is in call n + 2 has seen the end of call n + 1, which needed tiles
that every other rank computed after its own call n: nobody still reads the slots of call n. (Every rank must own a
tile for that, or wait for one: BROADCAST.)

JOINED: all ranks' memory lies in one range of addresses (`fabric/joined.py`), and tiles are stored by TMA. Elsewhere by
ordinary stores: a descriptor for each owner means a branch for each, among which the compiler no longer lets one wgmma
run while the next is issued (half as slow again on an H200).

Memory ordering. The word of a tile is released, at system scope, behind a CTA barrier that follows the tile's ordinary
stores (`turns.tell`), or when both warps that issued bulk stores have completed them (`after_bulk_stores`). The owner
acquires it at system scope, with a CTA barrier, before it loads slots with ordinary loads. A ready word is released
behind a CTA barrier after the stores of the sum, and acquired before the copy. Epochs are this rank's own: one for each
CTA, read and advanced by it alone.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,misc,no-untyped-def"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from .combine import activated
from .gemm import ENTRY, after_bulk_stores, halves, plain_multiply
from .signals import has_bulk_copies, signal_wait_beside
from .turns import LINE, tell

_SET_BULK = tl.constexpr(after_bulk_stores("st.release.gpu.global.b32 [$1], $2;"))


@triton.jit
def set_after_bulk_stores(word, epoch):
    """Set a word of a rank on this GPU. Releases, at its scope, the bulk stores of the CTA's last tile."""
    tl.inline_asm_elementwise(_SET_BULK, "=r,l,r", [word, epoch], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _put(target, part, n, columns, FIRST: tl.constexpr):
    """Columns from FIRST on of a tile into its owner's slot, which holds whole bands."""
    across = FIRST + tl.arange(0, part.shape[1])[None, :]
    place = tl.arange(0, part.shape[0])[:, None] * n + across
    tl.store(target + place, part.to(target.dtype.element_ty), mask=across < columns)


@triton.jit
def _store(slots, bases, kind, total, turn, owner, row, column, half, n, JOINED: tl.constexpr):
    """A tile into its owner's memory, from `row` on of this turn's slots."""
    BLOCK_M: tl.constexpr = total.shape[0]
    BLOCK_N: tl.constexpr = total.shape[1]
    left, right = halves(total)
    if JOINED:  # in halves: what stages a whole one would not fit
        HALF: tl.constexpr = BLOCK_N // 2
        KIND: tl.constexpr = kind.dtype.element_ty
        slots.store([owner, turn, row, column], tl.reshape(left.to(KIND), (1, 1, BLOCK_M, HALF)))
        slots.store([owner, turn, row, column + HALF], tl.reshape(right.to(KIND), (1, 1, BLOCK_M, HALF)))
    else:
        base = tl.multiple_of(tl.load(bases + owner).to(kind.dtype), 16)
        column = column // 16 * 16
        slot = base + (turn * half + row.to(tl.int64) * n + column)
        parts = halves(left) + halves(right)  # addresses of a whole tile would not fit
        for part in tl.static_range(len(parts)):
            _put(slot, parts[part], n, n - column, part * (BLOCK_N // len(parts)))


@triton.jit
def _ask(job, top, n, plane, kind, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """HEIGHT rows of a job from its row `top` on: of all ranks' slots, or of what the owner summed. Under way only."""
    source, _, _, column, rows, sums, _ = job
    across = tl.arange(0, WIDTH)[None, :]
    down = top + tl.arange(0, HEIGHT)[:, None]
    mask = (down < rows) & (across < n - column)
    first = tl.multiple_of(source.to(kind.dtype), 16)
    place = down * n + across
    values = (tl.load(first + place, mask=mask, other=0.0),)
    for rank in tl.static_range(1, RANKS):
        values = values + (tl.load((first + rank * plane) + place, mask=mask & (sums != 0), other=0.0),)
    return values


@triton.jit
def _add(
    values, job, top, n, out, kept, bias, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Those rows, summed in the order of ranks and finished, into `out` (BROADCAST: and `kept`); copies as they are."""
    _, at, into, column, rows, sums, _ = job
    across = tl.arange(0, WIDTH)[None, :]
    down = top + tl.arange(0, HEIGHT)[:, None]
    mask = (down >= 0) & (down < rows) & (across < n - column)
    total = values[0].to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += values[rank].to(tl.float32)
    if BIAS or ACTIVATION:
        done = total
        if BIAS:
            done += tl.load(bias + column + across, mask=across < n - column, other=0.0).to(tl.float32)
        done = activated(done, ACTIVATION)
        total = tl.where(sums != 0, done, total) if BROADCAST else done
    result = total.to(out.dtype.element_ty)
    place = down * n + across
    tl.store((out + into // 8 * 8) + place, result, mask=mask)
    if BROADCAST:
        tl.store((kept + at // 8 * 8) + place, result, mask=mask & (sums != 0))


@triton.jit
def _do(
    job, n, plane, out, kept, bias, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A whole job at once."""
    for top in range(0, job[4], HEIGHT):
        values = _ask(job, top, n, plane, out, HEIGHT, WIDTH, RANKS)
        _add(values, job, top, n, out, kept, bias, HEIGHT, WIDTH, RANKS, BROADCAST, BIAS, ACTIVATION)


@triton.jit
def _entry(table, beside, position, tiles, jobs):
    """The lines of both tables at a position, or nothing behind the ends: of the tile its owner, line, row in the shard
    and column; of the job its row in the shard and in `out`, column, rows, line and owner.

    Asked for one tile early: between tiles nobody waits for them.
    """
    there, left = position < tiles, position < jobs
    tile, job = table + position * ENTRY, beside + position * ENTRY
    return (
        tl.load(tile + 6, mask=there, other=0).to(tl.int32), tl.load(tile + 5, mask=there, other=0).to(tl.int32),
        tl.load(tile + 4, mask=there, other=0).to(tl.int32), tl.load(tile + 2, mask=there, other=0).to(tl.int32),
        tl.load(job, mask=left, other=0).to(tl.int32), tl.load(job + 4, mask=left, other=0).to(tl.int32),
        tl.load(job + 2, mask=left, other=0).to(tl.int32), tl.load(job + 1, mask=left, other=0).to(tl.int32),
        tl.load(job + 3, mask=left, other=0).to(tl.int32), tl.load(job + 5, mask=left, other=0).to(tl.int32),
    )  # fmt: skip


@triton.jit
def _job(
    entry, mine, bases, turn, half, plane, lines, n, rank, kind, BLOCK_M: tl.constexpr, RANKS: tl.constexpr,
    BROADCAST: tl.constexpr,
):  # fmt: skip
    """A job: the address it begins to read at; where it begins in a shard, in `out`; column, rows; whether it is a sum;
    the line of its ready word. All of them are computed: what is only handed on would keep loads from running ahead.
    """
    _, _, _, _, row, out_row, column, rows, line, owner = entry
    BYTES: tl.constexpr = kind.dtype.element_ty.primitive_bitwidth // 8
    column = column // 16 * 16
    at, into = row.to(tl.int64) * n + column, out_row.to(tl.int64) * n + column
    source, sums = mine.to(tl.int64), 1
    if BROADCAST:
        sums = (owner == rank).to(tl.int32)
        source = tl.where(owner == rank, source, tl.load(bases + owner) + (turn * half + RANKS * plane) * BYTES)
    return source + at * BYTES, at, into, column, tl.minimum(rows, BLOCK_M), sums, lines + line


@triton.jit
def _await(
    entry, rank, words, lines, epoch, abort, error, deadline_ns, RANKS: tl.constexpr, BROADCAST: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Wait for what a job reads. Whether the wait failed."""
    _, _, _, _, _, _, _, rows, line, owner = entry
    count, place = tl.where(rows > 0, RANKS, 0), line
    if BROADCAST:
        count = tl.where((rows > 0) & (owner != rank), 1, count)
        place += tl.where(owner == rank, 0, lines)
    return signal_wait_beside(words + place * LINE, epoch, count, abort, error, deadline_ns, TOGETHER)


@triton.jit
def _ready(job, word_bases, epoch, failed, RANKS: tl.constexpr):
    """Tell all of a sum that was made."""
    tell(word_bases, 0, tl.where((job[4] > 0) & (job[5] != 0), RANKS, 0), job[6] * LINE, epoch, failed)


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


_FREE = [
    *("bias", "table", "beside", "bases", "word_bases", "words", "epochs", "tiles", "jobs", "active"),
    *("inner", "pace", "padded", "half", "lines", "rank", "abort", "error", "deadline_ns", "a_row", "b_row"),
]


@triton.jit(do_not_specialize=_FREE)
def fused_scatter_kernel(
    a, b, slots, mine, out, kept, bias, table, beside, bases, word_bases, words, epochs,
    a_row: tl.int64, b_row: tl.int64, tiles: tl.int32, jobs: tl.int32, active: tl.int32, inner: tl.int32, n: tl.int32,
    pace: tl.int32, padded: tl.int32, half: tl.int64, lines: tl.int32, rank: tl.int32, abort, error,
    deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    RANKS: tl.constexpr, BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    HEIGHT: tl.constexpr, BESIDE: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """`a` [M, K] and `b` ([K, N] or, TRANSPOSED, [N, K]) are tensor descriptors, or, on GPUs without TMA, pointers,
    whose rows lie `a_row` and `b_row` apart.

    `mine`: this rank's own memory, where source s has `padded` rows of slots behind those of s - 1, for calls of even
    numbers, and `half` elements further for those of odd ones; `kept` (BROADCAST) likewise without sources, behind the
    slots. JOINED: `slots` describes all ranks' memory, [ranks, 2, rows, N]. `bases`, `word_bases`: addresses of all
    ranks' memory and words; `words` those here: a line for each of `lines` tiles, and as many for sums that are ready.
    `beside` has `jobs` entries; HEIGHT rows of a job go beside every `pace` steps of the main loop, or (not BESIDE:
    where K is short) jobs go between tiles. The first `active` CTAs work; every CTA of the grid, which
    never changes, counts calls in its word of `epochs`.
    """
    program, programs = tl.program_id(0), active
    n, half = n // 8 * 8, half // 8 * 8  # they are so already: it tells the compiler
    plane = padded.to(tl.int64) * n // 8 * 8
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = epoch & 1
    steps = tl.cdiv(inner, BLOCK_K)
    mine += turn * half
    kept += turn * half
    here = tl.where(program < programs, tiles, 0)
    stored = program - programs
    word, told, offset, failed = words, rank, 0, 0  # of the tile before; and of the job under way
    entry = _entry(table, beside, program, here, here)
    nothing = _entry(table, beside, 0, 0, 0)
    job = _job(nothing, mine, bases, turn, half, plane, lines, n, rank, out, BLOCK_M, RANKS, BROADCAST)
    AHEAD: tl.constexpr = has_bulk_copies() and BESIDE  # loads of a tile run into the epilogue of the one before
    for position in tl.range(program, here, tl.maximum(programs, 1), flatten=AHEAD):  # it divides by its step
        tile = table + position * ENTRY
        row, column = tl.load(tile).to(tl.int32), tl.load(tile + 2).to(tl.int32)
        if has_bulk_copies():
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            empty = tl.zeros((HEIGHT, BLOCK_N), out.dtype.element_ty)
            values = (empty,)
            for _ in tl.static_range(RANKS - 1):
                values = values + (empty,)
            due, top = 0, -HEIGHT  # the step in which the job goes on, and where
            for step in range(steps):
                x = a.load([row, step * BLOCK_K])
                if TRANSPOSED:
                    w = b.load([column, step * BLOCK_K]).T
                else:
                    w = b.load([step * BLOCK_K, column])
                total = tl.dot(x, w, total)
                if BESIDE:  # what was asked for `pace` steps ago is here; what is asked for now comes meanwhile
                    if (step == due) & (top < job[4]):
                        _add(values, job, top, n, out, kept, bias, HEIGHT, BLOCK_N, RANKS, BROADCAST, BIAS,
                             ACTIVATION)  # fmt: skip
                        due, top = due + pace, top + HEIGHT
                        values = _ask(job, top, n, plane, out, HEIGHT, BLOCK_N, RANKS)
        else:
            total = plain_multiply(a, b, a_row, b_row, b_row, row, tl.load(tile + 1).to(tl.int32), column, n, inner, 0,
                                   BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, False)  # fmt: skip
        stored += programs
        owner, number, shard_row, column = entry[0], entry[1], entry[2], entry[3]
        if JOINED:
            if stored != program:  # the tile before, whose stores have long arrived
                set_after_bulk_stores(word, epoch)
        else:
            tell(word_bases, told, tl.where(stored != program, 1, 0), offset, epoch, 0)
        if BROADCAST:
            _ready(job, word_bases, epoch, failed, RANKS)
        failed = _await(entry, rank, words, lines, epoch, abort, error, deadline_ns, RANKS, BROADCAST, JOINED)
        job = _job(entry, mine, bases, turn, half, plane, lines, n, rank, out, BLOCK_M, RANKS, BROADCAST)
        if not BESIDE:
            _do(job, n, plane, out, kept, bias, HEIGHT, BLOCK_N, RANKS, BROADCAST, BIAS, ACTIVATION)
        _store(slots, bases, out, total, turn, owner, rank * padded + shard_row, column, half, n, JOINED)
        told, offset = owner % RANKS, number * LINE + rank
        word = tl.load(word_bases + owner).to(tl.pointer_type(tl.int32)) + offset
        entry = _entry(table, beside, stored + programs, here, here)
    if program < here:
        if JOINED:
            set_after_bulk_stores(word, epoch)
        else:
            tell(word_bases, told, 1, offset, epoch, 0)
    TALL: tl.constexpr = HEIGHT * (4 if RANKS <= 4 else 2)  # nothing else needs registers now
    if BESIDE:
        _do(job, n, plane, out, kept, bias, TALL, BLOCK_N, RANKS, BROADCAST, BIAS, ACTIVATION)
    if BROADCAST:
        _ready(job, word_bases, epoch, failed, RANKS)
    for position in range(tiles + program, tl.where(program < programs, jobs, 0), tl.maximum(programs, 1)):
        entry = _entry(table, beside, position, 0, jobs)
        failed = _await(entry, rank, words, lines, epoch, abort, error, deadline_ns, RANKS, BROADCAST, JOINED)
        job = _job(entry, mine, bases, turn, half, plane, lines, n, rank, out, BLOCK_M, RANKS, BROADCAST)
        _do(job, n, plane, out, kept, bias, TALL, BLOCK_N, RANKS, BROADCAST, BIAS, ACTIVATION)
        if BROADCAST:
            _ready(job, word_bases, epoch, failed, RANKS)
    tl.store(epochs + program, epoch)
