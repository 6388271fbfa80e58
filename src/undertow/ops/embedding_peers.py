"""Results of embedding_all_to_all that peers write straight into.

**Places.** Each rank has a few places for results in symmetric memory. The tensor that a call returns *is* such a
place: nothing is copied after the last peer has stored. A place is leased to that tensor and free again when its memory
is; if none can be leased (the caller keeps old results), the result is copied out of the first place, which is never
leased. A source that the watchdog releases from its wait finds a 1 and stores there, too: results that were given out
stay as they were.

    place 0      copied out of     place 1      of eager calls     place 2, ...     of captured calls

The result of a captured call is what torch calls a static output: each replay writes to the same place, also when the
tensor was dropped. So the place stays the graph's until that is destroyed. A later call of the same capture may have it
again once the tensor is dropped, as in torch's pool of a graph: the replay itself orders the two. Eager calls have a
place of their own, and calls of other captures take another or copy out. When a graph is replayed, and what was read of
its results by then, is for its owner to order.

Which place a result goes to is the destination's own choice, told to the sources in a word:

    destination d:  choice[d, parcel] at every source s := 1 + place      (releases: what read the place before is done)
    source s:       wait for choice[d, parcel] of all its slices, kernel  (acquires; the kernel reads the words itself)
                    the last finisher of a slice clears its choice, then sets full[s, parcel] at d := 1  (releases both)
    destination d:  wait for full[s, parcel], clear it                    (acquires the slice)

Only constants are written, and every word is cleared before its writer can come again: a destination chooses anew only
after it has seen the slice, which was signalled after its choice was cleared; a source sets `full` only after a choice
that follows the clearing. So a captured call can be replayed, as often and as fast as one likes.

**Who waits.** Grain `fused` is one kernel (`kernels/embedding.py`, `exchange_kernel`) that does all of this itself:
"done" and "follows" are then the order of launches on the stream, and it looks at the deadline, reports and poisons.
Nothing guards the stream of such a call. The other grains wait by stream memory operations on both sides of their
kernels. Each way has words of its own: the watchdog sets those that streams wait for, and a kernel must not take that
for a peer's word. Calls of both may follow each other, since all ranks make the same calls; a call's choice comes after
the slices of the call before, whichever words told of them.

**Streams.** Calls come one after the other, whatever streams they are on (`take`, `finish`): they share words, and the
place that is copied out of, and a kernel waits on all its SMs for those of other ranks. What the stream of a call did
with its result before that was dropped is done before the place is told again. Of other streams that read the result
nobody knows, as torch's `record_stream` knows only torch's own memory: the stream of the call must wait for them before
the result is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InvalidArgument
from ..fabric import stream_memory, timeline
from ..fabric.base import WAITING
from ..fabric.captures import Captured
from ..fabric.cuda import CudaFabric
from ..fabric.signals import Step
from ..plan.bags import Layout, Leaving, slices
from ..plan.plan import Plan
from ..plan.tiles import chunks
from .bags import Bags, add_up
from .embedding_cuda import CudaPooling, Lookup, Slice
from .overlap import overlap
from .product import NoProduct, Product

if TYPE_CHECKING:
    from ..fabric.base import Lane

MOST_PARCELS = 16  # words for so many slices of a (source, destination)
PLACES = 3  # the same on all ranks; more of them let more results of captured calls be kept
_COPIED, _EAGER, _CAPTURED = 0, 1, 2  # the place that is never leased, that of eager calls, the first of captured ones
_ALIGNMENT = 128
_EXCHANGE = object()  # name of what is kept with a fabric


class _Leased:
    """Memory that a tensor stands on: torch keeps this object until nothing uses that memory any more."""

    def __init__(self, address: int, nbytes: int, owner: torch.Tensor) -> None:
        self.owner = owner  # keeps the memory, should the places grow meanwhile
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class _Lease(NamedTuple):
    """Who has a place: a tensor, given out on a stream, and the graph whose replays write there."""

    tensor: weakref.ref[_Leased]
    stream: torch.cuda.Stream
    graph: Captured | None


class Words:
    """Choices and arrivals of all slices between the ranks of a group. Making them is collective."""

    def __init__(self, fabric: CudaFabric, in_kernel: bool) -> None:
        self._size, self._rank = fabric.group.size, fabric.group.rank
        self._signals = fabric.signals(2 * self._size * MOST_PARCELS)
        self._in_kernel = in_kernel  # it knows its own rank's choice

    def _chosen(self, destination: int, parcel: int) -> int:
        return destination * MOST_PARCELS + parcel

    def _full(self, source: int, parcel: int) -> int:
        return (self._size + source) * MOST_PARCELS + parcel

    def begin(self, place: int, sources: Sequence[int], parcels: Sequence[int], leaving: Sequence[Leaving]) -> None:
        """Tell `sources`, and this rank itself, the place for these parcels; wait for the choices of who gets mine."""
        mine = [self._chosen(self._rank, parcel) for parcel in parcels]
        steps = [Step(False, one, word, place + 1) for one in (self._rank, *sources) for word in mine]
        theirs = [(one.destination, one.parcel) for one in leaving if one.destination != self._rank]
        steps += [Step(True, self._rank, self._chosen(to, parcel), 1, to) for to, parcel in theirs]
        if steps:
            self._signals.perform(steps)

    def arrived(self, sources: Sequence[int], parcels: Sequence[int]) -> None:
        """Wait for these parcels of these sources, and clear their words."""
        words = [(self._full(source, parcel), source) for source in sources for parcel in parcels]
        steps = [Step(True, self._rank, word, 1, source) for word, source in words]
        steps += [Step(False, self._rank, word, 0) for word, _ in words]
        if steps:
            self._signals.perform(steps)

    def told(self, sources: Sequence[int], parcels: Sequence[int]) -> list[int]:
        """Addresses of the words that tell these sources the place for these parcels."""
        mine = [self._chosen(self._rank, parcel) for parcel in parcels]
        return [self._signals.address(one, word) for one in sources for word in mine]

    def awaited(self, sources: Sequence[int], parcels: Sequence[int]) -> list[int]:
        """Addresses of the words that these sources set when these parcels are here."""
        return [self._signals.address(self._rank, self._full(one, parcel)) for one in sources for parcel in parcels]

    def signal(self, destination: int, parcel: int) -> int:
        """Address of the word that says that this rank's slice is there; 0 for its own."""
        if destination == self._rank:
            return 0
        return self._signals.address(destination, self._full(self._rank, parcel))

    def choice(self, destination: int, parcel: int) -> int:
        """Address of the word by which the destination told its place; 0 where the kernel knows it."""
        if self._in_kernel and destination == self._rank:
            return 0
        return self._signals.address(self._rank, self._chosen(destination, parcel))


class Exchange:
    """The places and words of one group. Opening it is collective."""

    def __init__(self, fabric: CudaFabric) -> None:
        self._fabric, self._size, self._rank = fabric, fabric.group.size, fabric.group.rank
        self._streams, self._kernels = Words(fabric, in_kernel=False), Words(fabric, in_kernel=True)
        self._leases: dict[tuple[int, int], _Lease] = {}
        self._graph: Captured | None = None  # of the last captured call
        self._room = 0  # of a place, the largest yet
        self._memory: dict[int, torch.Tensor] = {}  # that places are or were in, by address

    @staticmethod
    def of(fabric: CudaFabric) -> Exchange:
        found = fabric.kept.get(id(_EXCHANGE))
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                was = "the first one over peers, inside a CUDA graph capture"
                raise InvalidArgument(argument="call", was=was, must="made once before it is captured: it makes words")
            found = fabric.kept[id(_EXCHANGE)] = Exchange(fabric)
        assert isinstance(found, Exchange)
        return found

    def words(self, grain: str) -> Words:
        return self._kernels if grain == "fused" else self._streams

    def take(self, layout: Layout, batches: Sequence[int], like: torch.Tensor) -> Result:
        """A place for the result of a call that comes after the last one. Collective where the places have to grow."""
        self._fabric.follow(WAITING)
        size = like.element_size()
        room = -(-max(1, max(batches) * layout.room * size) // _ALIGNMENT) * _ALIGNMENT
        graph = self._captured()
        if room > self._room and graph is None:
            self._let_go()
            self._room = room
        space = self._fabric.workspace("embedding results", PLACES * room)
        # By the workspace, which all shapes share, not by this call's shape: a place must not reach into another one's.
        distance = space.nbytes // PLACES // _ALIGNMENT * _ALIGNMENT
        base = [space.address(one) if space.reaches(one) else 0 for one in range(self._size)]  # 0: others are posted to
        mine, rows = base[self._rank], batches[self._rank]
        self._memory.setdefault(mine, space.local)
        leasable = range(_EAGER, _CAPTURED) if graph is None else range(_CAPTURED, PLACES)
        place = next((one for one in leasable if self._is_free(mine, one, graph)), _COPIED)
        nbytes = rows * layout.room * size
        if nbytes == 0:
            return Result(self, base, distance, place, layout, like.new_empty(rows, layout.room))
        leased = _Leased(mine + place * distance, nbytes, space.local)
        if place != _COPIED:
            self._lease(mine, place, leased, graph)
        whole = torch.as_tensor(leased, device=like.device).view(like.dtype).view(rows, layout.room)
        return Result(self, base, distance, place, layout, whole)

    def enqueued(self) -> None:
        """A call was enqueued, with all that reads where it is copied out of."""
        self._fabric.enqueued(WAITING)

    def _let_go(self) -> None:
        """Of memory that no result stands on any more, now that places grow and the rank is at rest.

        Not when the last result is dropped, whenever that is: symmetric memory that goes waits for all kernels of the
        rank, with the interpreter's lock in its hands, and one of them may be waiting for the proxy's thread.
        """
        self._fabric.rest()
        used = {base for (base, _), lease in self._leases.items() if lease.tensor() is not None}
        self._memory = {base: memory for base, memory in self._memory.items() if base in used}

    def _captured(self) -> Captured | None:
        """The graph that this call goes into, if it is captured."""
        if not torch.cuda.is_current_stream_capturing():
            return None
        stream = stream_memory.current_stream(self._fabric.device)
        if self._graph is None or self._graph.number != stream_memory.capture_of(stream):
            self._graph = Captured(stream)
        return self._graph

    def _is_free(self, base: int, place: int, graph: Captured | None) -> bool:
        held = self._leases.get((base, place))
        if held is None:
            return True
        if held.tensor() is not None:
            return False
        return held.graph is None or held.graph is graph or held.graph.is_gone

    def _lease(self, base: int, place: int, leased: _Leased, graph: Captured | None) -> None:
        """To a call on the current stream, after what the stream of the one before was given.

        Between captures, there is no such order: an event means nothing outside of its own.
        """
        here = torch.cuda.current_stream(self._fabric.device)
        before = self._leases.get((base, place))
        if before is not None and before.stream != here and before.graph is graph:
            here.wait_stream(before.stream)
        self._leases[base, place] = _Lease(weakref.ref(leased), here, graph)


@dataclass(frozen=True)
class Result:
    """A call's place (`whole` [rows, room] stands on it), and the slices that lead into those of others."""

    exchange: Exchange
    base: list[int]
    distance: int
    place: int
    layout: Layout
    whole: torch.Tensor

    def slices(self, leaving: Sequence[Leaving], words: Words, source: torch.Tensor | None = None) -> list[Slice]:
        """Where pooled rows go; `source` [samples, width] where they were pooled before."""
        size, room = self.whole.element_size(), self.layout.room
        found = []
        for one in leaving:
            signal = words.signal(one.destination, one.parcel)
            address = self.base[one.destination] + one.row * room * size
            width = 0 if source is None else source.shape[1]
            by = one.first * width * size
            choice, distance = words.choice(one.destination, one.parcel), self.distance // size
            found.append(Slice(address, room, one.first, one.bags, signal, by, width, choice, distance))
        return found

    def finish(self) -> torch.Tensor:
        """[rows, width], summed where rows of a table came from several ranks; of its own memory or leased."""
        if self.layout.sums:
            found = add_up(self.whole, self.layout)
        else:
            found = self.whole.clone() if self.place == _COPIED else self.whole
        self.exchange.enqueued()
        return found


def run_over_peers(
    fabric: CudaFabric, lane: Lane, bags: Bags, layout: Layout, batches: Sequence[int], plan: Plan, result: Result,
    compute: bool = True,
) -> None:  # fmt: skip
    """Pool and exchange by stores into peers' memory; `compute` False: only what moves, for measurements."""
    rank = fabric.group.rank
    leaving = slices(batches, plan, rank) if bags.tables else ()
    lookup = Lookup(fabric, bags, plan, layout.columns[rank])
    sources = [one for one, width in enumerate(layout.sent) if width and one != rank]
    here = [parcel for parcel, ranges in enumerate(chunks(batches, plan)) if ranges[rank][1]]
    words = result.exchange.words(plan.grain)
    if len(plan.parcels) > MOST_PARCELS:
        was = f"of {len(plan.parcels)} parcels"
        raise InvalidArgument(argument="plan", was=was, must=f"of at most {MOST_PARCELS} over peers")
    if plan.grain == "fused":
        found, told, awaited = result.slices(leaving, words), words.told(sources, here), words.awaited(sources, here)
        lookup.exchange(found, told, awaited, result.place + 1, result.whole, only_load=True)
        fabric.gate()()
        with timeline.event("lookup and send", engine="compute", bags=sum(one.bags for one in leaving)):
            lookup.exchange(found, told, awaited, result.place + 1, result.whole)
        return
    like = result.whole
    buffer = torch.empty(bags.samples, bags.width, dtype=like.dtype, device=like.device)
    at_once = plan.grain == "serial" and len(plan.parcels) == 1  # nothing is gained by own rows that go first
    parcels = [
        result.slices(
            [one for one in leaving if one.parcel == parcel and (at_once or one.destination != rank)], words, buffer
        )
        for parcel in range(len(plan.parcels))
    ]
    mine = result.slices([one for one in leaving if one.destination == rank and not at_once], words, buffer)
    product: Product = NoProduct()
    if compute:
        product = CudaPooling(fabric, bags, batches, plan, buffer, lambda: lookup.spread(mine, buffer))
        product.load()
        lookup.spread(mine, buffer, only_load=True)
    ctas = plan.share.communication_ctas
    for found in parcels:
        lookup.spread(found, buffer, ctas, only_load=True)

    def carry(parcel: int) -> None:
        with timeline.event("spread", engine=lane.name, slices=len(parcels[parcel])):
            lookup.spread(parcels[parcel], buffer, ctas)

    def collect(parcel: int) -> None:
        words.arrived(sources if parcel in here else (), [parcel])

    words.begin(result.place, sources, here, leaving)
    overlap(fabric, lane, plan, product, carry, (collect,), len(plan.parcels))
