"""Reorder maps are bijections, packing and unpacking is the identity, and a wrong permutation is seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_shapes import ROWS, planned

from undertow.plan import reorder
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem
from undertow.plan.reorder import (
    COLUMN,
    COLUMNS,
    PARCEL,
    PLACE,
    arrivals,
    arriving_pieces,
    arriving_table,
    pack,
    parcel_tiles,
    pieces,
    received_pieces,
    tile_table,
    unpack,
    unpack_table,
)
from undertow.plan.tiles import Integers, TileGrid, launch_order

PACKING = ("matmul_all_reduce", "matmul_reduce_scatter", "matmul_all_to_all")


def numbered(rows: int, columns: int) -> Integers:
    return np.arange(rows * columns, dtype=np.int64).reshape(rows, columns)


def places_by_hand(grid: TileGrid, plan: Plan) -> dict[tuple[int, int], int]:
    """Where a packed buffer holds each (row, column): a plain walk over parcels, destinations, tiles."""
    order = launch_order(grid, plan)
    found, place = {}, 0
    destinations = [None] if plan.order == "natural" else range(len(grid.shards))
    for parcel, destination in itertools.product(range(len(plan.parcels)), destinations):
        for band, column, of_parcel in zip(order.band, order.column, order.parcel, strict=True):
            row, rows, shard = grid.bands[band].tolist()
            if of_parcel != parcel or destination not in (None, shard):
                continue
            for down in range(rows):
                for across in range(column * grid.block_n, min(grid.n, (column + 1) * grid.block_n)):
                    found[row + down, across] = place
                    place += 1
    return found


@given(planned(), st.integers(0, 7))
def test_packing_is_a_bijection_and_unpacking_its_inverse(case: tuple[Problem, Plan], rank: int) -> None:
    problem, plan = case
    grid = problem.grid(plan)
    matrix = numbered(grid.m, grid.n)
    table = tile_table(grid, plan, rank % len(grid.shards))
    assert table.shape == (grid.tiles, 8)
    assert table.dtype == np.int64
    buffer = pack(matrix, table)
    assert sorted(buffer.tolist()) == list(range(grid.m * grid.n))  # every element once
    assert np.array_equal(unpack(buffer, unpack_table(grid, plan), grid.m, grid.n), matrix)
    if plan.layout == "natural":
        assert np.array_equal(buffer, matrix.reshape(-1))


@given(planned())
def test_the_packed_places_are_those_of_a_plain_walk(case: tuple[Problem, Plan]) -> None:
    problem, plan = case
    if plan.layout == "natural":
        return
    grid = problem.grid(plan)
    buffer = pack(numbered(grid.m, grid.n), tile_table(grid, plan))
    base = Plan(**{**{name: getattr(plan, name) for name in plan.__slots__}, "own_last": False})
    for (row, column), place in places_by_hand(grid, base).items():
        assert buffer[place] == row * grid.n + column


def test_a_wrong_permutation_is_seen() -> None:
    grid = TileGrid(9, 7, 2, 3, (9,))
    plan = Plan("signaled", "dma", ((0, 4), (4, grid.tiles)), tile=(2, 3), group_bands=2, layout="packed")
    matrix = numbered(9, 7)
    buffer = pack(matrix, tile_table(grid, plan))
    wrong = unpack_table(grid, plan)
    same_size = [index for index in range(grid.tiles) if tuple(wrong[index, [reorder.ROWS, COLUMNS]]) == (2, 3)]
    first, second = same_size[:2]
    wrong[[first, second], PLACE] = wrong[[second, first], PLACE]
    assert not np.array_equal(unpack(buffer, wrong, 9, 7), matrix)


@settings(max_examples=60)
@given(planned(PACKING), st.integers(0, 7))
def test_pieces_are_contiguous_and_hold_what_the_destination_gets(case: tuple[Problem, Plan], rank: int) -> None:
    problem, plan = case
    grid = problem.grid(plan)
    rank %= len(grid.shards)
    table = tile_table(grid, plan, rank)
    buffer = pack(numbered(grid.m, grid.n), table)
    cut = pieces(grid, plan)
    covered: list[int] = []
    for parcel, destinations in enumerate(cut):
        for destination, (offset, count) in enumerate(destinations):
            first = 0 if plan.order == "natural" else grid.shard_rows[destination]
            rows = grid.m if plan.order == "natural" else grid.shards[destination]
            wanted = [
                (row + down) * grid.n + column + across
                for row, height, column, width, _, _, of_parcel, _ in table.tolist()
                if of_parcel == parcel and first <= row < first + rows
                for down in range(height)
                for across in range(width)
            ]
            held = buffer[offset : offset + count].tolist()
            assert sorted(held) == sorted(wanted)
            covered += held
    assert sorted(covered) == list(range(grid.m * grid.n))
    assert parcel_tiles(grid, plan, rank) == tuple(np.bincount(table[:, PARCEL], minlength=len(cut)).tolist())


@settings(max_examples=60)
@given(planned(("matmul_reduce_scatter",)))
def test_reduce_scatter_sums_pieces_and_each_rank_unpacks_its_shard(case: tuple[Problem, Plan]) -> None:
    problem, plan = case
    grid = problem.grid(plan)
    ranks = len(grid.shards)
    partial = [numbered(grid.m, grid.n) * (rank + 1) for rank in range(ranks)]
    buffers = [pack(partial[rank], tile_table(grid, plan, rank)) for rank in range(ranks)]
    total = sum(buffers)
    assert isinstance(total, np.ndarray)
    for rank in range(ranks):
        stream = np.full(grid.shards[rank] * grid.n, -1, dtype=np.int64)
        for sent, (offset, count) in zip(pieces(grid, plan), received_pieces(grid, plan, rank), strict=True):
            assert sent[rank][1] == count
            stream[offset : offset + count] = total[sent[rank][0] : sent[rank][0] + count]
        result = unpack(stream, unpack_table(grid, plan, rank), grid.shards[rank], grid.n)
        first = grid.shard_rows[rank]
        assert np.array_equal(result, sum(partial)[first : first + grid.shards[rank]])  # type: ignore[index]


@settings(max_examples=60)
@given(st.data(), st.integers(1, 5))
def test_all_to_all_from_the_matrix_of_splits(data: st.DataObject, ranks: int) -> None:
    """Every rank has other rows and the same plan; each computes from the splits what the others send it."""
    splits = [tuple(data.draw(ROWS) for _ in range(ranks)) for _ in range(ranks)]
    n, tile = 7, (data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([2, 4, 7])))
    bounds = sorted(data.draw(st.sets(st.integers(1, 29), max_size=4)) | {0, 30})
    plan = Plan(
        "signaled",
        "dma",
        tuple(itertools.pairwise(bounds)),
        tile=tile,
        order="proportional",
        layout=data.draw(st.sampled_from(["natural", "packed"])),
        group_bands=data.draw(st.integers(1, 6)),
        own_last=data.draw(st.booleans()),
    )
    grids = [TileGrid(sum(row), n, *tile, row) for row in splits]
    matrices = [numbered(grid.m, n) + 10_000 * sender for sender, grid in enumerate(grids)]
    buffers = [
        pack(matrix, tile_table(grid, plan, rank))
        for rank, (matrix, grid) in enumerate(zip(matrices, grids, strict=True))
    ]
    sent = [pieces(grid, plan) for grid in grids]
    for rank in range(ranks):
        rows = sum(row[rank] for row in splits)
        inbox = np.full(rows * n, -1, dtype=np.int64)
        for parcel, senders in enumerate(arriving_pieces(splits, n, plan, rank)):
            for sender, (offset, count) in enumerate(senders):
                start, sent_count = sent[sender][parcel][rank]
                assert sent_count == count
                inbox[offset : offset + count] = buffers[sender][start : start + count]
        expected = np.concatenate(
            [matrices[sender][grids[sender].shard_rows[rank] :][: splits[sender][rank]] for sender in range(ranks)]
        )
        assert np.array_equal(unpack(inbox, arriving_table(splits, n, plan, rank), rows, n), expected)


@settings(max_examples=60)
@given(planned(("all_gather_matmul",)))
def test_every_row_arrives_once_and_before_the_tiles_that_read_it(case: tuple[Problem, Plan]) -> None:
    problem, plan = case
    plan.check(problem)
    grid = problem.grid(plan)
    ranks = len(grid.shards)
    for rank in range(ranks):
        came = arrivals(grid, plan, rank)
        rows = [row for one in came for row in range(one.row, one.row + one.rows)]
        assert sorted(rows) == list(range(grid.m))
        table = tile_table(grid, plan, rank)
        for row, height, _, _, _, _, parcel, _ in table.tolist():
            one = came[parcel]
            assert one.row <= row
            assert row + height <= one.row + one.rows
        for parcel, one in enumerate(came):  # the source sends in the same parcel, to this rank, this piece
            step = (one.source - rank) % ranks
            assert (arrivals(grid, plan, (one.source - step) % ranks)[parcel].source - rank) % ranks == step


@pytest.mark.parametrize("layout", ["natural", "packed"])
def test_the_columns_of_a_table(layout: str) -> None:
    grid = TileGrid(3, 5, 2, 4, (3,))
    plan = Plan("signaled", "net", ((0, 2), (2, 4)), tile=(2, 4), layout=layout)
    stride, narrow = (5, 5) if layout == "natural" else (4, 1)
    places = [0, 4, 10, 14] if layout == "natural" else [0, 8, 10, 14]
    expected = [
        [0, 2, 0, 4, places[0], stride, 0, 0],
        [0, 2, 4, 1, places[1], narrow, 0, 0],
        [2, 1, 0, 4, places[2], stride, 1, 0],
        [2, 1, 4, 1, places[3], narrow, 1, 0],
    ]
    assert tile_table(grid, plan).tolist() == expected
    assert unpack_table(grid, plan)[:, COLUMN].tolist() == [0, 4, 0, 4]
