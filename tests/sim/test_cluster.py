"""Machine files: those that are shipped, and every kind of damage."""

from __future__ import annotations

import copy
import itertools
import math
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undertow.collective import LIBRARY
from undertow.errors import InvalidArgument
from undertow.plan.defaults import default_plan
from undertow.plan.machine import Machine
from undertow.plan.problem import Problem
from undertow.sim.cluster import Cluster, shipped_names
from undertow.sim.collectives import Collectives
from undertow.sim.network import LinkKind
from undertow.sim.node_machine import plan_machine
from undertow.sim.plans import simulate_plan
from undertow.sim.schedules import Rules, simulate
from undertow.sim.topologies import FullyConnected, Level, Rails, Switch, Torus, Tree
from undertow.sim.what_if import what_if

GOOD: dict[str, Any] = {
    "format": "undertow cluster 1",
    "name": "test",
    "description": "a tree",
    "device": {"name": "d", "peak": 1e12, "memory_bandwidth": 1e12, "multiprocessors": 8, "source": "made up"},
    "links": {
        "low": {"bandwidth": 10e9, "latency": 1e-6, "source": "made up"},
        "high": {"bandwidth": 40e9, "latency": 2e-6, "source": "made up"},
    },
    "topology": {"kind": "tree", "ranks": 8, "levels": [{"size": 1, "link": "low"}, {"size": 4, "link": "high"}]},
}


def _changed(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    table: Any = data
    for key in way:
        table = table[int(key)] if key.isdigit() else table[key]
    if value is None:
        del table[last]
    else:
        table[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("format", "undertow cluster 9", "machine.format is 'undertow cluster 9', but must be"),
        (
            "links.low.bandwidth",
            -1.0,
            "machine.links.low.bandwidth is -1.0, but must be a number of at least 1",
        ),
        ("links.low.bandwidth", None, "machine.links.low is without 'bandwidth'"),
        ("links.low.latency", float("nan"), "machine.links.low.latency is nan"),
        ("links.low.source", None, "machine.links.low is without 'source'"),
        ("links.low.colour", "red", "machine.links.low.colour is 'red', but must be absent"),
        ("links.low.duplex", "quarter", "machine.links.low.duplex is 'quarter', but must be one of full, half"),
        ("links.low.points", [[2, 1.0], [1, 1.0]], "machine.links.low.points is"),
        ("device.multiprocessors", 0, "machine.device.multiprocessors is 0"),
        ("topology.ranks", 10**9, "machine.topology.ranks is 1000000000, but must be at most 65536"),
        ("topology.kind", "star", "machine.topology.kind is 'star', but must be one of"),
        ("topology.levels", [], "machine.topology.levels is"),
        ("topology.levels.1.size", 3, None),
        ("topology.levels.1.link", "missing", "link is 'missing', but must be one of the links: low, high"),
        ("topology.levels", [{"size": 4, "link": "low"}, {"size": 8, "link": "high"}], "ranks are not joined"),
        ("topology.levels", [{"size": 1, "link": "low"}], "with link 'high' that joins nothing"),
        ("topology", {"kind": "torus", "ranks": 7, "dimensions": 2, "link": "low"}, "sides of at least 2"),
        ("topology", {"kind": "switch", "link": "low"}, "machine.topology is without 'ranks'"),
        ("topology", {"kind": "fully_connected", "ranks": 60000, "link": "low"}, "where all are connected"),
        ("device", 3, "machine.device is 3, but must be a table"),
        ("device.memory_bandwidth", 1e-300, "machine.device.memory_bandwidth is 1e-300"),
        (
            "rules",
            {"sharing": "fair", "store_and_forward": True, "source": "x"},
            "sharing is 'fair' with store_and_forw",
        ),
        (
            "copy_engines",
            {"count": 3, "copy_seconds": 0, "direction": "one", "source": "x"},
            "count is 3, but must be even",
        ),
        ("copy_engines", {"count": 2, "copy_seconds": -1, "source": "x"}, "machine.copy_engines.copy_seconds is -1"),
        (
            "copy_engines",
            {"count": 10**9, "copy_seconds": 0, "source": "x"},
            "count is 1000000000, but must be at most",
        ),
        ("collectives", {"multiprocessors": 99, "source": "x"}, "multiprocessors is 99, but must be at most the 8"),
        ("collectives", {"scan": 1, "source": "x"}, "machine.collectives.scan is 1, but must be absent"),
    ],
)
def test_damage_is_one_sentence(path: str, value: Any, sentence: str | None) -> None:
    if sentence is None:
        assert Cluster.from_dict(_changed(path, value)).ranks == 8  # groups need not divide the ranks
        return
    with pytest.raises(InvalidArgument) as caught:
        Cluster.from_dict(_changed(path, value))
    text = str(caught.value)
    assert sentence in text
    assert "\n" not in text
    assert len(text) < 300


def test_files_are_bounded_and_readable(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2 << 20))
    for source in (large, tmp_path / "absent.toml", "no-such-machine"):
        with pytest.raises(InvalidArgument):
            Cluster.load(source)
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"name = [[[[\xff")
    with pytest.raises(InvalidArgument, match="readable file"):
        Cluster.load(broken)
    with pytest.raises(InvalidArgument, match="nodes is 0"):
        Cluster.load("h100-pod").scaled(0)
    with pytest.raises(InvalidArgument, match="of 8000000000 ranks"):
        Cluster.load("h100-pod").scaled(10**9)


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_machines_say_where_numbers_come_from(name: str) -> None:
    text = (resources.files("undertow.sim") / "machines" / f"{name}.toml").read_text()
    for table in _tables(tomllib.loads(text)):
        if any(isinstance(value, float) for value in table.values()):
            assert table["source"]
    cluster = Cluster.load(name)
    assert cluster.name == name
    schedule = LIBRARY["two_shot"].compile(ranks=cluster.ranks, target="staged") if cluster.ranks <= 16 else None
    if schedule is not None:
        found = simulate(schedule, cluster.network, nbytes=1 << 24, rules=cluster.rules, check=False)
        assert 1e-5 < found.seconds < 0.01


def _tables(data: dict[str, Any]) -> list[dict[str, Any]]:
    """All tables that must name a source; one that does so speaks for those in it."""
    inner = [] if "source" in data else [value for value in data.values() if isinstance(value, dict)]
    return [data] + [one for value in inner for one in _tables(value)]


def test_shipped_are_those_the_users_ask_for() -> None:
    wanted = {"h200-virtual", "h100x8", "a100x8", "a800x8", "rtx4090x4", "rtx4090x8", "mi300x8", "dlrm128", "h100-pod"}
    assert wanted <= set(shipped_names())
    assert Cluster.load("h100-pod").ranks == 1024


def test_every_route_leads_there() -> None:
    """From link to link: in each topology all pairs of ranks are joined, and no link is passed twice."""
    low, high = LinkKind("low", 1e9, 1e-6), LinkKind("high", 2e9, 1e-6)
    for network in (
        Switch(6, low),
        FullyConnected(5, low),
        Torus((5,), low),
        Torus((4, 3), low),
        Torus((2, 3, 2), low),
        Tree(12, [Level(1, low), Level(4, high, count=2), Level(8, high)]),
        Tree(8, [Level(1, low, through=high), Level(4, low)]),
        Rails(3, 4, low, high, 2, True),
        Rails(3, 4, low, high, 4, False, spine=low),
    ):
        pairs = np.array(list(itertools.permutations(range(network.ranks), 2)))
        routes = network.routes(pairs[:, 0], pairs[:, 1])
        assert len(routes.start) == len(pairs) + 1
        assert np.all(np.diff(routes.start) >= 1)
        assert routes.links.min() >= 0
        assert routes.links.max() < network.links.count
        for first, last in itertools.pairwise(routes.start.tolist()):
            links = routes.links[first:last]
            assert len(set(links.tolist())) == len(links)


def test_rails_go_straight_and_change_inside_the_node() -> None:
    port, card = LinkKind("port", 1e9, 1e-6), LinkKind("card", 2e9, 1e-6)
    network = Rails(2, 4, port, card, 4, True)
    kinds = network.links.kind_of()
    names = [kind.name for kind in network.links.kinds]
    routes = network.routes(np.array([0, 0, 0]), np.array([1, 4, 6]))
    found = [
        [names[kinds[link]] for link in routes.links[first:last]] for first, last in itertools.pairwise(routes.start)
    ]
    assert found == [["port", "port"], ["card", "card"], ["port", "port", "card", "card"]]


def test_half_duplex_links_are_shared_by_both_directions() -> None:
    schedule = LIBRARY["all_to_all_direct"].compile(ranks=2, target="staged")
    seconds = [
        simulate(schedule, Switch(2, LinkKind("port", 1e9, 0.0, half)), nbytes=2_000_000).seconds
        for half in (False, True)
    ]
    assert seconds == pytest.approx([1e-3, 2e-3])


def test_copy_engines_cost_each_copy_and_may_learn_to_add() -> None:
    node = Cluster.load("mi300x8")
    assert node.copy_engines is not None
    assert node.interference is not None
    node = replace(node, rules=replace(node.rules, memory_rate=0.5e12))  # so slow that sums count
    adding = replace(node, copy_engines=replace(node.copy_engines, reduces=True))
    small, large = 1 << 14, 1 << 30
    times = {
        (kind, size): Collectives(cluster).time("all_reduce", size).seconds
        for kind, cluster in (("kernels", node), ("engines", node.by_engines()), ("adding", adding.by_engines()))
        for size in (small, large)
    }
    assert times["engines", small] > times["kernels", small] + node.copy_engines.copy_seconds
    assert times["engines", large] < 1.05 * times["kernels", large]
    assert times["adding", large] < times["engines", large]
    with pytest.raises(InvalidArgument, match="without copy engines"):
        Cluster.load("h100x8").by_engines()


def test_copies_queue_for_engines() -> None:
    """By hand: seven copies of P from each rank, n engines: ceil(7 / n) after each other, then a signal."""
    node = Cluster.load("mi300x8")
    assert node.copy_engines is not None
    part, link = 1 << 24, 48e9
    network, free = node.network, replace(node.rules, memory_rate=math.inf)
    schedule = LIBRARY["all_gather_direct"].compile(ranks=8, target="staged", workers=8)
    for count in (1, 2, 4, 7, 14):
        rules = replace(free, engines=count, engine_seconds=5e-6)
        found = simulate(schedule, network, nbytes=8 * part, rules=rules, check=False)
        assert found.seconds == pytest.approx(-(-7 // count) * (5e-6 + part / link + 0.6e-6) + 0.6e-6, rel=1e-9)
    # Pulls need engines that read: half of the engines there are, where each has one direction.
    pulled = LIBRARY["reduce_scatter_direct"].compile(ranks=8, target="direct", workers=8)
    for directed, turns in ((False, 1), (True, 2)):
        rules = replace(free, engines=8, engine_seconds=5e-6, engines_have_directions=directed)
        found = simulate(pulled, network, nbytes=8 * part, rules=rules, check=False)
        assert found.seconds == pytest.approx(turns * (5e-6 + part / link), rel=0.01)
    with pytest.raises(InvalidArgument, match="even number"):
        Rules(engines=3, engines_have_directions=True)


def test_one_engine_for_all_peers_is_as_slow_as_published() -> None:
    """AMD-DMA-Latte, MI300X: from 32 MB on, all copies on one engine run at 0.15 to 0.2 of one engine a peer."""
    node = Cluster.load("mi300x8")
    assert node.copy_engines is not None
    one = replace(node, copy_engines=replace(node.copy_engines, count=1))
    for size in (1 << 25, 1 << 27):
        every, single = (Collectives(cluster.by_engines()).time("all_gather", size).seconds for cluster in (node, one))
        assert 0.15 <= every / single <= 0.2


def test_what_if_engines_were_more_or_could_add() -> None:
    node = Cluster.load("mi300x8")
    assert node.copy_engines is not None
    few = replace(
        node, copy_engines=replace(node.copy_engines, count=2), rules=replace(node.rules, memory_rate=0.5e12)
    ).by_engines()
    assert (few.lane, few.multiprocessors_of("all_to_all")) == ("dma", 0)
    assert (node.lane, node.multiprocessors_of("all_to_all"), node.multiprocessors_of("all_reduce")) == ("net", 64, 32)
    gains = {
        one.what: one.speedup for one in what_if(few, lambda c: Collectives(c).time("all_reduce", 1 << 28).seconds)
    }
    assert 1.5 < gains["twice as many copy engines"] < 2.1
    assert gains["copy engines that add"] > 1.05


def test_between_sockets_is_slower_than_inside() -> None:
    """A message to the other socket passes the link between them and the host memory of the receiver's."""
    node = Cluster.load("rtx4090x8")
    names, kinds = [kind.name for kind in node.network.links.kinds], node.network.links.kind_of()
    routes = node.network.routes(np.array([0, 0]), np.array([1, 5]))
    found = [
        [names[kinds[link]] for link in routes.links[first:last]] for first, last in itertools.pairwise(routes.start)
    ]
    assert found == [["pcie", "socket", "pcie"], ["pcie", "sockets", "sockets", "socket", "pcie"]]
    # Four to four others at once: 16 GB/s between the sockets instead of 24 in each.
    far = LIBRARY["all_to_all_direct"].compile(ranks=8, target="staged", workers=8)
    seconds = simulate(far, node.network, nbytes=8 << 24, rules=node.rules, check=False)
    assert seconds.busy("sockets") == pytest.approx(16 * (1 << 24) / 16e9)
    assert seconds.busy("socket") == pytest.approx((12 + 16) * (1 << 24) / 24e9)


def test_a_node_as_the_planners_machine() -> None:
    """What the planner reads back from a file is what was made, and its plans run on it."""
    made = plan_machine(Cluster.load("mi300x8"), 4, efficiency=0.6, launch_seconds=3e-6, stream_seconds=8e-6)
    assert set(made.lanes) == {"net", "dma"}
    assert Machine.from_dict(made.to_dict()) == made
    problem = Problem.of(
        "matmul_all_reduce", 8192, 8192, 4096, dtype="bfloat16", ranks=4, device="cuda", multiprocessors=304
    )
    serial, signaled = (
        simulate_plan(problem, default_plan(problem, grain, "dma"), made).seconds for grain in ("serial", "signaled")
    )
    assert signaled < serial
    with pytest.raises(InvalidArgument, match="ranks is 9"):
        plan_machine(Cluster.load("mi300x8"), 9, efficiency=0.6, launch_seconds=3e-6, stream_seconds=8e-6)


def test_scaling_a_cluster() -> None:
    pod = Cluster.load("h100-pod").scaled(4)
    assert (pod.ranks, pod.network.ranks, pod.topology.per_node) == (32, 32, 8)


@pytest.mark.parametrize(
    ("key", "value"),
    [("bandwidth", 1e-320), ("bandwidth", 10**400), ("latency", 1e308), ("latency", False), ("bandwidth", True)],
)
def test_links_beyond_reason_are_refused(key: str, value: object) -> None:
    """With fair sharing such a link would never end."""
    data = tomllib.loads((resources.files("undertow.sim") / "machines" / "h100x8.toml").read_text())
    data["links"][next(iter(data["links"]))][key] = value
    with pytest.raises(InvalidArgument, match=key):
        Cluster.from_dict(data)


def test_a_number_of_too_many_digits_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(f"format = {'1' * 5000}")
    with pytest.raises(InvalidArgument, match="readable file in TOML"):
        Cluster.load(path)
