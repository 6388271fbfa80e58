"""matmul_all_reduce of few rows on a GPU, in both exchanges: exact, replayed, launched ahead. Run by `operator_checks`.

Calls that are launched early must follow each other without anything between them, as a launch begins early only behind
another one: so most checks enqueue bare calls, without the words by which operators are watched.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import matmul_suite
import torch
from matmul_suite import Case

import undertow as ut
from undertow.fabric.share import bounded_grids
from undertow.ops.finish import Finish
from undertow.ops.matmul_all_reduce import reference
from undertow.plan.defaults import few_row_forms, fused_plan
from undertow.plan.plan import Plan, Share
from undertow.plan.problem import Problem

# Of either exchange, what else the plan says: small CTAs for all pieces and for fewer SMs, K in parts; by owners
# launched ahead and not, blocks without columns. One row has a tile of its own where nothing else is said.
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "one, narrow": {"block_n": 32},
    "one, two parts": {"block_n": 64, "split": 2},
    "one, bounded": {"share": Share(5, 3)},
    "two": {"block_n": 64, "ahead": 1024},
    "two, wide": {"block_n": 128, "ahead": 512},
    "two, after": {"block_n": 128},
}
# Each with a seed: with bias and relu; or without, weights the other way round. Few kernels to compile.
SHAPES = {
    (1, 8, 8): 30, (1, 1032, 520): 77, (3, 200, 72): 30, (16, 1032, 136): 77, (33, 520, 200): 30, (64, 2056, 328): 77,
}  # fmt: skip
NO_FINISH = Finish(None, "none")


def planned(group: ut.Group, shape: tuple[int, int, int], dtype: torch.dtype, way: str) -> tuple[Problem, Plan]:
    m, n, k = shape
    problem = Problem.of(
        "matmul_all_reduce", m, n, k, dtype=str(dtype).removeprefix("torch."), ranks=group.size, device="cuda",
        multiprocessors=group.fabric.multiprocessors,
    )  # fmt: skip
    form = few_row_forms(problem)["at once" if way.startswith("one") else "owners"]
    plan, asked = replace(fused_plan(problem, "peer"), **form), dict(WAYS[way])
    assert plan.tile is not None
    if "block_n" in asked:
        asked["tile"] = (max(16, plan.tile[0]), asked.pop("block_n"))
    plan = replace(plan, **asked)
    plan.check(problem)
    return problem, plan


class Bare:
    """One call after another of one shape and way, with operands of its own."""

    def __init__(self, group: ut.Group, shape: tuple[int, int, int], way: str, seed: int) -> None:
        dtype = torch.bfloat16 if seed % 2 else torch.float16
        case, (m, n, k) = Case("matmul_all_reduce", "fused:peer", dtype, shape, seed), shape
        xs = [matmul_suite.integers(m, k, seed + rank, case, group.device) for rank in range(group.size)]
        ws = [matmul_suite._weights(k, n, seed + 50 + rank, case, group.device) for rank in range(group.size)]
        self.group, self.name = group, f"{way} {shape}"
        self.x, self.w = xs[group.rank].clone(), ws[group.rank]
        if m == 1:  # by a tile of its own, but on a rank whose weights lie by rows
            self.w = self.w.contiguous() if group.rank == 1 else self.w.t().contiguous().t()
        self.want = reference(matmul_suite._wide(xs), matmul_suite._wide(ws)).to(dtype)
        self.y = torch.full_like(self.want, float("nan"))
        self.problem, self.plan = planned(group, shape, dtype, way)

    def __call__(self) -> None:
        self.into(self.x, self.w, self.y)

    def into(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        from undertow.ops import fused_cuda  # needs a driver

        fused_cuda.prepare(x, w, y, self.problem, self.plan, NO_FINISH, self.group.fabric)()


def few_rows_are_exact(group: ut.Group) -> None:
    """As the operator is called: odd sizes, ranks whose K differ, bias and relu, each turn and again."""
    for way in WAYS:
        for shape, seed in SHAPES.items():
            case = Case("matmul_all_reduce", way, torch.bfloat16, shape, seed)
            xs, ws = matmul_suite._factors(group, case)
            bias, activation = matmul_suite._bias(case, shape[1], group.device), matmul_suite._activation(case)
            whole = reference(matmul_suite._wide(xs), matmul_suite._wide(ws)).to(case.dtype)
            want = matmul_suite._finished(whole, bias, activation)
            _, plan = planned(group, shape, case.dtype, way)
            for _ in range(3):
                y = torch.full_like(want, float("nan"))
                ut.matmul_all_reduce(
                    xs[group.rank], ws[group.rank], bias=bias, activation=activation, group=group, plan=plan, out=y
                )  # fmt: skip
                matmul_suite._exactly(case, group, y, want)
            group.check()


def few_rows_follow_each_other(group: ut.Group) -> None:
    """600 bare calls in a row, shapes and ways at random, now and then a collective or another kernel between them, or
    a rank with fewer SMs."""
    from undertow.collective.algorithms import LIBRARY
    from undertow.collective.cuda_runtime import CudaExecutable

    collective = CudaExecutable(
        group.fabric, LIBRARY["two_shot"].compile(group.size, instances=4, target="staged")
    )  # fmt: skip
    ones, summed = (torch.ones(4096, device=group.device) for _ in range(2))
    calls = [
        Bare(group, shape, way, 76 + number)
        for number, shape in enumerate(((4, 2048, 256), (48, 2056, 200), (1, 2056, 264)))
        for way in WAYS
    ]
    collective.run(ones, summed, [4096])
    for call in calls:
        call()
    torch.cuda.synchronize()
    group.barrier()
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    chance = random.Random(4070)
    for number in range(600):
        call = chance.choice(calls)
        between = chance.random()
        if between < 0.2:
            collective.run(ones, summed, [4096])
        if between < 0.6:
            call.y.fill_(float("nan"))
        if number % 150 == 75 and group.rank == number // 150 % group.size:
            torch.cuda._sleep(5_000_000)  # the device of one rank is late
        fewer = call.plan.split > 0 and number % 7 == group.rank  # SMs, on one rank alone
        with bounded_grids(5 if fewer else None, group.device):
            call()
        if between < 0.8:
            wrong += (call.y != call.want).sum()
    assert int(wrong) == 0, f"{int(wrong)} wrong elements"
    assert bool((summed == group.size).all())
    group.check()


def few_rows_replay(group: ut.Group) -> None:
    """Graphs of four calls that begin as the one before ends, replayed with new inputs, a rank late at times."""
    from gpu_checks import _replay

    for way in ("one", "two", "two, wide"):
        one = Bare(group, (16, 2048, 256), way, 77)
        m = one.x.shape[0]
        ws = [one.w, *(one.w * scale for scale in (-1, 2, 1))]
        y = torch.full((4 * m, one.want.shape[1]), float("nan"), dtype=one.want.dtype, device=group.device)
        want = torch.cat([one.want * scale for scale in (1, -1, 2, 1)])

        def run(one: Bare = one, ws: list[torch.Tensor] = ws, y: torch.Tensor = y, m: int = m) -> None:
            for number, w in enumerate(ws):
                one.into(one.x, w, y[number * m : (number + 1) * m])

        _replay(group, one.name, one.x, y, run, want)


def weights_that_the_call_before_wrote_are_not_read_early(group: ut.Group) -> None:
    """The output of one call is the weight of the next, which asks for it while the first still runs."""
    from gpu_checks import _replay

    for way in ("one", "two"):
        first = Bare(group, (64, 2048, 64), "two", 77)
        second = Bare(group, (16, 2048, 64), way, 77)
        picked = torch.zeros(16, 64, dtype=first.y.dtype, device=group.device)
        rows = torch.arange(16, device=group.device)
        if group.rank < 2:  # each row of the result is the sum of two rows of the weight
            picked[rows, (5 * rows + 7 * group.rank) % 64] = 1
        want = first.want[5 * rows % 64] + first.want[(5 * rows + 7) % 64]
        y = torch.full_like(want, float("nan"))

        def run(first: Bare = first, second: Bare = second, x: torch.Tensor = picked, y: torch.Tensor = y) -> None:
            first()
            second.into(x, first.y, y)

        _replay(group, f"weights just written, {way}", first.x, y, run, want)


CHECKS: list[Callable[[ut.Group], None]] = [
    few_rows_are_exact,
    few_rows_follow_each_other,
    few_rows_replay,
    weights_that_the_call_before_wrote_are_not_read_early,
]
