"""Rank functions for fused matmuls that post to the proxy's ring: any shape and tile, lanes in turn, a lost parcel."""

from __future__ import annotations

import dataclasses
import os
import random
import time

import matmul_suite as suite
import torch

import undertow as ut
from undertow.errors import AllocationFailed
from undertow.fabric.net_drain import NetDrain
from undertow.fabric.post_ring import Post
from undertow.fabric.proxy import Drain, _CopyDrain
from undertow.fabric.symmetric import SymmetricBuffer
from undertow.ops import choose, posts
from undertow.plan import posts as posts_plan
from undertow.plan.defaults import fused_plan
from undertow.plan.plan import Plan, alike
from undertow.plan.problem import Problem

LANES = ("net", "dma")


def random_plans(seed: int, count: int) -> dict[str, int]:
    """`count` cases over lanes in turn, each with tiles of its own; how many there were of each operator."""
    group, chance = ut.init(), random.Random(seed)
    found, real = dict.fromkeys(suite.OPERATORS, 0), choose.default_plan

    def planned(problem: Problem, grain: str, lane: str, by_program: bool = False) -> Plan:
        inner = random.Random(seed + sum(found.values()))
        tile = inner.choice((1, 2, 3, 8, 33, 64)), inner.choice((1, 5, 16, 64))
        parcels = alike(inner.choice((1, 2, 3, 9, posts_plan.PARCELS)))
        plan = dataclasses.replace(
            fused_plan(problem, lane), tile=tile, group_bands=inner.randint(1, 9), parcels=parcels
        )
        plan.check(problem)
        return plan

    choose.default_plan = planned
    try:
        for _ in range(count):
            operator, dtype = chance.choice(list(suite.OPERATORS)), chance.choice(suite.CPU_DTYPES)
            shape, lane = chance.choice(suite.SHAPES), chance.choice(LANES)
            suite.verify(group, suite.Case(operator, f"fused:{lane}", dtype, shape, chance.randrange(1 << 30)))
            found[operator] += 1
    finally:
        choose.default_plan = real
    return found


def mixed_calls(seed: int, count: int) -> int:
    """Lanes, kinds of memory and calls that meet or do not, in any order, behind proxies of which one is late.

    A half that is written too early, here or at another rank, shows as wrong numbers.
    """
    group, chance = ut.init(), random.Random(seed)
    real = NetDrain.move, _CopyDrain.move

    slow = random.Random(seed + group.rank)

    def late(self: Drain, post: Post) -> None:
        if slow.random() < 0.2:
            time.sleep(0.03)  # longer than it takes to prepare and check a call
        real[isinstance(self, _CopyDrain)](self, post)  # type: ignore[arg-type]

    NetDrain.move = _CopyDrain.move = late  # type: ignore[method-assign,assignment]
    try:
        for _ in range(count):
            lane = chance.choice(LANES)
            if chance.random() < 0.2:
                verify_embedding(group, lane, chance.randrange(1 << 30))
                continue
            shape = chance.choice((0, 1, group.size, 17, 70)), chance.randint(1, 40), chance.randint(1, 9)
            operator, dtype = chance.choice(list(suite.OPERATORS)), chance.choice(suite.CPU_DTYPES)
            seed = chance.randrange(1 << 30)
            lanes = (*LANES, *LANES, lane, lane, lane)
            verify_in_a_row(
                group,
                [suite.Case(operator, f"fused:{one}", dtype, shape, seed + 6 * at) for at, one in enumerate(lanes)],
            )
    finally:
        NetDrain.move, _CopyDrain.move = real  # type: ignore[method-assign]
    return count


def verify_in_a_row(group: ut.Group, cases: list[suite.Case]) -> None:
    """Calls of a few kinds: ranks only wait for each other where the first of a kind is compared."""
    made = [suite.prepared(group, case) for case in cases]
    outs = [suite._poisoned(want.shape, case, group) for (_, want), case in zip(made, cases, strict=True)]
    found = [call(out) for (call, _), out in zip(made, outs, strict=True)]
    for case, got, (_, want) in zip(cases, found, made, strict=True):
        suite._exactly(case, group, got, want)


def verify_embedding(group: ut.Group, lane: str, seed: int) -> None:
    """Bags of one row each: a column of each rank's table, exact."""
    tables = [torch.arange(5.0 + rank)[:, None] * (rank + 1) + seed % 7 for rank in range(group.size)]
    samples = 2 * group.size + seed % 3
    picks = [torch.arange(samples) % len(table) for table in tables]
    mine = tables[group.rank], picks[group.rank]
    y = ut.embedding_all_to_all([mine[0]], mine[1], torch.arange(samples + 1), group=group, strategy=f"fused:{lane}")
    whole = torch.cat([table[pick] for table, pick in zip(tables, picks, strict=True)], 1)
    assert torch.equal(y, whole.tensor_split(group.size)[group.rank]), f"embedding over {lane}"


def a_lost_post() -> str:
    """A parcel that never leaves is no hang, but an error at the deadline."""
    group = ut.init()
    if group.rank == 1:
        posts.Turn.post = lambda self, *what: None  # type: ignore[method-assign]
    try:
        ut.matmul_reduce_scatter(torch.ones(4, 3), torch.ones(3, 5), group=group, strategy="fused:dma")
    except ut.UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return "not noticed"


def between_nodes(seed: int) -> str:
    """Two nodes of half the ranks each, by name: every operator, where the strategy names no lane; the plan's name."""
    os.environ["UNDERTOW_NODE"] = f"node {2 * int(os.environ['RANK']) // int(os.environ['WORLD_SIZE'])}"
    group, chance = ut.init(), random.Random(seed)
    assert len(group.local_ranks) == group.size // 2
    for operator in suite.OPERATORS:
        for shape in chance.sample(suite.SHAPES, 4):
            suite.verify(group, suite.Case(operator, "fused", torch.float32, shape, chance.randrange(1 << 30)))
    told = ut.explain()
    assert told is not None
    verify_embedding(group, "net", seed)
    return told.plan.name


def gradients_without_meetings() -> bool:
    """Ranks that meet do so in each other's memory, which ranks of another node have no pointer to."""
    group = ut.init()

    def refused(name: str) -> None:
        raise AssertionError(f"{name}: nobody can meet")

    group.fabric.meeting = refused  # type: ignore[method-assign,assignment]
    for call in (ut.matmul_reduce_scatter, ut.all_gather_matmul):
        found = []
        for strategy in ("serial:net", "fused:net"):
            x = torch.arange(24.0).view(8, 3).requires_grad_()
            w = torch.arange(15.0).view(3, 5).requires_grad_()
            call(x, w, group=group, strategy=strategy).square().sum().backward()  # type: ignore[operator]
            found.append((x.grad, w.grad))
        for ours, want in zip(found[1], found[0], strict=True):
            assert torch.equal(ours, want)
    return True


def explained() -> list[tuple[str, str]]:
    """The plan and the reason of every operator that is fused over lane net."""
    group, found = ut.init(), []
    x, w = torch.ones(8, 3), torch.ones(3, 5)
    for call in (ut.matmul_all_reduce, ut.matmul_reduce_scatter, ut.all_gather_matmul, ut.matmul_all_to_all):
        call(x, w, group=group, strategy="fused:net")  # type: ignore[operator]
        told = ut.explain()
        assert told is not None
        found.append((told.plan.name, told.choice.reason))
    return found


def no_room() -> list[str]:
    """A call that finds no room is refused on all ranks, and the group goes on."""
    group, said = ut.init(), []
    x, w = torch.ones(8, 4), torch.ones(4, 4)
    ut.matmul_reduce_scatter(x, w, group=group, strategy="fused:dma")  # makes the proxy
    real = group.fabric.buffer

    def full(shape: tuple[int, ...] | int, dtype: torch.dtype) -> SymmetricBuffer:
        group.fabric._agree_on_allocation("no room" if group.rank == 1 else "")
        return real(shape, dtype)

    group.fabric.buffer = full  # type: ignore[method-assign]
    try:
        ut.all_gather_matmul(torch.ones(400000, 4), w, group=group, strategy="fused:dma")
    except AllocationFailed as error:
        said.append(str(error))
    finally:
        group.fabric.buffer = real  # type: ignore[method-assign]
    assert not group.failed
    assert torch.equal(
        ut.matmul_all_reduce(x, w, group=group, strategy="serial"),
        ut.matmul_all_reduce(x, w, group=group, strategy="fused:dma"),
    )
    return said
