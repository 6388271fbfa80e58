"""Rank functions for strategy "auto" of rows that change ranks: counts differ from call to call and by rank."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import grouped_targets as grouped
import torch
from planner_targets import forget

import undertow as ut
from undertow import settings
from undertow.ops import tuning
from undertow.ops.explain import Explanation
from undertow.ops.machine import identity
from undertow.plan import cache
from undertow.plan.plan import Plan, split
from undertow.plan.problem import Problem

EXPERTS, N, K = 3, 12, 8
OPERATORS = ("leaving", "arriving")
PLANTED = "This plan was put here by a test."
Sizes = list[list[list[int]]]


def said() -> Explanation:
    found = ut.explain()
    assert found is not None
    return found


def sizes_of(busiest: int, ranks: int, seed: int) -> Sizes:
    """One rank has so many rows, the first none at all, the others what chance gives them; blocks are uneven."""
    chance = random.Random(seed)
    sizes = [[[0] * EXPERTS for _ in range(ranks)] for _ in range(ranks)]
    for rank in range(1, ranks):
        for _ in range(busiest if rank == ranks - 1 else chance.randrange(busiest + 1)):
            sizes[rank][chance.randrange(ranks)][chance.randrange(2) * 2] += 1  # the expert between has no rows
    return sizes


def multiply(group: ut.Group, operator: str, sizes: Sizes, experts: int = EXPERTS, **options: Any) -> Explanation:
    """A call whose busiest rank multiplies as many rows as the sizes say, checked bit for bit."""
    if operator == "arriving":  # who multiplies is who receives
        sizes = [list(column) for column in zip(*sizes, strict=True)]
    case = grouped.Case(operator, "auto", torch.float32, experts, 0, N, K, 7)
    xs, ws, _ = grouped.tensors(case, sizes, group.device)
    want = grouped.expected(case, sizes, xs, ws)[group.rank]
    call = ut.matmul_all_to_all if operator == "leaving" else ut.all_to_all_matmul
    got = call(xs[group.rank], ws[group.rank], group_sizes=sizes, group=group, **options)
    assert torch.equal(got, want), f"{operator} {sizes} on rank {group.rank}: {said().plan.name}"
    return said()


def exact(seed: int, count: int) -> int:
    """Uneven and empty groups, bias, activation and `out` while calls are measured and after it."""
    group, chance = ut.init(), random.Random(seed)
    for number in range(count):
        shape = chance.choice((1, 7, 33)), chance.choice((1, 24))
        rows, experts, dtype = (1, 8, 17, 40)[number % 4], chance.choice((1, 2, 5)), chance.choice(grouped.DTYPES)
        for again in (0, 3):  # the same class, other counts, and a bias where there was one
            case = grouped.Case(OPERATORS[number % 2], "auto", dtype, experts, rows, *shape, 3 * number + again)
            grouped.verify(group, case)
            assert said().asked == "auto"
    return count


def gradients(seed: int, count: int) -> int:
    group, chance = ut.init(), random.Random(seed)
    for number in range(count):
        experts, rows, n, k = (chance.choice(some) for some in ((1, 3), (4, 9), (1, 13), (5, 8)))
        case = grouped.Case(
            OPERATORS[number % 2], "auto", torch.float64, experts, rows, n, k, chance.randrange(1 << 30)
        )
        grouped.verify_gradient(group, case)
    return count


def once_for_a_class(operator: str) -> list[tuple[int, str, str, str]]:
    """Calls of several counts: how many choices the group made by then, which plan ran, why, and on which rows."""
    group = ut.init()
    found = []
    for seed, busiest in enumerate((40, 64, 33, 51, 65, 128, 40)):
        explanation = multiply(group, operator, sizes_of(busiest, group.size, seed))
        assert explanation.operator == {"leaving": "matmul_all_to_all", "arriving": "all_to_all_matmul"}[operator]
        found.append((tuning.Known.of(group).made, explanation.plan.digest, explanation.reason, str(explanation)))
    return found


def apart() -> int:
    """Operators and numbers of experts are problems of their own, also where all else is equal; so is none of them."""
    group = ut.init()
    for experts in (1, 2):
        sizes = [[[40 // group.size if one == 0 else 0 for one in range(experts)]] * group.size] * group.size
        for operator in OPERATORS:
            multiply(group, operator, sizes, experts)
    x, w = torch.ones(40 // group.size * group.size, K), torch.ones(K, N)
    for call in (ut.matmul_all_to_all, ut.all_to_all_matmul):
        assert bool((call(x, w, group=group) == K).all())
    return tuning.Known.of(group).made


def caches(folder: str, operator: str) -> dict[str, tuple[str, str]]:
    """Every rank has a cache folder of its own: a plan made for other counts is run where all ranks hold it."""
    group = ut.init()
    os.environ[settings.CACHE_DIR.name] = str(Path(folder) / str(group.rank))
    mirrored = operator == "arriving"
    nobody = [0] * group.size
    problem = Problem.for_splits(
        [[100, *nobody[1:]], *[nobody] * (group.size - 1)], *((K, N) if mirrored else (N, K)), dtype="float32",
        device="cpu", multiprocessors=group.fabric.multiprocessors,
        experts=EXPERTS, mirrored=mirrored,
    )  # fmt: skip
    where = problem, identity(group), tuning._versions(group)
    planted, other = Plan("chunked", "dma", split(100, 5)), Plan("serial", "net", split(100, 1))
    found: dict[str, tuple[str, str]] = {"planted": (planted.digest, PLANTED)}
    for state in ("whole", "one is missing", "one is other", "whole again"):
        last = group.rank == group.size - 1
        cache.store(*where, other if state == "one is other" and last else planted, PLANTED)
        if state == "one is missing" and last:
            cache.path_of(*where).unlink()
        group.barrier()
        forget(group)
        explanation = multiply(group, operator, sizes_of(77, group.size, 5))
        found[state] = explanation.plan.digest, explanation.reason
    return found


def unmeasurable(operator: str) -> tuple[str, str, str]:
    """While torch traces, and in deterministic mode: as the other operators."""
    group = ut.init()
    sizes = sizes_of(20, group.size, 1)
    real = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        unknown = multiply(group, operator, sizes)
    finally:
        torch.compiler.is_compiling = real
    torch.use_deterministic_algorithms(True)
    try:
        fixed = multiply(group, operator, sizes)
    finally:
        torch.use_deterministic_algorithms(False)
    assert tuning.Known.of(group).made == 0
    return unknown.reason, fixed.reason, fixed.plan.grain


def tuned(operator: str) -> tuple[str, str, int, bool]:
    """ut.tune, whose choice later calls of the class run."""
    group = ut.init()
    decision = ut.tune(lambda: multiply(group, operator, sizes_of(40, group.size, 1)), budget_seconds=0.5)
    later = multiply(group, operator, sizes_of(60, group.size, 2))
    serial = decision.serial_seconds
    chosen = next(one for one in decision.trials if one.plan == decision.plan)
    assert serial is not None
    assert chosen.median is not None
    return decision.plan.digest, later.plan.digest, len(decision.trials), chosen.median <= serial


def layer() -> list[tuple[str, bool]]:
    """Both operators of ExpertParallelMLP are asked for what the layer is, and measured."""
    group = ut.init()
    torch.manual_seed(3)
    mlp = ut.nn.ExpertParallelMLP(8, 16, experts=2 * group.size, top_k=2)
    with torch.no_grad():
        mlp(torch.randn(32, 8))
    last = said()
    first = ut.explain(group=group, call=last.call - 2)  # what is measured is a call, too
    assert first is not None
    return [(one.asked, any(candidate.measured for candidate in one.candidates)) for one in (first, last)]
