"""What fused calls on a CPU share where there is no peer pointer: proxies, and memory that calls use in turn.

A rank makes what it posts in symmetric memory, and what others post lands there, each call's in another half of it
than the last one's. A rank may write into that of the call before last, here and at the others: it has what the others
posted in the last call, which they did after they had taken all of the one before. Where in the last call two ranks had
nothing for each other, that proves nothing, and ranks meet at a barrier instead. They also do before anything is
posted to memory that is new to the proxies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..fabric.post_ring import Post
from ..fabric.proxy import Proxy
from ..plan.bags import aligned
from ..plan.posts import SIGNALS

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..fabric.symmetric import SymmetricBuffer

_HALVES = 2
_POSTS: dict[str, object] = {"dma": object(), "net": object()}  # names of what is kept with a fabric


class Posts:
    """The proxy of a group over one lane, and what calls over it know of each other. Made collectively."""

    def __init__(self, fabric: Fabric, lane: str) -> None:
        self.proxy = Proxy(fabric, signals=fabric.group.size * SIGNALS, lane=lane)
        self.arrived = [0] * (fabric.group.size * SIGNALS)  # how many posts each signal was waited for
        self._fabric, self._purpose = fabric, f"posts over {lane}"
        self._calls = 0
        self._met = True  # whether every rank had something for every other one in the last call
        self._space: SymmetricBuffer | None = None

    @staticmethod
    def of(fabric: Fabric, lane: str) -> Posts:
        """Made at first use."""
        key = id(_POSTS[lane])
        found = fabric.kept.get(key)
        if found is None:
            found = fabric.kept[key] = Posts(fabric, lane)
        assert isinstance(found, Posts)
        return found

    def room(self, nbytes: int) -> None:
        """Have so many bytes in each half: the same on all ranks. Collective where they grow."""
        self._space = self._fabric.workspace(self._purpose, _HALVES * aligned(nbytes))
        if self._space.identity not in self.proxy.posts.attached:
            self.proxy.attach(self._space)
            self._met = False

    def turn(self, dtype: torch.dtype, meets: bool) -> Turn:
        """The memory of one call, in elements of `dtype`. `meets`: every rank posts something to every other one."""
        assert self._space is not None, "there is no room yet"
        if not self._met:
            self._fabric.group.barrier()
        self._met = meets
        self._calls += 1
        half = self._space.nbytes // _HALVES // aligned(1) * aligned(1)
        return Turn(self, self._space, self._calls % _HALVES * half, half, dtype)


class Turn:
    """One call: a half of the memory, and what is posted from there and waited for."""

    def __init__(self, posts: Posts, space: SymmetricBuffer, first: int, nbytes: int, dtype: torch.dtype) -> None:
        self._posts, self._first, self._size = posts, first, dtype.itemsize
        self._number = space.identity
        self._here = space.local.view(-1)[first : first + nbytes].view(dtype)

    def part(self, first: int, count: int) -> torch.Tensor:
        """Elements of this rank's memory, flat."""
        return self._here[first : first + count]

    def rows(self, first: int, rows: int, columns: int) -> torch.Tensor:
        return self.part(first, rows * columns).view(rows, columns)

    def post(self, to: int, source: int, there: int, count: int, signal: int) -> None:
        """Have `count` elements at `source` moved to `there` in the memory of rank `to`. Releases them."""
        before, after = self._first + source * self._size, self._first + there * self._size
        self._posts.proxy.post(Post(self._number, before, to, self._number, after, count * self._size, signal))

    def wait(self, signal: int, sender: int) -> None:
        """Until the next post with this signal has landed here. Acquires it."""
        self._posts.arrived[signal] += 1
        self._posts.proxy.wait(signal, self._posts.arrived[signal], sender=sender)
