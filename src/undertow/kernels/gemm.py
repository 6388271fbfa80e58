"""A persistent matmul whose finished tiles are counted: out = a @ b, tile by tile in the order of a table.

CTAs take the tiles of the table in its order. The main loop knows nothing of communication; the epilogue stores a tile
where the table says and adds one to the counter of its parcel. The table is the plan's:

    row, rows, column, columns   the tile in the product
    place, stride                where its first element goes, in elements of `out`, and how far its rows lie apart
    parcel                       whose counter it adds to, or (WAITS) whose rows of `a` it waits for
    expert                       GROUPED: which of several weights, b[expert], and of biases

Memory ordering. A counter's add releases what the whole CTA stored for the tile (`_count`). Whoever waits for the
parcel's count acquires all its tiles: a stream's memory operation, or a kernel's wait. Where tiles wait for rows, the
wait acquires what the rows' writer released before it set the word, and a proxy fence orders it before TMA loads.
"""

import triton
import triton.language as tl

from .combine import activated
from .signals import ARRIVED, proxy_fence, report_error, signal_wait

ENTRY = tl.constexpr(8)  # 64-bit words of a table's row
WORD = tl.constexpr(32)  # 32-bit words between two counters
STORING_THREADS = 64  # those of the warps whose leaders issue the bulk stores of half a tile

# `signal_add` as one piece of text: a barrier or an atomic of Triton's own would keep it from running loads ahead
# across tiles. The barrier is the unaligned kind, as the compiler does not know that it is one.
_ADD = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    barrier.sync 0;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first red.release.gpu.global.add.s32 [$1], 1;
    mov.b32 $0, 0;
}""")


def after_bulk_stores(release: str) -> str:
    """The text of a release that covers the bulk stores of the CTA's last tile.

    Bulk stores complete for the thread that issued them: the leader that `elect.sync` always finds in the first warp
    and, where half a tile is wider than the 128 bytes that one store swizzles, in the second. Both leaders complete
    theirs, the two warps meet in a barrier of their own, and the first leader releases for both.
    """
    return f"""{{
    .reg .pred other, leader;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.ge.u32 other, thread, {STORING_THREADS};
    @other bra END;
    elect.sync _|leader, 0xffffffff;
    @!leader bra MEET;
    cp.async.bulk.wait_group 0;
    fence.proxy.async;
MEET:
    barrier.sync 15, {STORING_THREADS};
    setp.ge.u32 other, thread, 32;
    @other bra END;
    @!leader bra END;
    {release}
END:
    mov.b32 $0, 0;
}}"""


_ADD_BULK = tl.constexpr(after_bulk_stores("red.release.gpu.global.add.s32 [$1], 1;"))


@triton.jit
def _count(counter, BULK: tl.constexpr):
    """Add one to the parcel's counter. Releases, at the scope of this GPU, what the whole CTA stored for the tile.

    Those who acquire it are this GPU's own: the stream that waits for the parcel, or a kernel. What it covers lies in
    this GPU's memory, and whoever carries it further (a copy engine, a kernel) comes after the wait.
    """
    if BULK:
        tl.inline_asm_elementwise(_ADD_BULK, "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.inline_asm_elementwise(_ADD, "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def halves(tile):
    """The left and the right half of a tile's columns."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _store_part(
    out, c, bias, tile, entry, FIRST: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Columns [FIRST, FIRST + width) of a tile, finished."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    columns = tl.load(entry + 3).to(tl.int32)
    place, stride = tl.load(entry + 4), tl.load(entry + 5)
    if EVEN:  # stores of 16 bytes
        place, stride, columns = tl.multiple_of(place, 8), tl.multiple_of(stride, 8), tl.multiple_of(columns, 8)
    across = FIRST + tl.arange(0, COLUMNS)
    if BIAS:
        tile += tl.load(bias + tl.load(entry + 2) + across, mask=across < columns, other=0.0).to(tl.float32)[None, :]
    tile = activated(tile, ACTIVATION).to(out.dtype.element_ty)
    if BULK:
        c.store([(place // stride).to(tl.int32), (place % stride).to(tl.int32) + FIRST], tile)
    else:
        down = tl.arange(0, ROWS)[:, None]
        mask = (down < tl.load(entry + 1).to(tl.int32)) & (across < columns)[None, :]
        tl.store(out + place + (down * stride.to(tl.int32) + across[None, :]), tile, mask=mask)


@triton.jit
def store_tile(
    out, c, bias, tile, entry, PARTS: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A tile in PARTS parts: the addresses (or the staging memory) of a whole one would not fit."""
    WIDTH: tl.constexpr = tile.shape[1] // PARTS
    if PARTS == 1:
        _store_part(out, c, bias, tile, entry, 0, BULK, EVEN, BIAS, ACTIVATION)
    else:
        left, right = halves(tile)
        if PARTS == 2:
            _store_part(out, c, bias, left, entry, 0, BULK, EVEN, BIAS, ACTIVATION)
            _store_part(out, c, bias, right, entry, WIDTH, BULK, EVEN, BIAS, ACTIVATION)
        else:
            first, second = halves(left)
            _store_part(out, c, bias, first, entry, 0, BULK, EVEN, BIAS, ACTIVATION)
            _store_part(out, c, bias, second, entry, WIDTH, BULK, EVEN, BIAS, ACTIVATION)
            third, fourth = halves(right)
            _store_part(out, c, bias, third, entry, 2 * WIDTH, BULK, EVEN, BIAS, ACTIVATION)
            _store_part(out, c, bias, fourth, entry, 3 * WIDTH, BULK, EVEN, BIAS, ACTIVATION)


@triton.jit
def multiply(
    a, b, row, column, steps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr, expert=0, GROUPED: tl.constexpr = False, owner=0, OWNED: tl.constexpr = False, begin=0,
):  # fmt: skip
    """The main loop: one tile of a @ b, or (GROUPED) of a @ b[expert], or (OWNED) of a[owner] @ b; of the steps along K
    from `begin` to before `steps`.

    Grouped weights, and rows that several ranks have, are a descriptor of three dimensions, so that what lies behind
    the last row of one expert reads as zeros and never as the next expert's.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(begin, steps):
        if OWNED:
            x = tl.reshape(a.load([owner, row, step * BLOCK_K]), (BLOCK_M, BLOCK_K))
        else:
            x = a.load([row, step * BLOCK_K])
        if GROUPED:
            if TRANSPOSED:
                w = tl.reshape(b.load([expert, column, step * BLOCK_K]), (BLOCK_N, BLOCK_K)).T
            else:
                w = tl.reshape(b.load([expert, step * BLOCK_K, column]), (BLOCK_K, BLOCK_N))
        elif TRANSPOSED:
            w = b.load([column, step * BLOCK_K]).T
        else:
            w = b.load([step * BLOCK_K, column])
        total = tl.dot(x, w, total)
    return total


@triton.jit
def plain_multiply(
    a, b, a_row, b_row, b_expert, row, rows, column, n, inner, expert, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """The same main loop for GPUs without TMA, by pointers: `b` [K, N] (TRANSPOSED: [N, K]), one for each expert where
    GROUPED. Strides and the inner size are multiples of 8 elements and the memory is aligned, so that rows come 16
    bytes at a time; so is `n`, or what a row holds beyond it may be read.
    """
    a_row, b_row, b_expert = a_row // 8 * 8, b_row // 8 * 8, b_expert // 8 * 8  # they are so: it tells the compiler
    inner = inner // 8 * 8
    down, across, along = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    first_a, first_b = tl.multiple_of(a, 16) + row.to(tl.int64) * a_row, tl.multiple_of(b, 16)
    a_pointers = first_a + (down[:, None] * a_row.to(tl.int32) + along[None, :])
    if GROUPED:
        first_b += expert.to(tl.int64) * b_expert
    left = tl.cdiv(n - column, 8) * 8
    if TRANSPOSED:
        b_pointers = first_b + column.to(tl.int64) * b_row + (across[:, None] * b_row.to(tl.int32) + along[None, :])
        b_mask = (across < n - column)[:, None]
    else:
        b_pointers = first_b + column // 16 * 16 + (along[:, None] * b_row.to(tl.int32) + across[None, :])
        b_mask = (across < left)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, inner, BLOCK_K):
        here = along < inner - first
        x = tl.load(a_pointers, mask=(down < rows)[:, None] & here[None, :], other=0.0)
        if TRANSPOSED:
            w = tl.load(b_pointers, mask=b_mask & here[None, :], other=0.0).T
            b_pointers += BLOCK_K
        else:
            w = tl.load(b_pointers, mask=b_mask & here[:, None], other=0.0)
            b_pointers += BLOCK_K * b_row
        total = tl.dot(x, w, total)
        a_pointers += BLOCK_K
    return total


_BULK_ARGUMENTS = ["bias", "table", "counters", "tiles", "inner", "next_tile", "abort", "error", "deadline_ns"]


@triton.jit(do_not_specialize=_BULK_ARGUMENTS)
def gemm_kernel(
    a, b, c, out, bias, table, counters, tiles: tl.int32, inner: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    PARTS: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, SIGNAL: tl.constexpr, DEFER: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GROUPED: tl.constexpr = False, BIAS_ROW: tl.constexpr = 0,
):  # fmt: skip
    """`a` [M, K] and `b` ([K, N], or [N, K] if TRANSPOSED) are tensor descriptors; `c` one of `out` where BULK.

    GROUPED: `b` is one for each expert, [E, ...], and biases of experts lie BIAS_ROW elements apart.

    The CTAs take tiles in fixed turns, and the loads of a tile run ahead into the epilogue of the one before. EVEN:
    places, strides and columns of all tiles are multiples of 8 elements. DEFER: a tile is counted in the epilogue of
    the CTA's next one, when its stores have long arrived.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    steps = tl.cdiv(inner, BLOCK_K)
    stored = program - programs
    finished = counters
    for position in tl.range(program, tiles, programs, flatten=True):
        entry = table + position * ENTRY
        row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        if GROUPED:
            expert = tl.load(entry + 7).to(tl.int32)
            total = multiply(a, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, expert, True)
        else:
            total = multiply(a, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
        stored += programs
        entry = table + stored * ENTRY
        if SIGNAL and DEFER:
            if stored != program:
                _count(finished, BULK)
        own_bias = bias
        if GROUPED and BIAS:
            own_bias += tl.load(entry + 7) * BIAS_ROW
        store_tile(out, c, own_bias, total, entry, PARTS, BULK, EVEN, BIAS, ACTIVATION)
        finished = counters + tl.load(entry + 6).to(tl.int32) * WORD
        if SIGNAL and not DEFER:
            _count(finished, BULK)
    if SIGNAL and DEFER:
        if stored >= 0:
            _count(finished, BULK)


@triton.jit(do_not_specialize=_BULK_ARGUMENTS)
def waiting_gemm_kernel(
    a, b, c, out, bias, table, counters, tiles: tl.int32, inner: tl.int32, next_tile, abort, error,
    deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    PARTS: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The same for tiles that wait for rows of `a`, whose loads must not run ahead of the wait; nothing is counted.

    A CTA that is ready takes the next tile that nobody has: `next_tile` counts those taken, from 0. The fetch is
    relaxed: it carries nothing but the number.
    """
    steps = tl.cdiv(inner, BLOCK_K)
    status = 0
    position = tl.atomic_add(next_tile, 1, sem="relaxed")
    while position < tiles:
        following = tl.atomic_add(next_tile, 1, sem="relaxed")
        entry = table + position * ENTRY
        row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        counter = counters + tl.load(entry + 6).to(tl.int32) * WORD
        if status == ARRIVED:
            status = signal_wait(counter, 1, abort, deadline_ns)
            proxy_fence()
        total = multiply(a, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED)
        store_tile(out, c, bias, total, entry, PARTS, BULK, EVEN, BIAS, ACTIVATION)
        position = following
    if status != ARRIVED:
        report_error(error, status)


_PLAIN = [
    *("a", "b", "out", "bias", "table", "counters", "tiles", "inner", "a_row", "a_column", "b_row", "b_column"),
    *("abort", "error", "deadline_ns"),
]


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)
def plain_gemm_kernel(
    a, b, out, bias, table, counters, tiles: tl.int32, inner: tl.int32, a_row: tl.int64, a_column: tl.int64,
    b_row: tl.int64, b_column: tl.int64, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    SIGNAL: tl.constexpr, WAITS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    GROUPED: tl.constexpr = False, BIAS_ROW: tl.constexpr = 0, b_expert=0,
):  # fmt: skip
    """The same for any strides and alignment, any dtype that tensor cores or FMAs take, and GPUs without TMA."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    status = 0
    for position in range(program, tiles, programs):
        entry = table + position * ENTRY
        row, rows = tl.load(entry), tl.load(entry + 1).to(tl.int32)
        column, columns = tl.load(entry + 2), tl.load(entry + 3).to(tl.int32)
        counter = counters + tl.load(entry + 6).to(tl.int32) * WORD
        if WAITS:
            if status == ARRIVED:
                status = signal_wait(counter, 1, abort, deadline_ns)
        down, across, along = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        a_pointers = a + ((row + down)[:, None] * a_row + along[None, :] * a_column)
        b_pointers = b + (along[:, None] * b_row + (column + across)[None, :] * b_column)
        own_bias = bias
        if GROUPED:
            expert = tl.load(entry + 7)
            b_pointers += expert * b_expert
            own_bias += expert * BIAS_ROW
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, inner, BLOCK_K):
            here = along < inner - first
            x = tl.load(a_pointers, mask=(down < rows)[:, None] & here[None, :], other=0.0)
            w = tl.load(b_pointers, mask=here[:, None] & (across < columns)[None, :], other=0.0)
            total = tl.dot(x, w, total, input_precision="ieee")
            a_pointers += BLOCK_K * a_column
            b_pointers += BLOCK_K * b_row
        store_tile(out, out, own_bias, total, entry, PARTS, False, EVEN, BIAS, ACTIVATION)
        if SIGNAL:
            _count(counter, False)
    if status != ARRIVED:
        report_error(error, status)
