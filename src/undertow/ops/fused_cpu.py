"""Fused matmuls on a CPU: the thread that computes a tile puts it where it belongs, tile by tile. Nobody else moves.

The same tables, slots and words as the GPU kernels (`fused_cuda.py`), one thread in place of a grid, so what a fused
plan means is tested without a GPU:

    scatter  for tile of the rows of ranks r + 1, r + 2, ..., r:
                 slot r of the owner = x @ w; words[tile, r] of the owner = epoch
                 own tile: wait for words[tile, s] of all s, y = finish(sum over s of slots s)
             all_reduce: the sum stays where all can read it; all copy the others' sums in the end
    gather   for rank r - 1, r - 2, ...: its rows r = x, band after band
             for tile of own rows, then of ranks r + 1, ...: wait for the band, y = finish(x @ w)
    decode   for block of columns, part of K: slot of every rank = x @ w;   y = finish(sum over all slots)
    owned    as scatter (all_reduce), of few rows: tiles are blocks of columns that belong to ranks in turn
    Rows that change ranks (all_to_all): `tokens_cpu.py`. Where there is no peer pointer: `posted_cpu.py`.

Memory and words are used in turn by two calls. A call announces itself to all; nobody writes for call n before the
receiver has announced call n - 1, which it does when it is over with call n - 2. A call is over when all that was told
to this rank has been waited for: so nobody still writes for call n - 2 either, even where a word has another writer in
every call, as lines belong to other ranks in other shapes. Setting a word releases the stores before it; a wait
acquires them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..fabric import timeline
from ..plan import fused, fused_order
from . import posted_cpu
from .finish import Finish
from .tiles_cpu import add, multiply_tile, part_of

if TYPE_CHECKING:
    from ..fabric.base import Fabric
    from ..fabric.group import Group
    from ..fabric.signals import Signals
    from ..fabric.symmetric import SymmetricBuffer
    from ..plan.plan import Plan
    from ..plan.problem import Problem
    from .beside import Taking

_STAGES = object()  # name of what is kept with a fabric


@dataclass
class Stage:
    """Two halves of `half` elements on every rank, a word of every rank for calls begun, 2 × `words`, the call."""

    data: SymmetricBuffer
    half: int
    signals: Signals
    words: int
    epoch: int = 0


def room(fabric: Fabric, kind: str, dtype: torch.dtype, elements: int, words: int) -> Stage:
    """The stage for calls of `kind` with so many elements and words in a half, the same on all ranks.

    Collective where it is made or grown. What cannot be allocated on one rank is refused on all, and ends nothing.
    """
    stages: dict[tuple[str, torch.dtype], Stage] = fabric.kept.setdefault(id(_STAGES), {})  # type: ignore[assignment]
    stage = stages.get((kind, dtype))
    if stage is not None and stage.half >= elements and stage.words >= words:
        return stage
    half, held = max(1024, 2 * elements), max(64, 2 * words)
    if stage is not None:
        half, held = max(half, stage.half), max(held, stage.words)
        fabric.group.barrier()  # nobody reads the old one any more
        del stages[kind, dtype]
        stage.data.release()
        stage.signals.release()
    data = fabric.buffer(2 * half, dtype)
    try:
        signals = fabric.signals(fabric.group.size + 2 * held)
    except BaseException:
        data.release()
        raise
    stage = stages[kind, dtype] = Stage(data, half, signals, held)
    fabric.group.barrier()
    return stage


class Turn:
    """One call on a stage."""

    def __init__(self, group: Group, stage: Stage) -> None:
        self.size, self.rank = group.size, group.rank
        stage.epoch += 1
        self._stage, self._base = stage, (stage.epoch & 1) * stage.half
        self._words = self.size + (stage.epoch & 1) * stage.words
        self._open: set[int] = {self.rank}
        for peer in range(self.size):
            if peer != self.rank:
                stage.signals.set(peer, self.rank, stage.epoch)

    def half(self, rank: int) -> torch.Tensor:
        """This turn's memory of a rank."""
        return self._stage.data.peer(rank)[self._base : self._base + self._stage.half]

    def slot(self, rank: int, first: int, rows: int, columns: int) -> torch.Tensor:
        return self.half(rank)[first : first + rows * columns].view(rows, columns)

    def open(self, rank: int) -> None:
        """Wait until `rank` is over with the call before the last, whose memory this one writes to."""
        if rank not in self._open:
            self._stage.signals.wait(rank, self._stage.epoch - 1, rank)
            self._open.add(rank)

    def open_all(self) -> None:
        """Wait until all ranks are over with the call before the last, so that nobody still reads what is here."""
        for rank in range(self.size):
            self.open(rank)

    def tell(self, rank: int, word: int) -> None:
        self._stage.signals.set(rank, self._words + word, self._stage.epoch)

    def wait(self, word: int, sender: int) -> None:
        self._stage.signals.wait(self._words + word, self._stage.epoch, sender)


def prepare(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    arriving: Taking | None = None,
) -> Callable[[], None]:
    """The whole call of any operator but all_to_all, with room made for it: what does it, once."""
    # What needs whole rows comes in the end, and bias and activation with it.
    now = finish if finish.after is None else Finish(None, "none")
    form = fused.form(problem, plan)
    if plan.lane != "peer":
        if form == fused.GATHER:
            call = posted_cpu.rows(x, w, y, problem, plan, now, fabric, arriving)
        else:
            call = posted_cpu.sums(x, w, y, problem, plan, now, fabric)
    elif form == fused.GATHER:
        call = _gather(x, w, y, problem, plan, now, fabric, arriving)
    elif form == fused.DECODE:
        call = _decode(x, w, y, problem, plan, now, fabric)
    else:
        call = _scatter(x, w, y, problem, plan, now, fabric)

    def whole() -> None:
        call()
        if finish.after is not None:
            finish.apply(y)

    return whole


def _scatter(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: Fabric
) -> Callable[[], None]:
    assert plan.tile is not None
    rank, size, n = fabric.group.rank, fabric.group.size, problem.n
    broadcast = problem.operator == "matmul_all_reduce"
    if fused.form(problem, plan) == fused.OWNED:
        padded, lines = problem.m, -(-n // plan.tile[1])
        made = fused_order.column_table(problem.m, n, plan, size, rank)
    else:
        shards = fused.owned(problem, plan)
        padded = fused.padded_rows(shards, plan)
        lines = sum(-(-rows // plan.tile[0]) for rows in shards) * -(-n // plan.tile[1])
        made = fused_order.scatter_table(shards, n, plan, rank, broadcast)
    plane = padded * n
    stage = room(fabric, "scatter", x.dtype, (size + 1) * plane, lines * (size + 1))

    def call() -> None:
        turn = Turn(fabric.group, stage)
        table = made.tolist()
        sums = size * plane  # where a rank keeps what it has summed
        for row, rows, column, columns, shard_row, line, owner, out_row in table:
            if owner == rank:
                turn.open_all()  # others may have read sums here
            turn.open(owner)
            slot = part_of(turn.slot(owner, rank * plane, padded, n), shard_row, rows, column, columns)
            multiply_tile(x[row : row + rows], w[:, column : column + columns], slot)
            turn.tell(owner, line * size + rank)
            if owner != rank:
                continue
            parts = []
            for source in range(size):
                turn.wait(line * size + source, source)
                parts.append(part_of(turn.slot(rank, source * plane, padded, n), shard_row, rows, column, columns))
            out = part_of(y, out_row, rows, column, columns)
            with timeline.event("sum", engine="communication", bytes=out.nbytes):
                add(out, parts, finish, column)
            if broadcast:
                part_of(turn.slot(rank, sums, padded, n), shard_row, rows, column, columns).copy_(out)
                for peer in range(size):
                    turn.tell(peer, lines * size + line)
        if broadcast:
            for _, rows, column, columns, shard_row, line, owner, out_row in table:
                if owner != rank:
                    turn.wait(lines * size + line, owner)
                    summed = part_of(turn.slot(owner, sums, padded, n), shard_row, rows, column, columns)
                    part_of(y, out_row, rows, column, columns).copy_(summed)

    return call


def _gather(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    problem: Problem,
    plan: Plan,
    finish: Finish,
    fabric: Fabric,
    arriving: Taking | None,
) -> Callable[[], None]:
    assert plan.tile is not None
    block_m, block_n = plan.tile
    rank, size, n, k, shards = fabric.group.rank, fabric.group.size, problem.n, problem.k, problem.shards
    bands = [-(-rows // block_m) for rows in shards]
    firsts = [sum(shards[:source]) for source in range(size)]
    parts = max(1, fused.parts(plan, k))
    stage = room(fabric, "gather", x.dtype, problem.m * k, sum(bands) * parts)

    def call() -> None:
        turn = Turn(fabric.group, stage)
        gathered = turn.slot(rank, 0, problem.m, k)
        gathered[firsts[rank] : firsts[rank] + shards[rank]] = x
        if arriving is not None:
            arriving.begin(gathered)
        first_line = fused_order.first_line(shards, plan, rank)
        for step in range(1, size):
            to = (rank - step) % size
            turn.open(to)
            theirs = turn.slot(to, 0, problem.m, k)[firsts[rank] : firsts[rank] + shards[rank]]
            for band in range(bands[rank]):
                rows = slice(band * block_m, (band + 1) * block_m)
                for part in range(parts):
                    columns = slice(part * plan.piece, (part + 1) * plan.piece)
                    theirs[rows, columns] = x[rows, columns]
                    turn.tell(to, (first_line + band) * parts + part)
        here: set[int] = set()

        def awaited(source: int, line: int) -> None:
            if source != rank and line not in here:
                for part in range(parts):
                    turn.wait(line * parts + part, source)
                here.add(line)

        table = fused_order.rotated_table(shards, n, plan, rank).tolist()
        position = 0
        for step in range(size):
            source = (rank + step) % size
            for _ in range(bands[source] * -(-n // block_n)):
                row, rows, column, columns, _, _, line, _ = table[position]
                position += 1
                awaited(source, line)
                first = row + (firsts[rank] if source == rank else 0)
                out = part_of(y, first, rows, column, columns)
                multiply_tile(gathered[first : first + rows], w[:, column : column + columns], out, finish, column)
            if arriving is not None:
                for band in range(bands[source]):
                    awaited(source, sum(bands[:source]) + band)
                arriving.add([(firsts[source], shards[source])])
        for source in range(size):  # also without columns: the call is over when all rows are here
            for band in range(bands[source]):
                awaited(source, sum(bands[:source]) + band)

    return call


def _decode(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, problem: Problem, plan: Plan, finish: Finish, fabric: Fabric
) -> Callable[[], None]:
    assert plan.tile is not None
    rank, size, n, m = fabric.group.rank, fabric.group.size, problem.n, problem.m
    block_n, parts = plan.tile[1], plan.split
    blocks = -(-n // block_n)
    plane, sources = m * n, size * parts
    stage = room(fabric, "decode", x.dtype, sources * plane, blocks * sources)

    def call() -> None:
        turn = Turn(fabric.group, stage)
        inner = -(-x.shape[1] // parts)
        for block in range(blocks):
            column, columns = block * block_n, min(block_n, n - block * block_n)
            for part in range(parts):
                along = slice(part * inner, (part + 1) * inner)
                product = x[:, along] @ w[along, column : column + columns]
                for step in range(size):
                    to = (rank + step) % size
                    turn.open(to)
                    slot = turn.slot(to, (rank * parts + part) * plane, m, n)
                    slot[:, column : column + columns] = product
                    turn.tell(to, block * sources + rank * parts + part)
        for block in range(blocks):
            column, columns = block * block_n, min(block_n, n - block * block_n)
            found = []
            for source in range(sources):
                turn.wait(block * sources + source, source // parts)
                found.append(turn.slot(rank, source * plane, m, n)[:, column : column + columns])
            add(y[:, column : column + columns], found, finish, column)

    return call
