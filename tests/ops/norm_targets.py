"""Rank functions for the tests of what follows a matmul in a model: residual add, RMSNorm, LayerNorm."""

from __future__ import annotations

import itertools
import random

import matmul_suite as suite
import torch
from matmul_targets import random_plan, sentence, usable

import undertow as ut
from undertow import collective as co
from undertow.ops import choose
from undertow.ops import matmul_all_reduce as reduce
from undertow.ops import matmul_reduce_scatter as scatter
from undertow.ops.norm import reference

CALLS = {"matmul_all_reduce": ut.matmul_all_reduce, "matmul_reduce_scatter": ut.matmul_reduce_scatter}
PROGRAMS = {"matmul_all_reduce": "ring", "matmul_reduce_scatter": "reduce_scatter_direct"}
KINDS = (None, torch.nn.RMSNorm, torch.nn.LayerNorm)
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def norm_of(kind: type[torch.nn.Module] | None, n: int, like: torch.Tensor, plain: bool) -> torch.nn.Module | None:
    if kind is None:
        return None
    made = kind(n, elementwise_affine=not plain).to(like.device, like.dtype).requires_grad_(False)
    for number, one in enumerate(made.parameters()):
        one.copy_((torch.arange(n, device=like.device) % 5 - 2 + number).to(like.dtype))
    return made


def verify(group: ut.Group, case: suite.Case, kind: type[torch.nn.Module] | None, program: bool) -> None:
    xs, ws = suite._factors(group, case)
    bias, activation = suite._bias(case, case.shape[1], group.device), suite._activation(case)
    wide = suite._wide(xs), suite._wide(ws)
    want = reduce.reference(*wide) if case.operator == "matmul_all_reduce" else scatter.reference(*wide)[group.rank]
    want = suite._finished(want.to(case.dtype), bias, activation)
    residual = None
    if kind is None or case.seed % 4:
        residual = (torch.arange(want.numel(), device=group.device).view(want.shape) % 7 - 3).to(case.dtype)
        want = want + residual
    kept = None if residual is None else residual.clone()
    norm = norm_of(kind, case.shape[1], want, case.seed % 3 == 0)
    out = suite._poisoned(want.shape, case, group)
    CALLS[case.operator](
        xs[group.rank], ws[group.rank], bias=bias, activation=activation, residual=residual, norm=norm, group=group,
        strategy=case.strategy, out=out, program=co.LIBRARY[PROGRAMS[case.operator]] if program else None,
    )  # fmt: skip
    if residual is not None and kept is not None:
        suite._exactly(case, group, residual, kept if kind is None else want)
    if kind is None:
        suite._exactly(case, group, out, want)
        return
    close = torch.allclose(
        out.double(), reference(want, norm), rtol=LIMITS[case.dtype], atol=4 * LIMITS[case.dtype], equal_nan=False
    )
    assert close, f"{case}, {kind.__name__}, rank {group.rank}"


def what_follows_is_right(seed: int, part: float) -> int:
    """Operators × grains × lanes × norms × dtypes, a seeded part; signaled ones with plans of any layout."""
    group = ut.init()
    chance, count, packed = random.Random(seed), 0, 0
    real = choose.default_plan
    try:
        for operator, strategy, kind, dtype in itertools.product(CALLS, suite.strategies(), KINDS, suite.CPU_DTYPES):
            case = suite.Case(operator, strategy, dtype, chance.choice(suite.SHAPES), chance.randrange(1 << 30))
            if chance.random() >= part:
                continue
            signaled, program = strategy.startswith("signaled"), chance.random() < 0.2
            if signaled and not program:
                choose.default_plan = lambda problem, grain, lane, by_program, case=case: random_plan(  # type: ignore[misc]
                    problem, lane, random.Random(case.seed)
                )
            verify(group, case, kind, signaled and program)
            choose.default_plan = real
            said = ut.explain()
            packed += said is not None and said.plan.layout == "packed"
            count += 1
    finally:
        choose.default_plan = real
    assert packed > 0
    return count


def exact_norms() -> list[bool]:
    """Rows whose mean square (whose variance) is 4, so that dividing by its root is exact: any order, any layout."""
    group = ut.init()
    found = []
    for strategy, name in itertools.product(("signaled:peer", "chunked:dma", "serial:net"), CALLS):
        signs = torch.ones(24, 1) * torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(4)
        for norm, shift, want in (
            (torch.nn.RMSNorm(16, eps=0.0, elementwise_affine=False), 0.0, signs),
            (torch.nn.LayerNorm(16, eps=0.0, elementwise_affine=False), 1.0, signs),
        ):
            # The sum over ranks of x w is 2 signs + shift: each rank has its part of it.
            w = (2 * signs[:1] + shift) / group.size if group.size in (1, 2, 4) else None
            assert w is not None
            y = CALLS[name](torch.ones(24, 1), w, norm=norm, group=group, strategy=strategy)
            rows = want if name == "matmul_all_reduce" else torch.tensor_split(want, group.size)[group.rank]
            found.append(torch.equal(y, rows))
    return found


def refusals() -> dict[str, str]:
    group = ut.init()
    x, w = torch.ones(6, 4), torch.ones(4, 5)
    call = ut.matmul_all_reduce
    norm = torch.nn.RMSNorm(5).requires_grad_(False)
    out, two = torch.empty(6, 5), torch.zeros(2, 6, 5)
    wide, square = torch.ones(5, 5), torch.ones(6, 6)
    other = torch.nn.RMSNorm(5).requires_grad_(False)
    other.weight.data = wide[2]
    few = torch.nn.RMSNorm(5).requires_grad_(False)
    few.weight.data = out[3]
    found = {
        "shape": sentence(lambda: call(x, w, residual=torch.ones(5, 6))),
        "dtype": sentence(lambda: call(x, w, residual=torch.ones(6, 5).double())),
        "aliased": sentence(lambda: call(x, w, residual=out, out=out)),
        "over x": sentence(
            lambda: call(square, torch.ones(6, 6), residual=square, norm=torch.nn.RMSNorm(6, elementwise_affine=False))
        ),
        "over the norm": sentence(lambda: call(torch.ones(5, 5), torch.ones(5, 5), residual=wide, norm=other)),
        "half of out": str(bool((call(x, w, residual=two[0], out=two[1]) == 4 * group.size).all())),
        "out over the norm": sentence(lambda: call(x, w, norm=few, out=out)),
        "gradient": sentence(lambda: call(x, w, residual=torch.ones(6, 5).requires_grad_(), norm=norm)),
        "kind": sentence(lambda: call(x, w, norm=torch.nn.Linear(5, 5))),
        "width": sentence(lambda: call(x, w, norm=torch.nn.LayerNorm(6))),
        "type": sentence(lambda: call(x, w, norm=torch.nn.LayerNorm(5).double())),
        "parameter": sentence(lambda: call(x, w, norm=torch.nn.LayerNorm(5))),
        "ranks": sentence(lambda: call(x, w, norm=norm if group.rank else None, strategy="serial:peer")),
    }
    found["usable"] = str(usable(group, "matmul_all_reduce"))
    return found


def residuals_after_auto() -> list[float]:
    """The first calls of a shape measure; what they leave in the residual must be what one call leaves."""
    group = ut.init()
    found = []
    for _ in range(2):
        x, w = torch.ones(256, 4), torch.ones(4, 64)
        norm = torch.nn.RMSNorm(64).requires_grad_(False)
        whole, part = torch.ones(256, 64), torch.ones(256 // group.size, 64)
        ut.matmul_all_reduce(x, w, residual=whole, norm=norm, group=group)
        ut.matmul_reduce_scatter(x, w, residual=part, norm=norm, group=group)
        found += [float(whole.min()), float(whole.max()), float(part.min()), float(part.max())]
    return found
