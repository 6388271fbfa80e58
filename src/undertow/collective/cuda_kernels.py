"""The two kernels that run schedules: which variant a schedule takes, and how it is compiled and launched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from ..errors import InvalidArgument
from ..kernels.interpret import interpret_kernel
from ..kernels.pieces import BLOCK, MOST_UNROLLED
from ..kernels.straight import straight_kernel
from . import bind as layout
from .bind import waits_for_kernels, workspace_bytes
from .cpu_runtime import OPERATIONS
from .schedule import MOVE
from .straight import Straight, straighten

if TYPE_CHECKING:
    from ..fabric.group import Group
    from .schedule import Schedule

IN_FLIGHT = 16  # wide loads of a thread; of more warps fewer, as they have fewer registers each
WARPS = 8  # with that many loads 64 KB are under way for each CTA: enough to cover a peer's latency
PACKET_WARPS = 8
EARLIEST = (9, 0)  # the first GPUs on which a kernel can be launched before the one in front of it has ended
_ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: tl.float32, torch.float64: tl.float64, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.int32: tl.int32, torch.int64: tl.int64, torch.uint8: tl.uint8, torch.int8: tl.int8, torch.int16: tl.int16,
}  # fmt: skip
RAW: dict[int, Any] = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


class Kernel:
    """A variant of one of the two kernels, launched without binding and specialising its arguments anew."""

    def __init__(self, straight: bool, constants: dict[str, Any], warps: int) -> None:
        self._function: Any = straight_kernel if straight else interpret_kernel
        self._constants, self._options = constants, launch_options(warps)
        if constants.get("EARLY"):
            self._options["launch_pdl"] = True  # "programmatic dependent launch"
        order = [name for name in self._function.arg_names if name in constants]
        self._values = tuple(constants[name] for name in order)
        self._compiled: Any = None

    def launch(self, ctas: int, stream: int, *arguments: object) -> None:
        """The first time on the current stream, with tensors for pointers: that is when it is compiled."""
        if self._compiled is None:
            self._compiled = self._function[(ctas,)](*arguments, **self._constants, **self._options)
            return
        made, hooks = self._compiled, triton.knobs.runtime
        given = (*arguments, *self._values)
        made.run(
            ctas, 1, 1, stream, made.function, made.packed_metadata,
            made.launch_metadata((ctas, 1, 1), stream, *given), hooks.launch_enter_hook, hooks.launch_exit_hook, *given,
        )  # fmt: skip

    def compile(self, table: torch.Tensor, word: torch.Tensor) -> None:
        """Into the cache on disk, and no further. The tensors, of int64 and int32, stand in for all pointers."""
        if self._function is straight_kernel:
            arguments: tuple[object, ...] = (*[table] * 3, *[0] * 10, word, word, 0)
        else:
            arguments = (*[table] * 5, *[0] * 5, word, word, *[0] * 4)
        self._function.warmup(*arguments, grid=(1,), **self._constants, **self._options)


def compile_ahead(group: Group, wanted: Iterable[tuple[Schedule, torch.dtype, str]]) -> None:
    """Compile what calls of these schedules, types and operations need: the ranks of a node share the work. Collective.

    Without it the first call of each compiles, one after the other, on one rank.
    """
    made: dict[tuple[str, ...], Kernel] = {}
    for schedule, dtype, operation in wanted:
        straight, warps = straighten(schedule), warps_of(schedule)
        early = launches_early(group.device)
        constants = kernel_variant(schedule, straight, dtype, operation, warps, early=early)
        made[str(straight is None), *map(str, constants.values())] = Kernel(straight is not None, constants, warps)
    mates = group.local_ranks
    table, word = (torch.zeros(1, dtype=dtype, device=group.device) for dtype in (torch.int64, torch.int32))
    with torch.cuda.device(group.device):
        for number, kernel in enumerate(made.values()):
            if number % len(mates) == mates.index(group.rank):
                kernel.compile(table, word)
    group.barrier()


def launches_early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= EARLIEST


def warps_of(schedule: Schedule) -> int:
    return PACKET_WARPS if schedule.packets else WARPS


def idle_code(ranks: int) -> NDArray[np.int64]:
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


def straight_cut(
    schedule: Schedule, straight: Straight, stride: int, warps: int, iterations: int, tile: int
) -> tuple[int, ...]:
    """How a straight-line kernel cuts chunks, as its arguments say it; scratch lies as `own_part` wants it."""
    scratch = workspace_bytes(schedule, stride) // schedule.depth
    block = (1 + schedule.packets) * min(stride // schedule.instances, 32 * warps * 16 * BLOCK.value)
    return iterations, straight.width, tile, scratch, block, schedule.depth, schedule.instances


def launch_options(warps: int) -> dict[str, int]:
    """All registers that a CTA can have: left alone, the compiler spills to make room for CTAs that never come."""
    return {"num_warps": warps, "maxnreg": min(248, 65536 // (32 * warps) // 8 * 8)}


def kernel_variant(
    schedule: Schedule,
    straight: Straight | None,
    dtype: torch.dtype,
    operation: str,
    warps: int,
    in_flight: int | None = None,
    early: bool = False,
) -> dict[str, Any]:
    """The constants of the kernel that runs `schedule`, whatever the size of a call and the rank."""
    one = schedule.instructions
    moves = one.kind == MOVE
    sources, stores = np.diff(one.source_start)[moves], np.diff(one.store_start)[moves]
    most_sources, most_stores = int(sources.max(initial=1)), int(stores.max(initial=1))
    adds = sums(schedule)
    if adds and dtype not in _ELEMENTS:
        must = ", ".join(str(known).removeprefix("torch.") for known in _ELEMENTS)
        raise InvalidArgument(argument="source", was=f"of {dtype}", must=f"one of {must} to be reduced")
    many = max(most_sources, most_stores) > MOST_UNROLLED
    if schedule.packets and many:
        was = f"from {most_sources} sources to {most_stores} stores in packets"
        must = f"of at most {MOST_UNROLLED} operands, or without packets"
        raise InvalidArgument(argument="schedule", was=was, must=must)
    shared = {
        "ELEMENT": _ELEMENTS[dtype] if adds else RAW[dtype.itemsize],
        "OPERATION": OPERATIONS[operation] if adds else OPERATIONS["sum"],
        "PACKETS": schedule.packets,
        "LANES": 32 * warps,
    }
    if straight is not None:
        phases = tuple(phase.constants for phase in straight.phases)
        return {
            **shared, "STARTS": straight.starts, "ENDS": straight.ends, "PHASES": phases,
            "IN_FLIGHT": IN_FLIGHT * WARPS // max(WARPS, warps) if in_flight is None else in_flight,
            "RELEASED": straight.released, "EARLY": early,
        }  # fmt: skip
    return {
        **shared,
        "SOURCES": _unrolled(most_sources),
        "STORES": _unrolled(most_stores),
        "MANY": many,
        "KERNELS": waits_for_kernels(schedule),
    }


def sums(schedule: Schedule) -> bool:
    one = schedule.instructions
    return bool((np.diff(one.source_start)[one.kind == MOVE] > 1).any())


def _unrolled(most: int) -> int:
    """A power of two: few variants serve many programs."""
    return min(1 << (most - 1).bit_length(), MOST_UNROLLED)
