"""The signaling matmul against cuBLAS, on a whole GPU, without communication; and what packing costs.

Device time of one call in a CUDA graph of several, variants in turn, medians. The result of every variant is compared
with exact integers first, and its counters with the tiles of each parcel.

- plain: no counters, natural layout; signaled: one add for each tile, natural layout; packed: signaled, and the tiles
  of a parcel contiguous;
- packed only: as packed, without counters; unpack: the kernel on its own;
- norm: residual add and RMSNorm of the ordinary matrix; norm with unpack: the same kernel reading the packed buffer.

The cost of packing is (packed - plain) + (norm with unpack - norm), as a share of the plain matmul; beside it the same
without the counters.

    PYTHONPATH=src python bench/gpu_gemm.py [--m ...] [--k ...] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from undertow.fabric.environment import environment
from undertow.kernels import combine, gemm
from undertow.ops.norm import After
from undertow.plan import reorder
from undertow.plan.plan import Plan
from undertow.plan.problem import Problem

N = 8192
TILE, BLOCK_K = (128, 256), 64
PARCELS = 8
CALLS, ROUNDS = 8, 6
DEVICE = torch.device("cuda")
MEMORY_BOUND = ("unpack", "norm", "norm with unpack")


def plan_of(problem: Problem, layout: str) -> Plan:
    grid = problem.grid(Plan("signaled", "dma", ((0, 0),), tile=TILE))
    bands = sum(grid.band_counts)
    stops = [bands * (one + 1) // PARCELS * grid.columns for one in range(PARCELS)]
    parcels = tuple(itertools.pairwise([0, *stops]))
    return Plan("signaled", "dma", parcels, tile=TILE, group_bands=8, layout=layout)


class Variant:
    """One way to make c = a @ b, ready to be launched."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, problem: Problem, layout: str, signal: bool):
        self.plan = plan_of(problem, layout)
        self.grid = problem.grid(self.plan)
        self.tiles = reorder.parcel_tiles(self.grid, self.plan)
        self.table = torch.from_numpy(np.array(reorder.tile_table(self.grid, self.plan))).to(DEVICE)
        self.unpacking = torch.from_numpy(np.ascontiguousarray(reorder.unpack_table(self.grid, self.plan))).to(DEVICE)
        self.counters = torch.zeros(PARCELS * 32, dtype=torch.int32, device=DEVICE)
        block_m, block_n = TILE
        parts = 2
        stored = c if layout == "natural" else c.view(-1, block_n)  # all tiles are complete
        described = TensorDescriptor.from_tensor(stored, [block_m, block_n // parts])
        arguments = (
            TensorDescriptor.from_tensor(a, [block_m, BLOCK_K]), TensorDescriptor.from_tensor(b, [block_n, BLOCK_K]),
            described, c, c, self.table, self.counters, len(self.table), a.shape[1],
        )  # fmt: skip
        constants: dict[str, Any] = {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": BLOCK_K, "TRANSPOSED": True, "PARTS": parts,
            "BULK": True, "EVEN": True, "SIGNAL": signal, "DEFER": True, "BIAS": False, "ACTIVATION": 0,
            "num_warps": 8, "num_stages": 4,
        }  # fmt: skip
        ctas = min(problem.multiprocessors, len(self.table))
        kernel: Any = gemm.gemm_kernel
        self.launch: Callable[[], object] = lambda: kernel[(ctas,)](*arguments, **constants)
        self.signal = signal

    def check(self, c: torch.Tensor, want: torch.Tensor) -> None:
        c.fill_(float("nan"))
        self.counters.zero_()
        self.launch()
        found = torch.empty_like(c)
        self.unpack(found, c)
        assert torch.equal(found, want), f"{self.plan.layout}: {int((found != want).sum())} elements are wrong"
        if self.signal:
            assert self.counters[::32].tolist() == list(self.tiles)

    def unpack(self, y: torch.Tensor, buffer: torch.Tensor) -> None:
        kernel: Any = combine.unpack_kernel
        kernel[(len(self.unpacking),)](
            y, buffer, y, self.unpacking, len(self.unpacking), N, BIAS=False, ACTIVATION=0,
            ROWS=combine.UNPACK_ROWS, COLUMNS=combine.UNPACK_COLUMNS, num_warps=combine.WARPS,
        )  # fmt: skip


def norms(variants: dict[str, Variant], c: torch.Tensor, y: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Residual add and RMSNorm, of the ordinary matrix and of the packed one; both give the same bits."""
    norm = torch.nn.RMSNorm(N, eps=1e-5, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    residual = torch.zeros_like(c)
    after = After.of(residual, norm, y)
    assert after is not None
    calls: dict[str, Callable[[], object]] = {
        "norm": lambda: after.finish(y, c.view(-1), None, None, None, "none"),
        "norm with unpack": lambda: after.finish(y, c.view(-1), variants["packed"].unpacking, TILE, None, "none"),
    }
    found = []
    for gemm_name, norm_name in (("plain", "norm"), ("packed", "norm with unpack")):
        y.fill_(float("nan"))
        residual.fill_(1.0)
        variants[gemm_name].launch()
        calls[norm_name]()
        found.append((y.clone(), residual.clone()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), "unpacking changes the norm"
    residual.zero_()
    return calls


def packing_cost(median: dict[str, float], packed: str = "packed") -> float:
    """(packed - plain GEMM) + (norm with unpack - plain norm), as a share of the plain GEMM."""
    return (median[packed] - median["plain"] + median["norm with unpack"] - median["norm"]) / median["plain"]


def sampler(call: Callable[[], object]) -> Callable[[], float]:
    """Seconds of one call, from a graph of several."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        graph.replay()  # untimed: whoever comes after a kernel that draws little power would run at a higher clock
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / CALLS

    return sample


def measure(m: int, k: int) -> dict[str, Any]:
    a = torch.randint(-1, 2, (m, k), device=DEVICE).to(torch.bfloat16)
    b = (torch.randint(0, 4, (N, k), device=DEVICE) == 0).to(torch.bfloat16)
    c = torch.empty(m, N, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(c)
    want = (a.float() @ b.float().t()).to(torch.bfloat16)
    problem = Problem.of(
        "matmul_all_reduce", m, N, k, dtype="bfloat16", ranks=2, device="cuda",
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
    )  # fmt: skip
    variants = {
        "plain": Variant(a, b, c, problem, "natural", False),
        "signaled": Variant(a, b, c, problem, "natural", True),
        "packed": Variant(a, b, c, problem, "packed", True),
        "packed only": Variant(a, b, c, problem, "packed", False),
    }
    for one in variants.values():
        one.check(c, want)
    packed = variants["packed"]
    calls: dict[str, Callable[[], object]] = {
        "cuBLAS": lambda: torch.mm(a, b.t(), out=c), **{name: one.launch for name, one in variants.items()},
        "unpack": lambda: packed.unpack(y, c), **norms(variants, c, y),
    }  # fmt: skip
    ready = {name: sampler(call) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(ROUNDS + 1):
        for name, sample in ready.items():
            took = sample()
            if turn:
                seconds[name].append(took)
    return {"m": m, "k": k, "seconds": seconds, "median": {name: statistics.median(s) for name, s in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--m", default="1024,2048,4096,8192")
    parser.add_argument("--k", default="1024,2048,3584,8192")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for m, k in itertools.product(*([int(one) for one in text.split(",")] for text in (options.m, options.k))):
        found.append(measure(m, k))
        median = found[-1]["median"]
        rates = {name: median["cuBLAS"] / median[name] for name in ("plain", "signaled", "packed", "packed only")}
        print(f"M {m:5} K {k:5}  cuBLAS {median['cuBLAS'] * 1e6:8.1f} us  "
              + "  ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
              + "  " + "  ".join(f"{name} {median[name] * 1e6:.1f} us" for name in MEMORY_BOUND)
              + f"  packing {packing_cost(median):.2%}, without counters {packing_cost(median, 'packed only'):.2%}",
              flush=True)  # fmt: skip
    for name in ("plain", "signaled", "packed"):
        rates = [one["median"]["cuBLAS"] / one["median"][name] for one in found]
        print(f"{name}: geometric mean {math.exp(statistics.mean(map(math.log, rates))):.3f} of cuBLAS")
    for m in sorted({one["m"] for one in found}):
        costs = [packing_cost(one["median"]) for one in found if one["m"] == m]
        print(f"M {m}: packing and unpacking cost {statistics.mean(costs):.2%} of the matmul, at most {max(costs):.2%}")
    if options.out:
        facts = environment({"link": "none: one process, whole card", "ranks": 1})
        options.out.write_text(json.dumps({"shapes": found, "environment": facts}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
