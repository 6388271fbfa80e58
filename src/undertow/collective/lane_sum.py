"""out = the sum (or maximum, minimum) of some tensors that lie anywhere: the arithmetic between two messages.

In the order of the parts, 16-bit numbers in fp32 and rounded once, on both devices. On CUDA a few CTAs make the sums,
so that they take little from whoever computes; maxima and minima, and types that the kernel does not know, by torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

CTAS = 16
_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip
OPERATIONS = tuple(_TORCH)
_HALVES = (torch.float16, torch.bfloat16)
_ACCUMULATE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_KERNEL_TYPES = (*_HALVES, torch.float32, torch.int32)


class Sum:
    """`out` may be one of the parts, as a whole. "avg" is a sum: who asked for it divides."""

    def __init__(self, device: torch.device, ctas: int) -> None:
        self._device, self._ctas = device, ctas
        self._on_device = device.type == "cuda"
        self._warm: set[tuple[object, ...]] = set()

    def __call__(self, out: torch.Tensor, parts: list[torch.Tensor], operation: str) -> None:
        if len(parts) == 1:
            if out.data_ptr() != parts[0].data_ptr():
                out.copy_(parts[0])
            return
        adds = operation in ("sum", "avg")
        if self._on_device and adds and out.dtype in _KERNEL_TYPES and self._by_kernel(out, parts):
            return
        # Going through `out` would round 16-bit sums more than once, or lose a part that lies there.
        aside = len(parts) > 2 and any(one.data_ptr() == out.data_ptr() for one in parts[2:])
        if adds and (aside or (len(parts) > 2 and out.dtype in _HALVES)):
            ordered_sum(out, parts)
            return
        two = _TORCH[operation]
        total = torch.empty_like(out) if aside else out
        two(parts[0], parts[1], out=total)
        for part in parts[2:]:
            two(total, part, out=total)
        if aside:
            out.copy_(total)

    def warm_up(self, dtype: torch.dtype, sizes: Iterable[int], operation: str) -> None:
        """Load what sums of so many parts need: a kernel loaded behind a stream that waits for a message would hang."""
        if not self._on_device or torch.cuda.is_current_stream_capturing():
            return
        for count in sizes:
            key = (dtype, count, operation)
            if count == 1 or key in self._warm:
                continue
            self._warm.add(key)
            room = torch.zeros(32 * (count + 1) * (count + 2), dtype=dtype, device=self._device)
            for power, shift in itertools.product((1, 2), (0, 1)):  # equally far apart or not, aligned or not
                parts = [room[32 * (one + 1) ** power + shift :][:16] for one in range(count)]
                self(room[:16], parts, operation)
                self(parts[-1], parts, operation)

    def _by_kernel(self, out: torch.Tensor, parts: list[torch.Tensor]) -> bool:
        """All at once where parts are few or lie equally far apart; else two by two, where that rounds nothing."""
        from ..kernels import combine

        addresses = [one.data_ptr() for one in parts]
        if len({after - before for before, after in itertools.pairwise(addresses)}) == 1:
            self._launch(out, parts)
            return True
        if len(parts) <= combine.MOST_PARTS:
            self._combine(out, parts)
            return True
        if out.dtype in _HALVES or out.data_ptr() in addresses[2:]:
            return False
        self._launch(out, parts[:2])
        for part in parts[2:]:
            self._launch(out, [out, part])
        return True

    def _launch(self, out: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """As `move.sum_parts`, for parts of several tensors: the distance between those is a number like any other."""
        from ..kernels import move

        size = out.element_size()
        distance = parts[1].data_ptr() - parts[0].data_ptr()
        aligned = all(address % 16 == 0 for address in (out.data_ptr(), parts[0].data_ptr(), distance))
        blocks = -(-out.numel() // move.SUM_BLOCK)
        kernel: Any = move.sum_kernel
        kernel[(max(1, min(self._ctas, blocks)),)](
            out, parts[0], out.numel(), distance // size, len(parts), 16 if aligned else size, move.SUM_BLOCK,
            num_warps=move.SUM_WARPS,
        )  # fmt: skip

    def _combine(self, out: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Parts that lie anywhere."""
        from ..kernels import combine

        aligned = all(one.data_ptr() % 16 == 0 for one in (out, *parts))
        padded = [*parts, *[parts[0]] * (combine.MOST_PARTS - len(parts))]
        blocks = -(-out.numel() // combine.BLOCK)
        kernel: Any = combine.combine_kernel
        kernel[(max(1, min(self._ctas, blocks)),)](
            out, *padded, out, out.numel(), 0, 1, PARTS=len(parts), BIAS=False, ACTIVATION=combine.NONE,
            ALIGNED=aligned, BLOCK=combine.BLOCK, num_warps=combine.WARPS,
        )  # fmt: skip


def ordered_sum(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """out = parts[0] + parts[1] + ..., in that order on every rank; 16-bit types in fp32. `out` may be a part."""
    total = parts[0].to(_ACCUMULATE.get(out.dtype, out.dtype), copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)
