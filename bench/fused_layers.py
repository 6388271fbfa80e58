"""Layers of tensor parallelism as fused kernels and as their rivals: matmul + collective, PyTorch's async-TP."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from fused_common import BF16, Bench, Made, Variants, integers

from undertow.plan import chain, fused
from undertow.plan.brought import fuller_waves
from undertow.plan.defaults import few_row_forms, fused_plan, gather_forms, scatter_forms
from undertow.plan.plan import Plan, Share
from undertow.plan.problem import Problem

ROTATED = 200 << 20  # bytes of weights that decode calls take in turn
# CTAs of PyTorch's one-shot wait for each other and cannot all run at once where 8 ranks share a GPU: from so many
# bytes on it has stood still.
MOST_ONE_SHOT = 256 << 10


def scatter(bench: Bench, m: int, k: int, n: int, reduce: bool = False) -> Made:
    """matmul_reduce_scatter (or, `reduce`, matmul_all_reduce): x [m, k] and w [k, n] on each rank."""
    operator = "matmul_all_reduce" if reduce else "matmul_reduce_scatter"
    problem = bench.problem(operator, m, n, k)
    shard = m // bench.size
    mine = slice(0, m) if reduce else slice(bench.rank * shard, (bench.rank + 1) * shard)
    total = torch.zeros(m if reduce else shard, n, device=bench.device)
    for rank in range(bench.size):
        x_theirs, w_theirs = bench.factors(m, k, n, rank)
        total += (x_theirs[mine] @ w_theirs).float()
    x, w = bench.factors(m, k, n, bench.rank)
    want = total.to(BF16)
    del total
    y = torch.empty(m, n, device=bench.device, dtype=BF16)
    out = torch.empty(m if reduce else shard, n, device=bench.device, dtype=BF16)
    plan = fused_plan(problem, "peer")
    assert plan.tile is not None
    alone = bench.gemm(x, w, y, plan.tile)
    found: Variants = {
        "cublas": lambda _: torch.mm(x, w, out=y), "gemm": lambda _: (alone(), y)[1],
        "fused": bench.fused(x, w, out, problem, plan),
    }  # fmt: skip
    for summing in (2, 4) if reduce else (2,):
        other = replace(plan.share, communication_ctas=summing)
        found[f"fused {summing} sum"] = bench.fused(x, w, out, problem, replace(plan, share=other))
    forms = scatter_forms(problem, "peer")
    if bench.options["chains"] and not reduce and plan.tile == chain.TILE:
        forms.setdefault("chain", replace(plan, order="rotated", share=Share(max(1, problem.multiprocessors - 1))))
    for name, other_form in forms.items():
        if other_form != plan:
            found[f"fused, {name}"] = bench.fused(x, w, out, problem, other_form)
    for name, grouped in in_groups({"fused": plan} | {f"fused, {one}": forms[one] for one in forms}, bench).items():
        found[name] = bench.fused(x, w, out, problem, grouped)
    if bench.options["guarded"]:
        found["guarded"] = bench.fused(x, w, out, problem, plan, guarded=True)
    source, scattered = bench.buffer("source", m * n), bench.buffer("out", m * n if reduce else shard * n)
    for ctas in bench.ctas():
        if reduce:
            made = bench.executable("two_shot", ctas, target="direct", in_place=True)
            spans, into = [m * n], source
        else:
            made = bench.executable("reduce_scatter_direct", ctas, target="direct", in_place=False)
            spans, into = [shard * n] * bench.size, scattered

        def serial(_: int, made: Any = made, spans: list[int] = spans, into: Any = into) -> torch.Tensor:
            torch.mm(x, w, out=source.local.view(m, n))
            made.run(source, into, spans)
            return into.local.view(want.shape)

        found[f"serial {ctas}"] = serial
    operators = torch.ops.symm_mem
    if reduce:
        found["torch"] = lambda _: (
            torch.mm(x, w, out=source.local.view(m, n)),
            operators.two_shot_all_reduce_(source.local, "sum", bench.name).view(m, n),
        )[1]
    else:
        found["torch"] = lambda _: operators.fused_matmul_reduce_scatter(x, w, "sum", 0, bench.name)
    return found, want, (y, out, scattered.local)


def in_groups(plans: dict[str, Plan], bench: Bench) -> dict[str, Plan]:
    """The same in groups of other numbers of bands, where that is asked for."""
    found: dict[Plan, str] = {}
    for (name, plan), bands in itertools.product(plans.items(), bench.options["groups"]):
        if bands != plan.group_bands:
            found.setdefault(replace(plan, group_bands=bands), f"{name}, groups of {bands}")
    return {name: plan for plan, name in found.items()}


def gather_plans(problem: Problem, loaders: list[int]) -> dict[str, Plan]:
    """What is tried, by name: the default; rows pushed by so many CTAs before they multiply; brought by one or two of
    them beside the others, or by all at once, also in narrow tiles and with K of the last tiles cut; and, where rows
    are pulled, pushed instead."""
    forms = gather_forms(problem, "peer")
    before, beside, at_once = (forms.get(name) for name in ("before", "beside", "at once"))
    assert before is not None
    active = before.share.multiprocessors or problem.multiprocessors
    wanted: dict[str, Plan] = {"fused": fused_plan(problem, "peer"), "fused, before": before}
    for count in sorted({min(one, active) for one in loaders}):
        share = replace(before.share, communication_ctas=count)
        wanted[f"fused, {count} before"] = replace(before, share=share)
    for count in (1, 2) if beside is not None else ():
        wanted[f"fused, {count} beside"] = replace(beside, share=replace(beside.share, communication_ctas=count))
    if at_once is not None:
        wanted["fused, at once"] = at_once
        for plan in fuller_waves(problem, at_once):
            wanted[f"fused, at once, {'split' if plan.split else 'narrow'}"] = plan
    if before.pull:
        wanted["fused, pushed"] = gather_forms(replace(problem, together=False), "peer")["before"]
    names: dict[Plan, str] = {}
    for name, plan in wanted.items():
        names.setdefault(plan, name)  # what is the default, too, is measured once
    return {name: plan for plan, name in names.items()}


def gather(bench: Bench, m: int, k: int, n: int) -> Made:
    """all_gather_matmul: x [m / ranks, k], w [k, n]."""
    problem = bench.problem("all_gather_matmul", m, n, k)
    shard = m // bench.size
    whole = torch.cat([integers(shard, k, 100 + rank, bench.device, 3) for rank in range(bench.size)])
    w = integers(n, k, 200 + bench.rank, bench.device, 16).t()
    x = whole[bench.rank * shard : (bench.rank + 1) * shard].clone()
    want = whole @ w
    y, out = (torch.empty(m, n, device=bench.device, dtype=BF16) for _ in range(2))
    plans = gather_plans(problem, bench.options["loaders"])
    plans |= in_groups(plans, bench)
    found: Variants = {"cublas": lambda _: torch.mm(whole, w, out=y)}
    tiles = {plan.tile: "gemm" if name == "fused" else "gemm, narrow" for name, plan in reversed(plans.items())}
    for tile, name in tiles.items():
        assert tile is not None
        alone = bench.gemm(whole, w, y, tile)
        found[name] = lambda _, alone=alone: (alone(), y)[1]  # type: ignore[misc]
    found |= {name: bench.fused(x, w, out, problem, plan) for name, plan in plans.items()}
    source, gathered = bench.buffer("out", shard * k), bench.buffer("source", m * k)
    source.local.view(shard, k).copy_(x)
    for ctas in bench.ctas():
        made = bench.executable("all_gather_direct", ctas, target="direct", in_place=False)

        def serial(_: int, made: Any = made) -> torch.Tensor:
            made.run(source, gathered, [shard * k] * bench.size)
            return torch.mm(gathered.local.view(m, k), w, out=y)

        found[f"serial {ctas}"] = serial
    found["torch"] = lambda _: torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, bench.name)[1][0]
    return found, want, (y, out)


def _asked(names: list[str], m: int) -> list[str]:
    """The plans of few rows to try. "all": the exchange that should be better in all forms, the other in its best."""
    if names != ["all"]:
        return names
    at_once = [*(["one/16"] if m == 1 else []), "one/64", "one/32"]
    owners = ["two/64/1024", "two/64/2048", "two/64/0", "two/128/512", "two/128/1024", "two/128/0", "two/256/0"]
    return [*at_once, "two/64/0"] if m < 16 else [*owners, *(["one/64"] if m < 64 else [])]


def _few_rows(problem: Problem, base: Plan, name: str) -> Plan:
    """one/block_n[/split]: sent to all at once, of 16 columns for one row; two/block_n/ahead: by owners of columns."""
    way, block_n, *rest = name.split("/")
    plan = replace(base, **few_row_forms(problem)["at once" if way == "one" else "owners"])
    assert plan.tile is not None
    rows = 1 if int(block_n) == fused.ROW_TILE[1] else max(16, plan.tile[0])
    changed = replace(plan, tile=(rows, int(block_n)))
    if not rest:
        return changed
    return replace(changed, split=int(rest[0])) if way == "one" else replace(changed, ahead=int(rest[0]))


def decode(bench: Bench, m: int, k: int, n: int) -> Made:
    """matmul_all_reduce of few rows, weights in turn."""
    problem = bench.problem("matmul_all_reduce", m, n, k)
    count = max(1, -(-ROTATED // (2 * k * n)))
    x = bench.factors(m, k, n, bench.rank)[0]
    first = bench.factors(m, k, n, bench.rank)[1]
    weights = [first, *(first.t().clone().t() for _ in range(count - 1))]
    total = torch.zeros(m, n, device=bench.device)
    for rank in range(bench.size):
        x_theirs, w_theirs = bench.factors(m, k, n, rank)
        total += (x_theirs @ w_theirs).float()
    want = total.to(BF16)
    out, y = (torch.empty(m, n, device=bench.device, dtype=BF16) for _ in range(2))
    base = fused_plan(problem, "peer")
    assert base.tile is not None
    plans = {"fused": base}
    for name in _asked(bench.options["decode"], m):
        plan = _few_rows(problem, base, name)
        if plan not in plans.values():
            plan.check(problem)
            plans[f"fused {name}"] = plan
    found: Variants = {"cublas": lambda which: torch.mm(x, weights[which], out=y)}
    for name, plan in plans.items():
        calls = [bench.fused(x, w, out, problem, plan) for w in weights]
        found[name] = lambda which, calls=calls: calls[which](which)  # type: ignore[misc]
    source = bench.buffer("source", m * n)
    mine = source.local.view(m, n)
    spans = [m * n]
    serials = {
        "two_shot": (bench.executable("two_shot", 8, target="direct", in_place=True), source),
        "packets": (bench.executable("one_shot", 8, target="staged", packets=True), None),
    }
    for name, (made, into) in serials.items():

        def serial(which: int, made: Any = made, into: Any = into) -> torch.Tensor:
            torch.mm(x, weights[which], out=mine)
            made.run(source if into is not None else source.local, into if into is not None else y.view(-1), spans)
            return mine if into is not None else y

        found[f"serial {name}"] = serial
    operators = torch.ops.symm_mem
    if bench.size <= 4 or 2 * m * n < MOST_ONE_SHOT:
        found["torch one-shot"] = lambda which: (
            torch.mm(x, weights[which], out=mine), operators.one_shot_all_reduce(source.local, "sum", bench.name)
        )[1].view(m, n)  # fmt: skip
    found["torch two-shot"] = lambda which: (
        torch.mm(x, weights[which], out=mine), operators.two_shot_all_reduce_(source.local, "sum", bench.name)
    )[1].view(m, n)  # fmt: skip
    return found, want, (out, y, source.local, count)


def reduce(bench: Bench, m: int, k: int, n: int) -> Made:
    """matmul_all_reduce."""
    return scatter(bench, m, k, n, reduce=True)
