"""The benchmark of the planner, without a GPU: its candidates, and its figures where every time is as predicted."""

from __future__ import annotations

import dataclasses
import random
import sys
import types
from pathlib import Path
from typing import Any

import plan_machines as machines
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gpu_pick

from undertow.plan.predict import predict
from undertow.plan.staged import Engines

MACHINE = dataclasses.replace(
    machines.machine(),
    engines=Engines(4.8e10, 5e10, 1.5e-5, 1.7e-5, 1e-5, 8 << 20, 1e11, 1e12, call=5e-4, enqueue=1e-4),
)


@pytest.mark.parametrize("operator", list(gpu_pick.OPERATORS))
def test_candidates_fit_and_are_at_most_48(operator: str) -> None:
    for m in (2048, 3072, 8192):
        problem = machines.problem(operator, m=m)
        found = gpu_pick.fixed_candidates(problem, MACHINE)
        for plan in found.values():
            plan.check(problem)
        posted = [name for name in found if name.startswith("posted by ")]
        assert (1 if operator != "matmul_all_to_all" else 0) <= len(posted) <= 5
        assert len(found) - len(posted) <= 48 + 3  # and those of the model
        assert len(found) - len(posted) > (40 if m == 8192 else 20)
        assert {"serial", "best", "chunks of 2", "flash overlap", "growing", "shrinking"} <= set(found)


def test_a_run_where_predictions_are_nearly_right(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    asked: list[Any] = []
    fabric = types.SimpleNamespace(multiprocessors=32, together=False)
    group = types.SimpleNamespace(
        size=4, rank=0, device=torch.device("cpu"), fabric=fabric, exchange=lambda value, what: [value] * 4
    )
    bench: Any = object.__new__(gpu_pick.Bench)
    bench.group, bench.machine = group, MACHINE
    monkeypatch.setattr(gpu_pick, "N", 1024)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(gpu_pick, "bare_communication", lambda *_: lambda: asked.append(4e-3))
    problem = machines.problem("matmul_all_reduce", m=2048, n=1024, k=512)

    def call(x: torch.Tensor, w: torch.Tensor, *, group: Any, plan: Any, out: torch.Tensor) -> None:
        asked.append(predict(problem, plan, MACHINE).total * 1.02)

    monkeypatch.setattr(gpu_pick, "CALLS", {"matmul_all_reduce": call})

    def seconds(call: Any) -> float:
        asked.append(3e-3)  # of the matmul, which tells nothing
        call()
        return float(asked[-1]) * chance.uniform(0.999, 1.001)

    bench.seconds = seconds
    monkeypatch.setattr(gpu_pick, "wall_seconds", lambda group, call: seconds(call))
    found = bench.shape("matmul_all_reduce", 2048, 512)
    judged = gpu_pick.judged(found)
    assert judged["error"] == pytest.approx(0.02, abs=0.002)
    assert judged["first"] <= 1.002
    assert judged["auto"] <= 1.03
    assert found["alone"] == pytest.approx({"gemm": 3e-3, "communication": 4e-3}, rel=0.01)
    assert "share of ideal" in gpu_pick.line(found)
    lines = gpu_pick.summary([found], 1.2e10, 4)
    assert "mean absolute error 2.0%" in lines[0]
    rounds = {len(found["seconds"][name]) for name in found["plans"]}
    assert max(rounds) == gpu_pick.ROUNDS
    assert len(found["seconds"]["serial"]) == gpu_pick.ROUNDS
