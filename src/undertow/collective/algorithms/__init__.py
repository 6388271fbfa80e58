"""Algorithms in the chunk language, by name: to run, to compare, and to read as examples.

All are written for separate input and output and work in place too, where their contract knows such a form, except
those named in `OUT_OF_PLACE_ONLY`. Those that speak of nodes take them from the topology.
"""

from __future__ import annotations

from ..language import Program
from .all_gather import all_gather_direct, all_gather_doubling, all_gather_hierarchical, all_gather_ring
from .all_reduce import (
    all_pairs_chunks,
    double_binary_tree,
    halving_doubling,
    hierarchical,
    one_shot,
    ring,
    two_shot,
)
from .all_to_all import all_to_all_direct, all_to_all_swap, all_to_all_three_step, all_to_all_two_step
from .neighbours import all_to_next, send_recv_direct
from .reduce_scatter import reduce_scatter_direct, reduce_scatter_halving, reduce_scatter_ring
from .rooted import (
    broadcast_direct,
    broadcast_scatter_gather,
    broadcast_tree,
    gather_direct,
    reduce_direct,
    reduce_tree,
    scatter_direct,
)

LIBRARY: dict[str, Program] = {
    one.name: one
    for one in (
        ring, one_shot, two_shot, all_pairs_chunks, halving_doubling, double_binary_tree, hierarchical,
        all_gather_direct, all_gather_ring, all_gather_doubling, all_gather_hierarchical,
        reduce_scatter_direct, reduce_scatter_ring, reduce_scatter_halving,
        all_to_all_direct, all_to_all_swap, all_to_all_two_step, all_to_all_three_step,
        broadcast_direct, broadcast_tree, broadcast_scatter_gather, reduce_direct, reduce_tree,
        gather_direct, scatter_direct, send_recv_direct, all_to_next,
    )
}  # fmt: skip
OUT_OF_PLACE_ONLY = frozenset({"all_to_all_direct"})
