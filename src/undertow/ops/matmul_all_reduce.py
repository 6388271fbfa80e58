"""y = sum over ranks r of x_r @ w_r: the row-parallel linear layer.

| tensor | shape on each rank | sharded over |
|---|---|---|
| x_shard_k | [M, K_r] | K |
| w_shard_k | [K_r, N] | K |
| y | [M, N] | nothing: every rank holds the sum |

K_r may differ between ranks, and may be zero. Grains: `serial` multiplies, then reduces. `chunked` splits the rows on
the host; each chunk is reduced on a second stream while the next one is multiplied:

    compute        | x0 w | x1 w | x2 w | x3 w |
    communication         | sum0 | sum1 | sum2 | sum3 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..collective.direct import all_reduce
from ..errors import InvalidArgument
from ..fabric import timeline
from ..fabric.group import Group
from ..fabric.registry import as_group
from ..plan.plan import Plan, parse_strategy, split
from .explain import Explanation, remember

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.base import Fabric, Lane

GRAINS = ("serial", "chunked")
_CHUNKS = 4
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def reference(x_shards_k: Sequence[torch.Tensor], w_shards_k: Sequence[torch.Tensor]) -> torch.Tensor:
    """The meaning, as a plain loop over the shards of all ranks."""
    y = x_shards_k[0].new_zeros(x_shards_k[0].shape[0], w_shards_k[0].shape[1])
    for x_shard_k, w_shard_k in zip(x_shards_k, w_shards_k, strict=True):
        y += x_shard_k @ w_shard_k
    return y


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    group: Group | dist.ProcessGroup | DeviceMesh | None = None,
    strategy: str = "auto",
    plan: Plan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K_r] @ w [K_r, N], summed over the ranks of `group` -> [M, N] on every rank."""
    on = as_group(group)
    _check(x, w, out, on)
    chosen, reason = _plan(x.shape[0], strategy, plan, on)
    shape = f"x {list(x.shape)}, w {list(w.shape)}, {str(x.dtype).removeprefix('torch.')}"
    same_on_all = f"M {x.shape[0]}, N {w.shape[1]}, {str(x.dtype).removeprefix('torch.')}"
    y = x.new_empty(x.shape[0], w.shape[1]) if out is None else out
    with on.call("matmul_all_reduce", same_on_all, f"{chosen.name} {chosen.digest}") as number:
        lane = on.fabric.lane(chosen.lane)  # before the guarded part: opening it is collective and slow
        with on.fabric.guarded_call((y,)):
            _execute(x, w, y, chosen, on.fabric, lane)
        remember(Explanation("matmul_all_reduce", shape, on.name, number, strategy, chosen, reason))
    return y


def _execute(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, plan: Plan, fabric: Fabric, lane: Lane) -> None:
    lane.limit(plan.share.communication_ctas)
    if plan.grain == "serial":
        with timeline.event("matmul", engine="compute", rows=x.shape[0]):
            torch.matmul(x, w, out=y)
        all_reduce(fabric, lane, y)
        return
    communication = fabric.stream("communication", priority=plan.share.communication_priority)
    try:
        for start, stop in plan.parcels:
            with (
                fabric.computing(plan.share.multiprocessors),
                timeline.event("matmul", engine="compute", rows=stop - start),
            ):
                torch.matmul(x[start:stop], w, out=y[start:stop])
            communication.fork()
            communication.run(lambda rows=y[start:stop]: all_reduce(fabric, lane, rows))  # type: ignore[misc]
    finally:
        communication.join()


def _plan(rows: int, strategy: str, plan: Plan | None, group: Group) -> tuple[Plan, str]:
    if plan is not None:
        parse_strategy(plan.name, GRAINS, group.fabric.lanes(), plan.lane)
        plan.check_rows(rows)
        return plan, "The plan was given."
    if strategy == "auto":
        return Plan("serial", "net", ((0, rows),)), "No measured plan beats serial here yet, so serial runs."
    grain, lane = parse_strategy(strategy, GRAINS, group.fabric.lanes(), "net")
    parcels = split(rows, min(_CHUNKS, rows)) if grain == "chunked" and rows else ((0, rows),)
    return Plan(grain, lane, parcels), "The strategy was given."


def _check(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None, group: Group) -> None:
    for name, tensor in (("x", x), ("w", w)):
        if tensor.dim() != 2:
            raise InvalidArgument(argument=name, was=f"of shape {list(tensor.shape)}", must="a matrix")
        if tensor.device != group.device:
            raise InvalidArgument(argument=name, was=f"on {tensor.device}", must=f"on {group.device}")
        if tensor.dtype not in _DTYPES:
            must = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
            raise InvalidArgument(argument=name, was=f"of {tensor.dtype}", must=f"one of {must}")
    if w.shape[0] != x.shape[1]:
        raise InvalidArgument(
            argument="w", was=f"of shape {list(w.shape)}", must=f"of {x.shape[1]} rows, as x has columns"
        )
    if w.dtype != x.dtype:
        raise InvalidArgument(argument="w", was=f"of {w.dtype}", must=f"of {x.dtype}, as x is")
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        must = "detached, or the call under torch.no_grad(): this operator has no backward yet"
        raise InvalidArgument(argument="x or w", was="a tensor that requires a gradient", must=must)
    if out is not None:
        if any(out.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in (x, w) if one.numel()):
            raise InvalidArgument(argument="out", was="in the storage of x or w", must="a tensor of its own")
        shape = [x.shape[0], w.shape[1]]
        if list(out.shape) != shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
            was = f"{list(out.shape)} {out.dtype} on {out.device}"
            raise InvalidArgument(argument="out", was=was, must=f"contiguous {shape} {x.dtype} on {x.device}")
