"""torch's forms of collectives (lists of tensors, buffers of any shape) in terms of Undertow's.

torch counts elements where Undertow counts rows, so tensors are laid out flat: a row is an element, or what a split
counts. A tensor whose memory has gaps is written by way of a flat one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ..collective import operators
from ..errors import InvalidArgument
from ..fabric.group import Group


def misfit(tensors: Sequence[torch.Tensor], ranks: int) -> str:
    """Why a list cannot hold a tensor for each rank; empty if it can."""
    return "" if len(tensors) == ranks else f"it has {len(tensors)} tensors for {ranks} ranks"


def unequal(tensors: Sequence[torch.Tensor]) -> str:
    """Why a list cannot be cut into equal shards; empty if it can."""
    return "" if len({one.numel() for one in tensors}) == 1 else "its shards are not equally long"


def all_gather(outputs: Sequence[torch.Tensor], tensor: torch.Tensor, group: Group) -> None:
    counts = [one.numel() for one in outputs]
    _spread(operators.all_gather(tensor.reshape(-1), rows=counts, group=group), outputs)


def all_gather_single(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> None:
    flat = _flat(out)
    operators.all_gather(tensor.reshape(-1), out=flat, group=group)
    _write_back(out, flat)


def reduce_scatter(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, group: Group) -> None:
    flat = _flat(out)
    operators.reduce_scatter(_joined(parts), out=flat, op=op, group=group)
    _write_back(out, flat)


def reduce_scatter_single(out: torch.Tensor, tensor: torch.Tensor, op: str, group: Group) -> None:
    if tensor.numel() != out.numel() * group.size:
        must = f"of {group.size} times the {out.numel()} elements of output"
        raise InvalidArgument(argument="input", was=f"of {tensor.numel()} elements", must=must)
    flat = _flat(out)
    operators.reduce_scatter(tensor.reshape(-1), out=flat, op=op, group=group)
    _write_back(out, flat)


def gather(outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int, group: Group) -> None:
    found = operators.gather(tensor.reshape(-1), root=root, group=group)
    if found is not None:
        _spread(found, outputs)


def scatter(out: torch.Tensor, parts: Sequence[torch.Tensor], root: int, group: Group) -> None:
    flat = _flat(out)
    operators.scatter(_joined(parts) if parts else None, out=flat, root=root, group=group)
    _write_back(out, flat)


def all_to_all(outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group) -> None:
    flat = outputs[0].new_empty(sum(one.numel() for one in outputs))
    if len(outputs) != group.size:
        raise InvalidArgument(
            argument="outputs", was=f"{len(outputs)} tensors", must=f"one for each of {group.size} ranks"
        )
    rows, arriving = [one.numel() for one in parts], [one.numel() for one in outputs]
    operators.all_to_all(_joined(parts), out=flat, rows=rows, arriving=arriving, group=group)
    _spread(flat, outputs)


def all_to_all_single(
    out: torch.Tensor, tensor: torch.Tensor, to: Sequence[int], by: Sequence[int], group: Group
) -> None:
    """`by` and `to` count rows of the input and the output for each rank; both empty: equal parts on all ranks."""
    if not to and not by:
        flat = _flat(out)
        if tensor.numel() % group.size:
            must = f"a multiple of the {group.size} ranks"
            raise InvalidArgument(argument="input", was=f"of {tensor.numel()} elements", must=must)
        operators.all_to_all(tensor.reshape(-1), out=flat, group=group)
    else:
        if tensor.dim() == 0 or tensor.shape[1:] != out.shape[1:]:
            must = f"rows like those of output, which is {list(out.shape)}"
            raise InvalidArgument(argument="input", was=list(tensor.shape), must=must)
        rows = _splits("input_split_sizes", by, tensor.shape[0], group.size)
        arriving = _splits("output_split_sizes", to, out.shape[0], group.size)
        flat, width = _flat(out), prod(tensor.shape[1:])
        given, place = tensor.reshape(len(tensor), width), flat.view(len(out), width)
        operators.all_to_all(given, out=place, rows=rows, arriving=arriving, group=group)
    _write_back(out, flat)


def _splits(name: str, splits: Sequence[int], rows: int, ranks: int) -> list[int]:
    """Rows for each rank: those given, or equal parts."""
    counts = [int(one) for one in splits] or [rows // ranks] * ranks
    if len(counts) != ranks or min(counts) < 0 or sum(counts) != rows:
        was = counts if splits else "not given"
        raise InvalidArgument(argument=name, was=was, must=f"{ranks} numbers that add up to the {rows} rows")
    return counts


def _flat(out: torch.Tensor) -> torch.Tensor:
    """Where a result for `out` may be written, as one row of elements."""
    return out.view(-1) if out.is_contiguous() else out.new_empty(out.numel())


def _write_back(out: torch.Tensor, flat: torch.Tensor) -> None:
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.reshape(-1) for one in parts])


def _spread(flat: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    for out, part in zip(outputs, torch.split(flat, [one.numel() for one in outputs]), strict=True):
        out.copy_(part.view(out.shape))
