"""Published nccl-tests tables: a port fitted on every other size, tested on the rest; one node predicts many.

PYTHONPATH=src python bench/papers/nccl_tests.py        (tables: UNDERTOW_CONFORMANCE, or beside the checkout)
"""

from __future__ import annotations

import sys
from pathlib import Path

from side_by_side import Figure, print_figures

from undertow.collective import LIBRARY, Topology
from undertow.sim.network import LinkKind
from undertow.sim.published import Row, fitted_port, folder, read
from undertow.sim.schedules import simulate
from undertow.sim.topologies import Rails, Switch

HDR = LinkKind("card", 25e9, 1.35e-6)  # 200 Gb/s; NCCL 2.30.7's network hop of 2.7 us, half at each card


def held_out(rows: list[Row]) -> list[Figure]:
    found = []
    for system in dict.fromkeys(row.system for row in rows):
        lines = sorted((row for row in rows if row.system == system), key=lambda row: row.nbytes)
        network = Switch(lines[0].ranks, fitted_port("port", lines[::2]))
        schedule = LIBRARY["ring"].compile(ranks=lines[0].ranks, target="staged")
        errors = [
            simulate(schedule, network, nbytes=row.nbytes, check=False).seconds / row.seconds - 1 for row in lines[1::2]
        ]
        mean, worst = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
        found.append(
            Figure(
                f"{system}: {len(errors)} sizes held out", "measured", f"mean error {mean:.1%}", f"worst {worst:+.1%}"
            )
        )
    return found


def scaled(rows: list[Row]) -> list[Figure]:
    port = fitted_port("port", [row for row in rows if row.system == "A100 x8"])
    found = []
    for system, nodes in (("A100 2x8 IB", 2), ("A100 x128 IB SHARP", 16)):
        schedule = LIBRARY["hierarchical"].compile(topology=Topology.grid(nodes, 8), target="staged", workers=8)
        network = Rails(nodes, 8, port, HDR, 8, True)
        for row in rows:
            if row.system == system:
                simulated = simulate(schedule, network, nbytes=row.nbytes, check=False).seconds
                what = f"{system}, {row.nbytes} bytes"
                error = f"{simulated / row.seconds - 1:+.0%}"
                found.append(Figure(what, f"{row.seconds * 1e6:.1f} µs", f"{simulated * 1e6:.1f} µs", error))
    return found


if __name__ == "__main__":
    place = folder(Path(__file__))
    if place is None:
        sys.exit("There are no published tables; set UNDERTOW_CONFORMANCE.")
    table = read(place / "nccl-tests" / "all_reduce.csv")
    print_figures("Ports fitted on every other size", held_out(table))
    print_figures(
        "A100 x8's port and HDR's constants, program hierarchical",
        scaled(table),
        [
            "Below 32 MiB the prediction is wrong: the x8 table's smallest size is 32 MiB, so it knows no latency, and"
            " NCCL changes algorithm and protocol there; SHARP sums in the switches, which is not simulated.",
        ],
    )
