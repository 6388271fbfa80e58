"""Indices to the ranks that hold the tables: what a model's input pipeline has is this rank's samples of all features.

| what | before, on rank r | after, on rank r |
|---|---|---|
| lengths | [T, B_r], all T global tables, this rank's samples | [pieces of r, B], all samples, rank 0's first |
| values, weights | those bags one after the other, feature-major | the bags of r's pieces, feature-major |

Two messages to each rank, lengths and then values (three with weights). The host reads the lengths, as sizes must be
known before anything can be received. Columns or rows of one table on several ranks: its bags go to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ..collective.carry import Carrier
from ..errors import InvalidArgument
from ..plan.bags import Layout
from .overlap import half_way
from .telling import tell

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane
    from ..fabric.group import Group

_INDEX_TYPES = (torch.int32, torch.int64)


def agree(
    group: Group,
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    tables: int,
    batches: Sequence[int] | None,
) -> tuple[tuple[int, ...], torch.dtype]:
    """Samples of each rank, and the type that indices travel in: the widest of any. Collective, before anything moves.

    Whether there are weights, and of which type, must be the same on all ranks: each knows of itself how many messages
    it sends and how long they are.
    """
    trouble = None
    try:
        _check(lengths, values, weights, tables, group.rank, batches)
    except InvalidArgument as error:
        trouble = error
    kind = "missing" if weights is None else f"of {weights.dtype}"
    mine = [lengths.numel() // tables, values.dtype == torch.int64, kind]
    told = tell(group, mine, trouble, "samples and types of each rank")
    for rank, (_, _, other) in enumerate(told):
        if other != told[0][2]:
            raise InvalidArgument(argument=f"weights of rank {rank}", was=other, must=f"{told[0][2]}, as on rank 0")
    wide = torch.int64 if any(one for _, one, _ in told) else torch.int32
    return tuple(rows for rows, _, _ in told), wide


def _check(
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    tables: int,
    rank: int,
    batches: Sequence[int] | None,
) -> None:
    rows, odd = divmod(lengths.numel(), tables)
    if odd:
        must = f"of as many bags for each of {tables} tables"
        raise InvalidArgument(argument="lengths", was=f"of {lengths.numel()} elements", must=must)
    for name, one in (("values", values), ("lengths", lengths)):
        if one.dtype not in _INDEX_TYPES:
            raise InvalidArgument(argument=name, was=f"of {one.dtype}", must="of torch.int32 or torch.int64")
    if batches is not None and (len(batches) <= rank or batches[rank] != rows):
        must = f"{rows} at rank {rank}, as lengths says"
        raise InvalidArgument(argument="batches", was=str(list(batches)), must=must)
    total = int(lengths.sum())
    if total != values.numel():
        raise InvalidArgument(argument="lengths", was=f"{total} in all", must=f"{values.numel()}, as values are")
    if weights is None:
        return
    if weights.shape != values.shape or not weights.is_floating_point():
        was = f"{list(weights.shape)} {weights.dtype}"
        raise InvalidArgument(argument="weights", was=was, must=f"{list(values.shape)} of a floating-point dtype")
    if weights.requires_grad and torch.is_grad_enabled():
        must = "without: they travel to the tables, and no gradients come back (detach them)"
        raise InvalidArgument(argument="weights", was="with gradients asked for", must=must)


def distribute(
    fabric: Fabric,
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    layout: Layout,
    batches: Sequence[int],
    index: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Values, lengths and weights of this rank's pieces for all samples, as `agree` found them. Collective."""
    rank, tables = fabric.group.rank, len(layout.dims)
    by_table = lengths.reshape(tables, batches[rank]).long()
    fabric.settle()  # the host reads lengths: a copy that waits holds the driver's lock, which the proxy may need
    ends = [0, *accumulate(int(one) for one in by_table.sum(1).tolist())]
    lane = _lane(fabric)
    wanted = [[one.table for one in pieces] for pieces in layout.held]
    mine = len(wanted[rank])
    outgoing = [by_table[one].reshape(-1) for one in wanted]
    arrived = _exchange(fabric, lane, outgoing, [mine * one for one in batches])
    per = [part.view(mine, batch) for part, batch in zip(arrived, batches, strict=True)]
    sizes = [one.sum(1).tolist() for one in per]  # by source, by piece

    def moved(flat: torch.Tensor) -> torch.Tensor:
        parts = [torch.cat([flat[ends[t] : ends[t + 1]] for t in one]) if one else flat[:0] for one in wanted]
        came = _exchange(fabric, lane, parts, [int(sum(one)) for one in sizes])
        cut = [torch.split(part, [int(one) for one in size]) for part, size in zip(came, sizes, strict=True)]
        return torch.cat([cut[source][piece] for piece in range(mine) for source in range(len(cut))] or [flat[:0]])

    found = torch.cat(per, 1).reshape(-1) if mine else lengths.new_zeros(0, dtype=torch.int64)
    return moved(values.to(index)), found, None if weights is None else moved(weights.detach())


def _lane(fabric: Fabric) -> Lane:
    """Sizes differ from rank to rank, so a lane whose receiver says where bytes go: those need no common room."""
    if fabric.group.device.type == "cuda" and not fabric.lanes()["dma"] and fabric.lane("dma").lands_anywhere:
        return fabric.lane("dma")
    return fabric.lane("net")


def _exchange(
    fabric: Fabric, lane: Lane, outgoing: Sequence[torch.Tensor], counts: Sequence[int]
) -> list[torch.Tensor]:
    """outgoing[d] to rank d; what came from each rank, `counts` elements."""
    rank = fabric.group.rank
    packed = torch.cat([one.reshape(-1) for one in outgoing])
    pieces = torch.split(packed, [one.numel() for one in outgoing])
    landing = packed.new_empty(sum(counts))
    outs = torch.split(landing, list(counts))
    longest = max(*(one.numel() for one in pieces), *counts, 1)
    carrier = Carrier(fabric, lane, packed, longest)
    with fabric.guarded_call((landing,)), half_way(fabric.group):
        carrier.send(0, pieces)
        outs[rank].copy_(pieces[rank])
        carrier.receive(0, outs)
        lane.flush()
    return list(outs)
