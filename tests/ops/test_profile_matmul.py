"""What the profile makes of times of matmuls: with the times of a known machine it finds that machine again."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

import plan_machines as machines

from undertow.ops import profile_matmul, profile_timing
from undertow.ops.profile_timing import Spread
from undertow.plan.machine import Machine
from undertow.plan.matmuls import matmul_seconds, matmul_times
from undertow.plan.search import frames
from undertow.plan.work import Work

INNER, ROWS = (64, 256, 1024), (64, 192, 512)


def truth() -> Machine:
    """Slower at large k, much slower of 192 rows."""
    work = Work(
        overhead=4e-6, efficiency=0.9, tiles=((64, 1.0), (1024, 1.3)), library=((64, 1.0), (1024, 1.2)),
        rows=((64, 1.1), (192, 2.0), (512, 1.0)),
    )  # fmt: skip
    return dataclasses.replace(machines.quiet(), work=work)


def found(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Machine:
    """The machine with the costs that are found when matmuls take what `machine` says."""
    for name, value in (("_M", 2048), ("_N", 512), ("_INNER", INNER), ("_ROWS", ROWS), ("_ROWS_INNER", 256)):
        monkeypatch.setattr(profile_matmul, name, value)
    fabric = types.SimpleNamespace(multiprocessors=32, group=types.SimpleNamespace(rank=0))
    group: Any = types.SimpleNamespace(size=4, device=torch.device("cpu"), fabric=fabric)
    order = [(kind, k) for k in INNER for kind in ("library", "tiles")] + [("rows", rows) for rows in ROWS]
    asked = iter(order)

    def timed(call: Callable[[], object]) -> Spread:
        kind, size = next(asked)
        if kind == "rows":
            one = matmul_seconds(machines.problem(m=size, n=512, k=256), machine, 32, size)
            return Spread(profile_matmul._IN_A_ROW * one, 0.0)
        problem = machines.problem(m=2048, n=512, k=size)
        if kind == "library":
            return Spread(matmul_seconds(problem, machine, 32, 2048), 0.6 + 0.1 * INNER.index(size))
        plan = frames(problem, "dma")[0]
        return Spread(sum(matmul_times(problem, plan, machine, [0, 1])) - machine.launch_seconds, 0.0)

    costs = profile_matmul.costs(group, dataclasses.replace(machine, work=Work()), timed)
    assert next(asked, None) is None
    return dataclasses.replace(machine, work=costs)


def test_what_was_measured_is_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = truth()
    again = found(monkeypatch, machine)
    assert again.work.read_speed is not None
    assert Machine.from_dict(again.to_dict()) == again
    assert again.work.stagger == pytest.approx(0.7)  # the median
    again = dataclasses.replace(again, work=dataclasses.replace(again.work, read_speed=None))  # no memory bounds these
    for k in INNER:
        problem = machines.problem(m=2048, n=512, k=k)
        plan = frames(problem, "dma")[0]
        want = sum(matmul_times(problem, plan, machine, [0, 1]))
        assert sum(matmul_times(problem, plan, again, [0, 1])) == pytest.approx(want, rel=0.01)
        want = matmul_seconds(problem, machine, 32, 2048)
        assert matmul_seconds(problem, again, 32, 2048) == pytest.approx(want, rel=0.01)
    for rows in ROWS:
        problem = machines.problem(m=rows, n=512, k=256)
        want = matmul_seconds(problem, machine, 32, rows)
        assert matmul_seconds(problem, again, 32, rows) == pytest.approx(want, rel=0.01)


def test_ranks_with_gpus_of_their_own_are_not_staggered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, dataclasses.replace(truth(), shares_device=False)).work.stagger == 0


def test_the_slowest_rank_counts_and_the_first_round_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times, done = iter([9.0, 4.0, 3.0, 5.0]), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("end")

        def elapsed_time(self, other: Event) -> float:
            return next(times)

    slept: list[int] = []
    monkeypatch.setattr(profile_timing, "_cuda", types.SimpleNamespace(Event=Event, _sleep=slept.append))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def slowest(values: list[float]) -> list[float]:
        """Of another rank, whose calls take half as long."""
        return [max(one, one / 2) for one in values]

    group: Any = types.SimpleNamespace(device="cuda", barrier=lambda: done.append("barrier"), reduce_max=slowest)
    called: list[int] = []
    for ahead in (True, False):
        times = iter([9.0, 4.0, 3.0, 5.0])
        taken = profile_timing.together(group, lambda: called.append(1), lambda: done.append("align"), 3, ahead)
        assert taken.seconds == pytest.approx(4e-3)
        assert taken.stagger == pytest.approx(0.5)
    assert len(slept) == 4
    assert len(called) == 2 * 5  # once to load kernels
    assert done[:5] == ["barrier", "align", "record", "record", "end"]
