"""Moves of which some operands are packets: 32 bits of data and a 32-bit flag in one 64-bit word.

A packet needs no semaphore. Whoever writes it stores data and flag in one access, whoever reads it polls until the flag
is that of the iteration. Both accesses are relaxed, at system scope: 64 bits are never torn, and there is nothing else
to order. Flags grow by one with every iteration of every call, so that what an earlier iteration left is never taken
for the new, and nothing is ever cleared. All scratch is packets, also that which a rank keeps for itself: it is
written, and then read, once an iteration.

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

from .pieces import BLOCK, block_begin, reduced

_IN_FLIGHT = tl.constexpr(4)  # words that each thread has under way


def _settle(count: int) -> str:
    """Polls `count` packets together, those whose bit is set: all loads are under way before the first is looked at.

    As in `interpret`, the abort word (across PCIe) and the timer (slow to read) are looked at once in 1024 polls.
    """
    wanted, flag, *pointers, abort, error, deadline = (f"${one}" for one in range(count + 1, 2 * count + 6))
    each = range(count)
    lines = [
        *(f".reg .pred wanted{one}; .reg .b32 data{one}, flag{one}; .reg .b64 packet{one};" for one in each),
        ".reg .pred done, again, stop; .reg .b32 zero, polls, seen, status; .reg .b64 begin, now, passed;",
        "mov.b32 zero, 0; mov.b32 polls, 0; mov.b64 begin, 0; mov.b32 status, 0;",
        *(
            f"and.b32 seen, {wanted}, {1 << one}; setp.ne.s32 wanted{one}, seen, 0;"
            f"mov.b64 packet{one}, {{zero, {flag}}};"
            for one in each
        ),
        "POLL:",
        *(f"@wanted{one} ld.relaxed.sys.global.b64 packet{one}, [{pointers[one]}];" for one in each),
        "mov.b32 seen, 0;",
        *(
            f"mov.b64 {{data{one}, flag{one}}}, packet{one}; xor.b32 flag{one}, flag{one}, {flag};"
            f"or.b32 seen, seen, flag{one};"
            for one in each
        ),
        "setp.eq.u32 done, seen, 0; @done bra END;",
        "add.u32 polls, polls, 1; and.b32 seen, polls, 1023; setp.ne.u32 again, seen, 0; @again bra POLL;",
        f"ld.relaxed.sys.global.b32 seen, [{abort}]; setp.ne.s32 stop, seen, 0;",
        "@stop mov.b32 status, 1; @stop bra END;",
        "mov.u64 now, %globaltimer; setp.eq.u64 again, begin, 0; @again mov.u64 begin, now;",
        f"sub.u64 passed, now, begin; setp.lt.u64 again, passed, {deadline}; @again bra POLL;",
        "mov.b32 status, 2;",
        f"st.relaxed.sys.global.b32 [{error}], 2; st.relaxed.sys.global.b32 [{abort}], 1;",
        "END:",
        f"mov.b32 ${count}, status;",
        *(f"mov.b32 ${one}, data{one};" for one in each),
    ]
    return "{\n" + "\n".join(lines) + "\n}"


_SEND = tl.constexpr("""{
    .reg .pred wanted;
    .reg .b64 packet;
    mov.b64 packet, {$2, $3};
    setp.ne.s32 wanted, $4, 0;
    @wanted st.relaxed.sys.global.b64 [$1], packet;
    mov.b32 $0, 0;
}""")


@tl.core.builtin
def settle(pointers, wanted, flag, watch, _semantic=None):
    """The data of one packet for each of `pointers` and lane, polled together until those carry `flag` whose bit in
    `wanted` is set; last of all the status of each lane: ARRIVED, ABORTED or LATE.

    Relaxed: a packet publishes nothing but itself. A lane that is aborted goes on with whatever is there: outputs of an
    aborted call are poisoned. One that is late reports to the error word and sets the abort word, so that all others
    give up, too.
    """
    count = len(pointers)
    constraints = ",".join(["=r"] * (count + 1) + ["r", "r"] + ["l"] * (count + 3))
    return tl.inline_asm_elementwise(
        _settle(count), constraints, [wanted, flag, *pointers, *watch], dtype=[tl.int32] * (count + 1), is_pure=False,
        pack=1, _semantic=_semantic,
    )  # fmt: skip


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
            grown = reduced(total, _part(words[index], part, ELEMENT, SUMMED), OPERATION)
            total = tl.where(index < source_count, grown, total)
        result |= _as_bits(total, part, ELEMENT)
    return tl.where(source_count > 1, result, words[0])


@triton.jit
def move_words(
    sources, stores, source_count, store_count, from_packets, to_packets, count, instances, flag, watch,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """stores <- sum of sources, word by word; each operand is the user's memory or packets that carry `flag`.

    `from_packets` and `to_packets` have a bit for each operand that is packets. Only elements of 32 bits or fewer can
    be summed; others are copied. Returns the status: unless it is ARRIVED, what was stored is not right.
    """
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    ROW: tl.constexpr = LANES * (_IN_FLIGHT // SOURCES if SOURCES < _IN_FLIGHT else 1)
    PER_BLOCK: tl.constexpr = LANES * BLOCK * 4  # words
    tl.static_assert(SOURCES == 1 or SIZE <= 4, "packets carry sums of 32-bit elements at most")
    words = tl.maximum((count * SIZE + 3) // 4, 1).to(tl.int32)  # one at least: see above
    lanes = tl.arange(0, ROW)
    status = tl.zeros([ROW], tl.int32)
    for first in range(0, words, ROW):
        inside = lanes < words - first
        left = tl.minimum(count - first * 4 // SIZE, ROW * 4).to(tl.int32)  # elements, as a row can hold
        begin = block_begin(first, instances, 4, PER_BLOCK)
        data = ()
        pointers = ()
        for one in tl.static_range(SOURCES):
            from_memory = inside & (one < source_count) & ((from_packets >> one) & 1 == 0)
            data = data + (_load_words(sources[one] + begin, lanes, left, from_memory, SIZE),)
            pointers = pointers + ((sources[one] + begin * 2).to(tl.pointer_type(tl.int64)) + lanes,)
        arrived = settle(pointers, tl.where(inside, from_packets, 0), flag, watch)
        status = tl.maximum(status, arrived[SOURCES])
        settled = ()
        for one in tl.static_range(SOURCES):
            settled = settled + (tl.where((from_packets >> one) & 1 != 0, arrived[one], data[one]),)
        result = settled[0] if SOURCES == 1 else _sum(settled, source_count, ELEMENT, OPERATION, SOURCES)
        for one in tl.static_range(STORES):
            pointers_to = (stores[one] + begin * 2).to(tl.pointer_type(tl.int64)) + lanes
            send(pointers_to, result, flag, inside & ((to_packets >> one) & 1 != 0))
        for one in tl.static_range(STORES):
            to_memory = inside & (one < store_count) & ((to_packets >> one) & 1 == 0)
            _store_words(stores[one] + begin, lanes, result, left, to_memory, SIZE)
    tl.debug_barrier()  # no thread sends for the next iteration while another still reads this one
    return tl.max(status, axis=0)
