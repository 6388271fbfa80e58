"""The collectives as users call them, on local CPU ranks."""

from __future__ import annotations

import operator_targets as targets
import pytest

import undertow as ut
from undertow.errors import LaunchFailed


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_reduce(ranks: int) -> None:
    assert ut.launch(targets.all_reduces, ranks, device="cpu") == [[]] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_other_collectives(ranks: int) -> None:
    assert ut.launch(targets.the_others, ranks, device="cpu") == [[]] * ranks


def test_ranks_that_share_no_memory_copy_through_their_host() -> None:
    """What a kernel would run in common memory, packets too, the `dma` lane carries there."""
    assert ut.launch(targets.without_peers, 2, device="cpu") == [([], {"Copies"}, {"LaneExecutable"})] * 2


def test_every_all_reduce_of_the_library() -> None:
    assert ut.launch(targets.every_library_program, 4, device="cpu") == [[]] * 4


def test_a_users_own_program() -> None:
    assert ut.launch(targets.a_user_program, 3, device="cpu") == [True] * 3


def test_a_strided_output_of_a_call_that_failed_is_poison() -> None:
    assert ut.launch(targets.interrupted_into_strided_outputs, 2, device="cpu") == [[True, True]] * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_reduce_around_the_sizes_where_the_program_changes(ranks: int) -> None:
    assert ut.launch(targets.sizes_of_all_reduce, ranks, device="cpu") == [[]] * ranks


def test_a_repeated_call_after_a_failure_says_so() -> None:
    assert ut.launch(targets.repeated_after_a_failure, 1, device="cpu") == [[True] * 3]


def test_refusals_name_the_argument() -> None:
    for said in ut.launch(targets.refusals, 2, device="cpu"):
        assert said == [
            "op is 'product', but must be one of sum, avg, max, min.",
            "tensor is of torch.bool, but must be one of float64, float32, bfloat16, float16, int64, int32, int16,"
            " int8, uint8 to be reduced.",
            "op is 'avg', but must be sum, max or min for torch.int32.",
            "tensor is a tensor that requires a gradient, but must be detached, or the call under torch.no_grad():"
            " collectives have no backward yet.",
            "out is [4] torch.float32 on cpu, but must be [3] torch.float32 on cpu.",
            "tensor is of 5 rows, but must be a multiple of the 2 ranks, or rows given.",
            "root is 9, but must be between 0 and 1.",
            "program is ring, for all_reduce, but must be a program for all_gather.",
            "program is a str, but must be a collective program, made by undertow.collective.program, or one of"
            " undertow.collective.LIBRARY.",
            said[-1],
        ]
        assert said[-1].startswith("rows is [1], but must be 2 numbers")


def test_a_program_waits_for_a_kernel_and_a_kernel_for_it() -> None:
    for found in ut.launch(targets.kernels_hooked, 3, device="cpu"):
        assert found == {"early": False, "arrived": [True] * 3, "tiles": [1] * 3}


def test_the_first_parcel_has_arrived_before_the_last_is_made() -> None:
    for found in ut.launch(targets.parcels_overlap, 2, device="cpu"):
        assert found["right"]
        assert found["order"] == [[1] * done + [0] * (4 - done) for done in range(1, 5)]


def test_a_rank_lost_inside_a_collective() -> None:
    with pytest.raises(LaunchFailed, match="Rank 1 of 3"):
        ut.launch(targets.lost_in_a_collective, 3, device="cpu")


def test_workers_proceed_independently() -> None:
    """One call, one interpreter: at some moment its two workers stand at different steps, and neither waits at a common
    barrier: each goes on while the other is behind."""
    for right, events in ut.launch(targets.workers_apart, 3, device="cpu"):
        assert right
        steps = {"worker 0": -1, "worker 1": -1}
        apart = set()
        for engine, step, _, _ in events:
            steps[engine] = step
            apart.add(steps["worker 0"] - steps["worker 1"])
        assert set(steps) == {engine for engine, *_ in events}
        assert len(apart) > 1


def test_the_same_calls_across_nodes() -> None:
    for nodes, reduced, others in ut.launch(targets.across_named_nodes, 4, device="cpu"):
        assert nodes == [0, 0, 1, 1]
        assert (reduced, others) == ([], [])


def test_calls_that_differ_between_ranks_are_refused_on_all() -> None:
    for said in ut.launch(targets.disagreements, 2, device="cpu"):
        assert said == ["MismatchedCall"] * 4


def test_nan_survives_max_and_min() -> None:
    for found in ut.launch(targets.largest_with_nan, 3, device="cpu"):
        assert all(found)


def test_a_group_made_again() -> None:
    for found in ut.launch(targets.remade_group, 2, device="cpu"):
        assert found == [True] * 6


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_made_again(ranks: int) -> None:
    assert ut.launch(targets.made_again, ranks, device="cpu") == [[]] * ranks


def test_compiled_sums_have_names_of_their_own() -> None:
    """Processes that fill an empty cache together number functions alike: only a name tells two sums apart there."""
    from undertow.collective import cpu_sums as module

    types = ("float32", "float64", "int32", "int64", "uint8", "int8", "int16")
    names = {getattr(module, f"_sum_{one}").py_func.__qualname__ for one in types}
    assert names == {f"_sum_{one}" for one in types}
