"""The model of slowdown: what its equations say, and that `fit` finds the parameters that made the samples."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import plan_machines as machines
import pytest

from undertow.errors import InvalidArgument
from undertow.plan import work
from undertow.plan.interference import Effect, Interference, Run, Sample, fit, fit_runs, together
from undertow.plan.machine import Machine
from undertow.plan.work import KernelSample, Work

TRUTH = Interference(132, (("dma", Effect(0.0, 2e-12, 0.1)), ("peer", Effect(0.8, 1e-13, 0.5))))


def measured(model: Interference, noise: float = 0.0) -> list[Sample]:
    random = np.random.default_rng(7)
    found = []
    for lane in ("dma", "peer"):
        for compute in (64, 96, 132):
            for communication in (0, 8, 24) if lane == "peer" else (0,):
                for speed in (5e9, 2e10, 1e11):
                    wobble = 1 + noise * random.standard_normal(2)
                    gemm = model.gemm_slowdown(lane, speed, compute, communication) * wobble[0]
                    slow = model.lane_slowdown(lane, compute) * wobble[1]
                    found.append(Sample(compute, lane, speed, 2e-3, 2e-3 * gemm, 1e-3, 1e-3 * slow, communication))
    return found


def test_the_equations() -> None:
    assert TRUTH.gemm_slowdown("dma", 5e10, 132) == pytest.approx(1.1)
    assert TRUTH.gemm_slowdown("peer", 0, 120, 12) == 1
    assert TRUTH.gemm_slowdown("peer", 0, 120, 24) == pytest.approx(1 + 0.8 * 12 / 120)
    assert TRUTH.lane_slowdown("peer", 66) == pytest.approx(1.25)
    assert TRUTH.lane_slowdown("net", 132) == 1
    assert TRUTH.gemm_slowdown("net", 1e12, 132) == 1


def test_fit_finds_what_made_the_samples() -> None:
    found = fit(measured(TRUTH))
    assert found.multiprocessors == 132
    for lane, effect in TRUTH.effects:
        assert dataclasses.astuple(found.effect(lane)) == pytest.approx(
            dataclasses.astuple(effect), abs=1e-15, rel=1e-6
        )


def test_fit_under_noise_predicts_the_slowdown() -> None:
    found = fit(measured(TRUTH, noise=0.01), 132)
    for sample in measured(TRUTH):
        wanted = sample.gemm_seconds_beside / sample.gemm_seconds_alone
        said = found.gemm_slowdown(
            sample.lane, sample.lane_bytes_per_second, sample.compute_sms, sample.communication_sms
        )
        assert said == pytest.approx(wanted, rel=0.02)
        slow = sample.lane_seconds_beside / sample.lane_seconds_alone
        assert found.lane_slowdown(sample.lane, sample.compute_sms) == pytest.approx(slow, rel=0.02)


def test_nothing_gets_faster_by_company() -> None:
    faster = [Sample(32, "net", 1e9, 1.0, 0.9, 1.0, 0.95), Sample(16, "net", 2e9, 1.0, 0.8, 1.0, 0.9)]
    assert fit(faster, 32).effect("net") == Effect()
    assert fit([], 32).effects == ()


def test_a_broken_sample_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="sample is Sample"):
        fit([Sample(32, "net", 1e9, 0.0, 0.9, 1.0, 0.95)], 32)


def test_without_a_section_the_lanes_slowdowns_tell_it() -> None:
    machine = machines.machine()
    dma = machine.lane("dma")
    model = machine.slowdowns
    assert model.gemm_slowdown("dma", dma.bandwidth(1 << 28), 32) == pytest.approx(1.03)
    assert model.lane_slowdown("dma", 32) == pytest.approx(1.02)
    assert model.lane_slowdown("peer", 16) == pytest.approx(1.25)


def test_sections_survive_the_file() -> None:
    machine = dataclasses.replace(
        machines.machine(),
        interference=TRUTH,
        work=Work(overhead=1e-6, efficiency=0.97, signal=2e-6, copy_speed=6e11),
        collectives={"matmul_all_reduce": {"dma": ((1024, 1e-4), (1 << 20, 2e-3))}},
    )
    assert Machine.from_dict(machine.to_dict()) == machine
    assert machine.slowdowns is TRUTH


@pytest.mark.parametrize(
    ("section", "value", "said"),
    [
        ("interference", {"lanes": {}}, "without 'multiprocessors'"),
        (
            "interference",
            {"multiprocessors": 4, "lanes": {"dma": {"contention": -1}}},
            "machine.interference.lanes.dma",
        ),
        ("interference", {"multiprocessors": 4, "lanes": {"moon": {}}}, "net, peer, dma"),
        ("work", {"efficiency": 0}, "machine.work.efficiency"),
        ("work", {"skew": "much"}, "machine.work.skew"),
        ("work", {"speed": 1}, "no such key"),
        ("collectives", {"matmul": {}}, "matmul_all_reduce"),
        ("collectives", {"matmul_all_reduce": {"dma": [[2, 1.0], [1, 1.0]]}}, "grow"),
    ],
)
def test_a_mistake_in_an_optional_section_is_refused(section: str, value: object, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        machines.machine(**{section: value})
    assert said in str(caught.value)


def test_the_tile_constants_from_whole_kernels() -> None:
    samples = [
        KernelSample(waves, ideal, waves * (2e-6 + ideal / 0.95))
        for waves in (1, 4, 16)
        for ideal in (1e-5, 4e-5, 2e-4)
    ]
    assert work.fit(samples) == pytest.approx((2e-6, 0.95))
    overhead, efficiency = work.fit([KernelSample(1, 1e-5, 1.2e-5), KernelSample(1, 2e-5, 2.5e-5)])
    assert overhead == 0
    assert 0.7 < efficiency < 1
    with pytest.raises(InvalidArgument, match="two or more"):
        work.fit(samples[:1])


# -- whole runs --------------------------------------------------------------------------------------------------------

MEMORY = Interference(
    33, (("dma", Effect(0.0, 1e-11, 0.05, 4e-11, 0.6)), ("peer", Effect(0.9, 1e-13, 0.4, 8e-13, 1.5)))
)


def runs(model: Interference, noise: float = 0.0) -> list[Run]:
    random = np.random.default_rng(3)
    found = []
    for lane, ctas, speed in (("dma", 0, 1e10), ("peer", 32, 4e11), ("peer", 8, 2e11)):
        for memory in (0.1, 0.9):
            for ratio in (0.2, 0.5, 0.9, 1.1, 2.0, 5.0):
                run = Run(lane, 1e-3, 1e-3 * ratio, 1.0, 33, ctas, speed, memory)
                seconds = model.seconds(run) * math.exp(noise * random.standard_normal())
                found.append(dataclasses.replace(run, seconds=seconds))
    return found


def test_together_by_steps() -> None:
    """The equation against the two sides worked off in small steps of time."""
    for compute, lane, slow, slow_lane in ((1.0, 2.0, 1.5, 1.2), (3.0, 1.0, 1.1, 4.0), (1.0, 1.0, 2.0, 2.0)):
        left, left_lane, now, step = compute, lane, 0.0, 1e-4
        while left > 0 or left_lane > 0:
            both = left > 0 and left_lane > 0
            left -= step / (slow if both else 1) if left > 0 else 0
            left_lane -= step / (slow_lane if both else 1) if left_lane > 0 else 0
            now += step
        assert together(compute, lane, slow, slow_lane) == pytest.approx(now, rel=1e-3)
    assert together(1.0, 1.0, 1.0, 1.0) == 1.0
    assert together(1.0, 0.5, 2.0, 2.0) == pytest.approx(1.5)  # nothing gained


def test_fit_of_whole_runs_predicts_those_it_has_not_seen() -> None:
    known = runs(MEMORY, noise=0.01)
    model = fit_runs(known[::2], 33)
    for run in runs(MEMORY)[1::2]:
        assert model.seconds(run) == pytest.approx(run.seconds, rel=0.05)
    assert fit_runs([], 33).effects == ()
    with pytest.raises(InvalidArgument, match="run is Run"):
        fit_runs([dataclasses.replace(known[0], seconds=0.0)], 33)


def test_what_lives_on_memory_is_slowed_more() -> None:
    assert MEMORY.gemm_slowdown("dma", 1e10, 33, memory=1.0) == pytest.approx(1.5)
    assert MEMORY.gemm_slowdown("dma", 1e10, 33) == pytest.approx(1.1)
    assert MEMORY.lane_slowdown("dma", 33, memory=1.0) == pytest.approx(1.65)
    found = fit([dataclasses.replace(one, memory=memory) for memory in (0.0, 1.0) for one in measured(TRUTH)], 132)
    assert found.effect("peer").per_byte_of_memory == pytest.approx(0.0, abs=1e-15)
