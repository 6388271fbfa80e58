"""The job of the two-node test of the matmul operators, run by torchrun on each host.

    python -m torch.distributed.run ... two_nodes_matmul_script.py <folder> <mode>

All four ranks check results, over `net` and with a program that knows of nodes. Then one rank of each host measures a
balanced matmul_all_reduce, the other ones idle. What is found is written to `<folder>/<rank>.json`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import undertow as ut
from undertow import collective as co
from undertow.ops.matmul_all_reduce import reference

sys.path.insert(0, str(Path(__file__).parent))
import matmul_suite as suite

ROWS, COLUMNS = 2048, 1024  # 8 MB of fp32
FIRST_INNER, STEP = 256, 64
ROUNDS = 7
MEASURED = (0, 2)  # the first rank of each host


def exact(group: ut.Group) -> None:
    """Every operator over the network, and a program whose chunks cross it once."""
    for number, operator in enumerate(suite.OPERATORS):
        for strategy in suite.strategies(("net",)):
            suite.verify(group, suite.Case(operator, strategy, torch.float32, (61, 67, 5), 30 + number))
    ut.matmul_reduce_scatter(torch.ones(8, 3), torch.ones(3, 5), group=group, strategy="fused")
    told = ut.explain()
    assert told is not None
    assert told.plan.name == "fused:net", "between nodes it is posted"
    xs, ws = suite._factors(group, suite.Case("", "", torch.float64, (97, 101, 8), 7))
    y = ut.matmul_all_reduce(xs[group.rank], ws[group.rank], group=group, program=co.LIBRARY["hierarchical"])
    assert torch.equal(y, reference(xs, ws))


def seconds_of(group: ut.Group, call: Callable[[], object]) -> float:
    group.barrier()
    began = time.perf_counter()
    call()
    return group.reduce_max([time.perf_counter() - began])[0]


def measured(group: ut.Group) -> dict[str, Any]:
    """Medians of a matmul as long as its communication, all variants in turn."""
    y = torch.zeros(ROWS, COLUMNS)
    x, w = torch.ones(ROWS, FIRST_INNER), torch.ones(FIRST_INNER, COLUMNS)
    net = [seconds_of(group, lambda: co.all_reduce(y, group=group)) for _ in range(4)][1:]
    matmul = [seconds_of(group, lambda: torch.matmul(x, w, out=y)) for _ in range(4)][1:]
    inner = max(STEP, round(FIRST_INNER * statistics.median(net) / statistics.median(matmul) / STEP) * STEP)
    x, w = torch.ones(ROWS, inner), torch.ones(inner, COLUMNS)
    calls: dict[str, Callable[[], object]] = {"matmul": lambda: torch.matmul(x, w, out=y)}
    for strategy in suite.strategies(("net",)):
        grain = strategy.partition(":")[0]
        calls[grain] = lambda strategy=strategy: ut.matmul_all_reduce(x, w, group=group, strategy=strategy, out=y)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            y.fill_(torch.nan)
            times[name].append(seconds_of(group, call))
            assert name == "matmul" or bool((y == inner * group.size).all()), f"{name} is wrong in turn {turn}"
    return {"inner": inner, "seconds": {name: statistics.median(found[1:]) for name, found in times.items()}}


def main(folder: Path) -> None:
    group = ut.init()
    exact(group)
    pair = dist.new_group(list(MEASURED))
    found: dict[str, Any] = {"nodes": group.nodes}
    if group.rank in MEASURED:
        found |= measured(ut.as_group(pair))
    (folder / f"{group.rank}.json").write_text(json.dumps(found))
    group.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
