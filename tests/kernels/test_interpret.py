"""The kernel that runs bound programs: ordering, width of accesses, registers, spills; whole programs, interpreted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ptx import (
    TARGETS,
    CompiledKernel,
    Instruction,
    check_acquire_order,
    check_release_order,
    functions,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from undertow.collective.algorithms import LIBRARY
from undertow.collective.cuda_runtime import VECTORS, WARPS, kernel_variant, launch_options
from undertow.errors import InvalidArgument
from undertow.kernels.interpret import interpret_kernel

SIGNATURE = {
    "code": "*i64", "bases": "*i64", "semaphores": "*i64", "epochs": "*i64", "source": "i64", "out": "i64",
    "iterations": "i32", "words": "i32", "abort": "*i32", "error": "*i32", "deadline_ns": "i64", "parcels": "i64",
    "parcel_target": "i32", "tiles": "i64",
}  # fmt: skip
GENERAL = {"COPIES": True, "MANY": False, "SINGLE": False, "KERNELS": False, "PACKETS": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "one move, 4 ranks": {**GENERAL, "SOURCES": 4, "STORES": 4, "COPIES": False, "SINGLE": True},
    "one move, 8 ranks": {**GENERAL, "SOURCES": 8, "STORES": 8, "COPIES": False, "SINGLE": True},
    "one copy, 8 ranks": {**GENERAL, "SOURCES": 1, "STORES": 8, "COPIES": False, "SINGLE": True},
    "copies": {**GENERAL, "SOURCES": 1, "STORES": 4, "COPIES": False},
    "general, 2": {**GENERAL, "SOURCES": 2, "STORES": 2},
    "general, 4": {**GENERAL, "SOURCES": 4, "STORES": 4},
    "general, 8": {**GENERAL, "SOURCES": 8, "STORES": 8},
    "kernels": {**GENERAL, "SOURCES": 4, "STORES": 4, "KERNELS": True},
    "packets, 4": {**GENERAL, "SOURCES": 4, "STORES": 4, "PACKETS": True},
    "packets, 8": {**GENERAL, "SOURCES": 8, "STORES": 8, "PACKETS": True},
}
MANY = {**GENERAL, "SOURCES": 8, "STORES": 8, "MANY": True, "KERNELS": True}
_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


def compiled(variant: dict[str, Any], target: str, element: Any = tl.bfloat16, operation: int = 0) -> CompiledKernel:
    """As `CudaExecutable` launches it."""
    if variant["SOURCES"] == 1:
        element = {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}[element.primitive_bitwidth]
    constants = {**variant, "ELEMENT": element, "OPERATION": operation, "LANES": 32 * WARPS, "VECTORS": VECTORS}
    key = (*constants.values(), target)
    if key not in _compiled:
        architecture = int(target.removeprefix("sm_"))
        types = {name: SIGNATURE.get(name, "constexpr") for name in interpret_kernel.arg_names}
        source = ASTSource(interpret_kernel, types, constants, {})
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch_options(WARPS))
        _compiled[key] = CompiledKernel(made.asm["ptx"], architecture, made.metadata.shared)
    return _compiled[key]


def check_order(made: CompiledKernel) -> list[Instruction]:
    """Every wait and post is ordered, has system scope, and no register is spilled; the instructions."""
    assert check_release_order(made.ptx) == []
    assert check_acquire_order(made.ptx) == []
    (code,) = functions(made.ptx)
    releases = {at.opcode for at in code if re.search(r"\.(?:release|acq_rel)\b", at.opcode)}
    acquires = {at.opcode for at in code if re.search(r"\.(?:acquire|acq_rel)\b", at.opcode)}
    assert releases == {"atom.global.sys.release.add.u32"}  # posts
    assert acquires == {"ld.acquire.sys.global.b32"}  # waits
    assert all(at.guard for at in code if at.opcode in releases)
    assert "%globaltimer" in made.ptx
    assert made.spills == 0
    assert made.registers <= launch_options(WARPS)["maxnreg"]
    return code


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", VARIANTS)
def test_waits_and_posts_are_ordered_and_nothing_is_spilled(name: str, target: str) -> None:
    check_order(compiled(VARIANTS[name], target))


ELEMENTS = [tl.float32, tl.float16, tl.int32, tl.float64, tl.int64, tl.int8, tl.uint8, tl.int16]


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_type_compiles_without_spills(element: Any) -> None:
    check_order(compiled(VARIANTS["one move, 8 ranks"], "sm_90", element))


@pytest.mark.nightly
@pytest.mark.parametrize("element", ELEMENTS)
def test_every_type_compiles_without_spills_beside_copies(element: Any) -> None:
    check_order(compiled(VARIANTS["general, 8"], "sm_90", element))


@pytest.mark.parametrize("element", [tl.float32, tl.float16, tl.int32, tl.int8])
def test_packets_of_every_width_compile_without_spills(element: Any) -> None:
    check_order(compiled(VARIANTS["packets, 8"], "sm_90", element))


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_any_number_of_ranks_compiles_without_spills(ranks: int) -> None:
    for stores in (1, ranks):
        check_order(compiled({**VARIANTS["one move, 4 ranks"], "SOURCES": ranks, "STORES": stores}, "sm_90"))


@pytest.mark.parametrize("operation", [1, 2])
@pytest.mark.parametrize("element", [tl.bfloat16, tl.int32])
def test_maximum_and_minimum(element: Any, operation: int) -> None:
    check_order(compiled(VARIANTS["one move, 4 ranks"], "sm_90", element, operation))


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_more_operands_than_are_unrolled(target: str) -> None:
    check_order(compiled(MANY, target))


def data_accesses(code: list[Instruction]) -> list[str]:
    """Loads and stores of data: those wider than the 64 bits of the program's own words, or narrower than 32."""
    return [at.opcode for at in code if re.match(r"(?:ld|st)\.global\.(?:v\d\.)?b\d+$", at.opcode)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "element"), [("one move, 8 ranks", tl.bfloat16), ("one move, 4 ranks", tl.float32)])
def test_aligned_sums_have_all_their_loads_under_way(name: str, element: Any, target: str) -> None:
    """Between the first and the last wide load nothing is stored, nothing is waited for and nothing branches."""
    variant = VARIANTS[name]
    code = check_order(compiled(variant, target, element))
    wide = [index for index, at in enumerate(code) if at.opcode == "ld.global.v4.b32"]
    assert len(wide) == VECTORS
    between = [at.opcode for at in code[wide[0] : wide[-1]]]
    assert not [opcode for opcode in between if opcode.startswith(("st.", "bra", "bar"))]
    stores = [at.opcode for at in code].count("st.global.v4.b32")
    assert stores == variant["STORES"] * VECTORS // variant["SOURCES"]


@pytest.mark.parametrize("target", TARGETS)
def test_aligned_copies_are_wide_too(target: str) -> None:
    for name in ("copies", "one copy, 8 ranks"):
        code = check_order(compiled(VARIANTS[name], target))
        found = data_accesses(code)
        assert found.count("ld.global.v4.b32") == VECTORS
        assert found.count("st.global.v4.b32") == VECTORS * VARIANTS[name]["STORES"]


@pytest.mark.parametrize("target", TARGETS)
def test_one_thread_polls_for_each_semaphore(target: str) -> None:
    """One copy of the polling loop for an instruction and one for the end: each thread has one lane."""
    code = check_order(compiled(VARIANTS["one move, 4 ranks"], target))
    polls = [at for at in code if at.opcode == "ld.acquire.sys.global.b32"]
    posts = [at for at in code if at.opcode == "atom.global.sys.release.add.u32"]
    assert (len(polls), len(posts)) == (2, 2)  # body and end; start and body
    general = check_order(compiled(VARIANTS["general, 4"], target))
    assert [at.opcode for at in general].count("ld.acquire.sys.global.b32") == 2


@pytest.mark.parametrize("target", TARGETS)
def test_packets_travel_in_one_piece(target: str) -> None:
    """Data and flag in one relaxed 64-bit access at system scope, wherever packets are read or written."""
    code = check_order(compiled(VARIANTS["packets, 4"], target))
    found = [at.opcode for at in code]
    assert found.count("ld.relaxed.sys.global.b64") == 2 * 4  # a first look at each source, then its polling loop
    assert found.count("st.relaxed.sys.global.b64") == 4
    first = [index for index, opcode in enumerate(found) if opcode == "ld.relaxed.sys.global.b64"]
    looks = code[first[0] : first[3]]
    assert not [at for at in looks if at.opcode.startswith("bra")]  # all first looks are under way together


def test_epochs_are_read_first_and_stored_last() -> None:
    code = check_order(compiled(VARIANTS["one move, 4 ranks"], "sm_90"))
    stores = [index for index, at in enumerate(code) if at.opcode == "st.global.b64"]
    assert len(stores) == 2
    last_data = max(index for index, at in enumerate(code) if at.opcode.startswith("st.global") and index not in stores)
    assert last_data < stores[0]
    between = [at.opcode for at in code[last_data : stores[0]]]
    assert "bar.sync" in between


# -- which variant a schedule takes ----------------------------------------------------------------------------------


def test_one_move_a_worker_needs_no_interpretation() -> None:
    for name, sources, stores in (("two_shot", 8, 8), ("all_gather_direct", 1, 8), ("reduce_scatter_direct", 8, 1)):
        found = kernel_variant(LIBRARY[name].compile(8, target="direct"), torch.bfloat16, "sum")
        assert (found["SINGLE"], found["SOURCES"], found["STORES"]) == (True, sources, stores), name
    for name in ("ring", "one_shot", "broadcast_tree"):
        assert not kernel_variant(LIBRARY[name].compile(8, target="direct"), torch.bfloat16, "sum")["SINGLE"], name
    odd = kernel_variant(LIBRARY["two_shot"].compile(3, target="direct"), torch.bfloat16, "sum")
    assert (odd["SINGLE"], odd["SOURCES"]) == (True, 3)


def test_copies_share_a_kernel_whatever_the_type() -> None:
    schedule = LIBRARY["all_gather_ring"].compile(4, target="staged")
    variants = [kernel_variant(schedule, dtype, "sum") for dtype in (torch.bfloat16, torch.float16, torch.int16)]
    assert variants[0] == variants[1] == variants[2]
    assert kernel_variant(schedule, torch.complex64, "sum")["ELEMENT"] == tl.int64


def test_what_cannot_be_reduced_is_refused() -> None:
    schedule = LIBRARY["two_shot"].compile(2, target="direct")
    with pytest.raises(InvalidArgument, match=r"torch\.bool"):
        kernel_variant(schedule, torch.bool, "sum")
    packets = LIBRARY["one_shot"].compile(2, target="staged", packets=True)
    with pytest.raises(InvalidArgument, match="sums of 32-bit elements at most"):
        kernel_variant(packets, torch.float64, "sum")
    crowded = LIBRARY["one_shot"].compile(9, target="staged", packets=True)
    with pytest.raises(InvalidArgument, match="of at most 8 operands"):
        kernel_variant(crowded, torch.float32, "sum")


# -- whole programs in Triton's interpreter --------------------------------------------------------------------------


def interpreted(which: str, timeout: int) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / "interpreted_interpret.py")]
    folders = [str(here.parent / "gpu"), str(here.parent / "fabric"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([*command, "-k", which], env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_programs_in_the_interpreter() -> None:
    interpreted("not library", 300)


@pytest.mark.nightly
def test_the_whole_library_in_the_interpreter() -> None:
    interpreted("library", 3000)
