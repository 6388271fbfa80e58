"""A computation beside a collective: exact results under every strategy, and nothing left behind when one fails."""

from __future__ import annotations

import c3_targets as targets
import pytest
import torch

import undertow as ut
from undertow.c3.characterise import Result


def launched(target: object, ranks: int, *args: object, env: dict[str, str] | None = None) -> list[object]:
    return ut.launch(target, ranks, device="cpu", args=args, deadline=20, env=env or {})  # type: ignore[arg-type]


def test_every_collective_by_copies_is_exact() -> None:
    found = launched(targets.copied, 3, ("dma",), (1, 1001), (*targets.NUMBERS, *targets.OTHERS))
    assert min(found) >= 2 * 4 * len(targets.OTHERS)  # type: ignore[type-var]


def test_every_collective_by_rounds_of_messages_is_exact() -> None:
    """Also where a rank has nothing to send, or gets nothing."""
    env = {"UNDERTOW_NET": "backend"}
    found = launched(targets.copied, 3, ("net",), (1, 1001), targets.OTHERS[:2], env=env)
    assert min(found) >= 2 * 2 * 2  # type: ignore[type-var,operator]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_collective_by_copies_at_all_sizes(ranks: int) -> None:
    launched(targets.copied, ranks, ("dma", "net", "peer"), (1, 7, 4099), (*targets.NUMBERS, *targets.OTHERS))
    launched(targets.copied, ranks, ("dma",), (3_000_001,), (torch.float32, torch.uint8))


@pytest.mark.nightly
def test_a_gigabyte_by_copies() -> None:
    launched(targets.gigabyte, 2)


@pytest.mark.nightly
def test_a_compiled_block_beside_a_collective() -> None:
    launched(targets.compiled, 2)


def test_both_forms_under_every_strategy() -> None:
    for found in launched(targets.forms, 2, 1):
        assert found == ["serial", "base", "priority", "dma"]  # a rank has one thread: nothing to divide


def test_threads_are_divided_where_there_are_some() -> None:
    for found in launched(targets.forms, 2, 2, env={"UNDERTOW_BIND": "0"}):
        assert "partition" in found  # type: ignore[operator]
        assert "dma+fewer" in found  # type: ignore[operator]


def test_bad_input_is_refused_and_the_group_goes_on() -> None:
    for found in launched(targets.bad_input, 2):
        assert isinstance(found, dict)
        assert "share.multiprocessors is 10000, but must be between 1 and" in found["too many"]
        assert "share.multiprocessors is 0" in found["none"]
        assert "share.communication_ctas is 0" in found["no CTAs"]
        assert "one of serial, base" in found["name"]
        assert "lane is 'road'" in found["lane"]
        assert "'dma' for share 'dma'" in found["dma lane"]
        assert "compute is int" in found["no callable"]
        assert "collective is None" in found["no collective"]
        assert "runs beside this call" in found["same group"]
        assert "runs beside this call" in found["nested"]
        assert "op is 'median'" in found["bad collective"]
        assert "asked for after it" in found["early"]
        assert found["still usable"] == "2.0"


def test_the_two_overlap() -> None:
    """0.2 s of waiting beside copies of 2 × 2 MiB at 20 MB/s, some 0.2 s: both must take far less than the sum."""
    for compute, alone, both in launched(targets.beside, 2, env={"UNDERTOW_DMA_PACE": "20MB/s"}):  # type: ignore[misc]
        assert alone > 0.15
        assert both < 0.75 * (compute + alone)


def test_auto_learns_and_all_ranks_do_the_same() -> None:
    first, second = launched(targets.learns, 2)
    assert first[:9] == second[:9]  # type: ignore[index]
    assert first[:4] == ["serial:peer", "serial:peer", "serial:dma", "serial:dma"]  # type: ignore[index]
    assert first[4] == first[5]  # type: ignore[index]
    assert first[6] == first[7]  # type: ignore[index]
    assert first[6] == first[4] or first[6].startswith("serial:")  # type: ignore[index]
    assert first[8] == "serial:dma"  # type: ignore[index]
    assert "to be timed" in first[9]  # type: ignore[index]


def test_variants_lifetimes_and_a_scenario() -> None:
    """Every variant carries the same, tensors that are dropped early stay whole, a scenario is measured and read back,
    and names that are none are refused.
    """
    results = launched(targets.several, 2)
    for _, refused, kinds, (dropped, again, nothing) in results:  # type: ignore[misc]
        assert "one (tests/c3/c3_targets.py:" in kinds[0]
        assert "other (tests/c3/c3_targets.py:" in kinds[1]
        assert "name is missing, and compute of class ReLU" in kinds[2]
        assert "MismatchedCall" in kinds[3]
        assert kinds[4:7] in (["serial:dma"] * 3, ["serial:dma", "failed", "serial:dma"])
        assert kinds[7] == kinds[8]
        assert kinds[9] == kinds[10] == kinds[11]
        assert dropped == 1
        assert "the block is entered a second time" in again
        assert nothing == 1.0
        assert "collective is 'all_to_none'" in refused[0]
        assert "lane is 'road'" in refused[1]
        assert "compute is 'sleep'" in refused[2]
        assert "collective is 'gather'" in refused[3]
    found = results[0][0]  # type: ignore[index]
    assert set(found["together"]) == {"base", "dma"}
    assert all(one["wrong"] == 0 for one in found["together"].values())
    again = Result.from_json(found)
    assert again.to_json() == found
    assert again.ideal == pytest.approx(
        (again.compute_seconds + again.collective_seconds) / max(again.compute_seconds, again.collective_seconds)
    )
