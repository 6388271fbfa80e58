"""A matmul whose sums go from rank to rank: out = own rows of the sum over ranks of a @ b, in one launch.

Every rank computes all tiles of its product, those of the rank before it first, its own last. A finished tile is added
to what the ranks before have summed of it, and goes to the next rank; the owner, which comes last, finishes the sum:

    rank 0   | tiles of 3 | tiles of 2 | tiles of 1 | own |
    rank 1   | tiles of 0 | tiles of 3 | tiles of 2 | own |       what rank 0 has summed of 3's tiles goes to rank 1,
    rank 2   | tiles of 1 | tiles of 0 | tiles of 3 | own |       then to rank 2, then to rank 3
    rank 3   | tiles of 2 | tiles of 1 | tiles of 0 | own |

The warps of a CTA have three roles, which meet in barriers of shared memory:

    load        a warp: blocks of a and b into a ring of stages, as they become free
    multiply    two groups of four warps, half the rows of every tile each: total = a @ b, rounded, into shared memory
                when it is the group's turn; then the next tile at once
    pass on     two warps: wait for words[tile, r - 1], unless this rank is the first of the chain;
                others' tiles: slots[tile] of the next rank = slots[tile] + product; words[tile, r] there = epoch
                own tiles:     out = finish(slots[tile] + product)

So who multiplies is up to one tile ahead of the sums: a tile has the next one's time to be passed on. Additions are
made in fp32, in the order of the chain; products, and what travels, are rounded. The order never changes, so neither do
the results.

Products of both groups take turns in one buffer of half a tile, so that there is room for a fourth stage:

    first group     | tile 0 ....... | store | tile 1 ................... | store | tile 2 ...
    second group    | tile 0 ......... | waits           | store | tile 1 .......... | waits ...
    pass on                                  | upper half |      | lower half |    | upper half |

While the second waits the first has the tensor cores to itself, for as long as there are stages: what must not take
long is the upper half. So sums of the ranks before are under way some rows ahead of the product.

The table is the plan's (`plan/chain.py`): row, rows, column, columns of the product; row in the owner's shard; line,
the tile's number among all; owner; whether there is a sum to wait for.

Nobody waits for ever: a tile waits for the same tile of the rank before, which stands one rank's tiles earlier in that
one's table, and CTAs go through their tables in order. Inside a CTA all roles go through the same halves of tiles in
the same order, and wait for earlier ones only: a group, before it stores, for the half before to be taken; who passes
on, for a half to be stored. And for stages: of both groups the one that is behind never lacks them, since what its next
stage held before, both have read.

Slots are used in turn by two calls. A rank that is in call n + 2 has seen the end of call n + 1, for which every rank
had to begin that call: nobody still reads the slots of call n. (Every rank must own a tile for that.)

Memory ordering. Stages of factors, and the product, are handed over and back by barriers in shared memory, each
arrived at by one thread of a role or group, behind a barrier of its own warps. What comes by bulk copies is read by
wgmma alone. A stage is free when both groups have arrived. A group stores its half when `taken` of the other group says
that the half before has been loaded, which was after `made` of that one, behind all its stores: so no half is
overwritten before it is taken, or taken before it is whole. In the first tile the first group waits for the phase
before the first, which counts as over. No barrier can be two phases ahead of who waits for it, so that one bit tells
phases apart: the next phase of `taken` of a group needs that group's next half, which waits for the half between, of
the very group that waits; the next of `made` needs this one taken; the next of `there` needs the stage free, for which
both groups must have seen it; and the next of `free` needs a copy by who waits for it.

A tile's word is released at system scope by one thread, behind a barrier of the two warps that follows all their stores
of both halves; and with it what the rank's stream had stored before this launch, and what it acquired (`ops/fused.py`
relies on both). The next rank's two warps acquire it at system scope, each thread for itself, before they load the slot
with ordinary loads. After a wait that failed the CTA tells nobody. Epochs are this rank's own: one for each CTA, read
and advanced by it alone.
"""

# mypy: ignore-errors

from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .combine import activated
from .signals import RELEASE_EACH

WARPS, GROUPS = 4, 2  # of each group that multiplies; these groups
REGISTERS = 168  # of a thread, on average: what 12 warps can have
BLOCK_K, STAGES = 64, 4  # of both factors; the rest of shared memory is a group's product
_ENTRY = gl.constexpr(8)  # 64-bit words of a table's row
_LINE = gl.constexpr(32)  # 32-bit words of a tile's line
_MULTIPLYING, _PASSING, _LOADING = gl.constexpr(WARPS), gl.constexpr(2), gl.constexpr(1)  # warps
_GROUPS = gl.constexpr(GROUPS)
# Of a thread; the first group has what is left of three times REGISTERS: as many as the second. They need 152.
_MULTIPLYING_REGISTERS, _OTHER_REGISTERS = gl.constexpr(160), gl.constexpr(184)
_ROWS = gl.constexpr(8)  # of a tile that are passed on at once: what a product's swizzle needs, at least
# So many times _ROWS of the ranks before are under way, as many as registers hold. The code for each is its own, and
# that of an activation is long.
_AHEAD, _AHEAD_OF_ACTIVATION = gl.constexpr(4), gl.constexpr(2)

# One element a thread: each with `$3` set polls the word until it is the target or a little beyond, so that one which a
# much earlier call left is never taken for a later one. As in `signals`, the abort word, across PCIe, and the timer are
# looked at once in 1024 polls. Who is late says so, and has all others give up.
_POLL = gl.constexpr("""{
    .reg .pred idle, done, again, stop;
    .reg .b32 seen, polls, status;
    .reg .b64 begin, passed;
    mov.b32 status, 0;
    setp.eq.s32 idle, $3, 0;
    @idle bra END;
    mov.b32 polls, 0;
    mov.u64 begin, %globaltimer;
POLL:
    ld.acquire.sys.global.b32 seen, [$1];
    sub.s32 seen, seen, $2;
    setp.lt.u32 done, seen, 16;
    @done bra END;
    add.u32 polls, polls, 1;
    and.b32 seen, polls, 1023;
    setp.ne.u32 again, seen, 0;
    @again bra POLL;
    ld.relaxed.sys.global.b32 seen, [$4];
    setp.ne.s32 stop, seen, 0;
    @stop bra STOP;
    mov.u64 passed, %globaltimer;
    sub.u64 passed, passed, begin;
    setp.lt.u64 again, passed, $6;
    @again bra POLL;
    st.relaxed.sys.global.b32 [$5], 2;
    st.relaxed.sys.global.b32 [$4], 1;
STOP:
    mov.b32 status, 1;
END:
    mov.b32 $0, status;
}""")


def blocks(a: Any, b: Any, transposed: bool, tile: tuple[int, int]) -> tuple[Any, Any]:
    """Tensor descriptors of a [M, K] and b, [K, N] or (`transposed`) [N, K], as this kernel loads them: a stage has a
    block of a for each group."""
    element = gl.bfloat16 if a.dtype == torch.bfloat16 else gl.float16
    shapes = [tile[0] // GROUPS, BLOCK_K], [tile[1], BLOCK_K] if transposed else [BLOCK_K, tile[1]]
    found = [
        TensorDescriptor.from_tensor(factor, shape, gl.NVMMASharedLayout.get_default_for(shape, element))
        for factor, shape in zip((a, b), shapes, strict=True)
    ]
    return found[0], found[1]


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage behind one of a ring, and the phase of its barriers, which turns with the ring."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    return gl.where(stage == STAGES, 0, stage), phase


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _load(a, b, a_blocks, b_blocks, free, there, table, program, programs, tiles, steps, TRANSPOSED: gl.constexpr):
    """Blocks of both factors, tile by tile, into the stages."""
    STAGES: gl.constexpr = b_blocks.type.shape[0]
    ROWS: gl.constexpr = a_blocks.type.shape[1]
    BLOCK_K: gl.constexpr = a_blocks.type.shape[2]
    stage, phase = 0, 1
    for position in range(program, tiles, programs):
        entry = table + position * _ENTRY
        row, column = gl.load(entry).to(gl.int32), gl.load(entry + 2).to(gl.int32)
        for step in range(steps):
            ready = there.index(stage)
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(ready, _GROUPS * a.block_type.nbytes + b.block_type.nbytes)
            for group in gl.static_range(_GROUPS):
                rows = a_blocks.index(stage * _GROUPS + group)
                tma.async_copy_global_to_shared(a, [row + group * ROWS, step * BLOCK_K], ready, rows)
            if TRANSPOSED:
                tma.async_copy_global_to_shared(b, [column, step * BLOCK_K], ready, b_blocks.index(stage))
            else:
                tma.async_copy_global_to_shared(b, [step * BLOCK_K, column], ready, b_blocks.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply(
    a_blocks, b_blocks, product, free, there, taken, made, program, programs, tiles, steps, GROUP: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """total = a @ b of this group's rows of every tile, rounded, into shared memory when it is this group's turn."""
    STAGES: gl.constexpr = b_blocks.type.shape[0]
    ROWS: gl.constexpr = a_blocks.type.shape[1]
    BLOCK_N: gl.constexpr = product.type.shape[2]
    whole = product._reinterpret(product.dtype, [ROWS, BLOCK_N], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_MULTIPLYING, 1], [16, BLOCK_N, 16])
    stage, phase = 0, 0
    turn = 1 if GROUP == 0 else 0  # in the first tile the first group finds the buffer empty
    for _ in range(program, tiles, programs):
        running = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
        for step in range(steps):
            mbarrier.wait(there.index(stage), phase)
            weights = b_blocks.index(stage)
            if TRANSPOSED:
                weights = weights.permute((1, 0))
            begun = warpgroup_mma(a_blocks.index(stage * _GROUPS + GROUP), weights, running, is_async=True)
            running = warpgroup_mma_wait(num_outstanding=1, deps=(begun,))
            gl.thread_barrier()  # of this group: its four warps have read the stage before
            before = stage_before(stage, STAGES)
            mbarrier.arrive(free.index(before), count=1, pred=step > 0)  # the step before has read its stage
            stage, phase = next_stage(stage, phase, STAGES)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(running,))
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage_before(stage, STAGES)), count=1)
        mbarrier.wait(taken.index(1 - GROUP), turn)  # the half before, which the other group stored
        whole.store(total.to(product.dtype))
        gl.thread_barrier()  # of this group: all its warps have stored
        mbarrier.arrive(made.index(GROUP), count=1)
        turn ^= 1


@gluon.jit
def _before(slot, awaited, n, left, down, across):
    """Some rows of what the ranks before have summed of a tile; zeros if there are none."""
    return gl.load(slot + (down * n + across), mask=(across < left) & (awaited != 0), other=0.0)


@gluon.jit
def _pass_on(
    product, taken, made, mine, out, bias, table, base, words, next_words, program, programs, tiles, n, padded, rank,
    preceding, epoch, abort, error, deadline_ns, AHEAD: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Every tile, as it is made, to the next rank or, summed over all ranks, into `out`."""
    PARTS: gl.constexpr = product.type.shape[0]  # of a group's rows
    ROWS: gl.constexpr = product.type.shape[1]
    BLOCK_N: gl.constexpr = product.type.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_PASSING, 1], [1, 0])  # a warp has a row
    each: gl.constexpr = gl.BlockedLayout([1], [32], [_PASSING], [0])
    lanes = gl.arange(0, 32 * _PASSING, each)
    down = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    across = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))[None, :]
    turn = 0
    broken = 0
    for position in range(program, tiles, programs):
        entry = table + position * _ENTRY
        rows, column = gl.load(entry + 1).to(gl.int32), gl.load(entry + 2).to(gl.int32) // 16 * 16
        row, line = gl.load(entry + 4), gl.load(entry + 5).to(gl.int32)
        owner, awaited = gl.load(entry + 6), gl.load(entry + 7).to(gl.int32)
        left = n - column
        asked = [
            words + (line * _LINE + preceding + lanes * 0), epoch + lanes * 0, awaited + lanes * 0, abort + lanes * 0,
            error + lanes * 0, deadline_ns + lanes * 0,
        ]  # fmt: skip
        failed = gl.inline_asm_elementwise(_POLL, "=r,l,r,r,l,l,l", asked, dtype=gl.int32, is_pure=False, pack=1)
        broken = gl.maximum(broken, gl.max(failed, axis=0))
        place = (owner * padded + row) * n // 8 * 8 + column
        slot, target = mine + place, base + place
        if owner == rank:
            target = out + (row * n // 8 * 8 + column)
        limit = gl.where(owner == rank, rows, _GROUPS * PARTS * ROWS)
        found = ()
        for early in gl.static_range(AHEAD):
            found += (_before(slot + early * ROWS * n, awaited, n, left, down, across),)
        for group in range(_GROUPS):
            mbarrier.wait(made.index(group), turn)
            for first in range(0, PARTS, AHEAD):
                for after in gl.static_range(AHEAD):
                    part = group * PARTS + first + after  # of the tile
                    total = product.index(first + after).load(layout).to(gl.float32) + found[0].to(gl.float32)
                    later = part + AHEAD  # under way while this one is stored
                    more = gl.where(later < _GROUPS * PARTS, awaited, 0)
                    found += (_before(slot + later * ROWS * n, more, n, left, down, across),)
                    found = found[1:]
                    if BIAS or ACTIVATION != 0:
                        if owner == rank:
                            if BIAS:
                                total += gl.load(bias + column + across, mask=across < left, other=0.0).to(gl.float32)
                            total = activated(total, ACTIVATION)
                    here = (across < left) & (down < limit - part * ROWS)
                    gl.store(target + part * ROWS * n + (down * n + across), total.to(out.dtype.element_ty), mask=here)
            gl.thread_barrier()  # of this role: all warps have read the product, and one's release covers all stores
            mbarrier.arrive(taken.index(group), count=1)
        tells = (lanes == 0) & (owner != rank) & (broken == 0)
        told = [next_words + (line * _LINE + rank + lanes * 0), epoch + lanes * 0, tells.to(gl.int32)]
        gl.inline_asm_elementwise(RELEASE_EACH, "=r,l,r,r", told, dtype=gl.int32, is_pure=False, pack=1)
        turn ^= 1


_FREE = [
    *("bias", "table", "bases", "word_bases", "words", "epochs", "tiles", "active", "inner", "padded"),
    *("half", "rank", "preceding", "following", "abort", "error", "deadline_ns"),
]


@gluon.jit(do_not_specialize=_FREE)
def fused_chain_kernel(
    a, b, mine, out, bias, table, bases, word_bases, words, epochs, tiles: tl.int32, active: tl.int32, inner: tl.int32,
    n: tl.int32, padded: tl.int32, half: tl.int64, rank: tl.int32, preceding: tl.int32, following: tl.int32, abort,
    error, deadline_ns: tl.int64,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """`a` [M, K] and `b` ([K, N] or, TRANSPOSED, [N, K]) are tensor descriptors.

    `mine`: this rank's own memory, where owner s has `padded` rows of slots behind those of s - 1, for calls of even
    numbers, and `half` elements further for those of odd ones. `bases`, `word_bases`: addresses of all ranks' memory
    and words; `words`: a line here for each tile, where each rank has a word. `preceding`, `following`: the ranks
    before and behind this one in the chain. The first `active` CTAs work; every CTA of the grid, which never changes,
    counts calls in its word of `epochs`.
    """
    program, programs = gl.program_id(0), gl.maximum(active, 1)
    n, half = n // 8 * 8, half // 8 * 8  # they are so already: it tells the compiler
    epoch = gl.load(epochs + program, volatile=True) + 1
    own_tiles = gl.where(program < active, tiles, 0)
    shift = (epoch & 1) * half
    base = gl.multiple_of(gl.load(bases + following).to(out.dtype), 16) + shift
    next_words = gl.load(word_bases + following).to(words.dtype)
    steps = gl.cdiv(inner, BLOCK_K)
    HEIGHT: gl.constexpr = BLOCK_M // _GROUPS  # of a group's half
    a_blocks = gl.allocate_shared_memory(a.dtype, [STAGES * _GROUPS, HEIGHT, BLOCK_K], a.layout)
    if TRANSPOSED:
        b_blocks = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout)
    else:
        b_blocks = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_K, BLOCK_N], b.layout)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    product = gl.allocate_shared_memory(out.dtype.element_ty, [HEIGHT // _ROWS, _ROWS, BLOCK_N], swizzled)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(free.index(stage), count=_GROUPS)
        mbarrier.init(there.index(stage), count=1)
    for group in gl.static_range(_GROUPS):
        mbarrier.init(taken.index(group), count=1)
        mbarrier.init(made.index(group), count=1)
    AHEAD: gl.constexpr = _AHEAD_OF_ACTIVATION if ACTIVATION != 0 else _AHEAD
    gl.warp_specialize([
        (_multiply, (a_blocks, b_blocks, product, free, there, taken, made, program, programs, own_tiles, steps, 0,
                     TRANSPOSED)),
        (_multiply, (a_blocks, b_blocks, product, free, there, taken, made, program, programs, own_tiles, steps, 1,
                     TRANSPOSED)),
        (_pass_on, (product, taken, made, mine + shift, out, bias, table, base, words, next_words, program, programs,
                    own_tiles, n, padded, rank, preceding, epoch, abort, error, deadline_ns, AHEAD, BIAS,
                    ACTIVATION)),
        (_load, (a, b, a_blocks, b_blocks, free, there, table, program, programs, own_tiles, steps, TRANSPOSED)),
    ], [_MULTIPLYING, _PASSING, _LOADING], [_MULTIPLYING_REGISTERS, _OTHER_REGISTERS, _OTHER_REGISTERS])  # fmt: skip
    gl.store(epochs + program, epoch)
