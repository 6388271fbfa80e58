"""Schedules without a program run in one process, and compared with what their contract says must come out."""

from __future__ import annotations

import numpy as np
from in_process import Call, Machine, lengths_of, random_inputs

from undertow.collective.language import INPUT, OUTPUT
from undertow.collective.schedule import Schedule

STRIDE = 64  # bytes of a tile of scratch


def some_calls(schedule: Schedule, tiles: tuple[int, ...] = (1, 3)) -> list[Call]:
    """Calls whose chunks are so many tiles long, less a little."""
    contract = schedule.contract
    return [Call((contract.factor * (16 * count - 4),) * contract.spans) for count in tiles]


def run_exactly(schedule: Schedule, seed: int = 1, runs: int = 2, tiles: tuple[int, ...] = (1, 3)) -> None:
    """Some calls in a row, in `runs` orders of events; every element of every output is compared."""
    calls = some_calls(schedule, tiles)
    random = np.random.default_rng(seed)
    inputs = [random_inputs(schedule, call, random) for call in calls]
    longest = max(
        int(lengths_of(schedule.contract, call, rank, buffer).sum())
        for call in calls
        for rank in range(schedule.ranks)
        for buffer in (INPUT, OUTPUT)
    )
    machine = Machine(schedule, STRIDE, 4 * longest + 128)
    for order in range(seed, seed + runs):
        outputs = machine.run(calls, inputs, order, False)
        for number, call in enumerate(calls):
            compare(schedule, call, inputs[number], outputs[number])


def compare(schedule: Schedule, call: Call, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
    contract = schedule.contract
    given = []
    for rank, values in enumerate(inputs):
        ends = np.cumsum(lengths_of(contract, call, rank, INPUT)).tolist()
        given += [values[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    for rank in range(schedule.ranks):
        ends = np.cumsum(lengths_of(contract, call, rank, OUTPUT)).tolist()
        totals = contract.after[contract.first_output[rank] : contract.first_output[rank + 1]].tolist()
        for chunk, (begin, end, total) in enumerate(zip([0, *ends], ends, totals, strict=False)):
            if total < 0:
                continue
            items = contract.total_items[contract.total_start[total] : contract.total_start[total + 1]]
            wanted = sum(given[item] for item in items)
            found = outputs[rank][begin:end]
            assert (found == wanted).all(), f"{schedule.name}: chunk {chunk} of rank {rank} is wrong ({call})"
