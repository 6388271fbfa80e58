"""Which program a collective runs, by size and place: tables that were measured.

An entry holds up to `up_to` bytes (the sum of a call's spans). The CPU table comes from `bench/cpu_collectives.py`; its
results, with dates and machines, are in bench/results. Between nodes the programs that cross the slow link least are
taken, at any size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from ..errors import InvalidArgument
from .topology import Topology


@dataclass(frozen=True, slots=True)
class Choice:
    """A library program and how it is compiled; `stride` None: the runtime's own."""

    up_to: float
    program: str
    stride: int | None = None
    slots: int = 2
    depth: int = 2
    workers: int = 1
    instances: int = 1
    packets: bool = False


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
# Every collective of a GPU runs the same program as on a CPU, on as many CTAs as hide a memory's latency.
CUDA = {name: tuple(replace(one, instances=16) for one in table) for name, table in CPU.items()}
NODES = {"all_reduce": "hierarchical", "all_gather": "all_gather_hierarchical", "all_to_all": "all_to_all_two_step"}
IN_PLACE_INSTEAD = {"all_to_all_direct": "all_to_all_swap"}


def choose(collective: str, nbytes: int, in_place: bool, device: str, topology: Topology) -> Choice:
    """The entry for `nbytes`; programs that cannot work in place are replaced by their sibling that can."""
    table = CUDA if device == "cuda" else CPU
    if collective not in table:
        raise InvalidArgument(argument="collective", was=repr(collective), must=f"one of {', '.join(table)}")
    choice = next(one for one in table[collective] if nbytes <= one.up_to)
    nodes = topology.members
    if len(nodes) > 1 and collective in NODES and len({len(one) for one in nodes}) == 1 and _in_order(topology):
        choice = Choice(inf, NODES[collective])
    if in_place:
        choice = replace(choice, program=IN_PLACE_INSTEAD.get(choice.program, choice.program))
    return choice


def _in_order(topology: Topology) -> bool:
    """Whether ranks are numbered node by node."""
    return list(topology.nodes) == sorted(topology.nodes)
