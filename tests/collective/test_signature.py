"""Programs of one name have one signature if, and only if, they are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from undertow.collective.language import Program, Trace, program

STEP = 1


def nothing(c: Trace) -> None:
    recursive(0)


def made(first: int = 0, chunks: int = 1, helper: Callable[[int], int] = abs) -> Program:
    @program("all_reduce", chunks=chunks)
    def one(c: Trace) -> None:
        nothing(c)
        for rank in range(first, c.ranks, STEP):
            c.rank(helper(rank)).input[0].copy(c.rank(rank).output[0])

    return one


def with_constant(other: bool) -> Program:
    if other:

        @program("all_reduce")
        def same(c: Trace) -> None:
            c.rank(1).input[0].copy(c.rank(0).output[0])
    else:

        @program("all_reduce")
        def same(c: Trace) -> None:
            c.rank(0).input[0].copy(c.rank(0).output[0])

    return same


def recursive(depth: int) -> int:
    return recursive(depth - 1) if depth else 0


def test_what_differs_between_programs_differs_in_their_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(rank: int) -> int:
        return 2 * rank

    def thrice(rank: int) -> int:
        return 3 * rank

    programs = [made(), made(first=1), made(chunks=2), made(helper=twice), made(helper=thrice), made(helper=recursive)]
    programs += [with_constant(False), with_constant(True)]
    monkeypatch.setitem(globals(), "nothing", lambda c: c.rank(0).input[0].copy(c.rank(1).output[0]))
    programs.append(made())
    assert len({one.signature for one in programs}) == len(programs)


def test_the_same_program_made_again_has_the_same_signature() -> None:
    assert made(helper=recursive).signature == made(helper=recursive).signature
    assert with_constant(True).signature == with_constant(True).signature


def test_what_a_script_keeps_of_its_rank_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = made().signature
    monkeypatch.setitem(globals(), "rank", 3)  # the name of an attribute that programs use, too
    monkeypatch.setitem(globals(), "STEP", 3)
    assert made().signature == before
