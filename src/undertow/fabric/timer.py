"""The one timer: variants interleaved in one run, the slowest rank counts, medians with intervals.

Two numbers taken one after the other compare the machine's moods as much as the variants. So every round runs each
variant once, in an order shuffled anew each round, and ratios are formed inside rounds before the median is taken.

All ranks of a group must call `compare` with the same variants and arguments. They then run the same calls in the same
order, since the order comes from a seeded generator and every decision (when to stop) from numbers reduced over ranks.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch

from ..errors import InvalidArgument
from .environment import environment

__all__ = [
    "Clock",
    "Comparison",
    "DeviceClock",
    "Estimate",
    "GraphClock",
    "Rotating",
    "WallClock",
    "compare",
    "environment",
    "estimate",
]

_cuda: Any = torch.cuda  # parts of it carry no types, which strict checking would refuse to call
T = TypeVar("T")
ReduceMax = Callable[[list[float]], list[float]]

MINIMUM_ROUNDS = 3
"""Rounds run even when the budget is spent: fewer give no interval at all."""
RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and its 95% bootstrap interval."""

    median: float
    low: float
    high: float


def estimate(samples: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """The median of `samples`, and where it would lie in 95% of repetitions, judged by resampling them."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise InvalidArgument(argument="samples", was="empty", must="at least one number")
    picks = np.random.default_rng(seed).integers(0, values.size, size=(resamples, values.size))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return Estimate(float(np.median(values)), float(low), float(high))


class Clock(Protocol):
    """A way to time a call. Tests supply their own, so that none depends on the machine's speed."""

    name: str
    default_calls: int

    def now(self) -> float:
        """Seconds on a clock that only goes forward; used for budgets."""

    def sampler(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        """Prepare `call`; what is returned runs it `calls` times and gives the seconds of one."""


class WallClock:
    """Host time around the calls, with the device idle at both ends. For CPU work and for whole programs."""

    name = "wall"
    default_calls = 1

    def now(self) -> float:
        return time.monotonic()

    def sampler(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        def sample() -> float:
            _synchronise()
            start = time.perf_counter_ns()
            for _ in range(calls):
                call()
            _synchronise()
            return (time.perf_counter_ns() - start) * 1e-9 / calls

        return sample


class DeviceClock(WallClock):
    """CUDA events on the current stream, around the calls.

    A variant that uses other streams must join them to the current one before it returns, or its end is missed. Where
    the host cannot enqueue as fast as the device works, the gaps are counted: use `graph` for short calls.
    """

    name = "device"

    def sampler(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)

        def sample() -> float:
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e-3 / calls

        return sample


class GraphClock(DeviceClock):
    """CUDA events around the replay of one graph that holds `calls` calls: no launch gap, for calls of microseconds."""

    name = "graph"
    default_calls = 10

    def sampler(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        side = _cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()  # loads kernels and allocates workspaces, neither of which may happen inside a capture
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: a watchdog or proxy thread may use CUDA meanwhile without spoiling the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
        replay = super().sampler(graph.replay, 1)
        return lambda: replay() / calls


CLOCKS: dict[str, type[WallClock]] = {"wall": WallClock, "device": DeviceClock, "graph": GraphClock}


class Rotating(Generic[T]):
    """Input sets taken in turn, so that none is still in a cache when its turn comes again.

    `make(i)` builds set `i`, of `bytes_each` bytes; so many are made, at once, that a full turn touches `total_bytes`
    (200 MB with CUDA: four times the L2 of an H200; 64 MB on CPU).
    """

    def __init__(self, make: Callable[[int], T], *, bytes_each: int, total_bytes: int | None = None) -> None:
        if bytes_each <= 0:
            raise InvalidArgument(argument="bytes_each", was=bytes_each, must="a positive number of bytes")
        if total_bytes is None:
            total_bytes = (200 if _cuda.is_initialized() else 64) * 10**6
        self._sets = [make(index) for index in range(max(1, -(-total_bytes // bytes_each)))]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._sets)

    def next(self) -> T:
        """The next set in turn."""
        chosen = self._sets[self._turn]
        self._turn = (self._turn + 1) % len(self._sets)
        return chosen


@dataclass(frozen=True)
class Comparison:
    """Samples of several variants, in seconds per call, round by round, the slowest rank's where a group measured."""

    clock: str
    calls: int
    samples: dict[str, list[float]]
    seed: int = 0
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.samples)

    @property
    def rounds(self) -> int:
        return len(next(iter(self.samples.values())))

    def estimate(self, name: str) -> Estimate:
        """Seconds per call of one variant."""
        return estimate(self._of(name), seed=self.seed)

    def ratio(self, of: str, to: str) -> Estimate:
        """Time of `of` divided by time of `to`, formed within each round, then the median."""
        pairs = zip(self._of(of), self._of(to), strict=True)
        return estimate([first / second for first, second in pairs], seed=self.seed)

    def speedup(self, name: str, over: str) -> Estimate:
        """How many times faster `name` is than `over`."""
        return self.ratio(of=over, to=name)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON values; `from_json` reads it back."""
        variants = {}
        for name, samples in self.samples.items():
            found = self.estimate(name)
            variants[name] = {"median": found.median, "low": found.low, "high": found.high, "samples": samples}
        return {
            "format": "undertow comparison 1",
            "unit": "seconds per call",
            "clock": self.clock,
            "calls": self.calls,
            "rounds": self.rounds,
            "seed": self.seed,
            "variants": variants,
            "environment": self.environment,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        samples = {name: [float(value) for value in entry["samples"]] for name, entry in data["variants"].items()}
        return cls(data["clock"], int(data["calls"]), samples, int(data["seed"]), dict(data["environment"]))

    def save(self, path: str | Path) -> None:
        """Write `to_json()` to `path`, making its folder if needed."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_json(), indent=1, default=str) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        return cls.from_json(json.loads(Path(path).read_text()))

    def _of(self, name: str) -> list[float]:
        if name not in self.samples:
            raise InvalidArgument(argument="variant", was=repr(name), must=f"one of {', '.join(self.samples)}")
        return self.samples[name]


def compare(
    variants: Mapping[str, Callable[..., object]],
    *,
    clock: Literal["auto", "wall", "device", "graph"] | Clock = "auto",
    repeats: int = 30,
    warmup: int = 3,
    calls: int | None = None,
    budget_seconds: float | None = None,
    reduce_max: ReduceMax | None = None,
    before: Callable[[], object] | None = None,
    rotate: Rotating[Any] | None = None,
    seed: int = 0,
    facts: Mapping[str, object] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Comparison:
    """Time `variants` against each other.

    Each of `repeats` rounds takes one sample of every variant: `calls` calls in a row, timed together. `warmup` rounds
    go before and are dropped. With a `budget_seconds`, rounds stop when another would exceed it (never below
    `MINIMUM_ROUNDS`), and warming up stops at a quarter of it.

    `reduce_max` takes a list of numbers to their maximum over all ranks; it is called once per round, also while
    warming up. `before` runs before every sample, outside the timed part and on the current stream: a barrier that
    lets the ranks start together belongs there. With `rotate`, each call receives the next input set as its argument.
    `facts` go into the environment, and `progress(done, repeats)` is called after each round.

    `clock="auto"` is device time once this process uses CUDA, else wall time.
    """
    if not variants:
        raise InvalidArgument(argument="variants", was="empty", must="at least one named callable")
    if repeats < 1:
        raise InvalidArgument(argument="repeats", was=repeats, must="at least 1")
    chosen = _choose(clock)
    if calls is None:  # a graph freezes its inputs, so it must hold a whole turn of them
        calls = chosen.default_calls if chosen.default_calls == 1 else max(chosen.default_calls, len(rotate or ()))
    if calls < 1:
        raise InvalidArgument(argument="calls", was=calls, must="at least 1")

    begin = chosen.now()
    names = list(variants)
    samplers = {name: chosen.sampler(_bound(variant, rotate), calls) for name, variant in variants.items()}
    shuffle = random.Random(seed)
    limit = float("inf") if budget_seconds is None else budget_seconds

    def run_round() -> tuple[list[float], float, float]:
        """One sample per variant, then the seconds since the begin and those of this round, all of the slowest rank."""
        order = list(names)
        shuffle.shuffle(order)
        start = chosen.now()
        taken = dict.fromkeys(names, 0.0)
        for name in order:
            if before is not None:
                before()
            taken[name] = samplers[name]()
        end = chosen.now()
        numbers = [*taken.values(), end - begin, end - start]
        if reduce_max is not None:
            numbers = reduce_max(numbers)
        return numbers[:-2], numbers[-2], numbers[-1]

    for _ in range(warmup):
        _, elapsed, _ = run_round()
        if elapsed > limit / 4:
            break
    samples: dict[str, list[float]] = {name: [] for name in names}
    for done in range(1, repeats + 1):
        taken, elapsed, lasted = run_round()
        for name, value in zip(names, taken, strict=True):
            samples[name].append(value)
        if progress is not None:
            progress(done, repeats)
        if done >= MINIMUM_ROUNDS and elapsed + lasted > limit:
            break
    return Comparison(chosen.name, calls, samples, seed, environment(facts))


def _choose(clock: str | Clock) -> Clock:
    if not isinstance(clock, str):
        return clock
    if clock == "auto":
        clock = "device" if _cuda.is_initialized() else "wall"
    if clock not in CLOCKS:
        raise InvalidArgument(argument="clock", was=repr(clock), must=f"'auto', {', '.join(map(repr, CLOCKS))}")
    if clock != "wall" and not torch.cuda.is_available():
        raise InvalidArgument(argument="clock", was=repr(clock), must="'wall' where no CUDA device is visible")
    return CLOCKS[clock]()


def _bound(variant: Callable[..., object], rotate: Rotating[Any] | None) -> Callable[[], object]:
    if rotate is None:
        return variant
    return lambda: variant(rotate.next())


def _synchronise() -> None:
    if _cuda.is_initialized():
        torch.cuda.synchronize()
