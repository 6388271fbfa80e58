"""The pooled lookup: wide loads all asked for at once, no spills, a signal that covers the slice; its arithmetic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ptx import TARGETS, CompiledKernel, check_acquire_order, check_release_order, compile_kernel

from undertow.kernels import embedding
from undertow.plan.bags import completed, kernel_shape
from undertow.plan.plan import SLICES, Plan

NIGHTLY_TARGETS = [one if one == "sm_90" else pytest.param(one, marks=pytest.mark.nightly) for one in TARGETS]
SIZES = {"*fp32": 4, "*bf16": 2, "*fp16": 2}


def compiled(
    dtype: str = "*fp32", dim: int = 128, length: float = 10, target: str = "sm_90", peers: bool = False, **changes: Any
) -> CompiledKernel:
    """As `ops/embedding_cuda.py` launches it for tables of one dim."""
    plan = completed(Plan("fused", "peer", ((0, 8),), order=SLICES), [dim], SIZES[dtype], length)
    shape = kernel_shape(plan, SIZES[dtype])
    options = shape.options()
    warps = options.pop("num_warps")
    constants = {
        **options, "ALIGNMENT": 16 // SIZES[dtype], "MEAN": False, "WEIGHTS": False, "WHOLE": True,
        **changes,
    }  # fmt: skip
    types = {
        **dict.fromkeys(("slices", "tables", "values", "offsets"), "*i64"), "like": dtype, "weights": "*fp32",
        "tickets": "*i32", "slice_count": "i32", "value_count": "i64",
    }  # fmt: skip
    if peers:
        types |= {"words": "*i64", "told": "i32", "awaited": "i32", "place": "i32", "out": "i64", "out_bytes": "i64",
                  "abort": "*i32", "error": "*i32", "deadline_ns": "i64"}  # fmt: skip
        constants["LANES"] = 32 * warps
        return compile_kernel(embedding.exchange_kernel, types, constants, target, warps, maxnreg=shape.registers)
    types |= {"origin": "i64", "words": "i64"}
    return compile_kernel(embedding.pool_kernel, types, constants, target, warps, maxnreg=shape.registers)


def spread(dtype: str = "*fp32", target: str = "sm_90") -> CompiledKernel:
    constants = {"BAGS": 16, "COLUMNS": 128, "ALIGNMENT": 16 // SIZES[dtype]}
    types = {"like": dtype, "slices": "*i64", "tables": "*i64", "tickets": "*i32", "slice_count": "i32",
             "origin": "i64"}  # fmt: skip
    return compile_kernel(embedding.spread_kernel, types, constants, target)


@pytest.mark.parametrize("dtype", list(SIZES)[:2])
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.nightly), 128, 256])
@pytest.mark.parametrize("peers", [False, True])
def test_16_bytes_at_a_time_and_nothing_is_spilled(dtype: str, length: float, dim: int, peers: bool) -> None:
    made = compiled(dtype, dim, length, peers=peers)
    assert made.spills == 0
    shape = kernel_shape(
        completed(Plan("fused", "peer", ((0, 8),), order=SLICES), [dim], SIZES[dtype], length), SIZES[dtype]
    )
    assert made.registers <= shape.registers
    rows = shape.ahead * shape.bags * dim * SIZES[dtype] // (128 * 16)  # loads of a thread for one step
    assert made.ptx.count("ld.global.v4") == rows
    narrow = re.findall(r"st\.global\.b(?:16|32)\b|st\.global\.v2", made.ptx)
    alone = 2 if not peers else 5
    assert narrow == ["st.global.b32"] * alone, "only tickets, choices and arrivals are stored by themselves"


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("dtype", list(SIZES)[:2])
def test_all_rows_of_a_step_are_asked_for_before_one_is_added(dtype: str, peers: bool) -> None:
    """In the order of the machine's instructions: with too few registers the assembler would add first."""
    for dim in (128, 256):
        loop = compiled(dtype, dim, 10, peers=peers).innermost_loop("LDG.E.128")
        asked = [number for number, code in enumerate(loop) if "LDG.E.128" in code]
        assert len(asked) == 4
        assert asked[-1] < next(number for number, code in enumerate(loop) if "FADD" in code), f"dim {dim}"


@pytest.mark.parametrize("peers", [False, True])
def test_tables_that_take_turns_cost_no_spills(peers: bool) -> None:
    for dtype in list(SIZES)[:2]:
        assert compiled(dtype, 128, 1, peers=peers, TOGETHER=8).spills == 0


@pytest.mark.parametrize("target", NIGHTLY_TARGETS)
@pytest.mark.parametrize("kernel", ["pool", "weighted mean", "any dims", "spread", "exchange", "exchange, any dims"])
def test_the_signal_covers_the_slice(kernel: str, target: str) -> None:
    """Every store of a slice, a barrier, an acquire-release ticket, and the last one's release at system scope.

    The kernel that is a whole call has one more of each: the ticket of its end, and the words that tell its place.
    """
    anything: dict[str, Any] = {"WHOLE": False, "ALIGNMENT": 1}
    changes: dict[str, dict[str, Any]] = {
        "pool": {}, "weighted mean": {"WEIGHTS": True, "MEAN": True}, "any dims": anything,
        "exchange": {"peers": True}, "exchange, any dims": {**anything, "peers": True},
    }  # fmt: skip
    made = spread(target=target) if kernel == "spread" else compiled(target=target, **changes[kernel])
    assert check_release_order(made.ptx) == []
    assert check_acquire_order(made.ptx) == []
    each = 2 if kernel.startswith("exchange") else 1
    assert (
        made.ptx.count("atom.global.sys.acq_rel")
        + made.ptx.count("atom.acq_rel.sys")
        + made.ptx.count("atom.global.acq_rel.sys")
        == each
    ), [line for line in made.ptx.splitlines() if "atom" in line]
    assert made.ptx.count("st.release.sys.global.b32") == each
    assert made.ptx.count("ld.acquire.sys.global.b32") == (2 if each == 2 else 0), "places told, slices arrived"


@pytest.mark.parametrize("target", NIGHTLY_TARGETS)
def test_a_place_is_told_before_anything_waits(target: str) -> None:
    """The first release of the kernel stands before its first acquire: no CTA that others wait for waits itself."""
    text = compiled(target=target, peers=True).ptx
    told, waits = text.index("st.release.sys.global.b32"), text.index("ld.acquire.sys.global.b32")
    assert told < waits < text.index("ld.global.v4")


@pytest.mark.parametrize(
    "name",
    [
        *(f"interpreted_embedding{one}.py" for one in ("", "_ops", "_calls")),
        "interpreted_embedding_posts.py::test_calls_follow_each_other[3-3-True]",
        pytest.param("interpreted_embedding_posts.py", marks=pytest.mark.nightly),
    ],
)
def test_arithmetic(name: str) -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
