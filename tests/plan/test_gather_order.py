"""Who brings the rows of a gather, and when; and that every wait ends, in whatever order ranks and CTAs run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from undertow.plan import fused
from undertow.plan import tokens as maps
from undertow.plan.plan import Plan, Share
from undertow.plan.tiles import Integers
from undertow.plan.tokens import Tokens

K = 1200  # of three pieces
PLAN = Plan("fused", "peer", ((0, 1),), tile=(128, 256), group_bands=3, piece=512)
JOBS = ((300, 1, 128, 95), (64, 33), (129, 129, 129, 129), (1000,))


@pytest.mark.parametrize("shards", JOBS)
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("k", [8, 512, 4096, 12288])
def test_every_row_is_brought_by_one_job_and_every_piece_has_a_word(
    shards: tuple[int, ...], block_m: int, k: int
) -> None:
    """All words of a band that others wait for are told, none twice, and all of them lie in the band's line."""
    plan = replace(PLAN, tile=(block_m, 256), piece=fused.piece_of(k, block_m))
    pieces = fused.parts(plan, k)
    told: dict[int, tuple[int, int]] = {}  # first row and rows of each word's job, counted from the first rank's
    for rank in range(len(shards)):
        pushes = fused.push_table(shards, plan, rank)
        table = fused.job_table(pushes, plan, k)
        covered = np.zeros(shards[rank], int)
        for row, rows, to, into, word, first, heard, _ in table.tolist():
            assert 1 <= rows <= fused.JOB_ROWS
            assert into == sum(shards[:rank]) + row
            assert (to, first, heard) == ((rank - 1) % len(shards), 0, len(shards))
            covered[row : row + rows] += 1
            for piece in range(pieces):
                assert word + piece not in told
                told[word + piece] = into, rows
        assert (covered == (1 if len(shards) > 1 else 0)).all()
        assert table[:, 0].tolist() == sorted(table[:, 0].tolist())  # the first bands, which are needed first, first
    for rank in range(len(shards)):
        for row, rows, *_, line, _ in fused.gather_table(shards, 300, plan, rank).tolist():
            if line == fused.OWN:
                continue
            awaited = -(-rows // fused.JOB_ROWS) * pieces
            assert awaited <= fused.words(plan, k, "cuda") <= fused.LINE
            found = {told.pop(line * fused.LINE + word, (0, 0)) for word in range(awaited)} - {(0, 0)}
            assert sum(count for _, count in found) in (0, rows)  # 0: a tile before it has looked
            assert all(row <= first < row + rows for first, _ in found)
    assert told == {}


@pytest.mark.parametrize("shards", [*JOBS, (2048,) * 4, (256, 2048)])
@pytest.mark.parametrize("n", [1, 256, 2560, 14336])
@pytest.mark.parametrize("ctas", [1, 7, 32])
def test_whoever_has_a_job_waits_for_nobody(shards: tuple[int, ...], n: int, ctas: int) -> None:
    """Positions that have jobs are own tiles, and so is a wave behind them, where there are so many."""
    plan = replace(PLAN, group_bands=8, share=Share(ctas))
    for rank in range(len(shards)):
        jobs = len(fused.job_table(fused.push_table(shards, plan, rank), plan, 64))
        own = fused.tiles_of(shards[rank : rank + 1], n, plan)
        beside = fused.beside(jobs, own, plan)
        assert beside == (min(jobs, own) if own >= ctas else 0)
        lines = fused.gather_table(shards, n, plan, rank)[:, fused.BAND_LINE]
        assert (lines == fused.OWN).sum() == own
        early = fused.early_tiles(shards, n, plan, rank)
        assert (early == 0) == (beside == 0)
        assert (lines[:early] == fused.OWN).all()
        assert beside <= early
        assert not beside or early == own or beside + ctas <= early <= beside + 2 * ctas
        first = replace(plan, share=Share(ctas, ctas))  # all jobs before the first tile
        assert (fused.beside(jobs, own, first), fused.early_tiles(shards, n, first, rank)) == (0, 0)


class Node:
    """Ranks whose CTAs do as the kernel does. Words are (rank, word); steps of a CTA end before each wait and tell."""

    def __init__(self, plan: Plan, tables: list[tuple[Integers, Integers, int]], ctas: int) -> None:
        self.plan, self.tables, self.ctas = plan, tables, ctas
        self.words: dict[tuple[int, int], int] = {}
        self.taken = [0] * len(tables)

    def told(self, job: list[int], pieces: range) -> None:
        for one in range(job[5], job[5] + job[6]):
            for piece in pieces:
                self.words[one, job[4] + piece] = self.words.get((one, job[4] + piece), 0) + 1

    def cta(self, rank: int, program: int) -> Iterator[None]:
        table, jobs, own_tiles = (one.tolist() if hasattr(one, "tolist") else one for one in self.tables[rank])
        pieces = fused.parts(self.plan, K)
        before = len(jobs) - fused.beside(len(jobs), own_tiles, self.plan)
        for item in range(program, before * pieces, min(self.ctas, self.plan.share.communication_ctas or self.ctas)):
            if program < (self.plan.share.communication_ctas or self.ctas):
                yield
                self.told(jobs[item // pieces], range(item % pieces, item % pieces + 1))
        position = self.take(rank)
        while position < len(table):
            following = self.take(rank)
            _, rows, _, _, _, _, line, _ = table[position]
            if line == fused.OWN:
                yield
                if before + position < len(jobs):
                    self.told(jobs[before + position], range(pieces))
            else:
                assert before + position >= len(jobs), "a tile that waits has a job"
                awaited = [line * fused.LINE + word for word in range(-(-rows // fused.JOB_ROWS) * pieces)]
                while any((rank, word) not in self.words for word in awaited):
                    yield
            position = following

    def take(self, rank: int) -> int:
        self.taken[rank] += 1
        return self.taken[rank] - 1

    def run(self, chance: random.Random) -> None:
        """Whoever is next by chance, some ranks far more often than others; stuck if nobody gets on for long."""
        running = [self.cta(rank, program) for rank in range(len(self.tables)) for program in range(self.ctas)]
        often = [chance.choice((1, 1, 30)) for _ in running]
        for _ in range(200_000):
            if not running:
                return
            which = chance.choices(range(len(running)), often)[0]
            if next(running[which], "over") == "over":
                del running[which], often[which]
        raise AssertionError(f"{len(running)} CTAs wait for ever")


@pytest.mark.parametrize("shards", [(300, 1, 128), (700, 700), (40, 2000, 33, 129)])
@pytest.mark.parametrize("ns", [(256, 2560, 8, 700), (5000, 5000, 5000, 5000)])
@pytest.mark.parametrize("share", [Share(4), Share(2), Share(4, 4), Share(4, 1)])
def test_every_gather_ends(shards: tuple[int, ...], ns: tuple[int, ...], share: Share) -> None:
    """Ranks of different columns do their jobs at different times, and all words are told once."""
    plan, ranks = replace(PLAN, share=share), len(shards)
    for seed in range(3):
        tables = []
        for rank in range(ranks):
            jobs = fused.job_table(fused.push_table(shards, plan, rank), plan, K)
            own = fused.tiles_of(shards[rank : rank + 1], ns[rank], plan)
            tables.append((fused.gather_table(shards, ns[rank], plan, rank), jobs, own))
        node = Node(plan, tables, 4)
        node.run(random.Random(seed))
        assert set(node.words.values()) == {1}
        assert len(node.words) == ranks * sum(len(jobs) for _, jobs, _ in tables) * fused.parts(plan, K)


@pytest.mark.parametrize("share", [Share(4), Share(4, 4)])
@pytest.mark.parametrize("seed", range(6))
def test_every_arrival_ends(share: Share, seed: int) -> None:
    chance, plan = random.Random(seed), replace(PLAN, share=share)
    ranks, experts = chance.choice((2, 3, 4)), chance.choice((1, 3))
    rows = (0, 0, 1, 31, 40, 130, 300)
    sizes = [[[chance.choice(rows) for _ in range(experts)] for _ in range(ranks)] for _ in range(ranks)]
    tokens, tables = Tokens.of(sizes), []
    for rank in range(ranks):
        n = chance.choice((8, 700, 5000))
        jobs = fused.job_table(maps.push_table(tokens, plan, rank), plan, K)
        tables.append((maps.arriving_tiles(tokens, n, plan, rank), jobs, fused.tiles_of(sizes[rank][rank], n, plan)))
    node = Node(plan, tables, 4)
    node.run(chance)
    assert set(node.words.values()) <= {1}
    assert len(node.words) == sum(len(jobs) for _, jobs, _ in tables) * fused.parts(plan, K)
