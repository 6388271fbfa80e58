"""The matmul operators in real ranks: exact whatever the strategy and the plan, and clear about bad input."""

from __future__ import annotations

import re

import matmul_suite
import matmul_targets as targets
import pytest

import undertow as ut

SEED = 20260
RANKS = (2, 3, 4, 8)
NAMES = tuple(matmul_suite.OPERATORS)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_part_of_all_cases_is_exact(ranks: int) -> None:
    counts = ut.launch(matmul_suite.run, ranks, device="cpu", args=(SEED + ranks, 0.08))
    assert set(counts) == {counts[0]}
    assert counts[0] > 300


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", RANKS)
def test_all_cases_are_exact(ranks: int) -> None:
    shapes, dtypes = len(matmul_suite.SHAPES), len(matmul_suite.CPU_DTYPES)
    every = len(NAMES) * len(matmul_suite.strategies()) * dtypes * shapes
    assert len(matmul_suite.strategies()) == 12
    assert shapes == 30
    assert ut.launch(matmul_suite.run, ranks, device="cpu", args=(SEED, 1.1)) == [every] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_plan_that_fits_is_exact(ranks: int) -> None:
    for packed in ut.launch(targets.random_plans, ranks, device="cpu", args=(SEED + ranks, 80)):
        assert 10 < packed < 60


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", RANKS)
def test_any_of_many_plans_is_exact(ranks: int) -> None:
    ut.launch(targets.random_plans, ranks, device="cpu", args=(SEED * ranks, 2000))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["natural", "packed"])
def test_a_wrong_permutation_is_seen(name: str, layout: str) -> None:
    if (name, layout) == ("all_gather_matmul", "packed"):
        pytest.skip("nothing is packed where tiles wait for rows")
    found = ut.launch(targets.wrong_permutation, 2, device="cpu", args=(name, layout))
    assert [spoiled for spoiled, _ in found] == [1, 1]
    # Both tiles may be for one and the same rank: then only that one can see it.
    assert any(re.search(r"\d+ of \d+ elements are wrong", said) for _, said in found), found


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_one_sentence_and_the_group_goes_on(name: str) -> None:
    for found in ut.launch(targets.refused, 2, device="cpu", args=(name,), deadline=20):
        rows = 12 if name == "all_gather_matmul" else 6
        assert found.pop("usable") == "True"
        for strategy in ("auto", "serial:net", "signaled:dma"):
            said = found.pop(f"dtypes of ranks, {strategy}")
            assert re.fullmatch(
                rf"MismatchedCall: Ranks of group 0 disagree on call \d+: rank 0 called {name}\(.*float32\) as .*,"
                rf" but rank 1 called {name}\(.*bfloat16\) as .*\.",
                said,
            ), said
        tiles = found.pop("tiles of a plan")
        if name == "matmul_all_reduce":
            assert tiles == (
                "InvalidArgument: plan is made for 1 parcels of 99 tiles in all, but must be made for 3 tiles of 2 x 5,"
                " parcel after parcel."
            )
        else:
            assert re.fullmatch(
                r"InvalidArgument: plan is in natural order, but must be in \w+ order, as \w+ needs\.", tiles
            )
        out = found.pop("out")
        assert re.fullmatch(
            r"InvalidArgument: out is \[1, 1\] .*, but must be contiguous \[\d+, 5\] torch.* on cpu\.", out
        )
        assert found == {
            "inner": "InvalidArgument: w is of shape [3, 5], but must be of 4 rows, as x has columns.",
            "dtypes": "InvalidArgument: w is of torch.float64, but must be of torch.float32, as x is.",
            "integers": (
                "InvalidArgument: x is of torch.int32, but must be one of float64, float32, bfloat16, float16."
            ),
            "vector": "InvalidArgument: x is of shape [4], but must be a matrix.",
            "bias": "InvalidArgument: bias is [6] torch.float32 on cpu, but must be [5] torch.float32 on cpu.",
            "activation": "InvalidArgument: activation is 'tanh', but must be one of none, relu, gelu, silu.",
            "out with a gradient": (
                "InvalidArgument: out is given, but must be None where gradients are taken or torch traces: call under"
                " torch.no_grad(), or do it apart."
            ),
            **dict.fromkeys(
                ("aliased out", "out over bias"),
                "InvalidArgument: out is in memory that the call has another use for, but must be a tensor of its own.",
            ),
            "out that wants a gradient": (
                "InvalidArgument: out is a tensor that requires a gradient, but must be one that does not."
            ),
            **{
                f"sparse{'' if name == 'w' else f' {name}'}": (
                    f"InvalidArgument: {name} is of layout torch.sparse_coo, but must be dense: {name}.to_dense() makes"
                    " it so."
                )
                for name in ("w", "bias", "out")
            },
            "rows of a plan": (
                f"InvalidArgument: plan is made for parcels [(0, 2), (3, 99)], but must be made for"
                f" {99 if name == 'matmul_all_to_all' else rows} rows."
            ),
        }


@pytest.mark.parametrize("name", NAMES)
def test_strided_empty_and_not_a_number(name: str) -> None:
    assert ut.launch(targets.odd_but_right, 2, device="cpu", args=(name,), deadline=20) == [True, True]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_whole_results_move_by_collectives(ranks: int) -> None:
    """As on a GPU, where one kernel moves what overlaps with nothing."""
    assert min(ut.launch(targets.serial_by_collectives, ranks, device="cpu", args=(SEED + ranks, 0.3))) > 80
