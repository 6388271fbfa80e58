"""Residual add and normalisation fused with unpacking: wide accesses, registers, spills; its arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ptx import TARGETS, CompiledKernel, compile_kernel

from undertow.kernels import norm
from undertow.ops.norm import variant


def compiled(n: int, kind: int, packed: bool, target: str = "sm_90", **changes: Any) -> CompiledKernel:
    """As `ops/norm.py` launches it for rows of n columns in bf16."""
    options = variant(n, 256, packed)
    warps = options.pop("num_warps")
    constants: dict[str, Any] = {
        "PACKED": packed, "BIAS": False, "ACTIVATION": 0, "RESIDUAL": True, "NORM": kind, "WEIGHT": kind > 0,
        "SHIFT": kind == norm.LAYER, **options, **changes,
    }  # fmt: skip
    types = {
        **dict.fromkeys(("y", "residual", "buffer", "bias", "weight", "shift"), "*bf16"), "table": "*i64", "n": "i32",
        "block_m": "i64", "block_n": "i32", "columns": "i64", "eps": "fp32",
    }  # fmt: skip
    aligned = dict.fromkeys(("y", "residual", "buffer", "n", "block_n"), 16)
    return compile_kernel(norm.finish_rows_kernel, types, constants, target, warps, aligned)


@pytest.mark.parametrize("kind", [norm.NO_NORM, norm.RMS, norm.LAYER])
@pytest.mark.parametrize("packed", [False, True])
def test_16_bytes_at_a_time_and_nothing_is_spilled(kind: int, packed: bool) -> None:
    made = compiled(8192, kind, packed)
    assert made.spills == 0
    # The sum and the residual are read, and the results written, 16 bytes a thread.
    assert made.ptx.count("ld.global.v4.b32") >= 8
    assert made.ptx.count("st.global.v4") >= 4
    narrow = [line for line in made.ptx.splitlines() if "st.global" in line and "v4" not in line]
    assert narrow == []


@pytest.mark.parametrize(
    "target", [one if one == "sm_90" else pytest.param(one, marks=pytest.mark.nightly) for one in TARGETS]
)
@pytest.mark.parametrize("n", [100, 16384, 40000])
def test_rows_of_any_length_compile(n: int, target: str) -> None:
    assert compiled(n, norm.LAYER, True, target).spills == 0


def test_arithmetic() -> None:
    """Exact where the mathematics allows it; both ways of going through a row."""
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "interpreted_norm.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
