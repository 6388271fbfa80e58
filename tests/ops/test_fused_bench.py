"""The rivals in the benchmark of tokens, on a CPU: they give what the fused kernels must give.

Ranks come one after the other and wait for nobody, so every variant runs twice: the first time for what it sends.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import fused_layers
import fused_report
import fused_tokens
import gpu_fused

from undertow.plan import brought, fused, fused_order
from undertow.plan.defaults import fused_plan
from undertow.plan.problem import Problem

RANKS, TOKENS = 3, 40
RIVALS = ("serial blocks", "serial grouped")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `Bench` is to the layers, of all ranks."""
    monkeypatch.setattr(fused_tokens, "MODELS", {"small": (16, 24, 6, 2)})
    monkeypatch.setattr(fused_tokens, "_kernels", lambda: types.SimpleNamespace(exchange=None, arrive=None))
    memory: list[torch.Tensor] = [torch.empty(0, dtype=torch.bfloat16)] * RANKS

    def buffer(rank: int, elements: int) -> Any:
        if memory[rank].numel() < elements:
            memory[rank] = torch.full((elements,), float("nan"), dtype=torch.bfloat16)
        return types.SimpleNamespace(local=memory[rank], peer=lambda one: memory[one])

    return [
        types.SimpleNamespace(
            rank=rank, size=RANKS, device=torch.device("cpu"), sms=33, group=None, align=lambda: None,
            fabric=types.SimpleNamespace(bulk_copies=True), buffer=lambda _, count, rank=rank: buffer(rank, count),
        )
        for rank in range(RANKS)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["leave", "arrive"])
def test_rivals_are_right(kind: str, node: list[Any]) -> None:
    (_, _, m, k, n) = fused_tokens.cases(kind, [TOKENS])[0]
    made = [getattr(fused_tokens, kind)(bench, m, k, n) for bench in node]
    for name in RIVALS:
        for again in range(2):
            for variants, want, poisoned in made:
                for one in poisoned:
                    one.fill_(float("nan"))
                found = variants[name](0)
                if again:
                    assert torch.equal(found, want), name
    for variants, want, _ in made:
        assert variants["cublas"](0).isfinite().all()
        assert variants["cublas grouped"](0).shape[1] == want.shape[1]


def test_the_better_rival_counts() -> None:
    median = {
        "cublas": 4.0,
        "cublas grouped": 2.0,
        "gemm": 3.0,
        "fused": 4.0,
        "serial blocks": 9.0,
        "serial grouped": 6.0,
    }
    scores = fused_report.scores({"kind": "leave", "median": median})
    assert scores["over serial"] == 1.5
    assert scores["E"] == 0.5


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("m", [1, 4, 16, 64])
def test_plans_of_few_rows_that_are_tried_fit(m: int, ranks: int) -> None:
    problem = Problem.of(
        "matmul_all_reduce", m, 8192, 1024, dtype="bfloat16", ranks=ranks, device="cuda", multiprocessors=132 // ranks
    )  # fmt: skip
    base = fused_plan(problem, "peer")
    names = fused_layers._asked(["all"], m)
    plans = [fused_layers._few_rows(problem, base, name) for name in names]
    for plan in plans:
        plan.check(problem)
    assert len(set(plans)) == len(names)
    assert base in plans
    one, two = (fused_layers._few_rows(problem, base, name) for name in ("one/64/2", "two/128/512"))
    rows = max(16, base.tile[0])  # type: ignore[index]
    assert (one.tile, one.split, one.owners, one.ahead) == ((rows, 64), 2, "rows", 0)
    assert (two.tile, two.split, two.owners, two.ahead) == ((rows, 128), 0, "columns", 512)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("together", [True, False])
def test_every_plan_of_every_listed_gather_fits(ranks: int, together: bool) -> None:
    """Also its tables: every tile once."""
    options = {"only": ["gather"], "models": list(gpu_fused.HIDDEN), "m": [2048, 8192, 512, 4096, 1024]}
    listed = gpu_fused.cases(options, ranks)
    assert len(listed) == 5 * 4
    for _, _, m, k, n in listed:
        problem = Problem.of(
            "all_gather_matmul", m, n, k, dtype="bfloat16", ranks=ranks, device="cuda", multiprocessors=132 // ranks,
            together=together,
        )  # fmt: skip
        plans = fused_layers.gather_plans(problem, [4, 8, 16, 32])
        assert plans["fused"] == fused_plan(problem, "peer")
        assert len(set(plans.values())) == len(plans)
        forms = [fused.brought(problem, plan) for plan in plans.values()]
        assert True in forms or not together
        assert False in forms
        for name, plan in plans.items():
            plan.check(problem)
            assert plan.tile is not None, name
            tiles = brought.table if fused.brought(problem, plan) else fused_order.gather_table
            table = tiles(problem.shards, n, plan, 1)
            assert len(set(table[:, fused_order.PLACE].tolist())) == len(table)
            assert int((table[:, fused_order.ROWS] * table[:, fused_order.COLUMNS]).sum()) == m * n


def test_weights_that_are_streamed_are_told() -> None:
    took = {"cublas": 16e-6, "fused": 20e-6, "fused one/64/0": 18e-6, "serial packets": 30e-6, "torch one-shot": 27e-6}
    found = {"kind": "decode", "label": "", "ranks": 4, "m": 1, "k": 1024, "n": 8192, "median": took, "eager": []}
    text = fused_report.line({**found, "wrong": {}, "spent": 1.0})
    assert "TB/s of weights: fused 3.73, cublas 4.19 | x serial 1.50 x torch 1.50 E 0.82" in text
