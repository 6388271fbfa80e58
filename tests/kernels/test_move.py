"""The kernels of `move`: ordering, width of accesses, registers and spills; arithmetic through the interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ptx import TARGETS, CompiledKernel, check_acquire_order, check_release_order, compile_kernel, functions

from undertow.kernels import move

COPIES: list[tuple[Any, dict[str, Any]]] = [
    (move.copy_kernel, {}),
    (move.copy_and_signal_kernel, {"ADD": True}),
    (move.copy_and_signal_kernel, {"ADD": False}),
    (move.wait_and_copy_kernel, {"AHEAD": 0}),
    (move.wait_and_copy_kernel, {"AHEAD": 1}),
    (move.copies_kernel, {"COUNT": 3}),
    (move.copies_kernel, {"COUNT": move.MOST_COPIES}),
]


def compiled_copy(kernel: Any, constexprs: dict[str, Any], alignment: int, target: str) -> CompiledKernel:
    types = dict.fromkeys(kernel.arg_names, "*i32")
    types |= {"amount": "i32", "deadline_ns": "i64"}
    for name in types:
        if name.startswith("byte_count") or kernel is move.copies_kernel:
            types[name] = "i64"
        elif alignment == 1 and name in ("destination", "source"):
            types[name] = "*i8"
    constants = {**constexprs, "ALIGNMENT": alignment, "BLOCK": move.COPY_BLOCK}
    return compile_kernel(kernel, types, constants, target, num_warps=move.COPY_WARPS)


def hot_loop(ptx: str) -> list[str]:
    """The opcodes between the target of the first backward branch that loads data, and that branch."""
    (code,) = functions(ptx)
    for index, at in enumerate(code):
        for target in at.next:
            body = [inside.opcode for inside in code[target : index + 1]]
            if at.opcode.startswith("bra") and target <= index and any(name.startswith("ld.global") for name in body):
                return body
    raise AssertionError("no loop loads data")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("alignment", [16, 4, 1])
@pytest.mark.parametrize(("kernel", "constexprs"), COPIES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_copies_are_ordered_and_do_not_spill(
    kernel: Any, constexprs: dict[str, Any], alignment: int, target: str
) -> None:
    made = compiled_copy(kernel, constexprs, alignment, target)
    assert check_release_order(made.ptx) == []
    assert check_acquire_order(made.ptx) == []
    assert made.spills == 0
    assert made.registers <= 65536 // (32 * move.COPY_WARPS)
    accesses = {name for name in hot_loop(made.ptx) if name.startswith(("ld.global", "st.global"))}
    width = {16: "v4.b32", 4: "b32", 1: "b8"}[alignment]
    assert accesses == {f"ld.global.{width}", f"st.global.{width}"}


@pytest.mark.parametrize("target", TARGETS)
def test_an_aligned_copy_keeps_four_vectors_in_flight(target: str) -> None:
    made = compiled_copy(move.copy_kernel, {}, 16, target)
    body = [name for name in hot_loop(made.ptx) if ".global" in name]
    assert body == ["ld.global.v4.b32"] * 4 + ["st.global.v4.b32"] * 4
    assert made.registers <= 64


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("add", "release"), [(True, "atom.global.sys.release.add.u32"), (False, "st.release.sys.global.b32")]
)
def test_the_last_program_signals_the_peer_once(add: bool, release: str, target: str) -> None:
    (code,) = functions(compiled_copy(move.copy_and_signal_kernel, {"ADD": add}, 16, target).ptx)
    found = [at.opcode for at in code]
    assert [name for name in found if "release" in name or "acq_rel" in name] == [
        "atom.global.sys.acq_rel.add.u32",
        release,
    ]
    # Between the ticket and the signal stands the reset of the ticket counter, so that a graph can replay the launch.
    between = found[found.index("atom.global.sys.acq_rel.add.u32") : found.index(release)]
    assert between.count("st.global.b32") == 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("element", ["fp16", "bf16", "fp32", "i32"])
def test_aligned_sums_use_vectors_and_do_not_spill(element: str, parts: int, target: str) -> None:
    types = {"output": f"*{element}", "parts": f"*{element}", "count": "i64", "parts_stride": "i64"}
    constants = {"PARTS": parts, "ALIGNMENT": 16, "BLOCK": move.SUM_BLOCK}
    made = compile_kernel(move.sum_kernel, types, constants, target, num_warps=move.SUM_WARPS)
    loop = [name for name in hot_loop(made.ptx) if ".global" in name]
    per_thread = move.SUM_BLOCK // (32 * move.SUM_WARPS) * (4 if element in ("fp32", "i32") else 2) // 16
    assert loop.count("ld.global.v4.b32") == parts * per_thread
    assert loop.count("st.global.v4.b32") == per_thread
    assert len(loop) == (parts + 1) * per_thread
    assert made.spills == 0
    assert made.registers <= 96


def test_arithmetic_in_the_interpreter() -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "interpreted_move.py")]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
