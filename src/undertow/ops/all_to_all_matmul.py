"""y_r = activation(rows that other ranks have for rank r @ w_r + bias_r): tokens reach an expert.

| tensor | shape on each rank |
|---|---|
| x | [sum over destinations d of splits[r][d], K]: rows for rank 0, then rows for rank 1, ... |
| w | [K, N], each rank its own; or [experts, K, N], one for each of the rank's experts |
| y | [sum over sources s of splits[s][r], N]: rows from rank 0, then rows from rank 1, ... |

With grouped weights, rows for a rank stand by its experts, group_sizes[d][e] for expert e of rank d:

    x     rows for expert 0 of rank 0, for expert 1 of rank 0, ...; for expert 0 of rank 1, ...
    y     rows from rank 0 for expert 0, for expert 1, ...; rows from rank 1 for expert 0, ...

The mirror image of `matmul_all_to_all`, and its gradient: there rows leave as they are made, here they are multiplied
as they arrive. `serial`; `chunked`, where a parcel holds a fraction of every sender's rows; and `fused`: who computes
puts rows where they are for, band by band, and multiplies each band that has come.

    communication   | parcel 0 | parcel 1 | parcel 2 | ...
    compute                    | rows of 0 | rows of 1 | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..collective.carry import Carrier
from ..fabric.group import Group
from ..fabric.registry import as_group
from ..plan.fused import why_not_bands
from ..plan.problem import Problem
from ..plan.tokens import Tokens
from . import gradients as _gradients  # noqa: F401 - registers them
from .all_gather_matmul import bring_and_multiply
from .beside import Taking
from .choose import Request, near, perform
from .differentiable import autocast, differentiable, finished, name_of, refuse_in_place
from .finish import Finish, check_finish
from .fused import arrive
from .given import check_before_dispatch, check_given
from .grouped import GroupSizes, Splits, multiplied_alone, tokens_of
from .library import all_to_all_matmul as operator
from .matmul_all_to_all import flat_splits, row_pieces, told
from .operands import check_factors, dtype_name, output
from .overlap import half_way
from .product import RowProduct

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.base import Lane
    from ..plan.plan import Plan

GRAINS = ("serial", "chunked", "fused")


def grouped_reference(
    xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor], group_sizes: Sequence[Sequence[Sequence[int]]]
) -> list[torch.Tensor]:
    """The meaning of grouped weights: group_sizes[sender][destination][expert], w [experts, K, N] of each receiver."""
    received: list[list[torch.Tensor]] = [[] for _ in xs]
    for x, sizes in zip(xs, group_sizes, strict=True):
        row = 0
        for destination, counts in enumerate(sizes):
            for expert, count in enumerate(counts):
                received[destination].append(x[row : row + count] @ ws[destination][expert])
                row += count
    return [torch.cat(rows) for rows in received]


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
    group_sizes: GroupSizes = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    group: Group | dist.ProcessGroup | DeviceMesh | str | None = None,
    strategy: str = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows that all ranks have for this one, in the order of the senders, @ w -> [rows, N].

    `splits` as in `matmul_all_to_all`: rows for each rank, or the matrix splits[sender][destination], or None.

    w [experts, K, N] is one weight for each of this rank's experts; the same number on all ranks. Then `group_sizes`,
    in place of `splits`, are the rows of x for each expert of each rank, [rank][expert], zeros allowed; or those of all
    ranks, [sender][rank][expert], which spares ranks from telling each other. `bias` is [experts, N] then.
    """
    check_given(x, w, strategy, bias=bias, out=out)
    x, w, bias = autocast(x, w, bias)
    if differentiable(x, w, bias):
        refuse_in_place(out=out)
        check_before_dispatch(x, w, bias, activation, group, grouped=True)
        counts = flat_splits(splits, group_sizes, x, w, group)
        y, _ = operator(x, w, bias, counts, name_of(group), strategy)
        return finished(y, activation)
    on = as_group(group)
    check_factors(x, w, on, grouped=True)
    tokens = tokens_of(splits, group_sizes, w, x.shape[0], on)
    return call(x, w, tokens, bias, activation, on, strategy, out, keep=False)[0]


def call(
    x: torch.Tensor,
    w: torch.Tensor,
    tokens: Tokens,
    bias: torch.Tensor | None,
    activation: str,
    on: Group,
    strategy: str,
    out: torch.Tensor | None = None,
    arriving: Taking | None = None,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator without gradients, and the rows that came, unless nobody wants to `keep` them.

    `arriving` takes part of every parcel of them.
    """
    check_factors(x, w, on, grouped=True)
    n, k, experts = w.shape[-1], x.shape[1], w.shape[0] if w.dim() == 3 else None
    check_finish(bias, activation, n, x, experts)
    received = x.new_empty(sum(row[on.rank] for row in tokens.matrix), k)
    y = output(out, (received.shape[0], n), x, w, bias)
    problem = Problem.for_splits(
        tokens.back.matrix, k, n, dtype=dtype_name(x), device=x.device.type,
        multiprocessors=on.fabric.multiprocessors, bulk=on.fabric.bulk_copies, experts=tokens.experts, mirrored=True,
    )  # fmt: skip
    shape = f"x {list(x.shape)}, w {list(w.shape)}, {dtype_name(x)}"

    def execute(plan: Plan, lane: Lane) -> None:
        _run(x, w, received, y, tokens, plan, Finish(bias, activation), on, lane, arriving, keep)

    def multiply() -> torch.Tensor:
        return multiplied_alone(torch.zeros_like(received), w, tokens.arriving(on.rank))

    request = Request(
        problem, on, shape, f"{told(tokens)}, K {k}, {dtype_name(x)}", y, execute, multiply, grains=GRAINS,
        lane=near(on), block_rows=tokens.usual_rows,
    )  # fmt: skip
    perform(request, strategy, None)
    return y, received


def mirrored_strategy(strategy: str, x: torch.Tensor | None = None) -> str:
    """For the other half of a `matmul_all_to_all` of that strategy: its lane, and `chunked` for what overlaps there.

    So too for a gradient x [M, K] whose rows no fused kernel brings (K no multiple of 8), where the other half can be.
    """
    grain, colon, lane = strategy.partition(":")
    if grain == "fused" and x is not None and x.device.type == "cuda" and why_not_bands(x.shape[1]):
        return f"chunked{colon}{lane}"
    return strategy if grain in ("auto", *GRAINS) else f"chunked{colon}{lane}"


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    received: torch.Tensor,
    y: torch.Tensor,
    tokens: Tokens,
    plan: Plan,
    finish: Finish,
    on: Group,
    lane: Lane,
    arriving: Taking | None,
    keep: bool,
) -> None:
    if plan.grain == "fused":
        arrive(x, w, received, y, tokens, plan, finish, on.fabric, arriving, keep)
        return
    rank, k, matrix = on.rank, x.shape[1], tokens.matrix
    x = x.contiguous()
    shards = [row[rank] for row in matrix]
    leaving, coming = row_pieces(matrix[rank], k, plan), row_pieces(shards, k, plan)
    rows = row_pieces(shards, 1, plan)
    cuts = [row_pieces(row, k, plan) for row in matrix]
    carrier = Carrier(on.fabric, lane, x, max(count for cut in cuts for parcel in cut for _, count in parcel))
    epilogue = None if finish.nothing else finish
    product = RowProduct(on.fabric, plan, received, w, y, rows, epilogue, tokens.arriving(rank))

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
    if arriving is not None:
        on.fabric.poison_if_aborted(*arriving.made)
