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

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane


def distribute(
    fabric: Fabric,
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    layout: Layout,
    batches: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Values, lengths and weights of this rank's pieces for all samples. Collective."""
    rank, tables = fabric.group.rank, len(layout.dims)
    rows = batches[rank]
    if lengths.numel() != tables * rows:
        must = f"of {tables} features x {rows} samples"
        raise InvalidArgument(argument="lengths", was=f"of {lengths.numel()} elements", must=must)
    by_table = lengths.view(tables, rows).long()
    ends = [0, *accumulate(int(one) for one in by_table.sum(1).tolist())]
    if ends[-1] != values.numel():
        raise InvalidArgument(argument="lengths", was=f"{ends[-1]} in all", must=f"{values.numel()}, as values are")
    lane = _lane(fabric)
    wanted = [[one.table for one in pieces] for pieces in layout.held]
    mine = len(wanted[rank])
    outgoing = [by_table[one].reshape(-1) for one in wanted]
    arrived = _exchange(fabric, lane, outgoing, [mine * one for one in batches])
    per = [part.view(mine, -1) for part in arrived]
    sizes = [one.sum(1).tolist() for one in per]  # by source, by piece

    def moved(flat: torch.Tensor) -> torch.Tensor:
        parts = [torch.cat([flat[ends[t] : ends[t + 1]] for t in one]) if one else flat[:0] for one in wanted]
        came = _exchange(fabric, lane, parts, [int(sum(one)) for one in sizes])
        cut = [torch.split(part, [int(one) for one in size]) for part, size in zip(came, sizes, strict=True)]
        return torch.cat([cut[source][piece] for piece in range(mine) for source in range(len(cut))] or [flat[:0]])

    found = torch.cat(per, 1).reshape(-1) if mine else lengths.new_zeros(0, dtype=torch.int64)
    return moved(values), found, None if weights is None else moved(weights)


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
