"""The `net` lane: whatever backend the group's ProcessGroup has (Gloo, NCCL, MPI).

Collectives go to that backend as they are. Single messages need no peer pointer and no slot bookkeeping: the receiver
posts the matching receive, a slot is a tag, and messages of one tag arrive in order. They go over a Gloo group of the
lane's own, between GPUs through host memory: NCCL's sends block their stream until the other side receives, and two
ranks that both send first would wait for each other for ever. There the host waits too, so it cannot be captured.

Gloo moves the bytes of a message once both sides have named it, and `flush` waits for that. Ranks that flush before
they receive say with `expect` what they are going to receive.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import InvalidArgument, UndertowError
from . import timeline
from .base import Incoming, Lane, Outgoing
from .symmetric import SymmetricBuffer
from .works import InThread

if TYPE_CHECKING:
    from .group import Group

_FIRST_PART = 1 << 16  # tags below are the slots of the lane itself


class NetLane(Lane):
    """torch.distributed point-to-point and collectives."""

    name = "net"
    lands_anywhere = True

    def __init__(self, group: Group, watch: Callable[[], None] | None = None) -> None:
        """`watch`: called before the backend's collectives, which have no deadline that streams could keep."""
        self._group, self._watch = group, watch
        # A group of the backend "undertow" has its collectives from here: those of the backend behind it are meant.
        self._process_group: dist.ProcessGroup = getattr(group.process_group, "carrier", group.process_group)
        self._on_device = group.device.type == "cuda"
        self._wire = group.gloo("lane net")  # of its own: a tag of the user's must never meet one of ours
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []
        self._expected: dict[tuple[int, int], tuple[dist.Work, torch.Tensor]] = {}
        self._first_tag = 0
        self._next_part = itertools.count(_FIRST_PART, _FIRST_PART)
        if self._on_device:
            group.on_abort(self._abort)

    def describe(self) -> str:
        return f"torch.distributed ({self._process_group.name()})"

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
        host = torch.empty(count, dtype=buffer.dtype) if self._on_device else self._view(buffer, start, count)
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
            host = torch.empty(view.shape, dtype=view.dtype) if self._on_device else view
            works.append((self._start_receiving(one.peer, host, one.slot), host))
        for (work, host), view in zip(works, views, strict=True):
            self._finish(work, "receive")
            if self._on_device:
                view.copy_(host)
        return views

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
