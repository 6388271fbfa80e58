"""strategy "auto" of rows that change ranks: measured once for a class of counts, and the same on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import token_auto_targets as targets

import undertow as ut

OPERATORS = targets.OPERATORS


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UNDERTOW_FLIGHT_DIR", str(tmp_path / "flight"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_exact_on_calls_that_measure_and_after_them(ranks: int) -> None:
    assert ut.launch(targets.exact, ranks, device="cpu", args=(ranks, 8), deadline=30) == [8] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_exact(ranks: int) -> None:
    assert ut.launch(targets.gradients, ranks, device="cpu", args=(ranks, 4), deadline=30) == [4] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_class_of_counts_is_measured_once(operator: str, ranks: int) -> None:
    found = ut.launch(targets.once_for_a_class, ranks, device="cpu", args=(operator,), deadline=20)
    assert [made for made, *_ in found[0]] == [1, 1, 1, 1, 2, 2, 2]
    for number, calls in enumerate(zip(*found, strict=True)):
        assert len({digest for _, digest, *_ in calls}) == 1, f"call {number}: ranks ran different plans"
    _, digests, reasons, texts = zip(*found[0], strict=True)
    assert len({digests[call] for call in (0, 1, 2, 3, 6)}) == 1
    assert digests[4] == digests[5]
    assert len({reasons[call] for call in (0, 1, 2, 3, 6)}) == 1
    name = "matmul_all_to_all" if operator == "leaving" else "all_to_all_matmul"
    for reason, text in zip(reasons, texts, strict=True):
        assert "so serial runs." in reason or "by the median of" in reason, reason
        assert text.startswith(f"{name}(x [")
        assert "asked for 'auto', ran " in text
        assert "The matmul alone takes " in text
        assert "serial:peer" in text
        assert "chunked:" in text or (operator == "leaving" and "signaled:" in text)
        assert operator == "leaving" or "signaled:" not in text


def test_operators_and_experts_are_apart() -> None:
    """One expert is one weight, so of six calls that differ in nothing else four are problems."""
    assert ut.launch(targets.apart, 2, device="cpu", deadline=20) == [4, 4]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_plan_on_disk_counts_only_if_all_ranks_hold_it(operator: str, tmp_path: Path) -> None:
    found = ut.launch(targets.caches, 3, device="cpu", args=(str(tmp_path), operator), deadline=20)
    digest, planted = found[0].pop("planted")
    assert found[1].pop("planted") == found[2].pop("planted") == (digest, planted)
    for state in found[0]:
        assert len({one[state][0] for one in found}) == 1, f"{state}: ranks ran different plans"
        for _, reason in (one[state] for one in found):
            assert ("Known from" in reason) == state.startswith("whole"), (state, reason)
    for state in ("whole", "whole again"):
        assert found[0][state][0] == digest
        assert found[0][state][1].endswith(planted)


@pytest.mark.parametrize("operator", OPERATORS)
def test_where_nothing_can_be_measured_serial_runs(operator: str) -> None:
    for unknown, fixed, grain in ut.launch(targets.unmeasurable, 2, device="cpu", args=(operator,), deadline=20):
        assert unknown == (
            "Nothing is known of this problem and nothing can be measured while torch traces, so serial runs."
        )
        assert fixed.startswith("Deterministic algorithms are asked for")
        assert grain == "serial"


@pytest.mark.parametrize("operator", OPERATORS)
def test_tuning_with_patience(operator: str) -> None:
    found = ut.launch(targets.tuned, 2, device="cpu", args=(operator,), deadline=20)
    for decided, later, trials, never_slower in found:
        assert decided == later == found[0][0]
        assert trials > 1
        assert never_slower


def test_a_layer_of_experts_is_measured() -> None:
    for found in ut.launch(targets.layer, 2, device="cpu", deadline=20):
        assert found == [("auto", True)] * 2
