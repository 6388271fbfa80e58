"""CTAs of one launch that stay in step: who has multiplied a tile waits until all others have one of the same wave.

CTAs that run the same wave read the same rows and weights, and find in the L2 cache what another has just read, if they
read it at about the same time. Nothing keeps them together: who is behind finds nothing any more, and falls back
further. On a GPU of its own the cache is large enough for that; where eight ranks share one, with eight sets of
weights, it is not (on an H200 a matmul of K 8192 took up to half as long again).

It is a matter of speed alone: a wait ends after some thousand looks, whatever the others do, and nobody relies on it.
So the count is relaxed, as it carries nothing; the CTA barrier only holds back the loads of the CTA's other warps. The
loads that run ahead of a tile have been issued when it is waited for.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

_LOOKS = 4096

# One piece of text, as in `gemm`: an atomic or a barrier of Triton's own would keep loads from running ahead.
_MEET = tl.constexpr(f"""{{
    .reg .pred other, late;
    .reg .b32 thread, seen, looks;
    mov.u32 thread, %tid.x;
    setp.ne.u32 other, thread, 0;
    @other bra MEET;
    setp.eq.s32 other, $2, 0;
    @other bra MEET;
    red.relaxed.gpu.global.add.s32 [$1], 1;
    mov.u32 looks, {_LOOKS};
AGAIN:
    ld.relaxed.gpu.global.b32 seen, [$1];
    sub.u32 looks, looks, 1;
    setp.lt.s32 late, seen, $2;
    setp.ne.and.u32 late, looks, 0, late;
    @late bra AGAIN;
MEET:
    barrier.sync 0;
    mov.b32 $0, 0;
}}""")


@triton.jit
def keep_step(count, position, tiles, programs):
    """This CTA has the product of the tile at `position`, of `tiles` that `programs` CTAs take in fixed turns. `count`
    is 0 before the first wave; tiles of a last wave that is not full wait for nobody.
    """
    wave = position // programs
    target = tl.where((wave + 1) * programs <= tiles, (wave + 1) * programs, 0)
    tl.inline_asm_elementwise(_MEET, "=r,l,r", [count, target], dtype=tl.int32, is_pure=False, pack=1)
