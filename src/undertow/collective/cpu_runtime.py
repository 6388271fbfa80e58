"""Schedules on the CPU fabric: semaphores and workspace in shared memory, the interpreter on the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InvalidArgument, RankLost
from ..fabric import timeline
from ..fabric.flight import FlightRing
from ..fabric.symmetric import SymmetricBuffer
from . import cpu_interpreter as interpreter
from . import cpu_sums as sums
from .bind import (
    FIRST_WORKSPACE,
    MY_INPUT,
    MY_OUTPUT,
    Bound,
    bind,
    most_semaphores,
    waits_for_kernels,
    workspace_bytes,
)

if TYPE_CHECKING:
    from ..fabric.cpu import CpuFabric
    from ..fabric.flight_writer import Text
    from ..fabric.group import Group
    from .schedule import Schedule

STRIDE = 128 << 10  # bytes of a staged chunk: what a few ranks stage stays in the second-level caches
TYPES = {
    torch.float32: sums.FLOAT32, torch.float64: sums.FLOAT64, torch.float16: sums.FLOAT16,
    torch.bfloat16: sums.BFLOAT16, torch.int32: sums.INT32, torch.int64: sums.INT64,
    torch.uint8: sums.UINT8, torch.int8: sums.INT8, torch.int16: sums.INT16,
}  # fmt: skip
OPERATIONS = {"sum": sums.SUM, "max": sums.MAX, "min": sums.MIN, "avg": sums.SUM}
_SPINS_ALONE, _SPINS_CROWDED = 200, 20  # then the core is offered to others: a busy machine may need it
# Beside a thread that computes: it neither polls nor yields but sleeps at once. Whoever yields on a busy core loses its
# turn to all others on it, and wakes late when a parcel is there.
_SPINS_BESIDE = -interpreter.YIELDS
_LOGGED = 65536  # instructions of a call in a timeline
_MOST_WORKSPACE = 64 << 20  # bytes of a rank
_KEPT = 512  # bound programs: sizes may differ from call to call


def stride_for(schedule: Schedule) -> int:
    """Bytes of a staged chunk: the usual ones, or fewer where a schedule stages so many that memory would suffer."""
    chunks = max(1, workspace_bytes(schedule, 1))
    least = 16 * schedule.instances
    return max(least, min(STRIDE, _MOST_WORKSPACE // chunks // least * least))


class CpuExecutable:
    """One schedule on one group. Its semaphores and workspace are its own, so executables never disturb each other.

    Making one is collective. Calls of one executable come one after the other, on all ranks in the same order.
    """

    poisons = False

    def __init__(self, fabric: CpuFabric, schedule: Schedule, stride: int = STRIDE) -> None:
        group = fabric.group
        if schedule.ranks != group.size:
            raise InvalidArgument(
                argument="schedule", was=f"for {schedule.ranks} ranks", must=f"for {group.size} ranks"
            )
        self.schedule = schedule
        self.stride = stride - stride % (16 * schedule.instances)
        if self.stride < 1:
            must = f"at least {16 * schedule.instances} bytes for {schedule.instances} instances"
            raise InvalidArgument(argument="stride", was=stride, must=must)
        self._group = group
        self._bound: dict[tuple[object, ...], Bound] = {}
        words = max(1, most_semaphores(schedule))
        self._signals = fabric.signals(words)
        addresses = [self._signals.address(rank, 0) for rank in range(group.size)]
        self._semaphores = np.array([*addresses, addresses[group.rank]], np.int64)
        room = workspace_bytes(schedule, self.stride)
        self._workspace = fabric.buffer(room, torch.uint8) if room else None
        self._bases = np.zeros(FIRST_WORKSPACE + 3 * group.size, np.int64)
        if self._workspace is not None:
            for rank in range(group.size):
                self._bases[FIRST_WORKSPACE + rank] = self._workspace.address(rank)
        workers = max(1, len(schedule.workers_of(group.rank))) * schedule.instances
        self._state = np.zeros(interpreter.STATE_HEADER + workers * interpreter.STATE_ROW, np.int64)
        self._spins = _SPINS_CROWDED if group.crowded else _SPINS_ALONE
        if waits_for_kernels(schedule):
            self._spins = _SPINS_BESIDE

    def run(
        self,
        source: torch.Tensor | SymmetricBuffer,
        out: torch.Tensor | SymmetricBuffer,
        span_lengths: Sequence[int],
        operation: str = "sum",
        parcels: tuple[int, int] = (0, 0),
        tiles: int = 0,
        tile: int | None = None,
    ) -> None:
        """One call. `source` and `out` are contiguous; a direct schedule needs symmetric buffers for both.

        `parcels`: address of a kernel's parcel words and the value at which one is ready; `tiles`: address of the words
        that a waiting kernel looks at.
        """
        bound = self.bound(source.dtype, span_lengths, operation, tile)
        bases = self._bases
        bases[MY_INPUT], bases[MY_OUTPUT] = _address(source, self._group.rank), _address(out, self._group.rank)
        if not self.schedule.staged:
            self._set_remote(source, out)
        recorder = timeline.current()
        log = self._begin_log(bound) if recorder is not None else None
        try:
            with self.whole():
                self._complete(bound, True, parcels, tiles)
        finally:
            self._state[interpreter.LOG] = 0  # the log is about to go
        if recorder is not None and log is not None:
            self._end_log(recorder, log)

    def whole(self) -> Whole:
        """Around a call: whatever interrupts it ends the group, as others have counted on posts that will not come."""
        return Whole(self._group)

    def _complete(self, bound: Bound, fresh: bool, parcels: tuple[int, int] = (0, 0), tiles: int = 0) -> None:
        """Run, or go on running, until the call is over, the group has failed or the deadline has passed."""
        abort = self._group.abort_address
        began, stood = 0.0, b""
        while True:
            status = interpreter.run(
                bound.code, self._bases, self._state, self._semaphores, bound.iterations, abort, self._spins,
                parcels[0], parcels[1], tiles, 0, 0, fresh,
            )  # fmt: skip
            if status == interpreter.DONE:
                return
            fresh = False
            self._group.check()
            if self._state.tobytes() != stood:
                began, stood = time.monotonic(), self._state.tobytes()
            if time.monotonic() - began > self._group.deadline:
                waited = f"a collective stood still for {self._group.deadline:g} s"
                self._group.fail(self._group.why_waiting(None, waited))
                self._group.check()

    def prepare(self, dtype: torch.dtype, span_lengths: Sequence[int], operation: str, text: Text) -> Prepared:
        """Calls of one kind and size as one compiled call each; `text` is what their flight records say."""
        if not self.schedule.staged:
            must = "staged: a direct schedule's buffers are told with each call"
            raise InvalidArgument(argument="schedule", was="direct", must=must)
        return Prepared(self, self.bound(dtype, span_lengths, operation), text)

    def _begin_log(self, bound: Bound) -> NDArray[np.int64]:
        """Room for every instruction of a call; long calls leave their tail out."""
        rows = min(_LOGGED, len(bound.code) * bound.iterations)
        log = np.zeros(interpreter.LOG_HEADER + rows * interpreter.LOG_ROW, np.int64)
        log[0] = rows
        self._state[interpreter.LOG] = log.ctypes.data
        return log

    def _end_log(self, recorder: timeline.Recorder, log: NDArray[np.int64]) -> None:
        """What each worker did when, as rows of the timeline: they proceed independently, and here it shows."""
        mine = self.schedule.workers_of(self._group.rank)
        first = [int(self.schedule.worker_start[worker]) for worker in mine]
        sizes = [int(self.schedule.worker_start[worker + 1]) - begin for worker, begin in zip(mine, first, strict=True)]
        before = [sum(sizes[:place]) for place in range(len(sizes))]
        rows = log[interpreter.LOG_HEADER :].reshape(-1, interpreter.LOG_ROW)[: log[1]]
        for place, instruction, iteration, start, end in rows.tolist():
            worker, instance = divmod(place, self.schedule.instances)
            number = first[worker] + instruction - before[worker]
            engine = f"worker {worker}" + (f".{instance}" if self.schedule.instances > 1 else "")
            details = {"instruction": self.schedule.describe(number), "step": number - first[worker], "tile": iteration}
            recorder.add(
                timeline.Event(self.schedule.name, self._group.rank, engine, start, end - start, "peer", details)
            )

    def bound(
        self, dtype: torch.dtype, span_lengths: Sequence[int], operation: str = "sum", tile: int | None = None
    ) -> Bound:
        """The program for calls of this size; the latest few hundred are kept."""
        key = (tuple(span_lengths), dtype, operation, tile)
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= _KEPT:
                self._bound.clear()
            found = self._bound[key] = bind(
                self.schedule, self._group.rank, span_lengths, self.stride, dtype.itemsize,
                TYPES.get(dtype, sums.UINT8), OPERATIONS[operation], tile,
            )  # fmt: skip
        return found

    def _set_remote(self, source: torch.Tensor | SymmetricBuffer, out: torch.Tensor | SymmetricBuffer) -> None:
        size = self._group.size
        for buffer, given in ((MY_INPUT, source), (MY_OUTPUT, out)):
            if not isinstance(given, SymmetricBuffer):
                must = "a symmetric buffer, as other ranks reach into it"
                raise InvalidArgument(argument=("source", "out")[buffer], was="an ordinary tensor", must=must)
            for rank in range(size):
                self._bases[FIRST_WORKSPACE + size * (1 + buffer) + rank] = given.address(rank)

    def close(self) -> None:
        """Free the semaphores and the workspace. No rank may be in a call any more."""
        self._signals.release()
        if self._workspace is not None:
            self._workspace.release()


class Whole:
    """Fails the group if what it brackets does not come to its end."""

    __slots__ = ("_group",)

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and not self._group.failed:
            reason = f"a collective was interrupted by {kind.__name__}"
            self._group.fail(RankLost(rank=self._group.rank, group=self._group.name, reason=reason))


class Prepared:
    """See `CpuExecutable.prepare`. The caller holds the group's lock and has checked the tensors."""

    __slots__ = ("_executable", "_keep", "_words", "bound", "frame", "perform")

    def __init__(self, executable: CpuExecutable, bound: Bound, text: Text) -> None:
        words = np.zeros(interpreter.FRAME, np.int64)
        arrays = (bound.code, executable._bases, executable._state, executable._semaphores)
        for at, array in enumerate(arrays):
            words[2 * at], words[2 * at + 1] = array.ctypes.data, len(array)
        words[interpreter.ITERATIONS], words[interpreter.SPINS] = bound.iterations, executable._spins
        words[interpreter.ABORT_AT] = executable._group.abort_address
        ring = FlightRing.mine().address
        words[interpreter.RING_AT : interpreter.TICKET] = ring, text.address, text.length
        self._executable, self.bound, self._words, self._keep = executable, bound, words, (arrays, text)
        self.frame, self.perform = int(words.ctypes.data), interpreter.compiled_perform()

    def whole(self) -> Whole:
        """As `CpuExecutable.whole`."""
        return self._executable.whole()

    def complete(self) -> None:
        """Go on with a call that did not end in its first slice; its record ends here."""
        failed = True
        try:
            self._executable._complete(self.bound, fresh=False)
            failed = False
        finally:
            FlightRing.mine().end(int(self._words[interpreter.TICKET]), failed=failed)


def _address(given: torch.Tensor | SymmetricBuffer, rank: int) -> int:
    return given.address(rank) if isinstance(given, SymmetricBuffer) else given.data_ptr()
