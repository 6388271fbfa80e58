"""Lanes of the CUDA fabric between ranks of one node.

`peer`   a copy kernel with a bounded number of CTAs stores into the peer's memory.
`dma`    copy engines. Between GPUs with peer access: one copy, enqueued by the sender. Without it, or where ranks share
         a GPU: staged through pinned host memory that both ranks map, in chunks, so that the copy out of one chunk and
         the copy in of the one before run at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import InvalidArgument
from . import stream_memory, timeline
from .base import Incoming, Lane, Outgoing, needed
from .pinned import PinnedSegment
from .signals import Step
from .stream_memory import Rows
from .symmetric import SymmetricBuffer
from .transfer import destination_address

if TYPE_CHECKING:
    from .cuda import CudaFabric

PEER_CTAS = 16
Message = tuple[int, int, torch.Tensor]  # a peer, a slot, and where the bytes are or go
Place = tuple[int, int]  # a peer, a chunk of the ring
_OVER = object()
_UNSEEN = contextlib.nullcontext()
_MOST_CHUNK = 8 << 20  # of 128 MB, chunks of 8 MB were fastest; whoever's it is, each costs the engine a pause
_MOST_STEP = (1 << 31) - 1  # bytes between two rows of one copy: the driver's limit
_FEW_RANKS, _MANY_SLOTS, _FEW_SLOTS = 4, 4, 2


def chunk_slots(ranks: int) -> int:
    """Chunks under way between two ranks: fewer where many pairs would pin much memory."""
    return _MANY_SLOTS if ranks <= _FEW_RANKS else _FEW_SLOTS


class PeerLane(Lane):
    """SM stores into the peer's memory. `ctas` is its share of the GPU."""

    name = "peer"

    def __init__(self, fabric: CudaFabric) -> None:
        from ..kernels import move

        self._move = move
        self._pairs = fabric.handoffs()
        self._guard, self._device = fabric.guard, fabric.device
        self._stops: dict[tuple[object, ...], bytes] = {}  # made once: packing costs the host more than enqueueing
        self.ctas = PEER_CTAS
        move.warm_up(fabric.device)  # a kernel loaded for the first time behind a waiting stream would hang
        fabric.group.barrier()

    def describe(self) -> str:
        return f"copy kernel of {self.ctas} CTAs into peer memory"

    def limit(self, ctas: int | None) -> None:
        self.ctas = PEER_CTAS if ctas is None else ctas

    def send(self, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int) -> None:
        self.exchange([Outgoing(peer, source, buffer, start, slot)], [])

    def receive(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> torch.Tensor:
        return self.exchange([], [Incoming(peer, buffer, start, count, slot)])[0]

    def exchange(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> list[torch.Tensor]:
        """One kernel copies to all peers; before and after it the stream stops once, not once for every peer.

        So all places must be free before the first is written: nothing that reads what a place held before may wait
        for a message of this exchange, or of a later one. Parcels of a call keep to that: a place is used again by the
        next but one, and what takes a parcel waits for no later one.
        """
        if outgoing:
            copies = [(_destination(one), one.source.view(-1)) for one in outgoing]
            self._stop(self._pairs.claiming, outgoing)
            total, peers = sum(one.source.nbytes for one in outgoing), [one.peer for one in outgoing]
            with timeline.event("copy", engine=self.name, bytes=total, to=peers[0] if len(peers) == 1 else peers):
                self._move.copy_all(copies, self.ctas)
            self._stop(self._pairs.delivering, outgoing)  # the stream's writes follow the kernel and release its stores
        if incoming:
            self._stop(self._pairs.accepting, incoming)
        return [one.place() for one in incoming]

    def unload(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._move.copy_all([(out.view(-1), view) for out, view in copies], self.ctas)

    def free(self, peer: int, slot: int) -> None:
        self._pairs.free(peer, slot)

    def free_all(self, incoming: Sequence[Incoming]) -> None:
        self._stop(self._pairs.freeing, incoming)

    def _stop(
        self, steps: Callable[[int, int], tuple[Step, ...]], messages: Sequence[Outgoing] | Sequence[Incoming]
    ) -> None:
        """One stop of the current stream, for all of these messages."""
        if not messages:
            return
        key = (steps.__name__, *((one.peer, one.slot) for one in messages))
        packed = self._stops.get(key)
        if packed is None:
            every = [step for one in messages for step in steps(one.peer, one.slot)]
            packed = self._stops[key] = self._pairs.packed(every)
        self._guard.perform(stream_memory.current_stream(self._device), packed)

    def close(self) -> None:
        self._pairs.release()


def _destination(one: Outgoing) -> torch.Tensor:
    """The place of a message in the peer's memory; refused if it is not inside."""
    buffer = needed(one.buffer)
    destination_address(buffer, one.peer, one.start, one.source)
    return buffer.peer(one.peer).view(-1)[one.start : one.start + one.source.numel()]


class CopyLane(Lane):
    """Peer-to-peer copies by copy engines; no SM is used between two GPUs."""

    name = "dma"

    def __init__(self, fabric: CudaFabric) -> None:
        self._device = fabric.device
        self._pairs = fabric.handoffs()
        # One for messages, one for what is shared: who waits for room must not hold back the other.
        self._sending, self._sharing = (stream_memory.new_stream(fabric.device, priority=-1) for _ in range(2))
        self._used: list[torch.cuda.Stream] = []  # since the last flush

    def describe(self) -> str:
        return "peer-to-peer copies by copy engine"

    def send(self, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int) -> None:
        self._copy(self._sending, peer, source, buffer, start, slot)

    def share(
        self, peers: Sequence[int], source: torch.Tensor, buffer: SymmetricBuffer | None, start: int, slot: int
    ) -> None:
        for peer in peers:
            self._copy(self._sharing, peer, source, needed(buffer), start, slot)

    def _copy(
        self, stream: torch.cuda.Stream, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int
    ) -> None:
        destination_address(buffer, peer, start, source)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if stream not in self._used:
            self._used.append(stream)
        with torch.cuda.stream(stream):
            self._pairs.claim(peer, slot)
            with timeline.event("copy", engine=self.name, bytes=source.nbytes, to=peer):
                buffer.peer(peer).view(-1)[start : start + source.numel()].copy_(source.view(-1), non_blocking=True)
            self._pairs.deliver(peer, slot)

    def receive(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> torch.Tensor:
        self._pairs.accept(peer, slot)
        return buffer.local.view(-1)[start : start + count]

    def free(self, peer: int, slot: int) -> None:
        self._pairs.free(peer, slot)

    def close(self) -> None:
        self._pairs.release()

    def flush(self) -> None:
        for stream in self._used:  # others may be no part of a capture that the caller is in
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._used.clear()


class StagedLane(Lane):
    """Copy engines through pinned host memory: out of the sender, into the receiver, chunk by chunk.

    One pinned segment for the group. Every (sender, receiver) has a ring of `chunk_slots` chunks there, and every
    sender one more for what it shares: that is copied out once, and in by each receiver. A receiver's rings lie one
    behind the other, by how far behind it the senders are, so that one copy brings what all of them sent. Where a
    message starts in its ring depends on its slot only, so neither side keeps a position, and a captured message can be
    replayed.

    Two streams per rank, out and in, and two more for what is shared, so that finished results do not stand behind
    pieces that are still to be computed. A rank's sends wait only for room, its receives only for bytes; both sides
    must name the messages between them in the same order.
    """

    name = "dma"
    lands_anywhere = True
    staged_chunk = _MOST_CHUNK

    def __init__(self, fabric: CudaFabric) -> None:
        self._size, self._rank, self._device = fabric.group.size, fabric.group.rank, fabric.device
        self._slots = chunk_slots(self._size)
        rings = self._size * self._size  # those of the pairs, and in a rank's own place what it shares
        size = rings * self._slots * _MOST_CHUNK
        self._ring = PinnedSegment(fabric.group, size, "the staging ring of lane dma")
        self._ring_end = self._ring.address + size
        self._pairs = fabric.handoffs(2 * self._slots)  # the upper half: what is shared
        self._guard = fabric.guard
        self._out, self._in, self._out_shared, self._in_shared = (
            stream_memory.new_stream(fabric.device, priority=-1) for _ in range(4)
        )
        self._event = stream_memory.new_event(fabric.device)
        self._used: list[torch.cuda.Stream] = []  # streams that send, since the last flush
        every = [(peer, slot) for peer in range(self._size) for slot in range(2 * self._slots)]
        # The host must enqueue faster than the engines copy, so the stops of streams are made once.
        self._claim = {pair: self._pairs.packed(self._pairs.claiming(*pair)) for pair in every}
        self._deliver = {pair: self._pairs.packed(self._pairs.delivering(*pair)) for pair in every}
        self._accept = {pair: self._pairs.packed(self._pairs.accepting(*pair)) for pair in every}
        self._freed = {pair: self._pairs.packed(self._pairs.freeing(*pair)) for pair in every}

    def describe(self) -> str:
        return f"copy engines through pinned host memory, chunks of up to {_MOST_CHUNK >> 20} MiB"

    def _chunk(self, sender: int, receiver: int, slot: int) -> int:
        """Address of a chunk in the pinned segment; `receiver` is the sender itself for what it shares."""
        ring = receiver * self._size + (sender - receiver) % self._size
        return self._ring.address + (ring * self._slots + slot) * _MOST_CHUNK

    def send(self, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int) -> None:
        self.exchange([Outgoing(peer, source, buffer, start, slot)], [])

    def receive(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> torch.Tensor:
        return self.exchange([], [Incoming(peer, buffer, start, count, slot)])[0]

    def share(
        self, peers: Sequence[int], source: torch.Tensor, buffer: SymmetricBuffer | None, start: int, slot: int
    ) -> None:
        self._begin(self._out_shared)
        before = b""
        for number, offset in enumerate(range(0, source.nbytes, _MOST_CHUNK)):
            size, place = min(_MOST_CHUNK, source.nbytes - offset), self._place(slot, number)
            flag = self._slots + place
            self._stop(self._out_shared, before + b"".join(self._claim[peer, flag] for peer in peers))
            with self._recorded("copy out", self._out_shared, bytes=size, to="all"):
                chunk = self._chunk(self._rank, self._rank, place)
                stream_memory.to_host(self._out_shared.cuda_stream, chunk, source.data_ptr() + offset, size)
            before = b"".join(self._deliver[peer, flag] for peer in peers)
        self._stop(self._out_shared, before)

    def exchange(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> list[torch.Tensor]:
        """Enqueued copy by copy in turn: neither direction waits until the host has enqueued all of the other."""
        steps: list[Iterator[None]] = []
        if outgoing:
            self._begin(self._out)
            for one in outgoing:
                if one.buffer is not None:  # the receiver's is as large as mine
                    destination_address(one.buffer, self._rank, one.start, one.source)
            steps.append(self._copies_out([(one.peer, one.slot, one.source) for one in outgoing]))
        views = [one.place() for one in incoming]
        shared = bool(incoming) and incoming[0].shared
        arriving = self._in_shared if shared else self._in
        here = stream_memory.current_stream(self._device)
        if incoming:
            stream_memory.after(arriving.cuda_stream, here, self._event)  # whoever read these places before is done
            messages = [(one.peer, one.slot, view) for one, view in zip(incoming, views, strict=True)]
            steps.append(self._copies_in(arriving, shared, messages))
        while steps:
            steps = [step for step in steps if next(step, _OVER) is not _OVER]
        if incoming:
            stream_memory.after(here, arriving.cuda_stream, self._event)
        return views

    def _begin(self, stream: torch.cuda.Stream) -> None:
        """What `stream` sends next was made by the current stream."""
        stream_memory.after(stream.cuda_stream, stream_memory.current_stream(self._device), self._event)
        if stream not in self._used:
            self._used.append(stream)

    def _stop(self, stream: torch.cuda.Stream, packed: bytes) -> None:
        """Between two copies a stream stops once: what was copied is handed on and the next place asked for."""
        if packed:
            self._guard.perform(stream.cuda_stream, packed)

    def _recorded(
        self, name: str, stream: torch.cuda.Stream, **details: Any
    ) -> contextlib.AbstractContextManager[object]:
        """The copies of the block in the timeline, if somebody records one."""
        if not timeline.is_recording():
            return _UNSEEN
        both = contextlib.ExitStack()
        both.enter_context(stream_memory.current(stream))
        both.enter_context(timeline.event(name, engine=name.replace("copy", "dma"), **details))
        return both

    def _copies_out(self, messages: Sequence[Message]) -> Iterator[None]:
        before = b""
        for places, rows in self._copies(messages, lambda peer: (self._rank, peer)):
            self._stop(self._out, before + b"".join(self._claim[one] for one in places))
            with self._recorded("copy out", self._out, bytes=rows.nbytes, to=[peer for peer, _ in places]):
                rows.leave(self._out.cuda_stream)
            before = b"".join(self._deliver[one] for one in places)
            yield
        self._stop(self._out, before)

    def _copies_in(self, stream: torch.cuda.Stream, shared: bool, messages: Sequence[Message]) -> Iterator[None]:
        before, first = b"", self._slots if shared else 0
        for places, rows in self._copies(messages, lambda peer: (peer, peer if shared else self._rank)):
            slots = [(peer, first + place) for peer, place in places]
            self._stop(stream, before + b"".join(self._accept[one] for one in slots))
            with self._recorded("copy in", stream, bytes=rows.nbytes, source=[peer for peer, _ in places]):
                rows.arrive(stream.cuda_stream)
            before = b"".join(self._freed[one] for one in slots)
            yield
        self._stop(stream, before)

    def _copies(
        self, messages: Sequence[Message], ring: Callable[[int], tuple[int, int]]
    ) -> Iterator[tuple[list[Place], Rows]]:
        """Messages as one copy after the other, each with its places: the first chunk of all messages, the second, ...

        A chunk waits for nothing but the reading of an earlier one of its own message, so with this order on all ranks
        nobody waits in a circle. (Of the messages of one pair, which have even and odd slots in turns, an even one may
        be joined with the odd one after it, whose place is further up, but not an odd one with the next: that would
        wait for the reading of the even one before, which the other side may have joined with the odd one.)

        Chunks at even distances, here and in the rings, go together: every copy costs the engine a pause, so one of
        several rows beats several. The two sides need not join alike: each has its own flags. Peers follow each other
        from this rank on, so that no receiver is everybody's first.
        """
        for peer, _, _ in messages:
            if peer == self._rank:
                raise InvalidArgument(argument="peer", was=peer, must="another rank")
        ordered = sorted(messages, key=lambda message: (message[0] - self._rank) % self._size)
        longest = max((data.nbytes for _, _, data in messages), default=0)
        inside = self._ring_end if stream_memory.is_capturing() else None
        for number, offset in enumerate(range(0, longest, _MOST_CHUNK)):
            chunks = []
            for peer, slot, data in ordered:
                size = min(_MOST_CHUNK, data.nbytes - offset)
                if size > 0:
                    place = self._place(slot, number)
                    chunks.append(_Chunk(peer, place, self._chunk(*ring(peer), place), data, offset, size))
            yield from _joined(chunks, inside)

    def _place(self, slot: int, number: int) -> int:
        """Which chunk of the ring the `number`-th of a message takes: the same on both sides.

        Messages of even and odd slots begin in different halves, so that one leaves while the one before is read.
        """
        return (slot % 2 * (self._slots // 2) + number) % self._slots

    def free(self, peer: int, slot: int) -> None:
        """The receiver's own copy chose the place: nobody else writes there."""

    def flush(self) -> None:
        for stream in self._used:  # others may be no part of a capture that the caller is in
            stream_memory.after(stream_memory.current_stream(self._device), stream.cuda_stream, self._event)
        self._used.clear()

    def close(self) -> None:
        self._pairs.release()
        self._ring.close()


class _Chunk(NamedTuple):
    """`size` bytes at `offset` of a message to or from `peer`, and their place in the rings."""

    peer: int
    place: int
    host: int
    data: torch.Tensor
    offset: int
    size: int

    @property
    def device(self) -> int:
        return self.data.data_ptr() + self.offset


def _joined(chunks: Sequence[_Chunk], inside: int | None) -> list[tuple[list[Place], Rows]]:
    """The chunks in as few copies as their sizes and places allow: of each its peers' places in the rings, the rows.

    `inside`: where the rings end, in a capture: a graph's copy counts a whole step for its last row, too, and must not
    leave the memory it is in, on either side.
    """
    copies: list[tuple[list[Place], Rows]] = []
    for one in chunks:
        if copies:
            places, rows = copies[-1]
            height = rows.height
            host_step = one.host - rows.host - (height - 1) * rows.host_step
            step = one.device - rows.device - (height - 1) * rows.device_step
            even = height == 1 or (host_step, step) == (rows.host_step, rows.device_step)
            apart = one.size <= host_step <= _MOST_STEP and one.size <= step <= _MOST_STEP
            fits = inside is None or (one.device + step <= _end_of_memory(one.data) and one.host + host_step <= inside)
            if one.size == rows.size and even and apart and fits:
                joined = rows._replace(height=height + 1, host_step=host_step, device_step=step)
                copies[-1] = ([*places, (one.peer, one.place)], joined)
                continue
        copies.append(([(one.peer, one.place)], Rows(one.host, one.device, one.size)))
    return copies


def _end_of_memory(tensor: torch.Tensor) -> int:
    memory = tensor.untyped_storage()
    return memory.data_ptr() + memory.nbytes()
