"""Plans of few rows: sent to all ranks at once, or summed by owners of columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_machines import VIRTUAL_NODE

from undertow.errors import InvalidArgument
from undertow.plan import fused, fused_order
from undertow.plan.defaults import few_row_forms, fused_plan
from undertow.plan.machine import Machine
from undertow.plan.plan import Plan, Share
from undertow.plan.problem import Problem
from undertow.plan.search import fused_plans, ranked
from undertow.plan.tuner import short_list

MACHINE = Machine.from_dict(VIRTUAL_NODE)


def problem(m: int, n: int = 8192, k: int = 4096, multiprocessors: int = 33) -> Problem:
    return Problem.of(
        "matmul_all_reduce", m, n, k, dtype="bfloat16", ranks=4, device="cuda", multiprocessors=multiprocessors
    )


def plan_of(tile: tuple[int, int]) -> Plan:
    return Plan("fused", "peer", ((0, 1),), tile=tile, own_last=True)


@pytest.mark.parametrize(("m", "form"), [
    (1, fused.DECODE), (16, fused.DECODE), (17, fused.OWNED), (64, fused.OWNED), (65, fused.SCATTER),
])  # fmt: skip
def test_few_rows_go_to_all_at_once_or_to_owners_of_columns(m: int, form: str) -> None:
    asked = problem(m)
    plan = fused_plan(asked, "peer")
    plan.check(asked)
    assert fused.form(asked, plan) == form
    assert plan.tile is not None
    assert plan.tile[0] >= m or m > 64
    assert plan.ahead == 0
    assert Plan.from_json(plan.to_json()) == plan


def test_the_other_exchange_of_few_rows_is_tried() -> None:
    for m in (1, 16, 64):
        asked = problem(m)
        found = fused_plans(asked)
        for plan in found:
            plan.check(asked)
        assert {fused.form(asked, plan) for plan in found} == set(fused.OF_FEW_ROWS)
        assert len({plan.tile for plan in found}) >= 2


@pytest.mark.parametrize(("multiprocessors", "n", "columns", "split"), [
    (33, 8192, 64, 1), (33, 2048, 32, 1), (16, 8192, 64, 1), (132, 8192, 32, 1), (132, 2048, 32, 2),
])  # fmt: skip
def test_few_rows_have_a_cta_for_every_sm(multiprocessors: int, n: int, columns: int, split: int) -> None:
    """Blocks of columns are so narrow that every SM has one; where half of them have none, K in two parts is tried."""
    one, asked = (problem(m, n, 1024, multiprocessors) for m in (1, 2))
    plan = fused_plan(asked, "peer")
    assert plan.tile == (16, columns)
    assert fused_plan(one, "peer").tile == fused.ROW_TILE
    tried = fused_plans(asked)
    for one in tried:
        one.check(asked)
    assert max(one.split for one in tried) == split


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [8, 13, 200])
def test_every_block_of_columns_belongs_to_a_rank(ranks: int, n: int) -> None:
    """All ranks mean the same by a line; a rank computes the following ranks' blocks first, its own last."""
    plan = replace(plan_of((5, 4)), owners="columns")
    blocks = -(-n // 4)
    for rank in range(ranks):
        table = fused_order.column_table(5, n, plan, ranks, rank)
        seen = np.zeros(n, int)
        for row, rows, column, columns, shard_row, line, owner, out_row in table.tolist():
            assert (row, rows, shard_row, out_row) == (0, 5, 0, 0)
            assert (column, owner) == (4 * line, line % ranks)
            seen[column : column + columns] += 1
        assert (seen == 1).all()
        order = list(dict.fromkeys(table[:, fused_order.OWNER].tolist()))
        assert order == [one for one in ((rank + 1 + step) % ranks for step in range(ranks)) if one < blocks]


@pytest.mark.parametrize("n", [8, 200, 8192])
@pytest.mark.parametrize("tile", fused.DECODE_TILES)
@pytest.mark.parametrize("working", [1, 2, 3, 16, 132])
def test_no_more_small_ctas_wait_than_there_are_sms(tile: tuple[int, int], working: int, n: int) -> None:
    """Each piece has a CTA; where SMs are bounded, all of them together have one each at most, but one of either."""
    asked = problem(1, n)
    plan = replace(fused_plan(asked, "peer"), tile=tile, split=2)
    pieces = 2 * -(-n // tile[1])
    multiplying, summing = fused.small_ctas(asked, plan, tile, working, False)
    assert multiplying == pieces
    assert 1 <= summing <= working
    multiplying, summing = fused.small_ctas(asked, plan, tile, working, True)
    assert 1 <= multiplying <= pieces
    assert summing >= 1
    assert multiplying + summing <= max(2, working)
    assert fused.small_ctas(asked, plan, tile, 0, True) == (0, 0)
    usual = fused.small_ctas(asked, replace(plan, share=Share()), tile, working, False)
    assert usual == (pieces, min(working, fused.SUMMING))


@pytest.mark.parametrize("n", [2048, 8192])
@pytest.mark.parametrize("m", [1, 4, 16, 64])
def test_the_usual_plan_of_few_rows_is_measured(m: int, n: int) -> None:
    asked = problem(m, n, 1024)
    candidates = [plan for plan, _ in ranked(asked, MACHINE, ["peer"])]
    assert fused_plan(asked, "peer") in short_list(candidates)


def test_few_rows_that_are_sent_at_once_do_not_ask_ahead() -> None:
    asked = problem(1)
    for way, form in few_row_forms(asked).items():
        plan = replace(fused_plan(asked, "peer"), **form, ahead=512)
        if way == "owners":
            plan.check(asked)
        else:
            with pytest.raises(InvalidArgument, match=r"plan\.ahead"):
                plan.check(asked)


@pytest.mark.parametrize("tile", fused.OWNED_TILES)
@pytest.mark.parametrize("ahead", [0, 512])
def test_tiles_of_few_rows_fill_half_an_sm_or_all_of_it(tile: tuple[int, int], ahead: int) -> None:
    plan = replace(plan_of(tile), ahead=ahead)
    step, stages = fused.owned_step(plan, True), fused.owned_stages(plan, True)
    held = 2 * (tile[0] + tile[1]) * step * (stages - (tile[0] < 64))
    assert held + 2 * tile[0] * tile[1] <= (fused.HALF_SHARED if ahead else fused.ALL_SHARED)
    assert held >= 64 << 10  # bytes under way
    assert fused.owned_stages(plan, False) == 4
