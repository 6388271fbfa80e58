"""The kernel that runs bound programs: ordering, width of accesses, registers, spills; whole programs, interpreted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
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
from undertow.collective.bind import tiling
from undertow.collective.cuda_kernels import EARLIEST, PACKET_WARPS, WARPS, kernel_variant, launch_options
from undertow.collective.schedule import Schedule
from undertow.collective.selection import CUDA, most_ctas
from undertow.collective.straight import rows, straighten
from undertow.errors import InvalidArgument
from undertow.kernels.interpret import interpret_kernel
from undertow.kernels.straight import straight_kernel

SIGNATURE = {
    "code": "*i64", "bases": "*i64", "semaphores": "*i64", "epochs": "*i64", "finished": "*i64", "source": "i64",
    "out": "i64", "out_bytes": "i64", "iterations": "i32", "words": "i32", "abort": "*i32", "error": "*i32",
    "deadline_ns": "i64", "parcels": "i64",
    "parcel_target": "i32", "tiles": "i64", "rows": "*i64", "width": "i32", "tile": "i64", "scratch_bytes": "i64",
    "slice_bytes": "i64", "depth": "i32", "instances": "i32",
}  # fmt: skip
IN_FLIGHT = 16  # wide loads of a thread
GENERATIONS = [one if one == "sm_90" else pytest.param(one, marks=pytest.mark.nightly) for one in TARGETS]
DIRECT, STAGED, PACKETS = {"target": "direct"}, {"target": "staged"}, {"target": "staged", "packets": True}
STRAIGHT: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sum, 4 ranks": ("two_shot", 4, DIRECT),
    "sum, 8 ranks": ("two_shot", 8, DIRECT),
    "sum to one, 8 ranks": ("reduce_scatter_direct", 8, DIRECT),
    "copy, 8 ranks": ("all_gather_direct", 8, DIRECT),
    "copies, 8 ranks": ("all_to_all_direct", 8, DIRECT),
    "packets, 4 ranks": ("one_shot", 4, PACKETS),
    "packets, 8 ranks": ("one_shot", 8, PACKETS),
}
GENERAL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sums of 2": ("ring", 4, STAGED),
    "sums of 4": ("one_shot", 4, DIRECT),
    "sums of 8": ("one_shot", 8, DIRECT),
    "copies": ("all_gather_doubling", 4, STAGED),
    "kernels": ("all_gather_ring", 4, {**STAGED, "ready": True, "needed": True}),
    "sums of a kernel's tiles": ("ring", 4, {**STAGED, "ready": True}),
    "packets": ("ring", 4, PACKETS),
}
PROGRAMS = {**STRAIGHT, **GENERAL}
MANY = {"SOURCES": 8, "STORES": 8, "MANY": True, "KERNELS": True, "PACKETS": False}
_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


def schedule_of(name: str) -> Schedule:
    program, ranks, options = PROGRAMS[name]
    return LIBRARY[program].compile(ranks, **options)


def compiled(
    name: str, target: str, dtype: torch.dtype = torch.bfloat16, operation: str = "sum", warps: int = 0, **changes: Any
) -> CompiledKernel:
    """As `CudaExecutable` launches it."""
    schedule = schedule_of(name)
    warps = warps or (PACKET_WARPS if schedule.packets else WARPS)
    shape = straighten(schedule)
    assert (shape is not None) == (name in STRAIGHT), name
    kernel: Any = interpret_kernel if shape is None else straight_kernel
    architecture = int(target.removeprefix("sm_"))
    early = (architecture // 10, architecture % 10) >= EARLIEST
    constants = {**kernel_variant(schedule, shape, dtype, operation, warps, early=early), **changes}
    key = (shape is None, *constants.values(), target)
    if key not in _compiled:
        types = {argument: SIGNATURE.get(argument, "constexpr") for argument in kernel.arg_names}
        source = ASTSource(kernel, types, constants, {})
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch_options(warps))
        _compiled[key] = CompiledKernel(made.asm["ptx"], architecture, made.metadata.shared)
    return _compiled[key]


def check_order(made: CompiledKernel) -> list[Instruction]:
    """Every wait and post is ordered, has system scope, and no register is spilled; the instructions."""
    assert check_release_order(made.ptx) == []
    assert check_acquire_order(made.ptx) == []
    (code,) = functions(made.ptx)
    releases = {at.opcode for at in code if re.search(r"\.(?:release|acq_rel)\b", at.opcode)}
    acquires = {at.opcode for at in code if re.search(r"\.(?:acquire|acq_rel)\b", at.opcode)}
    failed = "atom.global.gpu.acq_rel.add.u64"  # of CTAs that leave a call
    left, posted = {"atom.global.gpu.release.add.u64", failed}, {"atom.global.sys.release.add.u32"}
    seen = {failed, "ld.global.gpu.acquire.b64"}
    assert failed in releases
    assert releases <= posted | left
    assert left <= releases or "atom.global.gpu.relaxed.add.u64" in {at.opcode for at in code}
    assert seen <= acquires <= {"ld.acquire.sys.global.b32"} | seen  # waits
    assert all(at.guard for at in code if at.opcode in releases)
    assert "%globaltimer" in made.ptx
    assert made.spills == 0
    return code


@pytest.mark.parametrize("target", GENERATIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_waits_and_posts_are_ordered_and_nothing_is_spilled(name: str, target: str) -> None:
    code = check_order(compiled(name, target))
    opcodes = [at.opcode for at in code]
    if not schedule_of(name).packets:
        assert "atom.global.sys.release.add.u32" in opcodes
        assert "ld.acquire.sys.global.b32" in opcodes


@pytest.mark.parametrize("name", ["sum, 4 ranks", "packets, 4 ranks"])
def test_the_next_call_is_launched_when_this_one_waits_no_more_and_reads_nothing_before_it_has_ended(name: str) -> None:
    code = check_order(compiled(name, "sm_90"))
    (waits,), (launches,) = (positions(code, f"griddepcontrol.{one}") for one in ("wait", "launch_dependents"))
    polls = [at for at, one in enumerate(code) if re.match(r"ld\.(acquire|relaxed)\.sys\.global\.b(32|64)", one.opcode)]
    assert polls
    assert waits < min(polls)
    assert max(polls) < launches
    touched = [at for at, one in enumerate(code) if one.opcode.startswith(("st.", "atom."))]
    assert waits < min(touched)
    loads = [at for at in range(waits) if code[at].opcode.startswith("ld.global")]
    assert len(loads) > 2, "the row is read meanwhile"
    assert "griddepcontrol" not in compiled(name, "sm_80").ptx


TYPES = [
    torch.float32, torch.float16, torch.int32, torch.float64, torch.int64, torch.int8, torch.uint8, torch.int16,
]  # fmt: skip


@pytest.mark.parametrize("name", [*STRAIGHT][:5])
def test_nothing_spills_with_as_many_warps_as_large_calls_have(name: str) -> None:
    for warps in {one.warps for choices in CUDA.values() for one in choices if one.warps and not one.packets}:
        check_order(compiled(name, "sm_90", warps=warps))


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_compiles_without_spills(dtype: torch.dtype) -> None:
    check_order(compiled("sum, 8 ranks", "sm_90", dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_compiles_without_spills_if_interpreted(dtype: torch.dtype) -> None:
    check_order(compiled("sums of 8", "sm_90", dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int8])
def test_packets_of_every_width_compile_without_spills(dtype: torch.dtype) -> None:
    check_order(compiled("packets, 8 ranks", "sm_90", dtype))


@pytest.mark.parametrize("operation", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_maximum_and_minimum(dtype: torch.dtype, operation: str) -> None:
    check_order(compiled("sum, 4 ranks", "sm_90", dtype, operation))


@pytest.mark.nightly
@pytest.mark.parametrize("target", GENERATIONS)
def test_more_operands_than_are_unrolled(target: str) -> None:
    check_order(compiled("sums of 8", target, **MANY))


def positions(code: list[Instruction], opcode: str) -> list[int]:
    return [index for index, at in enumerate(code) if at.opcode == opcode]


@pytest.mark.parametrize("target", GENERATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*STRAIGHT][:5])
def test_aligned_moves_have_all_their_loads_under_way(name: str, dtype: torch.dtype, target: str) -> None:
    """Between the first and the last wide load nothing is stored, nothing is waited for and nothing branches."""
    shape = straighten(schedule_of(name))
    assert shape is not None
    (phase,) = shape.phases
    code = check_order(compiled(name, target, dtype))
    wide = positions(code, "ld.global.v4.b32")
    assert len(wide) == IN_FLIGHT
    between = [at.opcode for at in code[wide[0] : wide[-1]]]
    assert not [opcode for opcode in between if opcode.startswith(("st.", "bra", "bar"))]
    stores = len(positions(code, "st.global.v4.b32"))
    assert stores == phase.pieces * phase.stores * IN_FLIGHT // (phase.pieces * phase.sources)


@pytest.mark.parametrize("target", GENERATIONS)
def test_interpreted_moves_are_wide_too(target: str) -> None:
    for name in ("copies", "sums of 4"):
        assert len(positions(check_order(compiled(name, target)), "ld.global.v4.b32")) == IN_FLIGHT


@pytest.mark.parametrize("target", GENERATIONS)
def test_one_thread_polls_for_each_semaphore(target: str) -> None:
    """One copy of the polling loop for a phase (or for all instructions) and one for the end."""
    for name in ("sum, 4 ranks", "sums of 4"):
        code = check_order(compiled(name, target))
        polls, posts = (
            positions(code, one) for one in ("ld.acquire.sys.global.b32", "atom.global.sys.release.add.u32")
        )
        assert (len(polls), len(posts)) == (2, 2)  # body and end; start and body


@pytest.mark.parametrize("target", GENERATIONS)
def test_a_phase_is_read_before_it_waits_and_no_load_depends_on_another(target: str) -> None:
    """From the start's post on, every word of the row is under way before the first poll; none is an address."""
    code = check_order(compiled("sum, 8 ranks", target))
    first_poll = positions(code, "ld.acquire.sys.global.b32")[0]
    start = positions(code, "atom.global.sys.release.add.u32")[0]
    words = [at for at in code[:first_poll] if at.opcode == "ld.global.b64"]
    assert len(words) == 2 + 4 + 1 + 4 + 1 + 17  # epochs, end, start, waits, posts, one piece
    assert positions(code, "ld.global.b64")[0] < start
    first_wide = positions(code, "ld.global.v4.b32")[0]
    assert not [at for at in code[first_poll:first_wide] if at.opcode == "ld.global.b64"]


@pytest.mark.parametrize("target", GENERATIONS)
def test_packets_travel_in_one_piece(target: str) -> None:
    """Data and flag in one relaxed 64-bit access at system scope; those of all sources are polled together."""
    code = check_order(compiled("packets, 4 ranks", target))
    loads, stores = (positions(code, f"{one}.relaxed.sys.global.b64") for one in ("ld", "st"))
    assert len(stores) == 4 * 4 + 1  # four words of a thread to each of four; the sum
    assert len(loads) == 4 + 4  # four words of one source, one of each of four
    between = code[loads[-4] : loads[-1]]
    assert not [at for at in between if at.opcode.startswith(("bra", "st"))]


def test_epochs_are_stored_last() -> None:
    code = check_order(compiled("sum, 4 ranks", "sm_90"))
    stores = positions(code, "st.global.b64")
    assert len(stores) == 3  # iterations and calls, or that it failed
    data = [index for index, at in enumerate(code) if re.fullmatch(r"st\.global\.(v4\.b32|b16)", at.opcode)]
    last_data = max(data)  # bytes are poison
    assert last_data < stores[0]
    between = [at.opcode for at in code[last_data : stores[0]]]
    assert "bar.sync" in between


# -- which kernel a schedule takes -----------------------------------------------------------------------------------


def test_what_is_straight_and_in_which_phases() -> None:
    def phases(name: str, ranks: int, **options: Any) -> list[tuple[int, int, int]] | None:
        found = straighten(LIBRARY[name].compile(ranks, **options))
        return None if found is None else [(one.pieces, one.sources, one.stores) for one in found.phases]

    assert phases("two_shot", 8, target="direct") == [(1, 8, 8)]
    assert phases("two_shot", 3, target="direct") == [(1, 3, 3)]
    assert phases("all_gather_direct", 8, target="direct") == [(1, 1, 8)]
    assert phases("reduce_scatter_direct", 8, target="direct") == [(1, 8, 1)]
    assert phases("all_to_all_direct", 8, target="direct") == [(8, 1, 1)]
    assert phases("two_shot", 4, target="staged") is None
    assert phases("one_shot", 4, target="staged", packets=True) == [(1, 1, 4), (1, 4, 1)]
    for name in ("ring", "halving_doubling", "broadcast_tree"):
        assert phases(name, 8, target="direct") is None, name


@pytest.mark.parametrize("name", STRAIGHT)
def test_a_phase_waits_for_earlier_phases_only(name: str) -> None:
    """And every wait and post of the schedule that is counted stands in the rows, once for each instance."""
    schedule = schedule_of(name)
    shape = straighten(schedule)
    assert shape is not None
    one = schedule.instructions
    told: dict[int, int] = {}
    level: dict[tuple[int, int], int] = {}
    for at in range(len(one)):
        for semaphore in one.post_semaphore[one.post_start[at] : one.post_start[at + 1]].tolist():
            told[semaphore] = told.get(semaphore, 0) + 1
            level[semaphore, told[semaphore]] = int(shape.level[at])
    counted = 0
    for at in range(len(one)):
        for entry in range(one.wait_start[at], one.wait_start[at + 1]):
            semaphore = int(one.wait_semaphore[entry])
            counted += not schedule.semaphore_of_packets[semaphore]
            if shape.level[at] >= 0 and one.wait_back[entry] == 0:
                assert level[semaphore, int(one.wait_value[entry])] < shape.level[at]
    length = schedule.contract.class_lengths([64] * schedule.contract.spans, 8)
    assert tiling(schedule, length, 1 << 20, 2, None)[1] == 1
    bases, semaphores = np.full(2 + 3 * schedule.ranks, 1 << 40), [1 << 30] * schedule.ranks
    found = [rows(schedule, shape, rank, length, 1 << 19, 2, bases, semaphores) for rank in range(schedule.ranks)]
    waits = [slice(shape.starts, shape.starts + shape.ends), *(slice(q.at, q.at + q.waits) for q in shape.phases)]
    assert sum(int((one_rank[:, part] != 0).sum()) for one_rank in found for part in waits) == counted


@pytest.mark.parametrize("target", ["direct", "staged"])
@pytest.mark.parametrize("name", LIBRARY)
def test_what_counts_a_cta_out_releases_its_stores_unless_every_cta_posts_last(name: str, target: str) -> None:
    """A post by the first thread of every CTA, that is: some programs have workers without one."""
    for ranks, packets in ((2, False), (4, False), (4, True)):
        schedule = LIBRARY[name].compile(ranks, target=target, packets=packets and target == "staged")
        shape = straighten(schedule)
        if shape is None:
            continue
        length, last = schedule.contract.class_lengths([64] * schedule.contract.spans, 8), shape.phases[-1]
        bases, semaphores = np.full(2 + 3 * ranks, 1 << 40), [1 << 30] * ranks
        found = [rows(schedule, shape, rank, length, 1 << 19, 2, bases, semaphores) for rank in range(ranks)]
        first = last.at + 4 * last.waits
        assert shape.released == (last.posts > 0 and all((one[:, first] != 0).all() for one in found)), (name, ranks)
        assert kernel_variant(schedule, shape, torch.int32, "sum", WARPS)["RELEASED"] == shape.released


def test_copies_share_a_kernel_whatever_the_type() -> None:
    schedule = LIBRARY["all_gather_ring"].compile(4, target="staged")
    types = (torch.bfloat16, torch.float16, torch.int16)
    variants = [kernel_variant(schedule, None, dtype, "sum", WARPS) for dtype in types]
    assert variants[0] == variants[1] == variants[2]
    assert kernel_variant(schedule, None, torch.complex64, "sum", WARPS)["ELEMENT"] == tl.int64


def test_what_cannot_be_reduced_is_refused() -> None:
    schedule = LIBRARY["two_shot"].compile(2, target="direct")
    with pytest.raises(InvalidArgument, match=r"torch\.bool"):
        kernel_variant(schedule, None, torch.bool, "sum", WARPS)
    crowded = LIBRARY["one_shot"].compile(9, target="staged", packets=True)
    with pytest.raises(InvalidArgument, match="of at most 8 operands"):
        kernel_variant(crowded, straighten(crowded), torch.float32, "sum", WARPS)


# -- whole programs in Triton's interpreter --------------------------------------------------------------------------


def interpreted(which: str, timeout: int) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / "interpreted_interpret.py")]
    folders = [str(here.parent / "gpu"), str(here.parent / "fabric"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([*command, "-k", which], env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_programs_in_the_interpreter() -> None:
    interpreted("not library and not long_tiles", 300)


@pytest.mark.nightly
def test_long_tiles_in_the_interpreter() -> None:
    interpreted("long_tiles", 600)


@pytest.mark.nightly
def test_the_whole_library_in_the_interpreter() -> None:
    interpreted("library", 3000)


def test_a_collective_leaves_half_of_a_ranks_part_of_a_gpu() -> None:
    """For the matmuls of those that it waits for, for its own rank's, and for another group's collective."""
    assert 2 * most_ctas(132) <= 132
    assert [most_ctas(one) for one in (33, 1)] == [16, 1]
