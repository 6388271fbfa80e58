"""The grid and its orders, against plain loops and against what the words promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_shapes import grids, planned, shards

from undertow.errors import InvalidArgument
from undertow.plan.plan import Plan, split
from undertow.plan.problem import Problem
from undertow.plan.tiles import TileGrid, chunks, launch_order


def signaled(grid: TileGrid, order: str, layout: str = "packed", parcels: int = 1, group_bands: int = 1) -> Plan:
    tile = grid.block_m, grid.block_n
    cut = split(grid.tiles, parcels)
    return Plan("signaled", "dma", cut, tile=tile, order=order, layout=layout, group_bands=group_bands)


@given(grids())
def test_bands_cover_each_shard_and_never_two(grid: TileGrid) -> None:
    reached = 0
    ends = {sum(grid.shards[:count]) for count in range(len(grid.shards) + 1)}
    for row, rows, shard in grid.bands.tolist():
        assert row == reached
        assert 1 <= rows <= grid.block_m
        assert sum(grid.shards[:shard]) <= row < row + rows <= sum(grid.shards[: shard + 1])
        assert rows == grid.block_m or row + rows in ends  # only a shard's last band is short
        reached += rows
    assert reached == grid.m
    assert grid.tiles == len(grid.bands) * grid.columns
    assert grid.waves(7) == -(-grid.tiles // 7)


@given(planned(), st.integers(0, 7))
def test_an_order_holds_every_tile_once_parcel_after_parcel(case: tuple[Problem, Plan], rank: int) -> None:
    problem, plan = case
    plan.check(problem)
    grid = problem.grid(plan)
    order = launch_order(grid, plan, rank % len(grid.shards))
    assert sorted(zip(order.band, order.column, strict=True)) == [
        (band, column) for band in range(len(grid.bands)) for column in range(grid.columns)
    ]
    assert np.all(np.diff(order.parcel) >= 0)
    if plan.order in ("natural", "interleaved"):  # a parcel is those positions
        assert order.tiles_of(len(plan.parcels)) == tuple(stop - start for start, stop in plan.parcels)


def test_a_group_of_bands_is_walked_column_by_column() -> None:
    grid = TileGrid(3, 4, 1, 1, (3,))
    order = launch_order(grid, signaled(grid, "natural", group_bands=2))
    expected = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert list(zip(order.band.tolist(), order.column.tolist(), strict=True)) == expected


def test_natural_groups_start_anew_with_each_parcel() -> None:
    grid = TileGrid(3, 2, 1, 1, (3,))
    plan = Plan("signaled", "net", ((0, 2), (2, 6)), tile=(1, 1), group_bands=2)
    order = launch_order(grid, plan)
    assert order.band.tolist() == [0, 0, 1, 2, 1, 2]
    assert order.column.tolist() == [0, 1, 0, 0, 1, 1]


@given(grids(), st.integers(1, 9), st.integers(1, 5))
def test_every_parcel_holds_its_share_of_every_shard(grid: TileGrid, group_bands: int, parcels: int) -> None:
    for order in ("interleaved", "proportional"):
        plan = signaled(grid, order, parcels=parcels, group_bands=group_bands)
        if not grid.tiles:
            continue
        found = launch_order(grid, plan)
        for number, (start, stop) in enumerate(plan.parcels):
            held = grid.bands[found.band[found.parcel == number], 2]
            for shard, bands in enumerate(grid.band_counts):
                fair = bands * grid.columns * (stop - start) / grid.tiles
                assert abs(np.count_nonzero(held == shard) - fair) < len(grid.shards) + 1


def test_equal_shards_take_turns() -> None:
    grid = TileGrid(8, 3, 1, 1, (2, 2, 2, 2))
    found = launch_order(grid, signaled(grid, "interleaved", group_bands=8))
    assert grid.bands[found.band, 2].tolist() == [0, 1, 2, 3] * 6
    assert found.column.tolist() == [0] * 8 + [1] * 8 + [2] * 8


def test_own_tiles_come_last_in_each_parcel() -> None:
    grid = TileGrid(12, 2, 1, 1, (4, 4, 4))
    for layout in ("natural", "packed"):
        plan = Plan(
            "signaled", "dma", ((0, 12), (12, 24)), tile=(1, 1), order="interleaved", layout=layout, own_last=True
        )
        found = launch_order(grid, plan, rank=1)
        for parcel in range(2):
            own = grid.bands[found.band[found.parcel == parcel], 2] == 1
            assert np.count_nonzero(own) == 4
            assert np.all(np.diff(own.astype(int)) >= 0)


@given(shards(), st.integers(1, 4), st.data())
def test_rotated_starts_at_home_and_goes_round(rows: tuple[int, ...], pieces: int, data: st.DataObject) -> None:
    grid = TileGrid(sum(rows), 5, 3, 2, rows)
    rank = data.draw(st.integers(0, len(rows) - 1))
    step = max(grid.band_counts) * grid.columns
    parcels = tuple((turn * step + a, turn * step + b) for turn in range(len(rows)) for a, b in split(step, pieces))
    plan = Plan("signaled", "dma", parcels, tile=(3, 2), order="rotated", group_bands=2)
    found = launch_order(grid, plan, rank)
    turns = (grid.bands[found.band, 2] - rank) % len(rows)
    assert np.all(np.diff(turns) >= 0)
    assert np.array_equal(found.parcel // pieces, turns)


@given(shards(), st.integers(1, 6))
def test_chunks_cover_each_shard_by_fraction(rows: tuple[int, ...], parts: int) -> None:
    total = sum(rows)
    cut = chunks(rows, Plan("chunked", "net", split(total, parts)))
    for shard, count in enumerate(rows):
        covered = [row for parcel in cut for row in range(parcel[shard][0], parcel[shard][0] + parcel[shard][1])]
        first = sum(rows[:shard])
        assert covered == list(range(first, first + count))
    whole = Plan("chunked", "net", split(total, parts))
    assert [one[0] for one in chunks((total,), whole)] == [(start, stop - start) for start, stop in whole.parcels]


def test_a_wrong_grid_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"shards is \[1, 2\], but must be rows that add up to 4"):
        TileGrid(4, 4, 1, 1, (1, 2))
    with pytest.raises(InvalidArgument, match="tile is 0 x 1"):
        TileGrid(4, 4, 0, 1, (4,))
