"""Schedules and networks that several tests run, and a digest of what came out, for comparing the two cores."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from undertow.collective import LIBRARY, Topology
from undertow.sim.network import LinkKind, Network
from undertow.sim.schedules import Rules, simulate
from undertow.sim.topologies import FullyConnected, Rails, Switch, Torus

BANDWIDTH, LATENCY = 400e9, 1e-6  # of a route through the switch: half of the latency is that of each of its two links


def switch(ranks: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Switch:
    return Switch(ranks, LinkKind("port", bandwidth, latency / 2))


def networks() -> list[Network]:
    slow, fast = LinkKind("card", 25e9, 2e-6), LinkKind("port", 300e9, 0.3e-6)
    curved = LinkKind("port", 1e9, 1e-6, points=((1024, 2e-6), (1 << 20, 30e-6), (1 << 26, 1500e-6)))
    return [
        switch(8),
        FullyConnected(8, slow),
        Torus((4, 2), fast),
        Rails(2, 4, fast, slow, 2, True),
        Switch(8, curved),
    ]


def digest() -> str:
    """Every number of a few simulations, to the last bit."""
    found = hashlib.sha256()
    for network in networks():
        for name in ("ring", "two_shot", "all_to_all_two_step", "double_binary_tree"):
            topology = Topology.grid(2, 4)
            for target in ("direct", "staged"):
                schedule = LIBRARY[name].compile(topology=topology, target=target, check=False)
                for fair in (False, True):
                    if fair and any(kind.points for kind in network.links.kinds):
                        continue
                    forwards = name == "ring" and not fair
                    plain = Rules(fair=fair, store_and_forward=forwards, step_seconds=1e-7, worker_rate=100e9)
                    narrow = replace(plain, memory_rate=200e9)
                    few = replace(narrow, engines=2, engine_seconds=1e-6, engines_have_directions=name == "two_shot")
                    for rules in (plain, narrow, few):
                        result = simulate(
                            schedule, network, nbytes=8 << 16, tile=1 << 14, rules=rules, traced=True, check=False
                        )
                        for numbers in (np.array([result.seconds, result.events]), result.link_bytes, result.log):
                            found.update(np.ascontiguousarray(numbers).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    print(digest())
