"""Rank r pools the bags of its tables for all samples; each rank gets the pooled rows of its own samples.

| what | shape on each rank |
|---|---|
| tables | any number of [rows, dim], each rank its own; or `Shard`s, rows or columns of a table |
| values, offsets | bags of all samples for the rank's first table, then for its second, ...: [T * B + 1] offsets |
| y | [B_r, sum of all dims]: this rank's samples, the columns of tables 0, 1, ... of the whole group |

    y[b, columns of t] = sum over l in bag (t, b) of weights[l] * table_t[values[l]]             ("mean": / its length)

B = sum of B_r is the global batch: rank 0's samples come first. Sums are taken in fp32 (fp64 for fp64) and rounded
once; where rows of a table are spread over ranks each rank's part is rounded, and the sum of the parts once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import settings
from ..errors import InvalidArgument
from ..fabric.base import poison
from ..fabric.group import Group
from ..fabric.registry import as_group
from ..plan.bags import Layout, Piece
from ..plan.plan import EMBEDDING, GRAINS, Plan, split
from ..plan.problem import Problem
from .bags import (
    POOLINGS,
    Bags,
    Shard,
    check_apart,
    check_bags,
    check_tables,
    offsets_of,
    pieces_of,
    tables_of,
)
from .choose import Request, perform
from .differentiable import refuse_in_place
from .embedding_gradients import Backward, Lookup, RowOptimizer
from .embedding_run import pool_all, run
from .explain import explain
from .operands import dtype_name
from .telling import tell

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


Tables = Sequence[torch.Tensor | Shard]


def reference(
    tables: Sequence[Sequence[torch.Tensor]],
    values: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    batches: Sequence[int],
    weights: Sequence[torch.Tensor] | None = None,
    pooling: str = "sum",
) -> list[torch.Tensor]:
    """The meaning, as a plain loop: what every rank gets. Arguments are those of ranks 0, 1, ...: whole tables."""
    samples, rows, device = sum(batches), [], values[0].device
    for sample in range(samples):
        parts = []
        for rank, held in enumerate(tables):
            for number, table in enumerate(held):
                bag = number * samples + sample
                begin, end = int(offsets[rank][bag]), int(offsets[rank][bag + 1])
                total = torch.zeros(table.shape[1], dtype=torch.float64, device=device)
                for place in range(begin, end):
                    scale = 1.0 if weights is None else float(weights[rank][place])
                    total += scale * table[int(values[rank][place])].double()
                if pooling == "mean" and end > begin:
                    total /= end - begin
                parts.append(total)
        rows.append(torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device))
    width = sum(table.shape[1] for held in tables for table in held)
    dtype = next((table.dtype for held in tables for table in held), torch.float32)
    whole = torch.stack(rows).to(dtype) if rows else torch.zeros(0, width, dtype=dtype, device=device)
    return list(torch.split(whole, list(batches)))


def embedding_layout(tables: Tables, group: Group | dist.ProcessGroup | DeviceMesh | str | None = None) -> Layout:
    """Who holds what, told to each other once. Collective; a call that is given it need not ask again."""
    on = as_group(group)
    try:
        check_tables(tables, on.device)
    except InvalidArgument as error:
        return _layout(tables, on, error)
    return _layout(tables, on, None)


def _layout(tables: Tables, on: Group, trouble: InvalidArgument | None) -> Layout:
    mine: list[Any] = ["", False, []]
    if tables and trouble is None:
        mine = [dtype_name(tables_of(tables)[0]), isinstance(tables[0], Shard), pieces_of(tables, 0)]
    told = tell(on, mine, trouble, "which tables ranks hold")
    holders = [rank for rank, (name, _, _) in enumerate(told) if name]
    if not holders:
        raise InvalidArgument(argument="tables", was="empty on all ranks", must="of at least one rank")
    for rank in holders:
        for what, one, first in zip(("of dtype", "given as shards:"), told[rank], told[holders[0]], strict=False):
            if one != first:
                must = f"{what} {first}, as on rank {holders[0]}"
                raise InvalidArgument(argument=f"tables of rank {rank}", was=f"{what} {one}", must=must)
    held, count = [], 0
    for _, sharded, pieces in told:
        held.append(tuple(Piece(one[0] if sharded else one[0] + count, *one[1:]) for one in pieces))
        count += len(pieces)
    return Layout(tuple(held), told[holders[0]][0])


def embedding_all_to_all(
    tables: Tables,
    values: torch.Tensor,
    offsets: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    pooling: str = "sum",
    *,
    batches: Sequence[int] | None = None,
    layout: Layout | None = None,
    sparse: bool = False,
    divide_gradients: bool = False,
    optimizer: RowOptimizer | None = None,
    group: Group | dist.ProcessGroup | DeviceMesh | str | None = None,
    strategy: str = "auto",
    plan: Plan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pooled lookups in tables that ranks hold -> [B_r, sum of dims]: this rank's samples, of all tables.

    Exactly one of `offsets` (one more than bags) and `lengths`. `weights`: one for each value, "mean" divides by the
    number of values all the same. `batches`: samples of each rank, None for B cut by torch.tensor_split. `layout`, from
    `embedding_layout`, and `batches` spare ranks from telling each other in every call under torch.no_grad().

    Gradients (`embedding_gradients.py`): of tables dense, or `sparse`; divided by the number of ranks if TorchRec's
    convention is wanted; or none, and an `optimizer` steps rows in the backward pass. The backward pass exchanges
    gradients, so if one rank asks for some, all have a backward pass, whatever their own tables want; if none does, no
    rank has. torch.no_grad() is for all ranks or for none.

    On a GPU the indices are looked at only under UNDERTOW_CHECK=1; one out of range reads nothing and counts as absent.
    The result may stand on memory that torch's allocator does not know: where another stream reads it, the current one
    must wait for that before the result is dropped (`record_stream` does nothing here).
    """
    on = as_group(group)
    given = _Given(tables, values, offsets, lengths, weights, pooling, batches, optimizer, out)
    bags, found, sizes, wanted = arguments(given, layout, on)
    if not wanted:
        return call(bags, found, sizes, on, strategy, plan, out)
    divisor = on.size if divide_gradients else 1

    def forward() -> tuple[torch.Tensor, str]:
        y = call(bags, found, sizes, on, strategy, plan)
        ran = explain(group=on.name)
        assert ran is not None
        return y, ran.plan.lane  # gradients take the way back

    backward = Backward(on.fabric, bags, found, sizes, forward, sparse, divisor, optimizer)
    anchor = torch.empty(0, device=on.device, requires_grad=True)  # ranks without tables have a backward pass, too
    return Lookup.apply(backward, anchor, weights, *bags.tables)  # type: ignore[no-any-return,no-untyped-call]


class _Given(NamedTuple):
    """What the caller gave, on this rank."""

    tables: Tables
    values: torch.Tensor
    offsets: torch.Tensor | None
    lengths: torch.Tensor | None
    weights: torch.Tensor | None
    pooling: str
    batches: Sequence[int] | None
    optimizer: RowOptimizer | None
    out: torch.Tensor | None

    @property
    def name(self) -> str:
        """Of the argument that says how many bags there are."""
        return "offsets" if self.offsets is not None else "lengths"

    @property
    def wants(self) -> bool:
        """Whether this rank asks for gradients, or for steps in their place."""
        asking = (*tables_of(self.tables), self.weights)
        return self.optimizer is not None or any(one is not None and one.requires_grad for one in asking)


def arguments(given: _Given, layout: Layout | None, on: Group) -> tuple[Bags, Layout, tuple[int, ...], bool]:
    """All arguments checked, the samples of each rank, and whether any rank wants gradients: then all take part.

    Where ranks tell each other anything (always, but under torch.no_grad() with `layout` and `batches`), a rank whose
    own arguments are wrong tells it before it raises.
    """
    trouble, places = None, given.values
    try:
        places = _places(given, on)
    except InvalidArgument as error:
        trouble = error
    if layout is None:
        layout, trouble = _layout(given.tables, on, trouble), None
    samples = None
    try:
        if trouble is None:
            samples = _samples(given, places, layout, on)
    except InvalidArgument as error:
        trouble = error
    sizes = None if given.batches is None else tuple(map(int, given.batches))
    if sizes is None or torch.is_grad_enabled():
        wants = torch.is_grad_enabled() and trouble is None and given.wants
        told = tell(on, [samples, wants, given.out is not None], trouble, "samples, and who wants gradients")
    elif trouble is not None:
        raise trouble
    else:
        told = []
    sizes = _cut([one for one, _, _ in told], given.name, on) if sizes is None else sizes
    wanted = any(wants for _, wants, _ in told)
    if wanted:
        rank = next((rank for rank, (_, _, in_place) in enumerate(told) if in_place), on.rank)
        refuse_in_place(**{"out" if rank == on.rank else f"out of rank {rank}": told[rank][2] or None})
    return _bags(given, places, layout, on, sum(sizes)), layout, sizes, wanted


def _places(given: _Given, on: Group) -> torch.Tensor:
    """The offsets; checks what needs no layout."""
    if given.pooling not in POOLINGS:
        raise InvalidArgument(argument="pooling", was=repr(given.pooling), must=f"one of {', '.join(POOLINGS)}")
    check_tables(given.tables, on.device)
    if given.optimizer is not None:
        check_apart(tables_of(given.tables))
    if given.values.device != on.device:
        raise InvalidArgument(argument="values", was=f"on {given.values.device}", must=f"on {on.device}")
    return offsets_of(given.values, given.offsets, given.lengths, given.weights)


def _samples(given: _Given, places: torch.Tensor, layout: Layout, on: Group) -> int | None:
    """Of every table; None on a rank without tables. Checks all that the layout tells."""
    held, count = layout.held[on.rank], len(given.tables)
    mine = pieces_of(given.tables, held[0].table if held else 0)
    if tuple(Piece(*one) for one in mine) != held:
        raise InvalidArgument(argument="tables", was=f"of pieces {mine}", must=f"those of the layout, {list(held)}")
    if count and (dtype := dtype_name(tables_of(given.tables)[0])) != layout.dtype:
        raise InvalidArgument(argument="tables", was=f"of {dtype}", must=f"of {layout.dtype}, as the layout says")
    bag_count = places.numel() - 1
    if bag_count % max(1, count) or (count == 0 and bag_count):
        must = f"as many for each of the {count} tables"
        raise InvalidArgument(argument=given.name, was=f"for {bag_count} bags", must=must)
    samples = bag_count // count if count else None
    if given.batches is not None:
        _check_batches(given, samples, on)
    if on.device.type == "cpu" or settings.CHECK.is_on():
        check_bags(_bags(given, places, layout, on, samples or 0), layout)
    return samples


def _bags(given: _Given, places: torch.Tensor, layout: Layout, on: Group, samples: int) -> Bags:
    weights = None if given.weights is None else given.weights.contiguous()  # kernels know no strides
    return Bags(tables_of(given.tables), layout.held[on.rank], given.values.contiguous(), places.contiguous(), weights,
                given.pooling, samples)  # fmt: skip


def _check_batches(given: _Given, samples: int | None, on: Group) -> None:
    sizes = tuple(map(int, given.batches or ()))
    if len(sizes) != on.size or min(sizes) < 0:
        must = f"{on.size} counts of at least 0"
        raise InvalidArgument(argument="batches", was=str(list(sizes)), must=must)
    if samples is not None and sum(sizes) != samples:
        must = f"for {sum(sizes)} samples of every table, as batches says"
        raise InvalidArgument(argument=given.name, was=f"for {samples} samples of every table", must=must)


def _cut(told: Sequence[int | None], name: str, on: Group) -> tuple[int, ...]:
    """Samples of each rank. Those of the bags must be the same on all ranks that hold tables."""
    known = {one for one in told if one is not None}
    if len(known) > 1:
        first = next(rank for rank, one in enumerate(told) if one is not None)
        other = next(rank for rank, one in enumerate(told) if one is not None and one != told[first])
        must = f"for {told[first]} samples of every table, as on rank {first}"
        raise InvalidArgument(argument=name, was=f"for {told[other]} samples of every table on rank {other}", must=must)
    return tuple(stop - start for start, stop in split(known.pop() if known else 0, on.size))


# -- one call ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request(Request):
    """A call whose result's memory depends on the plan: `made` holds the last one. `out`: the caller's, if given."""

    bags: Any = None
    layout: Any = None
    batches: tuple[int, ...] = ()
    made: Any = None
    out: torch.Tensor | None = None

    def execute(self, plan: Plan) -> None:
        try:
            self.made[:] = [run(self.group.fabric, self.bags, self.layout, self.batches, plan, self.output)]
        except BaseException:
            if self.out is not None:  # nothing will be copied there, and what is there is an older result
                poison(self.out)
            raise


def call(
    bags: Bags,
    layout: Layout,
    batches: tuple[int, ...],
    on: Group,
    strategy: str,
    plan: Plan | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator without gradients."""
    dtype = getattr(torch, layout.dtype)
    like = torch.empty(0, dtype=dtype, device=on.device)
    shape = (batches[on.rank], layout.width)
    if out is not None and (tuple(out.shape) != shape or out.dtype != dtype or out.device != on.device):
        was = f"{list(out.shape)} {out.dtype} on {out.device}"
        raise InvalidArgument(argument="out", was=was, must=f"{list(shape)} {dtype} on {on.device}")
    problem = problem_of(bags, layout, batches, on)
    told = f"{len(bags.pieces)} tables of {bags.width} columns, {bags.values.numel()} values, {dtype_name(like)}"
    same = f"{layout.width} columns, batches {list(batches)}, {bags.pooling}, {dtype_name(like)}"
    made: list[torch.Tensor] = []

    def lookup() -> None:
        pool_all(on.fabric, bags, layout, batches, like.new_empty(bags.samples, bags.width))

    request = _Request(
        problem, on, told, same, like, lambda plan, lane: None, lookup, grains=GRAINS,
        lane="net" if on.fabric.lanes()["peer"] else "peer", bags=bags, layout=layout, batches=batches, made=made,
        out=out,
    )  # fmt: skip
    perform(request, strategy, plan)
    return made[0] if out is None else out.copy_(made[0])


def problem_of(bags: Bags, layout: Layout, batches: Sequence[int], on: Group) -> Problem:
    """The problem that ranks plan for: the widest rank's columns; bags' mean length as a power of two."""
    length = 1 << max(0, round(bags.mean_length) - 1).bit_length()
    return Problem.of(
        EMBEDDING, sum(batches), max(layout.sent), length, dtype=layout.dtype, ranks=on.size, device=on.device.type,
        multiprocessors=on.fabric.multiprocessors, shards=batches,
    )  # fmt: skip
