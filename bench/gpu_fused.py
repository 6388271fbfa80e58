"""Fused matmuls in a virtual node, side by side: one kernel whose tiles move themselves against matmul + collective.

For every layer and number of rows, in one run, interleaved, device time of a call inside a CUDA graph, the slowest rank
counts. Every variant is compared with exact integers first; one that is wrong is left out and named.

- cublas: the matmul alone; gemm: our own kernel, the fused one's main loop, with communication off;
- serial: cuBLAS and then our collective on symmetric buffers, for several numbers of CTAs: the best counts;
- fused: one launch, for several plans; torch: PyTorch's async-TP operators (eager where they cannot be captured).

E = 1 - (fused - alone) / (serial - cublas): against cuBLAS as what is alone, and against our own kernel.

    PYTHONPATH=src python bench/gpu_fused.py [--ranks 4,8] [--only scatter,gather,...] [--m ...] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import undertow as ut
from undertow.collective.algorithms import LIBRARY
from undertow.fabric.environment import environment
from undertow.plan.defaults import fused_plan
from undertow.plan.plan import Plan, Share
from undertow.plan.problem import Problem

HIDDEN = {"llama3-70b": 8192, "gpt3-175b": 12288}
# Of each model: inner sizes of row-parallel layers (attention out, down), columns of column-parallel ones (QKV, up).
ROW_PARALLEL = {"llama3-70b": (8192, 28672), "gpt3-175b": (12288, 49152)}
COLUMN_PARALLEL = {"llama3-70b": (10240, 57344), "gpt3-175b": (36864, 49152)}
DECODE_M, DECODE_K, DECODE_N = (1, 4, 16, 64), (1024, 3584), 8192
ROTATED = 200 << 20  # bytes of weights that decode calls take in turn
BF16 = torch.bfloat16
Variants = dict[str, Callable[[int], torch.Tensor]]


def integers(rows: int, columns: int, seed: int, device: torch.device, odds: int) -> torch.Tensor:
    """-1, 0, 1, where one in `odds` is not zero: partial sums stay within what bf16 holds exactly."""
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn = torch.randint(0, 2 * odds, (rows, columns), device=device, generator=generator, dtype=torch.int16)
    return ((drawn == 0).to(torch.int8) - (drawn == 1).to(torch.int8)).to(BF16)


class Bench:
    def __init__(self, options: dict[str, Any]) -> None:
        self.group = ut.init()
        self.options = options
        self.fabric: Any = self.group.fabric
        self.device, self.rank, self.size = self.group.device, self.group.rank, self.group.size
        self.name = self.group.process_group.group_name
        self.sms = int(self.fabric.multiprocessors)
        self.fabric.lane("peer")
        self._executables: dict[tuple[object, ...], Any] = {}
        self._buffers: dict[str, Any] = {}
        ones = torch.ones(64, device=self.device)
        aligner = self.executable("two_shot", 1, target="staged")
        self.align = lambda: aligner.run(ones, ones.clone(), [64])
        self.align()

    # -- pieces of serial calls --------------------------------------------------------------------------------------

    def executable(self, program: str, instances: int, **options: Any) -> Any:
        from undertow.collective.cuda_runtime import CudaExecutable

        key = (program, instances, *sorted(options.items()))
        if key not in self._executables:
            schedule = LIBRARY[program].compile(self.size, instances=instances, **options)
            self._executables[key] = CudaExecutable(self.fabric, schedule)
        return self._executables[key]

    def buffer(self, name: str, elements: int) -> Any:
        """A symmetric buffer of at least so many elements; the first ones are used."""
        from undertow.fabric.base import SymmetricBuffer

        held = self._buffers.get(name)
        if held is None or held.count < elements:
            if held is not None:
                torch.cuda.synchronize()
                self.group.barrier()
                held.release()
            held = self._buffers[name] = self.fabric.buffer(elements, BF16)
        views: list[torch.Tensor | None] = [held.peer(rank)[:elements] for rank in range(self.size)]
        return SymmetricBuffer(self.group, held.identity, views, held)

    def gemm(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, tile: tuple[int, int]) -> Callable[[], object]:
        """Our own kernel, natural order, no counters."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        from undertow.kernels import gemm
        from undertow.plan import reorder

        problem = self.problem("matmul_all_reduce", x.shape[0], w.shape[1], x.shape[1])
        plan = Plan("signaled", "peer", ((0, 0),), tile=tile, group_bands=8)
        grid = problem.grid(plan)
        plan = replace(plan, parcels=((0, grid.tiles),))
        table = torch.from_numpy(np.array(reorder.tile_table(grid, plan))).to(self.device)
        counters = torch.zeros(64, dtype=torch.int32, device=self.device)
        transposed = w.stride(0) == 1
        factor = w.t() if transposed else w
        arguments = (
            TensorDescriptor.from_tensor(x, [tile[0], 64]),
            TensorDescriptor.from_tensor(factor, [tile[1], 64] if transposed else [64, tile[1]]),
            TensorDescriptor.from_tensor(y, [tile[0], tile[1] // 2]), y, y, table, counters, len(table), x.shape[1],
        )  # fmt: skip
        kernel: Any = gemm.gemm_kernel
        return lambda: kernel[(min(self.sms, len(table)),)](
            *arguments, BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=64, TRANSPOSED=transposed, PARTS=2, BULK=True,
            EVEN=True, SIGNAL=False, DEFER=True, BIAS=False, ACTIVATION=0, num_warps=8, num_stages=4,
        )  # fmt: skip

    def problem(self, operator: str, m: int, n: int, k: int) -> Problem:
        return Problem.of(
            operator, m, n, k, dtype="bfloat16", ranks=self.size, device="cuda", multiprocessors=self.sms
        )  # fmt: skip

    def fused(
        self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, problem: Problem, plan: Plan, guarded: bool = False
    ) -> Callable[[int], torch.Tensor]:
        """Bare, as the serial calls here are; `guarded` as the operators do it, with the watchdog's words around it."""
        from undertow.ops import fused_cuda
        from undertow.ops.finish import Finish

        finish = Finish(None, "none")

        def call(_: int) -> torch.Tensor:
            fused_cuda.prepare(x, w, out, problem, plan, finish, self.fabric)()
            return out

        def watched(which: int) -> torch.Tensor:
            with self.fabric.guarded_call((out,)):
                return call(which)

        return watched if guarded else call

    def ctas(self) -> list[int]:
        return sorted({max(1, self.sms // 2), self.sms})

    # -- layers ------------------------------------------------------------------------------------------------------

    def scatter(self, m: int, k: int, n: int, reduce: bool = False) -> tuple[Variants, torch.Tensor, Any]:
        """matmul_reduce_scatter (or, `reduce`, matmul_all_reduce): x [m, k] and w [k, n] on each rank."""
        operator = "matmul_all_reduce" if reduce else "matmul_reduce_scatter"
        problem = self.problem(operator, m, n, k)
        shard = m // self.size
        mine = slice(0, m) if reduce else slice(self.rank * shard, (self.rank + 1) * shard)
        total = torch.zeros(m if reduce else shard, n, device=self.device)
        for rank in range(self.size):
            x_theirs, w_theirs = self.factors(m, k, n, rank)
            total += (x_theirs[mine] @ w_theirs).float()
        x, w = self.factors(m, k, n, self.rank)
        want = total.to(BF16)
        del total
        y = torch.empty(m, n, device=self.device, dtype=BF16)
        out = torch.empty(m if reduce else shard, n, device=self.device, dtype=BF16)
        plan = fused_plan(problem, "peer")
        assert plan.tile is not None
        alone = self.gemm(x, w, y, plan.tile)
        found: Variants = {
            "cublas": lambda _: torch.mm(x, w, out=y), "gemm": lambda _: (alone(), y)[1],
            "fused": self.fused(x, w, out, problem, plan),
        }  # fmt: skip
        if self.options["guarded"]:
            found["guarded"] = self.fused(x, w, out, problem, plan, guarded=True)
        source, scattered = self.buffer("source", m * n), self.buffer("out", m * n if reduce else shard * n)
        for ctas in self.ctas():
            if reduce:
                made = self.executable("two_shot", ctas, target="direct", in_place=True)
                spans, into = [m * n], source
            else:
                made = self.executable("reduce_scatter_direct", ctas, target="direct", in_place=False)
                spans, into = [shard * n] * self.size, scattered

            def serial(_: int, made: Any = made, spans: list[int] = spans, into: Any = into) -> torch.Tensor:
                torch.mm(x, w, out=source.local.view(m, n))
                made.run(source, into, spans)
                return into.local.view(want.shape)

            found[f"serial {ctas}"] = serial
        operators = torch.ops.symm_mem
        if reduce:
            found["torch"] = lambda _: (
                torch.mm(x, w, out=source.local.view(m, n)),
                operators.two_shot_all_reduce_(source.local, "sum", self.name).view(m, n),
            )[1]
        else:
            found["torch"] = lambda _: operators.fused_matmul_reduce_scatter(x, w, "sum", 0, self.name)
        return found, want, (y, out, scattered.local)

    def gather(self, m: int, k: int, n: int) -> tuple[Variants, torch.Tensor, Any]:
        """all_gather_matmul: x [m / ranks, k], w [k, n]."""
        problem = self.problem("all_gather_matmul", m, n, k)
        shard = m // self.size
        whole = torch.cat([integers(shard, k, 100 + rank, self.device, 3) for rank in range(self.size)])
        w = integers(n, k, 200 + self.rank, self.device, 16).t()
        x = whole[self.rank * shard : (self.rank + 1) * shard].clone()
        want = whole @ w
        y, out = (torch.empty(m, n, device=self.device, dtype=BF16) for _ in range(2))
        plan = fused_plan(problem, "peer")
        assert plan.tile is not None
        alone = self.gemm(whole, w, y, plan.tile)
        found: Variants = {
            "cublas": lambda _: torch.mm(whole, w, out=y), "gemm": lambda _: (alone(), y)[1],
            "fused": self.fused(x, w, out, problem, plan),
        }  # fmt: skip
        for loaders in self.options["loaders"]:
            if loaders != plan.share.communication_ctas:
                other = replace(plan, share=Share(communication_ctas=loaders))
                found[f"fused {loaders}"] = self.fused(x, w, out, problem, other)
        source, gathered = self.buffer("out", shard * k), self.buffer("source", m * k)
        source.local.view(shard, k).copy_(x)
        for ctas in self.ctas():
            made = self.executable("all_gather_direct", ctas, target="direct", in_place=False)

            def serial(_: int, made: Any = made) -> torch.Tensor:
                made.run(source, gathered, [shard * k] * self.size)
                return torch.mm(gathered.local.view(m, k), w, out=y)

            found[f"serial {ctas}"] = serial
        found["torch"] = lambda _: torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, self.name)[1][0]
        return found, want, (y, out)

    def decode(self, m: int, k: int, n: int) -> tuple[Variants, torch.Tensor, Any]:
        """matmul_all_reduce of few rows, weights in turn."""
        problem = self.problem("matmul_all_reduce", m, n, k)
        count = max(1, -(-ROTATED // (2 * k * n)))
        x = self.factors(m, k, n, self.rank)[0]
        first = self.factors(m, k, n, self.rank)[1]
        weights = [first, *(first.t().clone().t() for _ in range(count - 1))]
        total = torch.zeros(m, n, device=self.device)
        for rank in range(self.size):
            x_theirs, w_theirs = self.factors(m, k, n, rank)
            total += (x_theirs @ w_theirs).float()
        want = total.to(BF16)
        out, y = (torch.empty(m, n, device=self.device, dtype=BF16) for _ in range(2))
        base = fused_plan(problem, "peer")
        assert base.tile is not None
        plans = {"fused": base}
        for block_n, split in self.options["decode"]:
            plans[f"fused {block_n}/{split}"] = replace(base, tile=(base.tile[0], block_n), split=split)
        found: Variants = {"cublas": lambda which: torch.mm(x, weights[which], out=y)}
        for name, plan in plans.items():
            calls = [self.fused(x, w, out, problem, plan) for w in weights]
            found[name] = lambda which, calls=calls: calls[which](which)  # type: ignore[misc]
        source = self.buffer("source", m * n)
        mine = source.local.view(m, n)
        spans = [m * n]
        serials = {
            "two_shot": (self.executable("two_shot", 8, target="direct", in_place=True), source),
            "packets": (self.executable("one_shot", 8, target="staged", packets=True), None),
        }
        for name, (made, into) in serials.items():

            def serial(which: int, made: Any = made, into: Any = into) -> torch.Tensor:
                torch.mm(x, weights[which], out=mine)
                made.run(source if into is not None else source.local, into if into is not None else y.view(-1), spans)
                return mine if into is not None else y

            found[f"serial {name}"] = serial
        operators = torch.ops.symm_mem
        found["torch one-shot"] = lambda which: (
            torch.mm(x, weights[which], out=mine), operators.one_shot_all_reduce(source.local, "sum", self.name)
        )[1].view(m, n)  # fmt: skip
        found["torch two-shot"] = lambda which: (
            torch.mm(x, weights[which], out=mine), operators.two_shot_all_reduce_(source.local, "sum", self.name)
        )[1].view(m, n)  # fmt: skip
        return found, want, (out, y, source.local, count)

    def factors(self, m: int, k: int, n: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            integers(m, k, 300 + rank, self.device, 3), integers(n, k, 400 + rank, self.device, 16).t(),
        )  # fmt: skip

    # -- right, then fast --------------------------------------------------------------------------------------------

    def right(self, variants: Variants, want: torch.Tensor, poisoned: Any) -> tuple[Variants, dict[str, str]]:
        good, bad = {}, {}
        for name, call in variants.items():
            alone = name in ("cublas", "gemm")
            reason = ""
            try:
                for _ in range(3 if name.startswith(("fused", "guarded")) else 1):  # each turn, and again the first
                    for one in poisoned:
                        if isinstance(one, torch.Tensor):
                            one.fill_(float("nan"))
                    torch.cuda.synchronize()
                    self.group.barrier()
                    found = call(0)
                    torch.cuda.synchronize()
                    self.group.check()
                    if not alone and not torch.equal(found, want):
                        wrong = (found != want).nonzero()
                        reason = f"{len(wrong)} of {want.numel()} wrong, first at {wrong[0].tolist()}"
            except ut.UndertowError:
                raise
            except (RuntimeError, NotImplementedError, AttributeError) as error:
                reason = str(error).splitlines()[0][:200]
            reasons = [one for one in self.group.exchange(reason, "whether a variant is right") if one]
            if reasons:
                bad[name] = reasons[0]
            else:
                good[name] = call
        return good, bad

    def sampler(self, call: Callable[[int], object], calls: int, sets: int) -> tuple[Callable[[], float], str]:
        """Seconds of one call, from a graph of several; eager where it cannot be captured."""
        for which in range(min(sets, calls)):
            call(which)
        torch.cuda.synchronize()
        self.group.barrier()
        graph: Any = torch.cuda.CUDAGraph()
        reason = ""
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for one in range(calls):
                    call(one % sets)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:100]
        captured = not any(self.group.exchange(reason, "whether a variant can be captured"))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def sample() -> float:
            self.align()
            start.record()
            if captured:
                graph.replay()
            else:
                for one in range(calls):
                    call(one % sets)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e-3 / calls

        return sample, "graph" if captured else "eager"

    def measure(self, kind: str, label: str, m: int, k: int, n: int) -> dict[str, Any]:
        began = time.perf_counter()
        made = {
            "scatter": self.scatter, "gather": self.gather, "decode": self.decode,
            "reduce": lambda m, k, n: self.scatter(m, k, n, reduce=True),
        }[kind](m, k, n)  # fmt: skip
        variants, want, poisoned = made
        sets = poisoned[-1] if isinstance(poisoned[-1], int) else 1
        good, bad = self.right(variants, want, poisoned)
        flops = 2 * m * k * n
        calls = max(2, min(20, int(2e11 / flops * self.size))) if sets == 1 else max(sets, 12)
        ready = {name: self.sampler(call, calls, sets) for name, call in good.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ready}
        for turn in range(self.options["rounds"] + 1):
            for name, (sample, _) in ready.items():
                torch.cuda.synchronize()
                self.group.barrier()
                took = self.group.reduce_max([sample()])[0]
                if turn:
                    seconds[name].append(took)
        self.group.check()
        median = {name: statistics.median(found) for name, found in seconds.items()}
        return {
            "kind": kind, "label": label, "m": m, "k": k, "n": n, "median": median, "seconds": seconds, "wrong": bad,
            "eager": [name for name, (_, how) in ready.items() if how == "eager"], "calls": calls,
            "spent": time.perf_counter() - began,
        }  # fmt: skip


def best(median: dict[str, float], prefix: str) -> float:
    return min((took for name, took in median.items() if name.startswith(prefix)), default=math.nan)


def scores(one: dict[str, Any]) -> dict[str, float]:
    median = one["median"]
    fused, serial = best(median, "fused"), best(median, "serial")
    if one["kind"] == "reduce":
        serial = min(serial, best(median, "torch"))
    cublas, gemm = median.get("cublas", math.nan), median.get("gemm", math.nan)
    exposed = serial - cublas
    return {
        "over serial": serial / fused, "over torch": best(median, "torch") / fused,
        "E": 1 - (fused - cublas) / exposed, "E own": 1 - (fused - gemm) / exposed, "share": exposed / serial,
        "over best": min(serial, best(median, "torch")) / fused,
    }  # fmt: skip


def line(one: dict[str, Any]) -> str:
    text = f"{one['kind']:7} {one['label']:11} M {one['m']:5} K {one['k']:5} N {one['n']:5}"
    for name, took in one["median"].items():
        text += f" {name} {took * 1e6:.1f}{'e' if name in one['eager'] else ''}"
    score = scores(one)
    text += f" | x serial {score['over serial']:.2f} x torch {score['over torch']:.2f}"
    text += f" E {score['E']:.2f} own {score['E own']:.2f} comm {score['share']:.0%} ({one['spent']:.1f} s)"
    return text + "".join(f"\n    {name} left out: {reason}" for name, reason in one["wrong"].items())


def mean(values: list[float]) -> float:
    good = [one for one in values if math.isfinite(one) and one > 0]
    return math.exp(statistics.mean(map(math.log, good))) if good else math.nan


def summary(found: list[dict[str, Any]]) -> str:
    lines = []
    for kind in ("scatter", "gather", "reduce", "decode"):
        some = [scores(one) for one in found if one["kind"] == kind]
        if not some:
            continue
        exposed = [one for one in some if one["share"] >= 0.1 and math.isfinite(one["E own"])]
        serial, torch_, either = (mean([one[f"over {name}"] for one in some]) for name in ("serial", "torch", "best"))
        text = f"{kind}: {len(some)} shapes, x serial {serial:.3f}, x torch {torch_:.3f}, x best {either:.3f}"
        if exposed:
            own, other = [one["E own"] for one in exposed], [one["E"] for one in exposed]
            text += f"; comm >= 10% on {len(exposed)}: E own mean {statistics.mean(own):.2f} best {max(own):.2f}"
            text += f", E cuBLAS mean {statistics.mean(other):.2f}"
        lines.append(text)
    return "\n".join(lines)


def cases(options: dict[str, Any], ranks: int) -> list[tuple[str, str, int, int, int]]:
    """What matters most first: few rows, then the middle sizes before the ends."""
    found: list[tuple[str, str, int, int, int]] = []
    if "decode" in options["only"]:
        found += [("decode", "decode", m, k, DECODE_N) for k in DECODE_K for m in DECODE_M]
    for m in options["m"]:
        for model in options["models"]:
            hidden = HIDDEN[model]
            if "scatter" in options["only"]:
                found += [("scatter", model, m, k // ranks, hidden) for k in ROW_PARALLEL[model]]
            if "gather" in options["only"]:
                found += [("gather", model, m, hidden, n // ranks) for n in COLUMN_PARALLEL[model]]
    if "reduce" in options["only"]:
        found += [("reduce", "llama3-70b", m, k // ranks, 8192) for m in options["m"] for k in (8192, 28672)]
    return found


def odd(bench: Bench) -> list[str]:
    """Operators as users call them, fused, on shapes with tails, bias and gradients: what is wrong."""
    group, device, size, rank = bench.group, bench.device, bench.size, bench.rank
    wrong: list[str] = []

    def same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if got.shape != want.shape or not torch.equal(got, want.to(got.dtype)):
            wrong.append(name)

    for m, n, k in ((300, 272, 72), (size * 70 + 3, 528, 200)):
        xs = [integers(m, k, 500 + one, device, 3) for one in range(size)]
        ws = [integers(n, k, 600 + one, device, 4).t() for one in range(size)]
        whole = sum(x.float() @ w.float() for x, w in zip(xs, ws, strict=True))
        parts = torch.tensor_split(whole, size)
        x, w = xs[rank].clone().requires_grad_(), ws[rank].detach().clone().requires_grad_()
        y = ut.matmul_reduce_scatter(x, w, group=group, strategy="fused")
        same(f"scatter {m} {n} {k}", y.detach(), parts[rank])
        y.backward(torch.ones_like(y))
        same(f"gradient of x {m} {n} {k}", x.grad, torch.ones(m, n, device=device) @ ws[rank].float().t())
        same(f"gradient of w {m} {n} {k}", w.grad, xs[rank].float().t() @ torch.ones(m, n, device=device))
        with torch.no_grad():
            same(f"reduce {m} {n} {k}", ut.matmul_all_reduce(x, w, group=group, strategy="fused"), whole)
            rows = [m // 4 + 5 * one for one in range(size)]
            x_own = xs[rank][: rows[rank]]
            gathered = torch.cat([xs[one][: rows[one]] for one in range(size)]).float()
            bias = (torch.arange(n, device=device) % 5 - 2).to(BF16)
            want = torch.relu(gathered @ ws[rank].float() + bias.float())
            found = ut.all_gather_matmul(
                x_own, w, rows=rows, bias=bias, activation="relu", group=group, strategy="fused"
            )  # fmt: skip
            same(f"gather {rows} {n} {k}", found, want)
            for few in (3, 33):
                want = sum(x[:few].float() @ w.float() for x, w in zip(xs, ws, strict=True))
                same(f"decode {few} {n} {k}", ut.matmul_all_reduce(x[:few], w, group=group, strategy="fused"), want)
    torch.cuda.synchronize()
    group.check()
    return sorted({one for found in group.exchange(wrong, "what is wrong") for one in found})


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    started = time.perf_counter()
    bench = Bench(options)
    began = time.perf_counter()  # a cold start takes as long as dozens of shapes
    if bench.group.rank == 0:
        print(f"{bench.size} ranks are up after {began - started:.1f} s", flush=True)
    found: list[dict[str, Any]] = []

    def late() -> bool:
        mine = time.perf_counter() - began > options["seconds"]
        return any(bench.group.exchange(mine, "whether time is left"))

    for case in cases(options, bench.size):
        if late():
            if bench.group.rank == 0:
                print(f"out of time before {case}", flush=True)
            break
        found.append(bench.measure(*case))
        torch.cuda.empty_cache()
        if bench.group.rank == 0:
            print(line(found[-1]), flush=True)
            if options["part"]:
                Path(options["part"]).write_text(json.dumps(found, indent=1, default=str) + "\n")
    if bench.group.rank == 0:
        print(f"{bench.size} ranks\n{summary(found)}", flush=True)
    if options["odd"]:
        wrong = odd(bench)
        if bench.group.rank == 0:
            print(f"{bench.size} ranks, operators on odd shapes, fused: {', '.join(wrong) or 'all exact'}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--only", default="decode,scatter,gather,reduce")
    parser.add_argument("--models", default="llama3-70b,gpt3-175b")
    parser.add_argument("--m", default="2048,8192,512,4096,1024")
    parser.add_argument("--loaders", default="2,8")
    parser.add_argument("--decode", default="", help="block_n/split of further decode plans, as 128/2,128/1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", default="32,8", help="for each number of ranks, from when they are up: no shape is begun later"
    )
    parser.add_argument("--guarded", action="store_true", help="also as the operators call it, watched")
    parser.add_argument("--no-odd", action="store_true", help="leave out the operators on odd shapes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"ranks": {}, "environment": {}}
    limits = [float(one) for one in options.seconds.split(",")]
    for number, ranks in enumerate(int(one) for one in options.ranks.split(",")):
        part = options.out.with_suffix(f".{ranks}.part.json") if options.out else None
        given = {
            "only": options.only.split(","), "models": options.models.split(","), "rounds": options.rounds,
            "m": [int(one) for one in options.m.split(",")], "seconds": limits[min(number, len(limits) - 1)],
            "loaders": [int(one) for one in options.loaders.split(",") if one], "guarded": options.guarded,
            "decode": [[int(part) for part in one.split("/")] for one in options.decode.split(",") if one],
            "part": str(part) if part else "", "odd": not options.no_odd and number == 0,
        }  # fmt: skip
        try:
            found = ut.launch(rank_main, ranks, device="cuda", args=(given,), deadline=20)[0]
        except Exception as error:
            print(f"{ranks} ranks: {error}", flush=True)
            report.setdefault("failed", {})[ranks] = str(error)
            found = json.loads(part.read_text()) if part and part.exists() else []
        report["ranks"][ranks] = found
        if options.out:
            report["environment"] = environment({"link": "virtual node, peer"})
            options.out.write_text(json.dumps(report, indent=1, default=str) + "\n")
        if part:
            part.unlink(missing_ok=True)
    if "failed" in report:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
