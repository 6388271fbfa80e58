"""A matmul whose communication is a collective program, against the operator's own.

Both are `signaled` over the same lane, with as many parcels. All variants run in turn, the slowest rank counts, and
ratios are taken inside a round. Results are compared with exact integers first.

    PYTHONPATH=src python bench/programs.py [--ranks 2] [--lanes peer] [--m 1024 --n 1024 --k 1024] [--out FILE.json]
    PYTHONPATH=src python bench/programs.py --device cuda --ranks 4 --m 4096 --n 8192 --k 4096 --lanes peer,dma
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import undertow as ut
from undertow import collective as co
from undertow.fabric.timer import compare
from undertow.ops.matmul_all_reduce import reference

ROUNDS = 25
PARCELS = 8
BUILT_IN = "built in"
SUMMED = 64  # rows of a weight that are not zero: sums of all ranks stay exact in bf16, in whatever order
PROGRAMS = {
    "matmul_all_reduce": ("two_shot", "ring", "halving_doubling"),
    "matmul_reduce_scatter": ("reduce_scatter_direct", "reduce_scatter_ring", "reduce_scatter_halving"),
}


@co.program("all_reduce", chunks=lambda ranks: PARCELS * ranks)
def parcel_by_parcel(c: co.Trace) -> None:
    """A user's own: parcel p holds a chunk for every rank, which sums it and hands the sum to all others."""
    for parcel in range(PARCELS):
        for rank in range(c.ranks):
            c.tile_ready(c.rank(rank).input[parcel * c.ranks : (parcel + 1) * c.ranks], parcel)
        for owner in range(c.ranks):
            chunk = parcel * c.ranks + owner
            total = c.rank(owner).input[chunk].copy(c.rank(owner).output[chunk])
            for other in c.others(owner):
                total.reduce(c.rank(other).input[chunk])
            for other in c.others(owner):
                total.copy(other)


@co.program("reduce_scatter", chunks=PARCELS)
def shard_by_shard(c: co.Trace) -> None:
    """A user's own: parcel p holds a chunk of every shard, which its owner sums."""
    for parcel in range(PARCELS):
        for owner in range(c.ranks):
            chunk = owner * PARCELS + parcel
            for rank in range(c.ranks):
                c.tile_ready(c.rank(rank).input[chunk], parcel)
            total = c.rank(owner).input[chunk].copy(c.rank(owner).output[parcel])
            for other in c.others(owner):
                total.reduce(c.rank(other).input[chunk])


OWN = {"matmul_all_reduce": parcel_by_parcel, "matmul_reduce_scatter": shard_by_shard}


def measure(operator: str, lane: str, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """In every rank: seconds of all variants."""
    group = ut.init()
    m, n, k = shape
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32

    def integers(rows: int, columns: int, seed: int) -> torch.Tensor:
        chance = torch.Generator(group.device).manual_seed(seed)
        return torch.randint(-1, 2, (rows, columns), generator=chance, device=group.device).to(dtype)

    factors = [(integers(m, k, rank), integers(k, n, 99 + rank)) for rank in range(group.size)]
    for _, w in factors:
        w[SUMMED:] = 0
    want = reference([x.float() for x, _ in factors], [w.float() for _, w in factors]).to(dtype)
    call: Callable[..., torch.Tensor] = getattr(ut, operator)
    if operator == "matmul_reduce_scatter":
        want = torch.tensor_split(want, group.size)[group.rank].contiguous()
    x, w = factors[group.rank]
    out = torch.empty_like(want)
    programs: dict[str, co.Program | None] = {
        BUILT_IN: None, **{name: co.LIBRARY[name] for name in PROGRAMS[operator]}, OWN[operator].name: OWN[operator],
    }  # fmt: skip
    variants = {}
    for name, program in programs.items():
        options = {} if program is None else {"program": program}
        variants[name] = lambda options=options: call(x, w, strategy=f"signaled:{lane}", out=out, **options)
        out.fill_(float("nan"))
        variants[name]()
        group.check()
        assert torch.equal(out, want), f"{operator} by {name} is wrong"
    found = compare(
        variants, repeats=rounds, warmup=3, budget_seconds=60, reduce_max=group.reduce_max, before=group.barrier,
        facts={"ranks": group.size, "link": group.fabric.lane(lane).describe()},
    )  # fmt: skip
    ratios = {name: found.ratio(BUILT_IN, name) for name in programs if name != BUILT_IN}
    return {
        "operator": operator, "lane": lane, "shape": shape,
        "median": {name: found.estimate(name).median for name in programs},
        "of built in": {name: [one.median, one.low, one.high] for name, one in ratios.items()},
        "environment": found.environment,
    }  # fmt: skip


def measure_all(lanes: list[str], shape: tuple[int, int, int], rounds: int) -> list[dict[str, Any]]:
    """In every rank, one operator and lane after the other."""
    found = []
    for operator in PROGRAMS:
        for lane in lanes:
            found.append(measure(operator, lane, shape, rounds))
            if ut.init().rank == 0:
                print(f"{operator} over {lane}: built in {found[-1]['median'][BUILT_IN] * 1e3:.2f} ms")
                for name, (median, low, high) in found[-1]["of built in"].items():
                    print(f"  {name}: {median:.3f} [{low:.3f}, {high:.3f}] of the built-in's speed", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("ranks", 2), ("m", 1024), ("n", 1024), ("k", 1024), ("rounds", ROUNDS)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lanes", default="peer")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = options.m, options.n, options.k
    arguments = (options.lanes.split(","), shape, options.rounds)
    results = ut.launch(measure_all, options.ranks, device=options.device, args=arguments, deadline=60)[0]
    if options.out:
        options.out.write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
