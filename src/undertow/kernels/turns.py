"""What fused kernels share: the word of a tile that left, and the turns that calls take on one stage.

Turns. Memory and words are used in turn by calls of even and of odd numbers. Where every rank waits for a tile of every
other in each call, a rank in call n + 2 knows that nobody still reads what call n left. Where a rank may have nothing
to wait for (tokens that all go one way), a call announces itself to all, and nobody stores for call n before every rank
has announced call n - 1 (`take_turn`): it does so when it is over with call n - 2, as calls of a stream follow each
other. All that was told to a rank in a call is waited for in that call, so nobody sets its words late either.

Memory ordering. An announcement is released at system scope by the first CTA, behind a CTA barrier; the launch orders
it after the loads of the calls before. Every CTA acquires all of them before it stores, and a proxy fence orders that
before its bulk copies. A tile's word is released at system scope, behind a CTA barrier that follows what the whole CTA
stored for the tile (`tell`).
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .signals import proxy_fence, signal_wait_all

LINE = tl.constexpr(32)  # 32-bit words of a tile's or a band's line

# The word at the same offset in the memory of $2 ranks from rank $1's on, after what the whole CTA stored: a thread
# each. One piece of text, as in `gemm`: an atomic or a barrier of Triton's own would keep loads from running ahead
# across tiles. The barrier is the unaligned kind, as the compiler does not know that it is there. Nobody is told of
# what did not all arrive ($6): who waits for it stops at its own deadline.
_TELL = tl.constexpr("""{
    .reg .pred other;
    .reg .b32 thread;
    .reg .b64 place;
    barrier.sync 0;
    mov.u32 thread, %tid.x;
    setp.ge.u32 other, thread, $3;
    @other bra END;
    setp.ne.u32 other, $6, 0;
    @other bra END;
    add.u32 thread, thread, $2;
    mad.wide.u32 place, thread, 8, $1;
    ld.global.b64 place, [place];
    mad.wide.s32 place, $4, 4, place;
    st.release.sys.global.b32 [place], $5;
END:
    mov.b32 $0, 0;
}""")


@triton.jit
def tell(bases, first, count, offset, epoch, failed):
    """Set the word `offset` words behind the bases of ranks [first, first + count), unless something failed.

    Releases, at system scope, what the whole CTA stored before, by ordinary stores.
    """
    tl.inline_asm_elementwise(
        _TELL, "=r,l,r,r,r,r,r", [bases, first, count, offset, epoch, failed], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def take_turn(word_bases, words, epoch, program, rank, abort, error, deadline_ns, RANKS: tl.constexpr):
    """Announce this call to all, in the first line of words, and wait until all have announced the one before."""
    if program == 0:
        tell(word_bases, 0, RANKS, rank, epoch, 0)
    signal_wait_all(words, epoch - 1, RANKS, rank, abort, error, deadline_ns)
    proxy_fence()
