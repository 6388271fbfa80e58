"""Rows that change ranks (all_to_all): whose they are, where they go, which expert's weight multiplies them.

`sizes[sender][receiver][expert]` are rows. A rank's rows stand by the rank at the other end and, in that, by expert:

    what leaves    rows for rank 0 (of expert 0, of expert 1, ...), rows for rank 1, ...
    what arrives   rows from rank 0 (of expert 0, of expert 1, ...), rows from rank 1, ...

Experts are those of the rank that multiplies: of the sender for matmul_all_to_all, of the receiver for
all_to_all_matmul. One weight is one expert. Bands of tiles never straddle two blocks: a block is rows of one expert for
one rank. From these counts alone a sender knows the rows and the words at the receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .fused import LINE
from .fused_order import BAND_LINE, COLUMN, COLUMNS, OWN, PLACE, ROW, ROWS, STRIDE
from .tiles import Integers

if TYPE_CHECKING:
    from .plan import Plan

WHOM, WORD = 6, 7  # columns of a line of `leaving_table`: LINE * expert + receiver, and the tile's word there
EXPERT = 7  # of `arriving_tiles`


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [row, row + rows) of a matrix that go to (or come from) rank `peer` and that `expert` multiplies.

    `there`: their first row in the matrix at the other end.
    """

    row: int
    rows: int
    peer: int
    expert: int
    there: int


@dataclass(frozen=True)
class Tokens:
    """How many rows go from each rank to each, for each expert."""

    sizes: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    def of(sizes: Sequence[Sequence[Sequence[int]]]) -> Tokens:
        return Tokens(tuple(tuple(tuple(int(one) for one in block) for block in row) for row in sizes))

    @staticmethod
    def of_splits(matrix: Sequence[Sequence[int]]) -> Tokens:
        """One weight for all rows: matrix[sender][receiver]."""
        return Tokens(tuple(tuple((int(rows),) for rows in row) for row in matrix))

    @property
    def ranks(self) -> int:
        return len(self.sizes)

    @property
    def experts(self) -> int:
        return len(self.sizes[0][0])

    @cached_property
    def matrix(self) -> list[list[int]]:
        """Rows by sender and receiver."""
        return [[sum(block) for block in row] for row in self.sizes]

    @cached_property
    def back(self) -> Tokens:
        """The way back: what a receiver got, it sends."""
        return Tokens(tuple(zip(*self.sizes, strict=True)))

    @property
    def most(self) -> int:
        """Rows of the rank that receives most."""
        return max(sum(row[rank] for row in self.matrix) for rank in range(self.ranks))

    @property
    def usual_rows(self) -> int:
        """Rows of a block, on average over those that have any; the same on all ranks."""
        found = [one for row in self.sizes for block in row for one in block if one]
        return -(-sum(found) // len(found)) if found else 0

    def leaving(self, rank: int) -> tuple[Block, ...]:
        """Blocks of the rows that `rank` sends, as they stand; empty ones are left out."""
        found, row = [], 0
        for peer, block in enumerate(self.sizes[rank]):
            there = sum(one[peer] for one in self.matrix[:rank])
            for expert, rows in enumerate(block):
                if rows:
                    found.append(Block(row, rows, peer, expert, there))
                row, there = row + rows, there + rows
        return tuple(found)

    def arriving(self, rank: int) -> tuple[Block, ...]:
        """Blocks of the rows that `rank` receives, as they stand."""
        return self.back.leaving(rank)  # the way back leaves as this one arrived

    def lines(self, rank: int, block_m: int) -> tuple[int, ...]:
        """The first band of each sender among those that `rank` receives, and how many there are in the end."""
        counts = [sum(-(-rows // block_m) for rows in row[rank]) for row in self.sizes]
        return tuple(sum(counts[:sender]) for sender in range(self.ranks + 1))

    def most_lines(self, block_m: int) -> int:
        """Bands of the rank that receives most of them."""
        return max(self.lines(rank, block_m)[-1] for rank in range(self.ranks))


def segments(blocks: Sequence[Block], first: int, count: int) -> list[tuple[int, int, int]]:
    """(row, rows, expert) of rows [first, first + count), cut where experts change; neighbours of one expert as one."""
    found: list[tuple[int, int, int]] = []
    for block in blocks:
        start, stop = max(first, block.row), min(first + count, block.row + block.rows)
        if start >= stop:
            continue
        if found and found[-1][2] == block.expert and sum(found[-1][:2]) == start:
            found[-1] = (found[-1][0], stop - found[-1][0], block.expert)
        else:
            found.append((start, stop - start, block.expert))
    return found


def bands_of(blocks: Sequence[Block], block_m: int, of: int) -> list[Block]:
    """Bands of the blocks of one rank, in order."""
    return [
        Block(one.row + row, min(block_m, one.rows - row), one.peer, one.expert, one.there + row)
        for one in blocks
        if one.peer == of
        for row in range(0, one.rows, block_m)
    ]


def _groups(experts: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Bands [start, stop) that are walked together, of these experts in their order: whole experts, while there are no
    more bands than `most`; an expert that has more is cut evenly. So the weights of an expert are read once for each
    `most` bands of it."""
    found: list[tuple[int, int]] = []
    for start, stop in _runs(experts):
        bands = stop - start
        if found and stop - found[-1][0] <= most:
            found[-1] = found[-1][0], stop
        else:
            parts = -(-bands // most)
            found += [(start + bands * one // parts, start + bands * (one + 1) // parts) for one in range(parts)]
    return found


def _runs(experts: Sequence[int]) -> list[tuple[int, int]]:
    """Where each expert's bands begin and end."""
    ends = [at for at in range(1, len(experts) + 1) if at == len(experts) or experts[at] != experts[at - 1]]
    return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def _walk(experts: Sequence[int], columns: int, group_bands: int) -> tuple[Integers, Integers]:
    """Band and column of every tile: groups of bands, column by column, as everywhere."""
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for start, stop in _groups(experts, group_bands):
        band = np.broadcast_to(np.arange(start, stop), (columns, stop - start))
        column = np.broadcast_to(np.arange(columns)[:, None], band.shape)
        found.append((band.reshape(-1), column.reshape(-1)))
    return np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])


def _by_expert(blocks: Sequence[Block], block_m: int, peers: Sequence[int]) -> list[tuple[Block, int]]:
    """Bands of these blocks, each with its number among those of its rank: expert by expert, and the ranks of `peers`
    in that order for each of them. So a weight is not read from memory once for each rank: of few rows the weights are
    most of what is read."""
    found = [(band, number) for peer in peers for number, band in enumerate(bands_of(blocks, block_m, peer))]
    return sorted(found, key=lambda one: one[0].expert)  # which leaves ranks in their order


def _tiles(
    blocks: Sequence[Block], n: int, plan: Plan, peers: Sequence[int]
) -> tuple[Integers, Integers, Integers, Integers]:
    """Of every tile, in order: row, rows, expert, there (four columns); the rank at the other end; the number of its
    band among those of that rank; its first column."""
    assert plan.tile is not None
    block_m, block_n = plan.tile
    bands = _by_expert(blocks, block_m, peers)
    position, column = _walk([one.expert for one, _ in bands], -(-n // block_n), plan.group_bands)
    known = np.array(
        [(one.row, one.rows, one.expert, one.there, one.peer, number) for one, number in bands], np.int64
    ).reshape(-1, 6)[position]  # fmt: skip
    return known[:, :4], known[:, 4], known[:, 5], column * block_n


def _kept(table: Integers) -> Integers:
    table.flags.writeable = False  # it is handed out again
    return table


@lru_cache(64)
def leaving_table(tokens: Tokens, n: int, plan: Plan, rank: int) -> Integers:
    """[tiles, 8]: what the exchange of `rank` computes, in order: expert by expert, groups of bands column by column;
    the bands of a group are first those for the following ranks, then its own.

    row, rows, column, columns of the product; place (of the first element) and stride in the receiver's matrix; LINE *
    expert + the receiver; the tile's word there: its band among those that the receiver gets, in order of senders.
    """
    assert plan.tile is not None
    block_m, block_n = plan.tile
    columns, ranks = -(-n // block_n), tokens.ranks
    peers = [(rank + step) % ranks for step in range(1, ranks + 1)]
    band, to, number, column = _tiles(tokens.leaving(rank), n, plan, peers)
    first = np.array([tokens.lines(one, block_m)[rank] for one in range(ranks)], np.int64)
    table = np.zeros((len(number), 8), np.int64)
    table[:, ROW], table[:, ROWS], table[:, COLUMN] = band[:, 0], band[:, 1], column
    table[:, COLUMNS] = np.minimum(block_n, n - column)
    table[:, PLACE], table[:, STRIDE] = band[:, 3] * n + column, n
    table[:, WHOM] = LINE * band[:, 2] + to
    table[:, WORD] = (first[to] + number) * columns + column // block_n
    return _kept(table)


@lru_cache(64)
def collected_table(tokens: Tokens, n: int, plan: Plan, rank: int) -> Integers:
    """[tiles, 8]: what an exchange brings to `rank`, about in the order in which it is sent: expert by expert, rank
    r - 1 sends to r first.

    row, rows, column, columns of the output; the tile's word; its sender.
    """
    assert plan.tile is not None
    block_m, block_n = plan.tile
    columns, ranks = -(-n // block_n), tokens.ranks
    peers = [(rank - step) % ranks for step in range(1, ranks)]
    band, source, number, column = _tiles(tokens.arriving(rank), n, plan, peers)
    first = np.array(tokens.lines(rank, block_m), np.int64)
    table = np.zeros((len(number), 8), np.int64)
    table[:, ROW], table[:, ROWS], table[:, COLUMN] = band[:, 0], band[:, 1], column
    table[:, COLUMNS] = np.minimum(block_n, n - column)
    table[:, 4], table[:, 5] = (first[source] + number) * columns + column // block_n, source
    return _kept(table)


@lru_cache(64)
def push_table(tokens: Tokens, plan: Plan, rank: int) -> Integers:
    """[bands, 8]: what `rank` pushes, in the order in which it is multiplied, nearest first: as
    `fused_order.push_table`, each band to one rank."""
    assert plan.tile is not None
    block_m, ranks = plan.tile[0], tokens.ranks
    bands = _by_expert(tokens.leaving(rank), block_m, [(rank - step) % ranks for step in range(1, ranks)])
    first = [tokens.lines(to, block_m)[rank] for to in range(ranks)]
    rows = [
        (one.row, one.rows, one.peer, one.there, first[one.peer] + number, 1, one.peer, 1) for one, number in bands
    ]  # fmt: skip
    return _kept(np.array(rows, np.int64).reshape(-1, 8))


@lru_cache(64)
def arriving_tiles(tokens: Tokens, n: int, plan: Plan, rank: int) -> Integers:
    """[tiles, 8]: what an all_to_all_matmul of `rank` multiplies, in order: expert by expert, groups of bands column by
    column; the bands of a group are first own ones, then the following ranks'. So few tiles come before the first that
    waits: what is pushed is there in a small part of the time that the weights take.

    As `fused_order.gather_table`, with the expert; own rows are those of x, others' those of the matrix that arrives.
    """
    assert plan.tile is not None
    block_m, block_n = plan.tile
    peers = [(rank + step) % tokens.ranks for step in range(tokens.ranks)]
    band, source, number, column = _tiles(tokens.arriving(rank), n, plan, peers)
    first = np.array(tokens.lines(rank, block_m), np.int64)
    table = np.zeros((len(number), 8), np.int64)
    table[:, ROW], table[:, ROWS] = np.where(source == rank, band[:, 3], band[:, 0]), band[:, 1]
    table[:, COLUMN], table[:, COLUMNS] = column, np.minimum(block_n, n - column)
    table[:, PLACE], table[:, STRIDE] = band[:, 0] * n + column, n
    table[:, BAND_LINE] = np.where(source == rank, OWN, first[source] + number)
    table[:, EXPERT] = band[:, 2]
    return _kept(table)
