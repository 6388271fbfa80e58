"""Host memory that all ranks of a group map and pin: flags between streams, staging rings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import errors
from . import stream_memory
from .segment import Segment

if TYPE_CHECKING:
    from .group import Group


class PinnedSegment:
    """One segment for the group, zeroed, at `address` here for both the host and the device. Collective."""

    def __init__(self, group: Group, size: int, purpose: str) -> None:
        segment: Segment | None = None
        failure = ""
        if group.rank == 0:
            try:
                segment = Segment.create(size, purpose)
            except errors.OutOfSharedMemory as error:
                failure = str(error)
        path, failure = group.exchange([segment.path if segment else "", failure])[0]
        if failure:
            raise errors.AllocationFailed(rank=0, reason=failure)
        self.segment = segment or Segment.open(path)
        group.barrier()  # everybody has mapped it: the descriptor can go, and nothing has a name any more
        self.segment.seal()
        self.address = self.segment.address
        stream_memory.register(self.address, self.segment.size)
        self._registered = True
        group.barrier()

    def close(self) -> None:
        """Unpin. The device must not use it any more."""
        if self._registered:
            self._registered = False
            stream_memory.unregister(self.address)
            self.segment.close()
