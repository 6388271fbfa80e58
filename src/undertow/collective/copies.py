"""Collectives by copies alone: pieces that a lane carries, and sums by a bounded kernel where there is one to make.

| collective | what rank r sends | what it does with what comes |
|---|---|---|
| all_gather, broadcast | the same bytes to all (copied out once) | puts them in their place |
| all_to_all, gather, scatter | a piece to each | puts them in their place |
| reduce_scatter, reduce | a piece to each, to be summed there | sums in rank order |
| all_reduce | a part to each, to be summed there; then its sum to all | both |

Over lane `dma` no SM is used, but for the sums. A piece is cut into parcels where the lane needs a place for each
(`Variant`); two are under way at a time, in the order that `carry` explains:

    moved     send 0, send 1, receive 0, send 2, receive 1, ...
    summed    give 0, give 1, reduce 0, give 2, reduce 1, ...        (and share p after reduce p, receive p one later)

so whoever waits for room or bytes waits for something that every rank does before its own wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from ..fabric.symmetric import SymmetricBuffer
from ..plan.plan import split
from .carry import Carrier, refuse_captured
from .cpu_runtime import Whole
from .lane_sum import CTAS, OPERATIONS, Sum

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane

Pieces = list[torch.Tensor]
COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
)  # fmt: skip
_SUMMED = ("all_reduce", "reduce_scatter", "reduce")
_SHARED = ("all_gather", "broadcast")


@dataclass(frozen=True, slots=True)
class Variant:
    """How pieces of up to `up_to` bytes travel: `parcel` bytes at most at a time; `together` lets the lane join the
    messages to several peers (one copy of several rows, one copy out for all) instead of one copy for each peer.
    """

    up_to: float
    parcel: float
    together: bool = True

    @property
    def name(self) -> str:
        joined = "batched" if self.together else "one copy per peer"
        return joined if self.parcel == inf else f"{joined}, parcels of {int(self.parcel) >> 10} KiB"


# By the longest piece. A lane that puts bytes in their place cuts them itself, in chunks that fit its ring; one that
# needs places of its own gets parcels, so that those stay small. Measured over the host link of an H200, 4 ranks: one
# batch beats one copy for each peer by 1.3 to 1.5 in an all_gather of any size, and up to 256 KiB in an all_to_all
# (above, the two are within 5%); an all_reduce in one parcel beats parcels of 2 MiB, by 1.1 at 4 MiB and 1.4 at 16.
MOVED = {True: (Variant(inf, inf),), False: (Variant(1 << 20, inf), Variant(inf, 1 << 20))}
SUMMED = {
    "cpu": (Variant(1 << 20, inf), Variant(inf, 1 << 20)),
    "cuda": (Variant(16 << 20, inf), Variant(inf, 16 << 20)),
}


def choose(collective: str, longest: int, lane: Lane, device: str) -> Variant:
    """The variant for pieces of at most `longest` bytes; the same on all ranks, as all know the longest."""
    table = SUMMED[device] if collective in _SUMMED else MOVED[lane.lands_anywhere]
    return next(one for one in table if longest <= one.up_to)


class Copies:
    """One collective over one lane of a group. Making one opens the lane, which is collective the first time."""

    poisons = False

    def __init__(
        self,
        fabric: Fabric,
        lane: str,
        collective: str,
        root: int = 0,
        ctas: int | None = None,
        variant: Variant | None = None,
    ) -> None:
        if collective not in COLLECTIVES:
            raise InvalidArgument(argument="collective", was=repr(collective), must=f"one of {', '.join(COLLECTIVES)}")
        self._fabric, self._group = fabric, fabric.group
        self._lane = fabric.lane(lane)
        self._collective, self._root = collective, root
        self._ctas, self._variant = ctas, variant
        self._sum = Sum(fabric.group.device, CTAS if ctas is None else ctas)

    def describe(self) -> str:
        return f"{self._collective} over {self._lane.describe()}"

    def run(
        self,
        source: torch.Tensor | SymmetricBuffer,
        out: torch.Tensor | SymmetricBuffer,
        span_lengths: Sequence[int],
        operation: str = "sum",
    ) -> None:
        """One call, on contiguous memory; `span_lengths` in elements as the collective's contract says."""
        if operation not in OPERATIONS:
            raise InvalidArgument(argument="operation", was=repr(operation), must=f"one of {', '.join(OPERATIONS)}")
        if self._lane.name == "net":
            refuse_captured(self._group.device)
        given = source.local if isinstance(source, SymmetricBuffer) else source
        result = out.local if isinstance(out, SymmetricBuffer) else out
        flat, place = given.view(-1), result.view(-1)
        sent, own, received, longest = self._pieces(flat, place, list(span_lengths))
        size = flat.element_size()
        variant = self._variant or choose(self._collective, longest * size, self._lane, self._group.device.type)
        room = longest if variant.parcel == inf else max(1, int(variant.parcel) // size)
        parcels = max(1, -(-longest // max(1, room)))
        self._lane.limit(self._ctas)
        if self._collective in _SUMMED:
            self._sum.warm_up(flat.dtype, [self._group.size], operation)
        with Whole(self._group):
            carrier = Carrier(self._fabric, self._lane, flat, min(longest, room))
            if self._collective in _SUMMED:
                self._summed(carrier, sent, own, received, parcels, operation)
            else:
                self._moved(carrier, sent, own, received, parcels, variant.together)
            self._lane.flush()

    def close(self) -> None:
        """The lane is the fabric's, and so are the places."""

    # -- the two orders ------------------------------------------------------------------------------------------------

    def _moved(
        self, carrier: Carrier, sent: Pieces, own: Pieces, received: Pieces, parcels: int, together: bool
    ) -> None:
        shared = together and self._collective in _SHARED
        rank = self._group.rank

        def send(parcel: int) -> None:
            if parcel >= parcels:
                return
            pieces = [_part(one, parcel, parcels) for one in sent]
            if shared:
                # Whoever has nothing to share has an empty piece, and the carrier sends none.
                carrier.share(parcel, pieces[(rank + 1) % len(pieces)])
            elif together:
                carrier.send(parcel, pieces)
            else:
                for peer, one in enumerate(pieces):
                    carrier.send(parcel, [one if other == peer else one[:0] for other in range(len(pieces))])

        send(0)
        if own and own[0].data_ptr() != own[1].data_ptr():
            own[1].copy_(own[0])
        for parcel in range(parcels):
            send(parcel + 1)
            carrier.receive(parcel, [_part(one, parcel, parcels) for one in received], shared=shared)

    def _summed(
        self, carrier: Carrier, sent: Pieces, own: Pieces, received: Pieces, parcels: int, operation: str
    ) -> None:
        rank, every = self._group.rank, self._collective == "all_reduce"
        mine, total = own

        def give(parcel: int) -> None:
            if parcel < parcels:
                carrier.give(parcel, [_part(one, parcel, parcels) for one in sent])

        def collect(parcel: int) -> None:
            places = [_part(one, parcel, parcels) for one in received]
            places[rank] = places[rank][:0]
            carrier.receive(parcel, places, shared=True)

        def combine(place: torch.Tensor) -> Callable[[list[torch.Tensor]], None]:
            return lambda parts: self._sum(place, parts, operation)

        give(0)
        give(1)
        for parcel in range(parcels):
            place = _part(total, parcel, parcels)
            carrier.reduce(parcel, _part(mine, parcel, parcels), combine(place))
            if every:
                carrier.share(parcel, place)
            give(parcel + 2)
            if every and parcel:
                collect(parcel - 1)
        if every:
            collect(parcels - 1)

    # -- who has what for whom -----------------------------------------------------------------------------------------

    def _pieces(self, source: torch.Tensor, out: torch.Tensor, spans: list[int]) -> tuple[Pieces, Pieces, Pieces, int]:
        """What goes to each rank, (from, to) of what stays here, what comes from each, and the longest of all ranks."""
        rank, size, root = self._group.rank, self._group.size, self._root
        nothing, nowhere = source[:0], out[:0]
        none = [nothing] * size
        name = self._collective
        if name == "all_to_all":
            to = [spans[rank * size + one] for one in range(size)]
            come = [spans[one * size + rank] for one in range(size)]
            sent, received = _cut(source, to), _cut(out, come)
            return sent, [sent[rank], received[rank]], received, max(spans)
        if name == "broadcast":
            if rank == root:
                return [source[: spans[0]]] * size, [source[: spans[0]], out[: spans[0]]], [nowhere] * size, spans[0]
            return none, [], [out[: spans[0]] if one == root else nowhere for one in range(size)], spans[0]
        if name == "reduce":
            sent = [source[: spans[0]] if one == root else nothing for one in range(size)]
            mine = [source[: spans[0]], out[: spans[0]]] if rank == root else [nothing, nowhere]
            return sent, mine, [nowhere] * size, spans[0]
        if name == "all_reduce":
            counts = [stop - start for start, stop in split(spans[0], size)]
            sent, places = _cut(source, counts), _cut(out, counts)
            return sent, [sent[rank], places[rank]], places, max(counts)
        longest = max(spans)
        if name == "all_gather":
            places = _cut(out, spans)
            return [source[: spans[rank]]] * size, [source[: spans[rank]], places[rank]], places, longest
        if name == "reduce_scatter":
            sent = _cut(source, spans)
            return sent, [sent[rank], out[: spans[rank]]], [nowhere] * size, longest
        if name == "gather":
            sent = [source[: spans[rank]] if one == root else nothing for one in range(size)]
            places = _cut(out, spans) if rank == root else [nowhere] * size
            return sent, [source[: spans[rank]], places[rank]] if rank == root else [], places, longest
        sent = _cut(source, spans) if rank == root else none  # scatter
        places = [out[: spans[rank]] if one == root else nowhere for one in range(size)]
        return sent, [sent[rank], out[: spans[rank]]] if rank == root else [], places, longest


def _cut(tensor: torch.Tensor, counts: Sequence[int]) -> Pieces:
    return list(torch.split(tensor[: sum(counts)], list(counts)))


def _part(piece: torch.Tensor, parcel: int, parcels: int) -> torch.Tensor:
    """The parcel's part of a piece; pieces of one length are cut alike on all ranks."""
    if parcels == 1:
        return piece
    size, longer = divmod(piece.numel(), parcels)
    start = parcel * size + min(parcel, longer)
    return piece[start : start + size + (parcel < longer)]
