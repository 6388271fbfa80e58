"""Steps: presets, files, Chakra traces, and what each kind of damage is answered with."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undertow.errors import InvalidArgument, SimulationRefused
from undertow.plan.interference import Interference
from undertow.sim import chakra, step_files
from undertow.sim.chakra import COLL, COMP, RECV, SEND, Node
from undertow.sim.cluster import Cluster
from undertow.sim.collectives import Collectives, programs_for
from undertow.sim.steps import Step
from undertow.sim.tasks import Outcome, Task, Tasks
from undertow.sim.what_if import changed, what_if
from undertow.sim.workloads import STRATEGIES, Transformer, dlrm, transformer

NODE = Cluster.load("h100x8")
PORT = 370.8e9
STEP: dict[str, Any] = {
    "format": "undertow step 1",
    "name": "test",
    "operations": [
        {"name": "one", "kind": "compute", "seconds": 1e-3},
        {"name": "sum", "kind": "all_reduce", "bytes": 1 << 26, "after": ["one"]},
        {"name": "two", "kind": "compute", "flops": 989.4e9, "after": ["one"]},
    ],
}


def test_a_step_takes_what_its_parts_take() -> None:
    step = Step(NODE)
    one = step.compute("one", seconds=1e-3)
    step.collective("all_reduce", 1 << 28, after=[one])
    step.compute("two", flops=989.4e9, after=[one])
    found = step.run()
    assert found.ran[2].end == pytest.approx(1e-3 + 1e-3 * (1 + 24 / 132))  # beside 24 CTAs of the sum on 132 SMs
    alone = Step(NODE)
    alone.collective("all_reduce", 1 << 28, multiprocessors=0)
    assert alone.run().seconds == pytest.approx(found.ran[1].end - 1e-3)
    beside = Step(NODE)
    beside.collective("all_reduce", 1 << 28)
    beside.compute("copy", nbytes=3.35e9)  # lives on memory: it does not miss the SMs
    assert beside.run().ran[1].end == pytest.approx(1e-3)
    least = 2 * 7 / 8 * (1 << 28) / PORT
    assert least < found.ran[1].end - 1e-3 < 1.2 * least


def test_where_the_time_of_a_step_goes_by_hand() -> None:
    """1 ms of computing, a sum, 0.5 ms after it; beside the sum 0.2 ms that nobody waits for. Half the sum's time is
    saved where links are twice as good, half of computing where that is twice as fast."""

    def run(cluster: Cluster) -> Outcome:
        step = Step(cluster, interference=Interference(132, ()))
        one = step.compute("one", flops=1e-3 * 989.4e12)
        summed = step.collective("all_reduce", 1 << 28, after=[one])
        step.compute("beside", flops=0.2e-3 * 989.4e12, after=[one])
        step.compute("two", flops=0.5e-3 * 989.4e12, after=[summed])
        return step.run()

    node = replace(NODE, rules=replace(NODE.rules, memory_rate=math.inf))  # so that a sum is links and nothing else
    found = run(node)
    moving = Collectives(node).time("all_reduce", 1 << 28).seconds
    assert found.by_resource() == pytest.approx({"computing": 1.5e-3, "all_reduce over nvlink": moving})
    assert [found.tasks[one].name for one in found.critical_path()] == ["one", "all_reduce", "two"]
    better = changed(node, "nvlink", bandwidth=2.0, latency=0.5)
    assert found.seconds - run(better).seconds == pytest.approx(moving / 2, rel=1e-6)
    gains = {one.what: one.speedup for one in what_if(node, lambda other: run(other).seconds)}
    assert gains["computing twice as fast"] == pytest.approx(found.seconds / (found.seconds - 0.75e-3))


def test_a_delay_is_on_the_path_of_what_it_follows() -> None:
    """Ends at 1, then a delay of 5; its engine is free at 3 already: the path is through the first, and waits."""
    tasks = Tasks()
    first = tasks.add(Task("first", (0,), "a", 1.0))
    tasks.add(Task("other", (0,), "b", 3.0))
    tasks.add(Task("last", (0,), "b", 2.0, after=(first,), delay=5.0))
    found = tasks.run()
    assert found.by_resource() == {"waiting": 5.0, "b": 2.0, "a": 1.0}
    late = Tasks()
    first = late.add(Task("first", (0,), "a", 1.0))
    late.add(Task("other", (0,), "b", 7.0))
    late.add(Task("last", (0,), "b", 2.0, after=(first,), delay=5.0))
    assert late.run().by_resource() == {"b": 9.0}


def test_dlrm_on_128_nodes_within_a_second() -> None:
    cluster = Cluster.load("dlrm128")
    dlrm(cluster.scaled(16))  # compiles the loops
    begun = time.process_time()
    seconds = {strategy: dlrm(cluster, strategy).seconds for strategy in ("serial", "fused")}
    took = (time.process_time() - begun) / 2
    assert took < 2.0  # 1 s on a free core; others may be at work here
    assert 0.85 < seconds["fused"] / seconds["serial"] < 0.97


def test_strategies_never_lose_on_paper() -> None:
    pod = Cluster.load("h100-pod").scaled(2)
    known = Collectives(pod)
    serial, chunked, fused = (transformer(pod, one, known=known).seconds for one in STRATEGIES)
    assert serial > chunked > fused
    staged = transformer(pod, "serial", Transformer(stages=2))
    assert staged.seconds < serial
    assert any(task.resource == "send over ndr" for task in staged.tasks)
    with pytest.raises(InvalidArgument, match="stages"):
        transformer(pod, "serial", Transformer(stages=3))
    with pytest.raises(InvalidArgument, match="strategy"):
        transformer(pod, "best")


def test_groups_are_parts_of_the_cluster() -> None:
    pod = Cluster.load("h100-pod").scaled(4)
    known = Collectives(pod)
    assert [known.ranks(one) for one in ("all", "node", "across")] == [32, 8, 4]
    inside, across = known.time("all_reduce", 1 << 26, "node"), known.time("all_reduce", 1 << 26, "across")
    assert (inside.link, across.link) == ("nvlink", "ndr")
    assert across.seconds > 5 * inside.seconds
    assert programs_for("all_reduce", pod.topology) == ("hierarchical",)
    assert known.time("all_reduce", 0).seconds == 0
    for bad in (("all_reduce", 1, "some"), ("scan", 1, "all"), ("all_reduce", -1, "all")):
        with pytest.raises(InvalidArgument):
            known.time(*bad)


def _changed(index: int, **values: Any) -> dict[str, Any]:
    data = copy.deepcopy(STEP)
    data["operations"][index].update(values)
    return data


def test_step_files(tmp_path: Path) -> None:
    found = step_files.run(STEP, NODE)
    slow = 1 + 24 / 132
    moving = found.ran[1].end - 1e-3
    assert found.seconds == pytest.approx(1e-3 + moving + (1e-3 - moving / slow))
    assert step_files.run(_changed(1, multiprocessors=132), NODE).seconds > found.seconds
    for data, sentence in (
        (_changed(0, after=["sum"]), "wait for each other in a circle"),
        (_changed(1, after=["nobody"]), "the name of an operation"),
        (_changed(1, kind="scan"), "kind is 'scan'"),
        (_changed(1, bytes=-5), "bytes is -5"),
        (_changed(1, group="world"), "group is 'world'"),
        (_changed(2, name="one"), "a name of its own"),
        (_changed(2, colour=1), "colour is 1"),
        ({**STEP, "operations": []}, "operations"),
        ({**STEP, "format": "x"}, "format"),
    ):
        with pytest.raises(InvalidArgument, match=sentence):
            step_files.run(data, NODE)
    path = tmp_path / "step.toml"
    path.write_text("name = [")
    with pytest.raises(InvalidArgument, match="readable"):
        step_files.load(path)


def test_chakra_there_and_back(tmp_path: Path) -> None:
    step = Step(NODE)
    one = step.compute("one", seconds=100e-6)
    gathered = step.collective("all_gather", 1 << 20, after=[one])
    step.compute("two", seconds=50e-6, after=[gathered])
    outcome = step.run()
    nodes = chakra.from_outcome(outcome, NODE)
    chakra.write(tmp_path / "step.0.et", nodes)
    again = chakra.read(tmp_path / "step.0.et")
    assert again == nodes
    assert again[1].attributes["comm_size"] == (1 << 20) // 8
    assert chakra.simulate([again], NODE).seconds == pytest.approx(outcome.seconds, rel=1e-6)
    assert chakra.find(tmp_path / "step") == [tmp_path / "step.0.et"]


def test_chakra_keeps_multiprocessors() -> None:
    """A sum of 24 CTAs beside a matmul: as slow from the trace as in the step; without the attribute as alone."""
    step = Step(NODE)
    step.collective("all_reduce", 1 << 28)
    step.compute("matmul", seconds=1e-3)
    outcome = step.run()
    nodes = chakra.from_outcome(outcome, NODE)
    assert chakra.simulate([nodes], NODE).ran[1].end == pytest.approx(1e-3 * (1 + 24 / 132))
    silent = [Node(one.id, one.name, one.type, one.after, one.micros, dict(one.attributes)) for one in nodes]
    for one in silent:
        one.attributes.pop("multiprocessors")
    assert chakra.simulate([silent], NODE).ran[1].end == pytest.approx(1e-3)
    silent[0].attributes["multiprocessors"] = 133
    with pytest.raises(SimulationRefused, match="133 multiprocessors, of a device with 132"):
        chakra.simulate([silent], NODE)


def test_chakra_keeps_groups(tmp_path: Path) -> None:
    pod = Cluster.load("h100-pod").scaled(2)
    step = Step(pod)
    step.collective("all_gather", 1 << 24, group="node")
    step.collective("all_reduce", 1 << 24, group="across")
    outcome = step.run()
    chakra.write(tmp_path / "x.et", chakra.from_outcome(outcome, pod))
    assert chakra.simulate([chakra.read(tmp_path / "x.et")], pod).seconds == pytest.approx(outcome.seconds, rel=1e-6)
    about: dict[str, Any] = {"comm_type": 0, "comm_size": 1 << 20, "pg_name": "odd"}
    odd = [[Node(0, "sum", COLL, (), 0, about)] if rank < 3 else [Node(0, "work", COMP, (), 1)] for rank in range(16)]
    with pytest.raises(SimulationRefused, match="3 ranks that are neither all"):
        chakra.simulate(odd, pod)


def test_chakra_of_several_ranks() -> None:
    """Collectives meet in order; a late rank makes all of them late; messages meet by their ends."""
    traces = []
    for rank in range(8):
        about: dict[str, Any] = {"comm_type": 0, "comm_size": 1 << 24, "pg_name": "0"}
        nodes = [Node(0, "work", COMP, (), 100 * (rank + 1)), Node(1, "sum", COLL, (0,), 0, about)]
        message: dict[str, Any] = {"comm_src": 0, "comm_dst": 1, "comm_tag": 3, "comm_size": 1 << 20}
        if rank in (0, 1):
            nodes.append(Node(2, "message", SEND if rank == 0 else RECV, (1,), 0, message))
        traces.append(nodes)
    found = chakra.simulate(traces, NODE)
    sums = [ran for task, ran in zip(found.tasks, found.ran, strict=True) if task.name == "sum"]
    assert len(sums) == 1
    assert sums[0].start == pytest.approx(800e-6)
    sent = [ran for task, ran in zip(found.tasks, found.ran, strict=True) if task.name == "message"]
    assert len(sent) == 1
    assert sent[0].end - sent[0].start == pytest.approx((1 << 20) / PORT + 0.6e-6, rel=0.3)  # and copies at both ends
    with pytest.raises(SimulationRefused, match="3 traces are neither one nor"):
        chakra.simulate(traces[:3], NODE)


def test_chakra_issues_what_is_ready() -> None:
    """The second kernel stands behind one that waits for a long sum: it runs meanwhile."""
    about: dict[str, Any] = {"comm_type": 0, "comm_size": 1 << 28}
    nodes = [Node(0, "sum", COLL, (), 0, about), Node(1, "late", COMP, (0,), 50), Node(2, "early", COMP, (), 70)]
    found = chakra.simulate([nodes], NODE)
    ran = {task.name: one for task, one in zip(found.tasks, found.ran, strict=True)}
    assert ran["sum"].end > 200e-6
    assert ran["early"].start == 0
    assert ran["late"].start == ran["sum"].end
    queue = [Node(number, str(number), COMP, (), 10) for number in range(4)]  # one engine: one after the other
    assert chakra.simulate([queue], NODE).seconds == pytest.approx(40e-6)


def test_chakra_messages_of_different_pairs_do_not_queue() -> None:
    def traces(pairs: list[tuple[int, int]]) -> list[list[Node]]:
        found: list[list[Node]] = [[Node(99, "work", COMP, (), 1)] for _ in range(8)]
        for number, (source, destination) in enumerate(pairs):
            about: dict[str, Any] = {"comm_src": source, "comm_dst": destination, "comm_size": 1 << 26}
            found[source].append(Node(number, "message", SEND, (), 0, about))
            found[destination].append(Node(number, "message", RECV, (), 0, about))
        return found

    alone = chakra.simulate(traces([(0, 1)]), NODE).seconds
    assert chakra.simulate(traces([(0, 1), (2, 3), (4, 5), (6, 7)]), NODE).seconds == pytest.approx(alone)
    assert chakra.simulate(traces([(0, 1), (0, 1)]), NODE).seconds == pytest.approx(2 * alone)
    assert chakra.simulate(traces([(0, 1), (0, 2)]), NODE).seconds == pytest.approx(2 * alone)  # they share a port
    lonely = traces([(0, 1)])
    lonely[0].pop()
    with pytest.raises(SimulationRefused, match="node 0 of rank 1 is a receive that no send meets"):
        chakra.simulate(lonely, NODE)


def test_collectives_of_different_groups_share_only_links() -> None:
    """Inside nodes and across them: different links, so both at once; twice across: one after the other."""
    pod = Cluster.load("h100-pod").scaled(4)

    def seconds(*groups: str, **options: Any) -> float:
        step = Step(pod)
        for number, group in enumerate(groups):
            step.collective(
                "all_reduce", 1 << 28, group=group, **{key: f"{one}{number}" for key, one in options.items()}
            )
        return step.run().seconds

    inside, across = seconds("node"), seconds("across")
    assert seconds("node", "across") == pytest.approx(max(inside, across))
    assert seconds("across", "across") == pytest.approx(2 * across)
    assert seconds("across", "across", stream="own ") == pytest.approx(2 * across)  # side by side on one link


def test_chakra_with_damage(tmp_path: Path) -> None:
    good = tmp_path / "good.et"
    about: dict[str, Any] = {"comm_type": 0, "comm_size": 1 << 20}
    chakra.write(good, [Node(7, "a", COMP, (), 5), Node(9, "b", COLL, (7,), 0, about)])
    data = good.read_bytes()
    damaged = tmp_path / "damaged.et"
    whole: list[int] = []
    sentences: list[str] = []
    for size in range(len(data)):
        damaged.write_bytes(data[:size])
        try:
            whole.append(len(chakra.read(damaged)))
        except SimulationRefused as error:
            sentences.append(str(error))
    assert whole == [1]  # it ends between two nodes
    assert not any("\n" in one for one in sentences)
    for noise in (b"\xff" * 40, bytes(range(256)), b"\x01\x00\x05hello"):
        damaged.write_bytes(noise)
        with pytest.raises(SimulationRefused):
            chakra.simulate([chakra.read(damaged)], NODE)
    for nodes, sentence in (
        ([Node(0, "a", COMP, (1,), 1), Node(1, "b", COMP, (0,), 1)], "circle"),
        ([Node(0, "a", COMP, (5,), 1)], "waits for 5, which is none"),
        ([Node(0, "a", COMP), Node(0, "b", COMP)], "exists twice"),
        ([Node(0, "a", COLL, (), 0, {"comm_type": 5, "comm_size": 4})], "type 5"),
        ([Node(0, "a", COLL, (), 0, {"comm_type": 0, "comm_size": -4})], "comm_size -4"),
    ):
        with pytest.raises(SimulationRefused, match=sentence):
            chakra.simulate([nodes], NODE)
    with pytest.raises(SimulationRefused, match="without a gap"):
        chakra.find(tmp_path / "absent")
