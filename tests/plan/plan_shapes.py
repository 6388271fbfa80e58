"""Odd shapes and plans for them, for the property tests of this folder."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from undertow.plan.plan import OPERATORS, Plan
from undertow.plan.problem import Problem
from undertow.plan.tiles import TileGrid

ROWS = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 37, 64])


@st.composite
def shards(draw: st.DrawFn, most: int = 8) -> tuple[int, ...]:
    return tuple(draw(st.lists(ROWS, min_size=1, max_size=most)))


@st.composite
def grids(draw: st.DrawFn) -> TileGrid:
    rows = draw(shards())
    blocks = st.sampled_from([1, 2, 3, 8, 16])
    return TileGrid(sum(rows), draw(st.sampled_from([1, 2, 5, 16, 29])), draw(blocks), draw(blocks), rows)


@st.composite
def planned(draw: st.DrawFn, operators: tuple[str, ...] = tuple(OPERATORS)) -> tuple[Problem, Plan]:
    """A problem and a signaled plan that its `check` accepts."""
    operator = draw(st.sampled_from(operators))
    rows = draw(shards())
    if operator == "matmul_all_reduce":
        rows = (sum(rows),)
    grid = draw(grids())
    problem = Problem.of(
        operator,
        sum(rows),
        grid.n,
        3,
        dtype="float32",
        ranks=len(rows) if operator != "matmul_all_reduce" else 4,
        device="cpu",
        multiprocessors=2,
        shards=rows,
    )
    order = OPERATORS[operator]
    layout = "natural" if order == "rotated" else draw(st.sampled_from(["natural", "packed"]))
    sized = TileGrid(problem.m, problem.n, grid.block_m, grid.block_n, rows)
    if order == "rotated":
        step = max(sized.band_counts) * sized.columns
        extent, fixed = step * len(rows), {step * turn for turn in range(len(rows))}
    elif order == "proportional":
        extent, fixed = draw(st.integers(1, 100)), set()
    else:
        extent, fixed = sized.tiles, set()
    unit = sized.columns if layout == "natural" and order in ("natural", "interleaved") else 1
    cuts = draw(st.sets(st.integers(0, extent // unit).map(lambda cut: cut * unit), max_size=6))
    bounds = sorted(cuts | fixed | {0, extent})
    plan = Plan(
        "signaled",
        "dma",
        tuple(itertools.pairwise(bounds)) or ((0, 0),),
        tile=(grid.block_m, grid.block_n),
        group_bands=draw(st.integers(1, 9)),
        order=order,
        own_last=draw(st.booleans()),
        layout=layout,
    )
    return problem, plan
