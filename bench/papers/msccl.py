"""MSCCL: AllReduce, AllToAll and AllToNext on nodes of 8 A100, against what a plain library would do.

PYTHONPATH=src python bench/papers/msccl.py
"""

from __future__ import annotations

from side_by_side import Figure, print_figures

from undertow.collective import LIBRARY, Program, Trace, program
from undertow.sim.cluster import Cluster
from undertow.sim.schedules import simulate

SIZES = (1 << 20, 32 << 20, 1 << 30)
_TILE = 1 << 20


@program("all_to_next")
def naive_next(c: Trace) -> None:
    """Everybody sends its buffer to the next rank, as it is."""
    for rank in range(c.ranks - 1):
        c.rank(rank).input[0].copy(c.rank(rank + 1).output[0])


@program("all_reduce", chunks=lambda ranks: 8 * ranks)
def eight_rings(c: Trace) -> None:
    """A ring for each card of a node: the k-th enters every node at place k and leaves it at the place before."""
    ranks = c.ranks
    for ring in range(8):
        at = [node * 8 + (ring + step) % 8 for node in range(ranks // 8) for step in range(8)]
        inputs = [c.rank(one).input[ring * ranks : (ring + 1) * ranks] for one in at]
        outputs = [c.rank(one).output[ring * ranks : (ring + 1) * ranks] for one in at]
        passed = [inputs[place][place] for place in range(ranks)]
        for step in range(1, ranks):
            before, passed = passed, []
            for place in range(ranks):
                chunk = (place - step) % ranks
                total = inputs[place][chunk].copy(outputs[place][chunk], channel=ring)
                passed.append(total.reduce(before[place - 1], channel=ring))
        for step in range(ranks - 1):
            before, passed = passed, []
            for place in range(ranks):
                passed.append(before[place - 1].copy(outputs[place][(place - step) % ranks], channel=ring))


def slots(nbytes: int) -> int:
    """Messages that a connection may have under way: MSCCL's LL and LL128 have 8; Simple, which MSCCL's plans for the
    A100 take above 22 MB, 4 MiB, which are 4 tiles."""
    return 8 if nbytes <= 22 << 20 else 4


def seconds(one: Program, nodes: int, nbytes: int) -> float:
    cluster = Cluster.load("a100x16").scaled(nodes)
    schedule = one.compile(topology=cluster.topology, target="staged", workers=16, slots=slots(nbytes))
    return simulate(schedule, cluster.network, nbytes=nbytes, tile=_TILE, rules=cluster.rules, check=False).seconds


def ratios(name: str, first: Program, second: Program, nodes: int, published: str) -> list[Figure]:
    found = []
    for nbytes in SIZES:
        ratio = seconds(first, nodes, nbytes) / seconds(second, nodes, nbytes)
        found.append(Figure(f"{name}, {nodes}x8, {nbytes >> 20} MiB", published, f"{ratio:.2f}×"))
    return found


if __name__ == "__main__":
    print_figures(
        "MSCCL on nodes of 8 A100 with 8 cards of 200 Gb/s: how much faster",
        [
            *ratios("AllToNext over next-rank sends", naive_next, LIBRARY["all_to_next"], 3, "14.5× at the largest"),
            *ratios("AllToNext over next-rank sends", naive_next, LIBRARY["all_to_next"], 8, "not given"),
            *ratios("AllReduce hierarchical over one ring", LIBRARY["ring"], LIBRARY["hierarchical"], 2, "not given"),
            *ratios("AllReduce hierarchical over eight rings", eight_rings, LIBRARY["hierarchical"], 2, "up to 1.9×"),
            *ratios(
                "AllToAll two-step over direct", LIBRARY["all_to_all_direct"], LIBRARY["all_to_all_two_step"], 8,
                "up to 1.3×",
            ),
        ],
        [
            "AllToNext: between two nodes 8 cards do what one did, so no more than 8× can come from the link. What the"
            " paper has beyond is NCCL's: its point-to-point sends do not reach a card's 25 GB/s. Nothing here is"
            " slower than its link, so that part cannot show.",
            "AllReduce: against one ring, which leaves each node by one card of eight; and against eight rings, one for"
            " each card, which is what NCCL has.",
            "AllReduce, large: hierarchical moves 2 (1/8 + 7/8) of the buffer inside a node beside the cards, but step"
            " after step; eight rings keep cards and ports busy all the time. NCCL's rings do not.",
            "AllToAll: both ways send the same bytes over the same cards, direct ones along the rail of their"
            " destination too, so what two-step can win is what a message costs a card or its proxy beside its bytes."
            " No such cost is published, so none is simulated: two-step only pays for its first step and for waiting"
            " for eight neighbours; more where a connection has fewer messages under way, for each of its messages is"
            " eight chunks. Users of MSCCL found no gain on 8 to 64 A100 either (microsoft/msccl#48).",
        ],
    )  # fmt: skip
