"""The fused kernels: what their words release and acquire, that nothing spills, that loads still run ahead."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fused_builds import STAGES, decode, gather, scatter, sums
from ptx import check_acquire_order, check_after_bulk_stores, check_release_order

from undertow.kernels.turns import LINE
from undertow.plan import fused

SHARED = 227 << 10  # bytes that a CTA may have on sm_90
MULTIPROCESSOR, RESERVED = 228 << 10, 1 << 10  # of all CTAs of a multiprocessor, and of each for the system


def test_plans_and_kernels_mean_the_same_line() -> None:
    assert LINE.value == fused.LINE


@pytest.mark.parametrize("tile", [(128, 256), (64, 256)])
def test_a_tile_arrives_before_its_word(tile: tuple[int, int]) -> None:
    """Of bulk stores: in the loop, and after it for the last tile."""
    ptx = scatter(tile).ptx
    words = len(re.findall(r"st\.release\.sys", ptx))
    assert words >= 2
    assert check_after_bulk_stores(ptx, r"st\.release\.sys", r"3d") == words
    for dropped in ("cp.async.bulk.wait_group 0;", "fence.proxy.async;"):
        with pytest.raises(AssertionError):
            check_after_bulk_stores(ptx.replace(f"    {dropped}\n", ""), r"st\.release\.sys", r"3d")


def test_a_tile_of_ordinary_stores_arrives_before_its_word() -> None:
    check_words_follow_stores(scatter((128, 128), "sm_80").ptx, 2)


def test_a_sum_is_stored_before_its_word() -> None:
    check_words_follow_stores(sums().ptx, 1)
    assert "st.release" not in sums(broadcast=False).ptx


def check_words_follow_stores(ptx: str, words: int) -> None:
    assert len(re.findall(r"st\.release\.sys", ptx)) >= words
    assert check_release_order(ptx) == []
    spoiled = re.sub(r"(\.reg \.b64 place;\n)\s*barrier\.sync 0;", r"\1", ptx)
    assert spoiled != ptx
    assert check_release_order(spoiled) != []


@pytest.mark.parametrize("broadcast", [True, False])
def test_slots_are_read_after_they_were_waited_for(broadcast: bool) -> None:
    ptx = sums(broadcast=broadcast).ptx
    assert check_acquire_order(ptx) == []
    spoiled = re.sub(r"JOIN:\n\s*barrier\.red\.or\.pred failed, 0, failed;", "JOIN:", ptx)
    assert spoiled != ptx
    assert check_acquire_order(spoiled) != []


@pytest.mark.parametrize("tile", [(128, 256), (64, 256)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_who_multiplies_and_who_adds_find_room_on_one_multiprocessor(ranks: int, tile: tuple[int, int]) -> None:
    """Or the sums would have to wait for the end of the matmul, or, launched first, keep it from running."""
    multiplies, adds = scatter(tile), sums(ranks, True, tile)
    assert multiplies.spills == adds.spills == 0
    assert multiplies.shared + adds.shared + 2 * RESERVED <= MULTIPROCESSOR
    registers = [-(-one.registers // 8) * 8 * threads for one, threads in ((multiplies, 256), (adds, 128))]
    assert sum(registers) <= 65536


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
        lambda: scatter((64, 256)),
        lambda: scatter(transposed=False),
        gather,
        lambda: gather(False),
    ],
    ids=["scatter", "scatter of few rows", "scatter of weights as they are", "gather", "gather with tails"],
)
def test_loads_run_ahead_and_nothing_spills(made: Any) -> None:
    kernel = made()
    assert kernel.spills == 0
    assert kernel.registers <= 255
    assert STAGES * (64 + 256) * 64 * 2 <= kernel.shared <= SHARED
    assert "wgmma.mma_async" in kernel.ptx
    assert not kernel.serialised


def test_what_is_moved_is_moved_16_bytes_at_a_time() -> None:
    for kernel in (sums(bias=False), sums(8, False, bias=False), gather(False)):
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
