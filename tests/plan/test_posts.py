"""What fused matmuls post: parcels that cover every row once, places that never overlap, the same on all ranks."""

from __future__ import annotations

import itertools
import random

import pytest

from undertow.errors import InvalidArgument
from undertow.plan import posts
from undertow.plan.defaults import fused_plan
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem
from undertow.plan.tokens import Tokens


@pytest.mark.parametrize("parts", [1, 3, 8, posts.PARCELS])
@pytest.mark.parametrize("block_m", [1, 3, 16])
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 63, 64, 65, 200, 1000])
def test_parcels_are_whole_bands_and_few(rows: int, block_m: int, parts: int) -> None:
    found = posts.parcels_of(rows, block_m, parts)
    assert len(found) == min(parts, -(-rows // block_m))
    assert [row for one in found for row in range(one.row, one.row + one.rows)] == list(range(rows))
    assert all(one.row % block_m == 0 and -(-one.rows // block_m) == one.bands for one in found)
    for band in range(-(-rows // block_m)):
        one = found[posts.number_of(found, band)]
        assert one.row <= band * block_m < one.row + one.rows
    with pytest.raises(IndexError):
        posts.number_of(found, -(-rows // block_m))


def test_a_signal_belongs_to_one_parcel_of_one_source() -> None:
    every = itertools.product(range(4), range(posts.PARCELS), (False, True))
    found = [posts.signal_of(*one) for one in every]
    assert sorted(found) == list(range(4 * posts.SIGNALS))


@pytest.mark.parametrize("parts", [1, 2, posts.PARCELS])
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("shards", [(4, 4), (5, 0, 3), (1, 9, 2, 2), (0, 0, 7)])
def test_what_lands_has_a_place_of_its_own(shards: tuple[int, ...], broadcast: bool, parts: int) -> None:
    layout, ranks = posts.Sums(shards, 2, parts, 3, broadcast), range(len(shards))
    for owner in ranks:
        taken = [layout.product(row) for row in range(layout.rows)]
        taken += [layout.landing(owner, one, row) for one in ranks if one != owner for row in range(shards[owner])]
        taken += [layout.summed(row) for row in range(layout.rows)] if broadcast else []
        assert len(set(taken)) == len(taken)
        assert all(one % 3 == 0 and one + 3 <= layout.elements for one in taken)
        for row in range(shards[owner]):
            one = layout.parcels[owner][layout.number(owner, row)]
            assert one.row <= row < one.row + one.rows
    assert layout.meets == (min(shards) > 0)
    assert not posts.Sums((4, 4), 2, parts, 0, broadcast).meets


def test_gathered_rows_stand_as_in_the_matrix() -> None:
    layout = posts.Rows((3, 0, 4), 2, 1, 5)
    found = [layout.place(source, row) for source, rows in enumerate(layout.shards) for row in range(rows)]
    assert found == list(range(0, layout.elements, 5))
    assert not layout.meets
    assert posts.Rows((3, 1), 2, 1, 5).meets


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_change_ranks_land_where_the_receiver_has_them(seed: int) -> None:
    chance = random.Random(seed)
    ranks, experts = chance.randint(1, 4), chance.randint(1, 3)
    sizes = [[[chance.choice((0, 1, 5, 70)) for _ in range(experts)] for _ in range(ranks)] for _ in range(ranks)]
    parts = chance.choice((1, 2, 5, posts.PARCELS))
    layout = posts.Passed(Tokens.of(sizes), chance.choice((1, 2, 8)), parts, 4)
    for receiver in range(ranks):
        landed: dict[int, tuple[int, int]] = {}
        for sender in range(ranks):
            parcels = layout.parcels(sender, receiver)
            assert len(parcels) <= parts
            for one, there in parcels:
                for at in range(one.rows):
                    assert layout.leaving(one.row + at) + 4 <= layout.landing(0)
                    assert landed.setdefault(there + at, (sender, one.row + at)) == (sender, one.row + at)
        want = [
            (block.peer, block.there + at) for block in layout.tokens.arriving(receiver) for at in range(block.rows)
        ]
        assert [landed[row] for row in range(len(want))] == want
        assert layout.landing(len(want)) <= layout.elements


@pytest.mark.parametrize("lane", ["net", "dma"])
def test_what_only_peers_memory_can_do_is_refused(lane: str) -> None:
    problem = Problem.of("matmul_all_reduce", 4, 8, 8, dtype="float32", ranks=2, device="cpu", multiprocessors=1)
    fused_plan(problem, lane).check(problem)
    with pytest.raises(InvalidArgument, match=f"plan.split is .*, but must be 0 over lane {lane}"):
        Plan("fused", lane, ((0, 1),), tile=(4, 8), own_last=True, split=2).check(problem)
    with pytest.raises(InvalidArgument, match=f"plan.owners is .*, but must be rows over lane {lane}"):
        Plan("fused", lane, ((0, 1),), tile=(4, 8), own_last=True, owners="columns").check(problem)
