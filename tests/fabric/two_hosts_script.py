"""The job of the two-host tests, run by torchrun on each host: the same script as on one machine.

    python -m torch.distributed.run ... two_hosts_script.py <folder> <mode>

`check` uses everything across hosts and inside them; `wait` calls until a rank is lost. What it finds is written to
`<folder>/<rank>.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import undertow as ut
from undertow.errors import NoPeerPointer, RankLost, StrategyUnavailable
from undertow.fabric.group import Group
from undertow.fabric.post_ring import Post
from undertow.fabric.proxy import Proxy

ROWS, INNER, COLUMNS = 512, 8, 1024
PAYLOAD = ROWS * COLUMNS * 4


def link_bytes() -> tuple[int, int]:
    """Bytes received and sent so far on the interface that Gloo uses."""
    folder = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics"
    return int((folder / "rx_bytes").read_text()), int((folder / "tx_bytes").read_text())


def product(group: Group | dist.ProcessGroup | None, strategy: str, rank: int, size: int) -> bool:
    """Whether matmul_all_reduce is exact: ranks contribute 1, 2, ... in every place."""
    x, w = torch.full((ROWS, INNER), float(rank + 1)), torch.ones(INNER, COLUMNS)
    y = torch.full((ROWS, COLUMNS), float("nan"))
    ut.matmul_all_reduce(x, w, group=group, strategy=strategy, out=y)
    return bool((y == INNER * size * (size + 1) // 2).all())


def refusal(strategy: str) -> str:
    try:
        ut.matmul_all_reduce(torch.ones(2, 2), torch.ones(2, 2), strategy=strategy)
    except StrategyUnavailable as error:
        return str(error)
    return "not refused"


def by_proxy(group: Group) -> bool:
    """Bytes posted to the same rank of the other host, where no pointer leads, arrive before their signal."""
    other = (group.rank + group.size // 2) % group.size
    proxy = Proxy(group.fabric, signals=2, lane="net")
    buffer = group.fabric.buffer(1 << 16, torch.uint8)
    number = proxy.attach(buffer)
    half = buffer.nbytes // 2
    buffer.local[:half] = group.rank + 1
    group.barrier()
    proxy.post(Post(number, 0, other, number, half, half, 1))
    proxy.signals.wait(1, 1, sender=other)
    arrived = bool((buffer.local[half:] == other + 1).all())
    proxy.close()
    return arrived


def pointer_refusal(group: Group) -> str:
    buffer = group.fabric.buffer(4, torch.float32)
    try:
        buffer.peer((group.rank + group.size // 2) % group.size)
    except NoPeerPointer as error:
        return str(error)
    return "not refused"


def check(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {"nodes": group.nodes, "local": group.local_ranks}
    counts = []
    for strategy in ("serial:net", "chunked:net", "signaled:net", "auto"):
        product(group, strategy, group.rank, group.size)  # connections are made outside the measurement
        group.barrier()
        before, began = link_bytes(), time.perf_counter()
        exact = product(group, strategy, group.rank, group.size)
        group.barrier()
        seconds = time.perf_counter() - began
        moved = [now - then for now, then in zip(link_bytes(), before, strict=True)]
        counts.append({"strategy": strategy, "exact": exact, "received": moved[0], "sent": moved[1], "s": seconds})
    found["across"] = counts
    found["refusals"] = {strategy: refusal(strategy) for strategy in ("serial:peer", "chunked:dma")}
    found["pointer"] = pointer_refusal(group)
    found["proxy"] = by_proxy(group)
    half = group.size // 2
    mine = [dist.new_group(list(range(start, start + half))) for start in (0, half)][group.rank // half]
    local = ut.as_group(mine)
    found["inside"] = {
        f"{grain}:{lane}": product(local, f"{grain}:{lane}", local.rank, local.size)
        for grain in ("serial", "chunked")
        for lane in ("peer", "dma", "net")
    }
    found["local nodes"] = local.nodes
    return found


def main(folder: Path, mode: str) -> None:

    group = ut.init()
    target = folder / f"{group.rank}.json"
    if mode == "check":
        target.write_text(json.dumps(check(group)))
        group.barrier()
        ut.shutdown()
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's own clean-up must not hide what ranks do by themselves
    x, w = torch.ones(8, 4), torch.ones(4, 8)
    ut.matmul_all_reduce(x, w, strategy="serial:net")
    (folder / f"pid-{group.rank}").write_text(str(os.getpid()))
    try:
        while True:
            ut.matmul_all_reduce(x, w, strategy="chunked:net")
    except RankLost as error:
        target.write_text(json.dumps({"time": time.time(), "error": str(error)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
