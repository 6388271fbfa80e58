"""Random programs: what the reference finds right compiles and runs right in every order of events that is tried, and
what it finds wrong is refused. A failure names the seed: `random_program(seed)` is the program."""

from __future__ import annotations

import random

import pytest
from in_process import Call, Machine, verify
from random_programs import DTYPES, Made, random_options, random_program, random_spans, sequence_of

from undertow.collective.reference import wrong_outputs
from undertow.errors import ProgramRefused

BATCH = 20
LONGEST = 1 << 13  # bytes of a user buffer
# A program may be right and still be refused, if only by these:
READS_NOTHING = "is read before anything was written there"
OVERLAPS = "what is read and what is written overlap there"
UNEQUAL = "holds a chunk of another length class"


def runs_right(made: Made, target: str, dice: random.Random, seed: int, runs: int) -> None:
    """Compile in a random way and run calls of random sizes and types in a row, in several orders of events."""
    options = random_options(dice, target)
    schedule = made.program().compile(in_place=made.in_place, **options)
    trace = made.program().trace()
    calls = [
        Call(random_spans(made.contract, made.in_place, dice), dice.choice(DTYPES), dice.choice([None, None, 16, 32]))
        for _ in range(dice.randint(1, 3))
    ]
    machine = Machine(schedule, dice.choice([48, 64, 160]), LONGEST)
    try:
        verify(trace, schedule, calls, seed, machine, runs)
    except AssertionError as error:
        raise AssertionError(f"{error}, with {options}") from error


def check(seed: int, runs: int) -> tuple[int, int]:
    """One program and two neighbours of it. How many were right and how many were wrong."""
    dice = random.Random(~seed)
    made = random_program(seed)
    assert wrong_outputs(made.program().trace(), made.in_place) == []
    for target in ("direct", "staged"):
        runs_right(made, target, dice, seed, runs)
    right, wrong = 1, 0
    for _ in range(2):
        other = made.mutated(dice)
        target = dice.choice(["direct", "staged"])
        if other.steps == made.steps:
            continue
        if wrong_outputs(other.program().trace(), made.in_place):
            wrong += 1
            with pytest.raises(ProgramRefused):
                other.program().compile(in_place=made.in_place, **random_options(dice, target))
            continue
        try:
            runs_right(other, target, dice, seed, 1)
            right += 1
        except ProgramRefused as error:
            if not any(one in str(error) for one in (READS_NOTHING, OVERLAPS, UNEQUAL)):
                raise
    return right, wrong


def check_all(seeds: range, runs: int) -> None:
    right = wrong = 0
    for seed in seeds:
        try:
            found = check(seed, runs)
        except Exception as error:
            steps = "\n  ".join(sequence_of(random_program(seed)))
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n  {steps}") from error
        right, wrong = right + found[0], wrong + found[1]
    assert right >= len(seeds)
    assert wrong >= len(seeds) // 4, "too few of the mutated programs were wrong to say anything"


@pytest.mark.parametrize("batch", range(10))
def test_random_programs(batch: int) -> None:
    check_all(range(batch * BATCH, (batch + 1) * BATCH), runs=8)


@pytest.mark.nightly
@pytest.mark.parametrize("batch", range(50))
def test_many_random_programs(batch: int) -> None:
    check_all(range(1000 + batch * 200, 1000 + (batch + 1) * 200), runs=8)
