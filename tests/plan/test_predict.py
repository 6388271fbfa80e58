"""The predictor: its pipeline against a simulation by small steps, its terms against hand-made arithmetic."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import plan_machines as machines
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.errors import InvalidArgument
from undertow.plan import pipeline
from undertow.plan.defaults import default_plan
from undertow.plan.machine import Machine
from undertow.plan.matmuls import matmul_seconds, matmul_times, tile_seconds
from undertow.plan.pipeline import Step
from undertow.plan.plan import OPERATORS, Plan, Share, split
from undertow.plan.predict import collective_seconds, predict
from undertow.plan.work import Work

LENGTH = st.floats(0.1, 3)
SLOW = st.floats(1, 3)


def by_small_steps(total: float, steps: list[Step], tick: float = 1e-3) -> tuple[float, float]:
    """The meaning: a clock that ticks, a producer and a consumer, each slowed while the other works."""
    now = work = 0.0
    producer_end = 0.0
    for step in steps:
        while work < min(step.ready, total) - 1e-9:
            now, work = now + tick, work + tick
        left = step.cost
        while left > 1e-9:
            busy = work < total - 1e-9
            work += tick / step.producer_slowdown if busy else 0
            left -= tick / (step.consumer_slowdown if busy else 1)
            now += tick
            producer_end = now if busy else producer_end
    while work < total - 1e-9:
        now, work = now + tick, work + tick
        producer_end = now
    return producer_end, now


@given(st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=4), SLOW, SLOW)
def test_the_pipeline_is_what_a_ticking_clock_shows(parts: list[tuple[float, float]], slow: float, lane: float) -> None:
    ready = list(itertools.accumulate(length for length, _ in parts))
    steps = [Step(moment, cost, slow, lane) for moment, (_, cost) in zip(ready, parts, strict=True)]
    producer, consumer = pipeline.run(ready[-1], steps)
    ticked = by_small_steps(ready[-1], steps)
    assert max(producer, consumer) == pytest.approx(max(ticked), abs=0.03)
    time = lag = np.zeros(1)
    for step in steps:
        time, lag = pipeline.advance(time, lag, ready[-1], step)
    assert (ready[-1] + float(lag[0]), float(time[0])) == pytest.approx((producer, consumer))


@given(SLOW, SLOW, st.floats(0, 2), st.floats(0, 2), st.floats(0, 1), st.floats(0, 1), LENGTH, LENGTH)
def test_the_end_is_monotone_where_overlap_gains(
    slow: float, lane: float, time: float, lag: float, later: float, more: float, cost: float, total: float
) -> None:
    if 1 / slow + 1 / lane < 1:
        return
    step = Step(total / 2, cost, slow, lane)
    assert (
        pipeline.advance(time, lag, total, step)[0] <= pipeline.advance(time + later, lag + more, total, step)[0] + 1e-9
    )


def test_a_signal_is_hidden_behind_a_busy_lane_and_a_launch_is_not() -> None:
    steps = [Step(1, 5, signal=0.5, launch=0.25), Step(2, 1, signal=0.5, launch=0.25)]
    assert pipeline.run(2, steps) == (2, 1 + 0.5 + 0.25 + 5 + 0.25 + 1)


def test_waves_round_up() -> None:
    machine, problem = machines.quiet(), machines.problem(m=4096, n=4096, k=4096)
    assert matmul_seconds(problem, machine, 32, 4096) == pytest.approx(0.7e-3)  # the measured one
    tile = tile_seconds(problem, machine, (128, 256), 32)
    assert tile == pytest.approx(0.7e-3 / 16)  # 512 tiles on 32 SMs
    one_more = machines.problem(m=4096 + 1, n=4096, k=4096)
    assert matmul_seconds(one_more, machine, 32, 4097) == pytest.approx(17 * tile)
    assert matmul_seconds(problem, machine, 32, 0) == 0
    wider = machines.problem(m=4096, n=4096, k=4096, dtype="float32")
    assert tile_seconds(wider, machine, (128, 256), 32) == pytest.approx(2 * tile)


def test_tiles_have_an_overhead_and_memory_a_floor() -> None:
    problem = machines.problem(m=4096, n=4096, k=4096)
    slower = dataclasses.replace(machines.quiet(), work=Work(overhead=1e-5, efficiency=0.5))
    assert tile_seconds(problem, slower, (128, 256), 32) == pytest.approx(1e-5 + 2 * 0.7e-3 / 16)
    decode = machines.problem(m=1, n=8192, k=8192)
    reading = dataclasses.replace(machines.quiet(), work=Work(copy_speed=5e11))
    assert matmul_seconds(decode, reading, 32, 1) == pytest.approx(8192 * 8192 * 2 / 1e12, rel=0.01)


@pytest.mark.parametrize(
    ("operator", "factor", "phases"),
    [("matmul_all_reduce", 0.75, 2), ("matmul_reduce_scatter", 0.75, 1), ("matmul_all_to_all", 0.75, 1)],
)
def test_bytes_of_a_collective(operator: str, factor: float, phases: int) -> None:
    machine, nbytes = machines.machine(), 1 << 24
    problem = machines.problem(operator)
    seconds, speed = collective_seconds(problem, machine, "dma", nbytes)
    assert seconds == pytest.approx(phases * machine.lane("dma").seconds(int(factor * nbytes)))
    assert speed == pytest.approx(phases * factor * nbytes / seconds)
    assert collective_seconds(machines.problem(operator, ranks=1), machine, "dma", nbytes) == (0, 0)
    measured = dataclasses.replace(machine, collectives={operator: {"dma": ((1 << 24, 5e-3),)}})
    assert collective_seconds(problem, measured, "dma", nbytes)[0] == 5e-3


def test_serial_is_the_sum() -> None:
    machine, problem = machines.quiet(), machines.problem()
    serial = predict(problem, default_plan(problem, "serial", "dma"), machine)
    whole = predict(problem, Plan("serial", "dma", ((0, problem.m),)), machine)
    assert serial == whole
    assert serial.total == pytest.approx(serial.gemm + serial.communication)
    assert serial.exposed == pytest.approx(serial.communication)


@pytest.mark.parametrize("operator", OPERATORS)
def test_signaled_lies_between_the_ideal_and_serial(operator: str) -> None:
    machine, problem = machines.machine(), machines.problem(operator, k=3584)
    serial = predict(problem, default_plan(problem, "serial", "dma"), machine)
    signaled = predict(problem, default_plan(problem, "signaled", "dma"), machine)
    chunked = predict(problem, default_plan(problem, "chunked", "dma"), machine)
    ideal = max(serial.gemm, serial.communication)
    assert ideal < signaled.total < serial.total
    assert ideal < chunked.total < serial.total


def test_two_parcels_by_hand() -> None:
    machine, problem = machines.quiet(), machines.problem(m=4096, n=4096, k=4096)
    plan = Plan("signaled", "dma", split(512, 2), tile=(128, 256))
    half = collective_seconds(problem, machine, "dma", problem.result_bytes / 2)[0]
    found = predict(problem, plan, machine)
    assert found.gemm == pytest.approx(0.7e-3)
    assert found.total == pytest.approx(0.35e-3 + 2 * half)  # the lane is the longer side
    packed = predict(problem, dataclasses.replace(plan, layout="packed"), machine)
    assert packed.total - found.total == pytest.approx(packed.unpack)
    assert packed.unpack == pytest.approx(problem.result_bytes / (2e12 / 4))


def test_gathered_rows_are_waited_for() -> None:
    machine = machines.quiet()
    problem = machines.problem("all_gather_matmul", m=4096, n=4096, k=4096)
    plan = Plan("signaled", "dma", split(512, 4), tile=(128, 256), order="rotated")
    plan.check(problem)
    found = predict(problem, plan, machine)
    each = machine.lane("dma").seconds(1024 * 4096 * 2)
    assert found.communication == pytest.approx(3 * each)
    assert found.total == pytest.approx(3 * each + 0.7e-3 / 4)  # the last shard's tiles after its rows
    more_compute = machines.problem("all_gather_matmul", m=4096, n=65536, k=4096)
    hidden = predict(more_compute, dataclasses.replace(plan, parcels=split(512 * 16, 4)), machine)
    assert hidden.total == pytest.approx(hidden.gemm)


def test_contention_and_fewer_sms_cost_what_the_model_says() -> None:
    problem = machines.problem(k=20480)  # the matmul is much the longer side
    plan = Plan("signaled", "peer", split(2048, 8), tile=(128, 256))
    quiet, noisy = machines.quiet(), machines.machine()
    assert predict(problem, plan, noisy).total > predict(problem, plan, quiet).total
    half = dataclasses.replace(plan, share=Share(multiprocessors=16, communication_ctas=16))
    assert predict(problem, half, quiet).gemm == pytest.approx(2 * predict(problem, plan, quiet).gemm)


def test_skew_and_signals_are_paid() -> None:
    problem, plan = machines.problem(), Plan("signaled", "dma", split(2048, 4), tile=(128, 256))
    usual = predict(problem, plan, machines.machine()).total
    for costly in (Work(skew=1e-3), Work(signal=1e-3)):
        assert predict(problem, plan, dataclasses.replace(machines.machine(), work=costly)).total > usual + 0.9e-3


def test_curves_over_k_and_rows() -> None:
    """What was measured goes between points by the logarithm, beyond them as the nearest; without curves as before."""
    work = Work(tiles=((1024, 1.0), (4096, 1.4)), library=((1024, 1.1),), rows=((192, 2.0), (768, 1.0)))
    machine = dataclasses.replace(machines.quiet(), work=work)
    for k, factor in ((512, 1.0), (1024, 1.0), (2048, 1.2), (4096, 1.4), (20480, 1.4)):
        problem = machines.problem(k=k)
        plain = tile_seconds(problem, machines.quiet(), (128, 256), 32)
        assert tile_seconds(problem, machine, (128, 256), 32) == pytest.approx(factor * plain)
    problem, launch = machines.problem(k=2048), machines.quiet().launch_seconds
    for rows, factor in ((192, 2.2), (384, 1.65), (768, 1.1), (8192, 1.1)):
        plain = matmul_seconds(problem, machines.quiet(), 32, rows) - launch
        assert matmul_seconds(problem, machine, 32, rows) - launch == pytest.approx(factor * plain)
    assert Machine.from_dict(machine.to_dict()) == machine
    wrong = machine.to_dict()
    wrong["work"]["stagger"] = 1.0
    with pytest.raises(InvalidArgument, match=r"work\.stagger is 1\.0, but must be below 1"):
        Machine.from_dict(wrong)


def test_parcels_of_one_band_read_all_of_w_in_every_wave() -> None:
    """8192 columns are 32 tiles: a wave of 32 workers over one band reads 32 blocks of w, over 8 bands 4 and 8 of x."""
    problem = machines.problem("matmul_reduce_scatter", k=8192)
    plan = Plan(
        "signaled", "dma", ((0, 2048),), Share(multiprocessors=32), tile=(128, 256), group_bands=8, order="interleaved"
    )
    quick = dataclasses.replace(machines.quiet(), work=Work(read_speed=1e15))
    slow = dataclasses.replace(machines.quiet(), work=Work(read_speed=6e11))
    one = tile_seconds(problem, slow, plan.tile or (0, 0), 32)
    for bands, blocks in ((1, 128 + 32 * 256), (2, 256 + 16 * 256), (8, 1024 + 4 * 256), (64, 1024 + 4 * 256)):
        bounds = [*range(0, 2048, 32 * bands), 2048]
        wave = max(one, blocks * 8192 * 2 / 6e11)
        found = sum(matmul_times(problem, plan, slow, bounds)) - slow.launch_seconds
        assert found == pytest.approx(64 * wave)
        assert sum(matmul_times(problem, plan, quick, bounds)) == pytest.approx(64 * one + quick.launch_seconds)
