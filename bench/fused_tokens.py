"""Layers of expert parallelism: rows that change ranks, one weight for each local expert, uneven and empty groups.

| variant | what it is |
|---|---|
| cublas, cublas grouped | a matmul for each local expert, or torch's grouped one, of rows that lie together |
| gemm | our own kernel with communication off: every rank keeps its rows |
| serial blocks | a matmul for each block of rows (one expert, one rank), and a copy of symmetric memory for each rank |
| serial grouped | the same with torch's grouped matmul; rows are put by expert for it, and back |
| serial op, chunked op | the operator with that strategy, watched |
| fused | the kernel, bare; `fused op`: the operator with strategy="fused", watched |

`leave` is matmul_all_to_all (an expert's down projection), `arrive` all_to_all_matmul (gate and up).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from fused_common import BF16, Bench, Made, Variants, integers

import undertow as ut
from undertow.ops.finish import Finish
from undertow.plan.defaults import tokens_plan
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem
from undertow.plan.tokens import Block, Tokens

# hidden, intermediate, experts, how many of them a token takes
MODELS = {"mixtral-8x7b": (4096, 14336, 8, 2), "qwen3-30b": (2048, 768, 128, 8)}
_NOTHING = Finish(None, "none")


def cases(kind: str, rows: list[int]) -> list[tuple[str, str, int, int, int]]:
    """(kind, model, tokens of all ranks, K, N)"""
    found = []
    for m in rows:
        for model, (hidden, intermediate, _, _) in MODELS.items():
            k, n = (intermediate, hidden) if kind == "leave" else (hidden, 2 * intermediate)
            found.append((kind, model, m, k, n))
    return found


def _kernels() -> Any:
    from undertow.ops import tokens_cuda  # which needs a driver

    return tokens_cuda


def _model(k: int, n: int) -> tuple[int, int]:
    """(experts, of each token) of the model whose layer has these sizes."""
    for hidden, intermediate, experts, top in MODELS.values():
        if (k, n) in ((intermediate, hidden), (hidden, 2 * intermediate)):
            return experts, top
    raise ValueError(f"no model has a layer of K {k}, N {n}")


def sizes_of(ranks: int, m: int, experts: int, top: int) -> Tokens:
    """Rows by sender, receiver and expert, of m tokens in all; blocks of up to twice the usual, every seventh empty."""
    here = max(1, experts // ranks)
    usual = max(1, m * top // (ranks * ranks * here))
    counts = [0, usual // 2, usual, usual, usual, usual * 3 // 2, usual * 2]
    return Tokens.of([
        [[counts[(5 * sender + 3 * to + expert) % 7] for expert in range(here)] for to in range(ranks)]
        for sender in range(ranks)
    ])  # fmt: skip


def _factors(bench: Bench, tokens: Tokens, rank: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = integers(sum(tokens.matrix[rank]), k, 700 + rank, bench.device, 3)
    w = integers(tokens.experts * n, k, 800 + rank, bench.device, 16).view(tokens.experts, n, k).mT
    return x, w


def _kept(rows: list[list[int]]) -> Tokens:
    """So many rows of each rank's experts, which all stay there."""
    nobody = [0] * len(rows[0])
    return Tokens.of([[rows[rank] if rank == to else nobody for to in range(len(rows))] for rank in range(len(rows))])


def _plan(bench: Bench, tokens: Tokens, n: int, k: int, mirrored: bool = False) -> Plan:
    problem = Problem.for_splits(
        tokens.matrix, n, k, dtype="bfloat16", device="cuda", multiprocessors=bench.sms, bulk=bench.fabric.bulk_copies,
        experts=tokens.experts, mirrored=mirrored,
    )  # fmt: skip
    return tokens_plan(problem, "peer", tokens.usual_rows)


def _by_expert(blocks: tuple[Block, ...], experts: int) -> list[int]:
    return [sum(one.rows for one in blocks if one.expert == expert) for expert in range(experts)]


def _by_peer(blocks: tuple[Block, ...]) -> list[Block]:
    """Blocks of one rank as one: their rows lie together at both ends."""
    found: list[Block] = []
    for one in blocks:
        if found and found[-1].peer == one.peer:
            found[-1] = replace(found[-1], rows=found[-1].rows + one.rows)
        else:
            found.append(one)
    return found


def _sorted(blocks: tuple[Block, ...], experts: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Rows by expert, where each of them went, and where the rows of each expert end."""
    order = [row for expert in range(experts) for one in blocks if one.expert == expert
             for row in range(one.row, one.row + one.rows)]  # fmt: skip
    rows = torch.tensor(order, dtype=torch.int64, device=device)
    ends = torch.tensor(_by_expert(blocks, experts), device=device).cumsum(0).to(torch.int32)
    return rows, rows.argsort(), ends


def _grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows by expert @ w of each: one launch."""
    return torch._grouped_mm(x, w, offs=ends)  # type: ignore[attr-defined,no-any-return]


def _alone(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, rows: list[int]) -> torch.Tensor:
    first = 0
    for expert, count in enumerate(rows):
        if count:
            torch.mm(x[first : first + count], w[expert], out=y[first : first + count])
        first += count
    return y


def leave(bench: Bench, m: int, k: int, n: int) -> Made:
    tokens = sizes_of(bench.size, m, *_model(k, n))
    rank, size, leaving = bench.rank, bench.size, tokens.leaving(bench.rank)
    want = torch.empty(sum(row[rank] for row in tokens.matrix), n, device=bench.device, dtype=BF16)
    for sender in range(size):
        x, w = _factors(bench, tokens, sender, k, n)
        for one in tokens.leaving(sender):
            if one.peer == rank:
                want[one.there : one.there + one.rows] = x[one.row : one.row + one.rows] @ w[one.expert]
        del x, w
    x, w = _factors(bench, tokens, rank, k, n)
    y, out = torch.empty(len(x), n, device=bench.device, dtype=BF16), torch.empty_like(want)
    plan, alone = (
        _plan(bench, tokens, n, k),
        _kept([_by_expert(tokens.leaving(one), tokens.experts) for one in range(size)]),
    )
    fused = _kernels().exchange
    source = bench.buffer("source", max(map(sum, tokens.matrix)) * n)
    mine, arriving = source.local[: y.numel()].view(y.shape), _by_peer(tokens.arriving(rank))
    order, back, ends = _sorted(leaving, tokens.experts, bench.device)
    by_expert = x[order]

    def serial(_: int) -> torch.Tensor:
        for one in leaving:
            torch.mm(x[one.row : one.row + one.rows], w[one.expert], out=mine[one.row : one.row + one.rows])
        return fetched()

    def grouped(_: int) -> torch.Tensor:
        torch.index_select(_grouped(by_expert, w, ends), 0, back, out=mine)
        return fetched()

    def fetched() -> torch.Tensor:
        bench.align()  # all have multiplied
        for one in arriving:
            theirs = source.peer(one.peer)[one.there * n : (one.there + one.rows) * n]
            out[one.row : one.row + one.rows].copy_(theirs.view(one.rows, n))
        bench.align()  # all have read
        return out

    found: Variants = {
        "cublas": lambda _: _alone(x, w, y, _by_expert(leaving, tokens.experts)),
        "cublas grouped": lambda _: _grouped(by_expert, w, ends),
        "gemm": lambda _: (fused(x, w, y, alone, plan, _NOTHING, bench.fabric)(), y)[1],
        "fused": lambda _: (fused(x, w, out, tokens, plan, _NOTHING, bench.fabric)(), out)[1],
        "serial blocks": serial, "serial grouped": grouped,
        **_operators(bench, ut.matmul_all_to_all, x, w, tokens, out),
    }  # fmt: skip
    return found, want, (y, out)


def arrive(bench: Bench, m: int, k: int, n: int) -> Made:
    tokens = sizes_of(bench.size, m, *_model(k, n))
    rank, size, arriving = bench.rank, bench.size, tokens.arriving(bench.rank)
    x, w = _factors(bench, tokens, rank, k, n)
    rows = sum(row[rank] for row in tokens.matrix)
    whole, received, y, out = (torch.empty(rows, one, device=bench.device, dtype=BF16) for one in (k, k, n, n))
    for sender in range(size):
        theirs = x if sender == rank else _factors(bench, tokens, sender, k, 8)[0]
        for one in tokens.leaving(sender):
            if one.peer == rank:
                whole[one.there : one.there + one.rows] = theirs[one.row : one.row + one.rows]
    want = torch.empty(rows, n, device=bench.device, dtype=BF16)
    for one in arriving:
        torch.mm(whole[one.row : one.row + one.rows], w[one.expert], out=want[one.row : one.row + one.rows])
    plan, alone = (
        _plan(bench, tokens.back, k, n, mirrored=True),
        _kept([_by_expert(tokens.arriving(one), tokens.experts) for one in range(size)]),
    )
    fused = _kernels().arrive
    source = bench.buffer("source", max(map(sum, tokens.matrix)) * k)
    source.local[: x.numel()].view(x.shape).copy_(x)
    order, back, ends = _sorted(arriving, tokens.experts, bench.device)
    by_expert = whole[order]

    def fetch() -> None:
        bench.align()  # all may be read; what is read never changes here
        for one in _by_peer(arriving):
            theirs = source.peer(one.peer)[one.there * k : (one.there + one.rows) * k]
            received[one.row : one.row + one.rows].copy_(theirs.view(one.rows, k))

    def serial(_: int) -> torch.Tensor:
        fetch()
        for one in arriving:
            torch.mm(received[one.row : one.row + one.rows], w[one.expert], out=y[one.row : one.row + one.rows])
        return y

    def grouped(_: int) -> torch.Tensor:
        fetch()
        return torch.index_select(_grouped(received[order], w, ends), 0, back, out=y)

    found: Variants = {
        "cublas": lambda _: _alone(whole, w, y, _by_expert(arriving, tokens.experts)),
        "cublas grouped": lambda _: _grouped(by_expert, w, ends),
        "gemm": lambda _: (fused(whole, w, whole, y, alone, plan, _NOTHING, bench.fabric, None, False)(), y)[1],
        "fused": lambda _: (fused(x, w, received, out, tokens, plan, _NOTHING, bench.fabric, None, False)(), out)[1],
        "serial blocks": serial, "serial grouped": grouped,
        **_operators(bench, ut.all_to_all_matmul, x, w, tokens, out),
    }  # fmt: skip
    return found, want, (y, out, received)


def _operators(
    bench: Bench, call: Any, x: torch.Tensor, w: torch.Tensor, tokens: Tokens, out: torch.Tensor
) -> Variants:
    """As users call it."""

    def variant(strategy: str) -> Any:
        return lambda _: call(x, w, group_sizes=tokens.sizes, group=bench.group, strategy=strategy, out=out)

    strategies = {"serial op": "serial:peer", "chunked op": "chunked:peer", "fused op": "fused:peer"}
    return {name: variant(strategy) for name, strategy in strategies.items()}
