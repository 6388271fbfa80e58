"""The fused kernels: what their words release and acquire, that nothing spills, that loads still run ahead."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fused_builds import STAGES, decode, gather, scatter
from ptx import check_acquire_order, check_after_bulk_stores, check_release_order

from undertow.kernels.turns import LINE
from undertow.plan import fused

SHARED = 227 << 10  # bytes that a CTA may have on sm_90


def check_bulk_words(ptx: str) -> None:
    """Every tile's word is released after all threads that issued its bulk stores completed them and met."""
    assert check_after_bulk_stores(ptx, r"st\.release\.sys", r"3d") >= 2, "in the loop, and after it for the last tile"


def test_plans_and_kernels_mean_the_same_line() -> None:
    assert LINE.value == fused.LINE


def test_a_tile_arrives_before_its_word() -> None:
    check_bulk_words(scatter().ptx)


@pytest.mark.parametrize("dropped", ["cp.async.bulk.wait_group 0;", "fence.proxy.async;"])
def test_a_dropped_fence_is_found(dropped: str) -> None:
    with pytest.raises(AssertionError):
        check_bulk_words(scatter().ptx.replace(f"    {dropped}\n", ""))


def unordered_loads(ptx: str) -> list[str]:
    """Loads that may run before the acquire that covers them. Bulk loads are of this rank's own factors."""
    return [one for one in check_acquire_order(ptx) if "cp.async.bulk.tensor.2d.shared" not in one.split(": ")[1]]


def test_partials_are_read_after_they_were_waited_for() -> None:
    ptx = scatter().ptx
    assert unordered_loads(ptx) == []
    spoiled = re.sub(r"JOIN:\n\s*barrier\.red\.or\.pred failed, 0, failed;", "JOIN:", ptx)
    assert spoiled != ptx
    assert unordered_loads(spoiled) != []


def test_a_sum_is_stored_before_others_are_told() -> None:
    """Only the words that everybody gets: those of single tiles cover bulk stores, in one thread."""
    ptx = scatter().ptx
    everywhere = "add.s64 place, place,"
    assert everywhere in ptx
    lines = {number + 1 for number, line in enumerate(ptx.splitlines()) if everywhere in line}

    def uncovered(text: str) -> list[str]:
        found = check_release_order(text)
        about = [re.match(r"line (\d+): st\.release\.sys\.global\.b32 \[place\]", one) for one in found]
        told = [one for one, match in zip(found, about, strict=True) if match and int(match.group(1)) - 1 in lines]
        return [one for one in told if "cp.async.bulk" not in one]

    assert uncovered(ptx) == []
    spoiled = re.sub(r"(\.reg \.b64 place;\n)\s*barrier\.sync 0;", r"\1    // none", ptx)
    assert spoiled != ptx
    assert uncovered(spoiled) != []


@pytest.mark.parametrize("bulk", [True, False])
def test_rows_are_read_after_they_were_waited_for(bulk: bool) -> None:
    ptx = gather(bulk).ptx
    assert check_acquire_order(ptx) == []
    assert check_acquire_order(ptx.replace("fence.proxy.async.global;", "")) != []


def test_rows_are_stored_before_their_word() -> None:
    assert check_release_order(gather(False).ptx) == []


@pytest.mark.parametrize(
    "made",
    [scatter, lambda: scatter(2, False, (64, 256)), gather, lambda: gather(False)],
    ids=["scatter", "scatter of few rows", "gather", "gather with tails"],
)
def test_loads_run_ahead_and_nothing_spills(made: Any) -> None:
    kernel = made()
    assert kernel.spills == 0
    assert kernel.registers <= 255
    assert STAGES * (64 + 256) * 64 * 2 <= kernel.shared <= SHARED
    assert "wgmma.mma_async" in kernel.ptx


def test_what_is_moved_is_moved_16_bytes_at_a_time() -> None:
    for kernel in (scatter(), gather(False)):
        found = set(re.findall(r"(?:ld|st)\.global\.\S+", kernel.ptx))
        assert not [one for one in found if "b16" in one], found
        assert any("v4.b32" in one for one in found)


@pytest.mark.parametrize(("rows", "at_once", "ranks"), [(16, 1, 4), (64, 4, 8)])
def test_decode_fits(rows: int, at_once: int, ranks: int) -> None:
    kernel = decode(rows, at_once, ranks)
    assert kernel.spills == 0
    assert kernel.shared <= SHARED
    # A packet is data and flag in one access; nothing else is waited for.
    assert re.search(r"st\.relaxed\.sys\.global\.b64", kernel.ptx)
    assert "ld.acquire" not in kernel.ptx
    polled = re.findall(r"@wanted(\d+) ld\.relaxed\.sys\.global\.b64", kernel.ptx)
    assert len(set(polled)) == ranks * at_once
