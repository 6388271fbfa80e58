"""What fused kernels share: the word of a tile that left, and the turns that calls take on one stage.

Turns. Memory and words are used in turn by calls of even and of odd numbers. Where every rank waits for a tile of every
other in each call, a rank in call n + 2 knows that nobody still reads what call n left. Where a rank may have nothing
to wait for (tokens that all go one way), a call announces itself to all, and nobody stores for call n before every rank
has announced call n - 1 (`take_turn`): it does so when it is over with call n - 2, as calls of a stream follow each
other. All that was told to a rank in a call is waited for in that call, so nobody sets its words late either.

Memory ordering. An announcement is released at system scope by the first CTA, behind a CTA barrier; the launch orders
it after the loads of the calls before. Every CTA acquires all of them, and a proxy fence orders that before its bulk
stores. A tile's word is released at system scope after what the whole CTA stored for the tile: ordinary stores by a CTA
barrier, bulk stores by the completion and the proxy fence of the threads that issued them (`tell`).
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .gemm import after_bulk_stores
from .signals import has_bulk_copies, proxy_fence, signal_wait_all

LINE = tl.constexpr(32)  # 32-bit words of a tile's or a band's line

_WORD = "st.release.sys.global.b32 [$1], $2;"
# One piece of text, as in `gemm`: an atomic or a barrier of Triton's own would keep loads from running ahead across
# tiles. The barriers are the unaligned kind, as the compiler does not know that they are there.
_AFTER_BULK = tl.constexpr(after_bulk_stores(_WORD))
_FIRST = "    mov.u32 thread"
_AFTER_BOTH = tl.constexpr(after_bulk_stores(_WORD).replace(_FIRST, f"    barrier.sync 0;\n{_FIRST}"))
_AFTER_STORES = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    barrier.sync 0;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.release.sys.global.b32 [$1], $2;
    mov.b32 $0, 0;
}""")
# A word at the same offset in the memory of every rank, after what the whole CTA stored: thread i sets that of rank i.
# Nobody is told of what did not all arrive ($5): who waits for it stops at its own deadline.
_EVERYWHERE = tl.constexpr("""{
    .reg .pred other;
    .reg .b32 thread;
    .reg .b64 place;
    barrier.sync 0;
    mov.u32 thread, %tid.x;
    setp.ge.u32 other, thread, $4;
    @other bra END;
    setp.ne.u32 other, $5, 0;
    @other bra END;
    mad.wide.u32 place, thread, 8, $1;
    ld.global.b64 place, [place];
    add.s64 place, place, $2;
    st.release.sys.global.b32 [place], $3;
END:
    mov.b32 $0, 0;
}""")


@triton.jit
def tell(word, epoch, ORDINARY: tl.constexpr):
    """Set a tile's word. Releases what the CTA stored: in bulk (TMA) and, where ORDINARY, otherwise.

    GPUs without bulk copies have ordinary stores only.
    """
    if not has_bulk_copies():
        tl.inline_asm_elementwise(_AFTER_STORES, "=r,l,r", [word, epoch], dtype=tl.int32, is_pure=False, pack=1)
    elif ORDINARY:
        tl.inline_asm_elementwise(_AFTER_BOTH, "=r,l,r", [word, epoch], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.inline_asm_elementwise(_AFTER_BULK, "=r,l,r", [word, epoch], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def tell_everybody(bases, offset, epoch, failed, RANKS: tl.constexpr):
    """Set the word `offset` bytes behind each of `bases`, unless something failed. Releases what the CTA stored."""
    tl.inline_asm_elementwise(
        _EVERYWHERE, "=r,l,l,r,r,r", [bases, tl.cast(offset, tl.int64), epoch, RANKS, failed],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def take_turn(word_bases, words, epoch, program, rank, abort, error, deadline_ns, RANKS: tl.constexpr):
    """Announce this call to all, in the first line of words, and wait until all have announced the one before."""
    if program == 0:
        tell_everybody(word_bases, rank * 4, epoch, 0, RANKS)
    signal_wait_all(words, epoch - 1, RANKS, rank, abort, error, deadline_ns)
    proxy_fence()
