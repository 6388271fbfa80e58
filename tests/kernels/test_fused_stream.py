"""The kernel that takes columns as it comes, compiled without a GPU: registers, room, packets, and what is ordered."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from ptx import CompiledKernel
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from undertow.kernels.fused_stream import _TOGETHER, REGISTERS, WARPS, fused_stream_kernel
from undertow.plan import fused

WORKERS, MAILS, TOGETHER = 4, 4, _TOGETHER.value
Form = tuple[int, int, int, bool, int, str]  # rows, K, ranks, bias, activation, type
FORMS: list[Form] = [
    (8, 1024, 2, False, 0, "bf16"),
    (16, 1024, 4, True, 2, "fp16"),
    (8, 3584, 4, True, 3, "bf16"),
    (16, 3584, 8, False, 0, "bf16"),
]
_compiled: dict[Form, CompiledKernel] = {}


def compiled(form: Form) -> CompiledKernel:
    """As the operator launches it on sm_90."""
    if form not in _compiled:
        rows, k, ranks, bias, activation, kind = form
        step = fused.STREAM_STEP
        shapes = {"x": [fused.stream_rows(rows), step], "w": [fused.STREAM_TILE[1], step]}
        types: dict[str, str] = {
            name: f"tensordesc<{kind}{shape},{gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)!r}>"
            for name, shape in shapes.items()
        }
        types |= dict.fromkeys(("out", "bias"), f"*{kind}") | dict.fromkeys(("half", "deadline_ns"), "i64")
        types |= dict.fromkeys(("bases", "packets"), "*i64") | dict.fromkeys(("rows", "n", "active", "rank"), "i32")
        types |= dict.fromkeys(("epochs", "taken", "abort", "error"), "*i32")
        constants: dict[str, Any] = {
            "STEPS": -(-k // step), "STAGES": fused.stream_stages(rows, k), "RANKS": ranks, "BIAS": bias,
            "ACTIVATION": activation,
        }  # fmt: skip
        names = fused_stream_kernel.arg_names
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("out", "n")}
        signature = {name: "constexpr" if name in constants else types[name] for name in names}
        source = GluonASTSource(fused_stream_kernel, signature, constants, aligned)
        options = {"num_warps": WARPS, "maxnreg": REGISTERS}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        _compiled[form] = CompiledKernel(made.asm["ptx"], 90, made.metadata.shared)
    return _compiled[form]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_spilled_and_shared_memory_is_what_the_plan_reckons_with(form: Form) -> None:
    made, stages = compiled(form), fused.stream_stages(*form[:2])
    stage = 2 * fused.STREAM_STEP * fused.STREAM_TILE[1]
    assert made.spills == 0
    assert made.shared <= fused.ALL_SHARED
    assert stages == 24 or made.shared + stage > fused.ALL_SHARED - 2048  # as many as there is room for


@pytest.mark.parametrize("form", FORMS)
def test_stages_are_read_by_ldmatrix_alone(form: Form) -> None:
    made = compiled(form)
    high = fused.stream_rows(form[0]) // 8
    products = fused.STREAM_STEP // 16 * high  # of a stage
    assert made.ptx.count("mma.sync.aligned.m16n8k16") == WORKERS * products
    loops = made.innermost_loops("HMMA")
    assert len(loops) == WORKERS
    for loop in loops:
        assert sum("HMMA.16816.F32" in code for code in loop) == products
        assert sum("LDSM.16.M88.4" in code for code in loop) == fused.STREAM_STEP * (16 + 8 * high) // 256
        assert not any(re.search(r"\b(LDS|LDG|STG|LDL|STL|ATOM\w*|RED)\b", code) for code in loop)


@pytest.mark.parametrize("form", FORMS)
def test_packets_are_one_access_and_the_count_is_one_atomic(form: Form) -> None:
    ptx, ranks = compiled(form).ptx, form[2]
    assert re.findall(r"st\.relaxed\.sys\.global\.(\w+)", ptx).count("b64") == ranks
    assert (
        re.findall(r"ld\.relaxed\.sys\.global\.(\w+)", ptx).count("b64") == 2 * TOGETHER * ranks
    )  # on the way, and last
    assert not re.search(r"(ld|st)\.relaxed\.sys\.global\.v", ptx)
    assert re.findall(r"(\S+) (atom\.\S+\.u32)", ptx) == [("@first", "atom.relaxed.gpu.global.add.u32")]
    # Of `out`; of the epoch and the count for the next call; poison.
    assert set(re.findall(r"st\.global\.(\S+)", ptx)) == {"b16", "b32", "v4.b32"}


ACCESS = re.compile(r"\b(?:ldmatrix|stmatrix|ld\.shared|st\.shared)\b")
MEETING = re.compile(r"bar\.warp\.sync \t-1;|bar\.sync \t0, 128;")  # of a role's only warp; of those that exchange
ARRIVAL = re.compile(r"(\S+) mbarrier\.arrive\.shared::cta\.b64 _, \[\S+\];")
FENCE = "fence.proxy.async.shared::cta;"


def hand_overs(ptx: str) -> list[tuple[int, int, int]]:
    """Of every arrival that hands memory over: where the one before is, the last access before it, and itself."""
    found = [0, *(one.start() for one in ARRIVAL.finditer(ptx))]
    last = [max(one.end() for one in ACCESS.finditer(ptx, 0, at)) for at in found[1:]]
    return list(zip(found[:-1], last, found[1:], strict=True))


def check_hand_overs(ptx: str) -> None:
    """All lanes or warps of a role meet between their last access to what they hand over, or back, and the arrival of
    one thread. Stages are also fenced: what overwrites them is a bulk copy."""
    places = hand_overs(ptx)
    # A worker hands two numbers of blocks and a stage back, and a part over; who exchanges, two numbers and parts
    # back; who loads, two numbers over.
    assert len(places) == WORKERS * 4 + 3 + 2
    stages = 0
    for before, last, at in places:
        assert before < last < at, "an arrival that hands nothing over"
        assert MEETING.search(ptx, last, at), "handed over too early"
        if "mma.sync" in ptx[before:at]:
            stages += 1
            fence = ptx.find(FENCE, last, at)
            assert fence >= 0, "a copy may overtake what is read"
            assert MEETING.search(ptx, fence, at), "only one lane's reads are fenced"
    assert stages == WORKERS
    assert all(one[1].startswith("@%p") for one in ARRIVAL.finditer(ptx)), "more than one thread arrives"


@pytest.mark.parametrize("form", FORMS)
def test_all_have_read_or_stored_what_one_hands_over(form: Form) -> None:
    ptx = compiled(form).ptx
    check_hand_overs(ptx)
    stages = fused.stream_stages(*form[:2])
    counts = re.findall(r"mbarrier\.init\.\S+ \[\S+\], (\d+)", ptx)
    assert counts == ["1"] * 3 * stages + [str(WORKERS + 1), "1"] * MAILS + ["1", str(WORKERS)] * 2


def test_a_dropped_barrier_or_fence_is_found() -> None:
    ptx = compiled(FORMS[0]).ptx
    for _, last, at in hand_overs(ptx):
        with pytest.raises(AssertionError, match=r"too early|only one lane's"):
            check_hand_overs(ptx[:last] + MEETING.sub("", ptx[last:at]) + ptx[at:])
    for fence in re.finditer(re.escape(FENCE), ptx):
        with pytest.raises(AssertionError, match="overtake"):
            check_hand_overs(ptx[: fence.start()] + ptx[fence.end() :])


def test_the_plan_never_gives_fewer_stages_than_a_workers_way_to_its_next() -> None:
    """With fewer, one bit would not tell a stage's fillings apart."""
    given = {fused.stream_stages(rows, 256 * steps) for rows in (8, 16) for steps in range(1, 60)}
    assert min(given - {0}) == 2 * WORKERS - 1
    assert 0 in given
