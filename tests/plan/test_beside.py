"""Sums beside a matmul: each row is summed or copied once, and nobody waits for ever."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from undertow.plan import beside, fused_order
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
        other = fused_order.scatter_table(shards, N, plan, rank, broadcast)
        assert sorted(map(tuple, table.tolist())) == sorted(map(tuple, other.tolist()))


def test_all_ranks_get_tiles_at_the_same_pace_and_weights_are_streamed_as_by_the_matmul_alone() -> None:
    asked = Problem.of(
        "matmul_reduce_scatter", 4096, 8192, 2048, dtype="bfloat16", ranks=4, device="cuda", multiprocessors=33
    )
    plan = fused_plan(asked, "peer")
    table = beside.common_table(asked.shards, asked.n, plan, False)
    for wave in range(0, len(table), 32):
        assert np.bincount(table[wave : wave + 32, fused_order.OWNER]).tolist() == [8, 8, 8, 8]
    column = table[:, fused_order.COLUMN]
    assert np.count_nonzero(np.diff(column)) + 1 == 4096 // 128 // plan.group_bands * 8192 // 256


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("tile", [(128, 256), (64, 128)])
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("ctas", [1, 3, 32])
def test_every_row_is_summed_or_copied_once(
    shards: tuple[int, ...], tile: tuple[int, int], broadcast: bool, ctas: int
) -> None:
    plan = plan_of(ctas, tile)
    for rank in range(len(shards)):
        jobs, height = (
            beside.job_table(shards, N, plan, rank, broadcast, ctas),
            2 * beside.slice_rows(len(shards), plan),
        )
        seen = np.zeros((sum(shards) if broadcast else shards[rank], N), int)
        for row, rows, column, _, out_row, owner, part, _ in jobs.tolist():
            assert broadcast or owner == rank
            if owner == rank:
                assert 1 <= rows <= height <= tile[0]
                assert part == row // height % (tile[0] // height)
            else:
                assert 1 <= rows <= tile[0]
                assert part == -(-rows // height)
            assert out_row == row + (sum(shards[:owner]) if broadcast else 0)
            seen[out_row : out_row + rows, column : column + tile[1]] += 1
        assert (seen == 1).all()


def calls(
    table: np.ndarray, jobs: np.ndarray, ctas: int, summing: int, rank: int, ranks: int, words: set[object]
) -> list[Iterator[None]]:
    """The CTAs of a rank, as the kernel has them: each goes on until it waits for a word that is not set."""
    taken = itertools.count()
    multiplying = max(1, ctas - summing)

    def cta(program: int) -> Iterator[None]:
        for position in range(program, len(table) if program < multiplying else 0, multiplying):
            yield
            words.add((int(table[position, fused_order.TILE_LINE]), rank))
        while (unit := next(taken)) < len(jobs):
            job = jobs[unit].tolist()
            line, mine = job[beside.TILE_LINE], job[beside.OWNER] == rank
            wanted: set[object] = {(line, one) for one in range(ranks)}
            if not mine:
                wanted = {("ready", line, part) for part in range(job[beside.PART])}
            while not wanted <= words:
                yield
            if mine:
                words.add(("ready", line, job[beside.PART]))

    return [cta(program) for program in range(ctas)]


def run(chance: random.Random, running: list[Iterator[None]], most: int) -> int:
    """Events in a random order; how many CTAs are still waiting after so many."""
    for _ in range(most):
        one = chance.choice(running)
        if next(one, "over") == "over":
            running.remove(one)
        if not running:
            break
    return len(running)


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_for_ever(broadcast: bool, seed: int) -> None:
    """Random shards, CTAs (fewer than planned on some ranks, one of them perhaps) and orders of events."""
    chance = random.Random(seed)
    ranks, planned = chance.randint(2, 5), chance.randint(1, 6)
    shards = tuple(chance.choice((128, 200, 500, 900)) for _ in range(ranks))
    plan = plan_of(planned, bands=chance.randint(1, 8))
    table = beside.common_table(shards, N, plan, broadcast)
    words: set[object] = set()
    running = []
    for rank in range(ranks):
        jobs = beside.job_table(shards, N, plan, rank, broadcast, planned)
        running += calls(table, jobs, chance.randint(1, planned), chance.randint(0, 2), rank, ranks, words)
    assert run(chance, running, 200 * len(table)) == 0


def test_copies_before_the_sums_they_wait_for_are_seen_to_wait_for_ever() -> None:
    """The test above can fail: where every rank copies first, none sums."""
    plan, words = plan_of(2), set[object]()
    table = beside.common_table((512, 512), N, plan, True)
    running = []
    for rank in range(2):
        jobs = beside.job_table((512, 512), N, plan, rank, True, 2)
        jobs = jobs[np.argsort(jobs[:, beside.OWNER] == rank, kind="stable")]
        running += calls(table, jobs, 2, 1, rank, 2, words)
    assert run(random.Random(1), running, 10_000) == 4
