"""Lanes of the CUDA fabric between ranks of one node.

`peer`   a copy kernel with a bounded number of CTAs stores into the peer's memory.
`dma`    copy engines. Between GPUs with peer access: one copy, enqueued by the sender. Without it, or where ranks share
         a GPU: staged through pinned host memory that both ranks map, in chunks, so that the copy out of one chunk and
         the copy in of the one before run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from . import stream_memory, timeline
from .base import Incoming, Lane, Outgoing, SymmetricBuffer, needed
from .pinned import PinnedSegment
from .transfer import destination_address

if TYPE_CHECKING:
    from .cuda import CudaFabric

PEER_CTAS = 16
_OVER = object()
_LEAST_CHUNK, _MOST_CHUNK = 4 << 20, 8 << 20
_FEW_RANKS, _MANY_SLOTS, _FEW_SLOTS = 4, 4, 2


def chunk_slots(ranks: int) -> int:
    """Chunks under way between two ranks: fewer where many pairs would pin much memory."""
    return _MANY_SLOTS if ranks <= _FEW_RANKS else _FEW_SLOTS


def chunk_bytes(nbytes: int) -> int:
    """The chunk of a message, the same on both sides.

    Every chunk costs the engine a pause (about what it copies of 0.7 MB was seen), so small messages go whole: others
    before and after them keep both directions busy. The copy in runs one chunk behind the copy out, so chunks of large
    messages are not larger than what that loses is worth: of 128 MB, 8 MB was best.
    """
    return min(_MOST_CHUNK, max(_LEAST_CHUNK, nbytes // 2))


class PeerLane(Lane):
    """SM stores into the peer's memory. `ctas` is its share of the GPU."""

    name = "peer"

    def __init__(self, fabric: CudaFabric) -> None:
        from ..kernels import move

        self._move = move
        self._pairs = fabric.handoffs()
        self.ctas = PEER_CTAS
        move.warm_up(fabric.device)  # a kernel loaded for the first time behind a waiting stream would hang
        fabric.group.barrier()

    def describe(self) -> str:
        return f"copy kernel of {self.ctas} CTAs into peer memory"

    def limit(self, ctas: int | None) -> None:
        self.ctas = PEER_CTAS if ctas is None else ctas

    def send(self, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int) -> None:
        destination_address(buffer, peer, start, source)
        destination = buffer.peer(peer).view(-1)[start : start + source.numel()]
        self._pairs.claim(peer, slot)
        with timeline.event("copy", engine=self.name, bytes=source.nbytes, to=peer):
            self._move.copy(destination, source.view(-1), self.ctas)
        self._pairs.deliver(peer, slot)  # the stream's write follows the kernel and releases its stores

    def receive(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> torch.Tensor:
        self._pairs.accept(peer, slot)
        return buffer.local.view(-1)[start : start + count]

    def free(self, peer: int, slot: int) -> None:
        self._pairs.free(peer, slot)

    def close(self) -> None:
        self._pairs.release()


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
    sender one more for what it shares: that is copied out once, and in by each receiver. A message starts at the first
    chunk of its ring on both sides, so neither side keeps a position, and a captured message can be replayed.

    Two streams per rank, out and in, and two more for what is shared, so that finished results do not stand behind
    pieces that are still to be computed. A rank's sends wait only for room, its receives only for bytes; both sides
    must name their messages in the same order (rank r sends to r+1, r+2, ...; rank r receives from r-1, r-2, ...).
    """

    name = "dma"
    lands_anywhere = True

    def __init__(self, fabric: CudaFabric) -> None:
        self._size, self._rank, self._device = fabric.group.size, fabric.group.rank, fabric.device
        self._slots = chunk_slots(self._size)
        rings = self._size * self._size  # those of the pairs, and in a rank's own place what it shares
        self._ring = PinnedSegment(fabric.group, rings * self._slots * _MOST_CHUNK, "the staging ring of lane dma")
        self._pairs = fabric.handoffs(2 * self._slots)  # the upper half: what is shared
        self._out, self._in, self._out_shared, self._in_shared = (
            stream_memory.new_stream(fabric.device, priority=-1) for _ in range(4)
        )
        self._used: list[torch.cuda.Stream] = []  # streams that send, since the last flush

    def describe(self) -> str:
        return f"copy engines through pinned host memory, chunks of up to {_MOST_CHUNK >> 20} MiB"

    def _chunk(self, sender: int, receiver: int, slot: int) -> int:
        """Address of a chunk in the pinned segment; `receiver` is the sender itself for what it shares."""
        return self._ring.address + ((sender * self._size + receiver) * self._slots + slot) * _MOST_CHUNK

    def send(self, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int) -> None:
        self.exchange([Outgoing(peer, source, buffer, start, slot)], [])

    def receive(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> torch.Tensor:
        return self.exchange([], [Incoming(peer, buffer, start, count, slot)])[0]

    def share(
        self, peers: Sequence[int], source: torch.Tensor, buffer: SymmetricBuffer | None, start: int, slot: int
    ) -> None:
        self._begin(self._out_shared)
        for place, offset, size in self._cut(source.nbytes):
            with torch.cuda.stream(self._out_shared):
                for peer in peers:
                    self._pairs.claim(peer, self._slots + place)
                with timeline.event("copy out", engine="dma out", bytes=size, to="all"):
                    chunk = self._chunk(self._rank, self._rank, place)
                    stream_memory.to_host(self._out_shared.cuda_stream, chunk, source.data_ptr() + offset, size)
                for peer in peers:
                    self._pairs.deliver(peer, self._slots + place)

    def exchange(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> list[torch.Tensor]:
        """Enqueued chunk by chunk in turn: neither direction waits until the host has enqueued all of the other."""
        here = torch.cuda.current_stream(self._device)
        steps: list[Iterator[None]] = []
        if outgoing:
            self._begin(self._out)
            steps.append(self._chunks_out(outgoing))
        views = [one.place() for one in incoming]
        arriving = self._in_shared if incoming and incoming[0].shared else self._in
        if incoming:
            arriving.wait_stream(here)  # whoever read these places before is done
            steps.append(self._chunks_in(arriving, incoming, views))
        while steps:
            steps = [step for step in steps if next(step, _OVER) is not _OVER]
        if incoming:
            here.wait_stream(arriving)
        return views

    def _begin(self, stream: torch.cuda.Stream) -> None:
        """What `stream` sends next was made by the current stream."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if stream not in self._used:
            self._used.append(stream)

    def _chunks_out(self, messages: Sequence[Outgoing]) -> Iterator[None]:
        stream = self._out.cuda_stream
        for one in messages:
            if one.peer == self._rank:
                raise InvalidArgument(argument="peer", was=one.peer, must="another rank")
            if one.buffer is not None:  # the receiver's is as large as mine
                destination_address(one.buffer, self._rank, one.start, one.source)
            for place, offset, size in self._cut(one.source.nbytes):
                with (
                    torch.cuda.stream(self._out),
                    timeline.event("copy out", engine="dma out", bytes=size, to=one.peer),
                ):
                    self._pairs.claim(one.peer, place)
                    chunk = self._chunk(self._rank, one.peer, place)
                    stream_memory.to_host(stream, chunk, one.source.data_ptr() + offset, size)
                    self._pairs.deliver(one.peer, place)
                yield

    def _chunks_in(
        self, stream: torch.cuda.Stream, messages: Sequence[Incoming], views: list[torch.Tensor]
    ) -> Iterator[None]:
        for one, view in zip(messages, views, strict=True):
            if one.peer == self._rank:
                raise InvalidArgument(argument="peer", was=one.peer, must="another rank")
            first = self._slots if one.shared else 0
            for place, offset, size in self._cut(view.nbytes):
                with (
                    torch.cuda.stream(stream),
                    timeline.event("copy in", engine="dma in", bytes=size, source=one.peer),
                ):
                    self._pairs.accept(one.peer, first + place)
                    chunk = self._chunk(one.peer, one.peer if one.shared else self._rank, place)
                    stream_memory.to_device(stream.cuda_stream, view.data_ptr() + offset, chunk, size)
                    self._pairs.free(one.peer, first + place)
                yield

    def _cut(self, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """A message as (chunk slot, offset, size): the same on both sides."""
        size = chunk_bytes(nbytes)
        for number, offset in enumerate(range(0, nbytes, size)):
            yield number % self._slots, offset, min(size, nbytes - offset)

    def free(self, peer: int, slot: int) -> None:
        """The receiver's own copy chose the place: nobody else writes there."""

    def flush(self) -> None:
        for stream in self._used:  # others may be no part of a capture that the caller is in
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._used.clear()

    def close(self) -> None:
        self._pairs.release()
        self._ring.close()
