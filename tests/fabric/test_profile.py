"""A quick profile of this machine's CPU ranks: complete, plausible, and readable as a machine file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from undertow.fabric import local_ranks
from undertow.fabric.environment import usable_cores
from undertow.fabric.launch import launch
from undertow.fabric.profile import Effort, _counts
from undertow.plan.machine import Machine
from undertow.plan.plan import OPERATORS
from undertow.plan.problem import Problem
from undertow.plan.search import ranked
from undertow.report.machine import measure_rank, render
from undertow.report.tables import plain

PACE = 20e6  # bytes per second: far below what any machine copies at, so the pace is what is measured


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return launch(
        measure_rank, 2, "cpu", args=(True, False), env={"UNDERTOW_DMA_PACE": "20MB/s,100us", "UNDERTOW_BIND": "0"}
    )


@pytest.fixture(scope="module")
def machine(measured: list[dict[str, Any]]) -> Machine:
    return Machine.from_dict(measured[0])


def test_all_ranks_found_the_same(measured: list[dict[str, Any]]) -> None:
    first, second = ({**one, "environment": None} for one in measured)
    assert first == second


def test_it_survives_its_file(machine: Machine, tmp_path: Path) -> None:
    machine.save(tmp_path / "machine.toml")
    assert Machine.load(tmp_path / "machine.toml") == machine


def test_it_says_what_it_was_measured_on(machine: Machine) -> None:
    assert (machine.device, machine.ranks, machine.shares_device) == ("cpu", 2, False)
    assert {"date", "torch", "undertow", "python", "cores"} <= set(machine.environment)
    assert machine.gemm.workers == "threads"
    assert machine.gemm.points[-1][0] == usable_cores()
    assert 1e-8 < machine.launch_seconds < 1e-2
    assert 1e-7 < machine.stream_seconds < 1e-1


def test_every_lane_has_its_curve(machine: Machine) -> None:
    assert set(machine.lanes) == {"net", "peer", "dma"}
    sizes = Effort.fitting("cpu", quick=True).sizes
    for lane in machine.lanes.values():
        measured_sizes = tuple(size for size, _ in lane.points)
        assert measured_sizes == sizes[: len(measured_sizes)]
        assert lane.gemm_slowdown >= 1
        assert lane.lane_slowdown >= 1


def test_an_emulated_lane_is_as_fast_as_its_pace_and_says_so(machine: Machine) -> None:
    dma = machine.lane("dma")
    assert dma.emulated
    assert "emulated" in dma.description
    assert not machine.lane("peer").emulated
    assert dma.latency >= 100e-6
    assert 0.2 * PACE < dma.bandwidth(1 << 20) <= 1.05 * PACE


def test_the_planner_finds_what_it_needs(machine: Machine) -> None:
    assert set(machine.collectives) == set(OPERATORS)
    for lanes in machine.collectives.values():
        assert set(lanes) == {"net", "peer", "dma"}
        for points in lanes.values():
            assert points[0][0] == 16 << 10
            assert all(seconds > 0 for _, seconds in points)
    largest, slowest = machine.collectives["matmul_reduce_scatter"]["dma"][-1]
    assert slowest >= 0.9 * (largest / 2 / PACE)  # of two ranks each sends half
    assert machine.interference is not None
    assert {name for name, _ in machine.interference.effects} == {"net", "peer", "dma"}
    assert machine.interference.multiprocessors >= 1
    assert 0 < machine.work.efficiency < 10
    assert machine.work.copy_speed is not None
    problem = Problem.of("matmul_all_reduce", 512, 512, 512, dtype="float32", ranks=2, device="cpu", multiprocessors=1)
    assert all(prediction.total > 0 for _, prediction in ranked(problem, machine, list(machine.lanes)))


def test_it_can_be_shown(machine: Machine) -> None:
    text = plain(render(machine))
    assert "GFLOP/s" in text
    assert "emulated: memcpy" in text


@pytest.mark.parametrize(
    ("most", "step", "wanted"),
    [
        (1, 1, [1]),
        (2, 1, [1, 2]),
        (6, 1, [1, 2, 3, 4, 5, 6]),
        (48, 1, [1, 2, 4, 8, 16, 32, 48]),
        (32, 8, [8, 16, 24, 32]),
        (132, 8, [8, 16, 32, 64, 128, 132]),
    ],
)
def test_worker_counts(most: int, step: int, wanted: list[int]) -> None:
    assert _counts(most, step) == wanted


@pytest.mark.parametrize(
    ("gpus", "cores", "device", "ranks"),
    [
        (0, 1, "auto", 2),
        (0, 3, "auto", 3),
        (0, 64, "auto", 4),
        (1, 64, "auto", 4),
        (8, 64, "auto", 8),
        (8, 2, "cpu", 2),
    ],
)
def test_how_many_ranks(monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, device: str, ranks: int) -> None:
    monkeypatch.setattr(local_ranks.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(local_ranks, "usable_cores", lambda: cores)
    assert local_ranks.default_ranks(device) == ranks
