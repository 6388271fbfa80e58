"""Rank r sends rows of y_r = activation(x_r @ w_r + bias_r) to the ranks that own them: tokens leave an expert.

| tensor | shape on each rank |
|---|---|
| x | [sum over destinations d of splits[r][d], K]: rows for rank 0, then rows for rank 1, ... |
| w | [K, N], each rank its own; or [experts, K, N], one for each of the rank's experts |
| y | [sum over sources s of splits[s][r], N]: rows from rank 0, then rows from rank 1, ... |

With grouped weights, rows for a rank stand by expert, group_sizes[d][e] of expert e for rank d, and arrive so:

    x     rows for rank 0 of expert 0, of expert 1, ...; rows for rank 1 of expert 0, ...
    y     rows from rank 0 of its expert 0, of its expert 1, ...; rows from rank 1 of its expert 0, ...

Nothing is reduced: the product is complete where it is made, so bias and activation are the sender's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..collective.carry import Carrier
from ..fabric.group import Group
from ..fabric.registry import as_group
from ..plan import reorder
from ..plan.plan import Plan
from ..plan.problem import Problem
from ..plan.tiles import chunks
from ..plan.tokens import Tokens
from . import gradients as _gradients  # noqa: F401 - registers them
from .beside import Beside
from .choose import Request, near, perform
from .differentiable import autocast, differentiable, finished, held, name_of, refuse_in_place
from .finish import Finish, check_finish
from .fused import run as run_fused
from .given import check_before_dispatch, check_given
from .grouped import GroupSizes, Splits, flattened, multiplied_alone, tokens_of
from .library import matmul_all_to_all as operator
from .operands import check_factors, dtype_name, output
from .overlap import overlap
from .produce import placed, product_of
from .product import NoProduct, Product

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.base import Fabric, Lane

OPERATOR = "matmul_all_to_all"
_SHOWN = 48  # characters of a matrix of splits that a message shows


def grouped_reference(
    xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor], group_sizes: Sequence[Sequence[Sequence[int]]]
) -> list[torch.Tensor]:
    """The meaning of grouped weights: group_sizes[sender][destination][expert], w [experts, K, N] of each sender."""
    received: list[list[torch.Tensor]] = [[] for _ in xs]
    for x, w, sizes in zip(xs, ws, group_sizes, strict=True):
        row = 0
        for destination, counts in enumerate(sizes):
            for expert, count in enumerate(counts):
                received[destination].append(x[row : row + count] @ w[expert])
                row += count
    return [torch.cat(rows) for rows in received]


def reference(
    xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor], splits: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The meaning, as a plain loop: what every rank gets (without bias and activation)."""
    rows = [torch.split(x @ w, list(row)) for x, w, row in zip(xs, ws, splits, strict=True)]
    return [torch.cat([rows[source][rank] for source in range(len(xs))]) for rank in range(len(xs))]


def matmul_all_to_all(
    x: torch.Tensor,
    w: torch.Tensor,
    splits: Splits = None,
    *,
    group_sizes: GroupSizes = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    group: Group | dist.ProcessGroup | DeviceMesh | str | None = None,
    strategy: str = "auto",
    plan: Plan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ w, whose rows go to the ranks that own them -> what this rank owns, in the order of the senders.

    `splits`: rows for each rank; or the matrix splits[sender][destination], which spares ranks from telling each other;
    or None: every rank has as many rows and cuts them by torch.tensor_split.

    w [experts, K, N] is one weight for each of this rank's experts; the same number on all ranks. Then `group_sizes`,
    in place of `splits`, are the rows of x for each rank and of each expert, [rank][expert], zeros allowed; or those of
    all ranks, [sender][rank][expert], which spares ranks from telling each other. `bias` is [experts, N] then.
    """
    check_given(x, w, strategy, plan, bias=bias, out=out)
    x, w, bias = autocast(x, w, bias)
    if differentiable(x, w, bias):
        refuse_in_place(out=out)
        check_before_dispatch(x, w, bias, activation, group, grouped=True)
        told = flat_splits(splits, group_sizes, x, w, group)
        y = operator(x, w, bias, told, name_of(group), strategy, held(plan))
        return finished(y, activation)
    on = as_group(group)
    check_factors(x, w, on, grouped=True)
    tokens = tokens_of(splits, group_sizes, w, x.shape[0], on)
    return call(x, w, tokens, bias, activation, on, strategy, plan, out)


def call(
    x: torch.Tensor,
    w: torch.Tensor,
    tokens: Tokens,
    bias: torch.Tensor | None,
    activation: str,
    on: Group,
    strategy: str,
    plan: Plan | None,
    out: torch.Tensor | None = None,
    beside: Beside | None = None,
) -> torch.Tensor:
    """The operator without gradients. `beside`: what is computed while the last parcels move."""
    check_factors(x, w, on, grouped=True)
    n, experts = w.shape[-1], w.shape[0] if w.dim() == 3 else None
    check_finish(bias, activation, n, x, experts)
    matrix = tokens.matrix
    y = output(out, (sum(row[on.rank] for row in matrix), n), x, w, bias)
    shared = Problem.for_splits(
        matrix, n, x.shape[1], dtype=dtype_name(x), device=x.device.type, multiprocessors=on.fabric.multiprocessors,
        bulk=on.fabric.bulk_copies, experts=tokens.experts,
    )  # fmt: skip
    mine = replace(shared, m=x.shape[0], shards=tuple(matrix[on.rank]))
    shape = f"x {list(x.shape)}, w {list(w.shape)}, {dtype_name(x)}"

    def execute(chosen: Plan, lane: Lane) -> None:
        run(x, w, y, tokens, mine, chosen, Finish(bias, activation), on.fabric, lane, beside=beside)

    def multiply() -> torch.Tensor:
        return multiplied_alone(x, w, tokens.leaving(on.rank))

    request = Request(shared, on, shape, f"{told(tokens)}, N {n}, {dtype_name(x)}", y, execute, multiply)
    if experts is not None:
        request = replace(request, lane=near(on), block_rows=tokens.usual_rows, forget=reorder.forget)
    perform(request, strategy, plan)
    return y


def told(tokens: Tokens) -> str:
    """What ranks compare of their rows."""
    rows: object = tokens.matrix if tokens.experts == 1 else tokens.sizes
    short = str(rows) if len(str(rows)) <= _SHOWN else f"of checksum {zlib.crc32(str(rows).encode()):08x}"
    return f"splits {short}"


def flat_splits(
    splits: Splits,
    group_sizes: GroupSizes,
    x: torch.Tensor,
    w: torch.Tensor,
    group: Group | dist.ProcessGroup | DeviceMesh | str | None,
) -> list[int] | None:
    """All ranks' counts as one list; None where rows are cut evenly. While torch traces nobody can be asked."""
    if splits is None and w.dim() == 2 and group_sizes is None:
        return None
    if not torch.compiler.is_compiling():
        on = as_group(group)
        check_factors(x, w, on, grouped=True)
        return flattened(tokens_of(splits, group_sizes, w, x.shape[0], on))
    counts: list[int] = []
    for row in (splits if w.dim() == 2 else group_sizes) or ():
        for one in row if isinstance(row, Sequence) else [row]:
            counts.extend(one if isinstance(one, Sequence) else [one])
    return counts


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    tokens: Tokens,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    lane: Lane,
    compute: bool = True,
    beside: Beside | None = None,
) -> None:
    """`compute` False: only what moves, for measurements."""
    if plan.grain == "fused":
        run_fused(x, w, y, problem, plan, finish, fabric, lane, beside, tokens=tokens)
        return
    rank, n, matrix = fabric.group.rank, problem.n, tokens.matrix
    buffer = x.new_empty(problem.m * n)
    packed = plan.grain == "signaled" and plan.layout == "packed"
    splits: reorder.Splits = tokens.sizes if w.dim() == 3 else matrix
    if plan.grain == "signaled":
        leaving = reorder.pieces(reorder.sender_grid(splits[rank], n, plan), plan)
        arriving = reorder.arriving_pieces(splits, n, plan, rank)
    else:
        leaving = row_pieces(problem.shards, n, plan)
        arriving = row_pieces([row[rank] for row in matrix], n, plan)
    result = y.new_empty(y.numel()) if packed else y.view(-1)
    carrier = Carrier(fabric, lane, y, _longest(splits, n, plan))

    def landing(parcel: int) -> list[torch.Tensor]:
        return [result[offset : offset + count] for offset, count in arriving[parcel]]

    # Copy engines need no SM, but the copy of own rows does, and beside a matmul may wait for one: nobody waits for it.
    apart = bool(lane.staged_chunk)

    def keep(parcel: int) -> None:
        offset, count = leaving[parcel][rank]
        landing(parcel)[rank].copy_(buffer[offset : offset + count])

    def carry(parcel: int) -> None:
        if not apart:
            keep(parcel)
        carrier.send(parcel, [buffer[offset : offset + count] for offset, count in leaving[parcel]])

    def collect(parcel: int) -> None:
        carrier.receive(parcel, landing(parcel))

    epilogue = None if finish.nothing else finish
    product: Product = NoProduct()
    if compute:
        grid = reorder.sender_grid(splits[rank], n, plan) if plan.grain == "signaled" else None
        product = product_of(fabric, problem, plan, x, w, buffer, epilogue, tokens.leaving(rank), grid)
    overlap(fabric, lane, plan, product, carry, (keep, collect) if apart else (collect,), len(plan.parcels), beside)
    if packed:
        key = ("unpack", tokens, w.dim(), n, plan.digest, rank)
        table = placed(fabric, key, lambda: reorder.arriving_table(splits, n, plan, rank))
        Finish(None, "none").unpack(y, result, table)


def _longest(splits: reorder.Splits, n: int, plan: Plan) -> int:
    """Elements of the longest piece of whatever rank: all ranks must ask for as much room."""
    found = [0]
    for row in {tuple(row) for row in splits}:
        if plan.grain == "signaled":
            pieces = reorder.pieces(reorder.sender_grid(row, n, plan), plan)
        else:
            pieces = row_pieces([sum(one) if isinstance(one, Sequence) else one for one in row], n, plan)
        found += [count for parcel in pieces for _, count in parcel]
    return max(found)


def row_pieces(shards: Sequence[int], n: int, plan: Plan) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(tuple((row * n, rows * n) for row, rows in parcel) for parcel in chunks(shards, plan))
