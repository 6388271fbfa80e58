"""Rows of a gather that CTAs bring which do not multiply: which plans, their tables, when tiles wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_fused_plan import MACHINE, SHARDS, plan_of, problem

from undertow.errors import InvalidArgument
from undertow.plan import brought, fused, fused_order
from undertow.plan.defaults import fused_plan, gather_forms
from undertow.plan.plan import Plan, Share
from undertow.plan.predict import predict
from undertow.plan.search import fused_plans, ranked
from undertow.plan.tuner import short_list


def test_only_a_gpu_with_tma_has_rows_brought_by_other_ctas() -> None:
    asked = problem("all_gather_matmul")
    plan = replace(fused_plan(asked, "peer"), order="rotated")
    plan.check(asked)
    assert fused.brought(asked, plan)
    for other in (
        replace(asked, bulk=False),
        problem("all_gather_matmul", device="cpu"),
        problem("matmul_all_reduce"),
    ):
        with pytest.raises(InvalidArgument, match=r"plan\.order"):
            replace(fused_plan(other, "peer"), order="rotated").check(other)
    other = problem("matmul_reduce_scatter")  # whose order means something else
    with pytest.raises(InvalidArgument, match=r"plan\.share"):
        replace(fused_plan(other, "peer"), order="rotated").check(other)


@pytest.mark.parametrize(("m", "ranks", "usual"), [
    (256, 4, False), (512, 4, False), (1000, 4, False), (1024, 4, True), (2048, 4, True), (8192, 4, True),
    (512, 8, False), (1024, 8, False), (2048, 8, False),
])  # fmt: skip
def test_pulled_rows_of_two_bands_are_brought_beside_and_both_ways_are_tried(m: int, ranks: int, usual: bool) -> None:
    """Fewer rows, and where many ranks share a GPU all of them, come by all CTAs at once."""
    asked = problem("all_gather_matmul", m=m, ranks=ranks, shards=(m // ranks,) * ranks, together=True)
    plan = fused_plan(asked, "peer")
    assert fused.brought(asked, plan)
    assert (plan.share, plan.pull) == (Share(33, 1) if usual else Share(32, 32), True)
    assert plan.in_step == (ranks == 8)
    apart = replace(asked, together=False)
    assert not fused.brought(apart, fused_plan(apart, "peer"))  # pushed rows: only where a plan says so
    assert not fused.brought(replace(asked, bulk=False), fused_plan(replace(asked, bulk=False), "peer"))
    for one in (asked, apart):
        found = fused_plans(one)
        assert found[0] == fused_plan(one, "peer")
        for candidate in found:
            candidate.check(one)
            assert Plan.from_json(candidate.to_json()) == candidate
        both = one.together or m // ranks >= 256
        assert {fused.brought(one, other) for other in found} == ({True, False} if both else {False})
    uneven = replace(asked, m=m + 100, shards=(m // ranks + 100, *asked.shards[1:]))
    assert (fused_plan(uneven, "peer").share == Share(33, 1)) == usual  # the shortest shard counts


def test_both_kernels_of_a_gather_are_measured() -> None:
    for m in (512, 1024, 8192):
        asked = problem("all_gather_matmul", m=m, n=2560, together=True)
        listed = short_list([plan for plan, _ in ranked(asked, MACHINE, ["peer"])])
        assert {fused.brought(asked, plan) for plan in listed if plan.grain == "fused"} == {True, False}
        assert fused_plan(asked, "peer") in listed


@pytest.mark.parametrize(
    ("m", "n", "wanted"),
    [
        (512, 2560, [((128, 256), 0), ((128, 128), 0), ((128, 256), 4)]),  # 40 tiles on 32 CTAs: 8 of them in 4 parts
        (512, 14336, [((128, 256), 0)]),  # 224: 7 full waves
        (512, 9216, [((128, 256), 0), ((128, 128), 0), ((128, 256), 2)]),  # 144: 16 in 2; 288 narrow ones: 9 waves
        (1024, 2560, [((128, 256), 0), ((128, 128), 0), ((128, 256), 2)]),
        (2048, 2560, [((128, 256), 0)]),  # 160: 5 full waves
        (32768, 2560, []),
    ],
)
def test_few_rows_are_brought_by_all_and_tried_where_waves_are_fuller(
    m: int, n: int, wanted: list[tuple[tuple[int, int], int]]
) -> None:
    asked = problem("all_gather_matmul", m=m, n=n, together=True)
    found = [plan for plan in fused_plans(asked) if fused.at_once(plan)]
    assert [(plan.tile, plan.split) for plan in found] == wanted
    usual = predict(asked, found[0], MACHINE).gemm if found else 0.0
    for plan in found:
        assert (plan.share, fused.multiplying(32, plan)) == (Share(32, 32), 32)
        assert -(-asked.k // plan.piece) == 16  # 256 columns each: K of 4096 has no more
        assert plan == found[0] or predict(asked, plan, MACHINE).gemm < usual
        for parts in (1, 3, 16):
            with pytest.raises(InvalidArgument, match=r"plan\.split"):
                replace(plan, split=parts).check(asked)
    if m > 512:
        with pytest.raises(InvalidArgument, match=r"plan\.split"):
            replace(fused_plan(asked, "peer"), split=4).check(asked)
    other = problem("matmul_reduce_scatter")
    with pytest.raises(InvalidArgument, match=r"plan\.tile"):
        replace(fused_plan(other, "peer"), tile=fused.NARROW_TILE).check(other)


@pytest.mark.parametrize(("ranks", "every", "wanted"), [
    (4, 33, 32), (4, 24, 23), (2, 66, 64), (4, 7, 6), (4, 1, 1), (8, 16, 16), (6, 22, 22), (8, 14, 14), (5, 26, 24),
])  # fmt: skip
def test_ctas_that_bring_at_once_are_whole_blocks_unless_too_many_were_idle(
    ranks: int, every: int, wanted: int
) -> None:
    """And leave an SM free, unless each of many ranks has few of them."""
    asked = problem("all_gather_matmul", m=128 * ranks, ranks=ranks, shards=(128,) * ranks, together=True)
    plan = gather_forms(replace(asked, multiprocessors=every), "peer")["at once"]
    assert plan.share == Share(wanted, wanted)
    assert fused.at_once(plan)


@pytest.mark.parametrize("workers", [0, 1, 2, 15, 32, 132])
@pytest.mark.parametrize("tiles", [0, 1, 5, 40, 80, 144])
def test_the_parts_of_the_last_tiles_find_a_cta_each(tiles: int, workers: int) -> None:
    parts = brought.split_of(tiles, workers)
    plan = replace(plan_of((128, 256), 8), split=parts)
    last = brought.last_tiles(tiles, workers, plan)
    assert last * parts <= workers
    assert (last > 0) == (parts > 0)
    if parts:
        assert (tiles - last) % workers == 0
        assert parts == 8 or 2 * parts * last > workers
    for other in brought.SPLITS:  # a rank with other columns
        assert brought.last_tiles(tiles, workers, replace(plan, split=other)) * other <= workers


@pytest.mark.parametrize("shards", [one for one in SHARDS if min(one) > 0])
@pytest.mark.parametrize("pull", [True, False])
def test_brought_rows_are_those_of_a_gather_with_own_tiles_first(shards: tuple[int, ...], pull: bool) -> None:
    plan = replace(plan_of((4, 5), 2), pull=pull)
    for rank in range(len(shards)):
        table, own = brought.table(shards, 13, plan, rank), brought.own_tiles(shards, 13, plan, rank)
        other = fused_order.gather_table(shards, 13, plan, rank)
        assert sorted(map(tuple, table.tolist())) == sorted(map(tuple, other.tolist()))
        assert (table[:own, fused_order.BAND_LINE] == fused_order.OWN).all()
        assert (table[own:, fused_order.BAND_LINE] >= 0).all()


@pytest.mark.parametrize("shards", [one for one in SHARDS if min(one) > 0])
def test_rows_that_all_bring_at_once_are_read_where_they_are_kept(shards: tuple[int, ...]) -> None:
    """The tiles of `gather_table`, in an order that all ranks share, own ones with the line of their band, too."""
    plan = replace(plan_of((4, 5), 8), pull=True, order="rotated", share=Share(4, 4))
    for rank in range(len(shards)):
        table, told = brought.table(shards, 13, plan, rank), fused_order.push_table(shards, plan, rank)
        other = fused_order.gather_table(shards, 13, plan, rank)
        assert brought.own_tiles(shards, 13, plan, rank) == 0
        kept = {one[4]: (one[0], one[1]) for one in told.tolist() if one[6] <= rank < one[6] + one[7]}
        same = {(*one[: fused_order.BAND_LINE], one[fused_order.SOURCE]) for one in other.tolist()}
        assert len(table) == len(same)
        assert (table == brought.table(shards, 13, plan, 0)).all()
        for one in table.tolist():
            own = one[fused_order.SOURCE] == rank
            assert (*one[: fused_order.BAND_LINE], one[fused_order.SOURCE]) in same
            assert one[fused_order.BAND_LINE] >= 0
            assert not own or kept[one[fused_order.BAND_LINE]] == (one[fused_order.ROW], one[fused_order.ROWS])
        together = brought.table(shards, 13, plan, rank, apart=False)  # where all rows lie in one place
        firsts = np.array([sum(shards[:one]) for one in range(len(shards))])
        assert (together[:, fused_order.ROW] == table[:, fused_order.ROW] + firsts[table[:, fused_order.SOURCE]]).all()
        assert (together[:, 1 : fused_order.SOURCE] == table[:, 1 : fused_order.SOURCE]).all()
        for one, moved in zip(told.tolist(), fused_order.push_table(shards, plan, rank, 0).tolist(), strict=True):
            assert moved == [one[0], one[1], 0, one[3] + firsts[rank], *one[4:]]
    alone = brought.table((9,), 13, plan, 0)
    assert brought.own_tiles((9,), 13, plan, 0) == len(alone)
    assert (alone[:, fused_order.BAND_LINE] == fused_order.OWN).all()


@pytest.mark.parametrize("steps", range(1, 12))
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_rows_are_waited_for_before_their_first_load_is_issued(steps: int, stages: int) -> None:
    """Loads of up to `stages` steps are under way at the end of a step, however the compiler orders them in it."""
    ahead = brought.early(steps, stages)
    waited = ahead - 1  # of the tiles of a CTA, before its loop
    issued = -1
    for step in range(20 * steps):
        issued = max(issued, step + stages)
        assert issued // steps <= waited, (step, issued)
        if step % steps == steps - 1:  # the end of a tile
            waited = max(waited, step // steps + ahead)
