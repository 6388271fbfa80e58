"""Rank r sends rows of y_r = activation(x_r @ w_r + bias_r) to the ranks that own them: tokens leave an expert.

| tensor | shape on each rank |
|---|---|
| x | [sum over destinations d of splits[r][d], K]: rows for rank 0, then rows for rank 1, ... |
| w | [K, N], each rank its own |
| y | [sum over sources s of splits[s][r], N]: rows from rank 0, then rows from rank 1, ... |

Nothing is reduced: the product is complete where it is made, so bias and activation are the sender's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..collective.carry import Carrier
from ..errors import InvalidArgument
from ..fabric.group import Group
from ..fabric.registry import as_group
from ..plan import reorder
from ..plan.plan import Plan, split
from ..plan.problem import Problem
from ..plan.tiles import TileGrid, chunks
from . import gradients as _gradients  # noqa: F401 - registers them
from .beside import Beside
from .choose import Request, perform
from .differentiable import autocast, differentiable, finished, held, name_of, refuse_in_place
from .finish import Finish, check_finish
from .fused import run as run_fused
from .library import matmul_all_to_all as operator
from .operands import check_factors, dtype_name, output
from .overlap import overlap
from .produce import placed, product_of
from .product import NoProduct

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ..fabric.base import Fabric, Lane

OPERATOR = "matmul_all_to_all"
_SHOWN = 48  # characters of a matrix of splits that a message shows
Splits = Sequence[int] | Sequence[Sequence[int]] | None


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
    """
    x, w, bias = autocast(x, w, bias)
    if differentiable(x, w, bias):
        refuse_in_place(out=out)
        told = flat_splits(splits, x.shape[0], group)
        y = operator(x, w, bias, told, name_of(group), strategy, held(plan))
        return finished(y, activation)
    return call(x, w, splits, bias, activation, as_group(group), strategy, plan, out)


def call(
    x: torch.Tensor,
    w: torch.Tensor,
    splits: Splits,
    bias: torch.Tensor | None,
    activation: str,
    on: Group,
    strategy: str,
    plan: Plan | None,
    out: torch.Tensor | None = None,
    beside: Beside | None = None,
) -> torch.Tensor:
    """The operator without gradients. `beside`: what is computed while the last parcels move."""
    check_factors(x, w, on)
    n = w.shape[1]
    check_finish(bias, activation, n, x)
    matrix = split_matrix(splits, x.shape[0], on)
    y = output(out, (sum(row[on.rank] for row in matrix), n), x, w)
    shared = Problem.for_splits(
        matrix, n, x.shape[1], dtype=dtype_name(x), device=x.device.type, multiprocessors=on.fabric.multiprocessors
    )
    mine = replace(shared, m=x.shape[0], shards=tuple(matrix[on.rank]))
    shape = f"x {list(x.shape)}, w {list(w.shape)}, {dtype_name(x)}"
    told = str(matrix) if len(str(matrix)) <= _SHOWN else f"of checksum {zlib.crc32(str(matrix).encode()):08x}"
    same_on_all = f"splits {told}, N {n}, {dtype_name(x)}"

    def execute(chosen: Plan, lane: Lane) -> None:
        run(x, w, y, matrix, mine, chosen, Finish(bias, activation), on.fabric, lane, beside=beside)

    perform(Request(shared, on, shape, same_on_all, y, execute, lambda: x @ w), strategy, plan)
    return y


def flat_splits(
    splits: Splits, rows: int, group: Group | dist.ProcessGroup | DeviceMesh | str | None
) -> list[int] | None:
    """The matrix of splits as one list; None where rows are cut evenly. While torch traces nobody can be asked."""
    if splits is None:
        return None
    if not torch.compiler.is_compiling():
        return [one for row in split_matrix(splits, rows, as_group(group)) for one in row]
    counts: list[int] = []
    for row in splits:
        counts.extend(row if isinstance(row, Sequence) else [row])
    return counts


def split_matrix(splits: Splits, rows: int, group: Group) -> list[list[int]]:
    """splits[sender][destination] of all ranks."""
    size, rank = group.size, group.rank
    if splits is None:
        return [[stop - start for start, stop in split(rows, size)]] * size
    matrix: list[list[int]] = []
    mine: list[int] = []
    for row in splits:
        if isinstance(row, Sequence):
            matrix.append([int(one) for one in row])
        else:
            mine.append(int(row))
    if matrix:
        if len(matrix) != size or any(len(row) != size for row in matrix):
            was = f"{len(matrix)} rows of {[len(row) for row in matrix]} counts"
            raise InvalidArgument(argument="splits", was=was, must=f"a matrix of {size} x {size} counts")
        mine = matrix[rank]
    if len(mine) != size or min(min(row) for row in (mine, *matrix)) < 0 or sum(mine) != rows:
        must = f"{size} counts of at least 0 that add up to {rows}, the rows of x"
        raise InvalidArgument(argument="splits", was=str(matrix or mine), must=must)
    return matrix or group.exchange(mine, "how rows are split")


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    matrix: Sequence[Sequence[int]],
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
        run_fused(x, w, y, problem, plan, finish, fabric, lane, beside, matrix=matrix)
        return
    rank, n = fabric.group.rank, problem.n
    buffer = x.new_empty(problem.m * n)
    packed = plan.grain == "signaled" and plan.layout == "packed"
    if plan.grain == "signaled":
        leaving = reorder.pieces(problem.grid(plan), plan)
        arriving = reorder.arriving_pieces(matrix, n, plan, rank)
    else:
        leaving = row_pieces(problem.shards, n, plan)
        arriving = row_pieces([row[rank] for row in matrix], n, plan)
    result = y.new_empty(y.numel()) if packed else y.view(-1)
    carrier = Carrier(fabric, lane, y, _longest(matrix, n, plan))

    def landing(parcel: int) -> list[torch.Tensor]:
        return [result[offset : offset + count] for offset, count in arriving[parcel]]

    def carry(parcel: int) -> None:
        parts = [buffer[offset : offset + count] for offset, count in leaving[parcel]]
        landing(parcel)[rank].copy_(parts[rank])
        carrier.send(parcel, parts)

    def collect(parcel: int) -> None:
        carrier.receive(parcel, landing(parcel))

    epilogue = None if finish.nothing else finish
    product = product_of(fabric, problem, plan, x, w, buffer, epilogue) if compute else NoProduct()
    overlap(fabric, lane, plan, product, carry, (collect,), len(plan.parcels), beside)
    if packed:
        key = ("unpack", tuple(map(tuple, matrix)), n, plan.digest, rank)
        table = placed(fabric, key, lambda: reorder.arriving_table(matrix, n, plan, rank))
        Finish(None, "none").unpack(y, result, table)


def _longest(matrix: Sequence[Sequence[int]], n: int, plan: Plan) -> int:
    """Elements of the longest piece of whatever rank: all ranks must ask for as much room."""
    found = [0]
    for row in {tuple(row) for row in matrix}:
        if plan.grain == "signaled":
            pieces = reorder.pieces(TileGrid(sum(row), n, *(plan.tile or (1, 1)), row), plan)
        else:
            pieces = row_pieces(row, n, plan)
        found += [count for parcel in pieces for _, count in parcel]
    return max(found)


def row_pieces(shards: Sequence[int], n: int, plan: Plan) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(tuple((row * n, rows * n) for row, rows in parcel) for parcel in chunks(shards, plan))
