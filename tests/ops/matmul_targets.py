"""Rank functions for the tests of the matmul operators: random plans, wrong tables, bad input."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import matmul_suite as suite
import numpy as np
import torch

import undertow as ut
from undertow.errors import UndertowError
from undertow.ops import choose
from undertow.plan import reorder
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem

# -- plans that nobody would choose ------------------------------------------------------------------------------------


def random_plan(problem: Problem, lane: str, chance: random.Random) -> Plan:
    """A signaled plan that fits: any tile, layout, parcels. The same on ranks that differ in n or k."""
    order = problem.order
    tile = chance.choice((1, 2, 3, 8, 16, 33)), chance.choice((1, 5, 8, 16, 64))
    layout = "natural" if order == "rotated" else chance.choice(("natural", "packed"))
    grid = problem.grid(Plan("signaled", lane, ((0, 0),), tile=tile, order=order))
    fixed: set[int] = set()
    unit, extent = 1, grid.tiles
    if order == "rotated":
        step = chance.randint(1, 12)
        extent, fixed = step * problem.ranks, {step * turn for turn in range(problem.ranks)}
    elif order == "proportional":
        extent = chance.randint(1, 60)
    elif layout == "natural":
        unit = max(1, grid.columns)
    cuts = {chance.randint(0, extent // unit) * unit for _ in range(chance.randint(0, 6))}
    bounds = sorted(cuts | fixed | {0, extent})
    plan = Plan(
        "signaled",
        lane,
        tuple(itertools.pairwise(bounds)) or ((0, 0),),
        tile=tile,
        group_bands=chance.randint(1, 9),
        order=order,
        own_last=chance.random() < 0.5,
        layout=layout,
    )
    plan.check(problem)
    return plan


def random_plans(seed: int, count: int) -> int:
    """`count` cases, each with a plan of its own; how many plans were packed."""
    group = ut.init()
    chance, packed = random.Random(seed), 0
    real = choose.default_plan
    try:
        for number in range(count):
            operator = list(suite.OPERATORS)[number % len(suite.OPERATORS)]
            lane, dtype = chance.choice(suite.LANES), chance.choice(suite.CPU_DTYPES)
            case = suite.Case(
                operator, f"signaled:{lane}", dtype, chance.choice(suite.SHAPES), chance.randrange(1 << 30)
            )
            choose.default_plan = lambda problem, grain, lane, by_program, case=case: random_plan(  # type: ignore[misc]
                problem, lane, random.Random(case.seed)
            )
            suite.verify(group, case)
            explanation = ut.explain()
            assert explanation is not None
            packed += explanation.plan.layout == "packed"
    finally:
        choose.default_plan = real
    return packed


# -- a wrong permutation -----------------------------------------------------------------------------------------------


@contextmanager
def two_tiles_swapped() -> Iterator[list[int]]:
    """Tile tables in which two tiles of one parcel have each other's place; how many tables were spoiled."""
    real, spoiled = reorder.tile_table, []

    def wrong(*arguments: Any) -> Any:
        table = real(*arguments).copy()
        same = [reorder.ROWS, reorder.COLUMNS, reorder.PARCEL]
        for one, other in itertools.combinations(range(len(table)), 2):
            if np.array_equal(table[one, same], table[other, same]):
                places = [reorder.PLACE, reorder.STRIDE]
                table[np.ix_([one, other], places)] = table[np.ix_([other, one], places)]
                spoiled.append(one)
                break
        return table

    reorder.tile_table = wrong
    try:
        yield spoiled
    finally:
        reorder.tile_table = real


def wrong_permutation(operator: str, layout: str) -> tuple[int, str]:
    """How many tables were spoiled, and what the exactness check says; after it a right call passes again."""
    group = ut.init()
    case = suite.Case(operator, "signaled:peer", torch.float32, (64, 48, 32), 7)
    real = choose.default_plan

    def planned(problem: Problem, grain: str, lane: str, by_program: bool = False) -> Plan:
        chosen = Plan("signaled", lane, ((0, 0),), tile=(8, 8), order=problem.order, layout=layout)
        tiles = problem.grid(chosen).tiles
        extent = {"rotated": problem.ranks, "proportional": 4}.get(problem.order, tiles)
        step = extent // 2 if problem.order != "rotated" else 1
        parcels = tuple((start, start + step) for start in range(0, extent, step))
        return Plan("signaled", lane, parcels, tile=(8, 8), order=problem.order, layout=layout)

    choose.default_plan = planned
    try:
        with two_tiles_swapped() as spoiled:
            try:
                suite.verify(group, case)
                said = "exact"
            except AssertionError as error:
                said = str(error)
        suite.verify(group, case)
    finally:
        choose.default_plan = real
    return len(spoiled), said


# -- bad input ---------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "matmul_all_reduce": ut.matmul_all_reduce,
    "matmul_reduce_scatter": ut.matmul_reduce_scatter,
    "all_gather_matmul": ut.all_gather_matmul,
    "matmul_all_to_all": ut.matmul_all_to_all,
}


def sentence(call: Callable[[], Any]) -> str:
    try:
        call()
    except UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def usable(group: ut.Group, name: str) -> bool:
    """A right call after the wrong one."""
    suite.verify(group, suite.Case(name, "signaled:peer", torch.float32, (23, 29, 31), 5))
    return True


def refused(name: str) -> dict[str, str]:
    """What every rank refuses by itself, and what ranks refuse together."""
    group, call = ut.init(), CALLS[name]
    x, w = torch.ones(6, 4), torch.ones(4, 5)
    other = Plan("signaled", "peer", ((0, 99),), tile=(2, 5), order="natural")
    flat = torch.ones(60)
    found = {
        "inner": sentence(lambda: call(x, torch.ones(3, 5))),
        "dtypes": sentence(lambda: call(x, w.double())),
        "integers": sentence(lambda: call(x.int(), w.int())),
        "vector": sentence(lambda: call(x[0], w)),
        "bias": sentence(lambda: call(x, w, bias=torch.ones(6))),
        "activation": sentence(lambda: call(x, w, activation="tanh")),
        "out with a gradient": sentence(lambda: call(x.clone().requires_grad_(), w, out=torch.empty(6, 5))),
        "out": sentence(lambda: call(x, w, out=torch.empty(1, 1))),
        "aliased out": sentence(lambda: call(x.expand(6, 4), w, out=x)),
        "out over bias": sentence(lambda: call(x, w, bias=flat[-5:], out=flat.view(-1, 5))),
        "out that wants a gradient": sentence(lambda: call(x, w, out=torch.empty(6, 5, requires_grad=True))),
        "sparse": sentence(lambda: call(x, w.to_sparse())),
        "sparse bias": sentence(lambda: call(x, w, bias=torch.ones(5).to_sparse())),
        "sparse out": sentence(lambda: call(x, w, out=torch.ones(6, 5).to_sparse())),
        "rows of a plan": sentence(lambda: call(x, w, plan=Plan("chunked", "peer", ((0, 2), (3, 99))))),
        "tiles of a plan": sentence(lambda: call(x, w, plan=other)),
    }
    mixed = (torch.float32, torch.bfloat16)[group.rank % 2]
    for strategy in ("auto", "serial:net", "signaled:dma"):
        found[f"dtypes of ranks, {strategy}"] = sentence(lambda: call(x.to(mixed), w.to(mixed), strategy=strategy))  # noqa: B023
    found["usable"] = str(usable(group, name))
    return found


def odd_but_right(name: str) -> bool:
    """Strided inputs, empty ones, and what is no number, through every grain."""
    group, call = ut.init(), CALLS[name]
    size, rank = group.size, group.rank
    for strategy in suite.strategies(("peer", "net")):
        wide = torch.arange(12 * 8, dtype=torch.float64).view(12, 8) % 7 - 3
        x, w = wide[::2, ::2], wide.t()[:4, :5]
        assert not x.is_contiguous()
        assert not w.is_contiguous()
        want = call(x.contiguous(), w.contiguous(), strategy="serial:peer")
        assert torch.equal(call(x, w, strategy=strategy), want)
        for rows, inner, columns in ((0, 4, 5), (6, 0, 5), (6, 4, 0), (0, 0, 0)):
            empty = call(torch.ones(rows, inner), torch.ones(inner, columns), strategy=strategy)
            assert empty.numel() == 0 or bool((empty == 0).all())
        x = torch.ones(2 * size, 3)
        x[1, 0] = float("nan")
        x[2, 1] = float("inf")
        y = call(x, torch.ones(3, 4), strategy=strategy)
        plain = call(x, torch.ones(3, 4), strategy="serial:peer")
        assert torch.equal(torch.isnan(y), torch.isnan(plain))
        assert torch.equal(y.nan_to_num(), plain.nan_to_num())
        holders = {"matmul_reduce_scatter": {0: 1, 1: 0}, "matmul_all_to_all": {0: size, 1: 0}}
        bad = int(torch.isnan(y).any(1).sum())
        assert bad == holders.get(name, {}).get(rank, size if name == "all_gather_matmul" else bad)
        assert bad < y.shape[0]
    return usable(group, name)


# -- whole results by collectives --------------------------------------------------------------------------------------


def serial_by_collectives(seed: int, part: float) -> int:
    """What `serial:peer` does on a GPU, here: cases of it that were right, then gradients of it and of fused calls."""
    import gradient_targets
    import norm_targets

    from undertow.ops import alone, whole

    group = ut.init()
    whole.DEVICES = ("cuda", "cpu")
    found = [one for one in suite.cases(seed, part) if one.strategy == "serial:peer"]
    for least, target in ((whole.LARGE, "staged"), (1, "direct")):
        whole.LARGE = least
        for number, case in enumerate(found):
            suite.verify(group, case)
            if number % 4 == 0 and case.operator in ("matmul_all_reduce", "matmul_reduce_scatter"):
                norm_targets.verify(group, case, norm_targets.KINDS[number // 4 % len(norm_targets.KINDS)], False)
        gradient_targets.exact(part / 6, seed)
        y = torch.arange(24.0).view(4, 6) * (group.rank + 1)
        alone.all_reduce(group.fabric, "peer", y)
        assert torch.equal(y, torch.arange(24.0).view(4, 6) * sum(range(1, group.size + 1)))
        made = group.fabric.kept[id(whole._KEPT)]
        assert {"all_reduce", "reduce_scatter", "all_gather"} == {kind for kind, *_, how in made if how == target}
    _is_rounded_once(group)
    group.fabric.capturing = lambda: True  # type: ignore[method-assign]
    assert whole.exchange(group.fabric, "all_reduce", torch.empty(0), [24]) is not None
    assert whole.exchange(group.fabric, "all_reduce", torch.empty(0), [1 << 22]) is None, "memory made in a capture"
    whole.LARGE = 1 << 30
    group.fabric.kept[id(whole._KEPT)].clear()
    assert whole.exchange(group.fabric, "all_reduce", torch.empty(0), [24]) is None, "a kernel made in a capture"
    return len(found)


def _is_rounded_once(group: ut.Group) -> None:
    """256 + 1 + 1: a sum that is rounded before the bias is added has lost the one."""
    x = torch.tensor([[256.0 if group.rank == 0 else 1.0 if group.rank == 1 else 0.0]]).bfloat16()
    w, bias = torch.ones(1, 8).bfloat16(), torch.ones(8).bfloat16()
    for strategy in ("serial:peer", "chunked:peer", "fused:peer"):
        assert bool((ut.matmul_all_reduce(x, w, bias=bias, group=group, strategy=strategy) == 258).all()), strategy
