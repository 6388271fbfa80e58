"""The checks of `ptx` find what is wrong, in kernels as Triton compiles them, and pass what is right."""

from typing import Any

import pytest
import triton
import triton.language as tl
from ptx import TARGETS, check_acquire_order, check_release_order, compile_kernel, functions

from undertow.kernels.signals import proxy_fence, signal_wait, tma_store_fence

BULK_TARGETS = [target for target in TARGETS if target != "sm_80"]


@triton.jit
def store_then_release(data, signal, BARRIER: tl.constexpr):
    tl.store(data + tl.arange(0, 512), 1)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_add(signal, 1, sem="release", scope="sys")


@triton.jit
def branch_then_release(data, signal, flag, BARRIER: tl.constexpr):
    if flag > 0:
        tl.store(data + tl.arange(0, 512), 1)
        if BARRIER:
            tl.debug_barrier()
    else:
        tl.store(data + tl.arange(0, 512), 2)
        tl.debug_barrier()
    tl.atomic_add(signal, 1, sem="release", scope="sys")


@triton.jit
def release_in_a_loop(data, signal, count, BARRIER: tl.constexpr):
    for step in range(count):
        tl.atomic_add(signal + step, 1, sem="release", scope="sys")
        tl.store(data + step * 512 + tl.arange(0, 512), 1)
        if BARRIER:
            tl.debug_barrier()


@triton.jit
def accumulate_then_release(data, signal, BARRIER: tl.constexpr):
    tl.atomic_add(data + tl.arange(0, 512), 1, sem="relaxed")
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(signal, 1, sem="release", scope="sys")


@triton.jit
def bulk_store_then_release(output, signal, WAIT: tl.constexpr, FENCE: tl.constexpr, BARRIER: tl.constexpr):
    tile = tl.make_tensor_descriptor(output, shape=[1024, 64], strides=[64, 1], block_shape=[64, 64])
    tile.store([0, 0], tl.full([64, 64], 1, tl.float16))
    if WAIT and FENCE:
        tma_store_fence()
    elif WAIT:
        tl.inline_asm_elementwise(
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; // $0", "=r", [], tl.int32, is_pure=False, pack=1
        )
    elif FENCE:
        tl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], tl.int32, is_pure=False, pack=1)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_add(signal, 1, sem="release", scope="sys")


@triton.jit
def acquire_then_load(data, output, signal, BARRIER: tl.constexpr):
    seen = tl.inline_asm_elementwise("ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [signal], tl.int32, False, 1)
    while seen == 0:
        seen = tl.inline_asm_elementwise("ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [signal], tl.int32, False, 1)
    if BARRIER:
        tl.debug_barrier()
    tl.store(output + tl.arange(0, 512), tl.load(data + tl.arange(0, 512)))


@triton.jit
def unused_acquire_then_load(data, output, signal, BARRIER: tl.constexpr):
    tl.atomic_add(signal, 1, sem="acquire", scope="sys")
    if BARRIER:
        tl.debug_barrier()
    tl.store(output + tl.arange(0, 512), tl.load(data + tl.arange(0, 512)))


@triton.jit
def spin_on_atomics_then_load(data, output, signal):
    while tl.atomic_add(signal, 0, sem="acquire", scope="sys") == 0:
        pass
    tl.store(output + tl.arange(0, 512), tl.load(data + tl.arange(0, 512)))


@triton.jit
def wait_then_bulk_load(data, output, signal, abort, FENCE: tl.constexpr):
    tile = tl.make_tensor_descriptor(data, shape=[1024, 64], strides=[64, 1], block_shape=[64, 64])
    if signal_wait(signal, 1, abort, 1000) == 0:
        if FENCE:
            proxy_fence()
        values = tile.load([0, 0])
        offsets = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(output + offsets, values)


def ptx_of(kernel: Any, target: str, **constexprs: bool) -> str:
    types = dict.fromkeys(kernel.arg_names, "*i32")
    types |= {"flag": "i32", "count": "i32"}
    if "bulk" in kernel.__name__:
        types |= {"output": "*fp16", "data": "*fp16"}
    attributes = {name: 16 for name in ("data", "output") if name in kernel.arg_names}
    return compile_kernel(kernel, types, constexprs, target, attrs=attributes).ptx


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "kernel",
    [store_then_release, branch_then_release, release_in_a_loop, accumulate_then_release],
    ids=lambda k: k.__name__,
)
def test_a_release_needs_a_barrier_after_every_store(kernel: Any, target: str) -> None:
    assert check_release_order(ptx_of(kernel, target, BARRIER=True)) == []
    found = check_release_order(ptx_of(kernel, target, BARRIER=False))
    assert found
    assert all("has no CTA barrier between it and the release" in problem for problem in found)


@pytest.mark.parametrize("target", BULK_TARGETS)
@pytest.mark.parametrize(
    ("wait", "fence", "barrier", "problem"),
    [
        (False, False, False, "is not waited for (cp.async.bulk.wait_group 0, not .read)"),
        (False, True, True, "is not waited for (cp.async.bulk.wait_group 0, not .read)"),
        (True, False, True, "has no fence.proxy.async between its wait and the release"),
        (True, True, False, "has no CTA barrier between its proxy fence and the release"),
    ],
)
def test_a_bulk_store_must_be_complete(wait: bool, fence: bool, barrier: bool, problem: str, target: str) -> None:
    text = ptx_of(bulk_store_then_release, target, WAIT=wait, FENCE=fence, BARRIER=barrier)
    assert "cp.async.bulk.wait_group.read" in text  # Triton's own wait, which is not enough
    found = [line for line in check_release_order(text) if "cp.async.bulk.tensor" in line]
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize("target", TARGETS)
def test_a_complete_bulk_store_passes(target: str) -> None:
    text = ptx_of(bulk_store_then_release, target, WAIT=True, FENCE=True, BARRIER=True)
    assert check_release_order(text) == []
    assert ("cp.async.bulk.tensor" in text) == (target != "sm_80")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", [acquire_then_load, unused_acquire_then_load], ids=lambda k: k.__name__)
def test_an_acquire_needs_a_barrier_before_the_next_load(kernel: Any, target: str) -> None:
    assert check_acquire_order(ptx_of(kernel, target, BARRIER=True)) == []
    found = check_acquire_order(ptx_of(kernel, target, BARRIER=False))
    assert found
    assert all("no CTA barrier since the acquire" in problem for problem in found)


@pytest.mark.parametrize("target", TARGETS)
def test_the_way_of_a_result_from_one_thread_to_all_is_a_barrier(target: str) -> None:
    assert check_acquire_order(ptx_of(spin_on_atomics_then_load, target)) == []


@pytest.mark.parametrize("target", BULK_TARGETS)
def test_a_bulk_load_after_an_acquire_needs_a_proxy_fence(target: str) -> None:
    assert check_acquire_order(ptx_of(wait_then_bulk_load, target, FENCE=True)) == []
    found = check_acquire_order(ptx_of(wait_then_bulk_load, target, FENCE=False))
    assert found
    assert all("no fence.proxy.async since the acquire" in problem for problem in found)


def test_each_variant_is_compiled_once() -> None:
    arguments = (store_then_release, {"data": "*i32", "signal": "*i32"}, {"BARRIER": True}, "sm_90")
    first = compile_kernel(*arguments)
    assert compile_kernel(*arguments) is first
    assert compile_kernel(*arguments, num_warps=8) is not first
    assert 0 < first.registers <= 255
    assert first.spills == 0
    assert first.shared == 0


def module(*lines: str) -> str:
    body = "\n".join(lines)
    return f".visible .entry kernel(\n.param .u64 p\n)\n.reqntid 128\n{{\n.reg .b32 %r<9>;\n{body}\nret;\n}}\n"


BARRIER, STORE = "bar.sync 0;", "st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};"
RELEASE, FENCE, FLAG = (
    "@%p1 st.release.sys.global.b32 [%rd2], %r1;",
    "fence.acq_rel.sys;",
    "st.relaxed.sys.b32 [%rd2], %r1;",
)


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        ([STORE, BARRIER, FENCE, FLAG], 0),
        ([STORE, FENCE, FLAG], 1),
        ([STORE, "membar.sys;", "red.relaxed.sys.global.add.u32 [%rd2], 1;"], 1),
        ([STORE, "bar.sync 1, 64;", RELEASE], 1),  # only some of the threads
        ([STORE, "@%p2 bar.sync 0;", RELEASE], 1),  # only on some paths
        ([STORE, "bar.warp.sync 0xffffffff;", RELEASE], 1),
        ([STORE, "barrier.cta.sync 0;", RELEASE], 0),
        ([STORE, "bar.red.or.pred %p3, 0, %p4;", RELEASE], 0),
        ([STORE, "@%p2 bra $L1;", BARRIER, "$L1:", RELEASE], 1),
        ([STORE, "bra.uni $L1;", RELEASE, "$L1:", BARRIER, RELEASE], 0),  # the first release is never reached
        (["st.shared.b32 [%r1], %r2;", "st.local.b32 [%r1], %r2;", RELEASE], 0),
        ([STORE, "st.release.cta.global.b32 [%rd2], %r1;"], 0),  # does not leave the CTA
        (["st.b32 [%rd1], %r1;", RELEASE], 1),  # generic addresses may be global
        (["call.uni some_function, (%r1);", RELEASE], 1),
        (["multimem.st.weak.global.f32 [%rd1], %f1;", "multimem.red.release.sys.global.add.u32 [%rd2], 1;"], 1),
        (["cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 64;", BARRIER, RELEASE], 1),
        (["cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], 64;", BARRIER, RELEASE], 1),
        ([STORE, "bar.sync 0; // st.global after a barrier", RELEASE, "/* st.global.b32 */", RELEASE], 0),
    ],
)
def test_release_order_in_small_programs(lines: list[str], problems: int) -> None:
    assert len(check_release_order(module(*lines))) == problems


ACQUIRE, LOAD = "ld.acquire.sys.global.b32 %r1, [%rd1];", "ld.global.b32 %r2, [%rd2];"


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        ([ACQUIRE, BARRIER, LOAD], 0),
        ([ACQUIRE, LOAD], 1),
        ([ACQUIRE, "ld.relaxed.sys.global.b32 %r3, [%rd3];", ACQUIRE, BARRIER, LOAD], 0),
        (["ld.volatile.global.b32 %r1, [%rd1];", FENCE, LOAD], 1),
        (["ld.relaxed.gpu.b32 %r1, [%rd1];", FENCE, BARRIER, LOAD], 0),
        ([ACQUIRE, "ld.param.b64 %rd3, [p];", "ld.shared.b32 %r3, [%r4];", BARRIER, LOAD], 0),
        ([ACQUIRE, "cp.async.cg.shared.global [%r1], [%rd1], 16;"], 1),
        (["$L1:", LOAD, ACQUIRE, "@%p1 bra $L1;", BARRIER], 1),  # the load of the second turn
    ],
)
def test_acquire_order_in_small_programs(lines: list[str], problems: int) -> None:
    assert len(check_acquire_order(module(*lines))) == problems


def test_labels_of_inline_assembly_are_local_to_its_braces() -> None:
    block = ["{", ".reg .pred done;", "AGAIN:", "ld.global.b32 %r1, [%rd1];", "@!done bra AGAIN;", "}"]
    (code,) = functions(module(*block, *block))
    assert [at.next for at in code if at.opcode == "bra"] == [(0, 2), (2, 4)]


def test_a_problem_names_both_instructions_and_their_lines() -> None:
    (problem,) = check_release_order(module(STORE, RELEASE))
    assert problem.startswith("line 8: @%p1 st.release.sys.global.b32 [%rd2], %r1: line 7: st.global.v4.b32")
