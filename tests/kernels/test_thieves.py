"""The thieves take what they say: read in the compiled kernels, without a GPU."""

from __future__ import annotations

import pytest
from ptx import TARGETS, check_release_order, compile_kernel

from undertow.kernels import thieves

OCCUPY = {"record": "*i32", "sink": "*fp32", "nanoseconds": "i64"}
READ = {"record": "*i32", "sink": "*i32", "footprint": "*i32", "blocks": "i64", "nanoseconds": "i64"}
REGISTERS = 65536  # of an SM, on every GPU that is compiled for


@pytest.mark.parametrize("target", TARGETS)
def test_occupy_takes_all_registers(target: str) -> None:
    made = compile_kernel(
        thieves.occupy_kernel, OCCUPY, {"BLOCK": thieves.OCCUPY_BLOCK}, target, num_warps=thieves.OCCUPY_WARPS
    )
    threads = 32 * thieves.OCCUPY_WARPS
    assert made.spills == 0
    assert made.registers * threads > REGISTERS - 8 * threads, "another CTA of a usual size finds room"
    assert "%smid" in made.ptx
    assert check_release_order(made.ptx) == []


@pytest.mark.parametrize("target", TARGETS)
def test_read_goes_past_the_first_cache(target: str) -> None:
    made = compile_kernel(
        thieves.read_kernel, READ, {"BLOCK": thieves.READ_BLOCK}, target, num_warps=thieves.READ_WARPS
    )
    assert made.spills == 0
    loads = [line for line in made.ptx.splitlines() if "ld.global" in line]
    assert loads
    assert all(".cg" in line and ".v4" in line for line in loads)
    body = made.ptx[made.ptx.index("ld.global") :]
    assert "%globaltimer" in body, "the clock is read again after every block"
    assert check_release_order(made.ptx) == []
