"""What can be simulated by name: presets, collectives, programs, step files, traces; each with its strategies.

| target | what is run | strategies |
|---|---|---|
| dlrm, transformer | a preset step | serial, chunked, fused |
| all_reduce, all_gather, ... | a collective | every program of the library that has this contract and fits the nodes |
| ring, FILE.py, FILE.py:name | a program | itself |
| FILE.toml | a step | itself |
| FILE.et, PREFIX | traces | itself |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..collective.algorithms import LIBRARY
from ..collective.language import Program
from ..errors import InvalidArgument, SimulationRefused, UndertowError
from ..fabric.events import Timeline
from . import chakra, step_files
from .cluster import Cluster
from .collectives import Collectives
from .schedules import iterations, simulate
from .tasks import Outcome
from .timelines import critical_path, schedule_timeline
from .workloads import PRESETS, STRATEGIES

_MOST_TRACED = 50_000  # instructions of a schedule that is followed flight by flight,
_MOST_FOLLOWED = 500_000  # and how often they run, all together: what is followed is kept


@dataclass(frozen=True)
class Answer:
    """What one strategy took; `resources`: seconds of the critical path, by what they were spent on."""

    seconds: float
    resources: dict[str, float]
    timeline: Callable[[], Timeline]
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Target:
    """A name and how each of its strategies is run; the first is what the others are compared with."""

    name: str
    strategies: dict[str, Callable[[Cluster, Collectives], Answer]]


def find(target: str, nbytes: int, tile: int | None = None) -> Target:
    """What `target` means; see the module's table. `nbytes` and `tile` are those of a collective's call."""
    if target in PRESETS:
        run = PRESETS[target]
        return Target(target, {name: partial(_preset, run, name) for name in STRATEGIES})
    programs = {one.name: one for one in LIBRARY.values() if one.collective == target}
    if programs:
        return Target(target, {name: partial(_program, one, nbytes, tile) for name, one in programs.items()})
    if target.endswith(".toml"):
        data = step_files.load(target)
        return Target(
            Path(target).stem, {"step": lambda cluster, known: _outcome(step_files.run(data, cluster, known))}
        )
    if target in LIBRARY or ".py" in target:
        from ..collective.loading import load

        return Target(target, {one.name: partial(_program, one, nbytes, tile) for one in load(target)})
    if target.endswith(".et") or Path(f"{target}.0.et").is_file():
        traces = [chakra.read(path) for path in chakra.find(target)]
        run_traces = partial(_traces, traces)
        return Target(Path(target).name, {"trace": run_traces})
    must = (
        f"a preset ({', '.join(PRESETS)}), a collective or a program ('list' names them), FILE.py, FILE.toml or FILE.et"
    )
    raise InvalidArgument(argument="target", was=repr(target), must=must)


def _outcome(outcome: Outcome) -> Answer:
    return Answer(outcome.seconds, outcome.by_resource(), outcome.timeline, outcome)


def _preset(run: Callable[..., Outcome], strategy: str, cluster: Cluster, known: Collectives) -> Answer:
    return _outcome(run(cluster, strategy, known=known))


def _traces(traces: list[list[chakra.Node]], cluster: Cluster, known: Collectives) -> Answer:
    return _outcome(chakra.simulate(traces, cluster, known))


def _program(program: Program, nbytes: int, tile: int | None, cluster: Cluster, _: Collectives) -> Answer:
    schedule = program.compile(topology=cluster.topology, target="staged", workers=8, check=True)
    runs = len(schedule.instructions) * iterations(schedule, nbytes, tile)
    traced = len(schedule.instructions) <= _MOST_TRACED and runs <= _MOST_FOLLOWED
    result = simulate(
        schedule, cluster.network, nbytes=nbytes, tile=tile, rules=cluster.rules, check=False, traced=traced
    )
    kinds = dict.fromkeys(kind.name for kind in cluster.network.links.kinds)
    resources = critical_path(result) if traced else {f"busy {kind}": result.busy(kind) for kind in kinds}

    def timeline() -> Timeline:
        if not traced:
            was = f"for {len(schedule.instructions)} instructions, which run {runs} times in all"
            must = f"for at most {_MOST_TRACED}, and {_MOST_FOLLOWED} times: a larger --tile runs them less often"
            raise InvalidArgument(argument="--timeline", was=was, must=must)
        return schedule_timeline(result)

    return Answer(result.seconds, resources, timeline)


def fits(run: Callable[[], Answer]) -> Answer | UndertowError:
    """What a strategy took, or why it cannot run on this cluster."""
    try:
        return run()
    except UndertowError as error:
        return error
    except MemoryError:
        return SimulationRefused(reason="it takes more memory than there is")


def names() -> dict[str, str]:
    """What can be named: presets and collectives, each with its strategies."""
    found = {name: ", ".join(STRATEGIES) for name in PRESETS}
    for one in LIBRARY.values():
        found[one.collective] = f"{found[one.collective]}, {one.name}" if one.collective in found else one.name
    return found
