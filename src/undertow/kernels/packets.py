"""Moves of which some operands are packets: 32 bits of data and a 32-bit flag in one 64-bit word.

A packet needs no semaphore. Whoever writes it stores data and flag in one access, whoever reads it polls until the flag
is that of the iteration. Both accesses are relaxed, at system scope: 64 bits are never torn, and there is nothing else
to order. Flags grow by one with every iteration of every call, so that what an earlier iteration left is never taken
for the new, and nothing is ever cleared.

When a place may be written again is the program's business: a rank that has the packets of one iteration from a peer
knows that the peer is over with those of the iteration before. Two things make that true here. A CTA barrier follows
every move, so that no thread sends for an iteration while another still reads the one before. And a part without
elements, as instances have in short tiles, still sends and awaits one packet.
"""

# Triton has no starred tuples, and grows tuples whose types mypy would fix at their first length.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

import triton
import triton.language as tl

from .pieces import MAX, MIN

_IN_FLIGHT = tl.constexpr(4)  # words that each thread has under way

_LOOK = tl.constexpr("""{
    .reg .pred wanted;
    .reg .b64 seen;
    mov.b64 seen, 0;
    setp.ne.s32 wanted, $2, 0;
    @wanted ld.relaxed.sys.global.b64 seen, [$1];
    mov.b64 $0, seen;
}""")

# As in `signals`, the abort word (across PCIe) and the timer (slow to read) are looked at once in 64 polls.
_SETTLE = tl.constexpr("""{
    .reg .pred idle, done, again, stop;
    .reg .b32 data, flag, polls, seen;
    .reg .b64 packet, begin, passed;
    mov.b64 {data, flag}, $1;
    setp.eq.s32 idle, $4, 0;
    @idle bra END;
    setp.eq.u32 done, flag, $3;
    @done bra END;
    mov.b32 polls, 0;
    mov.u64 begin, %globaltimer;
POLL:
    ld.relaxed.sys.global.b64 packet, [$2];
    mov.b64 {data, flag}, packet;
    setp.eq.u32 done, flag, $3;
    @done bra END;
    add.u32 polls, polls, 1;
    and.b32 seen, polls, 63;
    setp.ne.u32 again, seen, 0;
    @again bra POLL;
    ld.relaxed.sys.global.b32 seen, [$5];
    setp.ne.s32 stop, seen, 0;
    @stop bra END;
    mov.u64 passed, %globaltimer;
    sub.u64 passed, passed, begin;
    setp.lt.u64 again, passed, $7;
    @again bra POLL;
    st.relaxed.sys.global.b32 [$6], 2;
    st.relaxed.sys.global.b32 [$5], 1;
END:
    mov.b32 $0, data;
}""")

_SEND = tl.constexpr("""{
    .reg .pred wanted;
    .reg .b64 packet;
    mov.b64 packet, {$2, $3};
    setp.ne.s32 wanted, $4, 0;
    @wanted st.relaxed.sys.global.b64 [$1], packet;
    mov.b32 $0, 0;
}""")


@triton.jit
def look(pointers, wanted):
    """The packets as they are now. Waits for nothing, so that those of several sources are under way together."""
    arguments = [pointers, wanted.to(tl.int32)]
    return tl.inline_asm_elementwise(_LOOK, "=l,l,r", arguments, dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def settle(packets, pointers, flag, wanted, abort, error, deadline_ns):
    """The data of the packets, polled again until they carry `flag`. Relaxed: a packet publishes nothing but itself.

    A lane that is aborted goes on with whatever is there: outputs of an aborted call are poisoned. One that is late
    reports to `error` and sets `abort`, so that all others give up, too.
    """
    arguments = [packets, pointers, flag, wanted.to(tl.int32), abort, error, tl.cast(deadline_ns, tl.int64)]
    return tl.inline_asm_elementwise(_SETTLE, "=r,l,l,r,r,l,l,l", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def send(pointers, data, flag, wanted):
    """Store packets, each in one access. Relaxed: a packet publishes nothing but itself."""
    arguments = [pointers, data, flag, wanted.to(tl.int32)]
    tl.inline_asm_elementwise(_SEND, "=r,l,r,r,r", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _load_words(address, lanes, left, wanted, SIZE: tl.constexpr):
    """Words `lanes` of ordinary memory from `address` on, of any alignment; zero beyond the `left` elements there."""
    if SIZE >= 4:
        pointer = address.to(tl.pointer_type(tl.int32))
        found = tl.load(pointer + lanes, mask=wanted & (lanes < left * (SIZE // 4)), other=0)
    else:
        PART: tl.constexpr = tl.uint16 if SIZE == 2 else tl.uint8
        found = tl.zeros(lanes.shape, tl.int32)
        for part in tl.static_range(4 // SIZE):
            element = lanes * (4 // SIZE) + part
            bits = tl.load(address.to(tl.pointer_type(PART)) + element, mask=wanted & (element < left), other=0)
            found |= bits.to(tl.int32) << (8 * SIZE * part)
    return found


@triton.jit
def _store_words(address, lanes, data, left, wanted, SIZE: tl.constexpr):
    if SIZE >= 4:
        pointer = address.to(tl.pointer_type(tl.int32))
        tl.store(pointer + lanes, data, mask=wanted & (lanes < left * (SIZE // 4)))
    else:
        PART: tl.constexpr = tl.uint16 if SIZE == 2 else tl.uint8
        for part in tl.static_range(4 // SIZE):
            element = lanes * (4 // SIZE) + part
            bits = (data >> (8 * SIZE * part)).to(PART)
            tl.store(address.to(tl.pointer_type(PART)) + element, bits, mask=wanted & (element < left))


@triton.jit
def _part(word, part: tl.constexpr, ELEMENT: tl.constexpr, SUMMED: tl.constexpr):
    """Element `part` of a word, in the type of the sum."""
    bits = word
    if ELEMENT.primitive_bitwidth == 16:
        bits = (word >> (16 * part)).to(tl.int16)
    elif ELEMENT.primitive_bitwidth == 8:
        bits = (word >> (8 * part)).to(tl.int8)
    return bits.to(ELEMENT, bitcast=True).to(SUMMED)


@triton.jit
def _as_bits(value, part: tl.constexpr, ELEMENT: tl.constexpr):
    """The same, back at its place in a word."""
    BITS: tl.constexpr = ELEMENT.primitive_bitwidth
    RAW: tl.constexpr = tl.uint32 if BITS == 32 else tl.uint16 if BITS == 16 else tl.uint8
    return value.to(ELEMENT).to(RAW, bitcast=True).to(tl.int32) << (BITS * part)


@triton.jit
def _sum(words, source_count, ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr):
    """The words of all sources, element by element, in their order; 16-bit types in fp32, rounded once."""
    half: tl.constexpr = ELEMENT.is_floating() and ELEMENT.primitive_bitwidth == 16
    SUMMED: tl.constexpr = tl.float32 if half else ELEMENT
    result = words[0] * 0
    for part in tl.static_range(32 // ELEMENT.primitive_bitwidth):
        total = _part(words[0], part, ELEMENT, SUMMED)
        for index in tl.static_range(1, SOURCES):
            value = _part(words[index], part, ELEMENT, SUMMED)
            if OPERATION == MAX:
                grown = tl.maximum(total, value)
            elif OPERATION == MIN:
                grown = tl.minimum(total, value)
            else:
                grown = total + value
            total = tl.where(index < source_count, grown, total)
        result |= _as_bits(total, part, ELEMENT)
    return tl.where(source_count > 1, result, words[0])


@triton.jit
def move_words(
    piece, from_packets, to_packets, count, flag, abort, error, deadline_ns,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """stores <- sum of sources, word by word; each operand is ordinary memory or packets that carry `flag`.

    `from_packets` and `to_packets` have a bit for each operand that is packets. Only elements of 32 bits or fewer can
    be summed; others are copied.
    """
    sources, source_count, _, stores, store_count, _, _, _ = piece
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    BLOCK: tl.constexpr = LANES * (_IN_FLIGHT // SOURCES if SOURCES < _IN_FLIGHT else 1)
    tl.static_assert(SOURCES == 1 or SIZE <= 4, "packets carry sums of 32-bit elements at most")
    words = tl.maximum((count * SIZE + 3) // 4, 1)  # one at least: see above
    lanes = tl.arange(0, BLOCK)
    for first in range(0, words, BLOCK):
        inside = lanes < tl.minimum(words - first, BLOCK).to(tl.int32)
        left = tl.minimum(count - first * 4 // SIZE, BLOCK * 4).to(tl.int32)  # elements, of those that a block can hold
        seen = ()
        data = ()
        for one in tl.static_range(SOURCES):
            pointers = (sources[one] + first * 8).to(tl.pointer_type(tl.int64)) + lanes
            seen = seen + (look(pointers, inside & ((from_packets >> one) & 1 != 0)),)
        for one in tl.static_range(SOURCES):
            from_memory = inside & (one < source_count) & ((from_packets >> one) & 1 == 0)
            data = data + (_load_words(sources[one] + first * 4, lanes, left, from_memory, SIZE),)
        settled = ()
        for one in tl.static_range(SOURCES):
            pointers = (sources[one] + first * 8).to(tl.pointer_type(tl.int64)) + lanes
            awaited = inside & ((from_packets >> one) & 1 != 0)
            arrived = settle(seen[one], pointers, flag, awaited, abort, error, deadline_ns)
            settled = settled + (tl.where((from_packets >> one) & 1 != 0, arrived, data[one]),)
        result = settled[0] if SOURCES == 1 else _sum(settled, source_count, ELEMENT, OPERATION, SOURCES)
        for one in tl.static_range(STORES):
            pointers = (stores[one] + first * 8).to(tl.pointer_type(tl.int64)) + lanes
            send(pointers, result, flag, inside & ((to_packets >> one) & 1 != 0))
            to_memory = inside & (one < store_count) & ((to_packets >> one) & 1 == 0)
            _store_words(stores[one] + first * 4, lanes, result, left, to_memory, SIZE)
    tl.debug_barrier()  # no thread sends for the next iteration while another still reads this one
