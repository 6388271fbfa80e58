"""The scenarios that are measured where nobody says otherwise, and what a rank does to measure them.

Sizes are such that both sides take about as long: of scenarios in which one side hardly counts, little can be learnt.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .characterise import RATIOS, Bench, Result, Scenario, grid
from .workloads import COLLECTIVES, COMPUTATIONS

STRATEGIES = ("base", "priority", "partition", "both", "dma", "dma+fewer")
MIB = 1 << 20


@dataclass(frozen=True)
class Order:
    """What to measure. `sizes` by lane; `seconds` for one scenario; `until`: when to stop, on this machine's clock;
    `file`: where a line is written for each.
    """

    computations: tuple[str, ...] = tuple(COMPUTATIONS)
    collectives: tuple[str, ...] = COLLECTIVES
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    strategies: tuple[str, ...] = STRATEGIES
    ctas: int | None = None
    rounds: int = 5
    seconds: float = 0.8
    until: float = float("inf")
    scale: float = 1.0
    file: str = ""

    def to_args(self) -> dict[str, Any]:
        return asdict(self)


def default_sizes(device: str) -> dict[str, tuple[int, ...]]:
    """Bytes by lane. Virtual node or NVLink: hundreds of MB a millisecond; host link: a fortieth of that."""
    if device == "cuda":
        return {"dma": (32 * MIB, 8 * MIB), "peer": (128 * MIB, 512 * MIB)}
    return {"peer": (8 * MIB, 32 * MIB), "dma": (4 * MIB, 16 * MIB)}


def measure_rank(order: dict[str, Any], said: Callable[[Result, int, int], None] | None = None) -> list[dict[str, Any]]:
    """All scenarios of an `Order` on this rank's group. Collective; every rank gets the results."""
    import undertow as ut

    group = ut.init()
    wanted = Order(**order)
    sizes = {lane: tuple(counts) for lane, counts in (wanted.sizes or default_sizes(group.device.type)).items()}
    lanes = group.fabric.lanes()
    scenarios = grid(
        wanted.computations, wanted.collectives, {lane: sizes[lane] for lane in sizes if not lanes.get(lane, "none")}
    )
    bench = Bench(group, wanted.rounds, wanted.seconds, wanted.scale)
    results = []
    for number, scenario in enumerate(scenarios):
        if group.reduce_max([time.time()])[0] > wanted.until:
            break  # on all ranks
        result = bench.measure(scenario, wanted.strategies, wanted.ctas)
        results.append(result.to_json())
        if group.rank == 0:
            keep(wanted.file, {"node": results[-1]})
            if said is not None:
                said(result, number + 1, len(scenarios))
            else:
                print(line(result), flush=True)
    return results


def tables_rank(counts: Sequence[int], nbytes: int, lane: str, file: str = "") -> dict[str, Any]:
    """The two tables behind the papers' choice of a partition, on this rank's group. Collective."""
    import undertow as ut

    group = ut.init()
    found = asdict(Bench(group).tables(counts, COLLECTIVES, nbytes, lane))
    if group.rank == 0:
        keep(file, {"tables": found})
    return found


def keep(file: str, what: dict[str, Any]) -> None:
    """A line of JSON, at once: what comes later may fail."""
    if file:
        with Path(file).open("a") as stream:
            stream.write(json.dumps(what) + "\n")


def line(result: Result) -> str:
    """One scenario in one line, for logs."""
    said = f"{result.scenario.name}: {result.label}, {_ms(result.compute_seconds)} + {_ms(result.collective_seconds)}"
    for name in result.together:
        share = result.share(name)
        wrong = f" WRONG {result.together[name].wrong}" if result.together[name].wrong else ""
        said += f" | {name} {result.speedup(name):.2f}x {'-' if share is None else f'{share:.0%}'}{wrong}"
    return said + f" | ideal {result.ideal:.2f}x"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def scenarios_of_card(sizes: Sequence[int], lane: str, stand_in: str) -> list[Scenario]:
    """Every computation beside a stand-in on a whole card."""
    ratios = itertools.cycle(RATIOS)
    return [Scenario(name, stand_in, size, lane, next(ratios)) for size in sizes for name in COMPUTATIONS]
