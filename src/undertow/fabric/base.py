"""What every fabric offers: symmetric buffers, signals, streams, lanes. Two implementations, `cpu` and `cuda`.

On CUDA everything that moves or waits is *enqueued* on the current stream; on the CPU it is *done* by the calling
thread. A `Stream` hides the difference: `fork` after the caller's work so far, `run` something on it, `join` back.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from .. import errors
from .segment import human
from .signals import Handoffs, Signals
from .symmetric import SymmetricBuffer

if TYPE_CHECKING:
    from .group import Group

WORD_STRIDE = 128  # bytes between two signals: neighbours never share a cache line, nor the line fetched along with it


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no right result looks like: NaN, or the least integer."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:  # no value is wrong in itself
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min)


class _Guard:
    """Poisons outputs if what it brackets fails."""

    __slots__ = ("_outputs",)

    def __init__(self, outputs: tuple[torch.Tensor, ...]) -> None:
        self._outputs = outputs

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            for output in self._outputs:
                poison(output)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message: contiguous `source` to elements [start, start + source.numel()) of `peer`'s `buffer`.

    `peer` is another rank: lanes do not carry messages to oneself. Where the lane `lands_anywhere`, the receiver says
    where the bytes go and `buffer` may be None.
    """

    peer: int
    source: torch.Tensor
    buffer: SymmetricBuffer | None
    start: int
    slot: int


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message that `peer` sends: `count` elements from `start` on in my `buffer`, or in contiguous `into`."""

    peer: int
    buffer: SymmetricBuffer | None
    start: int
    count: int
    slot: int
    into: torch.Tensor | None = None  # only where the lane `lands_anywhere`
    shared: bool = False  # whether the sender used `share`

    def place(self) -> torch.Tensor:
        """Where the bytes go, if the receiver's own copy puts them there."""
        if self.into is not None:
            return self.into.view(-1)
        if self.buffer is None:
            raise errors.InvalidArgument(argument="buffer", was="None", must="a symmetric buffer, or `into` given")
        return self.buffer.local.view(-1)[self.start : self.start + self.count]


class Lane(ABC):
    """Who moves bytes. Both sides call: the sender `send`, the receiver `receive` and, once it has read, `free`.

    A lane with direct access does all the work at the sender; a staged lane or a network needs the receiver's half.
    A `slot` guards one place of the destination: the sender may write there again only after `free`.
    """

    name: str
    emulated = False
    lands_anywhere = False  # whether the receiver's own copy puts bytes in their place, any memory of its own
    in_rounds = False  # whether messages move by `round`: what leaves and what comes at once, on all ranks in one order
    staged_chunk = 0  # where bytes are staged through host memory by copy engines: the most of one copy to one peer

    @abstractmethod
    def describe(self) -> str:
        """What it is, in a few words."""

    @abstractmethod
    def send(self, peer: int, source: torch.Tensor, buffer: SymmetricBuffer, start: int, slot: int) -> None:
        """Move contiguous `source` to elements [start, start + source.numel()) of `peer`'s `buffer`, then signal."""

    @abstractmethod
    def receive(self, peer: int, buffer: SymmetricBuffer, start: int, count: int, slot: int) -> torch.Tensor:
        """Wait for what `peer` sent to `slot`; the view of my `buffer` that holds it."""

    @abstractmethod
    def free(self, peer: int, slot: int) -> None:
        """I have read what `peer` sent to `slot`."""

    def free_all(self, incoming: Sequence[Incoming]) -> None:
        """I have read all of these."""
        for one in incoming:
            self.free(one.peer, one.slot)

    def unload(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """What came in, out of its place: (contiguous destination, flat view), in my own memory."""
        for out, view in copies:
            out.view(-1).copy_(view)

    def limit(self, ctas: int | None) -> None:  # noqa: B027 - most lanes take no SM
        """Let copies take so many CTAs from now on; None for the lane's own choice."""

    def exchange(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> list[torch.Tensor]:
        """All of these messages; the views that hold what came in. Lanes that can interleave them do."""
        for one in outgoing:
            self.send(one.peer, one.source, needed(one.buffer), one.start, one.slot)
        return [self.receive(one.peer, needed(one.buffer), one.start, one.count, one.slot) for one in incoming]

    def round(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> list[torch.Tensor]:
        """As `exchange`, where all ranks come together, each with whatever it has, in the same order."""
        return self.exchange(outgoing, incoming)

    def behind(self) -> Callable[[], None]:
        """What orders the stream of whoever calls it behind all that the current one was given so far."""
        return _pass

    def share(
        self, peers: Sequence[int], source: torch.Tensor, buffer: SymmetricBuffer | None, start: int, slot: int
    ) -> None:
        """The same bytes to several peers, each as by `send`. A lane that stages them copies them out once.

        Their messages pass those of `send`: the two keep no order between them.
        """
        self.exchange([Outgoing(peer, source, buffer, start, slot) for peer in peers], [])

    def flush(self) -> None:  # noqa: B027 - nothing to do where `send` completes in order
        """After this, in the caller's order, sources of earlier sends may be overwritten."""

    def mark(self) -> Callable[[], None]:
        """What waits until sources of the sends so far may be overwritten, whoever calls it, and not for later ones.

        Called by who sends. A send that failed is told by it, or else by `flush`.
        """
        return self.flush

    def close(self) -> None:  # noqa: B027 - most lanes own nothing
        """Stop threads, free staging memory."""


def needed(buffer: SymmetricBuffer | None) -> SymmetricBuffer:
    """The buffer of a message whose sender writes to its place."""
    if buffer is None:
        must = "a symmetric buffer: on this lane the sender writes to the place"
        raise errors.InvalidArgument(argument="buffer", was="None", must=must)
    return buffer


class Stream(ABC):
    """An order of work beside the caller's own."""

    @abstractmethod
    def fork(self) -> None:
        """What runs here next comes after what the caller has done so far."""

    @abstractmethod
    def after(self, other: Stream) -> None:
        """What runs here next comes after what `other` was given so far (also if that failed)."""

    @abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Do `work` in this stream's order, without waiting for it."""

    @abstractmethod
    def join(self) -> None:
        """What the caller does next comes after what runs here. Raises what `run` raised."""


class Service(ABC):
    """Something with threads of its own that uses a fabric's memory."""

    @abstractmethod
    def stop(self) -> None:
        """End what runs here; not collective."""

    def part(self) -> None:  # noqa: B027 - most wait for nobody
        """Behind `stop`, where the process lives on: wait for others no longer than they need. Not collective."""

    def abandon(self) -> None:  # noqa: B027 - most threads are Python's, and stand still then
        """The process ends, and nobody knows in which state: the group's abort word is set, so the thread ends."""


def _pass() -> None:
    """Nobody is waited for."""


WAITING = "kernels that wait"
"""What calls have in common (`Fabric.follow`) whose kernels hold SMs until those of other ranks have run.

All ranks must run them in one order, whatever streams they are on: of two at a time one rank's GPU might begin with the
first, another's with the second, and each would hold the SMs that the other needs.
"""


class Fabric(ABC):
    """Where the ranks of one group meet."""

    slots = 8  # hand-off slots between every two ranks, per lane
    multiprocessors: int  # SMs (on a CPU: threads) that this rank computes with
    bulk_copies = True  # whether a GPU has TMA; a CPU has no tiles that would be chosen by it
    together = False  # whether all ranks share one GPU, and its memory
    shares_device = False  # whether two ranks do
    unknown_sharers = ""  # why nobody can tell who else fills this device; the same on all ranks

    def __init__(self, group: Group) -> None:
        self.group = group
        self._buffers: weakref.WeakSet[SymmetricBuffer] = weakref.WeakSet()
        self._next_buffer = 0
        self._workspaces: dict[str, SymmetricBuffer] = {}
        self._captured: list[SymmetricBuffer] = []  # workspaces that graphs use
        self._signals: weakref.WeakSet[Signals] = weakref.WeakSet()
        self._services: weakref.WeakSet[Service] = weakref.WeakSet()
        self._lanes: dict[str, Lane] = {}
        self._bandwidths: dict[tuple[str, int], float] = {}
        self._lock = threading.RLock()
        self.kept: dict[int, object] = {}  # what those above keep with this fabric, and lose with it

    def gate(self) -> Callable[[], None]:
        """What every rank calls before a kernel whose CTAs wait for other ranks' (`gate.py`). Collective at first."""
        return _pass

    def meeting(self, name: str) -> Callable[[], None]:
        """What every rank calls where memory that others may still read, in their calls before, is written next: who is
        through it comes after all that stood before it, on any rank, on the streams it was called on. Collective at
        the first of that name; made ready for the current stream.
        """
        return _pass  # on a CPU calls are over when they return

    def poison_if_aborted(self, *made: torch.Tensor) -> None:
        """What a call makes beside its output is poisoned, too, if the call was aborted."""
        return  # on a CPU a call that is aborted raises

    def follow(self, what: str) -> None:
        """The current stream's next call that shares `what` comes after the last one, wherever that was."""
        return  # on a CPU it does: calls are over when they return

    def enqueued(self, what: str) -> None:
        """Such a call was enqueued, with all that reads what it shares."""
        return

    # -- memory --------------------------------------------------------------------------------------------------

    def buffer(self, shape: tuple[int, ...] | int, dtype: torch.dtype) -> SymmetricBuffer:
        """A symmetric buffer, zeroed. Collective: every rank asks for the same shape and dtype."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(extent < 0 for extent in shape):
            raise errors.InvalidArgument(argument="shape", was=list(shape), must="made of extents of at least 0")
        with self._lock:
            identity = self._next_buffer
            self._next_buffer += 1
            self._agree_on_shape(f"buffer({list(shape)}, {dtype})")
            with torch.inference_mode(False):  # it outlives this call: others, in no such mode, write to it, too
                views, owner = self._allocate(shape, dtype)
            made = SymmetricBuffer(self.group, identity, views, owner)
            self._buffers.add(made)
            return made

    def _agree_on_shape(self, asked: str) -> None:
        """Ranks that ask for different buffers must all hear of it before anything is allocated."""
        group = self.group
        for rank, theirs in enumerate(group.exchange(asked, "a symmetric buffer")):
            if theirs != asked:
                group.fall_out_of_step()
                disagreement = group.mismatch()  # the calls that led here say more than the sizes they led to
                if disagreement is not None:
                    raise disagreement
                raise errors.MismatchedCall(
                    group=group.name, call=group.calls, rank=group.rank, mine=asked, other_rank=rank, theirs=theirs
                )

    def _agree_on_allocation(self, failure: str) -> None:
        """Raise on all ranks if one of them could not allocate: none may be left waiting for it."""
        for rank, reason in enumerate(self.group.exchange(failure, "whether memory could be had")):
            if reason:
                raise errors.AllocationFailed(rank=rank, reason=reason)

    def workspace(self, purpose: str, nbytes: int) -> SymmetricBuffer:
        """Bytes for `purpose`: the largest ever asked for, grown collectively, never inside a capture."""
        held = self._workspaces.get(purpose)
        if held is not None and held.nbytes >= nbytes:
            if self.capturing() and held not in self._captured:
                self._captured.append(held)
            return held
        if self.capturing():
            raise errors.WorkspaceTooSmall(
                wanted=human(nbytes), held=human(held.nbytes if held else 0), wanted_bytes=nbytes
            )
        rounded = -(-max(nbytes, 1) // (1 << 20)) * (1 << 20)
        if held is not None:
            self._quiesce()  # a lane may still be writing to the old one
            del self._workspaces[purpose]
            if held not in self._captured:  # a graph would use it again: that one lives as long as the fabric
                held.release()
        self._workspaces[purpose] = self.buffer(rounded, torch.uint8)
        return self._workspaces[purpose]

    def memory(self) -> dict[str, int]:
        """Bytes of symmetric memory this rank holds, by use."""
        spaces = {f"workspace {purpose}": buffer.nbytes for purpose, buffer in self._workspaces.items()}
        owned = {buffer.identity for buffer in self._workspaces.values()}
        loose = sum(one.nbytes for one in self._buffers if one._owner is not None and one.identity not in owned)
        return {**spaces, "buffers": loose}

    @abstractmethod
    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor | None], object]:
        """Collective. A view for each rank that can be addressed, and whatever keeps the memory alive."""

    @abstractmethod
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def rest(self) -> None:  # noqa: B027 - a thread that computes is over when it returns
        """Wait for all kernels of this rank."""

    @abstractmethod
    def _quiesce(self) -> None:
        """Return once no rank uses the workspaces any more. Collective."""

    # -- signals and lanes -------------------------------------------------------------------------------------

    @abstractmethod
    def signals(self, count: int) -> Signals:
        """`count` signals on every rank, all zero. Collective."""

    def flags(self, count: int) -> Signals:
        """Signals that only streams set and wait for; on a GPU they cannot be added to. Collective."""
        return self.signals(count)

    def handoffs(self, slots: int | None = None) -> Handoffs:
        """Full/empty pairs between all ranks, all empty. Collective."""
        slots = self.slots if slots is None else slots
        size = self.group.size
        pairs = Handoffs(self.flags(Handoffs.words(size, slots)), self.group.rank, size, slots)
        pairs.reset()
        self.settle()
        self.group.barrier()
        return pairs

    @abstractmethod
    def settle(self) -> None:
        """Return once what was enqueued so far is done."""

    def lane(self, name: str) -> Lane:
        """The lane of that name. Made at first use, collectively."""
        with self._lock:
            if name not in self._lanes:
                reasons = self.lanes()
                if name not in reasons:
                    raise errors.InvalidArgument(argument="lane", was=repr(name), must=f"one of {', '.join(reasons)}")
                if reasons[name]:
                    possible = ", ".join(one for one, reason in reasons.items() if not reason) or "none"
                    raise errors.StrategyUnavailable(strategy=name, reason=reasons[name], possible=possible)
                self.group.exchange(None, f"opening lane {name}")  # ranks that open different ones hear of it here
                with torch.inference_mode(False):  # as for buffers
                    self._lanes[name] = self._open_lane(name)
            return self._lanes[name]

    def open_lanes(self) -> list[str]:
        """The lanes that were made already."""
        return list(self._lanes)

    def bandwidth(self, name: str, nbytes: int = 4 << 20) -> float:
        """Measured bytes per second of a lane, per rank, with all ranks sending at once. Kept. Collective at first."""
        key = (name, nbytes)
        if key not in self._bandwidths:
            from .bandwidth import measure

            self._bandwidths[key] = measure(self, name, nbytes)
        return self._bandwidths[key]

    @abstractmethod
    def lanes(self) -> dict[str, str]:
        """Every lane with the reason why it is not available here, or "" if it is."""

    @abstractmethod
    def _open_lane(self, name: str) -> Lane:
        """Make an available lane. Collective."""

    @abstractmethod
    def stream(self, name: str, priority: int = 0) -> Stream:
        """The stream of that name and priority (lower is more urgent), made at first use. Few and long-lived."""

    def adopt(self, service: Service) -> None:
        """Stop `service` before the memory goes."""
        self._services.add(service)

    @abstractmethod
    def computing(self, multiprocessors: int | None) -> contextlib.AbstractContextManager[None]:
        """What is computed inside uses so many SMs (on a CPU: threads) at most; None for all."""

    def sharing(self, multiprocessors: int | None) -> contextlib.AbstractContextManager[None]:
        """As `computing`, beside a collective; where ranks share a GPU, by grids that keep to it."""
        return self.computing(multiprocessors)

    def guarded_call(
        self, outputs: tuple[torch.Tensor, ...], itself: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Bracket a call: nobody may take half a result of an aborted one for a whole.

        `itself`: all that is enqueued is one kernel that waits no longer than its deadline and poisons by itself.
        """
        return _Guard(outputs)

    def poisons_itself(self) -> None:
        """All of the call that waits poisons what it could not make right, and what follows passes it on."""
        return

    def finish(self) -> None:
        """Have what was posted moved, before the process ends or the memory goes. Not collective."""
        services = list(self._services)
        if services:
            self.rest()  # kernels have posted what they post
        for service in services:
            service.stop()
        if services:
            self.rest()  # what the services enqueued has been copied

    def abandon(self) -> None:
        """The process ends, and nobody knows in which state: no thread uses memory that is about to go."""
        for service in list(self._services):
            service.abandon()

    def close(self) -> None:
        """Release everything. Tensors taken from buffers stay valid."""
        with self._lock:
            self.finish()
            for service in list(self._services):
                service.part()
            for lane in self._lanes.values():
                lane.close()
            for signals in list(self._signals):
                signals.release()
            for buffer in list(self._buffers):
                buffer.release()
            self._lanes.clear()
            self._workspaces.clear()
            self.kept.clear()
