"""A matmul of few rows and its all_reduce in one launch: out = sum over ranks of x @ w, for at most 64 rows.

Such a matmul reads its weights once and is done; what an all_reduce adds is latency. So whoever has multiplied a piece,
a block of columns (and, SPLIT > 1, a part of the inner size), sends it to all ranks as packets (`packets.py`: data and
flag in one 64-bit word, no signal to wait for), and others take the packets of all ranks.

    CTAs that multiply, piece by piece:   packets[turn, r * SPLIT + part, :, block] of every rank r's peers = x @ w
    CTAs that sum, word by word:          out[word] = sum over r, part of packets[turn, r * SPLIT + part, word]

CTAs are small, many to an SM, and have one piece each. SMs of a GPU differ by a third in how fast they get weights: who
is done makes room for the next piece, and nobody has shared them out. Those that sum come last in the grid.

Only they wait, and there are no more of them than this rank has SMs, each of which has room for two CTAs at least. So
those that multiply find room whatever waits, also where ranks share a GPU, and not all of a grid need run at once.

Sums are taken in fp32 in the order of ranks, and of parts; the partial products are rounded to the type of x, as a
matmul followed by an all_reduce does. A packet holds two columns next to each other. How a rank cuts its columns is its
own affair: packets lie the same way.

Packets are used in turn by two calls, and carry the number of the call. A rank that sends for call n + 2 has had
packets of call n + 1 from every rank, which were sent after that rank's whole call n. All accesses to packets are
relaxed, at system scope: a packet publishes nothing but itself.

Every CTA reads the number of the call, which this rank keeps in LINE words, one for a lane: a CTA that multiplies asks
for it first and looks at it last, which a compiler that knows all lanes to get the same would not let it. Each CTA adds
one to a count, relaxed, behind a barrier, which no thread passes before it has the number that it read; who finds that
it was the last one stores the next number and clears what the next call counts. A CTA that sums and does not get what
it waits for poisons all of `out` when the others that sum are over with it: they count themselves out, which releases
what they stored.

EARLY (sm_90 and later, launched to match): the call is launched while the one in front of it on the stream ends, and
waits for that before it does anything; and it lets the next one in when no CTA of it waits for anybody any more.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,misc,no-untyped-def"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from .ahead import begin_early, let_next_begin
from .combine import activated
from .gemm import plain_multiply
from .packets import send, settle
from .poison import fill_when_out
from .turns import LINE

_POISONED_AT_ONCE = tl.constexpr(1024)


@triton.jit
def _pairs(tile, ELEMENT: tl.constexpr):
    """Two columns next to each other as one 32-bit word."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    low, high = tl.split(tl.reshape(tile.to(ELEMENT), (ROWS, COLUMNS // 2, 2)))
    bits_low = low.to(tl.uint16, bitcast=True).to(tl.int32)
    bits_high = high.to(tl.uint16, bitcast=True).to(tl.int32)
    return bits_low | (bits_high << 16)


@triton.jit
def _value(word, SHIFT: tl.constexpr, ELEMENT: tl.constexpr):
    return (word >> SHIFT).to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)


@triton.jit
def _one_row(x, w, w_row, column, n, inner, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[1, BLOCK_N] = x [inner] @ w [n, inner]^T, without tensor cores: each warp reads some columns, 512 contiguous
    bytes at a time. Strides, the inner size and what lies in memory are multiples of 8 elements."""
    w_row, inner = w_row // 8 * 8, inner // 8 * 8  # they are so: it tells the compiler
    across, along = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    first_w = tl.multiple_of(w, 16) + column.to(tl.int64) * w_row
    from_w = first_w + (across[:, None] * w_row.to(tl.int32) + along[None, :])
    from_x = tl.multiple_of(x, 16) + along
    inside = (across < n - column)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    for first in range(0, inner, BLOCK_K):
        here = along < inner - first
        weight = tl.load(from_w, mask=inside & here[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        product = weight * tl.load(from_x, mask=here, other=0.0).to(tl.float32)[None, :]
        total += tl.sum(tl.reshape(product, (BLOCK_N, BLOCK_K // 8, 8)), axis=2)  # each thread of what it read
        from_w += BLOCK_K
        from_x += BLOCK_K
    return tl.sum(total, axis=1)[None, :]


@triton.jit
def _send(
    x, w, x_row, w_row, to, piece, rows, n, inner, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr, SPLIT: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Multiply a piece, some columns over its part of the inner size, and send it to all ranks."""
    bases, half, plane, rank, before = to
    column, part = piece // SPLIT * BLOCK_N, piece % SPLIT
    each = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT) * BLOCK_K
    begin = part * each
    left = tl.minimum(inner - begin, each)
    from_w = w + (begin if TRANSPOSED else begin * w_row // 8 * 8)
    if ROWS == 1:
        tl.static_assert(TRANSPOSED, "one row reads rows of w^T")
        total = _one_row(x + begin, from_w, w_row, column, n, left, BLOCK_N, BLOCK_K)
    else:
        total = plain_multiply(x + begin, from_w, x_row, w_row, w_row, rows * 0, rows, column, n, left, 0, ROWS,
                               BLOCK_N, BLOCK_K, TRANSPOSED, False)  # fmt: skip
    words = _pairs(total, x.dtype.element_ty)
    down, across = tl.arange(0, ROWS)[:, None], column // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
    wanted = (down < rows) & (across < n // 2)
    epoch = before + 1  # looked at only now: it was on its way while this multiplied
    place = (epoch & 1).to(tl.int64) * half + (rank * SPLIT + part) * plane + down * (n // 2) + across
    targets = ()
    for step in tl.static_range(RANKS):  # all of them before the first is used
        targets = targets + (tl.load(bases + (rank + step) % RANKS).to(tl.pointer_type(tl.int64)),)
    for step in tl.static_range(RANKS):
        send(targets[step] + place, words, tl.zeros_like(words) + epoch, wanted)


@triton.jit
def _sum(
    out, bias, packets, begin, words, n, plane, epoch, watch, SOURCES: tl.constexpr, LANES: tl.constexpr,
    AT_ONCE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """LANES * AT_ONCE words of `out` from `begin` on, as soon as all have sent them. Returns the status of each lane:
    ARRIVED, or why what it stored is not right."""
    ELEMENT: tl.constexpr = out.dtype.element_ty
    lanes = tl.arange(0, LANES)
    wanted = tl.zeros([LANES], tl.int32)
    pointers = ()
    for one in tl.static_range(AT_ONCE):
        word = begin + one * LANES + lanes
        wanted |= tl.where(word < words, ((1 << SOURCES) - 1) << (one * SOURCES), 0).to(tl.int32)
        for source in tl.static_range(SOURCES):
            pointers = pointers + (packets + source * plane + word,)
    found = settle(pointers, wanted, tl.zeros_like(wanted) + epoch, watch)
    for one in tl.static_range(AT_ONCE):
        word = begin + one * LANES + lanes
        here = word < words
        low, high = _value(found[one * SOURCES], 0, ELEMENT), _value(found[one * SOURCES], 16, ELEMENT)
        for source in tl.static_range(1, SOURCES):
            low += _value(found[one * SOURCES + source], 0, ELEMENT)
            high += _value(found[one * SOURCES + source], 16, ELEMENT)
        if BIAS:
            column = 2 * word % n
            low += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
            high += tl.load(bias + column + 1, mask=here, other=0.0).to(tl.float32)
        both = tl.join(activated(low, ACTIVATION), activated(high, ACTIVATION)).to(ELEMENT)
        tl.store(out + (2 * word)[:, None] + tl.arange(0, 2)[None, :], both, mask=here[:, None])
    return found[AT_ONCE * SOURCES]


@triton.jit
def _count_read(epochs, taken, epoch):
    """This CTA has read the number of the call; the last one sets the next."""
    tl.debug_barrier()  # one thread counts, and all have read
    turn = epoch & 1
    if tl.atomic_add(taken + turn * LINE, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(epochs + tl.arange(0, LINE), epoch)
        tl.store(taken + (1 - turn) * LINE, 0)
        tl.store(taken + (1 - turn) * LINE + 1, 0)


@triton.jit
def _leave(left, failed, summing, out, count, deadline_ns):
    """Count a CTA out that summed; one that failed poisons all of `out` once all are out, or `deadline_ns` later.

    Counting releases, on this GPU, what the CTA has stored.
    """
    SIZE: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    tl.atomic_add(left, 1, sem="release", scope="gpu")
    if failed != 0:
        fill_when_out(left, summing, out.to(tl.int64), count.to(tl.int64) * SIZE, deadline_ns, _POISONED_AT_ONCE)


_FREE = [
    *("bias", "bases", "packets", "epochs", "taken", "multiplying", "summing", "rank", "rows", "half"),
    *("x_row", "w_row", "abort", "error", "deadline_ns"),
]


@triton.jit(do_not_specialize=_FREE)
def fused_decode_kernel(
    x, w, out, bias, bases, packets, epochs, taken, rows: tl.int32, n: tl.int32, inner: tl.int32, multiplying: tl.int32,
    summing: tl.int32, x_row: tl.int64, w_row: tl.int64, half: tl.int64, rank: tl.int32, abort, error,
    deadline_ns: tl.int64,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, SPLIT: tl.constexpr,
    TURNS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`x` [rows, K] and `w` ([K, N] or, TRANSPOSED, [N, K]), whose rows lie `x_row` and `w_row` apart; `out` [rows, N]
    is contiguous, N even. ROWS: `rows` or more, 1 (TRANSPOSED only), 16, 32 or 64.

    `bases`: addresses of all ranks' packets, `packets` those here: [2, ranks * SPLIT, rows, N / 2] 64-bit words of
    which the second turn begins at `half`. `epochs` is the number of the last call, LINE times, and `taken` has for
    either turn, LINE words apart, how many CTAs have read it, and how many that sum have left. The first `multiplying`
    CTAs have a piece each, or (TURNS) as many as there are, in turns; the `summing` others have words. None of either:
    nothing happens. LANES: the CTA's threads, which take AT_ONCE words each at once, whose packets are polled together:
    at most 32 of all sources.
    """
    SOURCES: tl.constexpr = RANKS * SPLIT
    program = tl.program_id(0)
    if EARLY:
        begin_early()
    plane = (rows * (n // 2)).to(tl.int64)
    if program < multiplying:
        before = tl.load(epochs + tl.arange(0, BLOCK_N // 2)[None, :], volatile=True)  # nobody waits for it here
        to = (bases, half, plane, rank, before)
        if TURNS:
            for other in range(0, tl.cdiv(n, BLOCK_N) * SPLIT - program, multiplying):
                piece = program + other
                _send(x, w, x_row, w_row, to, piece, rows, n, inner, ROWS, BLOCK_N, BLOCK_K, TRANSPOSED, SPLIT, RANKS)
        else:
            _send(x, w, x_row, w_row, to, program, rows, n, inner, ROWS, BLOCK_N, BLOCK_K, TRANSPOSED, SPLIT, RANKS)
        _count_read(epochs, taken, tl.max(tl.max(before, axis=1), axis=0) + 1)
    elif summing > 0:
        epoch = tl.load(epochs, volatile=True) + 1
        _count_read(epochs, taken, epoch)
        packets += (epoch & 1).to(tl.int64) * half
        words, every = rows * (n // 2), summing * LANES * AT_ONCE
        failed = tl.zeros([LANES], tl.int32)
        for begin in range((program - multiplying) * LANES * AT_ONCE, words, every):
            status = _sum(out, bias, packets, begin, words, n, plane, epoch, (abort, error, deadline_ns), SOURCES,
                          LANES, AT_ONCE, BIAS, ACTIVATION)  # fmt: skip
            failed = tl.maximum(failed, status)
        if EARLY:
            tl.debug_barrier()  # one thread speaks for the CTA: all have what they waited for
            let_next_begin()
        _leave(taken + (epoch & 1) * LINE + 1, tl.max(failed, axis=0), summing, out, rows * n, deadline_ns)
