"""Pooled lookups where not every destination has a peer pointer: whoever finishes a slice last posts it to the proxy.

The slices, tables, turns and tickets of `embedding.py`. Slices are of three kinds:

    posted    (`to` is a rank) pooled into this rank's memory, piece beside piece; the last CTA posts it. `destination`
              and `there` are bytes of a half of the memory, here and at `to`; `signal` is the number of a signal there
    a peer's  (a word of choice) as in `exchange_kernel`: stored into the place that was told, then signalled
    own       stored into the result: `destination` is counted from there

Both kernels of a call stand one behind the other on its stream. `posting_kernel` pools, posts and never waits for what
others pool, only for room in the ring and for places told. `take_kernel` waits for what others posted, and brings it
into the result:

    arrivals  word                   address of the arrival signal, which the proxy of this rank advances
              counter                which of the counters of `state` is the signal's
              from                   the byte of a half at which it lands
              width, column          elements of a row there, and the first of those that are brought
              row, rows              which rows of the result they belong to
              to, columns, stride    where they go in a row of the result, how many, elements between two rows there

Nothing that changes from call to call is an argument, so a graph can replay both. `state`, in this rank's own memory:

    calls, failed, then a counter for each signal: how many of its posts were waited for in the calls so far

Calls use the two halves of the memory in turn. A signal belongs to one slice of one source: slices may be finished, and
so be posted, in another order than they were begun. `state` is read by every CTA before it takes its last ticket, and
changed by who takes the last one; `failed` also by a CTA whose post found no room, for the kernels behind it.

Memory ordering of a post. CTAs store a slice's rows with ordinary stores, then take the slice's ticket (a CTA barrier,
an acquire-release add at system scope); so the last one has acquired the stores of all, and the ready word that it
releases in the ring (`proxy.post_transfer`), at system scope, publishes them to the proxy's thread, whose copy comes
after its acquire. Of an arrival: the proxy's stream copies, then writes the signal, which releases the copy; a CTA of
`take_kernel` acquires the signal at system scope, and its barrier gives the bytes to all its threads before they load.

Every wait ends with its deadline or the abort word. What fails is reported, no later call of this rank waits or posts
again (`failed`), and `take_kernel` fills the result with ones once all its CTAs are done.
"""

import triton
import triton.language as tl

from .embedding import _POOL, _SLICE, _TICKET, _await, _complete, _first_item, _pool_items, _report, _take, _tell
from .poison import fill
from .proxy import post_transfer
from .signals import ABORTED, ARRIVED, LAST, NOT_LAST, last_to_finish, signal_wait

ARRIVAL_WORDS = 10
STATE_WORDS = 2  # and one for each signal
_ARRIVAL, _STATE = tl.constexpr(ARRIVAL_WORDS), tl.constexpr(STATE_WORDS)
_SOURCE_COLUMN, _USUAL_COLUMN = tl.constexpr(7), tl.constexpr(4)  # words of a table


@triton.jit
def _half(ring, state):
    """Where this call's half of the memory begins, counted from its first byte."""
    return (tl.load(state, volatile=True) & 1).to(tl.int64) * tl.load(ring + 5)


@triton.jit
def _goes_to(entry, to, ring, state, out, element: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where a slice's first row goes. A word of choice was acquired by `_await`, and is cleared by the last CTA."""
    address, choice = tl.load(entry), tl.load(entry + 9)
    if to >= 0:
        address += tl.load(ring + 4) + _half(ring, state)
    elif choice != 0:
        place = tl.load(choice.to(tl.pointer_type(tl.int32)), volatile=True).to(tl.int64) - 1
        address += place * tl.load(entry + 10) * (element.primitive_bitwidth // 8)
    else:
        address += out
    return tl.multiple_of(address.to(tl.pointer_type(element)), ALIGNMENT * (element.primitive_bitwidth // 8))


@triton.jit
def _post(ticket, participants, entry, ring, state, watch, element: tl.constexpr):
    """The last CTA of a slice posts it. Releases, at system scope, what all of them stored.

    The order is that of the head of this file: barrier, ticket (acquires the others' stores), and the ring's own. A
    post that fails is reported, and `take_kernel` finds it in `state`: a status would cost every thread a register.
    """
    abort, _, deadline_ns = watch
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    taken = tl.atomic_add(ticket, 1, sem="acq_rel", scope="sys") + 1
    if taken == participants:
        tl.store(ticket, 0)
        half, buffer = _half(ring, state), tl.load(ring + 3)
        byte_count = tl.load(entry + 3) * tl.load(entry + 1) * (element.primitive_bitwidth // 8)
        status = post_transfer(
            tl.load(ring).to(tl.pointer_type(tl.int64)), tl.load(ring + 1).to(tl.pointer_type(tl.int32)),
            tl.load(ring + 2).to(tl.int32), buffer, half + tl.load(entry), tl.load(entry + 11), buffer,
            half + tl.load(entry + 12), byte_count, tl.load(entry + 4), abort, deadline_ns,
        )  # fmt: skip
        if status != ARRIVED:
            _report(status, watch)
            tl.store(state + 1, 1)


@triton.jit(do_not_specialize=[*_POOL, "ring", "words", "told", "place", "out", "state", "abort", "error",
                               "deadline_ns"])  # fmt: skip
def posting_kernel(
    like, slices, tables, values, offsets, weights, tickets, slice_count: tl.int32, value_count: tl.int64,
    ring, words, told: tl.int32, place: tl.int32, out: tl.int64, state, abort, error, deadline_ns: tl.int64,
    BAGS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, TOGETHER: tl.constexpr, ALIGNMENT: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTS: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Pool all slices; the last CTA of each posts or signals it.

    `ring`: addresses of the ring and of its counter of tickets, its capacity, the number by which the proxies know the
    memory, the memory's address, and the bytes of a half of it. `words`: addresses of the `told` words at peers that
    learn `place` (1 for the first). `out`: address of this rank's result. LANES: threads of a CTA. One ticket more than
    there are slices.
    """
    element: tl.constexpr = like.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    watch = (abort, error, deadline_ns)
    if program == 0:
        _tell(words, told, place, LANES)
    status = tl.where(tl.load(state + 1, volatile=True) != 0, ABORTED, ARRIVED)
    status = tl.maximum(status, _await(slices, slice_count, watch, LANES))
    for number in range(tl.where(status == ARRIVED, slice_count, 0)):
        entry = slices + number * _SLICE
        to = tl.load(entry + 11)
        destination = _goes_to(entry, to, ring, state, out, element, ALIGNMENT)
        begin, items = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
        mine = _first_item(begin, program, programs)
        _pool_items(
            entry, destination, mine, items, programs, tables, values, offsets, weights, value_count, element,
            BAGS, COLUMNS, UNROLL, ALIGNMENT, MEAN, WEIGHTS, WHOLE, TOGETHER,
            tl.where(to >= 0, _SOURCE_COLUMN, _USUAL_COLUMN),
        )  # fmt: skip
        ticket, signal = tickets + number * _TICKET, tl.load(entry + 4)
        if mine < items:
            if tl.load(entry + 11) >= 0:
                _post(ticket, tl.minimum(programs, items), entry, ring, state, watch, element)
            elif signal != 0:
                _complete(ticket, tl.minimum(programs, items), signal, tl.load(entry + 9))
    if status != ARRIVED:
        _report(status, watch)
    outcome = last_to_finish(tickets + slice_count * _TICKET, status)
    if (outcome != NOT_LAST) & (outcome != LAST):
        tl.store(state + 1, 1)
        for number in range(slice_count):  # those who failed took none
            tl.store(tickets + number * _TICKET, 0)


@triton.jit
def _bring(
    arrival, half, out, mine, items, programs, element: tl.constexpr,
    BAGS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Items `mine`, `mine` + `programs`, ... of what has arrived into the result."""
    size: tl.constexpr = element.primitive_bitwidth // 8
    source = (half + tl.load(arrival + 2)).to(tl.pointer_type(element))
    source = tl.multiple_of(source, ALIGNMENT * size)
    width, by = tl.multiple_of(tl.load(arrival + 3), ALIGNMENT), tl.multiple_of(tl.load(arrival + 4), ALIGNMENT)
    row, rows = tl.load(arrival + 5), tl.load(arrival + 6).to(tl.int32)
    to = tl.multiple_of(tl.load(arrival + 7), ALIGNMENT)
    columns = tl.multiple_of(tl.load(arrival + 8), ALIGNMENT).to(tl.int32)
    result = tl.multiple_of(out.to(tl.int64).to(tl.pointer_type(element)), ALIGNMENT * size)
    stride = tl.multiple_of(tl.load(arrival + 9), ALIGNMENT)
    parts = tl.cdiv(columns, COLUMNS)
    for item in range(mine, items, programs):
        down = item // parts * BAGS + tl.arange(0, BAGS)[:, None]
        across = item % parts * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        mask = (down < rows) & (across < columns)
        loaded = tl.load(source + (down.to(tl.int64) * width + (by + across)), mask=mask, other=0.0)
        tl.store(result + ((row + down) * stride + (to + across)), loaded, mask=mask)


@triton.jit(do_not_specialize=["like", "arrivals", "arrival_count", "memory", "half_bytes", "counters", "signals",
                               "words", "awaited", "out", "out_bytes", "ticket", "state", "abort", "error",
                               "deadline_ns"])  # fmt: skip
def take_kernel(
    like, arrivals, arrival_count: tl.int32, memory: tl.int64, half_bytes: tl.int64, counters, signals: tl.int32,
    words, awaited: tl.int32, out: tl.int64, out_bytes: tl.int64, ticket, state, abort, error,
    deadline_ns: tl.int64,
    BAGS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Wait for what others posted to this rank and bring it into the result; the last CTA ends the call.

    `memory`: as in `posting_kernel`. `counters`: those of the `signals` of this call.
    `words`: addresses of the `awaited` words that peers set. `out`, `out_bytes`: the result, filled with ones if the
    call fails. A CTA waits only for arrivals of which it brings a part; none of them needs an SM of this rank.
    """
    element: tl.constexpr = like.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    watch = (abort, error, deadline_ns)
    failed = tl.load(state + 1, volatile=True)
    half = memory + (tl.load(state, volatile=True) & 1).to(tl.int64) * half_bytes
    status = tl.where(failed != 0, ABORTED, ARRIVED)
    for number in range(arrival_count):
        arrival = arrivals + number * _ARRIVAL
        items = tl.cdiv(tl.load(arrival + 6).to(tl.int32), BAGS) * tl.cdiv(tl.load(arrival + 8).to(tl.int32), COLUMNS)
        if (status == ARRIVED) & (program < items):
            before = tl.load(state + _STATE + tl.load(arrival + 1), volatile=True)
            signal = tl.load(arrival).to(tl.pointer_type(tl.int32))
            status = signal_wait(signal, before + 1, abort, deadline_ns)
            until = tl.where(status == ARRIVED, items, 0)
            _bring(arrival, half, out, program, until, programs, element, BAGS, COLUMNS, ALIGNMENT)
    if status != ARRIVED:
        _report(status, watch)
    outcome = last_to_finish(ticket, status)
    if outcome != NOT_LAST:
        status = ABORTED
        if outcome == LAST:
            status = _take(words, awaited, watch, LANES)
            if status != ARRIVED:
                _report(status, watch)
        if status == ARRIVED:
            tl.store(state, tl.load(state, volatile=True) + 1)
            for first in range(0, signals, LANES):
                lanes = first + tl.arange(0, LANES)
                counter = state + _STATE + tl.load(counters + lanes, mask=lanes < signals, other=0)
                tl.store(counter, tl.load(counter, mask=lanes < signals, other=0) + 1, mask=lanes < signals)
        else:
            tl.store(state + 1, 1)
            tl.debug_barrier()  # the ticket of one thread acquired the others' stores for the CTA only across a barrier
            fill(out.to(tl.int64).to(tl.pointer_type(tl.int8)), out_bytes, LANES)
