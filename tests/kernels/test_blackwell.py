"""Kernels with TMA on GPUs that multiply in another way (sm_100): what words cover, what waits cover, and room."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fused_builds import STAGES, brought, decode, exchange, few, gather, scatter
from ptx import CompiledKernel, check_acquire_order, check_after_bulk_stores, check_release_order
from test_gemm import check_bulk_release, compiled

pytestmark = pytest.mark.nightly
TARGET = "sm_100"
SHARED = 227 << 10  # bytes that a CTA may have


def test_counts_and_words_cover_bulk_stores() -> None:
    check_bulk_release(compiled(True, target=TARGET).ptx)
    for tile in ((128, 256), (64, 256)):
        ptx = scatter(4, False, tile, TARGET).ptx
        words = len(re.findall(r"st\.release\.gpu", ptx))
        assert words >= 2
        assert check_after_bulk_stores(ptx, r"st\.release\.gpu", r"4d") == words


ORDINARY: dict[str, Callable[[], CompiledKernel]] = {
    "signaled": lambda: compiled(False, target=TARGET),
    "waiting": lambda: compiled(False, waits=True, target=TARGET),
    "scatter": lambda: scatter(8, False, target=TARGET, joined=False),
    "scatter to all": lambda: scatter(8, target=TARGET, joined=False),
    "gather": lambda: gather(False, TARGET, ranks=8),
    "tokens that arrive": lambda: gather(False, TARGET, tokens=True, transposed=True, ranks=8),
    "brought": lambda: brought(False, pull=False, ranks=8, target=TARGET),
    "brought, in step": lambda: brought(False, in_step=True, ranks=8, target=TARGET),
    "tokens that leave": lambda: exchange(8, TARGET),
    "owned columns": lambda: few((64, 128), 8, TARGET),
    "owned columns, few rows": lambda: few((16, 64), 8, TARGET, ahead=0),
    "decode": lambda: decode((16, 64), 8, TARGET, at_once=1),
}


@pytest.mark.parametrize("name", list(ORDINARY))
def test_words_and_waits_cover_ordinary_accesses(name: str) -> None:
    """Bulk loads of this rank's own factors, which nobody else writes, may stand before a wait."""
    kernel = ORDINARY[name]()
    assert check_release_order(kernel.ptx) == []
    early = check_acquire_order(kernel.ptx)
    if "columns" in name or "scatter" in name:
        early = [one for one in early if "cp.async.bulk.tensor.2d.shared" not in one.split(": ")[1]]
    assert early == []
    assert kernel.shared <= SHARED


@pytest.mark.parametrize("split", [0, 4])
def test_loads_of_brought_rows_run_ahead_no_further(split: int) -> None:
    """Than their rows are waited for ahead (`brought.early`): a step in each main loop, at most STAGES before it."""
    kernel = brought(width=256, split=split, target=TARGET)
    loads = re.findall(r"cp\.async\.bulk\.tensor\.\d+d\.shared", kernel.ptx)
    loops = 3 if split else 2
    assert loops * 2 < len(loads) <= loops * 2 * (1 + STAGES)
    assert kernel.shared <= SHARED
