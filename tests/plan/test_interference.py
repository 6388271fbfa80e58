"""The model of slowdown: what its equations say, and that `fit` finds the parameters that made the samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import plan_machines as machines
import pytest

from undertow.errors import InvalidArgument
from undertow.plan import work
from undertow.plan.interference import Effect, Interference, Sample, fit
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
