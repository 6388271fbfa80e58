"""The one check that every direct transfer passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import errors

if TYPE_CHECKING:
    import torch

    from .symmetric import SymmetricBuffer


def destination_address(buffer: SymmetricBuffer, peer: int, start: int, source: torch.Tensor) -> int:
    """Where `source` goes in `peer`'s buffer; a wrong range here would be silent corruption there."""
    if source.dtype is not buffer.dtype or not source.is_contiguous():
        was = f"{'contiguous' if source.is_contiguous() else 'strided'} {source.dtype}"
        raise errors.InvalidArgument(argument="source", was=was, must=f"contiguous {buffer.dtype}")
    address = buffer.address(peer)
    if start < 0 or start + source.numel() > buffer.count:
        was = f"[{start}, {start + source.numel()})"
        must = f"inside the buffer's {buffer.count} elements"
        raise errors.InvalidArgument(argument="start", was=was, must=must)
    return address + start * buffer.itemsize
