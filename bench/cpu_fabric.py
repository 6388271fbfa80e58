"""The CPU fabric against its bars: latency of small puts and signals, bandwidth of large puts, two processes.

    one way   rank 0 puts 4 KB and signals, rank 1 waits and reads; then the other way round; half of the round trip
    ping-pong rank 0 adds to rank 1's signal and waits for its own; rank 1 the reverse; the whole round trip
    64 MB     rank 0 puts into rank 1's memory and signals; beside it, in the same rounds, one thread's memcpy from the
              same source to shared memory of rank 0's own (both destinations are memfd pages, touched before)

The bars are for two free cores. A sample in which the scheduler took a core away from either rank says nothing about
the fabric, so it is taken again; how many were is part of the result.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import undertow as ut
from undertow.fabric.cpu import CpuSignals
from undertow.fabric.group import Group
from undertow.fabric.timer import Comparison, Estimate, compare

SMALL = 4 << 10
LARGE = 64 << 20
ATTEMPTS = 200
"""Tries for an undisturbed sample before a disturbed one is taken as it is: a busy machine must not stop the run."""

ONE_WAY = "4 KB put + signal + wait + read"
PING_PONG = "signal ping-pong"
LANE = "4 KB over lane peer, send + receive + free"
PUT = "64 MB put + signal + wait"
LANE_PUT = "64 MB over lane peer, send + receive + free"
MEMCPY = "64 MB memcpy, one thread"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `bar` is a limit on `value` (`at_most` or not); None where a figure is only reported."""

    name: str
    value: Estimate
    unit: str
    bar: float | None = None
    at_most: bool = True

    @property
    def good(self) -> bool:
        if self.bar is None:
            return True
        return self.value.median <= self.bar if self.at_most else self.value.median >= self.bar

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        return f"{'<=' if self.at_most else '>='} {self.bar:g}  {'ok' if self.good else 'MISSED'}"


class UndisturbedClock:
    """Wall time of samples in which no rank was preempted. Every rank decides alike, from switches reduced by maximum.

    The kernel counts a thread's involuntary switches; waits that give the core away by themselves are not among them.
    """

    name = "wall, undisturbed"
    default_calls = 1

    def __init__(self, group: Group) -> None:
        self._group = group
        self.taken = 0
        self.disturbed = 0

    def now(self) -> float:
        return time.monotonic()

    def sampler(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        def sample() -> float:
            for _ in range(ATTEMPTS):
                self._group.barrier()
                switches = _involuntary_switches()
                start = time.perf_counter_ns()
                for _ in range(calls):
                    call()
                seconds = (time.perf_counter_ns() - start) * 1e-9 / calls
                self.taken += 1
                if self._group.reduce_max([float(_involuntary_switches() - switches)])[0] == 0:
                    break
                self.disturbed += 1
            return seconds

        return sample


def _involuntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def small(repeats: int) -> dict[str, Any]:
    """Latencies, on one rank of two. Each call is one round trip, so that both ranks see the same order of events."""
    group = ut.init()
    fabric = group.fabric
    count = SMALL // 4
    inbox = fabric.buffer(count, torch.float32)
    signals = fabric.signals(2)
    assert isinstance(signals, CpuSignals)
    lane = fabric.lane("peer")
    source, read = torch.full((count,), float(group.rank)), torch.empty(count)
    me, other = group.rank, 1 - group.rank
    arrivals = [0, 0]  # how far each of my counters is

    def one_way_put() -> None:
        signals.put(other, 0, source, inbox)

    def one_way_take() -> None:
        arrivals[0] += 1
        signals.take(0, arrivals[0], read, inbox, sender=other)

    def ping() -> None:
        signals.add(other, 1)

    def pong() -> None:
        arrivals[1] += 1
        signals.wait(1, arrivals[1], sender=other)

    def send() -> None:
        lane.send(other, source, inbox, 0, 0)

    def receive() -> None:
        read.copy_(lane.receive(other, inbox, 0, count, 0))
        lane.free(other, 0)

    def turn(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
        """Rank 0 gives then takes; rank 1 takes then gives."""
        before, after = (first, second) if me == 0 else (second, first)

        def both() -> None:
            before()
            after()

        return both

    clock = UndisturbedClock(group)
    variants = {ONE_WAY: turn(one_way_put, one_way_take), PING_PONG: turn(ping, pong), LANE: turn(send, receive)}
    found = compare(variants, clock=clock, calls=100, repeats=repeats, reduce_max=group.reduce_max)
    assert bool((read == other).all()), "the bytes read are not the ones put"
    return {"comparison": found.to_json(), "taken": clock.taken, "disturbed": clock.disturbed}


def large(repeats: int) -> dict[str, Any]:
    """Bandwidths. Rank 0 moves the bytes in every variant; rank 1 only waits for those that are for it."""
    group = ut.init()
    fabric = group.fabric
    count = LARGE // 4
    inbox = fabric.buffer(count, torch.float32)  # mine is the memcpy's destination, the peer's is the put's
    signals = fabric.signals(1)
    assert isinstance(signals, CpuSignals)
    lane = fabric.lane("peer")
    source = torch.ones(count)
    inbox.local.fill_(0.0)
    target, origin = inbox.address(group.rank), source.data_ptr()
    is_first = group.rank == 0
    arrivals = 0

    def put() -> None:
        nonlocal arrivals
        arrivals += 1
        if is_first:
            signals.put(1, 0, source, inbox)
        else:
            signals.wait(0, arrivals, sender=0)

    def over_lane() -> None:
        if is_first:
            lane.send(1, source, inbox, 0, 0)
        else:
            lane.receive(0, inbox, 0, count, 0)
            lane.free(0, 0)

    def memcpy() -> None:
        if is_first:
            ctypes.memmove(target, origin, LARGE)

    variants = {PUT: put, LANE_PUT: over_lane, MEMCPY: memcpy}
    found = compare(
        variants, clock="wall", calls=1, repeats=repeats, before=group.barrier, reduce_max=group.reduce_max, warmup=3
    )
    if not is_first:
        assert bool((inbox.local == 1).all()), "the bytes put did not arrive"
    return {"comparison": found.to_json()}


def rows(latency: Comparison, bandwidth: Comparison) -> list[Row]:
    def microseconds(name: str, share: float = 1.0) -> Estimate:
        found = latency.estimate(name)
        return Estimate(*(value * share * 1e6 for value in (found.median, found.low, found.high)))

    def rate(name: str) -> Estimate:
        found = bandwidth.estimate(name)
        return Estimate(*(LARGE / seconds / 1e9 for seconds in (found.median, found.high, found.low)))

    return [
        Row(f"{ONE_WAY}, one way", microseconds(ONE_WAY, 0.5), "us", 3.0),
        Row(f"{PING_PONG}, round trip", microseconds(PING_PONG), "us", 5.0),
        Row(f"{LANE}, one way", microseconds(LANE, 0.5), "us"),
        Row(PUT, rate(PUT), "GB/s"),
        Row(LANE_PUT, rate(LANE_PUT), "GB/s"),
        Row(MEMCPY, rate(MEMCPY), "GB/s"),
        Row("64 MB put / memcpy", bandwidth.speedup(PUT, over=MEMCPY), "", 0.9, at_most=False),
        Row("64 MB over lane peer / memcpy", bandwidth.speedup(LANE_PUT, over=MEMCPY), "", 0.9, at_most=False),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = Path("bench/results") / f"cpu_fabric_{datetime.now(UTC):%Y-%m-%d}.json"
    parser.add_argument("--out", nargs="?", type=Path, const=named, help=f"write JSON; without a value to {named}")
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    small_result = ut.launch(small, 2, device="cpu", args=(options.repeats,), deadline=30)[0]
    large_result = ut.launch(large, 2, device="cpu", args=(max(10, options.repeats // 4),), deadline=30)[0]
    latency = Comparison.from_json(small_result["comparison"])
    bandwidth = Comparison.from_json(large_result["comparison"])
    table = rows(latency, bandwidth)
    width = max(len(row.name) for row in table)
    for row in table:
        figures = f"{row.value.median:8.2f} [{row.value.low:.2f}, {row.value.high:.2f}] {row.unit}"
        print(f"{row.name:<{width}}  {figures:<32} {row.verdict}".rstrip())
    taken, disturbed = small_result["taken"], small_result["disturbed"]
    print(f"Samples of latency: {taken}, of which {disturbed} were taken again because a rank had lost its core.")
    if options.out is not None:
        summary = [{**asdict(row), "good": row.good} for row in table]
        document = {"rows": summary, "latency": small_result, "bandwidth": large_result}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
        print(f"Written: {options.out}")
    return 0 if all(row.good for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
