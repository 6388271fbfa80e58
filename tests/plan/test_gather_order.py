"""Gathers as their CTAs go through the tables, in any order that ranks and CTAs may run in: every wait ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from undertow.plan import fused
from undertow.plan import tokens as maps
from undertow.plan.plan import Plan, Share
from undertow.plan.tiles import Integers
from undertow.plan.tokens import Tokens

K = 1200  # of three pieces
PLAN = Plan("fused", "peer", ((0, 1),), tile=(128, 256), group_bands=3, piece=512)


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
