"""Fused matmuls of rows that change ranks, on a CPU: stages, turns and words as in `fused_cpu.py`.

    exchange  matmul_all_to_all   for tile of the rows for all ranks, expert by expert:
                                      rows of the receiver (own: of y) = finish(x @ w[expert]); its word there = epoch
                                  for tile of the rows from other ranks: wait for its word; y = what arrived
    arrive    all_to_all_matmul   for band of the rows for other ranks: rows of the receiver = x; its word = epoch
                                  for band of own rows, then of those from ranks r + 1, ...:
                                      wait for its word; y = finish(rows @ w[expert])

Tables are those of the GPU kernels (`plan/tokens.py`); but what arrives is multiplied rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..plan.fused import LINE
from ..plan.tokens import Tokens, bands_of, collected_table, leaving_table, push_table
from .finish import Finish
from .fused_cpu import Turn, room
from .grouped import finish_of, weight_of
from .tiles_cpu import multiply_tile, part_of

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..plan.plan import Plan
    from .beside import Taking


def exchange(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, tokens: Tokens, plan: Plan, finish: Finish, fabric: Fabric
) -> Callable[[], None]:
    """matmul_all_to_all. The sender finishes its rows."""
    assert plan.tile is not None
    rank, n = fabric.group.rank, w.shape[-1]
    columns_of = -(-n // plan.tile[1])
    stage = room(fabric, "exchange", x.dtype, tokens.most * n, tokens.most_lines(plan.tile[0]) * columns_of)

    def call() -> None:
        turn = Turn(fabric.group, stage)
        for row, rows, column, columns, place, stride, whom, word in leaving_table(tokens, n, plan, rank).tolist():
            to, expert = whom % LINE, whom // LINE
            turn.open(to)
            whole = y.view(-1) if to == rank else turn.half(to)
            block = whole.as_strided((rows, columns), (stride, 1), whole.storage_offset() + place)
            weight = weight_of(w, expert)[:, column : column + columns]
            multiply_tile(x[row : row + rows], weight, block, finish_of(finish, expert), column)
            if to != rank:
                turn.tell(to, word)
        here = turn.slot(rank, 0, y.shape[0], n)
        for row, rows, column, columns, word, source, _, _ in collected_table(tokens, n, plan, rank).tolist():
            turn.wait(word, source)
            part_of(y, row, rows, column, columns).copy_(part_of(here, row, rows, column, columns))

    return call


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
) -> Callable[[], None]:
    """all_to_all_matmul: rows go to `received`, and are multiplied band by band."""
    assert plan.tile is not None
    block_m = plan.tile[0]
    rank, size, k = fabric.group.rank, fabric.group.size, x.shape[1]
    stage = room(fabric, "arrive", x.dtype, tokens.most * k, tokens.most_lines(block_m))

    def call() -> None:
        turn = Turn(fabric.group, stage)
        for row, rows, to, there, line, _, _, _ in push_table(tokens, plan, rank).tolist():
            turn.open(to)
            turn.half(to)[there * k : (there + rows) * k].view(rows, k).copy_(x[row : row + rows])
            turn.tell(to, line)
        if arriving is not None:
            arriving.begin(received)
        here = turn.slot(rank, 0, received.shape[0], k)
        blocks, lines = tokens.arriving(rank), tokens.lines(rank, block_m)
        for step in range(size):
            sender = (rank + step) % size
            for number, band in enumerate(bands_of(blocks, block_m, sender)):
                rows = slice(band.row, band.row + band.rows)
                if sender == rank:
                    received[rows] = x[band.there : band.there + band.rows]
                else:
                    turn.wait(lines[sender] + number, sender)
                    received[rows] = here[rows]
                multiply_tile(received[rows], weight_of(w, band.expert), y[rows], finish_of(finish, band.expert))
            if arriving is not None:
                first = sum(row[rank] for row in tokens.matrix[:sender])
                arriving.add([(first, tokens.matrix[sender][rank])])

    return call
