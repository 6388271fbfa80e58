"""Rank functions for the tests of strategy "auto": caches that differ between ranks, shapes that do, and explain()."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matmul_suite as suite
import torch

import undertow as ut
from undertow import settings
from undertow.errors import UndertowError
from undertow.ops import tuning
from undertow.ops.explain import KEPT, Explanation
from undertow.ops.machine import identity
from undertow.plan import cache
from undertow.plan.plan import Plan, split
from undertow.plan.problem import Problem

ROWS, COLUMNS, INNER = 48, 40, 16
PLANTED = "This plan was put here by a test."


def sentence(call: Callable[[], Any]) -> str:
    try:
        call()
    except UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def multiply(rows: int = ROWS, inner: int = INNER, **options: Any) -> Explanation:
    """A call with ones whose result is checked; what explain() says of it."""
    group = ut.init()
    y = ut.matmul_all_reduce(torch.ones(rows, inner), torch.ones(inner, COLUMNS), **options)
    total = int(sum(group.exchange(inner, "inner sizes of a test")))
    assert bool((y == total).all())
    explanation = ut.explain()
    assert explanation is not None
    return explanation


def forget(group: ut.Group) -> None:
    """As a new process would start: nothing in memory."""
    group.fabric.kept.clear()


def problem(group: ut.Group, inner: int = INNER) -> Problem:
    return Problem.of(
        "matmul_all_reduce", ROWS, COLUMNS, inner, dtype="float32", ranks=group.size, device="cpu",
        multiprocessors=group.fabric.multiprocessors,
    )  # fmt: skip


def plant(group: ut.Group, plan: Plan) -> Path:
    """A plan in this rank's cache."""
    where = problem(group), identity(group), tuning._versions(group)
    assert cache.store(*where, plan, PLANTED)
    return cache.path_of(*where)


def caches(folder: str) -> dict[str, tuple[str, str]]:
    """Every rank has a cache folder of its own; what each state of them leads to: digest and reason."""
    group = ut.init()
    mine = Path(folder) / str(group.rank)
    os.environ[settings.CACHE_DIR.name] = str(mine)
    quarters, halves = Plan("chunked", "peer", split(ROWS, 4)), Plan("chunked", "dma", split(ROWS, 2))
    found: dict[str, tuple[str, str]] = {}

    def look(state: str, spoil: Callable[[Path], object] | None = None) -> None:
        path = plant(group, quarters)
        if spoil is not None and group.rank == group.size - 1:
            spoil(path)
        group.barrier()
        forget(group)
        explanation = multiply()
        assert multiply().plan == explanation.plan  # from memory
        found[state] = explanation.plan.digest, explanation.reason

    look("whole")
    look("deleted", lambda path: path.unlink())
    look("folder deleted", lambda path: shutil.rmtree(mine))
    look("corrupted", lambda path: path.write_bytes(path.read_bytes()[:100]))
    look("other plan", lambda path: plant(group, halves))
    look("whole again")
    found["planted"] = quarters.digest, PLANTED
    return found


def kept_on_disk() -> dict[str, Any]:
    """What one call measured, a later process finds; only the node's first rank wrote it."""
    group = ut.init()
    first = multiply()
    group.barrier()
    files = [path.name for path, entry in cache.show() if entry is not None and entry.plan == first.plan]
    forget(group)
    second = multiply()
    return {
        "same": first.plan == second.plan,
        "files": files,
        "first": first.to_dict(),
        "second": second.to_dict(),
        "text": str(first),
    }


def other_shape_at_first() -> tuple[str, bool]:
    """Nobody knows the problem: all ranks hear of the disagreement before anything runs."""
    group = ut.init()
    found = sentence(lambda: multiply(rows=ROWS + group.rank))
    return found, multiply().asked == "auto"


def other_shape_later() -> None:
    """Rank 0 knows its problem and waits for nobody; the others meet a new one."""
    group = ut.init()
    multiply()
    multiply(rows=ROWS if group.rank == 0 else 2 * ROWS)


def rows_without_splits() -> tuple[str, bool]:
    """all_to_all does not compare rows: they may differ where splits say so."""
    group = ut.init()
    x, w = torch.ones(4 + group.rank, 3), torch.ones(3, 5)
    found = sentence(lambda: ut.matmul_all_to_all(x, w))
    return found, multiply().asked == "auto"


def uneven_parts() -> list[str]:
    """Ranks differ in K, or in N: they plan for one problem all the same, and agree."""
    group = ut.init()
    found = [multiply(inner=one + group.rank).plan.digest for one in (0, 1, 2, 300)]
    for columns in (0, 1, 30):
        x, w = torch.ones(6, 4), torch.ones(4, columns + group.rank)
        y = ut.all_gather_matmul(x, w)
        assert y.shape == (6 * group.size, columns + group.rank)
        assert bool((y == 4).all())
        explanation = ut.explain()
        assert explanation is not None
        found.append(explanation.plan.digest)
    for rows in ([3, 0], [2, 5], [40, 9]):
        matrix = [rows, rows[::-1]]
        y = ut.matmul_all_to_all(torch.ones(sum(rows), 3), torch.ones(3, 2), matrix)
        assert bool((y == 3).all())
    return found


def while_tracing() -> tuple[str, str, str]:
    group = ut.init()
    real = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        unknown = multiply()
    finally:
        torch.compiler.is_compiling = real
    known = multiply()
    torch.compiler.is_compiling = lambda: True
    try:
        again = multiply()
    finally:
        torch.compiler.is_compiling = real
    torch.use_deterministic_algorithms(True)
    try:
        fixed = multiply()
    finally:
        torch.use_deterministic_algorithms(False)
    assert again.plan == known.plan
    assert again.reason == known.reason
    assert unknown.plan.grain == "serial"
    assert not group.failed
    return unknown.reason, fixed.reason, fixed.plan.name


def history() -> dict[str, Any]:
    """explain() of the last call, of a group's last, of a call by its number."""
    group = ut.init()
    assert ut.explain() is None
    first = multiply(strategy="serial:peer")
    second = multiply(strategy="chunked:dma")
    found = {
        "last": ut.explain() == second,
        "by call": ut.explain(call=first.call) == first,
        "by group": ut.explain(group=group) == second == ut.explain(group=group.name),
        "both": ut.explain(group=group, call=first.call) == first,
        "none": (ut.explain(call=10**6), ut.explain(group="nobody")) == (None, None),
        "str": str(second),
    }
    x, w = torch.ones(1, 1), torch.ones(1, 1)
    for _ in range(KEPT):
        ut.matmul_all_reduce(x, w, strategy="serial:peer")
    found["bounded"] = ut.explain(call=first.call) is None
    return found


def tuned() -> dict[str, Any]:
    """ut.tune measures anew, whatever is known, and what it finds is what later calls run."""
    group = ut.init()
    rows = 512 * ROWS  # of few rows, hardly any plan but serial is worth measuring
    before = multiply(rows=rows)
    x, w = torch.ones(rows, INNER), torch.ones(INNER, COLUMNS)
    decision = ut.tune(ut.matmul_all_reduce, x, w, group=group, budget_seconds=1.0)
    after = multiply(rows=rows)
    inside = ut.tune(lambda: multiply(rows=5), budget_seconds=0.1)
    return {
        "plan": decision.plan == after.plan,
        "anew": before.candidates != after.candidates,
        "serial": decision.serial_seconds,
        "trials": len(decision.trials),
        "inside": inside.plan.extent,
        "explicit": sentence(lambda: ut.tune(multiply, strategy="serial:peer")),
        "budget": sentence(lambda: ut.tune(multiply, budget_seconds=0)),
    }


def exact() -> list[str]:
    """Every operator by itself, on odd shapes: whatever was measured on the way, the result is right."""
    group = ut.init()
    found = []
    for number, (operator, shape) in enumerate(
        itertools.product(suite.OPERATORS, ((1, 7, 3), (64, 48, 32), (97, 101, 8)))
    ):
        dtype = suite.CPU_DTYPES[number % len(suite.CPU_DTYPES)]
        for seed in (number, number + 1):
            suite.verify(group, suite.Case(operator, "auto", dtype, shape, seed))
        explanation = ut.explain()
        assert explanation is not None
        assert explanation.asked == "auto"
        found.append(explanation.plan.digest)
    return found


def alone() -> str:
    ut.init()
    return multiply().reason


# -- deterministic -----------------------------------------------------------------------------------------------------


def deterministic_bits() -> list[bool]:
    """Sums in rank order have the same bits over every lane, also where the backend would sum in its own order."""
    group = ut.init()
    generator = torch.Generator().manual_seed(group.rank)
    found = []
    for rows in (64, 1, 517):
        x, w = torch.randn(rows, 33, generator=generator), torch.randn(33, 29, generator=generator)
        want = ut.matmul_all_reduce(x, w, strategy="serial:peer")
        parts: list[torch.Tensor] = [torch.empty_like(want) for _ in range(group.size)]
        torch.distributed.all_gather(parts, x @ w)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        for lane in ("net", "peer", "dma"):
            plan = Plan("serial", lane, ((0, rows),), deterministic=True)
            found.append(torch.equal(ut.matmul_all_reduce(x, w, plan=plan), total))
    torch.use_deterministic_algorithms(True)
    try:
        ut.matmul_all_reduce(x, w)
        said = ut.explain()
        assert said is not None
        found.append(said.plan.deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    return found
