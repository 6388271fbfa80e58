"""Layers of tensor parallelism over the host-staged link (`dma`), by whichever plan the tuner picks for that lane.

For row-parallel layers matmul_reduce_scatter, for column-parallel ones all_gather_matmul, of Llama-3 70B and of GPT-3
175B. In one run, on ranks that share a GPU: the machine is profiled, then for one layer after the other the candidates
over that lane are tuned as `auto` does it (200 ms), and measured again, interleaved, in device time with the hosts
ahead (`at_once`): the matmul alone (cuBLAS), the communication alone (the serial plan's), serial, and the pick.

Told: T_comm / T_gemm, speed-up over serial, the share of the ideal speed-up; its mean where neither part is more than
twice the other, and elsewhere.

    PYTHONPATH=src python bench/gpu_staged_layers.py [--ranks 4] [--m ...] [--models ...] [--seconds 100] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_pick
import torch
from gpu_fused import COLUMN_PARALLEL, HIDDEN, ROW_PARALLEL
from gpu_overlap import bare_communication

import undertow as ut
from undertow.fabric.environment import environment
from undertow.plan import tuner
from undertow.plan.defaults import default_plan
from undertow.plan.metrics import share_of_ideal
from undertow.plan.plan import Plan
from undertow.plan.predict import predict
from undertow.plan.problem import Problem
from undertow.plan.search import ranked

LANE = gpu_pick.LANE
SCATTER, GATHER = "matmul_reduce_scatter", "all_gather_matmul"
FEW_COLUMNS = 8  # of a matmul that costs nothing beside the gather in front of it
Layer = tuple[str, str, int, int, int]  # operator, model, M, and of each rank K, N


def layers(models: list[str], rows: list[int], ranks: int) -> list[Layer]:
    found: list[Layer] = []
    for m in rows:
        for model in models:
            hidden = HIDDEN[model]
            found += [(SCATTER, model, m, k // ranks, hidden) for k in ROW_PARALLEL[model]]
            found += [(GATHER, model, m, hidden, n // ranks) for n in COLUMN_PARALLEL[model]]
    return found


class Bench(gpu_pick.Bench):
    def layer(self, operator: str, model: str, m: int, k: int, n: int, rounds: int) -> dict[str, Any]:
        group, options = self.group, {"device": self.group.device, "dtype": torch.bfloat16}
        gathers, each = operator == GATHER, m // group.size
        whole, w = torch.randn(m, k, **options), torch.randn(n, k, **options).t()
        x = whole[:each].contiguous() if gathers else whole
        y = torch.empty(m, n, **options)
        out = y if gathers else torch.empty(each, n, **options)
        problem = Problem.of(
            operator, m, n, k, dtype="bfloat16", ranks=group.size, device="cuda",
            multiprocessors=group.fabric.multiprocessors, shards=[each] * group.size,
            bulk=group.fabric.bulk_copies, together=group.fabric.together,
        )  # fmt: skip
        function: Any = getattr(ut, operator)

        def run(plan: Plan) -> Callable[[], object]:
            return lambda: function(x, w, group=group, plan=plan, out=out)

        decision = tuner.tune(
            problem,
            [plan for plan, _ in ranked(problem, self.machine, [LANE])],
            lambda plan: self.seconds(run(plan)),
            lambda text: str(group.exchange(text, "what the first rank decides")[0]),
            predicted=lambda plan: predict(problem, plan, self.machine).total,
            warm=lambda plan: run(plan)(),
        )
        serial = default_plan(problem, "serial", LANE)
        narrow, few = w[:, :FEW_COLUMNS], torch.empty(m, FEW_COLUMNS, **options)
        calls = {
            "gemm": lambda: torch.mm(whole, w, out=y),
            "communication": (
                (lambda: function(x, narrow, group=group, strategy=f"serial:{LANE}", out=few))
                if gathers else bare_communication(group, operator, x, w, out, problem, serial)
            ),
            "serial": run(serial),
            "pick": run(decision.plan),
        }  # fmt: skip
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, call in calls.items():
                seconds = self.seconds(call)
                if turn:
                    taken[name].append(seconds)
        group.check()
        median = {name: statistics.median(found) for name, found in taken.items()}
        facts = {"operator": operator, "model": model, "m": m, "k": k, "n": n, "ranks": group.size}
        pick = {"strategy": decision.plan.name, "parcels": len(decision.plan.parcels)}
        trials = [
            {
                "strategy": one.plan.name,
                "parcels": len(one.plan.parcels),
                "predicted": one.predicted,
                "median": one.median,
            }
            for one in decision.trials
        ]
        return {**facts, "pick": pick, "seconds": taken, "median": median, "trials": trials}


def share(one: dict[str, Any]) -> float:
    """Of the ideal speed-up; a pick that is serial has none, whatever its two measurements say."""
    median = one["median"]
    if one["pick"]["strategy"].startswith("serial"):
        return 0.0
    return share_of_ideal(median["pick"], median["gemm"], median["communication"]) or 0.0


def line(one: dict[str, Any]) -> str:
    median = one["median"]
    gemm, comm, serial, pick = (median[name] * 1e3 for name in ("gemm", "communication", "serial", "pick"))
    return (
        f"{one['operator']:22} {one['model']:11} M {one['m']:5} K {one['k']:5} N {one['n']:5}  gemm {gemm:6.2f} "
        f"comm {comm:6.2f} ({comm / gemm:5.2f}) serial {serial:6.2f} ms | {one['pick']['strategy']} in "
        f"{one['pick']['parcels']}: {pick:6.2f} ms, {serial / pick:.2f}x, {share(one) * 100:.0f}% of ideal"
    )


def summary(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for text, near in (("where 0.5 <= comm/gemm <= 2", True), ("elsewhere", False)):
        some = [
            one for one in found if (0.5 <= one["median"]["communication"] / one["median"]["gemm"] <= 2) == near
        ]  # fmt: skip
        if some:
            mean, worst = statistics.mean(share(one) for one in some), min(share(one) for one in some)
            slowest = min(one["median"]["serial"] / one["median"]["pick"] for one in some)
            lines.append(
                f"{len(some)} layers {text}: mean share of ideal {mean * 100:.0f}%, at worst {worst * 100:.0f}%; "
                f"over serial at worst {slowest:.2f}x"
            )
    return lines


def rank_main(options: dict[str, Any]) -> dict[str, Any]:
    bench = Bench(options)
    spent = bench.spent()
    if bench.group.rank == 0:
        print(f"profiled after {spent:.0f} s", flush=True)
    found: list[dict[str, Any]] = []
    for one in layers(options["models"], options["m"], bench.group.size):
        if bench.spent() > options["seconds"]:
            break
        found.append(bench.layer(*one, options["rounds"]))
        torch.cuda.empty_cache()
        if bench.group.rank == 0:
            print(line(found[-1]), flush=True)
    return {"machine": bench.machine.to_dict(), "layers": found}


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--models", default=",".join(HIDDEN))
    parser.add_argument("--m", default="2048,8192,512,4096,1024")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=100, help="of everything: no layer is begun later")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    given = {
        "ahead": True, "started": started, "seconds": options.seconds, "rounds": options.rounds,
        "models": options.models.split(","), "m": [int(one) for one in options.m.split(",")],
    }  # fmt: skip
    found = ut.launch(rank_main, options.ranks, device="cuda", args=(given,), deadline=60)[0]
    print(*summary(found["layers"]), sep="\n")
    if options.out:
        facts = environment({"link": f"virtual node of {options.ranks}, lane {LANE}", "ahead": True})
        options.out.write_text(json.dumps({**found, "environment": facts}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
