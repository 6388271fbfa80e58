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
from typing import TYPE_CHECKING, Any

import torch

from .. import settings
from ..errors import InvalidArgument
from ..fabric.group import Group
from ..fabric.registry import as_group
from ..plan.bags import Layout, Piece
from ..plan.plan import EMBEDDING, GRAINS, Plan, split
from ..plan.problem import Problem
from .bags import (
    POOLINGS,
    Bags,
    Shard,
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
    samples, rows = sum(batches), []
    for sample in range(samples):
        parts = []
        for rank, held in enumerate(tables):
            for number, table in enumerate(held):
                bag = number * samples + sample
                begin, end = int(offsets[rank][bag]), int(offsets[rank][bag + 1])
                total = torch.zeros(table.shape[1], dtype=torch.float64)
                for place in range(begin, end):
                    scale = 1.0 if weights is None else float(weights[rank][place])
                    total += scale * table[int(values[rank][place])].double()
                if pooling == "mean" and end > begin:
                    total /= end - begin
                parts.append(total)
        rows.append(torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64))
    width = sum(table.shape[1] for held in tables for table in held)
    dtype = next((table.dtype for held in tables for table in held), torch.float32)
    whole = torch.stack(rows).to(dtype) if rows else torch.zeros(0, width, dtype=dtype)
    return list(torch.split(whole, list(batches)))


def embedding_layout(tables: Tables, group: Group | dist.ProcessGroup | DeviceMesh | str | None = None) -> Layout:
    """Who holds what, told to each other once. Collective; a call that is given it need not ask again."""
    on = as_group(group)
    check_tables(tables, on.device)
    dtype = dtype_name(tables_of(tables)[0]) if tables else ""
    shards = bool(tables) and isinstance(tables[0], Shard)
    told = on.exchange([dtype, shards, pieces_of(tables, 0)], "which tables ranks hold")
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
    `embedding_layout`, and `batches` spare ranks from telling each other in every call.

    Gradients (`embedding_gradients.py`): of tables dense, or `sparse`; divided by the number of ranks if TorchRec's
    convention is wanted; or none, and an `optimizer` steps rows in the backward pass. As the backward pass exchanges
    gradients, either all ranks ask for some or none does: a rank without tables takes part, too.

    On a GPU the indices are looked at only under UNDERTOW_CHECK=1; one out of range reads nothing and counts as absent.
    """
    on = as_group(group)
    bags, found, sizes = arguments(tables, values, offsets, lengths, weights, pooling, batches, layout, on)
    wanted = any(one is not None and one.requires_grad for one in (*bags.tables, weights))
    if not torch.is_grad_enabled() or not (wanted or optimizer is not None or not bags.tables):
        return call(bags, found, sizes, on, strategy, plan, out)
    refuse_in_place(out=out)
    divisor = on.size if divide_gradients else 1

    def forward() -> tuple[torch.Tensor, str]:
        y = call(bags, found, sizes, on, strategy, plan)
        ran = explain(group=on.name)
        assert ran is not None
        return y, ran.plan.lane  # gradients take the way back

    backward = Backward(on.fabric, bags, found, sizes, forward, sparse, divisor, optimizer)
    anchor = torch.empty(0, device=on.device, requires_grad=True)  # ranks without tables have a backward pass, too
    return Lookup.apply(backward, anchor, weights, *bags.tables)  # type: ignore[no-any-return,no-untyped-call]


def arguments(
    tables: Tables,
    values: torch.Tensor,
    offsets: torch.Tensor | None,
    lengths: torch.Tensor | None,
    weights: torch.Tensor | None,
    pooling: str,
    batches: Sequence[int] | None,
    layout: Layout | None,
    on: Group,
) -> tuple[Bags, Layout, tuple[int, ...]]:
    """All arguments checked, and what ranks tell each other. A rank whose own are wrong tells it before it raises."""
    if pooling not in POOLINGS:
        raise InvalidArgument(argument="pooling", was=repr(pooling), must=f"one of {', '.join(POOLINGS)}")
    check_tables(tables, on.device)
    if values.device != on.device:
        raise InvalidArgument(argument="values", was=f"on {values.device}", must=f"on {on.device}")
    places = offsets_of(values, offsets, lengths, weights)
    name = "offsets" if offsets is not None else "lengths"
    if layout is None:
        layout = embedding_layout(tables, on)
    mine = pieces_of(tables, layout.held[on.rank][0].table if layout.held[on.rank] else 0)
    if tuple(Piece(*one) for one in mine) != layout.held[on.rank]:
        was = f"of pieces {mine}"
        raise InvalidArgument(argument="tables", was=was, must=f"those of the layout, {list(layout.held[on.rank])}")
    bag_count, count = places.numel() - 1, len(tables)
    if bag_count % max(1, count) or (count == 0 and bag_count):
        must = f"as many for each of the {count} tables"
        raise InvalidArgument(argument=name, was=f"for {bag_count} bags", must=must)
    samples = bag_count // count if count else None
    sizes = _batches(batches, samples, name, on)
    bags = Bags(tables_of(tables), layout.held[on.rank], values.contiguous(), places.contiguous(), weights, pooling,
                sum(sizes))  # fmt: skip
    if on.device.type == "cpu" or settings.CHECK.is_on():
        check_bags(bags, layout)
    return bags, layout, sizes


def _batches(batches: Sequence[int] | None, samples: int | None, name: str, on: Group) -> tuple[int, ...]:
    """Samples of each rank. Those of the bags must be the same on all ranks that hold tables."""
    if batches is not None:
        sizes = tuple(map(int, batches))
        if len(sizes) != on.size or min(sizes) < 0:
            must = f"{on.size} counts of at least 0"
            raise InvalidArgument(argument="batches", was=str(list(sizes)), must=must)
        if samples is not None and sum(sizes) != samples:
            must = f"for {sum(sizes)} samples of every table, as batches says"
            raise InvalidArgument(argument=name, was=f"for {samples} samples of every table", must=must)
        return sizes
    told = on.exchange(samples, "how many samples there are")
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
    """A call whose result's memory depends on the plan: `made` holds the last one."""

    bags: Any = None
    layout: Any = None
    batches: tuple[int, ...] = ()
    made: Any = None

    def execute(self, plan: Plan) -> None:
        self.made[:] = [run(self.group.fabric, self.bags, self.layout, self.batches, plan, self.output)]


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
