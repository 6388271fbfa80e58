"""The kernel of straight-line schedules (`collective/straight.py`): a few phases, unrolled; nothing is interpreted.

CTA p reads row p of a table of addresses; it is instance `p % instances` of its worker. As in `interpret`, CTAs meet in
semaphores only, all of them must be able to run at the same time, and nothing that changes from call to call is an
argument.

    read the epoch -> post "start" -> phases, once an iteration: wait, move, post -> wait for "end" -> advance the epoch

Memory ordering is that of `interpret`: a wait acquires and a post releases at system scope, one thread for each
semaphore, with a CTA barrier between these threads and all others on either side. The words of a phase are loaded
before its wait, all at once, while the posts of others are still on their way.
"""

# Triton has no starred tuples, and grows tuples whose types mypy would fix at their first length.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..collective import straight
from .interpret import FAILED, poll
from .packets import move_words
from .pieces import BLOCK, block_begin, block_offsets, own_part, reduced, settled
from .poison import leave
from .signals import ABORTED, ARRIVED, LATE, report_error

_OWN_INPUT, _OWN_OUTPUT = tl.constexpr(straight.OWN_INPUT), tl.constexpr(straight.OWN_OUTPUT)
_IN_SCRATCH, _IN_PACKETS = tl.constexpr(straight.IN_SCRATCH), tl.constexpr(straight.IN_PACKETS)
_ADDRESS = tl.constexpr(straight.OWN_INPUT - 1)
_VECTOR = tl.constexpr(16)  # bytes of the widest access
_NARROW = tl.constexpr(4)  # the same where they cannot be wide


@triton.jit
def _entries(row, AT: tl.constexpr, WAITS: tl.constexpr, LANES: tl.constexpr):
    """Wait entries of a row, a lane each: addresses (0: none), constants, posts an iteration, posts a call."""
    lanes = tl.arange(0, LANES)
    here = lanes < WAITS
    first = row + AT + lanes
    return (
        tl.load(first, mask=here, other=0), tl.load(first + WAITS, mask=here, other=0),
        tl.load(first + 2 * WAITS, mask=here, other=0), tl.load(first + 3 * WAITS, mask=here, other=0),
    )  # fmt: skip


@triton.jit
def _wait(entries, past, iteration, watch):
    """All waits at once, a thread each. Acquires, at system scope, what their posters released; the barrier gives it
    to every thread of the CTA. Returns the status: unless it is ARRIVED, nothing may be read."""
    addresses, constants, each_iteration, each_call = entries
    abort, _, deadline_ns = watch
    targets = (each_iteration * (past[0] + iteration) + each_call * past[1] + constants).to(tl.int32)  # modulo 2^32
    found = poll(addresses.to(tl.pointer_type(tl.int32)), targets, addresses != 0, abort, deadline_ns)
    tl.debug_barrier()  # what one thread acquired is the CTA's only across a barrier
    return tl.max(found, axis=0)


@triton.jit
def _post(addresses):
    """Post to every address that is not 0, a thread each. Releases, at system scope, everything this CTA has stored
    (and what it has itself acquired)."""
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    tl.atomic_add(addresses.to(tl.pointer_type(tl.int32)), 1, mask=addresses != 0, sem="release", scope="sys")


@triton.jit
def _operand(word, source, out, user, scratch):
    """The address that a word stands for. `user`, `scratch`: bytes to the instance's part, in either memory."""
    own = tl.where(word & _OWN_INPUT != 0, source, tl.where(word & _OWN_OUTPUT != 0, out, 0))
    return (word & _ADDRESS) + own + tl.where(word & _IN_SCRATCH != 0, scratch, user)


@triton.jit
def _words(at, COUNT: tl.constexpr):
    words = ()
    for index in tl.static_range(COUNT):
        words = words + (tl.load(at + index),)
    return words


@triton.jit
def _piece(
    words, cut, buffers, iteration, parity, SOURCES: tl.constexpr, STORES: tl.constexpr, SIZE: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Elements of this instance's part of the piece of these words, in one iteration (-1: there is no such piece),
    addresses of its sources and stores, and a bit for each of those that is packets."""
    tile, scratch_bytes, slice_bytes, instances, instance = cut
    source, out = buffers
    elements = words[0]
    start = iteration * tile
    first, count = own_part(elements - start, tile, instances, instance, SIZE, LANES)
    user, scratch = (start + first) * SIZE, parity * scratch_bytes + instance * slice_bytes
    operands = ()
    bits = 0
    for index in tl.static_range(SOURCES + STORES):
        operands = operands + (settled(_operand(words[1 + index], source, out, user, scratch)),)
        bits |= tl.where(words[1 + index] & _IN_PACKETS != 0, 1 << index, 0)
    return tl.where(elements < 0, -1, count), operands, bits


@triton.jit
def _block(
    operands, begin, place, masks,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, PIECES: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """stores <- sum of sources for each piece, its masked elements at `place`, `begin` bytes on.

    The loads of all sources of all pieces are issued before any of them is needed. Sums are made in the order of the
    sources, in fp32 for 16-bit types, and rounded once. A store may be one of the sources of its piece: each element is
    read and written by the same thread, in that order.
    """
    EACH: tl.constexpr = SOURCES + STORES
    half: tl.constexpr = ELEMENT.is_floating() and ELEMENT.primitive_bitwidth == 16
    SUMMED: tl.constexpr = tl.float32 if half else ELEMENT
    values = ()
    for piece in tl.static_range(PIECES):
        for index in tl.static_range(SOURCES):
            pointer = (operands[piece * EACH + index] + begin).to(tl.pointer_type(ELEMENT))
            pointer = tl.multiple_of(pointer, ALIGNMENT) + place
            values = values + (tl.load(pointer, mask=masks[piece]),)
    for piece in tl.static_range(PIECES):
        result = values[piece * SOURCES]
        if SOURCES > 1:
            total = result.to(SUMMED)
            for index in tl.static_range(1, SOURCES):
                total = reduced(total, values[piece * SOURCES + index].to(SUMMED), OPERATION)
            result = total.to(ELEMENT)
        for index in tl.static_range(STORES):
            pointer = (operands[piece * EACH + SOURCES + index] + begin).to(tl.pointer_type(ELEMENT))
            tl.store(tl.multiple_of(pointer, ALIGNMENT) + place, result, mask=masks[piece])


@triton.jit
def _move_vectors(
    counts, operands, instances,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, PIECES: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr,
    IN_FLIGHT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """All whole vectors of all pieces of a phase together, IN_FLIGHT wide loads of each thread under way if pieces and
    sources are no more."""
    WIDTH: tl.constexpr = _VECTOR // (ELEMENT.primitive_bitwidth // 8)
    LOADS: tl.constexpr = PIECES * SOURCES
    GROUP: tl.constexpr = 1 if LOADS == 1 else 2 if LOADS == 2 else 4 if LOADS <= 4 else 8 if LOADS <= 8 else 16
    ROWS: tl.constexpr = LANES * (IN_FLIGHT // GROUP if IN_FLIGHT > GROUP else 1)
    most = counts[0]
    for piece in tl.static_range(1, PIECES):
        most = tl.maximum(most, counts[piece])
    rows = tl.arange(0, ROWS)
    place = block_offsets(rows, instances, WIDTH, LANES)[:, None] + tl.arange(0, WIDTH)[None, :]
    for first in range(0, (most // WIDTH).to(tl.int32), ROWS):
        masks = ()
        for piece in tl.static_range(PIECES):
            # A mask by rows is constant along a vector, so that it never splits one.
            masks = masks + ((rows < (counts[piece] // WIDTH).to(tl.int32) - first)[:, None],)
        begin = block_begin(first, instances, _VECTOR, LANES * BLOCK)
        _block(operands, begin, place, masks, ELEMENT, OPERATION, PIECES, SOURCES, STORES, _VECTOR)


@triton.jit
def _move_elements(
    done, count, operands, instances,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The elements of one piece from `done` on: fewer than a vector, or all where addresses are not that even."""
    ROUND: tl.constexpr = LANES * BLOCK * (_VECTOR // (ELEMENT.primitive_bitwidth // 8))
    ELEMENTS: tl.constexpr = LANES * (_NARROW // SOURCES if SOURCES == 1 or SOURCES == 2 else 1)
    lanes = tl.arange(0, ELEMENTS)
    for first in range(done, count, ELEMENTS):
        own = first + lanes
        place = own // ROUND * (instances * ROUND) + own % ROUND
        size: tl.constexpr = ELEMENT.primitive_bitwidth // 8
        _block(operands, 0, place, (own < count,), ELEMENT, OPERATION, 1, SOURCES, STORES, size)


@triton.jit
def _phase(
    row, held, cut, buffers, watch, past, iteration, parity, AT: tl.constexpr, WAITS: tl.constexpr, POSTS: tl.constexpr,
    PIECES: tl.constexpr, SOURCES: tl.constexpr, STORES: tl.constexpr, ELEMENT: tl.constexpr, OPERATION: tl.constexpr,
    PACKETS: tl.constexpr, IN_FLIGHT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One phase of one iteration: load, wait, move, post. `held`: the words of its piece, if they were loaded before.
    Returns the status of the wait."""
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    RAW: tl.constexpr = tl.int8 if SIZE == 1 else tl.int16 if SIZE == 2 else tl.int32 if SIZE == 4 else tl.int64
    TYPE: tl.constexpr = RAW if SOURCES == 1 else ELEMENT  # a copy moves bits, whatever they mean
    WIDTH: tl.constexpr = _VECTOR // SIZE
    EACH: tl.constexpr = 1 + SOURCES + STORES
    lanes = tl.arange(0, LANES)
    instances = cut[3]
    entries = _entries(row, AT, WAITS, LANES)
    posts = tl.load(row + AT + 4 * WAITS + lanes, mask=lanes < POSTS, other=0)
    pieces = row + AT + 4 * WAITS + POSTS
    counts = ()
    operands = ()
    even, rest = 0, 0
    if not PACKETS:
        for piece in tl.static_range(PIECES):
            words = _words(pieces + piece * EACH, EACH)
            count, addresses, _ = _piece(words, cut, buffers, iteration, parity, SOURCES, STORES, SIZE, LANES)
            counts, operands = counts + (count,), operands + addresses
            for index in tl.static_range(SOURCES + STORES):
                even |= addresses[index]
            rest |= tl.maximum(count, 0)
    # Not before the loads above: the epoch may still be on its way. Where one failed the abort word is set, so that the
    # wait ends soon.
    status = tl.where(past[1] == FAILED, ABORTED, ARRIVED)
    if WAITS > 0:
        status = tl.maximum(status, _wait(entries, past, iteration, watch))
    if status == ARRIVED:
        if PACKETS:
            flag = (past[0] + iteration + 1).to(tl.int32)
            for turn in range(PIECES):
                words = held
                if len(held) == 0:
                    words = _words(pieces + turn * EACH, EACH)
                count, addresses, packets = _piece(words, cut, buffers, iteration, parity, SOURCES, STORES, SIZE, LANES)
                if (count >= 0) & (status == ARRIVED):
                    sources, stores = _parted(addresses, SOURCES, STORES)
                    status = move_words(
                        sources, stores, SOURCES, STORES, packets, packets >> SOURCES, count, instances, flag, watch,
                        TYPE, OPERATION, SOURCES, STORES, LANES,
                    )  # fmt: skip
        else:
            if even % _VECTOR == 0:
                _move_vectors(counts, operands, instances, TYPE, OPERATION, PIECES, SOURCES, STORES, IN_FLIGHT, LANES)
            if (even % _VECTOR != 0) | (rest % WIDTH != 0):
                for turn in range(PIECES):  # rare and short: decoded anew instead of unrolled
                    words = _words(pieces + turn * EACH, EACH)
                    left, places, _ = _piece(words, cut, buffers, iteration, parity, SOURCES, STORES, SIZE, LANES)
                    done = tl.where(even % _VECTOR == 0, left // WIDTH * WIDTH, 0)
                    _move_elements(done, left, places, instances, TYPE, OPERATION, SOURCES, STORES, LANES)
        if POSTS > 0:
            if status == ARRIVED:  # packets may not have come
                _post(posts)
        else:
            tl.debug_barrier()  # the next phase may read, in other threads, what this one has stored
    return status


@triton.jit
def _parted(operands, SOURCES: tl.constexpr, STORES: tl.constexpr):
    """Sources and stores of a piece."""
    sources = ()
    stores = ()
    for index in tl.static_range(SOURCES):
        sources = sources + (operands[index],)
    for index in tl.static_range(STORES):
        stores = stores + (operands[SOURCES + index],)
    return sources, stores


_ARGUMENTS = [
    *("rows", "epochs", "finished", "source", "out", "out_bytes", "iterations", "width", "tile", "scratch_bytes"),
    *("slice_bytes", "depth", "instances", "abort", "error", "deadline_ns"),
]


@triton.jit(do_not_specialize=_ARGUMENTS, do_not_specialize_on_alignment=_ARGUMENTS)
def straight_kernel(
    rows, epochs, finished, source: tl.int64, out: tl.int64, out_bytes: tl.int64, iterations: tl.int32, width: tl.int32,
    tile: tl.int64, scratch_bytes: tl.int64, slice_bytes: tl.int64, depth: tl.int32, instances: tl.int32, abort, error,
    deadline_ns: tl.int64,
    ELEMENT: tl.constexpr, OPERATION: tl.constexpr, STARTS: tl.constexpr, ENDS: tl.constexpr, PHASES: tl.constexpr,
    PACKETS: tl.constexpr, IN_FLIGHT: tl.constexpr, RELEASED: tl.constexpr, EARLY: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One call. `rows`: `width` words for each CTA. `epochs`: (iterations, calls) before this one, for each CTA; calls
    are FAILED for good where one failed.

    `source`, `out`: addresses of the caller's own tensors; `finished`, `out_bytes`: see `poison.leave`. `tile`:
    elements of a chunk that an iteration moves. `scratch_bytes`: of one of the `depth` copies of scratch;
    `slice_bytes`: from one instance's first block to the next one's. ELEMENT is the type of the sums, an integer type
    where nothing is summed. STARTS posts and ENDS waits bracket a call. PHASES: for each its first word in a row, then
    waits, posts, pieces, sources and stores of a piece. RELEASED: every CTA posts in the last phase.

    EARLY (sm_90 and later, launched to match): the next call on the stream is launched once no CTA of this one waits
    for anybody, and reads its row, which never changes, until this one has ended. Not before: a call that still waits
    for others must not take their room on the GPU with one that waits for it.
    """
    number = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    row = rows + number * width
    ends = _entries(row, STARTS, ENDS, LANES)
    starts = tl.load(row + lanes, mask=lanes < STARTS, other=0)
    held = ()
    for phase in tl.static_range(len(PHASES)):
        # Few and needed at once, if packets are all that is waited for; elsewhere a wait covers the loads.
        words = ()
        if PACKETS and PHASES[phase][3] == 1:
            first = row + (PHASES[phase][0] + 4 * PHASES[phase][1] + PHASES[phase][2])
            words = _words(first, 1 + PHASES[phase][4] + PHASES[phase][5])
        held = held + (words,)
    if EARLY:
        gdc_wait()
    # Ordered by the launch: the CTA of this number stored them in the call before.
    past = (tl.load(epochs + 2 * number), tl.load(epochs + 2 * number + 1))
    watch = (abort, error, deadline_ns)
    cut = (tile, scratch_bytes, slice_bytes, instances, number % instances)
    if STARTS > 0:
        _post(starts)
    status = 0
    iteration = 0
    while (iteration < iterations) & (status == ARRIVED):
        parity = (past[0] % depth).to(tl.int32)
        parity = (parity + iteration) % depth
        for phase in tl.static_range(len(PHASES)):
            if status == ARRIVED:
                status = _phase(
                    row, held[phase], cut, (source, out), watch, past, iteration, parity, PHASES[phase][0],
                    PHASES[phase][1], PHASES[phase][2], PHASES[phase][3], PHASES[phase][4], PHASES[phase][5],
                    ELEMENT, OPERATION, PACKETS, IN_FLIGHT, LANES,
                )  # fmt: skip
        iteration += 1
    if ENDS > 0:
        if status == ARRIVED:
            status = _wait(ends, past, iterations - 1, watch)
    if EARLY:
        gdc_launch_dependents()
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
    leave(finished, status, out, out_bytes, deadline_ns, LANES, RELEASED)
