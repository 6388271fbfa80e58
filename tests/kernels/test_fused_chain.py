"""The kernel whose sums go from rank to rank, compiled without a GPU: registers, what waits and what is ordered."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from ptx import CompiledKernel
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from undertow.kernels.fused_chain import BLOCK_K, GROUPS, REGISTERS, STAGES, WARPS, fused_chain_kernel
from undertow.plan import chain

_compiled: dict[tuple[object, ...], CompiledKernel] = {}


def compiled(
    transposed: bool = True, bias: bool = False, activation: int = 0, kind: str = "bf16"
) -> CompiledKernel:  # fmt: skip
    """As the operator launches it on sm_90, the only kind of GPU that has its matmul."""
    key = transposed, bias, activation, kind
    if key not in _compiled:
        block_m, block_n = chain.TILE
        shapes = {"a": [block_m // GROUPS, BLOCK_K], "b": [block_n, BLOCK_K] if transposed else [BLOCK_K, block_n]}
        types: dict[str, str] = {
            name: f"tensordesc<{kind}{shape},{gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)!r}>"
            for name, shape in shapes.items()
        }
        types |= dict.fromkeys(("mine", "out", "bias"), f"*{kind}") | dict.fromkeys(("half", "deadline_ns"), "i64")
        types |= dict.fromkeys(("table", "bases", "word_bases"), "*i64")
        types |= dict.fromkeys(("words", "epochs", "abort", "error"), "*i32")
        types |= dict.fromkeys(("tiles", "active", "inner", "n", "padded", "rank", "preceding", "following"), "i32")
        constants: dict[str, Any] = {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": BLOCK_K, "STAGES": STAGES, "TRANSPOSED": transposed,
            "BIAS": bias, "ACTIVATION": activation,
        }  # fmt: skip
        names = fused_chain_kernel.arg_names
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("mine", "out", "n")}
        signature = {name: "constexpr" if name in constants else types[name] for name in names}
        source = GluonASTSource(fused_chain_kernel, signature, constants, aligned)
        options = {"num_warps": WARPS, "maxnreg": REGISTERS}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        _compiled[key] = CompiledKernel(made.asm["ptx"], 90, made.metadata.shared)
    return _compiled[key]


@pytest.mark.parametrize(("transposed", "kind"), [(True, "bf16"), (False, "bf16"), (True, "fp16")])
@pytest.mark.parametrize(("bias", "activation"), [(False, 0), (True, 2)])
def test_nothing_is_spilled_and_nothing_waits_that_multiplies(
    transposed: bool, kind: str, bias: bool, activation: int
) -> None:
    made = compiled(transposed, bias, activation, kind)
    assert made.spills == 0
    assert not made.serialised
    assert made.shared <= 227 << 10
    loops = made.innermost_loops("HGMMA")
    assert len(loops) == GROUPS
    for loop in loops:
        assert sum("HGMMA.64x256x16" in code for code in loop) == BLOCK_K // 16
        assert any("DEPBAR.LE gsb0, 0x1" in code for code in loop)  # the next step is issued while one runs
        assert not any(re.search(r"\b(LD(?!C|GDEPBAR)|ST|RED|ATOM)[A-Z]*\b", code) for code in loop)  # of any memory


def test_rows_are_moved_16_bytes_at_a_time() -> None:
    ptx = compiled().ptx
    assert re.findall(r"ld\.global\.v4\.b32", ptx)
    assert set(re.findall(r"st\.global\.(\S+)", ptx)) == {"v4.b32", "b32"}  # and the epoch


def test_sums_of_the_ranks_before_are_under_way_early() -> None:
    """Rows for four rounds are asked for before a product is waited for, and none is asked for when it is needed."""
    role = passing(compiled().ptx)
    loads = [found.start() for found in re.finditer(r"ld\.global\.v4", role)]
    waits = role.index("mbarrier.try_wait")
    assert sum(at < waits for at in loads) == sum(at > waits for at in loads) == 16


def passing(ptx: str) -> str:
    """What passes tiles on: from its wait for the word to its release."""
    return ptx[ptx.index("ld.acquire.sys.global") : ptx.index("st.release.sys.global")]


def check_order(ptx: str) -> None:
    """Every thread acquires for itself before it loads sums; a barrier of the two warps is between all their stores
    of a half and the one thread's release, and between their loads of the product and its hand-over."""
    role = passing(ptx)
    assert ptx.count("st.release.sys.global") == ptx.count("ld.acquire.sys.global") == 1
    assert "ld.global.v4" not in ptx[: ptx.index("ld.acquire.sys.global")].split("// %bb")[-1]
    last_store, last_barrier = role.rindex("st.global.v4"), role.rindex("bar.sync \t3, 64")
    hand_over = role.rindex("mbarrier.arrive.shared")
    assert role.index("ld.global.v4") > 0
    assert last_store < last_barrier, "a release that does not cover the stores of the other warp"
    assert role.rindex("ld.shared.v4") < last_barrier < hand_over, "a product is handed back while it is read"


def test_a_word_covers_what_both_warps_stored() -> None:
    check_order(compiled().ptx)


def test_a_dropped_barrier_is_found() -> None:
    ptx = compiled().ptx
    role = passing(ptx)
    at = ptx.index(role) + role.rindex("bar.sync \t3, 64")
    with pytest.raises(AssertionError, match="release"):
        check_order(ptx[:at] + ptx[at:].replace("bar.sync \t3, 64", "", 1))


GROUP_BARRIER = re.compile(r"bar\.sync \t([02]), 128")  # of the first, of the second group


def check_stages(ptx: str) -> None:
    """The warps of a group meet between their wait for a step and the arrival that frees its stage; both groups do."""
    waits = [found.end() for found in re.finditer(r"wgmma\.wait_group\.sync\.aligned", ptx)]
    assert len(waits) == 2 * GROUPS
    met = []
    for wait in waits:
        found = GROUP_BARRIER.findall(ptx[wait : ptx.index("mbarrier.arrive.shared", wait)])
        assert found, "a stage is freed too early"
        met.append(found[0])
    assert met in (["0", "0", "2", "2"], ["2", "2", "0", "0"]), "each group has a barrier of its own"


def test_a_stage_is_freed_when_all_have_read_it() -> None:
    ptx = compiled().ptx
    check_stages(ptx)
    for wait in [found.end() for found in re.finditer(r"wgmma\.wait_group\.sync\.aligned", ptx)]:
        until = ptx.index("mbarrier.arrive.shared", wait)
        with pytest.raises(AssertionError, match="too early"):
            check_stages(ptx[:wait] + GROUP_BARRIER.sub("", ptx[wait:until]) + ptx[until:])
    counts = re.findall(r"mbarrier\.init\.\S+ \[\S+\], (\d+)", ptx)
    assert counts == [str(GROUPS), "1"] * STAGES + ["1", "1"] * GROUPS  # free, there; taken, made


def check_product(ptx: str) -> None:
    """A group waits for its turn before it stores its product to shared memory, and all its warps meet between that
    and the arrival of one thread."""
    stores = [part for part in ptx.split("mbarrier.arrive.shared") if "stmatrix.sync" in part]
    assert len(stores) == GROUPS
    for part in stores:
        assert "mbarrier.try_wait" in part[: part.index("stmatrix.sync")]
        assert GROUP_BARRIER.search(part[part.rindex("stmatrix.sync") :]), "a product is handed over too early"


def test_a_product_is_complete_when_it_is_handed_over() -> None:
    ptx = compiled().ptx
    check_product(ptx)
    for stored in [found.end() for found in re.finditer(r"stmatrix\.sync[^;]*;(?!\s*stmatrix)", ptx)]:
        until = ptx.index("mbarrier.arrive.shared", stored)
        with pytest.raises(AssertionError, match="too early"):
            check_product(ptx[:stored] + GROUP_BARRIER.sub("", ptx[stored:until]) + ptx[until:])
