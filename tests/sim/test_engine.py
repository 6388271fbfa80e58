"""The engine against closed forms, against itself in plain Python, and against schedules that lack a wait."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sim_cases
from sim_cases import BANDWIDTH, LATENCY, switch

from undertow.collective import LIBRARY, Schedule, Trace, program
from undertow.errors import InvalidArgument, ProgramRefused, SimulationRefused
from undertow.sim import core
from undertow.sim.cluster import Cluster
from undertow.sim.compiled import CORE
from undertow.sim.network import LinkKind
from undertow.sim.schedules import Result, Rules, simulate
from undertow.sim.timelines import critical_path, schedule_timeline
from undertow.sim.topologies import FullyConnected, Switch, Torus
from undertow.sim.what_if import changed, what_if

SIZE = 1 << 28
EXACT = 1e-9


def _staged(name: str, ranks: int, fuse: bool = True) -> Schedule:
    return LIBRARY[name].compile(ranks=ranks, target="staged", fuse=fuse)


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_closed_forms_on_a_switch(ranks: int, fair: bool) -> None:
    """S bytes, n ranks, B bytes per second, latency L: what textbooks say of each algorithm."""
    share, rounds = (ranks - 1) / ranks * SIZE / BANDWIDTH, math.log2(ranks)
    forms = {
        "ring": 2 * (ranks - 1) * (SIZE / ranks / BANDWIDTH + LATENCY),
        "two_shot": 2 * (share + LATENCY),
        "halving_doubling": 2 * share + 2 * rounds * LATENCY,
        "all_to_all_direct": share + LATENCY,
        "all_gather_direct": share + LATENCY,
        "reduce_scatter_direct": share + LATENCY,
        "all_gather_ring": (ranks - 1) * (SIZE / ranks / BANDWIDTH + LATENCY),
        "broadcast_tree": rounds * (SIZE / BANDWIDTH + LATENCY),
        "reduce_tree": rounds * (SIZE / BANDWIDTH + LATENCY),
    }
    for name, seconds in forms.items():
        # Fused, sends of one chunk in several rounds are one instruction, and all of them are posted with the last.
        schedule = _staged(name, ranks, fuse=name != "broadcast_tree")
        found = simulate(schedule, switch(ranks), nbytes=SIZE, rules=Rules(fair=fair), check=False)
        assert found.seconds == pytest.approx(seconds, rel=1e-5), name


def test_one_post_for_several_rounds_costs_time() -> None:
    """What fusing does to a tree, in units of one message: 6 rounds instead of 3; tiles make up for most of it."""
    unit = SIZE / BANDWIDTH
    fused = _staged("broadcast_tree", 8)
    assert simulate(fused, switch(8, latency=0.0), nbytes=SIZE).seconds == pytest.approx(6 * unit)
    assert simulate(fused, switch(8, latency=0.0), nbytes=SIZE, tile=SIZE // 64).seconds < 3.2 * unit


def test_direct_target_asks_and_waits_for_the_answer() -> None:
    """Sums are pulled: a signal, a request and the data, L each; copies are pushed: L. The last sum streams on."""
    ranks = 8
    schedule = LIBRARY["ring"].compile(ranks=ranks, target="direct")
    found = simulate(schedule, switch(ranks), nbytes=SIZE)
    steps = 2 * (ranks - 1) * SIZE / ranks / BANDWIDTH
    assert found.seconds == pytest.approx(steps + (4 * (ranks - 1) - 1) * LATENCY, rel=EXACT)


def test_tiles_pipeline_a_tree() -> None:
    """In k tiles the hops of a chain overlap: (hops + k - 1) tiles follow each other instead of hops k."""
    ranks, tiles = 4, 64
    chain = LIBRARY["broadcast_tree"].compile(ranks=2, target="staged")
    whole = simulate(chain, switch(2, latency=0.0), nbytes=SIZE).seconds
    cut = simulate(chain, switch(2, latency=0.0), nbytes=SIZE, tile=SIZE // tiles).seconds
    assert cut == pytest.approx(whole, rel=1e-9)  # one hop gains nothing
    ring = _staged("all_gather_ring", ranks)
    straight = simulate(ring, switch(ranks, latency=0.0), nbytes=SIZE, tile=SIZE // ranks // 4).seconds
    assert straight == pytest.approx((ranks - 1) / ranks * SIZE / BANDWIDTH, rel=1e-9)


def test_store_and_forward_takes_every_link_in_turn() -> None:
    rules = Rules(store_and_forward=True)
    schedule = _staged("all_gather_ring", 4)
    found = simulate(schedule, switch(4), nbytes=SIZE, rules=rules)
    assert found.seconds == pytest.approx(3 * (2 * SIZE / 4 / BANDWIDTH + LATENCY), rel=EXACT)


def test_hops_of_a_torus_add_up() -> None:
    link = LinkKind("link", BANDWIDTH, LATENCY)
    schedule = LIBRARY["send_recv_direct"].compile(ranks=9, target="staged")
    near = simulate(schedule, Torus((3, 3), link), nbytes=SIZE).seconds
    assert near == pytest.approx(SIZE / BANDWIDTH + LATENCY, rel=EXACT)
    routes = Torus((4, 4), link).routes(np.array([0, 0, 0]), np.array([3, 10, 15]))
    assert np.diff(routes.start).tolist() == [1, 4, 2]


def test_fair_sharing_gives_everybody_the_same() -> None:
    """Three send to one over its port: each at a third. FIFO: one after the other; the last ends at the same time."""
    schedule = LIBRARY["gather_direct"].compile(ranks=4, target="staged")
    for fair in (False, True):
        found = simulate(schedule, switch(4), nbytes=SIZE, rules=Rules(fair=fair))
        assert found.seconds == pytest.approx(0.75 * SIZE / BANDWIDTH + LATENCY, rel=EXACT)
    # Two of three flows leave through a slow port of their own; max-min gives the rest to the third.
    mixed = FullyConnected(4, LinkKind("link", BANDWIDTH, LATENCY))
    alone = simulate(schedule, mixed, nbytes=SIZE, rules=Rules(fair=True))
    assert alone.seconds == pytest.approx(0.25 * SIZE / BANDWIDTH + LATENCY, rel=EXACT)


def test_curves_are_read_at_the_size_of_a_message() -> None:
    points = ((1 << 10, 5e-6), (1 << 20, 20e-6))
    port = Switch(2, LinkKind("port", 1e9, 0.0, points=points))
    schedule = LIBRARY["send_recv_direct"].compile(ranks=2, target="staged")
    for nbytes, seconds in ((100, 5e-6), (1 << 15, 10e-6), (1 << 21, 40e-6)):
        assert simulate(schedule, port, nbytes=nbytes).seconds == pytest.approx(seconds, rel=EXACT)
    with pytest.raises(InvalidArgument, match="curves"):
        simulate(schedule, port, nbytes=1, rules=Rules(fair=True))


def test_workers_are_not_faster_than_they_copy() -> None:
    schedule = LIBRARY["send_recv_direct"].compile(ranks=2, target="direct", instances=4)
    slow = Rules(worker_rate=10e9)
    assert simulate(schedule, switch(2), nbytes=SIZE, rules=slow).seconds > SIZE / 40e9
    fast = Rules(worker_rate=1000e9)
    assert simulate(schedule, switch(2), nbytes=SIZE, rules=fast).seconds < 1.1 * SIZE / BANDWIDTH


@pytest.mark.parametrize("fair", [False, True])
def test_workers_share_the_memory_of_their_rank(fair: bool) -> None:
    """Four workers of a rank sum P each, 3 P through memory: as long as one that sums 4 P. Each rank has its own."""

    @program("all_reduce", chunks=4)
    def sums(c: Trace) -> None:
        for rank in range(2):
            for part in range(4):
                taken = c.rank(rank).input[part].copy(c.rank(rank).output[part], channel=part)
                taken.reduce(c.rank(rank).input[part], channel=part)

    rate, part = 100e9, 50_000_000
    rules = Rules(memory_rate=rate, copies_are_free=True, fair=fair)
    schedule = sums.compile(ranks=2, target="direct", workers=8, check=False)
    assert len(schedule.worker_rank) == 8
    found = simulate(schedule, switch(2), nbytes=4 * part, rules=rules, traced=True, check=False)
    assert found.seconds == pytest.approx(4 * 3 * part / rate, rel=EXACT)
    ends = np.sort(found.log[found.log[:, 5] > 0][:, 5])  # of each rank's workers: one by one, or all at once
    turns = [4] * 4 if fair else [1, 2, 3, 4]
    assert ends == pytest.approx(np.sort(np.repeat(turns, 2)) * 3 * part / rate, rel=EXACT)
    alone = simulate(schedule, switch(2), nbytes=4 * part, rules=replace(rules, memory_rate=4 * rate), check=False)
    assert alone.seconds == pytest.approx(3 * part / rate, rel=EXACT)


@pytest.mark.parametrize("target", ["direct", "staged"])
@pytest.mark.parametrize("name", ["ring", "two_shot", "halving_doubling", "all_to_all_swap"])
def test_no_wait_can_be_taken_away_unnoticed(name: str, target: str) -> None:
    """Without a wait the schedule is refused; or it was one that nobody needs, and then the checker says so too."""
    schedule = LIBRARY[name].compile(ranks=4, target=target)
    whole = simulate(schedule, switch(4), nbytes=1 << 20, tile=1 << 16, traced=True)
    waits = len(schedule.instructions.wait_value)
    noticed = 0
    for index in range(waits):
        try:
            other = simulate(schedule.without_wait(index), switch(4), nbytes=1 << 20, tile=1 << 16, traced=True)
        except ProgramRefused:
            noticed += 1
        else:
            noticed += not np.array_equal(whole.log, other.log)
    assert noticed == waits > 0


def test_a_missing_post_is_a_deadlock() -> None:
    schedule = _staged("ring", 4)
    with pytest.raises(SimulationRefused, match="waiting for a post that never comes"):
        simulate(schedule.without_post(0), switch(4), nbytes=1 << 20, check=False)


def test_critical_path_is_all_of_the_time() -> None:
    """A ring is links and signals; memory where it is slower than links."""
    schedule = _staged("ring", 8)
    for rules, name in ((Rules(), "port"), (Rules(memory_rate=BANDWIDTH / 4), "memory")):
        for fair in (False, True):
            found = simulate(schedule, switch(8), nbytes=SIZE, rules=replace(rules, fair=fair), traced=True)
            path = critical_path(found)
            assert sum(path.values()) == pytest.approx(found.seconds, rel=1e-9)
            assert path[name] > 0.9 * found.seconds
            assert set(path) <= {"port", "signals", "memory", "local work"}
    assert critical_path(simulate(schedule, switch(8), nbytes=SIZE)) == {}


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
def test_what_would_make_this_faster_by_hand(sharing: str) -> None:
    """Rank 0 sends P = 100 MB to the other node, over cards of 25 GB/s: 4 ms. Beside that it sends P to its neighbour,
    over ports of 100 GB/s, which adds it to its own, 3 P through memory of 200 GB/s: 1 ms + 1.5 ms. So it is the cards;
    twice their bandwidth gives 2 ms, and then the other way is longer, 2.5 ms; there it is memory, then ports."""

    @program("all_reduce", chunks=2)
    def two_ways(c: Trace) -> None:
        c.rank(0).input[0].copy(c.rank(2).output[0], channel=0)
        came = c.rank(0).input[1].copy(c.rank(1).output[1], channel=1)
        came.reduce(c.rank(1).input[1], channel=1)

    cluster = Cluster.from_dict(
        {
            "format": "undertow cluster 1",
            "name": "by hand",
            "description": "two nodes of two",
            "device": {"name": "d", "peak": 1.0, "memory_bandwidth": 200e9, "multiprocessors": 1, "source": "hand"},
            "links": {
                "card": {"bandwidth": 25e9, "latency": 0.0, "source": "hand"},
                "port": {"bandwidth": 100e9, "latency": 0.0, "source": "hand"},
            },
            "topology": {
                "kind": "rails", "nodes": 2, "per_node": 2, "cards": 2, "aligned": True, "port": "port", "card": "card",
            },
            "rules": {"sharing": sharing, "copies_are_free": True, "source": "hand"},
        }
    )  # fmt: skip
    schedule = two_ways.compile(topology=cluster.topology, target="direct", fuse=False, check=False)

    def run(machine: Cluster) -> Result:
        nbytes = 200_000_000
        return simulate(schedule, machine.network, nbytes=nbytes, rules=machine.rules, traced=True, check=False)

    assert critical_path(run(cluster)) == pytest.approx({"card": 4e-3})
    gains = {one.what: one.speedup for one in what_if(cluster, lambda other: run(other).seconds)}
    assert gains.pop("card: twice the bandwidth") == pytest.approx(4 / 2.5)
    assert set(gains.values()) == {1.0}
    better = changed(cluster, "card", bandwidth=2.0)
    assert critical_path(run(better)) == pytest.approx({"memory": 1.5e-3, "port": 1e-3})
    gains = {one.what: one.speedup for one in what_if(better, lambda other: run(other).seconds)}
    assert gains["memory twice as fast"] == pytest.approx(2.5 / 2.0)  # 1 + 0.75 ms, but cards take 2
    assert gains["port: twice the bandwidth"] == pytest.approx(2.5 / 2.0)
    assert gains["card: twice the bandwidth"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["ring", "all_gather_ring", "broadcast_tree"])
def test_halving_what_a_path_is_made_of_halves_that_part(name: str) -> None:
    """Where there is one path only, twice the bandwidth and half the latency take away half of what is told."""
    schedule = _staged(name, 8)
    before = simulate(schedule, switch(8), nbytes=1 << 22, traced=True)
    path = critical_path(before)
    after = simulate(schedule, switch(8, 2 * BANDWIDTH, LATENCY / 2), nbytes=1 << 22)
    assert before.seconds - after.seconds == pytest.approx((path["port"] + path.get("signals", 0.0)) / 2, rel=1e-9)


@pytest.mark.parametrize("target", ["staged", "direct"])
@pytest.mark.parametrize("name", ["hierarchical", "ring", "all_to_all_two_step", "all_to_all_direct", "all_to_next"])
def test_a_path_is_what_a_little_better_would_gain(name: str, target: str) -> None:
    """Links of one kind that are better by a millionth save a millionth of what the path says of them. Where data are
    asked for, some of the path is signals, which are latency of links too."""
    cluster = Cluster.load("a100x16")
    schedule = LIBRARY[name].compile(topology=cluster.topology, target=target, workers=8, check=False)

    def run(machine: Cluster, engines: int = 0) -> Result:
        rules = replace(machine.rules, engines=engines, engine_seconds=1e-6)
        return simulate(
            schedule, machine.network, nbytes=1 << 24, tile=1 << 19, rules=rules, traced=True, check=False
        )  # fmt: skip

    for engines in (0, 3):
        found = run(cluster, engines)
        path = critical_path(found)
        assert sum(path.values()) == pytest.approx(found.seconds, rel=1e-9)
        assert ("copy engines" in path) == (engines > 0)
    found, less = run(cluster), 1e-6
    path = critical_path(found)
    if target == "direct":  # reads of many ranks change their order at once: only the sum is told above
        return
    for kind in ("nvlink", "hdr"):
        better = run(changed(cluster, kind, bandwidth=1 + less, latency=1 / (1 + less)))
        assert (found.seconds - better.seconds) / less == pytest.approx(path.get(kind, 0.0), rel=1e-3, abs=1e-8)


def test_a_queue_counts_for_the_link_that_makes_it() -> None:
    """Messages wait for the link between the sockets, but only because host memory behind it is slower."""
    node = Cluster.load("rtx4090x8")
    schedule = LIBRARY["all_to_all_direct"].compile(ranks=8, target="staged", workers=8, check=False)

    def run(machine: Cluster) -> Result:
        return simulate(schedule, machine.network, nbytes=1 << 24, rules=machine.rules, traced=True, check=False)

    path = critical_path(run(node))
    assert next(iter(path)) == "socket"
    assert path["socket"] > 0.9 * sum(path.values())
    assert what_if(node, lambda other: run(other).seconds)[0].what == "socket: twice the bandwidth"


def test_a_schedule_simulates_itself() -> None:
    schedule = LIBRARY["two_shot"].compile(ranks=8)
    named, loaded = schedule.simulate("h100x8", nbytes=SIZE), schedule.simulate(Cluster.load("h100x8"), nbytes=SIZE)
    assert named.seconds == loaded.seconds > 2 * 7 / 8 * SIZE / 370.8e9
    timeline = schedule_timeline(schedule.simulate("h100x8", nbytes=SIZE, traced=True))
    assert timeline.ranks == list(range(8))
    assert timeline.span("worker 0") == pytest.approx(named.seconds, rel=0.01)


def test_kernels_are_waited_for() -> None:
    """Parcel p of rank r is complete at `ready[r, p]`; a send that needs it starts then."""
    schedule = LIBRARY["all_gather_direct"].compile(ranks=2, target="staged", ready=True)
    ready = np.array([[3e-3], [1e-3]])
    found = simulate(schedule, switch(2), nbytes=SIZE, ready=ready)
    assert found.seconds == pytest.approx(3e-3 + SIZE / 2 / BANDWIDTH + LATENCY, rel=EXACT)


def test_both_cores_agree_to_the_last_bit() -> None:
    if CORE == "python":
        pytest.skip("there is one core only: Numba is not installed or was turned off")
    script = Path(sim_cases.__file__)
    environment = os.environ | {"UNDERTOW_SIM_CORE": "python"}
    told = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == sim_cases.digest() == sim_cases.digest()


def test_no_torch() -> None:
    code = "import sys, undertow.sim.schedules, undertow.collective.algorithms; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


def test_speed_and_memory() -> None:
    """5 million events a second on a free core; less is asked here, where others may be at work."""
    schedule = LIBRARY["ring"].compile(ranks=64, target="staged", check=False)
    simulate(schedule, switch(64), nbytes=1 << 20, check=False)
    best, memory = 0.0, {}
    for tiles in (4, 64, 256):
        begun = time.process_time()
        found = simulate(schedule, switch(64), nbytes=64 * tiles << 16, tile=1 << 16, check=False)
        best = max(best, found.events / (time.process_time() - begun))
        memory[tiles] = found.memory
    assert memory[256] == memory[64] < 4 << 20  # more of the same takes no more memory
    if CORE == "numba":
        assert best > 2e6


def test_memory_of_direct_schedules_is_that_of_what_is_under_way() -> None:
    """4096 posts that are waited for one by one, long after they were seen; and a ring whose ranks also copy much."""

    @program("all_reduce", chunks=4096)
    def ahead(c: Trace) -> None:
        for chunk in range(4096):
            total = c.rank(0).input[chunk].copy(c.rank(0).output[chunk])
            total = total.reduce(c.rank(1).input[chunk], channel=1)
            total.copy(c.rank(1).output[chunk], channel=1)

    schedule = ahead.compile(ranks=2, target="direct", check=False)
    slow = Rules(memory_rate=10e9, copies_are_free=True)  # sums are, so that copies run ahead of them
    assert simulate(schedule, switch(2), nbytes=4096 << 10, rules=slow, check=False).memory < 128 << 10
    ring = LIBRARY["ring"].compile(ranks=256, target="direct", check=False)
    assert len(ring.instructions) > 2 * 255 * 256  # beside its messages it has copies
    found = simulate(ring, switch(256), nbytes=256 * 16 << 16, tile=1 << 16, check=False)
    assert found.memory < 1 << 20  # two messages and two flights a rank


def test_bad_arguments_are_one_sentence() -> None:
    schedule = _staged("ring", 4)
    with pytest.raises(InvalidArgument, match="network is of 8 ranks"):
        simulate(schedule, switch(8), nbytes=1)
    with pytest.raises(InvalidArgument, match="nbytes"):
        simulate(schedule, switch(4), nbytes=-1)
    with pytest.raises(InvalidArgument, match="tile is 0"):
        simulate(schedule, switch(4), nbytes=1, tile=0)
    with pytest.raises(SimulationRefused, match="more than 10 events"):
        simulate(schedule, switch(4), nbytes=1, most_events=10)
    assert core.FINE == 0
