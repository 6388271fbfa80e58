"""Staged schedules over lanes: copy engines inside a node, the network between nodes, the host walking the schedule.

    for every iteration (one tile of every chunk):
        for every step of the rank's walk (see `lane_plan`):
            expect    a message of another node may come in
            receive   wait for a message
            run       stores <- the sum of sources; what goes to another rank's staging is sent by a lane
            free      its place may be written again
            await     a parcel of a kernel is complete
            flush     memory that earlier sends read may be written again
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
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import InvalidArgument
from ..fabric.net import NetLane
from ..fabric.signals import Handoffs
from ..fabric.symmetric import SymmetricBuffer
from . import lane_plan as plan
from .bind import FIRST_WORKSPACE, SCRATCH, bind, waits_for_kernels, workspace_bytes
from .cpu_runtime import Whole
from .lane_plan import Operand, Rows
from .lane_sum import CTAS, OPERATIONS, Sum
from .schedule import NEEDED

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane
    from .schedule import Schedule

STRIDE = 1 << 20  # bytes of a message: transfers cost tens of microseconds to begin
MOST_BYTES = 8 << 20  # what the staged dma lane holds of a message before its receiver comes
_KEPT = 512  # walks: sizes may differ from call to call
_WORKSPACE, _SPARE = FIRST_WORKSPACE, FIRST_WORKSPACE + 1  # bases, after source and out


@dataclass(frozen=True, slots=True)
class _Piece:
    """One chunk of one instruction. `value` is what is sent: a source, or the first of `stores`."""

    elements: int
    sources: tuple[Operand, ...]
    stores: tuple[Operand, ...]
    value: Operand
    sends: tuple[tuple[int, int, int, int], ...]  # lane, peer, offset in its workspace, slot


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A message to me."""

    lane: int
    peer: int
    offset: int
    elements: int
    slot: int


@dataclass(frozen=True, slots=True)
class _Bound:
    """The walk for calls of one size. Lengths in elements."""

    steps: list[tuple[int, Any]]
    iterations: int
    tile: int
    copy: int  # of the workspace: there are `depth` of them
    needs: tuple[int, int]  # elements of source and out
    parts: frozenset[int]  # how many are summed


class LaneExecutable:
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
        near = _Near(fabric, lane)
        self._walk = plan.walk(schedule, group.rank, group.nodes, near.holds)
        self._lanes: list[Lane | None] = [None, None]
        self._sent = [False, False]  # by lane: whether there is anything to flush
        if plan.NEAR in self._walk.lanes:
            self._lanes[plan.NEAR] = near.open(self._walk.slots)
        if plan.FAR in self._walk.lanes:
            net = fabric.lane("net")
            assert isinstance(net, NetLane)
            self._lanes[plan.FAR] = net.part()
        self._near = near
        room = workspace_bytes(schedule, self.stride)
        self._workspace = fabric.buffer(room, torch.uint8) if room else None
        self._spare = torch.empty(
            self._walk.spares * self.stride * schedule.depth, dtype=torch.uint8, device=group.device
        )
        self._typed: dict[torch.dtype, SymmetricBuffer | None] = {}
        self._bound: dict[tuple[object, ...], _Bound] = {}
        self._sum = Sum(group.device, ctas)
        fabric.adopt(self)

    def describe(self) -> str:
        """Which lanes carry it, in a few words."""
        names = ("inside a node", "between nodes" if self._lanes[plan.NEAR] else "between all ranks")
        return "; ".join(f"{lane.describe()} {where}" for lane, where in zip(self._lanes, names, strict=True) if lane)

    def run(
        self,
        source: torch.Tensor | SymmetricBuffer,
        out: torch.Tensor | SymmetricBuffer,
        span_lengths: Sequence[int],
        operation: str = "sum",
        ready: Callable[[int], None] | None = None,
    ) -> None:
        """One call. `source` and `out` are contiguous; in place, both are parts of one memory as the contract says.

        `ready(parcel)` waits for a kernel's parcel, in the order of the current stream, and acquires it.
        """
        if ready is None and waits_for_kernels(self.schedule):
            raise InvalidArgument(argument="ready", was=None, must="given: the schedule waits for a kernel's parcels")
        if operation not in OPERATIONS:
            raise InvalidArgument(argument="operation", was=repr(operation), must=f"one of {', '.join(OPERATIONS)}")
        given = {"source": _flat("source", source), "out": _flat("out", out)}
        dtype = given["source"].dtype
        key = (tuple(span_lengths), dtype)
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= _KEPT:
                self._bound.clear()
            bound = self._bound[key] = self._bind(span_lengths, dtype.itemsize)
        for (name, tensor), needed in zip(given.items(), bound.needs, strict=True):
            if tensor.numel() < needed or tensor.dtype != dtype:
                was, must = f"{tensor.numel()} {tensor.dtype}", f"{needed} {dtype}"
                raise InvalidArgument(argument=name, was=was, must=must)
        self._sum.warm_up(dtype, bound.parts, operation)
        space = self._space(dtype)
        spare = self._spare.view(dtype)
        local = given["source"] if space is None else space.local
        bases = (given["source"], given["out"], local, spare)
        with Whole(self._group):
            for iteration in range(bound.iterations):
                self._iterate(bound, iteration, bases, space, operation, ready)
            self._flush(plan.NEAR)
            self._flush(plan.FAR)

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

    def _iterate(
        self,
        bound: _Bound,
        iteration: int,
        bases: tuple[torch.Tensor, ...],
        space: SymmetricBuffer | None,
        operation: str,
        ready: Callable[[int], None] | None,
    ) -> None:
        depth = self.schedule.depth
        parity, first = iteration % depth, iteration * bound.tile
        copy = parity * bound.copy
        shifts = (first, first, copy, parity * (self._spare.numel() // depth // bases[0].element_size()))
        for kind, found in bound.steps:
            if kind == plan.RUN:
                for piece in found:
                    count = min(bound.tile, piece.elements - first)
                    if count > 0:
                        self._move(piece, count, bases, shifts, space, operation, parity)
                continue
            if kind >= plan.FLUSH:
                if kind == plan.FLUSH or iteration >= depth:
                    self._flush(found)
                continue
            if kind == plan.AWAIT:
                assert ready is not None
                ready(found)
                continue
            count = min(bound.tile, found.elements - first)
            if count <= 0:
                continue
            lane = self._lanes[found.lane]
            assert lane is not None
            assert space is not None
            if kind == plan.FREE:
                lane.free(found.peer, found.slot + parity)
            elif kind == plan.RECEIVE:
                lane.receive(found.peer, space, found.offset + copy, count, found.slot + parity)
            else:
                assert isinstance(lane, NetLane)
                lane.expect(found.peer, space, found.offset + copy, count, found.slot + parity)

    def _move(
        self,
        piece: _Piece,
        count: int,
        bases: tuple[torch.Tensor, ...],
        shifts: tuple[int, ...],
        space: SymmetricBuffer | None,
        operation: str,
        parity: int,
    ) -> None:
        def view(operand: Operand) -> torch.Tensor:
            base, offset = operand
            return bases[base].narrow(0, offset + shifts[base], count)

        if piece.stores:
            total = view(piece.stores[0])
            self._sum(total, [view(one) for one in piece.sources], operation)
            for other in piece.stores[1:]:
                view(other).copy_(total)
        for lane, peer, offset, slot in piece.sends:
            carrier = self._lanes[lane]
            assert carrier is not None
            assert space is not None
            carrier.send(peer, view(piece.value), space, offset + shifts[_WORKSPACE], slot + parity)
            self._sent[lane] = True

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

    # -- the walk, for one size ----------------------------------------------------------------------------------------

    def _bind(self, span_lengths: Sequence[int], item_size: int) -> _Bound:
        schedule, rank = self.schedule, self._group.rank
        bound = bind(schedule, rank, span_lengths, self.stride, item_size, 0, 0)
        rows = Rows(bound.code, rank, self.stride // item_size)
        numbers = (
            at
            for worker in schedule.workers_of(rank)
            for at in range(int(schedule.worker_start[worker]), int(schedule.worker_start[worker + 1]))
        )
        row_of = {at: row for row, at in enumerate(numbers)}  # as `bind` puts them
        lengths = {
            (at, place): elements for at, row in row_of.items() for place, elements in rows.places_read(row).items()
        }
        steps: list[tuple[int, Any]] = []
        for kind, number in self._walk.steps:
            if kind == plan.RUN:
                steps.append((kind, self._pieces(rows, row_of[number], number)))
            elif kind >= plan.AWAIT:
                steps.append((kind, number))
            else:
                one = self._walk.messages[number]
                elements = lengths.get((one.first_read, one.place), 0)
                lane = self._lane_to(one.sender)
                steps.append((kind, _Transfer(lane, one.sender, one.place * rows.room, elements, one.slot)))
        contract, unit = schedule.contract, max(1, 16 // item_size)  # as `bind` cuts
        classes = contract.class_lengths(span_lengths, unit)
        items = contract.item_class[contract.first_item[rank] : contract.first_item[rank + 1]]
        outputs = contract.output_class[contract.first_output[rank] : contract.first_output[rank + 1]]
        needs = int(classes[items].sum()), int(classes[outputs].sum())
        pieces = [piece for kind, found in steps if kind == plan.RUN for piece in found]
        parts = frozenset(len(piece.sources) for piece in pieces)
        tile = bound.tile
        if bound.iterations == 1:  # chunks that lie side by side everywhere are one piece then
            tile = max([tile, *(piece.elements for piece in pieces)])
        return _Bound(steps, bound.iterations, tile, int(bound.code[SCRATCH]), needs, parts)

    def _pieces(self, rows: Rows, row: int, at: int) -> list[_Piece]:
        pieces: list[_Piece] = []
        spare = self._walk.spare_of.get(at)
        for elements, sources, stores, remote in rows.pieces(row):
            if spare is not None:
                stores = ((_SPARE, (spare + len(pieces)) * rows.room),)
            sends = tuple(
                (self._lane_to(peer), peer, place * rows.room, self._walk.slot_of[self._group.rank, peer, place])
                for peer, place in remote
            )
            value = sources[0] if plan.sends_source(self.schedule, at) else stores[0]
            pieces.append(_Piece(elements, sources, stores, value, sends))
        return pieces

    def _lane_to(self, peer: int) -> int:
        return plan.NEAR if self._near.holds != plan.MEETING and self._group.is_local(peer) else plan.FAR


class _Near:
    """The lane inside a node: one of its own with as many slots as the schedule needs, or the fabric's own."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self._fabric, self._name = fabric, name
        self._shared: Lane | None = None
        self._made: Lane | None = None
        self._pairs: list[Handoffs] = []
        self.group, self.device = fabric.group, fabric.group.device  # a lane's constructor takes this for its fabric
        self._slots = 0
        if name == "net" or name not in fabric.lanes():
            fabric.lane(name)  # refuses a name that is none
            self.holds = plan.MEETING
            return
        self.holds = plan.PLACES
        if self.device.type == "cuda":
            self._shared = fabric.lane(name)
            from ..fabric.cuda_lanes import StagedLane

            # Its ring of pinned memory is large and has one message for each pair, whatever the slot.
            self.holds = plan.ONE if isinstance(self._shared, StagedLane) else plan.PLACES

    def open(self, slots: int) -> Lane:
        """Collective."""
        if self._shared is not None and self.holds == plan.ONE:
            return self._shared
        self._slots = slots
        kind: Any = type(self._shared)
        if self._shared is None:
            from ..fabric.cpu_lanes import DmaLane, PeerLane

            kind = DmaLane if self._name == "dma" else PeerLane
        self._made = cast("Lane", kind(self))
        return self._made

    def handoffs(self) -> Handoffs:
        """As a fabric's, with enough slots."""
        self._pairs.append(self._fabric.handoffs(self._slots))
        return self._pairs[-1]

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None
        for pairs in self._pairs:
            pairs.release()
        self._pairs.clear()


def _flat(name: str, given: torch.Tensor | SymmetricBuffer) -> torch.Tensor:
    tensor = given.local if isinstance(given, SymmetricBuffer) else given
    if not tensor.is_contiguous():
        raise InvalidArgument(argument=name, was=f"strided {tuple(tensor.stride())}", must="contiguous")
    return tensor.view(-1)
