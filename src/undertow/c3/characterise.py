"""Computation and communication alone and together, under each strategy: how much they gain, how much they disturb.

With T_g and T_c the times alone (the collective on its lane, unbounded) and T the time together:

    ideal      (T_g + T_c) / max(T_g, T_c)
    speed-up   S = (T_g + T_c) / T
    share      (S - 1) / (ideal - 1): negative where together is slower than one after the other; none where ideal - 1
               is below 0.05, for it would be noise

    G-long     T_g > 1.15 T_c          C-long     T_c > 1.15 T_g          GC-equal     neither

All are taken in one run, interleaved, the slowest rank's; every strategy's result is checked before it is timed. On a
GPU it is device time: ranks' streams are held until all hosts have enqueued, then begin together, so that what eager
calls cost the host is not taken for what the two sides cost each other.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .. import collective as collectives
from ..errors import UndertowError
from ..fabric import placement
from ..fabric.placement import Placement
from ..fabric.timer import compare
from ..plan.metrics import share_of_ideal
from .spans import Ends, spans_of
from .strategies import Strategy, strategy
from .together import place_of, run
from .workloads import COMPUTATIONS, Computation, Exchange, computation, repeated

if TYPE_CHECKING:
    from ..fabric.group import Group

_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call
_HOLD_CYCLES = 9_000_000  # some 5 ms of a GPU, in which the host enqueues all that is to be timed
_MOST_REPEATS = 64
RATIOS = (1.0, 0.5, 2.0)
"""Of computation to collective, in turn."""
EQUAL = 1.15
PUBLISHED = {"base": 0.21, "priority": 0.42, "partition": 0.41, "both": 0.42, "dma": 0.66, "dma+fewer": 0.72}
"""Shares of ideal that ConCCL reports on eight MI300X (means)."""
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What runs beside what: `lane` carries the collective alone and under every strategy.

    `ratio`: how long the computation is beside the collective; it is repeated until it is about so long.
    """

    compute: str
    collective: str
    nbytes: int
    lane: str
    ratio: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.compute} beside {self.collective} of {self.nbytes / (1 << 20):g} MiB over {self.lane}"


@dataclass(frozen=True, slots=True)
class Together:
    """One strategy: seconds of both, and the seconds at which each side ended (medians of the slowest rank)."""

    strategy: str
    seconds: float
    compute_end: float
    collective_end: float
    compute_sms: int
    communication_ctas: int
    wrong: int = 0


@dataclass(frozen=True)
class Result:
    """One scenario, measured."""

    scenario: Scenario
    memory: float
    compute_seconds: float
    collective_seconds: float
    moved_bytes: float
    ranks: int
    multiprocessors: int
    repeats: int = 1
    device: str = "cuda"
    together: dict[str, Together] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return label(self.compute_seconds, self.collective_seconds)

    @property
    def ideal(self) -> float:
        both = self.compute_seconds + self.collective_seconds
        return both / max(self.compute_seconds, self.collective_seconds)

    def speedup(self, name: str) -> float:
        return (self.compute_seconds + self.collective_seconds) / self.together[name].seconds

    def share(self, name: str) -> float | None:
        """Of the ideal speed-up; None where that is too small to be divided by."""
        return share_of_ideal(self.together[name].seconds, self.compute_seconds, self.collective_seconds)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found.update(label=self.label, ideal=self.ideal)
        for name, one in found["together"].items():
            one.update(speedup=self.speedup(name), share=self.share(name))
        return found

    @staticmethod
    def from_json(data: dict[str, Any]) -> Result:
        known = {name: data[name] for name in Result.__dataclass_fields__ if name in data}
        known["scenario"] = Scenario(**data["scenario"])
        fields = Together.__dataclass_fields__
        known["together"] = {
            name: Together(**{key: value for key, value in one.items() if key in fields})
            for name, one in data["together"].items()
        }
        return Result(**known)


@dataclass(frozen=True, slots=True)
class Tables:
    """Seconds alone against SMs reserved for communication (0: all for each), by computation and by collective."""

    compute: dict[str, dict[int, float]]
    collective: dict[str, dict[int, float]]


def label(compute: float, collective: float) -> str:
    """Which side is longer, by the 15% rule."""
    if compute > EQUAL * collective:
        return "G-long"
    return "C-long" if collective > EQUAL * compute else "GC-equal"


class Beside(Protocol):
    """What runs beside a computation, and how its result is judged."""

    @property
    def moved(self) -> float:
        """Bytes that this rank sends."""

    def __call__(self) -> object: ...

    def fill(self) -> None:
        """Fresh input, poisoned output."""

    def wrong(self) -> int:
        """Elements of the output that are not what they must be."""


class _Told:
    """A clock for calls that return their own seconds."""

    name = "spans"
    default_calls = 1

    def now(self) -> float:
        return time.monotonic()

    def sampler(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        return lambda: float(call())  # type: ignore[arg-type]


class Bench:
    """Scenarios of one group, on which all ranks come along in the same order."""

    def __init__(self, group: Group, rounds: int = 5, seconds: float = 2.0, scale: float = 1.0) -> None:
        self.group, self._rounds, self._seconds, self._scale = group, rounds, seconds, scale
        self.place = place_of(group)
        self._computations: dict[str, Computation] = {}
        self._word = torch.zeros(1, device=group.device)

    def computation(self, name: str) -> Computation:
        """Made once: scenarios share it."""
        if name not in self._computations:
            self._computations = {}  # of the others nothing is needed any more, and they are large
            self._computations[name] = computation(name, self.group, self._scale)
            self._unit = self._times({0: self._computations[name].run})[0]
        return self._computations[name]

    def strategies(self, scenario: Scenario, names: Sequence[str], ctas: int | None) -> tuple[
        dict[str, Strategy], dict[str, str]
    ]:  # fmt: skip
        """Those that can run, and why the others cannot."""
        found, refused = {}, {}
        for name in names:
            # Copies need no SMs: there is nothing to divide but for those of the computation.
            if (name.startswith("dma") != (scenario.lane == "dma")) and name not in ("base", "priority"):
                continue
            try:
                found[name] = strategy(name, self.place, scenario.lane, ctas if name in ("partition", "both") else None)
            except UndertowError as error:
                refused[name] = str(error)
        return found, refused

    def measure(
        self, scenario: Scenario, names: Sequence[str], ctas: int | None = None, exchange: Beside | None = None
    ) -> Result:
        """One scenario. Collective. `exchange`: what stands for the collective, where there is none."""
        group = self.group
        compute = self.computation(scenario.compute)
        if exchange is None:
            exchange = Exchange(scenario.collective, scenario.nbytes, group)

        def collective() -> object:
            with placement.placed(Placement(scenario.lane)):
                return exchange()

        alone = self._times({0: collective}, 2)[0]
        repeats = max(1, min(_MOST_REPEATS, round(scenario.ratio * alone / self._unit)))
        compute = replace(compute, run=repeated(compute.run, repeats))
        chosen, refused = self.strategies(scenario, names, ctas)
        ends: dict[str, list[Ends]] = {name: [] for name in chosen}
        wrong = {name: self._checked(one, compute, exchange) for name, one in chosen.items()}

        def together(name: str) -> float:
            spans = spans_of(group.device)
            run(group, chosen[name], compute.run, exchange, spans)
            found = spans.ends()
            ends[name].append(found)
            return found.both

        variants: dict[str, Callable[[], object]] = {
            "compute": lambda: self._alone(compute.run),
            "collective": lambda: self._alone(collective),
        }
        variants |= {f"together {name}": lambda name=name: together(name) for name in chosen}  # type: ignore[misc]
        taken = compare(
            variants,
            clock=_Told(),
            repeats=self._rounds,
            warmup=1,
            budget_seconds=self._seconds,
            reduce_max=group.reduce_max,
            before=self._align,
        )
        sides = group.reduce_max(
            [statistics.median(getattr(one, side) for one in ends[name][-taken.rounds :])
             for name in chosen for side in ("compute", "collective")] or [0.0]
        )  # fmt: skip
        every = group.fabric.multiprocessors
        results = {
            name: Together(
                name, taken.estimate(f"together {name}").median, sides[2 * number], sides[2 * number + 1],
                one.share.multiprocessors or every, self._ctas(one), wrong[name],
            )
            for number, (name, one) in enumerate(chosen.items())
        }  # fmt: skip
        return Result(
            scenario, compute.memory, taken.estimate("compute").median, taken.estimate("collective").median,
            exchange.moved, group.size, every, repeats, group.device.type, results, refused,
        )  # fmt: skip

    def tables(self, counts: Sequence[int], collectives: Sequence[str], nbytes: int, lane: str) -> Tables:
        """What each side takes alone when so many SMs are reserved for communication. Collective."""
        group, every = self.group, self.group.fabric.multiprocessors
        slow: dict[str, dict[int, float]] = {}
        narrow: dict[str, dict[int, float]] = {}
        for name in COMPUTATIONS:
            run_it = self.computation(name).run

            def bounded(count: int, work: Callable[[], object] = run_it) -> object:
                with group.fabric.sharing(every - count if count else None):
                    return work()

            slow[name] = self._times({count: partial(bounded, count) for count in (0, *counts)})
        for name in collectives:
            exchange = Exchange(name, nbytes, group)

            def with_ctas(count: int, work: Callable[[], object] = exchange) -> object:
                with placement.placed(Placement(lane, count or None)):
                    return work()

            narrow[name] = self._times({count: partial(with_ctas, count) for count in (0, *counts)})
        return Tables(slow, narrow)

    def _times(self, works: dict[int, Callable[[], object]], rounds: int | None = None) -> dict[int, float]:
        for work in works.values():
            work()
        taken = compare(
            {str(count): partial(self._alone, work) for count, work in works.items()},
            clock=_Told(), repeats=rounds or self._rounds, warmup=1, budget_seconds=self._seconds,
            reduce_max=self.group.reduce_max, before=self._align,
        )  # fmt: skip
        return {count: taken.estimate(str(count)).median for count in works}

    def _alone(self, work: Callable[[], object]) -> float:
        spans = spans_of(self.group.device)
        spans.begin()
        work()
        spans.computed()
        spans.communicated()
        return spans.ends().both

    def _ctas(self, chosen: Strategy) -> int:
        """SMs that the collective wants; none for copies."""
        if chosen.lane != "peer" or self.group.device.type != "cuda":
            return 0
        return chosen.share.communication_ctas or self.group.fabric.multiprocessors

    def _checked(self, chosen: Strategy, compute: Computation, exchange: Beside) -> int:
        """Elements that are wrong on any rank after a call of the strategy on poisoned memory."""
        exchange.fill()
        run(self.group, chosen, compute.run, exchange)
        return int(self.group.reduce_max([float(exchange.wrong())])[0])

    def _align(self) -> None:
        """A barrier over Gloo lets ranks go milliseconds apart; a word that all of them sum brings them together."""
        self.group.barrier()
        if self.group.device.type == "cuda":
            _cuda._sleep(_HOLD_CYCLES)
        if self.group.size > 1:
            collectives.all_reduce(self._word, group=self.group)


def grid(computations: Sequence[str], exchanges: Sequence[str], sizes: dict[str, Sequence[int]]) -> list[Scenario]:
    """Every computation beside every collective of every size, `sizes` by lane: first all of the first sizes."""
    ratios = itertools.cycle(RATIOS)
    return [
        Scenario(compute, exchange, counts[number], lane, next(ratios))
        for number in range(max(map(len, sizes.values()), default=0))
        for lane, counts in sizes.items()
        for compute in computations
        for exchange in exchanges
        if number < len(counts)
    ]


def mean_shares(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """By lane and strategy, the mean share of ideal over the scenarios that have one."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in results:
        for name in one.together:
            share = one.share(name)
            if share is not None:
                found.setdefault(one.scenario.lane, {}).setdefault(name, []).append(share)
    return {
        lane: {name: statistics.mean(shares) for name, shares in by_name.items()} for lane, by_name in found.items()
    }
