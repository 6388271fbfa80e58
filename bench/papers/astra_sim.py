"""ASTRA-sim 2, congestion-aware: its printed times and ours, by its rules on its shipped HGX-H100-validated files.

PYTHONPATH=src python bench/papers/astra_sim.py
"""

from __future__ import annotations

from dataclasses import replace

from side_by_side import Figure, print_figures

from undertow.sim import astra
from undertow.sim.cluster import Cluster

# NPUs, bytes, microseconds: ring AllReduce, 4 splits, 2 active, as its analytical congestion-aware binary printed them.
PRINTED = [
    (8, 1 << 20, 57.4),
    (8, 64 << 20, 357.3),
    (8, 1 << 30, 4926.5),
    (64, 1 << 20, 479.0),
    (64, 1 << 30, 5879.0),
    (128, 1 << 20, 961.0),
    (128, 1 << 30, 6399.0),
]


def figures() -> list[Figure]:
    cluster = Cluster.load("astra-hgx-h100")
    found = []
    for npus, nbytes, published in PRINTED:
        wide = replace(cluster, shape=replace(cluster.shape, per_node=npus))
        simulated = astra.all_reduce(wide, nbytes).seconds * 1e6
        what = f"ring all_reduce, {npus} NPUs, {nbytes >> 20} MiB"
        found.append(Figure(what, f"{published:.1f} µs", f"{simulated:.1f} µs", f"{simulated / published - 1:+.2%}"))
    return found


if __name__ == "__main__":
    print_figures(
        "ASTRA-sim, HGX-H100-validated",
        figures(),
        [
            "Bandwidth 400 · 2^30, latency 936.25 ns, endpoint delay 10 ns, memory 3350 GB/s: all from its files.",
            "AllToAll 'ring' (relayed hop by hop) is not among our programs; direct AllToAll matches its closed form.",
        ],
    )
