"""Decoding and moving one piece of a bound program: stores <- the sum of sources, for an instance's part of a tile.

A piece is handed around as a tuple: sources (addresses), their count and first row, stores, their count and first row,
and what was added to the offsets of the user's memory and of scratch. Loads and stores here are ordinary ones: the
waits and posts around a move order them (`interpret`).
"""

# Triton has no starred tuples, and grows tuples whose types mypy would fix at their first length.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

import triton
import triton.language as tl

from ..collective import bind

MOST_UNROLLED = 8  # sources or stores whose addresses are held in registers
MAX, MIN = tl.constexpr(1), tl.constexpr(2)  # as in the CPU interpreter; 0 is the sum

_PIECE_ROW, _OPERAND_ROW = tl.constexpr(bind.PIECE_ROW), tl.constexpr(bind.OPERAND_ROW)
_MY_INPUT, _MY_OUTPUT = tl.constexpr(bind.MY_INPUT), tl.constexpr(bind.MY_OUTPUT)
_USER = tl.constexpr(bind.USER)
_VECTOR = tl.constexpr(16)  # bytes of the widest access
_IN_FLIGHT = tl.constexpr(16)  # wide loads that each thread has under way, of all sources together
_NARROW = tl.constexpr(4)  # the same where they cannot be wide
_FURTHER = tl.constexpr(4)  # operands that are unrolled of those beyond SOURCES or STORES


BLOCK = tl.constexpr(4)  # vectors of each thread in a block


@triton.jit
def own_part(left, tile, instances, instance, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Where an instance's part of a tile begins, of which `left` elements are left, and how many elements it has.

    Long tiles are cut into blocks that instances take in turn, so that together they walk through memory front to back;
    short ones into as many parts as there are instances, of whole vectors and no longer than a block. All ranks cut
    alike, as only equal instances know of each other. In scratch, blocks lie as in a long tile, whatever its length:
    what one instance writes is never another one's. Counted in vectors, of which a tile has fewer than 2^31.
    """
    UNIT: tl.constexpr = _VECTOR // SIZE
    VECTORS: tl.constexpr = LANES * BLOCK
    ELEMENTS: tl.constexpr = VECTORS * UNIT
    whole = tl.maximum(tl.minimum(tile, left), 0)
    vectors = ((whole + (UNIT - 1)) // UNIT).to(tl.int32)
    part = (vectors + (instances - 1)) // instances
    first = tl.minimum(whole, (instance * part).to(tl.int64) * UNIT)
    count = tl.minimum(whole, first + part.to(tl.int64) * UNIT) - first
    blocks = (whole // ELEMENTS).to(tl.int32)
    turns = blocks // instances
    further = blocks - turns * instances
    turns = (turns + tl.where(instance < further, 1, 0)).to(tl.int64) * ELEMENTS
    turns += tl.where(instance == further, whole % ELEMENTS, 0)
    in_turn = vectors > instances * VECTORS
    return tl.where(in_turn, instance.to(tl.int64) * ELEMENTS, first), tl.where(in_turn, turns, count)


@triton.jit
def block_begin(first, instances, EACH: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Bytes from an instance's first block to its unit `first`, of EACH bytes and PER_BLOCK to a block."""
    block = first // PER_BLOCK
    return block * (instances.to(tl.int64) * (EACH * PER_BLOCK)) + (first - block * PER_BLOCK) * EACH


@triton.jit
def block_offsets(rows, instances, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Elements to each of the vectors `rows`, which begin with a block or lie in one."""
    VECTORS: tl.constexpr = LANES * BLOCK
    if rows.shape[0] <= VECTORS:
        return rows * WIDTH
    return rows // VECTORS * (instances * (VECTORS * WIDTH)) + rows % VECTORS * WIDTH


@triton.jit
def settled(value):
    """`value`, computed here and now: compilers would put it off until after a wait and keep all that it is made of."""
    return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [value], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _operands(memory, lo, present, user, scratch, SIZE: tl.constexpr, COUNT: tl.constexpr, PACKETS: tl.constexpr):
    """Addresses of operand rows [lo, lo + present), at most COUNT and 0 for others, and a bit for each of packets."""
    rows, bases, source, out = memory
    addresses = ()
    packets = 0
    for index in tl.static_range(COUNT):
        row, here = rows + (lo * _OPERAND_ROW + index * _OPERAND_ROW), index < present
        base = tl.load(row, mask=here, other=0).to(tl.int32)
        kind = tl.load(row + 2, mask=here, other=0).to(tl.int32)
        begin = tl.load(bases + base, mask=here, other=0)
        begin = tl.where(base == _MY_INPUT, source, tl.where(base == _MY_OUTPUT, out, begin))
        offset = (tl.load(row + 1, mask=here, other=0) + tl.where(kind == _USER, user, scratch)) * SIZE
        if PACKETS:  # scratch of every kind takes twice the room
            offset = tl.where(kind == _USER, offset, 2 * offset)
            packets |= tl.where(here & (kind != _USER), 1 << index, 0)
        address = tl.where(here, begin + offset, 0)
        addresses = addresses + (address if PACKETS else settled(address),)
    return addresses, packets


@triton.jit
def decode(
    program, memory, tiling, at, present, iteration, parity,
    SIZE: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr, PACKETS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Piece `at` for one tile and one instance's part of it; of no elements if it is not `present`."""
    code, _, _, pieces, _, _, instances, instance = program
    tile, scratch_elements, slice_elements, _ = tiling
    row = code + (pieces + at * _PIECE_ROW)
    elements = tl.load(row, mask=present, other=0)
    source_lo = tl.load(row + 1, mask=present, other=0).to(tl.int32)
    source_count = tl.load(row + 2, mask=present, other=0).to(tl.int32) - source_lo
    store_lo = tl.load(row + 3, mask=present, other=0).to(tl.int32)
    store_count = tl.load(row + 4, mask=present, other=0).to(tl.int32) - store_lo
    start = iteration.to(tl.int64) * tile
    first, count = own_part(elements - start, tile, instances, instance, SIZE, LANES)
    block = tl.minimum(slice_elements, LANES * BLOCK * _VECTOR // SIZE)
    user, scratch = start + first, parity.to(tl.int64) * scratch_elements + instance * block
    sources, from_packets = _operands(memory, source_lo, source_count, user, scratch, SIZE, SOURCES, PACKETS)
    stores, to_packets = _operands(memory, store_lo, store_count, user, scratch, SIZE, STORES, PACKETS)
    piece = (sources, source_count, source_lo, stores, store_count, store_lo, user, scratch)
    return piece, count, from_packets, to_packets


@triton.jit
def reduced(total, value, OPERATION: tl.constexpr):
    if OPERATION == MAX:
        return tl.maximum(total, value)
    if OPERATION == MIN:
        return tl.minimum(total, value)
    return total + value


@triton.jit
def _block(
    memory, piece, begin, offsets, mask,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr,
    MANY: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """stores <- sum of sources for the masked elements at `offsets`, `begin` bytes into the piece.

    All loads of a group of sources are issued before any of them is needed. Sums are made in the order of the sources,
    in fp32 for 16-bit types, and rounded once. A store may be one of the sources: each element is read and written by
    the same thread, in that order. One source is copied, its bits as they are.
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
            values = values + (tl.load(pointer + offsets, mask=mask & (index < source_count)),)
        total = values[0].to(SUMMED)
        for index in tl.static_range(1, SOURCES):
            grown = reduced(total, values[index].to(SUMMED), OPERATION)
            total = tl.where(index < source_count, grown, total)
        if MANY:  # the addresses of further ones are found anew for every block
            for first in range(SOURCES, source_count, _FURTHER):
                others, _ = _operands(
                    memory, source_lo + first, source_count - first, user, scratch, SIZE, _FURTHER, False
                )
                for index in tl.static_range(_FURTHER):
                    pointer = tl.multiple_of((others[index] + begin).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
                    here = first + index < source_count
                    value = tl.load(pointer + offsets, mask=mask & here)
                    total = tl.where(here, reduced(total, value.to(SUMMED), OPERATION), total)
        result = tl.where(source_count > 1, total.to(ELEMENT), values[0])
    for index in tl.static_range(STORES):
        pointer = tl.multiple_of((stores[index] + begin).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
        tl.store(pointer + offsets, result, mask=mask & (index < store_count))
    if MANY:
        for first in range(STORES, store_count, _FURTHER):
            others, _ = _operands(memory, store_lo + first, store_count - first, user, scratch, SIZE, _FURTHER, False)
            for index in tl.static_range(_FURTHER):
                pointer = tl.multiple_of((others[index] + begin).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
                tl.store(pointer + offsets, result, mask=mask & (first + index < store_count))


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
        for first in range(source_count):
            others, _ = _operands(memory, source_lo + first, 1, user, scratch, SIZE, 1, False)
            found |= others[0]
        for first in range(store_count):
            others, _ = _operands(memory, store_lo + first, 1, user, scratch, SIZE, 1, False)
            found |= others[0]
    return found


@triton.jit
def move_piece(
    memory, piece, count, instances,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr, MANY: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """`count` elements of a decoded piece: 16 bytes an access where every address allows it."""
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    WIDTH: tl.constexpr = _VECTOR // SIZE
    GROUP: tl.constexpr = 1 if SOURCES == 1 else 2 if SOURCES == 2 else 4 if SOURCES <= 4 else 8
    ROWS: tl.constexpr = LANES * (_IN_FLIGHT // GROUP)
    done = count * 0
    if _low_bits(memory, piece, SIZE, SOURCES, STORES, MANY) % _VECTOR == 0:
        rows = tl.arange(0, ROWS)
        offsets = block_offsets(rows, instances, WIDTH, LANES)[:, None] + tl.arange(0, WIDTH)[None, :]
        vectors = (count // WIDTH).to(tl.int32)
        for first in range(0, vectors, ROWS):
            # A mask by rows is constant along a vector, so that it never splits one.
            mask = (rows < vectors - first)[:, None]
            begin = block_begin(first, instances, _VECTOR, LANES * BLOCK)
            _block(memory, piece, begin, offsets, mask, ELEMENT, OPERATION, SOURCES, STORES, MANY, _VECTOR)
        done = count // WIDTH * WIDTH
    # The rest: fewer elements than a vector, or all of them where addresses are not that even.
    ELEMENTS: tl.constexpr = LANES * (_NARROW // GROUP if GROUP < _NARROW else 1)
    ROUND: tl.constexpr = LANES * BLOCK * WIDTH
    lanes = tl.arange(0, ELEMENTS)
    for first in range(done, count, ELEMENTS):
        own = first + lanes
        offsets = own // ROUND * (instances * ROUND) + own % ROUND
        _block(memory, piece, 0, offsets, own < count, ELEMENT, OPERATION, SOURCES, STORES, MANY, SIZE)
