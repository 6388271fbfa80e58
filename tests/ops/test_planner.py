"""strategy "auto": the same plan on all ranks whatever their caches hold, never slower than serial, and explained."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import planner_targets as targets
import pytest
import torch

import undertow as ut
from undertow import settings
from undertow.errors import LaunchFailed
from undertow.ops import tuning
from undertow.ops.choose import Request
from undertow.ops.explain import Candidate, Choice, Explanation
from undertow.plan.defaults import default_plan
from undertow.plan.machine import Machine
from undertow.plan.plan import Plan, split
from undertow.plan.problem import Problem
from undertow.plan.tuner import BUDGET_SECONDS, TIE


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UNDERTOW_FLIGHT_DIR", str(tmp_path / "flight"))


# -- all ranks run the same plan ---------------------------------------------------------------------------------------


def test_a_plan_on_disk_counts_only_if_all_ranks_hold_it(tmp_path: Path) -> None:
    found = ut.launch(targets.caches, 3, device="cpu", args=(str(tmp_path),), deadline=20)
    digest, planted = found[0].pop("planted")
    assert found[1].pop("planted") == found[2].pop("planted") == (digest, planted)
    for state in found[0]:
        assert len({one[state][0] for one in found}) == 1, f"{state}: ranks ran different plans"
        for _, reason in (one[state] for one in found):
            assert ("Known from" in reason) == state.startswith("whole"), (state, reason)
    assert found[0]["whole"][0] == found[0]["whole again"][0] == digest
    assert found[0]["whole"][1].endswith(planted)


def test_what_was_measured_is_kept_and_found() -> None:
    for found in ut.launch(targets.kept_on_disk, 2, device="cpu", deadline=20):
        assert found["same"]
        assert len(found["files"]) == 1
        first, second = found["first"], found["second"]
        assert second["reason"].endswith(first["reason"])
        assert second["reason"].startswith("Known from 20")
        assert second["gemm_seconds"] == first["gemm_seconds"] > 0
        assert sum(one["chosen"] for one in first["candidates"]) == 1
        assert sum(one["chosen"] for one in second["candidates"]) == 1
        assert first["serial_seconds"] > 0
        json.dumps(first)
        assert "predicted" in found["text"]
        assert "measured" in found["text"]


def test_ranks_that_differ_in_shape_hear_of_it() -> None:
    for found, usable in ut.launch(targets.other_shape_at_first, 2, device="cpu", deadline=20):
        assert found == (
            "MismatchedCall: Ranks of group 0 disagree on call 1: rank 0 called matmul_all_reduce(M 48, N 40, float32)"
            " as auto, choice 1, but rank 1 called matmul_all_reduce(M 49, N 40, float32) as auto, choice 1."
        )
        assert usable
    for found, usable in ut.launch(targets.rows_without_splits, 2, device="cpu", deadline=20):
        called = r"called matmul_all_to_all\(splits "
        assert re.search(rf"rank 0 {called}\[\[2, 2\], .* but rank 1 {called}\[\[3, 2\], ", found)
        assert usable


def test_a_rank_that_meets_a_new_shape_alone_does_not_hang() -> None:
    with pytest.raises(LaunchFailed) as caught:
        ut.launch(targets.other_shape_later, 2, device="cpu", deadline=2)
    outcomes = caught.value.facts["outcomes"]
    assert all(one.startswith(("MismatchedCall", "RankLost")) for one in outcomes), outcomes
    sentence = next(one for one in outcomes if one.startswith("MismatchedCall"))
    assert "matmul_all_reduce(M 48, N 40, float32) as " in sentence
    assert "matmul_all_reduce(M 96, N 40, float32) as auto, choice 2" in sentence


def test_ranks_may_differ_in_their_part() -> None:
    first, second = ut.launch(targets.uneven_parts, 2, device="cpu", deadline=20)
    assert first == second


def test_nothing_is_measured_while_tracing_or_in_deterministic_mode() -> None:
    for unknown, fixed, name in ut.launch(targets.while_tracing, 2, device="cpu", deadline=20):
        assert unknown == (
            "Nothing is known of this problem and nothing can be measured while torch traces, so serial runs."
        )
        assert fixed.startswith("Deterministic algorithms are asked for")
        assert name == "serial:peer"


def test_results_are_exact_on_the_call_that_measures_and_after_it() -> None:
    found = ut.launch(targets.exact, 3, device="cpu", deadline=30)
    assert found[0] == found[1] == found[2]


def test_one_rank_has_nothing_to_choose() -> None:
    assert ut.launch(targets.alone, 1, device="cpu") == ["One rank has nothing to send."]


def test_tuning_with_patience() -> None:
    for found in ut.launch(targets.tuned, 2, device="cpu", deadline=20):
        assert found["plan"]
        assert found["anew"]
        assert found["serial"] > 0
        assert found["trials"] > 3
        assert found["inside"] == 5
        assert found["explicit"] == (
            "InvalidArgument: function is multiply, which called no operator with strategy 'auto', but must be an"
            " operator, or a function that calls one."
        )
        assert found["budget"].startswith("InvalidArgument: budget_seconds is 0")


# -- never slower: made-up times, no ranks -----------------------------------------------------------------------------

MACHINE = Machine.from_dict(
    {
        "format": "undertow machine 1",
        "name": "made up",
        "device": "cpu",
        "ranks": 2,
        "shares_device": False,
        "launch_seconds": 1e-6,
        "stream_seconds": 1e-5,
        "gemm": {"workers": "threads", "shape": [512, 512, 512], "dtype": "float32", "points": [[1, 3e-3]]},
        "lanes": {
            name: {
                "description": "made up",
                "emulated": False,
                "gemm_slowdown": 1.0,
                "lane_slowdown": 1.0,
                "points": [[1024, 1e-5], [1 << 20, 1e-3]],
            }
            for name in ("net", "peer", "dma")
        },
        "environment": {},
    }
)


class FakeGroup:
    """The first of two ranks that always agree."""

    def __init__(self) -> None:
        self.rank, self.size, self.name, self.calls = 0, 2, "fake", 0
        self.local_ranks, self.nodes, self.process_group = (0, 1), (0, 0), None
        self.device = torch.device("cpu")
        self.fabric = SimpleNamespace(
            kept={}, lanes=lambda: dict.fromkeys(("net", "peer", "dma"), ""), settle=lambda: None, multiprocessors=1,
            lane=lambda name: SimpleNamespace(name=name, in_rounds=False), unknown_sharers="",
            guarded_call=lambda outputs: contextlib.nullcontext(), follow=lambda what: None,
            enqueued=lambda what: None,
        )  # fmt: skip

    def exchange(self, value: Any, purpose: str) -> list[Any]:
        return [json.loads(json.dumps(value))] * 2

    def reduce_max(self, values: list[float]) -> list[float]:
        return values

    def barrier(self) -> None:
        return

    @contextlib.contextmanager
    def call(self, operator: str, shape: str, plan: str) -> Iterator[int]:
        self.calls += 1
        yield self.calls


class Bench:
    """Calls that take as long as `truth` says, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.group, self.now, self.ran = FakeGroup(), 0.0, list[Plan]()
        self._chance, self._seed = random.Random(seed), seed
        monkeypatch.setattr(tuning, "machine_of", lambda group: MACHINE)
        monkeypatch.setattr(tuning, "seconds_of", self._seconds_of)

    def truth(self, plan: Plan) -> float:
        """Serial takes 2 ms; of the others some are faster, some slower, by what they are."""
        if plan.grain == "serial":
            return 2e-3
        return 2e-3 * random.Random(f"{self._seed} {plan.digest}").choice((0.6, 0.97, 1.0, 1.02, 1.5, 4.0))

    def run(self, plan: Plan, lane: object) -> None:
        self.ran.append(plan)
        self.now += self.truth(plan) * (1 + 0.002 * self._chance.random())

    def _seconds_of(self, work: Any, device: torch.device) -> float:
        before = self.now
        work()
        return self.now - before

    def matmul(self) -> None:
        self.now += 1e-3

    def request(self, rows: int) -> Request:
        return self.of(
            Problem.of("matmul_all_reduce", rows, 256, 256, dtype="float32", ranks=2, device="cpu", multiprocessors=1)
        )

    def of(self, problem: Problem, **options: Any) -> Request:
        output = torch.empty(0)
        return Request(problem, self.group, "x, w", f"M {problem.m}", output, self.run, self.matmul, **options)  # type: ignore[arg-type]

    def tokens(self, splits: list[list[int]], experts: int, mirrored: bool, **options: Any) -> Request:
        return self.of(
            Problem.for_splits(
                splits, 256, 256, dtype="float32", device="cpu", multiprocessors=1, experts=experts, mirrored=mirrored
            ),
            **options,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_auto_never_picks_what_is_slower_than_serial(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, seed)
    choice = tuning.auto(bench.request(512))
    tried = {plan.digest: bench.truth(plan) for plan in bench.ran}
    assert bench.truth(choice.plan) <= 2e-3
    if min(tried.values()) < 2e-3 * (1 - 2 * TIE):
        assert bench.truth(choice.plan) == min(tried.values())
    assert bench.now <= BUDGET_SECONDS
    assert any(plan.grain == "serial" for plan in bench.ran)
    before = len(bench.ran)
    assert tuning.auto(bench.request(512)) is choice  # known: nothing runs
    assert len(bench.ran) == before
    assert choice.gemm_seconds == pytest.approx(1e-3)


@pytest.mark.parametrize(("experts", "mirrored"), [(4, False), (1, True), (4, True)])
@pytest.mark.parametrize("seed", range(4))
def test_auto_never_picks_what_is_slower_than_serial_for_tokens(
    seed: int, experts: int, mirrored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, forgotten = Bench(monkeypatch, seed), list[int]()
    kind = {"experts": experts, "mirrored": mirrored}
    request = bench.tokens([[300, 150], [0, 7]], **kind, forget=lambda: forgotten.append(len(bench.ran)))
    choice = tuning.auto(request)
    tried = {plan.digest: bench.truth(plan) for plan in bench.ran}
    assert bench.truth(choice.plan) <= 2e-3
    if min(tried.values()) < 2e-3 * (1 - 2 * TIE):
        assert bench.truth(choice.plan) == min(tried.values())
    assert bench.now <= BUDGET_SECONDS
    grains = {plan.grain for plan in bench.ran}
    assert grains == ({"serial", "chunked"} if mirrored else {"serial", "chunked", "signaled"})
    assert len(forgotten) == len(bench.ran) - len(tried), "maps are made anew for each call but the first of a plan"
    before = len(bench.ran)
    for splits in ([[0, 0], [0, 257]], [[256, 256], [512, 0]]):  # the same class of problems
        assert tuning.auto(bench.tokens(splits, **kind)) is choice
    assert len(bench.ran) == before
    for other in (
        bench.tokens([[300, 150], [0, 7]], experts=experts + 1, mirrored=mirrored),
        bench.tokens([[300, 213], [0, 7]], **kind),
        bench.tokens([[0, 0], [0, 0]], **kind),
        bench.tokens([[300, 150], [0, 7]], experts=experts, mirrored=not mirrored),
    ):
        assert tuning.auto(other) is not choice
        assert len(bench.ran) > before
        before = len(bench.ran)


def test_what_cannot_run_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 1)
    real = bench.run

    def refuse(plan: Plan, lane: object) -> None:
        if plan.grain != "serial":
            raise ut.errors.StrategyUnavailable(strategy=plan.name, reason="no", possible="serial")  # type: ignore[attr-defined]
        real(plan, lane)

    monkeypatch.setattr(bench, "run", refuse)
    choice = tuning.auto(bench.request(512))
    assert choice.plan.grain == "serial"
    assert all(one.measured is None for one in choice.candidates if not one.name.startswith("serial"))


def test_a_plan_without_memory_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 1)
    real = bench.run

    def exhaust(plan: Plan, lane: object) -> None:
        if plan.grain == "signaled":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much.")
        real(plan, lane)

    monkeypatch.setattr(bench, "run", exhaust)
    choice = tuning.auto(bench.request(512))
    assert choice.plan.grain != "signaled"
    assert re.search(r"signaled:\w+ could not run \(rank 0: CUDA out of memory\)\.", choice.reason)
    assert all(one.measured is None for one in choice.candidates if one.name.startswith("signaled"))


def test_where_no_buffer_fits_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 1)
    monkeypatch.setattr(tuning, "_BUFFERS", 1 << 40)
    choice = tuning.auto(bench.request(512))
    assert bench.ran == []
    assert choice.plan.grain == "serial"
    assert "could not run (rank 0: " in choice.reason


def test_a_group_forgets_its_oldest_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    known, choice = tuning.Known(), Choice(Plan("serial", "net", ((0, 1),)), "")
    monkeypatch.setattr(tuning, "_MOST", 3)
    problems = [Bench(monkeypatch, 1).request(rows).problem for rows in (1, 2, 3, 4)]
    for problem in problems:
        known.add(problem, choice)
    assert [known.find(problem) is not None for problem in problems] == [False, True, True, True]
    assert known.made == 4


def test_deterministic_plans_sum_in_rank_order_over_every_lane() -> None:
    for found in ut.launch(targets.deterministic_bits, 3, device="cpu", deadline=20):
        assert found == [True] * 10


# -- explain -----------------------------------------------------------------------------------------------------------


def test_this_threads_calls_are_remembered() -> None:
    for found in ut.launch(targets.history, 2, device="cpu", deadline=20):
        text = found.pop("str")
        assert text.startswith("matmul_all_reduce(x [48, 16], w [16, 40], float32) on group 0, call 2: asked for ")
        assert "'chunked:dma', ran chunked:dma in 4 parcels (plan " in text
        assert text.endswith("The strategy was given.")
        assert all(found.values()), found


def test_an_explanation_says_how_rows_are_brought() -> None:
    problem = Problem.of(
        "all_gather_matmul", 4096, 512, 64, dtype="bfloat16", ranks=4, device="cuda", multiprocessors=33, together=True
    )
    plan = default_plan(problem, "fused", "peer")
    way = "rows pulled, brought by 1 of 33 CTAs while the others multiply own ones"
    known = Candidate("fused:peer", 1, None, 2e-3, chosen=True, way=way)
    explanation = Explanation(problem.operator, "x, w", "0", 7, "fused", Choice(plan, "So.", (known,)))
    first, row = str(explanation).splitlines()
    assert f"ran fused:peer in 1 parcel, {way} (plan {plan.digest}). So." in first
    assert row.endswith(f"measured      2 ms, {way}")
    found = explanation.to_dict()
    assert (found["way"], found["candidates"][0]["way"]) == (way, way)


def test_an_explanation_says_what_was_hidden() -> None:
    plan = Plan("chunked", "dma", split(8, 2))
    choice = Choice(
        plan,
        "It was faster.",
        (Candidate("serial:net", 1, 2.5e-3, 3e-3), Candidate("chunked:dma", 2, None, 2e-3, chosen=True)),
        1.5e-3,
    )
    explanation = Explanation("matmul_all_reduce", "x, w", "0", 7, "auto", choice)
    found = explanation.to_dict()
    assert found["seconds"] == 2e-3
    assert found["serial_seconds"] == 3e-3
    assert found["effective_communication_seconds"] == pytest.approx(0.5e-3)
    assert found["overlap_efficiency"] == pytest.approx(1 - 0.5 / 1.5)
    assert found["share_of_ideal"] == pytest.approx(0.5)  # S is 1.5, at best 2
    assert found["reason"] == "It was faster."
    assert str(explanation).splitlines()[1:] == [
        "The matmul alone takes 1.5 ms, serial 3 ms, this plan 2 ms: effective communication time 0.5 ms, overlap"
        " efficiency E 67%, 50% of the ideal speed-up.",
        "    serial:net          1 parcel   predicted    2.5 ms   measured      3 ms",
        "  > chunked:dma        2 parcels   predicted         –   measured      2 ms",
    ]
    json.dumps(found)
    bare = Choice(plan, "The plan was given.")
    assert (bare.seconds, bare.serial_seconds, bare.overlap_efficiency, bare.share_of_ideal) == (None,) * 4


def test_posts_are_tried_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves them on a GPU is younger than what has run there."""
    plans = {lane: Plan("fused", lane, ((0, 64),), tile=(64, 64)) for lane in ("dma", "peer")}
    on = {
        device: Problem.of("matmul_all_reduce", 64, 64, 64, dtype="bfloat16", ranks=2, device=device, multiprocessors=8)
        for device in ("cpu", "cuda")
    }
    for said, posts in (("0", False), ("1", True)):
        monkeypatch.setenv(settings.POSTS.name, said)
        assert tuning._may_be_tried(on["cuda"], plans["dma"], "") == posts
        assert tuning._may_be_tried(on["cuda"], plans["peer"], "")
        assert not tuning._may_be_tried(on["cuda"], plans["peer"], "ranks differ")
        assert tuning._may_be_tried(on["cpu"], plans["dma"], ""), "a thread of the CPU moves its own tiles"
        known = SimpleNamespace(plan=plans["dma"])
        monkeypatch.setattr(tuning.cache, "load", lambda *_: known)  # noqa: B023
        monkeypatch.setattr(tuning, "available", lambda group: ["dma"])
        group: Any = SimpleNamespace(exchange=lambda mine, what: [mine])
        assert (tuning._on_disk(on["cuda"], "", {}, group, "") is known) == posts
