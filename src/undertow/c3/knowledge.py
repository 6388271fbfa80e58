"""What is known about a machine's computing beside its communicating: fitted from runs, kept in a file, or guessed.

The one interference model (`plan.interference`) has an effect for every lane under every strategy, named "peer:base",
"dma:dma" and so on. Beside it stands how much slower each side is alone on a part of the machine:

    computing on c of S SMs          (1 - m) S / c + m                  m: how much it lives on memory
    communicating on k CTAs          the factor of `narrow` at k, measured for all collectives together

and how far the model is off for each effect, on average, about the very runs that it was fitted to: what is predicted
to gain less than that may well lose.

Files hold numbers only. A damaged one is as good as none.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .. import settings
from ..plan import files
from ..plan.interference import Effect, Interference, Run, fit_runs
from .characterise import Result, Tables

FORMAT = "undertow c3 1"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """`errors`: by effect, the mean error of what the model says. `source` says in a few words where it is from."""

    model: Interference
    narrow: tuple[tuple[int, float], ...] = ()
    source: str = "assumed"
    errors: tuple[tuple[str, float], ...] = ()

    def error(self, name: str, lane: str) -> float:
        """How far the model is off about a strategy, as a part of the time; 0 where nothing is known."""
        return dict(self.errors).get(f"{lane}:{name}", 0.0)

    def computing(self, compute_sms: int, memory: float) -> float:
        """How many times longer a computation takes alone on so many SMs than on all."""
        return (1 - memory) * self.model.multiprocessors / max(1, compute_sms) + memory

    def communicating(self, ctas: int | None) -> float:
        """How many times longer a collective takes alone on so many CTAs than on those of its own choice."""
        if ctas is None or not self.narrow:
            return 1.0
        known = sorted(self.narrow)
        if ctas <= known[0][0]:
            return known[0][1] * known[0][0] / ctas
        for (low, slow), (high, fast) in itertools.pairwise(known):
            if ctas <= high:
                return slow + (fast - slow) * (ctas - low) / (high - low)
        return known[-1][1]

    def run(
        self,
        name: str,
        lane: str,
        compute_seconds: float,
        lane_seconds: float,
        memory: float,
        moved_bytes: float,
        compute_sms: int,
        ctas: int | None,
        default_ctas: int,
        seconds: float = 1.0,
    ) -> Run:
        """Both sides under a strategy, each with what it takes alone in its part."""
        every = self.model.multiprocessors
        part = compute_sms < every
        return Run(
            f"{lane}:{name}",
            compute_seconds * (self.computing(compute_sms, memory) if part else 1.0),
            lane_seconds * (self.communicating(ctas) if part and lane == "peer" else 1.0),
            seconds,
            compute_sms,
            0 if lane != "peer" else ctas or default_ctas,
            moved_bytes / lane_seconds,
            memory,
        )

    # -- files ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "multiprocessors": self.model.multiprocessors,
            "effects": {name: asdict(effect) for name, effect in self.model.effects},
            "narrow": [list(pair) for pair in self.narrow],
            "errors": dict(self.errors),
            "source": self.source,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Knowledge:
        """Raises one of `files.DAMAGE` where it is none."""
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}")
        names = {field.name for field in fields(Effect)}
        effects = []
        for name, values in data["effects"].items():
            numbers = {key: float(value) for key, value in values.items()}
            if set(numbers) != names or not all(0 <= value < float("inf") for value in numbers.values()):
                raise ValueError(f"effect {name!r} is not made of {', '.join(sorted(names))}")
            effects.append((str(name), Effect(**numbers)))
        narrow = tuple((int(count), float(factor)) for count, factor in data["narrow"])
        if any(count < 1 or not 0 < factor < float("inf") for count, factor in narrow):
            raise ValueError("narrow is not made of counts and factors above 0")
        every = int(data["multiprocessors"])
        if every < 1:
            raise ValueError("multiprocessors is below 1")
        errors = tuple((str(name), float(value)) for name, value in data.get("errors", {}).items())
        if not all(0 <= value < float("inf") for _, value in errors):
            raise ValueError("errors are not made of numbers from 0 on")
        return Knowledge(Interference(every, tuple(effects)), narrow, str(data["source"])[:200], errors)


def default_path(device: str, ranks: int) -> Path:
    """Where what `undertow c3 run` learnt is kept."""
    return settings.cache_folder() / f"c3-{device}-{ranks}.json"


def load(device: str, ranks: int, multiprocessors: int) -> Knowledge:
    """What was learnt on this machine, or what is assumed."""
    try:
        found = Knowledge.from_json(files.read(default_path(device, ranks)))
    except files.DAMAGE:
        return assumed(device, multiprocessors)
    return found if found.model.multiprocessors == multiprocessors else assumed(device, multiprocessors)


def save(knowledge: Knowledge, device: str, ranks: int) -> Path:
    path = default_path(device, ranks)
    files.write(path, knowledge.to_json())
    return path


def merged(learnt: Knowledge, before: Knowledge) -> Knowledge:
    """Effects that were learnt now in the place of those known before; the others stay, as does what `narrow` tells."""
    known, new = dict(before.model.effects), dict(learnt.model.effects)
    kept = sorted(set(known) - set(new))
    source = f"{learnt.source}, {len(kept)} effects {before.source}" if kept else learnt.source
    model = replace(learnt.model, effects=tuple(sorted((known | new).items())))
    errors = tuple((name, value) for name, value in before.errors if name in kept)
    return Knowledge(model, learnt.narrow or before.narrow, source, (*errors, *learnt.errors))


def narrowness(tables: Tables) -> tuple[tuple[int, float], ...]:
    """The factor at each number of CTAs, the geometric mean over collectives."""
    ratios: dict[int, list[float]] = {}
    for times in tables.collective.values():
        for count, seconds in times.items():
            if int(count):
                ratios.setdefault(int(count), []).append(seconds / _at_zero(times))
    return tuple((count, max(1.0, statistics.geometric_mean(found))) for count, found in sorted(ratios.items()))


def _at_zero(times: Mapping[int, float]) -> float:
    return next(seconds for count, seconds in times.items() if int(count) == 0)


def learn(results: Iterable[Result], narrow: Sequence[tuple[int, float]] = (), source: str = "fitted") -> Knowledge:
    """Fitted to runs of one machine."""
    known = list(results)
    every = max(one.multiprocessors for one in known)
    empty = Knowledge(Interference(every, ()), tuple(narrow), source)
    runs = [run for one in known for run in runs_of(one, empty)]
    model = fit_runs(runs, every)
    return replace(empty, model=model, errors=_errors(model, runs))


def _errors(model: Interference, runs: Sequence[Run]) -> tuple[tuple[str, float], ...]:
    """By effect, the mean of how far the model is off about these runs."""
    off: dict[str, list[float]] = {}
    for run in runs:
        off.setdefault(run.lane, []).append(abs(model.seconds(run) / run.seconds - 1))
    return tuple((name, statistics.mean(found)) for name, found in sorted(off.items()))


def runs_of(result: Result, knowledge: Knowledge) -> list[Run]:
    """One for each strategy that was measured."""
    return [
        knowledge.run(
            name, result.scenario.lane, result.compute_seconds, result.collective_seconds, result.memory,
            result.moved_bytes, one.compute_sms, one.communication_ctas or None, result.multiprocessors, one.seconds,
        )
        for name, one in result.together.items()
    ]  # fmt: skip


def halves(
    results: Sequence[Result], narrow: Sequence[tuple[int, float]] = ()
) -> list[tuple[Knowledge, Sequence[Result]]]:
    """What is learnt from every other scenario, with the rest, that it has not seen; both ways."""
    return [(learn(results[first::2], narrow), results[1 - first :: 2]) for first in (0, 1)]


def held_out(learnt: Sequence[tuple[Knowledge, Sequence[Result]]]) -> float:
    """Of `halves`: the mean error about what was not seen, as a part of what was measured."""
    return statistics.mean(
        abs(knowledge.model.seconds(run) / run.seconds - 1)
        for knowledge, unseen in learnt
        for one in unseen
        for run in runs_of(one, knowledge)
    )


def assumed(device: str, multiprocessors: int) -> Knowledge:
    """Where nothing was measured: what the papers report, as effects. Collectives on SMs lose most of their time to a
    computation that came first, a good part of it beside one that gave way, and copies by engines little.

    The errors are those of these very effects about 64 scenarios of four ranks that share an H200
    (gpu_c3_2026-11-16.json).
    """
    memory = 1.0 if device == "cuda" else 0.3
    effects = {
        "base": Effect(0.3, 0.0, 6.0, 0.0, memory),
        "priority": Effect(0.8, 0.0, 0.5, 0.0, memory),
        "partition": Effect(0.2, 0.0, 0.3, 0.0, memory),
        "both": Effect(0.2, 0.0, 0.3, 0.0, memory),
    }
    copies = Effect(0.0, 0.0, 0.05, 0.0, 0.1)
    found = [(f"peer:{name}", effect) for name, effect in effects.items()]
    found += [(f"{lane}:{name}", copies) for lane in ("dma", "net") for name in (*effects, "dma", "dma+fewer")]
    quarter = max(1, multiprocessors // 4)
    narrow = ((max(1, quarter // 2), 1.5), (quarter + 1, 1.0)) if device == "cuda" else ()
    off = {"base": 0.06, "priority": 0.10, "partition": 0.33, "both": 0.32}
    errors = [(f"peer:{name}", value) for name, value in off.items()]
    errors += [(name, 0.04 if name.endswith("fewer") else 0.03) for name, _ in found if not name.startswith("peer")]
    return Knowledge(Interference(multiprocessors, tuple(found)), narrow, errors=tuple(errors))
