"""matmul_all_reduce of few rows on a GPU, in one launch: sent to all ranks at once, or summed by owners of columns.

Which of them, and how, is the plan's (`plan/fused.py`); the kernels are `kernels/fused_decode.py` and
`kernels/fused_columns.py`. Where the plan asks for weights ahead, a call is launched before the one in front of it on
the stream has ended, and begins with what does not depend on that (`kernels/ahead.py`).

What is sent to all ranks at once lies the same way however a rank cuts its own columns. So a rank whose weights lie by
rows, or whose SMs are bounded, has another tile than the plan's where that is for one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..plan import fused
from .fused_launch import Factors, Launch, factors, finishing, watch
from .fused_stage import Stage, load, stage_of

if TYPE_CHECKING:
    from ..fabric.cuda import CudaFabric
    from ..plan.plan import Plan
    from ..plan.problem import Problem
    from .finish import Finish

_THREADS, _SMALL_WARPS = 256, 4
_MANY_ROWS = (16, 64)  # the tile of a rank that cannot multiply one row as the plan has it
_PACKETS = 8  # that a thread polls together: for more, registers would not leave room for a second CTA on the SM


def at_once(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: CudaFabric
) -> tuple[Stage, Launch]:
    """Partial products to all ranks, as packets."""
    from ..kernels.fused_decode import fused_decode_kernel

    assert plan.tile is not None
    size, n, m = fabric.group.size, problem.n, problem.m
    stage = stage_of(fabric, ("decode",), fused.stage_elements(problem, plan), 1, torch.int64)
    both = factors(x, w, False)
    bias, ends = finishing(finish, y)
    constants: dict[str, Any] = ends | {
        "TRANSPOSED": both.transposed, "SPLIT": plan.split, "RANKS": size, "LANES": 32 * _SMALL_WARPS,
        "AT_ONCE": max(1, _PACKETS // (size * plan.split)), "EARLY": fabric.bulk_copies, "num_warps": _SMALL_WARPS,
    }  # fmt: skip
    if fabric.bulk_copies:  # sm_90: "programmatic dependent launch"
        constants["launch_pdl"] = True
    one_row = plan.tile == fused.ROW_TILE
    tiles = {
        False: _MANY_ROWS if one_row and not both.transposed else plan.tile,
        True: _MANY_ROWS if one_row else plan.tile,
    }

    def as_bounded(epochs: torch.Tensor, working: int, bounded: bool) -> None:
        tile = tiles[bounded]
        multiplying, summing = fused.small_ctas(problem, plan, tile, working, bounded)
        kernel: Any = fused_decode_kernel
        kernel[(max(1, multiplying + summing),)](
            both.a, both.b, y, bias, stage.bases, stage.data.local, epochs, stage.taken, m, n, both.inner, multiplying,
            summing, *both.strides[:2], stage.half, fabric.group.rank, *watch(fabric), ROWS=tile[0], BLOCK_N=tile[1],
            BLOCK_K=fused.decode_step(tile), TURNS=bounded, num_stages=fused.decode_stages(tile), **constants,
        )  # fmt: skip

    def launch(epochs: torch.Tensor, working: int) -> None:
        as_bounded(epochs, working, working < min(fabric.multiprocessors, problem.multiprocessors))

    def launch_either(epochs: torch.Tensor, working: int) -> None:
        """To load both: whether SMs are bounded may change from call to call, also where nothing can be compiled."""
        for bounded in (False, True):
            as_bounded(epochs, working, bounded)

    common = "decode", plan.tile, plan.split, x.dtype, *ends.values()
    load(fabric, stage, common, (both.transposed, n % 16, both.inner % 16, y.data_ptr() % 16), launch_either)
    return stage, launch


def owned(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: CudaFabric
) -> tuple[Stage, Launch]:
    """Partial products to the owners of their columns, sums to all ranks."""
    from ..kernels.fused_columns import fused_columns_kernel

    assert plan.tile is not None
    block_m, block_n = plan.tile
    size, n, m = fabric.group.size, problem.n, problem.m
    groups = fused.column_groups(problem, plan)
    stage = stage_of(fabric, ("columns", x.dtype), fused.stage_elements(problem, plan), 2 * groups, x.dtype)
    both = factors(x, w, fabric.bulk_copies, fused.owned_step(plan, fabric.bulk_copies))
    bias, ends = finishing(finish, y)
    reduced = groups * size * block_m * block_n
    constants = _constants(both, plan, fabric) | ends

    def launch(epochs: torch.Tensor, working: int) -> None:
        kernel: Any = fused_columns_kernel
        kernel[(fabric.multiprocessors,)](
            *both.operands((block_m, block_n)), both.b, y, bias, stage.data.local, stage.bases, stage.word_bases,
            stage.words.local, epochs, m, n, both.inner, working, _early(plan, working), *both.strides[:2], stage.half,
            reduced, stage.lines // 2, fabric.group.rank, *watch(fabric), **constants,
        )  # fmt: skip

    common = "columns", plan.tile, plan.ahead, x.dtype, *ends.values()
    load(fabric, stage, common, (both.transposed, n % 16, y.data_ptr() % 16), launch)
    return stage, launch


def poisons(form: str, plan: Plan) -> bool:
    """Whether the kernel of that form poisons the result of a call that fails; else a launch behind it must."""
    return form == fused.DECODE or (form == fused.OWNED and not plan.ahead)


def _constants(both: Factors, plan: Plan, fabric: CudaFabric) -> dict[str, Any]:
    """Of the compilation of the kernel of owned columns."""
    assert plan.tile is not None
    found = both.constants | {
        "BLOCK_M": plan.tile[0], "BLOCK_N": plan.tile[1], "RANKS": fabric.group.size, "LANES": _THREADS,
        "AHEAD": plan.ahead, "num_stages": fused.owned_stages(plan, fabric.bulk_copies),
    }  # fmt: skip
    if plan.ahead:  # "programmatic dependent launch": the next one beside this one
        found |= {"launch_pdl": True, "maxnreg": fused.HALF_REGISTERS}
    return found


def _early(plan: Plan, working: int) -> int:
    """Whether all ranks have as many CTAs working: as the plan says, not as this rank's own share of its GPU does."""
    return int(plan.ahead > 0 and working == plan.share.multiprocessors)
