"""The machine that a group plans for: the file that `undertow profile` wrote, or a quick look where there is none.

The first rank's file counts, for all ranks must rank candidates alike. A quick look measures one matmul and two sizes
on each lane, once for each group, and assumes the rest: good enough to choose what is worth measuring.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import settings
from ..errors import InvalidArgument
from ..fabric.environment import cpu_model
from ..fabric.logs import get_logger
from ..plan.machine import GemmCurve, LaneCurve, Machine, default_path
from ..plan.staged import Engines

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..fabric.group import Group

_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call
_MACHINE = object()  # name of what is kept with a fabric
_EXTENT = {"cpu": 256, "cuda": 2048}
_SIZES = {"cpu": (4 << 10, 256 << 10), "cuda": (64 << 10, 16 << 20)}
_LAUNCH = {"cpu": 2e-6, "cuda": 5e-6}
_STREAM = {"cpu": 1e-4, "cuda": 1e-5}
_SLOWDOWN = {"cpu": 1.2, "cuda": 1.05}  # a CPU's lanes copy with the cores that compute
HEAD_START = 1e-3
"""Seconds that hosts are ahead of a GPU when calls are measured."""
_HEAD_START_CYCLES = 2_000_000  # about as long, at the clocks of GPUs of today
_ROUNDS = 3
_PAUSE, _HOP = 1.7e-5, 1e-5  # of copy engines: about what an H200 has, as are the three below
_SUM_SPEEDS = 1e11, 1e12
_END, _CALL, _ENQUEUE = 1e-4, 4e-4, 1e-4


def identity(group: Group) -> str:
    """Name of this machine for caches: what makes a plan good here and not elsewhere."""
    kind = group.device.type
    name = cpu_model() if kind == "cpu" else str(torch.cuda.get_device_name(group.device))
    nodes = max(group.nodes) + 1
    parts = [name, "one node" if nodes == 1 else f"{nodes} nodes"]
    if getattr(group.fabric, "shares_device", False):
        parts.append("ranks share it")
    pace = settings.DMA_PACE.get().strip()
    if kind == "cpu" and pace:
        parts.append(f"dma paced to {pace}")
    if group.fabric.lane("net").in_rounds:
        parts.append("messages over net in rounds")
    return ", ".join(parts)


def available(group: Group) -> list[str]:
    """The lanes that can run here."""
    return [name for name, missing in group.fabric.lanes().items() if not missing]


def machine_of(group: Group) -> Machine:
    """The machine, found once for each group. Collective the first time."""
    kept = group.fabric.kept
    found = kept.get(id(_MACHINE))
    if not isinstance(found, Machine):
        mine = _from_file(group) if group.rank == 0 else None
        said = group.exchange(None if mine is None else mine.to_dict(), "the machine")[0]
        if said is None:  # all look, and the first rank's look counts: what follows from it must be the same on all
            said = group.exchange(quick_look(group).to_dict(), "the machine, looked at")[0]
        found = Machine.from_dict(said)
        kept[id(_MACHINE)] = found
    return found


def _from_file(group: Group) -> Machine | None:
    """The machine file of this device and so many ranks; a damaged one is as good as none, and said in one line."""
    path = default_path(group.device.type, group.size)
    if not path.exists():
        return None
    try:
        machine = Machine.load(path)
    except InvalidArgument as error:
        get_logger().warning("Machine file %s is not used: %s", path, error)
        return None
    return machine if set(machine.lanes) & set(available(group)) else None


def quick_look(group: Group) -> Machine:
    """A machine of few points. Collective."""
    kind, fabric = group.device.type, group.fabric
    extent = _EXTENT[kind]
    seconds = group.reduce_max([_matmul_seconds(extent, group.device)])[0]
    workers = "threads" if kind == "cpu" else "SMs"
    dtype = "float32" if kind == "cpu" else "bfloat16"
    shares_device = bool(getattr(fabric, "shares_device", False))
    lanes = {name: _lane(fabric, name) for name in available(group)}
    return Machine(
        name="a quick look",
        device=kind,
        ranks=group.size,
        shares_device=shares_device,
        launch_seconds=_LAUNCH[kind],
        stream_seconds=_STREAM[kind],
        gemm=GemmCurve(workers, (extent, extent, extent), dtype, ((fabric.multiprocessors, seconds),)),
        lanes=lanes,
        engines=_engines(fabric, lanes["dma"], shares_device) if "dma" in lanes and group.size > 1 else None,
    )


def _engines(fabric: Fabric, curve: LaneCurve, shared: bool) -> Engines | None:
    """Where dma is staged: the speed at which its largest message, chunk by chunk out and in, takes what it took."""
    chunk = fabric.lane("dma").staged_chunk
    if not chunk:
        return None
    nbytes, seconds = curve.points[-1]
    speed = (nbytes + min(chunk, nbytes)) * (fabric.group.size if shared else 1) / seconds
    return Engines(speed, speed, _PAUSE, _PAUSE, _HOP, chunk, *_SUM_SPEEDS, _END, _CALL, _ENQUEUE)


def _matmul_seconds(extent: int, device: torch.device) -> float:
    x = torch.ones(extent, extent, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16, device=device)
    return statistics.median([seconds_of(lambda: x @ x, device) for _ in range(_ROUNDS + 1)][1:])


def _lane(fabric: Fabric, name: str) -> LaneCurve:
    kind = fabric.group.device.type
    points = tuple((size, size / fabric.bandwidth(name, size)) for size in _SIZES[kind])
    lane = fabric.lane(name)
    slowdown = 1.0 if lane.emulated else _SLOWDOWN[kind]
    return LaneCurve(name, lane.describe(), lane.emulated, points, slowdown, slowdown)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """What a call takes: device time between two events on a GPU, the clock's on a CPU. The host waits for its end.

    On a GPU the call stands behind a kernel that does nothing for `HEAD_START` seconds, so that the host has enqueued
    it, or the most of it, when it begins: as where a model keeps the GPU busy, or in a graph. Without that, of two
    short calls the one would seem faster that takes Python less time.
    """
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    _cuda._sleep(_HEAD_START_CYCLES)
    start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3
