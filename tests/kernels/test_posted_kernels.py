"""Matmuls that post: arithmetic by the interpreter, ordering in the PTX, nothing spilled, products not serialised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fused_builds import BLOCK_K, STAGES, operands
from ptx import CompiledKernel, check_acquire_order, check_release_order, compile_kernel, functions
from test_embedding_posts import tickets

from undertow.kernels import posted

TARGETS = ["sm_90", "sm_80"]
KNOWN = {
    **dict.fromkeys(("table", "parcels", "posts", "ring", "numbers"), "*i64"),
    **dict.fromkeys(("tickets", "signals", "state", "abort", "error"), "*i32"),
    **dict.fromkeys(("tiles", "count", "inner", "n", "width", "rank", "ranks"), "i32"),
    **dict.fromkeys(("like", "bias", "out", "rows"), "*bf16"),
}
PIECES = {"ROWS": 4, "COLUMNS": 512}


def built(kernel: Any, constants: dict[str, Any], target: str, **more: Any) -> CompiledKernel:
    known = dict.fromkeys(kernel.arg_names, "i64") | KNOWN | more.pop("types", {})
    types = {name: known[name] for name in kernel.arg_names if name not in constants}
    return compile_kernel(kernel, types, constants, target, **more)


def multiplying(
    landed: bool, target: str = "sm_90", tile: tuple[int, int] = (128, 256), grouped: bool = False, even: bool = True,
    transposed: bool = True,
) -> CompiledKernel:  # fmt: skip
    types, aligned = operands(target, tile, transposed, grouped, ("a",), "b")
    if landed and target != "sm_80":
        types["a"] = f"tensordesc<bf16[1, {tile[0]}, {BLOCK_K[target]}]>"
    constants = {
        "BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": BLOCK_K[target], "TRANSPOSED": transposed,
        "GROUPED": grouped, "EVEN": even, "BIAS": True, "ACTIVATION": 3,
    }  # fmt: skip
    if landed:
        constants["STRIDE"] = 32
    kernel = posted.multiply_landed_kernel if landed else posted.multiply_and_post_kernel
    aligned |= {"n": 8} if even else {}
    aligned |= {"out": 16} if landed and even else {}
    return built(kernel, constants, target, types=types, num_warps=8, attrs=aligned, num_stages=STAGES)


def summing(target: str = "sm_90", keep: bool = True) -> CompiledKernel:
    constants = {**PIECES, "SIGNALS": 128, "STRIDE": 32, "KEEP": keep, "BIAS": True, "ACTIVATION": 3}
    return built(posted.sum_kernel, constants, target, attrs={"out": 16})


def bringing(leave: bool, target: str = "sm_90", even: bool = True) -> CompiledKernel:
    return built(posted.bring_kernel, {**PIECES, "STRIDE": 32, "LEAVE": leave, "EVEN": even}, target)


@pytest.mark.parametrize("which", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_arithmetic(which: str) -> None:
    file = str(Path(__file__).parent / "interpreted_posted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("landed", [False, True])
def test_nothing_is_spilled_and_products_are_not_serialised(landed: bool, target: str) -> None:
    large, small = ((128, 256), (64, 256)) if target == "sm_90" else ((128, 128), (64, 128))
    for tile, grouped in ((large, False), (large, True), (small, False)):
        made = multiplying(landed, target, tile, grouped)
        assert made.spills == 0
        assert not made.serialised


def test_nothing_is_compiled_that_was_not_loaded() -> None:
    """What a launch is compiled for beside its constants must be in the variants of `ops/posted_cuda.py`."""
    variants = {
        posted.multiply_and_post_kernel: {"a", "b", "n"},  # factors are aligned, or descriptors
        posted.sum_kernel: {"out"},
        posted.bring_kernel: set(),
        posted.multiply_landed_kernel: {"a", "b", "out", "n"},
        posted.count_kernel: set(),
    }
    for kernel, known in variants.items():
        free = {one.name for one in kernel.params if not one.is_constexpr and not one.do_not_specialize}
        assert free == known, kernel


def test_16_bytes_at_a_time() -> None:
    for leave in (False, True):
        assert bringing(leave).ptx.count("ld.global.v4") == bringing(leave).ptx.count("st.global.v4") == 2
        assert bringing(leave, even=False).ptx.count("global.v4") == 0
    for made in (summing(keep=True), summing(keep=False), bringing(True), bringing(False)):
        assert made.spills == 0
        assert made.registers <= 64, "eight CTAs find room on an SM"


POSTING = {
    "product": lambda target: multiplying(False, target),
    "sum": summing,
    "rows": lambda target: bringing(True, target),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", list(POSTING))
def test_stored_then_counted_then_posted(kernel: str, target: str) -> None:
    """In the order of the text: what is stored, the parcel's ticket, the ring's ticket, room, the descriptor, its ready
    word; on every path each release covers all stores before it."""
    made = POSTING[kernel](target)
    assert check_release_order(made.ptx) == []
    if (kernel, target) != ("product", "sm_90"):  # whose bulk loads are of factors, which nobody else writes
        assert check_acquire_order(made.ptx) == []
    assert tickets(made.ptx) == 2
    assert made.ptx.count("st.release.sys.global.b64") == 1
    (code,) = functions(made.ptx)
    found = [at.opcode for at in code]
    ready = found.index("st.release.sys.global.b64")
    last = max(at for at, name in enumerate(found[:ready]) if name.startswith("st.global.v4"))
    position, between = 0, found[last:ready]
    for step in ("bar.sync", "atom.", "bar.sync", "atom.", "ld.acquire.sys.global.b32", "barrier.red.or.pred",
                 "st.global.b64", "bar.sync"):  # fmt: skip
        position = next(at for at in range(position, len(between)) if between[at].startswith(step)) + 1


@pytest.mark.parametrize("target", TARGETS)
def test_what_landed_is_read_behind_its_signal(target: str) -> None:
    for made in (summing(target, keep=False), bringing(False, target), multiplying(True, target)):
        assert check_acquire_order(made.ptx) == []
        assert check_release_order(made.ptx) == []
        assert made.ptx.count("ld.acquire.sys.global.b32") == 1
    opcodes = [at.opcode for at in next(iter(functions(multiplying(True, target).ptx)))]
    acquired = opcodes.index("ld.acquire.sys.global.b32")
    loads = [at for at, name in enumerate(opcodes) if name.startswith(("cp.async.bulk.tensor", "cp.async.cg"))]
    assert loads
    assert acquired < min(loads)
    if target == "sm_90":
        fence = next(at for at, name in enumerate(opcodes) if name.startswith("fence.proxy.async"))
        assert acquired < opcodes.index("barrier.red.or.pred") < fence < min(loads)
        dropped = multiplying(True).ptx.replace("fence.proxy.async.global;", "")
        assert check_acquire_order(dropped) != []
