"""Grouped weights: one for each of a rank's experts, w [experts, K, N], and which rows each of them multiplies.

    reference:  for (row, rows, expert) in segments:  y[row : row + rows] = x[row : row + rows] @ w[expert]

Rows stand by the rank at the other end and, in that, by expert (`plan/tokens.py`). With one weight, w [K, N], there is
nothing to look up. A bias is the expert's own then, [experts, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgument
from ..fabric import timeline
from ..plan.plan import split
from ..plan.tokens import Block, Tokens, segments
from .given import counts_of, listed
from .operands import is_transposed

if TYPE_CHECKING:
    from ..fabric.group import Group
    from .finish import Finish

Splits = Sequence[int] | Sequence[Sequence[int]] | torch.Tensor | None
GroupSizes = Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]] | torch.Tensor | None


def weight_of(w: torch.Tensor, expert: int) -> torch.Tensor:
    return w if w.dim() == 2 else w[expert]


def finish_of(finish: Finish, expert: int) -> Finish:
    """With the bias of that expert."""
    bias = finish.bias
    return finish if bias is None or bias.dim() == 1 else replace(finish, bias=bias[expert])


def rows_of(w: torch.Tensor, blocks: Sequence[Block], first: int, count: int) -> list[tuple[int, int, int]]:
    """(row, rows, expert) of rows [first, first + count); with one weight they need no cut."""
    return [(first, count, 0)] if w.dim() == 2 else segments(blocks, first, count)


def multiply_rows(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    blocks: Sequence[Block],
    first: int,
    count: int,
    finish: Finish | None,
) -> None:
    """Rows [first, first + count) of y = x @ w, finished if told so."""
    for row, rows, expert in rows_of(w, blocks, first, count):
        part = y[row : row + rows]
        torch.matmul(x[row : row + rows], weight_of(w, expert), out=part)
        if finish is not None:
            finish_of(finish, expert).apply(part)


def multiplied_alone(x: torch.Tensor, w: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """x @ w and nothing else, for measurements."""
    y = x.new_empty(x.shape[0], w.shape[-1])
    multiply_rows(x, w, y, blocks, 0, x.shape[0], None)
    return y


def multiplied_by_expert(x: torch.Tensor, dz: torch.Tensor, dw: torch.Tensor, blocks: Sequence[Block]) -> None:
    """dw [experts, K, N]: of each expert the sum over its rows, x^T @ dz; 16-bit sums of several blocks in fp32."""
    wide = torch.float32 if dw.element_size() == 2 else dw.dtype
    total = torch.zeros_like(dw, dtype=wide)  # lies as dw does
    for row, rows, expert in segments(blocks, 0, x.shape[0]):
        with timeline.event("weight gradient", engine="compute", rows=rows):
            if is_transposed(dw):
                total[expert].t().add_(dz[row : row + rows].t() @ x[row : row + rows])
            else:
                total[expert] += x[row : row + rows].t() @ dz[row : row + rows]
    dw.copy_(total)


def bias_gradient(dz: torch.Tensor, blocks: Sequence[Block], experts: int) -> torch.Tensor:
    """[experts, N]: of each expert the sum of its rows of dz; 16-bit ones in fp32."""
    total = dz.new_zeros(experts, dz.shape[1], dtype=torch.float32 if dz.element_size() == 2 else dz.dtype)
    for row, rows, expert in segments(blocks, 0, dz.shape[0]):
        total[expert] += dz[row : row + rows].sum(0, dtype=total.dtype)
    return total.to(dz.dtype)


# -- what callers say of their rows ------------------------------------------------------------------------------------


def tokens_of(splits: Splits, group_sizes: GroupSizes, w: torch.Tensor, rows: int, group: Group) -> Tokens:
    """Rows of all ranks for all ranks, and experts where w has one weight for each."""
    if w.dim() != 3:
        if group_sizes is not None:
            was = f"given for one weight of shape {list(w.shape)}"
            raise InvalidArgument(argument="group_sizes", was=was, must="None, or w [experts, K, N]")
        return Tokens.of_splits(split_matrix(splits, rows, group))
    if splits is not None:
        must = "None where w has one weight for each expert: group_sizes says it"
        raise InvalidArgument(argument="splits", was="given", must=must)
    return Tokens.of(_all_sizes(group_sizes, w.shape[0], rows, group))


def _all_sizes(group_sizes: GroupSizes, experts: int, rows: int, group: Group) -> list[list[list[int]]]:
    size, rank = group.size, group.rank
    shape = f"{size} x {experts} counts, [rank][expert]"
    if group_sizes is None:
        must = f"{shape} of the {rows} rows of x, where w has one weight for each expert"
        raise InvalidArgument(argument="group_sizes", was="None", must=must)
    given: Any = listed(group_sizes)
    everyones = _depth(given) == 3
    mine = given[rank] if everyones and len(given) == size else given
    found = given if everyones else [mine]
    wrong = _depth(mine) != 2 or any(
        len(row) != size or any(len(block) != experts for block in row) for row in found
    )  # fmt: skip
    if wrong or (everyones and len(given) != size):
        was = f"nested as {_shape(given)}"
        raise InvalidArgument(argument="group_sizes", was=was, must=f"{shape}, or those of all {size} ranks")
    counts = [[counts_of("group_sizes", block) for block in row] for row in found]
    least = min((one for row in counts for block in row for one in block), default=0)
    own = counts[rank if everyones else 0]
    total = sum(map(sum, own))
    if least < 0 or total != rows:
        was = f"counts from {least} on that add up to {total}"
        must = f"counts of at least 0 that add up to {rows}, the rows of x"
        raise InvalidArgument(argument="group_sizes", was=was, must=must)
    if everyones:
        return counts
    told: list[list[list[int]]] = group.exchange(own, "how rows are split over experts")
    for other, row in enumerate(told):
        if len(row[0]) != experts:
            was = f"of {len(row[0])} experts on rank {other}"
            raise InvalidArgument(argument="w", was=was, must=f"of as many experts on all ranks: here {experts}")
    return told


def _depth(value: object) -> int:
    depth = 0
    while isinstance(value, Sequence) and not isinstance(value, str):
        depth += 1
        value = value[0] if value else None
    return depth


def _shape(value: object) -> list[int]:
    found = []
    while isinstance(value, Sequence) and not isinstance(value, str):
        found.append(len(value))
        value = value[0] if value else None
    return found


def split_matrix(splits: Splits, rows: int, group: Group) -> list[list[int]]:
    """splits[sender][destination] of all ranks."""
    size, rank = group.size, group.rank
    if splits is None:
        return [[stop - start for start, stop in split(rows, size)]] * size
    found = listed(splits)
    everyones = isinstance(found, Sequence) and any(isinstance(listed(row), Sequence) for row in found)
    matrix = [counts_of("splits", row) for row in found] if everyones else []
    mine = [] if everyones else counts_of("splits", found)
    if matrix:
        if len(matrix) != size or any(len(row) != size for row in matrix):
            was = f"{len(matrix)} rows of {[len(row) for row in matrix]} counts"
            raise InvalidArgument(argument="splits", was=was, must=f"a matrix of {size} x {size} counts")
        mine = matrix[rank]
    if len(mine) != size or min(min(row) for row in (mine, *matrix)) < 0 or sum(mine) != rows:
        must = f"{size} counts of at least 0 that add up to {rows}, the rows of x"
        raise InvalidArgument(argument="splits", was=str(matrix or mine), must=must)
    return matrix or group.exchange(mine, "how rows are split")


def flattened(tokens: Tokens) -> list[int]:
    """Sender after sender, in it receiver after receiver, in it expert after expert: as torch's operators carry it."""
    return [one for row in tokens.sizes for block in row for one in block]


def unflattened(counts: Sequence[int] | None, rows: int, size: int, experts: int) -> Tokens:
    """What `flattened` made; None: rows cut evenly."""
    if counts is None:
        return Tokens.of_splits([[stop - start for start, stop in split(rows, size)]] * size)
    if len(counts) != size * size * experts:
        name, whole = "splits", f"the matrix splits[sender][destination] of {size} x {size} counts"
        if experts > 1:
            name, whole = (
                "group_sizes",
                f"those of all ranks, [sender][rank][expert], {size} x {size} x {experts} counts",
            )
        must = f"{whole}: ranks are not asked while torch traces"
        raise InvalidArgument(argument=name, was=f"{len(counts)} counts", must=must)
    found = iter(counts)
    return Tokens.of([[[next(found) for _ in range(experts)] for _ in range(size)] for _ in range(size)])
