"""What goes wrong in a first program of one's own: one sentence each, at the line of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from undertow.collective import LIBRARY, check, custom, program
from undertow.errors import InvalidArgument, ProgramRefused

HERE = r"test_first_mistakes\.py:\d+: "
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "to a rank that is not there": (lambda c: c.rank(0).input[0].copy(5000), f"{HERE}rank 5000 does not exist"),
    "to nothing": (lambda c: c.rank(0).input[0].copy(None), f"{HERE}.* goes to None, which is neither"),
    "to several": (lambda c: c.rank(0).input[0].copy([1, 2]), f"{HERE}.* goes to \\[1, 2\\], which is neither"),
    "a sum with a rank": (lambda c: c.rank(0).input[0].reduce(1), f"{HERE}1 is to be added to input\\[0\\] of rank 0"),
    "scratch without end": (lambda c: c.rank(0).scratch("s")[10**9], f"{HERE}s\\[1000000000\\] .* out of bounds"),
    "a channel by name": (lambda c: c.rank(0).input[0].copy(1, channel="x"), f"{HERE}channel 'x'"),
    "a channel too large": (lambda c: c.rank(0).input[0].copy(1, channel=2**40), f"{HERE}channel 1099511627776"),
    "a tile by name": (lambda c: c.tile_ready("x", 0), f"{HERE}x cannot become ready"),
    "others of nobody": (lambda c: c.others(99), f"{HERE}rank 99 does not exist"),
}
MEANT_OTHERWISE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half a chunk": (lambda c: c.rank(0).input[0.5], "chunks is 0.5, but must be a whole number"),
    "half a range": (lambda c: c.rank(0).input[0:1.5], "chunks is 1.5, but must be a whole number"),
    "a rank by name": (lambda c: c.rank("0"), "rank is '0', but must be a whole number"),
    "too many ways": (lambda c: c.parallel(10**9).__enter__(), "ways is 1000000000, but must be from 1 to 65536"),
    "ways by name": (lambda c: c.parallel("2").__enter__(), "ways is '2', but must be a whole number"),
}


def trace(body: Callable[[Any], Any]) -> None:
    program("all_reduce", chunks=4)(body).trace(2)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_at_its_line(name: str) -> None:
    body, said = REFUSED[name]
    with pytest.raises(ProgramRefused, match=said):
        trace(body)


@pytest.mark.parametrize("name", MEANT_OTHERWISE)
def test_says_what_it_must_be(name: str) -> None:
    body, said = MEANT_OTHERWISE[name]
    with pytest.raises(InvalidArgument, match=said):
        trace(body)


def test_buffers_and_ranges_can_be_gone_through() -> None:
    seen: list[str] = []
    trace(lambda c: seen.extend(map(repr, [*c.rank(1).input, *c.rank(0).output[1:3]])))
    assert seen == [*(f"input[{one}] of rank 1" for one in range(4)), "output[1] of rank 0", "output[2] of rank 0"]


def test_what_a_program_is_made_of() -> None:
    def two_shot(c: Any) -> None: ...

    for wrong, said in (
        (lambda: program(two_shot), "function two_shot, but must be the name of what it does"),  # @program alone
        (lambda: program(None), "collective is None"),
        (lambda: program("all_reduce", chunks=0)(two_shot).trace(2), "chunks is 0, but must be at least 1"),
        (lambda: program("all_reduce", chunks=1.5)(two_shot).trace(2), "chunks is 1.5, but must be a whole number"),
        (lambda: program("all_reduce")(two_shot).trace("2"), "ranks is '2', but must be a whole number"),
        (lambda: LIBRARY["ring"].compile(2, slots=10**20), "slots is 1.*, but must be a whole number from 1 to 65536"),
        (lambda: LIBRARY["ring"].compile(2, depth="2"), "depth is '2', but must be a whole number"),
        (lambda: check("ring"), "schedule is 'ring', but must be a schedule"),
        (lambda: custom("x", [1], [1, 2], {}), "a count of chunks for every rank"),
        (lambda: custom("x", [-1], [1], {}), "a count of chunks for every rank"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            wrong()  # type: ignore[no-untyped-call]
