"""`fused_decode` on GPUs whose warps run in random orders (`triton_warps.py`): right sums in call after call, poisoned
ones where somebody is missing, and nobody waits for ever. And the same with something of its text changed, which must
be found.

Not found, as it changes nothing that could be seen:

- `_leave` without its barrier: the maximum in front of it, of all threads' statuses, meets in one
- `fill_when_out` without its barrier: what was acquired comes to the other warps behind one
- `_leave` that waits for more CTAs than sum: it poisons a deadline later
- a settle that does not look at the abort word: it ends by its own deadline
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from decode_node import POISON, Case, Changes, Node, Rank, check, check_failed, run
from fused_builds import decode
from random_orders import rewrite

from undertow.plan import fused

TWO, FOUR = (2, 8), (4, 8)
ONE_ROW = Case()
SHARED = Case((Rank(), Rank()), apart=False, room=2, calls=4)  # on one GPU, with room for those that sum and no more
CASES = {
    "one row": ONE_ROW,
    "nothing in between": Case(idle=True, calls=3),
    "parts of K, a bias, two words each": Case(
        (Rank(tile=TWO), Rank(summing=2, tile=TWO)), rows=2, split=2, at_once=2, bias=True
    ),
    "three ranks, bounded, weights by rows": Case(
        (Rank(2, 1, FOUR), Rank(0, 2, FOUR, False), Rank(1, 1, FOUR)), rows=3
    ),
    "launches one by one": Case((Rank(1, 1, FOUR, False), Rank(summing=3)), n=24, early=False),
    "little room": SHARED,
    "one rank": Case((Rank(),)),
}
MISSING = {
    "two ranks": Case((Rank(summing=2), Rank()), missing=1, calls=4),
    "three ranks": Case((Rank(summing=2), Rank(1, 1, TWO), Rank()), missing=2, calls=4),
}
# A rank is slow, lost in the middle of a call, or one of its CTAs does not begin.
SILENT = Case(n=32, calls=3, chained=False, silent=True)
FAILING = {
    "slow": Case((Rank(summing=2, tile=TWO), Rank(tile=TWO)), rows=2, calls=4, chained=False),
    "lost": Case((Rank(summing=2), Rank(), Rank()), n=24, calls=4, chained=False, lost=True),
    "silent": SILENT,
}
HURRY = 60  # how often time passes where deadlines matter
LONG = pytest.mark.nightly


@pytest.mark.parametrize("orders", [2, pytest.param(100, marks=LONG)])
@pytest.mark.parametrize("name", CASES)
def test_sums_are_right_in_any_order(name: str, orders: int) -> None:
    for seed in range(orders):
        check(run(CASES[name], seed))


@pytest.mark.parametrize("orders", [2, pytest.param(100, marks=LONG)])
@pytest.mark.parametrize("name", MISSING)
def test_calls_of_a_rank_that_never_comes_are_poisoned(name: str, orders: int) -> None:
    case = MISSING[name]
    for seed in range(orders):
        node = run(case, seed)
        check(node, case.calls - case.missing)
        for number in range(len(case.ranks) - 1):
            assert (node.out[number, case.calls - case.missing :] == POISON).all()
            assert node.error[number].tolist() == [1, 2]


@pytest.mark.parametrize("orders", [2, pytest.param(100, marks=LONG)])
@pytest.mark.parametrize("name", FAILING)
def test_a_result_is_right_or_poisoned(name: str, orders: int) -> None:
    for seed in range(orders):
        check_failed(run(FAILING[name], seed, hurry=HURRY))


@pytest.mark.parametrize("orders", [2, pytest.param(100, marks=LONG)])
@pytest.mark.parametrize("name", FAILING)
def test_where_nobody_waits_long_enough_each_word_is_right_or_poisoned(name: str, orders: int) -> None:
    """Who poisons gives up waiting for others to leave: they may store after that, but then what is right."""
    for seed in range(orders):
        node = run(FAILING[name], seed, hurry=HURRY, patient=False)
        for number in range(len(node.case.ranks) - node.case.fails):
            for got, want in zip(node.out[number], node.want(), strict=True):
                assert ((got == POISON) | (got == want)).all()
            if (node.out[number] == POISON).any():
                assert node.error[number].tolist() == [1, 2]


def edited(*edits: tuple[str, str, str]) -> Changes:
    """The text of functions, with something else in place of something."""

    def changes(modules: Any) -> None:
        for name in {name for name, _, _ in edits}:
            rewrite(modules, name, lambda text, name=name: _replaced(text, name))  # type: ignore[misc]

    def _replaced(text: str, name: str) -> str:
        for where, old, new in edits:
            if where == name:
                assert old in text, old
                text = text.replace(old, new)
        return text

    return changes


def sent_apart(modules: Any) -> None:
    """Data and flag in two accesses."""
    packets = next(module for module in modules if hasattr(module, "_SEND"))
    packets._SEND = packets._SEND.replace(
        "@wanted st.relaxed.sys.global.b64 [$1], packet;",
        "@wanted st.relaxed.sys.global.b32 [$1], $2; add.u64 packet, $1, 4;"
        "@wanted st.relaxed.sys.global.b32 [packet], $3;",
    )


KERNEL, COUNT, LEAVE = "fused_decode_kernel", "_count_read", "_leave"
READ = "        _count_read(epochs, taken, epoch)\n"
MISTAKES: dict[str, Changes] = {
    "a thread counts before others have read": edited((COUNT, "tl.debug_barrier()", "pass")),
    "packets of one turn": edited(
        ("_send", "(epoch & 1)", "(epoch & 0)"), (KERNEL, "+= (epoch & 1)", "+= (epoch & 0)")
    ),
    "clears its own turn": edited((COUNT, "(1 - turn)", "turn")),
    "does not clear who has read": edited((COUNT, "tl.store(taken + (1 - turn) * LINE, 0)", "pass")),
    "does not clear who left": edited((COUNT, "tl.store(taken + (1 - turn) * LINE + 1, 0)", "pass")),
    "one count for both turns": edited((COUNT, "epoch & 1", "epoch & 0")),
    "multiplies by a number read after the count": edited(
        (KERNEL, "before = tl.load(", "_count_read(epochs, taken, tl.load(epochs) + 1)\n        before = tl.load("),
        (KERNEL, "        _count_read(epochs, taken, tl.max(tl.max(before, axis=1), axis=0) + 1)\n", ""),
    ),
    "sums by a number read after the count": edited((KERNEL, READ, READ + "        epoch = tl.load(epochs) + 1\n")),
    "the last but one sets the number": edited((COUNT, "num_programs(0) - 1", "num_programs(0) - 2")),
    "the first sets the number": edited((COUNT, "== tl.num_programs(0) - 1", "== 0")),
    "anybody sets the number": edited((COUNT, "== tl.num_programs(0) - 1", "< tl.num_programs(0)")),
    "sets the number once": edited((COUNT, "epochs + tl.arange(0, LINE)", "epochs")),
    "does not look at the flag": edited(("_settle", "xor.b32 flag{one}, flag{one}, {flag};", "mov.b32 flag{one}, 0;")),
    "data and flag apart": sent_apart,
    "begins too early": edited((KERNEL, "        begin_early()", "        pass")),
}  # fmt: skip
WHERE_ROOM_IS_LITTLE: dict[str, Changes] = {
    "lets the next one in while it waits": edited((KERNEL, READ, READ + "        let_next_begin()\n")),
    "a thread lets the next one in, and others wait": edited((KERNEL, "tl.debug_barrier()", "pass")),
    "those that wait come first": edited((KERNEL, "= tl.program_id(0)", "= tl.num_programs(0) - 1 - tl.program_id(0)")),
}  # fmt: skip
WHERE_SOME_FAIL: dict[str, Changes] = {
    "poisons what others still store": edited((LEAVE, 'sem="release"', 'sem="relaxed"')),
    "poisons when one has left": edited((LEAVE, "fill_when_out(left, summing,", "fill_when_out(left, 1,")),
    "poisons at once": edited(("fill_when_out", "while waits:", "while False:")),
    "a warp does not know of the others": edited((KERNEL, "tl.max(failed, axis=0)", "failed[0]")),
    "nobody is told who is late": edited(("_settle", "st.relaxed.sys.global.b32 [{error}], 2;", "")),
}  # fmt: skip


def found(case: Case, changes: Changes, look: Callable[[Node], None], hurry: int = 0) -> None:
    """In one of some orders."""

    def all_orders() -> None:
        for seed in range(60):
            look(run(case, seed, changes, hurry))

    with pytest.raises(AssertionError):
        all_orders()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    found(ONE_ROW, MISTAKES[name], check)


@pytest.mark.parametrize("name", WHERE_ROOM_IS_LITTLE)
def test_a_mistake_is_found_where_room_is_little(name: str) -> None:
    found(SHARED, WHERE_ROOM_IS_LITTLE[name], check)


@pytest.mark.parametrize("name", WHERE_SOME_FAIL)
def test_a_mistake_is_found_where_some_fail(name: str) -> None:
    found(SILENT, WHERE_SOME_FAIL[name], check_failed, HURRY)


# Barriers, and what they stand between: reads of the number, packets sent, the count and what its last one stores;
# packets polled, results stored, the next one let in, who leaves, who waits for that, poison.
TOKENS = {
    "|": r"\tbar\.sync", "n": r"ld\.volatile\.global", "s": r"st\.relaxed\.sys\.global\.b64",
    "c": r"atom\.global\.gpu\.relaxed", "o": r"st\.global\.b32", "p": r"ld\.relaxed\.sys\.global\.b64",
    "l": r"griddepcontrol\.launch_dependents", "r": r"atom\.global\.gpu\.release", "a": r"ld\.global\.gpu\.acquire",
    "f": r"st\.global\.b8",
}  # fmt: skip


@pytest.mark.parametrize("tile", fused.DECODE_TILES)
def test_warps_meet_here_where_they_do_in_the_compiled_code(tile: tuple[int, int]) -> None:
    """And nowhere else: between those accesses of which others see the order."""
    ptx = decode(tile).ptx
    found = re.finditer("|".join(f"({pattern})" for pattern in TOKENS.values()), ptx)
    text = "".join(list(TOKENS)[one.lastindex - 1] for one in found if one.lastindex)
    multiplies, sums = text[: text.rindex("n")], text[text.rindex("n") :]
    assert re.fullmatch(r"n+\|*s+\|c\|ooo", multiplies), multiplies
    assert re.fullmatch(r"n\|c\|ooop+o+\|l\|+r\|a\|+f+", sums), sums


def test_orders_differ() -> None:
    """And come again with their seed."""
    first, other, again = (run(ONE_ROW, seed).gpus.draw.getstate() for seed in (0, 1, 0))
    assert first == again != other
