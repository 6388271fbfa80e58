"""What the fused benchmarks share: the group, pieces of serial calls, exactness first, then times side by side."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import undertow as ut
from undertow.collective.algorithms import LIBRARY
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem

BF16 = torch.bfloat16
Result = torch.Tensor | tuple[Any, ...]
Variants = dict[str, Callable[[int], Result]]
Made = tuple[Variants, Result, Any]  # calls, what they must give, what is poisoned before (and, last, weights)


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
        from undertow.fabric.symmetric import SymmetricBuffer

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
            operator, m, n, k, dtype="bfloat16", ranks=self.size, device="cuda", multiprocessors=self.sms,
            together=self.fabric.together,
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

    def factors(self, m: int, k: int, n: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            integers(m, k, 300 + rank, self.device, 3), integers(n, k, 400 + rank, self.device, 16).t(),
        )  # fmt: skip

    def trace(self, what: str, name: str) -> None:
        """What is begun, where somebody asked for it: a rival that stands still has no deadline of ours."""
        if self.options.get("trace") and self.rank == 0:
            print(f"{time.perf_counter():.2f} {what} {name}", flush=True)

    # -- right, then fast --------------------------------------------------------------------------------------------

    def right(self, variants: Variants, want: Result, poisoned: Any) -> tuple[Variants, dict[str, str]]:
        good, bad = {}, {}
        for name, call in variants.items():
            self.trace("compare", name)
            alone = name.startswith(("cublas", "gemm"))
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
                    for got, right in [] if alone else zip(_each(found), _each(want), strict=True):
                        if not torch.equal(got, right):
                            wrong = (got != right).nonzero()
                            reason = f"{len(wrong)} of {right.numel()} wrong, first at {wrong[0].tolist()}"
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

    def measure(self, make: Maker, kind: str, label: str, m: int, k: int, n: int) -> dict[str, Any]:
        """The times of one shape, of all variants that `make` knows and that are right."""
        began = time.perf_counter()
        variants, want, poisoned = make(self, m, k, n)
        sets = poisoned[-1] if isinstance(poisoned[-1], int) else 1
        good, bad = self.right(variants, want, poisoned)
        flops = 2 * m * k * n
        calls = max(2, min(20, int(2e11 / flops * self.size))) if sets == 1 else max(sets, 12)
        ready = {}
        for name, call in good.items():
            self.trace("capture", name)
            ready[name] = self.sampler(call, calls, sets)
        seconds: dict[str, list[float]] = {name: [] for name in ready}
        for turn in range(self.options["rounds"] + 1):
            # In another order each time, the same on all ranks: a card that was busy runs slower for a while.
            for name in random.Random(turn).sample(list(ready), len(ready)):
                self.trace("measure", name)
                sample, _ = ready[name]
                torch.cuda.synchronize()
                self.group.barrier()
                took = self.group.reduce_max([sample()])[0]
                if turn:
                    seconds[name].append(took)
        self.group.check()
        median = {name: statistics.median(found) for name, found in seconds.items()}
        return {
            "kind": kind, "label": label, "ranks": self.size, "m": m, "k": k, "n": n, "median": median,
            "seconds": seconds, "wrong": bad,
            "eager": [name for name, (_, how) in ready.items() if how == "eager"], "calls": calls,
            "spent": time.perf_counter() - began,
        }  # fmt: skip


def _each(result: Result) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


Maker = Callable[[Bench, int, int, int], Made]
