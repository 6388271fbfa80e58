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

A failed wait ends the CTA: it reports to the error word, posts nothing more, and has FAILED from then on, in place of
the calls of its epoch. One that was late sets the abort word, too, so that all others of this rank give up. A CTA that
has failed fails every later call at once, and so poisons its output: a graph can be replayed after a failure, and what
others posted for the failed call, late, would be taken for their part in a later one. The abort word would tell it,
too, but lies across PCIe.
"""

import triton
import triton.language as tl

from ..collective import bind, schedule
from .packets import move_words
from .pieces import decode, move_piece
from .poison import leave
from .signals import ABORTED, ARRIVED, LATE, report_error

(
    _HEADER, _WORKER_ROW, _INSTRUCTION_ROW, _WAIT_ROW, _POST_ROW, _INSTRUCTIONS, _WAITS, _POSTS, _PIECES, _OPERANDS,
    _TILE, _DEPTH, _SCRATCH, _SLICE, _INSTANCES, _RANKS, _READY, _NEEDED,
) = (
    tl.constexpr(one)
    for one in (
        bind.HEADER, bind.WORKER_ROW, bind.INSTRUCTION_ROW, bind.WAIT_ROW, bind.POST_ROW, bind.INSTRUCTIONS, bind.WAITS,
        bind.POSTS, bind.PIECES, bind.OPERANDS, bind.TILE, bind.DEPTH, bind.SCRATCH, bind.SLICE, bind.INSTANCES,
        bind.RANKS, schedule.READY, schedule.NEEDED,
    )
)  # fmt: skip
_WORD = tl.constexpr(128)  # bytes between two semaphores
FAILED = tl.constexpr(-1)  # calls before this one, where one of them failed

# One element a thread: each thread with `$3` set polls its own word. As in `signals`, the abort word (across PCIe) and
# the timer (slow to read) are looked at once in 1024 polls.
_POLL = tl.constexpr("""{
    .reg .pred idle, done, again, stop;
    .reg .b32 seen, polls, status;
    .reg .b64 begin, now, passed;
    mov.b32 status, 0;
    setp.eq.s32 idle, $3, 0;
    @idle bra END;
    mov.b32 polls, 0;
    mov.b64 begin, 0;
POLL:
    ld.acquire.sys.global.b32 seen, [$1];
    sub.s32 seen, seen, $2;
    setp.ge.s32 done, seen, 0;
    @done bra END;
    add.u32 polls, polls, 1;
    and.b32 seen, polls, 1023;
    setp.ne.u32 again, seen, 0;
    @again bra POLL;
    ld.relaxed.sys.global.b32 seen, [$4];
    setp.ne.s32 stop, seen, 0;
    @stop bra STOP;
    mov.u64 now, %globaltimer;
    setp.eq.u64 again, begin, 0;
    @again mov.u64 begin, now;
    sub.u64 passed, now, begin;
    setp.lt.u64 again, passed, $5;
    @again bra POLL;
    mov.b32 status, 2;
    bra END;
STOP:
    mov.b32 status, 1;
END:
    mov.b32 $0, status;
}""")

_FETCH = tl.constexpr("""{
    .reg .pred wanted;
    setp.ne.s32 wanted, $2, 0;
    @wanted prefetch.global.L2 [$1];
    mov.b32 $0, 0;
}""")


@triton.jit
def fetch(pointers, wanted):
    """Start to bring what the wanted lanes point at into the second-level cache. Orders nothing."""
    arguments = [pointers, wanted.to(tl.int32)]
    tl.inline_asm_elementwise(_FETCH, "=r,l,r", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def poll(pointers, targets, wanted, abort, deadline_ns):
    """For each lane that is `wanted`: wait until its int32 reached its target, `int32(seen - target) >= 0`.

    The status of each lane: ARRIVED, ABORTED or LATE. ARRIVED acquires at system scope, for that lane's thread only.
    """
    arguments = [pointers, targets, wanted.to(tl.int32), abort, tl.cast(deadline_ns, tl.int64)]
    return tl.inline_asm_elementwise(_POLL, "=r,l,r,r,l,l", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait(program, watch, row, past, iteration, ready, parcel_target, KERNELS: tl.constexpr, LANES: tl.constexpr):
    """All waits of the instruction at `row` at once, a thread each, and that for the parcel word at `ready` unless 0.

    Acquires, at system scope, what the posters of all these semaphores (and of the parcel) released; the barrier gives
    it to every thread of the CTA. Returns the status: unless it is ARRIVED, nothing may be read.
    """
    code, waits, _, _, _, own, instances, instance = program
    abort, _, deadline_ns = watch
    past_iterations, past_calls = past
    lo, hi = tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    extra = 0
    if KERNELS:
        extra = tl.where(ready != 0, 1, 0)
    status = 0
    for first in range(lo, hi + extra, LANES):
        lanes = first + tl.arange(0, LANES)
        wanted = lanes < hi
        entry = code + (waits + lanes * _WAIT_ROW)
        semaphore, value = tl.load(entry, mask=wanted, other=0), tl.load(entry + 1, mask=wanted, other=0)
        back, posts = tl.load(entry + 2, mask=wanted, other=0), tl.load(entry + 3, mask=wanted, other=0)
        before = tl.where(posts < 0, -posts * past_calls, (past_iterations + iteration - back) * posts)
        targets = (before + value).to(tl.int32)  # modulo 2^32, as the semaphores count
        addresses = own + (semaphore * instances + instance) * _WORD
        if KERNELS:
            parcel = (lanes == hi) & (extra != 0)
            addresses, targets = tl.where(parcel, ready, addresses), tl.where(parcel, parcel_target, targets)
            wanted = wanted | parcel
        found = poll(addresses.to(tl.pointer_type(tl.int32)), targets, wanted, abort, deadline_ns)
        tl.debug_barrier()  # what one thread acquired is the CTA's only across a barrier
        status = tl.maximum(status, tl.max(found, axis=0))
    return status


@triton.jit
def _post(program, row, needed, KERNELS: tl.constexpr, LANES: tl.constexpr):
    """All posts of the instruction at `row`, a thread each, and to the tile word at `needed` unless that is 0.

    Releases, at system scope, everything this CTA has stored (and what it has itself acquired). The barrier is there
    without posts too: the next instruction may read, in other threads, what this one has stored.
    """
    code, _, posts, _, semaphores, _, instances, instance = program
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    lo, hi = tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32)
    extra = 0
    if KERNELS:
        extra = tl.where(needed != 0, 1, 0)
    for first in range(lo, hi + extra, LANES):
        lanes = first + tl.arange(0, LANES)
        wanted = lanes < hi
        entry = code + (posts + lanes * _POST_ROW)
        base = tl.load(semaphores + tl.load(entry, mask=wanted, other=0), mask=wanted, other=0)
        addresses = base + (tl.load(entry + 1, mask=wanted, other=0) * instances + instance) * _WORD
        if KERNELS:
            tile = (lanes == hi) & (extra != 0)
            addresses = tl.where(tile, needed, addresses)
            wanted = wanted | tile
        tl.atomic_add(addresses.to(tl.pointer_type(tl.int32)), 1, mask=wanted, sem="release", scope="sys")


@triton.jit
def _run(
    program, memory, tiling, watch, past, row, iteration, last, parcels, parcel_target, tiles,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr,
    MANY: tl.constexpr, KERNELS: tl.constexpr, PACKETS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The instruction at `row`, in one iteration: decode, wait, move, post. Returns the status of the wait."""
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    instances = program[6]
    at, end = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    depth = tiling[3]
    parity = (past[0] % depth + iteration).to(tl.int32) % depth.to(tl.int32)
    piece, count, from_packets, to_packets = decode(
        program, memory, tiling, at, at < end, iteration, parity, SIZE, SOURCES, STORES, PACKETS, LANES
    )  # fmt: skip
    ready, needed = tiles * 0, tiles * 0
    if KERNELS:
        kind, number = tl.load(row), tl.load(row + 1)
        ready = tl.where(kind == _READY, parcels + number * _WORD, 0)
        needed = tl.where((kind == _NEEDED) & (iteration == last), tiles + number * _WORD, 0)
    status = _wait(program, watch, row, past, iteration, ready, parcel_target, KERNELS, LANES)
    if status == ARRIVED:
        while (at < end) & (status == ARRIVED):
            if PACKETS:
                sources, source_count, _, stores, store_count, _, _, _ = piece
                status = move_words(
                    sources, stores, source_count, store_count, from_packets, to_packets, count, instances,
                    (past[0] + iteration + 1).to(tl.int32), watch, ELEMENT, OPERATION, SOURCES, STORES, LANES,
                )  # fmt: skip
            else:
                if count > 0:
                    move_piece(memory, piece, count, instances, ELEMENT, OPERATION, SOURCES, STORES, MANY, LANES)
            at += 1
            if at < end:
                piece, count, from_packets, to_packets = decode(
                    program, memory, tiling, at, True, iteration, parity, SIZE, SOURCES, STORES, PACKETS, LANES
                )
        if status == ARRIVED:
            _post(program, row, needed, KERNELS, LANES)
    return status


_ARGUMENTS = [
    *("code", "bases", "semaphores", "epochs", "finished", "source", "out", "out_bytes", "iterations", "words"),
    *("abort", "error", "deadline_ns", "parcels", "parcel_target", "tiles"),
]


@triton.jit(do_not_specialize=_ARGUMENTS, do_not_specialize_on_alignment=_ARGUMENTS)
def interpret_kernel(
    code, bases, semaphores, epochs, finished, source: tl.int64, out: tl.int64, out_bytes: tl.int64,
    iterations: tl.int32, words: tl.int32, abort, error, deadline_ns: tl.int64, parcels: tl.int64,
    parcel_target: tl.int32, tiles: tl.int64,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr,
    MANY: tl.constexpr, KERNELS: tl.constexpr, PACKETS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One call of a program of `words` words.

    `source`, `out`: addresses that stand in for the first two bases. `semaphores`: addresses of every rank's first
    semaphore, then of mine. `epochs`: (iterations, calls or FAILED) before this one, for each CTA. `finished`,
    `out_bytes`: see `poison.leave`. `parcels`, `tiles`: addresses of words that kernels post and wait for, 128 bytes
    apart; a parcel is ready at `parcel_target`.

    ELEMENT is the type of the sums, an integer type where nothing is summed; SOURCES and STORES are how many operands
    are unrolled, MANY says that some moves have more. KERNELS: `ready` or `needed` occur. PACKETS: all scratch is
    packets. LANES: threads of a CTA.
    """
    number = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    # All of a small program is fetched at once; what follows is a chain of loads that then only goes to the cache.
    fetch(code + lanes * 16, lanes * 16 < words)
    instances, ranks = tl.load(code + _INSTANCES).to(tl.int32), tl.load(code + _RANKS)
    fetch(bases + lanes, lanes < 3 * ranks + 2)
    fetch(semaphores + lanes, lanes < ranks + 1)
    # Ordered by the launch: the CTA of this number stored them in the call before.
    past = (tl.load(epochs + 2 * number), tl.load(epochs + 2 * number + 1))
    worker = code + (_HEADER + number // instances * _WORKER_ROW)
    start, first = tl.load(worker).to(tl.int32), tl.load(worker + 1).to(tl.int32)
    last, end = tl.load(worker + 2).to(tl.int32), tl.load(worker + 3).to(tl.int32)
    rows = tl.load(code + _INSTRUCTIONS).to(tl.int32)
    program = (
        code, tl.load(code + _WAITS).to(tl.int32), tl.load(code + _POSTS).to(tl.int32),
        tl.load(code + _PIECES).to(tl.int32), semaphores, tl.load(semaphores + ranks), instances, number % instances,
    )  # fmt: skip
    memory = (code + tl.load(code + _OPERANDS), bases, source, out)
    tiling = (
        tl.load(code + _TILE), tl.load(code + _SCRATCH), tl.load(code + _SLICE), tl.load(code + _DEPTH),
    )  # fmt: skip
    watch = (abort, error, deadline_ns)
    if start >= 0:  # posts, and nothing else
        _post(program, code + (rows + start * _INSTRUCTION_ROW), tiles, False, LANES)
    status = tl.where(past[1] == FAILED, ABORTED, ARRIVED)
    iteration = 0
    at = first
    while (first < last) & (iteration < iterations) & (status == ARRIVED):
        status = _run(
            program, memory, tiling, watch, past, code + (rows + at * _INSTRUCTION_ROW), iteration, iterations - 1,
            parcels, parcel_target, tiles,
            ELEMENT, OPERATION, SOURCES, STORES, MANY, KERNELS, PACKETS, LANES,
        )  # fmt: skip
        at += 1
        iteration = tl.where(at == last, iteration + 1, iteration)
        at = tl.where(at == last, first, at)
    if (end >= 0) & (status == ARRIVED):  # waits, and does nothing else
        row = code + (rows + end * _INSTRUCTION_ROW)
        status = _wait(program, watch, row, past, iterations - 1, tiles, 0, False, LANES)
    tl.debug_barrier()  # every thread has read the epoch
    if status == ARRIVED:
        # Ordered by the launch: the next call on the stream reads them.
        tl.store(epochs + 2 * number, past[0] + iterations)
        tl.store(epochs + 2 * number + 1, past[1] + 1)
    else:
        tl.store(epochs + 2 * number + 1, FAILED)
        report_error(error, status)
        if status == LATE:  # the watchdog will say so too, but the other CTAs of this rank need not wait for it
            report_error(abort, 1)
    leave(finished, status, out, out_bytes, deadline_ns, LANES)
