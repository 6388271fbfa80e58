"""How fast the simulator is: events per second, a ring of 1024 ranks, a DLRM step on 128 nodes, memory.

    PYTHONPATH=src python bench/simulator_speed.py [--ranks 1024] [--rounds 3]

Processor time of this process, the best of some rounds: what is told is what a free core would take.
"""

from __future__ import annotations

import argparse
import time

from undertow.collective import LIBRARY
from undertow.sim.cluster import Cluster
from undertow.sim.network import LinkKind
from undertow.sim.schedules import simulate
from undertow.sim.topologies import Switch
from undertow.sim.workloads import dlrm

PORT = LinkKind("port", 400e9, 0.5e-6)
TILE, TILES = 1 << 16, 4


def ring(ranks: int, rounds: int, target: str) -> None:
    """An AllReduce of four tiles a chunk; compiling is not counted."""
    schedule = LIBRARY["ring"].compile(ranks=ranks, target=target, check=False)
    network, best = Switch(ranks, PORT), float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        found = simulate(schedule, network, nbytes=ranks * TILES * TILE, tile=TILE, check=False)
        best = min(best, time.process_time() - begun)
    print(
        f"ring all_reduce, {ranks} ranks, {TILES} tiles, {target}: {best:.2f} s, {found.events} events"
        f" ({found.events / best / 1e6:.1f} M/s), {found.flights} instructions, {found.memory >> 10} KiB under way"
    )


def step(rounds: int) -> None:
    """With compiling its collectives."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        dlrm(Cluster.load("dlrm128"))
        best = min(best, time.process_time() - begun)
    print(f"dlrm step, 128 nodes: {best:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    dlrm(Cluster.load("dlrm128").scaled(16))  # compiles the loops
    step(options.rounds)
    for kind in ("staged", "direct"):
        ring(64, options.rounds, kind)
        ring(options.ranks, options.rounds, kind)
