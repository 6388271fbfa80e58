"""The device side of the proxy ring: its order, its layout, and that both sides agree on both."""

import re

import pytest
from ptx import TARGETS, CompiledKernel, check_acquire_order, check_release_order, compile_kernel, functions

from undertow.kernels import proxy, ring_layout

POINTERS = {"ring": "*i64", "head": "*i32", "abort": "*i32", "error": "*i32"}


def compiled(target: str) -> CompiledKernel:
    types = dict.fromkeys(proxy.post_kernel.arg_names, "i64") | POINTERS | {"capacity": "i32"}
    return compile_kernel(proxy.post_kernel, types, {}, target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_post_is_ordered_and_small(target: str) -> None:
    made = compiled(target)
    assert check_release_order(made.ptx) == []
    assert check_acquire_order(made.ptx) == []
    assert made.spills == 0
    assert made.registers <= 40


@pytest.mark.parametrize("target", TARGETS)
def test_ticket_then_room_then_words_then_ready(target: str) -> None:
    (code,) = functions(compiled(target).ptx)
    found = [at.opcode for at in code]
    steps = [
        "bar.sync",  # the stores of the CTA to the source
        "atom.global.sys.acq_rel.add.u32",  # the ticket
        "ld.acquire.sys.global.b32",  # room
        "barrier.red.or.pred",
        "st.global.b64",  # words 1 to 7
        "bar.sync",
        "st.release.sys.global.b64",  # the ready word
    ]
    position = 0
    for step in steps:
        position = found.index(step, position) + 1
    assert found.count("st.global.b64") == 1  # one store of one warp
    assert [name for name in found if name.startswith(("atom", "red"))] == ["atom.global.sys.acq_rel.add.u32"]


@pytest.mark.parametrize("target", TARGETS)
def test_no_atomic_reaches_host_memory(target: str) -> None:
    ptx = compiled(target).ptx
    ticket = re.search(r"atom\.\S+ %r\d+, \[ (%rd\d+)", ptx)
    assert ticket
    assert re.search(rf"ld\.param\.b64\s+{ticket.group(1)}, \[post_kernel_param_1\]", ptx)  # `head`, in device memory


def test_the_layout_does_not_overlap() -> None:
    words = [
        ring_layout.READY,
        ring_layout.SOURCE_BUFFER,
        ring_layout.SOURCE_OFFSET,
        ring_layout.DESTINATION_RANK,
        ring_layout.DESTINATION_BUFFER,
        ring_layout.DESTINATION_OFFSET,
        ring_layout.BYTE_COUNT,
        ring_layout.SIGNAL_INDEX,
    ]
    assert words == list(range(ring_layout.DESCRIPTOR_WORDS))
    assert ring_layout.DESCRIPTOR_BYTES == 64
    assert ring_layout.TAIL_OFFSET + 128 <= ring_layout.DESCRIPTORS_OFFSET  # the polled word has a line to itself
    assert ring_layout.ring_bytes(8) == 256 + 8 * 64
    for capacity in (0, 3, -4):
        with pytest.raises(ValueError, match="must be a power of two"):
            ring_layout.ring_bytes(capacity)


def test_tickets_wrap_around() -> None:
    assert [ring_layout.descriptor_offset(ticket, 4) for ticket in (0, 3, 4, 2**31 - 1, -(2**31), -1)] == [
        *(256, 448, 256),
        *(448, 256, 448),
    ]
    assert ring_layout.ready_value(0) == 1
    assert ring_layout.ready_value(2**31 - 1) == -(2**31)
    assert ring_layout.ready_value(2**31) == ring_layout.ready_value(-(2**31)) == 1 - 2**31
    assert ring_layout.ready_value(-1) == 0
