"""Fused embedding + AllToAll (arXiv 2305.06942): lookup, then exchange, against sixteen slices that leave when made.

PYTHONPATH=src python bench/papers/fused_embedding.py
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from side_by_side import Figure, print_figures

from undertow.sim.cluster import Cluster
from undertow.sim.collectives import Collectives
from undertow.sim.steps import Step
from undertow.sim.workloads import PARTS, dlrm

BATCHES, TABLES = (256, 512, 1024, 2048), (4, 8, 16)
WIDTH, POOLING, HALF = 92, 70, 2


def pair(cluster: Cluster, known: Collectives, batch: int, tables: int, parts: int) -> float:
    """Seconds of the lookup and the exchange of its rows, in so many parts."""
    step = Step(cluster, known)
    bags = cluster.ranks * batch * tables
    pooled = 1.0 * bags * WIDTH * HALF
    for _ in range(parts):
        made = step.compute("lookup", nbytes=(pooled * POOLING + pooled) / parts)
        step.collective("all_to_all", pooled / parts, after=[made], multiprocessors=0)  # the kernel sends it itself
    return step.run().seconds


def saved(cluster: Cluster) -> tuple[float, float]:
    """Mean and largest share of time that slicing saves, over batches and tables."""
    known = Collectives(cluster)
    shares = [
        1 - pair(cluster, known, batch, tables, PARTS["fused"]) / pair(cluster, known, batch, tables, 1)
        for batch in BATCHES
        for tables in TABLES
    ]
    return statistics.mean(shares), max(shares)


if __name__ == "__main__":
    torus = Cluster.load("dlrm128")
    inter, inter_best = saved(torus.scaled(4))
    node = Cluster.load("mi300x8")
    intra, intra_best = saved(replace(node, shape=replace(node.shape, per_node=4), device=torus.device))
    known = Collectives(torus)
    step = 1 - dlrm(torus, "fused", known=known).seconds / dlrm(torus, "serial", known=known).seconds
    print_figures(
        "Fused embedding + AllToAll: time saved",
        [
            Figure("between nodes, mean (best)", "31% (58%)", f"{inter:.0%} ({inter_best:.0%})"),
            Figure("inside a node of 4, mean (best)", "20 to 25% (32%)", f"{intra:.0%} ({intra_best:.0%})"),
            Figure("a DLRM step, 128 nodes", "about 10% (v1), 21% (v2)", f"{step:.0%}"),
        ],
        [
            "Batches, tables, width 92 and pooling 70 are placeholders: the paper's grid could not be read again. The"
            " order of its figures should come out, not their digits.",
            "Lookups are a roofline (bytes / memory bandwidth), links as in machine dlrm128; inside a node xGMI as in"
            " machine mi300x8, since no figure of the MI210's was at hand.",
        ],
    )
