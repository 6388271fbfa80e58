"""The job of the two-node test, run by torchrun on each host: programs that know of nodes, over `dma` and `net`.

    python -m torch.distributed.run ... two_nodes_script.py <folder> <mode>

What it finds is written to `<folder>/<rank>.json`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import undertow as ut
from undertow.collective.algorithms import LIBRARY
from undertow.collective.lane_runtime import LaneExecutable
from undertow.collective.language import Trace, program
from undertow.collective.topology import Topology

sys.path.insert(0, str(Path(__file__).parent))
from lane_targets import Case, spans_of

ELEMENTS = (8 << 20) // 4
ROUNDS = 5
STRIDE = 512 << 10


@program("all_reduce", ranks=4, chunks=4)
def alternating_ring(c: Trace) -> None:
    """A ring that knows nothing of nodes: with two ranks on each, every hop crosses between them."""
    order = [0, 2, 1, 3]
    for place, first in enumerate(order):
        total = c.rank(first).input[place]
        for step in range(1, 4):
            rank = order[(place + step) % 4]
            total = c.rank(rank).input[place].copy(c.rank(rank).output[place]).reduce(total)
        for step in range(4, 7):
            total = total.copy(c.rank(order[(place + step) % 4]).output[place])


def main(folder: Path) -> None:
    group = ut.init()
    topology = Topology.of(group.nodes)
    found: dict[str, Any] = {"nodes": group.nodes}
    runs: dict[str, tuple[LaneExecutable, Case]] = {}
    for one in (LIBRARY["hierarchical"], alternating_ring, LIBRARY["all_to_all_two_step"], LIBRARY["all_to_next"]):
        schedule = one.compile(topology=topology, target="staged", workers=1)
        run = LaneExecutable(group.fabric, schedule, "dma", STRIDE)
        case = Case(schedule, group.rank, spans_of(schedule.contract, ELEMENTS - 5), torch.float32)
        runs[one.name] = run, case
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):  # in turn; connections are made in the first round
        for name, (run, case) in runs.items():
            case.out.fill_(torch.nan)
            group.barrier()
            began = time.perf_counter()
            run.run(case.source, case.out, case.spans)
            seconds[name].append(group.reduce_max([time.perf_counter() - began])[0])
            case.check(name)
    found["seconds"] = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    found["lanes"] = runs["hierarchical"][0].describe()
    (folder / f"{group.rank}.json").write_text(json.dumps(found))
    for run, _ in runs.values():
        run.close()
    group.barrier()
    ut.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
