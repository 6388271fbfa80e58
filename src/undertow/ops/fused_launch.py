"""What every launch of a fused kernel needs: operands as the GPU reads them, and what all of them are given.

GPUs with TMA read operands by tensor descriptors, others by pointers; which of them a GPU is decides the fabric
(`bulk_copies`), and the kernels at compile time. Where operands do not lie as they must, they are copied first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..fabric.share import bound
from .cuda_product import rows_contiguous
from .finish import ACTIVATIONS, Finish

if TYPE_CHECKING:
    from ..fabric.cuda import CudaFabric
    from ..plan.plan import Plan
    from .fused_stage import Stage

Launch = Callable[[torch.Tensor, int], None]  # given the words that count calls, and how many CTAs work
Make = Callable[..., "tuple[Stage, Launch]"]  # x, w, y, problem, plan, finish, fabric: memory for calls, and the launch
ALIGNED = 8  # elements of 2 bytes: rows of whole 16 bytes
_BLOCK_K = {True: 64, False: 32}  # by whether there is TMA
_STAGES = 4


@dataclass(frozen=True)
class Factors:
    """a [M, K] and b, [K, N] or (`transposed`) [N, K], or one of them for each expert, as the kernels read them.

    `block_k`: elements along K that are multiplied at once.
    """

    a: torch.Tensor
    b: torch.Tensor
    transposed: bool
    bulk: bool
    block_k: int

    @property
    def inner(self) -> int:
        return self.a.shape[1]

    @property
    def stages(self) -> int:
        """Steps along K whose loads may be under way."""
        return _STAGES

    @property
    def grouped(self) -> bool:
        return self.b.dim() == 3

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of rows of a, of rows of b, of experts."""
        return self.a.stride(0), self.b.stride(-2), self.b.stride(0) if self.grouped else 0

    @property
    def constants(self) -> dict[str, Any]:
        """Of the kernel's compilation."""
        return {
            "BLOCK_K": self.block_k, "TRANSPOSED": self.transposed, "num_warps": 8, "num_stages": _STAGES,
        }  # fmt: skip

    def operands(self, tile: tuple[int, int]) -> tuple[Any, Any]:
        """a and b for a launch with tiles of that size."""
        if not self.bulk:
            return self.a, self.b
        last = [tile[1], self.block_k] if self.transposed else [self.block_k, tile[1]]
        return descriptor(self.a, [tile[0], self.block_k]), descriptor(self.b, [1, *last] if self.grouped else last)


def factors(x: torch.Tensor, w: torch.Tensor, bulk: bool, block_k: int | None = None) -> Factors:
    """x [M, K] and w [K, N] or [experts, K, N]. Where they do not lie so, they are copied, K padded with zeros.

    Without TMA, K comes in whole eights, and what lies behind a row's end must be there to be read.
    """
    a = rows_contiguous(x)
    b, transposed = (w.mT, True) if w.stride(-1) != 1 and w.stride(-2) == 1 else (w, False)
    k, n = x.shape[1], w.shape[-1]
    whole = bulk or (k % ALIGNED == 0 and (transposed or n % ALIGNED == 0))
    if readable(a) and readable(b) and whole:
        return Factors(a, b, transposed, bulk, block_k or _BLOCK_K[bulk])
    inner, wide = (max(ALIGNED, -(-one // ALIGNED) * ALIGNED) for one in (k, n))
    if not readable(a) or inner != k:
        copied = x.new_zeros(max(1, x.shape[0]), inner)
        copied[: x.shape[0], :k] = x
        a = copied
    if not readable(b) or inner != k or not whole:
        copied = w.new_zeros(*w.shape[:-2], inner, wide)
        copied[..., :k, :n] = w
        b, transposed = copied[..., :n], False
    return Factors(a, b, transposed, bulk, block_k or _BLOCK_K[bulk])


def readable(tensor: torch.Tensor) -> bool:
    """Whether rows of 16 bytes can be read from it: by TMA, or at once."""
    size = tensor.element_size()
    return (
        tensor.numel() > 0 and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
        and all(one * size % 16 == 0 for one in tensor.stride()[:-1])
    )  # fmt: skip


def descriptor(tensor: torch.Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, block)


def finishing(finish: Finish, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Bias and activation for the kernel, unless something follows that needs whole rows."""
    bias = finish.bias if finish.after is None else None
    activation = finish.activation if finish.after is None else "none"
    given = y if bias is None else bias.contiguous()
    return given, {"BIAS": bias is not None, "ACTIVATION": ACTIVATIONS.index(activation)}


def active(plan: Plan, fabric: CudaFabric) -> int:
    """CTAs that work. More than the grid could not run at once, and who shares the card asked for a bound."""
    asked = (plan.share.multiprocessors, bound(), fabric.multiprocessors)
    return min(one for one in asked if one is not None)


def watch(fabric: CudaFabric) -> tuple[object, ...]:
    return fabric.guard.abort, fabric.guard.error, int(fabric.group.deadline * 1e9)
