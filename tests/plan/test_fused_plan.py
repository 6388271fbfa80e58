"""Fused plans: every tile once, in the order that hides what it waits for; what is refused; what is predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_machines import VIRTUAL_NODE

from undertow.errors import InvalidArgument
from undertow.plan import fused
from undertow.plan.defaults import default_plan, fused_plan
from undertow.plan.machine import Machine
from undertow.plan.plan import Plan, Share
from undertow.plan.predict import predict
from undertow.plan.problem import Problem
from undertow.plan.search import fused_plans, ranked

MACHINE = Machine.from_dict(VIRTUAL_NODE)
SHARDS = ((5, 5, 5), (7, 0, 3, 1), (1, 1), (0, 9), (16, 16, 16, 16), (33, 2))
TILES = ((1, 1), (2, 3), (4, 16), (16, 5))


def problem(operator: str, m: int = 8192, n: int = 8192, k: int = 4096, **changes: object) -> Problem:
    made = Problem.of(operator, m, n, k, dtype="bfloat16", ranks=4, device="cuda", multiprocessors=33)
    return replace(made, **changes)  # type: ignore[arg-type]


def plan_of(tile: tuple[int, int], bands: int) -> Plan:
    return Plan("fused", "peer", ((0, 1),), tile=tile, group_bands=bands, own_last=True)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("bands", [1, 3, 8])
def test_every_element_is_computed_once_and_owned_by_one(
    shards: tuple[int, ...], tile: tuple[int, int], bands: int
) -> None:
    m, n = sum(shards), 13
    owners = np.repeat(np.arange(len(shards)), shards)
    lines = set()
    for rank in range(len(shards)):
        table = fused.scatter_table(shards, n, plan_of(tile, bands), rank, False)
        seen = np.zeros((m, n), int)
        for row, rows, column, columns, shard_row, line, owner, out_row in table.tolist():
            assert rows >= 1
            assert columns >= 1
            assert set(owners[row : row + rows]) == {owner}
            assert shard_row == out_row == row - sum(shards[:owner])
            seen[row : row + rows, column : column + columns] += 1
            lines.add((line, row, column))
        assert (seen == 1).all()
        order = list(dict.fromkeys(table[:, fused.OWNER].tolist()))
        wanted = [(rank + 1 + step) % len(shards) for step in range(len(shards))]
        assert order == [one for one in wanted if shards[one]]  # the following ranks' first, its own last
    assert len({line for line, _, _ in lines}) == len(lines)  # all ranks mean the same tile by a line


@pytest.mark.parametrize("shards", SHARDS)
def test_rows_are_gathered_own_first(shards: tuple[int, ...]) -> None:
    m, n, plan = sum(shards), 13, plan_of((4, 5), 2)
    for rank in range(len(shards)):
        table = fused.gather_table(shards, n, plan, rank)
        out = np.zeros(m * n, int)
        sources = []
        for row, rows, column, columns, place, stride, line, _ in table.tolist():
            first = place // n
            source = int(np.searchsorted(np.cumsum(shards), first, side="right"))
            sources.append(source)
            assert stride == n
            assert place % n == column
            assert row == first - (sum(shards[:rank]) if source == rank else 0)
            assert line == fused.first_line(shards, plan, source) + (first - sum(shards[:source])) // 4
            for down in range(rows):
                out[place + down * n : place + down * n + columns] += 1
        assert (out == 1).all()
        wanted = [(rank + step) % len(shards) for step in range(len(shards))]
        assert list(dict.fromkeys(sources)) == [one for one in wanted if shards[one]]


@pytest.mark.parametrize("m", [0, 1, 127, 128, 129, 1000, 8192])
def test_whole_bands_belong_to_ranks(m: int) -> None:
    rows = fused.owned(problem("matmul_all_reduce", m=m), plan_of((128, 256), 8))
    assert sum(rows) == m
    ends = np.cumsum(rows)
    assert all(end % 128 == 0 or end == m for end in ends)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32", "item_size": 4}, "multiply float16 and bfloat16, not float32"),
        ({"n": 8190}, "N is 8190, not a multiple of 8"),
        ({"ranks": 16, "shards": (512,) * 16}, "know 8 ranks, not 16"),
        ({"shards": (8192, 0, 0, 0)}, "a rank has no rows"),
    ],
)
def test_what_kernels_cannot_do_is_told(changes: dict[str, object], reason: str) -> None:
    asked = problem("matmul_reduce_scatter", **changes)
    assert reason in fused.why_not(asked, "peer")
    with pytest.raises(InvalidArgument, match=reason):
        plan_of((128, 256), 8).check(asked)
    assert fused_plans(asked) == []


def test_a_tile_needs_the_memory_of_its_owner() -> None:
    for lane in ("net", "dma"):
        assert "lane peer" in fused.why_not(problem("matmul_reduce_scatter"), lane)
        assert "lane peer" in fused.why_not(problem("matmul_reduce_scatter", device="cpu"), lane)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"parcels": ((0, 1), (1, 2))}, "parcels"),
        ({"tile": (32, 256)}, "tile"),
        ({"split": 1}, "split"),
        ({"piece": 16}, "piece"),
        ({"order": "rotated"}, "order"),
        ({"layout": "packed"}, "layout"),
        ({"own_last": True}, "own_last"),
        ({"share": Share(communication_priority=0)}, "share.communication_priority"),
    ],
)
def test_a_plan_that_no_kernel_has_is_refused(changes: dict[str, object], field: str) -> None:
    asked = problem("all_gather_matmul")
    plan = fused_plan(asked, "peer")
    plan.check(asked)
    with pytest.raises(InvalidArgument, match=rf"plan\.{field}"):
        replace(plan, **changes).check(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("m", [1, 16, 17, 64, 65])
def test_few_rows_go_to_all_at_once(m: int) -> None:
    asked = problem("matmul_all_reduce", m=m)
    plan = fused_plan(asked, "peer")
    plan.check(asked)
    assert (fused.form(asked, plan) == fused.DECODE) == (m <= 64)
    assert plan.tile is not None
    assert plan.tile[0] >= m or m > 64


@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul"])
@pytest.mark.parametrize("m", [4, 64, 512, 8192])
def test_the_planner_knows_fused_plans(operator: str, m: int) -> None:
    asked = problem(operator, m=m)
    found = {plan.name: seconds for plan, seconds in reversed(ranked(asked, MACHINE, ["peer"]))}
    assert "fused:peer" in found
    for plan in fused_plans(asked):
        plan.check(asked)
        said = predict(asked, plan, MACHINE)
        assert max(said.gemm, said.communication) <= said.total < 2 * (said.gemm + said.communication)
    serial = predict(asked, default_plan(asked, "serial", "peer"), MACHINE).total
    if m == 8192 and operator != "matmul_all_reduce":  # whose sums are copied once more
        assert found["fused:peer"].total < serial
    assert "fused:peer" not in {plan.name for plan, _ in ranked(asked, MACHINE, ["dma"])}


@pytest.mark.parametrize(
    ("operator", "m", "times"),
    [("matmul_reduce_scatter", 8192, 2 * 5 / 4), ("matmul_all_reduce", 8192, 2 * 5 / 4), ("matmul_all_reduce", 64, 16)],
)
def test_what_a_stage_takes_is_known(operator: str, m: int, times: float) -> None:
    """Slots of all ranks and sums, of both turns; of few rows packets of twice the bytes from every rank."""
    asked = problem(operator, m=m)
    assert fused.stage_bytes(asked, fused_plan(asked, "peer")) == times * asked.result_bytes
    gathers = problem("all_gather_matmul", m=m)
    assert fused.stage_bytes(gathers, fused_plan(gathers, "peer")) == 2 * m * gathers.k * 2


@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("m", [16, 8192])
def test_plans_do_not_depend_on_a_ranks_own_k(operator: str, device: str, m: int) -> None:
    plans = set()
    for k in (1, 30000, 32768, 32769, 34000, 524288, 524289, 1 << 24):
        asked = problem(operator, m=m, k=k, device=device)
        plans.add(fused_plan(asked, "peer"))
        for plan in plans:
            plan.check(asked)
    assert len(plans) == 1


@pytest.mark.parametrize("k", [8, 32768, 32776, 524288])
@pytest.mark.parametrize("n", [0, 5, 8192])
def test_whether_rows_are_gathered_does_not_depend_on_a_ranks_own_columns(k: int, n: int) -> None:
    asked = problem("all_gather_matmul", k=k)
    own = problem("all_gather_matmul", n=n, k=k)
    assert fused.why_not(own, "peer") == ""
    assert fused_plan(own, "peer") == fused_plan(asked, "peer")
    fused_plan(own, "peer").check(own)


def test_a_k_that_no_piece_fits_is_told() -> None:
    asked = problem("all_gather_matmul", k=524296)
    assert fused.why_not(asked, "peer") == "K is 524296, and the fused gather knows at most 524288"


@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul"])
def test_a_fused_plan_leaves_an_sm_to_others(operator: str) -> None:
    for plan in fused_plans(problem(operator)):
        assert plan.share.multiprocessors == 32  # of 33
