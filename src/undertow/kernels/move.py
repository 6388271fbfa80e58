"""Copies and sums over symmetric memory, in grids of a size that the caller gives.

The number of CTAs is the share of the GPU that a move may use. Each kernel is a persistent loop over blocks, so that
any size runs in any grid. Nothing here decides how many CTAs, which peer, or when.

`copy_and_signal` pushes bytes and sets or adds to a signal when all of them are there. `wait_and_copy` is the in-kernel
form for both ends of a channel with one slot, safe under graph replay because each end counts its own calls:

    sender    waits until `empty` reaches its epoch       copies into the slot      sets `full` to epoch + 1
    receiver  waits until `full` reaches its epoch + 1    copies out of the slot    sets `empty` to epoch + 1
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..errors import InvalidArgument
from .signals import (
    LAST,
    epoch_advance,
    epoch_read,
    last_to_finish,
    report_error,
    signal_add,
    signal_set,
    signal_wait,
)

_VECTOR = tl.constexpr(16)  # bytes of the widest access

# 32 KB in flight for each CTA: four 16-byte loads in each of 512 threads, enough to cover a peer's latency.
COPY_WARPS = 16
COPY_BLOCK = 2048
MOST_COPIES = 8  # of one launch
_COPIES = (1, 3, MOST_COPIES)  # variants of the kernel; three are what the others of four ranks need
SUM_WARPS = 8
SUM_BLOCK = 2048


@triton.jit
def _copy_range(
    destination, source, byte_count, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr = 0,
    PARTS: tl.constexpr = 1,
):  # fmt: skip
    """This program's part of a copy of `byte_count` (int64) bytes. Ordinary loads and stores; orders nothing.

    ALIGNMENT 16 or 4: the pointers are int32 and a block is BLOCK rows of four words, each row one 16-byte access or
    four 4-byte ones. ALIGNMENT 1: the pointers are int8 and a block is BLOCK bytes. PART of PARTS: which of several
    copies this is: each begins with another program, so that small ones do not all fall to the first.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    if PART > 0:
        program = (program + PART * programs // PARTS) % programs
    if ALIGNMENT >= 4:
        rows = tl.arange(0, BLOCK)
        offsets = rows[:, None] * 4 + tl.arange(0, 4)[None, :]
        vectors = byte_count // _VECTOR
        for block in range(program, tl.cdiv(vectors, BLOCK), programs):
            block_source = tl.multiple_of(source + block * (BLOCK * 4), ALIGNMENT)
            block_destination = tl.multiple_of(destination + block * (BLOCK * 4), ALIGNMENT)
            # A mask by rows is constant along a vector, so that it never splits one; what is left fits 32 bits.
            mask = (rows < tl.minimum(vectors - block * BLOCK, BLOCK).to(tl.int32))[:, None]
            tl.store(block_destination + offsets, tl.load(block_source + offsets, mask=mask), mask=mask)
        if program == programs - 1:  # the last bytes, fewer than a vector
            lanes = tl.arange(0, _VECTOR)
            rest = lanes < (byte_count - vectors * _VECTOR)
            source_bytes = source.to(tl.pointer_type(tl.int8), bitcast=True) + vectors * _VECTOR
            destination_bytes = destination.to(tl.pointer_type(tl.int8), bitcast=True) + vectors * _VECTOR
            tl.store(destination_bytes + lanes, tl.load(source_bytes + lanes, mask=rest), mask=rest)
    else:
        offsets = tl.arange(0, BLOCK)
        for block in range(program, tl.cdiv(byte_count, BLOCK), programs):
            mask = offsets < tl.minimum(byte_count - block * BLOCK, BLOCK).to(tl.int32)
            values = tl.load(source + block * BLOCK + offsets, mask=mask)
            tl.store(destination + block * BLOCK + offsets, values, mask=mask)


@triton.jit(do_not_specialize=["destination", "source", "byte_count"])
def copy_kernel(destination, source, byte_count: tl.int64, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy bytes. Ordered by the launch only: the end of the kernel publishes the copy."""
    _copy_range(destination, source, byte_count, ALIGNMENT, BLOCK)


@triton.jit(
    do_not_specialize=[f"{name}{one}" for name in ("destination", "source", "byte_count") for one in range(MOST_COPIES)]
)
def copies_kernel(
    destination0: tl.int64, destination1: tl.int64, destination2: tl.int64, destination3: tl.int64,
    destination4: tl.int64, destination5: tl.int64, destination6: tl.int64, destination7: tl.int64,
    source0: tl.int64, source1: tl.int64, source2: tl.int64, source3: tl.int64,
    source4: tl.int64, source5: tl.int64, source6: tl.int64, source7: tl.int64,
    byte_count0: tl.int64, byte_count1: tl.int64, byte_count2: tl.int64, byte_count3: tl.int64,
    byte_count4: tl.int64, byte_count5: tl.int64, byte_count6: tl.int64, byte_count7: tl.int64,
    COUNT: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first COUNT copies, none of which reads what another writes. Ordered by the launch only, as `copy_kernel`.

    Addresses are numbers: views of tensors with the right type would cost the host more than the launch.
    """
    destinations = (
        destination0, destination1, destination2, destination3, destination4, destination5, destination6, destination7,
    )  # fmt: skip
    sources = source0, source1, source2, source3, source4, source5, source6, source7
    byte_counts = (
        byte_count0, byte_count1, byte_count2, byte_count3, byte_count4, byte_count5, byte_count6, byte_count7,
    )  # fmt: skip
    WORD: tl.constexpr = tl.int32 if ALIGNMENT >= 4 else tl.int8
    for one in tl.static_range(COUNT):
        destination = destinations[one].to(tl.pointer_type(WORD))
        source = sources[one].to(tl.pointer_type(WORD))
        _copy_range(destination, source, byte_counts[one], ALIGNMENT, BLOCK, one, COUNT)


@triton.jit(do_not_specialize=["destination", "source", "byte_count", "ticket", "signal", "amount"])
def copy_and_signal_kernel(
    destination,
    source,
    byte_count: tl.int64,
    ticket,
    signal,
    amount: tl.int32,
    ADD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy bytes to a peer, then add `amount` to its signal, or set it.

    Each CTA: stores, barrier, acq_rel ticket at system scope. The last CTA thereby acquires what all others released,
    and its own release of the signal is cumulative: who acquires the signal sees every byte of the copy.
    """
    _copy_range(destination, source, byte_count, ALIGNMENT, BLOCK)
    if last_to_finish(ticket, 0) == LAST:
        if ADD:
            signal_add(signal, amount)
        else:
            signal_set(signal, amount)


@triton.jit(
    do_not_specialize=[
        *("destination", "source", "byte_count"),
        *("ready", "done", "epoch", "ticket", "abort", "error", "deadline_ns"),
    ]
)
def wait_and_copy_kernel(
    destination,
    source,
    byte_count: tl.int64,
    ready,
    done,
    epoch,
    ticket,
    abort,
    error,
    deadline_ns: tl.int64,
    AHEAD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Wait until `ready` reaches this call's number + AHEAD, copy, then set the peer's `done` to the number + 1.

    Each CTA acquires `ready` for itself (its writer released the bytes, or the room for them), copies, and takes a
    ticket. The last CTA's release of `done` is cumulative over all tickets: it covers the stores of the sender and the
    loads of the receiver. If any CTA was aborted or late, nothing is signalled, the epoch stays, and `error` holds the
    status.
    """
    number = epoch_read(epoch)
    status = signal_wait(ready, number + AHEAD, abort, deadline_ns)
    if status == 0:
        _copy_range(destination, source, byte_count, ALIGNMENT, BLOCK)
    else:
        report_error(error, status)
    if last_to_finish(ticket, status) == LAST:
        epoch_advance(epoch, number + 1)
        signal_set(done, number + 1)


@triton.jit
def _sum_block(output, parts, start, stride, mask, PARTS: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    element = output.dtype.element_ty
    accumulator = tl.int32 if element == tl.int32 else tl.float32
    total = tl.load(tl.multiple_of(parts + start, ALIGNMENT) + offsets, mask=mask).to(accumulator)
    for part in tl.static_range(1, PARTS):
        pointer = tl.multiple_of(parts + (start + part * stride), ALIGNMENT)
        total += tl.load(pointer + offsets, mask=mask).to(accumulator)
    tl.store(tl.multiple_of(output + start, ALIGNMENT) + offsets, total.to(element), mask=mask)


@triton.jit(do_not_specialize=["output", "parts", "count", "parts_stride"])
def sum_kernel(
    output,
    parts,
    count: tl.int64,
    parts_stride: tl.int64,
    PARTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`output[i]` = sum over `part` of `parts[part * parts_stride + i]`, for `count` elements.

    Always in the order of the parts, in float32 (int32 for int32), rounded once, so that every rank gets the same bits.
    ALIGNMENT is the number of bytes to which the output and every part are aligned. Ordered by the launch only.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    full = count // BLOCK
    for block in range(program, full, programs):
        _sum_block(output, parts, block * BLOCK, parts_stride, None, PARTS, ALIGNMENT, BLOCK)
    if program == programs - 1:
        mask = tl.arange(0, BLOCK) < (count - full * BLOCK).to(tl.int32)
        _sum_block(output, parts, full * BLOCK, parts_stride, mask, PARTS, ALIGNMENT, BLOCK)


def _alignment(*addresses: int) -> int:
    """The widest access that every address allows: 16, 4 or 1 bytes."""
    return next(width for width in (16, 4, 1) if all(address % width == 0 for address in addresses))


def _views(destination: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Both ends with the pointer type of `_copy_range`, the number of bytes, and the alignment that chose the type.

    The kernels leave all alignment to this choice and specialise nothing by value, so that ranks never compile a
    different variant of the same call.
    """
    for name, tensor in (("destination", destination), ("source", source)):
        if not tensor.is_contiguous():
            raise InvalidArgument(argument=name, was=f"strided {tuple(tensor.stride())}", must="contiguous")
    size = source.numel() * source.element_size()
    if destination.numel() * destination.element_size() != size:
        was = f"{destination.numel() * destination.element_size()} bytes"
        raise InvalidArgument(argument="destination", was=was, must=f"{size} bytes, as the source")
    alignment = _alignment(destination.data_ptr(), source.data_ptr()) if size >= _VECTOR.value else 1
    ends = [tensor.view(-1).view(torch.uint8) for tensor in (destination, source)]
    words = size // 4 * 4
    ends = [end[:words].view(torch.int32) if alignment >= 4 else end.view(torch.int8) for end in ends]
    return ends[0], ends[1], size, alignment


def _grid(units: int, block: int, ctas: int) -> tuple[int]:
    """At most `ctas` programs, and none without a block to work on."""
    if not 1 <= ctas < 1 << 16:
        raise InvalidArgument(argument="ctas", was=ctas, must="between 1 and 65535")
    return (max(1, min(ctas, -(-units // block))),)


def _copy_grid(size: int, alignment: int, ctas: int) -> tuple[int]:
    return _grid(size, COPY_BLOCK * (_VECTOR.value if alignment >= 4 else 1), ctas)


def copy(destination: torch.Tensor, source: torch.Tensor, ctas: int) -> None:
    """Copy the bytes of `source` to `destination` (either may be a peer's) with at most `ctas` CTAs."""
    to, by, size, alignment = _views(destination, source)
    copy_kernel[_copy_grid(size, alignment, ctas)](to, by, size, alignment, COPY_BLOCK, num_warps=COPY_WARPS)


def copy_all(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], ctas: int) -> None:
    """Copy the bytes of several contiguous (destination, source), with at most `ctas` CTAs.

    No copy may read what another writes, nor two write the same.
    """
    for to, by in copies:
        if to.nbytes != by.nbytes:
            raise InvalidArgument(argument="destination", was=f"{to.nbytes} bytes", must=f"{by.nbytes}, as the source")
        if not (to.is_contiguous() and by.is_contiguous()):
            raise InvalidArgument(argument="destination or source", was="strided", must="contiguous")
    every = [(to.data_ptr(), by.data_ptr(), by.nbytes) for to, by in copies if by.nbytes]
    for first in range(0, len(every), MOST_COPIES):
        some = every[first : first + MOST_COPIES]
        least = min(size for _, _, size in some)
        alignment = _alignment(*(address for one in some for address in one[:2])) if least >= _VECTOR.value else 1
        count = next(count for count in _COPIES if count >= len(some))
        some += [(some[0][0], some[0][1], 0)] * (MOST_COPIES - len(some))  # of no byte
        to_all, from_all, sizes = zip(*some, strict=True)
        copies_kernel[_copy_grid(sum(sizes), alignment, ctas)](
            *to_all, *from_all, *sizes, COUNT=count, ALIGNMENT=alignment, BLOCK=COPY_BLOCK, num_warps=COPY_WARPS
        )


def copy_and_signal(
    destination: torch.Tensor,
    source: torch.Tensor,
    ctas: int,
    *,
    ticket: torch.Tensor,
    signal: torch.Tensor,
    amount: int,
    add: bool,
) -> None:
    """Copy, then add `amount` to the int32 `signal` (or set it) in one release at system scope.

    `ticket` is an int32 zero in this rank's own device memory, used by one call at a time and zero again afterwards.
    """
    to, by, size, alignment = _views(destination, source)
    copy_and_signal_kernel[_copy_grid(size, alignment, ctas)](
        to, by, size, ticket, signal, amount, add, alignment, COPY_BLOCK, num_warps=COPY_WARPS
    )


def wait_and_copy(
    destination: torch.Tensor,
    source: torch.Tensor,
    ctas: int,
    *,
    ready: torch.Tensor,
    done: torch.Tensor,
    epoch: torch.Tensor,
    ticket: torch.Tensor,
    abort: torch.Tensor,
    error: torch.Tensor,
    deadline_ns: int,
    ahead: int,
) -> None:
    """One end of a one-slot channel: `ahead` is 0 for the sender, 1 for the receiver (see the module's text).

    All words are int32: `ready`, `epoch` and `ticket` in this rank's device memory, `done` in the peer's, `abort` and
    `error` in pinned host memory. Every CTA waits on its SM, so `ctas` must leave room for what it waits for.
    """
    to, by, size, alignment = _views(destination, source)
    wait_and_copy_kernel[_copy_grid(size, alignment, ctas)](
        to,
        by,
        size,
        ready,
        done,
        epoch,
        ticket,
        abort,
        error,
        deadline_ns,
        ahead,
        alignment,
        COPY_BLOCK,
        num_warps=COPY_WARPS,
    )


def warm_up(device: torch.device) -> None:
    """Load every variant of `copy_all`: loading synchronises, and would hang behind a waiting stream."""
    room = torch.zeros(128 * (MOST_COPIES + 1), dtype=torch.uint8, device=device)
    with torch.cuda.device(device):  # a thread that never chose a device starts on the first
        for alignment in (16, 4, 1):
            copies = [(room[128 * one :][:33], room[alignment:][:33]) for one in range(1, MOST_COPIES + 1)]
            for count in _COPIES:
                copy_all(copies[:count], 1)
    torch.cuda.synchronize(device)


def sum_parts(output: torch.Tensor, parts: torch.Tensor, ctas: int) -> None:
    """`output` = `parts.sum(0)` in rank order, with at most `ctas` CTAs; float16, bfloat16, float32 or int32.

    `parts` is [R, *output.shape]; each part is contiguous, the distance between parts is free.
    """
    if output.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.int32):
        raise InvalidArgument(argument="output", was=output.dtype, must="float16, bfloat16, float32 or int32")
    if parts.dtype != output.dtype or parts.shape[1:] != output.shape or parts.shape[0] == 0:
        was = f"{parts.dtype} {tuple(parts.shape)}"
        raise InvalidArgument(argument="parts", was=was, must=f"{output.dtype} [ranks, *{tuple(output.shape)}]")
    if not (output.is_contiguous() and parts[0].is_contiguous()):
        raise InvalidArgument(argument="parts or output", was="strided within a part", must="contiguous")
    count, stride = output.numel(), parts.stride(0)
    alignment = _alignment(output.data_ptr(), parts.data_ptr(), stride * parts.element_size())
    sum_kernel[_grid(count, SUM_BLOCK, ctas)](
        output,
        parts,
        count,
        stride,
        parts.shape[0],
        16 if alignment == 16 else output.element_size(),
        SUM_BLOCK,
        num_warps=SUM_WARPS,
    )
