"""A fused reduce_scatter whose sums go from rank to rank, run inside the ranks of a virtual node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import undertow as ut
from undertow.plan import chain
from undertow.plan.defaults import fused_plan
from undertow.plan.plan import Plan, Share
from undertow.plan.problem import Problem


def scatter_plans(group: ut.Group, m: int, n: int, k: int, shards: list[int] | None = None) -> tuple[Plan, Plan]:
    """Of a fused reduce_scatter: sums by owners, and from rank to rank, whatever the size."""
    problem = Problem.of(
        "matmul_reduce_scatter", m, n, k, dtype="bfloat16", ranks=group.size, device="cuda",
        multiprocessors=group.fabric.multiprocessors, shards=shards, bulk=group.fabric.bulk_copies,
        together=group.fabric.together,
    )  # fmt: skip
    beside, active = fused_plan(problem, "peer"), max(1, group.fabric.multiprocessors - 1)
    return beside, replace(beside, order="rotated", share=Share(active), tile=chain.TILE, group_bands=3)


def sparse(rows: int, columns: int, seed: int, odds: int, device: torch.device) -> torch.Tensor:
    """-1, 0 and 1, one in `odds` not zero, so that sums of many products are exact in 16 bits."""
    drawn = torch.randint(2 * odds, (rows, columns), generator=torch.Generator().manual_seed(seed))
    return ((drawn == 0).int() - (drawn == 1).int()).to(device, torch.bfloat16)


def chained(
    group: ut.Group, shape: tuple[int, int, int], seed: int
) -> tuple[str, Callable[..., torch.Tensor], torch.Tensor]:
    """A reduce_scatter whose sums go from rank to rank, as `matmul_suite.prepared` has others."""
    m, n, k = shape
    xs = [sparse(m, k, 1000 + 10 * seed + one, 3, group.device) for one in range(group.size)]
    ws = [sparse(n, k, 2000 + 10 * seed + one, 16, group.device).t() for one in range(group.size)]
    whole = torch.stack([x.float() @ w.float() for x, w in zip(xs, ws, strict=True)]).sum(0)
    want = torch.tensor_split(whole, group.size)[group.rank].to(torch.bfloat16)
    plan = scatter_plans(group, m, n, k)[1]

    def call(out: torch.Tensor) -> torch.Tensor:
        return ut.matmul_reduce_scatter(xs[group.rank], ws[group.rank], group=group, plan=plan, out=out)

    return f"from rank to rank {shape} {seed}", call, want


def sums_go_from_rank_to_rank(group: ut.Group) -> None:
    """`chain.py`: tails, uneven shards, K of one step and of many, weights either way round, bias and activation; in
    turn with sums by owners; then 1000 replays with new inputs and delayed ranks."""
    from gpu_checks import _replay

    device, size, rank = group.device, group.size, group.rank
    uneven = [300 + 130 * one for one in range(size)]
    for shards, n, k in ((uneven, 520, 72), ([260] * size, 776, 1032), ([512] * size, 2048, 64)):
        m = sum(shards)
        xs = [sparse(m, k, 700 + one, 3, device) for one in range(size)]
        ws = [sparse(n, k, 800 + one, 16, device).t() for one in range(size)]
        whole = sum((x.float() @ w.float() for x, w in zip(xs, ws, strict=True)), torch.zeros(m, n, device=device))
        first = sum(shards[:rank])
        want = whole[first : first + shards[rank]]
        bias = (torch.arange(n, device=device) % 5 - 2).to(torch.bfloat16)
        beside, plan = scatter_plans(group, m, n, k, shards)
        # One, two, three and no calls of the other form between, whatever they may have in common.
        for turn, form in enumerate("cbccbcccbbc"):
            w = ws[rank] if turn % 2 else ws[rank].contiguous()
            x = xs[rank] * (1 + turn % 3)  # what an earlier call left is wrong now
            finish: dict[str, Any] = {"bias": bias, "activation": "relu"} if turn % 4 == 3 else {}
            out = torch.full((shards[rank], n), float("nan"), dtype=torch.bfloat16, device=device)
            y = ut.matmul_reduce_scatter(
                x, w, rows=shards, group=group, plan=plan if form == "c" else beside, out=out, **finish
            )  # fmt: skip
            right = want * (1 + turn % 3)
            right = torch.relu(right + bias.float()) if finish else right
            assert torch.equal(y, right.to(y.dtype)), (shards, n, k, turn, form)
    x, shard, part = xs[rank].clone(), torch.empty(shards[rank], n, dtype=torch.bfloat16, device=device), want

    def scattered() -> None:
        ut.matmul_reduce_scatter(x, ws[rank], group=group, plan=plan, out=shard)

    _replay(group, "sums from rank to rank", x, shard, scattered, part.to(torch.bfloat16))


CHECKS: list[Callable[[ut.Group], None]] = [sums_go_from_rank_to_rank]
