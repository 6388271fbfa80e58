"""Problems: what is refused, what the shards are, which problems share a plan."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from undertow.errors import InvalidArgument
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem

COMMON: dict[str, Any] = {"dtype": "bfloat16", "ranks": 4, "device": "cuda", "multiprocessors": 32}


def test_the_usual_shards() -> None:
    assert Problem.of("matmul_all_reduce", 10, 8, 8, **COMMON).shards == (10,)
    assert Problem.of("matmul_reduce_scatter", 10, 8, 8, **COMMON).shards == (3, 3, 2, 2)
    assert Problem.of("all_gather_matmul", 2, 8, 8, **COMMON).shards == (1, 1, 0, 0)
    problem = Problem.of("matmul_all_to_all", 9, 8, 5, shards=(0, 9, 0, 0), **COMMON)
    assert problem.shards == (0, 9, 0, 0)
    assert (problem.item_size, problem.flops, problem.result_bytes) == (2, 2 * 9 * 8 * 5, 144)


def test_the_busiest_sender_is_planned_for() -> None:
    splits = [(1, 2, 3), (0, 9, 1), (10, 0, 0)]
    problem = Problem.for_splits(splits, 8, 16, dtype="float32", device="cpu", multiprocessors=2)
    assert (problem.m, problem.shards, problem.ranks) == (10, (0, 9, 1), 3)
    with pytest.raises(InvalidArgument, match="splits is rows of"):
        Problem.for_splits([(1, 2)], 8, 16, dtype="float32", device="cpu", multiprocessors=2)


def test_keys_are_stable_file_names() -> None:
    problem = Problem.of("matmul_all_reduce", 8192, 8192, 2048, **COMMON)
    assert problem.key == "matmul_all_reduce-8192x8192x2048-bfloat16-4ranks-cuda32-864a936a"
    assert re.fullmatch(r"[a-z0-9_-]+", problem.key)
    others = [
        Problem.of("matmul_reduce_scatter", 8192, 8192, 2048, **COMMON),
        Problem.of("matmul_all_reduce", 8191, 8192, 2048, **COMMON),
        Problem.of("matmul_all_reduce", 8192, 8192, 2048, **{**COMMON, "multiprocessors": 66}),
        Problem.of("all_gather_matmul", 8, 8, 8, **COMMON),
        Problem.of("all_gather_matmul", 8, 8, 8, shards=(8, 0, 0, 0), **COMMON),
    ]
    assert len({one.key for one in (problem, *others)}) == 6


def test_token_counts_of_one_size_share_a_plan() -> None:
    def key(*shards: int) -> str:
        return Problem.of("matmul_all_to_all", sum(shards), 8, 8, shards=shards, **COMMON).key

    assert key(300, 0, 1, 2) == key(100, 100, 100, 212)
    assert key(256, 0, 0, 0) != key(257, 0, 0, 0)


def test_experts_and_the_mirror_image_are_problems_of_their_own() -> None:
    def problem(experts: int = 1, mirrored: bool = False, rows: int = 300, n: int = 8) -> Problem:
        return Problem.for_splits(
            [[rows, 0], [0, 5]], n, 16, dtype="float32", device="cpu", multiprocessors=2, experts=experts,
            mirrored=mirrored,
        )  # fmt: skip

    assert problem().key == "matmul_all_to_all-upto512x8x16-float32-2ranks-cpu2-e3b0c442"
    mirrored = problem(experts=4, mirrored=True)
    assert mirrored.key == "all_to_all_matmul-upto512x16x8-4experts-float32-2ranks-cpu2-e3b0c442"
    assert (mirrored.name, mirrored.sizes, mirrored.operator) == ("all_to_all_matmul", (16, 8), "matmul_all_to_all")
    assert problem(4, True, rows=512).key == mirrored.key == problem(4, True, rows=257).key
    others = [problem(experts, one) for experts in (1, 2, 4) for one in (False, True)]
    others += [problem(4, True, rows) for rows in (0, 256, 513)] + [problem(n=16), problem(mirrored=True, n=16)]
    assert len({one.key for one in others}) == len(others)
    with pytest.raises(InvalidArgument, match="which has a mirror image"):
        dataclasses.replace(Problem.of("all_gather_matmul", 8, 8, 8, **COMMON), mirrored=True)
    with pytest.raises(InvalidArgument, match="experts is 0, but must be at least 1"):
        problem(experts=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"operator": "matmul"}, "operator is 'matmul', but must be one of matmul_all_reduce"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"m": -1}, "m is -1"),
        ({"ranks": 0}, "ranks is 0"),
        ({"multiprocessors": 0}, "multiprocessors is 0"),
        ({"shards": (3, 3)}, "shards is [3, 3], but must be 1 counts of rows that add up to 10"),
        ({"shards": (9,)}, "add up to 10"),
    ],
)
def test_a_wrong_problem_is_refused(change: dict[str, Any], said: str) -> None:
    good = {
        "operator": "matmul_all_reduce",
        "m": 10,
        "n": 8,
        "k": 8,
        "dtype": "float32",
        "item_size": 4,
        "ranks": 2,
        "shards": (10,),
        "device": "cpu",
        "multiprocessors": 1,
    }
    Problem(**good)
    with pytest.raises(InvalidArgument) as caught:
        Problem(**{**good, **change})
    assert said in str(caught.value)


def test_a_dtype_without_size_and_a_plan_without_tiles() -> None:
    with pytest.raises(InvalidArgument, match="dtype is 'int8'"):
        Problem.of("matmul_all_reduce", 1, 1, 1, **{**COMMON, "dtype": "int8"})
    with pytest.raises(InvalidArgument, match="without a tile"):
        Problem.of("matmul_all_reduce", 1, 1, 1, **COMMON).grid(Plan("serial", "net", ((0, 1),)))
