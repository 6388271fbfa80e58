"""How the gather kernels bring rows: bands of x, in parts of their columns, to where tiles of other ranks read them.

    for band, for part of its columns:
        rows = x[band, part], read once
        for rank it is for: rows of that rank = rows
        words[band, part] of those ranks = epoch

A task is a part of a band, bands in the order of the table. CTAs take them in fixed turns or, where they come to it at
different times (TAKEN), whoever is ready the next that nobody has: `step` is how many CTAs there are, or counts those
taken, relaxed, as it carries nothing but the number.

Memory ordering. A word is released at system scope behind a CTA barrier that follows the stores of its part (`tell`).
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .gemm import ENTRY
from .turns import LINE, tell

_COPIED = tl.constexpr(32 << 10)  # elements that a CTA holds; while they are stored as many more are on their way


@triton.jit
def _place_of(row, rows, into, column, inner, stride, FIRST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of ROWS rows from FIRST on of a band, `WIDTH` columns from `column` on: where they are in x, where they go, and
    which of them there are. The band's `rows` rows begin at `row` of x and at `into` of a gathered matrix.
    """
    down = FIRST + tl.arange(0, ROWS)[:, None]
    across = column + tl.arange(0, WIDTH)[None, :]
    here = (row + down).to(tl.int64) * stride + across
    return here, (into + down).to(tl.int64) * inner + across, (down < rows) & (across < inner)


@triton.jit
def _fetch(
    x, pushes, task, tasks, parts, inner, stride, FIRST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Those elements of a task, or nothing behind the last one."""
    there = task < tasks
    entry = pushes + task // parts * ENTRY
    row = tl.load(entry, mask=there, other=0).to(tl.int32)
    rows = tl.load(entry + 1, mask=there, other=0).to(tl.int32)
    here, _, mask = _place_of(row, rows, 0, task % parts * WIDTH, inner, stride, FIRST, ROWS, WIDTH)
    return tl.load(x + here, mask=mask)


@triton.jit
def bring(
    x, pushes, task, tasks, step, bases, word_bases, turn_row, turn_line, inner, stride, epoch, parts,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """What a CTA brings: the parts from `task` on that are its, each to all ranks that it is for.

    A part is read once, and while some of its rows are stored the next ones are on their way: two of an even number of
    blocks of rows in turn, so that nothing waits before it must be stored. Its word is set while the next part is on
    its way, when its own stores have long arrived.
    """
    ROWS: tl.constexpr = _COPIED // WIDTH if _COPIED // WIDTH < BLOCK_M // 2 else BLOCK_M // 2
    ahead = _fetch(x, pushes, task, tasks, parts, inner, stride, 0, ROWS, WIDTH)
    first, told, offset = 0, 0, 0  # the words of which ranks, and where: of the part before
    while task < tasks:
        if TAKEN:
            following = tl.atomic_add(step, 1, sem="relaxed")
        else:
            following = task + step
        entry, column = pushes + task // parts * ENTRY, task % parts * WIDTH
        rows, into = tl.load(entry + 1).to(tl.int32), turn_row + tl.load(entry + 3).to(tl.int32)
        to, copies = tl.load(entry + 2).to(tl.int32), tl.load(entry + 5).to(tl.int32)
        for top in tl.static_range(0, BLOCK_M, ROWS):
            found = ahead
            if top + ROWS < BLOCK_M:
                ahead = _fetch(x, pushes, task, tasks, parts, inner, stride, top + ROWS, ROWS, WIDTH)
            else:
                ahead = _fetch(x, pushes, following, tasks, parts, inner, stride, 0, ROWS, WIDTH)
            if top == 0:
                tell(word_bases, first, told, offset, epoch, 0)
            _, there, mask = _place_of(0, rows, into, column, inner, stride, top, ROWS, WIDTH)
            base = tl.load(bases + to)
            for copy in range(copies):
                target = tl.multiple_of(base.to(tl.pointer_type(x.dtype.element_ty)), 16)
                base = tl.load(bases + (to + 2 * RANKS - 1 - copy) % RANKS)  # that of the next, in time
                tl.store(target + there, found, mask=mask)
        first, told = tl.load(entry + 6).to(tl.int32), tl.load(entry + 7).to(tl.int32)
        offset = (turn_line + tl.load(entry + 4).to(tl.int32)) * LINE + task % parts
        task = following
    tell(word_bases, first, told, offset, epoch, 0)
