"""Why a fused lookup takes longer than the lookup alone: the same bytes, one difference after the other, in one run.

| variant | what it adds to the one before |
|---|---|
| lookup | rows written locally, side by side: the baseline |
| far | rows as far apart as in a result, in own memory: partitions of memory that all CTAs write to at once |
| kernel | the kernel that is a whole call, without words: its code, registers and last ticket |
| fences | a signal for each slice, to own words: what a release costs, and an acquire that empties first-level caches |
| peers | into peers' memory, by the plain kernel, without words: the stores themselves |
| peers, fences | the whole call's kernel into peers' memory, signals to own words; nobody waits for anybody |
| fused | the call: places told and waited for, so that ranks go in step |

Then `fused` with one thing changed: tables in turn (neighbours of a row stored at about the same time), own slices
first, four slices for each destination, fewer CTAs on an SM with more registers. Of each the slowest and the fastest
rank: in step, ranks wait for the slowest of every call. Everything in graphs of one call and of several: a graph of
several calls has ranks meet as often. Beside the shape itself, others that differ in one thing.

    PYTHONPATH=src python bench/gpu_embedding_why.py [--ranks 4] [--rounds 7] [--out why.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_embedding
import torch
from embedding_report import Case

import undertow as ut
from undertow.fabric.environment import environment
from undertow.ops import embedding_all_to_all as operator
from undertow.ops import embedding_cuda, embedding_run
from undertow.ops.embedding_cuda import Lookup, Slice
from undertow.plan.bags import completed, kernel_shape, slices
from undertow.plan.defaults import default_plan
from undertow.plan.plan import Plan, split

CASES = (
    Case(2048, 16, 256, 10, "bfloat16", "zipf"),
    Case(2048, 16, 256, 10, "bfloat16", "uniform"),
    Case(2048, 16, 128, 10, "float32", "zipf"),  # rows of as many bytes
    Case(2048, 16, 128, 10, "bfloat16", "zipf"),
)
CALLS = (4, 1)


class Why(gpu_embedding.Bench):
    """Its tables, bags and graphs."""

    def variants(self, case: Case) -> dict[str, Callable[[], object]]:
        group, fabric = self.group, self.fabric
        rank = group.rank
        bags, layout, batches = self.bags(case)
        like = bags.tables[0].new_empty(0)
        size, room = like.element_size(), layout.room
        local = like.new_empty(bags.samples, bags.width)
        wide = like.new_empty(bags.samples, room)
        words = torch.zeros(32 * group.size, dtype=torch.int32, device=self.device)
        space = fabric.workspace("embedding why", max(batches) * room * size)
        usual = default_plan(operator.problem_of(bags, layout, batches, group), "fused", "peer")
        plan = completed(usual, layout.dims, size, bags.mean_length)
        lookup = Lookup(fabric, bags, plan, layout.columns[rank])
        leaving = slices(batches, plan, rank)

        def into(signals: bool, peers: bool) -> list[Slice]:
            found = []
            for number, one in enumerate(leaving):
                address = wide.data_ptr() + one.first * room * size
                if peers:
                    address = space.address(one.destination) + one.row * room * size
                signal = words.data_ptr() + 128 * number if signals and one.destination != rank else 0
                found.append(Slice(address, room, one.first, one.bags, signal))
            return found

        def called(changed: Plan, shape: Callable[..., Any] = kernel_shape) -> None:
            embedding_cuda.kernel_shape = shape
            embedding_run.run(fabric, bags, layout, batches, changed, like)
            embedding_cuda.kernel_shape = kernel_shape

        def in_turn(given: Plan, item_size: int) -> Any:
            return kernel_shape(given, item_size)._replace(together=case.tables)

        def roomy(given: Plan, item_size: int) -> Any:
            return kernel_shape(given, item_size)._replace(registers=80)

        far, fenced = into(False, False), into(True, False)
        peers, both = into(False, True), into(True, True)
        return {
            "lookup": lambda: embedding_run.pool_all(fabric, bags, layout, batches, local),
            "far": lambda: lookup.pool(far),
            "kernel": lambda: lookup.exchange(far, [], [], 1, wide),
            "fences": lambda: lookup.exchange(fenced, [], [], 1, wide),
            "peers": lambda: lookup.pool(peers),
            "peers, fences": lambda: lookup.exchange(both, [], [], 1, wide),
            "fused": partial(called, usual),
            "fused, tables in turn": partial(called, usual, in_turn),
            "fused, own first": partial(called, replace(usual, own_last=False)),
            "fused, 4 slices": partial(called, replace(usual, parcels=split(bags.samples, 4))),
            "fused, 80 registers": partial(called, usual, roomy),
        }

    def times(self, variants: dict[str, Callable[[], object]], calls: int) -> dict[str, list[float]]:
        """Median seconds of one call, of every rank by itself; all at once, interleaved."""
        ready = {name: self.captured(call, calls) for name, call in variants.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ready}
        for turn in range(self.rounds + 1):
            for name, call in ready.items():
                torch.cuda.synchronize()
                self.group.barrier()
                began = time.perf_counter()
                call()
                torch.cuda.synchronize()
                if turn:
                    seconds[name].append((time.perf_counter() - began) / calls)
        mine = [statistics.median(one) for one in seconds.values()]
        every = self.group.exchange(mine, "medians")
        return {name: [theirs[number] for theirs in every] for number, name in enumerate(seconds)}


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    gpu_embedding.GRAPHS = 12  # results of so many graphs stand side by side, each in a place of its own
    bench = Why(options["rounds"])
    found = []
    for case in CASES:
        variants = bench.variants(case)
        for calls in CALLS:
            bench.copied = 0
            medians = bench.times(variants, calls)
            found.append({"case": vars(case), "calls": calls, "medians": medians, "copied": bench.copied})
            if bench.group.rank == 0:
                print(told(found[-1]), flush=True)
                Path(options["out"]).write_text(json.dumps(found, indent=1) + "\n")
        del variants
        torch.cuda.empty_cache()
    return found


def told(one: dict[str, Any]) -> str:
    base = max(one["medians"]["lookup"])
    lines = [
        f"{Case(**one['case'])}, graphs of {one['calls']}: lookup {base * 1e3:.3f} ms; of it, slowest (fastest) rank"
    ]
    for name, medians in one["medians"].items():
        lines.append(f"  {name:24} {max(medians) / base:5.2f} ({min(medians) / base:4.2f})")
    if one["copied"]:
        lines.append(f"  {one['copied']} captured results were copied out: no place was free")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("gpu-embedding-why.json"))
    options = parser.parse_args()
    given = {"rounds": options.rounds, "out": str(options.out.absolute())}
    found = ut.launch(rank_main, options.ranks, device="cuda", args=(given,), deadline=60)[0]
    facts = environment({"link": f"virtual node of {options.ranks}"})
    options.out.write_text(json.dumps({"found": found, "environment": facts}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
