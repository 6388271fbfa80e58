"""The fused kernels: what their words release and acquire, that nothing spills, that loads still run ahead."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fused_builds import STAGES, decode, gather, scatter
from ptx import check_acquire_order, check_release_order

from undertow.kernels.turns import LINE
from undertow.plan import fused

SHARED = 227 << 10  # bytes that a CTA may have on sm_90


def test_plans_and_kernels_mean_the_same_line() -> None:
    assert LINE.value == fused.LINE


def test_a_tile_arrives_before_its_word() -> None:
    """In the loop, after it for the last tile, and (BROADCAST) of sums: all of them by the same few lines."""
    ptx = scatter().ptx
    assert len(re.findall(r"st\.release\.sys", ptx)) >= 2
    assert check_release_order(ptx) == []
    spoiled = re.sub(r"(\.reg \.b64 place;\n)\s*barrier\.sync 0;", r"\1", ptx)
    assert spoiled != ptx
    assert check_release_order(spoiled) != []


def unordered_loads(ptx: str) -> list[str]:
    """Loads that may run before the acquire that covers them. Bulk loads are of this rank's own factors."""
    return [one for one in check_acquire_order(ptx) if "cp.async.bulk.tensor.2d.shared" not in one.split(": ")[1]]


def test_partials_are_read_after_they_were_waited_for() -> None:
    ptx = scatter().ptx
    assert unordered_loads(ptx) == []
    spoiled = re.sub(r"JOIN:\n\s*barrier\.red\.or\.pred failed, 0, failed;", "JOIN:", ptx)
    assert spoiled != ptx
    assert unordered_loads(spoiled) != []


@pytest.mark.parametrize("bulk", [True, False])
def test_rows_are_read_after_they_were_waited_for(bulk: bool) -> None:
    ptx = gather(bulk).ptx
    assert check_acquire_order(ptx) == []
    assert check_acquire_order(ptx.replace("fence.proxy.async.global;", "")) != []


def test_rows_are_stored_before_their_word() -> None:
    assert check_release_order(gather(False).ptx) == []


@pytest.mark.parametrize(
    "made",
    [
        scatter,
        lambda: scatter(4, False),
        lambda: scatter(8),
        lambda: scatter(2, False, (64, 256)),
        gather,
        lambda: gather(False),
    ],
    ids=["scatter", "scatter of 4", "scatter of 8", "scatter of few rows", "gather", "gather with tails"],
)
def test_loads_run_ahead_and_nothing_spills(made: Any) -> None:
    kernel = made()
    assert kernel.spills == 0
    assert kernel.registers <= 255
    assert STAGES * (64 + 256) * 64 * 2 <= kernel.shared <= SHARED
    assert "wgmma.mma_async" in kernel.ptx
    assert not kernel.serialised


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
