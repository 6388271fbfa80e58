"""Schedules on the CUDA fabric: semaphores and workspace in symmetric memory, one persistent kernel a call.

A call only enqueues. What a program is made of goes to the GPU once for each size of call, and what a kernel is made of
once for each type of element; neither can happen inside a CUDA graph capture, so a call must have been made before it
is captured. Nothing that differs from replay to replay is an argument of the kernel: it counts its calls itself.

All CTAs of all ranks wait for each other, so all of them must be able to run at the same time: a program takes no more
CTAs than a rank has multiprocessors, and what runs beside it must leave it as many as it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..fabric.base import SymmetricBuffer
from ..kernels.interpret import interpret_kernel
from ..kernels.pieces import MOST_UNROLLED
from . import bind as layout
from .bind import FIRST_WORKSPACE, MY_INPUT, MY_OUTPUT, bind, most_semaphores, waits_for_kernels, workspace_bytes
from .cpu_interpreter import UINT8
from .cpu_runtime import OPERATIONS, TYPES
from .schedule import MOVE

if TYPE_CHECKING:
    from ..fabric.cuda import CudaFabric
    from .schedule import Schedule

STRIDE = 1 << 20  # bytes of a staged chunk: an iteration's part of every CTA is then long beside its waits
WARPS, VECTORS = 8, 16  # 64 KB under way for each CTA: enough to cover a peer's latency
_KEPT = 512  # bound programs and tables of buffers: sizes may differ from call to call
_ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: tl.float32, torch.float64: tl.float64, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.int32: tl.int32, torch.int64: tl.int64, torch.uint8: tl.uint8, torch.int8: tl.int8, torch.int16: tl.int16,
}  # fmt: skip
_RAW: dict[int, Any] = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@dataclass(frozen=True, slots=True)
class _Program:
    """A bound program on the GPU, and how many elements the caller's two buffers must have."""

    code: torch.Tensor
    iterations: int
    inputs: int
    outputs: int


class CudaExecutable:
    """One schedule on one group. Its semaphores and workspace are its own, so executables never disturb each other.

    Making one is collective, and so is the first call with each dtype and operation, on the host too. Calls of one
    executable come one after the other in the order of streams, on all ranks in the same order. They are not bracketed:
    `fabric.guarded_call` around them poisons the outputs of an aborted call and watches the stream.
    """

    def __init__(
        self, fabric: CudaFabric, schedule: Schedule, stride: int = STRIDE, warps: int = WARPS, vectors: int = VECTORS
    ) -> None:
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
        self.stride = stride - stride % (16 * schedule.instances)
        self.ctas = len(schedule.workers_of(group.rank)) * schedule.instances
        self.warps, self.vectors = warps, vectors
        self._group, self._device, self._guard = group, fabric.device, fabric.guard
        uploads = fabric.stream("upload")
        assert isinstance(uploads, CudaStream)
        self._uploads = uploads.stream
        self._programs: dict[tuple[object, ...], _Program] = {}
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}  # base addresses, by the buffers of a call
        self._variants: dict[tuple[torch.dtype, str], dict[str, Any]] = {}
        self._captured: list[torch.Tensor] = []  # graphs use these again: they live as long as the executable
        self._retired: list[torch.Tensor] = []  # calls that were enqueued may still read these
        self._retired_at: Any = None  # an event
        self._signals = fabric.signals(max(1, most_semaphores(schedule)))
        first = [self._signals.address(rank, 0) for rank in range(group.size)]
        size = workspace_bytes(schedule, self.stride)
        self._workspace = fabric.buffer(size, torch.uint8) if size else None
        bases = np.zeros(FIRST_WORKSPACE + 3 * group.size, np.int64)
        if self._workspace is not None:
            bases[FIRST_WORKSPACE : FIRST_WORKSPACE + group.size] = [
                self._workspace.address(rank) for rank in range(group.size)
            ]
        self._bases = bases
        self._semaphores = self._upload(np.array([*first, first[group.rank]], np.int64))
        self._private = self._upload(bases)
        self._epochs = self._upload(np.zeros(2 * self.ctas, np.int64))

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

        `parcels`: address of a kernel's parcel words and the value at which one is ready, the same in every call;
        `tiles`: address of the words that a waiting kernel looks at.
        """
        with torch.cuda.device(self._device):  # a thread that never chose a device starts on the first
            program = self._program(source.dtype, span_lengths, operation, tile)
            self._check("source", source, program.inputs)
            self._check("out", out, program.outputs)
            bases = self._private if self.schedule.staged else self._table(source, out)
            variant = self._variant(source.dtype, operation)
            if torch.cuda.is_current_stream_capturing():
                self._captured += (program.code, bases)
            rank = self._group.rank
            addresses = [
                one.address(rank) if isinstance(one, SymmetricBuffer) and one.count else _pointer(one)
                for one in (source, out)
            ]
            self._launch(self.ctas, program, bases, self._epochs, addresses, parcels, tiles, variant)

    def close(self) -> None:
        """Free the semaphores and the workspace. No rank may be in a call any more, nor replay a graph of one."""
        self._signals.release()
        if self._workspace is not None:
            self._workspace.release()

    def _launch(
        self,
        ctas: int,
        program: _Program,
        bases: torch.Tensor,
        epochs: torch.Tensor,
        addresses: Sequence[int],
        parcels: tuple[int, int],
        tiles: int,
        variant: dict[str, Any],
    ) -> None:
        interpret_kernel[(ctas,)](
            program.code, bases, self._semaphores, epochs, addresses[0], addresses[1], program.iterations,
            program.code.numel(), self._guard.abort, self._guard.error, int(self._group.deadline * 1e9), parcels[0],
            parcels[1], tiles, **variant, **launch_options(self.warps),
        )  # fmt: skip

    # -- what is made once -----------------------------------------------------------------------------------------

    def _program(self, dtype: torch.dtype, span_lengths: Sequence[int], operation: str, tile: int | None) -> _Program:
        """The program for calls of this size, on the GPU; the latest few hundred are kept."""
        key = (tuple(span_lengths), dtype, operation, tile)
        found = self._programs.get(key)
        if found is None:
            self._refuse_in_capture("this size")
            if operation not in OPERATIONS:
                must = f"one of {', '.join(OPERATIONS)}"
                raise InvalidArgument(argument="operation", was=repr(operation), must=must)
            size, rank, contract = dtype.itemsize, self._group.rank, self.schedule.contract
            if size not in _RAW:
                must = "of a type of 1, 2, 4 or 8 bytes"
                raise InvalidArgument(argument="source", was=f"of {dtype}, of {size} bytes", must=must)
            code = TYPES.get(dtype, UINT8)
            made = bind(self.schedule, rank, span_lengths, self.stride, size, code, OPERATIONS[operation], tile)
            if made.iterations >= 1 << 31:
                must = "such that a call has fewer than 2^31 of them"
                raise InvalidArgument(argument="tile", was=f"one for {made.iterations} iterations", must=must)
            length = contract.class_lengths(span_lengths, max(1, 16 // size))
            inputs = contract.item_class[contract.first_item[rank] : contract.first_item[rank + 1]]
            outputs = contract.output_class[contract.first_output[rank] : contract.first_output[rank + 1]]
            self._make_room(self._programs, [one.code for one in self._programs.values()])
            found = self._programs[key] = _Program(
                self._upload(made.code), made.iterations, int(length[inputs].sum()), int(length[outputs].sum())
            )
        return found

    def _table(self, source: torch.Tensor | SymmetricBuffer, out: torch.Tensor | SymmetricBuffer) -> torch.Tensor:
        """The base addresses of a direct call, where other ranks' inputs and outputs are needed too."""
        rank, size = self._group.rank, self._group.size
        key: list[int] = []
        for name, given in (("source", source), ("out", out)):
            if not isinstance(given, SymmetricBuffer):
                must = "a symmetric buffer, as other ranks reach into it"
                raise InvalidArgument(argument=name, was="an ordinary tensor", must=must)
            key += (given.identity, given.address(rank) if given.count else 0)
        found = self._tables.get(tuple(key))
        if found is None:
            self._refuse_in_capture("these buffers")
            bases = self._bases.copy()
            for buffer, given in ((MY_INPUT, source), (MY_OUTPUT, out)):
                assert isinstance(given, SymmetricBuffer)
                first = FIRST_WORKSPACE + size * (1 + buffer)
                bases[first : first + size] = [given.address(one) if given.count else 0 for one in range(size)]
            self._make_room(self._tables, list(self._tables.values()))
            found = self._tables[tuple(key)] = self._upload(bases)
        return found

    def _variant(self, dtype: torch.dtype, operation: str) -> dict[str, Any]:
        """The kernel for this type and operation, compiled and loaded on all ranks. Collective at first.

        It follows from the schedule as a whole, so that all ranks make the same. Compiling and loading come before any
        rank waits in it: loading synchronises, and would wait for a kernel that waits for this rank.
        """
        found = self._variants.get((dtype, operation))
        if found is None:
            self._refuse_in_capture("this dtype and operation")
            found = kernel_variant(self.schedule, dtype, operation, self.warps, self.vectors)
            idle = _Program(self._upload(_idle_code(self._group.size)), 1, 0, 0)
            epochs = self._upload(np.zeros(2, np.int64))
            leads = self._group.rank == self._group.local_ranks[0]
            for turn in (True, False):  # one rank of a node compiles, the others find the result on disk
                if leads == turn:
                    with torch.cuda.stream(self._uploads):
                        self._launch(1, idle, self._private, epochs, (0, 0), (0, 0), 0, found)
                    self._uploads.synchronize()
                self._group.barrier()
            self._variants[dtype, operation] = found
        return found

    def _upload(self, words: NDArray[np.int64]) -> torch.Tensor:
        """On a stream of its own: the caller's may be waiting for something that the caller has yet to enqueue."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._uploads):
            made = torch.from_numpy(words).to(self._device)
        self._uploads.synchronize()
        return made

    def _make_room(self, held: dict[Any, Any], tensors: list[torch.Tensor]) -> None:
        """Forget what is `held` if it is much; its memory goes when the calls that were enqueued so far are over."""
        if len(held) < _KEPT:
            return
        if self._retired_at is not None and self._retired_at.query():
            self._retired.clear()
        held.clear()
        self._retired += tensors
        self._retired_at = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._retired_at.record()

    def _refuse_in_capture(self, what: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            was = f"the first one with {what}, inside a CUDA graph capture"
            raise InvalidArgument(
                argument="call", was=was, must="made once before it is captured: it uploads or compiles"
            )

    def _check(self, name: str, given: torch.Tensor | SymmetricBuffer, elements: int) -> None:
        """A wrong address would take the contexts of all ranks of this GPU."""
        if isinstance(given, SymmetricBuffer):
            held = given.count
        else:
            held = given.numel()
            if given.device != self._device or not given.is_contiguous():
                was = f"on {given.device}, of strides {tuple(given.stride())}"
                raise InvalidArgument(argument=name, was=was, must=f"contiguous and on {self._device}")
        if held < elements and not self.schedule.in_place:
            raise InvalidArgument(argument=name, was=f"of {held} elements", must=f"of at least {elements}")


def _pointer(given: torch.Tensor | SymmetricBuffer) -> int:
    return given.data_ptr() if isinstance(given, torch.Tensor) else 0


def _idle_code(ranks: int) -> NDArray[np.int64]:
    """A program of one worker whose one instruction moves nothing: it loads whatever kernel it is given to."""
    end = layout.HEADER + layout.WORKER_ROW + layout.INSTRUCTION_ROW
    code = np.zeros(end, np.int64)
    code[[layout.INSTRUCTIONS, layout.WAITS, layout.POSTS, layout.PIECES, layout.OPERANDS]] = (
        layout.HEADER + layout.WORKER_ROW, end, end, end, end,
    )  # fmt: skip
    code[[layout.WORKERS, layout.TILE, layout.ITEM_SIZE, layout.DEPTH, layout.INSTANCES, layout.RANKS]] = (
        1, 1, 1, 1, 1, ranks,
    )  # fmt: skip
    code[layout.HEADER : layout.HEADER + layout.WORKER_ROW] = (-1, 0, 1, -1)
    return code


def launch_options(warps: int) -> dict[str, int]:
    """All registers that a CTA can have: left alone, the compiler spills to make room for CTAs that never come."""
    return {"num_warps": warps, "maxnreg": min(248, 65536 // (32 * warps) // 8 * 8)}


def kernel_variant(
    schedule: Schedule, dtype: torch.dtype, operation: str, warps: int = WARPS, vectors: int = VECTORS
) -> dict[str, Any]:
    """The constants of the kernel that runs `schedule`, whatever the size of a call and the rank."""
    one = schedule.instructions
    moves = one.kind == MOVE
    sources, stores = np.diff(one.source_start)[moves], np.diff(one.store_start)[moves]
    most_sources, most_stores = int(sources.max(initial=1)), int(stores.max(initial=1))
    sums = most_sources > 1
    if sums and dtype not in _ELEMENTS:
        must = ", ".join(str(known).removeprefix("torch.") for known in _ELEMENTS)
        raise InvalidArgument(argument="source", was=f"of {dtype}", must=f"one of {must} to be reduced")
    many = max(most_sources, most_stores) > MOST_UNROLLED
    if schedule.packets and (many or (sums and dtype.itemsize > 4)):
        was = f"{dtype} from {most_sources} sources to {most_stores} stores in packets"
        must = f"sums of 32-bit elements at most, of at most {MOST_UNROLLED} operands, or without packets"
        raise InvalidArgument(argument="schedule", was=was, must=must)
    kernels = waits_for_kernels(schedule)
    a_worker = np.add.reduceat(np.append(moves, 0), schedule.worker_start[:-1]) * (np.diff(schedule.worker_start) > 0)
    single = (
        not (kernels or many or schedule.packets)
        and bool((a_worker <= 1).all())
        and bool((one.count[moves] == 1).all() and (sources == most_sources).all() and (stores == most_stores).all())
    )
    return {
        "ELEMENT": _ELEMENTS[dtype] if sums else _RAW[dtype.itemsize],
        "OPERATION": OPERATIONS[operation] if sums else OPERATIONS["sum"],
        "SOURCES": most_sources if single else _unrolled(most_sources),
        "STORES": most_stores if single else _unrolled(most_stores),
        "COPIES": sums and not single and bool((sources == 1).any()),
        "MANY": many,
        "SINGLE": single,
        "KERNELS": kernels,
        "PACKETS": schedule.packets,
        "LANES": 32 * warps,
        "VECTORS": max(vectors, MOST_UNROLLED),
    }


def _unrolled(most: int) -> int:
    """A power of two: few variants serve many programs."""
    return min(1 << (most - 1).bit_length(), MOST_UNROLLED)
