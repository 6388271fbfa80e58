"""What stands for a collective on a whole card with one rank, and thieves of one resource each.

| stand-in | moves | stands for |
|---|---|---|
| local copy | bytes within the card, by a kernel of so many CTAs | a collective on SMs |
| host copies | bytes to and from pinned host memory at once, by copy engines | a collective by copy engines |

They are labelled as stand-ins wherever they are reported: no other rank is there to disturb them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..fabric import placement, stream_memory
from ..fabric.base import poison
from ..fabric.group import Group
from ..kernels import move, thieves

_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call
_L2 = 24 << 20  # bytes that stay in the L2 of an H200 beside other work
_BEYOND = 1 << 30


class LocalCopy:
    """out = source, both on this GPU, by at most as many CTAs as the placement says (32 if it says nothing)."""

    def __init__(self, nbytes: int, group: Group) -> None:
        self.moved = float(nbytes)
        self.source = torch.empty(nbytes // 4, dtype=torch.int32, device=group.device)
        self.out = torch.empty_like(self.source)
        self.fill()

    def __call__(self) -> torch.Tensor:
        where = placement.current()
        move.copy(self.out, self.source, (where.ctas if where is not None else None) or 32)
        return self.out

    def fill(self) -> None:
        self.source.copy_(torch.arange(self.source.numel(), dtype=torch.int32, device=self.source.device))
        poison(self.out)

    def wrong(self) -> int:
        return int((self.out != self.source).sum())


class HostCopies:
    """Half of the bytes to pinned host memory and the other half from it, at the same time."""

    def __init__(self, nbytes: int, group: Group) -> None:
        self.moved = float(nbytes)
        half = nbytes // 8
        self._device = group.device
        self.leaving = torch.empty(half, dtype=torch.int32, device=group.device)
        self.arrived = torch.empty_like(self.leaving)
        self._left = torch.empty(half, dtype=torch.int32, device="cpu", pin_memory=True)
        self._waiting = torch.arange(half, dtype=torch.int32, device="cpu").pin_memory()
        self._second = stream_memory.new_stream(group.device, priority=-1)
        self.fill()

    def __call__(self) -> torch.Tensor:
        here = torch.cuda.current_stream(self._device)
        self._second.wait_stream(here)
        with torch.cuda.stream(self._second):
            self.arrived.copy_(self._waiting, non_blocking=True)
        self._left.copy_(self.leaving, non_blocking=True)
        here.wait_stream(self._second)
        return self.arrived

    def fill(self) -> None:
        self.leaving.copy_(torch.arange(self.leaving.numel(), dtype=torch.int32, device=self._device))
        poison(self.arrived)
        torch.cuda.synchronize(self._device)
        poison(self._left)

    def wrong(self) -> int:
        torch.cuda.synchronize(self._device)
        return int((self.arrived.cpu() != self._waiting).sum()) + int((self._left != self.leaving.cpu()).sum())


class Thieves:
    """Each takes one resource of the card for a while, on so many CTAs. Loaded when made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._record = torch.zeros(4096, dtype=torch.int32, device=device)
        self._floats = torch.zeros(thieves.OCCUPY_BLOCK, dtype=torch.float32, device=device)
        self._words = torch.zeros(thieves.READ_BLOCK, dtype=torch.int32, device=device)
        self._near = torch.zeros(_L2 // 4, dtype=torch.int32, device=device)
        self._far = torch.zeros(_BEYOND // 4, dtype=torch.int32, device=device)
        for run in self.each(1, 1000).values():
            run()
        torch.cuda.synchronize(device)

    def each(self, ctas: int, nanoseconds: int) -> dict[str, Callable[[], None]]:
        """By what they take."""
        return {
            "SMs": lambda: thieves.occupy(self._record, self._floats, ctas, nanoseconds),
            "L2": lambda: thieves.read(self._record, self._words, self._near, ctas, nanoseconds),
            "bandwidth": lambda: thieves.read(self._record, self._words, self._far, ctas, nanoseconds),
        }

    def bytes_read(self, ctas: int) -> int:
        """By the last thief that reads."""
        return int(self._record[ctas : 2 * ctas].sum()) * thieves.READ_BLOCK * 4

    def places(self, ctas: int, nanoseconds: int, record: torch.Tensor | None = None) -> torch.Tensor:
        """Enqueue CTAs that hold their SMs for a while; the SM of each, in the order of the current stream."""
        kept = torch.full((ctas,), -1, dtype=torch.int32, device=self._device) if record is None else record
        thieves.occupy(kept, self._floats, ctas, nanoseconds)
        return kept
