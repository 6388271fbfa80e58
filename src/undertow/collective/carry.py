"""Parcels over a lane, one after the other: each rank sends its pieces to their owners and takes what is its own.

    send      pieces[d] leaves for rank d                         (the sending half of an all-to-all)
    share     the same piece leaves for everybody                 (the sending half of an all-gather)
    receive   outs[s] = what rank s sent or shared                (the other half)
    give      pieces[d] leaves for rank d, to be summed there     (the sending half of a reduce-scatter)
    reduce    the sum of what all ranks have for me, in rank order

Ranks name their peers in rotated order, so that no receiver is everybody's first, and every rank carries the same
parcels in the same order: a lane's messages of two ranks then always meet. Two parcels may be under way at a time: a
parcel's *parity* chooses its places and hand-off slots. A slot guards one place, so places depend on the workspace and
not on the call: a rank that runs ahead would otherwise write over what a slower one has yet to read.

A lane that moves `in_rounds` does both halves of a parcel at once, on all ranks in the same order. What leaves is then
kept until the other half of its parcel is asked for, which every rank does, also one that gets nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from ..fabric.base import Incoming, Outgoing
from ..fabric.symmetric import SymmetricBuffer
from .rounds import Rounds

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane

_ALIGNMENT = 128
_REDUCE, _SEND = 0, 1  # kinds of messages; each has two slots and two places for every sender
_KINDS, _PARITIES = 2, 2
Combine = Callable[[list[torch.Tensor]], None]


class Carrier:
    """The parcels of one call. `longest`: elements of the longest piece that any rank sends in any of them.

    `beside_waiting`: whether a kernel that fills the SMs waits for what comes: a round, which needs some of them where
    a GPU's backend moves it, must not be what it waits for.
    """

    def __init__(
        self, fabric: Fabric, lane: Lane, like: torch.Tensor, longest: int, beside_waiting: bool = False
    ) -> None:
        group = fabric.group
        self._lane, self._rank, self._size = lane, group.rank, group.size
        self._rounds = Rounds(group, lane) if lane.in_rounds and not beside_waiting else None
        self._symmetric: SymmetricBuffer | None = None
        self._private: torch.Tensor | None = None
        self._room = longest
        if self._size == 1 or longest == 0:
            return
        if lane.name == "net" and self._rounds is None:
            refuse_captured(like.device)
        if lane.lands_anywhere:  # only what is to be summed needs a place of its own
            self._private = like.new_empty(_PARITIES * self._size * longest)
            return
        count = _KINDS * _PARITIES * self._size
        space = fabric.workspace(f"parcels over {lane.name}", count * (longest * like.element_size() + _ALIGNMENT))
        self._symmetric = space.as_type(like.dtype)
        self._room = space.nbytes // count // _ALIGNMENT * _ALIGNMENT // like.element_size()

    def send(self, parcel: int, pieces: Sequence[torch.Tensor]) -> None:
        """pieces[d] to rank d; the one for this rank stays."""
        self._leave(_SEND, parcel, self._outgoing(_SEND, parcel, pieces))

    def share(self, parcel: int, piece: torch.Tensor) -> None:
        """The same to all others."""
        outgoing = self._outgoing(_SEND, parcel, [piece] * self._size)
        if self._rounds is not None:
            self._leave(_SEND, parcel, outgoing)
        elif outgoing:
            one = outgoing[0]
            self._lane.share([each.peer for each in outgoing], piece, one.buffer, one.start, one.slot)

    def receive(self, parcel: int, outs: Sequence[torch.Tensor], shared: bool = False) -> None:
        """outs[s] = what rank s sent in this parcel (or shared); the one of this rank is left as it is."""
        incoming = self._incoming(_SEND, parcel, [one.numel() for one in outs], outs, shared)
        views = self._arrive(_SEND, parcel, incoming)
        if not self._lane.lands_anywhere:
            self._lane.unload([(outs[one.peer], view) for one, view in zip(incoming, views, strict=True)])
        self._lane.free_all(incoming)

    def give(self, parcel: int, pieces: Sequence[torch.Tensor]) -> None:
        """pieces[d] to rank d, which takes them by `reduce`; the one for this rank stays."""
        self._leave(_REDUCE, parcel, self._outgoing(_REDUCE, parcel, pieces))

    def reduce(self, parcel: int, mine: torch.Tensor, combine: Combine) -> None:
        """`combine(parts)` with what ranks 0, 1, ... have for this rank (here: `mine`), unless it is nothing."""
        incoming = self._incoming(_REDUCE, parcel, [mine.numel()] * self._size, None)
        arrived = self._arrive(_REDUCE, parcel, incoming)
        if mine.numel() == 0:
            return
        parts = {self._rank: mine, **{one.peer: view for one, view in zip(incoming, arrived, strict=True)}}
        combine([parts[rank] for rank in range(self._size)])
        self._lane.free_all(incoming)

    def _leave(self, kind: int, parcel: int, outgoing: Sequence[Outgoing]) -> None:
        if self._rounds is not None:
            self._rounds.keep((kind, parcel), outgoing)
        else:
            self._lane.exchange(outgoing, [])

    def _arrive(self, kind: int, parcel: int, incoming: Sequence[Incoming]) -> list[torch.Tensor]:
        if self._rounds is not None:
            return self._rounds.move((kind, parcel), incoming)
        return self._lane.exchange([], incoming)

    def _outgoing(self, kind: int, parcel: int, pieces: Sequence[torch.Tensor]) -> list[Outgoing]:
        ahead = [(self._rank + step) % self._size for step in range(1, self._size)]
        longest = max(one.numel() for one in pieces)
        if longest > self._room:  # it would reach into the next sender's place
            raise InvalidArgument(argument="piece", was=f"of {longest} elements", must=f"of at most {self._room}")
        start, slot = self._place(kind, parcel, self._rank), _slot(kind, parcel)
        return [Outgoing(peer, pieces[peer], self._symmetric, start, slot) for peer in ahead if pieces[peer].numel()]

    def _incoming(
        self, kind: int, parcel: int, counts: Sequence[int], outs: Sequence[torch.Tensor] | None, shared: bool = False
    ) -> list[Incoming]:
        behind = [(self._rank - step) % self._size for step in range(1, self._size)]
        found = []
        for peer in behind:
            if counts[peer]:
                start = self._place(kind, parcel, peer)
                into = None
                if self._private is not None:
                    into = outs[peer] if outs is not None else self._private[start : start + counts[peer]]
                found.append(Incoming(peer, self._symmetric, start, counts[peer], _slot(kind, parcel), into, shared))
        return found

    def _place(self, kind: int, parcel: int, sender: int) -> int:
        """The first element of a place.

        Private memory has places only for what is reduced, by how far behind this rank the senders are: a lane that
        keeps its messages so brings them all in one copy.
        """
        if self._private is not None:
            return (parcel % _PARITIES * self._size + (sender - self._rank) % self._size) * self._room
        return ((kind * _PARITIES + parcel % _PARITIES) * self._size + sender) * self._room


def _slot(kind: int, parcel: int) -> int:
    return kind * _PARITIES + parcel % _PARITIES


def refuse_captured(device: torch.device) -> None:
    """A call whose messages the host waits for, where it would go into a graph; half-way it would end the group."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        must = "outside, or lane dma: the host waits for a network"
        raise InvalidArgument(argument="lane net", was="inside a CUDA graph capture", must=must)
