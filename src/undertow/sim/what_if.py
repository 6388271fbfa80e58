"""What would make this faster: the same once more on machines that are twice as good in one respect each.

A critical path says where time went; it does not say what is gained when that part shrinks, since another path may be
almost as long. Running again does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .cluster import Cluster
from .network import LinkKind, Network

FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Gain:
    """`what` changed, and how many times faster everything is then."""

    what: str
    speedup: float


def what_if(cluster: Cluster, seconds: Callable[[Cluster], float]) -> list[Gain]:
    """The gains of each respect, the largest first. `seconds` simulates the workload on a cluster."""
    before = seconds(cluster)
    device = cluster.device
    variants: list[tuple[str, Cluster]] = [
        ("computing twice as fast", replace(cluster, device=replace(device, peak=device.peak * FACTOR))),
        (
            "memory twice as fast",
            replace(
                cluster,
                device=replace(device, memory_bandwidth=device.memory_bandwidth * FACTOR),
                rules=replace(cluster.rules, memory_rate=cluster.rules.memory_rate * FACTOR),
            ),
        ),
    ]
    for name in dict.fromkeys(kind.name for kind in cluster.network.links.kinds):
        variants.append((f"{name}: twice the bandwidth", changed(cluster, name, bandwidth=FACTOR)))
        variants.append((f"{name}: half the latency", changed(cluster, name, latency=1 / FACTOR)))
    if cluster.copy_engines is not None and cluster.rules.engines:
        engines, twice = cluster.copy_engines, replace(cluster.rules, engines=2 * cluster.rules.engines)
        variants.append(("twice as many copy engines", replace(cluster, rules=twice)))
        adding = replace(cluster, copy_engines=replace(engines, reduces=True)).by_engines()
        variants.append(("copy engines that add", adding))
    gains = [Gain(what, before / max(seconds(variant), 1e-30)) for what, variant in variants]
    return sorted(gains, key=lambda gain: -gain.speedup)


def changed(cluster: Cluster, link: str, *, bandwidth: float = 1.0, latency: float = 1.0) -> Cluster:
    """The same cluster with links of one name that are so many times as fast, or so many times as late."""
    build = cluster.shape.build

    def other(kind: LinkKind) -> LinkKind:
        if kind.name != link:
            return kind
        points = tuple((nbytes, seconds / bandwidth) for nbytes, seconds in kind.points)
        return replace(kind, bandwidth=kind.bandwidth * bandwidth, latency=kind.latency * latency, points=points)

    def rebuilt(nodes: int, ranks: int) -> Network:
        network = build(nodes, ranks)
        network.links.kinds = [other(kind) for kind in network.links.kinds]
        return network

    return replace(cluster, shape=replace(cluster.shape, build=rebuilt))
