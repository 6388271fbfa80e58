"""Memory that every rank has, in the same shape, and that others of its node can address."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import torch

from .. import errors

if TYPE_CHECKING:
    from .group import Group


class SymmetricBuffer:
    """The same shape on every rank: `local` is mine, `peer(r)` is the memory of rank r.

    Allocation is collective. Release is not: the bytes live until the last rank let go of its views.
    """

    def __init__(self, group: Group, identity: int, views: list[torch.Tensor | None], owner: object) -> None:
        local = views[group.rank]
        assert local is not None
        self.shape = tuple(local.shape)
        self.dtype = local.dtype
        self.identity = identity
        self._rank = group.rank
        self._views: list[torch.Tensor | None] = views
        self._owner: object | None = owner
        self._when_released: list[Callable[[], None]] = []
        # Kept as numbers: asking a tensor for its address or size takes longer than moving a small message.
        self.count, self.itemsize = prod(self.shape), self.dtype.itemsize
        self._addresses = [0 if view is None else view.data_ptr() for view in views]

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def local(self) -> torch.Tensor:
        return self.peer(self._rank)

    def peer(self, rank: int) -> torch.Tensor:
        """The tensor of `rank`, addressable from here."""
        if self._owner is None:
            raise errors.BufferReleased(shape=list(self.shape))
        if not 0 <= rank < len(self._views):
            raise errors.InvalidArgument(argument="peer", was=rank, must=f"between 0 and {len(self._views) - 1}")
        view = self._views[rank]
        if view is None:
            raise errors.NoPeerPointer(peer=rank, rank=self._rank, reason="it stands on another node")
        return view

    def reaches(self, rank: int) -> bool:
        """Whether `rank`'s memory can be addressed from here."""
        return self._views[rank] is not None

    def address(self, rank: int) -> int:
        """Address of `rank`'s first byte in this process."""
        if self._owner is not None and 0 <= rank < len(self._addresses) and self._addresses[rank]:
            return self._addresses[rank]
        return self.peer(rank).data_ptr()  # says what is wrong; an empty buffer has no address

    def as_type(self, dtype: torch.dtype) -> SymmetricBuffer:
        """The same bytes, flat, as elements of `dtype`; a tail that fills no element is left out."""
        self.peer(self._rank)  # raises if released
        alias = copy.copy(self)
        alias._when_released = []
        with torch.inference_mode(False):  # kept by callers, and in that mode even a view could not be written to later
            alias._views = [None if view is None else _retyped(view, dtype) for view in self._views]
        local = alias._views[self._rank]
        assert local is not None
        alias.shape, alias.dtype = tuple(local.shape), dtype
        alias.count, alias.itemsize = local.numel(), dtype.itemsize
        return alias

    def when_released(self, call: Callable[[], None]) -> None:
        """Have `call` made when this buffer lets go of its memory."""
        self._when_released.append(call)

    def release(self) -> None:
        """Let go of the memory. Tensors taken from this buffer before keep it alive."""
        told, self._when_released = self._when_released, []
        for call in told:  # before the memory may go
            call()
        self._views, self._owner = [], None


def _retyped(view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    raw = view.view(-1).view(torch.uint8)
    return raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
