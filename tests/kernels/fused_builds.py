"""Fused kernels compiled without a GPU, as the operators launch them: with TMA (sm_90, sm_100), or plain (sm_80)."""

from __future__ import annotations

from typing import Any

from ptx import CompiledKernel, compile_kernel

from undertow.kernels.fused_brought import fused_brought_kernel
from undertow.kernels.fused_columns import fused_columns_kernel
from undertow.kernels.fused_decode import fused_decode_kernel
from undertow.kernels.fused_exchange import fused_exchange_kernel
from undertow.kernels.fused_gather import fused_gather_kernel
from undertow.kernels.fused_scatter import fused_scatter_kernel
from undertow.plan import fused
from undertow.plan.beside import slice_rows
from undertow.plan.plan import Plan

STAGES = 4
WATCH = {"abort": "*i32", "error": "*i32", "deadline_ns": "i64"}
BLOCK_K = {"sm_100": 64, "sm_90": 64, "sm_80": 32}


def operands(
    target: str, tile: tuple[int, int], transposed: bool, grouped: bool, a: tuple[str, ...], b: str, inner: int = 64
) -> tuple[dict[str, str], dict[str, int]]:
    """Types of the factors, and what is known of their alignment: descriptors, or pointers."""
    if target == "sm_80":
        return dict.fromkeys((*a, b), "*bf16"), dict.fromkeys((*a, b), 16)
    block = f"{tile[1]}, {inner}" if transposed else f"{inner}, {tile[1]}"
    types = dict.fromkeys(a, f"tensordesc<bf16[{tile[0]}, {inner}]>")
    return types | {b: f"tensordesc<bf16[{'1, ' if grouped else ''}{block}]>"}, {}


def scatter(
    ranks: int = 2, broadcast: bool = True, tile: tuple[int, int] = (128, 256), target: str = "sm_90",
    joined: bool = True, bias: bool = False,
) -> CompiledKernel:  # fmt: skip
    """`joined`: stored by TMA, not on sm_80."""
    bulk = target != "sm_80"
    factors, aligned = operands(target, tile, True, False, ("a",), "b")
    types = {
        **factors, "slots": f"tensordesc<bf16[1, 1, {tile[0]}, {tile[1] // 2}]>" if joined and bulk else "*bf16",
        **dict.fromkeys(("mine", "out", "kept", "bias"), "*bf16"),
        **dict.fromkeys(("table", "jobs", "bases", "word_bases"), "*i64"),
        **dict.fromkeys(("words", "epochs", "taken"), "*i32"),
        **dict.fromkeys(("tiles", "count", "active", "multiplying", "inner", "n", "padded", "lines", "rank"), "i32"),
        **dict.fromkeys(("half", "a_row", "b_row"), "i64"), **WATCH,
    }  # fmt: skip
    constants: dict[str, Any] = {
        "BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": BLOCK_K[target], "TRANSPOSED": True, "RANKS": ranks,
        "BROADCAST": broadcast, "BIAS": bias, "ACTIVATION": 3 * bias,
        "HEIGHT": slice_rows(ranks, Plan("fused", "peer", ((0, 1),), tile=tile)),
        "JOINED": joined and bulk,
    }  # fmt: skip
    aligned |= {"mine": 16, "out": 16, "kept": 16, "n": 16}
    return compile_kernel(fused_scatter_kernel, types, constants, target, 8, aligned, num_stages=STAGES)


def _gathering(
    target: str, tile: tuple[int, int], transposed: bool, grouped: bool, pull: bool, bulk: bool, width: int, ranks: int
) -> tuple[dict[str, str], dict[str, Any], dict[str, int]]:
    """What both kernels that gather have: types, constants, what is known of alignment."""
    factors, aligned = operands(target, tile, transposed, grouped, ("mine", "gathered"), "b")
    if pull and target != "sm_80":
        factors["gathered"] = f"tensordesc<bf16[1, {tile[0]}, {BLOCK_K[target]}]>"
    types = {
        **factors, "c": f"tensordesc<bf16[{tile[0]}, {tile[1] // 2}]>" if bulk else "*i32",
        **dict.fromkeys(("x", "out", "bias"), "*bf16"),
        **dict.fromkeys(("table", "pushes", "bases", "word_bases"), "*i64"),
        **dict.fromkeys(("words", "epochs", "taken"), "*i32"),
        **dict.fromkeys(("tiles", "tasks", "active", "inner", "capacity", "lines", "parts"), "i32"),
        "stride": "i64", **WATCH,
    }  # fmt: skip
    constants: dict[str, Any] = {
        "BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": BLOCK_K[target], "TRANSPOSED": transposed,
        "PARTS": 2 if bulk else 4, "BULK": bulk, "WIDTH": width, "RANKS": ranks, "PULL": pull,
    }  # fmt: skip
    return types, constants, aligned | {"x": 16, "out": 16}


def gather(
    bulk: bool = True, target: str = "sm_90", tile: tuple[int, int] = (128, 256), tokens: bool = False,
    transposed: bool = False, even: bool = True, bias: bool = False, width: int = 1024, ranks: int = 4,
    pull: bool = False,
) -> CompiledKernel:  # fmt: skip
    """`tokens`: as all_to_all_matmul launches it, with announced calls and grouped weights."""
    types, constants, aligned = _gathering(target, tile, transposed, tokens, pull, bulk, width, ranks)
    types |= {"loaders": "i32", "rank": "i32", **dict.fromkeys(("b_row", "b_expert", "distance"), "i64")}
    constants |= {"GROUPED": tokens, "EVEN": even, "BIAS": bias, "ACTIVATION": 0, "ANNOUNCED": tokens}
    return compile_kernel(fused_gather_kernel, types, constants, target, 8, aligned, num_stages=STAGES)


def brought(
    bulk: bool = True, tile: tuple[int, int] = (128, 256), transposed: bool = True, bias: bool = False,
    width: int = 1024, ranks: int = 4, pull: bool = True, split: int = 0, in_step: bool = False, target: str = "sm_90",
) -> CompiledKernel:  # fmt: skip
    types, constants, aligned = _gathering(target, tile, transposed, False, pull, bulk, width, ranks)
    types |= dict.fromkeys(("own", "multiplying", "early", "last", "spare", "rank"), "i32") | {"partial": "*fp32"}
    constants |= {"EVEN": True, "BIAS": bias, "ACTIVATION": 3 * bias, "SPLIT": split, "IN_STEP": in_step}
    aligned |= {"partial": 16}
    return compile_kernel(fused_brought_kernel, types, constants, target, 8, aligned, num_stages=STAGES)


def exchange(
    ranks: int = 4, target: str = "sm_90", tile: tuple[int, int] = (128, 256), grouped: bool = True,
    transposed: bool = True, even: bool = True, bias: bool = False,
) -> CompiledKernel:  # fmt: skip
    factors, aligned = operands(target, tile, transposed, grouped, ("a",), "b")
    types = {
        **factors, **dict.fromkeys(("arrived", "out", "bias"), "*bf16"),
        **dict.fromkeys(("table", "arriving", "bases", "word_bases"), "*i64"), "words": "*i32", "epochs": "*i32",
        **dict.fromkeys(("tiles", "coming", "active", "inner", "n", "lines", "rank"), "i32"),
        **dict.fromkeys(("a_row", "b_row", "b_expert", "half"), "i64"), **WATCH,
    }  # fmt: skip
    constants: dict[str, Any] = {
        "BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": BLOCK_K[target], "TRANSPOSED": transposed,
        "GROUPED": grouped, "RANKS": ranks, "EVEN": even, "BIAS": bias, "ACTIVATION": 0,
    }  # fmt: skip
    aligned |= {"arrived": 16} | ({"out": 16, "n": 16} if even else {})
    return compile_kernel(fused_exchange_kernel, types, constants, target, 8, aligned, num_stages=STAGES)


def few(
    tile: tuple[int, int], ranks: int = 4, target: str = "sm_90", transposed: bool = True, ahead: int = 512,
    **changes: Any,
) -> CompiledKernel:  # fmt: skip
    """Few rows, summed by owners of columns."""
    plan = Plan("fused", "peer", ((0, 1),), tile=tile, owners="columns", ahead=ahead)
    step = fused.owned_step(plan, target != "sm_80")
    factors, aligned = operands(target, tile, transposed, False, ("x",), "w", step)
    types = {
        **factors, **dict.fromkeys(("weights", "out", "bias", "parts"), "*bf16"),
        **dict.fromkeys(("bases", "word_bases"), "*i64"), **dict.fromkeys(("epochs", "words"), "*i32"),
        **dict.fromkeys(("rows", "n", "inner", "active", "early", "rank", "lines"), "i32"),
        **dict.fromkeys(("half", "reduced", "a_row", "b_row"), "i64"), **WATCH,
    }  # fmt: skip
    constants: dict[str, Any] = {
        "BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": step, "TRANSPOSED": transposed, "RANKS": ranks,
        "LANES": 256, "AHEAD": ahead, "BIAS": False, "ACTIVATION": 0, **changes,
    }  # fmt: skip
    aligned |= {"out": 16, "n": 16, "parts": 16}
    registers = fused.HALF_REGISTERS if ahead else None
    stages = fused.owned_stages(plan, target != "sm_80")
    return compile_kernel(fused_columns_kernel, types, constants, target, 8, aligned, stages, registers)


def decode(
    tile: tuple[int, int] = (16, 64), ranks: int = 4, target: str = "sm_90", transposed: bool = True, at_once: int = 2,
    **changes: Any,
) -> CompiledKernel:  # fmt: skip
    """Few rows, sent to all ranks at once."""
    types = {
        **dict.fromkeys(("x", "w", "out", "bias"), "*bf16"), **dict.fromkeys(("bases", "packets"), "*i64"),
        **dict.fromkeys(("epochs", "taken"), "*i32"),
        **dict.fromkeys(("rows", "n", "inner", "multiplying", "summing", "rank"), "i32"),
        **dict.fromkeys(("half", "x_row", "w_row"), "i64"), **WATCH,
    }  # fmt: skip
    constants: dict[str, Any] = {
        "ROWS": tile[0], "BLOCK_N": tile[1], "BLOCK_K": fused.decode_step(tile), "TRANSPOSED": transposed, "SPLIT": 1,
        "TURNS": False, "RANKS": ranks, "LANES": 128, "AT_ONCE": at_once, "EARLY": target != "sm_80", "BIAS": False,
        "ACTIVATION": 0, **changes,
    }  # fmt: skip
    aligned = dict.fromkeys(("x", "w", "out", "n", "inner"), 16)
    return compile_kernel(fused_decode_kernel, types, constants, target, 4, aligned, fused.decode_stages(tile))
