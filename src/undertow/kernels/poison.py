"""Filling the output of an aborted call with what no right result looks like.

All ones are a NaN in every floating type and -1 in every integer. A call of several operations ends with a kernel that
looks at the abort word (`poison_if_aborted`). A call that is one kernel needs none: its CTAs know whether they failed,
and those that did poison the output themselves (`leave`).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

_BLOCK = 4096
_FILLED = tl.constexpr(_BLOCK)


@triton.jit
def fill(output, byte_count, BLOCK: tl.constexpr):
    """Poison, by the calling CTA."""
    offsets = tl.arange(0, BLOCK)
    ones = tl.full([BLOCK], -1, tl.int8)
    for start in range(0, byte_count, BLOCK):
        tl.store(output + start + offsets, ones, mask=start + offsets < byte_count)


@triton.jit
def fill_when_out(count, target, output, byte_count, deadline_ns, BLOCK: tl.constexpr):
    """Poison `output` (an address), by the calling CTA, when `count` has reached `target`, or `deadline_ns` later.

    Acquires, on this GPU, what those released who counted: no store of theirs comes after.
    """
    begin = globaltimer()
    waits = True
    while waits:
        seen = tl.atomic_add(count, 0, sem="acquire", scope="gpu")
        waits = (seen < target) & (globaltimer() - begin < deadline_ns)
    tl.debug_barrier()  # what one thread acquired is the CTA's only across a barrier
    fill(output.to(tl.pointer_type(tl.int8)), byte_count, BLOCK)


@triton.jit
def leave(finished, failed, output, byte_count, deadline_ns, BLOCK: tl.constexpr, RELEASED: tl.constexpr = False):
    """Count this CTA out of its call; one that `failed` poisons all of `output` (an address) once all are out.

    `finished` is an int64 in this rank's own memory to which every CTA of every call adds one, and nobody anything
    else, so that multiples of the grid tell calls apart, also where a graph of a group that failed is replayed.
    Counting releases, on this GPU, what the CTA has stored; whoever failed acquires it from all before it poisons, so
    no store of this rank comes after. It waits no longer than `deadline_ns`: a CTA that has not begun by then finds the
    call aborted and poisons, too.

    RELEASED: the CTA's first thread has released all that the CTA stored to `output` before, by a post after it; then
    the count need not do so again, and no store of the call is waited for once more. That is a property of GPUs, which
    release by a fence before the add, not of the PTX memory model, in which a release is its own word's only; and
    nothing but the poison of a failed call stands on it.
    """
    tl.debug_barrier()  # the release of one thread covers the stores of the others only across a barrier
    if failed == 0:
        if RELEASED:
            tl.atomic_add(finished, 1, sem="relaxed", scope="gpu")
        else:
            tl.atomic_add(finished, 1, sem="release", scope="gpu")
    else:
        ctas = tl.num_programs(0)
        target = (tl.atomic_add(finished, 1, sem="acq_rel", scope="gpu") // ctas + 1) * ctas
        fill_when_out(finished, target, output, byte_count, deadline_ns, BLOCK)


@triton.jit
def leave_grid(epochs, failed, out, count, deadline_ns):
    """`leave` for a kernel whose grid, which never changes, has an int32 in `epochs` for each CTA: the count of those
    that left is the int64 behind them. `out`: a pointer to `count` elements."""
    SIZE: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    finished = (epochs + (tl.num_programs(0) + 1) // 2 * 2).to(tl.pointer_type(tl.int64), bitcast=True)
    leave(finished, failed, out.to(tl.int64), count.to(tl.int64) * SIZE, deadline_ns, _FILLED)


@triton.jit(do_not_specialize=["output", "count", "abort"])
def poison_kernel(output, count: tl.int64, abort, BLOCK: tl.constexpr):
    """Set `count` bytes of `output` to 0xFF if the int32 at `abort`, in mapped host memory, is not zero.

    The abort word is read relaxed, at system scope: whoever aborts stores it before releasing the waits that this
    launch stands behind, so the launch order covers it.

    One warp: every warp's read of the word crosses PCIe by itself, about 1 us each, and holds up copies meanwhile.
    """
    if tl.load(abort, volatile=True) != 0:
        fill(output, count, BLOCK)


def poison_if_aborted(output: torch.Tensor, abort: torch.Tensor) -> None:
    """Enqueue the kernel for contiguous `output`; `abort` is the pinned int32."""
    count = output.numel() * output.element_size()
    if count:
        poison_kernel[(1,)](output.view(-1).view(torch.int8), count, abort, _BLOCK, num_warps=1)
