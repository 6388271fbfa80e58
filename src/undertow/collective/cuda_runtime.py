"""Schedules on the CUDA fabric: semaphores and workspace in symmetric memory, one persistent kernel a call.

A call only enqueues. What a program is made of goes to the GPU once for each size of call (and pair of buffers, where
others reach into them), and what a kernel is made of once for each type of element; neither can happen inside a CUDA
graph capture, so a call must have been made before it is captured. Nothing that differs from replay to replay is an
argument of the kernel: it counts its calls itself.

Straight-line schedules have a kernel that is unrolled for them (`kernels/straight.py`), all others are interpreted.

All CTAs of all ranks wait for each other, so all of them must be able to run at the same time: a program takes no more
CTAs than a rank has multiprocessors, and what runs beside it must leave it as many as it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..fabric.symmetric import SymmetricBuffer
from .bind import (
    FIRST_WORKSPACE,
    MY_INPUT,
    MY_OUTPUT,
    bind,
    check_places,
    most_semaphores,
    tiling,
    workspace_bytes,
)
from .cpu_runtime import OPERATIONS, TYPES
from .cpu_sums import UINT8
from .cuda_kernels import (
    RAW,
    Kernel,
    idle_code,
    kernel_variant,
    launches_early,
    straight_cut,
    sums,
    warps_of,
)
from .straight import rows, straighten

if TYPE_CHECKING:
    from ..fabric.cuda import CudaFabric
    from .schedule import Schedule

STRIDE = 1 << 20  # bytes of a staged chunk: an iteration's part of every CTA is then long beside its waits
_KEPT = 512  # kinds of calls: sizes and buffers may differ from call to call
_MOST_TILE = 32 << 30  # bytes of a tile: kernels count its vectors in 32 bits


@dataclass(frozen=True, slots=True)
class _Call:
    """Calls of one size, type and operation, on the same buffers if others reach into those."""

    kernel: Kernel
    tables: tuple[torch.Tensor, ...]  # whose addresses are among the arguments
    before: tuple[object, ...]  # arguments before the addresses of the caller's tensors, and after them
    after: tuple[object, ...]
    inputs: int  # elements that the caller's tensors must have
    outputs: int


class CudaExecutable:
    """One schedule on one group. Its semaphores and workspace are its own, so executables never disturb each other.

    Making one is collective, and so is the first call with each dtype and operation, on the host too. Calls of one
    executable come one after the other in the order of streams, on all ranks in the same order. A call is one kernel,
    which looks at its own deadline and poisons the output of an aborted call itself: nothing has to watch the stream.
    """

    poisons = True

    def __init__(
        self,
        fabric: CudaFabric,
        schedule: Schedule,
        stride: int = STRIDE,
        warps: int | None = None,
        in_flight: int | None = None,
        early: bool | None = None,
    ) -> None:
        """`warps`, `in_flight` (wide loads of a thread), `early`: of straight-line kernels, where not left open."""
        from ..fabric.cuda import CudaStream

        group = fabric.group
        if schedule.ranks != group.size:
            raise InvalidArgument(
                argument="schedule", was=f"for {schedule.ranks} ranks", must=f"for {group.size} ranks"
            )
        # The greatest number of CTAs and the least of multiprocessors, so that all ranks decide alike.
        most = int(np.bincount(schedule.worker_rank).max()) * schedule.instances
        room = min(group.exchange(fabric.multiprocessors, "how many multiprocessors ranks have"))
        if most > room:
            was = f"of {most} CTAs a rank ({most // schedule.instances} workers, {schedule.instances} instances each)"
            must = f"of at most {room}, the multiprocessors that a rank has: all CTAs run at once"
            raise InvalidArgument(argument="schedule", was=was, must=must)
        self.schedule = schedule
        self.straight = straighten(schedule)
        self.stride = stride - stride % (16 * schedule.instances)
        self.ctas = len(schedule.workers_of(group.rank)) * schedule.instances
        self.warps = warps if warps is not None and self.straight is not None else warps_of(schedule)
        self._in_flight = in_flight
        self._early = launches_early(fabric.device) if early is None else early
        self._fabric, self._group, self._device, self._guard = fabric, group, fabric.device, fabric.guard
        uploads = fabric.stream("upload")
        assert isinstance(uploads, CudaStream)
        self._uploads = uploads.stream
        self._calls: dict[tuple[object, ...], _Call] = {}
        self._kernels: dict[tuple[torch.dtype, str], Kernel] = {}
        self._plain: CudaExecutable | None = None  # for what packets cannot carry
        self._captured: list[tuple[torch.Tensor, ...]] = []  # graphs use these again: they live as long as this
        self._retired: list[_Call] = []  # calls that were enqueued may still read the tables of these
        self._retired_at: Any = None  # an event
        self._signals = fabric.signals(max(1, most_semaphores(schedule)))
        self._first_semaphores = [self._signals.address(rank, 0) for rank in range(group.size)]
        size = workspace_bytes(schedule, self.stride)
        self._workspace = fabric.buffer(size, torch.uint8) if size else None
        bases = np.zeros(FIRST_WORKSPACE + 3 * group.size, np.int64)
        if self._workspace is not None:
            bases[FIRST_WORKSPACE : FIRST_WORKSPACE + group.size] = [
                self._workspace.address(rank) for rank in range(group.size)
            ]
        self._bases = bases
        self._semaphores = self._upload(np.array([*self._first_semaphores, self._first_semaphores[group.rank]]))
        self._epochs = self._upload(np.zeros(2 * self.ctas + 1, np.int64))  # and how many CTAs of all calls are out

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
        """Enqueue one call. `source` and `out` are contiguous; a direct schedule needs symmetric buffers for both.
        Should the call fail, all of `out` is poisoned, also what it has beyond the result.

        `parcels`: address of a kernel's parcel words and the value at which one is ready, the same in every call;
        `tiles`: address of the words that a waiting kernel looks at.
        """
        if torch.cuda.current_device() != self._device.index:  # a thread that never chose a device starts on the first
            with torch.cuda.device(self._device):
                self.run(source, out, span_lengths, operation, parcels, tiles, tile)
            return
        if self.schedule.packets and not self._packets_carry(source.dtype):
            self._without_packets().run(source, out, span_lengths, operation, parcels, tiles, tile)
            return
        call = self.load(source, out, span_lengths, operation, tile)
        first = self._address("source", source, call.inputs)
        second = self._address("out", out, call.outputs)
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(call.tables)
        ends = (parcels[0], parcels[1], tiles) if self.straight is None else ()
        call.kernel.launch(
            self.ctas, self._stream(), *call.before, first, second, _bytes(out), *call.after, self._guard.abort,
            self._guard.error, int(self._group.deadline * 1e9), *ends,
        )  # fmt: skip

    def load(
        self,
        source: torch.Tensor | SymmetricBuffer,
        out: torch.Tensor | SymmetricBuffer,
        span_lengths: Sequence[int],
        operation: str = "sum",
        tile: int | None = None,
    ) -> _Call:
        """Have all on the GPU that such a call needs, before a kernel that it waits for is under way. Collective."""
        places = () if self.schedule.staged else (*self._place("source", source), *self._place("out", out))
        key = (source.dtype, operation, tile, *span_lengths, *places)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._prepare(source, out, tuple(span_lengths), operation, tile)
        return call

    def close(self) -> None:
        """Free the semaphores and the workspace. No rank may be in a call any more, nor replay a graph of one."""
        self._signals.release()
        if self._workspace is not None:
            self._workspace.release()
        if self._plain is not None:
            self._plain.close()

    # -- what is made once -----------------------------------------------------------------------------------------

    def _prepare(
        self,
        source: torch.Tensor | SymmetricBuffer,
        out: torch.Tensor | SymmetricBuffer,
        spans: tuple[int, ...],
        operation: str,
        tile: int | None,
    ) -> _Call:
        """All that is known of a call before it is made, on the GPU; the latest few hundred are kept."""
        self._refuse_in_capture("this size, or with these buffers")
        dtype, schedule, rank = source.dtype, self.schedule, self._group.rank
        if operation not in OPERATIONS:
            must = f"one of {', '.join(OPERATIONS)}"
            raise InvalidArgument(argument="operation", was=repr(operation), must=must)
        size, contract = dtype.itemsize, schedule.contract
        if size not in RAW:
            must = "of a type of 1, 2, 4 or 8 bytes"
            raise InvalidArgument(argument="source", was=f"of {dtype}, of {size} bytes", must=must)
        length = contract.class_lengths(spans, max(1, 16 // size))
        check_places(schedule, length)
        step, iterations = tiling(schedule, length, self.stride, size, tile)
        if iterations >= 1 << 31 or step * size >= _MOST_TILE:
            must = "of less than 32 GiB and such that a call has fewer than 2^31 of them"
            raise InvalidArgument(argument="tile", was=f"of {step * size} bytes, {iterations} of them", must=must)
        bases = self._bases if schedule.staged else self._with_buffers(source, out)
        if len(self._calls) >= _KEPT:
            self._make_room()
        if self.straight is not None:
            made = rows(schedule, self.straight, rank, length, self.stride // size, size, bases, self._first_semaphores)
            tables: tuple[torch.Tensor, ...] = (self._upload(made),)
            before: tuple[object, ...] = (tables[0].data_ptr(), *self._counts())
            after: tuple[object, ...] = straight_cut(schedule, self.straight, self.stride, self.warps, iterations, step)
        else:
            code = TYPES.get(dtype, UINT8)
            bound = bind(schedule, rank, spans, self.stride, size, code, OPERATIONS[operation], tile)
            tables = (self._upload(bound.code), self._upload(bases))
            before = (*(one.data_ptr() for one in (*tables, self._semaphores)), *self._counts())
            after = (bound.iterations, len(bound.code))
        inputs = contract.item_class[contract.first_item[rank] : contract.first_item[rank + 1]]
        outputs = contract.output_class[contract.first_output[rank] : contract.first_output[rank + 1]]
        least = (0, 0) if schedule.in_place else (int(length[inputs].sum()), int(length[outputs].sum()))
        return _Call(self._kernel(dtype, operation), tables, before, after, *least)

    def _counts(self) -> tuple[int, int]:
        """Addresses of the epochs, and of what counts CTAs that are out."""
        return self._epochs.data_ptr(), self._epochs.data_ptr() + 16 * self.ctas

    def _with_buffers(
        self, source: torch.Tensor | SymmetricBuffer, out: torch.Tensor | SymmetricBuffer
    ) -> NDArray[np.int64]:
        """The base addresses of a direct call, where other ranks' inputs and outputs are needed too."""
        bases = self._bases.copy()
        size = self._group.size
        for buffer, given in ((MY_INPUT, source), (MY_OUTPUT, out)):
            assert isinstance(given, SymmetricBuffer)
            first = FIRST_WORKSPACE + size * (1 + buffer)
            bases[first : first + size] = [given.address(one) if given.count else 0 for one in range(size)]
        return bases

    def _kernel(self, dtype: torch.dtype, operation: str) -> Kernel:
        """The kernel for this type and operation, compiled and loaded on all ranks. Collective at first.

        It follows from the schedule as a whole, so that all ranks make the same. Compiling and loading come before any
        rank waits in it: loading synchronises, and would wait for a kernel that waits for this rank.
        """
        found = self._kernels.get((dtype, operation))
        if found is None:
            constants = kernel_variant(
                self.schedule, self.straight, dtype, operation, self.warps, self._in_flight, self._early
            )
            found = Kernel(self.straight is not None, constants, self.warps)
            arguments = self._idle()
            leads = self._group.rank == self._group.local_ranks[0]
            for turn in (True, False):  # one rank of a node compiles, the others find the result on disk
                if leads == turn:
                    with torch.cuda.stream(self._uploads):
                        found.launch(1, self._uploads.cuda_stream, *arguments)
                    self._uploads.synchronize()
                self._group.barrier()
            self._kernels[dtype, operation] = found
        return found

    def _idle(self) -> tuple[object, ...]:
        """Arguments with which a kernel does nothing: to have it compiled and loaded."""
        epochs = self._upload(np.zeros(3, np.int64))
        watch = (self._guard.abort, self._guard.error, int(self._group.deadline * 1e9))
        if self.straight is not None:
            row = self._upload(np.zeros(self.straight.width, np.int64))
            return (row, epochs, epochs[2:], 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, *watch)
        code = idle_code(self._group.size)
        tables = (self._upload(code), self._upload(self._bases), self._semaphores)
        return (*tables, epochs, epochs[2:], 0, 0, 0, 1, len(code), *watch, 0, 0, 0)

    def _packets_carry(self, dtype: torch.dtype) -> bool:
        """Whether sums of this type fit packets; copies of any type do."""
        return dtype.itemsize <= 4 or not sums(self.schedule)

    def _without_packets(self) -> CudaExecutable:
        """The same schedule with its semaphores, which packets leave out. Collective at first."""
        if self._plain is None:
            self._refuse_in_capture("this dtype")
            announced = np.zeros_like(self.schedule.semaphore_of_packets)
            plain = replace(self.schedule, packets=False, semaphore_of_packets=announced)
            self._plain = CudaExecutable(self._fabric, plain, self.stride)
        return self._plain

    def _upload(self, words: NDArray[np.int64]) -> torch.Tensor:
        """On a stream of its own: the caller's may be waiting for something that the caller has yet to enqueue."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._uploads):
            made = torch.from_numpy(words).to(self._device)
        self._uploads.synchronize()
        return made

    def _make_room(self) -> None:
        """Forget all calls; their memory goes when those that were enqueued so far are over."""
        if self._retired_at is not None and self._retired_at.query():
            self._retired.clear()
        self._retired += self._calls.values()
        self._calls.clear()
        self._retired_at = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._retired_at.record()

    def _refuse_in_capture(self, what: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            was = f"the first one with {what}, inside a CUDA graph capture"
            raise InvalidArgument(
                argument="call", was=was, must="made once before it is captured: it uploads or compiles"
            )

    # -- at every call ---------------------------------------------------------------------------------------------

    def _stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self._device.index))

    def _place(self, name: str, given: torch.Tensor | SymmetricBuffer) -> tuple[int, int]:
        """What tells apart the buffers of direct calls."""
        if not isinstance(given, SymmetricBuffer):
            must = "a symmetric buffer, as other ranks reach into it"
            raise InvalidArgument(argument=name, was="an ordinary tensor", must=must)
        return given.identity, given.address(self._group.rank) if given.count else 0

    def _address(self, name: str, given: torch.Tensor | SymmetricBuffer, elements: int) -> int:
        """Checked: a wrong address would take the contexts of all ranks of this GPU."""
        if isinstance(given, SymmetricBuffer):
            held, address = given.count, given.address(self._group.rank) if given.count else 0
        else:
            held, address = given.numel(), given.data_ptr()
            if given.device != self._device or not given.is_contiguous():
                was = f"on {given.device}, of strides {tuple(given.stride())}"
                raise InvalidArgument(argument=name, was=was, must=f"contiguous and on {self._device}")
        if held < elements:
            raise InvalidArgument(argument=name, was=f"of {held} elements", must=f"of at least {elements}")
        return address


def _bytes(given: torch.Tensor | SymmetricBuffer) -> int:
    return (given.local if isinstance(given, SymmetricBuffer) else given).nbytes
