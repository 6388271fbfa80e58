"""Embedding + All-to-All in a virtual node: own lookup, serial, fused; over peers and over the host link.

First exactness against a plain loop, then for every shape, in one run, interleaved, the slowest rank counts:
- `lookup`: own kernel, written locally, beside torch's embedding_bag, table by table;
- `serial`: lookup, then the All-to-All on all SMs, over the same lane; `move`: that All-to-All alone;
- `fused`: one kernel that stores into peers' results; over the host link `signaled`: slices leave behind one kernel.

Bytes of a lookup: rows read, pooled rows written. All ranks run at once, so each has its part of the card's bandwidth.
Several calls in one CUDA graph: device time. `hidden` is the part of the All-to-All's time that fused does not show.

First a few shapes of the kernel (vectors in a thread, rows ahead, registers) are tried on one problem of each kind; the
fastest is what runs afterwards, and is printed: those of `plan/bags.py` should be the same.

    PYTHONPATH=src python bench/gpu_embedding.py [--full] [--seconds 55] [--out results.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import undertow as ut
from undertow.fabric.environment import environment
from undertow.ops import embedding_all_to_all as operator
from undertow.ops import embedding_cuda, embedding_run
from undertow.ops.bags import Bags, Shard
from undertow.plan.bags import Layout, Piece, Shape
from undertow.plan.defaults import default_plan

PUBLISHED = "4 GPUs of a node -25% mean, up to -35%; between nodes -31% mean, up to -58% (arXiv 2305.06942)"
GRID = {
    "batch": (512, 2048, 8192), "tables": (4, 16, 64), "dim": (64, 128, 256), "pooling": (1, 10, 70),
    "dtype": ("float32", "bfloat16"), "indices": ("uniform", "zipf"),
}  # fmt: skip
FIRST = (
    (2048, 16, 128, 10, "float32", "uniform"),
    (2048, 16, 128, 1, "float32", "uniform"),
    (8192, 16, 128, 1, "bfloat16", "zipf"),
    (2048, 16, 128, 70, "bfloat16", "uniform"),
    (2048, 16, 256, 10, "bfloat16", "zipf"),
    (512, 64, 64, 1, "float32", "uniform"),
    (8192, 4, 64, 10, "float32", "zipf"),
    (512, 16, 256, 70, "float32", "uniform"),
    (2048, 64, 128, 10, "bfloat16", "uniform"),
    (2048, 4, 256, 1, "float32", "zipf"),
    (8192, 16, 64, 70, "float32", "uniform"),
    (512, 4, 128, 10, "float32", "uniform"),
    (2048, 64, 64, 1, "bfloat16", "zipf"),
    (512, 64, 128, 70, "bfloat16", "zipf"),
    (512, 4, 64, 1, "float32", "uniform"),
    (8192, 64, 128, 1, "float32", "uniform"),
)
"""One of each kind, before others follow in a seeded order."""
TABLE_BYTES = 4 << 30
MOST_VALUES = 160 << 20  # of a rank: indices of 8 bytes
HOST_BYTES = 48 << 20  # shapes that send more per rank are left out over the host link
ZIPF = 1.05
SERIAL, FUSED, HOST = "serial:peer", "fused:peer", "signaled:dma"


@dataclass(frozen=True)
class Case:
    batch: int
    tables: int
    dim: int
    pooling: int
    dtype: str
    indices: str

    def __str__(self) -> str:
        kind = "bf16" if self.dtype == "bfloat16" else "fp32"
        return f"B{self.batch:5} T{self.tables:3} D{self.dim:4} L{self.pooling:3} {kind} {self.indices:7}"


def cases(full: bool, ranks: int) -> list[Case]:
    first = [Case(*one) for one in FIRST]
    every = [Case(*one) for one in itertools.product(*GRID.values())]
    every = [one for one in every if one.batch * ranks * one.tables * one.pooling <= MOST_VALUES and one not in first]
    random.Random(6).shuffle(every)
    return first + every if full else first


# -- exactness ---------------------------------------------------------------------------------------------------------


PROBLEMS = (
    (torch.float32, torch.int64, (128,)),
    (torch.bfloat16, torch.int32, (64, 128)),
    (torch.float16, torch.int64, (3, 5)),
    (torch.float32, torch.int32, (600, 20)),
)


def jagged(group: ut.Group, seed: int) -> dict[str, Any]:
    """The arguments of all ranks for a small random problem: the same on every rank."""
    pick = random.Random(seed)
    dtype, index, dims = PROBLEMS[seed % len(PROBLEMS)]
    batches = [pick.choice([0, 1, 7, 33, 60]) for _ in range(group.size)]
    batches[0] = 5
    samples, generator = sum(batches), torch.Generator().manual_seed(seed)
    tables, values, offsets, weights = [], [], [], []
    for rank in range(group.size):
        count = pick.choice([0, 1, 2, 5]) if rank else 2
        held = [
            torch.randint(-2, 3, (pick.choice([1, 9, 300]), pick.choice(dims)), generator=generator).to(dtype)
            for _ in range(count)
        ]
        lengths = torch.randint(0, 12, (count * samples,), generator=generator)
        offsets.append(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(index))
        parts = [
            torch.randint(0, len(one), (int(lengths[k * samples : (k + 1) * samples].sum()),), generator=generator)
            for k, one in enumerate(held)
        ]
        values.append(torch.cat([*parts, torch.zeros(0, dtype=torch.int64)]).to(index))
        weights.append(torch.randint(-1, 2, (len(values[-1]),), generator=generator).float())
        tables.append(held)
    return {
        "tables": tables, "values": values, "offsets": offsets, "batches": batches,
        "weights": weights if seed % 2 else None, "pooling": "sum",
    }  # fmt: skip


def exact(group: ut.Group, seeds: range) -> int:
    """Every strategy against the plain loop; results are kept, so that places run out and are copied, too."""
    count, device = 0, group.device
    strategies = [f"{grain}:peer" for grain in ("serial", "chunked", "signaled", "fused")]
    strategies += ["serial:dma", "signaled:dma", "chunked:dma"]
    for seed in seeds:
        given = jagged(group, seed)
        want = operator.reference(**given)[group.rank].to(device)
        mine = {name: given[name][group.rank].to(device) for name in ("values", "offsets")}
        weights = None if given["weights"] is None else given["weights"][group.rank].to(device)
        tables = [one.to(device) for one in given["tables"][group.rank]]
        kept = []
        for strategy in strategies if seed == 0 else (SERIAL, FUSED, HOST):
            for _ in range(2):
                y = ut.embedding_all_to_all(
                    tables, mine["values"], mine["offsets"], weights=weights, batches=given["batches"],
                    group=group, strategy=strategy,
                )  # fmt: skip
                kept.append((strategy, y))
        torch.cuda.synchronize()
        group.check()
        for strategy, y in kept:
            assert torch.equal(y, want), f"{strategy} is wrong, seed {seed}, rank {group.rank}"
            count += 1
    return count + by_rows(group)


def by_rows(group: ut.Group) -> int:
    """One table cut by rows over all ranks, one cut by columns."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-2, 3, (40, 64), generator=generator)
    columns = torch.randint(-2, 3, (9, 32 * group.size), generator=generator)
    samples, rank, device = 21, group.rank, group.device
    values = torch.randint(0, 9, (2 * samples * 3,), generator=generator).to(device)
    values[: samples * 3] *= 4
    offsets = torch.arange(0, 2 * samples * 3 + 1, 3, device=device)
    part = rows.float().tensor_split(group.size)[rank].contiguous().to(device)
    first = sum(len(one) for one in rows.tensor_split(group.size)[:rank])
    held = [
        Shard(part, 0, first_row=first),
        Shard(columns[:, 32 * rank : 32 * rank + 32].float().contiguous().to(device), 1, first_column=32 * rank),
    ]
    whole = [rows.float().to(device), columns.float().to(device)]
    want = torch.cat([
        torch.nn.functional.embedding_bag(values[k * samples * 3 : (k + 1) * samples * 3].view(samples, 3), one,
                                          mode="sum") for k, one in enumerate(whole)
    ], 1).tensor_split(group.size)[rank]  # fmt: skip
    for strategy in (SERIAL, FUSED, HOST):
        y = ut.embedding_all_to_all(held, values, offsets, group=group, strategy=strategy)
        torch.cuda.synchronize()
        assert torch.equal(y, want), f"rows and columns: {strategy} is wrong on rank {rank}"
    return 3


# -- times -------------------------------------------------------------------------------------------------------------


SHORT = ((1, 1, 48), (2, 1, 64), (2, 1, 80), (4, 1, 128), (2, 2, 96))
LONG = ((1, 8, 80), (1, 8, 128), (1, 4, 64), (2, 4, 128), (1, 16, 128))
"""Vectors of 16 bytes in a thread, rows ahead, registers."""


class Bench:
    def __init__(self, rounds: int) -> None:
        self.group = ut.init()
        self.fabric, self.device, self.rounds = self.group.fabric, self.group.device, rounds
        self.storage = torch.empty(TABLE_BYTES // 4, dtype=torch.float32, device=self.device)
        self.filled = ""

    def tables(self, case: Case) -> list[torch.Tensor]:
        """All of the storage, in as many tables."""
        dtype = getattr(torch, case.dtype)
        whole = self.storage.view(dtype)
        if self.filled != case.dtype:
            whole.uniform_(-1, 1)
            self.filled = case.dtype
        rows = whole.numel() // (case.tables * case.dim)
        return [whole[k * rows * case.dim : (k + 1) * rows * case.dim].view(rows, case.dim) for k in range(case.tables)]

    def bags(self, case: Case) -> tuple[Bags, Layout, tuple[int, ...]]:
        size = self.group.size
        tables, samples = self.tables(case), case.batch * size
        rows = len(tables[0])
        generator = torch.Generator(self.device).manual_seed(7 + self.group.rank)
        count = case.tables * samples * case.pooling
        if case.indices == "uniform":
            values = torch.randint(0, rows, (count,), device=self.device, generator=generator)
        else:  # the inverse of Zipf's distribution, spread over the rows by a multiplication
            power = 1 - ZIPF
            draw = torch.rand(count, device=self.device, generator=generator, dtype=torch.float64)
            order = ((rows**power - 1) * draw + 1) ** (1 / power)
            values = (order.long().clamp(1, rows) * 2654435761) % rows
            del draw, order
        offsets = torch.arange(0, count + 1, case.pooling, device=self.device)
        held = tuple(
            tuple(Piece(rank * case.tables + k, rows, case.dim) for k in range(case.tables)) for rank in range(size)
        )
        layout = Layout(held, case.dtype)
        bags = Bags(tuple(tables), held[self.group.rank], values, offsets, None, "sum", samples)
        return bags, layout, (case.batch,) * size

    def captured(self, call: Callable[[], object], calls: int) -> Callable[[], object]:
        call()
        call()
        torch.cuda.synchronize()
        self.group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
        torch.cuda.synchronize()
        self.group.barrier()
        return graph.replay

    def interleaved(self, variants: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
        """Median seconds of one call; the slowest rank's, all ranks at once."""
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
                    seconds[name].append(time.perf_counter() - began)
        flat = self.group.reduce_max([one for times in seconds.values() for one in times])
        return {
            name: statistics.median(flat[k * self.rounds : (k + 1) * self.rounds]) / calls
            for k, name in enumerate(seconds)
        }

    def stream_bandwidth(self) -> dict[str, float]:
        """Bytes per second of a rank while all copy, or all read; the faster one, reading, is what counts."""
        half = self.storage.numel() // 2
        into = self.storage[half:]
        small = torch.empty(half // 8192, device=self.device)
        found = self.interleaved({
            "copy": lambda: into.copy_(self.storage[:half]),
            "read": lambda: torch.sum(self.storage[:half].view(-1, 8192), 1, out=small),
        }, 1)  # fmt: skip
        self.filled = ""
        return {"copy": 8 * half / found["copy"], "read": 4 * half / found["read"]}

    def choose_shapes(self, stream: float, said: Callable[[str], None]) -> dict[str, Any]:
        """The fastest shape for short and long bags of each dtype, on one problem; used from here on."""
        chosen: dict[tuple[int, bool], tuple[int, int, int]] = {}
        told: dict[str, Any] = {}

        def shape_of(plan: Any, size: int, now: tuple[int, int, int] | None = None) -> Shape:
            vectors, ahead, registers = now or chosen[size, plan.group_bands >= 4]
            columns = plan.tile[1]
            return Shape(max(1, vectors * 128 * 16 // size // columns), columns, ahead, registers)

        for dtype, pooling in itertools.product(("float32", "bfloat16"), (1, 10)):
            case = Case(2048, 16, 128, pooling, dtype, "uniform")
            bags, layout, _ = self.bags(case)
            size = bags.tables[0].element_size()
            local = bags.tables[0].new_empty(bags.samples, bags.width)

            def called(now: tuple[int, int, int], bags: Any = bags, layout: Any = layout, local: Any = local) -> None:
                embedding_cuda.kernel_shape = partial(shape_of, now=now)
                embedding_run.pool_all(self.fabric, bags, layout, (bags.samples,), local)

            choices = SHORT if pooling == 1 else LONG
            for one in choices[self.group.rank :: self.group.size]:  # each rank compiles some, all find them
                called(one)
            torch.cuda.synchronize()
            self.group.barrier()
            median = self.interleaved({str(one): partial(called, one) for one in choices}, 4)
            order = sorted(choices, key=lambda one: median[str(one)])
            chosen[size, pooling > 1] = order[0]
            moved = bags.values.numel() * (case.dim * size + 8) + local.nbytes
            told[str(case)] = {str(one): moved / median[str(one)] / stream for one in order}
            said(f"{case}: " + ", ".join(f"{one} {share:.2f}" for one, share in told[str(case)].items()))
        embedding_cuda.kernel_shape = shape_of
        return told

    def load(self, every: list[Case]) -> None:
        """Compile what the cases need: each rank some of it, and all find it."""
        kinds = {(one.dtype, one.dim, min(one.pooling, 10)): one for one in every}
        small = [Case(64, 1, dim, pooling, dtype, "uniform") for dtype, dim, pooling in sorted(kinds)]
        for one in small[self.group.rank :: self.group.size]:
            bags, layout, _ = self.bags(one)
            local = bags.tables[0].new_empty(bags.samples, bags.width)
            embedding_run.pool_all(self.fabric, bags, layout, (bags.samples,), local)
        torch.cuda.synchronize()
        self.group.barrier()

    def case(self, case: Case, host: bool) -> dict[str, Any]:
        group, fabric = self.group, self.fabric
        bags, layout, batches = self.bags(case)
        problem = operator.problem_of(bags, layout, batches, group)
        like = torch.empty(0, dtype=bags.tables[0].dtype, device=self.device)
        local = like.new_empty(bags.samples, bags.width)
        size = like.element_size()
        sent = local.nbytes * (group.size - 1) // group.size

        def planned(strategy: str) -> Any:
            return default_plan(problem, *strategy.split(":"))

        def called(strategy: str, compute: bool = True) -> Callable[[], object]:
            plan = planned(strategy)
            return lambda: embedding_run.run(fabric, bags, layout, batches, plan, like, compute)

        span = bags.samples * case.pooling
        views = [bags.values[k * span : (k + 1) * span].view(bags.samples, case.pooling) for k in range(case.tables)]

        def torch_lookup() -> None:
            for table, view in zip(bags.tables, views, strict=True):
                torch.nn.functional.embedding_bag(view, table, mode="sum")

        variants: dict[str, Callable[[], object]] = {
            "lookup": lambda: embedding_run.pool_all(fabric, bags, layout, batches, local),
            "torch": torch_lookup,
            "serial": called(SERIAL),
            "move": called(SERIAL, compute=False),
            "fused": called(FUSED),
        }
        first, second = variants["serial"]().clone(), variants["fused"]().clone()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        raw = torch.int32 if size == 4 else torch.int16
        same = bool(torch.equal(first.view(raw), second.view(raw)))
        del first, second
        assert same, f"{case}: fused and serial differ on rank {group.rank}"
        moved = bags.values.numel() * (case.dim * size + 8) + local.nbytes
        calls = max(1, min(40, int(3e-3 * 1e12 / moved)))
        median = self.interleaved(variants, calls)
        if host and sent <= HOST_BYTES:
            calls = max(1, min(8, int(10e-3 * 12e9 / max(1, sent))))
            median |= self.interleaved({
                "host serial": called("serial:dma"), "host move": called("serial:dma", compute=False),
                "host signaled": called(HOST), "host chunked": called("chunked:dma"),
            }, calls)  # fmt: skip
        return {"case": vars(case), "median": median, "bytes": moved, "sent": sent, "row": case.dim * size}


def numbers(one: dict[str, Any], stream: float) -> dict[str, float]:
    """The figures that are asked for."""
    m = one["median"]
    found = {
        "lookup/stream": one["bytes"] / m["lookup"] / stream, "torch/lookup": m["torch"] / m["lookup"],
        "fused/lookup": m["fused"] / m["lookup"], "reduction": 1 - m["fused"] / m["serial"],
        "hidden": 1 - (m["fused"] - m["lookup"]) / max(1e-9, m["serial"] - m["lookup"]),
        "lookup GB/s": one["bytes"] / m["lookup"] / 1e9, "fused GB/s": one["bytes"] / m["fused"] / 1e9,
    }  # fmt: skip
    if "host serial" in m:
        best = min(m["host signaled"], m["host chunked"])
        ideal = min(m["lookup"], m["host move"]) / (m["lookup"] + m["host move"])
        found |= {
            "host reduction": 1 - best / m["host serial"], "host ideal": ideal,
            "host share": (1 - best / m["host serial"]) / ideal,
        }  # fmt: skip
    return found


def line(one: dict[str, Any], stream: float) -> str:
    m, n = one["median"], numbers(one, stream)
    text = (
        f"{Case(**one['case'])} | lookup {m['lookup'] * 1e3:7.3f} ms {n['lookup/stream']:4.2f} of stream,"
        f" torch {n['torch/lookup']:5.2f}x | serial {m['serial'] * 1e3:7.3f} move {m['move'] * 1e3:6.3f}"
        f" fused {m['fused'] * 1e3:7.3f} = {n['fused/lookup']:4.2f} lookup, {-n['reduction']:+5.0%}"
        f" hidden {n['hidden']:4.0%} | GB/s {n['lookup GB/s']:5.0f} alone {n['fused GB/s']:5.0f} fused"
    )
    if "host serial" in m:
        text += (
            f" | host serial {m['host serial'] * 1e3:6.2f} move {m['host move'] * 1e3:6.2f} signaled"
            f" {m['host signaled'] * 1e3:6.2f} chunked {m['host chunked'] * 1e3:6.2f} {-n['host reduction']:+5.0%}"
            f" ideal {-n['host ideal']:+5.0%}"
        )
    return text


def rank_main(options: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    bench = Bench(options["rounds"])
    group = bench.group
    said = (lambda text: print(text, flush=True)) if group.rank == 0 else (lambda text: None)

    def passed() -> float:
        return group.reduce_max([time.monotonic() - began])[0]

    checked = exact(group, range(options["seeds"]))
    said(f"exact: {checked} results of seeded jagged problems, {passed():.1f} s")
    stream = bench.stream_bandwidth()
    said(f"stream of a rank, all at once: copy {stream['copy'] / 1e9:.0f} GB/s, read {stream['read'] / 1e9:.0f} GB/s")
    found: dict[str, Any] = {"stream": stream, "cases": [], "shapes": bench.choose_shapes(stream["read"], said)}
    said(f"shapes chosen, {passed():.1f} s")
    every = cases(options["full"], group.size)
    bench.load(every)
    said(f"kernels compiled, {passed():.1f} s")
    for number, case in enumerate(every):
        if passed() > options["seconds"]:
            said("the rest is left out: time is over")
            break
        found["cases"].append(bench.case(case, host=number % 3 == 0 or number == 1))
        said(line(found["cases"][-1], stream["read"]))
        torch.cuda.empty_cache()
        if group.rank == 0:  # as they come: a run that is cut leaves what it has
            Path(options["out"]).write_text(json.dumps(found, indent=1) + "\n")
            if number in (5, 9, 13):
                said(summary(found))
    return found


def mean(values: list[float]) -> float:
    return statistics.mean(values) if values else math.nan


def summary(found: dict[str, Any]) -> str:
    stream = found["stream"]["read"]
    every = [(one, numbers(one, stream)) for one in found["cases"]]
    wide = [n for one, n in every if one["row"] >= 256 and one["case"]["pooling"] >= 10]
    short = [n for one, n in every if one["case"]["pooling"] == 1]
    host = [n for _, n in every if "host share" in n]
    rows = [
        ("fused / own lookup, mean (asked <= 1.08)", mean([n["fused/lookup"] for _, n in every])),
        ("All-to-All time hidden, mean (>= 0.80)", mean([n["hidden"] for _, n in every])),
        ("reduction against serial at pooling 1, mean (>= 0.35)", mean([n["reduction"] for n in short])),
        ("reduction against serial, mean", mean([n["reduction"] for _, n in every])),
        ("reduction against serial, least (>= 0)", min([n["reduction"] for _, n in every], default=math.nan)),
        ("host link: share of the ideal reduction, mean (>= 0.80)", mean([n["host share"] for n in host])),
        ("host link: least reduction (>= 0)", min([n["host reduction"] for n in host], default=math.nan)),
        ("own lookup / stream, rows >= 256 B, pooling >= 10, mean", mean([n["lookup/stream"] for n in wide])),
        ("the same, least (>= 0.85)", min([n["lookup/stream"] for n in wide], default=math.nan)),
        ("torch's embedding_bag / own lookup there, mean (>= 1.2)", mean([n["torch/lookup"] for n in wide])),
        ("the same, least", min([n["torch/lookup"] for n in wide], default=math.nan)),
    ]
    text = "\n".join(f"{name:60} {value:6.3f}" for name, value in rows)
    return f"{len(every)} shapes\n{text}\npublished: {PUBLISHED}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--full", action="store_true", help="all shapes, not only the first ones")
    parser.add_argument("--seconds", type=float, default=55, help="no new shape after so many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=4, help="small problems for exactness")
    parser.add_argument("--out", type=Path, default=Path("gpu-embedding.json"))
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("full", "seconds", "rounds", "seeds")}
    given["out"] = str(options.out.absolute())
    found = ut.launch(rank_main, options.ranks, device="cuda", args=(given,), deadline=60)[0]
    facts = environment({"link": f"virtual node of {options.ranks}"})
    options.out.write_text(json.dumps({**found, "environment": facts}, indent=1, default=str) + "\n")
    if found["cases"]:
        print(summary(found))


if __name__ == "__main__":
    main()
