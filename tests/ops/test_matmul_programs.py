"""Matmuls whose communication is a collective program: exact, overlapped, and clear about programs that will not do."""

from __future__ import annotations

import program_targets as targets
import pytest

import undertow as ut

SEED = 4511


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_part_of_all_programs_is_exact(ranks: int) -> None:
    counts = ut.launch(targets.programs_are_exact, ranks, device="cpu", args=(SEED + ranks, 0.01))
    assert set(counts) == {counts[0]}
    assert counts[0] > 20


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_programs_are_exact(ranks: int) -> None:
    counts = ut.launch(targets.programs_are_exact, ranks, device="cpu", args=(SEED, 1.1))
    assert set(counts) == {9 * 3 * 4 * 30}


def test_chunks_move_before_the_matmul_ends() -> None:
    for found in ut.launch(targets.moves_before_the_end, 2, device="cpu"):
        assert set(found) == {one.name for programs in targets.PROGRAMS.values() for one in programs}
        for name, (early, moves) in found.items():
            # The last parcel's chunks cannot.
            assert 0 < early < moves, f"{name}: {early} of {moves} moves before the matmul's end"


def test_a_program_that_will_not_do_is_one_sentence_and_the_group_goes_on() -> None:
    for found in ut.launch(targets.refusals, 2, device="cpu", deadline=20):
        several = found.pop("not all the same")
        assert several.startswith("MismatchedCall: Ranks of group 0 disagree on call")
        assert found == {
            "contract": (
                "InvalidArgument: program is reduce_scatter_ring, for reduce_scatter, but must be a program for"
                " all_reduce."
            ),
            "other contract": (
                "InvalidArgument: program is ring, for all_reduce, but must be a program for reduce_scatter."
            ),
            "no program": (
                "InvalidArgument: program is a str, but must be a collective program, made by"
                " undertow.collective.program, or one of undertow.collective.LIBRARY."
            ),
            "ranks": "InvalidArgument: program is for_five, for 5 ranks, but must be a program for 2 ranks.",
            "half tied": (
                "InvalidArgument: program is half_tied, in which input[1] of rank 0 never becomes ready, but must be"
                " one with tile_ready for every chunk of every input, or for none."
            ),
            "grain": (
                "StrategyUnavailable: Strategy 'serial' is not available: this operator has no serial form; possible"
                " here: signaled:net, signaled:peer, signaled:dma."
            ),
            "lane": (
                "InvalidArgument: strategy is 'signaled:wire', but must be \"auto\", a grain (serial, chunked,"
                ' signaled, fused) or "grain:lane" with lanes net, peer, dma.'
            ),
            "plan of another": "InvalidArgument: plan.program is 'ring', but must be 'mine', as program mine needs.",
            "plan without": "InvalidArgument: plan.program is '', but must be 'ring', as program ring needs.",
            "unknown": (
                "InvalidArgument: plan.program is 'nobody', but must be a program of the library, or the one given as"
                " program=."
            ),
            "parcels": "InvalidArgument: plan.parcels is 8, but must be 4, as program mine needs.",
            "packed": "InvalidArgument: plan.layout is 'packed', but must be 'natural', as program ring needs.",
            "no taker": "InvalidArgument: plan.program is 'ring', but must be '', as matmul_all_to_all takes none.",
            "usable, matmul_all_reduce": "True",
            "usable, matmul_reduce_scatter": "True",
        }


def test_a_plan_names_its_program() -> None:
    for found in ut.launch(targets.plans_name_their_program, 2, device="cpu", deadline=20):
        assert found == [True] * 6


def test_few_bands_and_programs_made_anew() -> None:
    for right, more_descriptors in ut.launch(targets.few_bands_and_many_programs, 2, device="cpu", deadline=20):
        assert right == [True] * 3
        assert more_descriptors == 0


def test_a_strategy_may_choose_a_program() -> None:
    for found in ut.launch(targets.strategies_may_choose_one, 2, device="cpu", deadline=20):
        assert found
        assert set(found) == {"two_shot"}
