"""The `net` lane: whatever backend the group's ProcessGroup has (Gloo, NCCL, MPI).

Collectives go to that backend as they are. Single messages need no peer pointer and no slot bookkeeping: the receiver
posts the matching receive, a slot is a tag, and messages of one tag arrive in order. They go over a Gloo group of the
lane's own, between GPUs through host memory: NCCL's sends block their stream until the other side receives, and two
ranks that both send first would wait for each other for ever. There the host waits too, so it cannot be captured.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import InvalidArgument, UndertowError
from . import timeline
from .base import Lane, SymmetricBuffer
from .works import InThread

if TYPE_CHECKING:
    from .group import Group


class NetLane(Lane):
    """torch.distributed point-to-point and collectives."""

    name = "net"

    def __init__(self, group: Group) -> None:
        self._group = group
        self._process_group = group.process_group
        self._on_device = group.device.type == "cuda"
        self._wire = group.gloo("lane net")  # of its own: a tag of the user's must never meet one of ours
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []
        if self._on_device:
            group.on_abort(self._abort)

    def describe(self) -> str:
        return f"torch.distributed ({dist.get_backend(self._process_group)})"

    def send(self, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int) -> None:
        self._check(peer)
        host = source.cpu() if self._on_device else source
        with self._group.connected("send"):
            self._pending.append((self._wire.send([_bytes(host)], peer, slot), host))

    def receive(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> torch.Tensor:
        self._check(peer)
        view = buffer.local.view(-1)[start : start + count]
        host = torch.empty(count, dtype=view.dtype) if self._on_device else view
        with self._group.connected("receive"):
            work = self._wire.recv([_bytes(host)], peer, slot)
        self._finish(work, "receive")
        if self._on_device:
            view.copy_(host)
        return view

    def free(self, peer: int, slot: int) -> None:
        """The receiver chose the place itself: nobody can overwrite it."""

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        for work, _ in pending:
            self._finish(work, "send")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the group, in place, by the backend's own collective."""
        with timeline.event("all_reduce", engine=self.name, bytes=tensor.nbytes):
            with self._group.connected("all_reduce"):
                work = dist.all_reduce(tensor, group=self._process_group, async_op=True)
            if self._on_device:
                work.wait()  # orders the current stream after it; the host goes on
            else:
                self._group.complete(lambda: work, "all_reduce")

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
