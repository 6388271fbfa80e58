"""The demonstration behind `undertow demo`: one operator, every strategy, exact checks, one table, one timeline.

The matrices are chosen so that a rank's core and the link of lane `dma` are busy equally long, where overlap has most
to hide. On a GPU the matmul alone keeps the core busy. On a CPU the very core that computes also copies and sums, so
the matmul gets what of the communication's time they leave. There the lane also runs *paced*, as an emulated link: only
one that leaves the core alone for most of the time can show what a copy engine would.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from rich.table import Table

from ..fabric.base import Fabric, poison
from ..fabric.cpu_lanes import DmaLane, Pace
from ..fabric.group import Group
from ..fabric.launch import launch
from ..fabric.registry import init
from ..fabric.timeline import Recorder, Timeline, event, recording
from ..fabric.timer import Comparison, Estimate, compare
from ..ops.alone import all_reduce
from ..ops.matmul_all_reduce import matmul_all_reduce, reference
from .progress import Report, progress_bar
from .tables import DEMO_FORMAT, StrategyResult, factor, percent, seconds, strategy_results, strategy_table

MATMUL = "matmul"
GRAINS = ("serial", "chunked", "signaled")  # those that run over every lane
EMULATED_LINK = Pace(bandwidth=1e9, latency=20e-6)
"""About a tenth of what a core copies, as a PCIe link is slower than a GPU's memory."""
_EXACT_INTEGERS = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}
_FIRST_INNER, _LEAST_INNER, _STEP_INNER, _MOST_INNER = 256, 32, 16, 32768
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to do: the result's rows and columns, rounds of measuring, and the seconds they may take."""

    rows: int
    columns: int
    dtype: torch.dtype
    rounds: int
    budget_seconds: float

    @staticmethod
    def fitting(device: str, quick: bool) -> Effort:
        if device == "cuda":
            return Effort(4096, 4096, torch.bfloat16, 10 if quick else 30, 4 if quick else 15)
        # Tall, as activations are; large, as waking a thread on a busy core takes a millisecond or more.
        return Effort(4096 if quick else 8192, 1152, torch.float32, 8 if quick else 20, 3 if quick else 20)


@dataclass(frozen=True, slots=True)
class Route:
    """A lane, and the emulated link it is paced to if any. `label` is what its strategies are called in the table."""

    lane: str
    label: str
    pace: Pace | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """What one rank brings home; times are those of the slowest rank already, so rank 0's are everybody's."""

    comparison: Comparison
    timeline: Timeline
    wrong: list[str]
    routes: list[Route]
    descriptions: dict[str, str]
    problem: str
    device: str
    shares_device: bool


@dataclass(frozen=True)
class Demonstration:
    """The findings of all ranks, ready to be shown."""

    ranks: int
    first: Findings
    timeline: Timeline
    wrong: list[str]
    rows: list[StrategyResult]
    sentences: list[str] = field(default_factory=list)


def demonstrate(ranks: int, device: str, *, quick: bool = False, progress: bool = False) -> Demonstration:
    """Launch `ranks` ranks, let them measure, and gather what they found."""
    found: list[Findings] = launch(measure_rank, ranks, device, args=(quick, progress))
    first = found[0]
    timeline = Timeline(environment=first.comparison.environment).merge(each.timeline for each in found)
    wrong = [f"{strategy} on rank {rank}" for rank, each in enumerate(found) for strategy in each.wrong]
    rows = _rows(first)
    return Demonstration(ranks, first, timeline, wrong, rows, _sentences(ranks, first, rows))


def render(found: Demonstration) -> Table:
    """The one table."""
    return strategy_table(found.rows, title=_title(found))


def to_json(found: Demonstration) -> str:
    """The table and its sentences, for `undertow report`."""
    made = {
        "format": DEMO_FORMAT,
        "title": _title(found),
        "sentences": found.sentences,
        "rows": [row.to_json() for row in found.rows],
        "environment": found.first.comparison.environment,
    }
    return json.dumps(made, indent=1, default=str) + "\n"


def _title(found: Demonstration) -> str:
    kind = "GPU" if found.first.device == "cuda" else "CPU"
    return f"matmul_all_reduce, {found.first.problem}, {found.ranks} {kind} ranks"


# -- in each rank ----------------------------------------------------------------------------------------------------


def measure_rank(quick: bool, progress: bool) -> Findings:
    """Everything one rank does."""
    group = init()
    with progress_bar(progress and group.rank == 0) as report:
        return _measure(group, Effort.fitting(group.device.type, quick), report)


def _measure(group: Group, effort: Effort, report: Report) -> Findings:
    fabric = group.fabric
    routes = find_routes(fabric)
    report("choosing the shape", 0.0)
    inner = _balanced_inner(group, effort, _showcase(routes))
    x, w = exact_shards(group.rank, group.size, inner, effort, group.device)
    y = torch.empty(effort.rows, effort.columns, dtype=effort.dtype, device=group.device)
    calls = {
        f"{grain}:{route.label}": partial(_call, group, route, grain, x, w, y) for route in routes for grain in GRAINS
    }
    report("checking every result", 0.1)
    shards = [exact_shards(rank, group.size, inner, effort, group.device) for rank in range(group.size)]
    expected = reference([each[0] for each in shards], [each[1] for each in shards])
    del shards
    wrong = wrong_results(calls, y, expected)
    variants: dict[str, Callable[[], object]] = {
        MATMUL: partial(torch.matmul, x, w, out=y),
        **{_communication(route): partial(_exchange, fabric, route, torch.zeros_like(y)) for route in routes},
        **calls,
    }
    comparison = compare(
        variants,
        repeats=effort.rounds,
        warmup=2,
        budget_seconds=effort.budget_seconds,
        reduce_max=group.reduce_max,
        before=group.barrier,
        facts={"ranks": group.size, "link": {route.label: describe(fabric, route) for route in routes}},
        progress=lambda done, of: report("timing all strategies, interleaved", 0.2 + 0.75 * done / of),
    )
    report("recording one call of each", 0.95)
    timeline, again = _record(group, calls, y, expected)
    return Findings(
        comparison=comparison,
        timeline=timeline,
        wrong=sorted({*wrong, *again}),
        routes=routes,
        descriptions={route.label: describe(fabric, route) for route in routes},
        problem=f"x [{effort.rows}, {inner}] @ w [{inner}, {effort.columns}] in {str(effort.dtype)[6:]}",
        device=group.device.type,
        shares_device=getattr(fabric, "shares_device", False),
    )


def find_routes(fabric: Fabric) -> list[Route]:
    """Every lane that is available here; on the CPU also the dma lane as an emulated link, unless it is one already."""
    routes = []
    for name, missing in fabric.lanes().items():
        if missing:
            continue
        lane = fabric.lane(name)
        if not isinstance(lane, DmaLane):
            routes.append(Route(name, name))
            continue
        routes.append(Route(name, name, lane.pace))
        if lane.pace is None:
            routes.append(Route(name, f"{name} (paced)", EMULATED_LINK))
    return routes


def describe(fabric: Fabric, route: Route) -> str:
    """What moves the bytes of `route`, in a few words."""
    set_pace(fabric, route)
    return fabric.lane(route.lane).describe()


def set_pace(fabric: Fabric, route: Route) -> None:
    """Let the dma lane of a CPU be the link of `route`."""
    lane = fabric.lane(route.lane)
    if isinstance(lane, DmaLane):
        lane.pace = route.pace  # nothing is in flight: every call ends with a flush


def _call(group: Group, route: Route, grain: str, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    set_pace(group.fabric, route)
    return matmul_all_reduce(x, w, group=group, strategy=f"{grain}:{route.lane}", out=y)


def _exchange(fabric: Fabric, route: Route, tensor: torch.Tensor) -> None:
    set_pace(fabric, route)
    all_reduce(fabric, route.lane, tensor)


def _communication(route: Route) -> str:
    return f"all_reduce:{route.label}"


def _showcase(routes: list[Route]) -> Route:
    """The route whose communication the shape is balanced against: the emulated link, else dma, else what there is."""
    return max(routes, key=lambda route: (route.pace is not None, route.lane == "dma"))


def _balanced_inner(group: Group, effort: Effort, route: Route) -> int:
    """The inner extent K at which a rank's core and the link of `route` are busy equally long. Equal on all ranks."""
    x = torch.zeros(effort.rows, _FIRST_INNER, dtype=effort.dtype, device=group.device)
    w = torch.zeros(_FIRST_INNER, effort.columns, dtype=effort.dtype, device=group.device)
    y = torch.zeros(effort.rows, effort.columns, dtype=effort.dtype, device=group.device)
    taken = compare(
        {
            MATMUL: partial(torch.matmul, x, w, out=y),
            "all_reduce": partial(_exchange, group.fabric, route, torch.zeros_like(y)),
        },
        repeats=_ROUNDS,
        warmup=2,
        reduce_max=group.reduce_max,
        before=group.barrier,
    )
    left = taken.estimate("all_reduce").median - _core_seconds(group, partial(_exchange, group.fabric, route, y))
    wanted = _FIRST_INNER * max(0.0, left) / taken.estimate(MATMUL).median
    return max(_LEAST_INNER, min(_MOST_INNER, round(wanted / _STEP_INNER) * _STEP_INNER))


def _core_seconds(group: Group, call: Callable[[], object]) -> float:
    """What a call takes of the core that computes: nothing on a GPU, the CPU time of all its threads on a CPU."""
    if group.device.type != "cpu":
        return 0.0
    times = []
    for _ in range(_ROUNDS):
        group.barrier()
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return group.reduce_max([statistics.median(times)])[0]


def exact_shards(
    rank: int, size: int, inner: int, effort: Effort, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of `rank` whose products add up exactly in any order; any rank can make those of any other.

    All values are -1, 0 or 1. A row of x has so few non-zeros, one in each of as many stretches of K, that no sum over
    all ranks leaves the range in which the dtype holds every integer.
    """
    generator = torch.Generator(device).manual_seed(1 + rank)
    count = min(inner, _EXACT_INTEGERS[effort.dtype] // size)
    starts = torch.arange(count + 1, device=device) * inner // count
    place = torch.rand(effort.rows, count, generator=generator, device=device)
    index = starts[:-1] + (place * (starts[1:] - starts[:-1])).long()
    signs = torch.randint(0, 2, (effort.rows, count), generator=generator, device=device).to(effort.dtype) * 2 - 1
    x = torch.zeros(effort.rows, inner, dtype=effort.dtype, device=device).scatter_(1, index, signs)
    w = torch.randint(-1, 2, (inner, effort.columns), generator=generator, device=device).to(effort.dtype)
    return x, w


def wrong_results(calls: Mapping[str, Callable[[], object]], y: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """The strategies that do not leave exactly `expected` in `y`. It is poisoned first: what nobody wrote is wrong."""
    wrong = []
    for name, call in calls.items():
        poison(y)
        call()
        if not torch.equal(y, expected):
            wrong.append(name)
    return wrong


def _record(
    group: Group, calls: Mapping[str, Callable[[], object]], y: torch.Tensor, expected: torch.Tensor
) -> tuple[Timeline, list[str]]:
    """One more call of each, recorded, and checked once more: after hundreds of calls it must still be right."""

    def marked(name: str, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            group.barrier()
            with event(name, engine="call"):
                call()

        return run

    recorder = Recorder(group.rank, "cuda" if group.device.type == "cuda" else "cpu")
    with recording(recorder):
        wrong = wrong_results({name: marked(name, call) for name, call in calls.items()}, y, expected)
    return recorder.timeline(), wrong


# -- for the reader --------------------------------------------------------------------------------------------------


def _rows(first: Findings) -> list[StrategyResult]:
    overlapped = {f"{grain}:{route.label}": route for route in first.routes for grain in GRAINS if grain != "serial"}
    return strategy_results(
        first.comparison,
        serial={name: f"serial:{route.label}" for name, route in overlapped.items()},
        gemm=MATMUL,
        communication={name: _communication(route) for name, route in overlapped.items()},
        emulated=[f"{grain}:{route.label}" for route in first.routes if route.pace for grain in GRAINS],
    )


def _sentences(ranks: int, first: Findings, rows: list[StrategyResult]) -> list[str]:
    alone = [f"over {route.label} {seconds(_time(first, _communication(route)))}" for route in first.routes]
    said = [
        f"Every result equals the reference exactly, on all {ranks} ranks.",
        _seen(rows),
        f"Alone, the matmul takes {seconds(_time(first, MATMUL))}, the all_reduce {', '.join(alone)}.",
    ]
    if first.device == "cuda" and first.shares_device:
        said.append(f"The {ranks} ranks share one GPU (a virtual node): its times are not those of {ranks} GPUs.")
    emulated = [f"{route.label} is an emulated link of {route.pace}" for route in first.routes if route.pace]
    if emulated:
        said.append(f"Rows marked emulated are emulated: {'; '.join(emulated)}.")
    return said


def _time(first: Findings, name: str) -> Estimate:
    return first.comparison.estimate(name)


def _seen(rows: list[StrategyResult]) -> str:
    """The best of the strategies that have a baseline, in one sentence."""
    found = [(row.speedup, row) for row in rows if row.speedup is not None]
    speedup, best = max(found, key=lambda pair: pair[0].median)
    link = " over the emulated link" if best.emulated else ""
    ran = f"{best.name} ran {factor(speedup)} as fast as serial{link}"
    if speedup.low <= 1:
        return f"Nothing clearly beat serial here: at best {ran}."
    hidden = f", hiding {percent(best.efficiency)} of the communication" if best.efficiency is not None else ""
    return f"{ran}{hidden}."
