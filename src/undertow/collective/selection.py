"""Which program a collective runs, by size and place: tables that were measured.

An entry holds up to `up_to` bytes (the sum of a call's spans) and `ranks` ranks. The CPU table comes from
`bench/cpu_collectives.py`; its results, with dates and machines, are in bench/results. Between nodes the programs that
cross the slow link least are taken, at any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..errors import InvalidArgument
from .topology import Topology


@dataclass(frozen=True, slots=True)
class Choice:
    """A library program, how it is compiled and run; `stride`, `warps` None: the runtime's own."""

    up_to: float
    program: str
    ranks: float = inf
    stride: int | None = None
    slots: int = 2
    depth: int = 2
    workers: int = 1
    instances: int = 1
    packets: bool = False
    warps: int | None = None


_PROGRAMS = {
    "all_reduce": "two_shot",
    "all_gather": "all_gather_direct",
    "reduce_scatter": "reduce_scatter_direct",
    "all_to_all": "all_to_all_direct",
    "broadcast": "broadcast_direct",
    "reduce": "reduce_direct",
    "gather": "gather_direct",
    "scatter": "scatter_direct",
}
# What differs most is the staged tile: with a core each, larger ones pay (fewer meetings, and lines that have left the
# other core's cache); with more ranks than cores, all must fit.
CPU: dict[str, tuple[Choice, ...]] = {
    name: (Choice(inf, program, ranks=2, stride=256 << 10), Choice(inf, program, stride=128 << 10))
    for name, program in _PROGRAMS.items()
}
# all_reduce by size. On two ranks, calls take staging in turn, about 1 MB of it (what a second-level cache holds): a
# line that is written again has left the cache of whoever read it, and need not be fetched from there. With more ranks
# than cores every meeting is a change of process: only one while bytes cost less than that, and for long calls one tile
# of twice the size instead of two in turn.
CPU["all_reduce"] = (
    Choice(4 << 10, "two_shot", ranks=2, stride=256 << 10),
    Choice(96 << 10, "two_shot", ranks=2, stride=64 << 10, depth=16),
    Choice(192 << 10, "two_shot", ranks=2, stride=128 << 10, depth=8),
    Choice(512 << 10, "two_shot", ranks=2, stride=256 << 10, depth=4),
    Choice(inf, "two_shot", ranks=2, stride=256 << 10),
    Choice(16 << 10, "one_shot", ranks=4, stride=64 << 10),
    Choice(512 << 10, "two_shot", stride=128 << 10),
    Choice(inf, "two_shot", stride=256 << 10, depth=1),
)
# On a GPU: packets while latency is all there is, then the direct programs, on as many CTAs as it takes to keep the
# memory busy (a rank takes no more than `most_ctas`). Packets of more than 8 ranks do not fit the kernel.
# From a sweep over CTAs, warps and loads in flight, all_reduce of symmetric buffers on 4 ranks of a virtual node (one
# H200), and a look at 8. GPUs joined by links, other collectives, and staged calls of ordinary tensors follow it
# unmeasured (but for warps: straight-line kernels' only).
_FEW, _SOME, _ALL = 8, 16, 128
CUDA: dict[str, tuple[Choice, ...]] = {
    name: (
        Choice(128 << 10, program, instances=_FEW),
        Choice(512 << 10, program, instances=_SOME),
        Choice(2 << 20, program, instances=_SOME),
        Choice(8 << 20, program, instances=_SOME, warps=16),
        Choice(inf, program, instances=_ALL, warps=16),
    )
    for name, program in _PROGRAMS.items()
}
CUDA["all_reduce"] = (
    Choice(8 << 10, "one_shot", ranks=4, instances=_SOME, packets=True, warps=4),
    Choice(64 << 10, "one_shot", ranks=4, instances=_ALL, packets=True),
    Choice(16 << 10, "one_shot", ranks=8, instances=_FEW, packets=True),
    *CUDA["all_reduce"],
)
NODES = {"all_reduce": "hierarchical", "all_gather": "all_gather_hierarchical", "all_to_all": "all_to_all_two_step"}


def most_ctas(multiprocessors: int) -> int:
    """CTAs that a call takes at most, each on a multiprocessor of its own: half of a rank's.

    They wait there while other ranks still compute. On a GPU that ranks share, matmuls that are launched in clusters of
    several neighbouring multiprocessors (cuBLAS takes up to 8) find room only where not every one has a CTA that waits
    for them. On a GPU of one rank, gradients are computed beside the sums of earlier ones; and calls of two groups, on
    streams of their own that run in another order on another rank (along both dimensions of a mesh), would wait for
    each other in a circle if they did not fit beside each other.
    """
    return max(1, multiprocessors // 2)


def choose(collective: str, nbytes: int, device: str, topology: Topology) -> Choice:
    """The entry for `nbytes`."""
    table = CUDA if device == "cuda" else CPU
    if collective not in table:
        raise InvalidArgument(argument="collective", was=repr(collective), must=f"one of {', '.join(table)}")
    choice = next(one for one in table[collective] if nbytes <= one.up_to and topology.ranks <= one.ranks)
    nodes = topology.members
    if len(nodes) > 1 and collective in NODES and len({len(one) for one in nodes}) == 1 and _in_order(topology):
        choice = Choice(inf, NODES[collective])
    return choice


def _in_order(topology: Topology) -> bool:
    """Whether ranks are numbered node by node."""
    return list(topology.nodes) == sorted(topology.nodes)
