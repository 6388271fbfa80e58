"""Whole results that move by themselves, before or after a matmul: by the collective that `undertow.collective` takes.

`serial` over `peer` overlaps nothing, so nothing is gained by parcels that are handed from rank to rank. On a GPU one
kernel moves and sums all of it, several times as fast as one copy and one stop of a stream for every piece; a model
that calls the operators loses nothing, then, to one that calls a matmul and a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..collective.kinds import executable_of, kind_of
from ..fabric.placement import Placement
from .overlap import half_way

if TYPE_CHECKING:
    from ..fabric.base import Fabric, Lane
    from ..plan.plan import Plan
    from .beside import Beside
    from .product import Product

Move = Callable[[torch.Tensor, torch.Tensor], None]
"""Given what this rank has and where what it gets goes: flat, contiguous, the same tensor where it is in place."""

DEVICES = ["cuda"]  # where it is faster than parcels


def moves_whole(plan: Plan, fabric: Fabric, lane: Lane) -> bool:
    """Whether the plan's communication is one collective. Not where sums must be those of a parcel's owner."""
    return plan.grain == "serial" and not plan.deterministic and has_collectives(fabric, lane)


def has_collectives(fabric: Fabric, lane: Lane) -> bool:
    group = fabric.group
    return lane.name == "peer" and group.device.type in DEVICES and len(group.local_ranks) == group.size


def mover(
    fabric: Fabric,
    collective: str,
    dtype: torch.dtype,
    spans: Sequence[int],
    in_place: bool = False,
    ctas: int | None = None,
) -> Move:
    """The collective over spans of so many elements (of each rank, or one of all), made ready. Collective at first."""
    group, where = fabric.group, Placement(ctas=ctas)
    kind = kind_of(
        collective, tuple(spans), dtype, in_place, "sum", None, 0, group.device.type, group.nodes, None, where
    )
    if not sum(spans):
        return _nothing
    found = executable_of(group, kind)
    return lambda source, out: found.run(source, out, list(spans), "sum")


def _nothing(source: torch.Tensor, out: torch.Tensor) -> None:
    """There is nothing to move."""


def bringer(fabric: Fabric, beside: Beside | None) -> Callable[[], None]:
    """What gathers the rows that `beside` needs, made ready. Collective at first."""
    wanted = beside.gathers if beside is not None else None
    if wanted is None:
        return lambda: None
    shard, whole = wanted.shard.contiguous().view(-1), wanted.whole.view(-1)
    move = mover(fabric, "all_gather", whole.dtype, [rows * wanted.whole.shape[1] for rows in wanted.rows])
    return lambda: move(shard, whole)


def multiply_and_move(fabric: Fabric, product: Product, move: Callable[[], None], beside: Beside | None) -> None:
    """What `beside` needs and computes, the product, then what moves of it: nothing hides anything."""
    bring = bringer(fabric, beside)
    with half_way(fabric.group):
        if beside is not None:
            bring()
            beside.compute()
        product.start()
        move()
