"""Fused matmuls on a CPU where there is no peer pointer: the last tile of a parcel posts it to the proxy's ring.

    sums      for tile of the rows of ranks r + 1, r + 2, ..., r:
                  product = x @ w; the last one of a parcel:
                      of another rank's rows: post it to that rank
                      own: wait for it from all; y = finish(sum over ranks); all_reduce: post the sum to all
              all_reduce: for parcel of another rank: wait for its sum; y = sum
    rows      for rank r - 1, r - 2, ...: post own rows, parcel after parcel
              for tile of own rows, then of ranks r + 1, ...: wait for the parcel, y = finish(x @ w)
    exchange  matmul_all_to_all: as sums, but what lands is y
    arrive    all_to_all_matmul: as rows, but each rank has rows of its own for each other one

What travels, and where it stands, is in `plan/posts.py`; whose turn the memory is in `posts.py`. The thread that
computes posts and goes on; the proxy's thread moves what it is told, in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..fabric import timeline
from ..plan import fused, fused_order
from ..plan.posts import Parcel, Passed, Rows, Sums, number_of, signal_of
from ..plan.tokens import Tokens, bands_of, leaving_table
from .finish import Finish
from .grouped import finish_of, weight_of
from .posts import Posts, Turn
from .tiles_cpu import add, multiply_tile, part_of

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..plan.plan import Plan
    from ..plan.problem import Problem
    from .beside import Taking


def sums(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: Fabric
) -> Callable[[], None]:
    """matmul_reduce_scatter, matmul_all_reduce."""
    assert plan.tile is not None
    rank, size, n = fabric.group.rank, fabric.group.size, problem.n
    broadcast = problem.operator == "matmul_all_reduce"
    shards = fused.owned(problem, plan)
    layout = Sums(shards, plan.tile[0], len(plan.parcels), n, broadcast)
    columns_of = -(-n // plan.tile[1])
    others = [(rank + step) % size for step in range(1, size)]
    posts = Posts.of(fabric, plan.lane)
    posts.room(layout.elements * x.element_size())

    def call() -> None:
        turn = posts.turn(x.dtype, layout.meets)
        if not n:
            return
        product = turn.rows(layout.product(0), layout.rows, n)
        left = {(o, at): one.bands * columns_of for o in range(size) for at, one in enumerate(layout.parcels[o])}

        def leave(owner: int, number: int) -> None:
            """A parcel of another rank's rows, complete."""
            one = layout.parcels[owner][number]
            source = layout.product(layout.first(owner) + one.row)
            turn.post(owner, source, layout.landing(owner, rank, one.row), one.rows * n, signal_of(rank, number))

        def add_up(number: int) -> None:
            """An own parcel, complete here."""
            one = layout.parcels[rank][number]
            first = layout.first(rank) + one.row
            parts = []
            for source in range(size):
                if source != rank:
                    turn.wait(signal_of(source, number), source)
                at = layout.product(first) if source == rank else layout.landing(rank, source, one.row)
                parts.append(turn.rows(at, one.rows, n))
            into = first if broadcast else one.row
            out = y[into : into + one.rows]
            with timeline.event("sum", engine="communication", bytes=out.nbytes):
                add(out, parts, finish, 0)
            if broadcast:
                at = layout.summed(first)
                turn.rows(at, one.rows, n).copy_(out)
                for to in others:
                    turn.post(to, at, at, one.rows * n, signal_of(rank, number, sums=True))

        table = fused_order.scatter_table(shards, n, plan, rank, broadcast).tolist()
        for row, rows, column, columns, shard_row, _, owner, _ in table:
            tile = part_of(product, row, rows, column, columns)
            multiply_tile(x[row : row + rows], w[:, column : column + columns], tile)
            number = layout.number(owner, shard_row)
            left[owner, number] -= 1
            if left[owner, number]:
                continue
            if owner == rank:
                add_up(number)
            else:
                leave(owner, number)
        for source in others if broadcast else ():
            for number, one in enumerate(layout.parcels[source]):
                turn.wait(signal_of(source, number, sums=True), source)
                first = layout.first(source) + one.row
                y[first : first + one.rows] = turn.rows(layout.summed(first), one.rows, n)

    return call


def rows(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    arriving: Taking | None,
) -> Callable[[], None]:
    """all_gather_matmul."""
    assert plan.tile is not None
    block_m, block_n = plan.tile
    rank, size, n, k = fabric.group.rank, fabric.group.size, problem.n, problem.k
    layout = Rows(problem.shards, block_m, len(plan.parcels), k)
    posts = Posts.of(fabric, plan.lane)
    posts.room(layout.elements * x.element_size())

    def call() -> None:
        turn = posts.turn(x.dtype, layout.meets)
        gathered = turn.rows(0, problem.m, k)
        own = layout.first(rank)
        gathered[own : own + x.shape[0]] = x
        if arriving is not None:
            arriving.begin(gathered)
        moves = k > 0
        for step in range(1, size if moves else 1):
            for number, one in enumerate(layout.parcels[rank]):
                at = layout.place(rank, one.row)
                turn.post((rank - step) % size, at, at, one.rows * k, signal_of(rank, number))
        bands = [-(-count // block_m) for count in problem.shards]
        lines = [sum(bands[:source]) for source in range(size)]
        table = iter(fused_order.rotated_table(problem.shards, n, plan, rank).tolist())
        here = _Landed(turn)
        for step in range(size):
            source = (rank + step) % size
            awaited = () if source == rank or not moves else layout.parcels[source]
            for _ in range(bands[source] * -(-n // block_n)):
                row, rows, column, columns, _, _, line, _ = next(table)
                here.wait(source, awaited, line - lines[source])
                first = row + (own if source == rank else 0)
                out = part_of(y, first, rows, column, columns)
                multiply_tile(gathered[first : first + rows], w[:, column : column + columns], out, finish, column)
            here.wait_all(source, awaited)  # also without columns: the call is over when all rows are here
            if arriving is not None:
                arriving.add([(layout.first(source), problem.shards[source])])

    return call


def exchange(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, tokens: Tokens, plan: Plan, finish: Finish, fabric: Fabric
) -> Callable[[], None]:
    """matmul_all_to_all. The sender finishes its rows."""
    assert plan.tile is not None
    rank, size, n = fabric.group.rank, fabric.group.size, w.shape[-1]
    block_m, columns_of = plan.tile[0], -(-n // plan.tile[1])
    layout = Passed(tokens, block_m, len(plan.parcels), n)
    others = [(rank + step) % size for step in range(1, size)]
    posts = Posts.of(fabric, plan.lane)
    posts.room(layout.elements * x.element_size())

    def call() -> None:
        turn = posts.turn(x.dtype, layout.meets)
        if not n:
            return
        product = turn.rows(0, x.shape[0], n)
        parcels = {to: layout.parcels(rank, to) for to in others}
        left = {(to, at): one.bands * columns_of for to in others for at, (one, _) in enumerate(parcels[to])}
        firsts = [tokens.lines(to, block_m)[rank] for to in range(size)]
        for row, rows, column, columns, place, _, whom, word in leaving_table(tokens, n, plan, rank).tolist():
            to, expert = whom % fused.LINE, whom // fused.LINE
            own = to == rank
            tile = (
                part_of(y, place // n, rows, column, columns) if own else part_of(product, row, rows, column, columns)
            )
            weight = weight_of(w, expert)[:, column : column + columns]
            multiply_tile(x[row : row + rows], weight, tile, finish_of(finish, expert), column)
            if own:
                continue
            number = number_of([one for one, _ in parcels[to]], word // columns_of - firsts[to])
            left[to, number] -= 1
            if not left[to, number]:
                one, there = parcels[to][number]
                source = layout.leaving(one.row)
                turn.post(to, source, layout.landing(there), one.rows * n, signal_of(rank, number))
        for source in reversed(others):  # about in the order in which it is sent
            for number, (one, there) in enumerate(layout.parcels(source, rank)):
                turn.wait(signal_of(source, number), source)
                y[there : there + one.rows] = turn.rows(layout.landing(there), one.rows, n)

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
    layout = Passed(tokens, block_m, len(plan.parcels), k)
    posts = Posts.of(fabric, plan.lane)
    posts.room(layout.elements * x.element_size())

    def call() -> None:
        turn = posts.turn(x.dtype, layout.meets)
        moves = k > 0
        turn.rows(0, x.shape[0], k).copy_(x)
        for step in range(1, size if moves else 1):
            to = (rank - step) % size
            for number, (one, there) in enumerate(layout.parcels(rank, to)):
                turn.post(
                    to, layout.leaving(one.row), layout.landing(there), one.rows * k, signal_of(rank, number)
                )  # fmt: skip
        if arriving is not None:
            arriving.begin(received)
        landed = turn.rows(layout.landing(0), received.shape[0], k)
        blocks, here = tokens.arriving(rank), _Landed(turn)
        for step in range(size):
            sender = (rank + step) % size
            own = sender == rank
            awaited = () if own or not moves else [one for one, _ in layout.parcels(sender, rank)]
            for number, band in enumerate(bands_of(blocks, block_m, sender)):
                which = slice(band.row, band.row + band.rows)
                here.wait(sender, awaited, number)
                received[which] = x[band.there : band.there + band.rows] if own else landed[which]
                multiply_tile(received[which], weight_of(w, band.expert), y[which], finish_of(finish, band.expert))
            if arriving is not None:
                first = sum(row[rank] for row in tokens.matrix[:sender])
                arriving.add([(first, tokens.matrix[sender][rank])])

    return call


class _Landed:
    """Which parcels of each source have been waited for, one after the other."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._until = turn, dict[int, int]()

    def wait(self, source: int, parcels: Sequence[Parcel], band: int) -> None:
        """Until the parcel of that band is here."""
        if parcels:
            self._reach(source, number_of(parcels, band) + 1)

    def wait_all(self, source: int, parcels: Sequence[Parcel]) -> None:
        self._reach(source, len(parcels))

    def _reach(self, source: int, until: int) -> None:
        for number in range(self._until.get(source, 0), until):
            self._turn.wait(signal_of(source, number), source)
            self._until[source] = number + 1
