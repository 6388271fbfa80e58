"""A matmul whose tiles go to their owners by themselves: out = rows of the sum over ranks of a @ b, in one launch.

Every rank computes all tiles of its own product, all ranks in the same order. A finished tile is stored into the memory
of the rank that owns its rows, where each rank has a slot of its own, and a word there says so. Most CTAs only
multiply, and wait for nobody. A few sum meanwhile: they would not be missed, as tiles come in whole waves, and find
what they read still in the L2 cache. When tiles are over, all CTAs but one sum what is left; that one leaves its SM to
whoever needs it while the others may wait.

    multiply:   for tile in table, in fixed turns:
                    total = a @ b
                    words[tile before, r] of its owner = epoch
                    slots[r] of the owner = total
    then:       for job in jobs, whoever is ready takes the next:
                    sum:   wait for words[tile, s] of all s; out = finish(sum over s of slots[s])
                    BROADCAST (all_reduce): keep the sum where others can read it, and tell all: ready[tile, part];
                    copy:  wait for ready[tile, part] of all parts of another's; out = what its owner summed

Sums are made in fp32 of products rounded once, in the order of ranks. A tile's word follows one tile later, when its
stores have arrived and nobody has to wait for them.

Both tables are the plan's (`plan/beside.py`), and so is who multiplies. `table`: row, rows, column, columns of the
product; row in the owner's shard; line, the tile's number among all; owner; row of `out`. `jobs`: row in the owner's
shard, rows, column, line, row of `out`, owner, and which part of the tile a sum is, or how many a copy has.

Nobody waits for ever: who multiplies does not wait, and jobs come in an order in which nobody waits for a later one
(`plan/beside.py`). Before a CTA waits it has told of all that it made.

Slots are used in turn by two calls. A rank that is in call n + 2 has seen the end of call n + 1, which needed tiles
that every other rank computed after its own call n: nobody still reads the slots of call n. (Every rank must own a
tile for that, or wait for one: BROADCAST.)

JOINED: all ranks' memory lies in one range of addresses (`fabric/joined.py`), and tiles are stored by TMA. Elsewhere by
ordinary stores: a descriptor for each owner means a branch for each, among which the compiler no longer lets one wgmma
run while the next is issued (half as slow again on an H200).

Memory ordering. The word of a tile is released behind a CTA barrier that follows the tile's ordinary stores, at system
scope (`turns.tell`), or, JOINED, when both warps that issued bulk stores have completed them, at the scope of the GPU
that all ranks share (`after_bulk_stores`). So is all that the rank's stream had stored before this launch, on which
backward passes rely (`ops/fused.py`). The owner acquires it at system scope, with a CTA barrier, before it loads
slots with ordinary loads. A ready word is released at system scope behind a CTA barrier after the stores of the sum,
and acquired before the copy. The count of jobs taken is relaxed: it carries nothing but the number; there are two, for
calls of even and of odd numbers, and each call clears the other one, which nobody uses before the next call on the
stream. Epochs are this rank's own: one for each CTA, read and advanced by it alone.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,misc,no-untyped-def"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from .combine import activated
from .gemm import ENTRY, after_bulk_stores, halves, multiply, plain_multiply
from .signals import has_bulk_copies, signal_wait_all
from .turns import LINE, tell

# At the scope of the GPU: ranks that share it are several programs, but their memory is in one L2 cache.
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
    """HEIGHT rows of a sum from its row `top` on: of all ranks' slots. Under way only."""
    source, _, _, column, rows = job
    across = tl.arange(0, WIDTH)[None, :]
    down = top + tl.arange(0, HEIGHT)[:, None]
    mask = (down < rows) & (across < n - column)
    first = tl.multiple_of(source.to(kind.dtype), 16)
    place = down * n + across
    values = ()
    for rank in tl.static_range(RANKS):
        values = values + (tl.load((first + rank * plane) + place, mask=mask, other=0.0),)
    return values


@triton.jit
def _add(
    values, job, top, n, out, kept, bias, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Those rows, summed in the order of ranks and finished, into `out` (BROADCAST: and `kept`)."""
    _, at, into, column, rows = job
    across = tl.arange(0, WIDTH)[None, :]
    down = top + tl.arange(0, HEIGHT)[:, None]
    mask = (down < rows) & (across < n - column)
    total = values[0].to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += values[rank].to(tl.float32)
    if BIAS:
        total += tl.load(bias + column + across, mask=across < n - column, other=0.0).to(tl.float32)
    result = activated(total, ACTIVATION).to(out.dtype.element_ty)
    place = down * n + across
    tl.store((out + into // 8 * 8) + place, result, mask=mask)
    if BROADCAST:
        tl.store((kept + at // 8 * 8) + place, result, mask=mask)


@triton.jit
def _copy(job, n, out, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """A tile that its owner summed, as it is: both halves are under way before one is stored."""
    source, _, into, column, rows = job
    HALF: tl.constexpr = HEIGHT // 2
    across = tl.arange(0, WIDTH)[None, :]
    first, target = tl.multiple_of(source.to(out.dtype), 16), out + into // 8 * 8
    found = ()
    for half in tl.static_range(2):
        down = half * HALF + tl.arange(0, HALF)[:, None]
        found = found + (tl.load(first + (down * n + across), mask=(down < rows) & (across < n - column)),)
    for half in tl.static_range(2):
        down = half * HALF + tl.arange(0, HALF)[:, None]
        tl.store(target + (down * n + across), found[half], mask=(down < rows) & (across < n - column))


@triton.jit
def _entry(jobs, unit, count):
    """The line of a job, or nothing behind the last: row in the shard and in `out`, column, rows, line, owner, part."""
    there, entry = unit < count, jobs + unit * ENTRY
    return (
        tl.load(entry, mask=there, other=0), tl.load(entry + 4, mask=there, other=0),
        tl.load(entry + 2, mask=there, other=0).to(tl.int32), tl.load(entry + 1, mask=there, other=0).to(tl.int32),
        tl.load(entry + 3, mask=there, other=0).to(tl.int32), tl.load(entry + 5, mask=there, other=0).to(tl.int32),
        tl.load(entry + 6, mask=there, other=0).to(tl.int32),
    )  # fmt: skip


@triton.jit
def _job(entry, memory, n, kind):
    """A job: the address in `memory` it begins to read at; where it begins in a shard, in `out`; column and rows."""
    row, out_row, column, rows, _, _, _ = entry
    BYTES: tl.constexpr = kind.dtype.element_ty.primitive_bitwidth // 8
    column = column // 16 * 16
    at, into = row * n + column, out_row * n + column
    return memory + at * BYTES, at, into, column, rows


@triton.jit
def _sum_up(
    jobs, count, counter, helps, mine, out, bias, words, plane, n, epoch, abort, error, deadline_ns,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Jobs until there are no more, all of them sums, each of two slices: one is asked for while the other is added.

    The number of the next job, and its line, are asked for while one is done, and its first slice before the second of
    this one is added. (Slices that changed places in a loop would have to be there to be moved.)
    """
    unit = count
    if helps:
        unit = tl.atomic_add(counter, 1, sem="relaxed")
    entry = _entry(jobs, unit, count)
    awaited = tl.where(unit < count, RANKS, 0)
    signal_wait_all(words + entry[4] * LINE, epoch, awaited, -1, abort, error, deadline_ns)
    memory = mine.to(tl.int64)
    job = _job(entry, memory, n, out)
    upper = _ask(job, 0, n, plane, out, HEIGHT, WIDTH, RANKS)
    while unit < count:
        second = tl.maximum(HEIGHT, unit - count)  # HEIGHT: Triton 3.6 fails on a loop that does not use its condition
        lower = _ask(job, second, n, plane, out, HEIGHT, WIDTH, RANKS)
        unit = tl.atomic_add(counter, 1, sem="relaxed")
        entry = _entry(jobs, unit, count)
        _add(upper, job, 0, n, out, out, bias, HEIGHT, WIDTH, RANKS, False, BIAS, ACTIVATION)
        awaited = tl.where(unit < count, RANKS, 0)
        signal_wait_all(words + entry[4] * LINE, epoch, awaited, -1, abort, error, deadline_ns)
        following = _job(entry, memory, n, out)
        upper = _ask(following, 0, n, plane, out, HEIGHT, WIDTH, RANKS)
        _add(lower, job, second, n, out, out, bias, HEIGHT, WIDTH, RANKS, False, BIAS, ACTIVATION)
        job = following


@triton.jit
def _sum_up_for_all(
    jobs, count, counter, helps, mine, out, kept, bias, bases, word_bases, words, others, plane, lines, n, rank, epoch,
    abort, error, deadline_ns, HEIGHT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """BROADCAST: parts of own tiles to sum, others' tiles to copy. A job is over, and told of, before the next one is
    waited for. `others`: bytes from the beginning of a rank's memory to what it has summed.
    """
    unit = count
    if helps:
        unit = tl.atomic_add(counter, 1, sem="relaxed")
    entry = _entry(jobs, unit, count)
    while unit < count:
        unit = tl.maximum(tl.atomic_add(counter, 1, sem="relaxed"), unit)  # it is larger: a loop must use its condition
        following = _entry(jobs, unit, count)
        line, owner, part = entry[4], entry[5], entry[6]
        if owner == rank:
            failed = signal_wait_all(words + line * LINE, epoch, RANKS, -1, abort, error, deadline_ns)
            job = _job(entry, mine.to(tl.int64), n, out)
            upper = _ask(job, 0, n, plane, out, HEIGHT, WIDTH, RANKS)
            lower = _ask(job, HEIGHT, n, plane, out, HEIGHT, WIDTH, RANKS)
            _add(upper, job, 0, n, out, kept, bias, HEIGHT, WIDTH, RANKS, True, BIAS, ACTIVATION)
            _add(lower, job, HEIGHT, n, out, kept, bias, HEIGHT, WIDTH, RANKS, True, BIAS, ACTIVATION)
            tell(word_bases, 0, RANKS, (lines + line) * LINE + part, epoch, failed)
        else:  # `part` counts the parts of the tile
            signal_wait_all(words + (lines + line) * LINE, epoch, part, -1, abort, error, deadline_ns)
            _copy(_job(entry, tl.load(bases + owner) + others, n, out), n, out, TILE, WIDTH)
        entry = following


_FREE = [
    *("bias", "table", "jobs", "bases", "word_bases", "words", "epochs", "taken", "tiles", "count", "active"),
    *("multiplying", "inner", "padded", "half", "lines", "rank", "abort", "error", "deadline_ns", "a_row", "b_row"),
]


@triton.jit(do_not_specialize=_FREE)
def fused_scatter_kernel(
    a, b, slots, mine, out, kept, bias, table, jobs, bases, word_bases, words, epochs, taken,
    a_row: tl.int64, b_row: tl.int64, tiles: tl.int32, count: tl.int32, active: tl.int32, multiplying: tl.int32,
    inner: tl.int32, n: tl.int32, padded: tl.int32, half: tl.int64, lines: tl.int32, rank: tl.int32, abort, error,
    deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    RANKS: tl.constexpr, BROADCAST: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    HEIGHT: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """`a` [M, K] and `b` ([K, N] or, TRANSPOSED, [N, K]) are tensor descriptors, or, on GPUs without TMA, pointers,
    whose rows lie `a_row` and `b_row` apart.

    `mine`: this rank's own memory, where source s has `padded` rows of slots behind those of s - 1, for calls of even
    numbers, and `half` elements further for those of odd ones; `kept` (BROADCAST) likewise without sources, behind the
    slots. JOINED: `slots` describes all ranks' memory, [ranks, 2, rows, N]. `bases`, `word_bases`: addresses of all
    ranks' memory and words; `words` those here: a line for each of `lines` tiles, and as many for sums that are ready.
    The first `active` CTAs work, the first `multiplying` of them multiply before they take some of the `count` jobs, of
    two slices of HEIGHT rows each; every CTA of the grid, which never changes, counts calls in its word of `epochs`.
    """
    program, programs = tl.program_id(0), multiplying
    n, half = n // 8 * 8, half // 8 * 8  # they are so already: it tells the compiler
    plane = padded.to(tl.int64) * n // 8 * 8
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = epoch & 1
    if (program == 0) & (active > 0):
        tl.store(taken + (1 - turn) * LINE, 0)
    steps = tl.cdiv(inner, BLOCK_K)
    stored = program - programs
    here = tl.where(program < programs, tiles, 0)
    owner, offset = rank, 0  # of the tile before
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
        if JOINED:
            if stored != program:  # the tile before, whose stores have long arrived
                set_after_bulk_stores(tl.load(word_bases + owner).to(tl.pointer_type(tl.int32)) + offset, epoch)
        else:
            tell(word_bases, owner, tl.where(stored != program, 1, 0), offset, epoch, 0)
        entry = table + stored * ENTRY
        owner = tl.load(entry + 6).to(tl.int32)
        offset = tl.load(entry + 5).to(tl.int32) * LINE + rank
        _store(slots, bases, out, total, turn, owner, rank * padded + tl.load(entry + 4).to(tl.int32),
               tl.load(entry + 2).to(tl.int32), half, n, JOINED)  # fmt: skip
    if program < here:
        if JOINED:
            set_after_bulk_stores(tl.load(word_bases + owner).to(tl.pointer_type(tl.int32)) + offset, epoch)
        else:
            tell(word_bases, owner, 1, offset, epoch, 0)
    helps, counter = (program < active) & ((program > 0) | (active == 1)), taken + turn * LINE
    if BROADCAST:
        BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
        _sum_up_for_all(jobs, count, counter, helps, mine + turn * half, out, kept + turn * half, bias, bases,
                        word_bases, words, (turn * half + RANKS * plane) * BYTES, plane, lines, n, rank, epoch, abort,
                        error, deadline_ns, HEIGHT, BLOCK_M, BLOCK_N, RANKS, BIAS, ACTIVATION)  # fmt: skip
    else:
        _sum_up(jobs, count, counter, helps, mine + turn * half, out, bias, words, plane, n, epoch, abort, error,
                deadline_ns, HEIGHT, BLOCK_N, RANKS, BIAS, ACTIVATION)  # fmt: skip
    tl.store(epochs + program, epoch)
