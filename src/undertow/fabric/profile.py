"""Measuring what a node can do: GEMMs, lanes, and how much each slows the other.

Every rank of the group comes along, and all ranks send at once: a lane is only as fast as it is when everybody uses it.
The result is the plain content of a machine file, which `plan.machine` reads; this room knows nothing of plans.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..errors import StrategyUnavailable
from . import logs
from .base import Fabric, Lane
from .environment import cpu_model, environment, usable_cores
from .group import Group
from .symmetric import SymmetricBuffer
from .timeline import Recorder
from .timer import compare

Progress = Callable[[str, float], None]
"""Told what is being measured now, and which fraction of everything is done."""
Work = Callable[[], object]

_SIDE_BY_SIDE_SECONDS = 0.005  # at least: shorter spans would measure how the two sides start
_OTHER = 4  # times larger or smaller: the second pair's messages
_COVER = 3  # the longer side does so many times the work of the shorter, so that it is there until the end
_GREEN_STEP = 8  # SMs; the driver rounds partitions to this on recent GPUs


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to do. `message_bytes` is what moves beside a GEMM; `size_seconds` what one size of a curve may take."""

    sizes: tuple[int, ...]
    shape: tuple[int, int, int]
    dtype: torch.dtype
    message_bytes: int
    rounds: int
    size_seconds: float

    @staticmethod
    def fitting(device: str, quick: bool) -> Effort:
        largest = (4 << 20 if quick else 64 << 20) if device == "cpu" else (16 << 20 if quick else 256 << 20)
        sizes = tuple(1 << exponent for exponent in range(10, 29, 2) if 1 << exponent <= largest)
        if device == "cpu":
            return Effort(sizes, (512, 512, 512), torch.float32, 1 << 20, 5 if quick else 11, 0.3 if quick else 1.0)
        return Effort(sizes, (4096, 4096, 4096), torch.bfloat16, 16 << 20, 5 if quick else 15, 1.0 if quick else 3.0)


class Pair(NamedTuple):
    """A matmul on so many workers and a lane with messages of so many bytes: seconds of each alone and side by side."""

    workers: int
    lane: str
    message_bytes: int
    matmul_alone: float
    matmul_beside: float
    lane_alone: float
    lane_beside: float

    @property
    def slowdowns(self) -> tuple[float, float]:
        """Of the matmul and of the lane. Below 1 is noise: nothing gets faster by company."""
        return max(1.0, self.matmul_beside / self.matmul_alone), max(1.0, self.lane_beside / self.lane_alone)


def measure(
    group: Group,
    *,
    quick: bool = False,
    progress: Progress = lambda what, fraction: None,
    only: Sequence[str] | None = None,
) -> tuple[dict[str, Any], list[Pair]]:
    """The content of this node's machine file, and the pairs behind its slowdowns: of each lane the first. Collective.

    Further pairs, with other messages and with fewer workers, are for models of interference. `only`: these lanes.
    """
    fabric = group.fabric
    effort = Effort.fitting(group.device.type, quick)
    progress("launch cost", 0.0)
    launch_seconds, stream_seconds = _launch_cost(group, effort)
    progress("matmul against its workers", 0.05)
    matmul = _matmul(group, effort)
    gemm_points = _gemm_curve(group, effort, matmul)
    there = [name for name, missing in fabric.lanes().items() if not missing]
    lanes = {name: fabric.lane(name) for name in there if only is None or name in only}
    curves = _lane_curves(group, effort, lanes, progress)
    pairs: list[Pair] = []
    slowdowns = {}
    for number, (name, lane) in enumerate(lanes.items()):
        progress(f"matmul beside lane {name}", 0.7 + 0.3 * number / len(lanes))
        found = _pairs(group, effort, matmul, lane)
        slowdowns[name] = found[0].slowdowns
        pairs += found
    content = {
        "name": _device_name(group),
        "device": group.device.type,
        "ranks": group.size,
        "shares_device": bool(getattr(fabric, "shares_device", False)),
        "launch_seconds": launch_seconds,
        "stream_seconds": stream_seconds,
        "gemm": {
            "workers": "threads" if group.device.type == "cpu" else "SMs",
            "shape": list(effort.shape),
            "dtype": str(effort.dtype).removeprefix("torch."),
            "points": gemm_points,
        },
        "lanes": {
            name: {
                "description": lane.describe(),
                "emulated": lane.emulated,
                "gemm_slowdown": slowdowns[name][0],
                "lane_slowdown": slowdowns[name][1],
                "points": curves[name],
            }
            for name, lane in lanes.items()
        },
        "environment": _scalars(environment({"ranks": group.size})),
    }
    return content, pairs


def _device_name(group: Group) -> str:
    return cpu_model() if group.device.type == "cpu" else str(torch.cuda.get_device_name(group.device))


def _scalars(facts: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: what is unknown is left out."""
    return {key: value for key, value in facts.items() if isinstance(value, str | int | float)}


def _launch_cost(group: Group, effort: Effort) -> tuple[float, float]:
    """Seconds of an operation on one element, and of going to a second stream and back."""
    word = torch.zeros(1, device=group.device)
    stream = group.fabric.stream("communication", priority=-1)

    def there_and_back() -> None:
        stream.fork()
        stream.run(lambda: None)
        stream.join()

    variants: dict[str, Work] = {"operation": word.zero_, "stream": there_and_back}
    taken = compare(variants, calls=100, repeats=effort.rounds, warmup=1, reduce_max=group.reduce_max)
    return taken.estimate("operation").median, taken.estimate("stream").median


# -- matmul against its workers ------------------------------------------------------------------------------------


def _matmul(group: Group, effort: Effort) -> Work:
    rows, columns, inner = effort.shape
    x = torch.ones(rows, inner, dtype=effort.dtype, device=group.device)
    w = torch.ones(inner, columns, dtype=effort.dtype, device=group.device)
    y = torch.empty(rows, columns, dtype=effort.dtype, device=group.device)
    return functools.partial(torch.matmul, x, w, out=y)


def _gemm_curve(group: Group, effort: Effort, matmul: Work) -> list[list[float]]:
    """Points of (workers, seconds). CPU: rank 0 alone, for the threads of one rank are the cores of the others."""
    if group.device.type == "cpu":
        variants = {threads: _inside(group, threads, matmul) for threads in _counts(usable_cores(), 1)}
        taken = compare(_named(variants), repeats=effort.rounds, warmup=1) if group.rank == 0 else None
        points = [[threads, taken.estimate(str(threads)).median] for threads in variants] if taken else []
        return list(group.exchange(points, "points of a curve")[0])
    variants = _partitions(group, matmul)
    taken = compare(
        _named(variants), repeats=effort.rounds, reduce_max=group.reduce_max, before=group.barrier, warmup=2
    )
    return [[sms, taken.estimate(str(sms)).median] for sms in variants]


def _named(variants: dict[int, Work]) -> dict[str, Work]:
    return {str(workers): work for workers, work in variants.items()}


def _counts(most: int, step: int) -> list[int]:
    """`step`, twice that, and so on, and `most` itself; every number where there are few."""
    if most <= 8 * step:
        return [*range(step, most, step), most]
    doublings = range(int(math.log2(most / step)) + 1)
    return sorted({step << exponent for exponent in doublings} | {most})


def _partitions(group: Group, matmul: Work) -> dict[int, Work]:
    """The matmul on parts of the GPU; on all that this rank has only, where there are no partitions.

    Ranks that share a GPU see all of its SMs, but measure at once, and each has its part of them.
    """
    every = group.fabric.multiprocessors
    parts: dict[int, Work] = {}
    refusal = ""
    try:
        for sms in _counts(every, _GREEN_STEP)[:-1]:
            parts[sms] = _inside(group, sms, matmul)
            parts[sms]()
    except StrategyUnavailable as error:
        refusal = str(error)
    refusals = [
        reason for reason in group.exchange(refusal, "partitions") if reason
    ]  # all ranks measure the same variants
    if refusals:
        logs.once("partitions", f"The matmul is measured on all of a rank's SMs only: {refusals[0]}")
        return {every: matmul}
    return {**parts, every: matmul}


def _inside(group: Group, multiprocessors: int, matmul: Work) -> Work:
    def run() -> None:
        with group.fabric.computing(multiprocessors):
            matmul()

    return run


# -- lanes -----------------------------------------------------------------------------------------------------------


class _Exchange:
    """Every rank sends to its right-hand neighbour and receives from its left-hand one."""

    def __init__(self, group: Group, lane: Lane, buffer: SymmetricBuffer, source: torch.Tensor) -> None:
        self._lane, self._buffer, self._source = lane, buffer, source
        self._right, self._left = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def __call__(self) -> None:
        self._lane.send(self._right, self._source, self._buffer, 0, 0)
        self._lane.receive(self._left, self._buffer, 0, self._source.numel(), 0)
        self._lane.free(self._left, 0)
        self._lane.flush()


def _lane_curves(
    group: Group, effort: Effort, lanes: dict[str, Lane], progress: Progress
) -> dict[str, list[list[float]]]:
    """Points of (bytes, seconds) of every lane. A lane too slow for a size is spared the larger ones."""
    buffer, source = _memory(group.fabric, effort.sizes[-1])
    curves: dict[str, list[list[float]]] = {name: [] for name in lanes}
    running = dict(lanes)
    last_step = _Exchange(group, lanes.get("peer") or next(iter(lanes.values())), buffer, source[:1])

    def align() -> None:
        """A barrier over Gloo lets ranks go milliseconds apart; a message between neighbours brings them together."""
        group.barrier()
        last_step()

    for number, size in enumerate(effort.sizes):
        progress(f"lanes at {size >> 10} KB", 0.15 + 0.55 * number / len(effort.sizes))
        taken = compare(
            {name: _Exchange(group, lane, buffer, source[:size]) for name, lane in running.items()},
            repeats=effort.rounds,
            warmup=1,
            calls=max(1, min(100, (1 << 19) // size)),
            budget_seconds=effort.size_seconds,
            reduce_max=group.reduce_max,
            before=align,
        )
        for name in list(running):
            median = taken.estimate(name).median
            curves[name].append([size, median])
            if median > effort.size_seconds:  # the same on all ranks: the times are the slowest rank's
                del running[name]
        if not running:
            break
    buffer.release()
    return curves


def _memory(fabric: Fabric, nbytes: int) -> tuple[SymmetricBuffer, torch.Tensor]:
    return fabric.buffer(nbytes, torch.uint8), torch.ones(nbytes, dtype=torch.uint8, device=fabric.group.device)


# -- both at once ----------------------------------------------------------------------------------------------------


class _Told:
    """A clock for calls that time a part of themselves and return its seconds."""

    name = "span"
    default_calls = 1

    def now(self) -> float:
        return time.monotonic()

    def sampler(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        return lambda: float(call())  # type: ignore[arg-type]


def _pairs(group: Group, effort: Effort, matmul: Work, lane: Lane) -> list[Pair]:
    """The usual pair, one with other messages, and one with half of the workers where they can be had.

    The others are larger, but on a slow lane, which would take too long. Smaller messages on a fast one would tell how
    long a busy core takes to wake somebody up, not what a byte costs.
    """
    every = group.fabric.multiprocessors
    found = [_pair(group, effort, matmul, lane, every)]
    slow = _OTHER * found[0].lane_alone > effort.size_seconds / 10  # the same on all ranks
    message_bytes = effort.message_bytes // _OTHER if slow else effort.message_bytes * _OTHER
    less = replace(effort, message_bytes=message_bytes, rounds=5, size_seconds=effort.size_seconds / 4)
    found.append(_pair(group, less, matmul, lane, every))
    if every >= 2 and group.device.type == "cpu":  # a part of a GPU is no part of what its ranks share
        found.append(_pair(group, less, _inside(group, every // 2, matmul), lane, every // 2))
    return found


def _pair(group: Group, effort: Effort, matmul: Work, lane: Lane, workers: int) -> Pair:
    """How long the matmul and the lane take alone, and each beside the other.

    The side in question runs inside the other, which does `_COVER` times as much and starts first.
    """
    fabric = group.fabric
    buffer, source = _memory(fabric, effort.message_bytes)
    exchange = _Exchange(group, lane, buffer, source)
    alone = compare(
        {"matmul": matmul, "lane": exchange}, repeats=3, reduce_max=group.reduce_max, before=group.barrier, warmup=1
    )
    times = {name: alone.estimate(name).median for name in alone.names}
    longest = max(_SIDE_BY_SIDE_SECONDS, *times.values())
    count = {name: math.ceil(longest / one) for name, one in times.items()}
    compute, communication = fabric.stream("compute"), fabric.stream("communication", priority=-1)

    def span(engine: str, matmuls: int, exchanges: int) -> float:
        recorder = Recorder(group.rank, "cpu" if group.device.type == "cpu" else "cuda")

        def repeat(name: str, work: Work, times: int) -> None:
            with recorder.event(name, engine=name):
                for _ in range(times):
                    work()

        sides = [
            (matmuls, compute, functools.partial(repeat, "matmul", matmul, matmuls)),
            (exchanges, communication, functools.partial(repeat, "lane", exchange, exchanges)),
        ]
        used = [side for side in sides if side[0]]
        used.sort(key=lambda side: side[2].args[0] == engine)  # the covering side first
        for _, stream, _ in used:
            stream.fork()
        for _, stream, work in used:
            stream.run(work)
        for _, stream, _ in used:
            stream.join()
        return recorder.timeline().span(engine)

    matmuls, exchanges = count["matmul"], count["lane"]
    taken = compare(
        {
            "matmul": lambda: span("matmul", matmuls, 0),
            "lane": lambda: span("lane", 0, exchanges),
            "matmul beside": lambda: span("matmul", matmuls, exchanges * _COVER),
            "lane beside": lambda: span("lane", matmuls * _COVER, exchanges),
        },
        clock=_Told(),
        repeats=effort.rounds,
        warmup=1,
        budget_seconds=2 * effort.size_seconds,
        reduce_max=group.reduce_max,
        before=group.barrier,
    )
    buffer.release()
    # Ratios formed inside rounds are steadier than ratios of medians.
    alone_seconds = {
        "matmul": taken.estimate("matmul").median / matmuls,
        "lane": taken.estimate("lane").median / exchanges,
    }
    beside = {name: seconds * taken.ratio(f"{name} beside", name).median for name, seconds in alone_seconds.items()}
    return Pair(
        workers, lane.name, effort.message_bytes, alone_seconds["matmul"], beside["matmul"], alone_seconds["lane"],
        beside["lane"],
    )  # fmt: skip
