"""Signals between kernels of different ranks: device functions, each with its memory ordering.

A signal is a 32-bit counter in symmetric memory, compared cyclically. One thread releases for its CTA and one thread
acquires for its CTA, so that neither store nor poll is repeated by every warp; a CTA barrier joins the other threads to
it. The chain that makes a peer's bytes visible is always the same:

    stores of all threads -> CTA barrier -> release at system scope -> acquire at system scope -> CTA barrier -> loads

Releases and acquires are cumulative in the PTX memory model: a release also publishes what its thread has itself
observed through a barrier or an acquire. That is why one thread can release for all, and why the last CTA of a grid can
release for the whole grid (`last_to_finish`).

Bulk copies (TMA) stand outside this chain, in the async proxy:

- a TMA *store* must be complete before the barrier of the release: call `tma_store_fence()` first;
- a TMA *load* of bytes that a peer wrote with ordinary stores needs `proxy_fence()` after the wait.

Nothing that changes from call to call may be an argument, because a CUDA graph freezes arguments. A call that waits in
the kernel therefore takes its number from an *epoch* in its own device memory, which the call itself advances:

    epoch = epoch_read(epoch_pointer) + 1                   # every CTA, before its ticket
    ...                                                     # wait for `epoch`, work
    outcome = last_to_finish(ticket_pointer, status)        # one ticket for each CTA
    if outcome == LAST:
        epoch_advance(epoch_pointer, epoch)                 # every CTA has read it: all tickets are taken
        signal_set(done_pointer, epoch)

All of these are called by every thread of a CTA, in uniform control flow, and not from a warp-specialised region: their
barriers span the CTA.
"""

import triton
import triton.language as tl

ARRIVED = tl.constexpr(0)
ABORTED = tl.constexpr(1)
LATE = tl.constexpr(2)

NOT_LAST = tl.constexpr(0)
LAST = tl.constexpr(1)
LAST_FAILED = tl.constexpr(2)

# A ticket counter holds the number of CTAs that finished in its low half, of those that failed in its high half.
_FAILED_TICKET = tl.constexpr(1 << 16)

# Thread 0 polls; the others wait in the barrier, which also hands them the outcome. The barriers are the unaligned
# kind: the compiler does not know that this text holds one and may keep the warp of thread 0 diverged. The abort word
# lies across PCIe and the timer is slow to read, so both are looked at once in 1024 polls.
_WAIT = tl.constexpr("""{
    .reg .pred other, done, again, stop, failed, aborted;
    .reg .b32 thread, seen, polls, status;
    .reg .b64 begin, passed;
    mov.b32 status, 0;
    mov.u32 thread, %tid.x;
    setp.ne.u32 other, thread, 0;
    @other bra JOIN;
    mov.b32 polls, 0;
    mov.u64 begin, %globaltimer;
POLL:
    ld.acquire.sys.global.b32 seen, [$1];
    sub.s32 seen, seen, $2;
    setp.ge.s32 done, seen, 0;
    @done bra JOIN;
    add.u32 polls, polls, 1;
    and.b32 seen, polls, 1023;
    setp.ne.u32 again, seen, 0;
    @again bra POLL;
    ld.relaxed.sys.global.b32 seen, [$3];
    setp.ne.s32 stop, seen, 0;
    @stop bra STOP;
    mov.u64 passed, %globaltimer;
    sub.u64 passed, passed, begin;
    setp.lt.u64 again, passed, $4;
    @again bra POLL;
    mov.b32 status, 2;
    bra JOIN;
STOP:
    mov.b32 status, 1;
JOIN:
    setp.ne.u32 failed, status, 0;
    barrier.red.or.pred failed, 0, failed;
    mov.b32 $0, 0;
    @!failed bra END;
    setp.eq.u32 aborted, status, 1;
    barrier.red.or.pred aborted, 0, aborted;
    selp.b32 $0, 1, 2, aborted;
END:
}""")

# For several words that lie next to each other: thread i polls word i, all but the one that is skipped. Who is late
# says so here: a status that the loop around it carried would end its loads that run ahead.
_WAIT_ALL = tl.constexpr("""{
    .reg .pred other, done, again, stop, failed;
    .reg .b32 thread, seen, polls;
    .reg .b64 begin, passed, place;
    setp.ne.u32 failed, 0, 0;
    mov.u32 thread, %tid.x;
    setp.ge.u32 other, thread, $3;
    @other bra JOIN;
    setp.eq.u32 other, thread, $4;
    @other bra JOIN;
    mad.wide.u32 place, thread, 4, $1;
    mov.b32 polls, 0;
    mov.u64 begin, %globaltimer;
POLL:
    ld.acquire.sys.global.b32 seen, [place];
    sub.s32 seen, seen, $2;
    setp.lt.u32 done, seen, 16;
    @done bra JOIN;
    add.u32 polls, polls, 1;
    and.b32 seen, polls, 1023;
    setp.ne.u32 again, seen, 0;
    @again bra POLL;
    ld.relaxed.sys.global.b32 seen, [$5];
    setp.ne.s32 stop, seen, 0;
    @stop bra STOP;
    mov.u64 passed, %globaltimer;
    sub.u64 passed, passed, begin;
    setp.lt.u64 again, passed, $7;
    @again bra POLL;
    st.relaxed.sys.global.b32 [$6], 2;
    st.relaxed.sys.global.b32 [$5], 1;
STOP:
    setp.eq.u32 failed, 0, 0;
JOIN:
    barrier.red.or.pred failed, 0, failed;
    selp.b32 $0, 1, 0, failed;
}""")

_STORE = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.SEMANTICS.sys.global.BITS [$1], $2;
    mov.b32 $0, 0;
}""")
_RELEASE_32 = tl.constexpr(_STORE.value.replace("SEMANTICS", "release").replace("BITS", "b32"))
_RELEASE_64 = tl.constexpr(_STORE.value.replace("SEMANTICS", "release").replace("BITS", "b64"))
_RELAXED_32 = tl.constexpr(_STORE.value.replace("SEMANTICS", "relaxed").replace("BITS", "b32"))

# One element a thread: each with `$3` set stores to its own word.
RELEASE_EACH = tl.constexpr("""{
    .reg .pred wanted;
    setp.ne.s32 wanted, $3, 0;
    @wanted st.release.sys.global.b32 [$1], $2;
    mov.b32 $0, 0;
}""")


@tl.core.builtin
def has_bulk_copies(_semantic=None):
    """Whether the *compilation* target has TMA, which need not be the GPU present."""
    return tl.constexpr(int(_semantic.builder.options.arch.removeprefix("sm")) >= 90)


@triton.jit
def signal_add(pointer, amount):
    """Add `amount` to the int32 signal at `pointer`, which may be a peer's.

    Releases, at system scope, everything the CTA stored before (and what it has itself acquired). Whoever waits for the
    sum acquires it.
    """
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    tl.atomic_add(pointer, amount, sem="release", scope="sys")


@triton.jit
def signal_set(pointer, value):
    """Store `value` into the int32 signal at `pointer`, which may be a peer's. Only one writer may set a signal.

    Releases, at system scope, everything the CTA stored before (and what it has itself acquired). A store, not an
    exchange: it also works over links without atomics, and for host memory.
    """
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    tl.inline_asm_elementwise(_RELEASE_32, "=r,l,r", [pointer, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def signal_set_each(pointers, value, wanted):
    """`signal_set` for each lane that is `wanted`, by a thread of its own: as many lanes as the CTA has threads."""
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    arguments = [pointers, value, wanted.to(tl.int32)]
    tl.inline_asm_elementwise(RELEASE_EACH, "=r,l,r,r", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def release_word(pointer, value):
    """`signal_set` for an int64 word: the ready word of a descriptor in host memory."""
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    tl.inline_asm_elementwise(_RELEASE_64, "=r,l,l", [pointer, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def signal_wait(pointer, target, abort_pointer, deadline_ns):
    """Wait until the int32 signal at `pointer` has reached `target`: `int32(seen - target) >= 0`.

    Returns ARRIVED, ABORTED (the int32 at `abort_pointer` is not zero) or LATE (`deadline_ns` nanoseconds have passed
    since the first poll), the same in every thread. A wait that is already satisfied is never ABORTED or LATE.

    ARRIVED acquires, at system scope, what the signal's writers released, and the CTA barrier inside gives it to every
    thread. ABORTED and LATE acquire nothing: the caller must not read what it waited for. The abort word is read
    relaxed; it carries no data. A following TMA load also needs `proxy_fence()`.
    """
    arguments = [pointer, tl.cast(target, tl.int32), abort_pointer, tl.cast(deadline_ns, tl.int64)]
    return tl.inline_asm_elementwise(_WAIT, "=r,l,r,l,l", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def signal_wait_all(pointer, target, count, skipped, abort_pointer, error_pointer, deadline_ns):
    """Wait until `count` int32 signals from `pointer` on, 4 bytes apart, are `target` or a little beyond: less than 16.

    So a word that a much earlier call left is never taken for a later one, however many calls lie between. Number
    `skipped` is left out (-1: none). Each is polled, and acquired at system scope, by a thread of its own, so `count`
    is at most the threads of the CTA; the CTA barrier inside gives to all what each acquired.

    Returns whether the wait failed, the same in every thread. The caller may go on with whatever is there, as outputs
    of an aborted call are poisoned, but must tell nobody that it is good. A wait that is late says so in the error
    word, for the watchdog, and sets the abort word: all others give up, and leave the error word alone.
    """
    arguments = [
        pointer, tl.cast(target, tl.int32), tl.cast(count, tl.int32), tl.cast(skipped, tl.int32), abort_pointer,
        error_pointer, tl.cast(deadline_ns, tl.int64),
    ]  # fmt: skip
    return tl.inline_asm_elementwise(_WAIT_ALL, "=r,l,r,r,r,l,l,l", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def proxy_fence():
    """Order ordinary accesses before it with bulk copies (TMA) after it, in global memory, for the calling threads.

    Needed after `signal_wait`, before a TMA load of bytes that a peer wrote with ordinary stores. Nothing on GPUs
    before sm_90, which have no bulk copies.
    """
    if has_bulk_copies():
        tl.inline_asm_elementwise("fence.proxy.async.global; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def tma_store_fence():
    """Complete the TMA stores of the calling threads, so that the next `signal_add` or `signal_set` covers them.

    Triton itself waits only until shared memory has been read (`wait_group.read`). The full wait makes the bytes
    visible to the issuing thread, the proxy fence orders them with its ordinary accesses; the barrier that follows is
    the signal's own. Nothing on GPUs before sm_90, which have no bulk copies.
    """
    if has_bulk_copies():
        tl.inline_asm_elementwise(
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; fence.proxy.async; // $0",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def epoch_read(pointer):
    """The number of calls that completed on the int32 epoch at `pointer`, in this rank's own device memory.

    Ordered by the launch: the previous call on the stream advanced it. Within a call it may be read until the CTA takes
    its ticket, whose release orders the read before the last CTA's `epoch_advance`.
    """
    return tl.load(pointer, volatile=True)


@triton.jit
def epoch_advance(pointer, epoch):
    """Store `epoch` as the number of completed calls. By the last CTA only, after every CTA took its ticket.

    An ordinary store: the next call on the stream reads it, and the end of the kernel publishes it.
    """
    tl.store(pointer, epoch)


@triton.jit
def last_to_finish(ticket_pointer, status):
    """Take a ticket; tell the last CTA of the grid. Returns NOT_LAST, LAST, or LAST_FAILED if any status was not zero.

    Releases, at system scope, what the CTA stored, and acquires what the CTAs with earlier tickets released; the
    result's way from thread 0 to the others is a CTA barrier. So everything the grid stored happens before what the
    last CTA does next, and a signal that it releases covers the whole grid. The counter (int32, this rank's own memory,
    zero at first) is zero again afterwards, so that a graph can replay the launch: the next launch on the stream reads
    it. The grid is one-dimensional, of at most 65,535 CTAs.
    """
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    weight = tl.where(status == 0, 1, 1 + _FAILED_TICKET)
    taken = tl.atomic_add(ticket_pointer, weight, sem="acq_rel", scope="sys") + weight
    outcome = NOT_LAST
    if (taken & (_FAILED_TICKET - 1)) == tl.num_programs(0):
        tl.store(ticket_pointer, 0)
        outcome = tl.where(taken == tl.num_programs(0), LAST, LAST_FAILED)
    return outcome


@triton.jit(do_not_specialize=["pointer", "amount"])
def add_kernel(pointer, amount: tl.int32):
    """`signal_add` in the order of a stream: the launch orders it after what the stream did before."""
    signal_add(pointer, amount)


@triton.jit(do_not_specialize=["pointer", "target", "abort", "error", "deadline_ns"])
def wait_kernel(pointer, target: tl.int32, abort, error, deadline_ns: tl.int64):
    """`signal_wait` in the order of a stream, on one SM: what follows on the stream sees what the signal released.

    For signals whose writer needs no SM, such as a copy engine. A stream memory operation would need none either, but
    the driver may hold back work of other streams that was enqueued after it, and so the very copy it waits for.
    """
    status = signal_wait(pointer, target, abort, deadline_ns)
    if status != ARRIVED:
        report_error(error, status)


@triton.jit
def report_error(error_pointer, code):
    """Store `code` into the int32 error word at `error_pointer`, in mapped host memory.

    Relaxed, at system scope: it publishes nothing but itself. The host checks it after the call; when several CTAs
    report, one of their codes remains.
    """
    tl.inline_asm_elementwise(_RELAXED_32, "=r,l,r", [error_pointer, code], dtype=tl.int32, is_pure=False, pack=1)
