"""A launch that begins before the one in front of it has ended: it asks for its first weights, then waits.

What comes before `begin_early` must not depend on what the launch in front of it does. Weights may: so they are not
read there, only asked for, into the L2 cache. Whoever writes to them later writes to the same cache, so that what is
read after the wait is always right, whatever was asked for before it.

`let_next_begin` lets the launch behind this one, when all CTAs of this one have said so, take what room is left on the
GPU, which ranks may share. A launch that waits must not hold room which those it waits for still need. So a CTA says it
when it waits for nobody any more; or sooner, when all CTAs of this rank together have had something, in this very call,
from every CTA of every rank: all those run then, and nothing that is launched later keeps them from ending.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Nothing is ordered by it: it moves no data that anybody could see.
_ASK = tl.constexpr("""{
    .reg .pred wanted;
    setp.gt.s32 wanted, $2, 0;
    @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.b32 $0, 0;
}""")

# Relaxed: that the CTA runs is all it says.
_SAY = tl.constexpr("""{
    .reg .pred wanted;
    setp.ne.s32 wanted, $3, 0;
    @wanted st.relaxed.sys.global.b32 [$1], $2;
    mov.b32 $0, 0;
}""")


@triton.jit
def ask(pointers, nbytes):
    """Have these bytes brought into the L2 cache, for each lane with more than none: multiples of 16, as addresses."""
    tl.inline_asm_elementwise(_ASK, "=r,l,r", [pointers, nbytes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask_for_weights(
    weights, b_row, n, column, begin, end, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Elements [begin, end) along K, AHEAD of them at most, of BLOCK_N columns of weights, of 16 bits each.

    `weights` [K, N] or, TRANSPOSED, [N, K]: rows of whole 16 bytes, `b_row` elements apart. What lies behind the last
    column is not asked for, nor the end of a row that is no whole 16 bytes. LANES: the threads of the CTA.
    """
    lanes = tl.arange(0, LANES)
    if TRANSPOSED:
        EACH: tl.constexpr = AHEAD // (LANES // BLOCK_N)
        row, first = column + lanes % BLOCK_N, begin + lanes // BLOCK_N * EACH
        left = tl.where(row < n, tl.minimum(end - first, EACH), 0)
        ask(weights + (row.to(tl.int64) * b_row + first), left // 8 * 16)
    else:
        for some in tl.static_range(0, AHEAD, LANES):
            row = begin + some + lanes
            left = tl.where(row < end, tl.minimum(n - column, BLOCK_N), 0)
            ask(weights + (row.to(tl.int64) * b_row + column), left // 8 * 16)


@triton.jit
def begin_early():
    """Wait until the launch in front has ended, and acquire what it stored. In every CTA: who follows relies on it."""
    gdc_wait()


@triton.jit
def say_running(word_bases, offset, epoch, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Set the word `offset` words behind the bases of all ranks, a thread each. Orders nothing."""
    lanes = tl.arange(0, LANES)
    here = lanes < RANKS
    words = tl.load(word_bases + lanes, mask=here, other=0).to(tl.pointer_type(tl.int32)) + offset
    arguments = [words, tl.zeros_like(lanes) + epoch, here.to(tl.int32)]
    tl.inline_asm_elementwise(_SAY, "=r,l,r,r", arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def let_next_begin():
    gdc_launch_dependents()
