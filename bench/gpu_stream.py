"""How fast weights of a decode step can be read: few rows times weights, by kernels without communication.

A decode step lasts as long as its weights take to come from memory. In one run, interleaved, on all ranks of a virtual
node at once, device time of a call inside a CUDA graph, weights in turn so that none is in the cache: cuBLAS; the main
loop of a fused kernel (`kernels/fused_columns.py`) for several tiles: columns of a block, elements along K that one
load brings (a row of weights comes in pieces of so many contiguous bytes), CTAs; a kernel whose warps have roles, which
takes blocks of columns in fixed turns or as it comes; and one row times weights by many small CTAs. Every variant is
compared with exact integers first. Ranks do not wait for each other here: what one of them leaves of the memory's rate
another one takes.

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
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

import undertow as ut
from undertow.fabric.environment import environment
from undertow.kernels.fused_chain import next_stage, stage_before
from undertow.plan.fused import ALL_SHARED

N = 8192
TILES = tuple((block_n, block_k) for block_n in (64, 128, 256) for block_k in (64, 128, 256, 512))
ROLE_TILES = ((64, 64), (64, 128), (64, 256), (64, 512), (128, 64), (128, 128), (256, 64))
ROW_TILES = ((8, 512, 4), (16, 512, 4), (16, 256, 4), (32, 128, 4), (16, 512, 8))
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


@triton.jit
def row_kernel(x, w, out, inner: tl.int32, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """out [n] = x @ w^T of one row x [K], a CTA for each BLOCK_N columns; K is a multiple of BLOCK_K."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    along = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for begin in range(0, inner, BLOCK_K):
        weight = tl.load(w + column[:, None] * inner + begin + along[None, :], eviction_policy="evict_first")
        total += weight.to(tl.float32) * tl.load(x + begin + along)[None, :].to(tl.float32)
    tl.store(out + column, tl.sum(total, axis=1).to(out.dtype.element_ty))


_NEXT = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane, found;
    mov.u32 lane, %laneid;
    mov.b32 found, 0;
    setp.eq.u32 first, lane, 0;
    @first atom.relaxed.gpu.global.add.u32 found, [$1], 1;
    shfl.sync.idx.b32 $0, found, 0, 31, 0xffffffff;
}""")
_WARPS = gl.constexpr(4)  # that multiply


@gluon.jit
def _role_load(
    x, w, x_blocks, w_blocks, mail, free, there, counter, program, programs, blocks, steps, TAKEN: gl.constexpr
):  # fmt: skip
    """Blocks of columns, in turns or (TAKEN) as a count gives them: into the stages, with the number of the block in
    the mail of its first stage; -1 in the end. A stage's barrier hands its mail over, too: all lanes have stored it."""
    STAGES: gl.constexpr = w_blocks.type.shape[0]
    BLOCK_N: gl.constexpr = w_blocks.type.shape[1]
    BLOCK_K: gl.constexpr = w_blocks.type.shape[2]
    each: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, each)
    stage, phase = 0, 1
    block = program
    while block < blocks:
        if TAKEN:
            found = gl.inline_asm_elementwise(
                _NEXT, "=r,l", [counter + lanes * 0], dtype=gl.int32, is_pure=False, pack=1
            )  # fmt: skip
            following = programs + gl.max(found, axis=0)
        else:
            following = block + programs
        for step in range(steps):
            mbarrier.wait(free.index(stage), phase)
            if step == 0:
                mail.index(stage).store(lanes * 0 + block)
                gl.thread_barrier()
            ready = there.index(stage)
            mbarrier.expect(ready, x.block_type.nbytes + w.block_type.nbytes)
            tma.async_copy_global_to_shared(w, [block * BLOCK_N, step * BLOCK_K], ready, w_blocks.index(stage))
            tma.async_copy_global_to_shared(x, [0, step * BLOCK_K], ready, x_blocks.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
        block = following
    mbarrier.wait(free.index(stage), phase)
    mail.index(stage).store(lanes * 0 - 1)
    gl.thread_barrier()
    mbarrier.arrive(there.index(stage), count=1)


@gluon.jit
def _role_multiply(x_blocks, w_blocks, mail, free, there, out, rows, n, steps):
    """out^T = w @ x^T of every block that comes. A stage is free when all warps have read it, its mail, too: they meet
    before one of them says so."""
    STAGES: gl.constexpr = w_blocks.type.shape[0]
    BLOCK_N: gl.constexpr = w_blocks.type.shape[1]
    BLOCK_M: gl.constexpr = x_blocks.type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, BLOCK_M, 16])
    each: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    across = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))[:, None]
    down = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))[None, :]
    stage, phase = 0, 0
    mbarrier.wait(there.index(0), 0)
    block = gl.max(mail.index(0).load(each), axis=0)
    while block >= 0:
        running = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout)
        for step in range(steps):
            mbarrier.wait(there.index(stage), phase)
            begun = warpgroup_mma(w_blocks.index(stage), x_blocks.index(stage).permute((1, 0)), running, is_async=True)
            running = warpgroup_mma_wait(num_outstanding=1, deps=(begun,))
            gl.thread_barrier()
            mbarrier.arrive(free.index(stage_before(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(running,))
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage_before(stage, STAGES)), count=1)
        column = block * BLOCK_N + across
        gl.store(out + down * n + column, total.to(out.dtype.element_ty), mask=(down < rows) & (column < n))
        mbarrier.wait(there.index(stage), phase)
        block = gl.max(mail.index(stage).load(each), axis=0)


@gluon.jit(do_not_specialize=["rows"])
def role_kernel(
    x, w, out, counters, rows: tl.int32, n: tl.int32, inner: tl.int32, STAGES: gl.constexpr, TAKEN: gl.constexpr,
):  # fmt: skip
    """out [rows, n] = x @ w^T: a warp loads, four multiply; TAKEN: blocks go to who asks for one.

    `counters`: [call & 1] is this call's, the other one is cleared for the next; [2] counts CTAs that have ended.
    """
    program = gl.program_id(0)
    BLOCK_N: gl.constexpr = w.block_type.shape[0]
    BLOCK_K: gl.constexpr = w.block_type.shape[1]
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    x_blocks = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    w_blocks = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_N, BLOCK_K], w.layout)
    mail = gl.allocate_shared_memory(gl.int32, [STAGES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(free.index(stage), count=1)
        mbarrier.init(there.index(stage), count=1)
    programs = gl.num_programs(0)
    call = gl.load(counters + 2, volatile=True) // programs
    turn = call & 1
    if program == 0:
        gl.store(counters + (1 - turn), 0)
    blocks, steps = gl.cdiv(n, BLOCK_N), gl.cdiv(inner, BLOCK_K)
    gl.warp_specialize([
        (_role_multiply, (x_blocks, w_blocks, mail, free, there, out, rows, n, steps)),
        (_role_load, (x, w, x_blocks, w_blocks, mail, free, there, counters + turn, program, programs, blocks, steps,
                      TAKEN)),
    ], [1], [40])  # fmt: skip
    gl.atomic_add(counters + 2, 1, sem="relaxed")


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


def by_roles(
    x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor, tile: tuple[int, int], ctas: int, taken: bool
) -> Callable[[int], torch.Tensor]:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block_n, block_k = tile
    block_m = 16 if x.shape[0] <= 16 else 64

    def described(tensor: torch.Tensor, shape: list[int]) -> Any:
        return TensorDescriptor.from_tensor(tensor, shape, gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16))

    rows, every = described(x, [block_m, block_k]), [described(one, [block_n, block_k]) for one in weights]
    counters = torch.zeros(3, dtype=torch.int32, device=x.device)
    stages = (ALL_SHARED - 4096) // (2 * (block_m + block_n) * block_k)
    kernel: Any = role_kernel

    def call(which: int) -> torch.Tensor:
        kernel[(ctas,)](
            rows, every[which], out, counters, x.shape[0], N, x.shape[1], STAGES=stages, TAKEN=taken,
            num_warps=_WARPS.value,
        )  # fmt: skip
        return out

    return call


def by_row(
    x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor, block_n: int, block_k: int, warps: int
) -> Callable[[int], torch.Tensor]:
    kernel: Any = row_kernel

    def call(which: int) -> torch.Tensor:
        kernel[(N // block_n,)](x, weights[which], out, x.shape[1], BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps)
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
    for tile in ROLE_TILES:
        for taken in (False, True):
            for ctas in sorted({bench.sms, bench.sms - 1}):
                name = f"roles {tile[0]} x {tile[1]}, {ctas} CTAs{', taken' if taken else ''}"
                variants[name] = by_roles(x, weights, out, tile, ctas, taken)
    for block_n, block_k, warps in ROW_TILES if m == 1 else ():
        variants[f"a row, {block_n} x {block_k}, {warps} warps"] = by_row(x, weights, out, block_n, block_k, warps)
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
        listed.append(f"  {name:32} {took * 1e6:7.1f} us  {streamed / took * 1e-12:.2f} TB/s")
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
