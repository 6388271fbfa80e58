"""Backward passes of the layers of tensor parallelism: the gradients of x and of w, as training needs both.

| layer | dx | dw |
|---|---|---|
| column (all_gather_matmul) | sum over ranks of dz @ w^T, scattered by rows | gathered x^T @ dz |
| row (matmul_reduce_scatter) | gathered dz @ w^T | x^T @ gathered dz |

cublas: both matmuls alone. gemm: the first of them by our own kernel. serial: cuBLAS and our collectives on symmetric
buffers, one after the other. fused: the operator's backward pass, by its usual plan and by others that `auto` would
try, bare as the serial ones; guarded: as users call it, watched. torch: PyTorch's async-TP operators.
"""

from __future__ import annotations

from typing import Any

import torch
from fused_common import BF16, Bench, Made, Variants, integers

from undertow.ops import all_gather_matmul, library, matmul_reduce_scatter
from undertow.ops.beside import Arriving, gathered_again
from undertow.ops.differentiable import name_of
from undertow.ops.finish import Finish
from undertow.ops.operands import like_weight
from undertow.plan.defaults import fused_plan, gather_forms, scatter_forms
from undertow.plan.plan import Plan


def column(bench: Bench, m: int, k: int, n: int) -> Made:
    """x [m / ranks, k], w [k, n], dz [m, n] -> dx [m / ranks, k], dw [k, n]"""
    size, rank, device, shard = bench.size, bench.rank, bench.device, m // bench.size
    whole = torch.cat([integers(shard, k, 100 + one, device, 3) for one in range(size)])
    x = whole[rank * shard : (rank + 1) * shard].clone()
    dzs, ws = ([integers(n, rows, seed + one, device, odds).t() for one in range(size)]
               for rows, seed, odds in ((m, 300, 8), (k, 200, 16)))  # fmt: skip
    dz, w = dzs[rank].contiguous(), ws[rank]
    total = torch.zeros(shard, k, device=device)
    for their_dz, their_w in zip(dzs, ws, strict=True):
        total += (their_dz[rank * shard : (rank + 1) * shard] @ their_w.t()).float()
    del dzs, ws
    want = total.to(BF16), whole.t() @ dz
    partial, dw = torch.empty(m, k, device=device, dtype=BF16), torch.empty(k, n, device=device, dtype=BF16)
    source, scattered = bench.buffer("source", m * k), bench.buffer("out", shard * k)
    held, gathered = bench.buffer("held", shard * k), bench.buffer("gathered", m * k)
    held.local.view(shard, k).copy_(x)
    problem = bench.problem("matmul_reduce_scatter", m, k, n)
    tile = fused_plan(problem, "peer").tile
    assert tile is not None
    alone, name = bench.gemm(dz, w.t(), partial, tile), name_of(bench.group)
    found: Variants = {
        "cublas": lambda _: (torch.mm(dz, w.t(), out=partial), torch.mm(whole.t(), dz, out=dw)),
        "gemm": lambda _: (alone(), torch.mm(whole.t(), dz, out=dw)),
        "guarded": lambda _: library.all_gather_matmul_backward(dz, x, w, None, [True, True], name, "fused:peer"),
    }
    for form, plan in scatter_forms(problem, "peer").items():

        def fused(_: int, plan: Plan = plan) -> tuple[torch.Tensor, ...]:
            made, weight = torch.empty(shard, k, device=device, dtype=BF16), like_weight(w)
            beside = gathered_again(x, [shard] * size, rank, dz, weight)
            finish, lane = Finish(None, "none"), bench.fabric.lane("peer")
            matmul_reduce_scatter.run(dz, w.t(), made, problem, plan, finish, bench.fabric, lane, beside=beside)
            return made, weight

        found[f"fused, {form}"] = fused
    for ctas in bench.ctas():
        scatters = bench.executable("reduce_scatter_direct", ctas, target="direct", in_place=False)
        gathers = bench.executable("all_gather_direct", ctas, target="direct", in_place=False)

        def serial(_: int, scatters: Any = scatters, gathers: Any = gathers) -> tuple[torch.Tensor, ...]:
            torch.mm(dz, w.t(), out=source.local.view(m, k))
            scatters.run(source, scattered, [shard * k] * size)
            gathers.run(held, gathered, [shard * k] * size)
            return scattered.local.view(shard, k), torch.mm(gathered.local.view(m, k).t(), dz, out=dw)

        found[f"serial {ctas}"] = serial

    def peer(_: int) -> tuple[torch.Tensor, ...]:
        rows = torch.ops.symm_mem._low_contention_all_gather(held.local, bench.name)
        dx = torch.ops.symm_mem.fused_matmul_reduce_scatter(dz, w.t(), "sum", 0, bench.name)
        return dx, torch.mm(torch.ops._c10d_functional.wait_tensor(rows).view(m, k).t(), dz, out=dw)

    found["torch"] = peer
    return found, want, (partial, dw, scattered.local, gathered.local)


def row(bench: Bench, m: int, k: int, n: int) -> Made:
    """x [m, k], w [k, n], dz [m / ranks, n] -> dx [m, k], dw [k, n]"""
    size, rank, device, shard = bench.size, bench.rank, bench.device, m // bench.size
    whole = torch.cat([integers(shard, n, 300 + one, device, 8) for one in range(size)])
    dz = whole[rank * shard : (rank + 1) * shard].clone()
    x, w = integers(m, k, 100 + rank, device, 3), integers(n, k, 200 + rank, device, 16).t()
    want = whole @ w.t(), x.t() @ whole
    dx, dw = torch.empty(m, k, device=device, dtype=BF16), torch.empty(k, n, device=device, dtype=BF16)
    held, gathered = bench.buffer("held", shard * n), bench.buffer("gathered", m * n)
    held.local.view(shard, n).copy_(dz)
    problem = bench.problem("all_gather_matmul", m, k, n)
    tile = fused_plan(problem, "peer").tile
    assert tile is not None
    alone, name = bench.gemm(whole, w.t(), dx, tile), name_of(bench.group)
    wanted = [True, True, False]
    found: Variants = {
        "cublas": lambda _: (torch.mm(whole, w.t(), out=dx), torch.mm(x.t(), whole, out=dw)),
        "gemm": lambda _: (alone(), torch.mm(x.t(), whole, out=dw)),
        "guarded": lambda _: library.matmul_reduce_scatter_backward(dz, x, w, None, wanted, name, "fused:peer")[:2],
    }
    for form, plan in gather_forms(problem, "peer").items():

        def fused(_: int, plan: Plan = plan) -> tuple[torch.Tensor, ...]:
            made, arriving = torch.empty(m, k, device=device, dtype=BF16), Arriving(x, w, bias=False)
            finish, lane = Finish(None, "none"), bench.fabric.lane("peer")
            all_gather_matmul.run(dz, w.t(), made, problem, plan, finish, bench.fabric, lane, arriving)
            return made, arriving.weight

        found[f"fused, {form}"] = fused
    for ctas in bench.ctas():
        gathers = bench.executable("all_gather_direct", ctas, target="direct", in_place=False)

        def serial(_: int, gathers: Any = gathers) -> tuple[torch.Tensor, ...]:
            gathers.run(held, gathered, [shard * n] * size)
            rows = gathered.local.view(m, n)
            return torch.mm(rows, w.t(), out=dx), torch.mm(x.t(), rows, out=dw)

        found[f"serial {ctas}"] = serial

    def peer(_: int) -> tuple[torch.Tensor, ...]:
        rows, (made,) = torch.ops.symm_mem.fused_all_gather_matmul(dz, [w.t()], 0, bench.name, return_A=True)
        return made, torch.mm(x.t(), rows, out=dw)

    found["torch"] = peer
    return found, want, (dx, dw, gathered.local)
