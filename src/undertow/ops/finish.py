"""What is done to a reduced sum before the user sees it: y = activation(sum of parts + bias), and unpacking.

    reference:  total = parts[0] + parts[1] + ...           in this order, 16-bit types in fp32
                y = activation(total + bias)                 rounded once

Bias and activation belong to the reduced sum, never to a rank's partial product. On CUDA a bounded number of CTAs does
it; on CPU torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..fabric import timeline
from .norm import After, unpack
from .operands import check_dense

if TYPE_CHECKING:
    from ..plan.plan import Plan

ACTIVATIONS = ("none", "relu", "gelu", "silu")
FUNCTIONS = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
_HALVES = (torch.float16, torch.bfloat16)
_CTAS = 16
_BLOCK = 32 << 10  # elements that are summed and finished at a time on a CPU
_loaded: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class Finish:
    """`bias` [N] or None, `activation` one of ACTIVATIONS; `ctas`: what a kernel may take beside a matmul.

    `after`: what follows needs whole rows, so all of it, bias and activation too, is done in the end.
    """

    bias: torch.Tensor | None
    activation: str
    ctas: int = _CTAS
    after: After | None = None

    @staticmethod
    def of(bias: torch.Tensor | None, activation: str, plan: Plan, after: After | None = None) -> Finish:
        """With the CTAs that the plan leaves to communication while a matmul runs."""
        beside = plan.grain == "signaled" and plan.share.communication_ctas is not None
        return Finish(bias, activation, plan.share.communication_ctas or _CTAS if beside else _CTAS, after)

    @property
    def nothing(self) -> bool:
        return self.bias is None and self.activation == "none" and self.after is None

    def sum(self, out: torch.Tensor, parts: Sequence[torch.Tensor], first: int = 0, finish: bool = True) -> None:
        """out = the sum of flat `parts`, finished unless told otherwise; `out[0]` is element `first` of the matrix."""
        bias = self.bias if finish else None
        activation = self.activation if finish else "none"
        if out.numel() == 0 or (len(parts) == 1 and out is parts[0] and bias is None and activation == "none"):
            return
        with timeline.event("sum", engine="communication", bytes=out.nbytes):
            if out.device.type == "cuda":
                _sum_on_gpu(out, parts, bias, activation, first, self.ctas)
            else:
                _sum_on_cpu(out, parts, bias, activation, first)

    def load(self, like: torch.Tensor, parts: int, finish: bool = True) -> None:
        """Have the kernel for sums of so many parts loaded: behind a waiting stream, loading might wait for it."""
        if like.numel() == 0:
            return
        key = (like.dtype, like.device, parts, finish and self.bias is not None, finish and self.activation)
        if like.device.type != "cuda" or key in _loaded or torch.cuda.is_current_stream_capturing():
            return
        small = torch.zeros(64 * (parts + 1), dtype=like.dtype, device=like.device)
        for shift in (0, 1):  # aligned to 16 bytes, and not
            places = [small[64 * one + shift :][:16] for one in range(parts + 1)]
            self.sum(places[0], places[1:], 0, finish)
        _loaded.add(key)

    def unpack(
        self,
        y: torch.Tensor,
        buffer: torch.Tensor,
        table: NDArray[np.int64] | torch.Tensor,
        tile: tuple[int, int] | None = None,
    ) -> None:
        """y [rows, N] from a flat buffer packed in tiles, finished. On CUDA the table is a tensor on the device."""
        if self.after is not None:
            self.after.finish(y, buffer, table, tile, self.bias, self.activation)
        elif isinstance(table, torch.Tensor):
            _unpack_on_gpu(y, buffer, table, self.bias, self.activation)
        else:
            unpack(y, buffer, table)
            self.apply(y)

    def apply(self, y: torch.Tensor) -> None:
        """In place, to a whole contiguous matrix."""
        if self.after is not None:
            self.after.finish(y, y.view(-1), None, None, self.bias, self.activation)
        elif not self.nothing:
            self.sum(y.view(-1), [y.view(-1)])

    def follows(self, y: torch.Tensor) -> bool:
        """Whether it may be done to sums that are rounded already: 16-bit ones are rounded once."""
        return self.nothing or self.after is not None or y.dtype not in _HALVES

    def take(self, y: torch.Tensor, result: torch.Tensor) -> None:
        """y [M, N] = the flat `result`, finished."""
        if self.after is not None:
            self.after.finish(y, result, None, None, self.bias, self.activation)
        elif self.nothing:
            y.view(-1).copy_(result)
        else:
            self.sum(y.view(-1), [result])


def check_finish(
    bias: torch.Tensor | None, activation: str, columns: int, like: torch.Tensor, experts: int | None = None
) -> None:
    """`experts`: where each has a weight, and so a bias, of its own."""
    wanted = (columns,) if experts is None else (experts, columns)
    if activation not in ACTIVATIONS:
        raise InvalidArgument(argument="activation", was=repr(activation), must=f"one of {', '.join(ACTIVATIONS)}")
    if bias is None:
        return
    check_dense("bias", bias)
    if tuple(bias.shape) != wanted or bias.dtype != like.dtype or bias.device != like.device:
        was = f"{list(bias.shape)} {bias.dtype} on {bias.device}"
        raise InvalidArgument(argument="bias", was=was, must=f"{list(wanted)} {like.dtype} on {like.device}")


def finish_text(bias: torch.Tensor | None, activation: str) -> str:
    """What ranks must agree on, for comparing calls; nothing where nothing is done."""
    return f"{', bias' if bias is not None else ''}{'' if activation == 'none' else f', {activation}'}"


def _sum_on_cpu(
    out: torch.Tensor, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, activation: str, first: int
) -> None:
    """In place, or a block at a time: the core that sums also computes, and what leaves its cache costs it twice."""
    if len(parts) == 2 and bias is None and activation == "none":
        torch.add(parts[0], parts[1], out=out)  # two 16-bit numbers: in fp32 and rounded once, too
        return
    total = torch.empty(
        min(_BLOCK, out.numel()), dtype=torch.float32 if out.dtype in _HALVES else out.dtype, device=out.device
    )
    for start in range(0, out.numel(), _BLOCK):
        block = slice(start, min(start + _BLOCK, out.numel()))
        here = total[: block.stop - start].copy_(parts[0][block])
        for part in parts[1:]:
            here += part[block]
        if bias is not None:
            here += _repeated(bias, first + start, len(here))
        out[block] = FUNCTIONS[activation](here) if activation != "none" else here


def _repeated(bias: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """The bias of elements [first, first + count) of a matrix."""
    columns = bias.numel()
    before, rows = first % columns, -(-(first % columns + count) // columns)
    if rows == 1:
        return bias[before : before + count]
    return bias.repeat(rows)[before : before + count]


def _sum_on_gpu(
    out: torch.Tensor, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, activation: str, first: int, ctas: int
) -> None:
    from ..kernels import combine

    kernel: Any = combine.combine_kernel
    if len(parts) > combine.MOST_PARTS:
        # In fp32 between the kernels, so that 16-bit sums are rounded once all the same.
        wide = torch.float32 if out.dtype in _HALVES else out.dtype
        total = torch.empty(out.shape, dtype=wide, device=out.device)
        total.copy_(parts[0])
        for part in parts[1:]:
            total += part
        parts = [total]
    addresses = [one.data_ptr() for one in (out, *parts)]
    padded = [*parts, *[parts[0]] * (combine.MOST_PARTS - len(parts))]
    blocks = -(-out.numel() // combine.BLOCK)
    kernel[(max(1, min(ctas, blocks)),)](
        out, *padded, out if bias is None else bias.contiguous(), out.numel(), first,
        1 if bias is None else bias.numel(), PARTS=len(parts), BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS.index(activation), ALIGNED=all(one % 16 == 0 for one in addresses), BLOCK=combine.BLOCK,
        num_warps=combine.WARPS,
    )  # fmt: skip


def _unpack_on_gpu(
    y: torch.Tensor, buffer: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> None:
    from ..kernels import combine

    kernel: Any = combine.unpack_kernel
    tiles = table.shape[0]
    if tiles:
        kernel[(tiles,)](
            y, buffer, y if bias is None else bias.contiguous(), table, tiles, y.shape[1], BIAS=bias is not None,
            ACTIVATION=ACTIVATIONS.index(activation), ROWS=combine.UNPACK_ROWS, COLUMNS=combine.UNPACK_COLUMNS,
            num_warps=combine.WARPS,
        )  # fmt: skip
