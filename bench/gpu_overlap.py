"""Matmuls whose results travel, in a virtual node: overlapped against serial, side by side.

For every operator and shape, in one run, interleaved, the slowest rank counts:
- the matmul alone (cuBLAS, the rank's SMs) and the communication alone (the lane's own collective, pipelined);
- serial: one after the other; two chunks and more; equal parcels (FlashOverlap's rule); growing and shrinking ones.

Times are those of the whole call, what the host needs for it included, or (--ahead) those of the device alone, while
hosts are ahead of it, as they are where a training step keeps it busy (`at_once`).

With --ahead also the matmul's own time inside a call of 8 parcels, and alone on the same SMs, by events around it.

Speed-up is over serial; E is the part of the exposed communication that was hidden; the share of ideal compares with
the longer of the two parts.

    PYTHONPATH=src python bench/gpu_overlap.py [--ranks 4] [--lane dma] [--operators ...] [--m ...] [--k ...] [--graph]
        [--ahead] [--machine FILE] [--out FILE]
    PYTHONPATH=src python bench/gpu_overlap.py --show FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from at_once import AtOnce

import undertow as ut
from undertow.fabric import timeline
from undertow.fabric.environment import environment
from undertow.ops import matmul_all_reduce, matmul_all_to_all, matmul_reduce_scatter
from undertow.ops.finish import Finish
from undertow.plan.defaults import default_plan
from undertow.plan.machine import Machine
from undertow.plan.metrics import overlap_efficiency, share_of_ideal
from undertow.plan.plan import Plan, split
from undertow.plan.problem import Problem
from undertow.plan.search import ranked
from undertow.plan.tokens import Tokens

N = 8192
INSIDE = "8 equal parcels"  # the call in which the matmul itself is timed
OPERATORS = {
    "matmul_all_reduce": matmul_all_reduce,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_to_all": matmul_all_to_all,
}
CALLS = {
    "matmul_all_reduce": ut.matmul_all_reduce,
    "matmul_reduce_scatter": ut.matmul_reduce_scatter,
    "matmul_all_to_all": ut.matmul_all_to_all,
}


def parcels_of(weights: list[float], bands: int, columns: int) -> tuple[tuple[int, int], ...]:
    """Whole bands in parcels that are in proportion to `weights`."""
    total, stops, reached = sum(weights), [], 0.0
    for one in weights:
        reached += one
        stops.append(round(bands * reached / total) * columns)
    stops[-1] = bands * columns
    return tuple(itertools.pairwise([0, *stops]))


def signaled(problem: Problem, lane: str, weights: list[float], extent: int | None = None) -> Plan:
    from dataclasses import replace

    base = default_plan(problem, "signaled", lane)
    grid = problem.grid(base)
    bands = sum(grid.band_counts)
    return replace(base, parcels=parcels_of(weights, bands, grid.columns), layout="natural")


def plans(problem: Problem, lane: str) -> dict[str, Plan]:
    bands = sum(problem.grid(default_plan(problem, "signaled", lane)).band_counts)
    found = {
        "serial": default_plan(problem, "serial", lane),
        "two chunks": Plan("chunked", lane, split(problem.m, 2)),
        "4 chunks": Plan("chunked", lane, split(problem.m, 4)),
        "8 chunks": Plan("chunked", lane, split(problem.m, 8)),
    }
    for count in (4, 8, 12, 16):
        if count <= bands:
            found[f"{count} equal parcels"] = signaled(problem, lane, [1.0] * count)
    if lane == "peer" and problem.operator != "matmul_all_to_all":
        found["by a program"] = default_plan(problem, "signaled", lane, by_program=True)
    if bands >= 8:
        found["8 growing"] = signaled(problem, lane, [1.0 + 0.5 * one for one in range(8)])
        found["8 shrinking"] = signaled(problem, lane, [1.0 + 0.5 * (7 - one) for one in range(8)])
    return found


def bare_communication(
    group: ut.Group, operator: str, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, problem: Problem, plan: Plan
) -> Callable[[], None]:
    """What the operator moves under that plan, without its matmul."""
    module: Any = OPERATORS[operator]
    lane, each = group.fabric.lane(plan.lane), problem.m // group.size
    tokens = (Tokens.of_splits([[each] * group.size] * group.size),) if operator == "matmul_all_to_all" else ()

    def alone() -> None:
        with group.fabric.guarded_call((out,)):
            module.run(
                x, w, out, *tokens, problem, plan, Finish(None, "none"), group.fabric, lane, compute=False
            )  # fmt: skip

    return alone


def two_way_bandwidth(group: ut.Group, nbytes: int = 64 << 20, rounds: int = 5) -> float:
    """Bytes per second and rank of bare copies from and to pinned memory, all ranks both ways at once."""
    here, there = (torch.zeros(nbytes, dtype=torch.uint8, device=group.device) for _ in range(2))
    out, back = (torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    streams = [torch.cuda.Stream(group.device) for _ in range(2)]
    taken = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        group.barrier()
        began = time.perf_counter()
        for _ in range(4):  # a start that is not quite together counts less
            with torch.cuda.stream(streams[0]):
                out.copy_(here, non_blocking=True)
            with torch.cuda.stream(streams[1]):
                there.copy_(back, non_blocking=True)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return 4 * nbytes / statistics.median(group.reduce_max(taken)[1:])


def wall_seconds(group: ut.Group, call: Callable[[], object]) -> float:
    """Seconds of the clock until the last rank is done."""
    torch.cuda.synchronize()
    group.barrier()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return group.reduce_max([time.perf_counter() - began])[0]


class Bench:
    def __init__(self, options: dict[str, Any]) -> None:
        self.group = ut.init()
        self.machine = None if options["machine"] is None else Machine.from_dict(options["machine"])
        self.lane, self.graph, self.rounds = options["lane"], options["graph"], options["rounds"]
        self.group.fabric.lane(self.lane)
        self._ahead = AtOnce(self.group) if options["ahead"] else None

    def timed(self, call: Callable[[], object]) -> float:
        return self._ahead.seconds(call) if self._ahead is not None else wall_seconds(self.group, call)

    def captured(self, call: Callable[[], object]) -> Callable[[], object]:
        call()
        call()
        torch.cuda.synchronize()
        self.group.barrier()
        if not self.graph:
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        torch.cuda.synchronize()
        self.group.barrier()
        return graph.replay

    def shape(self, operator: str, m: int, k: int) -> dict[str, Any]:
        group, device = self.group, self.group.device
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        w = torch.randn(N, k, device=device, dtype=torch.bfloat16).t()
        y = torch.empty(m, N, device=device, dtype=torch.bfloat16)
        problem = Problem.of(
            operator, m, N, k, dtype="bfloat16", ranks=group.size, device="cuda",
            multiprocessors=group.fabric.multiprocessors,
        )  # fmt: skip
        rows = m // group.size if operator == "matmul_reduce_scatter" else m
        out = y if operator == "matmul_all_reduce" else torch.empty(rows, N, device=device, dtype=y.dtype)
        every = plans(problem, self.lane)
        if self.machine is not None:
            every["planned"] = ranked(problem, self.machine, [self.lane])[0][0]
        alone = bare_communication(group, operator, x, w, out, problem, every["serial"])
        variants: dict[str, Callable[[], object]] = {"gemm": lambda: torch.mm(x, w, out=y), "communication": alone}
        for name, plan in every.items():
            variants[name] = lambda plan=plan: CALLS[operator](x, w, group=group, plan=plan, out=out)
        ready = {name: self.captured(call) for name, call in variants.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ready}
        for turn in range(self.rounds + 1):
            for name, call in ready.items():
                took = self.timed(call)
                if turn:
                    seconds[name].append(took)
        median = {name: statistics.median(found) for name, found in seconds.items()}
        inside = None
        if INSIDE in every and self._ahead is not None:
            inside = self.matmul_inside(variants[INSIDE], problem, every[INSIDE], x, w)
        return {
            "operator": operator, "m": m, "k": k, "ranks": group.size, "seconds": seconds, "median": median,
            "inside": inside,
        }  # fmt: skip

    def matmul_inside(
        self, call: Callable[[], object], problem: Problem, plan: Plan, x: torch.Tensor, w: torch.Tensor
    ) -> dict[str, float]:
        """Seconds of the signaling matmul itself, by events around its launch: alone, and inside the whole call."""
        from undertow.ops.cuda_product import CudaTileProduct

        buffer = x.new_empty(problem.m * problem.n)
        product = CudaTileProduct(self.group.fabric, problem, plan, x, w, buffer, None)

        def alone() -> None:
            product.prepare()
            product.start()

        taken: dict[str, list[float]] = {"alone": [], "inside": []}
        for _ in range(self.rounds + 1):
            for name, one in (("alone", alone), ("inside", call)):
                with timeline.recording() as recorder:
                    self.timed(one)
                spans = [event.duration_ns for event in recorder.timeline().events if event.name == "matmul"]
                taken[name].append(self.group.reduce_max([max(spans) * 1e-9])[0])
        return {name: statistics.median(found[1:]) for name, found in taken.items()}


def moved(one: dict[str, Any]) -> float:
    """Bytes that each rank sends, and receives."""
    ranks = one["ranks"]
    return (2 if one["operator"] == "matmul_all_reduce" else 1) * (ranks - 1) / ranks * one["m"] * N * 2


def line(one: dict[str, Any]) -> str:
    median = one["median"]
    gemm, comm, serial = median["gemm"], median["communication"], median["serial"]
    text = (
        f"{one['operator'][7:]:15} M {one['m']:5} K {one['k']:5}  gemm {gemm * 1e3:7.2f}  comm {comm * 1e3:7.2f}"
        f" ({moved(one) / comm / one['link']:.2f} of bare copies)  ratio {comm / gemm:5.2f}"
        f"  serial {serial * 1e3:7.2f} ms |"
    )
    for name, took in median.items():
        if name not in ("gemm", "communication", "serial"):
            share = share_of_ideal(took, gemm, comm)
            hidden = overlap_efficiency(took, gemm, serial)
            shown = f"{share * 100:.0f}%" if share is not None else "-"
            efficiency = f"{hidden:.2f}" if hidden is not None else "-"
            text += f" {name}: {serial / took:.2f}x E {efficiency} {shown} |"
    inside = one.get("inside")
    if inside:
        text += f" matmul inside {inside['inside'] * 1e3:.2f}, alone {inside['alone'] * 1e3:.2f} ms"
        text += f" ({inside['inside'] / inside['alone']:.3f})"
    return text


def summary(found: list[dict[str, Any]]) -> list[str]:
    """Where neither part is more than twice the other: the mean share of ideal of each shape's fastest plan, by M."""
    lines = []
    slowed = [one["inside"]["inside"] / one["inside"]["alone"] for one in found if one.get("inside")]
    if slowed:
        mean = statistics.mean(slowed)
        lines.append(f"the matmul inside {INSIDE}: {mean:.3f} of its time alone, mean; {max(slowed):.3f} at most")
    for m in sorted({one["m"] for one in found}):
        shares, signaled_only = [], []
        for one in found:
            median = one["median"]
            gemm, comm = median["gemm"], median["communication"]
            if one["m"] != m or not 0.5 <= comm / gemm <= 2:
                continue
            plans = {name: took for name, took in median.items() if name not in ("gemm", "communication", "serial")}
            shares.append(share_of_ideal(min(plans.values()), gemm, comm) or 0.0)
            parcels = [took for name, took in plans.items() if "chunks" not in name]
            signaled_only.append(share_of_ideal(min(parcels), gemm, comm) or 0.0)
        if shares:
            lines.append(
                f"M {m}: {len(shares)} shapes with 0.5 <= comm/gemm <= 2, mean share of ideal "
                f"{statistics.mean(shares) * 100:.0f}%, of parcels alone {statistics.mean(signaled_only) * 100:.0f}%"
            )
    return lines


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    bench = Bench(options)
    link = two_way_bandwidth(bench.group)
    if bench.group.rank == 0:
        print(f"bare copies both ways {link / 1e9:.1f} GB/s a rank each way", flush=True)
    found = []
    for operator, m, k in itertools.product(options["operators"], options["m"], options["k"]):
        found.append({**bench.shape(operator, m, k), "link": link})
        if bench.group.rank == 0:
            print(line(found[-1]), flush=True)
            store(found, options)  # as far as it came, should it be cut
    return found


def store(found: list[dict[str, Any]], options: dict[str, Any]) -> None:
    if options["out"]:
        link = f"virtual node of {found[0]['ranks']}, lane {options['lane']}"
        facts = environment({"link": link, "graph": options["graph"], "ahead": options["ahead"]})
        text = json.dumps({"shapes": found, "environment": facts}, indent=1, default=str)
        Path(options["out"]).write_text(text + "\n")


def show(found: list[dict[str, Any]]) -> None:
    best = [
        max((one["median"]["serial"] / took, name) for name, took in one["median"].items() if name != "serial"
            and name not in ("gemm", "communication"))
        for one in found
    ]  # fmt: skip
    print(f"best speed-up {max(best)[0]:.2f} ({max(best)[1]}), geometric mean of the best of each shape "
          f"{math.exp(statistics.mean(math.log(one) for one, _ in best)):.2f}")  # fmt: skip
    print(*summary(found), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lane", default="dma")
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--m", default="2048,4096,8192")
    parser.add_argument("--k", default="2048,4096,7168,10240,14336,20480")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--ahead", action="store_true", help="device time, the hosts ahead of it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--machine", type=Path, help="a machine file: its best plan is measured, too")
    parser.add_argument("--show", type=Path, help="what such a run stored, instead of running")
    options = parser.parse_args()
    if options.show:
        found = json.loads(options.show.read_text())["shapes"]
        print(*(line(one) for one in found), sep="\n")
        show(found)
        return
    given = {
        "machine": Machine.load(options.machine).to_dict() if options.machine else None,
        "lane": options.lane, "graph": options.graph, "ahead": options.ahead, "rounds": options.rounds,
        "operators": options.operators.split(","), "m": [int(one) for one in options.m.split(",")],
        "k": [int(one) for one in options.k.split(",")], "out": str(options.out or ""),
    }  # fmt: skip
    found = ut.launch(rank_main, options.ranks, device="cuda", args=(given,), deadline=60)[0]
    show(found)


if __name__ == "__main__":
    main()
