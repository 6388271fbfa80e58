"""The lookup that posts its slices: wide loads and no spills, a post that covers the slice, a take behind its wait."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ptx import TARGETS, CompiledKernel, check_acquire_order, check_release_order, compile_kernel, functions

from undertow.kernels import embedding_posts
from undertow.plan.bags import Shape, completed, kernel_shape
from undertow.plan.plan import SLICES, Plan

NIGHTLY_TARGETS = [one if one == "sm_90" else pytest.param(one, marks=pytest.mark.nightly) for one in TARGETS]
SIZES = {"*fp32": 4, "*bf16": 2, "*fp16": 2}
POINTERS = {
    **dict.fromkeys(("slices", "tables", "values", "offsets", "ring", "words", "arrivals", "counters"), "*i64"),
    **dict.fromkeys(("tickets", "ticket", "state", "abort", "error"), "*i32"),
    **dict.fromkeys(("slice_count", "told", "place", "arrival_count", "signals", "awaited"), "i32"), "weights": "*fp32",
}  # fmt: skip


def shape_of(dtype: str, dim: int, length: float) -> Shape:
    plan = Plan("fused", "dma", ((0, 8),), order=SLICES)
    return kernel_shape(completed(plan, [dim], SIZES[dtype], length), SIZES[dtype])


def types_of(kernel: Any, dtype: str, constants: dict[str, Any]) -> dict[str, str]:
    known = dict.fromkeys(kernel.arg_names, "i64") | POINTERS | {"like": dtype}
    return {name: known[name] for name in kernel.arg_names if name not in constants}


def posting(
    dtype: str = "*fp32", dim: int = 128, length: float = 10, target: str = "sm_90", **changes: Any
) -> CompiledKernel:
    """As `ops/embedding_posts.py` launches it for tables of one dim."""
    shape = shape_of(dtype, dim, length)
    options = shape.options()
    warps = options.pop("num_warps")
    constants = {
        **options, "ALIGNMENT": 16 // SIZES[dtype], "MEAN": False, "WEIGHTS": False, "WHOLE": True,
        "LANES": 32 * warps, **changes,
    }  # fmt: skip
    kernel = embedding_posts.posting_kernel
    return compile_kernel(kernel, types_of(kernel, dtype, constants), constants, target, warps, maxnreg=shape.registers)


def taking(dtype: str = "*fp32", target: str = "sm_90", alignment: int | None = None) -> CompiledKernel:
    columns = 512
    constants = {
        "BAGS": 4 * max(1, 128 * 16 // (columns * SIZES[dtype])), "COLUMNS": columns,
        "ALIGNMENT": alignment or 16 // SIZES[dtype], "LANES": 128,
    }  # fmt: skip
    kernel = embedding_posts.take_kernel
    return compile_kernel(kernel, types_of(kernel, dtype, constants), constants, target)


def tickets(ptx: str) -> int:
    return len(re.findall(r"atom\.global\.sys\.acq_rel|atom\.(?:global\.)?acq_rel\.sys", ptx))


@pytest.mark.parametrize("dtype", list(SIZES)[:2])
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.nightly), 128, 256])
def test_16_bytes_at_a_time_and_nothing_is_spilled(dtype: str, length: float, dim: int) -> None:
    made, shape = posting(dtype, dim, length), shape_of(dtype, dim, length)
    assert made.spills == 0
    assert made.registers <= shape.registers
    rows = shape.ahead * shape.bags * dim * SIZES[dtype] // (128 * 16)  # loads of a thread for one step
    assert made.ptx.count("ld.global.v4") == rows
    assert not re.findall(r"st\.global\.b16\b|st\.global\.v2", made.ptx), "rows are stored 16 bytes at a time"
    loop = made.innermost_loop("LDG.E.128")
    asked = max(number for number, code in enumerate(loop) if "LDG.E.128" in code)
    assert asked < next(number for number, code in enumerate(loop) if "FADD" in code), "all rows, then the first sum"


@pytest.mark.parametrize("target", NIGHTLY_TARGETS)
@pytest.mark.parametrize("kernel", ["whole", "weighted mean", "any dims"])
def test_a_post_covers_the_slice(kernel: str, target: str) -> None:
    """Every store of a slice, a barrier, an acquire-release ticket, then the ring's own: room, words, ready word.

    Three tickets more than the slice's: that of a slice that is signalled, the ring's, and the one of the end.
    """
    changes: dict[str, dict[str, Any]] = {
        "whole": {}, "weighted mean": {"WEIGHTS": True, "MEAN": True}, "any dims": {"WHOLE": False, "ALIGNMENT": 1},
    }  # fmt: skip
    made = posting(target=target, **changes[kernel])
    assert check_release_order(made.ptx) == []
    assert check_acquire_order(made.ptx) == []
    assert tickets(made.ptx) == 4
    assert made.ptx.count("st.release.sys.global.b64") == 1, "the ready word"
    assert made.ptx.count("st.release.sys.global.b32") == 2, "places that are told, slices that are signalled"
    assert made.ptx.count("ld.acquire.sys.global.b32") == 2, "places of others, room in the ring"


@pytest.mark.parametrize("target", NIGHTLY_TARGETS)
def test_pooled_then_counted_then_posted(target: str) -> None:
    """In the order of the text: rows, the slice's ticket, the ring's ticket, room, the descriptor, its ready word."""
    (code,) = functions(posting(target=target).ptx)
    found = [at.opcode for at in code]
    last_row = max(at for at, name in enumerate(found) if name.startswith("st.global.v4"))
    ready = found.index("st.release.sys.global.b64")
    between = found[last_row:ready]
    steps = ("bar.sync", "atom.", "bar.sync", "atom.", "ld.acquire.sys.global.b32", "barrier.red.or.pred",
             "st.global.b64", "bar.sync")  # fmt: skip
    position = 0
    for step in steps:
        position = next(at for at in range(position, len(between)) if between[at].startswith(step)) + 1


@pytest.mark.parametrize("target", NIGHTLY_TARGETS)
@pytest.mark.parametrize("dtype", list(SIZES)[:2])
def test_what_has_arrived_is_read_behind_its_signal(dtype: str, target: str) -> None:
    for alignment in (None, 1):
        made = taking(dtype, target, alignment)
        assert check_release_order(made.ptx) == []
        assert check_acquire_order(made.ptx) == []
        assert made.spills == 0
        assert tickets(made.ptx) == 1
    text = taking(dtype, target).ptx
    assert text.index("ld.acquire.sys.global.b32") < text.index("ld.global.v4")
    assert text.count("ld.global.v4") == text.count("st.global.v4") == 4
