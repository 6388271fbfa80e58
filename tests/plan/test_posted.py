"""Where slices that are posted are pooled and land: every value once, none over another, in memory that all share."""

from __future__ import annotations

import itertools
import random

import pytest

from undertow.plan.bags import Layout, Piece, Posted, kernel_shape, slices
from undertow.plan.plan import SLICES, Plan, split


def drawn(seed: int) -> tuple[Posted, Plan]:
    """Tables of any rank, some cut by rows or columns, so that a rank's columns stand apart in the result."""
    chance = random.Random(seed)
    size = chance.randint(1, 5)
    pieces: list[list[Piece]] = [[] for _ in range(size)]
    for table in range(chance.randint(1, 7)):
        dim, rows = chance.randint(2, 9), chance.randint(2, 9)
        kind = chance.choice(("whole", "rows", "columns"))
        first, second = (chance.randrange(size) for _ in range(2))
        if kind == "whole":
            pieces[first].append(Piece(table, rows, dim))
        elif kind == "rows":
            pieces[first].append(Piece(table, rows - 1, dim))
            pieces[second].append(Piece(table, 1, dim, first_row=rows - 1))
        else:
            pieces[first].append(Piece(table, rows, dim - 1))
            pieces[second].append(Piece(table, rows, 1, first_column=dim - 1))
    batches = tuple(chance.choice((0, 1, 4, 7)) for _ in range(size))
    samples = max(1, sum(batches))
    plan = Plan("fused", "dma", split(samples, chance.randint(1, min(5, samples))), order=SLICES, own_last=True)
    return Posted(Layout(tuple(map(tuple, pieces))), batches, chance.choice((2, 4))), plan


@pytest.mark.parametrize("seed", range(60))
def test_every_value_is_brought_once(seed: int) -> None:
    """Slices of all ranks are moved as the proxies would, then arrivals bring them: each result is complete."""
    posted, plan = drawn(seed)
    layout, size, item = posted.layout, len(posted.batches), posted.item_size
    landed: list[dict[int, tuple[int, int, int]]] = [{} for _ in range(size)]  # byte -> (source, sample, its column)
    for rank in range(size):
        pooled = set()
        for one in slices(posted.batches, plan, rank) if layout.sent[rank] else ():
            if one.destination == rank:
                continue
            width = layout.sent[rank]
            for row, column in itertools.product(range(one.bags), range(width)):
                at = (row * width + column) * item
                here, there = posted.source(rank, one.first) + at, posted.place(one.destination, rank, one.row) + at
                assert 0 <= here < posted.sending <= there < posted.nbytes
                assert here not in pooled
                assert there not in landed[one.destination], "one slice lands on another"
                pooled.add(here)
                landed[one.destination][there] = rank, one.first + row, column
    for rank in range(size):
        sources = [one for one in range(size) if one != rank and layout.sent[one]]
        result: dict[tuple[int, int], tuple[int, int, int]] = {}
        for one in posted.arrivals(plan, rank, sources):
            place = posted.place(rank, one.source, one.row)
            for row, column in itertools.product(range(one.rows), range(one.columns)):
                at = place + (row * layout.sent[one.source] + one.by + column) * item
                assert (one.row + row, one.to + column) not in result
                result[one.row + row, one.to + column] = landed[rank].pop(at)
        assert not landed[rank], "all that lands is brought"
        wanted = {
            (row, to + column): (source, sum(posted.batches[:rank]) + row, by + column)
            for source in sources
            for by, to, columns in layout.runs(source)
            for row, column in itertools.product(range(posted.batches[rank]), range(columns))
        }
        assert result == wanted
    assert posted.sending % 128 == posted.nbytes % 128 == 0
    assert posted.meets == (all(layout.sent) and all(posted.batches))


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_the_columns_of_the_pieces(seed: int) -> None:
    layout = drawn(seed)[0].layout
    for rank, pieces in enumerate(layout.held):
        flat = [(by + k, to + k) for by, to, columns in layout.runs(rank) for k in range(columns)]
        firsts = [sum(one.dim for one in pieces[:number]) for number in range(len(pieces))]
        assert flat == [
            (first + k, to + k)
            for piece, first, to in zip(pieces, firsts, layout.columns[rank], strict=True)
            for k in range(piece.dim)
        ]


def test_a_kernel_that_posts_has_more_registers_and_fewer_ctas() -> None:
    shapes = {
        lane: kernel_shape(Plan("fused", lane, ((0, 4),), tile=(4, 128), group_bands=4, order=SLICES), 4)
        for lane in ("peer", "dma", "net")
    }
    assert (shapes["peer"].registers, shapes["peer"].ctas) == (64, 8)
    assert (shapes["dma"].registers, shapes["dma"].ctas) == (shapes["net"].registers, shapes["net"].ctas) == (72, 7)
