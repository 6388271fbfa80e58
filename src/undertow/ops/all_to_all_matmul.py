"""y_r = activation(rows that other ranks have for rank r @ w_r + bias_r): tokens reach an expert.

| tensor | shape on each rank |
|---|---|
| x | [sum over destinations d of splits[r][d], K]: rows for rank 0, then rows for rank 1, ... |
| w | [K, N], each rank its own |
| y | [sum over sources s of splits[s][r], N]: rows from rank 0, then rows from rank 1, ... |

The mirror image of `matmul_all_to_all`, and its gradient: there rows leave as they are made, here they are multiplied
as they arrive. `serial`; `chunked`, where a parcel holds a fraction of every sender's rows; and, on a CPU, `fused`: the
thread that computes puts its rows where they are for, band by band, and multiplies each band that has come.

    communication   | parcel 0 | parcel 1 | parcel 2 | ...
    compute                    | rows of 0 | rows of 1 | ...

Nothing is measured: `auto` is `chunked` over `peer` where all ranks stand on one node, else over `net`, and `serial`
where a rank is alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..collective.carry import Carrier
from ..fabric.group import Group
from ..fabric.registry import as_group
from ..plan.defaults import default_plan
from ..plan.plan import Plan, parse_strategy
from ..plan.problem import Problem
from . import fused_cpu
from . import gradients as _gradients  # noqa: F401 - registers them
from .all_gather_matmul import bring_and_multiply
from .beside import Arriving
from .choose import refuse_fused
from .differentiable import autocast, differentiable, finished, name_of, refuse_in_place
from .explain import Choice, Explanation, remember
from .finish import Finish, check_finish
from .library import all_to_all_matmul as operator
from .matmul_all_to_all import Splits, flat_splits, row_pieces, split_matrix
from .operands import check_factors, dtype_name, output
from .overlap import half_way
from .product import RowProduct

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.base import Lane

OPERATOR = "all_to_all_matmul"
GRAINS = ("serial", "chunked", "fused")
_SHOWN = 48  # characters of a matrix of splits that a message shows


def reference(
    xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor], splits: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The meaning, as a plain loop: what every rank gets (without bias and activation)."""
    rows = [torch.split(x, list(row)) for x, row in zip(xs, splits, strict=True)]
    return [torch.cat([rows[source][rank] for source in range(len(xs))]) @ w for rank, w in enumerate(ws)]


def all_to_all_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    splits: Splits = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    group: Group | dist.ProcessGroup | DeviceMesh | str | None = None,
    strategy: str = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows that all ranks have for this one, in the order of the senders, @ w -> [rows, N].

    `splits` as in `matmul_all_to_all`: rows for each rank, or the matrix splits[sender][destination], or None.
    """
    x, w, bias = autocast(x, w, bias)
    if differentiable(x, w, bias):
        refuse_in_place(out=out)
        told = flat_splits(splits, x.shape[0], group)
        y, _ = operator(x, w, bias, told, name_of(group), strategy)
        return finished(y, activation)
    return call(x, w, splits, bias, activation, as_group(group), strategy, out)[0]


def call(
    x: torch.Tensor,
    w: torch.Tensor,
    splits: Splits,
    bias: torch.Tensor | None,
    activation: str,
    on: Group,
    strategy: str,
    out: torch.Tensor | None = None,
    arriving: Arriving | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator without gradients, and the rows that came. `arriving` takes part of every parcel of them."""
    check_factors(x, w, on)
    n, k = w.shape[1], x.shape[1]
    check_finish(bias, activation, n, x)
    matrix = split_matrix(splits, x.shape[0], on)
    received = x.new_empty(sum(row[on.rank] for row in matrix), k)
    y = output(out, (received.shape[0], n), x, w)
    # Planned as its mirror image, which sends as many bytes and multiplies as much.
    mirrored = Problem.for_splits(
        [list(column) for column in zip(*matrix, strict=True)], k, n, dtype=dtype_name(x), device=x.device.type,
        multiprocessors=on.fabric.multiprocessors,
    )  # fmt: skip
    plan, reason = _planned(mirrored, on, strategy)
    told = str(matrix) if len(str(matrix)) <= _SHOWN else f"of checksum {zlib.crc32(str(matrix).encode()):08x}"
    with on.call(OPERATOR, f"splits {told}, K {k}, {dtype_name(x)}", f"{plan.name} {plan.digest}") as number:
        lane = on.fabric.lane(plan.lane)
        with on.fabric.guarded_call((y,)):
            _run(x, w, received, y, matrix, plan, Finish(bias, activation), on, lane, arriving)
        shape = f"x {list(x.shape)}, w {list(w.shape)}, {dtype_name(x)}"
        remember(Explanation(OPERATOR, shape, on.name, number, strategy, Choice(plan, reason)))
    return y, received


def mirrored_strategy(strategy: str) -> str:
    """For the other half of a `matmul_all_to_all` of that strategy: its lane, and `chunked` for what overlaps there."""
    grain, colon, lane = strategy.partition(":")
    return strategy if grain in ("auto", *GRAINS) else f"chunked{colon}{lane}"


def _planned(problem: Problem, group: Group, strategy: str) -> tuple[Plan, str]:
    lanes = group.fabric.lanes()
    near = "net" if lanes["peer"] else "peer"
    if strategy == "auto":
        grain = "chunked" if group.size > 1 else "serial"
        return default_plan(
            problem, grain, near
        ), "Nothing is measured for this operator: rows are multiplied as they come."
    grain, lane = parse_strategy(strategy, GRAINS, lanes, near)
    if grain == "fused":
        refuse_fused(strategy, problem, lane, group)
    return default_plan(problem, grain, lane), "The strategy was given."


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    received: torch.Tensor,
    y: torch.Tensor,
    matrix: Sequence[Sequence[int]],
    plan: Plan,
    finish: Finish,
    on: Group,
    lane: Lane,
    arriving: Arriving | None,
) -> None:
    if plan.grain == "fused":
        call = fused_cpu.arrive(x, w, received, y, matrix, plan, finish, on.fabric, arriving)
        with half_way(on):
            call()
        return
    rank, k = on.rank, x.shape[1]
    x = x.contiguous()
    shards = [row[rank] for row in matrix]
    leaving, coming = row_pieces(matrix[rank], k, plan), row_pieces(shards, k, plan)
    rows = row_pieces(shards, 1, plan)
    cuts = [row_pieces(row, k, plan) for row in matrix]
    carrier = Carrier(on.fabric, lane, x, max(count for cut in cuts for parcel in cut for _, count in parcel))
    product = RowProduct(on.fabric, plan, received, w, y, rows, None if finish.nothing else finish)

    def bring(parcel: int) -> None:
        parts = [x.view(-1)[first : first + count] for first, count in leaving[parcel]]
        outs = [received.view(-1)[first : first + count] for first, count in coming[parcel]]
        outs[rank].copy_(parts[rank])
        carrier.send(parcel, parts)
        carrier.receive(parcel, outs)

    def also(parcel: int | None) -> None:
        if arriving is not None:
            arriving.add([(0, received.shape[0])] if parcel is None else rows[parcel])

    if arriving is not None:
        arriving.begin(received)
    with half_way(on):
        bring_and_multiply(on.fabric, lane, plan, product, bring, len(plan.parcels), also)
