"""Backward passes of fused layers in a virtual node: where gathered rows lie, calls in a row, captured ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from chain_checks import scatter_plans, sparse

import undertow as ut
from undertow.ops import all_gather_matmul, matmul_reduce_scatter
from undertow.ops.beside import Arriving, gathered_again
from undertow.ops.operands import like_weight
from undertow.plan.defaults import default_plan, gather_forms
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem

TURNS = 8


def gathering_plans(group: ut.Group, rows: list[int], n: int, k: int) -> list[Plan]:
    """Of an all_gather_matmul of these rows: pulled in all forms, and pushed."""
    problem = Problem.of(
        "all_gather_matmul", sum(rows), n, k, dtype="bfloat16", ranks=group.size, device="cuda",
        multiprocessors=group.fabric.multiprocessors, shards=rows, bulk=group.fabric.bulk_copies, together=True,
    )  # fmt: skip
    pushed = gather_forms(replace(problem, together=False), "peer")
    return [*gather_forms(problem, "peer").values(), *pushed.values()]


def gathered_rows_stay_for_the_weight(group: ut.Group) -> None:
    """dx = gathered dz @ w^T and dw = x^T @ gathered dz, dbias: rows pulled in all forms, and pushed; weights either
    way round; calls in a row with other numbers and a rank late; replays."""
    size, rank, device = group.size, group.rank, group.device
    uneven = [300 + 40 * one for one in range(size)]
    # The third is of the first one's N: other rows in the same memory, which grows.
    for rows, n, k in (([256] * size, 4096, 264), (uneven, 264, 136), ([2 * one for one in uneven], 4096, 136)):
        m, first = sum(rows), sum(rows[:rank])
        dzs = [sparse(count, n, 20 + one, 24, device) for one, count in enumerate(rows)]
        whole, x, w = torch.cat(dzs), sparse(m, k, 40 + rank, 8, device), sparse(n, k, 60 + rank, 24, device).t()
        want = whole @ w.t(), x.t() @ whole, whole.sum(0)
        for plan in gathering_plans(group, rows, k, n):
            results = []
            for turn in range(TURNS):
                if rank == turn % size:
                    torch.cuda._sleep(2_000_000)
                weight = w if turn % 2 else w.contiguous()
                arriving = Arriving(x, weight, bias=True)
                dz = dzs[rank] * (turn % 3 + 1)
                dx = all_gather_matmul.call(
                    dz, weight.t(), rows, None, "none", group, "auto", plan, arriving=arriving
                )  # fmt: skip
                results.append((dx, arriving.weight, arriving.bias))
            for turn, found in enumerate(results):
                for got, right in zip(found, want, strict=True):
                    assert torch.equal(got, right * (turn % 3 + 1)), (rows, plan, turn)
        for plan in gathering_plans(group, rows, k, n)[-2:] if n < 4096 else ():
            _replayed(group, rows, plan, dzs[rank], x, w, want[:2])
        dz = whole[first : first + rows[rank]].clone()
        y = ut.matmul_reduce_scatter(
            x.requires_grad_(), w.detach().requires_grad_(), rows=rows, group=group, strategy="fused:peer"
        )  # fmt: skip
        (dx,) = torch.autograd.grad(y, [x], dz)
        assert torch.equal(dx, want[0])


def _replayed(
    group: ut.Group,
    rows: list[int],
    plan: Plan,
    dz: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    want: tuple[torch.Tensor, ...],
) -> None:
    """1000 replays of a captured gather whose rows stay, with new inputs and delayed ranks."""
    from gpu_checks import _replay

    given, both = dz.clone(), torch.empty(sum(one.numel() for one in want), device=dz.device, dtype=dz.dtype)

    def run() -> None:
        arriving = Arriving(x, w, bias=False)
        dx = all_gather_matmul.call(given, w.t(), rows, None, "none", group, "auto", plan, arriving=arriving)
        both[: dx.numel()].view_as(dx).copy_(dx)
        both[dx.numel() :].view_as(arriving.weight).copy_(arriving.weight)

    _replay(group, f"rows that stay, {plan.order}", given, both, run, torch.cat([one.reshape(-1) for one in want]))


def rows_are_gathered_beside_sums(group: ut.Group) -> None:
    """dx = rows of the sum of dz @ w^T and dw = gathered x^T @ dz: sums by owners and from rank to rank, serial between
    them, whose order of meetings is another; then 1000 replays of either with new inputs."""
    from gpu_checks import _replay

    size, rank, device = group.size, group.rank, group.device
    rows, n, k = [300 + 60 * one for one in range(size)], 264, 520
    m, first = sum(rows), sum(rows[:rank])
    xs = [sparse(count, k, 20 + one, 8, device) for one, count in enumerate(rows)]
    dzs = [sparse(m, n, 40 + one, 8, device) for one in range(size)]
    ws = [sparse(n, k, 60 + one, 16, device).t() for one in range(size)]
    total = sum((dz.float() @ w.float().t() for dz, w in zip(dzs, ws, strict=True)), torch.zeros(m, k, device=device))
    want = total[first : first + rows[rank]].to(torch.bfloat16), torch.cat(xs).t() @ dzs[rank]
    beside, chained = scatter_plans(group, m, k, n, rows)
    problem = Problem.of(
        "matmul_reduce_scatter", m, k, n, dtype="bfloat16", ranks=size, device="cuda",
        multiprocessors=group.fabric.multiprocessors, shards=rows,
    )  # fmt: skip
    x, w = xs[rank].clone(), ws[rank]

    def backward(dz: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        dw = like_weight(w)
        also = gathered_again(x, rows, rank, dz, dw)
        options: dict[str, Any] = {"beside": also, "alone": False}
        dx = matmul_reduce_scatter.call(
            dz, w.t(), rows, None, "none", None, None, group, "auto", plan, **options
        )  # fmt: skip
        return dx, dw

    serial = default_plan(problem, "serial", "peer")
    for plan in (beside, chained, serial, chained, serial, beside, chained):
        results = []
        for turn in range(TURNS):
            if rank == turn % size:
                torch.cuda._sleep(2_000_000)
            results.append(backward(dzs[rank] * (turn % 3 + 1), plan))
        for turn, found in enumerate(results):
            for got, right in zip(found, want, strict=True):
                assert torch.equal(got, right * (turn % 3 + 1)), (plan.name, plan.order, turn)
    for plan in (beside, chained):
        dz, both = (
            dzs[rank].clone(),
            torch.empty(want[0].numel() + want[1].numel(), device=device, dtype=torch.bfloat16),
        )

        def run(dz: torch.Tensor = dz, both: torch.Tensor = both, plan: Plan = plan) -> None:
            dx, dw = backward(dz, plan)
            both[: dx.numel()].view_as(dx).copy_(dx)
            both[dx.numel() :].view_as(dw).copy_(dw)

        _replay(group, f"backward, {plan.order}", dz, both, run, torch.cat([one.reshape(-1) for one in want]))


CHECKS = (gathered_rows_stay_for_the_weight, rows_are_gathered_beside_sums)
