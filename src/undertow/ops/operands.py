"""The arguments that all matmul operators share: checked once, one sentence each; how weights lie in memory."""

from __future__ import annotations

import torch

from ..errors import InvalidArgument
from ..fabric.group import Group

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype in DTYPES:
        return
    must = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
    if "float8" in str(dtype):
        must += "; fp8 is not supported yet, .to(torch.bfloat16) is the way for now"
    raise InvalidArgument(argument=name, was=f"of {dtype}", must=f"one of {must}")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        must = f"dense: {name}.to_dense() makes it so"
        raise InvalidArgument(argument=name, was=f"of layout {tensor.layout}", must=must)


def check_factors(x: torch.Tensor, w: torch.Tensor, group: Group, x_name: str = "x", grouped: bool = False) -> None:
    """x [M, K] and w [K, N], of any strides, on the group's device, of one dtype.

    `grouped`: w may be [experts, K, N], one weight for each expert.
    """
    for name, tensor in ((x_name, x), ("w", w)):
        several = grouped and name == "w"
        if tensor.dim() != 2 and not (several and tensor.dim() == 3 and tensor.shape[0] > 0):
            must = "a matrix, or one for each of at least one expert" if several else "a matrix"
            raise InvalidArgument(argument=name, was=f"of shape {list(tensor.shape)}", must=must)
        if tensor.device != group.device:
            raise InvalidArgument(argument=name, was=f"on {tensor.device}", must=f"on {group.device}")
        check_dense(name, tensor)
        check_dtype(name, tensor.dtype)
    if w.shape[-2] != x.shape[1]:
        must = f"of {x.shape[1]} rows, as {x_name} has columns"
        raise InvalidArgument(argument="w", was=f"of shape {list(w.shape)}", must=must)
    if w.dtype != x.dtype:
        raise InvalidArgument(argument="w", was=f"of {w.dtype}", must=f"of {x.dtype}, as {x_name} is")


def output(
    out: torch.Tensor | None, shape: tuple[int, int], x: torch.Tensor, w: torch.Tensor, *others: torch.Tensor | None
) -> torch.Tensor:
    """`out` if it is given and right, else a new tensor. `others`: what else the call reads or writes."""
    if out is None:
        return x.new_empty(shape)
    check_dense("out", out)
    check_apart("out", out, x, w, *others)
    if out.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(argument="out", was="a tensor that requires a gradient", must="one that does not")
    if tuple(out.shape) != shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        was = f"{list(out.shape)} {out.dtype} on {out.device}"
        raise InvalidArgument(argument="out", was=was, must=f"contiguous {list(shape)} {x.dtype} on {x.device}")
    return out


def check_apart(name: str, written: torch.Tensor, *others: torch.Tensor | None) -> None:
    """What a call writes must not lie where it reads or writes anything else."""
    if any(_share_memory(written, one) for one in others if one is not None):
        was = "in memory that the call has another use for"
        raise InvalidArgument(argument=name, was=was, must="a tensor of its own")


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the spans of memory overlap in which they lie."""
    if not one.numel() or not other.numel():
        return False
    spans = []
    for tensor in (one, other):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    (first, end), (start, stop) = spans
    return first < stop and start < end


def is_transposed(w: torch.Tensor) -> bool:
    """Whether w [..., K, N] lies in memory as [..., N, K]."""
    return w.stride(-1) != 1 and w.stride(-2) == 1


def like_weight(w: torch.Tensor) -> torch.Tensor:
    """Room for the gradient of w [..., K, N], which lies as w does."""
    return w.mT.new_empty(w.mT.shape).mT if is_transposed(w) else w.new_empty(w.shape)
