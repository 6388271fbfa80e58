"""Which program a collective runs, by size: tables that were measured, and the sentence that says so.

An entry holds up to `up_to` bytes (of a rank's longer buffer). The tables come from `bench/cpu_collectives.py`; its
results, with dates and machines, are in bench/results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Choice:
    """A library program and how it is compiled."""

    up_to: float
    program: str
    stride: int = 64 << 10
    slots: int = 2
    depth: int = 2
    workers: int = 1
    instances: int = 1


CPU: dict[str, tuple[Choice, ...]] = {
    "all_reduce": (Choice(inf, "two_shot"),),
    "all_gather": (Choice(inf, "all_gather_direct"),),
    "reduce_scatter": (Choice(inf, "reduce_scatter_direct"),),
    "all_to_all": (Choice(inf, "all_to_all_direct"),),
    "broadcast": (Choice(inf, "broadcast_direct"),),
    "reduce": (Choice(inf, "reduce_direct"),),
    "gather": (Choice(inf, "gather_direct"),),
    "scatter": (Choice(inf, "scatter_direct"),),
}
IN_PLACE_INSTEAD = {"all_to_all_direct": "all_to_all_swap"}


def choose(collective: str, nbytes: int, in_place: bool) -> Choice:
    """The entry for `nbytes`; programs that cannot work in place are replaced by their sibling that can."""
    if collective not in CPU:
        raise InvalidArgument(argument="collective", was=repr(collective), must=f"one of {', '.join(CPU)}")
    for choice in CPU[collective]:
        if nbytes <= choice.up_to:
            break
    if in_place and choice.program in IN_PLACE_INSTEAD:
        from dataclasses import replace

        return replace(choice, program=IN_PLACE_INSTEAD[choice.program])
    return choice
