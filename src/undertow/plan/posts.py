"""What fused matmuls post where a destination has no peer pointer, and where it stands: the same memory on all ranks.

A tile is small for a network, and its rows lie apart. What travels are *parcels* of whole bands, which are contiguous:
the last tile of a parcel posts it. A rank has as many of them for each other rank as its plan has (`parts`), at most
PARCELS, or as many as there are bands.

    sums    matmul_reduce_scatter, matmul_all_reduce: the rows of each owner are its parcels
            | this rank's product [M, N] | what lands: [longest shard, N] of each other rank | all_reduce: sums [M, N] |
    rows    all_gather_matmul: the rows of each rank are its parcels, and go to all others
            | all rows [M, K], each rank's at their place |
    tokens  matmul_all_to_all, all_to_all_matmul: the rows of a sender for a receiver are its parcels
            | what leaves | what lands, as it stands in the result |

Everything is counted in elements. A source has a signal on each rank for each of its parcels, and one more for each of
its sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .plan import split
from .tokens import Tokens, bands_of

PARCELS = 64
SIGNALS = 2 * PARCELS  # of each source


def signal_of(source: int, parcel: int, sums: bool = False) -> int:
    """The number of the signal that says on another rank that a parcel (`sums`: its sums) of `source` has landed."""
    return source * SIGNALS + parcel + (PARCELS if sums else 0)


def together(bands: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Which bands [start, stop) travel as one parcel, of so many."""
    return split(bands, min(bands, parts)) if bands else ()


@dataclass(frozen=True)
class Parcel:
    """Rows [row, row + rows) of a rank's shard, in `bands` bands."""

    row: int
    rows: int
    bands: int


def parcels_of(rows: int, block_m: int, parts: int) -> tuple[Parcel, ...]:
    """The parcels of a shard of so many rows."""
    found = together(-(-rows // block_m), parts)
    return tuple(
        Parcel(start * block_m, min(stop * block_m, rows) - start * block_m, stop - start) for start, stop in found
    )


class _Shards:
    """Rows that belong to ranks."""

    shards: tuple[int, ...]
    block_m: int
    parts: int

    @property
    def rows(self) -> int:
        return sum(self.shards)

    def first(self, rank: int) -> int:
        """The first row of a rank's shard."""
        return sum(self.shards[:rank])

    @cached_property
    def parcels(self) -> tuple[tuple[Parcel, ...], ...]:
        """Of every rank."""
        return tuple(parcels_of(rows, self.block_m, self.parts) for rows in self.shards)


@dataclass(frozen=True)
class Sums(_Shards):
    """Products [M, N] of all ranks that are summed by the owners of their rows; `broadcast`: for all."""

    shards: tuple[int, ...]
    block_m: int
    parts: int
    n: int
    broadcast: bool

    @property
    def elements(self) -> int:
        return self.summed(self.rows if self.broadcast else 0)

    @property
    def meets(self) -> bool:
        """Whether every rank has something for every other one: then who has all of a call knows that the others have
        all of the call before."""
        return self.n > 0 and min(self.shards) > 0

    def product(self, row: int) -> int:
        """Where a row of a rank's own product stands."""
        return row * self.n

    def landing(self, owner: int, source: int, row: int) -> int:
        """Where a row of the owner's shard that `source` made lands."""
        slot = (source - owner - 1) % len(self.shards)
        return (self.rows + slot * max(self.shards) + row) * self.n

    def summed(self, row: int) -> int:
        """Where a row of the sum stands on every rank (`broadcast`)."""
        return (self.rows + (len(self.shards) - 1) * max(self.shards) + row) * self.n

    def number(self, owner: int, row: int) -> int:
        """Which of the owner's parcels has this row of its shard."""
        return next(at for at, one in enumerate(self.parcels[owner]) if row < one.row + one.rows)


@dataclass(frozen=True)
class Rows(_Shards):
    """Rows [M, K] that every rank gets."""

    shards: tuple[int, ...]
    block_m: int
    parts: int
    k: int

    @property
    def elements(self) -> int:
        return self.rows * self.k

    @property
    def meets(self) -> bool:
        return self.k > 0 and min(self.shards) > 0

    def place(self, source: int, row: int) -> int:
        """Where a row of a source's shard stands on every rank."""
        return (self.first(source) + row) * self.k


@dataclass(frozen=True)
class Passed:
    """`width` elements of each row that changes ranks."""

    tokens: Tokens
    block_m: int
    parts: int
    width: int

    @property
    def sent(self) -> int:
        """Rows of the rank that sends most."""
        return max(map(sum, self.tokens.matrix))

    @property
    def elements(self) -> int:
        return self.landing(self.tokens.most)

    @property
    def meets(self) -> bool:
        others = [rows for one, row in enumerate(self.tokens.matrix) for to, rows in enumerate(row) if to != one]
        return self.width > 0 and all(others)

    def leaving(self, row: int) -> int:
        """Where a row that a rank sends stands there."""
        return row * self.width

    def landing(self, row: int) -> int:
        """Where a row of a receiver's matrix stands there."""
        return (self.sent + row) * self.width

    def parcels(self, sender: int, receiver: int) -> tuple[tuple[Parcel, int], ...]:
        """Of the rows of one for the other, by rows of what the sender has, each with its first row at the receiver."""
        bands = bands_of(self.tokens.leaving(sender), self.block_m, receiver)
        found = [bands[start:stop] for start, stop in together(len(bands), self.parts)]
        return tuple((Parcel(one[0].row, sum(band.rows for band in one), len(one)), one[0].there) for one in found)


def number_of(parcels: Sequence[Parcel], band: int) -> int:
    """Which parcel has this band, the how many-th of its rank."""
    for at, one in enumerate(parcels):
        band -= one.bands
        if band < 0:
            return at
    raise IndexError("band")
