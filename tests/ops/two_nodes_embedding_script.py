"""The job of the two-node test of embedding_all_to_all, run by torchrun on each host.

    python -m torch.distributed.run ... two_nodes_embedding_script.py <folder> <mode>

All four ranks check random problems over the network, the fused ones through the proxy's ring. Then all of them, and
then one rank of each host while the other one idles, measure a problem whose lookup takes about as long as its rows are
under way. What is found is written to `<folder>/<rank>.json`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import undertow as ut
from undertow.plan.plan import SLICES, Plan, split

sys.path.insert(0, str(Path(__file__).parent))
import embedding_suite as suite

BATCH, TABLES, DIM, ROWS = 2048, 8, 64, 5000
PARCELS, ROUNDS = 4, 5
PAIR = (0, 2)  # the first rank of each host


def exact(group: ut.Group) -> int:
    for number in range(24):
        case = suite.Case.random(group.size, 300 + number)
        suite.verify(group, case, f"{suite.GRAINS[number % 4]}:net")
    return 24


def seconds_of(group: ut.Group, call: Callable[[], object]) -> float:
    group.barrier()
    began = time.perf_counter()
    call()
    return group.reduce_max([time.perf_counter() - began])[0]


def measured(group: ut.Group) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(group.rank)
    tables = [torch.randint(-2, 3, (ROWS, DIM), generator=generator).float() for _ in range(TABLES)]
    layout, samples = ut.embedding_layout(tables, group), BATCH * group.size

    def called(plan: Plan, length: int) -> torch.Tensor:
        values = given[: TABLES * samples * length]
        offsets = torch.arange(0, len(values) + 1, length)
        return ut.embedding_all_to_all(
            tables, values, offsets, batches=[BATCH] * group.size, layout=layout, group=group, plan=plan
        )

    plans = {
        grain: Plan(grain, "net", split(BATCH, 1 if grain == "serial" else PARCELS), order=SLICES, own_last=True)
        for grain in ("serial", "chunked", "fused")
    }
    given = torch.randint(0, ROWS, (TABLES * samples * 64,), generator=generator)
    for length in (1, 4):  # warm
        called(plans["serial"], length)
    once, more = (seconds_of(group, partial(called, plans["serial"], length)) for length in (1, 33))
    length = max(1, min(64, round(once * 32 / max(1e-6, more - once))))
    want = called(plans["serial"], length).clone()
    times: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(ROUNDS + 1):
        for name, plan in plans.items():
            found: list[torch.Tensor] = []
            times[name].append(seconds_of(group, lambda plan=plan, found=found: found.append(called(plan, length))))
            assert torch.equal(found[0], want), f"{name} is wrong in turn {turn}"
    return {"length": length, "seconds": {name: statistics.median(one[1:]) for name, one in times.items()}}


def main(folder: Path) -> None:
    group = ut.init()
    found: dict[str, Any] = {"nodes": group.nodes, "exact": exact(group), "four": measured(group)}
    pair = dist.new_group(list(PAIR))
    if group.rank in PAIR:
        found["two"] = measured(ut.as_group(pair))
    (folder / f"{group.rank}.json").write_text(json.dumps(found))
    group.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
