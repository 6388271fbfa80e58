"""The signaling matmul: what its counters release, that its loads run ahead across tiles, registers; its arithmetic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ptx import (
    TARGETS,
    CompiledKernel,
    check_acquire_order,
    check_after_bulk_stores,
    check_release_order,
    compile_kernel,
)

from undertow.kernels import gemm

STAGES, TILE = 4, (128, 256, 64)


def compiled(bulk: bool, *, waits: bool = False, target: str = "sm_90", **changes: Any) -> CompiledKernel:
    block_m, block_n, block_k = TILE
    parts = 2 if bulk else 4
    constants: dict[str, Any] = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "TRANSPOSED": False, "PARTS": parts, "BULK": bulk,
        "EVEN": True, "BIAS": False, "ACTIVATION": 0, **changes,
    }  # fmt: skip
    types = {
        "a": f"tensordesc<bf16[{block_m}, {block_k}]>",
        "b": f"tensordesc<bf16[{'1, ' if changes.get('GROUPED') else ''}{block_k}, {block_n}]>",
        "c": f"tensordesc<bf16[{block_m}, {block_n // parts}]>" if bulk else "*i32", "out": "*bf16", "bias": "*bf16",
        "table": "*i64", "counters": "*i32", "tiles": "i32", "inner": "i32", "next_tile": "*i32", "abort": "*i32",
        "error": "*i32", "deadline_ns": "i64",
    }  # fmt: skip
    kernel: Any = gemm.waiting_gemm_kernel
    if not waits:
        kernel = gemm.gemm_kernel
        constants |= {"SIGNAL": True, "DEFER": bulk}
    return compile_kernel(kernel, types, constants, target, 8, {"out": 16}, num_stages=STAGES)


def plain(dtype: str, block: tuple[int, int, int], target: str, **changes: Any) -> CompiledKernel:
    constants: dict[str, Any] = {
        "BLOCK_M": block[0], "BLOCK_N": block[1], "BLOCK_K": block[2], "PARTS": 2 if block[1] <= 128 else 4,
        "EVEN": False, "SIGNAL": True, "WAITS": False, "BIAS": False, "ACTIVATION": 0, **changes,
    }  # fmt: skip
    pointers = dict.fromkeys(("a", "b", "out", "bias"), f"*{dtype}")
    words = dict.fromkeys(("counters", "abort", "error"), "*i32") | {"table": "*i64", "tiles": "i32", "inner": "i32"}
    strides = dict.fromkeys(("a_row", "a_column", "b_row", "b_column", "deadline_ns"), "i64")
    types = {**pointers, **words, **strides}
    return compile_kernel(gemm.plain_gemm_kernel, types, constants, target, 8 if block[1] > 128 else 4, num_stages=2)


def check_bulk_release(ptx: str) -> None:
    """Every count follows the completion of the tile's bulk stores, in all threads that issued some."""
    counts = check_after_bulk_stores(ptx, r"red\.release\.gpu", r"2d")
    assert counts == len(re.findall(r"\bred\.release", ptx)), "a count does not complete the bulk stores first"


def test_a_count_covers_a_tile_that_left_by_bulk_stores() -> None:
    check_bulk_release(compiled(True).ptx)


@pytest.mark.parametrize("dropped", ["cp.async.bulk.wait_group 0;", "fence.proxy.async;"])
def test_a_dropped_fence_is_found(dropped: str) -> None:
    with pytest.raises(AssertionError):
        check_bulk_release(compiled(True).ptx.replace(f"    {dropped}\n", ""))


def test_a_count_covers_the_stores_of_all_warps() -> None:
    assert check_release_order(compiled(False).ptx) == []


def test_a_dropped_barrier_is_found() -> None:
    ptx = compiled(False).ptx
    assert "    barrier.sync 0;\n" in ptx
    assert check_release_order(ptx.replace("    barrier.sync 0;\n", "")) != []


def test_rows_are_read_after_they_were_waited_for() -> None:
    made = compiled(False, waits=True)
    assert check_acquire_order(made.ptx) == []
    first_load = made.ptx.index("cp.async.bulk.tensor.2d.shared")
    assert made.ptx.index("ld.acquire.sys") < made.ptx.index("fence.proxy.async.global") < first_load
    assert made.spills == 0


@pytest.mark.parametrize("bulk", [True, False])
def test_loads_run_ahead_across_tiles(bulk: bool) -> None:
    """Four stages of both factors in shared memory: something in the epilogue would make the compiler give them up."""
    block_m, block_n, block_k = TILE
    made = compiled(bulk)
    assert made.shared >= STAGES * (block_m + block_n) * block_k * 2
    assert made.spills == 0
    assert made.registers <= 255
    assert "wgmma.mma_async" in made.ptx


def test_a_staged_tile_is_read_before_the_next_one_is_loaded() -> None:
    """Staging shares memory with the factors: each bulk store is followed by a wait until it has been read."""
    made = compiled(True, waits=True)
    stores = len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global", made.ptx))
    after = re.findall(r"cp\.async\.bulk\.tensor\.2d\.global[^;]*;[^;]*?cp\.async\.bulk\.commit_group;[^;]*?"
                       r"cp\.async\.bulk\.wait_group\.read\s+0;", made.ptx, re.DOTALL)  # fmt: skip
    assert len(after) == stores
    assert made.spills == 0


def test_even_places_are_stored_16_bytes_at_a_time() -> None:
    stores = re.findall(r"st\.global\.(\S+)", compiled(False).ptx)
    assert stores
    assert all(kind.startswith("v4.b32") for kind in stores), set(stores)


def test_bias_and_activation_fit_the_epilogue() -> None:
    assert compiled(True, BIAS=True, ACTIVATION=2).spills == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "block"), [("bf16", (128, 256, 32)), ("fp32", (64, 128, 32))])
def test_the_plain_kernel_compiles_everywhere(dtype: str, block: tuple[int, int, int], target: str) -> None:
    made = plain(dtype, block, target)
    assert made.spills <= 64  # a few registers of the widest tile, on the oldest GPU
    assert check_release_order(made.ptx) == []


@pytest.mark.parametrize("bulk", [True, False])
def test_grouped_weights_cost_no_spills(bulk: bool) -> None:
    """Loads still run ahead, of a weight for each expert."""
    kernel = compiled(bulk, GROUPED=True, BIAS=True, BIAS_ROW=4096)
    assert kernel.spills == 0
    assert kernel.shared >= STAGES * (128 + 256) * 64 * 2
    assert "wgmma.mma_async" in kernel.ptx


def test_arithmetic() -> None:
    """Through Triton's interpreter, which is chosen when a kernel is defined: in a process of its own."""
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "interpreted_gemm.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
