"""Fused plans: every tile once, in the order that hides what it waits for; what is refused; what is predicted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from plan_machines import VIRTUAL_NODE

from undertow.errors import InvalidArgument
from undertow.plan import chain, fused, fused_order
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
        table = fused_order.scatter_table(shards, n, plan_of(tile, bands), rank, False)
        seen = np.zeros((m, n), int)
        for row, rows, column, columns, shard_row, line, owner, out_row in table.tolist():
            assert rows >= 1
            assert columns >= 1
            assert set(owners[row : row + rows]) == {owner}
            assert shard_row == out_row == row - sum(shards[:owner])
            seen[row : row + rows, column : column + columns] += 1
            lines.add((line, row, column))
        assert (seen == 1).all()
        order = list(dict.fromkeys(table[:, fused_order.OWNER].tolist()))
        wanted = [(rank + 1 + step) % len(shards) for step in range(len(shards))]
        assert order == [one for one in wanted if shards[one]]  # the following ranks' first, its own last
    assert len({line for line, _, _ in lines}) == len(lines)  # all ranks mean the same tile by a line


def test_a_scatter_of_few_rows_streams_weights_twice() -> None:
    """Once for all others' bands together, once for its own."""
    asked = problem("matmul_reduce_scatter", m=512)
    plan = fused_plan(asked, "peer")
    table = fused_order.scatter_table(asked.shards, asked.n, plan, 0, False)
    columns = table[:, fused_order.COLUMN].tolist()
    streams = 1 + sum(later < earlier for earlier, later in itertools.pairwise(columns))
    assert streams == 2
    assert table[:3, fused_order.OWNER].tolist() == [1, 2, 3]


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("n", [1, 13])
@pytest.mark.parametrize(("ctas", "loaders"), [(None, 1), (4, 1), (4, 2), (4, 4), (9, 2), (2, 30)])
def test_every_tile_is_gathered_once_from_where_its_rows_are(
    shards: tuple[int, ...], n: int, ctas: int | None, loaders: int
) -> None:
    plan = replace(plan_of((4, 5), 2), share=Share(ctas, loaders))
    for rank in range(len(shards)):
        for table in (
            fused_order.gather_table(shards, n, plan, rank),
            fused_order.rotated_table(shards, n, plan, rank),
        ):
            out = np.zeros(sum(shards) * n, int)
            for row, rows, column, columns, place, stride, line, _ in table.tolist():
                first = place // n
                source = int(np.searchsorted(np.cumsum(shards), first, side="right"))
                assert (stride, place % n) == (n, column)
                assert row == first - (sum(shards[:rank]) if source == rank else 0)
                own_line = fused_order.first_line(shards, plan, source) + (first - sum(shards[:source])) // 4
                assert line == own_line or (line == fused_order.OWN and source == rank)
                for down in range(rows):
                    out[place + down * n : place + down * n + columns] += 1
            assert (out == 1).all()
        lines = fused_order.gather_table(shards, n, plan, rank)[:, fused_order.BAND_LINE]
        mine = -(-shards[rank] // 4) * -(-n // 5)
        assert (lines == fused_order.OWN).sum() == mine
        early = fused_order.early_tiles(shards, n, plan, rank)
        assert early <= mine
        assert (lines[:early] == fused_order.OWN).all()


@pytest.mark.parametrize("shards", SHARDS)
def test_a_thread_gathers_shard_by_shard(shards: tuple[int, ...]) -> None:
    n, plan = 13, plan_of((4, 5), 2)
    for rank in range(len(shards)):
        places = fused_order.rotated_table(shards, n, plan, rank)[:, fused_order.PLACE] // n
        sources = np.searchsorted(np.cumsum(shards), places, side="right").tolist()
        wanted = [(rank + step) % len(shards) for step in range(len(shards))]
        assert list(dict.fromkeys(sources)) == [one for one in wanted if shards[one]]


@pytest.mark.parametrize("shards", SHARDS)
def test_a_band_is_pushed_to_all_at_once_and_to_where_tiles_wait_for_it(shards: tuple[int, ...]) -> None:
    ranks, plan = len(shards), plan_of((4, 5), 2)
    arrived: list[dict[int, tuple[int, int]]] = [{} for _ in range(ranks)]
    for rank in range(ranks):
        for row, rows, first, into, line, copies, told, heard in fused_order.push_table(shards, plan, rank).tolist():
            assert into == sum(shards[:rank]) + row
            to = [(first - step) % ranks for step in range(copies)]
            assert to == [(rank - step) % ranks for step in range(1, ranks)]  # nearest first, and not to itself
            assert set(to) <= set(range(told, told + heard)) <= set(range(ranks))
            for one in to:
                assert line not in arrived[one]
                arrived[one][line] = into, rows
    for rank in range(ranks):
        found = fused_order.gather_table(shards, 13, plan, rank)
        waiting = {line: (row, rows) for row, rows, *_, line, _ in found.tolist() if line != fused_order.OWN}
        assert waiting == arrived[rank]
    assert len(fused_order.push_table((9,), plan, 0)) == 0


@pytest.mark.parametrize("shards", SHARDS)
def test_pulled_rows_are_where_their_owner_keeps_them(shards: tuple[int, ...]) -> None:
    """The same tiles in the same order, of rows that their owner stored once, and told everybody of."""
    pushed = replace(plan_of((4, 5), 2), share=Share(4, 4))
    plan, ranks = replace(pushed, pull=True), len(shards)
    kept: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in range(ranks):
        for row, rows, to, into, line, copies, told, heard in fused_order.push_table(shards, plan, rank).tolist():
            assert (to, into, copies, told, heard) == (rank, row, 1, 0, ranks)
            kept[rank, line] = row, rows
    for rank in range(ranks):
        table, other = (fused_order.gather_table(shards, 13, one, rank) for one in (plan, pushed))
        assert (table[:, 1:7] == other[:, 1:7]).all()
        for row, rows, _, _, place, _, line, source in table.tolist():
            assert row == place // 13 - sum(shards[:source])
            assert line == fused_order.OWN if source == rank else kept[source, line] == (row, rows)


def test_tiles_come_as_their_rows_arrive() -> None:
    """Own bands, then the first of each rank, nearest first, then the second of each: as all push in step."""
    shards, plan = (12, 8, 4), replace(plan_of((4, 5), 8), share=Share(4, 4))
    lines = fused_order.gather_table(shards, 5, plan, 1)[:, fused_order.BAND_LINE].tolist()
    assert lines == [fused_order.OWN, fused_order.OWN, 5, 0, 1, 2]
    in_pairs = fused_order.gather_table(shards, 10, replace(plan, group_bands=2), 1)
    wanted = [(-1, 0), (-1, 0), (-1, 5), (-1, 5), (5, 0), (0, 0), (5, 5), (0, 5), (1, 0), (2, 0), (1, 5), (2, 5)]
    assert in_pairs[:, [fused_order.BAND_LINE, fused_order.COLUMN]].tolist() == [list(one) for one in wanted]


@pytest.mark.parametrize("m", [512, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("n", [2560, 14336])
@pytest.mark.parametrize("ranks", [4, 8])
def test_weights_are_streamed_as_often_as_by_the_matmul_alone(m: int, n: int, ranks: int) -> None:
    """Once for each group of bands, and again for the columns of early tiles: less than half of them."""
    asked = Problem.of("all_gather_matmul", m, n, 64, dtype="bfloat16", ranks=ranks, device="cuda", multiprocessors=33)
    plan = fused_plan(asked, "peer")
    assert plan.tile is not None
    bands, columns = ranks * -(-m // ranks // plan.tile[0]), -(-n // plan.tile[1])
    for rank in (0, ranks - 1):
        table = fused_order.gather_table(asked.shards, n, plan, rank)
        early = fused_order.early_tiles(asked.shards, n, plan, rank)
        column = table[:, fused_order.COLUMN]
        streamed = np.count_nonzero(np.diff(column[early:])) + 1
        assert streamed == -(-bands // plan.group_bands) * columns
        again = np.unique(column[:early])
        assert len(again) <= max(columns / 2, early / (bands // ranks) + 1)


@pytest.mark.parametrize(
    ("m", "loaders", "piece", "early"),
    [(256, 32, 256, 0), (512, 32, 256, 0), (1024, 32, 256, 0), (2048, 16, 1024, 16), (4096, 8, 1024, 0)],
)
def test_the_fewer_rows_the_more_push_them_and_the_less_is_computed_meanwhile(
    m: int, loaders: int, piece: int, early: int
) -> None:
    asked = problem("all_gather_matmul", m=m, n=14336, k=8192)
    plan = fused_plan(asked, "peer")
    plan.check(asked)
    assert (plan.share, plan.piece) == (Share(32, loaders), piece)
    assert {fused_order.early_tiles(asked.shards, 14336, plan, rank) for rank in range(4)} == {early}
    assert fused_plan(replace(asked, bulk=False), "peer").piece == 1024
    few = fused_order.early_tiles(asked.shards, 256, plan, 0)  # there are no more own tiles than bands
    assert few == min(early, m // 4 // 128)


@pytest.mark.parametrize("k", [8, 1000, 8192, 12288, 32768, 524288])
@pytest.mark.parametrize(("bands", "loaders"), [(1, 0), (1, 32), (2, 16), (16, 5)])
def test_parts_are_enough_for_those_who_push_and_fit_a_line(k: int, bands: int, loaders: int) -> None:
    piece = fused.piece_of(k, bands, loaders)
    assert piece in (256 << one for one in range(7))
    assert -(-k // piece) <= fused.LINE
    if bands * -(-k // piece) < 2 * loaders:
        assert piece == 256 or -(-k // (piece // 2)) > fused.LINE
    elif piece < 1024:
        assert bands * -(-k // (2 * piece)) < 2 * loaders
    assert fused.piece_of(k) >= 1024


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
        ({"ranks": 16, "shards": (512,) * 16}, "know 8 ranks over lane peer, not 16"),
        ({"shards": (8192, 0, 0, 0)}, "a rank has no rows"),
    ],
)
def test_what_kernels_cannot_do_is_told(changes: dict[str, object], reason: str) -> None:
    asked = problem("matmul_reduce_scatter", **changes)
    assert reason in fused.why_not(asked, "peer")
    with pytest.raises(InvalidArgument, match=reason):
        plan_of((128, 256), 8).check(asked)
    assert fused_plans(asked) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("lane", ["net", "dma"])
def test_what_is_posted_has_a_plan_for_any_number_of_ranks(lane: str, device: str) -> None:
    for operator in ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_to_all"):
        parts = 1 if operator == "matmul_all_reduce" else 16
        asked = problem(operator, ranks=16, shards=(8192 // parts,) * parts, device=device)
        plan = fused_plan(asked, lane)
        plan.check(asked)
        assert (plan.split, plan.owners, plan.pull, plan.order) == (0, "rows", False, "natural")
        assert plan.own_last == (operator != "all_gather_matmul")
        few = problem(operator, m=16, ranks=16, shards=(16 // parts,) * parts, device=device)
        fused_plan(few, lane).check(few)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"parcels": ((0, 1), (1, 2))}, "parcels"),
        ({"tile": (32, 256)}, "tile"),
        ({"split": 1}, "split"),
        ({"owners": "columns"}, "owners"),
        ({"owners": "both"}, "owners"),
        ({"ahead": 256}, "ahead"),
        ({"piece": 16}, "piece"),
        ({"order": "interleaved"}, "order"),
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


def test_only_a_gpu_pulls_and_only_rows() -> None:
    for operator, device in (("all_gather_matmul", "cpu"), ("matmul_reduce_scatter", "cuda")):
        asked = problem(operator, device=device)
        assert not fused_plan(replace(asked, together=device == "cuda"), "peer").pull
        with pytest.raises(InvalidArgument, match=r"plan\.pull"):
            replace(fused_plan(asked, "peer"), pull=True).check(asked)


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
    [
        ("matmul_reduce_scatter", 8192, 2 * 5 / 4),
        ("matmul_all_reduce", 8192, 2 * 5 / 4),
        ("matmul_all_reduce", 4, 16),
        ("matmul_all_reduce", 64, 4),
    ],
)
def test_what_a_stage_takes_is_known(operator: str, m: int, times: float) -> None:
    """Slots of all ranks and sums, of both turns; of few rows packets of twice the bytes from every rank, or parts of
    own columns from every rank, and sums of all."""
    asked = problem(operator, m=m)
    assert fused.stage_bytes(asked, fused_plan(asked, "peer")) == times * asked.result_bytes
    gathers = problem("all_gather_matmul", m=m)
    assert fused.stage_bytes(gathers, fused_plan(gathers, "peer")) == 2 * m * gathers.k * 2
    pulls = replace(gathers, together=True)
    assert fused_plan(pulls, "peer").pull
    assert fused.stage_bytes(pulls, fused_plan(pulls, "peer")) == 2 * m // 4 * gathers.k * 2
    assert fused.stage_bytes(pulls, fused_plan(pulls, "peer"), stays=True) == m * gathers.k * 2


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
def test_a_fused_plan_whose_tiles_wait_leaves_an_sm_to_others(operator: str) -> None:
    """Who multiplies for others to sum waits for nobody, and all but one do."""
    for plan in fused_plans(problem(operator)):
        if operator == "all_gather_matmul":
            assert fused.multiplying(plan.share.multiprocessors or 33, plan) <= 32  # of 33
            assert plan.share.multiprocessors == 32 or fused.brought(problem(operator), plan)  # those who bring leave
        elif chain.chained(problem(operator), plan):
            assert plan.share == Share(32)
        else:
            assert (plan.share.multiprocessors, plan.share.communication_ctas) == (33, 1)
    scattered = problem("matmul_reduce_scatter")
    for every, summing in ((1, 1), (2, 1), (16, 1), (66, 2), (132, 4)):
        plan = fused_plan(replace(scattered, multiprocessors=every), "peer")
        assert (plan.share.multiprocessors, plan.share.communication_ctas) == (every, summing)
        plan.check(replace(scattered, multiprocessors=every))
    for plan in fused_plans(problem("matmul_all_reduce", m=16)):
        small = fused.form(problem("matmul_all_reduce", m=16), plan) == fused.DECODE  # of which some wait, one an SM
        assert (plan.share.multiprocessors, plan.share.communication_ctas) == ((33, 32) if small else (32, 4))
