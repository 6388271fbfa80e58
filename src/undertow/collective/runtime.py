"""Which runtime runs a schedule: the interpreter of the group's device, or the lanes where memory is not shared:
between nodes, and between GPUs that cannot address each other's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from ..errors import InvalidArgument
from ..fabric.symmetric import SymmetricBuffer

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from .schedule import Schedule


class Executable(Protocol):
    """One schedule on one group: semaphores or hand-offs, and a workspace, of its own."""

    schedule: Schedule
    poisons: bool  # whether a call is one kernel, which poisons its output itself should it be aborted

    def run(
        self,
        source: torch.Tensor | SymmetricBuffer,
        out: torch.Tensor | SymmetricBuffer,
        span_lengths: Sequence[int],
        operation: str = "sum",
    ) -> None:
        """One call; collective."""

    def close(self) -> None:
        """Free what it holds. No rank may be in a call any more."""


def in_common_memory(fabric: Fabric, lane: str) -> bool:
    """Whether the interpreter runs schedules for `lane`, in memory that all ranks reach. The same on all ranks."""
    return lane == "peer" and not fabric.lanes()["peer"]


def executable(
    fabric: Fabric, schedule: Schedule, stride: int | None = None, lane: str = "peer", warps: int | None = None
) -> Executable:
    """Make one; collective. `lane`: "peer" for the interpreter, "dma" for copy engines, "net" for messages. `warps`: of
    a CTA, where there are any.

    Where there is no common memory the lanes carry every schedule. In a group that spans nodes `net` between nodes and
    `dma` inside one (GPUs: `net` everywhere, as their staging memory belongs to groups of one node); between GPUs of
    one node without peer access `dma`, through the host.
    """
    group = fabric.group
    options = {} if stride is None else {"stride": stride}
    if not in_common_memory(fabric, lane):
        from .lane_runtime import LaneExecutable

        spans_nodes = len(group.local_ranks) != group.size
        near = "net" if spans_nodes and group.device.type == "cuda" else "dma"
        return LaneExecutable(fabric, schedule, lane=near if lane == "peer" else lane, **options)
    if group.device.type == "cuda":
        if schedule.publishes:
            must = "compiled without publish: a GPU's kernel sends to receivers"
            raise InvalidArgument(argument="schedule", was="one that publishes", must=must)
        from .cuda_runtime import CudaExecutable

        return CudaExecutable(fabric, schedule, warps=warps, **options)  # type: ignore[arg-type]
    from .cpu_runtime import CpuExecutable

    return CpuExecutable(fabric, schedule, **options)  # type: ignore[arg-type]
