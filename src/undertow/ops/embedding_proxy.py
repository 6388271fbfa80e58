"""Fused slices where there is no peer pointer: whoever finishes a slice posts it to the proxy's ring, and pools on.

    computing    | pool slice 0 | post | pool slice 1 | post | ... | own slices |
    proxy thread                | move 0              | move 1 ...
    taking                      | wait for parcel 0, put it beside the others | ...

Source and landing stand in symmetric memory, each call's in another half of it than the last one's. A rank may write
into that of the call before last: it has the slices that the others posted in the last call, which they did after they
had taken all of the one before. Where in the last call two ranks had nothing for each other, that proves nothing, and
ranks meet at a barrier instead. They also do before anything is posted to memory that is new to the proxies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..fabric import timeline
from ..fabric.proxy import Post, Proxy
from ..plan.bags import Layout, Posted, aligned, slices
from ..plan.plan import Plan
from ..plan.tiles import chunks
from .bags import Bags, pool
from .overlap import half_way

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..fabric.base import Fabric
    from ..fabric.symmetric import SymmetricBuffer

_CALLS = 2
_POSTS: dict[str, object] = {"dma": object(), "net": object()}  # names of what is kept with a fabric


class Posts:
    """The proxy of a group over one lane, and how many slices of each source have been waited for."""

    def __init__(self, fabric: Fabric, lane: str) -> None:
        self.proxy = Proxy(fabric, signals=fabric.group.size, lane=lane)
        self.taken = [0] * fabric.group.size
        self.calls = 0
        self.met = True  # whether every rank had something for every other one in the last call

    @staticmethod
    def of(fabric: Fabric, lane: str) -> Posts:
        """Made at first use, collectively."""
        key = id(_POSTS[lane])
        found = fabric.kept.get(key)
        if found is None:
            found = fabric.kept[key] = Posts(fabric, lane)
        assert isinstance(found, Posts)
        return found


class _Memory:
    """Where the slices of one call are made, and where those for each rank land. Making it is collective."""

    def __init__(self, fabric: Fabric, posts: Posts, posted: Posted, like: torch.Tensor) -> None:
        self.space: SymmetricBuffer = fabric.workspace("embedding posts", _CALLS * posted.nbytes)
        is_new = self.space.identity not in posts.proxy.buffers
        self.number = posts.proxy.attach(self.space)
        if is_new or not posts.met:
            fabric.group.barrier()
        posts.met = posted.meets
        self.half = posts.calls % _CALLS * (self.space.nbytes // _CALLS // aligned(1) * aligned(1))
        posts.calls += 1
        self._posted, self._size, self._dtype = posted, like.element_size(), like.dtype

    def buffer(self, samples: int, width: int) -> torch.Tensor:
        """[samples, width]: what this rank pools."""
        return self._view(0, samples * width).view(samples, width)

    def arrived(self, rank: int, source: int, row: int, rows: int) -> torch.Tensor:
        width = self._posted.layout.sent[source]
        return self._view(self._posted.place(rank, source, row), rows * width).view(rows, width)

    def _view(self, first: int, count: int) -> torch.Tensor:
        first += self.half
        return self.space.local.view(-1)[first : first + count * self._size].view(self._dtype)


def run(
    fabric: Fabric,
    lane: str,
    bags: Bags,
    layout: Layout,
    batches: Sequence[int],
    plan: Plan,
    unpack: Callable[[int, int, torch.Tensor], None],
    like: torch.Tensor,
) -> None:
    """Pool and post all slices on a CPU, take those of others; `unpack(source, row, rows)` puts them in their place."""
    group, rank = fabric.group, fabric.group.rank
    posts = Posts.of(fabric, lane)
    posted = Posted(layout, tuple(batches), like.element_size())
    memory = _Memory(fabric, posts, posted, like)
    width = bags.width
    buffer = memory.buffer(bags.samples, width)
    with half_way(group):
        for one in slices(batches, plan, rank) if bags.tables else ():
            with timeline.event("lookup", engine="compute", bags=one.bags):
                pool(bags, one.first, one.bags, buffer[one.first : one.first + one.bags])
            if one.destination == rank:
                unpack(rank, one.row, buffer[one.first : one.first + one.bags])
                continue
            source = memory.half + posted.source(rank, one.first)
            there = memory.half + posted.place(one.destination, rank, one.row)
            nbytes = one.bags * width * like.element_size()
            posts.proxy.post(Post(memory.number, source, one.destination, memory.number, there, nbytes, rank))
        own = sum(batches[:rank])
        for ranges in chunks(batches, plan):
            first, rows = ranges[rank]
            for source in range(group.size):
                if source == rank or not rows or not layout.sent[source]:
                    continue
                posts.taken[source] += 1
                posts.proxy.wait(source, posts.taken[source], sender=source)  # acquires the slice
                unpack(source, first - own, memory.arrived(rank, source, first - own, rows))
