"""The `net` lane: whatever backend the group's ProcessGroup has (Gloo, NCCL, MPI).

Collectives go to that backend as they are. Single messages need no peer pointer and no slot bookkeeping: the receiver
posts the matching receive, a slot is a tag, and messages of one tag arrive in order. They go over a Gloo group of the
lane's own, between GPUs through host memory: NCCL's sends block their stream until the other side receives, and two
ranks that both send first would wait for each other for ever. There the host waits too, so it cannot be captured.

Where all ranks come together (`round`), what leaves and what comes can be one operation of the backend, and no rank
waits for another's order: so NCCL carries it, from memory to memory, in the order of the current stream, and the host
goes on. That is for GPUs that no two ranks share, and between nodes, where there is no other lane; settings.NET says
otherwise.

Gloo moves the bytes of a message once both sides have named it, and `flush` waits for that. Ranks that flush before
they receive say with `expect` what they are going to receive.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import settings
from ..errors import InvalidArgument, StrategyUnavailable, UndertowError
from . import timeline
from .base import Incoming, Lane, Outgoing
from .symmetric import SymmetricBuffer
from .works import InThread

if TYPE_CHECKING:
    from .group import Group

_FIRST_PART = 1 << 16  # tags below are the slots of the lane itself
_ROUND = 1 << 8  # tags of rounds, above those of single messages
_CARRIERS = ("auto", "backend", "host")


class NetLane(Lane):
    """torch.distributed point-to-point and collectives."""

    name = "net"
    lands_anywhere = True

    def __init__(self, group: Group, watch: Callable[[], None] | None = None, apart: bool = False) -> None:
        """Made collectively. `watch`: called before the backend's collectives, which have no deadline that streams
        could keep. `apart`: whether every rank has a GPU of its own."""
        self._group, self._watch = group, watch
        # A group of the backend "undertow" has its collectives from here: those of the backend behind it are meant.
        self._process_group: dist.ProcessGroup = getattr(group.process_group, "carrier", group.process_group)
        self._on_device = group.device.type == "cuda"
        self.in_rounds = self._moves_in_rounds(apart)
        self._wire = group.gloo("lane net")  # of its own: a tag of the user's must never meet one of ours
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []
        self._expected: dict[tuple[int, int], tuple[dist.Work, torch.Tensor]] = {}
        self._first_tag = 0
        self._next_part = itertools.count(_FIRST_PART, _FIRST_PART)
        if self._on_device:
            group.on_abort(self._abort)
        if self.in_rounds and self._on_device:
            met = InThread(self._meet)  # what blocks there, nothing could interrupt
            group.complete(lambda: met, "the first round over net")

    def describe(self) -> str:
        backend = self._backend()
        name = self._process_group.name() if backend is None else backend.name()
        if not self._on_device:
            return f"torch.distributed ({name})"
        return f"torch.distributed ({name}), messages {'by it' if self.in_rounds else 'through host memory'}"

    def _backend(self) -> Any:
        """What the group has for tensors of its device; None if it has nothing."""
        try:
            return self._process_group._get_backend(self._group.device)
        except RuntimeError:
            return None

    @property
    def _starts_at_once(self) -> bool:
        """Whether the backend starts messages both ways as one operation."""
        return self._on_device and bool(getattr(self._backend(), "supports_coalescing", False))

    def _moves_in_rounds(self, apart: bool) -> bool:
        """Whether the backend itself carries rounds: the same on all ranks."""
        able = self._starts_at_once or not self._on_device  # a CPU's messages block nobody
        spans = len(self._group.local_ranks) < self._group.size
        auto = spans and apart and self._starts_at_once
        said = self._group.exchange([settings.NET.get(), able, auto], "who carries messages over net")
        wanted = sorted({one for one, _, _ in said})
        if len(wanted) > 1 or wanted[0] not in _CARRIERS:
            must = f"{', '.join(_CARRIERS[:-1])} or {_CARRIERS[-1]}, the same on all ranks"
            raise InvalidArgument(argument=settings.NET.name, was=", ".join(map(repr, wanted)), must=must)
        if wanted[0] == "backend" and not all(able for _, able, _ in said):
            reason = f"{self._process_group.name()} does not start messages both ways at once"
            raise StrategyUnavailable(strategy=f"{settings.NET.name}=backend", reason=reason, possible="host")
        return wanted[0] == "backend" or (wanted[0] == "auto" and all(auto for _, _, auto in said))

    def _meet(self) -> None:
        """A first round of everybody with everybody: backends connect then, which no stream may wait behind."""
        size, rank, device = self._group.size, self._group.rank, self._group.device
        with torch.cuda.device(device):
            words = torch.zeros(2, size, dtype=torch.int32, device=device)
            peers = [(rank + step) % size for step in range(1, size)]
            self.round(
                [Outgoing(peer, words[0, peer : peer + 1], None, 0, 0) for peer in peers],
                [Incoming(peer, None, 0, 1, 0, words[1, peer : peer + 1]) for peer in peers],
            )
            torch.cuda.current_stream(device).synchronize()

    def part(self) -> NetLane:
        """A lane over the same wire with slots and a `flush` of its own. All ranks ask for their parts in one order."""
        made = copy.copy(self)
        made._pending, made._expected, made._first_tag = [], {}, next(self._next_part)
        return made

    def send(self, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int) -> None:
        self._send(peer, source, slot)

    def _send(self, peer: int, source: torch.Tensor, slot: int) -> None:
        self._check(peer)
        if self._on_device:
            # By itself first: the copy, to memory that is not pinned, would wait for the stream with the driver's lock,
            # which the proxy's thread may need to bring what a kernel of the stream is waiting for.
            torch.cuda.current_stream(source.device).synchronize()
        host = source.cpu() if self._on_device else source
        with self._group.connected("send"):
            self._pending.append((self._wire.send([_bytes(host)], peer, self._first_tag + slot), host))

    def expect(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> None:
        """Let what `peer` sends to `slot` come in from now on; `receive` then waits for it. One message a slot."""
        host = (
            torch.empty(count, dtype=buffer.dtype, device="cpu")
            if self._on_device
            else self._view(buffer, start, count)
        )
        self._expected[peer, slot] = self._start_receiving(peer, host, slot), host

    def _start_receiving(self, peer: int, host: torch.Tensor, slot: int) -> dist.Work:
        self._check(peer)
        with self._group.connected("receive"):
            return self._wire.recv([_bytes(host)], peer, self._first_tag + slot)

    def receive(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> torch.Tensor:
        if (peer, slot) not in self._expected:
            self.expect(peer, buffer, start, count, slot)
        work, host = self._expected.pop((peer, slot))
        self._finish(work, "receive")
        view = self._view(buffer, start, count)
        if self._on_device:
            view.copy_(host)
        return view

    def exchange(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> list[torch.Tensor]:
        for out in outgoing:
            self._send(out.peer, out.source, out.slot)
        views = [one.place() for one in incoming]
        works = []
        for one, view in zip(incoming, views, strict=True):
            host = torch.empty(view.shape, dtype=view.dtype, device="cpu") if self._on_device else view
            works.append((self._start_receiving(one.peer, host, one.slot), host))
        for (work, host), view in zip(works, views, strict=True):
            self._finish(work, "receive")
            if self._on_device:
                view.copy_(host)
        return views

    def round(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> list[torch.Tensor]:
        if not self.in_rounds:
            return self.exchange(outgoing, incoming)
        views = [one.place() for one in incoming]
        if self._watch is not None:
            self._watch()
        with self._group.connected("a round of messages"):
            works = self._start_round(outgoing, incoming, views) if outgoing or incoming else []
            if self._on_device:
                for work in works:
                    work.wait()  # orders the current stream after it; the host goes on
        if not self._on_device:
            for work in works:
                self._finish(work, "a round of messages")
        return views

    def _start_round(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], views: Sequence[torch.Tensor]
    ) -> list[dist.Work]:
        for peer in (*(out.peer for out in outgoing), *(one.peer for one in incoming)):
            self._check(peer)
        comes = [([_bytes(view)], one.peer, self._tag_of(one.slot)) for one, view in zip(incoming, views, strict=True)]
        leaves = [([_bytes(out.source)], out.peer, self._tag_of(out.slot)) for out in outgoing]
        if not self._starts_at_once:
            works = [self._wire.recv(*one) for one in comes]
            return works + [self._wire.send(*one) for one in leaves]
        group, device = self._process_group, self._group.device
        group._start_coalescing(device)
        try:
            for coming in comes:
                group.recv(*coming)
            for leaving in leaves:
                group.send(*leaving)
        finally:  # what stays open would swallow all that follows
            work = group._end_coalescing(device)
        return [] if work is None else [work]

    def _tag_of(self, slot: int) -> int:
        """Of a message in a round: another one than that of `send`. NCCL knows none, but order."""
        return self._first_tag + _ROUND + slot

    def behind(self) -> Callable[[], None]:
        if not self._on_device:
            return super().behind()
        here = torch.cuda.current_stream(self._group.device).record_event()
        return lambda: torch.cuda.current_stream(self._group.device).wait_event(here)

    def free(self, peer: int, slot: int) -> None:
        """The receiver chose the place itself: nobody can overwrite it."""

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        for work, _ in pending:
            self._finish(work, "send")

    def mark(self) -> Callable[[], None]:
        pending, self._pending = self._pending, []

        def wait() -> None:
            for work, _ in pending:
                self._finish(work, "send")

        return wait

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the group, in place, by the backend's own collective."""
        with timeline.event("all_reduce", engine=self.name, bytes=tensor.nbytes):
            if self._watch is not None:
                self._watch()
            with self._group.connected("all_reduce"):
                work = dist.all_reduce(tensor, group=self._process_group, async_op=True)
            if self._on_device:
                work.wait()  # orders the current stream after it; the host goes on
            else:
                self._group.complete(lambda: work, "all_reduce")

    @staticmethod
    def _view(buffer: SymmetricBuffer, start: int, count: int) -> torch.Tensor:
        return buffer.local.view(-1)[start : start + count]

    def _check(self, peer: int) -> None:
        if not 0 <= peer < self._group.size or peer == self._group.rank:
            must = f"another rank, between 0 and {self._group.size - 1}"
            raise InvalidArgument(argument="peer", was=peer, must=must)

    def _abort(self, error: UndertowError) -> None:
        """A collective of the backend that waits for a lost rank occupies the stream: only the backend can end it."""
        threading.Thread(target=self._process_group.abort, name="undertow-net-abort", daemon=True).start()

    def _finish(self, work: dist.Work, what: str) -> None:
        """Gloo's point-to-point works only move on inside `wait`, which nothing can interrupt: a thread waits."""
        self._group.complete(lambda: InThread(work.wait), what)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Any dtype as bytes: a message is not arithmetic, and backends know few dtypes."""
    return tensor.view(-1).view(torch.uint8)
