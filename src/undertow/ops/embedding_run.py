"""How embedding_all_to_all runs a plan: who pools, who moves the slices, and how they are put side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..collective.carry import Carrier
from ..fabric import timeline
from ..plan.bags import Layout, completed, slices
from ..plan.plan import SLICES, Plan
from ..plan.tiles import chunks
from .bags import Bags, add_up, pool
from .overlap import give_up, half_way, join, one_by_one, overlap
from .product import NoProduct, Product

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane


def run(
    fabric: Fabric,
    bags: Bags,
    layout: Layout,
    batches: tuple[int, ...],
    plan: Plan,
    like: torch.Tensor,
    compute: bool = True,
) -> torch.Tensor:
    """[B_r, width] by `plan`. `compute` False: only what moves, for measurements; the result is then any numbers."""
    plan = completed(plan, layout.dims, like.element_size(), bags.mean_length)
    if plan.posts(like.device.type):
        from ..fabric.cuda import CudaFabric
        from . import embedding_posts

        assert isinstance(fabric, CudaFabric)
        return embedding_posts.run(fabric, bags, layout, batches, plan, like)
    lane = fabric.lane(plan.lane)  # before the guarded part: opening it is collective and slow
    if like.device.type == "cuda" and plan.lane == "peer":
        from ..fabric.cuda import CudaFabric
        from . import embedding_peers

        assert isinstance(fabric, CudaFabric)
        result = embedding_peers.Exchange.of(fabric).take(layout, batches, like)
        with fabric.guarded_call((result.whole,), itself=plan.grain == "fused"):
            embedding_peers.run_over_peers(fabric, lane, bags, layout, batches, plan, result, compute)
        return result.finish()  # of a poisoned place, should the call be aborted
    whole = like.new_empty(batches[fabric.group.rank], layout.room)
    with fabric.guarded_call((whole,)), one_by_one(fabric, lane):
        _run_over_lane(fabric, lane, bags, layout, batches, plan, whole, compute)
    return add_up(whole, layout) if layout.sums else whole


def pool_all(
    fabric: Fabric, bags: Bags, layout: Layout, batches: Sequence[int], into: torch.Tensor, plan: Plan | None = None
) -> None:
    """The lookup alone, written locally: what communication is hidden beneath."""
    plan = plan or Plan("serial", "peer", ((0, sum(batches)),), order=SLICES)
    plan = completed(plan, layout.dims, into.element_size(), bags.mean_length)
    pooling(fabric, bags, batches, plan, into, lambda: None).start()


def pooling(
    fabric: Fabric, bags: Bags, batches: Sequence[int], plan: Plan, buffer: torch.Tensor, own: Callable[[], None]
) -> Product:
    """Who pools into `buffer`, on the device that is there."""
    if buffer.device.type == "cpu":
        return _Pooling(bags, batches, plan, buffer, own)
    from ..fabric.cuda import CudaFabric
    from . import embedding_cuda

    assert isinstance(fabric, CudaFabric)
    made = embedding_cuda.CudaPooling(fabric, bags, batches, plan, buffer, own)
    made.load()
    return made


class _Pooling(Product):
    """On a CPU, by the thread that calls; `own` takes this rank's own rows from the buffer once all are there."""

    def __init__(
        self, bags: Bags, batches: Sequence[int], plan: Plan, buffer: torch.Tensor, own: Callable[[], None]
    ) -> None:
        self._bags, self._plan, self._buffer, self._own = bags, plan, buffer, own
        self._ranges = chunks(batches, plan)

    def start(self) -> None:
        if self._plan.grain == "serial":
            self._pool(0, self._bags.samples)
            self._own()

    def reach(self, parcel: int) -> None:
        if self._plan.grain == "serial":
            return
        for first, count in self._ranges[parcel]:
            self._pool(first, count)
        if parcel + 1 == len(self._ranges):
            self._own()

    def _pool(self, first: int, count: int) -> None:
        if count and self._bags.tables:
            with timeline.event("lookup", engine="compute", bags=count):
                pool(self._bags, first, count, self._buffer[first : first + count])


class _Landing:
    """Where rows of other ranks arrive, and the way from there (or from this rank's own buffer) into `whole`."""

    def __init__(self, layout: Layout, whole: torch.Tensor, rank: int) -> None:
        self._whole, self._runs = whole, [layout.runs(source) for source in range(len(layout.held))]
        self._rank, self._widths = rank, [0 if one == rank else width for one, width in enumerate(layout.sent)]
        self._flat = whole.new_empty(whole.shape[0] * sum(self._widths))  # one for all: copies of several go together

    def views(self, row: int, rows: int) -> list[torch.Tensor]:
        """Of every source, flat: where its part of rows [row, row + rows) arrives."""
        firsts = [len(self._whole) * sum(self._widths[:source]) for source in range(len(self._widths))]
        return [
            self._flat[first + row * width : first + (row + rows) * width]
            for first, width in zip(firsts, self._widths, strict=True)
        ]

    def unpack(self, source: int, row: int, rows: torch.Tensor) -> None:
        """`rows` [n, columns that `source` makes] into rows [row, row + n) of the result."""
        for by, to, columns in self._runs[source]:
            self._whole[row : row + len(rows), to : to + columns] = rows[:, by : by + columns]

    def unpack_arrived(self, row: int, rows: int) -> None:
        for source, flat in enumerate(self.views(row, rows)):
            if source != self._rank and flat.numel():
                self.unpack(source, row, flat.view(rows, -1))


def _run_over_lane(
    fabric: Fabric,
    lane: Lane,
    bags: Bags,
    layout: Layout,
    batches: Sequence[int],
    plan: Plan,
    whole: torch.Tensor,
    compute: bool,
) -> None:
    """Pool into a buffer; slices leave over a lane, and what arrives is put beside each other."""
    rank, width = fabric.group.rank, bags.width
    if plan.grain == "fused" and lane.name == "net":  # the lane's own sends wait for their receiver
        from . import embedding_proxy

        landing = _Landing(layout, whole, rank)
        embedding_proxy.run(fabric, lane.name, bags, layout, batches, plan, landing.unpack, whole)
        return
    ranges, first_own = chunks(batches, plan), sum(batches[:rank])
    buffer = whole.new_empty(bags.samples, width)
    flat = buffer.view(-1)
    landing = _Landing(layout, whole, rank)
    longest = max((count for parcel in ranges for _, count in parcel), default=0) * max(layout.sent)
    carrier = Carrier(fabric, lane, whole, longest)

    def carry(parcel: int, only: int | None = None) -> None:
        parts = [
            flat[first * width : (first + (count if only in (None, to) else 0)) * width]
            for to, (first, count) in enumerate(ranges[parcel])
        ]
        carrier.send(parcel, parts)

    def collect(parcel: int) -> None:
        first, count = ranges[parcel][rank]
        carrier.receive(parcel, landing.views(first - first_own, count))
        landing.unpack_arrived(first - first_own, count)

    def own() -> None:
        landing.unpack(rank, 0, buffer[first_own : first_own + batches[rank]])

    if plan.grain == "fused":
        _fused_on_cpu(fabric, lane, bags, batches, plan, buffer, carry, collect, own)
        return
    product = pooling(fabric, bags, batches, plan, buffer, own) if compute else NoProduct()
    overlap(fabric, lane, plan, product, carry, (collect,), len(plan.parcels))


def _fused_on_cpu(
    fabric: Fabric,
    lane: Lane,
    bags: Bags,
    batches: Sequence[int],
    plan: Plan,
    buffer: torch.Tensor,
    carry: Callable[[int, int | None], None],
    collect: Callable[[int], None],
    own: Callable[[], None],
) -> None:
    """The thread that pools a slice puts it, destination by destination; another takes what arrives."""
    group = fabric.group
    following = fabric.stream("following 1", priority=plan.share.communication_priority)
    following.fork()

    def taken(parcel: int) -> None:
        with half_way(group):
            collect(parcel)

    try:
        for parcel in range(len(plan.parcels)):
            following.run(partial(taken, parcel))
        for one in slices(batches, plan, group.rank):
            with timeline.event("lookup", engine="compute", bags=one.bags):
                if bags.tables:
                    pool(bags, one.first, one.bags, buffer[one.first : one.first + one.bags])
            if one.destination != group.rank:
                carry(one.parcel, one.destination)
        own()
    except Exception as error:
        give_up(group, error)
        join(group, following)
        raise
    join(group, following)
    lane.flush()
