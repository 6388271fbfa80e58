"""Machine files: those that are shipped, and every kind of damage."""

from __future__ import annotations

import copy
import itertools
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
from undertow.sim.schedules import simulate
from undertow.sim.topologies import FullyConnected, Level, Rails, Switch, Torus, Tree

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
