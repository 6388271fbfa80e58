"""Collectives of a virtual node, side by side: Undertow's schedules, PyTorch's symmetric-memory operators, and a
two-shot AllReduce written by hand in Triton, which shows what interpreting a program costs.

Device time of one call in a CUDA graph of 20, buffers rotating, second-level cache flushed before every sample, ranks
aligned by a small collective just before it; interleaved rounds, the slowest rank counts, medians. `eager` is the same
20 calls without a graph. Every variant is verified with integers first; one that fails to run or is wrong is left out
and named.

    PYTHONPATH=src python bench/gpu_collectives.py [--ranks 4,8] [--only all_reduce] [--rounds 15] [--nccl] [--out FILE]
        [--tuning '{"warps": 8, "vectors": 16, "stride": 1048576}']

`--nccl` adds NCCL (2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment); `--tuning` goes to the executables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import undertow as ut
from undertow.collective.algorithms import LIBRARY
from undertow.fabric.base import SymmetricBuffer
from undertow.fabric.environment import environment
from undertow.fabric.timer import Comparison, GraphClock, compare
from undertow.kernels.interpret import poll
from undertow.kernels.signals import report_error

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 128 << 20]
FEW_SIZES = [64 << 10, 1 << 20, 16 << 20, 128 << 20]
TOTAL = 256 << 20  # bytes of all inputs of a size, and of all outputs
CALLS = 20
MOST_ONE_SHOT = 4 << 20  # larger ones are a waste of time
MOST_PACKETS = 256 << 10
DTYPE = torch.bfloat16
Call = Callable[[int], torch.Tensor]  # of a set of buffers, by number; gives the result


# -- by hand -------------------------------------------------------------------------------------------------------

_HAND = ["tables", "words", "epochs", "rank", "vectors", "abort", "error", "deadline_ns"]


@triton.jit
def _meet(own, theirs, target, mine, abort, deadline_ns):
    """All CTAs of this number on all ranks. Releases what the CTA stored, acquires what the others released."""
    tl.debug_barrier()
    tl.atomic_add(theirs.to(tl.pointer_type(tl.int32)), 1, mask=mine, sem="release", scope="sys")
    found = poll(own.to(tl.pointer_type(tl.int32)), target, mine, abort, deadline_ns)
    tl.debug_barrier()
    return tl.max(found, axis=0)


@triton.jit(do_not_specialize=_HAND, do_not_specialize_on_alignment=_HAND)
def two_shot_kernel(
    tables, words, epochs, rank: tl.int32, vectors: tl.int64, abort, error, deadline_ns: tl.int64,
    RANKS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Rank r sums the r-th part, of `vectors` 16-byte vectors, of everybody's input, and stores it to everybody.

    `tables`: addresses of all inputs, then of all outputs. `words`: addresses of all ranks' words.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    mine = lanes < RANKS
    call = tl.load(epochs + program) + 1
    theirs = tl.load(words + lanes, mask=mine, other=0) + (program * RANKS + rank) * 128
    own = tl.load(words + rank) + (program * RANKS + lanes) * 128
    sources = ()
    stores = ()
    for one in tl.static_range(RANKS):
        sources = sources + (tl.load(tables + one) + rank * vectors * 16,)  # noqa: RUF005
        stores = stores + (tl.load(tables + RANKS + one) + rank * vectors * 16,)  # noqa: RUF005
    target = (call + tl.zeros([LANES], tl.int64)).to(tl.int32)
    status = _meet(own, theirs, target, mine, abort, deadline_ns)
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * 8 + tl.arange(0, 8)[None, :]
    for first in range(program.to(tl.int64) * ROWS, tl.where(status == 0, vectors, 0), programs * ROWS):
        mask = (rows < tl.minimum(vectors - first, ROWS).to(tl.int32))[:, None]
        values = ()
        for one in tl.static_range(RANKS):
            pointer = tl.multiple_of((sources[one] + first * 16).to(tl.pointer_type(tl.bfloat16)), 16)
            values = values + (tl.load(pointer + offsets, mask=mask),)  # noqa: RUF005
        total = values[0].to(tl.float32)
        for one in tl.static_range(1, RANKS):
            total += values[one].to(tl.float32)
        for one in tl.static_range(RANKS):
            pointer = tl.multiple_of((stores[one] + first * 16).to(tl.pointer_type(tl.bfloat16)), 16)
            tl.store(pointer + offsets, total.to(tl.bfloat16), mask=mask)
    phase = programs * RANKS * 128
    if status == 0:
        status = _meet(own + phase, theirs + phase, target, mine, abort, deadline_ns)
    if status != 0:
        report_error(error, status)
    tl.store(epochs + program, call)


class ByHand:
    """The kernel above with its words and epochs."""

    def __init__(self, group: ut.Group, ctas: int) -> None:
        self._group, self._ctas = group, ctas
        self._words = group.fabric.buffer(2 * ctas * group.size * 32, torch.int32)
        addresses = [self._words.address(rank) for rank in range(group.size)]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=group.device)
        self._epochs = torch.zeros(ctas, dtype=torch.int64, device=group.device)

    def run(self, table: torch.Tensor, nbytes: int) -> None:
        fabric: Any = self._group.fabric
        ranks = self._group.size
        two_shot_kernel[(self._ctas,)](
            table, self._addresses, self._epochs, self._group.rank, nbytes // ranks // 16, fabric.guard.abort,
            fabric.guard.error, int(self._group.deadline * 1e9), RANKS=ranks, ROWS=256 * max(1, 16 // ranks),
            LANES=256, num_warps=8,
        )  # fmt: skip


# -- buffers and clocks ----------------------------------------------------------------------------------------------


class Sets:
    """Inputs and outputs of one size, as parts of two large symmetric buffers, so that 20 calls are never alike."""

    def __init__(self, group: ut.Group, pair: list[SymmetricBuffer], source: int, out: int) -> None:
        self.count = max(1, min(CALLS, TOTAL // max(source, out)))
        self.sources, self.outs = ([_part(group, whole, one * size, size) for one in range(self.count)]
                                   for whole, size in zip(pair, (source, out), strict=True))  # fmt: skip


def _part(group: ut.Group, whole: SymmetricBuffer, first: int, size: int) -> SymmetricBuffer:
    views: list[torch.Tensor | None] = [
        whole.peer(rank)[first : first + size].view(DTYPE) for rank in range(group.size)
    ]
    return SymmetricBuffer(group, whole.identity, views, whole)


class AlignedGraphClock(GraphClock):
    """A graph of calls, timed from when all ranks have met on the device."""

    def __init__(self, align: Callable[[], object]) -> None:
        self._align = align

    def sampler(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def sample() -> float:
            self._align()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e-3 / calls

        return sample


# -- variants --------------------------------------------------------------------------------------------------------


class Bench:
    """Everything that outlives one size."""

    def __init__(self, group: ut.Group, nccl: bool, tuning: dict[str, int]) -> None:
        from undertow.collective.cuda_runtime import CudaExecutable

        self.group, self.name = group, group.process_group.group_name
        self._make, self._tuning = CudaExecutable, tuning
        fabric: Any = group.fabric
        self._fabric = fabric
        self.ctas = fabric.multiprocessors
        self.pair = [fabric.buffer(TOTAL, torch.uint8) for _ in range(2)]
        self._flush = torch.empty(TOTAL, dtype=torch.uint8, device=group.device)
        self._executables: dict[str, Any] = {}
        self._hand = ByHand(group, self.ctas)
        self.nccl = dist.new_group(list(group.ranks), backend="nccl") if nccl else None
        ones = torch.ones(64, device=group.device)
        aligner = self.executable("two_shot", 1, target="staged")
        self.align = lambda: aligner.run(ones, ones.clone(), [64])
        self.align()

    def executable(self, program: str, instances: int, **options: Any) -> Any:
        key = f"{program} {instances} {options}"
        if key not in self._executables:
            schedule = LIBRARY[program].compile(self.group.size, instances=instances, **options)
            self._executables[key] = self._make(self._fabric, schedule, **self._tuning)
        return self._executables[key]

    def before(self) -> None:
        """Outside the timed part: cold caches, ranks together."""
        self._flush.zero_()
        torch.cuda.synchronize()
        self.group.barrier()

    def direct(self, program: str, instances: int, sets: Sets, spans: list[int], in_place: bool = False) -> Call:
        made = self.executable(program, instances, target="direct", in_place=in_place)

        def call(which: int) -> torch.Tensor:
            source = sets.sources[which]
            out = source if in_place else sets.outs[which]
            made.run(source, out, spans)
            return out.local

        return call

    def staged(self, program: str, instances: int, sets: Sets, spans: list[int], **options: Any) -> Call:
        made = self.executable(program, instances, target="staged", **options)

        def call(which: int) -> torch.Tensor:
            made.run(sets.sources[which].local, sets.outs[which].local, spans)
            return sets.outs[which].local

        return call

    def by_hand(self, sets: Sets, nbytes: int) -> Call:
        ranks = range(self.group.size)
        tables = [
            torch.tensor([one.address(rank) for rank in ranks] * 2, dtype=torch.int64, device=self.group.device)
            for one in sets.sources
        ]

        def call(which: int) -> torch.Tensor:
            self._hand.run(tables[which], nbytes)
            return sets.sources[which].local

        return call

    def all_reduce(self, size: int) -> tuple[Sets, dict[str, Call], int]:
        elements = size // DTYPE.itemsize
        sets = Sets(self.group, self.pair, size, size)
        few = max(1, min(8, self.ctas))
        operators = torch.ops.symm_mem
        found: dict[str, Call] = {}
        for ctas in sorted({few, self.ctas}):
            found[f"two_shot in place, {ctas}"] = self.direct("two_shot", ctas, sets, [elements], in_place=True)
            if size <= MOST_ONE_SHOT:
                found[f"one_shot, {ctas}"] = self.direct("one_shot", ctas, sets, [elements])
            if size <= MOST_PACKETS:
                found[f"one_shot packets, {ctas}"] = self.staged("one_shot", ctas, sets, [elements], packets=True)
        found[f"ring, {few}"] = self.direct("ring", few, sets, [elements])
        found["two-shot by hand"] = self.by_hand(sets, size)
        found["torch two-shot"] = lambda which: operators.two_shot_all_reduce_(
            sets.sources[which].local, "sum", self.name
        )
        if size <= MOST_ONE_SHOT:
            found["torch one-shot"] = lambda which: operators.one_shot_all_reduce(
                sets.sources[which].local, "sum", self.name
            )
        if self.nccl is not None:
            found["NCCL"] = lambda which: _after(
                dist.all_reduce(sets.sources[which].local, group=self.nccl), sets.sources[which].local
            )
        return sets, found, self.group.size

    def others(self, collective: str, size: int) -> tuple[Sets, dict[str, Call], int]:
        """AllGather, ReduceScatter, AllToAll; `size` is that of the longer buffer."""
        ranks = self.group.size
        elements, shard = size // DTYPE.itemsize, size // ranks
        sizes = {"all_gather": (shard, size), "reduce_scatter": (size, shard), "all_to_all": (size, size)}[collective]
        sets = Sets(self.group, self.pair, *sizes)
        spans = [elements // ranks] * (ranks * ranks if collective == "all_to_all" else ranks)
        found: dict[str, Call] = {}
        for ctas in sorted({max(1, min(8, self.ctas)), self.ctas}):
            found[f"{collective}_direct, {ctas}"] = self.direct(f"{collective}_direct", ctas, sets, spans)
        if collective != "all_to_all":
            # These take the beginning of an allocation, whatever part of it they are given: always the same buffer.
            whole = self.pair[0].local[: sizes[0]].view(DTYPE)
            operators = torch.ops.symm_mem
            gather = collective == "all_gather"
            found["torch low contention"] = lambda which: torch.ops._c10d_functional.wait_tensor(
                operators._low_contention_all_gather(whole, self.name)
                if gather
                else operators._low_contention_reduce_scatter(whole, "sum", self.name)
            )
        if self.nccl is not None:
            function = {
                "all_gather": dist.all_gather_into_tensor, "reduce_scatter": dist.reduce_scatter_tensor,
                "all_to_all": dist.all_to_all_single,
            }[collective]  # fmt: skip
            found["NCCL"] = lambda which: _after(
                function(sets.outs[which].local, sets.sources[which].local, group=self.nccl), sets.outs[which].local
            )
        return sets, found, ranks if collective == "reduce_scatter" else 1

    def verified(self, sets: Sets, variants: dict[str, Call], total: int) -> tuple[dict[str, Call], dict[str, str]]:
        """Those that give the right result on all ranks, and why the others do not."""
        good, bad = {}, {}
        for name, call in variants.items():
            reason = ""
            for one in sets.sources:
                one.local.fill_(1)
            for one in sets.outs:
                one.local.fill_(float("nan"))
            self.before()
            try:
                result = call(0)
                torch.cuda.synchronize()
                wrong = int((result != total).sum())
                reason = f"{wrong} of {result.numel()} elements are wrong" if wrong else ""
            except (RuntimeError, NotImplementedError, AttributeError) as error:
                reason = str(error).splitlines()[0]
            self.group.check()
            reasons = [one for one in self.group.exchange(reason, "whether a variant is right") if one]
            if reasons:
                bad[name] = reasons[0]
            else:
                good[name] = call
        return good, bad

    def measure(self, collective: str, size: int, rounds: int) -> dict[str, Any]:
        made = self.all_reduce(size) if collective == "all_reduce" else self.others(collective, size)
        sets, variants, total = made
        good, bad = self.verified(sets, variants, total)
        shared: dict[str, Any] = {"repeats": rounds, "warmup": 2, "calls": CALLS, "before": self.before}
        shared["reduce_max"] = self.group.reduce_max
        graph = compare(_turning(good, sets.count), clock=AlignedGraphClock(self.align), **shared)
        eager = compare(_turning(good, sets.count), clock="device", **{**shared, "repeats": min(rounds, 5)})
        return {"bytes": size, "sets": sets.count, "left out": bad, "graph": graph.to_json(), "eager": eager.to_json()}


def _after(_: object, result: torch.Tensor) -> torch.Tensor:
    return result


def _turning(variants: dict[str, Call], count: int) -> dict[str, Callable[[], object]]:
    """Each call takes the next set."""

    def turning(call: Call) -> Callable[[], object]:
        turn = [0]

        def next_call() -> object:
            turn[0] = (turn[0] + 1) % count
            return call(turn[0])

        return next_call

    return {name: turning(call) for name, call in variants.items()}


def rank_main(collectives: list[str], rounds: int, nccl: bool, tuning: dict[str, int]) -> list[dict[str, Any]]:
    """Runs on every rank."""
    group = ut.init()
    bench = Bench(group, nccl, tuning)
    found = []
    for collective in collectives:
        for size in SIZES if collective == "all_reduce" else FEW_SIZES:
            found.append({"collective": collective, **bench.measure(collective, size, rounds)})
            if group.rank == 0:
                print(table(found[-1], group.size), flush=True)
    return found


def table(entry: dict[str, Any], ranks: int) -> str:
    graph, eager = (Comparison.from_json(entry[clock]) for clock in ("graph", "eager"))
    fastest = min(graph.names, key=lambda name: graph.estimate(name).median)
    lines = [f"{entry['collective']}, {ranks} ranks, {entry['bytes'] >> 10} KB, {entry['sets']} sets"]
    for name in graph.names:
        one = graph.estimate(name)
        ratio = graph.ratio(of=name, to=fastest).median
        lines.append(
            f"  {name:28} {one.median * 1e6:9.1f} us  [{one.low * 1e6:9.1f}, {one.high * 1e6:9.1f}]  x {ratio:5.2f}"
            f"  eager {eager.estimate(name).median * 1e6:9.1f} us"
        )
    lines += [f"  {name:28} left out: {reason}" for name, reason in entry["left out"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--only", default="all_reduce,all_gather,reduce_scatter,all_to_all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--tuning", type=json.loads, default={})
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arguments = (options.only.split(","), options.rounds, options.nccl, options.tuning)
    facts = environment({"link": "virtual node", "tuning": options.tuning})
    report: dict[str, Any] = {"dtype": str(DTYPE), "ranks": {}, "environment": facts}
    for ranks in (int(one) for one in options.ranks.split(",")):
        report["ranks"][ranks] = ut.launch(rank_main, ranks, device="cuda", args=arguments, deadline=60)[0]
        if options.out:
            options.out.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
