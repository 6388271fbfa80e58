"""The CUDA fabric in a virtual node: several ranks on one GPU.

Measures, side by side in one run, for each rank count:
- the host-staged `dma` lane with all ranks sending at once, against plain pinned copies of the same bytes, both ways at
  once, without any hand-off (what the card can do);
- the `peer` lane likewise;
- a GEMM alone and beside the `dma` lane, in device time.

    PYTHONPATH=src python bench/gpu_fabric.py [--ranks 2,4,8] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import undertow as ut
from undertow.fabric.base import Incoming, Outgoing
from undertow.fabric.environment import environment

BYTES = 128 << 20
ROUNDS = 5
GEMMS = 12


def measure() -> dict[str, Any]:
    """Runs on every rank; the slowest rank counts in every round."""
    group = ut.init()
    device, right, left = group.device, (group.rank + 1) % group.size, (group.rank - 1) % group.size
    source = torch.randint(0, 100, (BYTES // 4,), dtype=torch.int32, device=device)
    buffer = group.fabric.buffer((BYTES // 4,), torch.int32)
    dma, peer = group.fabric.lane("dma"), group.fabric.lane("peer")
    sums = group.exchange(int(source.sum(dtype=torch.int64)), "sums")

    outbox = torch.empty(BYTES // 4, dtype=torch.int32, pin_memory=True)
    inbox = torch.zeros(BYTES // 4, dtype=torch.int32, pin_memory=True)
    landing = torch.empty_like(source)
    going, coming = torch.cuda.Stream(), torch.cuda.Stream()

    def pinned() -> None:
        with torch.cuda.stream(going):
            outbox.copy_(source, non_blocking=True)
        with torch.cuda.stream(coming):
            landing.copy_(inbox, non_blocking=True)

    def over(lane: Any) -> Callable[[], None]:
        def step() -> None:
            lane.exchange([Outgoing(right, source, buffer, 0, 0)], [Incoming(left, buffer, 0, source.numel(), 0)])
            lane.free(left, 0)
            lane.flush()

        return step

    variants = {"pinned copies": pinned, "dma": over(dma), "peer": over(peer)}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(ROUNDS + 1):
        for name, step in variants.items():
            if name != "pinned copies":
                buffer.local.fill_(-1)
            torch.cuda.synchronize()
            group.barrier()
            began = time.perf_counter()
            step()
            torch.cuda.synchronize()
            took = group.reduce_max([time.perf_counter() - began])[0]
            if round_number:  # the first one warms up
                seconds[name].append(took)
            if name != "pinned copies":
                assert int(buffer.local.sum(dtype=torch.int64)) == sums[left], f"{name} moved wrong bytes"
    result: dict[str, Any] = {
        name: {"GB/s per rank each way": BYTES / statistics.median(times) / 1e9, "seconds": times}
        for name, times in seconds.items()
    }
    result["dma of pinned copies"] = statistics.median(
        one / other for one, other in zip(seconds["pinned copies"], seconds["dma"], strict=True)
    )
    result["gemm"] = beside(group, over(dma))
    result["lanes"] = {lane.name: lane.describe() for lane in (dma, peer)}
    link = "virtual node: ranks share one GPU; dma through pinned host memory"
    result["environment"] = environment({"link": link, "ranks": group.size})
    return result


def beside(group: ut.Group, transfer: Callable[[], None]) -> dict[str, Any]:
    """GEMM time alone and while the lane is busy from before its start until after its end."""
    a = torch.randn(8192, 2048, device=group.device, dtype=torch.bfloat16)
    b = torch.randn(2048, 8192, device=group.device, dtype=torch.bfloat16)
    c = torch.empty(8192, 8192, device=group.device, dtype=torch.bfloat16)
    compute, communication = torch.cuda.Stream(), torch.cuda.Stream()

    def run(with_lane: bool) -> tuple[float, bool]:
        torch.cuda.synchronize()
        group.barrier()
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        if with_lane:
            with torch.cuda.stream(communication):
                ends[2].record()
                for _ in range(3):
                    transfer()
                ends[3].record()
        with torch.cuda.stream(compute):
            ends[0].record()
            for _ in range(GEMMS):
                torch.mm(a, b, out=c)
            ends[1].record()
        torch.cuda.synchronize()
        covered = with_lane and ends[2].elapsed_time(ends[0]) >= 0 and ends[1].elapsed_time(ends[3]) >= 0
        return ends[0].elapsed_time(ends[1]) / GEMMS, covered

    run(False)
    run(True)
    alone, together, covered = [], [], []
    for _ in range(ROUNDS):
        alone.append(group.reduce_max([run(False)[0]])[0])
        took, was_covered = run(True)
        together.append(group.reduce_max([took])[0])
        covered.append(was_covered)
    ratios = [one / other for one, other in zip(together, alone, strict=True)]
    return {
        "alone ms": statistics.median(alone),
        "beside dma ms": statistics.median(together),
        "slowdown": statistics.median(ratios),
        "lane busy throughout": all(covered),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"bytes": BYTES, "ranks": {}}
    print("ranks  pinned GB/s  dma GB/s  dma/pinned  peer GB/s  GEMM alone ms  beside ms  slowdown  covered")
    for ranks in (int(one) for one in options.ranks.split(",")):
        one = ut.launch(measure, ranks, device="cuda", deadline=60)[0]
        report["ranks"][ranks] = one
        speed = {name: one[name]["GB/s per rank each way"] for name in ("pinned copies", "dma", "peer")}
        gemm = one["gemm"]
        print(
            f"{ranks:5}  {speed['pinned copies']:11.2f}  {speed['dma']:8.2f}  {one['dma of pinned copies']:10.3f}"
            f"  {speed['peer']:9.1f}  {gemm['alone ms']:13.3f}  {gemm['beside dma ms']:9.3f}  {gemm['slowdown']:8.3f}"
            f"  {gemm['lane busy throughout']}",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
