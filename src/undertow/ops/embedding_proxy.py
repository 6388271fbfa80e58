"""Fused slices where there is no peer pointer: whoever finishes a slice posts it to the proxy's ring, and pools on.

    computing    | pool slice 0 | post | pool slice 1 | post | ... | own slices |
    proxy thread                | move 0              | move 1 ...
    taking                      | wait for parcel 0, put it beside the others | ...

Source and landing stand in memory that calls use in turn (`posts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..fabric import timeline
from ..plan.bags import Layout, Posted, slices
from ..plan.plan import Plan
from ..plan.posts import signal_of
from ..plan.tiles import chunks
from .bags import Bags, pool
from .overlap import half_way
from .posts import Posts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..fabric.base import Fabric


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
    group, rank, size = fabric.group, fabric.group.rank, like.element_size()
    posts = Posts.of(fabric, lane)
    posted = Posted(layout, tuple(batches), size)
    posts.room(posted.nbytes)
    turn = posts.turn(torch.uint8, posted.meets)
    width = bags.width
    buffer = turn.part(0, bags.samples * width * size).view(like.dtype).view(bags.samples, width)
    with half_way(group):
        for one in slices(batches, plan, rank) if bags.tables else ():
            with timeline.event("lookup", engine="compute", bags=one.bags):
                pool(bags, one.first, one.bags, buffer[one.first : one.first + one.bags])
            if one.destination == rank:
                unpack(rank, one.row, buffer[one.first : one.first + one.bags])
                continue
            there = posted.place(one.destination, rank, one.row)
            nbytes = one.bags * width * size
            turn.post(one.destination, posted.source(rank, one.first), there, nbytes, signal_of(rank, 0))
        own = sum(batches[:rank])
        for ranges in chunks(batches, plan):
            first, rows = ranges[rank]
            for source in range(group.size):
                sent = layout.sent[source]
                if source == rank or not rows or not sent:
                    continue
                turn.wait(signal_of(source, 0), sender=source)  # acquires the slice
                landed = turn.part(posted.place(rank, source, first - own), rows * sent * size)
                unpack(source, first - own, landed.view(like.dtype).view(rows, sent))
