"""Collectives of a virtual node, side by side: Undertow's schedules, PyTorch's symmetric-memory operators, and one-shot
and two-shot AllReduce written by hand in Triton, which show what running a schedule costs.

Device time of one call in a CUDA graph of 20, buffers rotating, second-level cache flushed before every sample, ranks
aligned by a small collective just before it; interleaved rounds, the slowest rank counts, medians. `eager` is the same
20 calls without a graph. Every variant is verified with integers first; one that fails to run or is wrong is left out
and named. "undertow" is what the selection table chooses, on symmetric buffers where it does not choose packets.

    PYTHONPATH=src python bench/gpu_collectives.py [--ranks 4,8] [--only all_reduce] [--rounds 7] [--nccl] [--out FILE]
        [--ctas 4,8,16,32] [--sizes 4,1024] [--more] [--names] [--deadline 60]
        [--tuning '{"warps": 8, "stride": 1048576}']

`--ctas`: numbers of CTAs to try for each program (those that fit). `--sizes`: only these, in KB. `--names`: every
variant is named before it is run for the first time. `--more` adds one-shot without packets and the ring.
`--nccl` adds NCCL (2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment); `--tuning` goes to the executables.
The report is written after every size, so that a later failure loses nothing.
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
from undertow.collective.selection import choose
from undertow.collective.topology import Topology
from undertow.fabric.environment import environment
from undertow.fabric.symmetric import SymmetricBuffer
from undertow.fabric.timer import Comparison, GraphClock, compare
from undertow.kernels.interpret import poll
from undertow.kernels.signals import report_error

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 128 << 20]
FEW_SIZES = [64 << 10, 1 << 20, 16 << 20, 128 << 20]
TOTAL = 256 << 20  # bytes of all inputs of a size, and of all outputs
CALLS = 20
MOST_ONE_SHOT = 4 << 20  # larger ones are a waste of time
MOST_PACKETS = 128 << 10
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
def all_reduce_kernel(
    tables, words, epochs, rank: tl.int32, vectors: tl.int64, abort, error, deadline_ns: tl.int64,
    RANKS: tl.constexpr, ONE_SHOT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Rank r sums the r-th part, of `vectors` 16-byte vectors, of everybody's input, and stores it to everybody.

    One-shot: `vectors` are all there are, and every rank sums them for itself. `tables`: addresses of all inputs, then
    of all outputs. `words`: addresses of all ranks' words.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, LANES)
    mine = lanes < RANKS
    call = tl.load(epochs + program) + 1
    theirs = tl.load(words + lanes, mask=mine, other=0) + (program * RANKS + rank) * 128
    own = tl.load(words + rank) + (program * RANKS + lanes) * 128
    sources = ()
    stores = ()
    begin = vectors * 0 if ONE_SHOT else rank * vectors * 16
    STORES: tl.constexpr = 1 if ONE_SHOT else RANKS
    for one in tl.static_range(RANKS):
        sources = sources + (tl.load(tables + one) + begin,)  # noqa: RUF005
        stores = stores + (tl.load(tables + RANKS + (rank if ONE_SHOT else one)) + begin,)  # noqa: RUF005
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
        for one in tl.static_range(STORES):
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

    def run(self, table: torch.Tensor, nbytes: int, one_shot: bool) -> None:
        fabric: Any = self._group.fabric
        ranks = self._group.size
        all_reduce_kernel[(self._ctas,)](
            table, self._addresses, self._epochs, self._group.rank, nbytes // (1 if one_shot else ranks) // 16,
            fabric.guard.abort, fabric.guard.error, int(self._group.deadline * 1e9), RANKS=ranks, ONE_SHOT=one_shot,
            ROWS=256 * max(1, 16 // ranks), LANES=256, num_warps=8,
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

    def __init__(
        self, group: ut.Group, ctas: list[int], more: bool, nccl: bool, names: bool, tuning: dict[str, int]
    ) -> None:
        from undertow.collective.cuda_runtime import CudaExecutable

        self.group, self.name = group, group.process_group.group_name
        self._make, self._tuning, self._names = CudaExecutable, tuning, names
        fabric: Any = group.fabric
        self._fabric = fabric
        room = min(group.exchange(fabric.multiprocessors, "how many multiprocessors ranks have"))
        self.ctas = sorted({min(one, room) for one in ctas} | {room})
        self._more, self._topology = more, Topology.of(group.nodes)
        self.pair = [fabric.buffer(TOTAL, torch.uint8) for _ in range(2)]
        self._flush = torch.empty(TOTAL, dtype=torch.uint8, device=group.device)
        self._executables: dict[str, Any] = {}
        self._hands = {ctas: ByHand(group, ctas) for ctas in self.ctas}
        self.nccl = dist.new_group(list(group.ranks), backend="nccl") if nccl else None
        ones = torch.ones(64, device=group.device)
        aligner = self.executable("two_shot", 1, target="staged")
        self.align = lambda: aligner.run(ones, ones.clone(), [64])
        self.align()

    def executable(self, program: str, instances: int, warps: int | None = None, **options: Any) -> Any:
        key = f"{program} {instances} {warps} {options}"
        if key not in self._executables:
            schedule = LIBRARY[program].compile(self.group.size, instances=instances, **options)
            tuning = self._tuning if warps is None else {"warps": warps, **self._tuning}
            self._executables[key] = self._make(self._fabric, schedule, **tuning)
        return self._executables[key]

    def before(self) -> None:
        """Outside the timed part: cold caches, ranks together."""
        self._flush.zero_()
        torch.cuda.synchronize()
        self.group.barrier()

    def direct(
        self, program: str, instances: int, sets: Sets, spans: list[int], in_place: bool = False,
        warps: int | None = None,
    ) -> Call:  # fmt: skip
        made = self.executable(program, instances, warps, target="direct", in_place=in_place)

        def call(which: int) -> torch.Tensor:
            source = sets.sources[which]
            out = source if in_place else sets.outs[which]
            made.run(source, out, spans)
            return out.local

        return call

    def staged(
        self, program: str, instances: int, sets: Sets, spans: list[int], warps: int | None = None, **options: Any
    ) -> Call:
        made = self.executable(program, instances, warps, target="staged", **options)

        def call(which: int) -> torch.Tensor:
            made.run(sets.sources[which].local, sets.outs[which].local, spans)
            return sets.outs[which].local

        return call

    def by_hand(self, sets: Sets, nbytes: int, ctas: int, one_shot: bool = False) -> Call:
        ranks = range(self.group.size)
        outs = sets.outs if one_shot else sets.sources
        tables = [
            torch.tensor(
                [one.address(rank) for one in pair for rank in ranks], dtype=torch.int64, device=self.group.device
            )
            for pair in zip(sets.sources, outs, strict=True)
        ]

        def call(which: int) -> torch.Tensor:
            self._hands[ctas].run(tables[which], nbytes, one_shot)
            return outs[which].local

        return call

    def chosen(self, collective: str, nbytes: int, sets: Sets, spans: list[int]) -> Call:
        """What the selection table takes: `nbytes` is the sum of all spans."""
        choice = choose(collective, nbytes, "cuda", self._topology)
        instances = min(choice.instances, self.ctas[-1])
        if choice.packets:
            return self.staged(choice.program, instances, sets, spans, choice.warps, packets=True)
        in_place = collective == "all_reduce"
        return self.direct(choice.program, instances, sets, spans, in_place=in_place, warps=choice.warps)

    def all_reduce(self, size: int) -> tuple[Sets, dict[str, Call], int]:
        spans = [size // DTYPE.itemsize]
        sets = Sets(self.group, self.pair, size, size)
        operators = torch.ops.symm_mem
        found: dict[str, Call] = {"undertow": self.chosen("all_reduce", size, sets, spans)}
        for ctas in self.ctas:
            found[f"two_shot in place, {ctas}"] = self.direct("two_shot", ctas, sets, spans, in_place=True)
            if size <= MOST_PACKETS:
                found[f"one_shot packets, {ctas}"] = self.staged("one_shot", ctas, sets, spans, packets=True)
        few = self.ctas[0]
        for ctas in sorted({few, self.ctas[-1]}):
            found[f"two-shot by hand, {ctas}"] = self.by_hand(sets, size, ctas)
        if size <= MOST_ONE_SHOT:
            found[f"one-shot by hand, {few}"] = self.by_hand(sets, size, few, one_shot=True)
        # CTAs of PyTorch's wait for each other and cannot all run at once where 8 ranks share a GPU: from 4 MB on
        # neither of the two returns.
        returns = self.group.size <= 4 or size <= 1 << 20
        if returns and size <= MOST_ONE_SHOT:
            found["torch one-shot"] = lambda which: operators.one_shot_all_reduce(
                sets.sources[which].local, "sum", self.name
            )
        if self._more:
            found[f"ring, {few}"] = self.direct("ring", few, sets, spans)
            if size <= MOST_ONE_SHOT:
                found[f"one_shot, {few}"] = self.direct("one_shot", few, sets, spans)
        if returns:
            found["torch two-shot"] = lambda which: operators.two_shot_all_reduce_(
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
        nbytes = sum(spans) * DTYPE.itemsize
        found: dict[str, Call] = {"undertow": self.chosen(collective, nbytes, sets, spans)}
        for ctas in self.ctas:
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
            if self._names and self.group.rank == 0:
                print(f"  trying {name}", flush=True)
            for one in sets.sources:
                one.local.fill_(1)
            for one in sets.outs:
                one.local.fill_(float("nan"))
            self.before()
            try:
                wrong = torch.zeros((), dtype=torch.int64, device=self.group.device)
                for which in range(sets.count):  # all of them: what a call uploads once must be there before a capture
                    wrong += (call(which) != total).sum()
                reason = f"{int(wrong)} elements are wrong" if int(wrong) else ""
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
        shared: dict[str, Any] = {"repeats": rounds, "warmup": 1, "calls": CALLS, "before": self.before}
        shared["reduce_max"] = self.group.reduce_max
        graph = compare(_turning(good, sets.count), clock=AlignedGraphClock(self.align), **shared)
        eager = compare(_turning(good, sets.count), clock="device", **{**shared, "repeats": min(rounds, 3)})
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


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs on every rank."""
    group = ut.init()
    bench = Bench(group, *(options[name] for name in ("ctas", "more", "nccl", "names", "tuning")))
    found = []
    for collective in options["collectives"]:
        for size in options["sizes"] or (SIZES if collective == "all_reduce" else FEW_SIZES):
            found.append({"collective": collective, **bench.measure(collective, size, options["rounds"])})
            if group.rank == 0:
                print(table(found[-1], group.size), flush=True)
                if options["part"]:
                    Path(options["part"]).write_text(json.dumps(found, indent=1, default=str) + "\n")
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


def summary(entries: list[dict[str, Any]], ranks: int) -> str:
    """A line a size: what is chosen against the best peer, the best of ours, and ours against the same by hand."""
    lines = [f"{ranks} ranks: chosen us | best of ours us | best peer us | chosen/peer | two-shot: ours/by hand"]
    for entry in entries:
        graph = Comparison.from_json(entry["graph"])
        median = {name: graph.estimate(name).median * 1e6 for name in graph.names}
        peers = {name: one for name, one in median.items() if name.startswith(("torch", "NCCL"))}
        ours = {name: one for name, one in median.items() if name not in peers and "by hand" not in name}
        by_hand = [one for name, one in median.items() if name.startswith("two-shot by hand")]
        two_shot = [one for name, one in median.items() if name.startswith("two_shot")]
        best, peer = (min(of, key=lambda name: of[name], default="") for of in (ours, peers))
        chosen = median.get("undertow", float("nan"))
        lines.append(
            f"  {entry['collective']:15} {entry['bytes'] >> 10:7} KB  {chosen:8.1f}"
            f" | {ours.get(best, float('nan')):8.1f} {best:24} | {peers.get(peer, float('nan')):8.1f} {peer:20}"
            f" | {chosen / peers[peer] if peers else float('nan'):5.2f}"
            f" | {min(two_shot) / min(by_hand) if two_shot and by_hand else float('nan'):5.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--only", default="all_reduce,all_gather,reduce_scatter,all_to_all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ctas", default="8")
    parser.add_argument("--sizes", default="")
    parser.add_argument("--names", action="store_true")
    parser.add_argument("--deadline", type=float, default=60)
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--tuning", type=json.loads, default={})
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts = environment({"link": "virtual node", "tuning": options.tuning})
    report: dict[str, Any] = {"dtype": str(DTYPE), "ranks": {}, "environment": facts}
    for ranks in (int(one) for one in options.ranks.split(",")):
        part = options.out.with_suffix(f".{ranks}.part.json") if options.out else None
        arguments = {
            "collectives": options.only.split(","), "rounds": options.rounds, "more": options.more,
            "ctas": [int(one) for one in options.ctas.split(",")], "nccl": options.nccl, "tuning": options.tuning,
            "part": str(part) if part else "", "names": options.names,
            "sizes": [int(one) << 10 for one in options.sizes.split(",") if one],
        }  # fmt: skip
        try:
            found = ut.launch(rank_main, ranks, device="cuda", args=(arguments,), deadline=options.deadline)[0]
        except Exception as error:
            print(f"{ranks} ranks: {error}", flush=True)
            found = json.loads(part.read_text()) if part and part.exists() else []
            report.setdefault("failed", {})[ranks] = str(error)
        report["ranks"][ranks] = found
        print(summary(found, ranks), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
        if part:
            part.unlink(missing_ok=True)
    if "failed" in report:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
