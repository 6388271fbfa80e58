"""Fused slices on a GPU where destinations have no peer pointer: the kernel posts them to the proxy's ring.

    stream         | posting kernel: pool slice 0, post it, pool slice 1, post it, ..., own slices | taking kernel   |
    proxy's thread            | move 0 ...          | move 1 ...                                   |
    arrivals                                | 0              | 1                      ...        | wait, bring 0, 1 ...

Destinations that have a peer pointer get theirs from the same kernel, straight into their results, by the words of
`embedding_peers.py`. Where all have one, a lane that is named is wanted: everything is posted.

Memory, what may wait and when, and graphs: `posting.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import InvalidArgument
from ..fabric import timeline
from ..fabric.cuda import CudaFabric
from ..plan.bags import Arrival, Layout, Posted, slices
from ..plan.posts import signal_of
from ..plan.tiles import chunks
from .bags import Bags, add_up
from .cuda_product import device_table
from .embedding_cuda import Lookup, Slice, is_loaded
from .embedding_peers import MOST_PARCELS, Exchange, Result
from .overlap import half_way
from .posting import Posting, half_of, refuse_capture

if TYPE_CHECKING:
    from ..fabric.symmetric import SymmetricBuffer
    from ..plan.plan import Plan

_THREADS = 128
_TAKING_CTAS = 2  # on an SM, where the plan does not say how many
_MOST_COLUMNS = 512


def reached(fabric: CudaFabric, space: SymmetricBuffer) -> tuple[int, ...] | None:
    """Ranks whose results this rank stores into, while the others are posted to. None, on all ranks, where each could
    reach every other: `fused:peer` is for that, and whoever names another lane wants it."""
    if not fabric.lanes()["peer"]:
        return None
    return tuple(one for one in range(fabric.group.size) if one != fabric.group.rank and space.reaches(one))


def run(
    fabric: CudaFabric, bags: Bags, layout: Layout, batches: Sequence[int], plan: Plan, like: torch.Tensor
) -> torch.Tensor:
    """[B_r, width] by a fused plan whose lane is `dma` or `net`."""
    posted = Posted(layout, tuple(batches), like.element_size())
    _check(plan, posted)
    posting = Posting.of(fabric, plan.lane)
    posting.follow(fabric)
    space, number = posting.memory(fabric, posted.nbytes)
    direct = reached(fabric, space)
    result: Result | None = None
    if direct is not None:  # also where this rank reaches none: places are made collectively
        result = Exchange.of(fabric).take(layout, batches, like)
        whole = result.whole
    else:
        whole = like.new_empty(batches[fabric.group.rank], layout.room)
    call = Call(fabric, posting, posted, bags, plan, space, number, whole, result, direct or ())
    with fabric.guarded_call((whole,), itself=True):
        call.launch(only_load=True)
        with half_way(fabric.group):
            call.launch()
            posting.finish(fabric, posted.meets)
    if result is not None:
        return result.finish()
    return add_up(whole, layout) if layout.sums else whole


def _check(plan: Plan, posted: Posted) -> None:
    if len(plan.parcels) > MOST_PARCELS:
        was = f"of {len(plan.parcels)} parcels"
        raise InvalidArgument(argument="plan", was=was, must=f"of at most {MOST_PARCELS} where slices are posted")
    refuse_capture(posted.meets, plan.lane)


@dataclass(frozen=True)
class Call:
    """The two launches of a call. `number`: of `space` to the proxies; `result`: where peers in `direct` store."""

    fabric: CudaFabric
    posting: Posting
    posted: Posted
    bags: Bags
    plan: Plan
    space: SymmetricBuffer
    number: int
    whole: torch.Tensor
    result: Result | None
    direct: tuple[int, ...]

    def launch(self, only_load: bool = False) -> None:
        """`only_load`: nothing but load the kernels and upload their lists, before anything waits."""
        if only_load and torch.cuda.is_current_stream_capturing():
            return
        rank, layout = self.fabric.group.rank, self.posted.layout
        sources = [one for one, width in enumerate(layout.sent) if width and one != rank]
        peers = [one for one in sources if one in self.direct]
        here = [parcel for parcel, ranges in enumerate(chunks(self.posted.batches, self.plan)) if ranges[rank][1]]
        told: tuple[int, ...] = ()
        awaited: tuple[int, ...] = ()
        if self.result is not None:
            words = self.result.exchange.words("fused")
            told, awaited = tuple(words.told(peers, here)), tuple(words.awaited(peers, here))
        found = self.slices()
        arrivals = self.posted.arrivals(self.plan, rank, [one for one in sources if one not in self.direct])
        post, tickets = self._posting(found, told, only_load)
        take = self._taking(tickets, arrivals, awaited, only_load)
        if not only_load:
            self.fabric.gate()()
        with timeline.event("lookup and post", engine="compute", bags=sum(one.bags for one in found)):
            post()
        with timeline.event("take", engine=self.plan.lane, slices=len(arrivals)):
            take()

    def slices(self) -> list[Slice]:
        """In the plan's order: posted, or stored into a peer's place, or this rank's own."""
        rank, layout, size = self.fabric.group.rank, self.posted.layout, self.posted.item_size
        found = []
        for one in slices(self.posted.batches, self.plan, rank) if self.bags.tables else ():
            if one.destination == rank:
                found.append(Slice(one.row * layout.room * size, layout.room, one.first, one.bags))
            elif one.destination in self.direct:
                assert self.result is not None
                found += self.result.slices([one], self.result.exchange.words("fused"))
            else:
                source = self.posted.source(rank, one.first)
                there = self.posted.place(one.destination, rank, one.row)
                signal = signal_of(rank, one.parcel)
                found.append(
                    Slice(source, self.bags.width, one.first, one.bags, signal, to=one.destination, there=there)
                )
        return found

    def _posting(
        self, found: Sequence[Slice], told: tuple[int, ...], only_load: bool
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """The first launch, its lists uploaded, and a ticket for the other one."""
        from ..kernels import embedding_posts
        from ..kernels.embedding import TICKET_WORDS

        proxy, rank, whole = self.posting.proxy, self.fabric.group.rank, self.whole
        lookup = Lookup(self.fabric, self.bags, self.plan, self.posted.layout.columns[rank])
        arguments, constants, ctas = lookup.pooling(found, whole, whole, more_tickets=1)
        about = (
            proxy.address, proxy.head.data_ptr(), proxy.capacity, self.number, self.space.address(rank), self._half,
        )  # fmt: skip
        ring, words = self._table("ring", about), self._table("words", (*told, 0))  # never an empty list
        place = 1 if self.result is None else self.result.place + 1
        grid, counts, state = (ctas,), (len(found), len(told)), self.posting.state
        if only_load:
            if is_loaded(self.fabric, "posting", arguments, constants):
                return _nothing, arguments[-1]
            self.fabric.settle()
            grid, counts, state = (1,), (0, 0), self.posting.idle
        kernel: Any = embedding_posts.posting_kernel

        def post() -> None:
            kernel[grid](
                *arguments, counts[0], self.bags.values.numel(), ring, words, counts[1], place, whole.data_ptr(),
                state, *self._watch, LANES=_THREADS, **constants,
            )  # fmt: skip

        return post, arguments[-1][(len(found) + 1) * TICKET_WORDS :]

    def _taking(
        self, ticket: torch.Tensor, arrivals: Sequence[Arrival], awaited: tuple[int, ...], only_load: bool
    ) -> Callable[[], None]:
        """The second launch, its lists uploaded."""
        from ..kernels import embedding_posts

        whole, size, sent, room = self.whole, self.posted.item_size, self.posted.layout.sent, self.posted.layout.room
        rank, signals = self.fabric.group.rank, self.posting.proxy.signals
        memory, numbers = self.space.address(rank), [signal_of(one.source, one.parcel) for one in arrivals]
        lines = [
            (signals.address(rank, number), number, self.posted.place(rank, one.source, one.row), sent[one.source],
             one.by, one.row, one.rows, one.to, one.columns, room)
            for one, number in zip(arrivals, numbers, strict=True)
        ]  # fmt: skip
        listed = self._table("arrivals", (*itertools.chain.from_iterable(lines), 0))
        once = tuple(dict.fromkeys(numbers))
        counters, words = self._table("counters", (*once, 0)), self._table("words", (*awaited, 0))
        longest = max((one.columns for one in arrivals), default=1)
        columns = min(_MOST_COLUMNS, max(16 // size, 1 << (longest - 1).bit_length()))
        block = 4 * max(1, _THREADS * 16 // (columns * size))
        constants = {
            "BAGS": block, "COLUMNS": columns, "ALIGNMENT": self._alignment(arrivals), "LANES": _THREADS,
            "num_warps": _THREADS // 32,
        }  # fmt: skip
        items = max((-(-one.rows // block) * -(-one.columns // columns) for one in arrivals), default=1)
        ctas = self.plan.share.communication_ctas or _TAKING_CTAS * self.fabric.multiprocessors
        grid, state = (min(items, ctas),), self.posting.state
        counts = len(lines), len(once), len(awaited), whole.nbytes
        if only_load:
            if is_loaded(self.fabric, "taking", (whole,), constants):
                return _nothing
            self.fabric.settle()
            grid, counts, state = (1,), (0, 0, 0, 0), self.posting.idle
        kernel: Any = embedding_posts.take_kernel

        def take() -> None:
            kernel[grid](
                whole, listed, counts[0], memory, self._half, counters, counts[1], words, counts[2], whole.data_ptr(),
                counts[3], ticket, state, *self._watch, **constants,
            )  # fmt: skip

        return take

    @property
    def _half(self) -> int:
        return half_of(self.space)

    @property
    def _watch(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.fabric.guard.abort, self.fabric.guard.error, int(self.fabric.group.deadline * 1e9)

    def _table(self, name: str, numbers: tuple[int, ...]) -> torch.Tensor:
        return device_table(self.fabric, (name, numbers), lambda: np.array(numbers, np.int64))

    def _alignment(self, arrivals: Sequence[Arrival]) -> int:
        """Elements that all addresses of what is brought are multiples of: those of 16 bytes, or one."""
        size, sent, room = self.posted.item_size, self.posted.layout.sent, self.posted.layout.room
        bytes_of = [self.whole.data_ptr(), room * size]
        for one in arrivals:
            place = self.posted.place(self.fabric.group.rank, one.source, one.row)
            bytes_of += [place, sent[one.source] * size, one.by * size, one.to * size, one.columns * size]
        return 16 // size if all(one % 16 == 0 for one in bytes_of) else 1


def _nothing() -> None:
    """What is left to do for a kernel that was loaded before."""
