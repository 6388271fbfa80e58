"""matmul_all_reduce of few rows on a GPU, in one launch: sent to all ranks at once, or summed by owners of columns.

Which of them, and how, is the plan's (`plan/fused.py`); the kernels are `kernels/fused_decode.py` and
`kernels/fused_columns.py`. Where the plan asks for weights ahead, a call is launched before the one in front of it on
the stream has ended, and begins with what does not depend on that (`kernels/ahead.py`).
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

_THREADS = 256
_PACKETS = 8  # that a thread polls together: for more, registers would not leave room for a second CTA on the SM


def at_once(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: CudaFabric
) -> tuple[Stage, Launch]:
    """Partial products to all ranks, as packets."""
    from ..kernels.fused_decode import fused_decode_kernel

    assert plan.tile is not None
    block_m, block_n = plan.tile
    size, n, m = fabric.group.size, problem.n, problem.m
    stage = stage_of(fabric, ("decode",), fused.stage_elements(problem, plan), 1, torch.int64)
    both = factors(x, w, fabric.bulk_copies, fused.decode_step(plan, fabric.bulk_copies))
    bias, ends = finishing(finish, y)
    together = max(1, _PACKETS // (size * plan.split))
    constants = _constants(both, plan, fabric) | ends

    def launch(epochs: torch.Tensor, working: int) -> None:
        kernel: Any = fused_decode_kernel
        kernel[(fabric.multiprocessors,)](
            *both.operands((block_m, block_n)), both.b, y, bias, stage.bases, stage.data.local, epochs, m, n,
            both.inner, working, _early(plan, working), *both.strides[:2], stage.half, fabric.group.rank,
            *watch(fabric), SPLIT=plan.split, AT_ONCE=together, **constants,
        )  # fmt: skip

    common = "decode", plan.tile, plan.split, plan.ahead, x.dtype, *ends.values()
    variant = (both.transposed, n % 16, both.inner % 16, y.data_ptr() % 16)
    load(fabric, stage, common, variant, launch)
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
    both = factors(x, w, fabric.bulk_copies, fused.decode_step(plan, fabric.bulk_copies))
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
    return form in (fused.DECODE, fused.OWNED) and not plan.ahead


def _constants(both: Factors, plan: Plan, fabric: CudaFabric) -> dict[str, Any]:
    """Of the compilation of both kernels."""
    assert plan.tile is not None
    found = both.constants | {
        "BLOCK_M": plan.tile[0], "BLOCK_N": plan.tile[1], "RANKS": fabric.group.size, "LANES": _THREADS,
        "AHEAD": plan.ahead, "num_stages": fused.decode_stages(plan, fabric.bulk_copies),
    }  # fmt: skip
    if plan.ahead:  # "programmatic dependent launch": the next one beside this one
        found |= {"launch_pdl": True, "maxnreg": fused.HALF_REGISTERS}
    return found


def _early(plan: Plan, working: int) -> int:
    """Whether all ranks have as many CTAs working: as the plan says, not as this rank's own share of its GPU does."""
    return int(plan.ahead > 0 and working == plan.share.multiprocessors)
