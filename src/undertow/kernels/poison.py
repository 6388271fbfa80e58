"""Filling the output of an aborted call with what no right result looks like."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit(do_not_specialize=["output", "count", "abort"])
def poison_kernel(output, count: tl.int64, abort, BLOCK: tl.constexpr):
    """Set `count` bytes of `output` to 0xFF if the int32 at `abort`, in mapped host memory, is not zero.

    All ones are a NaN in every floating type and -1 in every integer. The abort word is read relaxed, at system scope:
    whoever aborts stores it before releasing the waits that this launch stands behind, so the launch order covers it.

    One warp: every warp's read of the word crosses PCIe by itself, about 1 us each, and holds up copies meanwhile.
    """
    if tl.load(abort, volatile=True) != 0:
        offsets = tl.arange(0, BLOCK)
        ones = tl.full([BLOCK], -1, tl.int8)
        for start in range(0, count, BLOCK):
            tl.store(output + start + offsets, ones, mask=start + offsets < count)


def poison_if_aborted(output: torch.Tensor, abort: torch.Tensor) -> None:
    """Enqueue the kernel for contiguous `output`; `abort` is the pinned int32."""
    count = output.numel() * output.element_size()
    if count:
        poison_kernel[(1,)](output.view(-1).view(torch.int8), count, abort, _BLOCK, num_warps=1)
