"""A matmul of few rows and its all_reduce in one launch: out = sum over ranks of x @ w, for at most 64 rows.

Such a matmul reads its weights once and is done; what an all_reduce adds is latency. So each CTA multiplies a block of
columns (and, SPLIT > 1, a part of the inner size), sends its partial product to all ranks as packets (`packets.py`:
data and flag in one 64-bit word, no signal to wait for), and then takes the packets of all ranks for its own columns.

    for block of columns, part of K:     packets[turn, r * SPLIT + part, :, block] of every rank = x @ w
    for block of columns:                out[:, block] = sum over r, part of packets[turn, r * SPLIT + part, :, block]

Loads of weights run ahead over the ends of blocks, so that several blocks of a CTA are one stream of them.

Sums are taken in fp32 in the order of ranks, and of parts; the partial products are rounded to the type of x, as a
matmul followed by an all_reduce does. A packet holds two columns next to each other.

Packets are used in turn by two calls, and carry the number of the call. A rank that sends for call n + 2 has had
packets of call n + 1 from every rank, which were sent after that rank's whole call n. All accesses to packets are
relaxed, at system scope: a packet publishes nothing but itself. Unless AHEAD, a CTA that does not get what it waits for
poisons all of `out` when all others are done (`poison.leave`): nothing has to follow the launch.

AHEAD (sm_90 and later, launched to match): the call begins while the launch in front of it ends (`ahead.py`), and the
next one when every CTA has the packets of its first block (`early`: they come from CTAs of the same numbers on all
ranks), or when that is its only one.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: disable-error-code="assignment,misc,no-untyped-def"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from .ahead import ask_for_weights, begin_early, let_next_begin
from .combine import activated
from .gemm import plain_multiply
from .packets import send, settle
from .poison import leave_grid
from .signals import has_bulk_copies


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
def _take(
    out, bias, packets, begin, end, shape, epoch, watch, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    SOURCES: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Sums of words [begin, end) of this CTA's pieces, LANES * AT_ONCE of them at most, as soon as all have sent them.
    Returns the status of each lane: ARRIVED, or why what it stored is not right.

    A piece, a part of a block's rows, has `words`: of each of its rows one for each two columns of the block.
    """
    ELEMENT: tl.constexpr = out.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_N // 2
    program, active, rows, wide, plane, words = shape
    lanes = tl.arange(0, LANES)
    wanted = tl.zeros([LANES], tl.int32)
    pointers, places = (), ()
    for one in tl.static_range(AT_ONCE):
        word = begin + one * LANES + lanes
        piece = program + word // words * active
        row = word % words // WIDTH * SPLIT + piece % SPLIT
        across = piece // SPLIT * WIDTH + word % WIDTH
        here = (word < end) & (row < rows) & (across < wide)
        wanted |= tl.where(here, ((1 << SOURCES) - 1) << (one * SOURCES), 0).to(tl.int32)
        places = places + (row, across, here)
        for source in tl.static_range(SOURCES):
            pointers = pointers + (packets + source * plane + row * wide + across,)
    found = settle(pointers, wanted, tl.zeros_like(wanted) + epoch, watch)
    for one in tl.static_range(AT_ONCE):
        row, across, here = places[3 * one], places[3 * one + 1], places[3 * one + 2]
        low, high = _value(found[one * SOURCES], 0, ELEMENT), _value(found[one * SOURCES], 16, ELEMENT)
        for source in tl.static_range(1, SOURCES):
            low += _value(found[one * SOURCES + source], 0, ELEMENT)
            high += _value(found[one * SOURCES + source], 16, ELEMENT)
        if BIAS:
            low += tl.load(bias + 2 * across, mask=here, other=0.0).to(tl.float32)
            high += tl.load(bias + 2 * across + 1, mask=here, other=0.0).to(tl.float32)
        both = tl.join(activated(low, ACTIVATION), activated(high, ACTIVATION)).to(ELEMENT)
        columns = (row * (2 * wide) + 2 * across)[:, None] + tl.arange(0, 2)[None, :]
        tl.store(out + columns, both, mask=here[:, None])
    return found[AT_ONCE * SOURCES]


_FREE = [
    *("weights", "bias", "bases", "packets", "epochs", "active", "early", "rank", "rows", "half", "abort", "error"),
    *("deadline_ns", "a_row", "b_row"),
]


@triton.jit(do_not_specialize=_FREE)
def fused_decode_kernel(
    x, w, weights, out, bias, bases, packets, epochs, rows: tl.int32, n: tl.int32, inner: tl.int32, active: tl.int32,
    early: tl.int32, a_row: tl.int64, b_row: tl.int64, half: tl.int64, rank: tl.int32, abort, error,
    deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr, SPLIT: tl.constexpr,
    RANKS: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, AHEAD: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`x` [rows, K] and `w` ([K, N] or, TRANSPOSED, [N, K]) are tensor descriptors, or (GPUs without TMA) pointers,
    whose rows lie `a_row` and `b_row` apart; `weights` points to w in either case; `out` [rows, N] is contiguous.

    `bases`: addresses of all ranks' packets, `packets` those here: [2, ranks * SPLIT, rows, N / 2] 64-bit words of
    which the second turn begins at `half`. N is even. The first `active` CTAs work; every CTA of the grid, which never
    changes, counts calls in its word of `epochs`; behind those is `poison.leave_grid`'s. LANES (the CTA's threads) take
    AT_ONCE words each at once, whose packets are polled together: at most 32 of all sources. AHEAD: elements of K that
    are asked for early, 0: the call begins when the launch in front has ended. `early`: the next one may begin before
    this one waits for nobody, for which all ranks must have the same number of active CTAs.
    """
    ELEMENT: tl.constexpr = out.dtype.element_ty
    SOURCES: tl.constexpr = RANKS * SPLIT
    program = tl.program_id(0)
    blocks = tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT)
    last = tl.where(program < active, blocks, 0)
    if AHEAD > 0:
        for one in tl.static_range(2):  # of the first piece, and if it has no more, of the second
            piece, left = program + one * active, AHEAD - one * steps * BLOCK_K
            if (piece < last * SPLIT) & (left > 0):
                begin = piece % SPLIT * steps * BLOCK_K
                end = tl.minimum(inner, begin + tl.minimum(left, steps * BLOCK_K))
                ask_for_weights(weights, b_row, n, piece // SPLIT * BLOCK_N, begin, end, AHEAD, BLOCK_N, TRANSPOSED,
                                LANES)  # fmt: skip
        begin_early()
    epoch = tl.load(epochs + program, volatile=True) + 1
    turn = (epoch & 1).to(tl.int64) * half
    plane = (rows * (n // 2)).to(tl.int64)
    down = tl.arange(0, BLOCK_M)[:, None]
    stored = program - active
    FLAT: tl.constexpr = has_bulk_copies()  # loads of a block run into the epilogue of the one before
    for piece in tl.range(program, last * SPLIT, tl.maximum(active, 1), flatten=FLAT):  # it divides by its step
        if has_bulk_copies():
            column, first = piece // SPLIT * BLOCK_N, piece % SPLIT * steps
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for step in range(steps):
                factor = x.load([0, (first + step) * BLOCK_K])
                if TRANSPOSED:
                    weight = w.load([column, (first + step) * BLOCK_K]).T
                else:
                    weight = w.load([(first + step) * BLOCK_K, column])
                total = tl.dot(factor, weight, total)
        else:
            begin, first = piece % SPLIT * steps * BLOCK_K, rows * 0
            from_here = w + (begin if TRANSPOSED else begin * b_row // 8 * 8)
            total = plain_multiply(x + begin, from_here, a_row, b_row, b_row, first, rows,
                                   first + piece // SPLIT * BLOCK_N, n, tl.minimum(inner - begin, steps * BLOCK_K), 0,
                                   BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, False)  # fmt: skip
        stored += active  # the piece again: what the loads that run ahead need must not wait for this
        column, part = stored // SPLIT * BLOCK_N, stored % SPLIT
        words = _pairs(total, ELEMENT)
        across = column // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
        wanted = (down < rows) & (across < n // 2)
        place = turn + (rank * SPLIT + part) * plane + down * (n // 2) + across
        for step in tl.static_range(RANKS):
            to = (rank + step) % RANKS
            target = tl.load(bases + to).to(tl.pointer_type(tl.int64))
            send(target + place, words, tl.zeros_like(words) + epoch, wanted)
    # The same pieces, each now a part of its block's rows: the first one, then all others as one row of words.
    shape = (program, active, rows, n // 2, plane, tl.cdiv(rows, SPLIT) * (BLOCK_N // 2))
    watch, words = (abort, error, deadline_ns), shape[5]
    pieces = tl.where(program < last * SPLIT, tl.cdiv(last * SPLIT - program, tl.maximum(active, 1)), 0)
    failed = tl.zeros([LANES], tl.int32)
    for begin in range(0, tl.minimum(pieces, 1) * words, LANES * AT_ONCE):
        status = _take(out, bias, packets + turn, begin, words, shape, epoch, watch, BLOCK_N, SPLIT, SOURCES, LANES,
                       AT_ONCE, BIAS, ACTIVATION)  # fmt: skip
        failed = tl.maximum(failed, status)
    if AHEAD > 0:
        tl.debug_barrier()  # one thread speaks for the CTA: all have what they waited for
        if (early != 0) | (pieces <= 1):
            let_next_begin()
    for begin in range(words, pieces * words, LANES * AT_ONCE):
        status = _take(out, bias, packets + turn, begin, pieces * words, shape, epoch, watch, BLOCK_N, SPLIT, SOURCES,
                       LANES, AT_ONCE, BIAS, ACTIVATION)  # fmt: skip
        failed = tl.maximum(failed, status)
    tl.store(epochs + program, epoch)
    if AHEAD == 0:
        leave_grid(epochs, tl.max(failed, axis=0), out, rows * n, deadline_ns)
