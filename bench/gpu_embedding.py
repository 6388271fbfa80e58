"""Embedding + All-to-All in a virtual node: own lookup, serial, fused; over peers and over the host link.

First exactness against a plain loop, then for every shape, in one run, interleaved, the slowest rank counts:
- `lookup`: own kernel, written locally, beside torch's embedding_bag, table by table and all tables as one;
- `serial`: lookup, then the All-to-All on all SMs, over the same lane; `move`: that All-to-All alone;
- `chunked`: four parts of the batch, each on its way while the next one is looked up;
- `fused`: one kernel that stores into peers' results; over the host link `signaled`: slices leave behind one kernel,
  and `fused`: that kernel posts them to the proxy itself.

Bytes of a lookup: rows read, pooled rows written. All ranks run at once, so each has its part of the card's bandwidth.
Over peers several calls in one CUDA graph: device time. `hidden` is the part of the All-to-All's time that fused does
not show. Over the host link several calls in a row *without* a graph, from the first launch to the last byte: a
captured call of that lane runs its stream operations one after the other, and calls are milliseconds long. `signaled`
and `fused` are also tried in 2, 4 and 8 equal parcels beside the plan's own; the fastest counts, and is named.

First a few shapes of the kernel (vectors in a thread, rows ahead, registers) are tried on one problem of each kind, for
the lookup and for fused, then how many tables take turns; what is fastest for both together runs afterwards, and is
printed: those of `plan/bags.py` should be the same.

    PYTHONPATH=src python bench/gpu_embedding.py [--full] [--seconds 55] [--out results.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from embedding_exact import CHUNKED, FUSED, HOST, POSTED, SERIAL, exact
from embedding_report import Case, line, summary

import undertow as ut
from undertow.fabric.environment import environment
from undertow.ops import embedding_all_to_all as operator
from undertow.ops import embedding_cuda, embedding_peers, embedding_posts, embedding_run
from undertow.ops.bags import Bags
from undertow.ops.posting import Posting
from undertow.plan.bags import Layout, Piece, Posted, Shape, completed
from undertow.plan.defaults import default_plan
from undertow.plan.plan import SLICES, Plan, split

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


def cases(full: bool, ranks: int) -> list[Case]:
    first = [Case(*one) for one in FIRST]
    every = [Case(*one) for one in itertools.product(*GRID.values())]
    every = [one for one in every if one.batch * ranks * one.tables * one.pooling <= MOST_VALUES and one not in first]
    random.Random(6).shuffle(every)
    return first + every if full else first


def over_the_host(number: int) -> bool:
    """Whether the case of that number is also measured over the host link, which takes long."""
    return number % 3 == 0 or number == 1


# -- times -------------------------------------------------------------------------------------------------------------


SHORT = ((1, 1, 48), (2, 1, 64), (2, 1, 80), (4, 1, 128))
LONG = ((1, 4, 64), (1, 8, 80), (1, 8, 128), (2, 4, 128))
"""Vectors of 16 bytes in a thread, rows ahead, registers."""
TOGETHER = (1, 4, 64)  # tables that take turns
HOST_PARCELS = (2, 4, 8)
GRAPHS = 4  # whose results over peers are measured side by side: each needs a place of its own
Choice = tuple[int, int, int, int]


class Bench:
    def __init__(self, rounds: int) -> None:
        self.group = ut.init()
        self.fabric, self.device, self.rounds = self.group.fabric, self.group.device, rounds
        self.storage = torch.empty(TABLE_BYTES // 4, dtype=torch.float32, device=self.device)
        self.filled = ""
        self.copied = 0  # captured calls whose result had no place of its own: twice the bytes, which must not happen
        embedding_peers.PLACES = 2 + GRAPHS
        plain = embedding_peers.Result.finish

        def finish(result: embedding_peers.Result) -> torch.Tensor:
            copies = result.place == 0 and result.whole.numel() > 0 and torch.cuda.is_current_stream_capturing()
            self.copied += int(copies)
            return plain(result)

        embedding_peers.Result.finish = finish  # type: ignore[method-assign]

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

    def eagerly(self, call: Callable[[], object], calls: int) -> Callable[[], object]:
        call()
        torch.cuda.synchronize()
        self.group.barrier()

        def several() -> None:
            for _ in range(calls):
                call()

        return several

    def interleaved(
        self, variants: dict[str, Callable[[], object]], calls: int, in_graph: bool = True
    ) -> dict[str, float]:
        """Median seconds of one call; the slowest rank's, all ranks at once."""
        made = self.captured if in_graph else self.eagerly
        ready = {name: made(call, calls) for name, call in variants.items()}
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
        chosen: dict[tuple[int, bool], Choice] = {}
        told: dict[str, Any] = {}

        def shape_of(plan: Any, size: int, now: Choice | None = None) -> Shape:
            vectors, ahead, registers, together = now or chosen[size, plan.group_bands >= 4]
            columns = plan.tile[1]
            registers += 8 if plan.posts("cuda") else 0  # as `plan/bags.py` has it
            return Shape(max(1, vectors * 128 * 16 // size // columns), columns, ahead, registers, together)

        def tried(case: Case, choices: Iterable[Choice], what: str) -> Choice:
            bags, layout, batches = self.bags(case)
            size, like = bags.tables[0].element_size(), bags.tables[0].new_empty(0)
            local = like.new_empty(bags.samples, bags.width)
            fused = default_plan(operator.problem_of(bags, layout, batches, self.group), *FUSED.split(":"))

            def lookup(now: Choice) -> None:
                embedding_cuda.kernel_shape = partial(shape_of, now=now)
                embedding_run.pool_all(self.fabric, bags, layout, (bags.samples,), local)

            def both(now: Choice) -> None:
                embedding_cuda.kernel_shape = partial(shape_of, now=now)
                embedding_run.run(self.fabric, bags, layout, batches, fused, like)

            every = list(choices)
            for one in every[self.group.rank :: self.group.size]:  # each rank compiles some, all find them
                lookup(one)
                self.load_fused(bags, layout, local)
            torch.cuda.synchronize()
            self.group.barrier()
            variants = {f"lookup {one}": partial(lookup, one) for one in every}
            variants |= {f"fused {one}": partial(both, one) for one in every}
            median = self.interleaved(variants, 4)
            order = sorted(every, key=lambda one: median[f"lookup {one}"] + median[f"fused {one}"])
            moved = bags.values.numel() * (case.dim * size + 8) + local.nbytes
            told[f"{case} {what}"] = {
                str(one): [moved / median[f"{kind} {one}"] / stream for kind in ("lookup", "fused")] for one in order
            }
            shares = (f"{one} {a:.2f} {b:.2f}" for one, (a, b) in told[f"{case} {what}"].items())
            said(f"{case} {what}, lookup and fused of stream: " + ", ".join(shares))
            return order[0]

        for dtype, pooling in itertools.product(("float32", "bfloat16"), (1, 10)):
            shapes = [(*one, 1) for one in (SHORT if pooling == 1 else LONG)]
            best = tried(Case(2048, 16, 128, pooling, dtype, "uniform"), shapes, "shape")
            orders = [(*best[:3], one) for one in TOGETHER]
            best = tried(Case(2048, 64, 128, pooling, dtype, "uniform"), orders, "turns")
            chosen[4 if dtype == "float32" else 2, pooling > 1] = best
        embedding_cuda.kernel_shape = shape_of
        return told

    def load_fused(self, bags: Bags, layout: Layout, local: torch.Tensor) -> None:
        """Compile what a fused call of these tables launches, without a word to anybody."""
        plan = completed(Plan("fused", "peer", ((0, 1),), order=SLICES), layout.dims, local.itemsize, bags.mean_length)
        rows = embedding_cuda.Slice(0, layout.room, 0, bags.samples)
        columns = layout.columns[self.group.rank]
        lookup = embedding_cuda.Lookup(self.fabric, bags, plan, columns)
        lookup.exchange([rows], [], [], 1, local, only_load=True)

    def load(self, every: list[Case]) -> None:
        """Compile what the cases need: each rank some of it, and all find it."""
        kinds = {(one.dtype, one.dim, min(one.pooling, 10)): one for one in every}
        small = [Case(64, 1, dim, pooling, dtype, "uniform") for dtype, dim, pooling in sorted(kinds)]
        for one in small[self.group.rank :: self.group.size]:
            bags, layout, _ = self.bags(one)
            local = bags.tables[0].new_empty(bags.samples, bags.width)
            embedding_run.pool_all(self.fabric, bags, layout, (bags.samples,), local)
            plan = completed(Plan("serial", "peer", ((0, bags.samples),), order=SLICES), layout.dims, local.itemsize, 1)
            rows = embedding_cuda.Slice(0, one.dim, 0, bags.samples, source_stride=one.dim)
            embedding_cuda.Lookup(self.fabric, bags, plan, (0,)).spread([rows], local, only_load=True)
            self.load_fused(bags, layout, local)
        self.load_posted([one for number, one in enumerate(every) if over_the_host(number)])
        torch.cuda.synchronize()
        self.group.barrier()

    def load_posted(self, every: list[Case]) -> None:
        """Compile what posts slices and what takes them, likewise."""
        shared = Posting.of(self.fabric, "dma")
        space = self.fabric.workspace("posts over dma", 1 << 20)
        kinds = {(one.dtype, one.dim, min(one.pooling, 10), min(one.tables * one.dim, 512)): one for one in every}
        for one in list(kinds.values())[self.group.rank :: self.group.size]:
            bags, layout, batches = self.bags(replace(one, batch=16))
            size = bags.tables[0].element_size()
            plan = default_plan(operator.problem_of(bags, layout, batches, self.group), *POSTED.split(":"))
            plan = completed(plan, layout.dims, size, bags.mean_length)
            posted = Posted(layout, batches, size)
            whole = bags.tables[0].new_empty(batches[self.group.rank], layout.room)
            call = embedding_posts.Call(self.fabric, shared, posted, bags, plan, space, 0, whole, None, ())
            call.launch(only_load=True)

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

        rows = len(bags.tables[0])  # all tables lie in one storage, so torch may also take them for one
        stacked = self.storage.view(like.dtype)[: case.tables * rows * case.dim].view(-1, case.dim)
        places = torch.arange(case.tables, device=self.device).view(-1, 1) * rows
        every = (bags.values.view(case.tables, -1) + places).view(-1, case.pooling)

        variants: dict[str, Callable[[], object]] = {
            "lookup": lambda: embedding_run.pool_all(fabric, bags, layout, batches, local),
            "torch": torch_lookup,
            "torch stacked": lambda: torch.nn.functional.embedding_bag(every, stacked, mode="sum"),
            "serial": called(SERIAL),
            "move": called(SERIAL, compute=False),
            "chunked": called(CHUNKED),
            "fused": called(FUSED),
        }
        first, second = variants["serial"]().clone(), variants["fused"]().clone()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        raw = torch.int32 if size == 4 else torch.int16
        assert torch.equal(first.view(raw), second.view(raw)), f"{case}: fused and serial differ on rank {group.rank}"
        whole = first if host and sent <= HOST_BYTES else None
        del first, second
        moved = bags.values.numel() * (case.dim * size + 8) + local.nbytes
        calls = max(1, min(40, int(3e-3 * 1e12 / moved)))
        self.copied = 0
        median = self.interleaved(variants, calls)
        copied = self.copied
        if whole is not None:
            calls = max(2, min(8, int(10e-3 * 12e9 / max(1, sent))))
            over_host = {
                "host serial": called("serial:dma"), "host move": called("serial:dma", compute=False),
                "host chunked": called("chunked:dma"), "host signaled": called(HOST), "host fused": called(POSTED),
            }  # fmt: skip
            for strategy, parts in itertools.product((HOST, POSTED), HOST_PARCELS):
                cut = replace(planned(strategy), parcels=split(problem.m, parts))
                if cut != planned(strategy):
                    over_host[f"host {cut.grain} {parts}"] = partial(
                        embedding_run.run, fabric, bags, layout, batches, cut, like
                    )
            posted = over_host["host fused"]()
            torch.cuda.synchronize()
            assert isinstance(posted, torch.Tensor)
            assert torch.equal(whole.view(raw), posted.view(raw)), f"{case}: posted differs on rank {group.rank}"
            del posted, whole
            median |= self.interleaved(over_host, calls, in_graph=False)
        return {
            "case": vars(case), "median": median, "bytes": moved, "sent": sent, "row": case.dim * size,
            "copied": copied,
        }  # fmt: skip


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
    found: dict[str, Any] = {"stream": stream, "cases": [], "shapes": {}}
    if not options["planned"]:
        found["shapes"] = bench.choose_shapes(stream["read"], said)
        said(f"shapes chosen, {passed():.1f} s")

    def keep() -> None:
        """As results come: a run that is cut leaves what it has."""
        if group.rank == 0:
            Path(options["out"]).write_text(json.dumps(found, indent=1) + "\n")

    keep()
    every = cases(options["full"], group.size)
    bench.load(every)
    said(f"kernels compiled, {passed():.1f} s")
    for number, case in enumerate(every):
        if passed() > options["seconds"]:
            said("the rest is left out: time is over")
            break
        found["cases"].append(bench.case(case, host=over_the_host(number)))
        said(line(found["cases"][-1], stream["read"]))
        torch.cuda.empty_cache()
        keep()
        if number in (5, 9, 13):
            said(summary(found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--full", action="store_true", help="all shapes, not only the first ones")
    parser.add_argument("--seconds", type=float, default=55, help="no new shape after so many")
    parser.add_argument("--planned", action="store_true", help="the plan's shapes of the kernel; no others are tried")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=4, help="small problems for exactness")
    parser.add_argument("--out", type=Path, default=Path("gpu-embedding.json"))
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("full", "seconds", "planned", "rounds", "seeds")}
    given["out"] = str(options.out.absolute())
    alone = {"UNDERTOW_GATE": "off"}  # as on GPUs of their own, where nobody meets before a call
    found = ut.launch(rank_main, options.ranks, device="cuda", args=(given,), env=alone, deadline=60)[0]
    facts = environment({"link": f"virtual node of {options.ranks}"})
    options.out.write_text(json.dumps({**found, "environment": facts}, indent=1, default=str) + "\n")
    if found["cases"]:
        print(summary(found))


if __name__ == "__main__":
    main()
