"""A matmul of few rows and its all_reduce in one launch, as `fused_decode`, by warps that have roles.

Such a call lasts as long as its weights take to come, and SMs of one GPU differ by a third in how fast they get them.
So columns are not shared out beforehand: who has room takes the next few, a block. Weights are rows of w^T.

    load        a warp: takes the next block of this rank, and has its weights brought, some along K in a stage, as
                stages become free; with those of the first block comes x, which stays
    multiply    WORKERS warps, each every WORKERS-th stage: a part of x @ w, left in shared memory
    exchange    four warps: the sum of the parts, in their order, rounded, to all ranks as packets; then what all
                ranks sent of columns that were taken a while ago, summed into `out`

Which columns a CTA multiplies changes from call to call; which it sums does not: every `active`-th block of them. It
sums while it still multiplies others, so that in the end only the last few blocks are waited for.

Packets, their places and their turns are those of `fused_decode`: ranks of a group may run either kernel in a call.
Sums are taken in fp32 in the order of ranks, of products that are rounded to the type of x; a product is the sum of
WORKERS parts, always the same ones: results do not depend on who multiplied.

Nobody waits for ever. Blocks are taken in the order of their numbers, and a CTA waits for packets of a block only when
it has sent a later one. Of all blocks that some rank has not sent, the first is being multiplied by a CTA that waits
only for earlier ones, which all ranks have sent.

Memory ordering. Stages, the parts and the numbers of blocks are handed over and back by barriers in shared memory, each
arrived at by one thread behind a barrier of its role's own warps. What comes by bulk copies is read by ordinary loads
behind the wait for their barrier; a stage is free again when its warp has read it, and has a fence behind its reads:
the copy that follows is of another proxy. x is read by each worker only where it waited for the stage that came with
it.

One bit tells phases of a barrier apart only for who has seen the phase before. Of a stage that may have been another
worker's, and still be under way, since copies land in any order. So `there` is two barriers of a stage, for every other
time it is filled. A worker's next stage is at most 2 * WORKERS - 1 further on than its last one, which has come; there
are so many stages at least. So all copies were begun that lie a whole ring before the one it waits for, and those two
rings before, the last ones of that barrier, had been read.

Packets are relaxed, at system scope: each publishes nothing but itself. The
count of blocks taken is relaxed, too: it carries nothing but the number. There are two, for calls of even and of odd
numbers; each call, also of `fused_decode`, clears the other one, which nobody uses before the next call on the stream.
Who does not get what it waits for poisons the result, as in `fused_decode`.
"""

# Triton grows tuples whose types mypy would fix at their first length.
# mypy: ignore-errors
# ruff: noqa: RUF005

from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .combine import activated
from .packets import send, settle
from .poison import count_out, finished_of

WARPS, REGISTERS = 4, 168  # that exchange; of a thread, on average
_WARPS, _WORKERS = gl.constexpr(WARPS), gl.constexpr(4)
_MAILS = gl.constexpr(4)  # numbers of blocks under way between the roles
_LAG = gl.constexpr(2)  # rounds of all CTAs between a block's way and its sum
_TOGETHER = gl.constexpr(4)  # blocks that are summed at once
_WORKER_REGISTERS = gl.constexpr(152)
_LINE = gl.constexpr(32)  # 32-bit words between the counts of either turn

# One lane has the number, the others zero: nobody waits for it before it is looked at.
_TAKE = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane, found;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.b32 found, 0;
    @first atom.relaxed.gpu.global.add.u32 found, [$1], 1;
    mov.b32 $0, found;
}""")


def blocks(x: Any, w: Any, shapes: tuple[list[int], list[int]]) -> tuple[Any, Any]:
    """Tensor descriptors of x [rows, K] and w [N, K] for blocks of these shapes."""
    element = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    found = [
        TensorDescriptor.from_tensor(factor, shape, gl.NVMMASharedLayout.get_default_for(shape, element))
        for factor, shape in zip((x, w), shapes, strict=True)
    ]
    return found[0], found[1]


@gluon.jit
def _post(mail, mail_free, mail_there, slot, turn, block):
    """Tell the other roles of a block, or (less than zero) that there is none any more."""
    each: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(mail_free.index(slot), turn)
    mail.index(slot).store(gl.arange(0, 32, each) * 0 + block)
    gl.thread_barrier()  # of this role: all lanes have stored
    mbarrier.arrive(mail_there.index(slot), count=1)


@gluon.jit
def _read(mail, mail_free, mail_there, slot, turn, WARPS: gl.constexpr):
    """The number of the next block."""
    each: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(mail_there.index(slot), turn)
    block = gl.max(mail.index(slot).load(each), axis=0)
    gl.thread_barrier()  # of this role: all lanes have read
    mbarrier.arrive(mail_free.index(slot), count=1)
    return block


@gluon.jit
def _load(
    x, w, x_blocks, w_blocks, mail, mail_free, mail_there, free, there, taken, program, active, blocks
):  # fmt: skip
    """Blocks of columns, as they are taken: their numbers to all roles, their weights into the stages."""
    STAGES: gl.constexpr = w_blocks.type.shape[0]
    STEPS: gl.constexpr = x_blocks.type.shape[0]
    COLUMNS: gl.constexpr = w_blocks.type.shape[1]
    BLOCK_K: gl.constexpr = w_blocks.type.shape[2]
    each: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, each)
    stage, phase, slot, turn = 0, 1, 0, 1
    block = gl.where(program < active, program, blocks)
    with_x = True  # the first block's stages bring it
    while block < blocks:
        asked = [taken + lanes * 0]
        found = gl.inline_asm_elementwise(_TAKE, "=r,l", asked, dtype=gl.int32, is_pure=False, pack=1)
        _post(mail, mail_free, mail_there, slot, turn, block)
        slot += 1
        turn = gl.where(slot == _MAILS, turn ^ 1, turn)
        slot = gl.where(slot == _MAILS, 0, slot)
        for step in range(STEPS):
            ready = there.index(stage + gl.where(phase == 1, 0, STAGES))  # which of a stage's two: see above
            mbarrier.wait(free.index(stage), phase)
            if with_x:
                mbarrier.expect(ready, w.block_type.nbytes + x.block_type.nbytes)
                tma.async_copy_global_to_shared(x, [0, step * BLOCK_K], ready, x_blocks.index(step))
            else:
                mbarrier.expect(ready, w.block_type.nbytes)
            tma.async_copy_global_to_shared(w, [block * COLUMNS, step * BLOCK_K], ready, w_blocks.index(stage))
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        with_x = False
        block = active + gl.max(found, axis=0)  # which was under way while this block was loaded
    _post(mail, mail_free, mail_there, slot, turn, -1)


@gluon.jit
def _multiply(
    x_blocks, w_blocks, parts, mail, mail_free, mail_there, free, there, summed, made, WORKER: gl.constexpr
):  # fmt: skip
    """This worker's part of every block: out^T [COLUMNS, rows], of its stages along K."""
    STAGES: gl.constexpr = w_blocks.type.shape[0]
    STEPS: gl.constexpr = x_blocks.type.shape[0]
    COLUMNS: gl.constexpr = w_blocks.type.shape[1]
    TALL: gl.constexpr = x_blocks.type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    slot, turn, which, buffer, first = 0, 0, 0, 1, 0
    block = _read(mail, mail_free, mail_there, slot, turn, 1)
    while block >= 0:
        total = gl.zeros((COLUMNS, TALL), gl.float32, layout)
        for step in range(WORKER, STEPS, _WORKERS):
            position = first + step
            stage = position % STAGES
            mbarrier.wait(there.index(position % (2 * STAGES)), position // (2 * STAGES) & 1)
            weights = w_blocks.index(stage).load(gl.DotOperandLayout(0, layout, 2))
            factor = x_blocks.index(step).permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
            total = mma_v2(weights, factor, total)
            fence_async_shared()  # what this lane has read comes before the copy that overwrites it
            gl.thread_barrier()  # of this role: all lanes have read the stage
            mbarrier.arrive(free.index(stage), count=1)
        first += STEPS
        mbarrier.wait(summed.index(which), buffer)
        parts.index(which * _WORKERS + WORKER).store(total)
        gl.thread_barrier()  # of this role: all lanes have stored
        mbarrier.arrive(made.index(which), count=1)
        buffer = gl.where(which == 1, buffer ^ 1, buffer)
        which = 1 - which
        slot += 1
        turn = gl.where(slot == _MAILS, turn ^ 1, turn)
        slot = gl.where(slot == _MAILS, 0, slot)
        block = _read(mail, mail_free, mail_there, slot, turn, 1)


@gluon.jit
def _halves(tile):
    """Columns of even and of odd numbers, each as many rows and half as many columns."""
    ROWS: gl.constexpr = tile.shape[0]
    PAIRS: gl.constexpr = tile.shape[1] // 2
    return gl.split(gl.reshape(tile, (ROWS, PAIRS, 2)))


@gluon.jit
def _value(word, SHIFT: gl.constexpr, ELEMENT: gl.constexpr):
    return (word >> SHIFT).to(gl.int16).to(ELEMENT, bitcast=True).to(gl.float32)


@gluon.jit
def _sum(
    out, bias, packets, first, apart, blocks, rows, wide, plane, epoch, watch, TALL: gl.constexpr, PAIRS: gl.constexpr,
    RANKS: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Blocks of `out`, `apart` from each other, when all ranks have sent them: of each a packet of every rank for each
    thread, all of them polled together. Whether one did not come."""
    ELEMENT: gl.constexpr = out.dtype.element_ty
    each: gl.constexpr = gl.BlockedLayout([1], [32], [_WARPS], [0])
    words = gl.arange(0, TALL * PAIRS, each)
    row = words // PAIRS
    wanted = words * 0
    pointers, places = (), ()
    for one in gl.static_range(_TOGETHER):
        block = first + one * apart
        across = block * PAIRS + words % PAIRS
        here = (row < rows) & (across < wide) & (block < blocks)
        wanted |= gl.where(here, ((1 << RANKS) - 1) << (one * RANKS), 0).to(gl.int32)
        places = places + (across, here)
        for source in gl.static_range(RANKS):
            pointers = pointers + (packets + source * plane + row * wide + across,)
    found = settle(pointers, wanted, words * 0 + epoch, watch)
    for one in gl.static_range(_TOGETHER):
        across, here = places[2 * one], places[2 * one + 1]
        low, high = _value(found[one * RANKS], 0, ELEMENT), _value(found[one * RANKS], 16, ELEMENT)
        for source in gl.static_range(1, RANKS):
            low += _value(found[one * RANKS + source], 0, ELEMENT)
            high += _value(found[one * RANKS + source], 16, ELEMENT)
        if BIAS:
            low += gl.load(bias + 2 * across, mask=here, other=0.0).to(gl.float32)
            high += gl.load(bias + 2 * across + 1, mask=here, other=0.0).to(gl.float32)
        place = row * (2 * wide) + 2 * across
        gl.store(out + place, activated(low, ACTIVATION).to(ELEMENT), mask=here)
        gl.store(out + place + 1, activated(high, ACTIVATION).to(ELEMENT), mask=here)
    return gl.max(found[_TOGETHER * RANKS], axis=0)


@gluon.jit
def _exchange(
    out, bias, bases, packets, parts, mail, mail_free, mail_there, summed, made, program, active, blocks, rows, wide,
    plane, turned, rank, epoch, abort, error, deadline_ns, RANKS: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Every block that was multiplied, to all ranks; this CTA's own blocks of the result. Whether a wait failed."""
    ELEMENT: gl.constexpr = out.dtype.element_ty
    COLUMNS: gl.constexpr = parts.type.shape[1]
    PAIRS: gl.constexpr = COLUMNS // 2
    TALL: gl.constexpr = parts.type.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [_WARPS, 1], [1, 0])
    rows_of = gl.arange(0, TALL, gl.SliceLayout(1, layout))[:, None]
    columns_of = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    down, _ = _halves(rows_of + columns_of * 0)  # as words are laid out
    pair, _ = _halves(columns_of // 2 + rows_of * 0)
    targets = ()
    for step in gl.static_range(RANKS):
        base = gl.load(bases + (rank + step) % RANKS).to(gl.pointer_type(gl.int64))
        targets = targets + (base + (turned + rank * plane),)
    watch = (abort, error, deadline_ns)
    slot, turn, which, buffer = 0, 0, 0, 0
    mine, failed = gl.where(program < active, program, blocks), 0
    block = _read(mail, mail_free, mail_there, slot, turn, _WARPS)
    while block >= 0:
        mbarrier.wait(made.index(which), buffer)
        total = parts.index(which * _WORKERS).permute((1, 0)).load(layout)
        for worker in gl.static_range(1, _WORKERS):
            total += parts.index(which * _WORKERS + worker).permute((1, 0)).load(layout)
        gl.thread_barrier()  # of this role: all warps have read the parts
        mbarrier.arrive(summed.index(which), count=1)
        low, high = _halves(total.to(ELEMENT))
        bits = low.to(gl.uint16, bitcast=True).to(gl.int32) | (high.to(gl.uint16, bitcast=True).to(gl.int32) << 16)
        across = block * PAIRS + pair
        for step in gl.static_range(RANKS):
            send(targets[step] + (down * wide + across), bits, bits * 0 + epoch, (down < rows) & (across < wide))
        while mine + (_TOGETHER - 1 + _LAG) * active <= block:
            status = _sum(out, bias, packets + turned, mine, active, blocks, rows, wide, plane, epoch, watch, TALL,
                          PAIRS, RANKS, BIAS, ACTIVATION)  # fmt: skip
            failed = gl.maximum(failed, status)
            mine += _TOGETHER * active
        buffer = gl.where(which == 1, buffer ^ 1, buffer)
        which = 1 - which
        slot += 1
        turn = gl.where(slot == _MAILS, turn ^ 1, turn)
        slot = gl.where(slot == _MAILS, 0, slot)
        block = _read(mail, mail_free, mail_there, slot, turn, _WARPS)
    while mine < blocks:
        status = _sum(out, bias, packets + turned, mine, active, blocks, rows, wide, plane, epoch, watch, TALL, PAIRS,
                      RANKS, BIAS, ACTIVATION)  # fmt: skip
        failed = gl.maximum(failed, status)
        mine += _TOGETHER * active
    return (failed,)


_FREE = [
    *("bias", "bases", "packets", "epochs", "taken", "active", "rank", "rows", "half", "abort", "error"),
    "deadline_ns",
]


@gluon.jit(do_not_specialize=_FREE)
def fused_stream_kernel(
    x, w, out, bias, bases, packets, epochs, taken, rows: tl.int32, n: tl.int32, active: tl.int32, half: tl.int64,
    rank: tl.int32, abort, error, deadline_ns: tl.int64,
    STEPS: gl.constexpr, STAGES: gl.constexpr, RANKS: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """`x` [rows, K] and `w` [N, K] are tensor descriptors, of which the blocks say how many columns are one, and
    how many elements along K come at once; K has STEPS times so many at most. `out` [rows, N] is contiguous, N even.
    `taken`: how many blocks were, of either turn, LINE words apart.

    `bases`, `packets`, `half`, `epochs`, `active`: as in `fused_decode`.
    """
    gl.static_assert(STAGES >= 2 * _WORKERS - 1, "a worker's way to its next stage")
    program = gl.program_id(0)
    TALL: gl.constexpr = x.block_type.shape[0]
    COLUMNS: gl.constexpr = w.block_type.shape[0]
    BLOCK_K: gl.constexpr = w.block_type.shape[1]
    x_blocks = gl.allocate_shared_memory(x.dtype, [STEPS, TALL, BLOCK_K], x.layout)
    w_blocks = gl.allocate_shared_memory(w.dtype, [STAGES, COLUMNS, BLOCK_K], w.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    parts = gl.allocate_shared_memory(gl.float32, [2 * _WORKERS, COLUMNS, TALL], plain)
    mail = gl.allocate_shared_memory(gl.int32, [_MAILS, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    mail_free = gl.allocate_shared_memory(gl.int64, [_MAILS, 1], mbarrier.MBarrierLayout())
    mail_there = gl.allocate_shared_memory(gl.int64, [_MAILS, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(free.index(stage), count=1)
        mbarrier.init(there.index(stage), count=1)
        mbarrier.init(there.index(STAGES + stage), count=1)
    for slot in gl.static_range(_MAILS):
        mbarrier.init(mail_free.index(slot), count=_WORKERS + 1)
        mbarrier.init(mail_there.index(slot), count=1)
    for which in gl.static_range(2):
        mbarrier.init(summed.index(which), count=1)
        mbarrier.init(made.index(which), count=_WORKERS)
    epoch = gl.load(epochs + program, volatile=True) + 1
    turned = (epoch & 1).to(gl.int64) * half
    wide, blocks = n // 2, gl.cdiv(n, COLUMNS)
    plane = (rows * wide).to(gl.int64)
    if (program == 0) & (active > 0):
        gl.store(taken + (1 - (epoch & 1)) * _LINE, 0)  # for the next call
    outcome = gl.warp_specialize([
        (_exchange, (out, bias, bases, packets, parts, mail, mail_free, mail_there, summed, made, program, active,
                     blocks, rows, wide, plane, turned, rank, epoch, abort, error, deadline_ns, RANKS, BIAS,
                     ACTIVATION)),
        (_multiply, (x_blocks, w_blocks, parts, mail, mail_free, mail_there, free, there, summed, made, 0)),
        (_multiply, (x_blocks, w_blocks, parts, mail, mail_free, mail_there, free, there, summed, made, 1)),
        (_multiply, (x_blocks, w_blocks, parts, mail, mail_free, mail_there, free, there, summed, made, 2)),
        (_multiply, (x_blocks, w_blocks, parts, mail, mail_free, mail_there, free, there, summed, made, 3)),
        (_load, (x, w, x_blocks, w_blocks, mail, mail_free, mail_there, free, there,
                 taken + (epoch & 1) * _LINE, program, active, blocks)),
    ], [1, 1, 1, 1, 1], [_WORKER_REGISTERS] * 5)  # fmt: skip
    failed = outcome[0]
    gl.store(epochs + program, epoch)
    count_out(finished_of(epochs), failed, deadline_ns)
    if failed != 0:  # as `poison.leave`, whose layouts are Triton's
        lanes = gl.arange(0, 1024, gl.BlockedLayout([8], [32], [_WARPS], [0]))
        poison = (lanes * 0 - 1).to(gl.int16).to(out.dtype.element_ty, bitcast=True)
        for start in range(0, rows * n, 1024):
            gl.store(out + start + lanes, poison, mask=start + lanes < rows * n)
