"""Fused kernels of rows that change ranks, and all fused kernels without TMA: ordering, registers, arithmetic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fused_builds import STAGES, decode, exchange, few, gather, scatter
from ptx import CompiledKernel, check_acquire_order, check_release_order

from undertow.plan import fused

SHARED = {90: 227 << 10, 80: 99 << 10}  # bytes that a CTA may have; on sm_89, which runs what is made for sm_80, 99 KiB
PLAIN: dict[str, Callable[[], CompiledKernel]] = {
    "scatter": lambda: scatter(4, True, (128, 128), "sm_80"),
    "scatter of 8": lambda: scatter(8, True, (64, 128), "sm_80"),
    "gather": lambda: gather(False, "sm_80", (128, 128)),
    "arrive": lambda: gather(False, "sm_80", (128, 128), tokens=True, even=False, bias=True),
    "exchange": lambda: exchange(8, "sm_80", (128, 128), bias=True),
    "exchange of odd columns": lambda: exchange(8, "sm_80", (64, 128), even=False),
    "decode": lambda: decode((64, 64), 8, "sm_80", at_once=1),
    "columns": lambda: few((64, 128), 8, "sm_80", ahead=0),
}
BULK: dict[str, Callable[[], CompiledKernel]] = {
    "exchange": exchange,
    "exchange of 8, one weight, bias": lambda: exchange(8, grouped=False, transposed=False, bias=True),
    "exchange of few rows": lambda: exchange(2, tile=(64, 256)),
    "exchange of odd columns": lambda: exchange(4, tile=(64, 256), even=False, bias=True),
    "arrive": lambda: gather(False, tokens=True, bias=True),
    "arrive, transposed": lambda: gather(True, tokens=True, transposed=True),
}


def unordered_loads(ptx: str) -> list[str]:
    """Loads that may run before the acquire that covers them. Bulk loads are of this rank's own factors."""
    return [one for one in check_acquire_order(ptx) if "cp.async.bulk.tensor" not in one.split(": ")[1]]


def without(ptx: str, what: str, by: str = "") -> str:
    spoiled = re.sub(what, by, ptx)
    assert spoiled != ptx, what
    return spoiled


def test_plain_tiles_are_those_that_are_compiled_here() -> None:
    assert fused.PLAIN_TILES == ((128, 128), (64, 128))


@pytest.mark.parametrize("name", BULK)
def test_with_tma_loads_run_ahead_and_nothing_spills(name: str) -> None:
    kernel = BULK[name]()
    assert kernel.spills == 0
    assert STAGES * (64 + 256) * 64 * 2 <= kernel.shared <= SHARED[90]
    assert "wgmma.mma_async" in kernel.ptx
    assert not kernel.serialised


@pytest.mark.parametrize("made", [exchange, scatter])
def test_a_launch_of_no_cta_divides_by_no_zero(made: Callable[[], CompiledKernel]) -> None:
    """Kernels are loaded by such a launch (`fused_stage.load`), and a flattened loop divides by its step."""
    ptx = made().ptx
    divisors = re.findall(r"div\.s32\s+%r\d+, %r\d+, (%r\d+);", ptx)
    assert divisors
    for one in divisors:
        assert re.search(rf"max\.s32\s+{one}, %r\d+, 1;", ptx), f"{one} may be zero"


@pytest.mark.nightly
@pytest.mark.parametrize("tile", fused.GPU_TILES)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_whatever_is_launched_fits(tile: tuple[int, int], transposed: bool, bias: bool) -> None:
    """All that GPU checks and benchmarks launch; odd columns leave in small tiles (`plan/defaults.py`)."""
    made = [exchange(ranks, tile=tile, transposed=transposed, bias=bias) for ranks in (2, 4, 8)]
    if tile == fused.GPU_TILES[1]:
        made += [exchange(ranks, tile=tile, transposed=transposed, even=False, bias=bias) for ranks in (2, 4, 8)]
    for bulk, even in ((True, True), (False, True), (False, False)):
        made += [gather(bulk, "sm_90", tile, tokens, transposed, even, bias) for tokens in (True, False)]
    assert [one.spills for one in made] == [0] * len(made)
    assert max(one.shared for one in made) <= SHARED[90]


def test_a_tile_arrives_before_its_word() -> None:
    ptx = exchange().ptx
    assert len(re.findall(r"st\.release\.sys", ptx)) >= 3, "announced, in the loop, and after it for the last tile"
    assert check_release_order(ptx) == []
    assert check_release_order(without(ptx, r"(\.reg \.b64 place;\n)\s*barrier\.sync 0;", r"\1")) != []


def test_what_arrived_is_read_after_its_word() -> None:
    ptx = exchange().ptx
    assert unordered_loads(ptx) == []
    assert unordered_loads(without(ptx, r"JOIN:\n\s*barrier\.red\.or\.pred failed, 0, failed;", "JOIN:")) != []


def test_nothing_leaves_before_all_have_announced_the_call_before() -> None:
    ptx = exchange().ptx
    told, wait, stored = (ptx.index(one) for one in ("st.release.sys", "ld.acquire.sys.global.b32 seen", "st.global"))
    assert told < wait < stored


def test_rows_of_tokens_are_read_after_they_were_waited_for() -> None:
    ptx = gather(False, tokens=True, bias=True).ptx
    assert check_acquire_order(ptx) == []
    assert check_acquire_order(without(ptx, r"fence\.proxy\.async\.global;")) != []
    assert check_release_order(ptx) == []


@pytest.mark.parametrize("name", PLAIN)
def test_without_tma_nothing_spills_and_copies_run_ahead(name: str) -> None:
    kernel = PLAIN[name]()
    assert kernel.spills == 0
    assert kernel.registers <= 255
    assert kernel.shared <= SHARED[80]
    assert "cp.async.cg.shared.global" in kernel.ptx, "loads of 16 bytes that run ahead"
    assert "cp.async.bulk" not in kernel.ptx
    assert "wgmma" not in kernel.ptx


@pytest.mark.parametrize("name", [one for one in PLAIN if one != "decode"])
def test_without_tma_words_cover_stores_and_waits_come_before_loads(name: str) -> None:
    ptx = PLAIN[name]().ptx
    assert check_release_order(ptx) == []
    assert check_acquire_order(ptx) == []
    assert check_acquire_order(without(ptx, r"barrier\.red\.or\.pred failed, 0, failed;")) != []
    # A word is told behind a barrier of its own text, or (rows that are pushed) of Triton's.
    bare = without(ptx, r"barrier\.sync 0;|bar\.sync\s+0;")
    assert check_release_order(bare) != []


def interpreted(*names: str) -> None:
    """Through Triton's interpreter, which is chosen when a kernel is defined: in a process of its own."""
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(folder / name) for name in names)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_arithmetic() -> None:
    interpreted("interpreted_tokens.py")


def test_an_exchange_as_it_is_launched() -> None:
    interpreted("interpreted_launches.py::test_an_exchange_as_it_is_launched[136-24-True-True]")


@pytest.mark.parametrize("which", ["tile0-shape0-2-3", "tile2-shape2-1-2"])
def test_few_rows_are_sent_at_once_as_they_are_launched(which: str) -> None:
    interpreted(f"interpreted_few_rows.py::test_few_rows_are_sent_at_once_as_they_are_launched[{which}-True]")


@pytest.mark.nightly
def test_few_rows_as_they_are_launched() -> None:
    interpreted("interpreted_few_rows.py::test_few_rows_as_they_are_launched[True-tile1-shape1-True]")


def test_a_scatter_as_it_is_launched() -> None:
    interpreted("interpreted_launches.py::test_a_scatter_as_it_is_launched[70-136-24-True-True]")


@pytest.mark.nightly
def test_the_first_weights_are_asked_for_once() -> None:
    interpreted("interpreted_few_rows.py::test_the_first_weights_are_asked_for_once")


@pytest.mark.nightly
def test_every_launch() -> None:
    interpreted("interpreted_launches.py", "interpreted_few_rows.py")
