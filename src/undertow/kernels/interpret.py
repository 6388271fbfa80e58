"""One persistent kernel that runs a bound program (`collective/bind.py` says how it is written down).

CTA p is instance `p % instances` of worker `p // instances`. It meets other CTAs, of its rank and of others, only in
semaphores, so all CTAs of all ranks must be able to run at the same time. What the CPU interpreter does for a worker,
this does for a CTA; one thing differs: the parts of instances begin on 16 bytes, so that accesses can be that wide.

    read the epoch -> start -> body, once an iteration -> end -> advance the epoch
                               each instruction: decode, wait, move, post

Memory ordering. A wait acquires and a post releases at system scope, one thread for each semaphore, with a CTA barrier
between these threads and all others on either side (see `signals`):

    stores of all threads -> CTA barrier -> release-add at system scope
        -> acquire-load at system scope -> CTA barrier -> loads and stores of all threads

Everything else of the program is read-only while it runs (code, bases, semaphore addresses) or this CTA's own (its
epoch: the iterations and calls before this one). The launch orders those. Nothing that changes from call to call is an
argument, so a captured launch can be replayed. What a program needs is decoded *before* the wait: an acquire empties
the first-level cache, and decoding is a chain of dependent loads.

A failed wait ends the CTA: it reports to the error word, posts nothing more, and leaves its epoch as it was.
"""

import triton
import triton.language as tl

from ..collective import bind, schedule
from .packets import PACKET, move_words
from .signals import ARRIVED, report_error

MOST_UNROLLED = 8  # sources or stores whose addresses are held in registers
VECTORS = 8  # 16-byte loads that each thread has under way
SUM, MAX, MIN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # as in the CPU interpreter

_HEADER, _WORKER_ROW = tl.constexpr(bind.HEADER), tl.constexpr(bind.WORKER_ROW)
_INSTRUCTION_ROW, _WAIT_ROW = tl.constexpr(bind.INSTRUCTION_ROW), tl.constexpr(bind.WAIT_ROW)
_POST_ROW, _PIECE_ROW, _OPERAND_ROW = (
    tl.constexpr(bind.POST_ROW),
    tl.constexpr(bind.PIECE_ROW),
    tl.constexpr(bind.OPERAND_ROW),
)
_INSTRUCTIONS, _WAITS, _POSTS = (
    tl.constexpr(bind.INSTRUCTIONS),
    tl.constexpr(bind.WAITS),
    tl.constexpr(bind.POSTS),
)
_PIECES, _OPERANDS, _TILE = tl.constexpr(bind.PIECES), tl.constexpr(bind.OPERANDS), tl.constexpr(bind.TILE)
_DEPTH, _SCRATCH, _SLICE = tl.constexpr(bind.DEPTH), tl.constexpr(bind.SCRATCH), tl.constexpr(bind.SLICE)
_INSTANCES, _RANKS = tl.constexpr(bind.INSTANCES), tl.constexpr(bind.RANKS)
_MY_INPUT, _MY_OUTPUT = tl.constexpr(bind.MY_INPUT), tl.constexpr(bind.MY_OUTPUT)
_READY, _NEEDED, _END = tl.constexpr(schedule.READY), tl.constexpr(schedule.NEEDED), tl.constexpr(schedule.END)
_WORD = tl.constexpr(128)  # bytes between two semaphores
_VECTOR = tl.constexpr(16)  # bytes of the widest access
_IN_FLIGHT = tl.constexpr(VECTORS)
_ELEMENTS = tl.constexpr(4)  # elements of each thread and block where accesses cannot be wide

# One element a thread: each thread with `$3` set polls its own word. As in `signals`, the abort word (across PCIe) and
# the timer (slow to read) are looked at once in 64 polls.
_POLL = tl.constexpr("""{
    .reg .pred idle, done, again, stop;
    .reg .b32 seen, polls;
    .reg .b64 begin, passed;
    mov.b32 $0, 0;
    setp.eq.s32 idle, $3, 0;
    @idle bra END;
    mov.b32 polls, 0;
    mov.u64 begin, %globaltimer;
POLL:
    ld.acquire.sys.global.b32 seen, [$1];
    sub.s32 seen, seen, $2;
    setp.ge.s32 done, seen, 0;
    @done bra END;
    add.u32 polls, polls, 1;
    and.b32 seen, polls, 63;
    setp.ne.u32 again, seen, 0;
    @again bra POLL;
    ld.relaxed.sys.global.b32 seen, [$4];
    setp.ne.s32 stop, seen, 0;
    @stop bra STOP;
    mov.u64 passed, %globaltimer;
    sub.u64 passed, passed, begin;
    setp.lt.u64 again, passed, $5;
    @again bra POLL;
    mov.b32 $0, 2;
    bra END;
STOP:
    mov.b32 $0, 1;
END:
}""")

_TOUCH = tl.constexpr("""{
    .reg .pred wanted;
    .reg .b32 seen;
    mov.b32 $0, 0;
    setp.ne.s32 wanted, $2, 0;
    @wanted ld.global.b32 seen, [$1];
}""")


@triton.jit
def touch(pointers, wanted):
    """Fetch what each lane points at into the caches, without waiting for it. Orders nothing."""
    tl.inline_asm_elementwise(
        _TOUCH, "=r,l,r", [pointers, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def poll(pointers, targets, wanted, abort, deadline_ns):
    """For each lane that is `wanted`: wait until its int32 reached its target, `int32(seen - target) >= 0`.

    The status of each lane: ARRIVED, ABORTED or LATE. ARRIVED acquires at system scope, for that lane's thread only.
    """
    arguments = [pointers, targets, wanted.to(tl.int32), abort, tl.cast(deadline_ns, tl.int64)]
    return tl.inline_asm_elementwise(_POLL, "=r,l,r,r,l,l", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait(code, rows, lo, hi, own, past, iteration, lead, ready, parcel_target, KERNELS: tl.constexpr, LANES: tl.constexpr):
    """Wait rows [lo, hi) all at once, a thread each, and the parcel word at `ready` if that is not 0. The status.

    Acquires, at system scope, what the posters of all these semaphores (and of the parcel) released; the barrier gives
    it to every thread of the CTA.
    """
    past_iterations, past_calls = past
    instances, instance, abort, deadline_ns = lead
    lanes = tl.arange(0, LANES)
    extra = 0
    if KERNELS:
        extra = tl.where(ready != 0, 1, 0)
    status = 0
    for first in range(lo, hi + extra, LANES):
        row = code + (rows + (first + lanes).to(tl.int64) * _WAIT_ROW)
        waits = first + lanes < hi
        semaphore = tl.load(row, mask=waits, other=0)
        value, back = tl.load(row + 1, mask=waits, other=0), tl.load(row + 2, mask=waits, other=0)
        posts = tl.load(row + 3, mask=waits, other=0)
        counted = tl.where(posts < 0, -posts * past_calls, (past_iterations + iteration - back) * posts)
        targets = (counted + value).to(tl.int32)  # modulo 2^32, as the semaphores count
        addresses = own + (semaphore * instances + instance) * _WORD
        wanted = waits
        if KERNELS:
            parcel = (first + lanes == hi) & (extra != 0)
            addresses, targets = tl.where(parcel, ready, addresses), tl.where(parcel, parcel_target, targets)
            wanted = waits | parcel
        found = poll(addresses.to(tl.pointer_type(tl.int32)), targets, wanted, abort, deadline_ns)
        tl.debug_barrier()  # what one thread acquired is the CTA's only across a barrier
        status = tl.maximum(status, tl.max(found, axis=0))
    return status


@triton.jit
def _post(code, rows, lo, hi, semaphores, lead, needed, KERNELS: tl.constexpr, LANES: tl.constexpr):
    """Post rows [lo, hi), a thread each, and the tile word at `needed` if that is not 0.

    Releases, at system scope, everything this CTA has stored (and what it has itself acquired).
    """
    instances, instance, _, _ = lead
    lanes = tl.arange(0, LANES)
    extra = 0
    if KERNELS:
        extra = tl.where(needed != 0, 1, 0)
    for first in range(lo, hi + extra, LANES):
        row = code + (rows + (first + lanes).to(tl.int64) * _POST_ROW)
        posts = first + lanes < hi
        base = tl.load(semaphores + tl.load(row, mask=posts, other=0), mask=posts, other=0)
        addresses = base + (tl.load(row + 1, mask=posts, other=0) * instances + instance) * _WORD
        wanted = posts
        if KERNELS:
            tile = (first + lanes == hi) & (extra != 0)
            addresses = tl.where(tile, needed, addresses)
            wanted = posts | tile
        tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
        tl.atomic_add(addresses.to(tl.pointer_type(tl.int32)), 1, mask=wanted, sem="release", scope="sys")


@triton.jit
def _operands(memory, lo, present, user, scratch, SIZE: tl.constexpr, COUNT: tl.constexpr, PACKETS: tl.constexpr):
    """Addresses of operand rows [lo, lo + present), at most COUNT of them, 0 for the others; then their kinds."""
    rows, bases, source, out = memory
    addresses = ()
    kinds = ()
    for index in tl.static_range(COUNT):
        row, here = rows + (lo + index).to(tl.int64) * _OPERAND_ROW, index < present
        base, kind = tl.load(row, mask=here, other=0), tl.load(row + 2, mask=here, other=0)
        begin = tl.load(bases + base, mask=here, other=0)
        begin = tl.where(base == _MY_INPUT, source, tl.where(base == _MY_OUTPUT, out, begin))
        offset = (tl.load(row + 1, mask=here, other=0) + tl.where(kind == 0, user, scratch)) * SIZE
        if PACKETS:
            offset = tl.where(kind == PACKET, 2 * offset, offset)
        addresses = addresses + (tl.where(here, begin + offset, 0),)
        kinds = kinds + (kind.to(tl.int32),)
    return addresses, kinds


@triton.jit
def _reduced(total, value, OPERATION: tl.constexpr):
    if OPERATION == MAX:
        return tl.maximum(total, value)
    if OPERATION == MIN:
        return tl.minimum(total, value)
    return total + value


@triton.jit
def _block(
    memory, piece, begin, offsets, mask,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr,
    EXACT: tl.constexpr, MANY: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """stores <- sum of sources for the masked elements at `offsets`, `begin` bytes into the piece.

    All loads of a group of sources are issued before any of them is needed. Sums are made in the order of the sources,
    in fp32 for 16-bit types, and rounded once. A store may be one of the sources: each element is read and written by
    the same thread, in that order. EXACT: there are exactly SOURCES sources and STORES stores.
    """
    sources, source_count, source_lo, stores, store_count, store_lo, user, scratch = piece
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    half: tl.constexpr = ELEMENT.is_floating() and ELEMENT.primitive_bitwidth == 16
    SUMMED: tl.constexpr = tl.float32 if half else ELEMENT
    if SOURCES == 1:  # a copy, of the bits as they are
        pointer = tl.multiple_of((sources[0] + begin).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
        result = tl.load(pointer + offsets, mask=mask)
    else:
        values = ()
        for index in tl.static_range(SOURCES):
            pointer = tl.multiple_of((sources[index] + begin).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
            present = mask if EXACT else mask & (index < source_count)
            values = values + (tl.load(pointer + offsets, mask=present),)
        total = values[0].to(SUMMED)
        for index in tl.static_range(1, SOURCES):
            grown = _reduced(total, values[index].to(SUMMED), OPERATION)
            total = grown if EXACT else tl.where(index < source_count, grown, total)
        if MANY:
            for first in range(SOURCES, source_count, SOURCES):
                others, _ = _operands(
                    memory, source_lo + first, source_count - first, user, scratch, SIZE, SOURCES, False
                )
                for index in tl.static_range(SOURCES):
                    pointer = tl.multiple_of((others[index] + begin).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
                    here = first + index < source_count
                    value = tl.load(pointer + offsets, mask=mask & here)
                    total = tl.where(here, _reduced(total, value.to(SUMMED), OPERATION), total)
        result = total.to(ELEMENT)
    for index in tl.static_range(STORES):
        pointer = tl.multiple_of((stores[index] + begin).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
        tl.store(pointer + offsets, result, mask=mask if EXACT else mask & (index < store_count))
    if MANY:
        for first in range(STORES, store_count, STORES):
            others, _ = _operands(memory, store_lo + first, store_count - first, user, scratch, SIZE, STORES, False)
            for index in tl.static_range(STORES):
                pointer = tl.multiple_of((others[index] + begin).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
                tl.store(pointer + offsets, result, mask=mask & (first + index < store_count))


@triton.jit
def _move(
    memory, piece, count, low_bits,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr,
    EXACT: tl.constexpr, MANY: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`count` elements from all sources to all stores: 16 bytes an access where every address allows it."""
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    WIDTH: tl.constexpr = _VECTOR // SIZE
    ROWS: tl.constexpr = LANES * (_IN_FLIGHT // SOURCES)
    done = count * 0
    if low_bits % _VECTOR == 0:
        rows = tl.arange(0, ROWS)
        offsets = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        vectors = count // WIDTH
        for first in range(0, vectors, ROWS):
            # A mask by rows is constant along a vector, so that it never splits one; what is left fits 32 bits.
            mask = (rows < tl.minimum(vectors - first, ROWS).to(tl.int32))[:, None]
            _block(
                memory, piece, first * _VECTOR, offsets, mask,
                ELEMENT, OPERATION, SOURCES, STORES, EXACT, MANY, _VECTOR,
            )  # fmt: skip
        done = vectors * WIDTH
    # The rest: fewer elements than a vector, or all of them where addresses are not that even.
    lanes = tl.arange(0, LANES * _ELEMENTS)
    for first in range(done, count, LANES * _ELEMENTS):
        mask = lanes < tl.minimum(count - first, LANES * _ELEMENTS).to(tl.int32)
        _block(
            memory, piece, first * SIZE, lanes, mask, ELEMENT, OPERATION, SOURCES, STORES, EXACT, MANY, SIZE
        )  # fmt: skip


@triton.jit
def _decode(
    memory, pieces, at, present, tiling, iteration, parity, instance,
    SIZE: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr, PACKETS: tl.constexpr,
):  # fmt: skip
    """Piece `at` for one tile and one instance's part of it; of no elements if it is not `present`."""
    tile, scratch_elements, slice_elements, instances = tiling
    row = pieces + at.to(tl.int64) * _PIECE_ROW
    elements = tl.load(row, mask=present, other=0)
    source_lo, store_lo = tl.load(row + 1, mask=present, other=0), tl.load(row + 3, mask=present, other=0)
    source_count = (tl.load(row + 2, mask=present, other=0) - source_lo).to(tl.int32)
    store_count = (tl.load(row + 4, mask=present, other=0) - store_lo).to(tl.int32)
    # The instance's part, in whole vectors: instances of all ranks cut alike, as only equal numbers know of each other.
    UNIT: tl.constexpr = _VECTOR // SIZE
    start = iteration.to(tl.int64) * tile
    whole = tl.maximum(tl.minimum(tile, elements - start), 0)
    part = (whole + (instances * UNIT - 1)) // (instances * UNIT) * UNIT
    first = tl.minimum(whole, instance * part)
    count = tl.minimum(whole, first + part) - first
    user, scratch = start + first, parity.to(tl.int64) * scratch_elements + instance * slice_elements
    sources, source_kinds = _operands(memory, source_lo, source_count, user, scratch, SIZE, SOURCES, PACKETS)
    stores, store_kinds = _operands(memory, store_lo, store_count, user, scratch, SIZE, STORES, PACKETS)
    piece = (sources, source_count, source_lo, stores, store_count, store_lo, user, scratch)
    return piece, count, source_kinds, store_kinds


@triton.jit
def _low_bits(memory, piece, SIZE: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr, MANY: tl.constexpr):
    """All addresses of a piece in one: its low bits are zero where theirs all are."""
    sources, source_count, source_lo, stores, store_count, store_lo, user, scratch = piece
    found = sources[0]
    for index in tl.static_range(1, SOURCES):
        found |= sources[index]
    for index in tl.static_range(STORES):
        found |= stores[index]
    if MANY:
        for first in range(0, source_count):
            others, _ = _operands(memory, source_lo + first, 1, user, scratch, SIZE, 1, False)
            found |= others[0]
        for first in range(0, store_count):
            others, _ = _operands(memory, store_lo + first, 1, user, scratch, SIZE, 1, False)
            found |= others[0]
    return found


_ARGUMENTS = [
    *("code", "bases", "semaphores", "epochs", "source", "out", "iterations", "words"),
    *("abort", "error", "deadline_ns", "parcels", "parcel_target", "tiles"),
]


@triton.jit(do_not_specialize=_ARGUMENTS, do_not_specialize_on_alignment=_ARGUMENTS)
def interpret_kernel(
    code, bases, semaphores, epochs, source: tl.int64, out: tl.int64, iterations: tl.int32, words: tl.int32,
    abort, error, deadline_ns: tl.int64, parcels: tl.int64, parcel_target: tl.int32, tiles: tl.int64,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr,
    COPIES: tl.constexpr, MANY: tl.constexpr, SINGLE: tl.constexpr, KERNELS: tl.constexpr, PACKETS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """One call of a program of `words` words.

    `source`, `out`: addresses that stand in for the first two bases. `semaphores`: addresses of every rank's first
    semaphore, then of mine. `epochs`: (iterations, calls) before this one, for each CTA. `parcels`, `tiles`: addresses
    of words that kernels post and wait for, 128 bytes apart; a parcel is ready at `parcel_target`.

    ELEMENT is the type of the sums, an integer type where nothing is summed; SOURCES and STORES are how many operands
    are unrolled, MANY says that some moves have more. COPIES: moves of one source occur beside sums. SINGLE: every
    worker's body is one move, of one piece at most, with exactly SOURCES sources and STORES stores. KERNELS: `ready` or
    `needed` occur. PACKETS: packet operands occur. LANES: threads of a CTA.
    """
    program = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    # All of a small program is fetched at once; what follows is a chain of loads that then only goes to the cache.
    touch(code + lanes * 16, lanes * 16 < words)
    instances = tl.load(code + _INSTANCES)
    ranks = tl.load(code + _RANKS)
    touch(bases + lanes, lanes < 3 * ranks + 2)
    touch(semaphores + lanes, lanes < ranks + 1)
    # Ordered by the launch: the CTA of this number stored them in the call before.
    past_iterations, past_calls = tl.load(epochs + 2 * program), tl.load(epochs + 2 * program + 1)
    depth, tile = tl.load(code + _DEPTH), tl.load(code + _TILE)
    instance = program % instances
    worker = code + (_HEADER + program // instances * _WORKER_ROW)
    start, first = tl.load(worker).to(tl.int32), tl.load(worker + 1).to(tl.int32)
    last, end = tl.load(worker + 2).to(tl.int32), tl.load(worker + 3).to(tl.int32)
    instructions = code + tl.load(code + _INSTRUCTIONS)
    wait_rows, post_rows = tl.load(code + _WAITS), tl.load(code + _POSTS)
    pieces = code + tl.load(code + _PIECES)
    memory = (code + tl.load(code + _OPERANDS), bases, source, out)
    tiling = (tile, tl.load(code + _SCRATCH), tl.load(code + _SLICE), instances)
    lead = (instances, instance, abort, deadline_ns)
    past = (past_iterations, past_calls)
    own = tl.load(semaphores + ranks)
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    RAW: tl.constexpr = tl.int8 if SIZE == 1 else tl.int16 if SIZE == 2 else tl.int32 if SIZE == 4 else tl.int64

    status = 0
    iteration = 0
    at = tl.where(start >= 0, start, tl.where(first < last, first, end))
    if SINGLE:
        if start >= 0:
            row = instructions + start.to(tl.int64) * _INSTRUCTION_ROW
            _post(
                code, post_rows, tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32), semaphores, lead, 0,
                False, LANES,
            )  # fmt: skip
        at = tl.where(first < last, first, end)
    while (at >= 0) & (status == ARRIVED):
        row = instructions + at.to(tl.int64) * _INSTRUCTION_ROW
        kind, number = tl.load(row).to(tl.int32), tl.load(row + 1)
        wait_lo, wait_hi = tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
        piece_at, piece_hi = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
        post_lo, post_hi = tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32)
        now = tl.where(kind == _END, iterations - 1, iteration)
        parity = (past_iterations % depth).to(tl.int32)
        parity = (parity + now) % depth.to(tl.int32)
        piece, count, source_kinds, store_kinds = _decode(
            memory, pieces, piece_at, piece_at < piece_hi, tiling, now, parity, instance,
            SIZE, SOURCES, STORES, PACKETS,
        )  # fmt: skip
        ready, needed = tiles * 0, tiles * 0
        if KERNELS:
            ready = tl.where(kind == _READY, parcels + number * _WORD, 0)
            needed = tl.where((kind == _NEEDED) & (now == iterations - 1), tiles + number * _WORD, 0)
        status = _wait(
            code, wait_rows, wait_lo, wait_hi, own, past, now, lead, ready, parcel_target, KERNELS, LANES
        )  # fmt: skip
        if status == ARRIVED:
            while piece_at < piece_hi:
                if PACKETS:
                    epoch = (past_iterations + now + 1).to(tl.int32)
                    move_words(
                        piece, source_kinds, store_kinds, count, epoch, abort, error, deadline_ns,
                        ELEMENT, OPERATION, SOURCES, STORES, LANES,
                    )  # fmt: skip
                elif count > 0:
                    low_bits = _low_bits(memory, piece, SIZE, SOURCES, STORES, MANY)
                    if SOURCES == 1:
                        _move(memory, piece, count, low_bits, RAW, OPERATION, 1, STORES, SINGLE, MANY, LANES)
                    elif COPIES:
                        if piece[1] == 1:
                            _move(memory, piece, count, low_bits, RAW, OPERATION, 1, STORES, SINGLE, MANY, LANES)
                        else:
                            _move(
                                memory, piece, count, low_bits, ELEMENT, OPERATION, SOURCES, STORES, SINGLE, MANY, LANES
                            )
                    else:
                        _move(memory, piece, count, low_bits, ELEMENT, OPERATION, SOURCES, STORES, SINGLE, MANY, LANES)
                piece_at += 1
                piece, count, source_kinds, store_kinds = _decode(
                    memory, pieces, piece_at, piece_at < piece_hi, tiling, now, parity, instance,
                    SIZE, SOURCES, STORES, PACKETS,
                )  # fmt: skip
            _post(code, post_rows, post_lo, post_hi, semaphores, lead, needed, KERNELS, LANES)
        following = at + 1
        if kind == _END:
            following = -1
        elif following == last:
            if (first < last) & (iteration + 1 < iterations):
                iteration += 1
                following = first
            else:
                following = end
        at = following
    if status == ARRIVED:
        # Ordered by the launch: the next call on the stream reads them.
        tl.store(epochs + 2 * program, past_iterations + iterations)
        tl.store(epochs + 2 * program + 1, past_calls + 1)
    else:
        report_error(error, status)
