"""What a GPU's kernels read of a call that posts (`kernels/posted.py`): tiles, parcels and posts, as 64-bit words.

    tiles     row, rows, column, columns of the product; place and stride of what is stored; parcel or signal; expert
    parcels   tiles (or rows), place of the rows here, first row in x or in the result, first post, posts, signal
    posts     to whom, source, place there, elements, signal

Places are those of `posts.py`. A tile's signal, and a parcel's, is NOBODY where nothing is waited for. Tables are
handed out again, so nobody may write to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import fused, fused_order
from .plan import Plan
from .posts import Passed, Rows, Sums, number_of, signal_of
from .tiles import Integers
from .tokens import WHOM, WORD, arriving_tiles, leaving_table

Line = Sequence[int]
NOBODY = -1
TILE_WORDS, PARCEL_WORDS, POST_WORDS = 8, 6, 5


@dataclass(frozen=True, eq=False)
class Leaving:
    """What a launch makes and posts. `tiles`: of the product, none where rows are copied."""

    tiles: Integers
    parcels: Integers
    posts: Integers


@dataclass(frozen=True, eq=False)
class Landing:
    """What a launch waits for: parcels that are brought or summed (their sums perhaps posted), or tiles that are
    multiplied. `numbers`: the signals that are waited for, each once."""

    parcels: Integers
    posts: Integers
    tiles: Integers
    numbers: Integers


def others_of(rank: int, ranks: int) -> list[int]:
    """The ranks behind this one, nearest first."""
    return [(rank + step) % ranks for step in range(1, ranks)]


# -- sums --------------------------------------------------------------------------------------------------------------


@lru_cache(64)
def leaving_products(layout: Sums, plan: Plan, rank: int) -> Leaving:
    """Tiles of the rows of the following ranks, own ones last, which are a parcel that nobody is sent."""
    assert plan.tile is not None
    ranks = len(layout.shards)
    found = fused_order.scatter_table(layout.shards, layout.n, plan, rank, layout.broadcast)
    tiles = np.zeros((len(found), TILE_WORDS), np.int64)
    tiles[:, :4] = found[:, :4]
    tiles[:, 4] = found[:, fused_order.ROW] * layout.n + found[:, fused_order.COLUMN]
    tiles[:, 5] = layout.n
    columns = -(-layout.n // plan.tile[1])
    parcels, posts, first = list[Line](), list[Line](), np.zeros(ranks, np.int64)
    for owner in others_of(rank, ranks):
        first[owner] = len(parcels)
        for number, one in enumerate(layout.parcels[owner]):
            place = layout.product(layout.first(owner) + one.row)
            parcels.append((one.bands * columns, place, 0, len(posts), 1, NOBODY))
            there = layout.landing(owner, rank, one.row)
            posts.append((owner, place, there, one.rows * layout.n, signal_of(rank, number)))
    bands = sum(one.bands for one in layout.parcels[rank])
    parcels.append((bands * columns, layout.product(layout.first(rank)), 0, 0, 0, NOBODY))
    for tile, line in zip(tiles, found.tolist(), strict=True):
        owner, row = line[fused_order.OWNER], line[fused_order.SHARD_ROW]
        tile[6] = len(parcels) - 1 if owner == rank else first[owner] + layout.number(owner, row)
    return Leaving(_kept(tiles), _rows(parcels, PARCEL_WORDS), _rows(posts, POST_WORDS))


@lru_cache(64)
def landing_products(layout: Sums, rank: int) -> Landing:
    """Own parcels, each of which lands from all other ranks, and whose sum goes to all of them (`broadcast`)."""
    ranks, parcels, posts = len(layout.shards), list[Line](), list[Line]()
    for number, one in enumerate(layout.parcels[rank]):
        row = layout.first(rank) + one.row
        to = others_of(rank, ranks) if layout.broadcast else []
        parcels.append((one.rows, layout.product(row), one.row, len(posts), len(to), signal_of(0, number)))
        place = layout.summed(row)
        posts += [(peer, place, place, one.rows * layout.n, signal_of(rank, number, sums=True)) for peer in to]
    numbers = [
        signal_of(source, number) for source in others_of(rank, ranks) for number in range(len(layout.parcels[rank]))
    ]
    return _landing(parcels, posts, numbers)


@lru_cache(64)
def landing_sums(layout: Sums, rank: int) -> Landing:
    """The sums of other ranks, for the result of an all_reduce."""
    parcels = [
        (one.rows, layout.summed(layout.first(owner) + one.row), layout.first(owner) + one.row, 0, 0,
         signal_of(owner, number, sums=True))
        for owner in others_of(rank, len(layout.shards))
        for number, one in enumerate(layout.parcels[owner])
    ]  # fmt: skip
    return _landing(parcels, [], [one[5] for one in parcels])


# -- rows --------------------------------------------------------------------------------------------------------------


@lru_cache(64)
def leaving_rows(layout: Rows, rank: int) -> Leaving:
    """Own rows, to all others: first to the rank in front, which multiplies them first."""
    to = others_of(rank, len(layout.shards))[::-1]
    parcels, posts = list[Line](), list[Line]()
    for number, one in enumerate(layout.parcels[rank]):
        place = layout.place(rank, one.row)
        parcels.append((one.rows, place, one.row, len(posts), len(to), NOBODY))
        posts += [(peer, place, place, one.rows * layout.k, signal_of(rank, number)) for peer in to]
    return Leaving(_rows([], TILE_WORDS), _rows(parcels, PARCEL_WORDS), _rows(posts, POST_WORDS))


@lru_cache(64)
def landing_rows(layout: Rows, n: int, plan: Plan, rank: int) -> Landing:
    """Tiles of own rows, then of those of the following ranks as they land: the first parcel of each, the second, ...
    Rows without columns are waited for by nobody here."""
    grid = fused_order.grid_of(layout.shards, n, plan)
    firsts = np.cumsum([0, *grid.band_counts])
    numbers = [number_of(layout.parcels[int(band[2])], at - int(firsts[band[2]])) for at, band in enumerate(grid.bands)]
    distance = (grid.bands[:, 2] - rank) % len(layout.shards)
    found = fused_order.own_first(grid, np.lexsort((distance, np.array(numbers))), plan, rank)
    tiles = np.zeros((len(found), TILE_WORDS), np.int64)
    tiles[:, :6] = found[:, :6]
    tiles[:, 0] = found[:, fused_order.PLACE] // max(1, n)
    for tile, line in zip(tiles, found[:, fused_order.BAND_LINE].tolist(), strict=True):
        source = int(grid.bands[line, 2])
        tile[6] = NOBODY if source == rank else signal_of(source, numbers[line])
    awaited = [
        signal_of(source, number)
        for source in others_of(rank, len(layout.shards))
        for number in range(len(layout.parcels[source]))
    ]
    return _landing([], [], awaited, tiles)


# -- tokens ------------------------------------------------------------------------------------------------------------


@lru_cache(64)
def leaving_tokens(layout: Passed, plan: Plan, rank: int) -> Leaving:
    """Tiles of the rows for all ranks, expert by expert; own ones are a parcel that nobody is sent."""
    assert plan.tile is not None
    block_m, block_n = plan.tile
    tokens, n = layout.tokens, layout.width
    columns = -(-n // block_n)
    found = leaving_table(tokens, n, plan, rank)
    tiles = np.zeros((len(found), TILE_WORDS), np.int64)
    tiles[:, :4] = found[:, :4]
    tiles[:, 4] = found[:, fused_order.ROW] * n + found[:, fused_order.COLUMN]
    tiles[:, 5], tiles[:, 7] = n, found[:, WHOM] // fused.LINE
    parcels, posts, first = list[Line](), list[Line](), dict[int, int]()
    for to in others_of(rank, tokens.ranks):
        first[to] = len(parcels)
        for number, (one, there) in enumerate(layout.parcels(rank, to)):
            place = layout.leaving(one.row)
            parcels.append((one.bands * columns, place, 0, len(posts), 1, NOBODY))
            posts.append((to, place, layout.landing(there), one.rows * n, signal_of(rank, number)))
    own = int((found[:, WHOM] % fused.LINE == rank).sum())
    parcels.append((own, 0, 0, 0, 0, NOBODY))
    sent = {to: [one for one, _ in layout.parcels(rank, to)] for to in first}
    lines = {to: tokens.lines(to, block_m)[rank] for to in first}
    for tile, whom, word in zip(tiles, found[:, WHOM].tolist(), found[:, WORD].tolist(), strict=True):
        to = whom % fused.LINE
        own_parcel = len(parcels) - 1
        tile[6] = own_parcel if to == rank else first[to] + number_of(sent[to], word // columns - lines[to])
    return Leaving(_kept(tiles), _rows(parcels, PARCEL_WORDS), _rows(posts, POST_WORDS))


@lru_cache(64)
def landing_tokens(layout: Passed, rank: int) -> Landing:
    """Rows of the result: own ones, which stand where they were made, then those of other ranks as they land."""
    parcels = [
        (one.rows, layout.leaving(one.row), there, 0, 0, NOBODY) for one, there in layout.parcels(rank, rank)
    ]  # fmt: skip
    for source in others_of(rank, layout.tokens.ranks)[::-1]:
        for number, (one, there) in enumerate(layout.parcels(source, rank)):
            parcels.append((one.rows, layout.landing(there), there, 0, 0, signal_of(source, number)))
    return _landing(parcels, [], [one[5] for one in parcels if one[5] != NOBODY])


@lru_cache(64)
def leaving_token_rows(layout: Passed, rank: int) -> Leaving:
    """Rows of x for other ranks, which are posted, and own ones, which go to where others' land."""
    parcels, posts = list[Line](), list[Line]()
    for to in others_of(rank, layout.tokens.ranks)[::-1]:
        for number, (one, there) in enumerate(layout.parcels(rank, to)):
            place = layout.leaving(one.row)
            parcels.append((one.rows, place, one.row, len(posts), 1, NOBODY))
            posts.append((to, place, layout.landing(there), one.rows * layout.width, signal_of(rank, number)))
    for one, there in layout.parcels(rank, rank):
        parcels.append((one.rows, layout.landing(there), one.row, 0, 0, NOBODY))
    return Leaving(_rows([], TILE_WORDS), _rows(parcels, PARCEL_WORDS), _rows(posts, POST_WORDS))


@lru_cache(64)
def landing_token_tiles(layout: Passed, n: int, plan: Plan, rank: int) -> Landing:
    """Tiles of the rows that arrive, expert by expert, own ones first in each group."""
    assert plan.tile is not None
    tokens, block_m = layout.tokens, plan.tile[0]
    found = arriving_tiles(tokens, n, plan, rank)
    tiles = np.zeros((len(found), TILE_WORDS), np.int64)
    tiles[:, :6] = found[:, :6]
    tiles[:, 0] = found[:, fused_order.PLACE] // max(1, n)
    tiles[:, 7] = found[:, 7]
    lines = tokens.lines(rank, block_m)
    came = [[one for one, _ in layout.parcels(source, rank)] for source in range(tokens.ranks)]
    for tile, line in zip(tiles, found[:, fused_order.BAND_LINE].tolist(), strict=True):
        tile[6] = NOBODY
        if line != fused_order.OWN:
            source = int(np.searchsorted(lines, line, side="right")) - 1
            tile[6] = signal_of(source, number_of(came[source], line - lines[source]))
    numbers = [
        signal_of(source, number) for source in others_of(rank, tokens.ranks) for number in range(len(came[source]))
    ]
    return _landing([], [], numbers, tiles)


def _landing(
    parcels: Iterable[Sequence[int]],
    posts: Iterable[Sequence[int]],
    numbers: Sequence[int],
    tiles: Integers | None = None,
) -> Landing:
    made = _rows([], TILE_WORDS) if tiles is None else _kept(tiles)
    return Landing(_rows(parcels, PARCEL_WORDS), _rows(posts, POST_WORDS), made, _kept(np.array(numbers, np.int64)))


def _rows(lines: Iterable[Line], words: int) -> Integers:
    return _kept(np.array(list(lines), np.int64).reshape(-1, words))


def _kept(table: Integers) -> Integers:
    table.flags.writeable = False
    return table
