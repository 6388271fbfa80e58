"""What the device functions of `signals` compile to: the instructions, their scope, and the barriers around them."""

import re
from typing import Any

import pytest
import triton
import triton.language as tl
from ptx import TARGETS, check_acquire_order, check_release_order, compile_kernel, functions

from undertow.kernels import signals
from undertow.kernels.poison import poison_kernel
from undertow.kernels.signals import (
    ARRIVED,
    LAST,
    epoch_advance,
    epoch_read,
    last_to_finish,
    proxy_fence,
    release_word,
    report_error,
    signal_add,
    signal_set,
    signal_wait,
    tma_store_fence,
)


@triton.jit
def add_kernel(data, signal, amount):
    tl.store(data + tl.arange(0, 512), amount)
    signal_add(signal, amount)


@triton.jit
def set_kernel(data, signal, amount):
    tl.store(data + tl.arange(0, 512), amount)
    signal_set(signal, amount)


@triton.jit
def word_kernel(data, word, amount):
    tl.store(data + tl.arange(0, 512), amount)
    release_word(word, amount.to(tl.int64))


@triton.jit
def wait_kernel(data, output, signal, abort, error, amount, deadline):
    status = signal_wait(signal, amount, abort, deadline)
    if status == ARRIVED:
        tl.store(output + tl.arange(0, 512), tl.load(data + tl.arange(0, 512)))
    else:
        report_error(error, status)


@triton.jit
def epoch_kernel(data, output, signal, abort, epoch, ticket, deadline):
    number = epoch_read(epoch) + 1
    status = signal_wait(signal, number, abort, deadline)
    if status == ARRIVED:
        tl.store(output + tl.arange(0, 512), tl.load(data + tl.arange(0, 512)))
    if last_to_finish(ticket, status) == LAST:
        epoch_advance(epoch, number)
        signal_set(signal + 32, number)


@triton.jit
def fence_kernel(data):
    proxy_fence()
    tl.store(data, 1)
    tma_store_fence()


def compiled(kernel: Any, target: str, num_warps: int = 4) -> Any:
    types = dict.fromkeys(kernel.arg_names, "*i32") | {"amount": "i32", "deadline": "i64", "word": "*i64"}
    return compile_kernel(kernel, types, {}, target, num_warps=num_warps)


def opcodes(ptx: str) -> list[str]:
    return [at.opcode for code in functions(ptx) for at in code]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "release"),
    [
        (add_kernel, "atom.global.sys.release.add.u32"),
        (set_kernel, "st.release.sys.global.b32"),
        (word_kernel, "st.release.sys.global.b64"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_signal_is_one_release_at_system_scope_after_a_barrier(kernel: Any, release: str, target: str) -> None:
    ptx = compiled(kernel, target).ptx
    assert check_release_order(ptx) == []
    (code,) = functions(ptx)
    releases = [at for at in code if ".release" in at.opcode]
    assert [at.opcode for at in releases] == [release]
    assert releases[0].guard  # one thread, not all


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("num_warps", [1, 4])
def test_a_wait_polls_with_loads_and_ends_in_a_barrier(num_warps: int, target: str) -> None:
    kernel = compiled(wait_kernel, target, num_warps)
    assert check_acquire_order(kernel.ptx) == []
    assert check_release_order(kernel.ptx) == []
    found = opcodes(kernel.ptx)
    assert found.count("ld.acquire.sys.global.b32") == 1  # the signal
    assert found.count("ld.relaxed.sys.global.b32") == 1  # the abort word
    assert found.count("st.relaxed.sys.global.b32") == 1  # the error word
    assert not [opcode for opcode in found if opcode.startswith(("atom", "red"))]
    assert "%globaltimer" in kernel.ptx
    assert kernel.spills == 0
    assert kernel.registers <= 48


@pytest.mark.parametrize("target", TARGETS)
def test_the_abort_word_and_the_timer_are_read_once_in_1024_polls(target: str) -> None:
    (code,) = functions(compiled(wait_kernel, target).ptx)
    poll = next(index for index, at in enumerate(code) if at.opcode == "ld.acquire.sys.global.b32")
    again = [index for index, at in enumerate(code) if at.opcode == "bra" and poll in at.next]
    abort = next(index for index, at in enumerate(code) if at.opcode == "ld.relaxed.sys.global.b32")
    assert again[0] < abort < again[1]
    assert any(at.opcode == "and.b32" and at.operands.endswith(", 1023") for at in code[poll : again[0]])


@pytest.mark.parametrize("target", TARGETS)
def test_the_last_program_releases_for_the_grid_and_advances_the_epoch(target: str) -> None:
    kernel = compiled(epoch_kernel, target)
    assert check_release_order(kernel.ptx) == []
    assert check_acquire_order(kernel.ptx) == []
    found = opcodes(kernel.ptx)
    ticket = found.index("atom.global.sys.acq_rel.add.u32")
    assert found.index("ld.volatile.global.b32") < found.index("ld.acquire.sys.global.b32") < ticket
    assert found[ticket:].count("st.global.b32") == 2  # the ticket counter and the epoch
    assert ticket < found.index("st.release.sys.global.b32")
    assert kernel.spills == 0


@pytest.mark.parametrize("target", TARGETS)
def test_bulk_copy_fences_exist_from_sm_90_on(target: str) -> None:
    ptx = compiled(fence_kernel, target).ptx
    bulk = [opcode for opcode in opcodes(ptx) if re.match(r"fence\.proxy|cp\.async\.bulk", opcode)]
    expected = [
        "fence.proxy.async.global",
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group",
        "fence.proxy.async",
    ]
    assert bulk == ([] if target == "sm_80" else expected)


WORD = {"pointer": "*i32", "abort": "*i32", "error": "*i32"}


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_of_streams(target: str) -> None:
    """`add_kernel` and `wait_kernel` themselves, as the fabric launches them."""
    adding = compile_kernel(signals.add_kernel, {"pointer": "*i32", "amount": "i32"}, {}, target, num_warps=1)
    assert any("release" in opcode for opcode in opcodes(adding.ptx))
    assert check_release_order(adding.ptx) == []
    signature = {**WORD, "target": "i32", "deadline_ns": "i64"}
    ordered = {name: signature[name] for name in ("pointer", "target", "abort", "error", "deadline_ns")}
    waiting = compile_kernel(signals.wait_kernel, ordered, {}, target, num_warps=1)
    assert "ld.acquire.sys.global.b32" in opcodes(waiting.ptx)
    assert check_acquire_order(waiting.ptx) == []
    assert adding.spills == waiting.spills == 0


@pytest.mark.parametrize("target", TARGETS)
def test_poison_stores_nothing_unless_aborted(target: str) -> None:
    signature = {"output": "*i8", "count": "i64", "abort": "*i32"}
    kernel = compile_kernel(poison_kernel, signature, {"BLOCK": 4096}, target)
    found = opcodes(kernel.ptx)
    look = next(index for index, opcode in enumerate(found) if opcode.startswith("ld.volatile.global"))
    stores = [index for index, opcode in enumerate(found) if opcode.startswith("st.global")]
    assert stores
    assert all(look < store for store in stores)
    assert any(opcode == "bra" for opcode in found[look : stores[0]])
    assert kernel.spills == 0
