"""The fused grain: which executor runs it, and what it does with the options of the operators.

Bias and activation are taken with the tile that is complete, a norm in the end. What a gradient wants computed beside
is computed before (`beside`; behind it, where all ranks meet once for both), or from the rows that have arrived
(`arriving`): a fused call has no lane that could carry anything beside it, and its kernels hold all SMs. Over `peer` it
is one kernel; over `net` and `dma` some kernels post what others, or the threads of a CPU, take (`posted_cuda.py`,
`posted_cpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..collective.carry import Carrier
from .overlap import compute_beside, half_way
from .whole import bringer, has_collectives

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane
    from ..fabric.group import Group
    from ..plan.plan import Plan
    from ..plan.problem import Problem
    from ..plan.tokens import Tokens
    from .beside import Beside, Taking
    from .finish import Finish


def unavailable(group: Group) -> str:
    """Why this rank's device cannot run a fused kernel, whatever the problem, or ""; ranks have GPUs of one kind."""
    if group.fabric.unknown_sharers:
        return group.fabric.unknown_sharers
    if group.device.type == "cpu":
        return ""
    if torch.cuda.get_device_capability(group.device)[0] < 8:
        return "the fused kernels multiply bfloat16 on tensor cores, which GPUs before sm_80 do not"
    return ""


def unwanted(group: Group) -> str:
    """Why `auto` leaves fused plans out on this rank, or "".

    A fused kernel holds its SMs until all ranks have come. Kernels of another group on the same device (NCCL's, of data
    parallel gradients) that wait for SMs on one rank, while their peers run on another, would wait for each other.
    """
    device = group.device.type
    for other, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        if other is group.process_group or len(ranks) < 2 or not isinstance(other, dist.ProcessGroup):
            continue
        if any(one.type == device for one in other._device_types):
            return f"group {other.group_name} may run kernels on the same device"
    return unavailable(group)


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    lane: Lane,
    beside: Beside | None = None,
    arriving: Taking | None = None,
    tokens: Tokens | None = None,
) -> None:
    """One call by the plan. `tokens`: the rows of an all_to_all."""
    # Room and kernels first: what cannot be had is refused before anything moves, and ends no group.
    call: Callable[[], None]
    if fabric.group.device.type == "cuda":
        from . import fused_cuda, posted_cuda, tokens_cuda

        if tokens is not None:
            exchange = tokens_cuda.exchange if plan.lane == "peer" else posted_cuda.exchange
            call = exchange(x, w, y, tokens, plan, finish, fabric)
        else:
            call = fused_cuda.prepare(x, w, y, problem, plan, finish, fabric, arriving)
    else:
        from . import fused_cpu, posted_cpu, tokens_cpu

        if tokens is not None:
            exchange = tokens_cpu.exchange if plan.lane == "peer" else posted_cpu.exchange
            call = exchange(x, w, y, tokens, plan, finish, fabric)
        else:
            call = fused_cpu.prepare(x, w, y, problem, plan, finish, fabric, arriving)
    also = bringer(fabric, beside) if beside is not None and has_collectives(fabric, lane) else None
    meet = also.meet if also is not None else None
    stays = arriving is not None and fabric.group.size > 1 and plan.lane == "peer"  # what is posted has its turns
    gate = meet or (fabric.meeting("rows that stay") if stays else fabric.gate())
    with half_way(fabric.group):
        if also is not None and meet is None:
            also.at_once()
        elif also is None and beside is not None:
            if beside.bring is not None:
                beside.bring(Carrier(fabric, lane, y, beside.longest))
                lane.flush()
            compute_beside(fabric, beside)
        gate()
        if also is not None and meet is not None:
            # All have met, so nobody reads what others overwrite. Rows that a rank stores are released by the words of
            # its kernel's tiles, as that follows on its stream, and acquired by whoever waits for those: every rank,
            # for all others (of sums that go from rank to rank, through the ranks between), before its kernel ends.
            also.bring()
            call()
            also.compute()
        else:
            call()


def arrive(
    x: torch.Tensor,
    w: torch.Tensor,
    received: torch.Tensor,
    y: torch.Tensor,
    tokens: Tokens,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    arriving: Taking | None,
    keep: bool,
) -> None:
    """One all_to_all_matmul by the plan. `keep`: the rows that came are wanted in `received`."""
    call: Callable[[], None]
    if fabric.group.device.type == "cuda":
        from . import posted_cuda, tokens_cuda

        on_device = tokens_cuda.arrive if plan.lane == "peer" else posted_cuda.arrive
        call = on_device(x, w, received, y, tokens, plan, finish, fabric, arriving, keep)
    else:
        from . import posted_cpu, tokens_cpu

        take = tokens_cpu.arrive if plan.lane == "peer" else posted_cpu.arrive
        call = take(x, w, received, y, tokens, plan, finish, fabric, arriving)
    gate = fabric.gate()
    with half_way(fabric.group):
        gate()
        call()
