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
        path, failure = group.exchange([segment.path if segment else "", failure], purpose)[0]
        if not failure:
            try:
                self.segment = segment or Segment.open(path)
                stream_memory.register(self.segment.address, self.segment.size)
            except (OSError, errors.UndertowError) as error:
                failure = str(error)  # told to all ranks below: none may be left waiting for this one
        for rank, reason in enumerate(group.exchange(failure, f"{purpose}, mapped")):
            if reason:
                raise errors.AllocationFailed(rank=rank, reason=reason)
        self.segment.seal()  # everybody has mapped it: nothing has a name any more
        self.address = self.segment.address
        self._registered = True

    def close(self) -> None:
        """Unpin. The device must not use it any more."""
        if self._registered:
            self._registered = False
            stream_memory.unregister(self.address)
            self.segment.close()
