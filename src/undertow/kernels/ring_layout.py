"""The layout of the proxy ring: what a kernel writes and the proxy thread reads, in pinned host memory.

    byte   0   unused; the counter of tickets stands in device memory, because not every link has atomics
    byte 128   tail, int32: descriptors consumed, written by the host alone; behind it how many on the host sleep for it
    byte 256   descriptors, 64 bytes each: eight int64 words

Tickets are int32 and wrap around. Ticket t uses descriptor `t % capacity`; the kernel may fill it once `t - tail` is
less than the capacity. The words are complete when the ready word holds `ready_value(t)`: the kernel stores it last,
with a release at system scope, and the host's load of it must acquire. The host consumes tickets in order and stores
the tail with a release after it has read a descriptor, which gives the descriptor back.

Integers only: the host side and the device side both import this file.
"""

from __future__ import annotations

TAIL_OFFSET = 128
DESCRIPTORS_OFFSET = 256
DESCRIPTOR_WORDS = 8
WORD_BYTES = 8
DESCRIPTOR_BYTES = DESCRIPTOR_WORDS * WORD_BYTES

READY = 0
SOURCE_BUFFER = 1
SOURCE_OFFSET = 2
DESTINATION_RANK = 3
DESTINATION_BUFFER = 4
DESTINATION_OFFSET = 5
BYTE_COUNT = 6
SIGNAL_INDEX = 7

NO_SIGNAL = -1


def ring_bytes(capacity: int) -> int:
    """The size of a ring of `capacity` descriptors."""
    if capacity < 1 or capacity & (capacity - 1):
        raise ValueError(f"capacity is {capacity}, but must be a power of two")
    return DESCRIPTORS_OFFSET + capacity * DESCRIPTOR_BYTES


def descriptor_offset(ticket: int, capacity: int) -> int:
    """The byte at which the descriptor of `ticket` begins; tickets beyond 32 bits and negative ones wrap."""
    return DESCRIPTORS_OFFSET + (ticket & (capacity - 1)) * DESCRIPTOR_BYTES


def ready_value(ticket: int) -> int:
    """The ready word of `ticket`: ticket + 1 as an int32 that wraps around, extended to 64 bits with its sign.

    It differs from what the lap before left there, and from the zeros of a new ring on the first lap.
    """
    return ((ticket + 1 + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
