"""Rank functions for the fused grain: plans nobody would choose, options of the operators, many calls in a row."""

from __future__ import annotations

import dataclasses
import random

import matmul_suite as suite
import torch

import undertow as ut
from undertow.errors import StrategyUnavailable
from undertow.ops import choose
from undertow.ops import matmul_all_reduce as reduce
from undertow.ops import matmul_reduce_scatter as scatter
from undertow.plan import fused
from undertow.plan.defaults import fused_plan
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem


def random_plan(problem: Problem, chance: random.Random) -> Plan:
    """Any tile, group of bands and piece that fits; where rows are few, perhaps all ranks sum."""
    tile = chance.choice((1, 2, 3, 8, 16, 33, 64)), chance.choice((1, 5, 8, 16, 64))
    split = 0
    if problem.operator == "matmul_all_reduce" and problem.m <= 33 and chance.random() < 0.5:
        split = chance.choice((1, 2, 3))
        tile = max(1, problem.m), tile[1]
    plan = dataclasses.replace(
        fused_plan(problem, "peer"), tile=tile, group_bands=chance.randint(1, 9), split=split,
        piece=max(chance.choice((1, 3, 8, 64)), -(-problem.k // fused.LINE)),
    )  # fmt: skip
    plan.check(problem)
    return plan


def random_plans(seed: int, count: int) -> dict[str, int]:
    """`count` cases, each with a plan of its own; how many there were of each form."""
    group = ut.init()
    chance, forms = random.Random(seed), dict.fromkeys((fused.SCATTER, fused.GATHER, fused.DECODE), 0)
    real = choose.default_plan

    turn = 0

    def planned(problem: Problem, grain: str, lane: str) -> Plan:
        # K differs between ranks of all but all_gather: the plan must not depend on it.
        asked = problem if problem.operator == "all_gather_matmul" else dataclasses.replace(problem, k=64)
        plan = random_plan(asked, random.Random(seed + turn))
        forms[fused.form(problem, plan)] += 1
        return plan

    choose.default_plan = planned
    try:
        for turn in range(count):  # noqa: B007 - read above
            operator, dtype = chance.choice(list(suite.OPERATORS)), chance.choice(suite.CPU_DTYPES)
            shape = chance.choice(suite.SHAPES)
            suite.verify(group, suite.Case(operator, "fused:peer", dtype, shape, chance.randrange(1 << 30)))
    finally:
        choose.default_plan = real
    return forms


def mixed_calls(seed: int, count: int) -> dict[str, int]:
    """`count` calls in a row with random sizes, strategies and operators; how many of each grain."""
    group, chance = ut.init(), random.Random(seed)
    strategies, grains = suite.strategies(), dict.fromkeys(suite.GRAINS, 0)
    fewer = [one for one in strategies if not one.endswith("net")]  # those over the network are slow and many
    for _ in range(count):
        strategy = "fused:peer" if chance.random() < 0.5 else chance.choice(fewer)
        shape = chance.randint(0, 70), chance.randint(1, 40), chance.randint(1, 24)
        operator, dtype = chance.choice(list(suite.OPERATORS)), chance.choice(suite.CPU_DTYPES)
        suite.verify(group, suite.Case(operator, strategy, dtype, shape, chance.randrange(1 << 30)))
        grains[strategy.partition(":")[0]] += 1
    return grains


def norms_and_residuals() -> bool:
    """residual and norm after a fused call give what torch gives of the serial one."""
    group = ut.init()
    for m, n, seed in ((7, 12, 1), (32, 40, 2), (61, 8, 3)):
        case = suite.Case("", "", torch.float32, (m, n, 9), seed)
        xs, ws = suite._factors(group, case)
        norm = torch.nn.LayerNorm(n)
        whole = reduce.reference(xs, ws)
        for call, want in (
            (ut.matmul_all_reduce, whole),
            (ut.matmul_reduce_scatter, scatter.reference(xs, ws)[group.rank]),
        ):
            residual = torch.arange(want.numel(), dtype=torch.float32).view(want.shape) % 5
            summed = torch.relu(want + 1) + residual
            with torch.no_grad():
                y = call(
                    xs[group.rank], ws[group.rank], bias=torch.ones(n), activation="relu", residual=residual, norm=norm,
                    group=group, strategy="fused",
                )  # fmt: skip
                assert torch.equal(residual, summed)
                torch.testing.assert_close(y, norm(summed))
    return True


def explained() -> tuple[str, str, str]:
    """The plan's name, the reason, and what is said where no tile can be put."""
    group = ut.init()
    x, w = torch.ones(8, 3), torch.ones(3, 5)
    ut.matmul_reduce_scatter(x, w, group=group, strategy="fused")
    told = ut.explain()
    assert told is not None
    said = ""
    try:
        ut.all_gather_matmul(x, w, group=group, strategy="fused:dma")
    except StrategyUnavailable as error:
        said = str(error)
    return told.plan.name, told.choice.reason, said


def a_missing_word_is_an_error() -> str:
    """A rank that never tells its tiles leaves the others no hang but an error at the deadline."""
    from undertow.ops import fused_cpu

    group = ut.init()
    if group.rank == 1:
        fused_cpu._Turn.tell = lambda self, rank, word: None  # type: ignore[method-assign]
    try:
        ut.matmul_reduce_scatter(torch.ones(4, 3), torch.ones(3, 5), group=group, strategy="fused")
    except ut.UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return "not noticed"
