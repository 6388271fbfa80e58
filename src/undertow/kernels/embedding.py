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
    tables   pointer, rows, dim, stride      the rows held here
             column                          where its values go in a destination row
             offsets                         position of its first bag in `offsets`
             first_row                       the global number of row 0: others' rows of a table cut by rows are passed
             source_column                   where its values are in a source row (`spread_kernel`)

Memory ordering. CTAs store a slice's rows with ordinary stores. Each CTA that had items in the slice then takes a
ticket (a CTA barrier, and an acquire-release add at system scope), so the last one has acquired the stores of all; its
release of the signal, at system scope, publishes them to whoever acquires it: a stream's wait at the destination.
Tickets are zero again afterwards and a signal is only ever set to 1 here, so a graph can replay the launch.

No index reads outside its table and no offset outside `values`: what is out of range counts as absent.
"""

import triton
import triton.language as tl

from .signals import signal_set

SLICE_WORDS = 11
TABLE_WORDS = 8
TICKET_WORDS = 32  # 32-bit words between two tickets: one cache line each
_SLICE, _TABLE, _TICKET = tl.constexpr(SLICE_WORDS), tl.constexpr(TABLE_WORDS), tl.constexpr(TICKET_WORDS)


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
def _destination(entry, origin, element: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where a slice's first row goes.

    The word of choice was acquired by the stream's wait before this launch and is cleared by the slice's last CTA.
    """
    address, choice = tl.load(entry) + origin, tl.load(entry + 9)
    if choice != 0:
        place = tl.load(choice.to(tl.pointer_type(tl.int32)), volatile=True).to(tl.int64) - 1
        address += place * tl.load(entry + 10) * (element.primitive_bitwidth // 8)
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
    """The sums of BAGS bags, COLUMNS columns. `start`, `length` are [BAGS, 1], `across`, `mask` [1, COLUMNS].

    UNROLL rows of every bag are asked for before the first is added, and the indices of the next ones before that: a
    row's address needs its index first, and one row at a time would leave memory idle.
    """
    total = tl.zeros((BAGS, COLUMNS), tl.float32)
    longest = tl.max(length)
    indices = _indices(values, start, length, 0, UNROLL)
    for begin in range(0, longest, UNROLL):
        places, loaded = (), ()
        for step in tl.static_range(UNROLL):
            index = (indices[step].to(tl.int64) - first_row).to(tl.uint64)  # unsigned: negative ones are too large
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
                row *= tl.load(weights + (start + (begin + step)), mask=here, other=0.0).to(tl.float32)
            total += row
    return total


_POOL = ["like", "slices", "tables", "values", "offsets", "weights", "tickets", "slice_count", "value_count", "origin",
         "words"]  # fmt: skip


@triton.jit(do_not_specialize=_POOL)
def pool_kernel(
    like, slices, tables, values, offsets, weights, tickets, slice_count: tl.int32, value_count: tl.int64,
    origin: tl.int64, words: tl.int64,
    BAGS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, ALIGNMENT: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`like` only tells the dtype of rows and results. ALIGNMENT: elements that every address is a multiple of.

    WHOLE: every table has exactly COLUMNS columns, so nothing is masked across. `origin`: 0 where destinations are
    peers'; or the address of a buffer, which may be another one in the next call. `words`: likewise, of signals.
    """
    element: tl.constexpr = like.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    for number in range(slice_count):
        entry = slices + number * _SLICE
        destination = _destination(entry, origin, element, ALIGNMENT)
        destination_stride, first, bags = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3).to(tl.int32)
        begin, items = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
        blocks = tl.cdiv(bags, BAGS)
        mine = (program - begin % programs + programs) % programs  # turns go on from slice to slice
        for item in range(mine, items, programs):
            about = tables + item // blocks * _TABLE
            block = (item % blocks) * BAGS
            table = tl.load(about).to(tl.pointer_type(element))
            rows, dim, stride, column = tl.load(about + 1), tl.load(about + 2), tl.load(about + 3), tl.load(about + 4)
            offset, first_row = tl.load(about + 5), tl.load(about + 6)
            bag = block + tl.arange(0, BAGS)[:, None]
            present = bag < bags
            places = offsets + (offset + first + bag)
            start = tl.load(places, mask=present, other=0).to(tl.int64)
            stop = tl.load(places + 1, mask=present, other=0).to(tl.int64)
            start = tl.minimum(tl.maximum(start, 0), value_count)
            length = tl.maximum(tl.minimum(stop, value_count) - start, 0).to(tl.int32)
            table = tl.multiple_of(table, ALIGNMENT * (element.primitive_bitwidth // 8))
            stride, column = tl.multiple_of(stride, ALIGNMENT), tl.multiple_of(column, ALIGNMENT)
            destination_stride = tl.multiple_of(destination_stride, ALIGNMENT)
            dim = tl.multiple_of(dim, ALIGNMENT).to(tl.int32)
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
                    total /= tl.maximum(length, 1).to(tl.float32)
                to = destination + (bag.to(tl.int64) * destination_stride + (column + across))
                tl.store(to, total.to(element), mask=present & mask)
        signal = tl.load(entry + 4)
        if (signal != 0) & (mine < items):
            _complete(tickets + number * _TICKET, tl.minimum(programs, items), signal + words, tl.load(entry + 9))


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
        destination = _destination(entry, 0, element, ALIGNMENT)
        destination_stride, bags = tl.load(entry + 1), tl.load(entry + 3).to(tl.int32)
        begin, items = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
        source, source_stride = tl.load(entry + 7) + origin, tl.load(entry + 8)
        source = tl.multiple_of(source.to(tl.pointer_type(element)), ALIGNMENT * (element.primitive_bitwidth // 8))
        source_stride = tl.multiple_of(source_stride, ALIGNMENT)
        destination_stride = tl.multiple_of(destination_stride, ALIGNMENT)
        blocks = tl.cdiv(bags, BAGS)
        mine = (program - begin % programs + programs) % programs
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
