"""A plan: every decision for one call. Executors read it and decide nothing. No torch in here."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument, StrategyUnavailable

if TYPE_CHECKING:
    from .problem import Problem

GRAINS = ("serial", "chunked", "signaled", "fused")
LANES = ("net", "peer", "dma")
DEVICES = ("cpu", "cuda")
LAYOUTS = ("natural", "packed")
OPERATORS = {
    "matmul_all_reduce": "natural",
    "matmul_reduce_scatter": "interleaved",
    "matmul_all_to_all": "proportional",
    "all_gather_matmul": "rotated",
}
"""The order of tiles in each operator's signaled plans; `tiles.py` says what they are."""
TOKENS = "matmul_all_to_all"
"""The operator whose rows change from call to call. Parcels of its plans are fractions."""
EMBEDDING, SLICES = "embedding_all_to_all", "slices"
"""The operator that has no product, and the order of its plans; `bags.py` says what it is."""
ORDERS = (*OPERATORS.values(), SLICES)
OWNERS = ("rows", "columns")
_FUSED_FIELDS = {"piece": 1024, "split": 0, "owners": "rows", "ahead": 0, "pull": False, "in_step": False}
"""What only fused plans have, and what it is elsewhere."""
_LATER = {"in_step": False}
"""What fused plans that were written earlier lack."""


@dataclass(frozen=True, slots=True)
class Share:
    """What each side may use while both run.

    `multiprocessors`: SMs (on a CPU: threads) for computing, None for all. `communication_ctas`: the grid of copies
    that run on SMs, None for the lane's own choice, or (fused) for none apart (of few rows sent at once: for as many as
    usual). `communication_priority`: of streams, lower is more urgent.
    """

    multiprocessors: int | None = None
    communication_ctas: int | None = None
    communication_priority: int = -1


@dataclass(frozen=True, slots=True)
class Plan:
    """`grain` over `lane` with `share`, in `parcels`: ranges [start, stop) in the order in which they leave.

    serial, chunked: `parcels` are rows, cut by fraction in every shard (`tiles.chunks`; with one shard, the rows
    themselves). signaled: positions in the launch order of tiles. There

    - `tile` is (block_m, block_n), and `group_bands` how many bands of tiles are walked column by column together;
    - `order` is how tiles follow each other, `own_last` whether those a rank keeps come last in each parcel;
    - `layout` is where they are stored: "natural", as in the matrix, or "packed", each parcel contiguous.

    fused: each tile moves by itself, so `parcels` is one, [(0, 1)]; where tiles are posted (lanes other than `peer`),
    the bands that a rank has for another travel in so many. `tile`, `group_bands` as above. Where tiles wait for rows,
    `share.communication_ctas` CTAs push them, in pieces of `piece` columns, before they multiply, or (`order`
    "rotated", `brought.py`) while the others multiply all own tiles first, or where all do so before all multiply;
    where owners sum on a GPU, so many do only that (`beside.py`), unless sums go from rank to rank (`order` "rotated",
    `chain.py`); where few rows are sent to all ranks at once, so many small CTAs sum, and those that multiply, one for
    each tile and part of K, are as many as there are, or, of fewer SMs than all, one for each. `split` is for few rows:
    of all_reduce 0 where owners sum, else in how many parts K is cut for a one-shot exchange; of all_gather in how many
    K of the last tiles is, 0: it is not. `owners`: ranks own "rows" or, where few rows are summed by owners
    (all_reduce), "columns". `ahead`: of owned columns on a GPU, elements along K whose weights a call asks for before
    the launch in front of it has ended, 0: it begins after that. A rank's own tiles come last where they wait for the
    others' (`fused.own_last`); elsewhere `order`, and `layout`, are "natural".
    `pull` (all_gather): tiles read rows where their owners keep them, instead of having them pushed here. `in_step`:
    CTAs of a GPU that multiply tiles wait for each other after each, so that they find what they read in its cache.

    Of embedding_all_to_all (`bags.py`), whose order is "slices", parcels are rows of the batch in every grain, cut by
    fraction: parcel k of a destination is a slice. `tile` is (bags of a block, columns) and `group_bands` how many rows
    of a bag are asked for before the first is added; without a tile both follow from the tables that are met.

    `program` names the collective program that moves the parcels, "" none. `deterministic`: sums are taken in rank
    order over lane `net`, too, where the backend would choose one; over the others they always are.
    """

    grain: str
    lane: str
    parcels: tuple[tuple[int, int], ...]
    share: Share = Share()
    tile: tuple[int, int] | None = None
    group_bands: int = 1
    order: str = "natural"
    own_last: bool = False
    layout: str = "natural"
    program: str = ""
    deterministic: bool = False
    piece: int = 1024
    split: int = 0
    owners: str = "rows"
    ahead: int = 0
    pull: bool = False
    in_step: bool = False

    @property
    def name(self) -> str:
        return f"{self.grain}:{self.lane}"

    def posts(self, device: str) -> bool:
        """Whether a GPU's kernel has to ask the proxy to move what it computes: it has no peer pointer, or shall not
        use it."""
        return device == "cuda" and self.grain == "fused" and self.lane != "peer"

    @property
    def extent(self) -> int:
        """What the parcels cover: [0, extent)."""
        return max((stop for _, stop in self.parcels), default=0)

    def to_json(self) -> str:
        fields = asdict(self)
        if self.grain != "fused":  # what others do not have is left out: plans on disk keep their names
            for name in _FUSED_FIELDS:
                del fields[name]
        return json.dumps(fields, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read back what `to_json` wrote; anything else is refused with one sentence."""
        try:
            found = json.loads(text)
            if isinstance(found, dict):
                found = (_LATER if found.get("grain") == "fused" else _FUSED_FIELDS) | found
            fields = _exactly(Plan, found)
            share = Share(**_exactly(Share, fields.pop("share")))
            parcels = tuple(_pair(pair) for pair in fields.pop("parcels"))
            tile = fields.pop("tile")
            plan = Plan(parcels=parcels, share=share, tile=None if tile is None else _pair(tile), **fields)
        except (ValueError, TypeError, RecursionError) as error:
            must = f"a plan in JSON ({error})"
            raise InvalidArgument(argument="plan", was=repr(text)[:80], must=must) from error
        plan.validate()
        return plan

    @property
    def digest(self) -> str:
        """Short hash: equal on all ranks that run the same plan."""
        return _digest(self)

    def validate(self) -> None:
        """Refuse a plan that could be right for no problem at all."""
        if self.grain not in GRAINS or self.lane not in LANES:
            must = f"a grain of {', '.join(GRAINS)} over a lane of {', '.join(LANES)}"
            raise InvalidArgument(argument="plan", was=self.name, must=must)
        limits: tuple[tuple[str, Any, str, bool], ...] = (
            (
                "tile",
                self.tile,
                "two sizes of at least 1",
                self.tile is None or all(_whole(one, 1) for one in self.tile),
            ),
            ("parcels", self.extent, "below 2^31", all(_whole(one, 0) for pair in self.parcels for one in pair)),
            (
                "tile",
                self.tile,
                f"given for a {self.grain} plan",
                self.grain in GRAINS[:2] or self.order == SLICES or self.tile is not None,
            ),
            ("group_bands", self.group_bands, "at least 1", _whole(self.group_bands, 1)),
            ("piece", self.piece, "at least 1", _whole(self.piece, 1)),
            ("split", self.split, "at least 0", _whole(self.split, 0)),
            ("owners", self.owners, f"one of {', '.join(OWNERS)}", self.owners in OWNERS),
            ("ahead", self.ahead, "at least 0", _whole(self.ahead, 0)),
            ("pull", self.pull, "true or false", isinstance(self.pull, bool)),
            ("in_step", self.in_step, "true or false", isinstance(self.in_step, bool)),
            *self._of_its_grain(),
            ("order", self.order, f"one of {', '.join(ORDERS)}", self.order in ORDERS),
            ("layout", self.layout, f"one of {', '.join(LAYOUTS)}", self.layout in LAYOUTS),
            ("program", self.program, "a text", isinstance(self.program, str)),
            ("own_last", self.own_last, "true or false", isinstance(self.own_last, bool)),
            ("deterministic", self.deterministic, "true or false", isinstance(self.deterministic, bool)),
            ("share", self.share, "made of whole numbers, of SMs and CTAs at least 1", _is_share(self.share)),
            ("layout", self.layout, "natural where tiles wait for rows", not self._packs_what_stays()),
        )
        for field, was, must, good in limits:
            if not good:
                raise InvalidArgument(argument=f"plan.{field}", was=repr(was), must=must)

    def _of_its_grain(self) -> list[tuple[str, Any, str, bool]]:
        """What only fused plans have."""
        found = [(name, getattr(self, name), usual) for name, usual in _FUSED_FIELDS.items()]
        fused = self.grain == "fused"
        return [(name, was, f"{usual} unless the grain is fused", fused or was == usual) for name, was, usual in found]

    def _packs_what_stays(self) -> bool:
        return self.grain == "signaled" and self.order == "rotated" and self.layout == "packed"

    def check(self, problem: Problem) -> None:
        """Refuse, with one sentence, a plan that was made for another problem. Costs microseconds."""
        self.validate()
        if problem.operator == EMBEDDING:
            if self.order != SLICES:
                must = f"in {SLICES} order, as {problem.operator} needs"
                raise InvalidArgument(argument="plan", was=f"in {self.order} order", must=must)
            self.check_rows(self.extent or problem.m)  # fractions
            return
        if self.grain == "fused":
            self._check_fused(problem)
            return
        if self.grain in ("serial", "chunked"):
            any_rows = problem.operator == TOKENS and self.extent > 0  # fractions
            self.check_rows(self.extent if any_rows else problem.m)
            return
        if problem.mirrored:
            must = "serial, chunked or fused, as rows of all_to_all_matmul are multiplied when they came"
            raise InvalidArgument(argument="plan", was=self.name, must=must)
        if self.tile is None:
            return
        if self.order != problem.order:
            must = f"in {problem.order} order, as {problem.operator} needs"
            raise InvalidArgument(argument="plan", was=f"in {self.order} order", must=must)
        block_m, block_n = self.tile
        columns = -(-problem.n // block_n)
        tiles = [-(-rows // block_m) * columns for rows in problem.shards]
        wanted = {
            "proportional": self.extent or min(1, sum(tiles)),  # fractions: right for any number of tiles but none
            # fractions, as ranks differ in columns; none only where there are no rows
            "rotated": -(-self.extent // problem.ranks) * problem.ranks or min(1, problem.m),
        }.get(self.order, sum(tiles))
        bounds = [0, *(stop for _, stop in self.parcels)]
        if list(self.parcels) != list(itertools.pairwise(bounds)) or bounds != sorted(bounds) or bounds[-1] != wanted:
            was = f"made for {len(self.parcels)} parcels of {self.extent} tiles in all"
            must = f"made for {wanted} tiles of {block_m} x {block_n}, parcel after parcel"
            raise InvalidArgument(argument="plan", was=was, must=must)
        step = wanted // problem.ranks if self.order == "rotated" else 0
        if step and any(start // step != (stop - 1) // step for start, stop in self.parcels if stop > start):
            was = "of parcels that hold rows of several ranks"
            raise InvalidArgument(argument="plan", was=was, must=f"of parcels inside each {step} positions of a rank")
        literal = self.layout == "natural" and self.order in ("natural", "interleaved")
        if literal and columns and any(bound % columns for bound in bounds):
            must = f"of parcels of whole bands, multiples of {columns} tiles, or packed"
            raise InvalidArgument(argument="plan", was="of natural layout and parcels of other sizes", must=must)

    def _check_fused(self, problem: Problem) -> None:
        from . import brought, chain, fused, posts

        reason = fused.why_not(problem, self.lane)
        if reason:
            raise InvalidArgument(argument="plan", was=f"{self.name}, but {reason}", must="serial, chunked or signaled")
        form = fused.form(problem, self)
        few = problem.m <= fused.MOST_DECODE_ROWS and self.split * problem.ranks <= fused.MOST_PACKETS
        of_few, owned = form in fused.OF_FEW_ROWS, form == fused.OWNED
        tiles = {fused.DECODE: fused.DECODE_TILES, fused.OWNED: fused.OWNED_TILES}.get(form, fused.gpu_tiles(problem))
        tile_fits = problem.device == "cpu" or self.tile in tiles
        if of_few and self.tile is not None:
            tile_fits = tile_fits and self.tile[0] >= problem.m
        whole = problem.operator == "matmul_all_reduce" and not self.split  # sums that every rank gets
        gathers = problem.operator == "all_gather_matmul"  # elsewhere nothing comes in pieces, and K is a rank's own
        pieces = fused.parts(self, problem.k) if gathers else 0
        last = fused.own_last(problem, self.lane)
        most = 1 if self.lane == "peer" else posts.PARCELS
        sums = problem.operator == "matmul_reduce_scatter" and not self.deterministic  # not in rank order
        scatters = sums and self.tile == chain.TILE
        rotates = (gathers or scatters) and problem.bulk and problem.device == "cuda"
        limits: tuple[tuple[str, object, str, bool], ...] = (
            (
                "parcels",
                list(self.parcels),
                f"(0, 1), (1, 2) and so on, at most {most}" if most > 1 else "one: each tile moves by itself",
                self.parcels == alike(len(self.parcels)) and 1 <= len(self.parcels) <= most,
            ),
            (
                "owners",
                self.owners,
                f"rows for a {problem.operator} of split {self.split}",
                self.owners == "rows" or whole,
            ),
            ("owners", self.owners, f"rows over lane {self.lane}", self.owners == "rows" or self.lane == "peer"),
            ("split", self.split, f"0 over lane {self.lane}", self.split == 0 or self.lane == "peer"),
            ("owners", self.owners, f"rows for {problem.m} rows", self.owners == "rows" or few),
            (
                "tile",
                self.tile,
                f"one of {list(tiles)} that holds all rows where K is split or columns are owned",
                tile_fits,
            ),
            (
                "ahead",
                self.ahead,
                f"one of {fused.AHEAD}, and 0 unless owners of columns sum few rows on a GPU with TMA",
                self.ahead == 0 or (owned and problem.bulk and problem.device == "cuda" and self.ahead in fused.AHEAD),
            ),
            (
                "split",
                self.split,
                f"0, or where all CTAs bring pulled rows at once one of {brought.SPLITS}",
                not (gathers and self.split) or (fused.at_once(self) and self.split in brought.SPLITS),
            ),
            (
                "split",
                self.split,
                f"0 for {problem.m} rows and {problem.ranks} ranks",
                gathers or not self.split or few,
            ),
            ("split", self.split, f"0 for {problem.operator}", gathers or not self.split or form == fused.DECODE),
            (
                "piece",
                self.piece,
                f"a power of two from 256 to {fused.WIDEST_PIECE} on a GPU",
                problem.device == "cpu" or self.piece in (256 << one for one in range(7)),
            ),
            ("piece", self.piece, f"such that K of {problem.k} has at most {fused.LINE}", pieces <= fused.LINE),
            (
                "pull",
                self.pull,
                "false unless rows are gathered by ranks that share one GPU",
                not self.pull or (gathers and problem.together),
            ),
            (
                "in_step",
                self.in_step,
                "false unless rows are brought by CTAs that do not multiply meanwhile",
                not self.in_step or fused.brought(problem, self),
            ),
            # What no fused kernel reads must not seem to be chosen.
            (
                "order",
                self.order,
                "natural for a fused plan, or rotated where a GPU with TMA gathers or scatters rows",
                self.order == "natural" or (self.order == "rotated" and rotates),
            ),
            (
                "share.communication_ctas",
                self.share.communication_ctas,
                "None where sums go from rank to rank: nobody only sums",
                gathers or self.order != "rotated" or self.share.communication_ctas is None,
            ),
            ("layout", self.layout, "natural for a fused plan", self.layout == "natural"),
            ("own_last", self.own_last, f"{last} for a fused {problem.operator}", self.own_last == last),
            (
                "share.communication_priority",
                self.share.communication_priority,
                "-1 for a fused plan: it has one stream",
                self.share.communication_priority == -1,
            ),
        )
        for field, was, must, good in limits:
            if not good:
                raise InvalidArgument(argument=f"plan.{field}", was=repr(was), must=must)

    def check_rows(self, rows: int) -> None:
        """Refuse a plan made for another number of rows: its parcels must cover [0, rows) once, in any order."""
        reached = 0
        for start, stop in sorted(self.parcels):
            if start != reached or stop < start:
                break
            reached = stop
        else:
            if reached == rows:
                return
        raise InvalidArgument(
            argument="plan", was=f"made for parcels {list(self.parcels)}", must=f"made for {rows} rows"
        )


def _exactly(kind: type, fields: object) -> dict[str, Any]:
    """`fields` as a dictionary with the names of the dataclass `kind`: none missing, none left over."""
    if not isinstance(fields, Mapping):
        raise TypeError(f"{kind.__name__.lower()} must be a table")
    names = {field.name for field in dataclasses.fields(kind)}
    for what, odd in (("without", names - set(fields)), ("with unknown", set(fields) - names)):
        if odd:
            raise ValueError(f"{kind.__name__.lower()} {what} {', '.join(sorted(odd))}")
    return dict(fields)


def _pair(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(_whole(one, 0) for one in value):
        raise ValueError(f"{value!r} is no pair of whole numbers")
    return value[0], value[1]


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31


def _is_share(share: Share) -> bool:
    counts = (share.multiprocessors, share.communication_ctas)
    return all(one is None or _whole(one, 1) for one in counts) and _whole(share.communication_priority, -(2**31))


def split(count: int, parts: int) -> tuple[tuple[int, int], ...]:
    """`parts` ranges of [0, count) by torch.tensor_split's rule: the first `count % parts` are one longer."""
    size, longer = count // parts, count % parts  # torch.compile knows no divmod of what may change
    bounds = [index * size + min(index, longer) for index in range(parts + 1)]
    return tuple(itertools.pairwise(bounds))


def alike(parts: int) -> tuple[tuple[int, int], ...]:
    """So many parcels of which nothing is known but that they are equal."""
    return split(parts, max(1, parts))


def as_written(strategy: str) -> tuple[str, str]:
    """The grain and the lane, or "" where none is named."""
    grain, colon, lane = strategy.partition(":") if isinstance(strategy, str) else ("", "", "")
    if grain not in GRAINS or (lane not in LANES and colon + lane):
        must = f'"auto", a grain ({", ".join(GRAINS)}) or "grain:lane" with lanes {", ".join(LANES)}'
        raise InvalidArgument(argument="strategy", was=repr(strategy), must=must)
    return grain, lane


def parse_strategy(strategy: str, grains: tuple[str, ...], lanes: dict[str, str], default_lane: str) -> tuple[str, str]:
    """`"grain"` or `"grain:lane"` to a pair that can run here. `lanes` maps a lane to why it is missing, or ""."""
    grain, lane = as_written(strategy)
    lane = lane or default_lane
    possible = ", ".join(f"{one}:{other}" for one in grains for other, missing in lanes.items() if not missing)
    if grain not in grains:
        raise StrategyUnavailable(strategy=strategy, reason=f"this operator has no {grain} form", possible=possible)
    if lanes[lane]:
        raise StrategyUnavailable(strategy=strategy, reason=lanes[lane], possible=possible)
    return grain, lane


@lru_cache(1024)
def _digest(plan: Plan) -> str:
    return hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]
