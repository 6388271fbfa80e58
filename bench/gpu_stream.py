"""How fast weights of a decode step can be read: few rows times weights, by kernels without communication.

A decode step lasts as long as its weights take to come from memory. In one run, interleaved, on all ranks of a virtual
node at once, device time of a call inside a CUDA graph, weights in turn so that none is in the cache: cuBLAS, and the
main loop of the fused kernels (`kernels/fused_decode.py`) for several tiles: columns of a block, elements along K that
one load brings (a row of weights comes in pieces of so many contiguous bytes), CTAs. Every variant is compared with
exact integers first.

    PYTHONPATH=src python bench/gpu_stream.py [--ranks 4] [--m 1,16] [--k 1024,3584] [--rounds 5] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from fused_common import BF16, Bench, integers
from fused_layers import ROTATED

import undertow as ut
from undertow.fabric.environment import environment
from undertow.plan.fused import ALL_SHARED

N = 8192
TILES = tuple((block_n, block_k) for block_n in (64, 128, 256) for block_k in (64, 128, 256, 512))
LEAST_STAGES = 3


@triton.jit(do_not_specialize=["rows"])
def stream_kernel(
    x, w, out, rows: tl.int32, n: tl.int32, inner: tl.int32, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [rows, n] = x @ w^T, x [rows, K] and w [n, K] as tensor descriptors; blocks of columns in fixed turns."""
    steps = tl.cdiv(inner, BLOCK_K)
    down = tl.arange(0, BLOCK_M)[:, None]
    for block in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.num_programs(0), flatten=True):
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            total = tl.dot(x.load([0, step * BLOCK_K]), w.load([block * BLOCK_N, step * BLOCK_K]).T, total)
        across = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(out + down * n + across, total.to(out.dtype.element_ty), mask=(down < rows) & (across < n))


def stages_of(block_n: int, block_k: int) -> int:
    """One more than loads that shared memory holds, of which there are at most 8: the one that is multiplied goes."""
    return min(8, (ALL_SHARED - 2048) // (2 * (16 + block_n) * block_k)) + 1


def streaming(
    x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor, tile: tuple[int, int], ctas: int
) -> Callable[[int], torch.Tensor]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    block_n, block_k = tile
    rows = TensorDescriptor.from_tensor(x, [16, block_k])
    described = [TensorDescriptor.from_tensor(one, [block_n, block_k]) for one in weights]
    kernel: Any = stream_kernel

    def call(which: int) -> torch.Tensor:
        kernel[(ctas,)](
            rows, described[which], out, x.shape[0], N, x.shape[1], BLOCK_M=16, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=8, num_stages=stages_of(block_n, block_k),
        )  # fmt: skip
        return out

    return call


def measure(bench: Bench, m: int, k: int, rounds: int) -> dict[str, Any]:
    """Seconds of each variant, by name; those that are wrong are left out and named."""
    x = integers(m, k, 300 + bench.rank, bench.device, 3)
    first = integers(N, k, 400 + bench.rank, bench.device, 16)
    weights = [first, *(first.clone() for _ in range(max(1, -(-ROTATED // (2 * k * N))) - 1))]
    y, out = (torch.empty(m, N, device=bench.device, dtype=BF16) for _ in range(2))
    variants: dict[str, Callable[[int], torch.Tensor]] = {
        "cublas": lambda which: torch.mm(x, weights[which].t(), out=y)
    }
    for tile in TILES:
        if stages_of(*tile) >= LEAST_STAGES:
            for ctas in sorted({bench.sms, bench.sms - 1}):
                variants[f"{tile[0]} x {tile[1]}, {ctas} CTAs"] = streaming(x, weights, out, tile, ctas)
    good, wrong = bench.right(variants, x @ first.t(), (y, out))
    calls = max(len(weights), 12)
    ready = {name: bench.sampler(call, calls, len(weights))[0] for name, call in good.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(rounds + 1):
        for name in random.Random(turn).sample(list(ready), len(ready)):
            torch.cuda.synchronize()
            bench.group.barrier()
            took = bench.group.reduce_max([ready[name]()])[0]
            if turn:
                seconds[name].append(took)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    return {"m": m, "k": k, "ranks": bench.size, "median": median, "wrong": wrong}


def lines(found: dict[str, Any]) -> list[str]:
    """Fastest first, with the rate at which all ranks together read weights."""
    streamed = found["ranks"] * found["k"] * N * 2
    listed = [f"M {found['m']}, K {found['k']} a rank, {found['ranks']} ranks"]
    for name, took in sorted(found["median"].items(), key=lambda one: one[1]):
        listed.append(f"  {name:22} {took * 1e6:7.1f} us  {streamed / took * 1e-12:.2f} TB/s")
    return listed + [f"  {name} left out: {reason}" for name, reason in found["wrong"].items()]


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    bench = Bench(options)
    found = []
    for k in options["k"]:
        for m in options["m"]:
            found.append(measure(bench, m, k, options["rounds"]))
            if bench.rank == 0:
                print(*lines(found[-1]), sep="\n", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--m", default="1,16")
    parser.add_argument("--k", default="1024,3584")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    given = {"m": [int(one) for one in options.m.split(",")], "k": [int(one) for one in options.k.split(",")],
             "rounds": options.rounds}  # fmt: skip
    found = ut.launch(rank_main, options.ranks, device="cuda", args=(given,), deadline=40)[0]
    if options.out:
        facts = environment({"link": f"virtual node of {options.ranks}, no communication"})
        options.out.write_text(json.dumps({"found": found, "environment": facts}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
