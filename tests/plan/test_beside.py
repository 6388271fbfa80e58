"""Jobs beside tiles: each row is summed or copied once, after what it needs, and nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from undertow.plan import beside, fused
from undertow.plan.defaults import fused_plan
from undertow.plan.plan import Plan, Share
from undertow.plan.problem import Problem

SHARDS = [(512, 512), (300, 1, 700), (0, 640, 200, 333), (128, 128, 128, 128), (64,) * 8]
N = 700


def plan_of(ctas: int, tile: tuple[int, int] = (128, 256), bands: int = 8) -> Plan:
    return Plan("fused", "peer", ((0, 1),), Share(ctas), tile=tile, group_bands=bands)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("broadcast", [True, False])
def test_a_common_table_has_the_same_tiles(shards: tuple[int, ...], broadcast: bool) -> None:
    plan = plan_of(4, bands=3)
    table = beside.common_table(shards, N, plan, broadcast)
    for rank in range(len(shards)):
        other = fused.scatter_table(shards, N, plan, rank, broadcast)
        assert sorted(map(tuple, table.tolist())) == sorted(map(tuple, other.tolist()))


def test_all_ranks_get_tiles_at_the_same_pace_and_weights_are_streamed_as_by_the_matmul_alone() -> None:
    asked = Problem.of(
        "matmul_reduce_scatter", 4096, 8192, 2048, dtype="bfloat16", ranks=4, device="cuda", multiprocessors=33
    )
    plan = fused_plan(asked, "peer")
    table = beside.common_table(asked.shards, asked.n, plan, False)
    for wave in range(0, len(table), 32):
        assert np.bincount(table[wave : wave + 32, fused.OWNER]).tolist() == [8, 8, 8, 8]
    column = table[:, fused.COLUMN]
    assert np.count_nonzero(np.diff(column)) + 1 == 4096 // 128 // plan.group_bands * 8192 // 256
    jobs = beside.job_table(asked.shards, asked.n, plan, 0, False, 32)
    assert (jobs[: 2 * 32, beside.ROWS] == 0).all()
    assert (jobs[2 * 32 :, beside.ROWS] == 32).all()  # every CTA sums a quarter of a tile beside each further tile
    assert len(jobs) == len(table) + 2 * 32  # two such jobs are left for each


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("tile", [(128, 256), (64, 128)])
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("ctas", [1, 3, 32])
def test_every_row_is_summed_or_copied_once(
    shards: tuple[int, ...], tile: tuple[int, int], broadcast: bool, ctas: int
) -> None:
    plan = plan_of(ctas, tile)
    for rank in range(len(shards)):
        jobs = beside.job_table(shards, N, plan, rank, broadcast, ctas)
        seen = np.zeros((sum(shards) if broadcast else shards[rank], N), int)
        for row, rows, column, _, out_row, owner, *_ in jobs.tolist():
            if rows:
                assert broadcast or owner == rank
                assert out_row == row + (sum(shards[:owner]) if broadcast else 0)
                seen[out_row : out_row + rows, column : column + tile[1]] += 1
        assert (seen == 1).all()


def calls(
    table: np.ndarray, jobs: np.ndarray, ctas: int, rank: int, ranks: int, broadcast: bool, words: set[object]
) -> list[Iterator[None]]:
    """The CTAs of a rank, as the kernel has them: each goes on until it waits for a word that is not set."""

    def waited(job: np.ndarray) -> Iterator[None]:
        line, owner = int(job[beside.TILE_LINE]), int(job[beside.OWNER])
        if job[beside.ROWS]:
            wanted = {(line, one) for one in range(ranks)} if owner == rank else {("ready", line)}
            while not wanted <= words:
                yield

    def made(job: np.ndarray) -> None:
        if broadcast and job[beside.ROWS] and job[beside.OWNER] == rank:
            words.add(("ready", int(job[beside.TILE_LINE])))

    def cta(program: int) -> Iterator[None]:
        job = np.zeros(8, dtype=np.int64)
        last = None
        for position in range(program, len(table), ctas):
            yield
            if last is not None:
                words.add((int(table[last, fused.TILE_LINE]), rank))
            made(job)
            job, last = jobs[position], position
            yield from waited(job)
        if last is not None:
            words.add((int(table[last, fused.TILE_LINE]), rank))
        made(job)
        for position in range(len(table) + program, len(jobs), ctas):
            yield from waited(jobs[position])
            made(jobs[position])

    return [cta(program) for program in range(ctas)]


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_for_ever(broadcast: bool, seed: int) -> None:
    """Random shards, CTAs (fewer than planned on some ranks) and orders of events; all CTAs run to their end."""
    chance = random.Random(seed)
    ranks, planned = chance.randint(2, 5), chance.randint(1, 6)
    shards = tuple(chance.choice((128, 200, 500, 900)) for _ in range(ranks))
    plan = plan_of(planned, bands=chance.randint(1, 8))
    table = beside.common_table(shards, N, plan, broadcast)
    words: set[object] = set()
    running = []
    for rank in range(ranks):
        jobs = beside.job_table(shards, N, plan, rank, broadcast, planned)
        running += calls(table, jobs, chance.randint(1, planned), rank, ranks, broadcast, words)
    for _ in range(200 * len(table)):
        one = chance.choice(running)
        if next(one, "over") == "over":
            running.remove(one)
        if not running:
            return
    raise AssertionError(f"{len(running)} CTAs still wait")


def test_a_job_that_waits_for_what_comes_after_is_seen_to_wait_for_ever() -> None:
    """The test above can fail: with sums a wave early, each CTA waits for tiles that it computes itself later."""
    plan, words, ctas = plan_of(2), set[object](), 2
    table = beside.common_table((512, 512), N, plan, False)
    running = []
    for rank in range(2):
        jobs = np.roll(beside.job_table((512, 512), N, plan, rank, False, ctas), -3 * ctas, axis=0)
        running += calls(table, jobs, ctas, rank, 2, False, words)
    for _ in range(10_000):
        running = [one for one in running if next(one, "over") != "over"]
    assert running


def test_jobs_go_as_slowly_as_the_main_loop_allows() -> None:
    plan = plan_of(32)
    assert [beside.job_parts(ranks, plan, False) for ranks in (2, 3, 4, 8)] == [2, 2, 4, 8]
    assert beside.job_parts(8, plan, True) == 1
    assert [beside.pace(4, plan, False, steps) for steps in (1, 4, 5, 32, 112)] == [0, 0, 1, 7, 27]  # four slices
    assert [beside.pace(4, plan, True, steps) for steps in (8, 9, 32)] == [0, 1, 3]  # eight
    assert [beside.pace(8, plan, True, steps) for steps in (16, 17)] == [0, 1]  # sixteen, of half as many rows
