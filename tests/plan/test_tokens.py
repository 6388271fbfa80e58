"""Rows that change ranks: every row is computed once, by its expert, for its rank, and found again by its word."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from undertow.plan import fused, fused_order
from undertow.plan import tokens as maps
from undertow.plan.defaults import fused_tile, tokens_plan
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem
from undertow.plan.tokens import Tokens


def some(seed: int) -> tuple[Tokens, Plan, int]:
    chance = random.Random(seed)
    ranks, experts = chance.randint(1, 5), chance.randint(1, 4)
    sizes = [
        [[chance.choice((0, 0, 1, 7, 40)) for _ in range(experts)] for _ in range(ranks)] for _ in range(ranks)
    ]  # fmt: skip
    tile = chance.choice((1, 3, 8, 16)), chance.choice((1, 4, 16))
    plan = Plan("fused", "peer", ((0, 1),), tile=tile, group_bands=chance.randint(1, 4), own_last=True)
    return Tokens.of(sizes), plan, chance.choice((1, 5, 16, 33))


SEEDS = range(60)


def expert_of(tokens: Tokens, rank: int, row: int, leaving: bool) -> int:
    """By counting."""
    for block in (tokens if leaving else tokens.back).sizes[rank]:
        for expert, rows in enumerate(block):
            if row < rows:
                return expert
            row -= rows
    raise IndexError(row)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_of_both_ends_are_the_same_rows(seed: int) -> None:
    tokens, _, _ = some(seed)
    for rank in range(tokens.ranks):
        found = tokens.leaving(rank)
        assert [one.row for one in found] == [sum(one.rows for one in found[:number]) for number in range(len(found))]
        for one in found:
            there = next(back for back in tokens.arriving(one.peer) if back.row == one.there)
            assert (there.rows, there.peer, there.expert, there.there) == (one.rows, rank, one.expert, one.row)
        assert sum(one.rows for one in tokens.arriving(rank)) == sum(row[rank] for row in tokens.matrix)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_element_leaves_once_and_is_waited_for_once(seed: int) -> None:
    tokens, plan, n = some(seed)
    received = [np.full((sum(row[rank] for row in tokens.matrix), n), -1) for rank in range(tokens.ranks)]
    told: list[dict[int, tuple[int, int]]] = [{} for _ in range(tokens.ranks)]
    for rank in range(tokens.ranks):
        for row, rows, column, columns, place, stride, whom, word in maps.leaving_table(tokens, n, plan, rank).tolist():
            to, expert = whom % fused.LINE, whom // fused.LINE
            assert stride == n
            assert {expert_of(tokens, rank, one, True) for one in range(row, row + rows)} == {expert}
            part = received[to][place // n :, place % n :][:rows, :columns]
            assert place % n == column
            assert (part == -1).all(), "stored twice"
            part[:] = rank * 1000 + np.arange(row, row + rows)[:, None]
            if to != rank:
                assert word not in told[to]
                told[to][word] = place // n, column
    for rank in range(tokens.ranks):
        want = [
            sender * 1000 + sum(tokens.matrix[sender][:rank]) + row
            for sender in range(tokens.ranks)
            for row in range(tokens.matrix[sender][rank])
        ]
        assert (received[rank] == np.array(want)[:, None]).all() if want else received[rank].size == 0
        words = {
            word: (row, column)
            for row, _, column, _, word, _, _, _ in maps.collected_table(tokens, n, plan, rank).tolist()
        }
        assert words == told[rank]
        assert plan.tile is not None
        most = tokens.most_lines(plan.tile[0]) * -(-n // plan.tile[1])
        assert max(words, default=0) < max(1, most)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_band_is_pushed_once_to_where_a_tile_waits_for_it(seed: int) -> None:
    tokens, plan, n = some(seed)
    told: list[dict[int, tuple[int, int, int]]] = [{} for _ in range(tokens.ranks)]
    for rank in range(tokens.ranks):
        for row, rows, to, there, line, copies, first, heard in maps.push_table(tokens, plan, rank).tolist():
            assert (copies, first, heard) == (1, to, 1)
            assert line not in told[to]
            told[to][line] = there, rows, rank * 1000 + row
    for rank in range(tokens.ranks):
        found = maps.arriving_tiles(tokens, n, plan, rank)
        done = np.zeros((sum(row[rank] for row in tokens.matrix), n), int)
        for row, rows, column, columns, place, stride, line, expert in found.tolist():
            first = place // n
            assert (stride, place % n) == (n, column)
            assert {expert_of(tokens, rank, one, False) for one in range(first, first + rows)} == {expert}
            done[first : first + rows, column : column + columns] += 1
            if line == fused_order.OWN:
                assert row == sum(tokens.matrix[rank][:rank]) + first - sum(one[rank] for one in tokens.matrix[:rank])
            else:
                assert row == first
                assert told[rank][line][:2] == (first, rows)
        assert (done == 1).all()
        assert {line for *_, line, _ in found.tolist() if line != fused_order.OWN} == set(told[rank])


def first_seen(found: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("seed", SEEDS)
def test_bands_come_expert_by_expert_and_rank_by_rank(seed: int) -> None:
    """Of all four tables; and what a rank pushes to another is in the order in which that one waits for it."""
    tokens, plan, n = some(seed)
    ranks = tokens.ranks
    for rank in range(ranks):
        leaving = maps.leaving_table(tokens, n, plan, rank).tolist()
        order = first_seen(
            [(one[6] // fused.LINE, (one[6] % fused.LINE - rank - 1) % ranks, one[0]) for one in leaving]
        )
        assert order == sorted(order)
        collected = maps.collected_table(tokens, n, plan, rank).tolist()
        order = first_seen([(expert_of(tokens, rank, one[0], False), (rank - one[5] - 1) % ranks, one[0])
                            for one in collected])  # fmt: skip
        assert order == sorted(order)
        pushes = maps.push_table(tokens, plan, rank).tolist()
        order = [(expert_of(tokens, rank, one[0], True), (rank - one[2] - 1) % ranks, one[0]) for one in pushes]
        assert order == sorted(order)
        arriving = maps.arriving_tiles(tokens, n, plan, rank)
        source = {
            line: sender
            for sender in range(ranks)
            if sender != rank
            for line in (one[4] for one in maps.push_table(tokens, plan, sender).tolist() if one[2] == rank)
        }
        order = first_seen([(one[7], (source.get(one[6], rank) - rank) % ranks, one[0]) for one in arriving.tolist()])
        assert order == sorted(order)
        for sender in set(range(ranks)) - {rank}:
            sent = [one[4] for one in maps.push_table(tokens, plan, sender).tolist() if one[2] == rank]
            assert sent == list(dict.fromkeys(one for one in arriving[:, 6].tolist() if source.get(one) == sender))


@pytest.mark.parametrize("bands", [1, 3, 8, 17])
def test_a_weight_is_read_once_for_each_group_of_its_bands(bands: int) -> None:
    """However many bands the experts before it have."""
    most = 8
    plan = Plan("fused", "peer", ((0, 1),), tile=(16, 16), group_bands=most, own_last=True)
    tokens = Tokens.of([[[16 * bands, 16 * (5 + sender + to), 16 * bands] for to in range(3)] for sender in range(3)])
    for table, expert, row in (  # rows of x that leave, or places of those that come
        (maps.leaving_table(tokens, 64, plan, 1), lambda one: one[6] // fused.LINE, 0),
        (maps.arriving_tiles(tokens, 64, plan, 1), lambda one: one[7], 4),
    ):
        columns = [(expert(one), one[2]) for one in table.tolist()]
        reads = [now for before, now in pairwise([None, *columns]) if now != before]  # one after the other: one read
        for which in range(3):
            own = {one[row] // (64 if row else 1) for one in table.tolist() if expert(one) == which}
            assert reads.count((which, 0)) == -(-len(own) // most)


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_segments_cut_rows_where_experts_change(seed: int) -> None:
    tokens, _, _ = some(seed)
    for rank in range(tokens.ranks):
        blocks, rows = tokens.leaving(rank), sum(tokens.matrix[rank])
        for first, count in ((0, rows), (rows // 3, rows // 2), (rows, 0)):
            found = maps.segments(blocks, first, count)
            assert sum(one[1] for one in found) == min(count, rows - first)
            for row, part, expert in found:
                assert {expert_of(tokens, rank, one, True) for one in range(row, row + part)} == {expert}
            assert all(before[2] != after[2] for before, after in pairwise(found))


def test_a_plan_fits_the_gpu_and_the_blocks() -> None:
    def problem(n: int, bulk: bool, ranks: int = 4, mirrored: bool = False) -> Problem:
        return Problem.for_splits(
            [[200] * ranks] * ranks, n, 64, dtype="bfloat16", device="cuda", multiprocessors=32, bulk=bulk,
            mirrored=mirrored,
        )  # fmt: skip

    assert tokens_plan(problem(512, True), "peer", 200).tile == (128, 256)
    assert tokens_plan(problem(512, True), "peer", 40).tile == (64, 256)
    assert tokens_plan(problem(511, True), "peer", 200).tile == (64, 256)  # addresses of single elements
    assert tokens_plan(problem(512, False), "peer", 200).tile == (128, 128)
    assert tokens_plan(problem(512, False, 8), "peer", 200).tile == (64, 128)
    assert fused_tile(problem(512, True), 64) == (64, 256)
    wide = tokens_plan(problem(65536, True, mirrored=True), "peer", 200)
    assert fused.parts(wide, 65536) <= fused.LINE
    for bulk in (True, False):
        asked = problem(512, bulk)
        tokens_plan(asked, "peer", 200).check(asked)
        assert asked.key.endswith("-plain") is False
        assert ("-plain" in asked.key) is not bulk


def test_what_cannot_be_fused_is_said() -> None:
    assert fused.why_not_bands(64) == ""
    assert "not a multiple of 8" in fused.why_not_bands(63)
    assert fused.why_not_bands(0) == "there is nothing to multiply"
    asked = Problem.for_splits([[0, 0]] * 2, 7, 3, dtype="bfloat16", device="cuda", multiprocessors=8)
    assert fused.why_not(asked, "peer") == "", "any sizes, and none"
    wide = Problem.for_splits([[1, 0]] * 2, 7, 3, dtype="float32", device="cuda", multiprocessors=8)
    assert "float32" in fused.why_not(wide, "peer")
