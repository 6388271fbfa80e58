"""The timer, on clocks that tests move by hand: no assertion depends on how fast this machine is."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from undertow.errors import InvalidArgument
from undertow.fabric import timer
from undertow.fabric.timer import Comparison, Estimate, Rotating, compare, estimate


class HandClock:
    """A clock that stands still unless a variant moves it."""

    name = "hand"
    default_calls = 1

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def takes(self, seconds: Callable[[], float]) -> Callable[[], object]:
        def variant() -> None:
            self.time += seconds()

        return variant

    def sampler(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        def sample() -> float:
            start = self.time
            for _ in range(calls):
                call()
            return (self.time - start) / calls

        return sample


def test_every_round_runs_each_variant_once_in_a_changing_seeded_order() -> None:
    def order(seed: int) -> list[str]:
        log: list[str] = []
        variants = {name: (lambda name=name: log.append(name)) for name in "abc"}
        compare(variants, clock=HandClock(), repeats=20, warmup=2, seed=seed)
        return log

    log = order(seed=1)
    rounds = [tuple(log[i : i + 3]) for i in range(0, len(log), 3)]
    assert len(rounds) == 22
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 2, "the order never changed"
    assert order(seed=1) == log, "ranks with one seed would run different orders"
    assert order(seed=2) != log


def test_samples_are_kept_by_name_whatever_the_order() -> None:
    clock = HandClock()
    result = compare({"a": clock.takes(lambda: 2.0), "b": clock.takes(lambda: 3.0)}, clock=clock, repeats=7, warmup=0)
    assert result.samples == {"a": [2.0] * 7, "b": [3.0] * 7}
    assert result.rounds == 7
    assert result.clock == "hand"


def test_ratios_are_paired_within_rounds() -> None:
    """The machine drifts tenfold; each round's ratio is still exactly two."""
    clock = HandClock()
    drift = random.Random(3)
    speed = 1.0

    def before() -> None:
        nonlocal speed
        if calls[0] % 2 == 0:
            speed = drift.uniform(1.0, 10.0)
        calls[0] += 1

    calls = [0]
    variants = {"fast": clock.takes(lambda: speed), "slow": clock.takes(lambda: 2 * speed)}
    result = compare(variants, clock=clock, repeats=25, warmup=0, before=before)
    assert result.ratio("slow", "fast") == Estimate(pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0))
    assert result.speedup("fast", over="slow").median == pytest.approx(2.0)
    wide = result.estimate("fast")
    assert wide.high - wide.low > 0.5, "the drift was meant to blur the times themselves"


def test_before_runs_outside_the_timed_part_of_every_sample() -> None:
    clock = HandClock()
    prepared = []

    def before() -> None:
        prepared.append(clock.time)
        clock.time += 100.0

    result = compare({"a": clock.takes(lambda: 1.0)}, clock=clock, repeats=5, warmup=1, before=before)
    assert result.samples["a"] == [1.0] * 5
    assert len(prepared) == 6


def test_several_calls_are_timed_together_and_divided() -> None:
    clock = HandClock()
    count = [0]

    def seconds() -> float:
        count[0] += 1
        return 1.0

    result = compare({"a": clock.takes(seconds)}, clock=clock, repeats=3, warmup=0, calls=8)
    assert result.samples["a"] == [1.0] * 3
    assert count[0] == 24
    assert result.calls == 8


def test_budget_stops_rounds_but_not_below_the_minimum() -> None:
    clock = HandClock()
    result = compare({"a": clock.takes(lambda: 1.0)}, clock=clock, repeats=100, warmup=0, budget_seconds=10.0)
    assert result.rounds == 10
    slow = HandClock()
    result = compare({"a": slow.takes(lambda: 50.0)}, clock=slow, repeats=100, warmup=5, budget_seconds=10.0)
    assert result.rounds == timer.MINIMUM_ROUNDS
    assert slow.time == 50.0 * (1 + timer.MINIMUM_ROUNDS), "warming up did not stop at its share of the budget"


class Ranks:
    """`count` threads that stand for ranks and reduce by maximum."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=20)
        self.shared: list[list[float]] = [[] for _ in range(count)]

    def reduce_max(self, rank: int) -> Callable[[list[float]], list[float]]:
        def reduce(values: list[float]) -> list[float]:
            self.shared[rank] = values
            self.barrier.wait()
            result = [max(column) for column in zip(*self.shared, strict=True)]
            self.barrier.wait()
            return result

        return reduce


def test_the_slowest_rank_counts_and_all_ranks_stop_together() -> None:
    """Rank 1 is three times slower at `a`, rank 0 at `b`; by its own clock each would stop at another round."""
    ranks = Ranks(2)
    results: dict[int, Comparison] = {}
    logs: dict[int, list[str]] = {0: [], 1: []}

    def run(rank: int) -> None:
        clock = HandClock()
        spent = {"a": 3.0 if rank == 1 else 1.0, "b": 1.5 if rank == 0 else 0.5}

        def seconds(name: str) -> Callable[[], float]:
            return lambda: logs[rank].append(name) or spent[name]  # type: ignore[func-returns-value]

        variants = {name: clock.takes(seconds(name)) for name in "ab"}
        results[rank] = compare(
            variants, clock=clock, repeats=100, warmup=1, budget_seconds=40.0, reduce_max=ranks.reduce_max(rank), seed=5
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results[0].samples == results[1].samples
    assert set(results[0].samples["a"]) == {3.0}
    assert set(results[0].samples["b"]) == {1.5}
    assert 3 <= results[0].rounds < 100
    assert logs[0] == logs[1]


def test_bootstrap_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        found = estimate(list(generator.normal(5.0, 1.0, size=30)), seed=trial, resamples=300)
        assert found.low <= found.median <= found.high
        covered += found.low <= 5.0 <= found.high
    assert 0.88 <= covered / 200 <= 1.0


def test_estimates_are_reproducible_and_degenerate_samples_allowed() -> None:
    samples = [1.0, 5.0, 2.0, 9.0, 3.0]
    assert estimate(samples) == estimate(samples)
    assert estimate([4.0]) == Estimate(4.0, 4.0, 4.0)
    with pytest.raises(InvalidArgument, match="samples is empty"):
        estimate([])


def test_rotating_inputs_come_in_turn_and_reach_the_variants() -> None:
    rotating = Rotating(lambda index: index * 10, bytes_each=30, total_bytes=100)
    assert len(rotating) == 4, "100 bytes need four sets of 30"
    clock = HandClock()
    seen: list[int] = []
    compare({"a": seen.append}, clock=clock, repeats=6, warmup=0, rotate=rotating)
    assert seen == [0, 10, 20, 30, 0, 10]


def test_rotating_needs_one_set_if_that_is_large_enough_and_defaults_to_64_megabytes_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(Rotating(lambda index: index, bytes_each=500, total_bytes=100)) == 1
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert len(Rotating(lambda index: index, bytes_each=10**6)) == 64
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert len(Rotating(lambda index: index, bytes_each=10**6)) == 200
    with pytest.raises(InvalidArgument, match="bytes_each is 0"):
        Rotating(lambda index: index, bytes_each=0)


def test_a_graph_holds_a_whole_turn_of_the_inputs() -> None:
    class GraphLike(HandClock):
        default_calls = 10

    def calls(sets: int) -> int:
        rotating = Rotating(lambda index: index, bytes_each=1, total_bytes=sets)
        return compare({"a": lambda _: None}, clock=GraphLike(), repeats=1, warmup=0, rotate=rotating).calls

    assert calls(4) == 10
    assert calls(25) == 25


def test_wall_clock_measures_between_its_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = iter([1_000, 5_000])
    monkeypatch.setattr(timer.time, "perf_counter_ns", lambda: next(stamps))
    assert timer.WallClock().sampler(lambda: None, calls=4)() == pytest.approx(1e-6)


def test_save_and_load(tmp_path: Path) -> None:
    clock = HandClock()
    variants = {"serial": clock.takes(lambda: 2.0), "chunked": clock.takes(lambda: 1.0)}
    result = compare(variants, clock=clock, repeats=4, facts={"link": "veth, 1 Gbit/s", "ranks": 4})
    path = tmp_path / "results" / "one.json"
    result.save(path)
    data = json.loads(path.read_text())
    assert data["variants"]["serial"]["median"] == 2.0
    assert data["environment"]["link"] == "veth, 1 Gbit/s"
    assert data["environment"]["ranks"] == 4
    loaded = Comparison.load(path)
    assert loaded == result
    assert loaded.speedup("chunked", over="serial").median == 2.0


def test_progress_is_told_round_by_round() -> None:
    told: list[tuple[int, int]] = []
    compare({"a": lambda: None}, clock=HandClock(), repeats=3, progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_misuse_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="variants is empty"):
        compare({})
    with pytest.raises(InvalidArgument, match="repeats is 0"):
        compare({"a": lambda: None}, repeats=0)
    with pytest.raises(InvalidArgument, match="calls is 0"):
        compare({"a": lambda: None}, calls=0)
    with pytest.raises(InvalidArgument, match="clock is 'sundial'"):
        compare({"a": lambda: None}, clock="sundial")  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgument, match="clock is 'graph'"):
        compare({"a": lambda: None}, clock="graph")
    result = compare({"a": lambda: None}, clock=HandClock(), repeats=1)
    with pytest.raises(InvalidArgument, match="must be one of a"):
        result.ratio("a", "b")
