"""Matmuls that post what has no peer pointer to the proxy's ring: whole parcels of rows, by who finishes them last.

What travels, and where it stands, is the plan's (`plan/posts.py`). A call is some of these launches, one behind the
other on its stream, whose order says what they read of each other:

    sums      multiply and post; sum what landed; all_reduce: (the sums are posted, too) copy the sums of others
    rows      copy own rows and post them; multiply rows when they have landed
    tokens    multiply and post; copy what landed          or: copy own rows and post them; multiply when they landed
    all       count: the calls, and what was waited for

    `multiply_and_post_kernel`   tile by tile into this rank's memory; the last CTA of a parcel posts it
    `sum_kernel`                 out = finish(the parts of all ranks, in their order), parcel by parcel
    `bring_kernel`               rows that landed into the result; or own rows into this rank's memory, to be posted
    `multiply_landed_kernel`     tile by tile of rows that land, each waiting for its parcel
    `count_kernel`               ends the call

Tables, of 64-bit words, places in elements from the beginning of a half of the memory:

    table     ENTRY words a tile, as in `gemm.py`; word 6 is a tile's parcel (multiply_landed: its signal, or NOBODY)
    parcels   tiles (or rows), place of the rows here, first row of them in x or in the result, first of its posts, how
              many posts, and the number of the signal that is waited for (of rank 0's, where all ranks have one)
    posts     to whom, source, place there, elements, signal

`ring`: addresses of the ring and of its counter of tickets, its capacity, the number by which the proxies know the
memory, the memory's address, and the bytes of a half of it. `state`, in this rank's own memory, as in
`embedding_posts.py`: calls, failed, then for each signal how many of its posts were waited for in the calls so far.
Nothing that changes from call to call is an argument, so a graph can replay them.

Nobody waits for what needs an SM of this rank: posts wait for room in the ring, which the proxy's thread makes, and
the others for what has landed, which copy engines bring. So no launch need be resident as a whole; but where ranks
share a GPU, those that wait must leave room for the products of others.

Memory ordering of a post. CTAs store a parcel's tiles with ordinary stores, then take the parcel's ticket (a CTA
barrier, an acquire-release add at system scope), so the last one has acquired what all stored, and the ready word that
it releases in the ring (`proxy.post_transfer`), at system scope, publishes it to the proxy's thread. Of what lands: the
proxy's stream copies, then writes the signal, which releases the copy; who waits acquires it at system scope, its
barrier gives that to all threads of the CTA, and a proxy fence orders it before loads by TMA.

Every wait ends with its deadline or the abort word. What fails is reported, and no later launch of this rank waits or
posts (`failed`); whoever watches the call poisons its result.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .combine import activated
from .embedding import _report
from .embedding_posts import STATE_WORDS
from .gemm import ENTRY, multiply, plain_multiply, store_tile
from .proxy import post_transfer
from .signals import ABORTED, ARRIVED, has_bulk_copies, proxy_fence, signal_wait

PARCEL_WORDS, POST_WORDS = 6, 5
NOBODY = -1
_PARCEL, _POST, _STATE, _NOBODY = (tl.constexpr(one) for one in (PARCEL_WORDS, POST_WORDS, STATE_WORDS, NOBODY))


@triton.jit
def _status(state):
    """What waits of this launch begin with: nobody waits any more where one has failed."""
    return tl.where(tl.load(state + 1, volatile=True) != 0, ABORTED, ARRIVED)


@triton.jit
def _failed(status, state, watch):
    """Say that something failed: to the host and, if late, to all other waits of this rank; to later launches."""
    _report(status, watch)
    tl.store(state + 1, 1)


@triton.jit
def _turn(state):
    return tl.load(state, volatile=True) & 1


@triton.jit
def _here(ring, state, like):
    """The half of this rank's memory that this call uses."""
    first = tl.load(ring + 4) + _turn(state).to(tl.int64) * tl.load(ring + 5)
    return tl.multiple_of(first.to(like.dtype), 16)


@triton.jit
def _complete(tickets, parcel, participants, parcels, posts, ring, state, watch, like):
    """Count a part of a parcel; who counts the last one posts it, to each that it is for.

    The order is that of the head of this file. A post that fails is reported, and later launches find it in `state`.
    """
    abort, _, deadline_ns = watch
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    taken = tl.atomic_add(tickets + parcel, 1, sem="acq_rel", scope="sys") + 1
    if taken == participants:
        tl.store(tickets + parcel, 0)
        BYTES: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
        half, buffer = _turn(state).to(tl.int64) * tl.load(ring + 5), tl.load(ring + 3)
        entry = parcels + parcel * _PARCEL
        first = tl.load(entry + 3)
        for number in range(first, first + tl.load(entry + 4)):
            post = posts + number * _POST
            status = post_transfer(
                tl.load(ring).to(tl.pointer_type(tl.int64)), tl.load(ring + 1).to(tl.pointer_type(tl.int32)),
                tl.load(ring + 2).to(tl.int32), buffer, half + tl.load(post + 1) * BYTES, tl.load(post), buffer,
                half + tl.load(post + 2) * BYTES, tl.load(post + 3) * BYTES, tl.load(post + 4), abort, deadline_ns,
            )  # fmt: skip
            if status != ARRIVED:
                _failed(status, state, watch)


@triton.jit
def _landed(number, signals, state, watch, STRIDE: tl.constexpr):
    """Wait for the next post with this signal, counted from the calls before. Acquires it."""
    abort, _, deadline_ns = watch
    before = tl.load(state + _STATE + number, volatile=True)
    return signal_wait(signals + number * STRIDE, before + 1, abort, deadline_ns)


_FREE = [
    *(
        "like",
        "bias",
        "table",
        "parcels",
        "posts",
        "tickets",
        "ring",
        "signals",
        "state",
        "tiles",
        "count",
        "inner",
        "half",
    ),
    *("a_row", "b_row", "b_expert", "rank", "ranks", "first", "next_slot", "kept", "abort", "error", "deadline_ns"),
]


@triton.jit(do_not_specialize=_FREE)
def multiply_and_post_kernel(
    a, b, like, bias, table, parcels, posts, tickets, ring, state, a_row: tl.int64, b_row: tl.int64, b_expert: tl.int64,
    tiles: tl.int32, inner: tl.int32, n: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUPED: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`a` [M, K] and `b` ([K, N] or, TRANSPOSED, [N, K]; GROUPED: one for each expert, [E, ...]) are tensor
    descriptors, or (GPUs without TMA) pointers, whose rows lie `a_row` and `b_row` apart, experts `b_expert`. `like`: a
    pointer of the type of the memory. `bias` [N], or one for each expert. EVEN: N is a multiple of 8.

    All tiles of a parcel are counted, so own rows, which nobody is sent, are a parcel without posts.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    watch = (abort, error, deadline_ns)
    steps = tl.cdiv(inner, BLOCK_K)
    product = _here(ring, state, like)
    failed = _status(state) != ARRIVED
    for position in range(program, tl.where(failed, 0, tiles), programs):
        entry = table + position * ENTRY
        row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        expert = tl.load(entry + 7).to(tl.int32)
        if has_bulk_copies():
            total = multiply(a, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, expert, GROUPED)
        else:
            total = plain_multiply(a, b, a_row, b_row, b_expert, row, tl.load(entry + 1).to(tl.int32), column, n, inner,
                                   expert, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, GROUPED)  # fmt: skip
        store_tile(product, product, bias + expert * n, total, entry, 4, False, EVEN, BIAS, ACTIVATION)
        parcel = tl.load(entry + 6)
        participants = tl.load(parcels + parcel * _PARCEL).to(tl.int32)
        _complete(tickets, parcel, participants, parcels, posts, ring, state, watch, like)


@triton.jit
def _part(memory, place, landed, next_slot, source, rank, ranks, offset, mask):
    """What one source has for a part of a parcel: at `place` if it is this rank, else in its slot behind `landed`."""
    slot = (source - rank - 1 + ranks) % ranks
    at = tl.where(source == rank, place, landed + slot * next_slot) // 8 * 8  # it is so already
    return tl.load(memory + (at + offset), mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=[*_FREE, "n"])
def sum_kernel(
    out, like, bias, parcels, count: tl.int32, posts, tickets, ring, signals, state, n: tl.int32, first: tl.int64,
    next_slot: tl.int64, rank: tl.int32, ranks: tl.int32, kept: tl.int64, abort, error, deadline_ns: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIGNALS: tl.constexpr, STRIDE: tl.constexpr,
    KEEP: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """`out` [M_r, N] = finish(the sum over ranks), in fp32 and in the order of ranks; N is a multiple of 8.

    What this rank made of a parcel stands at its place. What source s made landed in slot (s - rank - 1) mod `ranks`:
    slots begin at `first`, `next_slot` elements apart, with the first row of the shard. Its signal is SIGNALS behind
    that of the source before. KEEP (all_reduce): the sum is also stored `kept` elements behind the place, and posted.
    STRIDE: 32-bit words between two signals.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    watch = (abort, error, deadline_ns)
    memory = _here(ring, state, like)
    status = _status(state)
    n = n // 8 * 8  # it is so already: it tells the compiler
    across = tl.cdiv(n, COLUMNS)
    for number in range(count):
        entry = parcels + number * _PARCEL
        rows, place, top = tl.load(entry).to(tl.int32), tl.load(entry + 1), tl.load(entry + 2)
        items = tl.cdiv(rows, ROWS) * across
        if program < items:
            for source in range(ranks):
                if (source != rank) & (status == ARRIVED):
                    status = _landed(tl.load(entry + 5) + source * SIGNALS, signals, state, watch, STRIDE)
            for item in range(program, tl.where(status == ARRIVED, items, 0), programs):
                down = item // across * ROWS + tl.arange(0, ROWS)[:, None]
                wide = item % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
                mask = (down < rows) & (wide < n)
                offset = down.to(tl.int64) * n + wide
                total = _part(memory, place, first + top * n, next_slot, 0, rank, ranks, offset, mask)
                for source in range(1, ranks):
                    total += _part(memory, place, first + top * n, next_slot, source, rank, ranks, offset, mask)
                if BIAS:
                    total += tl.load(bias + wide, mask=wide < n, other=0.0).to(tl.float32)
                result = activated(total, ACTIVATION).to(out.dtype.element_ty)
                tl.store(out + (top * n + offset), result, mask=mask)
                if KEEP:
                    tl.store(memory + ((place + kept) // 8 * 8 + offset), result, mask=mask)
            if KEEP & (status == ARRIVED):
                _complete(tickets, number, tl.minimum(programs, items), parcels, posts, ring, state, watch, like)
    if status != ARRIVED:
        _failed(status, state, watch)


@triton.jit(do_not_specialize=[*_FREE, "rows", "width"])
def bring_kernel(
    rows, like, parcels, count: tl.int32, posts, tickets, ring, signals, state, width: tl.int32, abort, error,
    deadline_ns: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, LEAVE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Parcels of rows of `width` elements, contiguous on both sides. LEAVE: from `rows` to their places here, and
    posted from there by the last CTA; else from their places, when they have landed, to `rows`. EVEN: `width` is a
    multiple of 8, and `rows` aligned.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    watch = (abort, error, deadline_ns)
    memory = _here(ring, state, like)
    status = _status(state)
    if EVEN:
        width = width // 8 * 8
        rows = tl.multiple_of(rows.to(tl.int64).to(rows.dtype), 16)  # of an argument it would say nothing
    across = tl.cdiv(width, COLUMNS)
    for number in range(count):
        entry = parcels + number * _PARCEL
        here, place = tl.load(entry).to(tl.int32), tl.load(entry + 1)
        top, signal = tl.load(entry + 2), tl.load(entry + 5)
        items = tl.cdiv(here, ROWS) * across
        if program < items:
            if not LEAVE:
                if (signal != _NOBODY) & (status == ARRIVED):
                    status = _landed(signal, signals, state, watch, STRIDE)
            if EVEN:
                place = place // 8 * 8
            for item in range(program, tl.where(status == ARRIVED, items, 0), programs):
                down = item // across * ROWS + tl.arange(0, ROWS)[:, None]
                wide = item % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
                mask = (down < here) & (wide < width)
                offset = down.to(tl.int64) * width + wide
                if LEAVE:
                    tl.store(memory + (place + offset), tl.load(rows + (top * width + offset), mask=mask), mask=mask)
                else:
                    tl.store(rows + (top * width + offset), tl.load(memory + (place + offset), mask=mask), mask=mask)
            if LEAVE:
                if status == ARRIVED:
                    _complete(tickets, number, tl.minimum(programs, items), parcels, posts, ring, state, watch, like)
    if not LEAVE:
        if status != ARRIVED:
            _failed(status, state, watch)


@triton.jit(do_not_specialize=_FREE)
def multiply_landed_kernel(
    a, b, out, bias, table, signals, state, half: tl.int64, a_row: tl.int64, b_row: tl.int64, b_expert: tl.int64,
    tiles: tl.int32, inner: tl.int32, n: tl.int32, abort, error, deadline_ns: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    GROUPED: tl.constexpr, EVEN: tl.constexpr, STRIDE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out = finish(rows @ b): `a` describes the rows of both halves, [2, M, K], or (GPUs without TMA) points to those
    of the first, `half` elements in front of the others; `b` as in `multiply_and_post_kernel`. EVEN: N is a multiple of
    8, `out` aligned.

    Own rows were copied by the launch before. What landed is loaded behind the wait: loads do not run ahead of it.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    watch = (abort, error, deadline_ns)
    steps = tl.cdiv(inner, BLOCK_K)
    turn = _turn(state)
    status = _status(state)
    for position in range(program, tiles, programs):
        entry = table + position * ENTRY
        row, column = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        signal, expert = tl.load(entry + 6), tl.load(entry + 7).to(tl.int32)
        if (signal != _NOBODY) & (status == ARRIVED):
            status = _landed(signal, signals, state, watch, STRIDE)
            proxy_fence()
        if status == ARRIVED:
            if has_bulk_copies():
                total = multiply(a, b, row, column, steps, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, expert, GROUPED,
                                 turn, True)  # fmt: skip
            else:
                total = plain_multiply(a + turn * (half // 8 * 8), b, a_row, b_row, b_expert, row,
                                       tl.load(entry + 1).to(tl.int32), column, n, inner, expert, BLOCK_M, BLOCK_N,
                                       BLOCK_K, TRANSPOSED, GROUPED)  # fmt: skip
            store_tile(out, out, bias + expert * n, total, entry, 4, False, EVEN, BIAS, ACTIVATION)
    if status != ARRIVED:
        _failed(status, state, watch)


@triton.jit(do_not_specialize=["numbers", "count", "state"])
def count_kernel(numbers, count: tl.int32, state, LANES: tl.constexpr):
    """The end of a call, by one CTA: one more call, one more post of each signal that was waited for. All of `state` is
    ordered by the launches in front and behind."""
    if tl.load(state + 1, volatile=True) == 0:
        tl.store(state, tl.load(state, volatile=True) + 1)
        for first in range(0, count, LANES):
            lanes = first + tl.arange(0, LANES)
            counter = state + _STATE + tl.load(numbers + lanes, mask=lanes < count, other=0)
            tl.store(counter, tl.load(counter, mask=lanes < count, other=0) + 1, mask=lanes < count)
