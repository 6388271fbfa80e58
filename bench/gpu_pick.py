"""The planner on a GPU: are its predictions right, is its pick near the best, how much of the ideal does it reach?

In one run, on ranks that share a GPU, over the host-staged link (`dma`): the machine is profiled (constants of engines,
tiles and interference; no operator is timed for that), then for one shape after the other, in a seeded order, until the
time is over:

- up to 48 fixed candidates: equal parcels of 1 to 32 waves and so many equal ones, growing, shrinking, chunks, serial,
  FlashOverlap's rule; a few fused ones that post their tiles; beside them what the model takes for best, and what the
  tuner picks as `auto` does (200 ms);
- interleaved, in device time, the slowest rank counts, and a message from every rank to every other, by copy engines,
  lets them begin together; after two rounds of all, those that were clearly slower leave;
- the matmul alone (cuBLAS, by the clock: ranks' matmuls take the GPU one after the other, and all of them count), the
  communication alone (of the serial plan predicted faster), bare copies both ways.

Told: the error of every prediction, the pick against the best of the fixed ones (all, and without the chunks of 4 and 8
and the numbers of parcels that stand beside waves), speed-up over serial, share of ideal.

    PYTHONPATH=src python bench/gpu_pick.py [--ranks 4] [--seconds 170] [--ahead] [--out FILE]
        [--machine FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from at_once import AtOnce
from gpu_overlap import CALLS, OPERATORS, N, bare_communication, two_way_bandwidth, wall_seconds

import undertow as ut
from undertow.fabric import profile
from undertow.fabric.environment import environment
from undertow.ops.profile import meeting, sharpen
from undertow.plan import tuner
from undertow.plan.machine import FORMAT, Machine
from undertow.plan.metrics import share_of_ideal
from undertow.plan.plan import Plan, split
from undertow.plan.predict import predict
from undertow.plan.problem import Problem
from undertow.plan.search import fixed, ranked, wave_cuts

LANE = "dma"
ROWS, INNER = (2048, 3072, 4096, 6144, 8192), (2048, 4096, 7168, 10240, 14336, 20480)
COUNTS = (4, 6, 8, 10, 12, 16, 24)
ALL_ROUNDS, ROUNDS = 2, 7
CLEARLY, STILL = 1.10, 1.05  # times the fastest: who is slower than that leaves after two rounds, and after four
AUTO = "auto"
PLANNED = "serial, planned"
CHUNKS = "chunks, planned"
BEYOND = ("best", AUTO, PLANNED, CHUNKS)  # not among the fixed ones
NAMED = ("serial", "growing", "shrinking", "chunks of 2", "flash overlap")  # and equal parcels of so many waves
ALONE = ("gemm", "communication")


def fixed_candidates(problem: Problem, machine: Machine) -> dict[str, Plan]:
    """At most 48 different plans of waves and chunks, those that post, and the model's own best."""
    found = fixed(problem, machine, LANE)
    frame = found["best"]
    cuts = wave_cuts(problem, frame)
    waves = len(cuts) - 1
    for count in COUNTS:
        if count <= waves:
            ends = [cuts[stop] for _, stop in split(waves, count)]
            found[f"{count} parcels"] = replace(frame, parcels=tuple(itertools.pairwise([0, *ends])))
    for name, weights in (("gently growing", range(2, 10)), ("gently shrinking", range(9, 1, -1))):
        ends = [cuts[round(waves * reached / 44)] for reached in itertools.accumulate(weights)]
        if waves >= 16:
            found[name] = replace(frame, parcels=tuple(itertools.pairwise([0, *ends])))
    different: dict[str, str] = {}
    for name, plan in found.items():
        if name not in BEYOND:
            different.setdefault(plan.digest, name)
    return {name: found[name] for name in (*different.values(), "best", PLANNED, CHUNKS)}


class Bench:
    def __init__(self, options: dict[str, Any]) -> None:
        self.group = ut.init()
        self._ahead = AtOnce(self.group) if options["ahead"] else None
        self._started = options["started"]  # by the clock that all processes of a machine share
        fabric = self.group.fabric
        fabric.lane(LANE)
        self._align = meeting(self.group, LANE)  # by copy engines: a kernel would stand behind another rank's matmul
        self.machine = self._profile()

    def _profile(self) -> Machine:
        content, pairs = profile.measure(self.group, quick=True, only=(LANE,))
        machine = sharpen(Machine.from_dict({"format": FORMAT, **content}), pairs, self.group, quick=True)
        machine = Machine.from_dict(self.group.exchange(machine.to_dict(), "the machine")[0])
        if self._ahead is not None and machine.engines is not None:
            machine = replace(machine, engines=machine.engines.ahead)
        return machine

    def seconds(self, call: Callable[[], object]) -> float:
        """Device time of the slowest rank; a message between all of them lets ranks begin together."""
        if self._ahead is not None:
            return self._ahead.seconds(call)
        torch.cuda.synchronize()
        self.group.barrier()
        self._align()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return self.group.reduce_max([start.elapsed_time(end) * 1e-3])[0]

    def spent(self) -> float:
        """Seconds since the start; the same on all ranks."""
        return self.group.reduce_max([time.monotonic() - self._started])[0]

    def shape(self, operator: str, m: int, k: int) -> dict[str, Any]:
        group, device = self.group, self.group.device
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        w = torch.randn(N, k, device=device, dtype=torch.bfloat16).t()
        y = torch.empty(m, N, device=device, dtype=torch.bfloat16)
        problem = Problem.of(
            operator, m, N, k, dtype="bfloat16", ranks=group.size, device="cuda",
            multiprocessors=group.fabric.multiprocessors, together=group.fabric.together,
        )  # fmt: skip
        rows = m // group.size if operator == "matmul_reduce_scatter" else m
        out = torch.empty(rows, N, device=device, dtype=y.dtype)

        def run(plan: Plan) -> Callable[[], object]:
            return lambda: CALLS[operator](x, w, group=group, plan=plan, out=out)

        plans = fixed_candidates(problem, self.machine)
        searched = time.perf_counter()
        order = ranked(problem, self.machine, [LANE])
        searched = time.perf_counter() - searched
        decision = tuner.tune(
            problem,
            [plan for plan, _ in order],
            lambda plan: self.seconds(run(plan)),
            lambda text: str(group.exchange(text, "what the first rank decides")[0]),
            predicted=lambda plan: predict(problem, plan, self.machine).total,
            warm=lambda plan: run(plan)(),
        )
        same = next((name for name, plan in plans.items() if plan == decision.plan), None)
        if same is None:
            plans[AUTO] = decision.plan
        calls = {name: run(plan) for name, plan in plans.items()}
        calls["gemm"] = lambda: torch.mm(x, w, out=y)
        serial = min((plans["serial"], plans[PLANNED]), key=lambda plan: predict(problem, plan, self.machine).total)
        calls["communication"] = bare_communication(group, operator, x, w, out, problem, serial)
        first = next(name for name, plan in plans.items() if plan == order[0][0])
        taken = self.rounds(calls, (*ALONE, *BEYOND, "serial", first, same or AUTO))
        return {
            "operator": operator, "m": m, "k": k, "search_seconds": searched, "auto": same or AUTO,
            "first": first,
            "seconds": taken,
            "plans": {
                name: {
                    "grain": plan.grain, "parcels": [stop - start for start, stop in plan.parcels],
                    "layout": plan.layout, "multiprocessors": plan.share.multiprocessors,
                    "predicted": predict(problem, plan, self.machine).total, "measured": statistics.median(taken[name]),
                }
                for name, plan in plans.items()
            },
            "alone": {name: statistics.median(taken[name]) for name in ALONE},
        }  # fmt: skip

    def rounds(self, calls: dict[str, Callable[[], object]], kept: Sequence[str]) -> dict[str, list[float]]:
        """Seconds of each; who is clearly slower than the fastest leaves, but for `kept`. All ranks take one path."""
        for call in calls.values():
            call()
            torch.cuda.synchronize()
        taken: dict[str, list[float]] = {name: [] for name in calls}
        running = list(calls)
        for turn in range(ROUNDS):
            for name in running:
                taken[name].append(
                    self.seconds(calls[name]) if name != "gemm" else wall_seconds(self.group, calls[name])
                )
            if turn + 1 in (ALL_ROUNDS, ALL_ROUNDS + 2):
                limit = CLEARLY if turn + 1 == ALL_ROUNDS else STILL
                fastest = min(min(taken[name]) for name in running if name not in ALONE)
                running = [name for name in running if name in kept or min(taken[name]) <= limit * fastest]
        return taken


def judged(one: dict[str, Any]) -> dict[str, float]:
    """The figures of one shape."""
    plans, gemm, comm = one["plans"], one["alone"]["gemm"], one["alone"]["communication"]
    measured = {name: plan["measured"] for name, plan in plans.items()}
    best = min(took for name, took in measured.items() if name not in BEYOND)
    named = min(took for name, took in measured.items() if name in NAMED or name.startswith("equal "))
    errors = [plan["predicted"] / plan["measured"] - 1 for plan in plans.values()]
    fastest, serial = min(measured.values()), min(measured["serial"], measured[PLANNED])
    return {
        "error": statistics.mean(abs(one) for one in errors),
        "bias": statistics.mean(errors),
        "auto": measured[one["auto"]] / best,
        "auto_named": measured[one["auto"]] / named,
        "first": measured[one["first"]] / best,
        "model": measured["best"] / best,
        "speedup": serial / fastest,
        "auto_speedup": serial / measured[one["auto"]],
        "share": share_of_ideal(fastest, gemm, comm) or 0.0,
        "auto_share": share_of_ideal(measured[one["auto"]], gemm, comm) or 0.0,
        "ratio": comm / gemm,
    }


def line(one: dict[str, Any]) -> str:
    found, plans = judged(one), one["plans"]
    best = min((name for name in plans if name not in BEYOND), key=lambda name: plans[name]["measured"])
    return (
        f"{one['operator'][7:]:15} M {one['m']:5} K {one['k']:5}  gemm {one['alone']['gemm'] * 1e3:6.2f} comm "
        f"{one['alone']['communication'] * 1e3:6.2f} serial {plans['serial']['measured'] * 1e3:6.2f} "
        f"({plans[PLANNED]['measured'] * 1e3:.2f} planned) ms | error "
        f"{found['error'] * 100:4.1f}% ({found['bias'] * 100:+.1f}) | fixed: {best} {plans[best]['measured'] * 1e3:.2f}"
        f" | auto: {one['auto']} {found['auto']:.3f} of it | model's {found['model']:.3f}, first {found['first']:.3f}"
        f" | {found['speedup']:.2f}x, share of ideal {found['share'] * 100:.0f}%"
    )


def summary(shapes: Sequence[dict[str, Any]], link: float, ranks: int) -> list[str]:
    """Over all shapes: the bars of predictor and pick, and of speed-up and share of ideal by M."""
    found = [judged(one) for one in shapes]
    plans = [(name, plan) for one in shapes for name, plan in one["plans"].items()]
    errors = [abs(plan["predicted"] / plan["measured"] - 1) for _, plan in plans]
    lines = [f"{len(shapes)} shapes, {len(plans)} plans: mean absolute error {statistics.mean(errors) * 100:.1f}%"]
    for grain in sorted({plan["grain"] for _, plan in plans}):
        some = [plan["predicted"] / plan["measured"] - 1 for _, plan in plans if plan["grain"] == grain]
        off, bias = statistics.mean(abs(one) for one in some) * 100, statistics.mean(some) * 100
        lines.append(f"  {grain}: {off:.1f}%, bias {bias:+.1f}%")
    for what, name in (
        ("auto's pick", "auto"), ("the same, without chunks of 4 and 8 and numbers of parcels,", "auto_named"),
        ("the model's first", "first"), ("the model's parcels", "model"),
    ):  # fmt: skip
        within = sum(one[name] <= 1.03 for one in found)
        worst = max(one[name] for one in found)
        lines.append(f"{what} within 3% of the best fixed one on {within} of {len(found)}, at worst {worst:.3f}")
    best, auto = (max(one[name] for one in found) for name in ("speedup", "auto_speedup"))
    slower = sum(one["auto_speedup"] < 0.98 for one in found)
    lines.append(f"best speed-up {best:.2f}, auto's {auto:.2f}; auto below 0.98 of serial on {slower}")
    for m in sorted({one["m"] for one in shapes}):
        some = [one for shape, one in zip(shapes, found, strict=True) if shape["m"] == m and 0.5 <= one["ratio"] <= 2]
        if some:
            best, auto = (statistics.mean(one[name] for one in some) * 100 for name in ("share", "auto_share"))
            lines.append(f"M {m}: {len(some)} shapes, mean share of ideal {best:.0f}%, auto's {auto:.0f}%")
    for operator, m in sorted({(one["operator"], one["m"]) for one in shapes}):
        took = [one["alone"]["communication"] for one in shapes if (one["operator"], one["m"]) == (operator, m)]
        phases = 2 if operator == "matmul_all_reduce" else 1
        speed = phases * (ranks - 1) / ranks * m * N * 2 / statistics.median(took)
        lines.append(f"{operator[7:]} M {m}: serial's link {speed / 1e9:.1f} GB/s a rank each way, {speed / link:.2f}")
    return lines


def rank_main(options: dict[str, Any]) -> dict[str, Any]:
    bench = Bench(options)
    link, spent = two_way_bandwidth(bench.group), bench.spent()
    if bench.group.rank == 0:
        print(f"profiled after {spent:.0f} s: {bench.machine.engines} {bench.machine.work}", flush=True)
        print(f"bare copies {link / 1e9:.1f} GB/s a rank each way", flush=True)
    shapes = list(itertools.product(OPERATORS, ROWS, INNER))
    random.Random(options["seed"]).shuffle(shapes)
    found: list[dict[str, Any]] = []
    longest = 0.0
    for operator, m, k in shapes:
        began = bench.spent()
        if began + longest > options["seconds"]:
            break
        found.append(bench.shape(operator, m, k))
        longest = max(longest, bench.spent() - began)
        if bench.group.rank == 0:
            print(line(found[-1]), flush=True)
    return {"machine": bench.machine.to_dict(), "link": link, "shapes": found}


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=170, help="of everything; a shape is begun only if it fits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ahead", action="store_true", help="the GPU is busy before each call: the host runs ahead")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--machine", type=Path, help="where the machine file goes")
    options = parser.parse_args()
    given = {"seconds": options.seconds, "seed": options.seed, "started": started, "ahead": options.ahead}
    found = ut.launch(rank_main, options.ranks, device="cuda", args=(given,), deadline=60)[0]
    print(*summary(found["shapes"], found["link"], options.ranks), sep="\n")
    if options.machine:
        Machine.from_dict(found["machine"]).save(options.machine)
    if options.out:
        facts = environment({"link": f"virtual node of {options.ranks}, lane {LANE}", "ahead": options.ahead})
        options.out.write_text(json.dumps({**found, "environment": facts}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
