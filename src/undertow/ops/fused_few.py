"""matmul_all_reduce of few rows on a GPU, in one launch: sent to all ranks at once, or summed by owners of columns.

Which of them, and how, is the plan's (`plan/fused.py`); the kernels are `kernels/fused_decode.py` and
`kernels/fused_columns.py`. Where the plan has columns taken as it comes, `kernels/fused_stream.py` stands in for the
first, on ranks whose weights lie by rows of K and whose x finds room in shared memory: the others need not know. Where
the plan asks for weights ahead, a call is launched before the one in front of it on the stream has ended, and begins
with what does not depend on that (`kernels/ahead.py`).
"""

from __future__ import annotations

from dataclasses import replace
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

SHARED_OUT = (16, 128)  # the tile of a rank that cannot take columns as it comes
_THREADS = 256
_PACKETS = 8  # that a thread polls together: for more, registers would not leave room for a second CTA on the SM


def at_once(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: CudaFabric
) -> tuple[Stage, Launch]:
    """Partial products to all ranks, as packets."""
    from ..kernels.fused_decode import fused_decode_kernel

    assert plan.tile is not None
    stage = stage_of(fabric, ("decode",), fused.stage_elements(problem, plan), 1, torch.int64)
    bias, ends = finishing(finish, y)
    common = "decode", plan.tile, plan.split, plan.ahead, x.dtype, *ends.values()
    if plan.tile == fused.STREAM_TILE:
        both = factors(x, w, fabric.bulk_copies, fused.STREAM_STEP)
        if both.transposed and fused.stream_stages(problem.m, both.inner):
            streamed, variant = _streamed(both, y, bias, ends, problem, fabric, stage)
            load(fabric, stage, common, variant, streamed)
            return stage, streamed
        plan = replace(plan, tile=SHARED_OUT)
    assert plan.tile is not None
    block_m, block_n = plan.tile
    size, n, m = fabric.group.size, problem.n, problem.m
    both = factors(x, w, fabric.bulk_copies, fused.decode_step(plan, fabric.bulk_copies))
    together = max(1, _PACKETS // (size * plan.split))
    constants = _constants(both, plan, fabric) | ends

    def launch(epochs: torch.Tensor, working: int) -> None:
        kernel: Any = fused_decode_kernel
        kernel[(fabric.multiprocessors,)](
            *both.operands((block_m, block_n)), both.b, y, bias, stage.bases, stage.data.local, epochs, stage.taken,
            m, n, both.inner, working, _early(plan, working), *both.strides[:2], stage.half, fabric.group.rank,
            *watch(fabric), SPLIT=plan.split, AT_ONCE=together, **constants,
        )  # fmt: skip

    variant = (both.transposed, n % 16, both.inner % 16, y.data_ptr() % 16)
    load(fabric, stage, common, variant, launch)
    return stage, launch


def _streamed(
    both: Factors, y: torch.Tensor, bias: torch.Tensor, ends: dict[str, Any], problem: Problem, fabric: CudaFabric,
    stage: Stage,
) -> tuple[Launch, tuple[object, ...]]:  # fmt: skip
    """The same, of columns that are taken as it comes; and which of the kernel's variants it is."""
    from ..kernels.fused_stream import REGISTERS, WARPS, blocks, fused_stream_kernel

    stages = fused.stream_stages(problem.m, both.inner)
    steps, tall = -(-both.inner // fused.STREAM_STEP), fused.stream_rows(problem.m)
    shapes = [tall, fused.STREAM_STEP], [fused.STREAM_TILE[1], fused.STREAM_STEP]

    def launch(epochs: torch.Tensor, working: int) -> None:
        kernel: Any = fused_stream_kernel
        kernel[(fabric.multiprocessors,)](
            *blocks(both.a, both.b, shapes), y, bias, stage.bases, stage.data.local, epochs, stage.taken, problem.m,
            problem.n, working, stage.half, fabric.group.rank, *watch(fabric), STEPS=steps, STAGES=stages,
            RANKS=fabric.group.size, num_warps=WARPS, maxnreg=REGISTERS, **ends,
        )  # fmt: skip

    return launch, ("streamed", steps, tall, problem.n % 16, y.data_ptr() % 16)


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
