"""The one loop of parcels, on streams that only say what they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from undertow.ops.beside import Beside
from undertow.ops.choose import Request
from undertow.ops.overlap import overlap
from undertow.ops.product import NoProduct
from undertow.plan.plan import Plan


@pytest.mark.parametrize("capturing", [False, True])
def test_what_was_brought_is_used_before_its_memory_is_given_out_again(capturing: bool) -> None:
    """Whatever stream the next call is on. A capture must end with all that was forked joined."""
    said: list[str] = []

    def stream(name: str, priority: int = 0) -> Any:
        def run(work: Callable[[], None]) -> None:
            work()

        return SimpleNamespace(
            fork=lambda: said.append(f"fork {name}"), join=lambda: said.append(f"join {name}"), run=run
        )

    fabric: Any = SimpleNamespace(
        group=SimpleNamespace(failed=False), stream=stream, capturing=lambda: capturing,
        poison_if_aborted=lambda *made: None,
    )  # fmt: skip
    lane: Any = SimpleNamespace(limit=lambda ctas: None, flush=lambda: None)
    beside = Beside(lambda: said.append("use"), lambda carrier: said.append("bring"))
    carrier: Any = None
    plan = Plan("chunked", "peer", ((0, 4),))
    overlap(fabric, lane, plan, NoProduct(), lambda parcel: None, (), 1, beside, carrier)
    found = [one for one in said if "communication" not in one]
    assert found == ["fork beside", "bring", "join beside", "use", *([] if capturing else ["fork beside"])]


@pytest.mark.parametrize("grain", ["serial", "chunked", "fused"])
def test_calls_over_a_lane_follow_each_other(grain: str) -> None:
    """Two receivers on two streams would both take the first message. Fused kernels have an order of their own."""
    said: list[str] = []
    fabric: Any = SimpleNamespace(
        lane=lambda name: SimpleNamespace(name=name), guarded_call=lambda outputs: contextlib.nullcontext(),
        follow=lambda what: said.append(f"follow {what}"), enqueued=lambda what: said.append(f"enqueued {what}"),
    )  # fmt: skip
    group: Any = SimpleNamespace(fabric=fabric)
    problem: Any = None

    def run(plan: Plan, lane: Any) -> None:
        said.append("run")

    request = Request(problem, group, "", "", torch.empty(0), run, lambda: None)
    request.execute(Plan(grain, "dma", ((0, 4),)))
    assert said == (["run"] if grain == "fused" else ["follow lane dma", "run", "enqueued lane dma"])
