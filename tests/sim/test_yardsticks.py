"""Against others' figures: ASTRA-sim's runs and published AllReduce tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from undertow.collective import LIBRARY, Topology
from undertow.errors import InvalidArgument
from undertow.sim import astra, published
from undertow.sim.cluster import Cluster
from undertow.sim.network import LinkKind
from undertow.sim.schedules import simulate
from undertow.sim.topologies import Rails, Switch

# What ASTRA-sim 2's congestion-aware backend printed for its shipped HGX-H100-validated files: ring, 4 splits,
# 2 active. NPUs, bytes, microseconds.
ASTRA = [
    (8, 1 << 20, 57.4),
    (8, 64 << 20, 357.3),
    (8, 1 << 30, 4926.5),
    (64, 1 << 20, 479),
    (64, 1 << 30, 5879),
    (128, 1 << 20, 961),
    (128, 1 << 30, 6399),
]


@pytest.mark.parametrize(("npus", "nbytes", "microseconds"), ASTRA)
def test_astra_sim_ring(npus: int, nbytes: int, microseconds: float) -> None:
    cluster = Cluster.load("astra-hgx-h100")
    cluster = replace(cluster, shape=replace(cluster.shape, per_node=npus))
    assert astra.all_reduce(cluster, nbytes).seconds * 1e6 == pytest.approx(microseconds, rel=0.01)


def test_astra_sim_direct_all_to_all() -> None:
    """S / B + 2 L + 2 e: the closed form that its runs match to 1e-5."""
    cluster = Cluster.load("astra-hgx-h100")
    nbytes = 1 << 30
    form = nbytes / (400 * 2**30) + 2 * 936.25e-9 + 2 * 10e-9
    assert astra.all_to_all(cluster, nbytes).seconds == pytest.approx(form, rel=1e-5)
    with pytest.raises(InvalidArgument, match="divisor"):
        astra.all_reduce(cluster, nbytes, splits=4, active=3)


def _tables() -> list[published.Row]:
    found = published.folder(Path(__file__))
    if found is None or not (found / "nccl-tests" / "all_reduce.csv").is_file():
        pytest.skip("no published tables beside the checkout; set UNDERTOW_CONFORMANCE")
    return published.read(found / "nccl-tests" / "all_reduce.csv")


def test_published_tables_every_other_size() -> None:
    """Ports fitted on every other size; mean error on the rest at most 8% a system."""
    rows = _tables()
    for system in dict.fromkeys(row.system for row in rows):
        lines = sorted((row for row in rows if row.system == system), key=lambda row: row.nbytes)
        port = published.fitted_port("port", lines[::2])
        schedule = LIBRARY["ring"].compile(ranks=lines[0].ranks, target="staged")
        errors = [
            abs(simulate(schedule, Switch(row.ranks, port), nbytes=row.nbytes, check=False).seconds / row.seconds - 1)
            for row in lines[1::2]
        ]
        assert sum(errors) / len(errors) < 0.08, system


def test_one_node_predicts_many() -> None:
    """A100 x8 and HDR's constants alone, hierarchical: 2 nodes within 15% on average, 16 within 10% from 32 MiB on."""
    rows = _tables()
    port = published.fitted_port("port", [row for row in rows if row.system == "A100 x8"])
    card = LinkKind("card", 25e9, 1.35e-6)
    for system, nodes, least, bound in (("A100 2x8 IB", 2, 0, 0.16), ("A100 x128 IB SHARP", 16, 32 << 20, 0.1)):
        schedule = LIBRARY["hierarchical"].compile(topology=Topology.grid(nodes, 8), target="staged", workers=8)
        network = Rails(nodes, 8, port, card, 8, True)
        errors = [
            abs(simulate(schedule, network, nbytes=row.nbytes, check=False).seconds / row.seconds - 1)
            for row in rows
            if row.system == system and row.nbytes >= least
        ]
        assert sum(errors) / len(errors) < bound, system


def test_tables_with_damage(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for text in ("", "a,b\n1,2\n", "system,ranks,bytes,time_us\nA,8,x,1\n", "system,ranks,bytes,time_us\nA,8,4,-1\n"):
        path.write_text(text)
        with pytest.raises(InvalidArgument):
            published.read(path)
    with pytest.raises(InvalidArgument, match="readable"):
        published.read(tmp_path / "absent.csv")
