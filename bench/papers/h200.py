"""This repository's own H200 runs (bench/results): measured operators against simulated ones.

    PYTHONPATH=src python bench/papers/h200.py [--overlap FILE --machine FILE]

A run of gpu_overlap beside a machine file that `undertow profile` (or gpu_pick --machine) wrote on a node of the same
kind: matmuls over k, copy engines, hosts, interference. No result of an overlapped call is in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from side_by_side import Figure, print_figures

from undertow.plan.defaults import default_plan
from undertow.plan.machine import Machine
from undertow.plan.plan import Plan, split
from undertow.plan.problem import Problem
from undertow.sim.plans import simulate_plan

RESULTS = Path(__file__).parents[1] / "results"
OVERLAP, MACHINE = RESULTS / "gpu_overlap_2026-11-16.json", RESULTS / "machine_h200_virtual_node_2026-11-16.toml"
RANKS, N = 4, 8192
SHAPES = {f"{count} equal parcels": [1.0] * count for count in (4, 8, 12, 16)}
SHAPES |= {"8 growing": [1 + 0.5 * one for one in range(8)], "8 shrinking": [1 + 0.5 * (7 - one) for one in range(8)]}


def parcels(weights: list[float], bands: int, columns: int) -> tuple[tuple[int, int], ...]:
    """Whole bands in proportion to the weights, as the bench made them."""
    ends = [round(bands * total / sum(weights)) * columns for total in itertools.accumulate(weights)]
    return tuple(itertools.pairwise([0, *ends]))


def plans(problem: Problem) -> dict[str, Plan]:
    base = default_plan(problem, "signaled", "dma")
    grid = problem.grid(base)
    found = {
        "serial": default_plan(problem, "serial", "dma"),
        "two chunks": Plan("chunked", "dma", split(problem.m, 2)),
        "4 chunks": Plan("chunked", "dma", split(problem.m, 4)),
        "8 chunks": Plan("chunked", "dma", split(problem.m, 8)),
    }
    for name, weights in SHAPES.items():
        if len(weights) > sum(grid.band_counts):
            continue
        cuts = parcels(weights, sum(grid.band_counts), grid.columns)
        found[name] = replace(base, parcels=cuts, layout="natural")
    return found


def compare(
    node: Machine, overlap: dict[str, Any]
) -> tuple[list[Figure], dict[str, list[float]], dict[str, list[bool]]]:
    """Lines, and by kind of strategy the errors and whether pairs stand in the right order."""
    figures: list[Figure] = []
    errors: dict[str, list[float]] = {"unsignaled": [], "signaled": []}
    orders: dict[str, list[bool]] = {"unsignaled": [], "signaled": []}
    for shape in overlap["shapes"]:
        problem = Problem.of(
            shape["operator"], shape["m"], N, shape["k"], dtype="bfloat16", ranks=RANKS, device="cuda",
            multiprocessors=node.gemm.points[-1][0],
        )  # fmt: skip
        simulated: dict[str, float] = {}
        for name, plan in plans(problem).items():
            if name not in shape["median"]:
                continue
            simulated[name] = simulate_plan(problem, plan, node).seconds
            measured = shape["median"][name]
            error = simulated[name] / measured - 1
            errors["signaled" if plan.grain == "signaled" else "unsignaled"].append(error)
            what = f"{shape['operator']}, M = {shape['m']}, K = {shape['k']}, {name}"
            figures.append(Figure(what, f"{measured * 1e3:.1f} ms", f"{simulated[name] * 1e3:.1f} ms", f"{error:+.0%}"))
        for one, other in itertools.combinations(simulated, 2):
            told = shape["median"][one] - shape["median"][other]
            if abs(told) > 0.05 * shape["median"][one]:  # closer than that, runs disagree among themselves
                kind = "signaled" if "parcels" in one + other or "ing" in one + other else "unsignaled"
                orders[kind].append(told * (simulated[one] - simulated[other]) > 0)
    return figures, errors, orders


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--overlap", type=Path, default=OVERLAP, help="what gpu_overlap --out wrote")
    parser.add_argument("--machine", type=Path, default=MACHINE, help="the machine file of such a node")
    options = parser.parse_args()
    lines, misses, right = compare(Machine.load(options.machine), json.loads(options.overlap.read_text()))
    every, pairs = list(itertools.chain(*misses.values())), list(itertools.chain(*right.values()))
    told = [
        f"All: mean error {statistics.mean(map(abs, every)):.1%}; of pairs more than 5% apart,"
        f" {sum(pairs) / len(pairs):.0%} in the right order.",
    ]
    told += [
        f"{kind}: mean error {statistics.mean(map(abs, misses[kind])):.1%}; of pairs more than 5% apart,"
        f" {sum(right[kind]) / len(right[kind]):.0%} in the right order. The goal is 10% and 90%."
        for kind in misses
    ]
    print_figures("Operators on a virtual node of 4 ranks, lane dma: measured and simulated", lines, told)


if __name__ == "__main__":
    main()
