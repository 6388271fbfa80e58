"""The device side of the proxy ring: a kernel asks the host to move bytes where it has no peer pointer.

The layout and the host's half of the protocol stand in `kernels/ring_layout.py`. The device's half, for one descriptor:

    CTA's stores to the source -> barrier -> ticket (acq_rel) -> room (acquire the tail) -> words 1..7 -> barrier
    -> release the ready word

The last release is cumulative: a host that acquires the ready word sees the descriptor, and a copy that it starts then
reads the bytes that the CTA stored, and those that it had acquired from others.
"""

import triton
import triton.language as tl

from . import ring_layout
from .signals import ARRIVED, release_word, report_error, signal_wait

_TAIL_INDEX = tl.constexpr(ring_layout.TAIL_OFFSET // 4)
_DESCRIPTORS_INDEX = tl.constexpr(ring_layout.DESCRIPTORS_OFFSET // ring_layout.WORD_BYTES)
_WORDS = tl.constexpr(ring_layout.DESCRIPTOR_WORDS)
_READY = tl.constexpr(ring_layout.READY)
_SOURCE_BUFFER = tl.constexpr(ring_layout.SOURCE_BUFFER)
_SOURCE_OFFSET = tl.constexpr(ring_layout.SOURCE_OFFSET)
_DESTINATION_RANK = tl.constexpr(ring_layout.DESTINATION_RANK)
_DESTINATION_BUFFER = tl.constexpr(ring_layout.DESTINATION_BUFFER)
_DESTINATION_OFFSET = tl.constexpr(ring_layout.DESTINATION_OFFSET)
_BYTE_COUNT = tl.constexpr(ring_layout.BYTE_COUNT)


@triton.jit
def post_transfer(
    ring_pointer,
    head_pointer,
    capacity,
    source_buffer,
    source_offset,
    destination_rank,
    destination_buffer,
    destination_offset,
    byte_count,
    signal_index,
    abort_pointer,
    deadline_ns,
):
    """Post one descriptor; called by every thread of a CTA, whose stores to the source it covers.

    `ring_pointer` is the int64 ring in mapped host memory, `head_pointer` the int32 counter of tickets in this rank's
    device memory, `capacity` an int32 power of two, `signal_index` ring_layout.NO_SIGNAL for none. Returns the status
    of the wait for room (`signals.ARRIVED`, ABORTED or LATE), the same in every thread. After a failure the ticket is
    lost and with it the ring: the host must make a new one.

    Order: the ticket and the ready word both release the CTA's earlier stores at system scope. The tail is acquired, so
    that the descriptor is not overwritten before the host has read it.
    """
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    ticket = tl.atomic_add(head_pointer, 1, sem="acq_rel", scope="sys")
    # Room: ticket - tail < capacity, in the cyclic form that a signal compares.
    tail_pointer = ring_pointer.to(tl.pointer_type(tl.int32), bitcast=True) + _TAIL_INDEX
    status = signal_wait(tail_pointer, ticket - capacity + 1, abort_pointer, deadline_ns)
    if status == ARRIVED:
        descriptor = ring_pointer + _DESCRIPTORS_INDEX + (ticket & (capacity - 1)) * _WORDS
        # Seven words in one warp's store: they cross the bus together.
        word = tl.arange(0, _WORDS)
        values = tl.full([_WORDS], 0, tl.int64) + signal_index
        values = tl.where(word == _SOURCE_BUFFER, source_buffer, values)
        values = tl.where(word == _SOURCE_OFFSET, source_offset, values)
        values = tl.where(word == _DESTINATION_RANK, destination_rank, values)
        values = tl.where(word == _DESTINATION_BUFFER, destination_buffer, values)
        values = tl.where(word == _DESTINATION_OFFSET, destination_offset, values)
        values = tl.where(word == _BYTE_COUNT, byte_count, values)
        tl.store(descriptor + word, values, mask=word != _READY)
        release_word(descriptor + _READY, (ticket + 1).to(tl.int64))
    return status


@triton.jit(
    do_not_specialize=[
        *("ring", "head", "capacity", "source_buffer", "destination_rank", "destination_buffer"),
        *("byte_count", "first_signal", "abort", "error", "deadline_ns"),
    ]
)
def post_kernel(
    ring,
    head,
    capacity: tl.int32,
    source_buffer: tl.int64,
    destination_rank: tl.int64,
    destination_buffer: tl.int64,
    byte_count: tl.int64,
    first_signal: tl.int64,
    abort,
    error,
    deadline_ns: tl.int64,
):
    """Each program posts its slice: `byte_count` bytes at program * byte_count of both buffers, its own signal."""
    program = tl.program_id(0).to(tl.int64)
    status = post_transfer(
        ring,
        head,
        capacity,
        source_buffer,
        program * byte_count,
        destination_rank,
        destination_buffer,
        program * byte_count,
        byte_count,
        first_signal + program,
        abort,
        deadline_ns,
    )
    if status != ARRIVED:
        report_error(error, status)
