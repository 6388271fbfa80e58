"""Staged schedules over lanes: copy engines inside a node, the network between nodes, the host walking the schedule.

    for every iteration (one tile of every chunk):
        for every step of the rank's walk (see `lane_plan`):
            expect    a message of another node may come in
            receive   wait for messages
            run       my stores <- the sum of sources
            send      what goes to other ranks' staging, by a lane; what goes to all of them may be shared
            free      places may be written again
            await     a parcel of a kernel is complete
            flush     memory that earlier sends read may be written again
            signal    what this track has done so far is done ...
            wait      ... for another track
    flush

Memory ordering is the lanes': a message's bytes are released by its sender's deliver and acquired by `receive`, the
reading of them is released by `free` and acquired by the sender's next claim of that slot. These replace the schedule's
semaphores. A slot guards one place, and places do not depend on the size of a call, so a rank may be a call ahead.

On the CPU each step is done when it returns. On CUDA each is enqueued on the current stream, the host waits for nothing
(except for lane `net`, which cannot be captured), and nothing is counted from call to call: calls can be captured. A
call of the same sizes comes before the capture, as it loads the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgument
from ..fabric.base import Incoming, Outgoing, Service
from ..fabric.net import NetLane
from ..fabric.symmetric import SymmetricBuffer
from . import lane_plan as plan
from . import lane_steps as steps
from .bind import waits_for_kernels, workspace_bytes
from .carry import refuse_captured
from .cpu_runtime import Whole
from .lane_bind import WORKSPACE, Addition, BoundWalk, Letter, Transfer, bind_walk
from .lane_near import Near
from .lane_rows import Operand
from .lane_sum import CTAS, OPERATIONS, Sum
from .lane_tracks import Tracks, new_signals
from .schedule import NEEDED

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane, Stream
    from .schedule import Schedule

STRIDE = 1 << 20  # bytes of a message: transfers cost tens of microseconds to begin
MOST_BYTES = 8 << 20  # what the staged dma lane holds of a message before its receiver comes
_KEPT = 512  # walks: sizes may differ from call to call


@dataclass(frozen=True, slots=True)
class _Iteration:
    """What the steps of one iteration need to know."""

    first: int  # element of every chunk
    tile: int
    number: int
    parity: int
    bases: tuple[torch.Tensor, ...]
    shifts: tuple[int, ...]  # of the bases
    space: SymmetricBuffer | None
    operation: str
    ready: Callable[[int], None] | None
    tracks: Tracks

    def count(self, elements: int) -> int:
        """How many of a chunk's elements are moved now; none or less: it is over."""
        return min(self.tile, elements - self.first)

    def view(self, operand: Operand, count: int) -> torch.Tensor:
        base, offset = operand
        return self.bases[base].narrow(0, offset + self.shifts[base], count)


class LaneExecutable(Service):
    """One schedule on one group. Hand-offs, workspace and order of messages are its own.

    Making one is collective. Calls of one executable come one after the other, on all ranks in the same order. Any
    number of workers and instances in the schedule are walked as one.
    """

    poisons = False

    def __init__(
        self, fabric: Fabric, schedule: Schedule, lane: str = "dma", stride: int = STRIDE, ctas: int = CTAS
    ) -> None:
        group = fabric.group
        if schedule.ranks != group.size:
            was, must = f"for {schedule.ranks} ranks", f"for {group.size} ranks"
            raise InvalidArgument(argument="schedule", was=was, must=must)
        if not schedule.staged:
            raise InvalidArgument(argument="schedule", was="for target direct", must="compiled for target staged")
        if schedule.packets:
            raise InvalidArgument(argument="schedule", was="one of packets", must="compiled without: lanes signal")
        if schedule.publishes:
            must = "compiled without publish: a lane brings messages to their receiver"
            raise InvalidArgument(argument="schedule", was="one that publishes", must=must)
        if NEEDED in schedule.instructions.kind:
            must = "without tile_needed: no lane tells a kernel"
            raise InvalidArgument(argument="schedule", was="one that kernels wait for", must=must)
        if not 16 <= stride <= MOST_BYTES:
            raise InvalidArgument(argument="stride", was=stride, must=f"between 16 and {MOST_BYTES} bytes")
        self.schedule = schedule
        self.stride = stride - stride % 16
        self._group = group
        near = Near(fabric, lane)
        self._walk = plan.walk(schedule, group.rank, group.nodes, near.holds)
        self._lanes: list[Lane | None] = [None, None]
        self._sent = [False, False]  # by lane: whether there is anything to flush
        if steps.NEAR in self._walk.lane_of:
            self._lanes[steps.NEAR] = near.open(self._walk.slots)
        if steps.FAR in self._walk.lane_of:
            net = fabric.lane("net")
            assert isinstance(net, NetLane)
            self._lanes[steps.FAR] = net.part()
        self._near = near
        room = workspace_bytes(schedule, self.stride)
        self._workspace = fabric.buffer(room, torch.uint8) if room else None
        with torch.inference_mode(False):  # it outlives this call
            self._spare = torch.empty(
                self._walk.spares * self.stride * schedule.depth, dtype=torch.uint8, device=group.device
            )
        self._typed: dict[torch.dtype, SymmetricBuffer | None] = {}
        self._bound: dict[tuple[object, ...], BoundWalk] = {}
        self._sum = Sum(group.device, ctas)
        self._side_tracks = frozenset(step.track for step in self._walk.steps) - {steps.MAIN}
        self._signals = new_signals(fabric, self._walk.signals)
        fabric.adopt(self)

    def describe(self) -> str:
        """Which lanes carry it, in a few words."""
        names = ("inside a node", "between nodes" if self._lanes[steps.NEAR] else "between all ranks")
        return "; ".join(f"{lane.describe()} {where}" for lane, where in zip(self._lanes, names, strict=True) if lane)

    def run(
        self,
        source: torch.Tensor | SymmetricBuffer,
        out: torch.Tensor | SymmetricBuffer,
        span_lengths: Sequence[int],
        operation: str = "sum",
        ready: Callable[[int], None] | None = None,
        beside: tuple[Stream, Stream] | None = None,
    ) -> None:
        """One call. `source` and `out` are contiguous; in place, both are parts of one memory as the contract says.

        `ready(parcel)` waits for a kernel's parcel, in the order of the current stream, and acquires it. `beside`: two
        CUDA streams for the walk's side tracks; None: the current stream does everything.
        """
        if ready is None and waits_for_kernels(self.schedule):
            raise InvalidArgument(argument="ready", was=None, must="given: the schedule waits for a kernel's parcels")
        if operation not in OPERATIONS:
            raise InvalidArgument(argument="operation", was=repr(operation), must=f"one of {', '.join(OPERATIONS)}")
        if self._lanes[steps.FAR] is not None:
            refuse_captured(self._group.device)
        given = {"source": _flat("source", source), "out": _flat("out", out)}
        dtype = given["source"].dtype
        key = (tuple(span_lengths), dtype)
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= _KEPT:
                self._bound.clear()
            bound = self._bound[key] = bind_walk(
                self.schedule, self._walk, self._group.rank, span_lengths, self.stride, dtype.itemsize
            )
        for (name, tensor), needed in zip(given.items(), bound.needs, strict=True):
            if tensor.numel() < needed or tensor.dtype != dtype:
                was, must = f"{tensor.numel()} {tensor.dtype}", f"{needed} {dtype}"
                raise InvalidArgument(argument=name, was=was, must=must)
        self._sum.warm_up(dtype, bound.parts, operation)
        space = self._space(dtype)
        spare = self._spare.view(dtype)
        local = given["source"] if space is None else space.local
        bases = (given["source"], given["out"], local, spare)
        depth = self.schedule.depth
        tracks = Tracks(self._group.device, self._signals, self._side_tracks, beside)
        with Whole(self._group):
            for number in range(bound.iterations):
                parity, first = number % depth, number * bound.tile
                shifts = (first, first, parity * bound.copy, parity * (spare.numel() // depth))
                now = _Iteration(first, bound.tile, number, parity, bases, shifts, space, operation, ready, tracks)
                self._iterate(bound, now)
            self._flush(steps.NEAR)
            self._flush(steps.FAR)

    def close(self) -> None:
        """Free the hand-offs and the workspace. No rank may be in a call any more."""
        self._near.close()
        self._typed.clear()
        self._bound.clear()
        if self._workspace is not None:
            self._workspace.release()

    def stop(self) -> None:
        """The fabric's word for it."""
        self._near.close()

    # -- one iteration -------------------------------------------------------------------------------------------------

    def _iterate(self, bound: BoundWalk, now: _Iteration) -> None:
        """Tracks begin and end with the iteration: the next one uses the same memory. Also if it fails: nothing may be
        written after the output was poisoned."""
        now.tracks.begin()
        try:
            for track, several in bound.runs:
                now.tracks.run(track, partial(self._perform, several, now))
        finally:
            now.tracks.end()

    def _perform(self, several: list[tuple[int, Any]], now: _Iteration) -> None:
        for kind, found in several:
            if kind == steps.RUN:
                self._sum_up(found, now)
            elif kind == steps.SEND:
                self._send(found, now)
            elif kind == steps.RECEIVE:
                self._receive(found, now)
            elif kind == steps.FREE:
                for one in found:
                    if now.count(one.elements) > 0:
                        self._lane(one.lane).free(one.peer, self._slot(one, now))
            elif kind == steps.AWAIT:
                assert now.ready is not None
                now.ready(found)
            elif kind == steps.SIGNAL:
                now.tracks.signal(found)
            elif kind == steps.WAIT:
                now.tracks.wait(found)
            elif kind == steps.EXPECT:
                self._expect(found, now)
            elif kind == steps.FLUSH or now.number >= self.schedule.depth:
                self._flush(found)

    def _sum_up(self, pieces: list[Addition], now: _Iteration) -> None:
        for piece in pieces:
            count = now.count(piece.elements)
            if count <= 0:
                continue
            total = now.view(piece.stores[0], count)
            self._sum(total, [now.view(one, count) for one in piece.sources], now.operation)
            for other in piece.stores[1:]:
                self._sum(now.view(other, count), [total], now.operation)

    def _send(self, letters: list[Letter], now: _Iteration) -> None:
        """What goes by the lane inside a node goes to it at once: it may join copies."""
        together = []
        for one in letters:
            count = now.count(one.elements)
            if count <= 0:
                continue
            assert now.space is not None
            lane, source, slot = self._lane(one.lane), now.view(one.value, count), self._slot(one, now)
            start = one.offset + now.shifts[WORKSPACE]
            self._sent[one.lane] = True
            if one.shared:
                lane.share(one.peers, source, None, 0, slot)
            elif one.lane == steps.NEAR:
                together.append(Outgoing(one.peers[0], source, now.space, start, slot))
            else:
                lane.send(one.peers[0], source, now.space, start, slot)
        if together:
            self._lane(steps.NEAR).exchange(together, [])

    def _receive(self, transfers: list[Transfer], now: _Iteration) -> None:
        together: dict[bool, list[Incoming]] = {}
        for one in transfers:
            count = now.count(one.elements)
            if count <= 0:
                continue
            assert now.space is not None
            start, slot = one.offset + now.shifts[WORKSPACE], self._slot(one, now)
            if one.lane == steps.NEAR:
                come = Incoming(one.peer, now.space, start, count, slot, None, one.shared)
                together.setdefault(one.shared, []).append(come)
            else:
                self._lane(one.lane).receive(one.peer, now.space, start, count, slot)
        for incoming in together.values():
            self._lane(steps.NEAR).exchange([], incoming)

    def _expect(self, transfers: list[Transfer], now: _Iteration) -> None:
        for one in transfers:
            count, lane = now.count(one.elements), self._lane(one.lane)
            if count > 0:
                assert isinstance(lane, NetLane)
                assert now.space is not None
                start = one.offset + now.shifts[WORKSPACE]
                lane.expect(one.peer, now.space, start, count, self._slot(one, now))

    def _slot(self, one: Letter | Transfer, now: _Iteration) -> int:
        """Of a place one for each copy; where messages are counted, by that: both sides count alike."""
        return one.slot + now.number * one.step if one.step else one.slot + now.parity

    def _lane(self, number: int) -> Lane:
        lane = self._lanes[number]
        assert lane is not None
        return lane

    def _flush(self, number: int) -> None:
        """Only after a send: in a capture, a stream that carried nothing is not part of it and cannot be waited for."""
        lane = self._lanes[number]
        if lane is not None and self._sent[number]:
            self._sent[number] = False
            lane.flush()

    def _space(self, dtype: torch.dtype) -> SymmetricBuffer | None:
        """The workspace as elements of `dtype`."""
        if dtype not in self._typed:
            self._typed[dtype] = None if self._workspace is None else self._workspace.as_type(dtype)
        return self._typed[dtype]


def _flat(name: str, given: torch.Tensor | SymmetricBuffer) -> torch.Tensor:
    tensor = given.local if isinstance(given, SymmetricBuffer) else given
    if not tensor.is_contiguous():
        raise InvalidArgument(argument=name, was=f"strided {tuple(tensor.stride())}", must="contiguous")
    return tensor.view(-1)
