"""What callers of collectives may give: checked in one sentence each, and made into what a schedule needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InvalidArgument
from ..fabric.group import Group
from ..plan.plan import split
from .language import Program

OPERATIONS = ("sum", "avg", "max", "min")
REDUCIBLE = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip


def row_width(tensor: torch.Tensor) -> int:
    """Elements of a row."""
    return tensor[0].numel() if tensor.shape[0] else int(torch.empty(tensor.shape[1:], device="meta").numel())


def is_narrow(tensor: torch.Tensor) -> bool:
    """Whether a sum of many could overflow, or be rounded before it is divided, where its average is wanted."""
    return tensor.dtype.itemsize < torch.float32.itemsize


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in which it cannot."""
    return tensor.to(torch.float32, copy=True)


def output(out: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return like.new_empty(shape) if out is None else checked_out(out, like, shape)


def checked_out(out: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(out.shape) != shape or out.dtype != like.dtype or out.device != like.device:
        was = f"{list(out.shape)} {out.dtype} on {out.device}"
        raise InvalidArgument(argument="out", was=was, must=f"{list(shape)} {like.dtype} on {like.device}")
    return out


def rows_of(name: str, rows: Sequence[int] | None, size: int, own: int, rank: int) -> list[int]:
    counts = [own] * size if rows is None else [int(one) for one in rows]
    if len(counts) != size or min(counts) < 0 or counts[rank] != own:
        must = f"{size} numbers, the one of rank {rank} being {own}"
        raise InvalidArgument(argument=name, was=counts, must=must)
    return counts


def shares_of(name: str, rows: Sequence[int] | None, size: int, whole: int) -> list[int]:
    """Rows of each rank of `whole`: those given, or as torch.tensor_split cuts them."""
    counts = [stop - start for start, stop in split(whole, size)] if rows is None else [int(one) for one in rows]
    if len(counts) != size or min(counts) < 0 or sum(counts) != whole:
        raise InvalidArgument(argument=name, was=counts, must=f"{size} numbers of at least 0 that add up to {whole}")
    return counts


def agreed_rows(said: list[list[int]]) -> list[list[int]]:
    """Rows from each rank to each, where every rank said first what it sends to each, then what it expects of each."""
    size = len(said)
    for source, row in enumerate(said):
        for to in range(size):
            if row[to] != said[to][size + source]:
                was, must = (
                    f"{row[to]} on rank {source} for rank {to}",
                    f"{said[to][size + source]}, as rank {to} expects",
                )
                raise InvalidArgument(argument="rows", was=was, must=must)
    return [row[:size] for row in said]


def check_root(root: int, on: Group) -> None:
    if not 0 <= root < on.size:
        raise InvalidArgument(argument="root", was=root, must=f"between 0 and {on.size - 1}")


def check_operation(op: str, tensor: torch.Tensor) -> None:
    if op not in OPERATIONS:
        raise InvalidArgument(argument="op", was=repr(op), must=f"one of {', '.join(OPERATIONS)}")
    if op == "avg" and not tensor.is_floating_point():
        raise InvalidArgument(argument="op", was="'avg'", must=f"sum, max or min for {tensor.dtype}")
    if tensor.dtype not in REDUCIBLE:
        must = ", ".join(str(one).removeprefix("torch.") for one in REDUCIBLE)
        raise InvalidArgument(argument="tensor", was=f"of {tensor.dtype}", must=f"one of {must} to be reduced")


def check_program(program: object) -> None:
    if not isinstance(program, Program):
        must = "a collective program, made by undertow.collective.program, or one of undertow.collective.LIBRARY"
        raise InvalidArgument(argument="program", was=f"a {type(program).__name__}", must=must)


def check_tensor(name: str, tensor: torch.Tensor, on: Group, matrix: bool = False) -> None:
    if tensor.device != on.device:
        raise InvalidArgument(argument=name, was=f"on {tensor.device}", must=f"on {on.device}")
    if tensor.requires_grad and torch.is_grad_enabled():
        must = "detached, or the call under torch.no_grad(): collectives have no backward yet"
        raise InvalidArgument(argument=name, was="a tensor that requires a gradient", must=must)
    if matrix and tensor.dim() == 0:
        raise InvalidArgument(argument=name, was="a single number", must="a tensor of rows")
