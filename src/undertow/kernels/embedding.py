"""Pooled lookups, and the kernel that pools straight into the memory of the ranks that own the samples.

    destination[bag, column : column + dim] = sum over l in [offsets[bag], offsets[bag + 1]) of
                                              weights[l] * table[values[l]]            (MEAN: / their number)

One persistent grid for all tables and all *slices*. A slice is a run of bags of one destination; its rows go to one
place, which may be a peer's memory, whatever table they come from. CTAs take *items* (a block of bags of one table) in
fixed turns, slice after slice in the order of the list: remote ones first, says the plan. Both lists are the caller's:

    slices   destination, stride   address of the first row's first element, counted from `origin`, and elements
                                   between two rows
             first, bags           which bags, counted within a table
             signal                address of the int32 word that says "complete", counted from `words`; 0: nobody's
             begin, items          how many items come before this slice, and how many it has
             source, source_stride where rows come from (`spread_kernel`), counted from `origin`
             choice, distance      address of the int32 word by which the destination says which of its places is free
                                   (1 for the first), and elements between two places; 0 where there is one place only
             to, there             of a slice that is posted (`embedding_posts.py`): to whom, and where it lands; or -1
    tables   pointer, rows, dim, stride      the rows held here
             column                          where its values go in a destination row
             offsets                         position of its first bag in `offsets`
             first_row                       the global number of row 0: others' rows of a table cut by rows are passed
             source_column                   where its values are in a source row (`spread_kernel`)

Memory ordering. CTAs store a slice's rows with ordinary stores. Each CTA that had items in the slice then takes a
ticket (a CTA barrier, and an acquire-release add at system scope), so the last one has acquired the stores of all; its
release of the signal, at system scope, publishes them to whoever acquires it: a stream's wait at the destination, or
that of its `exchange_kernel`. Tickets are zero again afterwards and a signal is only ever set to 1 here, so a graph can
replay the launch.

`pool_kernel` and `spread_kernel` run between waits of their stream. `exchange_kernel` is a whole call: it tells its
place to the sources, waits for the places of others, and for what others send it.

    CTA 0      tell this rank's place                   (releases: what used the place before is done, says the launch)
    every CTA  wait until the destinations of its items told theirs (acquires), pool
    the last   wait until all slices for this rank are there (acquires), clear those words

No CTA waits for one that a waiting CTA could keep from running. Its grid fits on the GPU at once, so the CTAs of a rank
never take the room of its CTA 0, which waits for nothing before it has told; and who waits for slices is the last CTA
of its rank: all others are done by then.

No index reads outside its table and no offset outside `values`: what is out of range counts as absent.
"""

import triton
import triton.language as tl

from .interpret import poll
from .poison import fill
from .signals import (
    ABORTED,
    ARRIVED,
    LAST,
    LATE,
    NOT_LAST,
    last_to_finish,
    report_error,
    signal_set,
    signal_set_each,
)

SLICE_WORDS = 13
TABLE_WORDS = 8
TICKET_WORDS = 32  # 32-bit words between two tickets: one cache line each
_SLICE, _TABLE, _TICKET = tl.constexpr(SLICE_WORDS), tl.constexpr(TABLE_WORDS), tl.constexpr(TICKET_WORDS)
_COLUMN = tl.constexpr(4)


@triton.jit
def _complete(ticket, participants, signal, choice):
    """The last CTA of a slice tells its destination. Releases, at system scope, what all of them stored.

    Before that it clears the word of choice, which all CTAs of the slice have read: once the destination knows of the
    slice it may choose again, and that choice must not be lost.
    """
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    taken = tl.atomic_add(ticket, 1, sem="acq_rel", scope="sys") + 1
    if taken == participants:
        tl.store(ticket, 0)
        if choice != 0:
            tl.store(choice.to(tl.pointer_type(tl.int32)), 0)
        signal_set(signal.to(tl.pointer_type(tl.int32)), 1)


@triton.jit
def _destination(entry, origin, own, element: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where a slice's first row goes; `own` (1 for the first, or None): its place where there is no word of choice.

    The word was acquired before, by the stream's wait or by `_await`, and is cleared by the slice's last CTA.
    """
    address, choice = tl.load(entry) + origin, tl.load(entry + 9)
    if choice != 0:
        place = tl.load(choice.to(tl.pointer_type(tl.int32)), volatile=True).to(tl.int64) - 1
        address += place * tl.load(entry + 10) * (element.primitive_bitwidth // 8)
    elif own is not None:
        address += (own - 1).to(tl.int64) * tl.load(entry + 10) * (element.primitive_bitwidth // 8)
    return tl.multiple_of(address.to(tl.pointer_type(element)), ALIGNMENT * (element.primitive_bitwidth // 8))


@triton.jit
def _indices(values, start, length, begin, UNROLL: tl.constexpr):
    """Indices `begin`, `begin` + 1, ... of every bag; -1 where it has no more."""
    found = ()
    for step in tl.static_range(UNROLL):
        index = tl.load(values + (start + (begin + step)), mask=begin + step < length, other=-1)
        found = found + (index,)  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no other way
    return found


@triton.jit
def _pooled(
    values, weights, table, first_row, rows, stride, start, length, across, mask,
    ALIGNMENT: tl.constexpr, WEIGHTS: tl.constexpr, UNROLL: tl.constexpr, BAGS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums of BAGS bags, COLUMNS columns. `start`, `length` are [BAGS], `across`, `mask` [1, COLUMNS].

    What belongs to a bag has one dimension until it meets columns: of [BAGS, 1] a thread would load and keep as many
    copies as it has columns, and compare each of them.

    UNROLL rows of every bag are asked for before the first is added, and the indices of the next ones before that: a
    row's address needs its index first, and one row at a time would leave memory idle.
    """
    total = tl.zeros((BAGS, COLUMNS), tl.float32)
    longest = tl.max(length)
    indices = _indices(values, start, length, 0, UNROLL)
    for begin in range(0, longest, UNROLL):
        places, loaded = (), ()
        for step in tl.static_range(UNROLL):
            index = (indices[step].to(tl.int64) - first_row).to(tl.uint64)[:, None]  # unsigned: negative: too large
            offset = index.to(tl.uint32).to(tl.uint64) * stride.to(tl.uint32).to(tl.uint64)
            offset = tl.multiple_of(offset, (ALIGNMENT, ALIGNMENT))
            place = (table + (offset + across), (index < rows.to(tl.uint64)) & mask)
            places = places + (place,)  # type: ignore[assignment]  # noqa: RUF005
        for step in tl.static_range(UNROLL):
            row = tl.load(places[step][0], mask=places[step][1], other=0.0)
            loaded = loaded + (row,)  # type: ignore[assignment]  # noqa: RUF005
        indices = _indices(values, start, length, begin + UNROLL, UNROLL)
        for step in tl.static_range(UNROLL):
            row = loaded[step].to(tl.float32)
            if WEIGHTS:
                here = begin + step < length
                row *= tl.load(weights + (start + (begin + step)), mask=here, other=0.0).to(tl.float32)[:, None]
            total += row
    return total


@triton.jit
def _first_item(begin, program, programs):
    """Of a CTA in a slice with so many items before it: turns go on from slice to slice."""
    return (program - begin % programs + programs) % programs


@triton.jit
def _item(item, items, blocks, TOGETHER: tl.constexpr):
    """The table and the block of bags of an item: TOGETHER tables take turns, so that neighbours in a row of the
    destination are stored at about the same time; with 1, the blocks of a table follow each other."""
    if TOGETHER == 1:
        return item // blocks, item % blocks
    tables = items // blocks
    first = item // (TOGETHER * blocks) * TOGETHER
    turn = tl.minimum(tables - first, TOGETHER)
    rest = item - first * blocks
    return first + rest % turn, rest // turn


@triton.jit
def _pool_items(
    entry, destination, mine, items, programs, tables, values, offsets, weights, value_count, element: tl.constexpr,
    BAGS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, ALIGNMENT: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTS: tl.constexpr, WHOLE: tl.constexpr, TOGETHER: tl.constexpr, columns=_COLUMN,
):  # fmt: skip
    """Items `mine`, `mine` + `programs`, ... of the slice at `entry`, whose first row goes to `destination`.

    `columns`: the word of a table that says where its values go there.
    """
    destination_stride, first, bags = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3).to(tl.int32)
    blocks = tl.cdiv(bags, BAGS)
    for item in range(mine, items, programs):
        number, block = _item(item, items, blocks, TOGETHER)
        about = tables + number * _TABLE
        table = tl.load(about).to(tl.pointer_type(element))
        rows, stride, column = tl.load(about + 1), tl.load(about + 3), tl.load(about + columns)
        offset, first_row = tl.load(about + 5), tl.load(about + 6)
        bag = block * BAGS + tl.arange(0, BAGS)
        present = bag < bags
        places = offsets + (offset + first + bag)
        start = tl.load(places, mask=present, other=0).to(tl.int64)
        stop = tl.load(places + 1, mask=present, other=0).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), value_count)
        length = tl.maximum(tl.minimum(stop, value_count) - start, 0).to(tl.int32)
        table = tl.multiple_of(table, ALIGNMENT * (element.primitive_bitwidth // 8))
        stride, column = tl.multiple_of(stride, ALIGNMENT), tl.multiple_of(column, ALIGNMENT)
        destination_stride = tl.multiple_of(destination_stride, ALIGNMENT)
        dim = COLUMNS if WHOLE else tl.multiple_of(tl.load(about + 2), ALIGNMENT).to(tl.int32)
        for left in range(0, dim, COLUMNS):
            across = left + tl.arange(0, COLUMNS)[None, :]
            mask = across < dim
            if WHOLE:
                mask = tl.full((1, COLUMNS), True, tl.int1)
            total = _pooled(
                values, weights, table, first_row, rows, stride, start, length, across, mask, ALIGNMENT, WEIGHTS,
                UNROLL, BAGS, COLUMNS,
            )  # fmt: skip
            if MEAN:
                total /= tl.maximum(length, 1).to(tl.float32)[:, None]
            to = destination + (bag.to(tl.int64)[:, None] * destination_stride + (column + across))
            tl.store(to, total.to(element), mask=present[:, None] & mask)


_POOL = ["like", "slices", "tables", "values", "offsets", "weights", "tickets", "slice_count", "value_count"]


@triton.jit(do_not_specialize=[*_POOL, "origin", "words"])
def pool_kernel(
    like, slices, tables, values, offsets, weights, tickets, slice_count: tl.int32, value_count: tl.int64,
    origin: tl.int64, words: tl.int64,
    BAGS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, TOGETHER: tl.constexpr, ALIGNMENT: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`like` only tells the dtype of rows and results. ALIGNMENT: elements that every address is a multiple of.

    WHOLE: every table has exactly COLUMNS columns, so nothing is masked across. `origin`: 0 where destinations are
    peers'; or the address of a buffer, which may be another one in the next call. `words`: likewise, of signals.
    """
    element: tl.constexpr = like.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    for number in range(slice_count):
        entry = slices + number * _SLICE
        destination = _destination(entry, origin, None, element, ALIGNMENT)
        begin, items = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
        mine = _first_item(begin, program, programs)
        _pool_items(
            entry, destination, mine, items, programs, tables, values, offsets, weights, value_count, element,
            BAGS, COLUMNS, UNROLL, ALIGNMENT, MEAN, WEIGHTS, WHOLE, TOGETHER,
        )  # fmt: skip
        signal = tl.load(entry + 4)
        if (signal != 0) & (mine < items):
            _complete(tickets + number * _TICKET, tl.minimum(programs, items), signal + words, tl.load(entry + 9))


@triton.jit
def _tell(words, count, value, LANES: tl.constexpr):
    """Store `value` to all of these words of peers. Releases, at system scope, what the launch is ordered behind: all
    that the stream did with the place before."""
    for first in range(0, count, LANES):
        lanes = first + tl.arange(0, LANES)
        wanted = lanes < count
        address = tl.load(words + lanes, mask=wanted, other=0)
        signal_set_each(address.to(tl.pointer_type(tl.int32)), value, wanted)


@triton.jit
def _await(slices, slice_count, watch, LANES: tl.constexpr):
    """Wait until the destinations of this CTA's slices have told their places, a thread for each. Returns the status.

    Of slices in which it has items only: the word of another one may be cleared again by the time this CTA looks.
    Acquires, at system scope, that nothing reads those places any more; the barrier gives it to every thread.

    One thread of CTA 0 looks at the abort word also where nothing has to be waited for: words that a failed call left
    behind satisfy the waits of the next. One, and while the others poll, as that word lies across PCIe; and what it
    finds is the CTA's by the reduction, since threads that each looked for themselves might differ.
    """
    abort, _, deadline_ns = watch
    status = 0
    for first in range(0, tl.maximum(slice_count, 1), LANES):
        lanes = first + tl.arange(0, LANES)
        looks = (lanes == 0) & (tl.program_id(0) == 0)
        aborted = tl.load(abort + tl.zeros([LANES], tl.int32), mask=looks, other=0, volatile=True)
        entry, here = slices + lanes * _SLICE, lanes < slice_count
        choice = tl.load(entry + 9, mask=here, other=0)
        begin, items = tl.load(entry + 5, mask=here, other=0), tl.load(entry + 6, mask=here, other=0)
        mine = _first_item(begin.to(tl.int32), tl.program_id(0), tl.num_programs(0))
        wanted = (choice != 0) & (mine < items.to(tl.int32))
        told = tl.full([LANES], 1, tl.int32)
        found = poll(choice.to(tl.pointer_type(tl.int32)), told, wanted, abort, deadline_ns)
        tl.debug_barrier()  # what one thread acquired is the CTA's only across a barrier
        status = tl.maximum(status, tl.max(tl.maximum(found, tl.where(aborted != 0, ABORTED, ARRIVED)), axis=0))
    return status


@triton.jit
def _take(words, count, watch, LANES: tl.constexpr):
    """Wait until all of these words of this rank are 1, a thread each, and clear them. Returns the status.

    Acquires, at system scope, the slices whose sources released them; the end of the kernel gives them to what follows
    on the stream. Clearing comes before the next call of this stream tells its place, and nobody sets a word again
    before it was told.
    """
    abort, _, deadline_ns = watch
    status = 0
    for first in range(0, count, LANES):
        lanes = first + tl.arange(0, LANES)
        wanted = lanes < count
        word = tl.load(words + lanes, mask=wanted, other=0).to(tl.pointer_type(tl.int32))
        found = poll(word, tl.full([LANES], 1, tl.int32), wanted, abort, deadline_ns)
        tl.debug_barrier()  # what one thread acquired is the CTA's only across a barrier
        tl.store(word, 0, mask=wanted & (found == ARRIVED))
        status = tl.maximum(status, tl.max(found, axis=0))
    return status


@triton.jit
def _report(status, watch):
    """Tell the host of a wait that failed. One that was late makes all others of this rank give up."""
    abort, error, _ = watch
    report_error(error, status)
    if status == LATE:
        report_error(abort, 1)


@triton.jit(do_not_specialize=[*_POOL, "words", "told", "awaited", "place", "out", "out_bytes", "abort", "error",
                               "deadline_ns"])  # fmt: skip
def exchange_kernel(
    like, slices, tables, values, offsets, weights, tickets, slice_count: tl.int32, value_count: tl.int64,
    words, told: tl.int32, awaited: tl.int32, place: tl.int32, out: tl.int64, out_bytes: tl.int64, abort, error,
    deadline_ns: tl.int64,
    BAGS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, TOGETHER: tl.constexpr, ALIGNMENT: tl.constexpr,
    MEAN: tl.constexpr, WEIGHTS: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Pool into the places of all ranks, and wait until this rank's own is full: a whole call, and it poisons itself.

    `words`: addresses, first of the `told` words at sources that learn `place` (1 for the first), then of the `awaited`
    ones that sources set here. Where a slice has no word of choice, its place is this rank's own. `out`, `out_bytes`:
    the result, filled with ones if the call fails. LANES: threads of a CTA. One ticket more than there are slices.

    Every wait ends with its deadline or the abort word. What fails is reported and told to the last CTA by the ticket;
    that one has acquired all stores of its rank's CTAs, so that none of them comes after the poison.
    """
    element: tl.constexpr = like.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    watch = (abort, error, deadline_ns)
    if program == 0:
        _tell(words, told, place, LANES)
    status = _await(slices, slice_count, watch, LANES)
    for number in range(tl.where(status == ARRIVED, slice_count, 0)):
        entry = slices + number * _SLICE
        destination = _destination(entry, 0, place, element, ALIGNMENT)
        begin, items = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
        mine = _first_item(begin, program, programs)
        _pool_items(
            entry, destination, mine, items, programs, tables, values, offsets, weights, value_count, element,
            BAGS, COLUMNS, UNROLL, ALIGNMENT, MEAN, WEIGHTS, WHOLE, TOGETHER,
        )  # fmt: skip
        signal = tl.load(entry + 4)
        if (signal != 0) & (mine < items):
            _complete(tickets + number * _TICKET, tl.minimum(programs, items), signal, tl.load(entry + 9))
    if status != ARRIVED:
        _report(status, watch)
    outcome = last_to_finish(tickets + slice_count * _TICKET, status)
    if outcome != NOT_LAST:
        status = ABORTED
        if outcome == LAST:
            status = _take(words + told, awaited, watch, LANES)
            if status != ARRIVED:
                _report(status, watch)
        else:
            for number in range(slice_count):  # those who failed took none
                tl.store(tickets + number * _TICKET, 0)
        if status != ARRIVED:
            tl.debug_barrier()  # the ticket of one thread acquired the others' stores for the CTA only across a barrier
            fill(out.to(tl.int64).to(tl.pointer_type(tl.int8)), out_bytes, LANES)


@triton.jit(do_not_specialize=["like", "slices", "tables", "tickets", "slice_count", "origin"])
def spread_kernel(
    like, slices, tables, tickets, slice_count: tl.int32, origin: tl.int64,
    BAGS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Rows that were pooled before, from `source` to `destination`, table by table: the All-to-All without lookup.

    The same slices, turns, tickets and signals as `pool_kernel`; signals are always addresses.
    """
    element: tl.constexpr = like.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    for number in range(slice_count):
        entry = slices + number * _SLICE
        destination = _destination(entry, 0, None, element, ALIGNMENT)
        destination_stride, bags = tl.load(entry + 1), tl.load(entry + 3).to(tl.int32)
        begin, items = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
        source, source_stride = tl.load(entry + 7) + origin, tl.load(entry + 8)
        source = tl.multiple_of(source.to(tl.pointer_type(element)), ALIGNMENT * (element.primitive_bitwidth // 8))
        source_stride = tl.multiple_of(source_stride, ALIGNMENT)
        destination_stride = tl.multiple_of(destination_stride, ALIGNMENT)
        blocks = tl.cdiv(bags, BAGS)
        mine = _first_item(begin, program, programs)
        for item in range(mine, items, programs):
            about = tables + item // blocks * _TABLE
            dim = tl.multiple_of(tl.load(about + 2), ALIGNMENT).to(tl.int32)
            column = tl.multiple_of(tl.load(about + 4), ALIGNMENT)
            source_column = tl.multiple_of(tl.load(about + 7), ALIGNMENT)
            bag = (item % blocks) * BAGS + tl.arange(0, BAGS)[:, None]
            for left in range(0, dim, COLUMNS):
                across = left + tl.arange(0, COLUMNS)[None, :]
                mask = (bag < bags) & (across < dim)
                by = source + (bag.to(tl.int64) * source_stride + (source_column + across))
                to = destination + (bag.to(tl.int64) * destination_stride + (column + across))
                tl.store(to, tl.load(by, mask=mask, other=0.0), mask=mask)
        signal = tl.load(entry + 4)
        if (signal != 0) & (mine < items):
            _complete(tickets + number * _TICKET, tl.minimum(programs, items), signal, tl.load(entry + 9))
